"""A differentiable function of one stage's heads: per-head norms, any rotary, gates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.projections.heads import HeadLists, add_heads, take_heads
from upipe_integrations.projections.structure import HoldsTensors


@dataclass(frozen=True)
class HeadFunction(HoldsTensors):
    """A differentiable function of some heads, such as a per-head norm.

    Args:
        function: ``function(heads, *tensors)`` of `[B, L, heads, D]`, same shape returned (of another D only where
            ``Projection.block`` says what is projected). It sees the heads of one stage, so it must treat them alike
            but for tensors `by_head`, and be free of side effects, as backward calls it again. In code for
            torch.compile: one from outside of that code, or a dataclass or closure of constants.
        tensors: what it reads besides; those that require gradients get them.
        by_row: which of `tensors` have this rank's rows as second dimension (rotary tables); needed where
            backward walks rows in blocks.
        by_head: which of `tensors` have the projection's heads as first dimension; it is given those of the
            stage's.
    """

    holds = ("tensors",)

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    by_row: tuple[int, ...] = ()
    by_head: tuple[int, ...] = ()

    @classmethod
    def of_module(cls, module: torch.nn.Module) -> HeadFunction:
        """A per-head norm module as a function of heads and its own parameters, without its hooks.

        Hosts hang gathering and releasing of parameters on hooks: those must not run from inside backward, where
        parameters may be saved copies.
        """
        return cls(_ModuleOfHeads(module), tuple(t for _, t in module.named_parameters(recurse=False)))

    def at_rows(self, rows: slice) -> HeadFunction:
        """The function of some rows only."""
        cut = tuple(t[:, rows] if i in self.by_row else t for i, t in enumerate(self.tensors))
        return dataclasses.replace(self, tensors=cut)

    def at_heads(self, heads: HeadLists) -> HeadFunction:
        """The function of some heads only."""
        cut = tuple(take_heads(t, heads, 0) if i in self.by_head else t for i, t in enumerate(self.tensors))
        return dataclasses.replace(self, tensors=cut)

    def add_gradient(
        self, totals: Sequence[Tensor | None], parts: Iterator[Tensor], rows: slice | None, heads: HeadLists
    ) -> None:
        """Add gradients of some rows' and heads' tensors (a part for each total that is there) to the totals."""
        for i, total in enumerate(totals):
            if total is None:
                continue
            part = next(parts)
            if i in self.by_head:
                add_heads(total, heads, 0, part.unflatten(0, (len(heads), -1)))
            elif i in self.by_row and rows is not None:
                total[:, rows].add_(part)
            else:
                total.add_(part)


@dataclass(frozen=True)
class _ModuleOfHeads:
    """What a module computes, with other tensors in the place of its parameters: a shell around those runs."""

    module: torch.nn.Module

    def __call__(self, heads: Tensor, *tensors: Tensor) -> Tensor:
        kind = type(self.module)
        shell = torch.nn.Module.__new__(kind)
        shell.__dict__.update(self.module.__dict__)
        names = [name for name, _ in self.module.named_parameters(recurse=False)]
        shell.__dict__["_parameters"] = dict(zip(names, tensors, strict=True))
        result: Tensor = kind.forward(shell, heads)
        return result
