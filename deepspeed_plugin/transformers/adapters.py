"""Linear layers whose weights are read directly: plain ones, and PEFT's LoRA of them.

A LoRA layer has the base weight under the plain layer's names, so that reading it alone would skip the adapter. The A
side of an adapter runs as PEFT has it (its modules, so its dropout, casts and hooks), once and outside of the stage
loop; its result `[B, L, r]` is the input of a low-rank term of the projection, and B is read stage by stage. Which
adapters are active, merged or disabled is looked up in every forward, as PEFT does.

Served by class: what PEFT calls a variant (DoRA and others), other adapters and quantised weights are refused by name.

What PEFT and ZeRO-3 leave on layers and parameters is asked for in this file alone.

Shapes: B batch, L rows of the sequence on this rank, E input size, r ranks of all active adapters together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from upipe_integrations import LowRank, Weights

# A linear layer by another name.
_FALCON = "transformers.models.falcon.modeling_falcon.FalconLinear"


def class_name(module: nn.Module) -> str:
    """The full name of the class of `module`."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _imported_class(module: str, name: str) -> type | None:
    """A class of PEFT; None where its module was not imported, as then nothing is of that class."""
    return getattr(sys.modules.get(module), name, None)


def _is_lora(layer: nn.Module) -> bool:
    """Whether `layer` is PEFT's LoRA of a linear layer."""
    return type(layer) is not nn.Linear and type(layer) is _imported_class("peft.tuners.lora.layer", "Linear")


def _is_plain(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or class_name(layer) == _FALCON


def is_unmodified(layer: nn.Module) -> bool:
    """Whether reading the weight and bias of `layer` is all that calling it would do.

    That is a plain linear layer without adapters, a forward put in its place, or hooks; but for DeepSpeed's, which
    ZeRO-3 and its profiler put on every module and which are not about what it computes.
    """
    return _is_plain(layer) and hooked_refusal(layer) is None and _weight_refusal(layer) is None


def hooked_refusal(layer: Any) -> str | None:
    """Why what calling `layer` would do is not what its class does, and what to do about it; None where it is.

    Hooks of DeepSpeed and PEFT aside: those are not about what is computed, or are looked at by themselves.
    """
    for module in (layer, layer.base_layer) if _is_lora(layer) else (layer,):
        if "forward" in vars(module):
            return "has a forward that was put in its place, which would not run. Remove it"
        hooks = (
            *module._forward_pre_hooks.values(),
            *module._forward_hooks.values(),
            *module._backward_pre_hooks.values(),
            *module._backward_hooks.values(),
        )
        foreign = [hook for hook in hooks if _package(hook) not in ("deepspeed", "peft")]
        if foreign:
            name = getattr(foreign[0], "__qualname__", type(foreign[0]).__name__)
            return f"has a hook ({name}), which would not run, as the layer is read and not called. Remove it"
    return None


def base_linear(layer: Any) -> nn.Linear:
    """The layer itself, or the linear layer under its adapters."""
    linear: nn.Linear = layer.base_layer if _is_lora(layer) else layer
    return linear


def active_adapters(layer: Any) -> list[str]:
    """The names of the adapters that `layer` adds now, in PEFT's order."""
    if not _is_lora(layer) or layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def read_refusal(name: str, layer: nn.Module) -> str | None:
    """Why the weights of the layer called `name` can't be read directly, and what to do about it; None where they can.

    The text goes on after the layer's name: "is a ...", "has weights of ...".
    """
    if _is_plain(layer):
        return _weight_refusal(layer)
    remedy = f"Merge the adapter, leave {name} out of its target modules"
    if not _is_lora(layer):
        return (
            f"is a {class_name(layer)}, not a plain torch.nn.Linear or PEFT's LoRA of one: other adapters and "
            f"quantised projections are not supported yet. {remedy}, load quantised weights in bfloat16"
        )
    return _lora_refusal(name, layer, remedy)


def _lora_refusal(name: str, layer: Any, remedy: str) -> str | None:
    """:func:`read_refusal` of PEFT's LoRA of a linear layer."""
    if not _is_plain(layer.base_layer):
        return (
            f"is LoRA of a {class_name(layer.base_layer)}, not of a plain torch.nn.Linear: adapters of adapters and of "
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
            return f"has the adapter {adapter!r} whose B is a {class_name(layer.lora_B[adapter])}. {remedy}"
    if "forward" in vars(layer):  # as X-LoRA does
        return f"is LoRA with a forward that was put in its place. {remedy}"
    # PEFT's pre-hooks change a LoRA layer's arguments for one call.
    if any(_package(hook) == "peft" for hook in layer._forward_pre_hooks.values()):
        return (
            "was called with adapters by sample (adapter_names) or by token (alora_offsets), which are not supported. "
            "Use set_adapter"
        )
    if layer.disable_adapters and layer.merged and hasattr(_weight(layer.base_layer), "ds_id"):
        return (
            "has merged adapters that are disabled, and ZeRO-3 has its weight in parts, from which PEFT can't take "
            "them. Call unmerge_adapter() under deepspeed.zero.GatheredParameters(..., modifier_rank=0) before"
        )
    return _weight_refusal(layer.base_layer)


def _weight(layer: nn.Module) -> nn.Parameter:
    """The layer's weight, as much of it as this rank holds.

    Not by its attribute, which under ZeRO-3 would gather it, and register it with the module that runs now.
    """
    return next(layer.parameters(recurse=False))


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of a parameter, which under ``zero.Init`` only its ``ds_shape`` knows."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _weight_refusal(layer: nn.Module) -> str | None:
    dtype = _weight(layer).dtype
    if dtype.is_floating_point and dtype.itemsize >= 2:
        return None
    return (
        f"has weights of {dtype}: quantised weights are not supported yet. Load the model in float32, "
        "bfloat16 or float16"
    )


def _package(hook: Any) -> str:
    """The package that a hook, or the function that it is a partial of, is from."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).split(".")[0]


def check_prompts(model: nn.Module) -> None:
    """Raise ValueError where PEFT puts trained tokens, or keys and values, in front of each rank's shard."""
    peft_model = _imported_class("peft.peft_model", "PeftModel")
    if peft_model is None:
        return
    for module in model.modules():
        if isinstance(module, peft_model):
            config: Any = module.active_peft_config
            if config.is_prompt_learning:
                raise ValueError(
                    f"upipe: {type(module).__name__}: {getattr(config.peft_type, 'value', config.peft_type)} puts "
                    "virtual tokens in front of every rank's shard, where they belong in front of the sequence. Use "
                    "LoRA, or remove the 'upipe' key."
                )


def low_rank_input(layer: Any, x: Tensor) -> Tensor | None:
    """What the A sides of the active adapters make of x, times their scales: `[B, L, E]` -> `[B, L, r]`.

    None without active adapters. As PEFT does, merged adapters that are disabled are taken out of the weight.
    """
    if _is_lora(layer) and layer.disable_adapters and layer.merged:
        layer.unmerge()
    by_adapter = []
    for name in active_adapters(layer):
        A = layer.lora_A[name]
        cast = x.to(_weight(A).dtype) if getattr(layer, "cast_input_dtype_enabled", True) else x
        by_adapter.append(A(layer.lora_dropout[name](cast)) * layer.scaling[name])
    return _concatenated(by_adapter) if by_adapter else None


def read_weights(layer: Any, low_rank_input: Tensor | None) -> Weights:
    """The weights of a layer that :func:`read_refusal` does not refuse.

    Args:
        layer: a linear layer, or LoRA of one.
        low_rank_input: what :func:`low_rank_input` gave for it, `[B, L, r]`; the B sides of the active adapters, side
            by side as `[outputs, r]`, are the weight of that term.
    """
    linear = base_linear(layer)
    if low_rank_input is None:
        return Weights(linear.weight, linear.bias)
    names = active_adapters(layer)
    weight, bias = _concatenated([layer.lora_B[name].weight for name in names]), linear.bias
    for name in names:
        if layer.lora_B[name].bias is not None:
            scaled = layer.lora_B[name].bias * layer.scaling[name]
            bias = scaled if bias is None else bias + scaled
    return Weights(linear.weight, bias, LowRank(low_rank_input, weight))


def _concatenated(tensors: list[Tensor]) -> Tensor:
    """Side by side in the last dimension."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)


def parameters_read(layer: Any) -> Iterator[nn.Parameter]:
    """The parameters that are read directly, also those of adapters that are not active now."""
    yield from base_linear(layer).parameters(recurse=False)
    if _is_lora(layer):
        for B in layer.lora_B.values():
            yield from B.parameters(recurse=False)
