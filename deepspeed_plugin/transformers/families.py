"""The table of attention modules of Transformers that UPipe can stand in for, and what it must know of each.

A class is served because a test compares it with the unpatched model, not because it looks alike: modules
with the same attribute names differ in windows, sinks, norms and gates. Everything else is refused by name.
docs/families.md lists every family, docs/howto/family.md says how to add one.

This file says how classes differ; :mod:`deepspeed_plugin.transformers.facts` reads modules by it.

Shapes: B batch, L rows of the sequence on this rank, E hidden size, H query heads, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_plugin.transformers.adapters import class_name
from deepspeed_plugin.transformers.latent import Latent

# ---------------------------------------------------------------- what a class can differ in


def _always(module: Any) -> bool:
    return True


def _no_window(module: Any) -> int | None:
    return None


@dataclass(frozen=True)
class Family:
    """What an attention class does, where that is not what Llama's does. Names are of the module's attributes.

    Args:
        qkv_layer: one linear layer with the outputs of q, then k, then v, in the place of three layers.
        by_kv_head: whether the outputs of `qkv_layer` go by KV head: the queries that attend it, its k, its v.
        latent: how the heads of latent attention are made, where they are; its layers have names of their own.
        head_dim: the size of query and key heads.
        value_dim: the size of value heads, where it is another.
        value_factor: what values are multiplied by; None is nothing.
        scale: the factor on the scores.
        output: the output projection.
        norms: modules applied to each query and key head; those that are absent or None are no norms.
        norm_after_rotary: whether norms come after the rotary embedding.
        whole_norms: whether norms are RMS norms over all heads together, before the heads are told apart.
        window: ``window(module)``, the positions that a row attends in this layer; None (or 0) is all before it.
        rotates: ``rotates(module)``, whether the layer has a rotary embedding.
        rotated: the size of the leading part of a head that is rotated, where the class cuts it out itself.
        half_tables: whether the model's rotary tables have half of the rotated size.
        mrope: whether positions may have three components per token, after plain ones: `[4, B, L]`.
        query_factor: ``query_factor(module, position_ids)``, a factor on each row's queries `[B, L, 1]`; None is none.
        softcap: the cap of the scores.
        sinks: the parameter with a sink per head, `[H]`; None in layers without.
        output_dropout: the rate of a dropout after the output projection.
        gate: ``gate(module, x, attended)`` of x `[B, L, E]` and the attended heads `[B, L, H * D]`: what goes into the
            output projection, in the shape of the attended heads.
    """

    qkv_layer: str | None = None
    by_kv_head: bool = False
    latent: Latent | None = None
    head_dim: str = "head_dim"
    value_dim: str | None = None
    value_factor: str | None = None
    scale: str = "scaling"
    output: str = "o_proj"
    norms: tuple[str, str] = ("q_norm", "k_norm")
    norm_after_rotary: bool = False
    whole_norms: bool = False
    window: Callable[[Any], int | None] = _no_window
    rotates: Callable[[Any], bool] = _always
    rotated: str | None = None
    half_tables: bool = False
    mrope: bool = False
    query_factor: Callable[[Any, Tensor], Tensor] | None = None
    softcap: str | None = None
    sinks: str | None = None
    output_dropout: str | None = None
    gate: Callable[[Any, Tensor, Tensor], Tensor] | None = None


# ---------------------------------------------------------------- what lines of the table have in common


def _config_window(module: Any) -> int | None:
    return getattr(module.config, "sliding_window", None)


def _module_window(module: Any) -> int | None:
    # Qwen2-MoE sets the attribute in windowed layers only.
    return getattr(module, "sliding_window", None)


def _window_of_sliding_layers(module: Any) -> int | None:
    window: int | None = module.sliding_window if module.is_sliding else None
    return window


def _growing_with_length(module: Any, position_ids: Tensor) -> Tensor:
    """`[B, L]` positions -> `[B, L, 1]`, by the function of the class's modelling file."""
    parameters = module.config.rope_parameters
    factor = sys.modules[type(module).__module__].get_llama_4_attn_scale(
        position_ids, parameters["llama_4_scaling_beta"], parameters["original_max_position_embeddings"]
    )
    by_row: Tensor = factor[:, 0]
    return by_row


def _softplus_gate(module: Any, x: Tensor, attended: Tensor) -> Tensor:
    """A gate per element of the attended heads, `[B, L, H * D]`, or per head, `[B, L, H]`."""
    gate: Tensor = nn.functional.softplus(module.g_proj(x).float()).to(attended.dtype)
    if not module.gate_per_head:
        return attended * gate
    by_head: Tensor = attended.unflatten(2, (-1, module.head_dim)) * gate[..., None]
    return by_head.flatten(2)


_PLAIN = Family()
_CONFIG_WINDOW = Family(window=_config_window)
_MODULE_WINDOW = Family(window=_module_window)
_EXAONE = Family(
    window=_window_of_sliding_layers, rotates=lambda module: module.sliding_window is None or module.is_sliding
)
_WHOLE_NORMS = Family(whole_norms=True)
_GRANITE_SWA = Family(
    window=_module_window,
    sinks="sinks",
    rotates=lambda module: bool(module.config.layer_rope_theta[module.layer_idx]),
)
_MROPE = Family(window=_module_window, mrope=True)
_HUNYUAN = Family(norms=("query_layernorm", "key_layernorm"), norm_after_rotary=True)
_PART_ROTATED = Family(rotated="rotary_ndims", norms=("q_layernorm", "k_layernorm"))
_BY_KV_HEAD = Family(qkv_layer="query_key_value", by_kv_head=True, output="dense")
_LATENT = Family(latent=Latent(), head_dim="qk_head_dim", value_dim="v_head_dim")


# ---------------------------------------------------------------- the table


_FAMILIES: dict[str, Family] = {
    "afmoe.AfmoeAttention": Family(
        window=_module_window,
        rotates=lambda module: module.is_local_attention,
        gate=lambda module, x, attended: attended * torch.sigmoid(module.gate_proj(x)),
    ),
    "apertus.ApertusAttention": _PLAIN,
    "apertus1p5.Apertus1p5TextAttention": _PLAIN,
    "arcee.ArceeAttention": _PLAIN,
    "aria.AriaTextAttention": _PLAIN,
    "axk1.AXK1Attention": _LATENT,
    "bitnet.BitNetAttention": Family(gate=lambda module, x, attended: module.attn_sub_norm(attended)),
    "cohere.CohereAttention": _PLAIN,
    "cohere2.Cohere2Attention": Family(window=_module_window, rotates=lambda module: module.sliding_window is not None),
    "cohere2_moe.Cohere2MoeAttention": Family(
        window=_module_window, rotates=lambda module: module.sliding_window is not None or module.force_rope
    ),
    "cwm.CwmAttention": _MODULE_WINDOW,
    "deepseek_v2.DeepseekV2Attention": replace(
        _LATENT, latent=Latent(rotary=lambda config: "apply_rotary_emb", complex_tables=True)
    ),
    "deepseek_v3.DeepseekV3Attention": _LATENT,
    "dots1.Dots1Attention": _MODULE_WINDOW,
    "emu3.Emu3Attention": _PLAIN,
    "ernie4_5.Ernie4_5Attention": _PLAIN,
    "ernie4_5_moe.Ernie4_5_MoeAttention": _PLAIN,
    "exaone4.Exaone4Attention": _EXAONE,
    "exaone_moe.ExaoneMoeAttention": _EXAONE,
    "falcon.FalconAttention": replace(_BY_KV_HEAD, scale="inv_norm_factor"),
    "flex_olmo.FlexOlmoAttention": _WHOLE_NORMS,
    "gemma.GemmaAttention": _PLAIN,
    "gemma2.Gemma2Attention": Family(window=_module_window, softcap="attn_logit_softcapping"),
    "gemma3.Gemma3Attention": _MODULE_WINDOW,
    "glm.GlmAttention": _PLAIN,
    "glm4.Glm4Attention": _PLAIN,
    "glm4_moe.Glm4MoeAttention": _PLAIN,
    "glm4_moe_lite.Glm4MoeLiteAttention": _LATENT,
    "gpt_neox.GPTNeoXAttention": replace(_BY_KV_HEAD, head_dim="head_size"),
    "gpt_oss.GptOssAttention": Family(window=_module_window, sinks="sinks", half_tables=True),
    "granite.GraniteAttention": _PLAIN,
    "granitemoe.GraniteMoeAttention": _PLAIN,
    "granite_swa.GraniteSWAAttention": _GRANITE_SWA,
    "granitemoe_swa.GraniteMoeSWAAttention": _GRANITE_SWA,
    "granitemoeshared.GraniteMoeSharedAttention": _PLAIN,
    "helium.HeliumAttention": _PLAIN,
    "hunyuan_v1_dense.HunYuanDenseV1Attention": _HUNYUAN,
    "hunyuan_v1_moe.HunYuanMoEV1Attention": _HUNYUAN,
    "hy_v3.HYV3Attention": _PLAIN,
    "hyperclovax.HyperCLOVAXAttention": _PLAIN,
    "jais2.Jais2Attention": _PLAIN,
    "kolibri1.Kolibri1Attention": _EXAONE,
    "laguna.LagunaAttention": Family(window=_module_window, gate=_softplus_gate),
    "llama.LlamaAttention": _PLAIN,
    "longcat_flash.LongcatFlashMLA": replace(
        _LATENT,
        latent=Latent(
            rotary=lambda config: "apply_rotary_pos_emb_interleave", factors=("mla_scale_q_lora", "mla_scale_kv_lora")
        ),
    ),
    "mellum.MellumAttention": _MODULE_WINDOW,
    "mimo_v2_flash.MiMoV2FlashAttention": Family(
        window=_module_window, sinks="sinks", value_dim="v_head_dim", value_factor="v_scale"
    ),
    "minicpm3.MiniCPM3Attention": replace(_LATENT, latent=Latent(rotary=lambda config: "apply_rotary_pos_emb")),
    "minimax_m2.MiniMaxM2Attention": _WHOLE_NORMS,
    "ministral.MinistralAttention": _MODULE_WINDOW,
    "ministral3.Ministral3Attention": Family(window=_config_window, query_factor=_growing_with_length),
    "mistral.MistralAttention": _CONFIG_WINDOW,
    "mixtral.MixtralAttention": _CONFIG_WINDOW,
    "nanochat.NanoChatAttention": Family(norm_after_rotary=True),
    "nemotron.NemotronAttention": _PLAIN,
    "olmo.OlmoAttention": _PLAIN,
    "olmo2.Olmo2Attention": _WHOLE_NORMS,
    "olmo3.Olmo3Attention": Family(window=_module_window, whole_norms=True),
    "olmoe.OlmoeAttention": _WHOLE_NORMS,
    "persimmon.PersimmonAttention": replace(
        _PART_ROTATED, qkv_layer="query_key_value", by_kv_head=True, output="dense"
    ),
    "phi.PhiAttention": replace(_PART_ROTATED, output="dense"),
    "phi3.Phi3Attention": Family(qkv_layer="qkv_proj", window=_config_window),
    "phimoe.PhimoeAttention": _CONFIG_WINDOW,
    "qwen2.Qwen2Attention": _MODULE_WINDOW,
    "qwen2_moe.Qwen2MoeAttention": _MODULE_WINDOW,
    "qwen2_5_vl.Qwen2_5_VLAttention": _MROPE,
    "qwen2_vl.Qwen2VLAttention": _MROPE,
    "qwen3.Qwen3Attention": _MODULE_WINDOW,
    "qwen3_moe.Qwen3MoeAttention": _MODULE_WINDOW,
    "qwen3_vl.Qwen3VLTextAttention": _MROPE,
    "qwen3_vl_moe.Qwen3VLMoeTextAttention": _MROPE,
    "seed_oss.SeedOssAttention": Family(output_dropout="residual_dropout"),
    "smollm3.SmolLM3Attention": Family(window=_module_window, rotates=lambda module: bool(module.use_rope)),
    "solar_open.SolarOpenAttention": _PLAIN,
    "stablelm.StableLmAttention": _PART_ROTATED,
    "starcoder2.Starcoder2Attention": Family(window=_config_window, output_dropout="residual_dropout"),
    "vaultgemma.VaultGemmaAttention": Family(window=_module_window, softcap="attn_logit_softcapping"),
    "youtu.YoutuAttention": _LATENT,
}


# Attention of vision towers: every rank runs them on whole images, so they stay as they are.
_VISION = (
    "clip.CLIPAttention",
    "internvl.InternVLVisionAttention",
    "pixtral.PixtralAttention",
    "qwen2_5_vl.Qwen2_5_VLVisionAttention",
    "qwen2_vl.VisionAttention",
    "qwen3_vl.Qwen3VLVisionAttention",
    "qwen3_vl_moe.Qwen3VLMoeVisionAttention",
)


# ---------------------------------------------------------------- looking a class up


def _full_name(name: str) -> str:
    """``llama.LlamaAttention`` -> ``transformers.models.llama.modeling_llama.LlamaAttention``."""
    module, name = name.split(".")
    return f"transformers.models.{module}.modeling_{module}.{name}"


SERVED: dict[str, Family] = {_full_name(name): family for name, family in _FAMILIES.items()}
"""The served attention classes by their full name."""


VISION = {_full_name(name) for name in _VISION}
"""The attention classes of vision towers, which are left alone, by their full name."""


def family_of(module: nn.Module) -> Family | None:
    """What the table says of the class of `module`; None when it isn't served."""
    return SERVED.get(class_name(module))


def is_vision(module: nn.Module) -> bool:
    """Whether `module` is attention of a vision tower, which is left alone."""
    return class_name(module) in VISION
