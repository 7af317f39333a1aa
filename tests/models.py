"""Tiny random Transformers models of every served family, and how they are run on shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
}
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "experts_implementation": "eager",  # the grouped one knows no float64
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with bias": {"attention_bias": True},
    "llama mqa": {"num_key_value_heads": 1},
    "llama scaled rotary": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "mistral": {"sliding_window": None, "head_dim": 8},
    "mixtral": {"sliding_window": None, **MOE},
    "qwen2": {},
    "qwen2_moe": MOE,
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, **MOE},
}
_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
}


def make_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> torch.nn.Module:
    """The model of `family`, with weights so large that attention is far from uniform; biases and norms too."""
    config_class, model_class = (getattr(transformers, name) for name in _CLASSES[family.split()[0]])
    settings = {**SMALL, **FAMILIES[family], "attn_implementation": "sdpa", **changes}
    torch.manual_seed(seed)
    model = getattr(transformers, model_class.__name__)(config_class(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * 2 / parameter.shape[-1] ** 0.5)
    return model.to(dtype)


def make_batch(seq: int = 16, batch: int = 1, seed: int = 1, vocab: int = 64) -> dict[str, torch.Tensor]:
    """Token ids and next-token targets, some of them not trained on."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (batch, seq), generator=generator)
    labels = ids.clone()
    labels[:, 1:3] = -100
    return {"input_ids": ids, "labels": F.pad(labels[:, 1:], (0, 1), value=-100)}


def single_process(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], positions: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Logits, loss and every gradient of an unpatched model on the whole batch."""
    model.zero_grad(set_to_none=True)
    if positions is None:
        positions = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    logits = model(input_ids=batch["input_ids"], position_ids=positions, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"logits": logits.detach(), "loss": loss.detach(), **grads}


def shard(t: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's rows of `[B, S]`."""
    C, rank = dist.get_world_size(group), dist.get_rank(group)
    return t.chunk(C, 1)[rank]


def worst(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest difference over largest value, by name; every name wanted must be there and finite."""
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    assert all(bool(torch.isfinite(t).all()) for t in got.values())
    return {
        name: float((got[name].double() - t.double()).abs().max() / t.double().abs().max().clamp(min=1e-30))
        for name, t in wanted.items()
    }
