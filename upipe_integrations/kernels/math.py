"""Attention written out, in any precision on any device: the oracle, and the kernel of last resort.

Scores are formed for a block of query rows at a time, so memory is O(block * S) per head, not O(S * S);
half-precision inputs are computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.kernels.base import (
    HALF_PRECISION,
    AttentionSpec,
    BlockKernel,
    KernelRequest,
    Region,
    common,
    regions,
    shifted,
)

_BLOCK_ROWS = 1024


class MathKernel(BlockKernel):
    """Plain softmax attention with every feature; see the module docstring.

    Args:
        longest: the longest sequence that it is taken for, in tokens; None is any.
    """

    name = "math"

    _longest: int | None = None

    def __init__(self, longest: int | None = None) -> None:
        self._longest = longest

    def longest(self, head_dim: int) -> int | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        return self._longest

    def refusal(self, request: KernelRequest) -> str | None:
        """None: every request is served."""
        return None

    def block_refusal(self, spec: AttentionSpec) -> str | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        # A mask is drawn for a region at a time, and blocks make other regions.
        return "dropout can't be drawn in blocks" if spec.dropout is not None else None

    def forward_block(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, start: int) -> tuple[Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        dtype = _working_dtype(q)
        k_all, v_all = per_query_head(k, q).to(dtype), per_query_head(v, q).to(dtype)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=dtype)
        for region in _regions_of(q, k, spec, start, 0):
            b, rows, keys = region.batch, shifted(region.rows, -start), region.keys
            scores = _scores(q[b, :, rows].to(dtype), k_all[b, :, keys], region, spec).capped
            lse[b, :, rows] = scores.logsumexp(-1)
            p = torch.softmax(scores, -1)
            kept = _kept(p, region, spec)
            out[b, :, rows] = ((p if kept is None else p * kept) @ v_all[b, :, keys]).to(q.dtype)
        return out, lse

    def backward_block(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        spec: AttentionSpec,
        start: int,
        first_key: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        dout, q, k, v, out, lse = tensors
        dtype = _working_dtype(q)
        k_all, v_all = per_query_head(k, q).to(dtype), per_query_head(v, q).to(dtype)
        dq = torch.zeros_like(q)
        dk, dv = torch.zeros_like(k_all), torch.zeros_like(v_all)
        scale = spec.scale_for(q.shape[3])
        for region in _regions_of(q, k, spec, start, first_key):
            b, rows, keys = region.batch, shifted(region.rows, -start), shifted(region.keys, -first_key)
            q_rows, dout_rows = q[b, :, rows].to(dtype), dout[b, :, rows].to(dtype)
            scores = _scores(q_rows, k_all[b, :, keys], region, spec)
            p = (scores.capped - lse[b, :, rows, None].to(dtype)).exp()
            kept = _kept(p, region, spec)
            dp = dout_rows @ v_all[b, :, keys].transpose(-1, -2)
            if kept is None:
                dv[b, :, keys].add_(p.transpose(-1, -2) @ dout_rows)
            else:
                dv[b, :, keys].add_((p * kept).transpose(-1, -2) @ dout_rows)
                dp = dp * kept
            delta = (dout_rows * out[b, :, rows].to(dtype)).sum(-1, keepdim=True)
            dscores = p * (dp - delta) * scale
            if scores.slope is not None:
                dscores = dscores * scores.slope
            dq[b, :, rows] = (dscores @ k_all[b, :, keys]).to(q.dtype)
            dk[b, :, keys].add_(dscores.transpose(-1, -2) @ q_rows)
        return dq, sum_groups(dk, k), sum_groups(dv, v)


def _regions_of(q: Tensor, k: Tensor, spec: AttentionSpec, start: int, first_key: int) -> Iterator[Region]:
    """The regions of the query rows from `start` on, cut to the keys from `first_key` on."""
    rows, keys = slice(start, start + q.shape[2]), slice(first_key, first_key + k.shape[2])
    for region in regions(spec, q.shape[0], max(rows.stop, keys.stop), _BLOCK_ROWS, rows):
        seen = common(region.keys, keys)
        if seen is not None:
            yield Region(region.batch, region.rows, seen)


def per_query_head(kv: Tensor, q: Tensor) -> Tensor:
    """A KV head for every query head: a, b -> a, a, b, b; the same tensor where there are as many."""
    return kv if q.shape[1] == kv.shape[1] else kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def sum_groups(grad: Tensor, kv: Tensor) -> Tensor:
    """The inverse of :func:`per_query_head` for gradients."""
    if grad.shape[1] == kv.shape[1]:
        return grad.to(kv.dtype)
    grouped: Tensor = grad.unflatten(1, (kv.shape[1], -1))
    return grouped.sum(2).to(kv.dtype)


def _working_dtype(q: Tensor) -> torch.dtype:
    return torch.float32 if q.dtype in HALF_PRECISION else q.dtype


@dataclass(frozen=True)
class _Scores:
    """Masked and capped scores of a region, and the cap's derivative where there is one."""

    capped: Tensor
    slope: Tensor | None


def _scores(q_rows: Tensor, keys: Tensor, region: Region, spec: AttentionSpec) -> _Scores:
    scores = q_rows @ keys.transpose(-1, -2) * spec.scale_for(q_rows.shape[3])
    slope = None
    if spec.softcap is not None:
        bend = torch.tanh(scores / spec.softcap)
        scores, slope = bend * spec.softcap, 1 - bend.square()
    hidden = region.masked(spec, scores.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return _Scores(scores, slope)


def _kept(p: Tensor, region: Region, spec: AttentionSpec) -> Tensor | None:
    """Dropout as a factor on probabilities, 0 or 1 / (1 - rate); None without dropout.

    Drawn per head and batch row from a generator seeded by the dropout's seed, the head's global number, the
    batch row and the region's first row: what a head gets does not depend on which heads share its stage.
    """
    dropout = spec.dropout
    if dropout is None or dropout.rate == 0:
        return None
    assert len(dropout.heads) == p.shape[1], "the engine says which heads these are"
    generator = torch.Generator(device=p.device)
    kept = torch.empty_like(p)
    for b in range(p.shape[0]):
        for j, head in enumerate(dropout.heads):
            row = (region.batch.start or 0) + b
            generator.manual_seed(hash((dropout.seed, head, row, region.rows.start)) & (2**63 - 1))
            draw = torch.rand(p.shape[2:], generator=generator, device=p.device)
            kept[b, j] = (draw >= dropout.rate) / (1 - dropout.rate)
    return kept
