"""What the engine must know of an attention module of Transformers, read once when UPipe is put in, or why not."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_plugin.transformers.adapters import (
    ReadLayer,
    active_adapters,
    plain_layer,
    read_parameters,
    why_not_readable,
)
from deepspeed_plugin.transformers.families import Family, class_name, family_of, is_vision
from deepspeed_plugin.transformers.rotary import ModuleRotary
from upipe_integrations import AttentionSpec, KernelRequest, Mode, Projection, RotateHalf, Weights

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
                Weights(layer.weight, layer.bias, low_rank=layer.low_rank),
                size,
                places=None if of is None else tuple(of),
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
    if family.gate is not None and mode.output_in_loop:
        raise ValueError(
            f"upipe.memory = {mode.memory!r}: {where} changes the attended heads before its output projection, so that "
            "can't be inside the stage loop. Set upipe.memory to 'recompute'."
        )
    if value_dim != head_dim and mode.query_blocks > 1:
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
    """Raise ValueError unless what is read directly is what :mod:`deepspeed_plugin.transformers.adapters` can read."""
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
                f"upipe: {where}.{name} is a {class_name(norm)} with modules inside: "
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
