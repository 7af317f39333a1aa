"""Where a stage's heads come from, and what becomes of their gradient: one interface for all that is sent.

Shapes: B batch, L rows of the sequence on this rank, C ranks, n heads of one rank in one stage, D head size. Exchange
buffers are `[C, L, B, n, D]`: piece c is for rank c.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from upipe_integrations.projections.structure import HoldsTensors, Totals
from upipe_integrations.schedule import HeadChunk

Factors = tuple[Tensor, Tensor]
"""`[B * L, heads * D]` and `[heads * D, E]`, whose product is a contribution to dx."""


class HeadSource(HoldsTensors, ABC):
    """Query, key or value heads of this rank's rows, of which a stage takes some."""

    @property
    @abstractmethod
    def head_dim(self) -> int:
        """D, the size of a head as it is sent."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(B, L)."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the heads are."""

    @property
    @abstractmethod
    def input(self) -> Tensor | None:
        """x `[B, L, E]` that the heads are projected from; None where they are projected already."""

    @property
    @abstractmethod
    def accumulates(self) -> bool:
        """Whether a weight's gradient is added to a tensor of the caller's."""

    @abstractmethod
    def reading(self, x: Tensor) -> HeadSource:
        """The same heads projected from another x; itself where they are projected already."""

    @abstractmethod
    def at_rows(self, rows: slice) -> HeadSource:
        """The heads of some of this rank's rows."""

    @abstractmethod
    def write(self, chunk: HeadChunk, send: Tensor) -> None:
        """Write the chunk's heads to a send buffer `[C, L, B, n, D]` of any strides."""

    @abstractmethod
    def gradient(self, totals: Totals) -> HeadGradient:
        """What adds the gradients of sent heads to `totals`."""


class HeadGradient(ABC):
    """Adds the gradients of a source's heads, as they come back, to the totals of the tensors they were made of."""

    @abstractmethod
    def add(self, received: Tensor, chunk: HeadChunk, rows: slice | None = None) -> Factors | None:
        """Add what the gradient `[C, L, B, n, D]` of the chunk's heads contributes.

        Returns the factors of dx, or None where the heads are not projected here. With `rows`, `received` is of these
        rows only, and gradients of weights are collected in float32 until :meth:`end_blocks`.
        """

    @abstractmethod
    def end_blocks(self, chunk: HeadChunk) -> None:
        """Add what was collected of the chunk, block of rows by block of rows."""
