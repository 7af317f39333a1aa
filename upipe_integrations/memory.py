"""Peak memory of one attention layer: closed forms, and the instrument that checks them.

Unit: one `[B, S, D]` tensor of the compute dtype, u = B * S * D * itemsize bytes (256 MiB at one million
tokens, batch 1, D = 128, bf16). Counted: everything an attention layer allocates on one rank between its
input and its output, the incoming gradient, weight gradients and the buffers FlashAttention 2 allocates
inside its backward. Not counted: the layer's input, weights, rotary tables.

In the formulas h = H/C and k = K/C are query and KV heads per rank, chi = E/(C*D) is an `[L, E]` tensor in
units, kappa KV heads and n query heads per KV head are one rank's in one stage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from upipe_integrations.kernels import AttentionSpec, KernelRequest, TorchCudaFlash
from upipe_integrations.mode import Mode
from upipe_integrations.projection import PRODUCT_PIECES
from upipe_integrations.schedule import Schedule, Stage

# The CUDA caching allocator rounds blocks up to this.
_BLOCK_BYTES = 512
_LSE_BYTES = 4


@dataclass(frozen=True)
class LayerShape:
    """What an attention layer's memory depends on, over all ranks."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int


@dataclass(frozen=True)
class PeakUnits:
    """Peaks in units u (see the module docstring)."""

    forward: float
    training: float

    def gib(self, tokens: int, head_dim: int, *, batch: int = 1, itemsize: int = 2) -> PeakUnits:
        """The same peaks in GiB for sequences of `tokens` tokens over all ranks."""
        unit = batch * tokens * head_dim * itemsize / 2**30
        return PeakUnits(self.forward * unit, self.training * unit)


def ulysses_peak(layer: LayerShape, ranks: int, *, one_pass_rotary: bool = False) -> PeakUnits:
    """Closed form for plain Ulysses in DeepSpeed's order of operations.

    `one_pass_rotary`: rotary by one fused kernel rather than by Transformers' own function.
    """
    h, k, chi = _per_rank(layer, ranks)
    forward = (3 if one_pass_rotary else 4) * h + 2 * k
    training = chi + 6 * h + 4 * k + (2 * h if h != k else 0)
    return PeakUnits(forward, training)


def upipe_peak(layer: LayerShape, schedule: Schedule, mode: Mode | None = None) -> PeakUnits:
    """Closed form for the engine with `schedule` in `mode` (None keeps out and lse), rotary in one pass."""
    mode = mode or Mode()
    h, _, chi = _per_rank(layer, schedule.ranks)
    lse = h * _LSE_BYTES / (2 * layer.head_dim)
    stages = [
        _StageSizes.of(stage, after if mode.overlap else None)
        for stage, after in zip_longest(schedule.stages, schedule.stages[1:])
    ]
    return PeakUnits(_forward_peak(stages, mode, h, chi, lse), _training_peak(stages, mode, h, chi, schedule.ranks))


@dataclass(frozen=True)
class _StageSizes:
    """One rank's heads in a stage, and those of the next stage that are in flight meanwhile (0 without overlap)."""

    q: int
    kappa: int
    opens_kv: bool
    closes_kv: bool
    next_q: int
    next_kappa: int

    @classmethod
    def of(cls, stage: Stage, after: Stage | None) -> _StageSizes:
        next_q, next_kappa = (0, 0) if after is None else (after.q.per_rank, after.kv.per_rank * after.opens_kv)
        return cls(stage.q.per_rank, stage.kv.per_rank, stage.opens_kv, stage.closes_kv, next_q, next_kappa)

    def in_flight(self, parts: int) -> int:
        """Sent and received for the next stage: `parts` tensors of query heads, and K and V."""
        return 2 * parts * self.next_q + 4 * self.next_kappa


def _forward_peak(stages: list[_StageSizes], mode: Mode, h: float, chi: float, lse: float) -> float:
    wide = 2 if mode.y_sum_dtype(torch.bfloat16, len(stages)) == torch.float32 else 1
    result = chi * wide if mode.fuses_output else h
    peak = 0.0
    if mode.fuses_output and wide == 2:  # y is rounded into a tensor of its own at the end
        peak = result + chi
    if mode.overlap:  # K, V and q of the first stage are all sent before the first is waited for
        peak = max(peak, 2 * stages[0].q + 4 * stages[0].kappa)
    for number, s in enumerate(stages):
        attending = (0 if number == 0 else result) + 2 * s.q + 2 * s.kappa
        writing = result + s.q + (0 if s.closes_kv else 2 * s.kappa)
        if mode.fuses_output:
            writing += s.q + (2 * chi / PRODUCT_PIECES if wide == 2 else 0)
        peak = max(peak, max(attending, writing) + s.in_flight(1) + lse)
    return peak


def _training_peak(stages: list[_StageSizes], mode: Mode, h: float, chi: float, ranks: int) -> float:
    wide = 2 if mode.accumulate == "float32" else 1
    # Beside a stage: the incoming gradients, what was kept, and dx so far.
    incoming = chi + {"keep": 2 * h, "recompute": h}.get(mode.memory, 0)
    peak = 0.0
    for number, s in enumerate(stages):
        expanded = 2 * s.q if s.q != s.kappa else 0
        if mode.blocks > 1:
            # A block of q and dout is sent and received; then a piece of it is attended, tile by tile.
            exchanging = 4 * s.q / mode.blocks
            attending = 2 * s.q / mode.blocks + 6 * s.q / (mode.blocks * ranks) + (2 * s.kappa + expanded) / ranks
            in_flight = exchanging + 4 * s.next_kappa if mode.overlap else 0
            stage = chi * wide + 6 * s.kappa + max(exchanging, attending) + in_flight
        else:
            sums = (0 if number == 0 else chi * wide) + (0 if s.opens_kv else 2 * s.kappa * wide)
            stage = sums + 4 * s.q + 4 * s.kappa + 2 * s.q + expanded + s.in_flight(3 if mode.memory == "keep" else 2)
        peak = max(peak, incoming + stage)
    return peak


def _per_rank(layer: LayerShape, ranks: int) -> tuple[float, float, float]:
    """(h, k, chi); KV heads fewer than ranks are replicated to one per rank."""
    return (
        layer.heads / ranks,
        max(layer.kv_heads / ranks, 1.0),
        layer.hidden_size / (ranks * layer.head_dim),
    )


class LiveMemory(TorchDispatchMode):
    """Counts bytes of live tensor storages that are made while it is active; exact.

    Works on real and on fake tensors; repeatable on fake ones (with real collectives a worker thread may hold
    a buffer a moment longer). A storage that was there before counts from its first use: use inputs once
    before the baseline is read. ``current`` and ``peak`` are in bytes, blocks rounded as the CUDA
    caching allocator does. What a kernel allocates and frees inside one operator is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        self.peak = max(self.peak, self.current)
        return result

    def reset_peak(self) -> None:
        """Start a new peak from what is live now."""
        self.peak = self.current

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        if size == 0 or key in self._live:
            return
        self._live[key] = size
        self.current += size
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.current -= self._live.pop(key)


class FlashWorkspace(TorchCudaFlash):
    """PyTorch's CUDA flash kernel that also allocates, visibly, what FlashAttention 2's backward does inside.

    For measuring with :class:`LiveMemory` on fake tensors: fp32 dq, the row sums, and under GQA dk and dv
    expanded to query heads (``mha_bwd`` in flash-attention's ``flash_api.cpp``).
    """

    def refusal(self, request: KernelRequest) -> str | None:
        """None: fake tensors need no GPU."""
        return None

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        workspace = _flash_workspace(q, k)
        grads = super().backward(dout, q, k, v, out, lse, spec)
        del workspace
        return grads

    def backward_block(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        spec: AttentionSpec,
        start: int,
        first_key: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.BlockKernel`."""
        workspace = _flash_workspace(tensors[1], tensors[2])
        grads = super().backward_block(tensors, spec, start, first_key)
        del workspace
        return grads


def _flash_workspace(q: Tensor, k: Tensor) -> list[Tensor]:
    """What FlashAttention 2's backward allocates beside its results."""
    workspace = [q.new_empty(q.shape, dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32)]
    if q.shape[1] != k.shape[1]:
        expanded = (q.shape[0], q.shape[1], k.shape[2], q.shape[3])
        workspace += [q.new_empty(expanded), q.new_empty(expanded)]
    return workspace
