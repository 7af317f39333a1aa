"""Which rows of a sequence a context-parallel rank holds, and where the documents of a packed one end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upipe_integrations import Layout

_REMEMBERED = "_upipe_packing"


@dataclass(frozen=True)
class Packing:
    """How one microbatch lies on the context-parallel ranks.

    Of one sequence a rank holds two half-chunks (zigzag); of packed documents that are cut ``"each"``, two of every
    document. On two ranks, documents of 4 and of 8 rows::

        row                0  1  2  3 | 4  5  6  7  8  9  10 11
        half-chunk         a  b  c  d | a  a  b  b  c  c  d  d
        rank 0 holds       0        3 | 4  5              10 11    a and d of each document
        rank 1 holds          1  2    |       6  7  8  9           b and c
        position           0  1  2  3 | 0  1  2  3  4  5  6  7     in its document, for the rotary embedding

    So rank 0's rows are 0 3 4 5 10 11, in this order.

    Cut as a ``"whole"``, the 12 rows are one zigzag, and documents only say who attends whom.

    Args:
        layout: which rows each rank holds.
        documents: boundaries of the documents, which do not attend each other; None is one sequence per batch row.
        rank: of this process in the context-parallel group.
        ranks: of that group.
        length: rows of the whole sequence.
    """

    layout: Layout
    documents: tuple[tuple[int, ...], ...] | None
    rank: int
    ranks: int
    length: int

    def table_indices(self, table_rows: int) -> Tensor | None:
        """Which entries of a rotary table are those of this rank's rows, `[rows of this rank]`.

        A table as long as the packed sequence has an entry for each of its rows, a shorter one for each position in a
        document (Megatron's ``_apply_rotary_pos_emb_thd``). None where the table is cut for this rank already.
        """
        if self.documents is None:
            return None
        rows = self.layout.rows(self.rank, self.length, self.ranks)
        boundaries = torch.tensor(self.documents[0])
        if table_rows == self.length and len(self.documents[0]) > 2:
            return rows
        starts = boundaries[torch.searchsorted(boundaries, rows, right=True) - 1]
        return rows - starts


def read_packing(packed_seq_params: Any, rows: int, group: Any, documents_cut: str) -> Packing:
    """The packing of a microbatch of which this rank holds `rows` rows.

    Args:
        packed_seq_params: Megatron's ``PackedSeqParams``, or None.
        rows: those of this rank.
        group: the context-parallel group.
        documents_cut: ``UPipeOptions.documents_cut``.

    Raises:
        ValueError: a format other than ``thd``, a group of its own, or boundaries that do not fit.
    """
    ranks, rank = group.size(), group.rank()
    length = rows * ranks
    natural = Layout.zigzag() if ranks > 1 else Layout.contiguous()
    if packed_seq_params is None:
        return Packing(natural, None, rank, ranks, length)
    if packed_seq_params.qkv_format != "thd":
        raise ValueError(f"upipe: packed sequences in format {packed_seq_params.qkv_format!r}: UPipe serves 'thd'.")
    own = getattr(packed_seq_params, "cp_group", None)
    if own is not None and own is not group:
        raise ValueError(
            "upipe: packed sequences with a context-parallel group of their own (--hybrid-context-parallel): UPipe's "
            "stages are planned for one group. Use --context-parallel-impl native."
        )
    remembered: dict[object, Packing] = getattr(packed_seq_params, _REMEMBERED, {})
    key = (length, ranks, documents_cut)
    if key not in remembered:
        boundaries = _boundaries(packed_seq_params, length)
        layout = natural
        if documents_cut == "each" and ranks > 1:
            layout = Layout.packed_zigzag(boundaries)
        remembered[key] = Packing(layout, (boundaries,), rank, ranks, length)
        setattr(packed_seq_params, _REMEMBERED, remembered)  # for the other layers: reading lengths waits for the GPU
    return remembered[key]


def _boundaries(packed_seq_params: Any, length: int) -> tuple[int, ...]:
    """The boundaries of the documents, ``(0, ..., length)``; of the padded ones where they are padded.

    Raises:
        ValueError: they do not rise to `length`.
    """
    lengths = packed_seq_params.cu_seqlens_q_padded
    if lengths is None:
        lengths = packed_seq_params.cu_seqlens_q
    found = [int(n) for n in lengths.flatten().tolist()]
    # Megatron pads the list itself by repeating its last entry.
    found = [0, *(n for before, n in itertools.pairwise(found) if n != before)]
    if found != sorted(found) or found[-1] != length:
        raise ValueError(
            f"upipe: documents that end at {found[1:]} in a packed sequence of {length} rows over all context-parallel "
            "ranks: ends must rise, the last to all rows. Give padding to the last document (cu_seqlens_q_padded)."
        )
    return tuple(found)
