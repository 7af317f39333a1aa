"""A norm over a whole projection (OLMo 2), in stages of a few heads.

Its mean square runs over all heads, so it is summed first, a few heads at a time, and the heads of a stage are scaled
by what came out. The projection is computed twice for it, and never exists whole.

Shapes: B batch, L rows of the sequence on this rank, E input size, N heads of the projection, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from upipe_integrations import HeadFunction, Projection, compute_dtype


def norm_over_heads(norm: Any, x: Tensor, projection: Projection, heads_at_once: int) -> HeadFunction:
    """An RMS norm over all heads of a projection, as a function of one stage's.

    Args:
        norm: the module, with a weight `[N * D]` and a ``variance_epsilon``.
        x: `[B, L, E]`, the projection's input.
        projection: what is normed.
        heads_at_once: heads that exist at a time while the mean square is summed.
    """
    weights = projection.weights
    low = weights.low_rank
    low_tensors = (None, None) if low is None else (low.input, low.weight)
    size = heads_at_once * projection.head_dim
    inverse: Tensor = _InverseRms.apply(  # type: ignore[no-untyped-call]
        norm.variance_epsilon, size, x, weights.weight, weights.bias, *low_tensors
    )
    gain: Tensor = norm.weight.unflatten(0, (-1, projection.head_dim))
    return HeadFunction(_scaled, (inverse, gain), by_row=(0,), by_head=(1,))


def _scaled(heads: Tensor, inverse: Tensor, gain: Tensor) -> Tensor:
    """Heads `[B, L, n, D]` times `[B, L, 1, 1]` and `[n, D]`."""
    return (heads * inverse * gain).to(heads.dtype)


class _InverseRms(torch.autograd.Function):
    """One over the root mean square of each row's N * D outputs, `[B, L, 1, 1]`, from `size` of them at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        size: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low_input: Tensor | None,
        low_weight: Tensor | None,
    ) -> Tensor:
        ctx.dtype, ctx.size = compute_dtype(x), size
        exact = torch.promote_types(ctx.dtype, torch.float32)
        total = x.new_zeros(x.shape[:2], dtype=exact)
        for projected, _ in _projected_in_pieces((x, weight, bias, low_input, low_weight), size, ctx.dtype):
            total += projected.to(exact).square().sum(-1)
        inverse = torch.rsqrt(total / weight.shape[0] + eps)
        ctx.save_for_backward(x, weight, bias, low_input, low_weight, inverse)
        return inverse[:, :, None, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *read, inverse = ctx.saved_tensors
        x, weight, bias, low_input, low_weight = read
        # d inverse / d projected = -inverse^3 / outputs * projected
        factor = -grad[:, :, 0, 0] * inverse**3 / weight.shape[0]
        dx, dweight, dbias, dlow_input, dlow_weight = (
            torch.zeros_like(t) if wanted and t is not None else None
            for t, wanted in zip(read, ctx.needs_input_grad[2:], strict=True)
        )
        if dx is not None:
            dx = dx.to(ctx.dtype)
        for projected, outputs in _projected_in_pieces(read, ctx.size, ctx.dtype):
            grad_piece = (projected * factor[..., None]).to(ctx.dtype)  # [B, L, size]
            by_token = grad_piece.flatten(0, 1)
            if dx is not None:
                dx += grad_piece @ weight[outputs].to(ctx.dtype)
            if dweight is not None:
                dweight[outputs] = (by_token.t() @ x.to(ctx.dtype).flatten(0, 1)).to(weight.dtype)
            if dbias is not None:
                dbias[outputs] = by_token.sum(0).to(dbias.dtype)
            if dlow_input is not None:
                dlow_input += grad_piece.to(dlow_input.dtype) @ low_weight[outputs].to(dlow_input.dtype)
            if dlow_weight is not None:
                low_by_token = low_input.flatten(0, 1)
                dlow_weight[outputs] = (by_token.to(low_by_token.dtype).t() @ low_by_token).to(dlow_weight.dtype)
        dx = None if dx is None else dx.to(x.dtype)
        return None, None, dx, dweight, dbias, dlow_input, dlow_weight


def _projected_in_pieces(
    read: Sequence[Tensor | None], size: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, slice]]:
    """(`size` outputs of the projection `[B, L, size]`, which they are), for one piece after the other.

    `read` are x, weight and bias of the projection, and input and weight of its low-rank term.
    """
    x, weight, bias, low_input, low_weight = read
    assert x is not None and weight is not None
    with torch.autocast(x.device.type, enabled=False):
        for first in range(0, weight.shape[0], size):
            outputs = slice(first, first + size)
            bias_piece = None if bias is None else bias[outputs].to(dtype)
            projected = torch.nn.functional.linear(x.to(dtype), weight[outputs].to(dtype), bias_piece)
            if low_input is not None and low_weight is not None:
                projected += low_input @ low_weight[outputs].to(low_input.dtype).t()
            yield projected, outputs
