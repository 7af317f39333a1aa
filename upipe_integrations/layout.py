"""Which rows of a sequence a rank holds: the one object that says so, deals tensors out and collects them.

Kernels always see the natural order: after an exchange the engine reorders from the ranks' rows to it, and
back before the return.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.constants import made_once


@dataclass(frozen=True)
class Layout:
    """A layout of the sequence over C ranks; make it with one of the class methods.

    Args:
        half_chunks: whether a span is cut in 2C chunks of which rank r holds chunks r and 2C-1-r, so that
            causal work is even (zigzag); else in C chunks of which rank r holds chunk r.
        documents: boundaries ``(0, ..., S)`` of the spans that are cut each for itself; None is one span.
    """

    half_chunks: bool = False
    documents: tuple[int, ...] | None = None

    @classmethod
    def contiguous(cls) -> Layout:
        """Rank r holds rows ``[r * S / C, (r + 1) * S / C)``: Ulysses, DeepSpeed."""
        return cls()

    @classmethod
    def zigzag(cls) -> Layout:
        """2C half-chunks, rank r holds r and 2C-1-r: Megatron's ``get_batch_on_this_cp_rank``."""
        return cls(half_chunks=True)

    @classmethod
    def packed_zigzag(cls, documents: tuple[int, ...]) -> Layout:
        """Zigzag within each (padded) document: Megatron's packed sequences (THD).

        Whether documents attend each other is the kernel's matter (``AttentionSpec.documents``), not the
        layout's: a whole-sequence zigzag of packed documents is :meth:`zigzag`.
        """
        return cls(half_chunks=True, documents=documents)

    @property
    def is_natural(self) -> bool:
        """Whether ranks' rows one after the other are the sequence itself."""
        return not self.half_chunks and self.documents is None

    def check(self, length: int, ranks: int) -> None:
        """Raise ValueError unless a sequence of `length` can be laid out on `ranks` ranks."""
        pieces = 2 * ranks if self.half_chunks else ranks
        boundaries = self.documents or (0, length)
        if boundaries[0] != 0 or boundaries[-1] != length:
            raise ValueError(f"layout documents {boundaries}: must start at 0 and end at the sequence length {length}.")
        for a, b in itertools.pairwise(boundaries):
            if b <= a or (b - a) % pieces:
                what = "a sequence" if self.documents is None else f"the document [{a}, {b})"
                raise ValueError(
                    f"{what} of {b - a} tokens on {ranks} sequence-parallel ranks: {pieces} must divide it. "
                    f"Pad it on the right with {(a - b) % pieces} tokens that are not trained on."
                )

    def rows(self, rank: int, length: int, ranks: int) -> Tensor:
        """The natural row numbers that `rank` holds, in the order in which it holds them: `[length / ranks]`."""
        self.check(length, ranks)
        pieces = 2 * ranks if self.half_chunks else ranks
        mine = (rank, pieces - 1 - rank) if self.half_chunks else (rank,)
        boundaries = self.documents or (0, length)
        parts = []
        for a, b in itertools.pairwise(boundaries):
            size = (b - a) // pieces
            parts += [torch.arange(a + piece * size, a + (piece + 1) * size) for piece in mine]
        return torch.cat(parts)

    def row_of(self, rank: int, row: int, length: int, ranks: int) -> int:
        """The natural number of a rank's `row`, in a layout of one span."""
        assert self.documents is None
        rows = length // ranks
        if not self.half_chunks:
            return rank * rows + row
        half = rows // 2
        return rank * half + row if row < half else (2 * ranks - 1 - rank) * half + row - half

    def deal(self, tensor: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
        """The rows of a whole `tensor` along `dim` that `rank` holds."""
        return tensor.index_select(dim, self.rows(rank, tensor.shape[dim], ranks).to(tensor.device))

    def collect(self, parts: list[Tensor], dim: int) -> Tensor:
        """The whole tensor from every rank's part, in natural order; the inverse of :meth:`deal`."""
        whole = torch.cat(parts, dim)
        return self.to_natural(whole, dim, len(parts))

    def to_natural(self, by_rank: Tensor, dim: int, ranks: int) -> Tensor:
        """All ranks' rows one after the other -> natural order; the same tensor where they are the same."""
        if self.is_natural:
            return by_rank
        return by_rank.index_select(dim, made_once(_slots, (self, by_rank.shape[dim], ranks), by_rank))

    def from_natural(self, natural: Tensor, dim: int, ranks: int) -> Tensor:
        """The inverse of :meth:`to_natural`."""
        if self.is_natural:
            return natural
        return natural.index_select(dim, made_once(_order, (self, natural.shape[dim], ranks), natural))


def _order(of: tuple[Layout, int, int], dtype: torch.dtype) -> Tensor:
    """The natural row of each slot, slots being all ranks' rows one after the other, of (layout, length, ranks)."""
    layout, length, ranks = of
    return torch.cat([layout.rows(rank, length, ranks) for rank in range(ranks)]).to(dtype)


def _slots(of: tuple[Layout, int, int], dtype: torch.dtype) -> Tensor:
    """The slot of each natural row."""
    return torch.argsort(_order(of, dtype))
