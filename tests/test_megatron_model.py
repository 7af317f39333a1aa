"""What stays as it was: checkpoints, inference, models without the option; and what is refused, by name."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import multiprocessing
import re
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron_models import Case, batch_of, build, causal_mask, config_of, fill, layer_spec, start
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")

FROM_0_17 = (
    importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.training") is not None
)
WITH_EVERYTHING = {"qk_layernorm": True, "softmax_type": "learnable"}


def on_cpu() -> None:
    from tests.megatron_cpu import use_cpu

    use_cpu()


# ---------------------------------------------------------------- checkpoints


def _sharded(model: Any) -> Any:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})


Trip = tuple[list[str], list[str], list[str]]
"""Parameters that differ after it, and the names in both models."""


def _save_and_load(written: Case, read: Case, upipe_writes: bool, folder: str) -> Trip:
    from megatron.core import dist_checkpointing

    start(written)
    (first,) = build(written, upipe_writes)
    dist_checkpointing.save(_sharded(first), folder)
    start(read)
    (second,) = build(read, not upipe_writes)
    wanted = {name: p.detach().clone() for name, p in second.named_parameters()}
    for p in second.parameters():
        p.data.fill_(-7.0)
    state = dist_checkpointing.load(_sharded(second), folder)
    second.load_state_dict(state)
    changed = [name for name, p in second.named_parameters() if not torch.equal(p, wanted[name])]
    return changed, sorted(first.state_dict()), sorted(second.state_dict())


def _round_trips(folders: list[str]) -> list[Trip]:
    on_cpu()
    # Megatron's writer has a process of its own, which a daemon may not have.
    multiprocessing.current_process()._config["daemon"] = False
    here = Case(tp=2, cp=2, config=WITH_EVERYTHING, upipe={"memory": "fused"}, dtype=torch.float32)
    there = dataclasses.replace(here, cp=1, upipe={})
    trips = [
        _save_and_load(here, there, True, folders[0]),
        _save_and_load(there, here, False, folders[1]),
        _save_and_load(dataclasses.replace(here, tp=1), there, True, folders[2]),
    ]
    _end_the_writer()
    return trips


def _end_the_writer() -> None:
    """Megatron keeps a manager process for its next checkpoint, which would outlive a rank: ranks end by os._exit."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = None  # the manager ends with the last use of it
    gc.collect()


def _pieces(model: Any) -> dict[tuple, torch.Tensor]:
    """What a distributed checkpoint gets of this rank's model: names, places in the whole, values."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    pieces = [piece for piece in nested_values(_sharded(model)) if isinstance(piece, ShardedTensor)]
    return {(p.key, p.global_shape, p.global_offset, p.axis_fragmentations): p.data for p in pieces}


def _same_pieces() -> tuple[bool, list[str]]:
    on_cpu()
    here = Case(tp=2, cp=2, config=WITH_EVERYTHING, upipe={"memory": "fused"}, dtype=torch.float32)
    pieces = []
    for case, upipe in ((here, True), (dataclasses.replace(here, cp=1, upipe={}), False)):
        start(case)
        pieces.append(_pieces(build(case, upipe)[0]))
    ours, stock = pieces
    assert ours.keys() == stock.keys()
    return all(torch.equal(ours[key], stock[key]) for key in stock), [key[0] for key in stock]


def test_what_a_checkpoint_gets_is_the_same():
    """Public fault 34, without files: names, shapes, places and bits."""
    for same, names in run_ranks(4, _same_pieces):
        assert same and any("softmax_offset" in name for name in names) and any("linear_qkv" in name for name in names)


@pytest.mark.skipif(not FROM_0_17, reason="the writer of this release forks, which hangs under gloo")
def test_checkpoints_with_and_without_are_the_same(tmp_path):
    """Public fault 34: saved with UPipe and loaded without, and back, bit by bit, also at another TP size."""
    folders = [tempfile.mkdtemp(dir=tmp_path) for _ in range(3)]
    for trips in run_ranks(4, _round_trips, folders):
        for changed, first, second in trips:
            assert changed == []
            assert first == second
            assert any("softmax_offset" in name for name in first)


# ---------------------------------------------------------------- inference and evaluation


def _inference() -> list[float]:
    from megatron.core.inference.contexts import StaticInferenceContext

    on_cpu()
    case = Case(cp=1, chunk_heads=4, dtype=torch.float32, length=16, config=WITH_EVERYTHING)
    start(case)
    logits = []
    for upipe in (False, True):
        (model,) = build(case, upipe)
        model.eval()
        batch, found = batch_of(case), []
        context = StaticInferenceContext(case.batch, case.length)
        with torch.no_grad():
            for first, end in [(0, 10), (10, 11), (11, 12)]:
                mask = causal_mask(end)[:, :, first:]
                found.append(
                    model(
                        batch["tokens"][:, first:end],
                        batch["position_ids"][:, first:end],
                        mask,
                        inference_context=context,
                        runtime_gather_output=True,
                    )[:, -1]
                )
                context.increment_sequence_len_offset(end - first)
        logits.append(torch.stack(found))
    return [float((logits[0] - logits[1]).abs().max()), float(logits[0].abs().max())]


def test_inference_at_one_rank_is_the_stock_one():
    """Prefill and two tokens with a KV cache: the same code runs, so the same bits."""
    ((difference, size),) = run_ranks(1, _inference)
    assert difference == 0 and size > 0.1


def _evaluation() -> float:
    on_cpu()
    case = Case(cp=2, dtype=torch.float64)
    from tests.megatron_models import on_this_rank

    logits = []
    for upipe, sized in ((False, case.alone()), (True, case)):
        start(sized)
        (model,) = build(sized, upipe)
        model.eval()
        batch = on_this_rank(batch_of(sized)) if upipe else batch_of(sized)
        with torch.no_grad():
            mask = None if upipe else causal_mask(case.length)
            logits.append(model(batch["tokens"], batch["position_ids"], mask))
    rank, half = dist.get_rank(), case.length // 4
    rows = [*range(rank * half, (rank + 1) * half), *range((3 - rank) * half, (4 - rank) * half)]
    return float((logits[0][:, rows] - logits[1]).abs().max())


def test_evaluation():
    assert max(run_ranks(2, _evaluation)) < 1e-12


# ---------------------------------------------------------------- hybrid models


def _hybrid() -> list[float]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from megatron_patch import UPipeConfig, upipe_spec
    from tests.megatron_models import fill, on_this_rank, token_loss

    on_cpu()
    layer = get_gpt_layer_local_spec().submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm, self_attention=layer.self_attention, self_attn_bda=layer.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda)
    stack = ModuleSpec(
        module=HybridStack,
        params={"post_layer_norm": False},  # it would be Transformer Engine's
        submodules=HybridStackSubmodules(
            mamba_layer=IdentityOp,
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=TransformerLayer, submodules=mlp),
        ),
    )
    results = []
    case = Case(cp=2, config={"num_layers": 4})
    for upipe, sized in ((False, case.alone()), (True, case)):
        start(sized)
        spec = upipe_spec(stack, UPipeConfig(chunk_heads=2)) if upipe else stack
        config = config_of(sized)
        model = HybridModel(
            config=config,
            hybrid_stack_spec=spec,
            vocab_size=64,
            max_sequence_length=32,
            hybrid_layer_pattern="*-*-",
            position_embedding_type="rope",
            parallel_output=False,
        ).double()
        fill(model)
        batch = on_this_rank(batch_of(sized))
        logits = model(batch["tokens"], batch["position_ids"], None if upipe else causal_mask(32))
        token_loss(logits, batch).backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        if upipe:
            for grad in grads.values():
                dist.all_reduce(grad)
        results.append(grads)
    stock, ours = results
    assert stock.keys() == ours.keys() and len(stock) > 20
    return [float((ours[name] - t).abs().max() / t.abs().max()) for name, t in stock.items()]


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is not None
    and importlib.util.find_spec("megatron.core.models.hybrid") is None,
    reason="this release has no HybridModel",
)
def test_hybrid_model():
    for found in run_ranks(2, _hybrid):
        assert max(found) < 1e-10


def _hooked_projection() -> tuple[list[str], float]:
    """What of a user's on ``linear_proj`` was called, and how far output and gradients are from those without it."""
    on_cpu()
    case = Case(cp=2)
    start(case)
    (model,) = build(case, upipe=True)
    fill(model)
    attention, calls, runs = model.decoder.layers[0].self_attention, [], []
    linear = attention.linear_proj
    stock = linear.forward

    def forward(x):
        calls.append("forward")
        return stock(x)

    for what in (None, "hook", "backward hook", "forward"):
        if what == "hook":
            handle = linear.register_forward_hook(lambda *given: calls.append("hook"))
        elif what == "backward hook":
            handle.remove()
            handle = linear.register_full_backward_hook(lambda *given: calls.append("backward hook"))
        elif what == "forward":
            handle.remove()
            linear.forward = forward
        torch.manual_seed(dist.get_rank())
        x = torch.randn(16, 2, 64, dtype=torch.float64, requires_grad=True)
        out, bias = attention(x, None)
        parameters = list(attention.parameters())
        grads = torch.autograd.grad((out + bias).sin().sum(), [x, *parameters])
        runs.append([out.detach(), *grads])
    right, *others = runs
    return calls, max(
        float((a - b).abs().max() / b.abs().max()) for run in others for a, b in zip(run, right, strict=True)
    )


def test_a_hook_of_the_output_projection_runs():
    for calls, error in run_ranks(2, _hooked_projection):
        assert calls == ["hook", "backward hook", "forward"] and error < 1e-12


# ---------------------------------------------------------------- refusals


def _refusals() -> dict[str, str]:
    from megatron.core.packed_seq_params import PackedSeqParams

    on_cpu()
    case = Case(cp=2)
    start(case)
    messages: dict[str, str] = {}

    def refused(name: str, call: Any) -> None:
        try:
            call()
        except ValueError as error:
            messages[name] = str(error)
        else:
            messages[name] = "nothing was raised"

    def built(**config: Any) -> Any:
        return lambda: build(dataclasses.replace(case, config=config), upipe=True)

    refused("dropout", built(attention_dropout=0.1))
    refused("window ahead", built(window_size=(5, 2)))
    refused("chunk", lambda: build(dataclasses.replace(case, chunk_heads=3), upipe=True))
    refused("large chunk", lambda: build(dataclasses.replace(case, chunk_heads=32), upipe=True))
    gated = dataclasses.replace(case, config={"attention_output_gate": True}, upipe={"memory": "fused"})
    refused("gate", lambda: build(gated, upipe=True))
    (model,) = build(case, upipe=True)
    x = torch.randn(16, 2, 64, dtype=torch.float64)
    attention = model.decoder.layers[0].self_attention

    def attend(**arguments: Any) -> Any:
        return lambda: attention(x, None, **arguments)

    refused("bias", attend(attention_bias=torch.zeros(1)))
    refused("inference", attend(inference_context=object()))
    ends = torch.tensor([0, 16, 30])
    odd = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=16, max_seqlen_kv=16)
    refused("ends", attend(packed_seq_params=odd))
    odd = dataclasses.replace(odd, cu_seqlens_q=torch.tensor([0, 15, 32]))
    refused("uneven", attend(packed_seq_params=odd))
    refused("format", attend(packed_seq_params=dataclasses.replace(odd, qkv_format="bshd")))
    attention.linear_qkv.adapter = torch.nn.Linear(2, 2)
    refused("adapter", attend())
    del attention.linear_qkv.adapter
    linear, runs = attention.linear_qkv, 0

    def own(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not run")

    def added(what: str, module: Any, register: str) -> None:
        """Refused while it is there, and fine once it is removed, as the message says."""
        nonlocal runs
        handle = getattr(module, register)(own)
        refused(what, attend())
        handle.remove()
        attend()()
        runs += 1

    added("hook", linear, "register_forward_hook")
    added("pre-hook", linear, "register_forward_pre_hook")
    added("backward hook", linear, "register_full_backward_hook")
    linear.forward = own
    refused("forward", attend())
    del linear.forward
    attention.q_layernorm = torch.nn.Identity()
    added("norm hook", attention.q_layernorm, "register_forward_hook")
    attention.q_layernorm = None
    attention.config.attention_dropout = 0.1
    refused("dropout later", attend())
    attention.config.attention_dropout = 0.0
    attend()()
    assert runs == 4

    # Another computation in the place of Megatron's.
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class OwnCore(DotProductAttention):
        pass

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    from megatron_patch import UPipeConfig, upipe_spec

    spec = get_gpt_layer_local_spec()
    inner = spec.submodules.self_attention
    for core in (OwnCore, functools.partial(OwnCore)):
        changed = dataclasses.replace(inner.submodules, core_attention=core)
        module = upipe_spec(dataclasses.replace(inner, submodules=changed), UPipeConfig(2))
        refused("core attention", lambda module=module: build_module(module, config=model.config, layer_number=1))
    before = Attention.forward
    Attention.forward = own
    try:
        refused("class forward", lambda: build(case, upipe=True))
    finally:
        Attention.forward = before
    build(case, upipe=True)
    return messages


REFUSED = {
    "dropout": r"--attention-dropout = 0.1 with .* Set --attention-dropout 0",
    "window ahead": r"--window-size \(5,2\) .* Set it to \(5,0\)",
    "chunk": r"--upipe-chunk-heads = 3: must be a multiple of the 2 context-parallel ranks.*fit.*2, 4, 8, 16",
    "large chunk": r"--upipe-chunk-heads = 32: larger than the model's 16 query heads",
    "gate": r"--attention-output-gate with --upipe-memory fused.* Set --upipe-memory recompute",
    "bias": r"called with attention_bias",
    "inference": r"inference .* on 2 context-parallel ranks.*--context-parallel-size 1",
    "ends": r"documents that end at \[16, 30\] in a packed sequence of 32 rows",
    "uneven": r"document \[0, 15\).*4 must divide it",
    "format": r"packed sequences in format 'bshd'",
    "adapter": r"linear_qkv .* has the parameters adapter.bias",
    "hook": r"linear_qkv .* has forward hooks",
    "pre-hook": r"linear_qkv .* has a forward pre-hook \(.*own\) that would be given no input",
    "backward hook": r"linear_qkv .* has backward hooks",
    "forward": r"linear_qkv .* has a forward that was put in its place \(.*own\)",
    "norm hook": r"q_layernorm \(Identity\) has forward hooks.*Remove it",
    "dropout later": r"--attention-dropout = 0\.1 .* set after the model was built.*Set config\.attention_dropout to 0",
    "core attention": r"has tests\.test_megatron_model\.OwnCore as core_attention.*Use a spec with Megatron's",
    "class forward": r"SelfAttention\.forward was replaced by tests\.test_megatron_model\..*own.*Remove it",
}


def test_what_a_layer_refuses():
    """Each by name and with a remedy, on every rank alike and before anything is sent."""
    for messages in run_ranks(2, _refusals):
        assert messages.keys() == REFUSED.keys()
        for name, pattern in REFUSED.items():
            assert re.search(pattern, messages[name]), (name, messages[name])


def _specs() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.attention import SelfAttention

    from megatron_patch import (
        UPipeConfig,
        UPipeOptions,
        UPipeSelfAttention,
        gpt_upipe_spec,
        upipe_options,
        upipe_spec,
    )

    options = UPipeConfig(chunk_heads=4)
    stock = get_gpt_layer_local_spec()
    converted = upipe_spec(stock, options)
    assert converted.submodules.self_attention.module is UPipeSelfAttention
    assert stock.submodules.self_attention.module is SelfAttention, "the given spec is left as it is"
    again = upipe_spec(converted, options)
    assert again.submodules.self_attention.module is UPipeSelfAttention
    with pytest.raises(ValueError, match="MLASelfAttention, which UPipe can't replace"):
        upipe_spec(get_gpt_layer_local_spec(multi_latent_attention=True), options)
    with pytest.raises(ValueError, match="no SelfAttention in this layer spec"):
        upipe_spec(dataclasses.replace(stock, submodules=None), options)
    case = Case(config={"num_moe_experts": 2, "moe_layer_freq": [0, 1], "add_bias_linear": False})
    block = upipe_spec(layer_spec(case, config_of(case)), options)
    again = gpt_upipe_spec(config_of(case), options, use_transformer_engine=False)
    assert [s.submodules.self_attention for s in block.layer_specs] == [
        s.submodules.self_attention for s in again.layer_specs
    ]
    selective = config_of(Case(cp=2, config={"recompute_granularity": "selective"}))
    assert upipe_options(selective) == UPipeOptions(UPipeConfig(chunk_heads=2, memory="recompute"))
    assert upipe_options(selective, chunk_heads=4, memory="fused", documents_cut="whole") == UPipeOptions(
        UPipeConfig(chunk_heads=4, memory="fused"), "whole"
    )
    for wrong, message in [
        ({"chunk_heads": 3}, "must be a multiple of the 2 context-parallel ranks"),
        ({"memroy": "fused"}, r"unknown key \(did you mean 'memory'"),
    ]:
        with pytest.raises(ValueError, match=message):
            upipe_options(selective, **wrong)
    with pytest.raises(ValueError, match=r"--attention-dropout = 0\.5"):
        upipe_options(config_of(Case(config={"attention_dropout": 0.5})))
    assert [s.submodules.self_attention.module for s in block.layer_specs] == [UPipeSelfAttention] * 2


def test_layer_specs():
    on = run_ranks(1, _specs_on_cpu)
    assert on == [None]


def _specs_on_cpu() -> None:
    on_cpu()
    start(Case())
    _specs()
