"""Megatron models with UPipe attention against Megatron's own without context parallelism: loss, every gradient."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron_models import (
    Case,
    batch_of,
    build,
    causal_mask,
    largest_error,
    on_this_rank,
    start,
    token_loss,
    whole_gradients,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")


def _run(case: Case, upipe: bool) -> dict[str, torch.Tensor]:
    """Loss, logits' sum over the vocabulary weighted by token, and gradients, of the whole batch."""
    from megatron.core import parallel_state

    (model,) = build(case, upipe)
    batch = on_this_rank(batch_of(case))
    mask = None if upipe else causal_mask(case.length)
    logits = model(batch["tokens"], batch["position_ids"], mask)
    loss = token_loss(logits, batch)
    loss.backward()
    loss = loss.detach().clone()
    if case.cp > 1:
        dist.all_reduce(loss, group=parallel_state.get_context_parallel_group())
    return {"loss": loss, **whole_gradients(model)}


def _results(cases: list[Case], upipe: bool) -> list[dict[str, torch.Tensor]]:
    from tests.megatron_cpu import use_cpu

    use_cpu()
    results = []
    for case in cases:
        start(case)
        results.append(_run(case, upipe))
    return results if dist.get_rank() == 0 else []


def errors(ranks: int, cases: dict[str, Case]) -> dict[str, tuple[float, str]]:
    """The largest error of each case on `ranks` ranks against the stock model on one."""
    alone = {name: dataclasses.replace(case.alone(), upipe={}, chunk_heads=None) for name, case in cases.items()}
    different = list({repr(case): case for case in alone.values()}.values())
    references = dict(zip(map(repr, different), run_ranks(1, _results, different, False)[0], strict=True))
    got = run_ranks(ranks, _results, list(cases.values()), True)[0]
    return {name: largest_error(result, references[repr(alone[name])]) for name, result in zip(cases, got, strict=True)}


def assert_equal(ranks: int, cases: dict[str, Case], tolerance: float = 1e-10) -> None:
    found = errors(ranks, cases)
    assert found.keys() == cases.keys()
    assert {name: error for name, error in found.items() if error[0] > tolerance} == {}


MEMORY = {
    "keep": {},
    "recompute": {"memory": "recompute"},
    "fused": {"memory": "fused"},
    "blocks": {"memory": "blocks", "query_blocks": 2},
    "overlap": {"overlap": True},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one sequence": {"batch": 1},
    "no bias": {"config": {"add_qkv_bias": False, "add_bias_linear": False}},
    "RMSNorm": {"config": {"normalization": "RMSNorm"}},
    "qk-layernorm": {"config": {"qk_layernorm": True}},
    "qk-l2-norm": {"config": {"qk_l2_norm": True}},
    "interleaved rotary": {"config": {"rotary_interleaved": True}},
    "partial rotary": {"model": {"rotary_percent": 0.5}},
    "scaled rotary": {"model": {"rope_scaling": True}},
    "learned positions": {"model": {"position_embedding_type": "learned_absolute"}},
    "no positions": {"model": {"position_embedding_type": "none"}},
    "layers without rotary": {"config": {"no_rope_freq": [0, 1]}},
    "window": {"config": {"window_size": (5, 0)}},
    "window in one layer": {"config": {"window_size": (5, 0), "window_attn_skip_freq": 2}},
    "scale": {"config": {"softmax_scale": 0.3}},
    "sinks": {"config": {"softmax_type": "learnable"}},
    "off by one": {"config": {"softmax_type": "off-by-one"}},
    "MHA": {"config": {"num_query_groups": 16}},
    "MQA": {"config": {"num_query_groups": 1}},
    "two groups": {"config": {"num_query_groups": 2}},
    "wide heads": {"config": {"kv_channels": 8}},
}


def _context_parallel_cases(cp: int) -> dict[str, Case]:
    cases = {name: Case(cp=cp, **options) for name, options in FEATURES.items()}
    for U in (2 * cp, 16):
        cases[f"U = {U}"] = Case(cp=cp, chunk_heads=U)
    for number, (name, options) in enumerate(FEATURES.items()):
        modes = list(MEMORY)[1:] if name in ("plain", "sinks", "qk-layernorm") else [list(MEMORY)[1 + number % 4]]
        for mode in modes:
            cases[f"{name}, {mode}"] = Case(cp=cp, chunk_heads=2 * cp, upipe=MEMORY[mode], **options)
    return cases


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_context_parallel_features(ranks):
    assert_equal(ranks, _context_parallel_cases(ranks))


GATE = {"config": {"attention_output_gate": True}}


def _gate_cases(ranks: int) -> dict[str, Case]:
    return {
        "gate": Case(cp=ranks, **GATE),
        "gate, recompute": Case(cp=ranks, upipe=MEMORY["recompute"], **GATE),
        "gate, TP + SP": Case(tp=2, cp=ranks // 2, sp=True, **GATE),
        "gate, TP": Case(tp=2, cp=ranks // 2, **GATE),
    }


def test_output_gate():
    """Megatron takes the gate's sigmoid in float32, whatever the model's precision."""
    assert_equal(4, _gate_cases(4), 1e-6)


def _tensor_parallel_cases() -> dict[str, Case]:
    norm = {"config": {"qk_layernorm": True, "softmax_type": "learnable"}}
    cases = {}
    for tp, cp, sp in [(2, 2, False), (2, 2, True), (4, 1, True)]:
        for number, (mode, options) in enumerate(MEMORY.items()):
            more = norm if number % 2 else {}
            if cp == 1:
                options = {**options, "overlap": False}
            cases[f"tp {tp} cp {cp} sp {sp} {mode}"] = Case(
                tp=tp, cp=cp, sp=sp, upipe=options, chunk_heads=2 * cp if number < 3 else cp, **more
            )
    cases["one sequence"] = Case(tp=2, cp=2, sp=True, batch=1, upipe=MEMORY["fused"])
    return cases


def test_tensor_and_sequence_parallel():
    """Public fault 33 (TP > 1), and norms whose gradients are parts on tensor-parallel ranks."""
    assert_equal(4, _tensor_parallel_cases())


def _recompute_cases() -> dict[str, Case]:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    selective = {"recompute_granularity": "selective"}
    # With a bias, Megatron's recomputed MLP returns a parameter from its checkpoint and never ends.
    mlp = {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "add_bias_linear": False}
    cases = {}
    for name, config in {"full": full, "selective": selective, "mlp": mlp}.items():
        for mode in ("keep", "fused"):
            cases[f"{name}, {mode}"] = Case(cp=2, config=config, upipe=MEMORY[mode])
    cases["full, tp + sp"] = Case(tp=2, cp=1, sp=True, config=full, upipe=MEMORY["fused"])
    return cases


def test_recomputation():
    assert_equal(2, _recompute_cases())
