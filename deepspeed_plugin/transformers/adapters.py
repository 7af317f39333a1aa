"""Linear layers whose weights are read directly: plain ones, and PEFT's LoRA of them.

A LoRA layer has the base weight under the plain layer's names, so that reading it alone would skip the adapter. The A
side of an adapter runs as PEFT has it (its modules, so its dropout, casts and hooks), once and outside of the stage
loop; its result `[B, L, r]` is the input of a low-rank term of the projection, and B is read stage by stage. Which
adapters are active, merged or disabled is looked up in every forward, as PEFT does.

Served by class: what PEFT calls a variant (DoRA and others), other adapters and quantised weights are refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from upipe_integrations import LowRank


def _lora_class() -> type | None:
    """PEFT's LoRA of a linear layer; None where PEFT was not imported, as then there can be none."""
    return getattr(sys.modules.get("peft.tuners.lora.layer"), "Linear", None)


def _is_lora(layer: nn.Module) -> bool:
    return type(layer) is not nn.Linear and type(layer) is _lora_class()


# A linear layer by another name.
_FALCON = "transformers.models.falcon.modeling_falcon.FalconLinear"


def _is_plain(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or _name(layer) == _FALCON


def is_bare(layer: Any) -> bool:
    """Whether `layer` is a plain linear layer that does nothing else when it is called.

    That is, without adapters, a forward put in its place, or hooks; but for DeepSpeed's, which ZeRO-3 and its profiler
    put on every module and which are not about what it computes.
    """
    if not _is_plain(layer) or "forward" in vars(layer) or _why_not_weight(layer) is not None:
        return False
    of_forward = (*layer._forward_pre_hooks.values(), *layer._forward_hooks.values())
    hooks = (*of_forward, *layer._backward_pre_hooks.values(), *layer._backward_hooks.values())
    return all(_package(hook) == "deepspeed" for hook in hooks)


def plain_layer(layer: Any) -> nn.Linear:
    """The layer itself, or the one under its adapters."""
    plain: nn.Linear = layer.base_layer if _is_lora(layer) else layer
    return plain


def active_adapters(layer: Any) -> list[str]:
    """The adapters that `layer` adds now, in PEFT's order."""
    if not _is_lora(layer) or layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def why_not_readable(name: str, layer: Any) -> str | None:
    """What the layer called `name` is or has that can't be read directly and what to do about it, or None."""
    remedy = f"Merge the adapter, leave {name} out of its target modules"
    if _is_plain(layer):
        return _why_not_weight(layer)
    if not _is_lora(layer):
        return (
            f"is a {_name(layer)}, not a plain torch.nn.Linear or PEFT's LoRA of one: other adapters and quantised "
            f"projections are not supported yet. {remedy}, load quantised weights in bfloat16"
        )
    if not _is_plain(layer.base_layer):
        return (
            f"is LoRA of a {_name(layer.base_layer)}, not of a plain torch.nn.Linear: adapters of adapters and of "
            f"quantised projections are not supported yet. {remedy}, load quantised weights in bfloat16"
        )
    if not hasattr(layer, "lora_variant"):
        return "is LoRA of a PEFT that does not say what kind an adapter is of. Install peft 0.16 or newer"
    for adapter in active_adapters(layer):
        if adapter in layer.lora_variant:
            return (
                f"has the adapter {adapter!r} of the kind {type(layer.lora_variant[adapter]).__name__}: plain LoRA is "
                "supported, DoRA and the other variants are not yet. Leave the variant's option out of the LoraConfig, "
                f"merge the adapter, leave {name} out of its target modules"
            )
        if type(layer.lora_B[adapter]) is not nn.Linear:
            return f"has the adapter {adapter!r} whose B is a {_name(layer.lora_B[adapter])}. {remedy}"
    if "forward" in vars(layer):  # as X-LoRA does
        return f"is LoRA with a forward that was put in its place. {remedy}"
    if any(_of_peft(hook) for hook in layer._forward_pre_hooks.values()):
        return (
            "was called with adapters by sample (adapter_names) or by token (alora_offsets), which are not supported. "
            "Use set_adapter"
        )
    if layer.disable_adapters and layer.merged and hasattr(_weight(layer.base_layer), "ds_id"):
        return (
            "has merged adapters that are disabled, and ZeRO-3 has its weight in parts, from which PEFT can't take "
            "them. Call unmerge_adapter() under deepspeed.zero.GatheredParameters(..., modifier_rank=0) before"
        )
    return _why_not_weight(layer.base_layer)


def _weight(layer: nn.Linear) -> nn.Parameter:
    """Its weight as it lies there: under ZeRO-3 the attribute would gather it, and for the module that runs now."""
    return next(layer.parameters(recurse=False))


def _why_not_weight(layer: nn.Linear) -> str | None:
    dtype = _weight(layer).dtype
    if dtype.is_floating_point and dtype.itemsize >= 2:
        return None
    return (
        f"has weights of {dtype}: quantised weights are not supported yet. Load the model in float32, "
        "bfloat16 or float16"
    )


def _name(layer: nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _of_peft(hook: Any) -> bool:
    """Whether PEFT put the hook there, as it does to change a LoRA layer's arguments for one call."""
    return _package(hook) == "peft"


def _package(hook: Any) -> str:
    """The package that a hook is from."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).split(".")[0]


def check_prompts(model: nn.Module) -> None:
    """Raise ValueError where PEFT puts trained tokens, or keys and values, in front of what it is given."""
    peft_model = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    for module in model.modules():
        if peft_model is not None and isinstance(module, peft_model):
            config: Any = module.active_peft_config
            if config.is_prompt_learning:
                raise ValueError(
                    f"upipe: {type(module).__name__}: {getattr(config.peft_type, 'value', config.peft_type)} puts "
                    "virtual tokens in front of every rank's shard, where they belong in front of the sequence. Use "
                    "LoRA, or remove the 'upipe' key."
                )


def low_rank_input(layer: Any, x: Tensor) -> Tensor | None:
    """What the A sides of the active adapters make of x `[B, L, E]`, by their scales: `[B, L, all their ranks]`.

    None without any. As PEFT does, merged adapters that are disabled are taken out of the weight.
    """
    if _is_lora(layer) and layer.disable_adapters and layer.merged:
        layer.unmerge()
    parts = []
    for name in active_adapters(layer):
        A = layer.lora_A[name]
        cast = x.to(_weight(A).dtype) if getattr(layer, "cast_input_dtype_enabled", True) else x
        parts.append(A(layer.lora_dropout[name](cast)) * layer.scaling[name])
    return _side_by_side(parts) if parts else None


@dataclass(frozen=True)
class ReadLayer:
    """A linear layer as it is read now."""

    weight: Tensor
    bias: Tensor | None
    low_rank: LowRank | None

    @classmethod
    def of(cls, layer: Any, low_rank_input: Tensor | None) -> ReadLayer:
        """Of a layer that is readable, with what :func:`low_rank_input` gave."""
        plain = plain_layer(layer)
        if low_rank_input is None:
            return cls(plain.weight, plain.bias, None)
        names = active_adapters(layer)
        weight, bias = _side_by_side([layer.lora_B[name].weight for name in names]), plain.bias
        for name in names:
            if layer.lora_B[name].bias is not None:
                part = layer.lora_B[name].bias * layer.scaling[name]
                bias = part if bias is None else bias + part
        return cls(plain.weight, bias, LowRank(low_rank_input, weight))


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def read_parameters(layer: Any) -> Iterator[nn.Parameter]:
    """The parameters that are read directly, also those of adapters that are not active now."""
    yield from plain_layer(layer).parameters(recurse=False)
    if _is_lora(layer):
        for B in layer.lora_B.values():
            yield from B.parameters(recurse=False)
