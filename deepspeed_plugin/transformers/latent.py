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
        complex_tables: see :class:`~deepspeed_plugin.rotary.ModuleRotary`.
        factors: the module's factors on queries and on the latents of keys and values; None is none.
    """

    rotary: Callable[[Any], str] = _by_config
    complex_tables: bool = False
    factors: tuple[str, str] | None = None

    def rotary_of(self, module: Any) -> ModuleRotary:
        """The rotary of the trailing part of a query head, and of what key heads share."""
        apply_rotary = getattr(sys.modules[type(module).__module__], self.rotary(module.config))
        return ModuleRotary(apply_rotary, range(module.qk_nope_head_dim, module.qk_head_dim), self.complex_tables)


def latent_inputs(module: Any) -> tuple[str, str]:
    """The linear layers that make heads, of queries and of keys and values; they are read directly."""
    return "q_proj" if module.q_lora_rank is None else "q_b_proj", "kv_b_proj"


def latent_projections(
    module: Any, latent: Latent, x: Tensor, rotary: ModuleRotary, tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, AttentionProjections]:
    """What the engine projects heads from, `[B, L, Q + R]` (E + R where queries are not compressed), and how.

    Args:
        module: the attention module, and `latent` how it differs.
        x: `[B, L, E]`, its input.
        rotary: from :meth:`Latent.rotary_of`.
        tables: its tables of this rank's rows.
    """
    own, shared_size, value_dim = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    of_kv, shared = module.kv_a_proj_with_mqa(x).split([module.kv_lora_rank, shared_size], -1)
    of_kv = module.kv_a_layernorm(of_kv)
    of_q = x if module.q_lora_rank is None else module.q_a_layernorm(module.q_a_proj(x))
    if latent.factors is not None:
        of_q, of_kv = (t * getattr(module, name) for t, name in zip((of_q, of_kv), latent.factors, strict=True))
    width = of_q.shape[2]
    q, kv = (getattr(module, name) for name in latent_inputs(module))

    def of_latent(head_dim: int, rows: range, function: HeadFunction | None = None) -> Projection:
        block = HeadBlock(own + value_dim, rows)
        columns = range(width, width + module.kv_lora_rank)
        return Projection(Weights(kv.weight, kv.bias), head_dim, function=function, block=block, columns=columns)

    append = HeadFunction(_with_shared, (rotary.of_part(shared[:, :, None], *tables),), by_row=(0,))
    projections = AttentionProjections(
        Projection(
            Weights(q.weight, q.bias),
            module.qk_head_dim,
            function=HeadFunction(rotary, tables, (0, 1)),
            columns=range(width),
        ),
        of_latent(module.qk_head_dim, range(own), append),
        of_latent(value_dim, range(own, own + value_dim)),
    )
    return torch.cat([of_q, of_kv], -1), projections


def _with_shared(heads: Tensor, shared: Tensor) -> Tensor:
    """`[B, L, heads, D - P]` and `[B, L, 1, P]` -> `[B, L, heads, D]`."""
    return torch.cat([heads, shared.to(heads.dtype).expand(-1, -1, heads.shape[2], -1)], -1)
