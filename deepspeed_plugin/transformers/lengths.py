"""Rotary embeddings that depend on the length of the sequence, which a rank knows only of its own shard.

Transformers' dynamic and long rotary types choose their tables by the largest position that they are given. They are
given one more row, at the largest position on any rank, and that row of the tables is cut off again: ranks then rotate
as one process does, and what a module remembers of lengths it has seen is the same on all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass
class LargestPosition:
    """The largest position on any rank, from the model's door to its rotary embeddings.

    Attributes:
        value: that of this forward; None where evaluation is left to the model.
    """

    value: int | None = None

    def tell(self, model: nn.Module) -> list[RemovableHandle]:
        """Tell it to every rotary embedding of `model` that depends on it, in each forward."""
        return [handle for module in model.modules() if _depends_on_length(module) for handle in self._hooks(module)]

    def _hooks(self, module: nn.Module) -> Iterator[RemovableHandle]:
        yield module.register_forward_pre_hook(self._append, with_kwargs=True)
        yield module.register_forward_hook(self._cut)

    def _append(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Positions `[..., L]`, the second argument, with the largest as one more."""
        if self.value is None:
            return None
        positions: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        longer = torch.cat([positions, torch.full_like(positions[..., :1], self.value)], -1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    def _cut(self, module: nn.Module, args: tuple[Any, ...], tables: Any) -> Any:
        """Tables `[..., L + 1, R]`, one or several, without their last row."""
        if self.value is None:
            return None
        if isinstance(tables, Tensor):
            return tables[..., :-1, :]
        return tuple(table[..., :-1, :] for table in tables)


def _depends_on_length(module: nn.Module) -> bool:
    """Whether it is a rotary embedding of another type than the plain one, whose tables go by their rows alone.

    Most others do too, but what a type depends on is the matter of each class (Phi-3.5-MoE's scale by any).
    """
    kinds = getattr(module, "rope_type", None)
    names = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(name not in (None, "default") for name in names)
