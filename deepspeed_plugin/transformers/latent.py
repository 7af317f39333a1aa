"""Multi-head latent attention (MLA, DeepSeek-V2 and its descendants): heads projected from small latents.

A layer's modules compute the latents of all rows once, under autograd and with their hooks: of queries (where the model
compresses them), of keys and values together, and the rotated part that all key heads share. Side by side the first two
are what the engine projects heads from, stage by stage; the shared part is appended to the key heads of a stage. So a
layer keeps latents for backward, never keys and values of all heads.

Shapes: B batch, L rows of the sequence on this rank, E hidden size, Q and R sizes of the latents, D of a query or key
head, of which all heads share P.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_plugin.transformers.rotary import ModuleRotary
from upipe_integrations import AttentionProjections, HeadBlock, HeadFunction, Projection, Weights


def _by_config(config: Any) -> str:
    return "apply_rotary_pos_emb_interleave" if config.rope_interleave else "apply_rotary_pos_emb"


@dataclass(frozen=True)
class Latent:
    """What latent attention does, where that is not what DeepSeek-V3's does.

    Args:
        rotary: the name of the rotary function in the class's modelling file, from the model's configuration.
        complex_tables: see :class:`~deepspeed_plugin.transformers.rotary.ModuleRotary`.
        factors: the module's factors on queries and on the latents of keys and values; None is none.
    """

    rotary: Callable[[Any], str] = _by_config
    complex_tables: bool = False
    factors: tuple[str, str] | None = None

    def module_rotary(self, module: Any) -> ModuleRotary:
        """The rotary of the last P of a query head's D, and (``rotate_part``) of the P that key heads share."""
        apply_rotary = getattr(sys.modules[type(module).__module__], self.rotary(module.config))
        return ModuleRotary(apply_rotary, range(module.qk_nope_head_dim, module.qk_head_dim), self.complex_tables)


def latent_inputs(module: Any) -> tuple[str, str]:
    """The names of the linear layers that make the heads: of queries, and of keys and values."""
    return "q_proj" if module.q_lora_rank is None else "q_b_proj", "kv_b_proj"


def latent_projections(
    module: Any, latent: Latent, x: Tensor, rotary: ModuleRotary, tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, AttentionProjections]:
    """What the engine projects heads from, and how.

    Args:
        module: the attention module.
        latent: how its class differs from DeepSeek-V3's.
        x: `[B, L, E]`, the module's input.
        rotary: from :meth:`Latent.module_rotary`.
        tables: cosines and sines of this rank's rows.

    Returns:
        The latents side by side, `[B, L, Q + R]` (`[B, L, E + R]` where queries are not compressed), and the
        projections that read their columns::

            columns            0 ... Q - 1      Q ... Q + R - 1
            latent of          queries          keys and values
            makes, per head    q: D             k without the shared part: D - P, then v: Dv
    """
    own_size, shared_size, value_dim = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    # [B, L, E] -> the latent of keys and values [B, L, R], and the part that all key heads share [B, L, P]
    kv_latent, shared = module.kv_a_proj_with_mqa(x).split([module.kv_lora_rank, shared_size], -1)
    kv_latent = module.kv_a_layernorm(kv_latent)
    q_latent = x if module.q_lora_rank is None else module.q_a_layernorm(module.q_a_proj(x))
    if latent.factors is not None:
        q_factor, kv_factor = (getattr(module, name) for name in latent.factors)
        q_latent, kv_latent = q_latent * q_factor, kv_latent * kv_factor
    width = q_latent.shape[2]
    q, kv = (getattr(module, name) for name in latent_inputs(module))

    def from_kv_latent(head_dim: int, outputs: range, function: HeadFunction | None = None) -> Projection:
        block = HeadBlock(own_size + value_dim, outputs)
        columns = range(width, width + module.kv_lora_rank)
        return Projection(Weights(kv.weight, kv.bias), head_dim, function=function, block=block, columns=columns)

    append = HeadFunction(_with_shared, (rotary.rotate_part(shared[:, :, None], *tables),), by_row=(0,))
    projections = AttentionProjections(
        Projection(
            Weights(q.weight, q.bias),
            module.qk_head_dim,
            function=HeadFunction(rotary, tables, (0, 1)),
            columns=range(width),
        ),
        from_kv_latent(module.qk_head_dim, range(own_size), append),
        from_kv_latent(value_dim, range(own_size, own_size + value_dim)),
    )
    return torch.cat([q_latent, kv_latent], -1), projections


def _with_shared(heads: Tensor, shared: Tensor) -> Tensor:
    """`[B, L, heads, D - P]` and `[B, L, 1, P]` -> `[B, L, heads, D]`."""
    return torch.cat([heads, shared.to(heads.dtype).expand(-1, -1, heads.shape[2], -1)], -1)
