"""The stage loop backward: a stage is sent again, differentiated, and its gradients sent back.

Gradients of weights are written heads by heads as stages come, dx is added up in place. See ``forward`` for what a
stage is, and for the letters; E is the input size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from upipe_integrations.all_to_all import reduce_scatter_rows
from upipe_integrations.engine.attend import OpenKV, OpenKVInTiles, StageAttention
from upipe_integrations.engine.call import Call
from upipe_integrations.engine.forward import SavedForBackward, kv_of, queries_of
from upipe_integrations.engine.travel import (
    Arriving,
    HeadsToSend,
    Return,
    Saved,
    Sent,
    SentBack,
    Travel,
    with_all_rows,
    zero_padding,
)
from upipe_integrations.projections.given import GivenHeads
from upipe_integrations.projections.projection import collecting_dtype
from upipe_integrations.projections.source import Factors, HeadGradient, HeadSource
from upipe_integrations.projections.structure import Structure, Totals
from upipe_integrations.projections.sums import RunningSum, ScaledSum, Sum
from upipe_integrations.schedule import Stage


@dataclass(frozen=True)
class _Gradients:
    """What backward adds gradients to; None where none is wanted."""

    q: HeadGradient
    k: HeadGradient
    v: HeadGradient
    sinks: Tensor | None
    output: Tensor | None

    @classmethod
    def of(cls, call: Call, totals: Totals) -> _Gradients:
        """Zero gradients of what wants one."""
        output = call.output
        return cls(
            call.q.gradient(totals),
            call.k.gradient(totals),
            call.v.gradient(totals),
            totals.of(call.sinks),
            None if output is None else totals.of_weight(output.weight, output.accumulate_into),
        )


def _gradient_of_heads(call: Call, grad: Tensor) -> HeadSource:
    """The source of the gradient of the attended heads: `grad` itself, or what it is behind the output projection."""
    return GivenHeads(grad) if call.output is None else call.output.heads_of(grad, call.v.head_dim)


# ---------------------------------------------------------------- the way back


_Step = TypeVar("_Step")


@dataclass
class _Back:
    """What a step sends back: dq, over blocks with out beside it; out by itself; dK and dV where it closes them."""

    dq: SentBack
    out: SentBack | None = None
    dk: SentBack | None = None
    dv: SentBack | None = None


class _GradientReturn(Return[_Step, _Back]):
    """Adds what every step sends back to the gradients, and to `dx`."""

    def __init__(self, call: Call, grad: Tensor, grads: _Gradients, dx: RunningSum) -> None:
        super().__init__(overlap=call.staging.mode.overlaps_return)
        self._call, self._grad, self._grads, self._dx = call, grad, grads, dx

    def _of_kv(self, stage: Stage, back: _Back) -> list[Factors | None]:
        """What dK and dV add to dx; nothing where the step does not close them."""
        if back.dk is None or back.dv is None:
            return []
        of_k = self._grads.k.add(back.dk.receive(), stage.kv)
        return [of_k, self._grads.v.add(back.dv.receive(), stage.kv)]


# ---------------------------------------------------------------- a stage at once


class _BackwardTravel(Travel[Stage, tuple[Arriving | None, list[Arriving]]]):
    """(K and V where the stage opens them, q and dout and, where it was saved, out) of every stage."""

    def __init__(self, call: Call, grad: Tensor, saved: SavedForBackward | None) -> None:
        super().__init__(call.staging.schedule.stages, overlap=call.staging.mode.overlaps_sending)
        self._call = call
        self._dout = _gradient_of_heads(call, grad)
        self._saved = saved

    def send(self, step: Stage) -> tuple[Arriving | None, list[Arriving]]:
        """See :class:`Travel`."""
        call, saved = self._call, self._saved
        kv, q = kv_of(call, step), queries_of(call, step)
        alone = call.staging.kernel.copies_slices
        others = [HeadsToSend(self._dout, step.q, zero_padding=True, alone=alone)]
        if saved is not None:
            others.append(HeadsToSend(GivenHeads(saved.out), step.q, alone=alone))
        if saved is not None and call.staging.mode.keeps_heads:
            saved_kv = Saved(kv, saved.heads) if kv else None
            return saved_kv, [Saved([q], saved.heads), Sent(others, call)]
        return Sent(kv, call) if kv else None, [Sent([q, *others], call)]


class _StageReturn(_GradientReturn[Stage]):
    """Adds what every stage sends back: dq and, where the output projection in the loop wants it, out."""

    def take(self, step: Stage, back: _Back) -> None:
        """See :class:`Return`."""
        call, grads, output = self._call, self._grads, self._call.output_in_loop
        factors = [grads.q.add(back.dq.receive(), step.q)]
        if back.out is not None:
            assert output is not None and grads.output is not None
            out = back.out.receive()
            zero_padding(out, step.q)
            dw = output.weight_gradient(out, self._grad, torch.promote_types(call.dtype, grads.output.dtype))
            output.add_weight_gradient(grads.output, dw, call.v.head_dim, step.q)
            del out, dw
        _add_products(self._dx, factors + self._of_kv(step, back))


def _backward(call: Call, grad: Tensor, saved: SavedForBackward | None, grads: _Gradients) -> RunningSum:
    """dx `[B * L, E]`; adds to `grads`.

    `grad` is of the result: `[B, L, H, Dv]`, or `[B, L, Y]` after the output projection. `saved` is None where a
    stage's attention is run again.
    """
    staging = call.staging
    sends_out = call.output_in_loop is not None and grads.output is not None
    if saved is not None and call.output_after is not None and grads.output is not None:
        call.output_after.add_all_rows(grads.output, saved.out.flatten(2, 3), grad)
    dx = Sum(staging.mode.sum_dtype(call.dtype))
    travel, returned, kv = _BackwardTravel(call, grad, saved), _StageReturn(call, grad, grads, dx), OpenKV(call)
    lses = iter(saved.lses if saved is not None else ())

    for stage in staging.schedule.stages:
        arriving_kv, arriving = travel.receive()
        if arriving_kv is not None:
            kv.open(arriving_kv.heads(), stage)
        q, dout, *saved_out = (heads for sent in arriving for heads in sent.heads())  # [B, n, S, D or Dv]
        travel.send_next()
        attention = StageAttention(call, stage, q, grads.sinks)
        if saved is None:
            out, lse = attention.forward(q, kv.k, kv.v)
        else:
            (out,), lse = saved_out, next(lses)
        del saved_out
        dq, dk, dv = attention.backward(dout, q, kv.k, kv.v, out, lse)
        del q, dout, lse
        if not sends_out:
            del out
        attention.add_to(kv, dk, dv)
        del dk, dv
        if stage.closes_kv:
            kv.close()
        returned.finish()
        back = _Back(SentBack(dq, call))
        del dq
        if sends_out:
            back.out = SentBack(out, call)
            del out
        if stage.closes_kv:
            back.dk, back.dv = SentBack(kv.dk, call), SentBack(kv.dv, call)
        returned.give(stage, back)
        del back
    returned.finish()
    return dx


# ---------------------------------------------------------------- a stage in blocks of rows


@dataclass(frozen=True)
class _Block:
    """Some rows of every rank in one stage: K and V travel with the first block, their gradients with the last."""

    stage: Stage
    rows: slice
    first: bool
    last: bool


class _BlockTravel(Travel[_Block, tuple[Sent | None, Sent]]):
    """(K and V where they are opened, q and dout of the block's rows) of every block."""

    def __init__(self, call: Call, grad: Tensor) -> None:
        rows = call.q.shape[1]
        size = rows // call.staging.mode.query_blocks
        self.blocks = [
            _Block(stage, slice(first, first + size), first == 0, first + size == rows)
            for stage in call.staging.schedule.stages
            for first in range(0, rows, size)
        ]
        super().__init__(self.blocks, overlap=call.staging.mode.overlaps_sending)
        self._call = call
        self._dout = _gradient_of_heads(call, grad)

    def send(self, step: _Block) -> tuple[Sent | None, Sent]:
        """See :class:`Travel`."""
        call, stage = self._call, step.stage
        kv = kv_of(call, stage) if step.first else []
        q = HeadsToSend(call.q.at_rows(step.rows), stage.q)
        dout = HeadsToSend(self._dout.at_rows(step.rows), stage.q, zero_padding=True)
        return Sent(kv, call) if kv else None, Sent([q, dout], call)


class _BlockReturn(_GradientReturn[_Block]):
    """Adds what every block sends back: dq and out side by side."""

    def __init__(self, call: Call, grad: Tensor, grads: _Gradients, dx: RunningSum) -> None:
        super().__init__(call, grad, grads, dx)
        self._dw = Sum()

    def take(self, step: _Block, back: _Back) -> None:
        """See :class:`Return`."""
        call, grads, stage, rows = self._call, self._grads, step.stage, step.rows
        output, grad = call.output, self._grad
        assert output is not None
        pieces = back.dq.receive()
        dq, out = pieces.split([stage.q.per_rank, stage.q.per_rank], 3)
        if grads.output is not None:
            zero_padding(out, stage.q)
            self._dw.add_(output.weight_gradient(out, grad[:, rows], collecting_dtype(grad, rows)))
        factors = [grads.q.add(dq, stage.q, rows)]
        del pieces, dq, out
        _add_products(self._dx.at_rows(rows), factors)
        del factors
        if not step.last:
            return
        grads.q.end_blocks(stage.q)
        if grads.output is not None:
            output.add_weight_gradient(grads.output, self._dw.take(), call.v.head_dim, stage.q)
        _add_products(self._dx, self._of_kv(stage, back))


def _backward_in_blocks(call: Call, grad: Tensor, grads: _Gradients) -> RunningSum:
    """:func:`_backward` with the output projection in the loop and a stage's queries walked in blocks of rows.

    K and V of a stage are exchanged whole, queries and their gradients a block of every rank's rows at a time. Of the
    block, the piece that came from rank c is attended by itself. dq and the output take the places of q and dout in the
    buffer, and travel back in one exchange. dx is `[B, L, E]`.
    """
    staging = call.staging
    C, L = staging.schedule.ranks, call.q.shape[1]
    dx = _sum_over_blocks(call)
    travel, returned, kv = _BlockTravel(call, grad), _BlockReturn(call, grad, grads, dx), OpenKVInTiles(call)

    for block in travel.blocks:
        stage, rows = block.stage, block.rows
        arriving_kv, arriving = travel.receive()
        if arriving_kv is not None:
            kv.open(arriving_kv.heads())
        pieces = arriving.pieces()  # [C, rows, B, n of q and n of dout, D]
        travel.send_next()
        n = stage.q.per_rank
        attention = StageAttention(call, stage, pieces, grads.sinks)
        for c in range(C):
            start = staging.layout.row_of(c, rows.start, L * C, C)
            q, dout = (t.permute(1, 2, 0, 3) for t in pieces[c].split([n, n], 2))
            dq, out = attention.piece_backward(dout, q, kv, start)
            q.copy_(dq)
            dout.copy_(out)
            del q, dout, dq, out
        returned.finish()
        back = _Back(SentBack(pieces, call))
        del pieces
        if block.last and stage.closes_kv:
            kv.close()
            back.dk, back.dv = SentBack(kv.dk, call), SentBack(kv.dv, call)
        returned.give(block, back)
        del back
    returned.finish()
    return dx


def _sum_over_blocks(call: Call) -> RunningSum:
    """dx `[B, L, E]`, zero so far.

    A stage adds to it once for every block and once more, which in bfloat16 would tell.
    """
    dtype, x = call.staging.mode.sum_dtype(call.dtype), call.q.input
    assert x is not None
    if dtype == torch.bfloat16:
        return ScaledSum.in_place_of(x.new_zeros(x.shape, dtype=torch.float16))
    return Sum(dtype, x.new_zeros(x.shape, dtype=dtype))


def _add_products(dx: RunningSum, factors: Sequence[Factors | None]) -> None:
    """Add several products to dx as one: a sum in the compute dtype rounds once, not once for each."""
    given = [pair for pair in factors if pair is not None]
    if len(given) == 1:
        dx.add_product(*given[0])
    elif given:
        dx.add_product(torch.cat([left for left, _ in given], 1), torch.cat([right for _, right in given], 0))


# ---------------------------------------------------------------- the whole


def run_backward(
    structure: Structure[Call], tensors: Sequence[Tensor], grad: Tensor, kept: list[Tensor], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of each of the call's tensors, where `wanted` says so.

    `grad` is of the result, after the output projection if there is one. `kept` is what was attended and what else
    ``run_forward`` returned, where the mode keeps it, and is emptied, so that heads are freed stage by stage.
    """
    call = structure.with_tensors(tensors)
    output, x, staging = call.output, call.q.input, call.staging
    totals = Totals(tensors, wanted)
    if output is not None and output.bias is not None and totals.wants(output.bias):
        totals.add(output.bias, grad.flatten(0, -2).sum(0).to(output.bias.dtype))
    with torch.autocast(call.q.device.type, enabled=False):
        call = with_all_rows(call)
        grads = _Gradients.of(call, totals)
        grad = grad.to(call.dtype) if output is not None else grad.unflatten(2, (staging.schedule.heads, -1))
        if staging.mode.query_blocks > 1:
            dx = _backward_in_blocks(call, grad, grads)
        else:
            dx = _backward(call, grad, SavedForBackward.of(call, kept) if kept else None, grads)
    del call, grads
    if x is not None:
        whole = dx.take(x.dtype).view(x.shape[0], -1, x.shape[2])
        totals.add(x, reduce_scatter_rows(whole, staging.x_group))
    return totals.take()
