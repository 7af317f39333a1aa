"""Proof on this machine: one attention layer on several ranks against one process, tensor by tensor.

The single-process side shares no code with the engine: plain attention under autograd in float64, head by
head. The ranks are processes started here, over gloo, or NCCL where there are GPUs for them.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from upipe_integrations.attention import AttentionProjections, upipe_attention, upipe_attention_qkv
from upipe_integrations.config import UPipeConfig
from upipe_integrations.kernels import AttentionSpec, KernelRequest, select_kernel
from upipe_integrations.layout import Layout
from upipe_integrations.mode import Mode
from upipe_integrations.projection import HeadFunction, OutputProjection, Projection, RotateHalf
from upipe_integrations.schedule import Schedule

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest difference allowed, relative to the largest value of a tensor: some units of the dtype's precision for a
sum of a few thousand terms; a wrong head, row or mask shows as 0.1 and more."""


@dataclass(frozen=True)
class Case:
    """One layer to prove; sizes and features as in the engine's own types. ``hidden_size`` None is half of the heads'.

    Raises:
        ValueError: settings that the engine refuses, or that make no layer.
    """

    heads: int
    kv_heads: int
    head_dim: int
    seq_len: int
    ranks: int
    chunk_heads: int
    hidden_size: int | None = None
    value_dim: int | None = None
    batch: int = 1
    kernel: str = "auto"
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    spec: AttentionSpec = field(default_factory=AttentionSpec)
    layout: Layout = field(default_factory=Layout)
    sinks: bool = False
    bias: bool = False
    norm: bool = False
    partial: bool = False
    memory: str = "keep"
    query_blocks: int = 4
    accumulate: str = "auto"
    overlap: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "seq_len", "ranks", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be positive.")
        if self.hidden_size is not None and self.hidden_size < 1:
            raise ValueError(f"hidden_size = {self.hidden_size}: must be positive.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: must be even, as heads are rotated in pairs.")
        if self.device == "cuda" and torch.cuda.device_count() < self.ranks:
            raise ValueError(
                f"device = cuda: {self.ranks} ranks need as many GPUs, there are {torch.cuda.device_count()}."
            )
        if self.partial and (self.config().mode != Mode()):
            raise ValueError(
                "partial: the form for heads that are projected already keeps what autograd keeps; leave "
                "memory, accumulate and overlap at their defaults."
            )
        self.layout.check(self.seq_len, self.ranks)
        for row in self.spec.documents or ():
            if row[-1] != self.seq_len:
                raise ValueError(f"documents {row}: must end at the sequence length {self.seq_len}.")
        self.schedule()
        select_kernel(self.kernel, self.request())

    def schedule(self) -> Schedule:
        """The layer's schedule."""
        return self.config().schedule(heads=self.heads, kv_heads=self.kv_heads, ranks=self.ranks)

    def config(self) -> UPipeConfig:
        """The settings that are proven."""
        return UPipeConfig(self.chunk_heads, self.kernel, self.memory, self.query_blocks, self.accumulate, self.overlap)

    def request(self) -> KernelRequest:
        """What the kernel must serve."""
        return KernelRequest(
            torch.device(self.device), self.dtype, self.head_dim, self.value_dim, self.spec, self.sinks
        )


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
    for name, right in _single_process(case).items():
        parts = [results[name].double() for results in by_rank]
        got = case.layout.collect(parts, 1) if name in ("out", "dx") else torch.stack(parts).sum(0)
        error = float((got - right).abs().max() / right.abs().max())
        yield Finding(name, error, TOLERANCE[case.dtype])


def _tensors(case: Case) -> dict[str, Tensor]:
    """The whole layer's random tensors, the same in every process; gradients are wanted of all but dout."""
    generator = torch.Generator().manual_seed(case.seed)
    size = case.hidden_size or case.head_dim * max(2, case.heads // 2)
    value_dim = case.value_dim or case.head_dim

    def rand(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(case.dtype)

    widths = {
        "q": case.heads * case.head_dim,
        "k": case.kv_heads * case.head_dim,
        "v": case.kv_heads * value_dim,
    }
    tensors = {"x": rand(case.batch, case.seq_len, size)}
    tensors |= {f"w{name}": rand(width, size, scale=size**-0.5) for name, width in widths.items()}
    if case.bias:
        tensors |= {f"b{name}": rand(width, scale=0.3) for name, width in widths.items()}
    if case.norm:
        tensors |= {f"{name}_norm": 1 + rand(case.head_dim, scale=0.3) for name in ("q", "k")}
    if case.sinks:
        tensors["sinks"] = rand(case.heads)
    width = case.heads * value_dim
    if case.config().mode.takes_output and not case.partial:
        tensors["wo"] = rand(size, width, scale=width**-0.5)
        width = size
        if case.bias:
            tensors["bo"] = rand(size, scale=0.3)
    return {**tensors, "dout": rand(case.batch, case.seq_len, width)}


def _angles(case: Case) -> Tensor:
    """Rotation of each position and pair: `[S, head_dim / 2]`."""
    frequency = 10_000.0 ** -(torch.arange(0, case.head_dim, 2, dtype=torch.float64) / case.head_dim)
    return torch.arange(case.seq_len, dtype=torch.float64)[:, None] * frequency


# ---------------------------------------------------------------- the single process


def _single_process(case: Case) -> dict[str, Tensor]:
    """The output and every gradient, in float64 from the rounded inputs."""
    leaves = {name: t.double().requires_grad_() for name, t in _tensors(case).items()}
    dout = leaves.pop("dout").detach()
    hidden = ~_visible(case)
    value_dim = case.value_dim or case.head_dim
    wo = leaves["wo"].detach() if "wo" in leaves else None
    outs = []
    for i in range(case.heads):
        columns = slice(i * value_dim, (i + 1) * value_dim)
        out = _one_head(case, leaves, hidden, i)
        out.backward(dout[..., columns] if wo is None else dout @ wo[:, columns])
        outs.append(out.detach())
    grads = {f"d{name}": t.grad for name, t in leaves.items() if t.grad is not None}
    whole = torch.cat(outs, -1)
    if wo is None:
        return {"out": whole, **grads}
    grads["dwo"] = dout.flatten(0, 1).T @ whole.flatten(0, 1)
    y = whole @ wo.T
    if "bo" in leaves:
        y = y + leaves["bo"].detach()
        grads["dbo"] = dout.sum((0, 1))
    return {"out": y, **grads}


def _one_head(case: Case, leaves: dict[str, Tensor], hidden: Tensor, i: int) -> Tensor:
    """Query head i's output `[B, S, Dv]`, with its KV head ``i // (heads / kv_heads)``."""
    j = i // (case.heads // case.kv_heads)
    heads = {}
    for name, number in (("q", i), ("k", j), ("v", j)):
        width = (case.value_dim or case.head_dim) if name == "v" else case.head_dim
        rows = slice(number * width, (number + 1) * width)
        head = leaves["x"] @ leaves[f"w{name}"][rows].T
        if f"b{name}" in leaves:
            head = head + leaves[f"b{name}"][rows]
        if f"{name}_norm" in leaves:
            head = head / (head.square().mean(-1, keepdim=True) + 1e-6).sqrt() * leaves[f"{name}_norm"]
        if name != "v":
            half = case.head_dim // 2
            turn = torch.polar(torch.ones(()).double(), _angles(case))
            turned = torch.complex(head[..., :half], head[..., half:]) * turn
            head = torch.cat([turned.real, turned.imag], -1)
        heads[name] = head
    scores = heads["q"] @ heads["k"].mT * (case.spec.scale or case.head_dim**-0.5)
    if case.spec.softcap is not None:
        scores = case.spec.softcap * (scores / case.spec.softcap).tanh()
    scores = scores.masked_fill(hidden, float("-inf"))
    if "sinks" in leaves:
        sink = leaves["sinks"][i].expand(*scores.shape[:2], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ heads["v"]
    return scores.softmax(-1) @ heads["v"]


def _visible(case: Case) -> Tensor:
    """`[B, S, S]`: whether a query sees a key."""
    S = case.seq_len
    rows, keys = torch.arange(S)[:, None], torch.arange(S)[None]
    seen = keys <= rows if case.spec.causal else torch.ones(S, S, dtype=torch.bool)
    if case.spec.window is not None:
        seen = seen & (rows - keys < case.spec.window)
    seen = seen.expand(case.batch, S, S).clone()
    for b in range(case.batch):
        if case.spec.documents is not None:
            bounds = case.spec.documents[b % len(case.spec.documents)]
            document = torch.bucketize(torch.arange(S), torch.tensor(bounds[1:]), right=True)
            seen[b] &= document[:, None] == document[None]
    return seen


# ---------------------------------------------------------------- the ranks


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
        process = context.Process(target=_rank_main, args=(rank, port, cases, theirs), daemon=True)
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


def _rank_main(rank: int, port: int, cases: Sequence[Case], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's, which ends its ranks
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks, on_gpu = cases[0].ranks, cases[0].device == "cuda"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    try:
        if on_gpu:
            torch.cuda.set_device(rank)
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
        for case in cases:
            try:
                results = _sharded(case, rank)
            except ValueError as refusal:
                pipe.send((None, str(refusal)))
                continue
            # As arrays: a process that ends must not leave shared memory behind.
            pipe.send((None, {name: t.double().cpu().numpy() for name, t in results.items()}))
    except Exception:
        pipe.send((traceback.format_exc(), None))
    if dist.is_initialized():
        dist.destroy_process_group()


def _sharded(case: Case, rank: int) -> dict[str, Tensor]:
    """This rank's output rows and gradients through the engine."""
    device = torch.device(case.device, rank) if case.device == "cuda" else torch.device("cpu")
    rows = case.layout.rows(rank, case.seq_len, case.ranks)
    leaves = {name: t.to(device) for name, t in _tensors(case).items()}
    dout = leaves.pop("dout")[:, rows.to(device)]
    leaves["x"] = leaves["x"][:, rows.to(device)]
    for t in leaves.values():
        t.requires_grad_()
    angles = torch.cat([_angles(case)[rows]] * 2, -1)[None].to(device)
    rotary = RotateHalf(angles.cos().to(case.dtype), angles.sin().to(case.dtype))

    def projection(name: str, head_dim: int, rotary: RotateHalf | None) -> Projection:
        norm = HeadFunction(_norm, (leaves[f"{name}_norm"],)) if f"{name}_norm" in leaves else None
        return Projection(leaves[f"w{name}"], head_dim, leaves.get(f"b{name}"), norm, rotary)

    projections = AttentionProjections(
        projection("q", case.head_dim, rotary),
        projection("k", case.head_dim, rotary),
        projection("v", case.value_dim or case.head_dim, None),
    )
    kernel = select_kernel(case.kernel, case.request())
    schedule, group = case.schedule(), dist.group.WORLD
    if case.partial:
        q, k, v = (_all_heads(p, leaves["x"]) for p in (projections.q, projections.k, projections.v))
        out = upipe_attention_qkv(
            q, k, v, schedule, group, kernel, case.spec, layout=case.layout, sinks=leaves.get("sinks")
        ).flatten(2)
    else:
        out = upipe_attention(
            leaves["x"],
            projections,
            schedule,
            group,
            kernel,
            case.spec,
            layout=case.layout,
            sinks=leaves.get("sinks"),
            output=OutputProjection(leaves["wo"], leaves.get("bo")) if "wo" in leaves else None,
            mode=case.config().mode,
        )
    out.backward(dout)
    return {"out": out.detach(), **{f"d{name}": t.grad for name, t in leaves.items() if t.grad is not None}}


def _norm(heads: Tensor, gain: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(heads, heads.shape[-1:], gain, 1e-6)


def _all_heads(projection: Any, x: Tensor) -> Tensor:
    """Projected, normed and rotated heads `[B, L, N, D]` under autograd: what a caller of the partial form has."""
    heads: Tensor = torch.nn.functional.linear(x, projection.weight, projection.bias)
    heads = heads.unflatten(2, (-1, projection.head_dim))
    if projection.function is not None:
        heads = projection.function.function(heads, *projection.function.tensors)
    if projection.rotary is not None:
        cos, sin = projection.rotary.cos[:, :, None], projection.rotary.sin[:, :, None]
        half = heads.shape[-1] // 2
        heads = heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), -1) * sin
    return heads
