"""One attention layer to prove: its sizes, settings and tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from upipe_integrations.config import UPipeConfig
from upipe_integrations.kernels import AttentionSpec, KernelRequest, select_kernel
from upipe_integrations.layout import Layout
from upipe_integrations.mode import Mode
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
    overlap: bool | str = False
    seed: int = 0
    one_device: bool = False
    """Whether all ranks are on the first GPU (``threads.py``)."""

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "seq_len", "ranks", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be positive.")
        if self.hidden_size is not None and self.hidden_size < 1:
            raise ValueError(f"hidden_size = {self.hidden_size}: must be positive.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: must be even, as heads are rotated in pairs.")
        gpus = 1 if self.one_device else self.ranks
        if self.device == "cuda" and torch.cuda.device_count() < gpus:
            raise ValueError(f"device = cuda: {gpus} ranks need as many GPUs, there are {torch.cuda.device_count()}.")
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
            torch.device(self.device),
            self.dtype,
            self.head_dim,
            self.value_dim,
            self.spec,
            self.sinks,
            self.config().mode.query_blocks > 1,
        )


def layer_tensors(case: Case) -> dict[str, Tensor]:
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
    if not case.partial:
        tensors["wo"] = rand(size, width, scale=width**-0.5)
        width = size
        if case.bias:
            tensors["bo"] = rand(size, scale=0.3)
    return {**tensors, "dout": rand(case.batch, case.seq_len, width)}


def angles(case: Case) -> Tensor:
    """Rotation of each position and pair: `[S, head_dim / 2]`."""
    frequency = 10_000.0 ** -(torch.arange(0, case.head_dim, 2, dtype=torch.float64) / case.head_dim)
    return torch.arange(case.seq_len, dtype=torch.float64)[:, None] * frequency
