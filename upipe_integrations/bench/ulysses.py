"""Plain Ulysses, to stand beside the engine: written the usual way, in DeepSpeed's order of operations.

All heads are projected and rotated, q, k and v each travel in an exchange of their own, a rank attends its heads over
the whole sequence, the output travels back and is projected. Everything is autograd's but the exchange and the kernel,
which is the same object that the engine is given: what differs is the schedule.

Shapes: B batch, L rows of the sequence on this rank, C ranks, S = C * L, H heads of size D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from upipe_integrations.all_to_all import Group, exchange, group_ranks
from upipe_integrations.bench.layers import SPEC, Layer
from upipe_integrations.kernels import Kernel

SequenceParallel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q `[B, L, H, D]`, k and v `[B, L, K, D]` to the attended heads `[B, L, H, D]`."""


def ulysses_layer(layer: Layer, group: Group, kernel: Kernel) -> Tensor:
    """y `[B, L, E]`: attention of the layer by plain Ulysses, and its output projection."""
    return F.linear(ulysses_heads(layer, group, kernel), layer.wo)


def ulysses_heads(layer: Layer, group: Group, kernel: Kernel) -> Tensor:
    """The attended heads `[B, L, H * D]`."""
    return attend_all_heads(layer, lambda q, k, v: _attend_heads(q, k, v, group, kernel))


def attend_all_heads(layer: Layer, attention: SequenceParallel) -> Tensor:
    """`[B, L, H * D]`: every head is projected and rotated before `attention`."""
    q, k, v = (F.linear(layer.x, w).unflatten(2, (-1, layer.head_dim)) for w in (layer.wq, layer.wk, layer.wv))
    q, k = (_rotated(t, layer.cos, layer.sin) for t in (q, k))
    heads: Tensor = attention(q, k, v).flatten(2)
    return heads


def _rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary as Transformers writes it."""
    return t * cos[:, :, None] + _half_turned(t) * sin[:, :, None]


def _half_turned(t: Tensor) -> Tensor:
    half = t.shape[-1] // 2
    return torch.cat((-t[..., half:], t[..., :half]), -1)


def _attend_heads(q: Tensor, k: Tensor, v: Tensor, group: Group, kernel: Kernel) -> Tensor:
    C = group_ranks(group)
    if k.shape[2] < C:  # as DeepSpeed does: every rank needs a KV head
        k, v = (t.repeat_interleave(C // t.shape[2], 2) for t in (k, v))
    q, k, v = (_AllToAll.apply(t, group, True) for t in (q, k, v))  # type: ignore[no-untyped-call]
    out = LocalAttention.apply(kernel, *(t.transpose(1, 2) for t in (q, k, v)))  # type: ignore[no-untyped-call]
    del q, k, v
    heads: Tensor = _AllToAll.apply(out.transpose(1, 2), group, False)  # type: ignore[no-untyped-call]
    return heads


class LocalAttention(torch.autograd.Function):
    """A kernel `[B, n, S, D]` under autograd."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See the class."""
        out, lse = kernel.forward(q, k, v, SPEC)
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """See the class."""
        return None, *ctx.kernel.backward(dout, *ctx.saved_tensors, SPEC)


class _AllToAll(torch.autograd.Function):
    """`[B, L, H, D]` to `[B, S, H / C, D]`, or back."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Group, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(t, group, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grad, ctx.group, not ctx.to_heads), None, None


def _exchanged(t: Tensor, group: Group, to_heads: bool) -> Tensor:
    C = group_ranks(group)
    if C == 1:
        return t
    if to_heads:
        send = t.unflatten(2, (C, -1)).permute(2, 0, 1, 3, 4).contiguous()  # [C, B, L, H / C, D]
    else:
        send = t.unflatten(1, (C, -1)).permute(1, 0, 2, 3, 4).contiguous()  # [C, B, L, H / C, D]
    received = exchange(send, group)
    del send
    if to_heads:
        return received.permute(1, 0, 2, 3, 4).contiguous().flatten(1, 2)
    return received.permute(1, 2, 0, 3, 4).contiguous().flatten(2, 3)
