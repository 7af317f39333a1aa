"""Rotary embedding straight into a send buffer, and its transpose."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.projections.structure import HoldsTensors


@dataclass(frozen=True)
class RotateHalf(HoldsTensors):
    """Rotary embedding of pairs: ``x * cos + rotate_half(x) * sin``.

    Args:
        cos: `[B or 1, L, R]`, this rank's rows, R <= D even; the first R of a head's D are rotated.
        sin: like `cos`.
        interleaved: pairs are neighbours (GPT-J, Megatron's ``rotary_interleaved``) rather than the two halves
            (GPT-NeoX, Llama).
    """

    holds = ("cos", "sin")

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def rotate(self, source: Tensor, target: Tensor, *, inverse: bool = False) -> None:
        """target <- rotated source, both `[C, L, B, n, D]` of any strides; `inverse` is the transpose."""
        R = self.cos.shape[-1]
        cos, sin = (t.to(source.dtype).transpose(0, 1)[None, :, :, None] for t in (self.cos, self.sin))
        (cos_of_first, cos_of_second), (sin_of_first, sin_of_second) = self._pairs(cos), self._pairs(sin)
        sign = -1.0 if inverse else 1.0
        if inverse:
            sin_of_first, sin_of_second = sin_of_second, sin_of_first
        first, second = self._pairs(source[..., :R])
        first_target, second_target = self._pairs(target[..., :R])
        torch.mul(first, cos_of_first, out=first_target)
        first_target.addcmul_(second, sin_of_first, value=-sign)
        torch.mul(second, cos_of_second, out=second_target)
        second_target.addcmul_(first, sin_of_second, value=sign)
        if source.shape[-1] > R:
            target[..., R:].copy_(source[..., R:])

    def _pairs(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second of each pair, as views."""
        if self.interleaved:
            return t[..., 0::2], t[..., 1::2]
        half = t.shape[-1] // 2
        return t[..., :half], t[..., half:]

    def at_rows(self, rows: slice) -> RotateHalf:
        """The rotary of some rows only."""
        return dataclasses.replace(self, cos=self.cos[:, rows], sin=self.sin[:, rows])
