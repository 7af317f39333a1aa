"""What all flash kernels on CUDA share: `[B, S, heads, D]` tensors, and packed rows with cu_seqlens."""

from __future__ import annotations

import dataclasses
import itertools
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.constants import constant
from upipe_integrations.kernels.base import DOCUMENTS, WINDOW, AttentionSpec, Kernel


@dataclass(frozen=True)
class Packing:
    """Boundaries of the documents of one row, as flash kernels take them."""

    cu_seqlens: Tensor
    longest: int


def _packing(boundaries: tuple[int, ...], like: Tensor) -> Packing:
    longest = max(b - a for a, b in itertools.pairwise(boundaries))
    return Packing(constant(boundaries, like, torch.int32), longest)


class FlashForm(Kernel):
    """Turns the engine's layout into flash kernels': subclasses call the kernel, dense or packed.

    Dense tensors are `[B, S, heads, D]` with lse `[B, heads, S]`; packed ones are one batch row,
    `[S, heads, D]` with lse `[heads, S]`.
    """

    @abstractmethod
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, packing: Packing | None
    ) -> tuple[Tensor, Tensor]:
        """(out, lse)."""

    @abstractmethod
    def _gradients(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        spec: AttentionSpec,
        packing: Packing | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of (dout, q, k, v, out, lse)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if spec.documents is None:
            out, lse = self._attend(q, k, v, spec, None)
            return out.transpose(1, 2), lse
        rows = [self._attend(q[b], k[b], v[b], spec, p) for b, p in _packings(spec, q)]
        out, lse = (_joined([row[i] for row in rows]) for i in (0, 1))
        return out.transpose(1, 2), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
        if spec.documents is None:
            grads = self._gradients((dout, q, k, v, out, lse), spec, None)
        else:
            rows = [
                self._gradients((dout[b], q[b], k[b], v[b], out[b], lse[b]), spec, p) for b, p in _packings(spec, q)
            ]
            grads = (_joined([r[0] for r in rows]), _joined([r[1] for r in rows]), _joined([r[2] for r in rows]))
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv

    def block_refusal(self, spec: AttentionSpec) -> str | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        refused = [name for name in spec.features() if name in (WINDOW, DOCUMENTS)]
        return f"it can't do {', '.join(refused)} in blocks" if refused else None

    def forward_block(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, start: int) -> tuple[Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`.

        Flash kernels align causal attention at the bottom right: the last query row sees the last key.
        """
        assert not spec.causal or k.shape[2] == start + q.shape[2]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse = self._attend(q, k, v, spec, None)
        return out.transpose(1, 2), lse

    def backward_block(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        spec: AttentionSpec,
        start: int,
        first_key: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        dout, q, k, v, out, lse = tensors
        if spec.causal and first_key + k.shape[2] <= start:
            spec = dataclasses.replace(spec, causal=False)  # rows see all keys that come before them
        dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
        dq, dk, dv = self._gradients((dout, q, k, v, out, lse), spec, None)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _packings(spec: AttentionSpec, q: Tensor) -> list[tuple[int, Packing]]:
    """(batch row, its packing), for `[B, S, heads, D]`."""
    assert spec.documents is not None
    B = q.shape[0]
    rows = spec.documents * B if len(spec.documents) == 1 else spec.documents
    return [(b, _packing(rows[b], q)) for b in range(B)]


def _joined(rows: list[Tensor]) -> Tensor:
    """Batch rows together; a single one is only viewed."""
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)
