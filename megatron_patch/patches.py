"""What is patched in Megatron when its modules are imported; without the argument, only ``--help`` changes.

Arguments are added where Megatron adds its own, checked where Megatron validates them, carried to the
TransformerConfig where Megatron builds it, and put to use where a model is given its layer spec.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from megatron_patch.arguments import add_arguments, fill_in
from megatron_patch.options import IMPL, Settings, UPipeOptions, check_arguments, flag, options_from

_CONFIG = "upipe"
"""The attribute of a TransformerConfig that holds the options."""


def patch_arguments(module: ModuleType) -> None:
    """``megatron.training.arguments``: add the arguments, check them, and (0.16-0.18) carry them to the config."""
    _wrap(module, "add_megatron_arguments", _with_arguments)
    _wrap(module, "parse_args", _not_both_yaml_and_flags)
    _wrap(module, "validate_args", _validated)
    patch_config(module)


def patch_config(module: ModuleType) -> None:
    """Carry the options to the TransformerConfig, in the module that builds it."""
    _wrap(module, "core_transformer_config_from_args", _with_options)


def patch_yaml(module: ModuleType) -> None:
    """``megatron.training.yaml_arguments``: the same for YAML."""
    _wrap(module, "validate_yaml", _validated)
    _wrap(module, "core_transformer_config_from_yaml", _with_options)


def patch_gpt(module: ModuleType) -> None:
    """``GPTModel``: UPipe in its layer spec and in that of multi-token prediction."""
    _patch_model(module, "GPTModel", ("transformer_layer_spec", "mtp_block_spec"))


def patch_hybrid(module: ModuleType) -> None:
    """``HybridModel``: UPipe in its attention layers; state-space layers split the sequence by themselves."""
    _patch_model(module, "HybridModel", ("hybrid_stack_spec",))


def patch_mamba(module: ModuleType) -> None:
    """``MambaModel``, the older name of ``HybridModel``."""
    _patch_model(module, "MambaModel", ("mamba_stack_spec",))


def patch_bert(module: ModuleType) -> None:
    """``BertModel`` is refused."""
    _patch_model(module, "BertModel", None)


def patch_t5(module: ModuleType) -> None:
    """``T5Model`` is refused."""
    _patch_model(module, "T5Model", None)


def _wrap(module: ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
    """Wrap a function of the module; not one that was imported there and wrapped where it is from."""
    function = getattr(module, name, None)
    if function is not None and not isinstance(function, wrapt.FunctionWrapper):
        wrapt.wrap_function_wrapper(module, name, wrapper)


# ---------------------------------------------------------------- arguments


def _with_arguments(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return add_arguments(wrapped(*args, **kwargs))


def _not_both_yaml_and_flags(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Megatron ignores arguments beside a YAML file: ours must not be among what is ignored."""
    parsed = wrapped(*args, **kwargs)
    ours = [word for word in sys.argv[1:] if word.startswith(("--upipe-", flag(IMPL)))]
    if ours and Settings(parsed).get("yaml_cfg") is not None:
        raise ValueError(
            f"{ours[0]} beside --yaml-cfg, with which Megatron ignores other arguments: put {IMPL}: upipe and "
            "upipe_chunk_heads into the YAML file, under model_parallel."
        )
    return parsed


def _validated(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Defaults are filled in before Megatron prints its arguments, and checked after it has completed its own."""
    parsed = args[0] if args else kwargs["args"]
    options = options_from(parsed)
    if options is not None:
        fill_in(parsed, options)
    result = wrapped(*args, **kwargs)
    if options is not None:
        for note in check_arguments(result if result is not None else parsed, options):
            _say(note)
    return result


def _with_options(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    config = wrapped(*args, **kwargs)
    setattr(config, _CONFIG, options_from(args[0] if args else kwargs["args"]))
    return config


# ---------------------------------------------------------------- models


def _options_of(config: Any) -> UPipeOptions | None:
    """The options that the config carries, or (a config that was made from it by other ways) Megatron's arguments."""
    if hasattr(config, _CONFIG):
        options: UPipeOptions | None = getattr(config, _CONFIG)
        return options
    variables = sys.modules.get("megatron.training.global_vars")
    args = getattr(variables, "_GLOBAL_ARGS", None)
    return None if args is None else options_from(args)


def _patch_model(module: ModuleType, name: str, specs: tuple[str, ...] | None) -> None:
    model = getattr(module, name)
    if isinstance(inspect.getattr_static(model, "__init__"), wrapt.FunctionWrapper):
        return
    signature = inspect.signature(model.__init__)

    def init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        bound = signature.bind(instance, *args, **kwargs)
        options = _options_of(bound.arguments["config"])
        if options is None:
            wrapped(*args, **kwargs)
            return
        if specs is None:
            raise ValueError(
                f"{flag(IMPL)} upipe with {name}: UPipe serves decoder-only models (GPTModel, HybridModel). Use "
                f"{flag(IMPL)} native."
            )
        from megatron_patch.specs import upipe_spec

        for spec in specs:
            if bound.arguments.get(spec) is not None:
                bound.arguments[spec] = upipe_spec(bound.arguments[spec], options)
        wrapped(*bound.args[1:], **bound.kwargs)
        _say(_summary(name, instance))

    wrapt.wrap_function_wrapper(module, f"{name}.__init__", init)


def _summary(name: str, model: Any) -> str:
    from megatron_patch.attention import UPipeSelfAttention

    layers = [module for module in model.modules() if isinstance(module, UPipeSelfAttention)]
    if not layers:
        return f"upipe: {name} has no attention on this pipeline stage"
    schedule, options = layers[0].schedule, layers[0].upipe
    return (
        f"upipe: {len(layers)} attention layers of {name} run in {len(schedule.stages)} stages of "
        f"{schedule.chunk_heads} of {schedule.heads} query heads on {schedule.ranks} context-parallel ranks "
        f"(memory {options.config.memory}, kernel {options.config.kernel})"
    )


def _say(message: str) -> None:
    """On rank 0, as Megatron's own notes."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)
