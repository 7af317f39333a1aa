"""Sums of one gradient's parts, which arrive stage by stage or block by block."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from upipe_integrations.projections.products import add_product, pieces, product

_LARGEST = 2.0**6
_SMALLEST = 2.0**-101
_LARGEST_FACTOR = 2.0**106
"""For rows whose elements are all below the smallest number that is told from zero."""
_PIECES, _PIECES_OF_SOME_ROWS = 16, 4
"""Pieces in which a product is added to a ScaledSum and to some rows of one, where memory is not at its peak."""


class RunningSum(ABC):
    """A sum that parts and products are added to."""

    @abstractmethod
    def add_(self, part: Tensor) -> None:
        """Add a part, which is given away."""

    @abstractmethod
    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left @ right``: `left` is `[M, N]`, the sum `[M, K]` or `[B, L, K]` of any strides with M = B * L."""

    @abstractmethod
    def at_rows(self, rows: slice) -> RunningSum:
        """The sum of some rows of `[B, L, K]`, as a view of a sum that is not empty."""

    @abstractmethod
    def take(self, dtype: torch.dtype | None = None) -> Tensor:
        """The sum in `dtype` (None: as it was made), which is given away."""


class Sum(RunningSum):
    """A sum made in `dtype` (None: the parts'); the first part is taken as it is where it has that dtype.

    Args:
        dtype: of the sum.
        total: what it starts from; None is nothing yet.
    """

    def __init__(self, dtype: torch.dtype | None = None, total: Tensor | None = None) -> None:
        self._dtype = dtype
        self._total = total

    def add_(self, part: Tensor) -> None:
        """See :class:`RunningSum`."""
        self._total = part.to(self._dtype or part.dtype) if self._total is None else self._total.add_(part)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """See :class:`RunningSum`."""
        dtype = self._dtype or left.dtype
        if self._total is None:
            if dtype == left.dtype:
                self._total = left @ right
                return
            self._total = left.new_zeros(left.shape[0], right.shape[1], dtype=dtype)
        batches = [self._total] if self._total.dim() == 2 else list(self._total)
        for total, part in zip(batches, left.chunk(len(batches)), strict=True):
            add_product(total, part, right, dtype)

    def at_rows(self, rows: slice) -> Sum:
        """See :class:`RunningSum`."""
        assert self._total is not None
        return Sum(self._dtype, self._total[:, rows])

    def take(self, dtype: torch.dtype | None = None) -> Tensor:
        """See :class:`RunningSum`."""
        total, self._total = self._total, None
        assert total is not None
        return total.to(dtype or total.dtype)


class ScaledSum(RunningSum):
    """A sum in the memory of one bfloat16 tensor, which rounds eight times finer than bfloat16 does.

    It is made in float16: three more bits of mantissa, for a range that gradients do not fit in. So every row (the
    last dimension) has a power of two of its own, by which its largest part so far is between 2 ** 5 and 2 ** 6. That
    leaves room for a thousand parts above, and below for elements of down to 2 ** -20 of the largest at full precision,
    and 2 ** -23 at bfloat16's.
    """

    def __init__(self, total: Tensor | None = None, factor: Tensor | None = None, pieces: int = _PIECES) -> None:
        """Nothing yet, or what is in `total` `[..., D]` (float16) with the factors `[..., 1]` (float32) of its rows.

        `pieces`: in which a product is added.
        """
        self._total = total
        self._factor = factor
        self._pieces = pieces

    @classmethod
    def in_place_of(cls, zeros: Tensor) -> ScaledSum:
        """Nothing yet, to be summed in the float16 tensor `zeros`."""
        return cls(zeros, zeros.new_full((*zeros.shape[:-1], 1), _LARGEST_FACTOR, dtype=torch.float32))

    def add_(self, part: Tensor) -> None:
        """See :class:`RunningSum`."""
        if self._total is None or self._factor is None:
            empty = ScaledSum.in_place_of(torch.zeros_like(part, dtype=torch.float16))
            self._total, self._factor = empty._total, empty._factor
        assert self._total is not None and self._factor is not None
        _add_scaled(self._total, self._factor, part)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """See :class:`RunningSum`; the product is rounded to float32, a piece of it at a time."""
        assert self._total is not None and self._factor is not None
        scaled = (self._total, self._factor)
        batches = [scaled] if self._total.dim() == 2 else list(zip(*scaled, strict=True))
        for (total, factors), part in zip(batches, left.chunk(len(batches)), strict=True):
            for piece in pieces(part, self._pieces):
                _add_scaled(total[piece], factors[piece], product(part[piece], right, torch.float32))

    def at_rows(self, rows: slice) -> ScaledSum:
        """See :class:`RunningSum`."""
        assert self._total is not None and self._factor is not None
        return ScaledSum(self._total[:, rows], self._factor[:, rows], _PIECES_OF_SOME_ROWS)

    def take(self, dtype: torch.dtype | None = None) -> Tensor:
        """See :class:`RunningSum`; None is float32."""
        total, self._total = self._total, None
        assert total is not None and self._factor is not None
        return total.to(dtype or torch.float32).div_(self._factor)


def _add_scaled(total: Tensor, factors: Tensor, part: Tensor) -> None:
    """Add `part` to rows of a :class:`ScaledSum`, whose factors fall where a part is larger than all before."""
    largest = torch.linalg.vector_norm(part, math.inf, dim=-1, keepdim=True, dtype=torch.float32)
    mantissa, _ = torch.frexp(largest.clamp_(min=_SMALLEST))
    # The mantissa is largest times a power of two, and from 1/2 up to 1: this is the power, exactly.
    needed = torch.minimum(factors, mantissa.mul_(_LARGEST).div_(largest))
    total.mul_(needed / factors).addcmul_(part, needed)
    factors.copy_(needed)
