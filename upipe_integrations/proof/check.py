"""Proof on this machine: one attention layer on several ranks against one process, tensor by tensor.

The single-process side shares no code with the engine: plain attention under autograd in float64, head by
head. The ranks are processes started here, over gloo, or NCCL where there are GPUs for them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.local_ranks import LocalRanks
from upipe_integrations.proof.case import TOLERANCE, Case
from upipe_integrations.proof.sharded import outcomes
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
    ranks = cases[0].ranks
    with LocalRanks(
        ranks,
        backend="nccl" if cases[0].device == "cuda" else "gloo",
        threads=max(1, (os.cpu_count() or 1) // ranks),
        preload=[__name__],
    ) as started:
        for case, by_rank in zip(cases, started.each(outcomes, cases, seconds=seconds), strict=True):
            refused = [outcome for outcome in by_rank if isinstance(outcome, str)]
            yield Result(refusal=refused[0]) if refused else Result(tuple(findings(case, by_rank)))


def findings(case: Case, by_rank: list[dict[str, Tensor]]) -> Iterator[Finding]:
    """What :func:`check` finds, from the tensors of every rank."""
    for name, right in single_process(case).items():
        parts = [results[name].double() for results in by_rank]
        got = case.layout.collect(parts, 1) if name in ("out", "dx") else torch.stack(parts).sum(0)
        error = float((got - right).abs().max() / right.abs().max())
        yield Finding(name, error, TOLERANCE[case.dtype])
