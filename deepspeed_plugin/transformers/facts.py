"""What the engine must know of an attention module of Transformers, read once when UPipe is put in, or why not.

Shapes: B batch, L rows of the sequence on this rank, E hidden size, D head size.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_plugin.transformers.adapters import (
    active_adapters,
    base_linear,
    class_name,
    hooked_refusal,
    read_refusal,
    read_weights,
    whole_shape,
)
from deepspeed_plugin.transformers.families import Family, family_of, is_vision
from deepspeed_plugin.transformers.reader import AttentionReader
from deepspeed_plugin.transformers.rotary import ModuleRotary
from upipe_integrations import AttentionSpec, KernelRequest, Mode, Projection, RotateHalf

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
    rotary: ModuleRotary | None
    """The module's own rotary function; None where the layer has none, or one that is ``RotateHalf``."""

    def now(self, reader: AttentionReader) -> AttentionFacts:
        """These facts with what may be set on a module, or its configuration, at any time, as it is now."""
        return dataclasses.replace(self, **_changeable(reader))

    def spec(self, documents: tuple[tuple[int, ...], ...] | None = None) -> AttentionSpec:
        """What the layer computes."""
        return AttentionSpec(scale=self.scale, window=self.window, softcap=self.softcap, documents=documents)

    def kernel_request(
        self, device: torch.device, dtype: torch.dtype, spec: AttentionSpec, *, blocks: bool
    ) -> KernelRequest:
        """What the layer's kernel must serve; `blocks` as in ``KernelRequest``."""
        return KernelRequest(device, dtype, self.head_dim, self.value_dim, spec, self.sinks, blocks)

    def projections(self, reader: AttentionReader, low_rank_inputs: dict[str, Tensor]) -> list[Projection]:
        """The projections of q, k and v, without functions of their heads.

        Args:
            reader: of the module that these facts are of.
            low_rank_inputs: `[B, L, r]` by the name of a layer with active adapters, from ``low_rank_input``.
        """
        read = [read_weights(layer, low_rank_inputs.get(name)) for name, layer in reader.input_layers().items()]
        places: Sequence[Iterable[int] | None] = [None] * 3
        if self.family.qkv_layer is not None:
            read *= 3
            places = self._places_in_qkv_layer()
        sizes = (self.head_dim, self.head_dim, self.value_dim)
        return [
            Projection(weights, size, places=None if at is None else tuple(at))
            for weights, size, at in zip(read, sizes, places, strict=True)
        ]

    def _places_in_qkv_layer(self) -> tuple[Iterable[int], Iterable[int], Iterable[int]]:
        """Where the heads of q, of k and of v are among all heads that a `qkv_layer` makes.

        With 4 query heads and 2 KV heads its outputs are, in heads::

            place          0   1   2   3   4   5   6   7
            q, k, v        q0  q1  q2  q3  k0  k1  v0  v1
            by KV head     q0  q1  k0  v0  q2  q3  k1  v1
        """
        if self.family.by_kv_head:
            queries = self.heads // self.kv_heads
            starts = range(0, self.heads + 2 * self.kv_heads, queries + 2)
            q = [start + i for start in starts for i in range(queries)]
            return q, [start + queries for start in starts], [start + queries + 1 for start in starts]
        ends = itertools.accumulate((self.heads, self.kv_heads, self.kv_heads))
        q_end, k_end, v_end = ends
        return range(q_end), range(q_end, k_end), range(k_end, v_end)

    def finish(self, reader: AttentionReader, x: Tensor, attended: Tensor, projected: bool) -> Tensor:
        """The module's output `[B, L, E]`.

        Args:
            reader: of the module that these facts are of.
            x: `[B, L, E]`, the module's input, which a gate reads.
            attended: the attended heads `[B, L, H * Dv]`, or `[B, L, E]` where they were `projected` already.
            projected: whether the engine ran the output projection.
        """
        family = self.family
        if family.gate is not None:
            attended = family.gate(reader.module, x, attended)
        out: Tensor = attended if projected else reader.output_layer(attended)
        if family.output_dropout is not None:
            out = nn.functional.dropout(out, reader.value(family.output_dropout), reader.module.training)
        return out


def find_attention(model: nn.Module) -> dict[str, nn.Module]:
    """The served attention modules of `model` by name.

    Raises:
        ValueError: the model has no served attention module, or others beside them.
    """
    found: dict[str, nn.Module] = {}
    others: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if family_of(module) is not None:
            found[name] = module
        elif _looks_like_attention(module) and not is_vision(module):
            others.setdefault(_unserved_reason(module), set()).add(type(module).__name__)
    reasons = [f"{', '.join(sorted(names))} ({why})" for why, names in sorted(others.items())]
    kinds = _other_layer_types(model, found)
    if kinds:
        reasons.append(f"layers of type {', '.join(kinds)}")
    remedy = "docs/families.md lists what is served. Remove the 'upipe' key to train this model with plain Ulysses."
    if others.keys() & {_RECURRENT} or kinds:
        remedy = (
            "docs/families.md lists what is served. Remove the 'upipe' key and the sequence parallelism (the mpu, "
            "sequence_parallel_size): plain Ulysses would train this model to wrong gradients, as it exchanges nothing "
            "in such layers."
        )
    if reasons:
        raise ValueError(
            f"upipe: {type(model).__name__} has attention that UPipe does not serve: {'; '.join(reasons)}. {remedy}"
        )
    if not found:
        raise ValueError(f"upipe: no attention module that UPipe serves in {type(model).__name__}. {remedy}")
    return found


def _other_layer_types(model: nn.Module, found: dict[str, nn.Module]) -> list[str]:
    """The types of layers in the model's configuration that are not causal attention."""
    config: Any = getattr(model, "config", None) or getattr(next(iter(found.values()), None), "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    return sorted(set(getattr(config, "layer_types", None) or ()) - _CAUSAL_LAYERS)


def _has_any(module: nn.Module, *names: str) -> bool:
    return any(hasattr(module, name) for name in names)


def _looks_like_attention(module: nn.Module) -> bool:
    """Attention, or something in its place (linear attention, a state-space mixer), of a class we do not know."""
    name = type(module).__name__.lower()
    holds_projections = _has_any(module, "q_proj", "qkv_proj", "query_key_value", "c_attn")
    named_so = name.endswith(("attention", "mixer", "deltanet")) and next(module.parameters(), None) is not None
    return holds_projections or named_so


_RECURRENT = "its state runs along the sequence, from rank to rank"


def _unserved_reason(module: nn.Module) -> str:
    """Why attention of a class that is not in the table is not served, from what its class shows."""
    name = type(module).__name__.lower()
    if any(word in name for word in ("mamba", "delta", "lightning", "recurrent", "rwkv", "mixer")):
        return _RECURRENT
    if _has_any(module, "is_kv_shared_layer", "kv_shared_layer_index", "kv_shared_layers"):
        return "layers share keys and values"
    if "cross" in name:
        return "it attends another sequence"
    if _has_any(module, "indexer"):
        return "it selects the keys of each query"
    if _has_any(module, "kv_lora_rank", "kv_b_proj"):
        return "latent attention (MLA) that no test compares with its unpatched model"
    if {"alibi", "position_bias"} & inspect.signature(module.forward).parameters.keys():
        return "its scores have a bias by position"
    if type(getattr(module, "c_attn", None)).__name__ == "Conv1D":
        return "its weights are transposed (Conv1D)"
    return "no test compares it with its unpatched model"


def attention_facts(name: str, module: nn.Module, device: torch.device, mode: Mode) -> AttentionFacts:
    """What the engine must know of the attention module called `name`, one that ``find_attention`` gave.

    Raises:
        ValueError: the module uses something that is not supported; the message names it and the remedy.
    """
    where = f"{name} ({type(module).__name__})"
    family = family_of(module)
    assert family is not None
    reader = AttentionReader(module, family)
    head_dim: int = reader.value(family.head_dim)
    value_dim: int = head_dim if family.value_dim is None else reader.value(family.value_dim)
    check_projections(where, reader, mode)
    check_settings(where, module, family)
    _check_mode(where, family, head_dim, value_dim, mode)
    heads, kv_heads = _head_counts(reader, head_dim)
    for norm_name, norm, normed_heads in zip(family.norms, reader.norms, (heads, kv_heads), strict=True):
        _check_norm(f"{where}.{norm_name}", norm, head_dim * (normed_heads if family.whole_norms else 1))
    rotates = family.rotates(module)
    return AttentionFacts(
        class_name=type(module).__name__,
        family=family,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        hidden_size=reader.value("config").hidden_size,
        **_changeable(reader),
        sinks=reader.sinks is not None,
        rotates=rotates,
        rotary=_own_rotary(reader, head_dim, device) if rotates else None,
    )


def _changeable(reader: AttentionReader) -> dict[str, Any]:
    """Fields of :class:`AttentionFacts` that the class reads in every forward."""
    family = reader.family
    window = family.window(reader.module)
    return {
        "scale": reader.value(family.scale),
        "window": int(window) if window else None,
        "softcap": reader.value(family.softcap),
    }


def check_settings(where: str, module: Any, family: Family) -> None:
    """Raise ValueError where the module, or its configuration, has something that no kernel is asked for.

    Asked when UPipe is put in and in every forward, as the classes read these settings in every forward.
    """
    config = module.config
    for key in ("attention_dropout", "attn_dropout"):
        rate = getattr(module, key, getattr(config, key, 0.0))
        if isinstance(rate, nn.Dropout):
            rate = rate.p
        if rate:
            raise ValueError(
                f"upipe: {where} has {key} = {rate}: dropout is not supported yet. Set the model "
                f"config's {key} to 0.0, or remove the 'upipe' key."
            )
    unsupported = {
        "sinks": family.sinks is None and getattr(module, "sinks", None) is not None,
        "alibi": bool(getattr(config, "alibi", False)),
        "clip_qkv": getattr(config, "clip_qkv", None) is not None,
        "is_causal = False": getattr(module, "is_causal", True) is False or getattr(config, "is_causal", True) is False,
    }
    for what, is_set in unsupported.items():
        if is_set:
            raise ValueError(f"upipe: {where} has {what}, which is not supported yet. Remove the 'upipe' key.")


def _check_mode(where: str, family: Family, head_dim: int, value_dim: int, mode: Mode) -> None:
    """Raise ValueError where the memory mode can't be had with this class."""
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


def _head_counts(reader: AttentionReader, head_dim: int) -> tuple[int, int]:
    """Query and KV heads of the layer; the outputs of a `qkv_layer` tell how many KV heads are in it."""
    family = reader.family
    if family.latent is not None:
        heads: int = reader.value("num_heads")
        return heads, heads
    if family.qkv_layer is None:
        q, k = (base_linear(reader.value(name)).out_features // head_dim for name in ("q_proj", "k_proj"))
        return q, k
    heads = reader.value("config").num_attention_heads
    return heads, (base_linear(reader.value(family.qkv_layer)).out_features // head_dim - heads) // 2


def _check_norm(where: str, norm: nn.Module | None, size: int) -> None:
    """Raise ValueError unless every parameter of `norm` has `size` elements, as the family has it."""
    for name, parameter in norm.named_parameters() if norm is not None else ():
        shape = whole_shape(parameter)
        if shape != (size,):
            raise ValueError(
                f"upipe: {where} has a {name} of shape {shape}, not ({size},): a norm that tells heads apart is not "
                "supported yet. Remove the 'upipe' key."
            )


def check_projections(where: str, reader: AttentionReader, mode: Mode) -> None:
    """Raise ValueError unless what is read directly is what :mod:`deepspeed_plugin.transformers.adapters` can read."""
    family = reader.family
    for name, layer in reader.layers_read(mode).items():
        reason, is_output = read_refusal(name, layer) or hooked_refusal(layer), name == family.output
        if reason is None and is_output and active_adapters(layer):
            reason = f"has an adapter, which has no place in the stage loop of upipe.memory = {mode.memory!r}. Merge it"
        if reason is None and family.latent is not None and active_adapters(layer):
            reason = (
                "has an adapter, and makes heads of latents: not supported yet together. Merge it, leave "
                f"{name} out of its target modules"
            )
        if reason is not None:
            other = ", or set upipe.memory to 'recompute'" if is_output else ""
            raise ValueError(f"upipe: {where}.{name} {reason}{other}, or remove the 'upipe' key.")
    for name, norm in zip(family.norms, reader.norms, strict=True):
        reason = None if norm is None else hooked_refusal(norm)
        if reason is not None:
            raise ValueError(f"upipe: {where}.{name} {reason}, or remove the 'upipe' key.")
        if norm is not None and any("." in inner for inner, _ in norm.named_parameters()):
            raise ValueError(
                f"upipe: {where}.{name} is a {class_name(norm)} with modules inside: "
                "adapters of norms are not supported yet. Leave it out of target modules and modules_to_save, or "
                "remove the 'upipe' key."
            )


def _own_rotary(reader: AttentionReader, head_dim: int, device: torch.device) -> ModuleRotary | None:
    """The rotary function of the module's modelling file, unless it computes exactly what RotateHalf does.

    Decided by trying, not by name: the function may have been replaced (Liger's kernel, a hub kernel).
    """
    module, family = reader.module, reader.family
    if family.latent is not None:
        return family.latent.module_rotary(module)
    apply_rotary = sys.modules[type(module).__module__].apply_rotary_pos_emb
    R: int = head_dim if family.rotated is None else reader.value(family.rotated)
    rotate = ModuleRotary(apply_rotary, range(R))
    if family.norm_after_rotary:
        return rotate
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    heads, half_cos, half_sin = tensor(2, 3, 4, head_dim), tensor(2, 3, R // 2), tensor(2, 3, R // 2)
    # A rotary table repeats its half: some kernels read the first half only.
    cos, sin = torch.cat([half_cos, half_cos], -1), torch.cat([half_sin, half_sin], -1)
    ours = torch.empty_like(heads[None])
    RotateHalf(cos, sin).rotate(heads.transpose(0, 1)[None], ours.transpose(1, 2))
    theirs = rotate(heads.clone(), *((half_cos, half_sin) if family.half_tables else (cos, sin)))
    return None if torch.allclose(ours[0], theirs, rtol=1e-5, atol=1e-5) else rotate
