"""The output projection: of all attended heads at once, or of a stage's heads in the stage loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.projections.given import next_tensor
from upipe_integrations.projections.heads import add_head_rows
from upipe_integrations.projections.products import add_product, product
from upipe_integrations.projections.projection import Projection
from upipe_integrations.schedule import HeadChunk


@dataclass(frozen=True)
class OutputProjection:
    """The output projection: after the stage loop, or in it, where y is summed and heads are never all there.

    Args:
        weight: `[Y, H * Dv]` in checkpoint order, as in ``nn.Linear``.
        bias: `[Y]` or None.
        accumulate_into: see :class:`Projection`.
    """

    weight: Tensor
    bias: Tensor | None = None
    accumulate_into: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        """Like ``Projection.tensors``."""
        return [self.weight, self.bias]

    def with_tensors(self, tensors: Iterator[Tensor | None]) -> OutputProjection:
        """The same projection of other tensors."""
        return dataclasses.replace(self, weight=next_tensor(tensors), bias=next(tensors))

    def by_head(self, head_dim: int) -> Projection:
        """The same weight seen from y's side: it projects dy to the gradient of the heads."""
        return Projection(self.weight.t(), head_dim)

    def add(self, y: Tensor | None, received: Tensor, chunk: HeadChunk, sum_dtype: torch.dtype) -> Tensor:
        """y `[B * L, Y]` (None: nothing yet) plus the chunk's attended heads, projected.

        Heads are `[C, L, B, n, Dv]`; repeated ones must be zero.
        """
        rows = _by_token(received)
        weight = self.by_head(received.shape[4])._rows(self.weight.t(), chunk.by_rank, received.dtype)
        return add_product(y, rows, weight, sum_dtype)

    def of_all(self, attended: Tensor) -> Tensor:
        """y `[B, L, Y]` of all attended heads `[B, L, H * Dv]`."""
        bias = None if self.bias is None else self.bias.to(attended.dtype)
        return torch.nn.functional.linear(attended, self.weight.to(attended.dtype), bias)

    def add_all_rows(self, total: Tensor, attended: Tensor, dy: Tensor) -> None:
        """Add what all attended heads `[B, L, H, Dv]` and dy `[B, L, Y]` contribute to the weight's gradient."""
        dtype = torch.promote_types(total.dtype, dy.dtype)
        add_product(total, dy.flatten(0, 1).t(), attended.flatten(2, 3).flatten(0, 1), dtype)

    def weight_rows(self, received: Tensor, dy: Tensor, dtype: torch.dtype) -> Tensor:
        """What the chunk's attended heads and dy `[B, L, Y]` contribute to the weight: `[C * n * Dv, Y]`."""
        return product(_by_token(received).t(), dy.flatten(0, 1), dtype)

    def add_rows(self, total: Tensor, rows: Tensor, head_dim: int, chunk: HeadChunk) -> None:
        """Add such rows to the weight's gradient `total` `[Y, H * Dv]`."""
        add_head_rows(self.by_head(head_dim).heads_of(total.t()), rows, chunk.by_rank)


def _by_token(received: Tensor) -> Tensor:
    """`[C, L, B, n, D]` -> `[B * L, C * n * D]`."""
    return received.permute(2, 1, 0, 3, 4).flatten(2, 4).flatten(0, 1)
