"""Putting UPipe into a model, and taking it out again."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed_plugin.alst import is_disabled_in_eval, registered_ulysses
from deepspeed_plugin.distributed import DistributedState, check_instance, distributed_forward
from deepspeed_plugin.group import SequenceGroup
from deepspeed_plugin.guard import ImageGuard, LabelGuard, ShardGuard
from deepspeed_plugin.transformers.adapters import check_prompts
from deepspeed_plugin.transformers.facts import AttentionFacts, attention_facts, find_attention
from deepspeed_plugin.transformers.families import is_vision
from deepspeed_plugin.transformers.layer import CHILD, LayerSettings, StagedAttention, attention_forward
from deepspeed_plugin.transformers.lengths import LargestPosition
from deepspeed_plugin.transformers.stock import StockAttention, check_module
from deepspeed_plugin.transformers.vision import attend_as_before, attend_locally
from upipe_integrations import Schedule, UPipeConfig, select_kernel
from upipe_integrations.planning.closed_forms import LayerShape, ulysses_peak, upipe_peak

_MILLION_TOKENS = 1 << 20


class Attachment:
    """UPipe in one model; :meth:`undo` restores the model exactly.

    Attributes:
        summary: one line that says what was replaced and what it is expected to save.
        layers: names of the attention modules that were replaced.
    """

    def __init__(
        self,
        summary: str,
        layers: dict[str, nn.Module],
        guards: Sequence[RemovableHandle] = (),
        vision: Sequence[nn.Module] = (),
    ) -> None:
        self.summary = summary
        self._layers = layers
        self._guards = guards
        self._vision = vision

    @property
    def layers(self) -> list[str]:
        """Names of the attention modules that are replaced; none after :meth:`undo`."""
        return list(self._layers)

    def undo(self) -> None:
        """Give every module its own forward back and remove what was added; a second call does nothing."""
        for module in self._layers.values():
            del module.forward
            delattr(module, CHILD)
        for module in self._vision:
            attend_as_before(module)
        self._layers, self._vision = {}, ()
        for guard in self._guards:
            guard.remove()


def attach(
    model: nn.Module,
    config: UPipeConfig,
    group: SequenceGroup,
    *,
    device: torch.device,
    dtype: torch.dtype,
    zero_stage: int = 0,
) -> Attachment:
    """Replace the attention of `model`, before its DeepSpeed engine is built.

    Args:
        model: a Transformers model (or something that holds one).
        config: the ``upipe`` settings.
        group: the sequence-parallel group.
        device: where the model will run.
        dtype: what it will compute in; with `device` it decides the kernel.
        zero_stage: 3 registers the projections' weights with ZeRO-3.

    Raises:
        ValueError: the settings, the model and the group do not fit, or UPipe is attached already. Nothing
            has been changed then.
    """
    check_prompts(model)
    layers = find_attention(model)
    if any(hasattr(module, CHILD) for module in layers.values()):
        raise ValueError("upipe: this model has UPipe already. Call undo() on its attachment (engine.upipe) first.")
    for name, module in layers.items():
        check_module(name, module)
    facts = {name: attention_facts(name, module, device, config.mode) for name, module in layers.items()}
    schedules = {
        name: config.schedule(heads=fact.heads, kv_heads=fact.kv_heads, ranks=group.ranks)
        for name, fact in facts.items()
    }
    kernels = {_kernel_for(fact, config, device, dtype) for fact in facts.values()}
    entry = _entry_module(model, layers)
    if group.ranks > 1:
        _check_head(model, layers)
    # Accelerate and the Trainer always register Ulysses as disabled in evaluation.
    ulysses = registered_ulysses()
    model_config: Any = next(iter(layers.values())).config
    disabled_in_eval = is_disabled_in_eval(ulysses.get(model_config._attn_implementation))
    settings = LayerSettings(config, group, disabled_in_eval)

    children = {
        name: StagedAttention(module, facts[name], schedules[name], settings) for name, module in layers.items()
    }
    for name, child in children.items():
        if zero_stage == 3:
            _register_external(child)
        layers[name].add_module(CHILD, child)
        _replace_forward(layers[name], attention_forward)
    mrope = any(fact.family.mrope for fact in facts.values())
    guards = _guards(model, layers, entry, settings, mrope=mrope)
    vision = [module for module in model.modules() if is_vision(module) and attend_locally(module, ulysses)]
    with_output = all(child.projects() for child in children.values())
    summary = _summary(facts, schedules, sorted(kernels), dtype, config, with_output=with_output)
    return Attachment(summary, layers, guards, vision)


def _guards(
    model: nn.Module, layers: dict[str, nn.Module], entry: nn.Module, settings: LayerSettings, *, mrope: bool
) -> list[RemovableHandle]:
    """Put the checks of :mod:`deepspeed_plugin.guard` in front of the modules whose arguments they look at."""
    largest, stock = LargestPosition(), StockAttention(layers, attention_forward)
    guard = ShardGuard(entry, settings, stock, largest, mrope=mrope)
    guards = [entry.register_forward_pre_hook(guard, with_kwargs=True), *largest.tell(entry)]
    for module in _modules_around(model, layers):
        parameters = inspect.signature(module.forward).parameters
        if "labels" in parameters:
            guards.append(module.register_forward_pre_hook(LabelGuard(module, settings), with_kwargs=True))
        if mrope and "pixel_values" in parameters:
            guards.append(module.register_forward_pre_hook(ImageGuard(module, settings), with_kwargs=True))
    return guards


def _replace_forward(module: Any, forward: Callable[..., Any]) -> None:
    """Let `module` run `forward`, as its method; ``del module.forward`` undoes it."""
    module.forward = types.MethodType(forward, module)


def attach_distributed(modules: dict[str, nn.Module], config: UPipeConfig) -> Attachment:
    """Replace the forward of DeepSpeed's ``DistributedAttention`` modules, given by name.

    Raises:
        ValueError: one can't be served under `config`. Nothing has been changed then.
    """
    for name, module in modules.items():
        check_instance(name, module, config)
    for module in modules.values():
        setattr(module, CHILD, DistributedState(config))
        _replace_forward(module, distributed_forward)
    local = ", ".join(sorted({_name_of(module.local_attn) for module in modules.values()}))
    summary = (
        f"UPipe: {len(modules)} DistributedAttention modules run in stages of {config.chunk_heads} query heads, around "
        f"the model's own local attention ({local}); queries, keys and values come projected, so what a stage saves is "
        "their exchange and the attention itself"
    )
    return Attachment(summary, modules)


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _kernel_for(fact: AttentionFacts, config: UPipeConfig, device: torch.device, dtype: torch.dtype) -> str:
    """The name of the kernel a layer will use."""
    request = fact.kernel_request(device, dtype, fact.spec(), blocks=config.mode.query_blocks > 1)
    kernel = select_kernel(config.kernel, request)
    if config.mode.query_blocks > 1:
        reason = kernel.block_refusal(request.spec)
        if reason is not None:
            raise ValueError(
                f"upipe.memory = 'blocks' with kernel {kernel.name!r}: {reason}. Set upipe.memory to 'fused', or "
                "upipe.kernel to another one."
            )
    return kernel.name


def _register_external(child: StagedAttention) -> None:
    from deepspeed.runtime.zero import register_external_parameter

    for parameter in child.external_parameters():
        register_external_parameter(child, parameter)


def _modules_around(model: nn.Module, layers: dict[str, nn.Module]) -> list[nn.Module]:
    """The modules that hold all attention layers, outermost first."""
    return [
        module
        for name, module in model.named_modules()
        if all(layer.startswith(f"{name}." if name else "") and layer != name for layer in layers)
    ]


def _entry_module(model: nn.Module, layers: dict[str, nn.Module]) -> nn.Module:
    """The innermost module around all attention whose forward takes tokens and ``position_ids``."""
    for module in reversed(_modules_around(model, layers)):
        parameters = inspect.signature(module.forward).parameters
        if "position_ids" in parameters and not {"input_ids", "inputs_embeds"}.isdisjoint(parameters):
            return module
    raise ValueError(
        f"upipe: no module of {type(model).__name__} that holds all attention layers takes input_ids and "
        "position_ids, so the positions of the shards can't be checked. Use a Transformers model, or remove the "
        "'upipe' key."
    )


_POOLING_HEADS = ("ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice")


def _check_head(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Raise ValueError where a head makes one result of a whole sequence, of which each rank has a part."""
    for module in _modules_around(model, layers):
        name = type(module).__name__
        if name.endswith(_POOLING_HEADS):
            raise ValueError(
                f"upipe: {name} makes one result of a sequence, and would make one of each rank's shard. Give "
                "deepspeed.initialize the model without that head (its base model, with a head of your own on the "
                "rows of the rank that has the token you need), or train without sequence parallelism "
                "(remove the 'upipe' key and the mpu)."
            )


def _summary(
    facts: dict[str, AttentionFacts],
    schedules: dict[str, Schedule],
    kernels: list[str],
    dtype: torch.dtype,
    config: UPipeConfig,
    *,
    with_output: bool,
) -> str:
    """The line that is logged; layers that differ from the first are counted, not described."""
    fact, schedule = next(iter(facts.values())), next(iter(schedules.values()))
    shape = LayerShape(fact.heads, fact.kv_heads, fact.head_dim, fact.hidden_size)
    peaks = (
        upipe_peak(shape, schedule, config.mode, with_output=with_output, kernel=kernels[0]),
        ulysses_peak(shape, schedule.ranks, kernel=kernels[0]),
    )
    ours, theirs = (peak.gib(_MILLION_TOKENS, fact.head_dim, itemsize=dtype.itemsize) for peak in peaks)
    others = sum(other != schedule for other in schedules.values())
    names = ", ".join(sorted({f.class_name for f in facts.values()}))
    one_size = fact.value_dim == fact.head_dim
    counted = "" if one_size else f" (value heads of {fact.value_dim} counted as {fact.head_dim})"
    other_method = "Ulysses" if schedule.ranks > 1 else "plain attention"
    return (
        f"UPipe: {len(facts)} attention layers replaced ({names}), {fact.heads} query and {fact.kv_heads} KV heads "
        f"on {schedule.ranks} ranks in {len(schedule.stages)} stages of {schedule.chunk_heads} heads"
        f"{f' ({others} layers differ)' if others else ''}, kernel {', '.join(kernels)}, memory {config.memory}; "
        "expected attention peak per rank in training, at 1M tokens of batch 1 in "
        f"{str(dtype).removeprefix('torch.')}: {ours.training:.2f} GiB against {theirs.training:.2f} GiB with "
        f"{other_method} ({ours.training / theirs.training - 1:+.0%}){counted}"
    )
