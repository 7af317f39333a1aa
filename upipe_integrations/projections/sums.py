"""Sums of one gradient's parts, which arrive stage by stage or block by block."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_LARGEST = 6


_SMALLEST_EXPONENT = -100


class Sum:
    """A sum made in `dtype` (None: the parts'); the first part is taken as it is where it has that dtype."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._total: Tensor | None = None

    def add_(self, part: Tensor) -> None:
        """Add a part, which is given away."""
        self._total = part.to(self._dtype or part.dtype) if self._total is None else self._total.add_(part)

    def take(self, dtype: torch.dtype | None = None) -> Tensor:
        """The sum in `dtype` (None: as it was made), which is given away."""
        total, self._total = self._total, None
        assert total is not None
        return total.to(dtype or total.dtype)


class ScaledSum:
    """A sum in the memory of one bfloat16 tensor, which rounds eight times finer than bfloat16 does.

    It is made in float16: three more bits of mantissa, for a range that gradients do not fit in. So every row (the
    last dimension) has a power of two of its own, by which its largest part so far is between 2 ** 5 and 2 ** 6. That
    leaves room for a thousand parts above, and below for elements of down to 2 ** -20 of the largest at full precision,
    and 2 ** -23 at bfloat16's.
    """

    def __init__(self, total: Tensor | None = None, exponent: Tensor | None = None) -> None:
        """Nothing yet, or what is in `total` `[..., D]` (float16) with the exponents `[..., 1]` of its rows."""
        self._total = total
        self._exponent = exponent

    @classmethod
    def in_place_of(cls, zeros: Tensor) -> ScaledSum:
        """Nothing yet, to be summed in the float16 tensor `zeros`."""
        return cls(zeros, zeros.new_full((*zeros.shape[:-1], 1), _SMALLEST_EXPONENT, dtype=torch.int32))

    def __getitem__(self, rows: Any) -> ScaledSum:
        """The sum of some rows, as a view."""
        assert self._total is not None and self._exponent is not None
        return ScaledSum(self._total[rows], self._exponent[rows])

    @property
    def shape(self) -> torch.Size:
        """Its shape, once there is something to add to."""
        assert self._total is not None
        return self._total.shape

    def add_(self, part: Tensor) -> None:
        """Add a part, which is given away."""
        if self._total is None or self._exponent is None:
            empty = ScaledSum.in_place_of(torch.zeros_like(part, dtype=torch.float16))
            self._total, self._exponent = empty._total, empty._exponent
        assert self._total is not None and self._exponent is not None
        largest = torch.linalg.vector_norm(part, math.inf, dim=-1, keepdim=True, dtype=torch.float32)
        exponent = torch.frexp(largest.clamp_(min=2.0**_SMALLEST_EXPONENT)).exponent
        exponent = torch.maximum(self._exponent, exponent)
        self._total.mul_(_power_of_two(self._exponent - exponent))
        self._total.add_(part.mul_(_power_of_two(_LARGEST - exponent)))
        self._exponent.copy_(exponent)

    def take(self, dtype: torch.dtype) -> Tensor:
        """The sum in `dtype`, which is given away."""
        total, self._total = self._total, None
        assert total is not None and self._exponent is not None
        return total.to(dtype).mul_(_power_of_two(self._exponent - _LARGEST))


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.exp2(exponent.to(torch.float32))
