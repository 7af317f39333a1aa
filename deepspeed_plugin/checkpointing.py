"""Gradient checkpointing of a Transformers model that has UPipe."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed_plugin.transformers.layer import StagedAttention
from upipe_integrations.engine.checkpoint import context_fn


def enable_checkpointing(model: nn.Module, *, keep_attention: bool = True) -> None:
    """Turn on gradient checkpointing for `model`, in the form that suits UPipe.

    Args:
        model: a Transformers model whose attention was replaced (``engine.module``).
        keep_attention: keep each layer's attention result beside the layer's input, so that recomputing the layer
            in backward skips attention and its exchanges: the bytes of checkpointed Ulysses, no third attention
            forward in the fused modes, one more `[B, L, E]` tensor a layer (in ``"keep_heads"`` q, k and v besides).
            False is a plain checkpoint: less saved memory, one more attention forward.

    Raises:
        ValueError: the model has no attention that was replaced.
    """
    layers = [module for module in model.modules() if isinstance(module, StagedAttention)]
    if not layers:
        raise ValueError(
            f"enable_checkpointing: {type(model).__name__} has no attention that UPipe replaced. Call it after "
            "deepspeed.initialize with the 'upipe' key, on engine.module."
        )
    for layer in layers:
        layer.keep_result = keep_attention
    # Set on the model, not in TrainingArguments: a function there can't be written to its JSON.
    options: dict[str, Any] = {"use_reentrant": False}
    if keep_attention:
        options["context_fn"] = context_fn
    enable: Any = model.gradient_checkpointing_enable
    enable(gradient_checkpointing_kwargs=options)
