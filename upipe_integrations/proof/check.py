"""Proof on this machine: one attention layer on several ranks against one process, tensor by tensor.

The single-process side shares no code with the engine: plain attention under autograd in float64, head by
head. The ranks are processes started here, over gloo, or NCCL where there are GPUs for them.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch
import torch.multiprocessing as mp
from torch import Tensor

from upipe_integrations.proof.case import TOLERANCE, Case
from upipe_integrations.proof.sharded import rank_main
from upipe_integrations.proof.single_process import single_process


@dataclass(frozen=True)
class Finding:
    """How far one tensor is from the single process's."""

    tensor: str
    error: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether the error is within the tolerance; a NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Result:
    """What came of a case: a finding per tensor, or why the engine refuses it."""

    findings: tuple[Finding, ...] = ()
    refusal: str | None = None

    @property
    def worst(self) -> Finding:
        """The tensor that is farthest off; a NaN is farther than any."""
        return max(self.findings, key=lambda finding: (math.isnan(finding.error), finding.error))


def check(case: Case, *, seconds: float = 600) -> list[Finding]:
    """Run `case` on its ranks and on one process, and compare the output and every gradient.

    Raises:
        ValueError: the engine refuses the case.
        RuntimeError: a rank failed (its traceback is in the message) or did not finish in `seconds`.
    """
    result = next(check_all([case], seconds=seconds))
    if result.refusal is not None:
        raise ValueError(result.refusal)
    return list(result.findings)


def check_all(cases: Sequence[Case], *, seconds: float = 600) -> Iterator[Result]:
    """The result of every case, which all have the same device and ranks: these are started once.

    Raises:
        RuntimeError: a rank failed, or did not finish a case in `seconds`.
    """
    with closing(_run_ranks(cases, seconds)) as outcomes:
        for case, by_rank in zip(cases, outcomes, strict=True):
            refused = [outcome for outcome in by_rank if isinstance(outcome, str)]
            if refused:
                yield Result(refusal=refused[0])
            else:
                yield Result(tuple(_findings(case, [o for o in by_rank if not isinstance(o, str)])))


def _findings(case: Case, by_rank: list[dict[str, Tensor]]) -> Iterator[Finding]:
    for name, right in single_process(case).items():
        parts = [results[name].double() for results in by_rank]
        got = case.layout.collect(parts, 1) if name in ("out", "dx") else torch.stack(parts).sum(0)
        error = float((got - right).abs().max() / right.abs().max())
        yield Finding(name, error, TOLERANCE[case.dtype])


def _run_ranks(cases: Sequence[Case], seconds: float) -> Generator[list[dict[str, Tensor] | str]]:
    """Every case's results by rank, or why they refuse it: all alike, and before any exchange."""
    ranks = cases[0].ranks
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("forkserver")  # imports torch once, not in every rank
    context.set_forkserver_preload([__name__])
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=rank_main, args=(rank, port, cases, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    finished = False
    try:
        for _ in cases:
            results = dict(_collect(pipes, seconds))
            yield [results[rank] for rank in range(ranks)]
        finished = True
    finally:
        for process in processes:
            process.join(timeout=5 if finished else 0)
            process.kill()


def _collect(pipes: list[Connection], seconds: float) -> Iterator[tuple[int, dict[str, Tensor] | str]]:
    """Every rank's results of one case, or its refusal."""
    end = time.monotonic() + seconds
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {sorted(waiting)} did not finish in {seconds:.0f} s.")
        for rank in [r for r, pipe in waiting.items() if pipe in ready]:
            try:
                failure, outcome = waiting.pop(rank).recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a result.") from None
            if failure is not None:
                raise RuntimeError(f"rank {rank} failed:\n{failure}")
            if isinstance(outcome, str):
                yield rank, outcome
            else:
                yield rank, {name: torch.from_numpy(array) for name, array in outcome.items()}
