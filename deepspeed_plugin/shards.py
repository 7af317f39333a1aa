"""What the ranks of a group say of their shards each time the model is entered, and what all of them conclude.

One small all-gather per forward, on all ranks alike, so that bad input raises the same error everywhere before any
attention exchange and nothing hangs. Positions and masks are gathered whole only where documents are packed or tokens
are masked.

Shapes: B batch, L rows of the sequence on this rank, S = L * ranks.
"""

from __future__ import annotations

import dataclasses
import enum
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upipe_integrations.all_to_all import Group, gather_integers, gather_over_group
from upipe_integrations.sharding import content_digest, documents_in

Documents = tuple[tuple[int, ...], ...]
"""Boundaries of packed documents by batch row, as in ``AttentionSpec.documents``."""

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What padding-free collators say of documents beside their positions."""


class _Fault(enum.IntEnum):
    """What can be wrong with one rank's input; the number travels to the other ranks."""

    NONE = 0
    NO_POSITIONS = 1
    POSITION_SHAPE = 2
    OTHER_MASK = 3
    NOT_CAUSAL = 4


_ADVICE = {
    _Fault.NO_POSITIONS: "position_ids are missing. The model would count from 0 on every rank; pass global ones: "
    "rank r of the group holds positions [r * L, (r + 1) * L) (UlyssesSPDataLoaderAdapter shards them for you).",
    _Fault.POSITION_SHAPE: "position_ids must be [batch or 1, rows of this rank]. A model whose positions have three "
    "components per token (mrope) also takes [4, batch, rows of this rank]: the plain positions, which tell documents "
    "apart, before its own three.",
    _Fault.OTHER_MASK: "attention_mask is not a [batch, rows of this rank] mask: custom masks are not supported. Leave "
    "it out, or remove the 'upipe' key.",
    _Fault.NOT_CAUSAL: "the model was called with is_causal = False: attention of every row to all others is not "
    "supported. Leave is_causal out, or remove the 'upipe' key.",
}
_NO_LENGTHS = 0


@dataclass(frozen=True)
class Shard:
    """What one rank says of its shard, in numbers.

    Attributes:
        batch, rows: B and L.
        fault: what is wrong with it already, of :class:`_Fault`.
        first: its first position.
        begins: whether every batch row starts at position 0.
        restarts: whether positions do not go on by one in every batch row, from the same position.
        largest: its largest position, which some rotary embeddings depend on.
        tokens: a digest of its tokens.
        masked: whether its attention mask is there and has something else than ones.
        lengths: a digest of the documents' boundaries that came as cu_seq_lens; 0 where none did.
    """

    batch: int
    rows: int
    fault: int = _Fault.NONE
    first: int = 0
    begins: int = 0
    restarts: int = 0
    largest: int = 0
    tokens: int = 0
    masked: int = 0
    lengths: int = _NO_LENGTHS

    @classmethod
    def of(cls, tokens: Tensor, positions: Tensor | None, mask: Any, options: dict[str, Any], *, mrope: bool) -> Shard:
        """This rank's.

        Args:
            tokens: input_ids `[B, L]`, or embeddings `[B, L, E]`.
            positions: position_ids as the model was given them, `[B or 1, L]`.
            mask: the attention mask.
            options: the model's further arguments by name.
            mrope: whether positions may have components, `[4, B, L]`.
        """
        B, L = tokens.shape[:2]
        fault = _fault(tokens, positions, mask, options, mrope=mrope)
        if fault != _Fault.NONE or positions is None:
            return cls(B, L, fault)
        plain = positions[0] if positions.dim() == 3 else positions
        own = positions[1:] if positions.dim() == 3 else positions
        first = plain[0, 0]
        expected = first + torch.arange(L, device=plain.device)
        numbers = [
            first,
            (plain[:, 0] == 0).all(),
            (plain != expected).any(),
            own.max(),
            content_digest(tokens if tokens.dim() == 2 else tokens[..., 0]).to(plain.device),
            (mask != 1).any().to(plain.device) if isinstance(mask, Tensor) else first.new_zeros(()),
        ]
        # The one wait for the device.
        start, begins, restarts, largest, content, masked = torch.stack([n.long() for n in numbers]).tolist()
        lengths = _lengths_digest(options)
        return cls(B, L, fault, start, begins, restarts, largest, content, masked, lengths)


def _fault(tokens: Tensor, positions: Tensor | None, mask: Any, options: dict[str, Any], *, mrope: bool) -> _Fault:
    if options.get("is_causal") is False:
        return _Fault.NOT_CAUSAL
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == tokens.shape[:2]):
        return _Fault.OTHER_MASK
    if positions is None:
        return _Fault.NO_POSITIONS
    dims = positions.dim()
    if mrope and dims == 3 and positions.shape[0] == WITH_COMPONENTS:
        dims = 2
    B, L = tokens.shape[:2]
    if dims != 2 or L == 0 or positions.shape[-1] != L or positions.shape[-2] not in (1, B):
        return _Fault.POSITION_SHAPE
    return _Fault.NONE


WITH_COMPONENTS = 4
"""Plain positions and the three components of a vision-language model's."""


def _lengths_digest(options: dict[str, Any]) -> int:
    """Of the boundaries that came; of several that differ, a number that no boundaries have."""
    given = {_boundaries_digest(_numbers(options[name])) for name in LENGTHS[:2] if options.get(name) is not None}
    return given.pop() if len(given) == 1 else -len(given)


def _numbers(lengths: Any) -> tuple[int, ...]:
    return tuple(lengths.tolist() if isinstance(lengths, Tensor) else lengths)


def _boundaries_digest(boundaries: Sequence[int]) -> int:
    return 1 + zlib.crc32(repr(tuple(boundaries)).encode())


@dataclass(frozen=True)
class Verdict:
    """What all ranks conclude.

    Attributes:
        packed: whether documents are packed.
        at_shards: whether documents begin where shards do and nowhere else, as positions local to a rank would.
        masked: whether some rank has a mask that is not all ones.
        largest: the largest position on any rank.
        lengths: digests of boundaries by rank.
    """

    packed: bool
    at_shards: bool
    masked: bool
    largest: int
    lengths: tuple[int, ...]


def agree(mine: Shard, group: Group, device: torch.device) -> Verdict:
    """What all ranks conclude, from what every rank says.

    Raises:
        ValueError: they do not hold the shards of one batch; on every rank alike, naming ranks and the remedy.
    """
    return _conclude([Shard(*said) for said in gather_integers(list(dataclasses.astuple(mine)), group, device)])


def _conclude(shards: list[Shard]) -> Verdict:
    for fault, advice in _ADVICE.items():
        faulty = [rank for rank, shard in enumerate(shards) if shard.fault == fault]
        if faulty:
            raise ValueError(f"upipe: on sequence-parallel ranks {faulty}: {advice}")
    L = shards[0].rows
    if len({(shard.batch, shard.rows) for shard in shards}) > 1:
        raise ValueError(
            "upipe: the ranks of a sequence-parallel group hold different shapes: batch "
            f"{[shard.batch for shard in shards]}, rows {[shard.rows for shard in shards]} by rank. All must hold "
            f"shards of the same batch; pad the sequence to a multiple of {len(shards)} before sharding it."
        )
    first, starts = [shard.first for shard in shards], [rank * L for rank in range(len(shards))]
    restarts, several = any(shard.restarts for shard in shards), len(shards) > 1
    all_begin = several and all(shard.begins for shard in shards)
    # Documents may begin just where shards do; a batch that was not sharded is there on every rank.
    unsharded = all_begin and len({shard.tokens for shard in shards}) == 1
    if first[0] != 0 or unsharded:
        raise ValueError(
            f"upipe: position_ids start at {first} by rank, but shards of {L} rows of one document start at {starts}: "
            "either the batch was not sharded (all ranks hold the same tokens then), or the shards are out of order. "
            "Shard the batch with its global position_ids (UlyssesSPDataLoaderAdapter does); to evaluate unsharded "
            "batches register Ulysses with disable_in_eval=True and call model.eval()."
        )
    return Verdict(
        packed=restarts or first != starts,
        at_shards=all_begin and not restarts,
        masked=any(shard.masked for shard in shards),
        largest=max(shard.largest for shard in shards),
        lengths=tuple(shard.lengths for shard in shards),
    )


def find_documents(
    verdict: Verdict, positions: Tensor, mask: Tensor | None, rows: Tensor, group: Group
) -> Documents | None:
    """The boundaries of packed documents; None where every batch row is one.

    Args:
        verdict: that of all ranks.
        positions: this rank's plain positions, `[B or 1, L]`.
        mask: this rank's attention mask `[B, L]`, or None.
        rows: any tensor `[B, L, ...]` on this rank's device.
        group: the ranks that hold the sequence.

    Raises:
        ValueError: positions jump, the mask hides a token that another one would attend to, or boundaries that
            came otherwise are not those of the positions; on every rank alike.
    """
    B, L = rows.shape[:2]
    documents = numbers = None
    if verdict.masked:
        mine = rows.new_ones(B, L, dtype=torch.int32) if mask is None else mask.to(torch.int32)
        numbers = torch.cat(gather_over_group(mine, group), 1)
        _check_padding(numbers)
    if verdict.packed:
        whole = torch.cat(gather_over_group(positions, group), 1)
        documents = documents_in(whole) if numbers is None else documents_in(whole.expand(B, -1), numbers == 0)
    if numbers is not None:
        _check_numbers(numbers, documents)
    S = L * len(verdict.lengths)
    expected = _boundaries_digest((0, S) if documents is None else documents[0])
    differing = [
        r for r, digest in enumerate(verdict.lengths) if digest != _NO_LENGTHS and (B > 1 or digest != expected)
    ]
    if differing:
        raise ValueError(
            f"upipe: on sequence-parallel ranks {differing}: cu_seq_lens are not the boundaries of the documents that "
            f"position_ids show: {documents or ((0, S),)}. Give position_ids that restart at 0 with each document, "
            "over the whole sequence, and leave cu_seq_lens and max_length out."
        )
    return documents


def _check_padding(mask: Tensor) -> None:
    """Raise ValueError unless what the whole mask `[B, S]` hides is behind all that it shows."""
    real = mask != 0
    wrong = (real[:, 1:] & ~real[:, :-1]).any(1).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"upipe: attention_mask hides tokens before others in batch rows {wrong}: only padding on the right is "
            "supported, which causal attention never looks at. Pad on the right (padding_side='right'), give padded "
            "tokens the label -100, or pack."
        )


def _check_numbers(mask: Tensor, documents: Documents | None) -> None:
    """Raise ValueError where the whole mask `[B, S]` numbers documents, and not those that positions show."""
    if not bool((mask > 1).any()):
        return
    changes = (mask[:, 1:] != mask[:, :-1]) & (mask[:, 1:] != 0)
    begins = torch.zeros_like(changes)
    for row, boundaries in enumerate(documents or ()):
        begins[row, [start - 1 for start in boundaries[1:-1]]] = True
    if not torch.equal(changes, begins & (mask[:, 1:] != 0)):
        raise ValueError(
            "upipe: attention_mask has numbers of documents that are not the documents that position_ids show. Give "
            "position_ids that restart at 0 with each document, and leave attention_mask out."
        )


# ---------------------------------------------------------------- what came from a loader that shards

_SHARD = "_upipe_shard"


def mark_shard(position_ids: Tensor) -> None:
    """Note on positions that they, and the batch that they came with, are a shard, also in evaluation."""
    setattr(position_ids, _SHARD, True)


def is_shard(position_ids: Any) -> bool:
    """Whether positions were marked."""
    return hasattr(position_ids, _SHARD)
