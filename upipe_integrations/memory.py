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
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from upipe_integrations.kernels import AttentionSpec, KernelRequest, TorchCudaFlash
from upipe_integrations.mode import Mode
from upipe_integrations.projection import PRODUCT_PIECES
from upipe_integrations.schedule import Schedule

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
    wide = 2 if mode.accumulate == "float32" else 1
    # Beside a stage: forward's result so far; backward's incoming gradients, what was kept, and dx so far.
    result = chi * wide if mode.fuses_output else h
    lse = h * _LSE_BYTES / (2 * layer.head_dim)
    incoming = chi + {"keep": 2 * h, "recompute": h}.get(mode.memory, 0)
    # A float32 y is rounded into a tensor of its own at the end.
    forward = result + chi if mode.fuses_output and wide == 2 else 0.0
    training = 0.0
    for number, stage in enumerate(schedule.stages):
        q, kappa = stage.q.per_rank, stage.kv.per_rank
        attending = (0 if number == 0 else result) + 2 * q + 2 * kappa
        writing = result + q + (0 if stage.closes_kv else 2 * kappa)
        if mode.fuses_output:
            writing += q + (chi / PRODUCT_PIECES if wide == 2 else 0)
        forward = max(forward, attending + lse, writing + lse)
        sums = (0 if number == 0 else chi * wide) + (0 if stage.opens_kv else 2 * kappa * wide)
        expanded = 2 * q if q != kappa else 0
        if mode.blocks > 1:
            blocks, tiles = mode.blocks, schedule.ranks
            # A block of q and dout is sent and received; then a piece of it is attended, tile by tile.
            attending = 2 * q / blocks + 6 * q / (blocks * schedule.ranks) + (2 * kappa + expanded) / tiles
            training = max(training, chi + chi * wide + 6 * kappa + max(4 * q / blocks, attending))
        else:
            training = max(training, incoming + sums + 4 * q + 4 * kappa + 2 * q + expanded)
    return PeakUnits(forward, training)


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
