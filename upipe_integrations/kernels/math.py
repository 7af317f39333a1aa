"""Attention written out, in any precision on any device: the oracle, and the kernel of last resort.

Scores are formed for a block of query rows at a time, so memory is O(block * S) per head, not O(S * S);
half-precision inputs are computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from upipe_integrations.kernels.base import HALF_PRECISION, AttentionSpec, KernelRequest

_BLOCK_ROWS = 1024


class MathKernel:
    """Plain softmax attention; see the module docstring."""

    name = "math"

    def refusal(self, request: KernelRequest) -> str | None:
        """None: every request is served."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        dtype = _working_dtype(q)
        k_all, v_all = _per_query_head(k, q).to(dtype), _per_query_head(v, q).to(dtype)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=dtype)
        for rows, keys in _blocks(q, k, spec):
            scores = _scores(q[:, :, rows].to(dtype), k_all[:, :, keys], rows, spec)
            lse[:, :, rows] = scores.logsumexp(-1)
            out[:, :, rows] = (torch.softmax(scores, -1) @ v_all[:, :, keys]).to(q.dtype)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        dtype = _working_dtype(q)
        k_all, v_all = _per_query_head(k, q).to(dtype), _per_query_head(v, q).to(dtype)
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k_all), torch.zeros_like(v_all)
        scale = spec.scale_for(q.shape[3])
        for rows, keys in _blocks(q, k, spec):
            q_rows, dout_rows = q[:, :, rows].to(dtype), dout[:, :, rows].to(dtype)
            p = (_scores(q_rows, k_all[:, :, keys], rows, spec) - lse[:, :, rows, None]).exp()
            dv[:, :, keys] += p.transpose(-1, -2) @ dout_rows
            delta = (dout_rows * out[:, :, rows].to(dtype)).sum(-1, keepdim=True)
            dscores = p * (dout_rows @ v_all[:, :, keys].transpose(-1, -2) - delta) * scale
            dq[:, :, rows] = (dscores @ k_all[:, :, keys]).to(q.dtype)
            dk[:, :, keys] += dscores.transpose(-1, -2) @ q_rows
        return dq, _sum_groups(dk, k), _sum_groups(dv, v)


def _working_dtype(q: Tensor) -> torch.dtype:
    return torch.float32 if q.dtype in HALF_PRECISION else q.dtype


def _per_query_head(kv: Tensor, q: Tensor) -> Tensor:
    """A KV head for every query head: a, b -> a, a, b, b."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _sum_groups(grad: Tensor, kv: Tensor) -> Tensor:
    """The inverse of :func:`_per_query_head` for gradients."""
    grouped: Tensor = grad.unflatten(1, (kv.shape[1], -1))
    return grouped.sum(2).to(kv.dtype)


def _blocks(q: Tensor, k: Tensor, spec: AttentionSpec) -> Iterator[tuple[slice, slice]]:
    """Query rows of a block, and the keys it can see."""
    S = q.shape[2]
    for first in range(0, S, _BLOCK_ROWS):
        end = min(first + _BLOCK_ROWS, S)
        yield slice(first, end), slice(0, end if spec.causal else k.shape[2])


def _scores(q_rows: Tensor, keys: Tensor, rows: slice, spec: AttentionSpec) -> Tensor:
    scores = q_rows @ keys.transpose(-1, -2) * spec.scale_for(q_rows.shape[3])
    if spec.causal:
        row = torch.arange(rows.start, rows.stop, device=scores.device)
        column = torch.arange(keys.shape[2], device=scores.device)
        scores.masked_fill_(column[None] > row[:, None], float("-inf"))
    return scores
