"""Matrix products that are rounded to the precision of the sum they are added to, without a temporary of their size."""

from __future__ import annotations

import torch
from torch import Tensor

from upipe_integrations.mode import PRODUCT_PIECES

_SMALLEST_PIECE = 2048
_DEPTH_OF_PIECE = 512


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


def add_product(total: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    """``total += left @ right`` in place, with the product rounded to `dtype`.

    `left` is `[M, N]`, `right` `[N, K]`, `total` `[M, K]`.
    """
    if total.dtype == dtype == left.dtype:
        total.addmm_(left, right)
        return
    for piece in pieces(left, PRODUCT_PIECES):
        total[piece].add_(product(left[piece], right, dtype))


def pieces(left: Tensor, count: int) -> list[slice]:
    """`left`'s first dimension in about `count` pieces, so that a product with it does not take all of its memory."""
    size = max(left.shape[0] // count, _SMALLEST_PIECE)
    return [slice(first, first + size) for first in range(0, left.shape[0], size)]
