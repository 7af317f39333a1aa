"""Megatron's self-attention with its training forward run by UPipe.

:class:`UPipeSelfAttention` is the stock ``SelfAttention`` with the same modules under the same names, so
checkpoints do not change; only how they are run does. The heads of ``linear_qkv`` are projected stage by stage,
rotated, exchanged over the context-parallel group and attended. ``linear_proj`` is run by the engine as well,
in the memory modes that allow it and where nothing was added to it.

Megatron's activations are `[s, b, h]`, the engine's `[b, s, h]`; with one sequence per microbatch, as long contexts
have it, either is a view of the other.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from megatron_patch.options import UPipeOptions, check_heads, check_rules
from megatron_patch.packing import Packing, read_packing
from megatron_patch.releases import core_attention_at_one_rank, layer_window, sink_logits, yarn_factor
from megatron_patch.rotary import rotary_tables
from megatron_patch.stock import check_class, check_core_attention, check_norm
from megatron_patch.weights import (
    ParallelLinear,
    check_linear,
    input_norm,
    is_unmodified,
    main_grad_buffer,
    qkv_places,
    run_pre_hooks,
    weight_read,
)
from upipe_integrations import (
    AttentionProjections,
    AttentionSpec,
    HeadFunction,
    KernelRequest,
    OutputProjection,
    Projection,
    RotateHalf,
    Staging,
    Weights,
    select_kernel,
    upipe_attention,
)

_FORWARD = inspect.signature(SelfAttention.forward)


class UPipeSelfAttention(SelfAttention):
    """``SelfAttention`` whose forward in training and evaluation is UPipe's; inference at one rank is the stock one.

    Built from a spec by ``megatron_patch.upipe_spec``, as ``SelfAttention`` is, with the options added.

    Args:
        upipe: the options; the rest is as for ``SelfAttention``.

    Raises:
        ValueError: the configuration has a setting that UPipe refuses, or heads that do not fit.
    """

    # What is read of Megatron's attributes.
    config: Any
    linear_qkv: ParallelLinear
    linear_proj: ParallelLinear
    q_layernorm: nn.Module | None
    k_layernorm: nn.Module | None
    hidden_size_per_attention_head: int

    def __init__(self, config: Any, submodules: Any, layer_number: int, *args: Any, upipe: UPipeOptions, **kwargs: Any):
        check_rules(config)
        check_class(SelfAttention)
        check_core_attention(submodules.core_attention)
        submodules = core_attention_at_one_rank(submodules)
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self.upipe = upipe
        group = self.pg_collection.cp
        self._group = group if group.size() > 1 else None
        check_heads(
            upipe,
            heads=self.config.num_attention_heads,
            groups=self.config.num_query_groups,
            ranks=group.size(),
            tensor_ranks=self.world_size,
        )
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        self.schedule = upipe.config.schedule(heads=heads, kv_heads=groups, ranks=group.size())
        self._gated = bool(self.config.attention_output_gate)
        if self._gated and upipe.config.mode.output_in_loop:
            raise ValueError(
                f"--attention-output-gate with --upipe-memory {upipe.config.memory}: the gate is between attention and "
                "the output projection, which this mode runs as one. Set --upipe-memory recompute."
            )
        self._places = qkv_places(heads, groups, self._gated)
        self._window = layer_window(self.config, layer_number)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As ``SelfAttention.forward``, with its arguments in this release.

        Raises:
            ValueError: an argument asks for what UPipe does not do: an inference context on several
                context-parallel ranks, an attention bias, a mask that is not causal.
        """
        bound = _FORWARD.bind(self, hidden_states, *args, **kwargs)
        arguments = {name: value for name, value in bound.arguments.items() if value is not None}
        if "inference_context" in arguments or "inference_params" in arguments:
            if self._group is not None:
                raise ValueError(
                    f"inference with --context-parallel-impl upipe on {self._group.size()} context-parallel ranks: a "
                    "KV cache is not split over ranks. Run inference with --context-parallel-size 1."
                )
            inferred: tuple[Tensor, Tensor | None] = super().forward(hidden_states, *args, **kwargs)
            return inferred
        for name in set(arguments) - {"self", "hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params"}:
            raise ValueError(f"upipe: attention was called with {name}, which UPipe does not support. Leave it out.")
        return self._attend(hidden_states, arguments.get("rotary_pos_emb"), arguments.get("packed_seq_params"))

    def _attend(self, hidden_states: Tensor, rotary: Any, packed_seq_params: Any) -> tuple[Tensor, Tensor | None]:
        mode, linear, projection = self.upipe.config.mode, self.linear_qkv, self.linear_proj
        self._check_dropout()
        check_linear(linear, "linear_qkv")
        check_norm(self.q_layernorm, "q_layernorm")
        check_norm(self.k_layernorm, "k_layernorm")
        run_pre_hooks(linear, self.q_layernorm, self.k_layernorm)
        x, split = self._input(input_norm(linear)(hidden_states))
        rows = x.shape[1] * (split.size() if split is not None else 1)
        packing = read_packing(packed_seq_params, rows, self.pg_collection.cp, self.upipe.documents_cut)
        spec = AttentionSpec(
            causal=self._causal(),
            scale=self.config.softmax_scale,
            window=self._window,
            documents=packing.documents,
        )
        sinks = sink_logits(self)
        request = KernelRequest(
            x.device,
            x.dtype,
            self.hidden_size_per_attention_head,
            spec=spec,
            sinks=sinks is not None,
            blocks=mode.query_blocks > 1,
        )
        output = None
        if mode.output_in_loop:
            check_linear(projection, "linear_proj")
        if mode.output_in_loop or (mode.keeps_output and not self._gated and is_unmodified(projection)):
            run_pre_hooks(projection)
            output = OutputProjection(weight_read(projection), None, accumulate_into=main_grad_buffer(projection))
        result = upipe_attention(
            x,
            self._projections(x, self._tables(rotary, packing, x.dtype)),
            Staging(
                self.schedule,
                self._group,
                select_kernel(self.upipe.config.kernel, request),
                layout=packing.layout,
                mode=mode,
                x_group=split,
            ),
            spec,
            sinks=sinks,
            output=output,
        ).transpose(0, 1)
        # [s, b, heads * D] of this tensor-parallel rank, or its share of [s, b, h] after the output projection
        if output is None:
            attended: tuple[Tensor, Tensor | None] = projection(self._gate(result, x, split))
            return attended
        reduce = (
            reduce_scatter_to_sequence_parallel_region
            if self.config.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        # Contiguous, for 0.16 as in _input; it is already where there is one sequence.
        result = result.contiguous()
        return reduce(result, group=self.pg_collection.tp), projection.bias if self.config.add_bias_linear else None

    def _input(self, x: Tensor) -> tuple[Tensor, Any]:
        """The attention input `[s, b, h]` -> `[b, s, h]`, and the group that splits its rows once more.

        That is the tensor-parallel group with ``--sequence-parallel``; else each of its ranks holds all `s` rows, and
        the group is None.
        """
        if self.world_size == 1:
            return x.transpose(0, 1), None
        if self.config.sequence_parallel:
            return x.transpose(0, 1), self.pg_collection.tp
        x = copy_to_tensor_model_parallel_region(x, group=self.pg_collection.tp)
        if x.requires_grad:
            x.register_hook(Tensor.contiguous)  # 0.16 loses the sum over ranks of anything else
        return x.transpose(0, 1), None

    def _check_dropout(self) -> None:
        """Raise ValueError where dropout was set after the layer was built."""
        rate = self.config.attention_dropout
        if rate and self.training:
            raise ValueError(
                f"--attention-dropout = {rate} with --context-parallel-impl upipe, set after the model was built: "
                "UPipe attends without dropout. Set config.attention_dropout to 0."
            )

    def _causal(self) -> bool:
        """Whether attention is causal; raises ValueError for a mask that is neither causal nor none."""
        kinds = {AttnMaskType.causal: True, AttnMaskType.padding_causal: True, AttnMaskType.no_mask: False}
        if self.attn_mask_type not in kinds:
            raise ValueError(
                f"upipe: an attention layer with mask type {self.attn_mask_type.name}: UPipe serves causal attention, "
                "and attention without a mask."
            )
        return kinds[self.attn_mask_type]

    def _tables(self, rotary: Any, packing: Packing, dtype: torch.dtype) -> tuple[RotateHalf | None, RotateHalf | None]:
        """The rotary of queries and of keys; None in layers without.

        `rotary` is the model's: angles `[s, b or 1, 1, R]`, or a pair of them for queries and keys.
        """
        skipped = self.config.no_rope_freq
        if rotary is None or (skipped and skipped[self.layer_number - 1]):
            return None, None
        q_angles, k_angles = rotary if isinstance(rotary, tuple) else (rotary, rotary)
        options = (dtype, yarn_factor(self.config), self.config.rotary_interleaved, packing)
        q = rotary_tables(q_angles, *options)
        return q, q if k_angles is q_angles else rotary_tables(k_angles, *options)

    def _projections(self, x: Tensor, rotary: tuple[RotateHalf | None, RotateHalf | None]) -> AttentionProjections:
        # A gate reads the same weight by autograd, whose gradient would be lost beside one in main_grad.
        linear, D = self.linear_qkv, self.hidden_size_per_attention_head
        weight = linear.weight if self._gated else weight_read(linear)
        bias = self._qkv_bias()
        into = None if self._gated else main_grad_buffer(linear)

        def heads(places: tuple[int, ...], norm: nn.Module | None, rotary: RotateHalf | None) -> Projection:
            function = None if norm is None or isinstance(norm, IdentityOp) else HeadFunction.of_module(norm)
            return Projection(
                Weights(weight, bias, accumulate_into=into), D, function=function, rotary=rotary, places=places
            )

        return AttentionProjections(
            heads(self._places.q, self.q_layernorm, rotary[0]),
            heads(self._places.k, self.k_layernorm, rotary[1]),
            heads(self._places.v, None, None),
        )

    def _qkv_bias(self) -> Tensor | None:
        return self.linear_qkv.bias if self.config.add_bias_linear or self.config.add_qkv_bias else None

    def _gate(self, out: Tensor, x: Tensor, split: Any) -> Tensor:
        """The attended heads `[s, b, heads * D]`, times the sigmoid of their gates where the layer has gates.

        Args:
            out: the attended heads.
            x: the attention input `[b, s, h]`, from ``_input``.
            split: the group that splits its rows once more, from there.
        """
        if not self._gated:
            return out
        x = x.transpose(0, 1)
        if split is not None:
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=split)
        outputs = self._places.gate_outputs(self.hidden_size_per_attention_head, x)
        bias = self._qkv_bias()
        gate = nn.functional.linear(x, self.linear_qkv.weight[outputs], None if bias is None else bias[outputs])
        return (out * gate.float().sigmoid()).to(out.dtype)

    # Weight gradients are complete when backward returns, and the largest logit is not kept.

    def backward_dw(self) -> None:
        """Nothing is left to compute; ``--delay-wgrad-compute`` is refused."""

    def clip_qk(self) -> None:
        """Refused with ``--qk-clip``, which asks for it."""
        raise ValueError("--qk-clip with --context-parallel-impl upipe: the largest logit is not known. Leave it out.")
