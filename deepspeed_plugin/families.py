"""Which attention modules of Transformers UPipe can stand in for, and what it must know of each.

A class is served because a test compares it with the unpatched model, not because it looks alike: modules
with the same attribute names differ in windows, sinks, norms and gates. Everything else is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from upipe_integrations import HeadFunction, Mode, RotateHalf

SERVED = {
    "transformers.models.llama.modeling_llama.LlamaAttention",
    "transformers.models.mistral.modeling_mistral.MistralAttention",
    "transformers.models.mixtral.modeling_mixtral.MixtralAttention",
    "transformers.models.qwen2.modeling_qwen2.Qwen2Attention",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeAttention",
    "transformers.models.qwen3.modeling_qwen3.Qwen3Attention",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeAttention",
}
"""Attention classes by their full name: q/k/v/o projections, rotary, optional biases and per-head norms."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class AttentionFacts:
    """One attention module, read once when UPipe is put in."""

    class_name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    scale: float
    window: int | None
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    """The module's own rotary of `[B, L, heads, D]` with `[B, L, D]` tables; None when it is ``RotateHalf``."""


def find_attention(model: nn.Module) -> dict[str, nn.Module]:
    """The served attention modules of `model` by name.

    Raises:
        ValueError: there are none, or there are others beside them.
    """
    found, others = {}, set()
    for name, module in model.named_modules():
        full_name = f"{type(module).__module__}.{type(module).__qualname__}"
        if full_name in SERVED:
            found[name] = module
        elif _looks_like_attention(module):
            others.add(type(module).__name__)
    served = ", ".join(sorted(name.rsplit(".", 1)[1] for name in SERVED))
    if others:
        raise ValueError(
            f"upipe: {type(model).__name__} has attention that UPipe does not serve: {', '.join(sorted(others))}. "
            f"Served classes: {served}. Remove the 'upipe' key to train this model with plain Ulysses."
        )
    if not found:
        raise ValueError(
            f"upipe: no attention module that UPipe serves in {type(model).__name__}. Served classes: {served}. "
            "Remove the 'upipe' key to train this model with plain Ulysses."
        )
    return found


def _looks_like_attention(module: nn.Module) -> bool:
    """Attention, or something in its place (linear attention, a state-space mixer), of a class we do not know."""
    name = type(module).__name__.lower()
    holds_projections = any(hasattr(module, a) for a in ("q_proj", "qkv_proj", "query_key_value", "c_attn"))
    called_so = name.endswith(("attention", "mixer", "deltanet")) and next(module.parameters(), None) is not None
    return holds_projections or called_so


def attention_facts(name: str, module: nn.Module, device: torch.device, mode: Mode) -> AttentionFacts:
    """What the engine must know of the attention module called `name`.

    Raises:
        ValueError: the module uses something that is not supported; the message names it and the remedy.
    """
    where = f"{name} ({type(module).__name__})"
    check_projections(where, module, mode)
    dropout = getattr(module, "attention_dropout", 0.0)
    if dropout:
        raise ValueError(
            f"upipe: {where} has attention_dropout = {dropout}: dropout is not supported yet. Set the model "
            "config's attention_dropout to 0.0, or remove the 'upipe' key."
        )
    for attribute, what in (("sinks", "attention sinks"), ("attn_logit_softcapping", "logit softcapping")):
        if getattr(module, attribute, None) is not None:
            raise ValueError(f"upipe: {where} has {what} ({attribute}), not supported yet. Remove the 'upipe' key.")
    head_dim = module.head_dim
    return AttentionFacts(
        class_name=type(module).__name__,
        heads=module.q_proj.out_features // head_dim,
        kv_heads=module.k_proj.out_features // head_dim,
        head_dim=head_dim,
        hidden_size=module.q_proj.in_features,
        scale=module.scaling,
        window=_window(module),
        rotary=_own_rotary(module, device),
    )


def _window(module: nn.Module) -> int | None:
    """The layer's sliding window; None where there is none (Qwen2-MoE says 0).

    Some families decide per layer and keep the window on the module, the others read it from the config.
    """
    config: Any = module.config
    window = module.sliding_window if hasattr(module, "sliding_window") else getattr(config, "sliding_window", None)
    return int(window) if window else None  # type: ignore[arg-type]


def check_projections(where: str, module: nn.Module, mode: Mode) -> None:
    """Raise ValueError unless the projections that are read directly are plain linear layers.

    An adapter (LoRA) keeps the base weight under the same name, so reading it would silently skip the
    adapter; a quantised weight is not the matrix. The output projection is read only where `mode` fuses it.
    """
    for projection in (*PROJECTIONS, "o_proj") if mode.fuses_output else PROJECTIONS:
        layer = getattr(module, projection)
        if type(layer) is not nn.Linear:
            other = ", or set upipe.memory to 'recompute'" if projection == "o_proj" else ""
            raise ValueError(
                f"upipe: {where}.{projection} is a {type(layer).__module__}.{type(layer).__qualname__}, not a plain "
                "torch.nn.Linear: adapters, quantised and fused projections are not supported yet. Merge the "
                f"adapter, leave {projection} out of its target modules{other}, or remove the 'upipe' key."
            )
        if not layer.weight.is_floating_point() or layer.weight.dtype.itemsize < 2:
            raise ValueError(
                f"upipe: {where}.{projection} has weights of {layer.weight.dtype}: quantised weights are not supported "
                "yet. Load the model in float32, bfloat16 or float16, or remove the 'upipe' key."
            )


def head_norm(module: nn.Module | None) -> HeadFunction | None:
    """A per-head norm module (``q_norm``, ``k_norm``) as a function of one stage's heads and its parameters."""
    if module is None:
        return None
    return HeadFunction(_NormOfHeads(module), tuple(t for _, t in module.named_parameters(recurse=False)))


@dataclass(frozen=True)
class _NormOfHeads:
    """A norm module as a function of heads and its parameters.

    A shell around the given tensors runs: the module's own hooks (ZeRO-3's gather and release) must not run from
    inside backward, and its parameters may be saved copies there.
    """

    module: nn.Module

    def __call__(self, heads: Tensor, *tensors: Tensor) -> Tensor:
        kind = type(self.module)
        shell = nn.Module.__new__(kind)
        shell.__dict__.update(self.module.__dict__)
        names = [name for name, _ in self.module.named_parameters(recurse=False)]
        shell.__dict__["_parameters"] = dict(zip(names, tensors, strict=True))
        result: Tensor = kind.forward(shell, heads)
        return result


def _own_rotary(module: nn.Module, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The rotary function of the module's modelling file, unless it computes exactly what RotateHalf does.

    Decided by trying, not by name: the function may have been replaced (Liger's kernel, a hub kernel).
    """
    apply_rotary = sys.modules[type(module).__module__].apply_rotary_pos_emb

    def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        by_head = heads.transpose(1, 2)
        rotated: Tensor = apply_rotary(by_head, by_head[:, :1].contiguous(), cos, sin)[0]
        return rotated.transpose(1, 2)

    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    D = module.head_dim
    heads, half_cos, half_sin = tensor(2, 3, 4, D), tensor(2, 3, D // 2), tensor(2, 3, D // 2)
    # A rotary table repeats its half: fused kernels read the first half only.
    cos, sin = torch.cat([half_cos, half_cos], -1), torch.cat([half_sin, half_sin], -1)
    ours = torch.empty_like(heads[None])
    RotateHalf(cos, sin).rotate(heads.transpose(0, 1)[None], ours.transpose(1, 2))
    theirs = rotate(heads.clone(), cos, sin)
    return None if torch.allclose(ours[0], theirs, rtol=1e-5, atol=1e-5) else rotate
