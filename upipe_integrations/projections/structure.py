"""Objects that hold tensors, taken apart into their tensors and all else, their structure, and put together again.

Autograd and registered operators are handed tensors in a list; what is not a tensor must be kept apart from them, and
for compiled code it must be comparable. A tensor that stands in several places is one in the list, so that structures
also say which places share a tensor, and its gradient is one sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor


class HoldsTensors:
    """A frozen dataclass whose fields named in ``holds`` are tensors, such dataclasses, tuples of both, or None."""

    holds: ClassVar[tuple[str, ...]]


_Held = TypeVar("_Held", bound=HoldsTensors)


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor: its number in the list."""

    number: int


@dataclass(frozen=True)
class Structure(Generic[_Held]):
    """An object without its tensors; structures of equal objects, with the same tensors shared, are equal."""

    _held: _Held

    def with_tensors(self, tensors: Sequence[Tensor]) -> _Held:
        """The object with other tensors in place, in the order of :func:`take_apart`."""
        held: _Held = _replaced(self._held, lambda place: tensors[place.number])
        return held


def take_apart(held: _Held) -> tuple[Structure[_Held], list[Tensor]]:
    """The object's structure, and every tensor in it once, in the order of its fields."""
    tensors: list[Tensor] = []

    def place_of(tensor: Tensor) -> _Place:
        for number, known in enumerate(tensors):
            if known is tensor:
                return _Place(number)
        tensors.append(tensor)
        return _Place(len(tensors) - 1)

    return Structure(_replaced(held, place_of)), tensors


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """`value` with its tensors, or what stands for them, replaced."""
    if isinstance(value, (Tensor, _Place)):
        return replace(value)
    if isinstance(value, tuple):
        return tuple([_replaced(item, replace) for item in value])
    if isinstance(value, HoldsTensors):
        held: Any = value  # a dataclass
        return dataclasses.replace(held, **{name: _replaced(getattr(value, name), replace) for name in value.holds})
    return value


class Totals:
    """The gradients of a list of tensors, each summed over all that contributes to it.

    Args:
        tensors: in the order of :func:`take_apart`.
        wanted: which of them want a gradient.
    """

    def __init__(self, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        self._tensors = tensors
        self._wanted = wanted
        self._totals: dict[int, Tensor] = {}

    def of(self, tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
        """The total of one of the tensors, at first zeros of `dtype` (None: its own); None where none is wanted."""
        number = self._number(tensor)
        if tensor is None or number is None:
            return None
        if number not in self._totals:
            self._totals[number] = torch.zeros_like(tensor, dtype=dtype)
        return self._totals[number]

    def of_weight(self, weight: Tensor, accumulate_into: Tensor | None) -> Tensor | None:
        """What a weight's gradient is added to: its total, or a tensor of the caller's beside these."""
        if accumulate_into is None:
            return self.of(weight)
        return accumulate_into if self.wants(weight) else None

    def wants(self, tensor: Tensor | None) -> bool:
        """Whether it is one of the tensors and wants a gradient."""
        return self._number(tensor) is not None

    def add(self, tensor: Tensor, gradient: Tensor) -> None:
        """Add to the total of one of the tensors, where it wants a gradient."""
        number = self._number(tensor)
        if number is not None:
            total = self._totals.get(number)
            self._totals[number] = gradient if total is None else total + gradient

    def take(self) -> list[Tensor | None]:
        """The gradients, in the dtypes of the tensors; None where none is wanted or nothing was added."""
        totals, self._totals = self._totals, {}
        return [totals[i].to(t.dtype) if i in totals else None for i, t in enumerate(self._tensors)]

    def _number(self, tensor: Tensor | None) -> int | None:
        for number, (known, wanted) in enumerate(zip(self._tensors, self._wanted, strict=True)):
            if known is tensor:
                return number if wanted else None
        return None
