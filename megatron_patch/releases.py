"""What differs between the releases of Megatron (0.16 to 0.19) and between its implementations of one module."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor


class _CoreAttentionAtOneRank(DotProductAttention):
    """Megatron's own core attention, built though it refuses context parallelism.

    UPipe does not call it, but it holds the parameter of attention sinks, and serves inference at one rank.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)


def core_attention_at_one_rank(submodules: Any) -> Any:
    """`submodules` with a core attention that can be built at any context-parallel size."""
    if submodules.core_attention is DotProductAttention:
        return dataclasses.replace(submodules, core_attention=_CoreAttentionAtOneRank)
    return submodules


def sink_logits(attention: Any) -> Tensor | None:
    """The logits of attention sinks, `[query heads of this tensor-parallel rank]`; None without sinks.

    Raises:
        ValueError: a core attention of which UPipe does not know where its sinks are.
    """
    kind: str = getattr(attention.config, "softmax_type", "vanilla")
    if kind == "vanilla":
        return None
    offset: Tensor | None = getattr(attention.core_attention, "softmax_offset", None)
    if offset is not None:
        return offset.reshape(-1)
    if kind != "off-by-one":
        raise ValueError(
            f"--softmax-type {kind} with a core attention ({type(attention.core_attention).__name__}) that has no "
            "softmax_offset: UPipe does not know its sinks. Use --softmax-type vanilla."
        )
    # Transformer Engine adds the 1 in its kernel: a sink of logit 0.
    weight = attention.linear_qkv.weight
    return torch.zeros(attention.num_attention_heads_per_partition, device=weight.device, dtype=weight.dtype)


def layer_window(config: Any, layer_number: int) -> int | None:
    """How many positions a row attends in this layer, itself among them; None for all before it.

    Raises:
        ValueError: a window that looks ahead.
    """
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    left, right = config.window_size
    if right != 0 and right != -1:
        raise ValueError(
            f"--window-size ({left},{right}) with --context-parallel-impl upipe: causal attention looks back only. Set "
            f"it to ({left},0)."
        )
    return None if left < 0 else int(left) + 1


def yarn_factor(config: Any) -> float:
    """What YaRN multiplies cosine and sine by; 1 without it."""
    try:
        from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
            _yarn_get_concentration_factor_from_config,
        )
    except ImportError:  # releases before YaRN
        return 1.0
    return float(_yarn_get_concentration_factor_from_config(config))
