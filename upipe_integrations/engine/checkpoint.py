"""The policy that keeps the result of attention under activation checkpointing.

A checkpointed layer runs its forward again in backward; with the fused modes, which attend again in backward
themselves, attention would run three times forward. Under selective checkpointing with :func:`context_fn` the
operator's result is kept instead: recomputing the layer skips it, so no third attention runs and as many bytes
travel as for checkpointed Ulysses.

The price is y (or the attention output and lse in mode ``"keep"``, and received heads in ``"keep_heads"``) kept beside
the layer's input: two `[B, L, E]` tensors a layer instead of one, in ``"keep_heads"`` three to five. Keep it where
speed matters or saved activations are offloaded; leave it, with a plain checkpoint, where the saved activations of all
layers are what fills the memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def _is_attention(operator: Any) -> bool:
    return operator in (torch.ops.upipe.attention.default, torch.ops.upipe.attention_in_graph.default)


def _keep_attention(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_attention(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def context_fn() -> tuple[Any, Any]:
    """For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=context_fn)``: keeps the result of
    attention that runs in a mode with ``operator``, and recomputes the rest."""
    forward, recomputation = create_selective_checkpoint_contexts(_keep_attention)
    return forward, _OnlyAttention(recomputation)


class _OnlyAttention(TorchDispatchMode):
    """PyTorch's mode of the recomputation, for attention alone.

    PyTorch's own refuses operators that forward did not run. ZeRO-3 gathers and frees parameters in both, of which some
    are there already in one of them.

    Args:
        recomputation: PyTorch's mode.
    """

    def __init__(self, recomputation: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recomputation = recomputation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        counter = getattr(self._recomputation, "func_counter", None)
        if counter is not None:
            counter.clear()  # as PyTorch's does, for a graph that is kept
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_attention(func):
            return self._recomputation.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
