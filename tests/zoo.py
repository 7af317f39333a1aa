"""A tiny random model of every causal-LM family in the installed Transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Model type to model class."""
VISION_LANGUAGE = {
    "internvl": "InternVLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
"""The same of vision-language models that are served; their causal language models have no class of their own."""

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, WINDOW = 2, 64, 8, 4, 8, 64, 6

# Set where a configuration has the key.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers",), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads", "encoder_attention_heads"), HEADS),
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 3.0,
    # Latent attention: every size another.
    **{"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": HEAD_DIM, "v_head_dim": 12},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(
        ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "residual_dropout"), 0.0
    ),
    **dict.fromkeys(("embedding_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"), 0.0),
    **dict.fromkeys(("activation_dropout", "attention_probs_dropout"), 0.0),
    # What is done to logits; the default of most is a factor of 1.
    **{"logits_scaling": 3.0, "logit_scale": 0.25, "lm_head_multiplier": 0.4, "unpadded_vocab_size": VOCABULARY},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# Where a family needs something else to be built at this size.
_ALSO: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": KV_HEADS}},
    "dots1": {"n_shared_experts": 1},
    **{family: {"num_key_value_heads": HEADS} for family in ("dots3_note", "dots3_note_text")},
    **{family: {"num_kv_shared_layers": 0} for family in ("gemma3n", "gemma3n_text")},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **{family: {"layer_rope_theta": [1e4, 0.0]} for family in ("granite_swa", "granitemoe_swa")},
    "hunyuan_v1_moe": {"moe_topk": 2},  # with 1 the gradient of the gate is nothing but rounding
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"num_layers": 1, "qk_head_dim": 10 + HEAD_DIM, "moe_topk": 2},  # a layer has two
    "mamba2": {"num_heads": 16},
    # Positions beyond the original length, where the factor on queries is not 1.
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 4,
            "max_position_embeddings": 128,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (32, 32)},
    "zamba": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
# Vision towers of two layers, of 2x2 patches after merging, that end in the text's width.
IMAGE_TOKEN = 60
_TOKENS = {
    **dict.fromkeys(("image_token_id", "image_token_index"), IMAGE_TOKEN),
    **{"video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63},
}
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1, "in_channels": 3}
_QWEN_TOWER = {"depth": 2, "num_heads": 2, "hidden_size": 16, "intermediate_size": 24, **_PATCHES}
_QWEN3_TOWER = {
    **_QWEN_TOWER,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_VISION: dict[str, dict[str, Any]] = {
    "internvl": {**_TOWER, "image_size": [8, 8], "patch_size": [4, 4]},
    "llava": {"model_type": "clip_vision_model", **_TOWER, "image_size": 8, "patch_size": 4},
    "mistral3": {"model_type": "pixtral", **_TOWER, "head_dim": 8, "image_size": 8, "patch_size": 4},
    "qwen2_5_vl": {**_QWEN_TOWER, "out_hidden_size": HIDDEN, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen2_vl": {"depth": 2, "num_heads": 2, "embed_dim": 16, "mlp_ratio": 2, "hidden_size": HIDDEN, **_PATCHES},
    "qwen3_vl": _QWEN3_TOWER,
    "qwen3_vl_moe": _QWEN3_TOWER,
}
# What a family's default configuration can't be built without.
_DEFAULT: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
}


def tiny_config(family: str, **changes: Any) -> Any:
    """The configuration of a model of `family`; of its text part, for causal LM families that have others."""
    config_class = CONFIG_MAPPING[family]
    default = config_class(**_DEFAULT.get(family, {}))
    text = default.get_text_config(decoder=True)
    if type(text) is type(default):
        text = default  # not with an encoder-decoder's names changed
    # The plain implementation is there for every family, and knows softcaps and sinks.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    small = {**_small_settings(text), **_ALSO.get(family, {}), **changes}
    if family not in VISION_LANGUAGE:
        return type(text)(**small, **plain)
    if family.startswith("qwen"):
        small["rope_parameters"] = {**text.rope_parameters, "mrope_section": [2, 1, 1]}
    tokens = {name: number for name, number in _TOKENS.items() if hasattr(default, name)}
    text_config = {"model_type": text.model_type, **small}
    return config_class(text_config=text_config, vision_config=_VISION[family], **tokens, **plain)


def _small_settings(default: Any) -> dict[str, Any]:
    there = set(default.to_dict())
    settings = {key: value for key, value in _SMALL.items() if key in there}
    both = ["sliding_attention", "full_attention"]
    if set(getattr(default, "layer_types", None) or ()) == set(both):
        settings["layer_types"] = both
    elif "layer_types" in there:
        settings["layer_types"] = None
    if "kv_lora_rank" in there:
        settings["num_key_value_heads"] = HEADS
    return settings


def tiny_model(family: str, **changes: Any) -> torch.nn.Module:
    """A model of `family` on the current default device, with weights that make attention far from uniform."""
    config = tiny_config(family, **changes)
    model_class = getattr(transformers, {**FAMILIES, **VISION_LANGUAGE}[family])
    if not isinstance(config, model_class.config_class):
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = model_class(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            continue
        noise = torch.randn(parameter.shape, generator=generator, device="cpu")
        with torch.no_grad():
            if "norm" in name and parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(noise * (0.3 if parameter.dim() == 1 else 2 / parameter.shape[-1] ** 0.5))
    return model
