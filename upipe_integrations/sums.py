"""Sums of one gradient's parts, which arrive stage by stage."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LARGEST = 6
_SMALLEST_EXPONENT = -100


class Sum:
    """A sum made in `dtype`; the first part is taken as it is where it has that dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._total: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Add a part, which is given away."""
        self._total = part.to(self._dtype) if self._total is None else self._total.add_(part)

    def take(self, dtype: torch.dtype) -> Tensor:
        """The sum in `dtype`, which is given away."""
        total, self._total = self._total, None
        assert total is not None
        return total.to(dtype)


class ScaledSum:
    """A sum of bfloat16 parts in the memory of one of them, which rounds eight times finer than bfloat16 does.

    It is made in float16: three more bits of mantissa, for a range that gradients do not fit in. So every row (the
    last dimension) has a power of two of its own, by which its largest part so far is between 2 ** 5 and 2 ** 6. That
    leaves room for a thousand parts above, and below for elements of down to 2 ** -20 of the largest at full precision,
    and 2 ** -23 at bfloat16's.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._exponent: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Add a part, which is given away."""
        largest = torch.linalg.vector_norm(part, math.inf, dim=-1, keepdim=True, dtype=torch.float32)
        exponent = torch.frexp(largest.clamp_(min=2.0**_SMALLEST_EXPONENT)).exponent
        if self._total is None or self._exponent is None:
            self._exponent = exponent
            self._total = part.mul_(_power_of_two(_LARGEST - exponent)).to(torch.float16)
            return
        higher = torch.maximum(self._exponent, exponent)
        self._total.mul_(_power_of_two(self._exponent - higher))
        self._total.add_(part.mul_(_power_of_two(_LARGEST - higher)))
        self._exponent = higher

    def take(self, dtype: torch.dtype) -> Tensor:
        """The sum in `dtype`, which is given away."""
        total, self._total = self._total, None
        assert total is not None and self._exponent is not None
        return total.to(dtype).mul_(_power_of_two(self._exponent - _LARGEST))


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.exp2(exponent.to(torch.float32))
