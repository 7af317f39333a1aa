"""Megatron models with UPipe attention against Megatron's own without context parallelism: loss, every gradient."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Iterable
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


def _run(case: Case, upipe: bool, change_spec: Any = None) -> dict[str, torch.Tensor]:
    """Loss, logits' sum over the vocabulary weighted by token, and gradients, of the whole batch."""
    from megatron.core import parallel_state

    (model,) = build(case, upipe, change_spec)
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
    references = _references(alone.values())
    got = run_ranks(ranks, _results, list(cases.values()), True)[0]
    return {name: largest_error(result, references[repr(alone[name])]) for name, result in zip(cases, got, strict=True)}


_computed: dict[str, dict[str, torch.Tensor]] = {}


def _references(cases: Iterable[Case]) -> dict[str, dict[str, torch.Tensor]]:
    """What the stock models compute on one rank, by the case's repr; each is run once for all tests."""
    missing = list({repr(case): case for case in cases if repr(case) not in _computed}.values())
    if missing:
        _computed.update(zip(map(repr, missing), run_ranks(1, _results, missing, False)[0], strict=True))
    return _computed


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
    """On 2 ranks every feature in `keep` and in another mode; on 1 and on 4 in one of the modes, in turn."""
    cases = {f"U = {U}": Case(cp=cp, chunk_heads=U) for U in (2 * cp, 16)}
    if cp != 2:
        for number, (name, options) in enumerate(FEATURES.items()):
            for mode in MEMORY if name == "plain" else [list(MEMORY)[(number + cp) % 5]]:
                U = cp if mode == "keep" else 2 * cp
                cases[f"{name}, {mode}"] = Case(cp=cp, chunk_heads=U, upipe=MEMORY[mode], **options)
        return cases
    cases |= {name: Case(cp=cp, **options) for name, options in FEATURES.items()}
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


# ---------------------------------------------------------------- packed sequences

DOCUMENTS = (0, 16, 24, 56, 64)  # each a multiple of twice 4 ranks
UNEVEN_DOCUMENTS = (0, 3, 20, 21, 64)


def _by_document(case: Case, documents: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The stock model on each document by itself, losses added."""
    (model,) = build(case, upipe=False)
    batch = batch_of(case)
    total = 0.0
    for start_, end in itertools.pairwise(documents):
        part = {name: t[:, start_:end] for name, t in batch.items()}
        positions = torch.arange(end - start_)[None]
        loss = token_loss(model(part["tokens"], positions, causal_mask(end - start_)), part)
        loss.backward()
        total += float(loss.detach())
    return {"loss": torch.tensor(total, dtype=torch.float64), **whole_gradients(model)}


def _packed(case: Case, documents: tuple[int, ...], cut: str, padded: bool) -> dict[str, torch.Tensor]:
    """The documents packed in one sequence, split as Megatron splits it."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    (model,) = build(case, upipe=True, documents_cut=cut)
    rank, ranks = parallel_state.get_context_parallel_rank(), case.cp
    # By hand, half-chunk by half-chunk: what each document (or the whole) gives this rank.
    spans = itertools.pairwise(documents if cut == "each" else (0, case.length))
    rows: list[int] = []
    for first, end in spans:
        half = (end - first) // (2 * ranks)
        for chunk in (rank, 2 * ranks - 1 - rank) if ranks > 1 else (0, 1):
            rows += range(first + chunk * half, first + (chunk + 1) * half)
    batch = {name: t[:, rows] for name, t in batch_of(case).items()}
    ends = torch.tensor(documents, dtype=torch.int32)
    longest = int((ends[1:] - ends[:-1]).max())
    # A document that is shorter than its place, and the list filled up with its last entry.
    real = torch.cat([ends[:-1], ends[-1:] - 2]) if padded else torch.cat([ends, ends[-1:]])
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=ends if padded else None,
        cu_seqlens_kv_padded=ends if padded else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    logits = model(batch["tokens"], batch["position_ids"], None, packed_seq_params=params)
    loss = token_loss(logits, batch)
    loss.backward()
    loss = loss.detach().clone()
    if ranks > 1:
        dist.all_reduce(loss, group=parallel_state.get_context_parallel_group())
    return {"loss": loss, **whole_gradients(model)}


def _packed_results(cases: list[tuple[Case, tuple[int, ...], str, bool]]) -> list[dict[str, torch.Tensor]]:
    from tests.megatron_cpu import use_cpu

    use_cpu()
    results = []
    for case, documents, cut, padded in cases:
        start(case)
        run = _by_document if cut == "alone" else _packed
        results.append(run(case, documents, *(() if cut == "alone" else (cut, padded))))
    return results


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_packed_sequences(ranks):
    """Public faults 14 and 28: both layouts, each document as if it were alone."""
    base = Case(batch=1, length=64, config={"softmax_type": "learnable"})
    references = dict(
        zip(
            (DOCUMENTS, UNEVEN_DOCUMENTS),
            run_ranks(1, _packed_results, [(base, d, "alone", False) for d in (DOCUMENTS, UNEVEN_DOCUMENTS)])[0],
            strict=True,
        )
    )
    cases = []
    for memory in ("keep", "fused"):
        case = dataclasses.replace(base, cp=ranks, upipe={"memory": memory})
        cases += [
            (case, DOCUMENTS, "each", False),
            (case, DOCUMENTS, "each", True),
            (case, DOCUMENTS, "whole", False),
            (case, UNEVEN_DOCUMENTS, "whole", False),
        ]
    if ranks == 4:
        cases.append((dataclasses.replace(base, tp=2, cp=2, sp=True), DOCUMENTS, "each", False))
    for case, result in zip(cases, run_ranks(ranks, _packed_results, cases)[0], strict=True):
        error, name = largest_error(result, references[case[1]])
        assert error < 1e-10, (case, name, error)


# ---------------------------------------------------------------- Transformer Engine's fused norm


class _Fused:
    """Makes ``ColumnParallelLinear`` what ``TELayerNormColumnParallelLinear`` is: a norm and a linear layer in one,
    with TE's attribute names."""

    @staticmethod
    def spec(spec: Any, kind: str, zero_centered: bool) -> Any:
        from megatron.core.tensor_parallel import ColumnParallelLinear
        from megatron.core.transformer.identity_op import IdentityOp

        class LayerNormColumnParallelLinear(ColumnParallelLinear):
            def __init__(self, input_size: int, *args: Any, config: Any, **kwargs: Any) -> None:
                super().__init__(input_size, *args, config=config, **kwargs)
                self.normalization, self.zero_centered_gamma, self.eps = kind, zero_centered, config.layernorm_epsilon
                names = ("layer_norm_weight", "layer_norm_bias") if kind == "LayerNorm" else ("layer_norm_weight",)
                for name in names:
                    self.register_parameter(name, torch.nn.Parameter(torch.empty(input_size)))
                    getattr(self, name).sequence_parallel = config.sequence_parallel

            def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                gain = self.layer_norm_weight + 1 if zero_centered else self.layer_norm_weight
                if kind == "LayerNorm":
                    centered = x - x.mean(-1, keepdim=True)
                    x = centered / (centered.square().mean(-1, keepdim=True) + self.eps).sqrt()
                    x = x * gain + self.layer_norm_bias
                else:
                    x = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * gain
                return super().forward(x, *args, **kwargs)

        layer = spec.submodules
        attention = layer.self_attention
        fused = dataclasses.replace(attention.submodules, linear_qkv=LayerNormColumnParallelLinear)
        return dataclasses.replace(
            spec,
            submodules=dataclasses.replace(
                layer,
                input_layernorm=IdentityOp,
                self_attention=dataclasses.replace(attention, submodules=fused),
            ),
        )


def _fused_norm_results(cases: list[tuple[Case, str, bool, bool]]) -> list[dict[str, torch.Tensor]]:
    from tests.megatron_cpu import use_cpu

    use_cpu()
    results = []
    for case, kind, zero_centered, upipe in cases:
        start(case)
        results.append(_run(case, upipe, lambda spec, k=kind, z=zero_centered: _Fused.spec(spec, k, z)))
    return results


def test_norm_inside_linear_qkv():
    """As Transformer Engine's layers have it: applied, and its gradients returned, under TP and CP too."""
    kinds = [("LayerNorm", False), ("LayerNorm", True), ("RMSNorm", False), ("RMSNorm", True)]
    references = run_ranks(1, _fused_norm_results, [(Case(), *kind, False) for kind in kinds])[0]
    splits = [Case(cp=4), Case(tp=2, cp=2), Case(tp=2, cp=2, sp=True, upipe={"memory": "fused"})]
    cases = [(case, *kind, True) for kind in kinds for case in splits]
    for (case, *kind, _), result in zip(cases, run_ranks(4, _fused_norm_results, cases)[0], strict=True):
        error, name = largest_error(result, references[kinds.index(tuple(kind))])
        assert error < 1e-10, (case, kind, name, error)
        assert any("layer_norm_weight" in key for key in result)


# ---------------------------------------------------------------- other precision, other lengths


def test_float32():
    """As models are trained on CPUs: equal to rounding, whatever the split."""
    plain = {"dtype": torch.float32, "config": {"qk_layernorm": True}}
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    cases = {mode: Case(cp=4, upipe=options, **plain) for mode, options in MEMORY.items()}
    cases["tp 2 x cp 2"] = Case(tp=2, cp=2, **plain)
    cases["tp 2 + sp x cp 2"] = Case(tp=2, cp=2, sp=True, upipe=MEMORY["fused"], **plain)
    cases["full recompute"] = Case(cp=4, dtype=torch.float32, config=full)
    assert_equal(4, cases, 1e-5)


def _own_lengths(lengths: tuple[int, int]) -> tuple[int, dict[str, torch.Tensor]]:
    from tests.megatron_cpu import use_cpu

    use_cpu()
    case = Case(cp=2)
    start(case)
    from megatron.core import parallel_state

    length = lengths[parallel_state.get_data_parallel_rank()]
    return length, _run(dataclasses.replace(case, length=length), upipe=True)


def test_data_parallel_ranks_of_other_lengths():
    """Public faults 26 and 30: two data-parallel ranks of two, each with its own batch and as many exchanges."""
    lengths = (32, 16)
    references = dict(zip(lengths, run_ranks(1, _results, [Case(length=n) for n in lengths], False)[0], strict=True))
    results = run_ranks(4, _own_lengths, lengths)
    assert sorted(length for length, _ in results) == [16, 16, 32, 32]
    for length, result in results:
        assert largest_error(result, references[length])[0] < 1e-10
