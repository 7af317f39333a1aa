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

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def _keep_attention(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in (torch.ops.upipe.attention.default, torch.ops.upipe.attention_in_graph.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


context_fn: Callable[[], tuple[Any, Any]] = functools.partial(create_selective_checkpoint_contexts, _keep_attention)
"""For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=context_fn)``: keeps the result of
attention that runs in a mode with ``operator``, and recomputes the rest."""
