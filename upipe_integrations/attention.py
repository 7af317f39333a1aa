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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from upipe_integrations.all_to_all import (
    Group,
    attention_view,
    exchange,
    group_rank,
    group_ranks,
    send_view,
    sequence_pieces,
)
from upipe_integrations.heads import put_heads, take_heads
from upipe_integrations.kernels import AttentionSpec, Kernel
from upipe_integrations.projection import Projection, ProjectionGradient
from upipe_integrations.schedule import HeadChunk, Schedule, Stage


@dataclass(frozen=True)
class AttentionProjections:
    """The query, key and value projections of one attention layer."""

    q: Projection
    k: Projection
    v: Projection

    def tensors(self) -> list[Tensor | None]:
        """Every tensor read, q's first."""
        return [*self.q.tensors(), *self.k.tensors(), *self.v.tensors()]

    def with_tensors(self, tensors: Iterator[Tensor | None]) -> AttentionProjections:
        """The same projections of other tensors."""
        q, k, v = (projection.with_tensors(tensors) for projection in (self.q, self.k, self.v))
        return AttentionProjections(q, k, v)

    def without_tensors(self) -> AttentionProjections:
        """The structure alone, for autograd contexts: what is kept there is kept by autograd's own means."""
        return self.with_tensors(iter([None if t is None else t.new_empty(0) for t in self.tensors()]))


def upipe_attention(
    x: Tensor,
    projections: AttentionProjections,
    schedule: Schedule,
    group: Group,
    kernel: Kernel,
    spec: AttentionSpec | None = None,
) -> Tensor:
    """Multi-head attention over a sequence that the ranks of `group` hold in contiguous shards.

    Args:
        x: `[B, L, E]`, this rank's rows: rank r of the group holds rows `[r * L, (r + 1) * L)`. L must be
            the same on every rank.
        projections: weights in checkpoint order, the same on every rank.
        schedule: from ``UPipeConfig.schedule`` or ``Schedule.build``, for this group's ranks.
        group: sequence-parallel group, or None for a group of one.
        kernel: local attention, from ``select_kernel``.
        spec: causal or full attention and its scale; None is causal at ``D ** -0.5``.

    Returns:
        `[B, L, H * D]` in checkpoint order, as the output projection takes it, in the dtype of `x` (under
        autocast: autocast's). Differentiable once, in x, weights, biases and the tensors of head functions.

    Raises:
        ValueError: shapes, dtypes, schedule and group do not fit together; raised before any exchange.
    """
    _check(x, projections, schedule, group)
    call = _Call(projections.without_tensors(), schedule, group, kernel, spec or AttentionSpec(), compute_dtype(x))
    out: Tensor = _UPipeAttention.apply(call, x, *projections.tensors())  # type: ignore[no-untyped-call]
    return out


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype attention of `x` is computed in: autocast's where it is on, else x's own."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def _check(x: Tensor, projections: AttentionProjections, schedule: Schedule, group: Group) -> None:
    if schedule.ranks != group_ranks(group):
        raise ValueError(
            f"the schedule is for {schedule.ranks} ranks, the group has {group_ranks(group)}. "
            "Build the schedule for the group that is passed."
        )
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(
            f"x of shape {tuple(x.shape)} and {x.dtype}: must be floating point [batch, rows of this rank, input size]."
        )
    wanted = {"q": schedule.heads, "k": schedule.kv_heads, "v": schedule.kv_heads}
    for name, heads in wanted.items():
        projection: Projection = getattr(projections, name)
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
    if len({getattr(projections, name).head_dim for name in wanted}) > 1:
        raise ValueError("query, key and value heads of different sizes are not supported yet.")


@dataclass(frozen=True)
class _Call:
    """Everything of one call; outside forward and backward its projections hold no tensors."""

    projections: AttentionProjections
    schedule: Schedule
    group: Group
    kernel: Kernel
    spec: AttentionSpec
    dtype: torch.dtype

    def with_tensors(self, tensors: Iterable[Tensor | None]) -> _Call:
        """The same call with its projections' tensors in place."""
        return dataclasses.replace(self, projections=self.projections.with_tensors(iter(tensors)))

    def heads_of(self, projection: Projection, x: Tensor, chunk: HeadChunk) -> Tensor:
        """A stage's projected heads over the whole sequence: `[B, n, S, D]`."""
        return attention_view(exchange(projection.send_buffer(x, chunk), self.group))

    def heads_from(self, full: Tensor, chunk: HeadChunk) -> Tensor:
        """A stage's heads of `[B, L, H, D]` over the whole sequence: `[B, n, S, D]`."""
        send = send_view(take_heads(full, chunk.by_rank, 2), self.schedule.ranks).contiguous()
        return attention_view(exchange(send, self.group))

    def pairing(self, stage: Stage, device: torch.device) -> Tensor | None:
        """Which KV head each query head attends, or None when the kernel's own grouping says the same."""
        rank = group_rank(self.group)
        return None if stage.grouped_evenly(rank) else torch.tensor(stage.kv_of_q[rank], device=device)


def _forward(call: _Call, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(out `[B, L, H, D]`, each stage's lse)."""
    q, k, v = call.projections.q, call.projections.k, call.projections.v
    B, L, _ = x.shape
    out = x.new_empty(B, L, call.schedule.heads, v.head_dim)
    lses = []
    kh = vh = None
    for stage in call.schedule.stages:
        if stage.opens_kv:
            kh = vh = None
            kh, vh = call.heads_of(k, x, stage.kv), call.heads_of(v, x, stage.kv)
        assert kh is not None and vh is not None
        qh = call.heads_of(q, x, stage.q)
        pairing = call.pairing(stage, x.device)
        o, lse = call.kernel.forward(qh, _paired(kh, pairing), _paired(vh, pairing), call.spec)
        del qh
        if stage.closes_kv:
            kh = vh = None
        lses.append(lse)
        o = sequence_pieces(o, call.schedule.ranks)
        o = exchange(o, call.group)
        put_heads(out, stage.q.by_rank, 2, o.permute(2, 1, 0, 3, 4))
        del o
    return out, lses


def _backward(
    call: _Call, dout: Tensor, x: Tensor, out: Tensor, lses: list[Tensor], grads: list[ProjectionGradient]
) -> Tensor:
    """dx `[B * L, E]`; adds to `grads` of q, k, v. `dout` and `out` are `[B, L, H, D]`."""
    q, k, v = call.projections.q, call.projections.k, call.projections.v
    q_grads, k_grads, v_grads = grads
    C = call.schedule.ranks
    dx = kh = vh = dk = dv = None
    for stage, lse in zip(call.schedule.stages, lses, strict=True):
        if stage.opens_kv:
            kh, vh = call.heads_of(k, x, stage.kv), call.heads_of(v, x, stage.kv)
        assert kh is not None and vh is not None
        qh = call.heads_of(q, x, stage.q)
        doh, oh = call.heads_from(dout, stage.q), call.heads_from(out, stage.q)
        pairing = call.pairing(stage, x.device)
        dq, dk_stage, dv_stage = call.kernel.backward(
            doh, qh, _paired(kh, pairing), _paired(vh, pairing), oh, lse, call.spec
        )
        del qh, doh, oh
        dk = _accumulated(dk, dk_stage, kh, pairing)
        dv = _accumulated(dv, dv_stage, vh, pairing)
        del dk_stage, dv_stage
        if stage.closes_kv:
            kh = vh = None
        dq = sequence_pieces(dq, C)
        dq = exchange(dq, call.group)
        dx = q_grads.add(dq, x, stage.q, dx)
        del dq
        if stage.closes_kv:
            dk = sequence_pieces(dk, C)
            dk = exchange(dk, call.group)
            dx = k_grads.add(dk, x, stage.kv, dx)
            dk = None
            dv = sequence_pieces(dv, C)
            dv = exchange(dv, call.group)
            dx = v_grads.add(dv, x, stage.kv, dx)
            dv = None
    assert dx is not None
    return dx


def _paired(kv: Tensor, pairing: Tensor | None) -> Tensor:
    """The KV heads a kernel is given: its own, or one per query head where groups are uneven."""
    return kv if pairing is None else kv.index_select(1, pairing)


def _accumulated(total: Tensor | None, part: Tensor, kv: Tensor, pairing: Tensor | None) -> Tensor:
    """`total` plus a stage's gradient of `kv`, in place; the first part is taken as it is."""
    if pairing is not None:
        part = torch.zeros_like(kv).index_add_(1, pairing, part)
    return part if total is None else total.add_(part)


class _UPipeAttention(torch.autograd.Function):
    """Autograd's view of the two functions above."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, *tensors: Tensor | None) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            out, lses = _forward(call.with_tensors(tensors), x.to(call.dtype))
        result = out.flatten(2, 3)
        ctx.call = call
        ctx.save_for_backward(x, result, *tensors, *lses)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, result, *saved = ctx.saved_tensors
        stages = len(ctx.call.schedule.stages)
        tensors, lses = saved[:-stages], saved[-stages:]
        call: _Call = ctx.call.with_tensors(tensors)
        wanted = iter(ctx.needs_input_grad[2:])
        grads = [
            ProjectionGradient.zeros(p, wanted) for p in (call.projections.q, call.projections.k, call.projections.v)
        ]
        heads = (call.schedule.heads, -1)
        with torch.autocast(x.device.type, enabled=False):
            dx = _backward(call, dout.unflatten(2, heads), x.to(call.dtype), result.unflatten(2, heads), lses, grads)
        return None, dx.to(x.dtype).view_as(x), *(t for g in grads for t in g.tensors())
