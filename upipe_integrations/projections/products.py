"""Matrix products that are added to a sum in its own precision, without a product-sized temporary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from upipe_integrations.mode import PRODUCT_PIECES
from upipe_integrations.projections.sums import ScaledSum

_PIECES_OF_SCALED = 16
"""Pieces in which a product is added to a ScaledSum, which is made where memory is not at its peak."""


_ROWS_OF_PIECE = 2048


_DEPTH_OF_PIECE = 512


_Total = TypeVar("_Total", bound=Tensor | ScaledSum)


def add_products(
    total: _Total | None, factors: Sequence[tuple[Tensor, Tensor] | None], dtype: torch.dtype
) -> _Total | Tensor | None:
    """:func:`add_product` of several products, as one: a sum in the compute dtype rounds once, not once for each."""
    given = [pair for pair in factors if pair is not None]
    if not given:
        return total
    if len(given) == 1:
        return add_product(total, *given[0], dtype)
    rows = torch.cat([pair[0] for pair in given], 1)
    weight = torch.cat([pair[1] for pair in given], 0)
    return add_product(total, rows, weight, dtype)


def add_product(total: _Total | None, rows: Tensor, weight: Tensor, dtype: torch.dtype) -> _Total | Tensor:
    """total + rows @ weight, in place, summed in `dtype`; a new tensor where total is None.

    `rows` is `[B * L, N]` and `total` `[B * L, M]`, or `[B, L, M]` of any batch stride. What is added to a
    :class:`ScaledSum` is of a wider dtype than `rows`.
    """
    if total is None:
        if dtype == rows.dtype:
            return rows @ weight
        return add_product(rows.new_zeros(rows.shape[0], weight.shape[1], dtype=dtype), rows, weight, dtype)
    if len(total.shape) == 3:
        for b, part in enumerate(rows.chunk(total.shape[0])):
            add_product(total[b], part, weight, dtype)
        return total
    if isinstance(total, Tensor) and total.dtype == dtype == rows.dtype:
        return total.addmm_(rows, weight)
    # In pieces, so that the product does not need the whole of its memory.
    pieces = PRODUCT_PIECES if isinstance(total, Tensor) else _PIECES_OF_SCALED
    size = max(rows.shape[0] // pieces, _ROWS_OF_PIECE)
    for first in range(0, rows.shape[0], size):
        piece = slice(first, first + size)
        total[piece].add_(product(rows[piece], weight, dtype))
    return total


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left @ right``, rounded to `dtype` only: their own, or a wider one that a sum of products is made in."""
    if dtype == left.dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    depth = max(left.shape[1] // PRODUCT_PIECES, _DEPTH_OF_PIECE)
    total = left.new_zeros(left.shape[0], right.shape[1], dtype=dtype)
    for columns, rows in zip(left.split(depth, 1), right.split(depth), strict=True):
        total.addmm_(columns.to(dtype), rows.to(dtype))
    return total
