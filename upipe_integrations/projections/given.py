"""Heads that are projected already."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.projections.heads import add_heads, copy_heads
from upipe_integrations.projections.source import Factors, HeadGradient, HeadSource
from upipe_integrations.projections.structure import Totals
from upipe_integrations.schedule import HeadChunk


@dataclass(frozen=True)
class GivenHeads(HeadSource):
    """Heads that a caller has projected and rotated.

    Args:
        tensor: `[B, L, N, D]` of any strides with D contiguous.
    """

    holds = ("tensor",)

    tensor: Tensor

    @property
    def head_dim(self) -> int:
        """D."""
        return self.tensor.shape[3]

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L)."""
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the tensor is."""
        return self.tensor.device

    @property
    def input(self) -> None:
        """None: there is nothing to project."""
        return None

    def reading(self, x: Tensor) -> GivenHeads:
        """Itself."""
        return self

    @property
    def accumulates(self) -> bool:
        """See :class:`HeadSource`."""
        return False

    def at_rows(self, rows: slice) -> GivenHeads:
        """The heads of some rows."""
        return GivenHeads(self.tensor[:, rows])

    def write(self, chunk: HeadChunk, send: Tensor) -> None:
        """`[B, L, N, D]` -> the chunk's heads in `[C, L, B, n, D]`."""
        copy_heads(self.tensor, chunk.by_rank, 2, send.permute(2, 1, 0, 3, 4))

    def gradient(self, totals: Totals) -> GivenHeadsGradient:
        """See :class:`HeadSource`."""
        return GivenHeadsGradient(totals.of(self.tensor))


@dataclass(frozen=True)
class GivenHeadsGradient(HeadGradient):
    """The gradient of :class:`GivenHeads`, written stage by stage.

    Args:
        total: `[B, L, N, D]`, or None where none is wanted.
    """

    total: Tensor | None

    def add(self, received: Tensor, chunk: HeadChunk, rows: slice | None = None) -> Factors | None:
        """`[C, L, B, n, D]` -> added where the chunk's heads are in `[B, L, N, D]`; there is no x."""
        if self.total is not None:
            total = self.total if rows is None else self.total[:, rows]
            add_heads(total, chunk.by_rank, 2, received.permute(2, 1, 0, 3, 4))
        return None

    def end_blocks(self, chunk: HeadChunk) -> None:
        """Nothing was collected: gradients were written where they belong."""
