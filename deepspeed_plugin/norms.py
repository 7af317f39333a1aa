"""A norm over a whole projection (OLMo 2), in stages of a few heads.

Its mean square runs over all heads, so it is summed first, a few heads at a time, and the heads of a stage are scaled
by what came out. The projection is computed twice for it, and never all there.

Shapes: B batch, L rows of the sequence on this rank, E input size, N heads of the projection, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from upipe_integrations import HeadFunction, compute_dtype


def norm_over_heads(
    norm: Any, x: Tensor, weight: Tensor, bias: Tensor | None, head_dim: int, heads_at_once: int
) -> HeadFunction:
    """An RMS norm over all heads of a projection, as a function of one stage's.

    Args:
        norm: the module, with a weight `[N * D]` and a ``variance_epsilon``.
        x: `[B, L, E]`, the projection's input.
        weight: `[N * D, E]`, the projection's, and its bias `[N * D]` or None.
        heads_at_once: heads that exist at a time while the mean square is summed.
    """
    inverse: Tensor = _InverseRms.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, norm.variance_epsilon, heads_at_once * head_dim
    )
    gain: Tensor = norm.weight.unflatten(0, (-1, head_dim))
    return HeadFunction(_scaled, (inverse, gain), by_row=(0,), by_head=(1,))


def _scaled(heads: Tensor, inverse: Tensor, gain: Tensor) -> Tensor:
    return (heads * inverse * gain).to(heads.dtype)


class _InverseRms(torch.autograd.Function):
    """One over the root mean square of a projection's rows, `[B, L, 1, 1]`, `size` of its outputs at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, size: int) -> Tensor:
        ctx.dtype = compute_dtype(x)
        exact = torch.promote_types(ctx.dtype, torch.float32)
        total = x.new_zeros(x.shape[:2], dtype=exact)
        for projected, _ in _parts(x, weight, bias, size, ctx.dtype):
            total += projected.to(exact).square().sum(-1)
        inverse = torch.rsqrt(total / weight.shape[0] + eps)
        ctx.size = size
        ctx.save_for_backward(x, weight, bias, inverse)
        return inverse[:, :, None, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, inverse = ctx.saved_tensors
        # d inverse / d projected = -inverse^3 / outputs * projected
        factor = -grad[:, :, 0, 0] * inverse**3 / weight.shape[0]
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = torch.zeros_like(x, dtype=ctx.dtype) if needs_x else None
        dweight = torch.zeros_like(weight) if needs_weight else None
        dbias = torch.zeros_like(bias) if needs_bias else None
        for projected, rows in _parts(x, weight, bias, ctx.size, ctx.dtype):
            part = (projected * factor[..., None]).to(ctx.dtype)
            if dx is not None:
                dx += part @ weight[rows].to(ctx.dtype)
            if dweight is not None:
                dweight[rows] = (part.flatten(0, 1).t() @ x.to(ctx.dtype).flatten(0, 1)).to(weight.dtype)
            if dbias is not None:
                dbias[rows] = part.flatten(0, 1).sum(0).to(dbias.dtype)
        return None if dx is None else dx.to(x.dtype), dweight, dbias, None, None


def _parts(x: Tensor, weight: Tensor, bias: Tensor | None, size: int, dtype: torch.dtype) -> Any:
    """(projected, rows of the weight), `size` rows at a time."""
    with torch.autocast(x.device.type, enabled=False):
        for first in range(0, weight.shape[0], size):
            rows = slice(first, first + size)
            of_bias = None if bias is None else bias[rows].to(dtype)
            yield torch.nn.functional.linear(x.to(dtype), weight[rows].to(dtype), of_bias), rows
