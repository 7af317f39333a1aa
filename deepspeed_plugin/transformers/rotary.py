"""The rotary functions of Transformers' modelling files, as functions of the heads of one stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ModuleRotary:
    """Rotates a part of heads `[B, L, heads, D]` by a modelling file's own function of queries and keys.

    Args:
        apply: ``apply(queries, keys, *tables)`` of `[B, heads, L, D]`.
        part: which of D it is given.
        complex_tables: whether it takes one complex table in the place of cosines and sines.
    """

    apply: Callable[..., Any]
    part: range
    complex_tables: bool = False

    def __call__(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, last = self.part.start, self.part.stop
        rotated = self.of_part(heads[..., first:last], cos, sin)
        if len(self.part) == heads.shape[-1]:
            return rotated
        return torch.cat([heads[..., :first], rotated, heads[..., last:]], -1)

    def of_part(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The same of the part alone, `[B, L, heads, len(part)]`."""
        tables = (torch.complex(cos, sin),) if self.complex_tables else (cos, sin)
        by_head = heads.transpose(1, 2)
        rotated: Tensor = self.apply(by_head, by_head[:, :1].contiguous(), *tables)[0].transpose(1, 2)
        return rotated
