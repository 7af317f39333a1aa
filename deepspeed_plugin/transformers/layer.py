"""The attention of one layer: a parameter-less module beside the projections, and the forward that uses it.

Parameters keep their names and places, so checkpoints do not change. The engine reads the weights of
``q_proj``, ``k_proj`` and ``v_proj`` directly, which bypasses those modules' hooks; under ZeRO-3 they are
therefore registered as external parameters of :class:`StagedAttention`, which is called with positional
tensors so that DeepSpeed's hooks see an input to wait for: weights are gathered for one layer at a time.
The A sides of adapters run before it, as modules; their results are among its inputs.

Shapes: B batch, L rows of the sequence on this rank, E hidden size, H query heads, D head size, Dv size of value heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_plugin.group import SequenceGroup
from deepspeed_plugin.shards import is_shard
from deepspeed_plugin.transformers.adapters import base_linear, low_rank_input
from deepspeed_plugin.transformers.facts import AttentionFacts, check_projections, check_settings
from deepspeed_plugin.transformers.latent import latent_projections
from deepspeed_plugin.transformers.norms import norm_over_heads
from deepspeed_plugin.transformers.reader import AttentionReader
from upipe_integrations import (
    AttentionProjections,
    HeadFunction,
    KernelRequest,
    OutputProjection,
    Projection,
    RotateHalf,
    Schedule,
    Staging,
    UPipeConfig,
    compute_dtype,
    select_kernel,
    upipe_attention,
)
from upipe_integrations.engine.tracing import run_while_tracing
from upipe_integrations.kernels import KERNELS
from upipe_integrations.sharding import documents_from_positions

CHILD = "upipe"
"""Name of the child module under an attention module."""


# Arguments of Transformers' attention layers that do not change what is attended.
_HARMLESS = {
    "position_ids",  # checked once per step, for the whole model
    "shift_labels",  # of the model's loss; checked there
    "use_cache",
    "cache_position",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
}


@dataclass(frozen=True)
class LayerSettings:
    """What all layers of a model share.

    Attributes:
        config: the ``upipe`` block.
        group: the sequence-parallel group.
        disabled_in_eval: whether evaluation is left to the model's own forward.
    """

    config: UPipeConfig
    group: SequenceGroup
    disabled_in_eval: bool


def _chosen_kernel(name: str, request: KernelRequest) -> str:
    """The name of the kernel for `request`. A name, as compiled code can hold that as a constant, and not a kernel."""
    return select_kernel(name, request).name


class StagedAttention(nn.Module):
    """UPipe attention over the projections of `attention`, of which it holds no parameter.

    Args:
        attention: the module that it is a child of.
        facts: what :func:`attention_facts` read of it.
        schedule: the stages of its heads.
        settings: what all layers of the model share.
    """

    def __init__(self, attention: nn.Module, facts: AttentionFacts, schedule: Schedule, settings: LayerSettings):
        super().__init__()
        # The reader hides the parent, which nn.Module would register as a child of its child.
        self.reader = AttentionReader(attention, facts.family)
        self.facts = facts
        self.schedule = schedule
        self.settings = settings
        self._may_project = self.reader.reads_output(settings.config.mode)
        self.keep_result = False
        """Whether attention runs as an operator whose result selective checkpointing keeps."""

    def projects(self) -> bool:
        """Whether the output projection is run here now, not as a module.

        Never where it was not at first, as its weight may then not be gathered for this module.
        """
        return self._may_project and self.reader.reads_output(self.settings.config.mode)

    def external_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of other modules that :meth:`forward` reads."""
        return self.reader.parameters_read(self.settings.config.mode)

    def forward(
        self,
        hidden_states: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        low_rank_inputs: dict[str, Tensor],
        documents: tuple[tuple[int, ...], ...] | None = None,
        query_factor: Tensor | None = None,
    ) -> Tensor:
        """Attention of this rank's rows to the whole sequence.

        Args:
            hidden_states: `[B, L, E]`.
            cos, sin: rotary tables of the rows, `[B or 1, L, D]`; None is no rotary.
            low_rank_inputs: `[B, L, r]` by the name of a projection with active adapters.
            documents: boundaries of packed documents, for ``AttentionSpec``.
            query_factor: `[B, L, 1]`, a factor on the queries of each row.

        Returns:
            `[B, L, H * Dv]`, or `[B, L, E]` after the output projection where :meth:`projects` says so.
        """
        facts, reader = self.facts, self.reader
        family = facts.family
        mode = dataclasses.replace(self.settings.config.mode, operator=self.keep_result)
        tables = None
        if facts.rotates and cos is not None and sin is not None:
            tables = (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)) if family.half_tables else (cos, sin)
        spec = facts.now(reader).spec(documents)
        sinks = reader.sinks
        dtype = compute_dtype(hidden_states)
        request = facts.kernel_request(
            hidden_states.device, dtype, spec, blocks=self.settings.config.mode.query_blocks > 1
        )
        if family.latent is None:
            x, projections = hidden_states, self._projections(hidden_states, low_rank_inputs, tables, query_factor)
        else:
            assert facts.rotary is not None and tables is not None  # latent attention rotates
            x, projections = latent_projections(reader.module, family.latent, hidden_states, facts.rotary, tables)
        output = base_linear(reader.output_layer) if self.projects() else None
        return upipe_attention(
            x,
            projections,
            Staging(
                self.schedule,
                self.settings.group.process_group,
                KERNELS[run_while_tracing(_chosen_kernel, self.settings.config.kernel, request)],
                mode=mode,
            ),
            spec,
            sinks=sinks,
            output=None if output is None else OutputProjection(output.weight, output.bias),
        )

    def _projections(
        self,
        x: Tensor,
        low_rank_inputs: dict[str, Tensor],
        tables: tuple[Tensor, Tensor] | None,
        query_factor: Tensor | None,
    ) -> AttentionProjections:
        """The projections of q, k and v from x `[B, L, E]`, with the functions of their heads."""
        q_norm, k_norm = self.reader.norms
        q, k, v = self.facts.projections(self.reader, low_rank_inputs)
        value_factor: float | None = self.reader.value(self.facts.family.value_factor)
        return AttentionProjections(
            self._with_norm_and_rotary(q, x, q_norm, _scaled_tables(tables, query_factor)),
            self._with_norm_and_rotary(k, x, k_norm, tables),
            dataclasses.replace(v, function=None if value_factor is None else HeadFunction(_Times(value_factor))),
        )

    def _with_norm_and_rotary(
        self, projection: Projection, x: Tensor, norm: nn.Module | None, tables: tuple[Tensor, Tensor] | None
    ) -> Projection:
        """`projection` with the norm and the rotary embedding of its heads."""
        facts = self.facts
        normalise = None
        if norm is not None and facts.family.whole_norms:
            normalise = norm_over_heads(norm, x, projection, self.schedule.chunk_heads)
        elif norm is not None:
            normalise = HeadFunction.of_module(norm)
        if tables is None or facts.rotary is None:
            rotary = None if tables is None else RotateHalf(*tables)
            return dataclasses.replace(projection, function=normalise, rotary=rotary)
        rotate = HeadFunction(facts.rotary, tables, by_row=(0, 1))
        steps = [rotate, normalise] if facts.family.norm_after_rotary else [normalise, rotate]
        return dataclasses.replace(projection, function=_composed([step for step in steps if step is not None]))


@dataclass(frozen=True)
class _Times:
    """Multiplies heads by a number."""

    factor: float

    def __call__(self, heads: Tensor) -> Tensor:
        return heads * self.factor


def _scaled_tables(tables: tuple[Tensor, Tensor] | None, factor: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Tables `[B or 1, L, D]` times a factor `[B, L, 1]`, so that what they rotate is scaled too.

    That is the whole head in every class that has a factor on queries.
    """
    if tables is None or factor is None:
        return tables
    cos, sin = (t * factor.to(t.dtype) for t in tables)
    return cos, sin


def is_left_alone(module: nn.Module, position_ids: Any, settings: LayerSettings) -> bool:
    """Whether a call of `module` is evaluation that is left to the model itself: of a batch not known to be a shard."""
    return settings.disabled_in_eval and not module.training and not is_shard(position_ids)


_DOCUMENTS = "_upipe_documents"


def remember_documents(position_ids: Tensor, documents: tuple[tuple[int, ...], ...] | None) -> None:
    """Keep the boundaries of a forward's packed documents on its position_ids.

    The layers of this forward find them by that tensor, and so does their recomputation under gradient checkpointing,
    whatever forwards of the model came in between.
    """
    setattr(position_ids, _DOCUMENTS, documents)


def recall_documents(position_ids: Tensor | None, group: SequenceGroup) -> tuple[tuple[int, ...], ...] | None:
    """The boundaries that were remembered for `position_ids`; None without packed documents, or without positions.

    A layer that is called by itself, or with other tensors than the model was (some checkpointing detaches
    them), finds out from the positions, by an exchange of its own.
    """
    if position_ids is None:
        return None
    if not hasattr(position_ids, _DOCUMENTS):
        remember_documents(position_ids, documents_from_positions(position_ids, group.process_group))
    remembered: tuple[tuple[int, ...], ...] | None = getattr(position_ids, _DOCUMENTS)
    return remembered


def _composed(steps: list[HeadFunction]) -> HeadFunction:
    """One function after the other, as one that reads the tensors of all, in order."""
    counts = [len(step.tensors) for step in steps]
    firsts = [sum(counts[:i]) for i in range(len(steps))]
    by_row = tuple(first + i for step, first in zip(steps, firsts, strict=True) for i in step.by_row)
    by_head = tuple(first + i for step, first in zip(steps, firsts, strict=True) for i in step.by_head)
    function = _Composed(tuple(step.function for step in steps), tuple(counts))
    return HeadFunction(function, tuple(t for step in steps for t in step.tensors), by_row, by_head)


@dataclass(frozen=True)
class _Composed:
    """Functions that each take the heads and as many of the tensors as `counts` says."""

    functions: tuple[Callable[..., Tensor], ...]
    counts: tuple[int, ...]

    def __call__(self, heads: Tensor, *tensors: Tensor) -> Tensor:
        first = 0
        for function, count in zip(self.functions, self.counts, strict=True):
            heads = function(heads, *tensors[first : first + count])
            first += count
        return heads


def attention_forward(
    attention: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | Tensor | None = None,
    attention_mask: Any = None,
    cache: Any = None,
    past_key_values: Any = None,
    layer_past: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Replaces the forward of a Transformers attention module; same arguments, same result `[B, L, E]`.

    Mask and cache are not looked at here: what reaches a layer was made by the model for the local shard, and
    what the user passed was checked by :class:`~deepspeed_plugin.guard.ShardGuard` when the model was entered.

    Raises:
        ValueError: an argument asks for what UPipe does not do (attention weights, bidirectional attention,
            packed sequences by cu_seq_lens rather than by position_ids).
    """
    child = attention.get_submodule(CHILD)
    assert isinstance(child, StagedAttention)
    if is_left_alone(attention, options.get("position_ids"), child.settings):
        # Of these three names for a cache a module knows one.
        caches = {"cache": cache, "past_key_values": past_key_values, "layer_past": layer_past}
        original: tuple[Tensor, None] = type(attention).forward(
            attention,
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **{name: value for name, value in caches.items() if value is not None},
            **options,
        )
        return original
    _refuse_options(type(attention).__name__, options)
    if position_embeddings is None and child.facts.rotates:
        raise ValueError(
            f"upipe: {type(attention).__name__} was called without position_embeddings. Call it through its model."
        )
    family, reader = child.facts.family, child.reader
    check_settings(child.facts.class_name, attention, family)
    check_projections(child.facts.class_name, reader, child.settings.config.mode)
    documents = recall_documents(options.get("position_ids"), child.settings.group)
    by_layer = {name: low_rank_input(layer, hidden_states) for name, layer in reader.input_layers().items()}
    low_rank_inputs = {name: t for name, t in by_layer.items() if t is not None}
    # ZeRO-3 hooks look into every argument, so last ones that are None are left out.
    last: tuple[Any, ...] = () if documents is None else (documents,)
    if family.query_factor is not None:
        last = (documents, family.query_factor(attention, _positions(attention, options)))
    out = child(hidden_states, *_tables(position_embeddings), low_rank_inputs, *last)
    return child.facts.finish(reader, hidden_states, out, child.projects()), None


def _tables(position_embeddings: tuple[Tensor, Tensor] | Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(cosines, sines) `[B or 1, L, D]`, which some models give as one complex table."""
    if position_embeddings is None:
        return None, None
    if isinstance(position_embeddings, Tensor):
        return position_embeddings.real, position_embeddings.imag
    return position_embeddings


def _positions(attention: nn.Module, options: dict[str, Any]) -> Tensor:
    positions: Tensor | None = options.get("position_ids")
    if positions is None:
        raise ValueError(
            f"upipe: {type(attention).__name__} was called without position_ids. Call it through its model."
        )
    return positions


def _refuse_options(class_name: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        harmless = value is True if name == "is_causal" else value is False
        if name in _HARMLESS or value is None or harmless:
            continue
        raise ValueError(
            f"upipe: {class_name} was called with {name} = {_short(value)}, which UPipe does not support. Leave {name} "
            "out, or remove the 'upipe' key."
        )


def _short(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
