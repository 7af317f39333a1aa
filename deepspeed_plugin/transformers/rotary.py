"""The rotary functions of Transformers' modelling files, as functions of the heads of one stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ModuleRotary:
    """Rotates a part of each head by a modelling file's own function of queries and keys.

    Args:
        apply: ``apply(queries, keys, *tables)`` of `[B, heads, L, D]`.
        part: which of a head's D elements it rotates; the others stay as they are.
        complex_tables: whether it takes one complex table in the place of cosines and sines.
    """

    apply: Callable[..., Any]
    part: range
    complex_tables: bool = False

    def __call__(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads `[B, L, heads, D]` whose part is rotated, by tables `[B or 1, L, R]` of their rows."""
        first, last = self.part.start, self.part.stop
        rotated = self.rotate_part(heads[..., first:last], cos, sin)
        if len(self.part) == heads.shape[-1]:
            return rotated
        return torch.cat([heads[..., :first], rotated, heads[..., last:]], -1)

    def rotate_part(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The rotated part of heads, from the part alone: `[B, L, heads, len(part)]`, and so is the result."""
        tables = (torch.complex(cos, sin),) if self.complex_tables else (cos, sin)
        by_head = heads.transpose(1, 2)  # [B, heads, L, len(part)]
        rotated: Tensor = self.apply(by_head, by_head[:, :1].contiguous(), *tables)[0].transpose(1, 2)
        return rotated
