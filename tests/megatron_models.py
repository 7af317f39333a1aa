"""Megatron models for tests: built under any parallelism with the same weights, and their gradients put together.

The reference is always Megatron's own attention without context parallelism; every rank computes it for itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY = 64


@dataclass(frozen=True)
class Case:
    """One model and how it is split.

    Args:
        tp, cp, pp, ep, vpp: sizes of the parallelisms.
        sp: sequence parallelism over tensor-parallel ranks.
        chunk_heads: None is the number of context-parallel ranks.
        upipe: more of the engine's options.
        config: more of the TransformerConfig.
        model: more arguments of GPTModel.
        spec: more arguments of the layer spec.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int | None = None
    sp: bool = False
    chunk_heads: int | None = None
    upipe: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    batch: int = 2
    length: int = 32
    dtype: torch.dtype = torch.float64

    def alone(self) -> Case:
        """The same model on one rank."""
        return dataclasses.replace(self, tp=1, cp=1, pp=1, ep=1, vpp=None, sp=False)


def start(case: Case) -> None:
    """Process groups for the case, over all ranks; those of a case before serve where the sizes are the same.

    Megatron forgets its groups without closing them, and each has threads: new ones for every case add up. What
    Megatron gives to ``torch.compile`` (activations beside attention) is run as it is: a compiler takes longer.
    """
    from megatron.core import parallel_state, tensor_parallel

    torch.compiler.set_stance("force_eager")
    global _started
    sizes = dict(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=1 if case.ep > 1 else None,
    )
    if sizes != _started:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes)
        _started = sizes
    tensor_parallel.model_parallel_cuda_manual_seed(123)


_started: dict[str, Any] | None = None


def config_of(case: Case) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = dict(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=16,
        num_query_groups=8,
        ffn_hidden_size=64,
        add_qkv_bias=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=1 if case.ep > 1 else None,
        sequence_parallel=case.sp,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        bias_dropout_fusion=False,
    )
    return TransformerConfig(**(settings | case.config))


def layer_spec(case: Case, config: Any) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    if config.num_moe_experts or config.mtp_num_layers or case.pp > 1:
        return gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, **case.spec)
    norm = {"normalization": config.normalization} if config.normalization != "LayerNorm" else {}
    return gpt_layer_specs.get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, qk_l2_norm=config.qk_l2_norm, **norm, **case.spec
    )


def build(case: Case, upipe: bool, change_spec: Any = None, documents_cut: str = "each") -> list[Any]:
    """The model's chunks on this rank (one without interleaving), with the weights that `fill` gives."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_patch import UPipeConfig, UPipeOptions, upipe_spec

    config = config_of(case)
    chunks = []
    for stage in range(case.vpp or 1):
        vp = {"vp_stage": stage} if case.vpp else {}
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, **vp)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, **vp)
        spec = layer_spec(dataclasses.replace(case, spec=case.spec | vp), config)
        mtp = _mtp_spec(config, spec, vp) if config.mtp_num_layers else None
        if change_spec is not None:
            spec = change_spec(spec)
        if upipe:
            engine = UPipeConfig(chunk_heads=case.chunk_heads or case.cp, **case.upipe)
            options = UPipeOptions(engine, documents_cut)
            spec = upipe_spec(spec, options)
            mtp = None if mtp is None else upipe_spec(mtp, options)
        arguments: dict[str, Any] = dict(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=case.length,
            position_embedding_type="rope",
            pre_process=first,
            post_process=last,
            parallel_output=config.mtp_num_layers is not None,
            mtp_block_spec=mtp,
            **vp,
        )
        model = GPTModel(**(arguments | case.model)).to(case.dtype)
        fill(model)
        chunks.append(model)
    return chunks


def _mtp_spec(config: Any, spec: Any, vp: dict[str, Any]) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    layer = spec.layer_specs[-1] if hasattr(spec, "layer_specs") else spec
    return gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, **vp)


# ---------------------------------------------------------------- the same weights everywhere


def global_name(model: Any, name: str) -> str:
    """The parameter's name in the whole model: layers and experts counted over all ranks."""
    from megatron.core import parallel_state

    found = re.match(r"(.*\bdecoder\.layers\.)(\d+)(\..*)", name)
    if found:
        layer = model.decoder.layers[int(found[2])]
        name = f"{found[1]}{layer.layer_number - 1}{found[3]}"
    found = re.match(r"(.*local_experts\.)(\d+)(\..*)", name)
    if found:
        moe = next(m for m in model.modules() if hasattr(m, "num_local_experts") and hasattr(m, "local_expert_indices"))
        offset = parallel_state.get_expert_model_parallel_rank() * moe.num_local_experts
        name = f"{found[1]}{int(found[2]) + offset}{found[3]}"
    return name


def fill(model: Any) -> None:
    """Random weights by name, the same however the model is split; norms are near one and biases not zero."""
    from megatron.core import parallel_state

    for name, parameter in model.named_parameters():
        whole = list(parameter.shape)
        split = _split_dim(name, parameter)
        if split is not None:
            whole[split] *= parallel_state.get_tensor_model_parallel_world_size()
        seed = int.from_bytes(hashlib.sha256(global_name(model, name).encode()).digest()[:4], "big")
        values = torch.randn(whole, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        if parameter.dim() == 1:
            values = values * 0.1 + ("norm" in name and name.endswith("weight"))
        else:
            values = values * 0.5 / whole[-1] ** 0.5
        if split is not None:
            ranks, rank = (
                parallel_state.get_tensor_model_parallel_world_size(),
                parallel_state.get_tensor_model_parallel_rank(),
            )
            values = values.chunk(ranks, split)[rank]
        parameter.data.copy_(values)


def _split_dim(name: str, parameter: Any) -> int | None:
    """The dimension that tensor parallelism splits, or None."""
    from megatron.core import parallel_state

    if parallel_state.get_tensor_model_parallel_world_size() == 1 or "experts" in name:
        return None
    if name.endswith("softmax_offset"):
        return 0
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


# ---------------------------------------------------------------- batches


def batch_of(case: Case, seed: int = 5) -> dict[str, torch.Tensor]:
    """A whole batch; every token has a weight of its own in the loss."""
    g = torch.Generator().manual_seed(seed)
    shape = (case.batch, case.length)
    return {
        "tokens": torch.randint(0, VOCABULARY, shape, generator=g),
        "labels": torch.randint(0, VOCABULARY, shape, generator=g),
        "position_ids": torch.arange(case.length)[None].repeat(case.batch, 1),
        "loss_mask": torch.rand(shape, generator=g),
    }


def causal_mask(length: int) -> torch.Tensor:
    """As Megatron's local attention takes it: True hides."""
    return ~torch.tril(torch.ones(length, length, dtype=torch.bool))[None, None]


def on_this_rank(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This context-parallel rank's part, by Megatron itself."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    if parallel_state.get_context_parallel_world_size() == 1:
        return dict(batch)
    known = inspect.signature(get_batch_on_this_cp_rank).parameters
    wanted = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
    return get_batch_on_this_cp_rank(dict(batch), **{name: v for name, v in wanted.items() if name in known})


def token_loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Weighted sum of cross entropies, in the logits' own precision."""
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (losses * batch["loss_mask"].flatten().to(losses.dtype)).sum()


# ---------------------------------------------------------------- whole gradients


def whole_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter's gradient, summed over context-parallel ranks, without data parallelism's help."""
    from megatron.core import parallel_state

    tensor, context = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()
    whole: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad.clone()
        if context.size() > 1:
            dist.all_reduce(grad, group=context)
        if tensor.size() > 1 and _split_dim(name, parameter) is None and _is_partial(name, parameter):
            dist.all_reduce(grad, group=tensor)
        whole[global_name(model, name)] = whole_over_tensor_ranks(name, parameter, grad)
    return whole


def whole_over_tensor_ranks(name: str, parameter: Any, value: torch.Tensor) -> torch.Tensor:
    """`value`, of the parameter's shape, put together where tensor parallelism splits it."""
    from megatron.core import parallel_state

    split = _split_dim(name, parameter)
    if split is None:
        return value.clone()
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.cat(parts, split)


def _is_partial(name: str, parameter: Any) -> bool:
    """Whether tensor-parallel ranks have parts of the gradient, which Megatron sums at the end of backward."""
    return getattr(parameter, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name


def largest_error(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """(largest difference over largest value, of which tensor); all that is wanted is there."""
    assert got.keys() == wanted.keys(), sorted(got.keys() ^ wanted.keys())
    errors = {}
    for name, value in wanted.items():
        assert torch.isfinite(got[name]).all() and value.abs().max() > 0, name
        errors[name] = float((got[name] - value).abs().max() / value.abs().max())
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst
