"""Which attention modules of Transformers UPipe can stand in for, and what it must know of each.

A class is served because a test compares it with the unpatched model, not because it looks alike: modules
with the same attribute names differ in windows, sinks, norms and gates. Everything else is refused by name.
docs/families.md lists every family.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_plugin.adapters import (
    ReadLayer,
    active_adapters,
    is_bare,
    plain_layer,
    read_parameters,
    why_not_readable,
)
from deepspeed_plugin.latent import Latent, latent_inputs
from deepspeed_plugin.rotary import ModuleRotary
from upipe_integrations import AttentionSpec, KernelRequest, Mode, Projection, RotateHalf


def _always(module: Any) -> bool:
    return True


def _no_window(module: Any) -> int | None:
    return None


def _config_window(module: Any) -> int | None:
    return getattr(module.config, "sliding_window", None)


def _module_window(module: Any) -> int | None:
    # Qwen2-MoE sets the attribute in windowed layers only.
    return getattr(module, "sliding_window", None)


def _window_of_sliding_layers(module: Any) -> int | None:
    window: int | None = module.sliding_window if module.is_sliding else None
    return window


@dataclass(frozen=True)
class Family:
    """What an attention class does, where that is not what Llama's does. Names are of the module's attributes.

    Args:
        fused: one linear layer with the rows of q, then k, then v, in the place of three.
        grouped: whether those rows go by KV head: the queries that attend it, its k, its v.
        latent: how the heads of latent attention are made, where they are; its layers have names of their own.
        head_dim: the size of query and key heads, and `scale` the factor on the scores.
        value_dim: the size of value heads where it is another, and `value_factor` what values are multiplied by.
        output: the output projection.
        norms: modules applied to each query and key head; those that are absent or None are no norms.
        norm_after_rotary: whether norms come after the rotary embedding.
        whole_norms: whether norms are RMS norms over all heads together, before the heads are told apart.
        window: the layer's sliding window; None (or 0) is none.
        rotates: whether the layer has a rotary embedding.
        rotated: the leading part of a head that is rotated, where the class cuts it out itself.
        half_tables: whether the model's rotary tables have half of the rotated size.
        mrope: whether positions may have three components per token, after plain ones: `[4, B, L]`.
        query_factor: ``query_factor(module, position_ids)``, a factor on each row's queries `[B, L, 1]`; None is none.
        softcap: the cap of the scores.
        sinks: the parameter with a sink per head; None in layers without.
        output_dropout: rate of a dropout after the output projection.
        gate: ``gate(module, x, attended)``, what becomes of the attended heads before the output projection.
    """

    fused: str | None = None
    grouped: bool = False
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

    def inputs(self, module: nn.Module) -> tuple[str, ...]:
        """The linear layers that heads of q, k and v are made by."""
        if self.latent is not None:
            return latent_inputs(module)
        return ("q_proj", "k_proj", "v_proj") if self.fused is None else (self.fused,)

    def takes_output(self, module: nn.Module, mode: Mode) -> bool:
        """Whether the output projection is read directly too: `mode` fuses it, or may take it and it is bare."""
        if mode.fuses_output:
            return True
        return mode.takes_output and self.gate is None and is_bare(getattr(module, self.output))

    def projections(self, module: nn.Module, mode: Mode) -> tuple[str, ...]:
        """The linear layers whose weights are read directly."""
        inputs = self.inputs(module)
        return (*inputs, self.output) if self.takes_output(module, mode) else inputs


def _growing_with_length(module: Any, position_ids: Tensor) -> Tensor:
    parameters = module.config.rope_parameters
    factor: Tensor = sys.modules[type(module).__module__].get_llama_4_attn_scale(
        position_ids, parameters["llama_4_scaling_beta"], parameters["original_max_position_embeddings"]
    )
    return factor[:, 0]


def _softplus_gate(module: Any, x: Tensor, attended: Tensor) -> Tensor:
    gate = nn.functional.softplus(module.g_proj(x).float()).to(attended.dtype)
    if not module.gate_per_head:
        return attended * gate
    return (attended.unflatten(2, (-1, module.head_dim)) * gate[..., None]).flatten(2)


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
_PARTIAL = {"rotated": "rotary_ndims", "norms": ("q_layernorm", "k_layernorm")}
_GROUPED = {"fused": "query_key_value", "grouped": True, "output": "dense"}
_LATENT_SIZES = {"head_dim": "qk_head_dim", "value_dim": "v_head_dim"}
_LATENT = Family(latent=Latent(), **_LATENT_SIZES)

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
    "deepseek_v2.DeepseekV2Attention": Family(
        latent=Latent(rotary=lambda config: "apply_rotary_emb", complex_tables=True), **_LATENT_SIZES
    ),
    "deepseek_v3.DeepseekV3Attention": _LATENT,
    "dots1.Dots1Attention": _MODULE_WINDOW,
    "emu3.Emu3Attention": _PLAIN,
    "ernie4_5.Ernie4_5Attention": _PLAIN,
    "ernie4_5_moe.Ernie4_5_MoeAttention": _PLAIN,
    "exaone4.Exaone4Attention": _EXAONE,
    "exaone_moe.ExaoneMoeAttention": _EXAONE,
    "falcon.FalconAttention": Family(scale="inv_norm_factor", **_GROUPED),
    "flex_olmo.FlexOlmoAttention": _WHOLE_NORMS,
    "gemma.GemmaAttention": _PLAIN,
    "gemma2.Gemma2Attention": Family(window=_module_window, softcap="attn_logit_softcapping"),
    "gemma3.Gemma3Attention": _MODULE_WINDOW,
    "glm.GlmAttention": _PLAIN,
    "glm4.Glm4Attention": _PLAIN,
    "glm4_moe.Glm4MoeAttention": _PLAIN,
    "glm4_moe_lite.Glm4MoeLiteAttention": _LATENT,
    "gpt_neox.GPTNeoXAttention": Family(head_dim="head_size", **_GROUPED),
    "gpt_oss.GptOssAttention": Family(window=_module_window, sinks="sinks", half_tables=True),
    "granite.GraniteAttention": _PLAIN,
    "granitemoe.GraniteMoeAttention": _PLAIN,
    "granite_swa.GraniteSWAAttention": _GRANITE_SWA,
    "granitemoe_swa.GraniteMoeSWAAttention": _GRANITE_SWA,
    "granitemoeshared.GraniteMoeSharedAttention": _PLAIN,
    "helium.HeliumAttention": _PLAIN,
    "hunyuan_v1_dense.HunYuanDenseV1Attention": Family(
        norms=("query_layernorm", "key_layernorm"), norm_after_rotary=True
    ),
    "hunyuan_v1_moe.HunYuanMoEV1Attention": Family(norms=("query_layernorm", "key_layernorm"), norm_after_rotary=True),
    "hy_v3.HYV3Attention": _PLAIN,
    "hyperclovax.HyperCLOVAXAttention": _PLAIN,
    "jais2.Jais2Attention": _PLAIN,
    "kolibri1.Kolibri1Attention": _EXAONE,
    "laguna.LagunaAttention": Family(window=_module_window, gate=_softplus_gate),
    "llama.LlamaAttention": _PLAIN,
    "longcat_flash.LongcatFlashMLA": Family(
        latent=Latent(
            rotary=lambda config: "apply_rotary_pos_emb_interleave", factors=("mla_scale_q_lora", "mla_scale_kv_lora")
        ),
        **_LATENT_SIZES,
    ),
    "mellum.MellumAttention": _MODULE_WINDOW,
    "mimo_v2_flash.MiMoV2FlashAttention": Family(
        window=_module_window, sinks="sinks", value_dim="v_head_dim", value_factor="v_scale"
    ),
    "minicpm3.MiniCPM3Attention": Family(latent=Latent(rotary=lambda config: "apply_rotary_pos_emb"), **_LATENT_SIZES),
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
    "persimmon.PersimmonAttention": Family(**_GROUPED, **_PARTIAL),
    "phi.PhiAttention": Family(output="dense", **_PARTIAL),
    "phi3.Phi3Attention": Family(fused="qkv_proj", window=_config_window),
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
    "stablelm.StableLmAttention": Family(**_PARTIAL),
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


def _full_name(name: str) -> str:
    module, name = name.split(".")
    return f"transformers.models.{module}.modeling_{module}.{name}"


SERVED = {_full_name(name): family for name, family in _FAMILIES.items()}
"""The served attention classes by their full name."""
VISION = {_full_name(name) for name in _VISION}
"""Attention classes that are left alone, likewise."""

_CAUSAL_LAYERS = {"full_attention", "sliding_attention", "attention"}


@dataclass(frozen=True)
class AttentionFacts:
    """One attention module, read once when UPipe is put in."""

    class_name: str
    family: Family
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    hidden_size: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    rotates: bool
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    """The module's own rotary of `[B, L, heads, D]` with the model's tables; None when it is ``RotateHalf``."""

    def spec(self, documents: tuple[tuple[int, ...], ...] | None = None) -> AttentionSpec:
        """What the layer computes."""
        return AttentionSpec(scale=self.scale, window=self.window, softcap=self.softcap, documents=documents)

    def kernel_request(self, device: torch.device, dtype: torch.dtype, spec: AttentionSpec) -> KernelRequest:
        """What the layer's kernel must serve."""
        return KernelRequest(device, dtype, self.head_dim, self.value_dim, spec, self.sinks)

    def projections(self, module: nn.Module, low_rank_inputs: dict[str, Tensor]) -> list[Projection]:
        """Weights of q, k and v, with the adapters of those layers (by name) that `low_rank_inputs` has."""
        read = [ReadLayer.of(getattr(module, name), low_rank_inputs.get(name)) for name in self.family.inputs(module)]
        places: Iterable[Iterable[int] | None] = [None] * 3
        if self.family.fused is not None:
            read *= 3
            places = self._grouped_places() if self.family.grouped else self._consecutive_places()
        sizes = (self.head_dim, self.head_dim, self.value_dim)
        return [
            Projection(
                layer.weight, size, layer.bias, places=None if of is None else tuple(of), low_rank=layer.low_rank
            )
            for layer, size, of in zip(read, sizes, places, strict=True)
        ]

    def _consecutive_places(self) -> list[range]:
        """Where the heads of q, k and v are in a fused weight: all of one after all of the other."""
        ends = [0, *itertools.accumulate((self.heads, self.kv_heads, self.kv_heads))]
        return [range(first, end) for first, end in itertools.pairwise(ends)]

    def _grouped_places(self) -> list[list[int]]:
        """Where they are KV head by KV head: the queries that attend it, its k, its v."""
        group = self.heads // self.kv_heads
        q = [i + 2 * (i // group) for i in range(self.heads)]
        return [q, *([(group + 2) * j + last for j in range(self.kv_heads)] for last in (group, group + 1))]

    def finish(self, module: nn.Module, x: Tensor, attended: Tensor, projected: bool) -> Tensor:
        """The module's output from what was attended, or is `projected` already."""
        family = self.family
        if family.gate is not None:
            attended = family.gate(module, x, attended)
        out = attended if projected else getattr(module, family.output)(attended)
        if family.output_dropout is not None:
            out = nn.functional.dropout(out, getattr(module, family.output_dropout), module.training)
        return out  # type: ignore[no-any-return]


def family_of(module: nn.Module) -> Family | None:
    """How the class of `module` computes; None when it isn't served."""
    return SERVED.get(_class_name(module))


def is_vision(module: nn.Module) -> bool:
    """Whether `module` is attention of a vision tower, which is left alone."""
    return _class_name(module) in VISION


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def find_attention(model: nn.Module) -> dict[str, nn.Module]:
    """The served attention modules of `model` by name.

    Raises:
        ValueError: there are none, or there are others beside them.
    """
    found: dict[str, nn.Module] = {}
    others: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if family_of(module) is not None:
            found[name] = module
        elif _looks_like_attention(module) and not is_vision(module):
            others.setdefault(_why_not(module), set()).add(type(module).__name__)
    reasons = [f"{', '.join(sorted(names))} ({why})" for why, names in sorted(others.items())]
    kinds = _strange_layers(model, found)
    if kinds:
        reasons.append(f"layers of type {', '.join(kinds)}")
    remedy = "docs/families.md lists what is served. Remove the 'upipe' key to train this model with plain Ulysses."
    if reasons:
        raise ValueError(
            f"upipe: {type(model).__name__} has attention that UPipe does not serve: {'; '.join(reasons)}. {remedy}"
        )
    if not found:
        raise ValueError(f"upipe: no attention module that UPipe serves in {type(model).__name__}. {remedy}")
    return found


def _strange_layers(model: nn.Module, found: dict[str, nn.Module]) -> list[str]:
    """Kinds of layers that the model's configuration names and that are not causal attention."""
    config: Any = getattr(model, "config", None) or getattr(next(iter(found.values()), None), "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    return sorted(set(getattr(config, "layer_types", None) or ()) - _CAUSAL_LAYERS)


def _looks_like_attention(module: nn.Module) -> bool:
    """Attention, or something in its place (linear attention, a state-space mixer), of a class we do not know."""
    name = type(module).__name__.lower()
    holds_projections = any(hasattr(module, a) for a in ("q_proj", "qkv_proj", "query_key_value", "c_attn"))
    called_so = name.endswith(("attention", "mixer", "deltanet")) and next(module.parameters(), None) is not None
    return holds_projections or called_so


def _why_not(module: nn.Module) -> str:
    name = type(module).__name__.lower()
    if any(part in name for part in ("mamba", "delta", "lightning", "recurrent", "rwkv", "mixer")):
        return "its state runs along the sequence, from rank to rank"
    if any(hasattr(module, a) for a in ("is_kv_shared_layer", "kv_shared_layer_index", "kv_shared_layers")):
        return "layers share keys and values"
    if "cross" in name:
        return "it attends another sequence"
    if hasattr(module, "indexer"):
        return "it selects the keys of each query"
    if hasattr(module, "kv_lora_rank") or hasattr(module, "kv_b_proj"):
        return "latent attention (MLA) that no test compares with its unpatched model"
    if {"alibi", "position_bias"} & inspect.signature(module.forward).parameters.keys():
        return "its scores have a bias by position"
    if type(getattr(module, "c_attn", None)).__name__ == "Conv1D":
        return "its weights are transposed (Conv1D)"
    return "no test compares it with its unpatched model"


def attention_facts(name: str, module: nn.Module, device: torch.device, mode: Mode) -> AttentionFacts:
    """What the engine must know of the attention module called `name`.

    Raises:
        ValueError: the module uses something that is not supported; the message names it and the remedy.
    """
    where = f"{name} ({type(module).__name__})"
    family = family_of(module)
    assert family is not None
    any_module: Any = module
    config = any_module.config
    head_dim: int = getattr(module, family.head_dim)
    value_dim: int = getattr(module, family.value_dim) if family.value_dim else head_dim
    check_projections(where, module, family, mode)
    for key in ("attention_dropout", "attn_dropout"):
        rate = getattr(module, key, getattr(config, key, 0.0))
        if isinstance(rate, nn.Dropout):
            rate = rate.p
        if rate:
            raise ValueError(
                f"upipe: {where} has {key} = {rate}: dropout is not supported yet. Set the model "
                f"config's {key} to 0.0, or remove the 'upipe' key."
            )
    refused = {
        "sinks": family.sinks is None and getattr(module, "sinks", None) is not None,
        "alibi": bool(getattr(config, "alibi", False)),
        "clip_qkv": getattr(config, "clip_qkv", None) is not None,
        "is_causal = False": getattr(module, "is_causal", True) is False,
    }
    for what, there in refused.items():
        if there:
            raise ValueError(f"upipe: {where} has {what}, which is not supported yet. Remove the 'upipe' key.")
    if family.gate is not None and mode.fuses_output:
        raise ValueError(
            f"upipe.memory = {mode.memory!r}: {where} changes the attended heads before its output projection, so that "
            "can't be inside the stage loop. Set upipe.memory to 'recompute'."
        )
    if value_dim != head_dim and mode.blocks > 1:
        raise ValueError(
            f"upipe.memory = {mode.memory!r}: {where} has value heads of {value_dim} and key heads of {head_dim}: "
            "not supported yet in blocks. Set upipe.memory to 'fused'."
        )
    heads, kv_heads = _head_counts(module, family, head_dim)
    for norm, of_all in zip(family.norms, (heads, kv_heads), strict=True):
        _check_norm(f"{where}.{norm}", getattr(module, norm, None), head_dim * (of_all if family.whole_norms else 1))
    rotates = family.rotates(module)
    window = family.window(module)
    return AttentionFacts(
        class_name=type(module).__name__,
        family=family,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        hidden_size=config.hidden_size,
        scale=getattr(module, family.scale),
        window=int(window) if window else None,
        softcap=None if family.softcap is None else getattr(module, family.softcap),
        sinks=family.sinks is not None and getattr(module, family.sinks) is not None,
        rotates=rotates,
        rotary=_own_rotary(module, family, head_dim, device) if rotates else None,
    )


def _head_counts(module: Any, family: Family, head_dim: int) -> tuple[int, int]:
    """Query and KV heads of the layer; a fused projection's rows tell how many KV heads are in it."""
    if family.latent is not None:
        return module.num_heads, module.num_heads
    if family.fused is None:
        heads, kv_heads = (plain_layer(getattr(module, p)).out_features // head_dim for p in ("q_proj", "k_proj"))
        return heads, kv_heads
    heads = module.config.num_attention_heads
    return heads, (plain_layer(getattr(module, family.fused)).out_features // head_dim - heads) // 2


def _check_norm(where: str, norm: nn.Module | None, size: int) -> None:
    """Raise ValueError unless every parameter of `norm` has `size` elements, as the family has it."""
    for name, parameter in norm.named_parameters() if norm is not None else ():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # under zero.Init only ds_shape knows
        if shape != (size,):
            raise ValueError(
                f"upipe: {where} has a {name} of shape {shape}, not ({size},): a norm that tells heads apart is not "
                "supported yet. Remove the 'upipe' key."
            )


def check_projections(where: str, module: nn.Module, family: Family, mode: Mode) -> None:
    """Raise ValueError unless what is read directly is what :mod:`deepspeed_plugin.adapters` can read."""
    for projection in family.projections(module, mode):
        layer, of_output = getattr(module, projection), projection == family.output
        reason = why_not_readable(projection, layer)
        if reason is None and of_output and active_adapters(layer):
            reason = f"has an adapter, which has no place in the stage loop of upipe.memory = {mode.memory!r}. Merge it"
        if reason is None and family.latent is not None and active_adapters(layer):
            reason = (
                "has an adapter, and makes heads of latents: not supported yet together. Merge it, leave "
                f"{projection} out of its target modules"
            )
        if reason is not None:
            other = ", or set upipe.memory to 'recompute'" if of_output else ""
            raise ValueError(f"upipe: {where}.{projection} {reason}{other}, or remove the 'upipe' key.")
    for name in family.norms:
        norm = getattr(module, name, None)
        if norm is not None and any("." in inner for inner, _ in norm.named_parameters()):
            raise ValueError(
                f"upipe: {where}.{name} is a {_class_name(norm)} with modules inside: "
                "adapters of norms are not supported yet. Leave it out of target modules and modules_to_save, or "
                "remove the 'upipe' key."
            )


def read_directly(module: nn.Module, family: Family, mode: Mode) -> Iterator[nn.Parameter]:
    """The parameters of other modules that a staged attention reads."""
    for name in family.projections(module, mode):
        yield from read_parameters(getattr(module, name))
    for name in family.norms:
        inner = getattr(module, name, None)
        if inner is not None:
            yield from inner.parameters(recurse=False)
    if family.sinks is not None and getattr(module, family.sinks) is not None:
        yield getattr(module, family.sinks)


def _own_rotary(
    module: nn.Module, family: Family, head_dim: int, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The rotary function of the module's modelling file, unless it computes exactly what RotateHalf does.

    Decided by trying, not by name: the function may have been replaced (Liger's kernel, a hub kernel).
    """
    if family.latent is not None:
        return family.latent.rotary_of(module)
    apply_rotary = sys.modules[type(module).__module__].apply_rotary_pos_emb
    R = getattr(module, family.rotated) if family.rotated else head_dim
    rotate = ModuleRotary(apply_rotary, range(R))
    if family.norm_after_rotary:
        return rotate
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    heads, half_cos, half_sin = tensor(2, 3, 4, head_dim), tensor(2, 3, R // 2), tensor(2, 3, R // 2)
    # A rotary table repeats its half: fused kernels read the first half only.
    cos, sin = torch.cat([half_cos, half_cos], -1), torch.cat([half_sin, half_sin], -1)
    ours = torch.empty_like(heads[None])
    RotateHalf(cos, sin).rotate(heads.transpose(0, 1)[None], ours.transpose(1, 2))
    theirs = rotate(heads.clone(), *((half_cos, half_sin) if family.half_tables else (cos, sin)))
    return None if torch.allclose(ours[0], theirs, rtol=1e-5, atol=1e-5) else rotate
