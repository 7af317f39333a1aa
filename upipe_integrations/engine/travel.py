"""Heads on their way between sequence shards and head shards: packed, sent, received, saved, and sent back.

Shapes: C ranks, L rows of the sequence on this rank, S = C * L, B batch, n heads of one rank in one stage, D head size.
One stage's buffers, with q and, where the stage opens KV heads, k and v beside each other in one exchange::

    this rank's rows, all ranks' heads                 all rows, this rank's heads
    send     [C, L, B, n, D]     -- all-to-all -->     received [C, L, B, n, D] = [S, B, n, D]
             piece c: my rows of                                piece c: rank c's rows of
             rank c's heads                                     my heads

The way back is the same exchange: what is attended `[B, n, S, D]` is sent as `[C, L, B, n, D]`, piece c being rank c's
rows, and received as this rank's rows of all ranks' heads.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from upipe_integrations.all_to_all import InFlight, gather_rows, sequence_pieces, start_exchange
from upipe_integrations.engine.attend import TileSum
from upipe_integrations.engine.call import Call, Staging
from upipe_integrations.projections.source import HeadSource
from upipe_integrations.projections.sums import RunningSum
from upipe_integrations.schedule import HeadChunk


@dataclass(frozen=True)
class HeadsToSend:
    """Some heads of a source.

    Args:
        source: where they come from.
        chunk: which they are.
        zero_padding: whether repeated heads are sent as zeros.
        alone: whether they travel in a buffer of their own, where others share one.
    """

    source: HeadSource
    chunk: HeadChunk
    zero_padding: bool = False
    alone: bool = False


def by_exchange(items: Sequence[HeadsToSend]) -> list[Sequence[HeadsToSend]]:
    """What goes in one exchange: neighbours side by side where all heads have one size, else each in its own."""
    alike = len({item.source.head_dim for item in items}) == 1
    groups: list[list[HeadsToSend]] = []
    for item in items:
        if groups and alike and not item.alone and not groups[-1][-1].alone:
            groups[-1].append(item)
        else:
            groups.append([item])
    return [tuple(group) for group in groups]


def widths(items: Sequence[HeadsToSend]) -> list[int]:
    """Heads of one rank, by item."""
    return [item.chunk.per_rank for item in items]


class Arriving(ABC):
    """Heads that were sent, or saved when they arrived before: asked for once, and then given away."""

    def __init__(self, exchanges: list[Sequence[HeadsToSend]]) -> None:
        self._widths = [widths(exchange) for exchange in exchanges]

    @abstractmethod
    def natural(self) -> list[Tensor]:
        """All heads of each exchange over the whole sequence in natural order, `[S, B, all n, D]`."""

    def heads(self, save_in: list[Tensor] | None = None) -> list[Tensor]:
        """Each item's heads `[B, n, S, D]`: views of :meth:`natural`, which is added to `save_in`."""
        natural = self.natural()
        if save_in is not None:
            save_in += natural
        by_item = [t for whole, of in zip(natural, self._widths, strict=True) for t in whole.split(of, 2)]
        return [t.permute(1, 2, 0, 3) for t in by_item]


class Sent(Arriving):
    """Heads that are sent when this is made."""

    def __init__(self, items: Sequence[HeadsToSend], call: Call) -> None:
        exchanges, staging = by_exchange(items), call.staging
        super().__init__(exchanges)
        self._staging = staging
        ranks, overlap = staging.schedule.ranks, staging.mode.overlaps_sending
        self._in_flight = [
            start_exchange(_packed(exchange, ranks, call.dtype), staging.group, overlap=overlap)
            for exchange in exchanges
        ]

    def natural(self) -> list[Tensor]:
        """See :class:`Arriving`."""
        layout, ranks = self._staging.layout, self._staging.schedule.ranks
        return [layout.to_natural(received.flatten(0, 1), 0, ranks) for received in self._received()]

    def pieces(self) -> Tensor:
        """All items side by side as received, `[C, L, B, all n, D]`, where they went in one exchange."""
        (received,) = self._received()
        return received

    def _received(self) -> Iterator[Tensor]:
        in_flight, self._in_flight = self._in_flight, []
        return (exchange.wait() for exchange in in_flight)


class Saved(Arriving):
    """Heads that forward saved, taken from the front of `saved`, where they are in the order in which they arrived."""

    def __init__(self, items: Sequence[HeadsToSend], saved: deque[Tensor]) -> None:
        exchanges = by_exchange(items)
        super().__init__(exchanges)
        self._natural = [saved.popleft() for _ in exchanges]

    def natural(self) -> list[Tensor]:
        """See :class:`Arriving`."""
        natural, self._natural = self._natural, []
        return natural


def _packed(items: Sequence[HeadsToSend], ranks: int, dtype: torch.dtype) -> Tensor:
    """The items' heads side by side in a send buffer `[C, L, B, all n, D]`."""
    source = items[0].source
    B, L = source.shape
    send = torch.empty(ranks, L, B, sum(widths(items)), source.head_dim, dtype=dtype, device=source.device)
    for item, target in zip(items, send.split(widths(items), 3), strict=True):
        item.source.write(item.chunk, target)
        if item.zero_padding:
            zero_padding(target, item.chunk)
    return send


def zero_padding(pieces: Tensor, chunk: HeadChunk) -> None:
    """Make the repeated heads of `[C, L, B, n, D]` zero."""
    for position in chunk.padding:
        rank, j = divmod(position, chunk.per_rank)
        pieces[rank, :, :, j].zero_()  # an assigned 0 is a tensor of the host


def pieces_of(attended: Tensor, staging: Staging) -> Tensor:
    """`[B, n, S, D]` -> `[C, L, B, n, D]`, to be sent back."""
    ranks = staging.schedule.ranks
    return sequence_pieces(staging.layout.from_natural(attended, 2, ranks), ranks)


class SentBack:
    """Heads on their way back: this rank's, over the whole sequence, to each rank's rows.

    They are sent when they are asked for; with ``overlap="both"`` when this is made.

    Args:
        heads: `[B, n, S, D]`, a sum of such, or pieces `[C, L, B, n, D]`; given away.
        call: the call.
    """

    def __init__(self, heads: Tensor | RunningSum | TileSum, call: Call) -> None:
        self._call = call
        self._heads: Tensor | RunningSum | TileSum | None = heads
        self._in_flight = self._start() if call.staging.mode.overlaps_return else None

    def receive(self) -> Tensor:
        """`[C, L, B, n, D]`, piece c being this rank's rows of rank c's heads; once."""
        in_flight, self._in_flight = self._in_flight or self._start(), None
        return in_flight.wait()

    def _start(self) -> InFlight:
        staging, heads = self._call.staging, self._heads
        assert heads is not None
        self._heads = None
        if not isinstance(heads, Tensor):
            heads = heads.take(self._call.dtype)
        if heads.dim() == 4:
            heads = pieces_of(heads, staging)
        return start_exchange(heads, staging.group, overlap=staging.mode.overlaps_return)


def with_all_rows(call: Call) -> Call:
    """The call with x in the computing precision and, where ranks split its rows once more, all of this rank's rows."""
    x = call.q.input
    if x is None:
        return call
    rows = gather_rows(x.to(call.dtype), call.staging.x_group)
    return dataclasses.replace(call, q=call.q.reading(rows), k=call.k.reading(rows), v=call.v.reading(rows))


_Step = TypeVar("_Step")
_Travelling = TypeVar("_Travelling")


class Travel(ABC, Generic[_Step, _Travelling]):
    """What the steps of a pass need, sent in their order: when a step's turn comes or, with overlap, one step ahead.

    A step calls :meth:`receive` for what it needs, waits for that, and calls :meth:`send_next` before it computes.
    """

    def __init__(self, steps: Sequence[_Step], *, overlap: bool) -> None:
        self._to_send = deque(steps)
        self._overlap = overlap
        self._travelling: deque[_Travelling] = deque()

    @abstractmethod
    def send(self, step: _Step) -> _Travelling:
        """Send what `step` needs."""

    def receive(self) -> _Travelling:
        """What the next step needs."""
        if not self._travelling:
            return self.send(self._to_send.popleft())
        return self._travelling.popleft()

    def send_next(self) -> None:
        """With overlap, send what the step after this one needs, to travel while this one computes."""
        if self._overlap and self._to_send:
            self._travelling.append(self.send(self._to_send.popleft()))


class Return(ABC, Generic[_Step, _Travelling]):
    """What the steps of a pass send back, taken when a step is over or, with overlap, when the next one has attended.

    A step calls :meth:`finish` when it has attended, and :meth:`give` at its end; after the last one comes one more
    :meth:`finish`.
    """

    def __init__(self, *, overlap: bool) -> None:
        self._overlap = overlap
        self._given: tuple[_Step, _Travelling] | None = None

    @abstractmethod
    def take(self, step: _Step, back: _Travelling) -> None:
        """Wait for what `step` sent back, and use it."""

    def give(self, step: _Step, back: _Travelling) -> None:
        """`step` sends back what is in `back`."""
        self._given = step, back
        del back
        if not self._overlap:
            self.finish()

    def finish(self) -> None:
        """Take what has been given and not taken."""
        given, self._given = self._given, None
        if given is not None:
            self.take(*given)
