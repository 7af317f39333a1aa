"""UPipe attention: the staged forward, its explicit backward, and the public call.

Per stage (arXiv 2602.21196, section 3): project some query heads of every rank and the KV heads they need,
rotate them into a send buffer, all-to-all to head shards, attend over the whole sequence, all-to-all back,
write. One stage's tensors exist at a time, so attention intermediates are O(chunk_heads), not O(heads);
that is why forward and backward are written out instead of left to autograd, which would keep every stage.

Shapes: B batch, L rows of the sequence on this rank, C ranks, S = C * L, E input size, H query heads and
K KV heads over all ranks, D head size, n query heads and v KV heads of one rank in one stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from upipe_integrations.all_to_all import (
    Group,
    InFlight,
    attention_view,
    exchange,
    group_rank,
    group_ranks,
    sequence_pieces,
    start_exchange,
)
from upipe_integrations.heads import put_heads
from upipe_integrations.kernels import AttentionSpec, Kernel, KernelRequest
from upipe_integrations.kernels.base import BlockKernel
from upipe_integrations.layout import Layout
from upipe_integrations.mode import Mode
from upipe_integrations.projection import (
    GivenHeads,
    GivenHeadsGradient,
    OutputProjection,
    Projection,
    ProjectionGradient,
    RowSum,
)
from upipe_integrations.schedule import HeadChunk, Schedule, Stage


@dataclass(frozen=True)
class AttentionProjections:
    """The query, key and value projections of one attention layer."""

    q: Projection
    k: Projection
    v: Projection


def upipe_attention(
    x: Tensor,
    projections: AttentionProjections,
    schedule: Schedule,
    group: Group,
    kernel: Kernel,
    spec: AttentionSpec | None = None,
    *,
    layout: Layout | None = None,
    sinks: Tensor | None = None,
    output: OutputProjection | None = None,
    mode: Mode | None = None,
) -> Tensor:
    """Multi-head attention over a sequence that the ranks of `group` hold in shards.

    Args:
        x: `[B, L, E]`, this rank's rows of the sequence; the shape must be the same on every rank
            (``sharding.check_same_shape``).
        projections: weights in checkpoint order, the same on every rank; rotary tables of this rank's rows.
        schedule: from ``UPipeConfig.schedule`` or ``Schedule.build``, for this group's ranks.
        group: sequence-parallel group, or None for a group of one.
        kernel: local attention, from ``select_kernel``.
        spec: what is computed; None is causal attention at ``D ** -0.5``.
        layout: which rows a rank holds; None is contiguous, rank r holding rows ``[r * L, (r + 1) * L)``.
        sinks: `[H]`, one logit per query head that takes part in its softmax without a value, the same on
            every rank; each rank gets the gradient of the heads it attends.
        output: the output projection, for modes that fuse it; required by them and refused by the others.
        mode: what is kept for backward; None keeps the attention output.

    Returns:
        `[B, L, H * Dv]` in checkpoint order, as the output projection takes it, or `[B, L, Y]` after it where
        the mode fuses it; in the dtype of `x` (under autocast: autocast's). Differentiable once, in x, weights,
        biases, sinks and the tensors of head functions.

    Raises:
        ValueError: shapes, dtypes, schedule, group, layout and kernel do not fit together, or the kernel
            does not do what `spec` asks; raised before any exchange.
    """
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(
            f"x of shape {tuple(x.shape)} and {x.dtype}: must be floating point [batch, rows of this rank, input size]."
        )
    _check_projections(x, projections, schedule)
    mode = mode or Mode()
    _check_output(output, mode, projections, schedule)
    sources = _Sources(projections.q, projections.k, projections.v, output)
    call = _Call(sources, schedule, group, kernel, spec or AttentionSpec(), layout or Layout(), mode, compute_dtype(x))
    _check(call, x.shape[0], x.shape[1], x.device, sinks)
    result: Tensor = _UPipeAttention.apply(  # type: ignore[no-untyped-call]
        call.without_tensors(), x, sinks, *sources.tensors()
    )
    return result


def upipe_attention_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    group: Group,
    kernel: Kernel,
    spec: AttentionSpec | None = None,
    *,
    layout: Layout | None = None,
    sinks: Tensor | None = None,
    sequence_first: bool = False,
) -> Tensor:
    """The partial form of :func:`upipe_attention`: heads are projected and rotated already.

    For code that can't hand over its projections. Same schedule, kernels and layouts; beyond its inputs, its
    output and their gradients it allocates the heads of one stage.

    Args:
        q: `[B, L, H, D]`, or `[L, B, H, D]` if `sequence_first`: this rank's rows of all heads.
        k: like `q` with K heads.
        v: like `k`, Dv its head size.
        schedule, group, kernel, spec, layout, sinks: see :func:`upipe_attention`.

    Returns:
        `[B, L, H, Dv]`, or `[L, B, H, Dv]` if `sequence_first`. Differentiable once, in q, k, v and sinks.

    Raises:
        ValueError: as :func:`upipe_attention`.
    """
    if sequence_first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    wanted = {"q": schedule.heads, "k": schedule.kv_heads, "v": schedule.kv_heads}
    for (name, heads), t in zip(wanted.items(), (q, k, v), strict=True):
        if t.dim() != 4 or t.shape[:2] != q.shape[:2] or t.shape[2] != heads or t.dtype != q.dtype:
            raise ValueError(
                f"{name} of shape {tuple(t.shape)} and {t.dtype}: must be {q.dtype} [batch, rows of this rank, "
                f"{heads} heads, head size] for this schedule, with batch and rows as q's."
            )
    given = _Sources(GivenHeads(q), GivenHeads(k), GivenHeads(v), None)
    call = _Call(given, schedule, group, kernel, spec or AttentionSpec(), layout or Layout(), Mode(), q.dtype)
    _check(call, q.shape[0], q.shape[1], q.device, sinks)
    out: Tensor = _UPipeAttention.apply(  # type: ignore[no-untyped-call]
        call.without_tensors(), None, sinks, q, k, v
    )
    by_head: Tensor = out.unflatten(2, (schedule.heads, -1))
    return by_head.transpose(0, 1) if sequence_first else by_head


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype attention of `x` is computed in: autocast's where it is on, else x's own."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def _check_projections(x: Tensor, projections: AttentionProjections, schedule: Schedule) -> None:
    wanted = {"q": schedule.heads, "k": schedule.kv_heads, "v": schedule.kv_heads}
    for name, heads in wanted.items():
        projection = getattr(projections, name)
        expected = (heads * projection.head_dim, x.shape[2])
        if tuple(projection.weight.shape) != expected:
            raise ValueError(
                f"{name} weight of shape {tuple(projection.weight.shape)}: must be {expected}, {heads} heads of "
                f"{projection.head_dim} by the input size, for this schedule and x."
            )
        if projection.bias is not None and tuple(projection.bias.shape) != expected[:1]:
            raise ValueError(f"{name} bias of shape {tuple(projection.bias.shape)}: must be {expected[:1]}.")
        if projection.rotary is not None:
            cos, sin = projection.rotary.cos, projection.rotary.sin
            fits = cos.dim() == 3 and cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == x.shape[1]
            if not fits or sin.shape != cos.shape or cos.shape[2] % 2 or cos.shape[2] > projection.head_dim:
                raise ValueError(
                    f"{name} rotary tables of shapes {tuple(cos.shape)} and {tuple(sin.shape)}: must be "
                    f"[1 or {x.shape[0]}, {x.shape[1]}, even and at most {projection.head_dim}], this rank's rows only."
                )


def _check_output(
    output: OutputProjection | None, mode: Mode, projections: AttentionProjections, schedule: Schedule
) -> None:
    if mode.fuses_output != (output is not None):
        raise ValueError(
            f"memory mode {mode.memory!r} with{'out' if output is None else ''} an output projection: 'fused' and "
            "'blocks' need it, 'keep' and 'recompute' leave it to the caller. Pass output=OutputProjection(weight, "
            "bias) exactly with the former."
        )
    if output is not None:
        width = schedule.heads * projections.v.head_dim
        if output.weight.dim() != 2 or output.weight.shape[1] != width:
            raise ValueError(
                f"output weight of shape {tuple(output.weight.shape)}: must be [output size, {width}], "
                f"{schedule.heads} heads of {projections.v.head_dim}."
            )


def _check(call: _Call, batch: int, rows: int, device: torch.device, sinks: Tensor | None) -> None:
    schedule, spec, kernel = call.schedule, call.spec, call.kernel
    if schedule.ranks != group_ranks(call.group):
        raise ValueError(
            f"the schedule is for {schedule.ranks} ranks, the group has {group_ranks(call.group)}. "
            "Build the schedule for the group that is passed."
        )
    S = rows * schedule.ranks
    call.layout.check(S, schedule.ranks)
    q, k, v = call.sources.q, call.sources.k, call.sources.v
    if q.head_dim != k.head_dim:
        raise ValueError(f"query heads of {q.head_dim} and key heads of {k.head_dim}: must have the same size.")
    if sinks is not None and tuple(sinks.shape) != (schedule.heads,):
        raise ValueError(f"sinks of shape {tuple(sinks.shape)}: must be one per query head, ({schedule.heads},).")
    for number, row in enumerate(spec.documents or ()):
        if row[-1] != S or len(spec.documents or ()) not in (1, batch):
            raise ValueError(
                f"documents of batch row {number} end at {row[-1]} and there are {len(spec.documents or ())} rows of "
                f"them: they must end at the sequence length {S}, for each of {batch} batch rows or once for all."
            )
    if call.mode.blocks > 1:
        _check_blocks(call, rows)
    request = KernelRequest(device, call.dtype, q.head_dim, v.head_dim, spec, sinks is not None)
    reason = kernel.refusal(request)
    if reason is not None:
        features = ", ".join(request.features())
        raise ValueError(
            f"kernel {kernel.name!r}{f' with {features}' if features else ''}: {reason}. "
            "Choose another kernel (select_kernel('auto', ...) finds one that can)."
        )


def _check_blocks(call: _Call, rows: int) -> None:
    blocks, kernel = call.mode.blocks, call.kernel
    if rows % blocks or (call.layout.half_chunks and blocks % 2):
        even = " and, in a zigzag layout, be even" if call.layout.half_chunks else ""
        raise ValueError(
            f"query_blocks = {blocks}: must divide the {rows} rows of a rank{even}. Set it to a number that does, or "
            "use memory mode 'fused'."
        )
    if call.layout.documents is not None:
        raise ValueError(
            "memory mode 'blocks' with a packed zigzag layout: its rows are in too many pieces. Use mode 'fused'."
        )
    reason = kernel.block_refusal(call.spec) if hasattr(kernel, "block_refusal") else "it can't attend blocks of rows"
    if reason is not None:
        features = ", ".join(call.spec.features())
        raise ValueError(
            f"memory mode 'blocks' with kernel {kernel.name!r}{f' and {features}' if features else ''}: {reason}. Use "
            "mode 'fused', or another kernel."
        )
    if call.sources.v.head_dim != call.sources.q.head_dim:
        raise ValueError("memory mode 'blocks' with value heads of another size is not supported. Use mode 'fused'.")


@dataclass(frozen=True)
class _Sources:
    """Where query, key and value heads come from (projections of x, or tensors that are given), and where the
    attended heads go: to the output projection, or (None) to the caller."""

    q: Projection | GivenHeads
    k: Projection | GivenHeads
    v: Projection | GivenHeads
    output: OutputProjection | None

    def tensors(self) -> list[Tensor | None]:
        """Every tensor read, q's first."""
        return [t for source in (self.q, self.k, self.v, self.output) if source for t in source.tensors()]

    def with_tensors(self, tensors: Iterator[Tensor | None]) -> _Sources:
        """The same with other tensors."""
        q, k, v = (source.with_tensors(tensors) for source in (self.q, self.k, self.v))
        return _Sources(q, k, v, None if self.output is None else self.output.with_tensors(tensors))


@dataclass(frozen=True)
class _Part:
    """Some heads to send: a source, what it reads, and which heads."""

    source: Projection | GivenHeads
    x: Tensor | None
    chunk: HeadChunk
    padding_is_zero: bool = False


@dataclass(frozen=True)
class _Call:
    """Everything of one call; outside forward and backward its sources hold no tensors."""

    sources: _Sources
    schedule: Schedule
    group: Group
    kernel: Kernel
    spec: AttentionSpec
    layout: Layout
    mode: Mode
    dtype: torch.dtype

    def without_tensors(self) -> _Call:
        """The structure alone, for autograd contexts: what is kept there is kept by autograd's own means."""
        return self.with_tensors([None if t is None else t.new_empty(0) for t in self.sources.tensors()])

    def with_tensors(self, tensors: Iterable[Tensor | None]) -> _Call:
        """The same call with its sources' tensors in place."""
        return dataclasses.replace(self, sources=self.sources.with_tensors(iter(tensors)))

    @property
    def block_kernel(self) -> BlockKernel:
        """The kernel, which was checked to attend blocks."""
        return self.kernel  # type: ignore[return-value]

    def start(self, *parts: _Part) -> _Arriving:
        """Project the parts' heads and send them: side by side in one exchange where sizes allow."""
        alike = len({part.source.head_dim for part in parts}) == 1
        groups = [parts] if alike else [(part,) for part in parts]
        widths = tuple(tuple(part.chunk.per_rank for part in group) for group in groups)
        overlap = self.mode.overlap
        sent = [start_exchange(self._packed(group), self.group, overlap=overlap) for group in groups]
        return _Arriving(sent, widths, self)

    def _packed(self, parts: Sequence[_Part]) -> Tensor:
        """The parts' heads side by side in a send buffer `[C, L, B, all their n, D]`."""
        B, L = parts[0].source.shape_of(parts[0].x)
        widths = [part.chunk.per_rank for part in parts]
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

    def attend(self, stage: Stage, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse) of a stage."""
        pairing = self.pairing(stage, q.device)
        out, lse = self.kernel.forward(q, _paired(k, pairing), _paired(v, pairing), self.spec_of(stage))
        if sinks is not None:
            return _with_sinks(out, lse, sinks[list(self.heads_here(stage))])
        return out, lse


class _Arriving:
    """Heads that were sent; see ``_Call.start``."""

    def __init__(self, exchanges: list[InFlight], widths: tuple[tuple[int, ...], ...], call: _Call) -> None:
        self._exchanges = exchanges
        self._widths = widths
        self._call = call

    def pieces(self) -> Tensor:
        """All parts side by side as received, `[C, L, B, all their n, D]`; once, when they went in one exchange."""
        (sent,) = self._exchanges
        self._exchanges = []
        return sent.wait()

    def heads(self) -> list[Tensor]:
        """Each part's heads over the whole sequence, `[B, n, S, D]`; once."""
        heads: list[Tensor] = []
        for sent, widths in zip(self._exchanges, self._widths, strict=True):
            received = attention_view(sent.wait())
            heads += self._call.layout.to_natural(received, 2, self._call.schedule.ranks).split(widths, 1)
        self._exchanges = []
        return heads


_Step = TypeVar("_Step")


def _ahead(
    steps: Iterable[_Step], ask: Callable[[_Step], list[_Arriving | None]], overlap: bool
) -> Iterator[tuple[_Step, Callable[[], list[_Arriving | None]], Callable[[], None]]]:
    """(step, take, look_ahead) for each step: `take` gives what `ask` sent for it, and `look_ahead`, called when that
    has arrived, asks for the next step's if `overlap` says so; else `take` asks first."""
    all_steps = list(steps)
    asked: dict[int, list[_Arriving | None]] = {}

    for i, step in enumerate(all_steps):

        def take(i: int = i) -> list[_Arriving | None]:
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


def _forward(call: _Call, x: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """(result, each stage's lse); the result is `[B, L, H, Dv]`, or `[B, L, Y]` after the output projection."""
    sources = call.sources
    result: Tensor | None = None
    lses = []
    kh = vh = None
    shape = sources.q.shape_of(x)

    def ask(stage: Stage) -> list[_Arriving | None]:
        return [_ask_kv(call, x, stage), call.start(_Part(sources.q, x, stage.q))]

    for stage, take, look_ahead in _ahead(call.schedule.stages, ask, call.mode.overlap):
        kv, q = take()
        if kv is not None:
            kh, vh = kv.heads()
        assert kh is not None and vh is not None and q is not None
        (qh,) = q.heads()
        look_ahead()
        o, lse = call.attend(stage, qh, kh, vh, sinks)
        del qh
        if stage.closes_kv:
            kh = vh = None
        lses.append(lse)
        o = call.to_pieces(o)
        o = exchange(o, call.group)
        if sources.output is not None:
            _zero_padding(o, stage.q)
            result = sources.output.add(result, o, stage.q, call.mode.sum_dtype(call.dtype))
        else:
            if result is None:
                result = o.new_empty(*shape, call.schedule.heads, o.shape[4])
            put_heads(result, stage.q, 2, o.permute(2, 1, 0, 3, 4))
        del o
    assert result is not None
    if sources.output is None:
        return result, lses
    if sources.output.bias is not None:
        result += sources.output.bias.to(result.dtype)
    return result.to(call.dtype).view(*shape, -1), lses


@dataclass
class _Gradients:
    """What backward accumulates."""

    q: ProjectionGradient | GivenHeadsGradient
    k: ProjectionGradient | GivenHeadsGradient
    v: ProjectionGradient | GivenHeadsGradient
    sinks: Tensor | None
    output: Tensor | None
    dx: Tensor | None = None


def _backward(
    call: _Call,
    grad: Tensor,
    x: Tensor | None,
    sinks: Tensor | None,
    kept: tuple[Tensor, list[Tensor]] | None,
    grads: _Gradients,
) -> None:
    """Adds to `grads`; its dx becomes `[B * L, E]`.

    `grad` is of the result: `[B, L, H, Dv]`, or `[B, L, Y]` after the output projection. `kept` is what forward
    gave (out `[B, L, H, Dv]` and lse), or None where a stage's attention is run again.
    """
    sources = call.sources
    kh = vh = dk = dv = None
    lses = iter(kept[1] if kept else [])

    def ask(stage: Stage) -> list[_Arriving | None]:
        parts = [_Part(sources.q, x, stage.q), _dout_part(sources, grad, stage)]
        if kept is not None:
            parts.append(_Part(GivenHeads(kept[0]), None, stage.q))
        return [_ask_kv(call, x, stage), call.start(*parts)]

    for stage, take, look_ahead in _ahead(call.schedule.stages, ask, call.mode.overlap):
        kv, of_queries = take()
        if kv is not None:
            kh, vh = kv.heads()
        assert kh is not None and vh is not None and of_queries is not None
        qh, doh, *out_heads = of_queries.heads()
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
        if sources.output is None:
            del oh
        sum_dtype = kh.dtype if stage.opens_kv and stage.closes_kv else call.mode.kv_sum_dtype(kh.dtype)
        dk = _accumulated(dk, dk_stage, kh, pairing, sum_dtype)
        dv = _accumulated(dv, dv_stage, vh, pairing, sum_dtype)
        del dk_stage, dv_stage
        if stage.closes_kv:
            kh = vh = None
        dq = call.to_pieces(dq)
        dq = exchange(dq, call.group)
        grads.dx = grads.q.add(dq, x, stage.q, grads.dx)
        del dq
        if sources.output is not None:
            if grads.output is not None:
                oh = call.to_pieces(oh)
                oh = exchange(oh, call.group)
                _zero_padding(oh, stage.q)
                rows = sources.output.weight_rows(oh, grad)
                sources.output.add_rows(grads.output, rows, sources.v.head_dim, stage.q)
                del rows
            del oh
        if stage.closes_kv:
            dk = call.to_pieces(dk.to(call.dtype))
            dk = exchange(dk, call.group)
            grads.dx = grads.k.add(dk, x, stage.kv, grads.dx)
            dk = None
            dv = call.to_pieces(dv.to(call.dtype))
            dv = exchange(dv, call.group)
            grads.dx = grads.v.add(dv, x, stage.kv, grads.dx)
            dv = None


def _backward_in_blocks(call: _Call, grad: Tensor, x: Tensor, sinks: Tensor | None, grads: _Gradients) -> None:
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
    grads.dx = x.new_zeros(B, L, E, dtype=call.mode.sum_dtype(call.dtype))
    kh = vh = dk = dv = None
    steps = [(stage, slice(first, first + size)) for stage in call.schedule.stages for first in range(0, L, size)]
    of_output = RowSum()

    def ask(step: tuple[Stage, slice]) -> list[_Arriving | None]:
        stage, rows = step
        of_queries = _Part(projection.at_rows(rows), x[:, rows], stage.q), _dout_part(sources, grad[:, rows], stage)
        return [_ask_kv(call, x, stage) if rows.start == 0 else None, call.start(*of_queries)]

    for (stage, rows), take, look_ahead in _ahead(steps, ask, call.mode.overlap):
        kv, of_queries = take()
        if kv is not None:
            kh, vh = kv.heads()
            sum_dtype = call.mode.kv_sum_dtype(call.dtype)
            dk, dv = (t.new_zeros(t.shape, dtype=sum_dtype) for t in (_by_row(kh), _by_row(vh)))
            dk, dv = (t.permute(1, 2, 0, 3) for t in (dk, dv))
        assert kh is not None and vh is not None and dk is not None and dv is not None and of_queries is not None
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
        grads.q.add(dq, x[:, rows], stage.q, grads.dx[:, rows], rows)
        if grads.output is not None:
            _zero_padding(o, stage.q)
            of_output.add(output.weight_rows(o, grad[:, rows]), True)
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
            grads.k.add(dk, x, stage.kv, grads.dx)
            dk = None
            dv = exchange(call.to_pieces(dv.to(call.dtype)), call.group)
            grads.v.add(dv, x, stage.kv, grads.dx)
            dv = None


def _by_row(heads: Tensor) -> Tensor:
    """`[B, v, S, D]` -> view `[S, B, v, D]`, as buffers lie in memory."""
    return heads.permute(2, 0, 1, 3)


def _piece_backward(
    call: _Call,
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


def _ask_kv(call: _Call, x: Tensor | None, stage: Stage) -> _Arriving | None:
    """Send the stage's K and V, unless those of the stage before serve it."""
    if not stage.opens_kv:
        return None
    return call.start(_Part(call.sources.k, x, stage.kv), _Part(call.sources.v, x, stage.kv))


def _dout_part(sources: _Sources, grad: Tensor, stage: Stage) -> _Part:
    """A stage's gradient of the attended heads: part of `grad`, or of what it is behind the output projection."""
    if sources.output is None:
        return _Part(GivenHeads(grad), None, stage.q, padding_is_zero=True)
    return _Part(sources.output.by_head(sources.v.head_dim), grad, stage.q, padding_is_zero=True)


def _paired(kv: Tensor, pairing: Tensor | None) -> Tensor:
    """The KV heads a kernel is given: its own, or one per query head where groups are uneven."""
    return kv if pairing is None else kv.index_select(1, pairing)


def _accumulated(total: Tensor | None, part: Tensor, kv: Tensor, pairing: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`total` plus a stage's gradient of `kv`, in place; the first part is taken as it is."""
    if pairing is not None:
        part = torch.zeros_like(kv).index_add_(1, pairing, part)
    return part.to(dtype) if total is None else total.add_(part)


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


class _UPipeAttention(torch.autograd.Function):
    """Autograd's view of the two functions above."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor | None, sinks: Tensor | None, *tensors: Tensor | None) -> Tensor:
        with torch.autocast(_device_type(tensors), enabled=False):
            result, lses = _forward(call.with_tensors(tensors), _cast(x, call.dtype), sinks)
        if call.sources.output is None:
            result = result.flatten(2, 3)
        ctx.call = call
        kept = [result, *lses] if call.mode.memory == "keep" else []
        ctx.save_for_backward(x, sinks, *tensors, *kept)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        read = len(ctx.call.sources.tensors())
        x, sinks, *rest = ctx.saved_tensors
        tensors, kept = rest[:read], rest[read:]
        call: _Call = ctx.call.with_tensors(tensors)
        sources = call.sources
        wants_sinks, *of_tensors = ctx.needs_input_grad[2:]
        wanted = iter(of_tensors)
        sum_dtype = call.mode.sum_dtype(call.dtype)
        grads = _Gradients(
            sources.q.gradient(wanted, sum_dtype),
            sources.k.gradient(wanted, sum_dtype),
            sources.v.gradient(wanted, sum_dtype),
            torch.zeros_like(sinks) if sinks is not None and wants_sinks else None,
            None,
        )
        of_output: list[Tensor | None] = []
        if sources.output is not None:
            grads.output = torch.zeros_like(sources.output.weight) if next(wanted) else None
            of_output = [grads.output, _summed(grad, sources.output.bias) if next(wanted) else None]
        heads = (call.schedule.heads, -1)
        with torch.autocast(_device_type(tensors), enabled=False):
            x_cast = _cast(x, call.dtype)
            if call.mode.blocks > 1:
                assert x_cast is not None
                _backward_in_blocks(call, grad.to(call.dtype), x_cast, sinks, grads)
            else:
                of_heads = grad.to(call.dtype) if sources.output is not None else grad.unflatten(2, heads)
                kept_out = (kept[0].unflatten(2, heads), kept[1:]) if kept else None
                _backward(call, of_heads, x_cast, sinks, kept_out, grads)
        dx = None if x is None or grads.dx is None else grads.dx.to(x.dtype).view_as(x)
        return (
            None,
            dx,
            grads.sinks,
            *(t for g in (grads.q, grads.k, grads.v) for t in g.tensors()),
            *of_output,
        )


def _summed(grad: Tensor, bias: Tensor | None) -> Tensor | None:
    """The gradient of a bias."""
    return None if bias is None else grad.flatten(0, -2).sum(0).to(bias.dtype)


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)


def _device_type(tensors: Iterable[Tensor | None]) -> str:
    return next(t.device.type for t in tensors if t is not None)
