"""Heads that are projected already, in the place of a projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.projections.heads import add_heads, copy_heads
from upipe_integrations.schedule import HeadChunk


@dataclass(frozen=True)
class GivenHeads:
    """Heads that are projected already, in the place of a :class:`Projection`.

    Args:
        tensor: `[B, L, N, D]` of any strides with D contiguous.
    """

    tensor: Tensor

    @property
    def head_dim(self) -> int:
        """D."""
        return self.tensor.shape[3]

    def tensors(self) -> list[Tensor | None]:
        """The one tensor, like ``Projection.tensors``."""
        return [self.tensor]

    def with_tensors(self, tensors: Iterator[Tensor | None]) -> GivenHeads:
        """Another tensor in its place."""
        return GivenHeads(next_tensor(tensors))

    def gradient(self, wanted: Iterator[bool]) -> GivenHeadsGradient:
        """Zero gradient, or none where `wanted` says so."""
        return GivenHeadsGradient(torch.zeros_like(self.tensor) if next(wanted) else None)

    def shape_of(self, x: Tensor | None) -> tuple[int, int]:
        """(B, L)."""
        return self.tensor.shape[0], self.tensor.shape[1]

    def write(self, x: Tensor | None, chunk: HeadChunk, send: Tensor) -> None:
        """Write the chunk's heads to a send buffer `[C, L, B, n, D]` of any strides."""
        copy_heads(self.tensor, chunk.by_rank, 2, send.permute(2, 1, 0, 3, 4))


@dataclass
class GivenHeadsGradient:
    """The gradient of :class:`GivenHeads`, written stage by stage."""

    tensor: Tensor | None

    def tensors(self) -> list[Tensor | None]:
        """In the order of ``GivenHeads.tensors``."""
        return [self.tensor]

    def add(
        self, received: Tensor, x: Tensor | None, chunk: HeadChunk, rows: slice | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Add the chunk's gradient `[C, L, B, n, D]` where its heads are; there is no x to have a gradient."""
        if self.tensor is not None:
            add_heads(self.tensor, chunk.by_rank, 2, received.permute(2, 1, 0, 3, 4))
        return None


def next_tensor(tensors: Iterator[Tensor | None]) -> Tensor:
    return is_there(next(tensors))


def is_there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
