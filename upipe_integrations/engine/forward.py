"""The stage loop forward.

Per stage (arXiv 2602.21196, section 3): project some query heads of every rank and the KV heads they need, rotate them
into a send buffer, all-to-all to head shards, attend over the whole sequence, all-to-all back, write (or add through
the output projection). One stage's tensors exist at a time, so attention intermediates are O(chunk_heads), not
O(heads); that is why forward and backward are written out instead of left to autograd, which would keep every stage. A
``del`` here is a promise that tests/test_memory.py holds.

Shapes: B batch, L rows of the sequence on this rank, C ranks, S = C * L, H query heads over all ranks, n query heads
and v KV heads of one rank in one stage, D and Dv head sizes, Y the output size.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.engine.attend import OpenKV, StageAttention
from upipe_integrations.engine.call import Call
from upipe_integrations.engine.travel import (
    HeadsToSend,
    Return,
    Sent,
    SentBack,
    Travel,
    by_exchange,
    widths,
    with_all_rows,
    zero_padding,
)
from upipe_integrations.projections.heads import put_heads
from upipe_integrations.projections.output import OutputProjection
from upipe_integrations.projections.sums import Sum
from upipe_integrations.schedule import HeadChunk, Stage


def queries_of(call: Call, stage: Stage) -> HeadsToSend:
    """The stage's query heads."""
    return HeadsToSend(call.q, stage.q)


def kv_of(call: Call, stage: Stage) -> list[HeadsToSend]:
    """The KV heads that the stage opens: none where those of the stage before serve it."""
    return [HeadsToSend(call.k, stage.kv), HeadsToSend(call.v, stage.kv)] if stage.opens_kv else []


@dataclass
class SavedForBackward:
    """What forward keeps for backward.

    Args:
        out: `[B, L, H, Dv]`, what was attended.
        lses: of each stage, `[B, n, S]`.
        heads: what stages received, in the order in which it arrived, `[S, B, all n, D]`; given away.
    """

    out: Tensor
    lses: list[Tensor]
    heads: deque[Tensor]

    @classmethod
    def of(cls, call: Call, kept: list[Tensor]) -> SavedForBackward:
        """From `[B, L, H * Dv]` and what else :func:`run_forward` returns; the list is emptied."""
        schedule = call.staging.schedule
        first_heads = 1 + len(schedule.stages)
        saved = cls(kept[0].unflatten(2, (schedule.heads, -1)), kept[1:first_heads], deque(kept[first_heads:]))
        kept.clear()
        return saved


class _ForwardTravel(Travel[Stage, tuple[Sent | None, Sent]]):
    """(K and V where the stage opens them, q) of every stage."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.staging.schedule.stages, overlap=call.staging.mode.overlaps_sending)
        self._call = call

    def send(self, step: Stage) -> tuple[Sent | None, Sent]:
        """See :class:`Travel`."""
        kv = kv_of(self._call, step)
        return Sent(kv, self._call) if kv else None, Sent([queries_of(self._call, step)], self._call)


class _ForwardReturn(Return[Stage, SentBack]):
    """What every stage attended."""

    def __init__(self, call: Call, result: _AllHeads | _SummedOutput) -> None:
        super().__init__(overlap=call.staging.mode.overlaps_return)
        self._result = result

    def take(self, step: Stage, back: SentBack) -> None:
        """See :class:`Return`."""
        self._result.add(back.receive(), step.q)


class _AllHeads:
    """The attended heads of all stages, `[B, L, H, Dv]`."""

    def __init__(self, call: Call) -> None:
        self._shape = (*call.q.shape, call.staging.schedule.heads, call.v.head_dim)
        self._attended: Tensor | None = None

    def add(self, received: Tensor, chunk: HeadChunk) -> None:
        """Write the chunk's heads `[C, L, B, n, Dv]`."""
        if self._attended is None:  # not before the first stage is over
            self._attended = received.new_empty(self._shape)
        put_heads(self._attended, chunk, 2, received.permute(2, 1, 0, 3, 4))

    def take(self) -> Tensor:
        """`[B, L, H * Dv]`."""
        assert self._attended is not None
        return self._attended.flatten(2, 3)


class _SummedOutput:
    """y `[B, L, Y]`, the attended heads of all stages through the output projection."""

    def __init__(self, call: Call, output: OutputProjection) -> None:
        self._output, self._dtype, self._shape = output, call.dtype, call.q.shape
        stages = len(call.staging.schedule.stages)
        self._y = Sum(call.staging.mode.y_sum_dtype(call.dtype, stages))

    def add(self, received: Tensor, chunk: HeadChunk) -> None:
        """Add the chunk's heads `[C, L, B, n, Dv]`, projected; repeated ones are made zero in place."""
        zero_padding(received, chunk)
        self._output.add(self._y, received, chunk)

    def take(self) -> Tensor:
        """y, with the bias."""
        y = self._y.take()
        if self._output.bias is not None:
            y += self._output.bias.to(y.dtype)
        return y.to(self._dtype).view(*self._shape, -1)


def _forward(call: Call, save_heads: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
    """What :func:`run_forward` returns, for a call with all rows of x; what stages receive is added to `save_heads`."""
    staging, output = call.staging, call.output_in_loop
    result = _AllHeads(call) if output is None else _SummedOutput(call, output)
    lses = []
    travel, returned, kv = _ForwardTravel(call), _ForwardReturn(call, result), OpenKV(call)

    for stage in staging.schedule.stages:
        arriving_kv, arriving_q = travel.receive()
        if arriving_kv is not None:
            kv.open(arriving_kv.heads(save_heads), stage)
        (q,) = arriving_q.heads(save_heads)  # [B, n, S, D]
        travel.send_next()
        out, lse = StageAttention(call, stage, q).forward(q, kv.k, kv.v)  # [B, n, S, Dv], [B, n, S]
        del q
        if stage.closes_kv:
            kv.close()
        lses.append(lse)
        returned.finish()
        back = SentBack(out, call)
        del out
        returned.give(stage, back)
        del back
    returned.finish()
    return result.take(), lses


def run_forward(call: Call) -> tuple[Tensor, list[Tensor]]:
    """(what was attended, what backward needs besides where the mode keeps it: each stage's lse, and received heads).

    Attended is `[B, L, H * Dv]`, which backward needs too where the mode keeps it, or y `[B, L, Y]` where the output
    projection is in the loop; :func:`project` makes the result of it. See :func:`saved_like` for the shapes.
    """
    heads: list[Tensor] | None = [] if call.staging.mode.keeps_heads else None
    with torch.autocast(call.q.device.type, enabled=False):
        attended, lses = _forward(with_all_rows(call), heads)
    return attended, [*lses, *(heads or [])] if call.staging.mode.keeps_output else []


def project(call: Call, attended: Tensor) -> Tensor:
    """The result of :func:`run_forward`: `attended`, or y `[B, L, Y]` after an output projection after the loop."""
    if call.output_after is None:
        return attended
    with torch.autocast(attended.device.type, enabled=False):
        return call.output_after.of_all(attended)


def saved_like(call: Call, like: Tensor, rows: tuple[int, int]) -> list[Tensor]:
    """Empty tensors like those that :func:`run_forward` returns besides what was attended, for B and L `rows`.

    `like` is on the device of the call's tensors.
    """
    staging, (B, L) = call.staging, rows
    S = L * staging.schedule.ranks
    lses, heads = [], []
    for stage in staging.schedule.stages:
        q = like.new_empty(B, stage.q.per_rank, S, call.q.head_dim, dtype=call.dtype)
        lses.append(staging.kernel.lse_like(q))
        kv = kv_of(call, stage)
        for items in [*(by_exchange(kv) if kv else []), [queries_of(call, stage)]]:
            heads.append(like.new_empty(S, B, sum(widths(items)), items[0].source.head_dim, dtype=call.dtype))
    return [*(lses if staging.mode.keeps_output else []), *(heads if staging.mode.keeps_heads else [])]
