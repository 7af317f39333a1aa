"""The output projection: of all attended heads at once, or of a stage's heads in the stage loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upipe_integrations.projections.heads import add_head_weights
from upipe_integrations.projections.products import add_product, product
from upipe_integrations.projections.projection import ProjectedHeads, Projection, Weights
from upipe_integrations.projections.structure import HoldsTensors
from upipe_integrations.projections.sums import Sum
from upipe_integrations.schedule import HeadChunk


@dataclass(frozen=True)
class OutputProjection(HoldsTensors):
    """The output projection: after the stage loop, or in it, where y is summed and heads are never all there.

    Args:
        weight: `[Y, H * Dv]` in checkpoint order, as in ``nn.Linear``.
        bias: `[Y]` or None.
        accumulate_into: see :class:`~upipe_integrations.projections.projection.Weights`.
    """

    holds = ("weight", "bias")

    weight: Tensor
    bias: Tensor | None = None
    accumulate_into: Tensor | None = None

    def heads_of(self, dy: Tensor, head_dim: int) -> ProjectedHeads:
        """The gradient of the attended heads, projected from dy `[B, L, Y]` by the same weight seen from y's side."""
        return ProjectedHeads(self._from_y(head_dim), dy)

    def _from_y(self, head_dim: int) -> Projection:
        return Projection(Weights(self.weight.t()), head_dim)

    # ---- in the stage loop

    def add(self, y: Sum, received: Tensor, chunk: HeadChunk) -> None:
        """Add the chunk's attended heads `[C, L, B, n, Dv]`, projected, to y `[B * L, Y]`.

        Repeated heads must be zero.
        """
        weight = self._from_y(received.shape[4]).slice_of(self.weight.t(), chunk.by_rank, received.dtype)
        y.add_product(_by_token(received), weight)

    def weight_gradient(self, received: Tensor, dy: Tensor, dtype: torch.dtype) -> Tensor:
        """What the chunk's attended heads and dy `[B, L, Y]` contribute to the weight: `[C * n * Dv, Y]`."""
        return product(_by_token(received).t(), dy.flatten(0, 1), dtype)

    def add_weight_gradient(self, total: Tensor, gradient: Tensor, head_dim: int, chunk: HeadChunk) -> None:
        """Add what :meth:`weight_gradient` gave to the weight's gradient `total` `[Y, H * Dv]`."""
        add_head_weights(self._from_y(head_dim).by_head(total.t()), gradient, chunk.by_rank)

    # ---- after it

    def of_all(self, attended: Tensor) -> Tensor:
        """y `[B, L, Y]` of all attended heads `[B, L, H * Dv]`."""
        bias = None if self.bias is None else self.bias.to(attended.dtype)
        return torch.nn.functional.linear(attended, self.weight.to(attended.dtype), bias)

    def add_all_rows(self, total: Tensor, attended: Tensor, dy: Tensor) -> None:
        """Add what all attended heads `[B, L, H * Dv]` and dy `[B, L, Y]` contribute to the weight's gradient."""
        dtype = torch.promote_types(total.dtype, dy.dtype)
        add_product(total, dy.flatten(0, 1).t(), attended.flatten(0, 1), dtype)

    def by_autograd(self, attended: Tensor) -> Tensor:
        """:meth:`of_all` under autograd, which keeps `attended` until its own backward."""
        if self.accumulate_into is None:
            return self.of_all(attended)
        y: Tensor = _IntoBuffer.apply(self, attended, self.weight)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _IntoBuffer(torch.autograd.Function):
    """The product alone, whose weight's gradient is added to ``accumulate_into``."""

    @staticmethod
    def forward(ctx: Any, output: OutputProjection, attended: Tensor, weight: Tensor) -> Tensor:
        ctx.into = output.accumulate_into
        ctx.save_for_backward(attended, weight)
        return torch.nn.functional.linear(attended, weight.to(attended.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        attended, weight = ctx.saved_tensors
        if ctx.needs_input_grad[2]:
            OutputProjection(weight).add_all_rows(ctx.into, attended, dy)
        return None, dy @ weight.to(dy.dtype), None


def _by_token(received: Tensor) -> Tensor:
    """`[C, L, B, n, D]` -> `[B * L, C * n * D]`."""
    return received.permute(2, 1, 0, 3, 4).flatten(2, 4).flatten(0, 1)
