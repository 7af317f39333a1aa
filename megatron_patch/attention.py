"""Megatron's self-attention with its training forward run by UPipe.

:class:`UPipeSelfAttention` is the stock ``SelfAttention`` with the same modules under the same names, so
checkpoints do not change; only how they are run does. ``linear_qkv``'s rows are projected stage by stage, rotated,
exchanged over the context-parallel group and attended; ``linear_proj``'s too, in the memory modes that take it and
where nothing was added to it.

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
from megatron_patch.packing import packing_of
from megatron_patch.releases import core_attention_at_one_rank, sinks_of, window_of, yarn_factor
from megatron_patch.rotary import tables_of
from megatron_patch.weights import (
    checked_linear,
    heads_in_qkv,
    input_norm,
    is_bare,
    main_grad_of,
    run_pre_hooks,
    with_gradient_in_main_grad,
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

    def __init__(self, config: Any, submodules: Any, layer_number: int, *args: Any, upipe: UPipeOptions, **kwargs: Any):
        check_rules(config)
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
        self._places = heads_in_qkv(heads, groups, self._gated)
        self._window = window_of(self.config, layer_number)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As ``SelfAttention.forward``, with its arguments in this release.

        Raises:
            ValueError: an argument asks for what UPipe does not do: an inference context on several
                context-parallel ranks, an attention bias, a mask that is not causal.
        """
        bound = _FORWARD.bind(self, hidden_states, *args, **kwargs)
        given = {name: value for name, value in bound.arguments.items() if value is not None}
        if "inference_context" in given or "inference_params" in given:
            if self._group is not None:
                raise ValueError(
                    f"inference with --context-parallel-impl upipe on {self._group.size()} context-parallel ranks: a "
                    "KV cache is not split over ranks. Run inference with --context-parallel-size 1."
                )
            return super().forward(hidden_states, *args, **kwargs)
        for name in set(given) - {"self", "hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params"}:
            raise ValueError(f"upipe: attention was called with {name}, which UPipe does not support. Leave it out.")
        return self._attend(hidden_states, given.get("rotary_pos_emb"), given.get("packed_seq_params"))

    def _attend(self, hidden_states: Tensor, rotary: Any, packed_seq_params: Any) -> tuple[Tensor, Tensor | None]:
        mode, linear, projection = self.upipe.config.mode, self.linear_qkv, self.linear_proj
        checked_linear(linear, "linear_qkv")
        run_pre_hooks(linear, *(norm for norm in (self.q_layernorm, self.k_layernorm) if norm is not None))
        x, split = self._input(input_norm(linear)(hidden_states))
        rows = x.shape[1] * (split.size() if split is not None else 1)
        packing = packing_of(packed_seq_params, rows, self.pg_collection.cp, self.upipe.documents_cut)
        spec = AttentionSpec(
            causal=self._causal(),
            scale=self.config.softmax_scale,
            window=self._window,
            documents=packing.documents,
        )
        sinks = sinks_of(self)
        request = KernelRequest(
            x.device, x.dtype, self.hidden_size_per_attention_head, spec=spec, sinks=sinks is not None
        )
        output = None
        if mode.output_in_loop:
            checked_linear(projection, "linear_proj")
        if mode.output_in_loop or (mode.keeps_output and not self._gated and is_bare(projection)):
            run_pre_hooks(projection)
            output = OutputProjection(
                with_gradient_in_main_grad(projection), None, accumulate_into=main_grad_of(projection)
            )
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
        """`[s, b, h]` -> (`[b, s, h]`, the group that splits its rows once more)."""
        if self.world_size == 1:
            return x.transpose(0, 1), None
        if self.config.sequence_parallel:
            return x.transpose(0, 1), self.pg_collection.tp
        x = copy_to_tensor_model_parallel_region(x, group=self.pg_collection.tp)
        if x.requires_grad:
            x.register_hook(Tensor.contiguous)  # 0.16 loses the sum over ranks of anything else
        return x.transpose(0, 1), None

    def _causal(self) -> bool:
        kinds = {AttnMaskType.causal: True, AttnMaskType.padding_causal: True, AttnMaskType.no_mask: False}
        if self.attn_mask_type not in kinds:
            raise ValueError(
                f"upipe: an attention layer with mask type {self.attn_mask_type.name}: UPipe serves causal attention, "
                "and attention without a mask."
            )
        return kinds[self.attn_mask_type]

    def _tables(self, rotary: Any, packing: Any, dtype: torch.dtype) -> tuple[RotateHalf | None, RotateHalf | None]:
        """The rotary of queries and of keys."""
        skipped = self.config.no_rope_freq
        if rotary is None or (skipped and skipped[self.layer_number - 1]):
            return None, None
        of_q, of_k = rotary if isinstance(rotary, tuple) else (rotary, rotary)
        options = (dtype, yarn_factor(self.config), self.config.rotary_interleaved, packing)
        q = tables_of(of_q, *options)
        return q, q if of_k is of_q else tables_of(of_k, *options)

    def _projections(self, x: Tensor, rotary: tuple[RotateHalf | None, RotateHalf | None]) -> AttentionProjections:
        # A gate reads the same weight by autograd, whose gradient would be lost beside one in main_grad.
        linear, D = self.linear_qkv, self.hidden_size_per_attention_head
        weight = linear.weight if self._gated else with_gradient_in_main_grad(linear)
        bias = linear.bias if self.config.add_bias_linear or self.config.add_qkv_bias else None
        into = None if self._gated else main_grad_of(linear)

        def heads(places: tuple[int, ...], norm: nn.Module | None, rotary: RotateHalf | None) -> Projection:
            plain = norm is None or isinstance(norm, IdentityOp)
            function = None if plain else HeadFunction.of_module(norm)
            return Projection(
                Weights(weight, bias, accumulate_into=into), D, function=function, rotary=rotary, places=places
            )

        return AttentionProjections(
            heads(self._places.q, self.q_layernorm, rotary[0]),
            heads(self._places.k, self.k_layernorm, rotary[1]),
            heads(self._places.v, None, None),
        )

    def _gate(self, out: Tensor, x: Tensor, split: Any) -> Tensor:
        """`[s, b, heads * D]` times the sigmoid of its gate, where the layer has one."""
        if not self._gated:
            return out
        x = x.transpose(0, 1)
        if split is not None:
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=split)
        rows = self._places.gate_rows(self.hidden_size_per_attention_head, x.device)
        bias = self.linear_qkv.bias
        with_bias = self.config.add_bias_linear or self.config.add_qkv_bias
        gate = nn.functional.linear(x, self.linear_qkv.weight[rows], bias[rows] if with_bias else None)
        return (out * gate.float().sigmoid()).to(out.dtype)

    # Weight gradients are complete when backward returns, and the largest logit is not kept.

    def backward_dw(self) -> None:
        """Nothing is left to compute; ``--delay-wgrad-compute`` is refused."""

    def clip_qk(self) -> None:
        """Refused with ``--qk-clip``, which asks for it."""
        raise ValueError("--qk-clip with --context-parallel-impl upipe: the largest logit is not known. Leave it out.")
