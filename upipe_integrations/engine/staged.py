"""The stage loop, forward and backward.

Per stage (arXiv 2602.21196, section 3): project some query heads of every rank and the KV heads they need,
rotate them into a send buffer, all-to-all to head shards, attend over the whole sequence, all-to-all back,
write (or add through the output projection). One stage's tensors exist at a time, so attention intermediates
are O(chunk_heads), not O(heads); that is why forward and backward are written out instead of left to
autograd, which would keep every stage. A ``del`` here is a promise that tests/test_memory.py holds.

Shapes: B batch, L rows of the sequence on this rank, C ranks, S = C * L, E input size, H query heads and
K KV heads over all ranks, D head size, n query heads and v KV heads of one rank in one stage.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from upipe_integrations.all_to_all import (
    Group,
    InFlight,
    exchange,
    gather_rows,
    group_rank,
    reduce_scatter_rows,
    sequence_pieces,
    start_exchange,
)
from upipe_integrations.kernels import AttentionSpec, Kernel
from upipe_integrations.kernels.base import BlockKernel, lse_like
from upipe_integrations.layout import Layout
from upipe_integrations.mode import Mode
from upipe_integrations.projections.given import GivenHeads, GivenHeadsGradient
from upipe_integrations.projections.heads import put_heads
from upipe_integrations.projections.output import OutputProjection
from upipe_integrations.projections.products import add_products
from upipe_integrations.projections.projection import SHARED, Projection, ProjectionGradient
from upipe_integrations.projections.sums import ScaledSum, Sum
from upipe_integrations.schedule import HeadChunk, Schedule, Stage


@dataclass(frozen=True)
class Sources:
    """Where query, key and value heads come from (projections of x, or tensors that are given), and where the
    attended heads go: to the output projection (in the stage loop in modes that fuse it, else after it, with its
    gradient projected stage by stage), or (None) to the caller."""

    q: Projection | GivenHeads
    k: Projection | GivenHeads
    v: Projection | GivenHeads
    output: OutputProjection | None
    fused: bool = False
    """Whether weights and bias are the same tensors for q, k and v, and so are read and differentiated once."""

    def tensors(self) -> list[Tensor | None]:
        """Every tensor read, q's first."""
        of_output = [] if self.output is None else self.output.tensors()
        return [*self.listed(self.q.tensors(), self.k.tensors(), self.v.tensors()), *of_output]

    @property
    def accumulate(self) -> bool:
        """Whether a weight's gradient is added to a tensor of the caller's."""
        read = [p for p in (self.q, self.k, self.v, self.output) if isinstance(p, Projection | OutputProjection)]
        return any(p.accumulate_into is not None for p in read)

    def listed(self, q: list[Tensor | None], k: list[Tensor | None], v: list[Tensor | None]) -> list[Tensor | None]:
        """What belongs to each projection's tensors, in the order of :meth:`tensors`."""
        shared = SHARED if self.fused else 0
        return [*q, *k[shared:], *v[shared:]]

    def with_tensors(self, tensors: Iterator[Tensor | None]) -> Sources:
        """The same with other tensors."""
        q = self.q.with_tensors(tensors)
        shared = q.tensors()[:SHARED] if self.fused else []
        k, v = (source.with_tensors(itertools.chain(shared, tensors)) for source in (self.k, self.v))
        output = None if self.output is None else self.output.with_tensors(tensors)
        return dataclasses.replace(self, q=q, k=k, v=v, output=output)

    def gradients(self, wanted: Iterator[bool]) -> tuple[_Gradient, _Gradient, _Gradient]:
        """Zero gradients of q, k and v where `wanted`, in the order of :meth:`tensors`, says so."""
        q, k, v = self.q, self.k, self.v
        of_q = q.gradient(wanted)
        if not self.fused:
            return of_q, k.gradient(wanted), v.gradient(wanted)
        assert isinstance(of_q, ProjectionGradient) and isinstance(k, Projection) and isinstance(v, Projection)
        return of_q, k.gradient_beside(of_q, wanted), v.gradient_beside(of_q, wanted)


_Gradient = ProjectionGradient | GivenHeadsGradient


@dataclass(frozen=True)
class _Part:
    """Some heads to send: a source, what it reads, and which heads."""

    source: Projection | GivenHeads
    x: Tensor | None
    chunk: HeadChunk
    padding_is_zero: bool = False


_A_TENSOR: Any = ...
"""Stands for a tensor in a call without tensors."""


@dataclass(frozen=True)
class Call:
    """Everything of one call; outside forward and backward its sources hold no tensors."""

    sources: Sources
    schedule: Schedule
    group: Group
    kernel: Kernel
    spec: AttentionSpec
    layout: Layout
    mode: Mode
    dtype: torch.dtype
    x_group: Group = None
    """The ranks among which the rows of x are split once more; None where x has all of this rank's."""

    def without_tensors(self) -> Call:
        """The structure alone, for autograd contexts: what is kept there is kept by autograd's own means.

        Equal structures are equal and hash alike (so long as group, kernel and functions do).
        """
        return self.with_tensors([None if t is None else _A_TENSOR for t in self.sources.tensors()])

    def with_tensors(self, tensors: Iterable[Tensor | None]) -> Call:
        """The same call with its sources' tensors in place."""
        return dataclasses.replace(self, sources=self.sources.with_tensors(iter(tensors)))

    @property
    def output_in_loop(self) -> OutputProjection | None:
        """The output projection where each stage's attended heads are added through it."""
        return self.sources.output if self.mode.fuses_output else None

    @property
    def output_after(self) -> OutputProjection | None:
        """The output projection where it takes all attended heads at once, after the stage loop."""
        return None if self.mode.fuses_output else self.sources.output

    @property
    def block_kernel(self) -> BlockKernel:
        """The kernel, which was checked to attend blocks."""
        return self.kernel  # type: ignore[return-value]

    def start(self, *parts: _Part) -> _Arriving:
        """Project the parts' heads and send them."""
        groups = _together(*parts)
        overlap = self.mode.overlap
        sent = [start_exchange(self._packed(group), self.group, overlap=overlap) for group in groups]
        return _Arriving(sent, [_widths(group) for group in groups], self)

    def _packed(self, parts: Sequence[_Part]) -> Tensor:
        """The parts' heads side by side in a send buffer `[C, L, B, all their n, D]`."""
        B, L = parts[0].source.shape_of(parts[0].x)
        widths = _widths(parts)
        reads = parts[0].source.tensors()[0]
        assert reads is not None
        send = torch.empty(
            self.schedule.ranks,
            L,
            B,
            sum(widths),
            parts[0].source.head_dim,
            dtype=self.dtype,
            device=reads.device,
        )
        for part, target in zip(parts, send.split(widths, 3), strict=True):
            part.source.write(part.x, part.chunk, target)
            if part.padding_is_zero:
                _zero_padding(target, part.chunk)
        return send

    def to_pieces(self, attended: Tensor) -> Tensor:
        """`[B, n, S, D]` -> `[C, L, B, n, D]` to send back."""
        return sequence_pieces(self.layout.from_natural(attended, 2, self.schedule.ranks), self.schedule.ranks)

    def heads_here(self, stage: Stage) -> tuple[int, ...]:
        """Global numbers of the query heads that this rank attends in a stage."""
        return stage.q.by_rank[group_rank(self.group)]

    def spec_of(self, stage: Stage) -> AttentionSpec:
        """The spec for a stage's kernel calls: dropout must know the heads."""
        if self.spec.dropout is None:
            return self.spec
        return dataclasses.replace(
            self.spec, dropout=dataclasses.replace(self.spec.dropout, heads=self.heads_here(stage))
        )

    def pairing(self, stage: Stage, device: torch.device) -> Tensor | None:
        """Which KV head each query head attends, or None when the kernel's own grouping says the same."""
        rank = group_rank(self.group)
        return None if stage.grouped_evenly(rank) else torch.tensor(stage.kv_of_q[rank], device=device)

    def kv_sum(self, stage: Stage) -> Sum | ScaledSum:
        """An empty sum for the dK or dV of the KV heads that a stage opens."""
        dtype = self.dtype if stage.closes_kv else self.mode.kv_sum_dtype(self.dtype)
        return ScaledSum() if dtype == torch.bfloat16 and not stage.closes_kv else Sum(dtype)

    def attend(self, stage: Stage, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse) of a stage."""
        pairing = self.pairing(stage, q.device)
        out, lse = self.kernel.forward(q, _paired(k, pairing), _paired(v, pairing), self.spec_of(stage))
        if sinks is not None:
            return _with_sinks(out, lse, sinks[list(self.heads_here(stage))])
        return out, lse


def _together(*parts: _Part) -> list[Sequence[_Part]]:
    """The parts by exchange: side by side in one where their heads have one size."""
    alike = len({part.source.head_dim for part in parts}) == 1
    return [parts] if alike else [(part,) for part in parts]


def _widths(parts: Sequence[_Part]) -> list[int]:
    """Heads of one rank, by part."""
    return [part.chunk.per_rank for part in parts]


class _Arriving:
    """Heads that were sent; see ``Call.start``."""

    def __init__(self, exchanges: list[InFlight], widths: list[list[int]], call: Call) -> None:
        self._exchanges = exchanges
        self._widths = widths
        self._call = call

    def pieces(self) -> Tensor:
        """All parts side by side as received, `[C, L, B, all their n, D]`; once, when they went in one exchange."""
        (sent,) = self._exchanges
        self._exchanges = []
        return sent.wait()

    def heads(self, kept: list[Tensor] | None = None) -> list[Tensor]:
        """Each part's heads over the whole sequence, `[B, n, S, D]`; once. What they are views of is added to `kept`.

        That is, of each exchange, all of its heads in natural order, `[S, B, n, D]`.
        """
        layout, ranks = self._call.layout, self._call.schedule.ranks
        whole = [layout.to_natural(sent.wait().flatten(0, 1), 0, ranks) for sent in self._exchanges]
        self._exchanges = []
        if kept is not None:
            kept += whole
        return _split(whole, self._widths)


class _Kept:
    """Heads that were kept when they arrived, asked for like :class:`_Arriving`."""

    def __init__(self, whole: list[Tensor], widths: list[list[int]]) -> None:
        self._whole = whole
        self._widths = widths

    def heads(self) -> list[Tensor]:
        """See :class:`_Arriving`."""
        whole, self._whole = self._whole, []
        return _split(whole, self._widths)


def _split(whole: list[Tensor], widths: list[list[int]]) -> list[Tensor]:
    """Each part's heads `[B, n, S, D]` of each exchange's `[S, B, all n, D]`."""
    parts = [part for t, of in zip(whole, widths, strict=True) for part in t.split(of, 2)]
    return [part.permute(1, 2, 0, 3) for part in parts]


_Step = TypeVar("_Step")


_Asked = TypeVar("_Asked")


def _ahead(
    steps: Iterable[_Step], ask: Callable[[_Step], _Asked], overlap: bool
) -> Iterator[tuple[_Step, Callable[[], _Asked], Callable[[], None]]]:
    """(step, take, look_ahead) for each step: `take` gives what `ask` sent for it, and `look_ahead`, called when that
    has arrived, asks for the next step's if `overlap` says so; else `take` asks first."""
    all_steps = list(steps)
    asked: dict[int, _Asked] = {}

    for i, step in enumerate(all_steps):

        def take(i: int = i) -> _Asked:
            return asked.pop(i) if i in asked else ask(all_steps[i])

        def look_ahead(i: int = i) -> None:
            if overlap and i + 1 < len(all_steps):
                asked[i + 1] = ask(all_steps[i + 1])

        yield step, take, look_ahead


def _zero_padding(pieces: Tensor, chunk: HeadChunk) -> None:
    """Make the repeated heads of `[C, L, B, n, D]` zero."""
    for position in chunk.padding:
        rank, j = divmod(position, chunk.per_rank)
        pieces[rank, :, :, j] = 0


def _forward(
    call: Call, x: Tensor | None, sinks: Tensor | None, kept_heads: list[Tensor] | None
) -> tuple[Tensor, list[Tensor]]:
    """(attended, each stage's lse); attended is `[B, L, H, Dv]`, or `[B, L, Y]` where the output projection is fused.

    Adds what stages receive to `kept_heads`.
    """
    sources, output = call.sources, call.output_in_loop
    result: Tensor | None = None
    lses = []
    kh = vh = None
    shape = sources.q.shape_of(x)
    y_dtype = call.mode.y_sum_dtype(call.dtype, len(call.schedule.stages))

    def ask(stage: Stage) -> tuple[_Arriving | None, _Arriving]:
        return _ask_kv(call.start, sources, x, stage), call.start(_Part(sources.q, x, stage.q))

    for stage, take, look_ahead in _ahead(call.schedule.stages, ask, call.mode.overlap):
        kv, q = take()
        if kv is not None:
            kh, vh = kv.heads(kept_heads)
        assert kh is not None and vh is not None
        (qh,) = q.heads(kept_heads)
        look_ahead()
        o, lse = call.attend(stage, qh, kh, vh, sinks)
        del qh
        if stage.closes_kv:
            kh = vh = None
        lses.append(lse)
        o = call.to_pieces(o)
        o = exchange(o, call.group)
        if output is not None:
            _zero_padding(o, stage.q)
            result = output.add(result, o, stage.q, y_dtype)
        else:
            if result is None:
                result = o.new_empty(*shape, call.schedule.heads, o.shape[4])
            put_heads(result, stage.q, 2, o.permute(2, 1, 0, 3, 4))
        del o
    assert result is not None
    if output is None:
        return result, lses
    if output.bias is not None:
        result += output.bias.to(result.dtype)
    return result.to(call.dtype).view(*shape, -1), lses


@dataclass
class _KeptResult:
    """What forward kept: out `[B, L, H, Dv]`, each stage's lse, and what stages received, which is given away."""

    out: Tensor
    lses: list[Tensor]
    heads: deque[Tensor]

    @classmethod
    def of(cls, call: Call, kept: list[Tensor]) -> _KeptResult:
        """From what :func:`run_forward` keeps, which is emptied."""
        first_heads = 1 + len(call.schedule.stages)
        out = kept[0].unflatten(2, (call.schedule.heads, -1))
        result = cls(out, kept[1:first_heads], deque(kept[first_heads:]))
        kept.clear()
        return result

    def take(self, *parts: _Part) -> _Kept:
        """The parts' heads."""
        groups = _together(*parts)
        return _Kept([self.heads.popleft() for _ in groups], [_widths(group) for group in groups])


@dataclass
class _Gradients:
    """What backward accumulates."""

    q: _Gradient
    k: _Gradient
    v: _Gradient
    sinks: Tensor | None
    output: Tensor | None
    dx: Tensor | None = None


def _backward(
    call: Call,
    grad: Tensor,
    x: Tensor | None,
    sinks: Tensor | None,
    kept: _KeptResult | None,
    grads: _Gradients,
) -> None:
    """Adds to `grads`; its dx becomes `[B * L, E]`.

    `grad` is of the result: `[B, L, H, Dv]`, or `[B, L, Y]` after the output projection. `kept` is None where a
    stage's attention is run again.
    """
    sources, output = call.sources, call.output_in_loop
    if kept is not None and call.output_after is not None and grads.output is not None:
        call.output_after.add_all_rows(grads.output, kept.out, grad)
    kh = vh = None
    dk: Sum | ScaledSum | None = None
    dv: Sum | ScaledSum | None = None
    lses = iter(kept.lses if kept else [])

    def ask(stage: Stage) -> tuple[_Arriving | _Kept | None, list[_Arriving | _Kept]]:
        q, back = _Part(sources.q, x, stage.q), [_dout_part(sources, grad, stage)]
        if kept is not None:
            back.append(_Part(GivenHeads(kept.out), None, stage.q))
        if kept is not None and call.mode.keeps_heads:
            return _ask_kv(kept.take, sources, x, stage), [kept.take(q), call.start(*back)]
        return _ask_kv(call.start, sources, x, stage), [call.start(q, *back)]

    for stage, take, look_ahead in _ahead(call.schedule.stages, ask, call.mode.overlap):
        kv, of_queries = take()
        if kv is not None:
            kh, vh = kv.heads()
        assert kh is not None and vh is not None
        qh, doh, *out_heads = (heads for there in of_queries for heads in there.heads())
        look_ahead()
        if kept is None:
            oh, lse = call.attend(stage, qh, kh, vh, sinks)
        else:
            (oh,), lse = out_heads, next(lses)
        del out_heads
        if grads.sinks is not None and sinks is not None:
            _add_sink_gradient(grads.sinks, sinks, call.heads_here(stage), doh, oh, lse)
        pairing = call.pairing(stage, qh.device)
        dq, dk_stage, dv_stage = call.kernel.backward(
            doh, qh, _paired(kh, pairing), _paired(vh, pairing), oh, lse, call.spec_of(stage)
        )
        del qh, doh, lse
        if output is None:
            del oh
        if stage.opens_kv:
            dk, dv = call.kv_sum(stage), call.kv_sum(stage)
        assert dk is not None and dv is not None
        dk.add_(_of_kv_heads(dk_stage, kh, pairing))
        dv.add_(_of_kv_heads(dv_stage, vh, pairing))
        del dk_stage, dv_stage
        if stage.closes_kv:
            kh = vh = None
        dq = call.to_pieces(dq)
        dq = exchange(dq, call.group)
        factors = [grads.q.add(dq, x, stage.q)]
        del dq
        if output is not None:
            if grads.output is not None:
                oh = call.to_pieces(oh)
                oh = exchange(oh, call.group)
                _zero_padding(oh, stage.q)
                rows = output.weight_rows(oh, grad, call.dtype)
                output.add_rows(grads.output, rows, sources.v.head_dim, stage.q)
                del rows
            del oh
        if stage.closes_kv:
            factors.append(grads.k.add(_sent_back(call, dk), x, stage.kv))
            factors.append(grads.v.add(_sent_back(call, dv), x, stage.kv))
        grads.dx = add_products(grads.dx, factors, call.mode.sum_dtype(call.dtype))
        del factors


def _backward_in_blocks(call: Call, grad: Tensor, x: Tensor, sinks: Tensor | None, grads: _Gradients) -> None:
    """:func:`_backward` with the output projection fused and a stage's queries walked in blocks of rows.

    K and V of a stage are exchanged whole, queries and their gradients a block of every rank's rows at a time.
    Of the block, the piece that came from rank c is attended against the keys it can see, and its backward
    run over tiles of them, with dK and dV summed over all. dq and the output take the places of q and dout in
    the buffer, and travel back in one exchange.
    """
    sources, C = call.sources, call.schedule.ranks
    output, projection = sources.output, sources.q
    assert output is not None and isinstance(projection, Projection)
    B, L, E = x.shape
    size = L // call.mode.blocks
    # A stage adds to dx once for every block and once more, which in bfloat16 would tell.
    sum_dtype = call.mode.sum_dtype(call.dtype)
    dx: Tensor | ScaledSum
    if sum_dtype == torch.bfloat16:
        dx, sum_dtype = ScaledSum.in_place_of(x.new_zeros(B, L, E, dtype=torch.float16)), torch.float32
    else:
        dx = x.new_zeros(B, L, E, dtype=sum_dtype)
    kh = vh = dk = dv = None
    steps = [(stage, slice(first, first + size)) for stage in call.schedule.stages for first in range(0, L, size)]
    of_output = Sum()

    def ask(step: tuple[Stage, slice]) -> tuple[_Arriving | None, _Arriving]:
        stage, rows = step
        of_queries = _Part(projection.at_rows(rows), x[:, rows], stage.q), _dout_part(sources, grad[:, rows], stage)
        return _ask_kv(call.start, sources, x, stage) if rows.start == 0 else None, call.start(*of_queries)

    for (stage, rows), take, look_ahead in _ahead(steps, ask, call.mode.overlap):
        kv, of_queries = take()
        if kv is not None:
            kh, vh = kv.heads()
            kv_dtype = call.mode.kv_sum_dtype(call.dtype)
            dk, dv = (t.new_zeros(t.shape, dtype=kv_dtype) for t in (_by_row(kh), _by_row(vh)))
            dk, dv = (t.permute(1, 2, 0, 3) for t in (dk, dv))
        assert kh is not None and vh is not None and dk is not None and dv is not None
        pieces = of_queries.pieces()
        look_ahead()
        n = stage.q.per_rank
        for c in range(C):
            start = call.layout.row_of(c, rows.start, L * C, C)
            q, do = (t.permute(1, 2, 0, 3) for t in pieces[c].split([n, n], 2))
            dq, o = _piece_backward(call, stage, (q, do, kh, vh), (dk, dv), start, sinks, grads)
            q.copy_(dq)
            do.copy_(o)
            del q, do, dq, o
        pieces = exchange(pieces, call.group)
        dq, o = pieces.split([n, n], 3)
        factors = grads.q.add(dq, x[:, rows], stage.q, rows)
        add_products(dx[:, rows], [factors], sum_dtype)
        del factors
        if grads.output is not None:
            _zero_padding(o, stage.q)
            of_output.add_(output.weight_rows(o, grad[:, rows], torch.promote_types(call.dtype, torch.float32)))
        del pieces, dq, o
        if rows.stop < L:
            continue
        assert isinstance(grads.q, ProjectionGradient)
        grads.q.end_blocks(stage.q)
        if grads.output is not None:
            output.add_rows(grads.output, of_output.take(), sources.v.head_dim, stage.q)
        if stage.closes_kv:
            kh = vh = None
            dk = exchange(call.to_pieces(dk.to(call.dtype)), call.group)
            of_k = grads.k.add(dk, x, stage.kv)
            dk = None
            dv = exchange(call.to_pieces(dv.to(call.dtype)), call.group)
            of_v = grads.v.add(dv, x, stage.kv)
            dv = None
            add_products(dx, [of_k, of_v], sum_dtype)
            del of_k, of_v
    grads.dx = dx.take(call.dtype) if isinstance(dx, ScaledSum) else dx


def _by_row(heads: Tensor) -> Tensor:
    """`[B, v, S, D]` -> view `[S, B, v, D]`, as buffers lie in memory."""
    return heads.permute(2, 0, 1, 3)


def _piece_backward(
    call: Call,
    stage: Stage,
    heads: tuple[Tensor, Tensor, Tensor, Tensor],
    kv_grads: tuple[Tensor, Tensor],
    start: int,
    sinks: Tensor | None,
    grads: _Gradients,
) -> tuple[Tensor, Tensor]:
    """(dq, out) of the query rows from `start` on; adds to dK, dV and the gradient of sinks.

    `heads` are q, dout (of these rows), k and v (of the whole sequence).
    """
    q, dout, k, v = heads
    dk, dv = kv_grads
    kernel, spec = call.block_kernel, call.spec
    S, ranks = k.shape[2], call.schedule.ranks
    pairing = call.pairing(stage, q.device)
    end = start + q.shape[2] if spec.causal else S
    seen_k, seen_v = (_paired(t[:, :, :end], pairing) for t in (k, v))
    out, lse = kernel.forward_block(q, seen_k, seen_v, spec, start)
    del seen_k, seen_v
    if sinks is not None:
        out, lse = _with_sinks(out, lse, sinks[list(call.heads_here(stage))])
        if grads.sinks is not None:
            _add_sink_gradient(grads.sinks, sinks, call.heads_here(stage), dout, out, lse)
    dq: Tensor | None = None
    for first in range(0, end, S // ranks):
        tile = slice(first, min(first + S // ranks, end))
        tile_k, tile_v = (_paired(t[:, :, tile], pairing) for t in (k, v))
        dq_part, dk_part, dv_part = kernel.backward_block((dout, q, tile_k, tile_v, out, lse), spec, start, first)
        if pairing is None:
            dk[:, :, tile] += dk_part
            dv[:, :, tile] += dv_part
        else:
            dk[:, :, tile].index_add_(1, pairing, dk_part.to(dk.dtype))
            dv[:, :, tile].index_add_(1, pairing, dv_part.to(dv.dtype))
        del dk_part, dv_part
        dq = dq_part.to(dk.dtype) if dq is None else dq.add_(dq_part)
        del dq_part
    assert dq is not None
    return dq, out


def _ask_kv(ask: Callable[..., _Asked], sources: Sources, x: Tensor | None, stage: Stage) -> _Asked | None:
    """Ask for the stage's K and V, unless those of the stage before serve it."""
    if not stage.opens_kv:
        return None
    return ask(_Part(sources.k, x, stage.kv), _Part(sources.v, x, stage.kv))


def _dout_part(sources: Sources, grad: Tensor, stage: Stage) -> _Part:
    """A stage's gradient of the attended heads: part of `grad`, or of what it is behind the output projection."""
    if sources.output is None:
        return _Part(GivenHeads(grad), None, stage.q, padding_is_zero=True)
    return _Part(sources.output.by_head(sources.v.head_dim), grad, stage.q, padding_is_zero=True)


def _paired(kv: Tensor, pairing: Tensor | None) -> Tensor:
    """The KV heads a kernel is given: its own, or one per query head where groups are uneven."""
    return kv if pairing is None else kv.index_select(1, pairing)


def _sent_back(call: Call, total: Sum | ScaledSum) -> Tensor:
    """The sum, at the ranks whose rows it is of: `[C, L, B, v, D]`."""
    pieces = call.to_pieces(total.take(call.dtype))
    return exchange(pieces, call.group)


def _of_kv_heads(part: Tensor, kv: Tensor, pairing: Tensor | None) -> Tensor:
    """A stage's gradient of the heads of `kv` from that of the heads its kernel was given."""
    return part if pairing is None else torch.zeros_like(kv).index_add_(1, pairing, part)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of a softmax in which each head's sink takes part without a value.

    With that lse a kernel's backward gives the gradients of q, k and v as they are.
    """
    if lse.shape != out.shape[:3]:
        raise ValueError(f"this kernel's lse has shape {tuple(lse.shape)}, which sinks can't be merged into.")
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return out * (lse - with_sink).exp()[..., None].to(out.dtype), with_sink


def _add_sink_gradient(
    total: Tensor, sinks: Tensor, heads: tuple[int, ...], dout: Tensor, out: Tensor, lse: Tensor
) -> None:
    """dsink = -sum over rows of the sink's probability times dout . out; repeated heads have zero dout."""
    here = torch.tensor(heads, device=total.device)
    probability = (sinks[here].to(lse.dtype)[None, :, None] - lse).exp()
    through = torch.einsum("bnsd,bnsd->bns", dout.to(lse.dtype), out.to(lse.dtype))
    total.index_add_(0, here, -(probability * through).sum((0, 2)).to(total.dtype))


def run_forward(
    call: Call, x: Tensor | None, sinks: Tensor | None, tensors: Sequence[Tensor | None]
) -> tuple[Tensor, list[Tensor]]:
    """(attended, what backward needs besides where the mode keeps it: each stage's lse, and received heads).

    Attended is `[B, L, H * Dv]`, which backward needs too where the mode keeps it, or `[B, L, Y]` where the output
    projection is fused; :func:`project` makes the result of it. See :func:`kept_like` for the shapes.
    """
    heads: list[Tensor] | None = [] if call.mode.keeps_heads else None
    with torch.autocast(_device_type(tensors), enabled=False):
        result, lses = _forward(call.with_tensors(tensors), _all_rows(call, x), sinks, heads)
    if not call.mode.fuses_output:
        result = result.flatten(2, 3)
    return result, [*lses, *(heads or [])] if call.mode.keeps_output else []


def project(call: Call, attended: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
    """The result of :func:`run_forward`: `attended`, or `[B, L, Y]` after an output projection that is not fused."""
    output = call.with_tensors(tensors).output_after
    if output is None:
        return attended
    with torch.autocast(attended.device.type, enabled=False):
        return output.of_all(attended)


def kept_like(call: Call, like: Tensor, rows: tuple[int, int]) -> list[Tensor]:
    """Empty tensors like those that :func:`run_forward` keeps besides its result, for B and L `rows`.

    `call` has its tensors; `like` is on their device.
    """
    (B, L), sources, stages = rows, call.sources, call.schedule.stages
    S = L * call.schedule.ranks
    lses, heads = [], []
    for stage in stages:
        q = like.new_empty(B, stage.q.per_rank, S, sources.q.head_dim, dtype=call.dtype)
        lses.append(lse_like(call.kernel, q))
        exchanges = [*(_ask_kv(_together, sources, None, stage) or []), [_Part(sources.q, None, stage.q)]]
        for parts in exchanges:
            heads.append(like.new_empty(S, B, sum(_widths(parts)), parts[0].source.head_dim, dtype=call.dtype))
    return [*(lses if call.mode.keeps_output else []), *(heads if call.mode.keeps_heads else [])]


def run_backward(
    call: Call,
    grad: Tensor,
    inputs: tuple[Tensor | None, Tensor | None, Sequence[Tensor | None]],
    kept: list[Tensor],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of x, sinks and each of the tensors, where `wanted` (in that order) says so.

    `grad` is of the result, after the output projection if there is one. `inputs` are x, sinks and the tensors of
    :func:`run_forward`; `kept` is what it returned, where the mode keeps it, and is emptied, so that heads are freed
    stage by stage.
    """
    x, sinks, tensors = inputs
    call = call.with_tensors(tensors)
    sources = call.sources
    of_tensors = iter(wanted[2:])
    grads = _Gradients(
        *sources.gradients(of_tensors),
        torch.zeros_like(sinks) if sinks is not None and wanted[1] else None,
        None,
    )
    of_output: list[Tensor | None] = []
    if (output := sources.output) is not None:
        into = output.accumulate_into
        if next(of_tensors):
            grads.output = torch.zeros_like(output.weight) if into is None else into
        of_bias = _summed(grad, output.bias) if next(of_tensors) else None
        of_output = [grads.output if into is None else None, of_bias]
    heads = (call.schedule.heads, -1)
    with torch.autocast(_device_type(tensors), enabled=False):
        x_cast = _all_rows(call, x)
        if call.mode.blocks > 1:
            assert x_cast is not None
            _backward_in_blocks(call, grad.to(call.dtype), x_cast, sinks, grads)
        else:
            of_heads = grad.to(call.dtype) if sources.output is not None else grad.unflatten(2, heads)
            _backward(call, of_heads, x_cast, sinks, _KeptResult.of(call, kept) if kept else None, grads)
    dx = None
    if x is not None and grads.dx is not None:
        dx = reduce_scatter_rows(grads.dx.to(x.dtype).view(x.shape[0], -1, x.shape[2]), call.x_group)
    of_projections = sources.listed(grads.q.tensors(), grads.k.tensors(), grads.v.tensors())
    return [dx, grads.sinks, *of_projections, *of_output]


def _summed(grad: Tensor, bias: Tensor | None) -> Tensor | None:
    """The gradient of a bias."""
    return None if bias is None else grad.flatten(0, -2).sum(0).to(bias.dtype)


def _all_rows(call: Call, x: Tensor | None) -> Tensor | None:
    """x with all of this rank's rows, in the computing precision."""
    return None if x is None else gather_rows(x.to(call.dtype), call.x_group)


def _device_type(tensors: Iterable[Tensor | None]) -> str:
    return next(t.device.type for t in tensors if t is not None)
