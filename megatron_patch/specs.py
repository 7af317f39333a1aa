"""Layer specs with UPipe attention: the route without patches, and what the patches use."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_patch.attention import UPipeSelfAttention
from megatron_patch.options import AUTO, UPipeOptions, check_arguments, resolve
from upipe_integrations import UPipeConfig


def upipe_options(
    config: Any, *, chunk_heads: int | str = AUTO, documents_cut: str = "each", **engine: Any
) -> UPipeOptions:
    """Options that fit a TransformerConfig, with the defaults that the command line has.

    Args:
        config: the model's TransformerConfig.
        chunk_heads: query heads per stage over all context-parallel ranks; ``"auto"`` is the number of ranks.
        documents_cut: see :class:`UPipeOptions`.
        engine: other fields of :class:`~upipe_integrations.UPipeConfig`, such as ``memory="fused"``.

    Raises:
        ValueError: an unknown option, one out of its range, or a setting of `config` that UPipe refuses.
    """
    options = dataclasses.replace(resolve(config, {"chunk_heads": chunk_heads, **engine}), documents_cut=documents_cut)
    check_arguments(config, options)
    return options


def gpt_upipe_spec(config: Any, options: UPipeOptions | UPipeConfig, **spec: Any) -> Any:
    """Megatron's decoder block spec for `config`, with UPipe attention: what ``GPTModel`` takes as its layer spec.

    Args:
        config: the model's TransformerConfig.
        options: see :func:`upipe_spec`.
        spec: as for Megatron's ``get_gpt_decoder_block_spec`` (``use_transformer_engine=True``, ``vp_stage=...``).
    """
    return upipe_spec(get_gpt_decoder_block_spec(config, **spec), options)


def upipe_spec(spec: Any, options: UPipeOptions | UPipeConfig) -> Any:
    """The same layer, block, stack or MTP spec, with UPipe in the place of every ``SelfAttention``.

    Args:
        spec: a ``ModuleSpec`` or block submodules, as ``GPTModel`` or ``HybridModel`` take them.
        options: the engine's settings, or all options.

    Raises:
        ValueError: the spec has no self-attention, or has attention of another kind (latent, linear).
    """
    if isinstance(options, UPipeConfig):
        options = UPipeOptions(options)
    converted, count = _converted(spec, options)
    if count == 0:
        raise ValueError(
            "upipe: no SelfAttention in this layer spec, so nothing would run on UPipe. Pass a spec with Megatron's "
            "SelfAttention, or use --context-parallel-impl native."
        )
    return converted


def _converted(spec: Any, options: UPipeOptions) -> tuple[Any, int]:
    """(`spec` with UPipe's class for each self-attention, how many those are).

    Specs nest in one another: a ``ModuleSpec`` in the dataclass of a layer's submodules, in a list of layers, in the
    arguments of a ``functools.partial``.
    """
    if isinstance(spec, ModuleSpec) and isinstance(spec.module, type):
        if spec.module is SelfAttention:
            params = {**spec.params, "upipe": options}
            return dataclasses.replace(spec, module=UPipeSelfAttention, params=params), 1
        if issubclass(spec.module, UPipeSelfAttention):
            return spec, 1
        _refuse_other_attention(spec.module)
    if isinstance(spec, functools.partial):
        if spec.func is SelfAttention:
            return functools.partial(UPipeSelfAttention, *spec.args, **spec.keywords, upipe=options), 1
        _refuse_other_attention(spec.func)
        keywords, count = {}, 0
        for name, value in spec.keywords.items():
            keywords[name], replaced = _converted(value, options)
            count += replaced
        return functools.partial(spec.func, *spec.args, **keywords), count
    if isinstance(spec, (list, tuple)):
        items = [_converted(item, options) for item in spec]
        return type(spec)(item for item, _ in items), sum(count for _, count in items)
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec, 0
    changes, total = {}, 0
    for field in dataclasses.fields(spec):
        value, count = _converted(getattr(spec, field.name), options)
        if count:
            changes[field.name] = value
            total += count
    return (dataclasses.replace(spec, **changes) if changes else spec), total


def _refuse_other_attention(module: Any) -> None:
    """Raise ValueError where `module` is attention over the sequence, but not plain self-attention."""
    if isinstance(module, type) and issubclass(module, Attention):
        raise ValueError(
            f"upipe: this model's layer spec has {module.__name__}, which UPipe can't replace: it serves Megatron's "
            "SelfAttention. Use --context-parallel-impl native for this model."
        )
