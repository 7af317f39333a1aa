"""What ``upipe bench`` is asked to do, and what comes of a step."""

from __future__ import annotations

import itertools
import os
import platform
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from upipe_integrations.bench.layers import SPEC, Run, upipe_layer
from upipe_integrations.bench.ulysses import ulysses_layer
from upipe_integrations.engine.checkpoint import context_fn
from upipe_integrations.kernels import Kernel, KernelRequest, select_kernel
from upipe_integrations.mode import Mode
from upipe_integrations.planning.closed_forms import LayerShape
from upipe_integrations.schedule import Schedule

FORWARD, TRAINING, CHECKPOINTED = "forward", "training", "training, checkpointed"


STEPS = {"no": (FORWARD, TRAINING), "yes": (FORWARD, CHECKPOINTED), "both": (FORWARD, TRAINING, CHECKPOINTED)}
"""What is timed, by whether training is with the layer under PyTorch's non-reentrant checkpoint."""


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 3e-2}
"""Largest Frobenius norm of a difference to the first contender, relative. Both round sums of the same few thousand
terms in their own order: some ten units of float32's precision, and in bfloat16 two errors of 5e-3 to 1.5e-2 each
(docs/precision.md). A wrong head, row or mask shows as 0.1 and more."""


class Contender(Protocol):
    """Who runs. An object that can be pickled and is equal to its copies."""

    @property
    def name(self) -> str:
        """In tables."""
        ...

    @property
    def chunk_heads(self) -> int | None:
        """UPipe's, over all ranks."""
        ...

    @property
    def mode(self) -> Mode | None:
        """UPipe's."""
        ...

    def checkpoint_options(self) -> dict[str, Any]:
        """For ``torch.utils.checkpoint``."""
        ...

    def run_on(self, shape: LayerShape, kernel: Kernel) -> Run:
        """The layer's forward on the default group."""
        ...


@dataclass(frozen=True)
class Ulysses:
    """Plain Ulysses."""

    chunk_heads: None = None
    mode: None = None
    name = "ulysses"

    def checkpoint_options(self) -> dict[str, Any]:
        """None."""
        return {}

    def run_on(self, shape: LayerShape, kernel: Kernel) -> Run:
        """See :class:`Contender`."""
        return lambda layer: ulysses_layer(layer, dist.group.WORLD, kernel)


@dataclass(frozen=True)
class UPipe:
    """The engine."""

    chunk_heads: int
    mode: Mode

    @property
    def name(self) -> str:
        """See :class:`Contender`."""
        exact = " float32" if self.mode.accumulate == "float32" else ""
        blocks = f" {self.mode.query_blocks}" if self.mode.query_blocks > 1 else ""
        ahead = " overlap" * bool(self.mode.overlap) + " both ways" * self.mode.overlaps_return
        return f"upipe U={self.chunk_heads} {self.mode.memory}{blocks}{exact}{ahead}"

    def checkpoint_options(self) -> dict[str, Any]:
        """Keep the result of attention that is an operator."""
        return {"context_fn": context_fn} if self.mode.operator else {}

    def schedule(self, shape: LayerShape, ranks: int) -> Schedule:
        """Of the layer."""
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
        return Schedule.build(**heads, ranks=ranks, chunk_heads=self.chunk_heads)

    def run_on(self, shape: LayerShape, kernel: Kernel) -> Run:
        """See :class:`Contender`."""
        schedule = self.schedule(shape, dist.get_world_size())
        return lambda layer: upipe_layer(layer, schedule, self.mode, dist.group.WORLD, kernel)


@dataclass(frozen=True)
class Job:
    """What every rank does.

    Args:
        shape: the layer.
        ranks: that hold the sequence.
        tokens: lengths, over all ranks.
        contenders: all are compared with the first.
        steps: of ``STEPS``.
        repeats: that count; ``warmup`` more come before.
        kernel: local attention of all.
        device: ``"cuda"`` or ``"cpu"``.
        dtype: of everything.
        profile: take profiles in the place of times.
        peaks: on GPUs, take the allocator's peak of each step, too.

    Raises:
        ValueError: sizes that do not fit each other, or a kernel that can't serve them.
    """

    shape: LayerShape
    ranks: int
    tokens: tuple[int, ...]
    contenders: tuple[Contender, ...]
    steps: tuple[str, ...]
    repeats: int
    warmup: int
    kernel: str
    device: str
    dtype: torch.dtype
    profile: bool = False
    peaks: bool = False

    def __post_init__(self) -> None:
        given = {**asdict(self.shape), "ranks": self.ranks, "repeats": self.repeats}
        for name, value in given.items():
            if value < 1:
                raise ValueError(f"{name} = {value}: must be positive.")
        if self.warmup < 0:
            raise ValueError(f"warmup = {self.warmup}: must not be negative.")
        H, K, C = self.shape.heads, self.shape.kv_heads, self.ranks
        if self.shape.head_dim % 2:
            raise ValueError(f"head_dim = {self.shape.head_dim}: must be even, as heads are rotated in pairs.")
        if H % C or (K % C and C % K):
            raise ValueError(
                f"ranks = {C} with {H} query and {K} KV heads: plain Ulysses, which all are compared with, needs ranks "
                "that divide both (or a multiple of the KV heads). Use other ranks; upipe check proves any."
            )
        kernel = select_kernel(self.kernel, self.request())
        for contender, tokens in itertools.product(self.contenders, self.tokens):
            if tokens % C:
                raise ValueError(f"tokens = {tokens}: the {C} ranks must divide it; {-(-tokens // C) * C} is the next.")
            if isinstance(contender, UPipe):
                contender.schedule(self.shape, C)
            blocks = 1 if contender.mode is None else contender.mode.query_blocks
            if tokens // C % blocks:
                raise ValueError(f"query_blocks = {blocks}: must divide the {tokens // C} rows of a rank.")
            reason = kernel.block_refusal(SPEC) if blocks > 1 else None
            if reason is not None:
                raise ValueError(f"memory blocks with kernel {kernel.name}: {reason}.")

    def request(self) -> KernelRequest:
        """What the kernel must serve."""
        blocks = any(c.mode is not None and c.mode.query_blocks > 1 for c in self.contenders)
        return KernelRequest(torch.device(self.device), self.dtype, self.shape.head_dim, blocks=blocks)

    @property
    def runs(self) -> int:
        """Samples there will be."""
        repetitions = self.warmup + self.repeats
        return len(self.tokens) * repetitions * len(self.steps) * len(self.contenders)

    def conditions(self) -> dict[str, Any]:
        """What the figures depend on."""
        return {
            **asdict(self.shape),
            "ranks": self.ranks,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else f"{os.cpu_count()} CPU cores",
            "dtype": str(self.dtype).removeprefix("torch."),
            "kernel": self.kernel,
            "repeats": self.repeats,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "load": [round(load, 2) for load in os.getloadavg()],
        }


def best_device(ranks: int) -> str:
    """``"cuda"`` where every rank finds a GPU."""
    return "cuda" if 0 < ranks <= torch.cuda.device_count() else "cpu"


@dataclass(frozen=True)
class Sample:
    """One run: wall seconds of the slowest rank, CPU seconds of all; warm-up does not count."""

    contender: Contender
    tokens: int
    step: str
    counts: bool
    wall: float
    cpu: float


@dataclass(frozen=True)
class StepPeak:
    """Bytes of a step on the rank that takes most, beyond the layer's input and weights."""

    contender: Contender
    tokens: int
    step: str
    bytes: float


@dataclass(frozen=True)
class Profile:
    """Of one training step on rank 0: operator to (self seconds, calls)."""

    contender: Contender
    tokens: int
    operators: dict[str, tuple[float, int]]
