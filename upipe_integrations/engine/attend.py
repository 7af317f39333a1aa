"""One stage's attention on this rank: which heads it has, which KV head each attends, and their sinks.

Shapes: B batch, S the whole sequence in natural order, n query heads and v KV heads of this rank in the stage, D head
size. Heads are `[B, n, S, D]`, lse is `[B, n, S]`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from upipe_integrations.all_to_all import group_rank
from upipe_integrations.constants import constant
from upipe_integrations.engine.call import Call
from upipe_integrations.projections.sums import RunningSum, ScaledSum, Sum
from upipe_integrations.schedule import Stage


class _OpenHeads:
    """K and V `[B, v, S, D]` for the stages that share them, from ``open`` to :meth:`close`."""

    k: Tensor
    v: Tensor

    def close(self) -> None:
        """Let go of K and V."""
        del self.k, self.v


class OpenKV(_OpenHeads):
    """K and V for the stages that share them, and the sums of their gradients, which stay until they are taken."""

    dk: RunningSum
    dv: RunningSum

    def __init__(self, call: Call) -> None:
        self._mode, self._dtype = call.staging.mode, call.dtype

    def open(self, heads: list[Tensor], stage: Stage) -> None:
        """Take over K and V, which `stage` opens."""
        self.k, self.v = heads
        self.dk, self.dv = self._empty_sum(stage), self._empty_sum(stage)

    def _empty_sum(self, stage: Stage) -> RunningSum:
        """For dK or dV: of one stage's alone where none shares its KV heads."""
        dtype = self._dtype if stage.closes_kv else self._mode.kv_sum_dtype(self._dtype)
        return ScaledSum() if dtype == torch.bfloat16 and not stage.closes_kv else Sum(dtype)


class OpenKVInTiles(_OpenHeads):
    """:class:`OpenKV` whose gradients are summed tile by tile of the keys."""

    dk: TileSum
    dv: TileSum

    def __init__(self, call: Call) -> None:
        self._dtype = call.staging.mode.kv_sum_dtype(call.dtype)

    def open(self, heads: list[Tensor]) -> None:
        """Take over K and V."""
        self.k, self.v = heads
        self.dk, self.dv = TileSum(self.k, self._dtype), TileSum(self.v, self._dtype)


class TileSum:
    """A sum of gradients of `heads` `[B, v, S, D]`, which lies in memory as they do: `[S, B, v, D]`."""

    def __init__(self, heads: Tensor, dtype: torch.dtype) -> None:
        S_first = heads.permute(2, 0, 1, 3)
        self.dtype = dtype
        self._total = S_first.new_zeros(S_first.shape, dtype=dtype).permute(1, 2, 0, 3)

    def add_(self, tile: slice, part: Tensor, pairing: Tensor | None) -> None:
        """Add to the keys of `tile`; `pairing` says which of the heads each of the part's is."""
        if pairing is None:
            self._total[:, :, tile].add_(part)  # not `+=`, which copies the tile onto itself besides
        else:
            self._total[:, :, tile].index_add_(1, pairing, part.to(self.dtype))

    def take(self, dtype: torch.dtype) -> Tensor:
        """The sum in `dtype`, which is given away."""
        total = self._total
        del self._total
        return total.to(dtype)


class StageAttention:
    """Attention of one stage on this rank.

    Args:
        call: the call, with its tensors.
        stage: the stage.
        like: a tensor that is where heads are.
        sink_gradient: `[H]`, to which gradients of sinks are added; None where none is wanted.
    """

    def __init__(self, call: Call, stage: Stage, like: Tensor, sink_gradient: Tensor | None = None) -> None:
        staging, rank = call.staging, group_rank(call.staging.group)
        self._ranks = staging.schedule.ranks
        self._kernel = staging.kernel.beside_exchanges() if staging.mode.overlaps_sending else staging.kernel
        self._heads = stage.q.by_rank[rank]
        # None where the kernel's own grouping of query heads says the same.
        self._pairing = None if stage.grouped_evenly(rank) else constant(stage.kv_of_q[rank], like)
        self._sinks = None if call.sinks is None else call.sinks.index_select(0, constant(self._heads, like))
        self._sink_gradient = sink_gradient
        self._spec = call.spec
        if call.spec.dropout is not None:  # which must know the heads
            dropout = dataclasses.replace(call.spec.dropout, heads=self._heads)
            self._spec = dataclasses.replace(call.spec, dropout=dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        return self._with_sinks(*self._kernel.forward(q, self._paired(k), self._paired(v), self._spec))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), the last two of the heads that the kernel was given: see :meth:`add_to`."""
        self._add_sink_gradient(dout, out, lse)
        return self._kernel.backward(dout, q, self._paired(k), self._paired(v), out, lse, self._spec)

    def add_to(self, kv: OpenKV, dk: Tensor, dv: Tensor) -> None:
        """Add what :meth:`backward` gave to the sums of the KV heads."""
        kv.dk.add_(self._of_kv_heads(dk, kv.k))
        kv.dv.add_(self._of_kv_heads(dv, kv.v))

    def piece_backward(self, dout: Tensor, q: Tensor, kv: OpenKVInTiles, start: int) -> tuple[Tensor, Tensor]:
        """(dq, out) of the query rows from `start` on; adds to dK, dV and the gradient of sinks.

        The rows are attended against the keys they can see, and their backward runs over tiles of these, a rank's rows
        long.
        """
        S, causal = kv.k.shape[2], self._spec.causal
        end = start + q.shape[2] if causal else S
        seen_k, seen_v = (self._paired(t[:, :, :end]) for t in (kv.k, kv.v))
        out, lse = self._with_sinks(*self._kernel.forward_block(q, seen_k, seen_v, self._spec, start))
        del seen_k, seen_v
        self._add_sink_gradient(dout, out, lse)
        dq = Sum(kv.dk.dtype)
        for first in range(0, end, S // self._ranks):
            tile = slice(first, min(first + S // self._ranks, end))
            tile_k, tile_v = (self._paired(t[:, :, tile]) for t in (kv.k, kv.v))
            dq_part, dk, dv = self._kernel.backward_block((dout, q, tile_k, tile_v, out, lse), self._spec, start, first)
            kv.dk.add_(tile, dk, self._pairing)
            kv.dv.add_(tile, dv, self._pairing)
            del dk, dv
            dq.add_(dq_part)
            del dq_part
        return dq.take(), out

    def _paired(self, kv: Tensor) -> Tensor:
        """The KV heads a kernel is given: its own, or one per query head where groups are uneven."""
        return kv if self._pairing is None else kv.index_select(1, self._pairing)

    def _of_kv_heads(self, part: Tensor, kv: Tensor) -> Tensor:
        """The gradient of the heads of `kv` from that of the heads that the kernel was given."""
        return part if self._pairing is None else torch.zeros_like(kv).index_add_(1, self._pairing, part)

    def _with_sinks(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of a softmax in which each head's sink takes part without a value.

        With that lse a kernel's backward gives the gradients of q, k and v as they are.
        """
        if self._sinks is None:
            return out, lse
        if lse.shape != out.shape[:3]:
            raise ValueError(f"this kernel's lse has shape {tuple(lse.shape)}, which sinks can't be merged into.")
        with_sink = torch.logaddexp(lse, self._sinks.to(lse.dtype)[None, :, None])
        return out * (lse - with_sink).exp()[..., None].to(out.dtype), with_sink

    def _add_sink_gradient(self, dout: Tensor, out: Tensor, lse: Tensor) -> None:
        """dsink = -sum over rows of the sink's probability times dout . out; repeated heads have zero dout."""
        total, sinks = self._sink_gradient, self._sinks
        if total is None or sinks is None:
            return
        probability = (sinks.to(lse.dtype)[None, :, None] - lse).exp()
        through = torch.einsum("bnsd,bnsd->bns", dout.to(lse.dtype), out.to(lse.dtype))
        total.index_add_(0, constant(self._heads, dout), -(probability * through).sum((0, 2)).to(total.dtype))
