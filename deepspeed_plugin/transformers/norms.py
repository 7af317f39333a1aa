"""A norm over a whole projection (OLMo 2), in stages of a few heads.

Its mean square runs over all heads, so it is summed first, a few heads at a time, and the heads of a stage are scaled
by what came out. The projection is computed twice for it, and never all there.

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
    of_low = (None, None) if low is None else (low.input, low.weight)
    size = heads_at_once * projection.head_dim
    inverse: Tensor = _InverseRms.apply(  # type: ignore[no-untyped-call]
        norm.variance_epsilon, size, x, weights.weight, weights.bias, *of_low
    )
    gain: Tensor = norm.weight.unflatten(0, (-1, projection.head_dim))
    return HeadFunction(_scaled, (inverse, gain), by_row=(0,), by_head=(1,))


def _scaled(heads: Tensor, inverse: Tensor, gain: Tensor) -> Tensor:
    return (heads * inverse * gain).to(heads.dtype)


class _InverseRms(torch.autograd.Function):
    """One over the root mean square of a projection's rows, `[B, L, 1, 1]`, `size` of its outputs at a time."""

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
        for projected, _ in _parts((x, weight, bias, low_input, low_weight), size, ctx.dtype):
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
        for projected, rows in _parts(read, ctx.size, ctx.dtype):
            part = (projected * factor[..., None]).to(ctx.dtype)
            by_token = part.flatten(0, 1)
            if dx is not None:
                dx += part @ weight[rows].to(ctx.dtype)
            if dweight is not None:
                dweight[rows] = (by_token.t() @ x.to(ctx.dtype).flatten(0, 1)).to(weight.dtype)
            if dbias is not None:
                dbias[rows] = by_token.sum(0).to(dbias.dtype)
            if dlow_input is not None:
                dlow_input += part.to(dlow_input.dtype) @ low_weight[rows].to(dlow_input.dtype)
            if dlow_weight is not None:
                of_input = low_input.flatten(0, 1)
                dlow_weight[rows] = (by_token.to(of_input.dtype).t() @ of_input).to(dlow_weight.dtype)
        dx = None if dx is None else dx.to(x.dtype)
        return None, None, dx, dweight, dbias, dlow_input, dlow_weight


def _parts(read: Sequence[Tensor | None], size: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, slice]]:
    """(projected, rows of the weight), `size` rows at a time; `read` are x, weight, bias and a low-rank term's."""
    x, weight, bias, low_input, low_weight = read
    assert x is not None and weight is not None
    with torch.autocast(x.device.type, enabled=False):
        for first in range(0, weight.shape[0], size):
            rows = slice(first, first + size)
            of_bias = None if bias is None else bias[rows].to(dtype)
            projected = torch.nn.functional.linear(x.to(dtype), weight[rows].to(dtype), of_bias)
            if low_input is not None and low_weight is not None:
                projected += low_input @ low_weight[rows].to(low_input.dtype).t()
            yield projected, rows
