"""torch.compile with fullgraph: no graph break at attention, and the same output and gradients as without."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.engine import projections_of, relative_errors, spec_of
from tests.ranks import on_pool, run_in_process, run_ranks
from tests.reference import make_layer
from upipe_integrations import (
    AttentionProjections,
    AttentionSpec,
    FunctionKernel,
    HeadFunction,
    Layout,
    LowRank,
    Mode,
    OutputProjection,
    Projection,
    RotateHalf,
    Schedule,
    Staging,
    Weights,
    upipe_attention,
    upipe_attention_qkv,
)
from upipe_integrations.engine.checkpoint import context_fn
from upipe_integrations.kernels import KERNELS, MathKernel

MODES = {
    "keep": Mode(),
    "keep_heads": Mode.named("keep_heads"),
    "recompute": Mode.named("recompute"),
    "fused": Mode.named("fused"),
    "blocks": Mode.named("blocks", query_blocks=2),
    "keep, overlap": Mode(overlap=True),
    "fused, operator": Mode.named("fused", operator=True),
}
FEATURES = {
    "plain": {"rotary": False},
    "everything": {"bias": True, "norm": True, "sinks": True},
    "masks": {"window": 5, "documents": ((0, 7, 24),), "scale": 0.3},
    "other value size": {"value_dim": 12},
}


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()


def compiled(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


def graph_errors(function, inputs: dict[str, torch.Tensor], backend="aot_eager") -> dict[str, float]:
    """Outputs and every gradient of two calls before the backward of both, compiled against not compiled."""
    results = []
    for run in (function, compiled(function, backend)):
        leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
        first, second = run(leaves), run({**leaves, "x": leaves["x"] * 0.5})
        (first.sin().sum() + second.cos().sum()).backward()
        grads = {name: t.grad for name, t in leaves.items() if t.grad is not None}
        results.append({"first": first.detach(), "second": second.detach(), **grads})
    assert len(results[0]) > 5
    return relative_errors(results[1], results[0])


def layer_function(layer, mode=None, group=None, *, kernel=KERNELS["math"], rows=slice(None), layout=None):
    """A function of leaves, with a norm before attention; all but schedule and kernel is made while it is traced."""
    C = 1 if group is None else dist.get_world_size(group)
    schedule = Schedule.build(heads=layer.heads, kv_heads=layer.kv_heads, ranks=C, chunk_heads=2 * C)
    given = "wo" in layer.leaves()

    def run(leaves):
        return upipe_attention(
            torch.nn.functional.layer_norm(leaves["x"], leaves["x"].shape[-1:]),
            projections_of(layer, leaves, rows),
            Staging(schedule, group, kernel, layout=layout, mode=mode),
            spec_of(layer),
            sinks=leaves.get("sinks"),
            output=OutputProjection(leaves["wo"], leaves.get("bo")) if given else None,
        )

    return run


@pytest.mark.parametrize("memory", ["keep", "fused"])
def test_a_low_rank_term_is_in_the_graph(memory):
    layer = make_layer(4, 2, output=True)
    schedule = Schedule.build(heads=4, kv_heads=2, ranks=1, chunk_heads=2)
    mode = Mode.named(memory)

    def run(leaves):
        given = projections_of(layer, leaves, slice(None))
        low = LowRank(0.5 * leaves["x"] @ leaves["a"].T, leaves["b"])
        weights = dataclasses.replace(given.v.weights, low_rank=low)
        projections = dataclasses.replace(given, v=dataclasses.replace(given.v, weights=weights))
        output = OutputProjection(leaves["wo"])
        return upipe_attention(
            leaves["x"], projections, Staging(schedule, None, KERNELS["math"], mode=mode), output=output
        )

    adapter = {"a": torch.randn(3, 24, dtype=torch.float64), "b": torch.randn(16, 3, dtype=torch.float64)}
    errors = graph_errors(run, {**layer.leaves(), **adapter})
    assert {"a", "b"} < errors.keys() and max(errors.values()) < 1e-12, errors


def _errors_of_modes(kernel: str, features: list[str]) -> dict[tuple, float]:
    C, rank = dist.get_world_size(), dist.get_rank()
    errors = {}
    for feature in features:
        for number, (name, mode) in enumerate(MODES.items()):
            if feature != "everything" and name not in ("keep", "fused"):
                continue
            torch.compiler.reset()
            layer = make_layer(8, 4, seq=24, batch=2, output=True, **FEATURES[feature])
            layout = [Layout.contiguous(), Layout.zigzag()][number % 2]
            rows = layout.rows(rank, 24, C)
            leaves = {**layer.leaves(), "x": layer.x[:, rows]}
            run = layer_function(layer, mode, dist.group.WORLD, kernel=KERNELS[kernel], rows=rows, layout=layout)
            errors[feature, name] = max(graph_errors(run, leaves).values())
    return errors


@pytest.mark.parametrize(
    ("ranks", "kernel", "features"), [(2, "math", list(FEATURES)), (1, "torch-cpu-flash", ["everything"])]
)
def test_every_mode_compiles_to_one_graph(ranks, kernel, features):
    for errors in on_pool(ranks, _errors_of_modes, kernel, features):
        assert len(errors) == len(MODES) + 2 * (len(features) - 1)
        assert {case: error for case, error in errors.items() if error > 1e-12} == {}


def _groups_used() -> list[bool]:
    """Whether compiled code exchanges over the group it is called with, for two groups of the same ranks."""
    torch.compiler.reset()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    layer = make_layer(4, 2, output=True)
    schedule = Schedule.build(heads=4, kv_heads=2, ranks=2, chunk_heads=2)
    rows = slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8)

    def run(leaves, group):
        return upipe_attention(
            leaves["x"], projections_of(layer, leaves, rows), Staging(schedule, group, KERNELS["math"])
        )

    used = []
    original = dist.all_to_all_single

    def recorded(*args, group, **kwargs):
        used.append(group)
        return original(*args, group=group, **kwargs)

    dist.all_to_all_single = recorded
    right = []
    try:
        call, leaves = compiled(run), {**layer.leaves(), "x": layer.x[:, rows]}
        for group in (*groups, groups[0]):
            used.clear()
            call(leaves, group)
            right.append(len(used) > 0 and all(g is group for g in used))
    finally:
        dist.all_to_all_single = original
    return right


def test_compiled_code_is_for_the_group_it_is_called_with():
    assert on_pool(2, _groups_used) == [[True] * 3] * 2


@dataclass(frozen=True)
class _Norm:
    eps: float

    def __call__(self, heads):
        return torch.nn.functional.layer_norm(heads, heads.shape[-1:], eps=self.eps)


def test_what_is_made_while_tracing_and_numbers_that_change():
    """Schedules, specs, kernels and functions made by compiled code; scales and windows it must not mix up."""
    layer = make_layer(8, 4, seq=24, batch=2)
    calls = []

    def attend(q, k, v, spec):
        calls.append(spec)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True
        )
        return out * len(calls[-1].documents or ())

    def run(leaves, scale, window, eps):
        function = HeadFunction(_Norm(eps))
        rotary = RotateHalf(layer.cos, layer.sin)
        projections = AttentionProjections(
            Projection(Weights(leaves["wq"]), 8, function=function, rotary=rotary),
            Projection(Weights(leaves["wk"]), 8, rotary=rotary),
            Projection(Weights(leaves["wv"]), 8),
        )
        return upipe_attention(
            leaves["x"],
            projections,
            Staging(
                Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2),
                None,
                MathKernel() if window else FunctionKernel(attend),
            ),
            AttentionSpec(scale=scale, window=window, documents=None if window else ((0, 24),)),
        )

    call = compiled(run)
    cases = [(0.3, 3, 1e-6), (0.4, 5, 1e-6), (0.5, 7, 1.0), (0.5, None, 1e-6), (0.3, 3, 1e-6)]
    outputs = [run(layer.leaves(), *case) for case in cases]
    assert all(float((a - b).abs().max()) > 1e-3 for a, b in itertools.pairwise(outputs))
    for case, wanted in zip(cases, outputs, strict=True):
        torch.testing.assert_close(call(layer.leaves(), *case), wanted, rtol=1e-12, atol=1e-12)
    errors = [max(graph_errors(lambda leaves, c=case: run(leaves, *c), layer.leaves()).values()) for case in cases[2:4]]
    assert max(errors) < 1e-12


def test_the_form_for_given_heads_compiles():
    layer = make_layer(8, 4, seq=24, batch=2)
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)

    def run(leaves):
        q, k, v = (
            torch.nn.functional.linear(leaves["x"], leaves[w]).unflatten(2, (-1, 8)).contiguous()
            for w in ("wq", "wk", "wv")
        )
        return upipe_attention_qkv(q, k, v, Staging(schedule, None, KERNELS["math"]))

    assert max(graph_errors(run, layer.leaves()).values()) < 1e-12


def test_other_lengths_and_autocast_compile():
    layer = make_layer(8, 4, seq=24, rotary=False)
    run = layer_function(layer)
    call = compiled(run)
    for rows in (24, 12, 18, 6):
        leaves = {**layer.leaves(), "x": layer.x[:, :rows]}
        torch.testing.assert_close(call(leaves), run(leaves), rtol=1e-12, atol=1e-12)

    def in_bfloat16(leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return run(leaves).double()

    assert max(graph_errors(in_bfloat16, layer.leaves()).values()) == 0.0


@pytest.mark.parametrize(("memory", "keeps"), [("fused", True), ("fused", False), ("keep", True)])
def test_checkpointed_layers_compile_and_keep_attention(memory, keeps):
    """The result is kept where the policy says so, as without compiling: no third attention forward.

    In a mode that keeps what was attended, y is not kept as well.
    """
    forwards = []

    class Counting(MathKernel):
        def forward(self, *args):
            forwards.append(1)
            return super().forward(*args)

    layer = make_layer(8, 4, output=True)
    run = layer_function(layer, Mode.named(memory, operator=True), kernel=Counting())
    options = {"context_fn": context_fn} if keeps else {}

    def then_sine(leaves):  # needs the result again
        return run(leaves).sin()

    counts, kept = [], []

    def pack(t):
        kept.append(t.shape)
        return t

    for function in (then_sine, compiled(lambda leaves: checkpoint(then_sine, leaves, use_reentrant=False, **options))):
        leaves = {name: t.detach().clone().requires_grad_() for name, t in layer.leaves().items()}
        forwards.clear()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = function(leaves)
        y.sum().backward()
        counts.append(len(forwards))
    stages = 4
    assert counts == ([stages] * 2 if memory == "keep" else [2 * stages, (2 if keeps else 3) * stages])
    attended = (*layer.x.shape[:2], layer.heads * layer.value_dim)
    assert (kept.count(y.shape), kept.count(attended)) == ((0, 1) if memory == "keep" else (int(keeps), 0))


def _by_inductor(folder: Path, mode: str) -> tuple[float, int]:
    """The largest error, and how many graphs PyTorch found among those that it keeps in `folder`."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    torch.set_num_threads(1)
    layer = make_layer(4, 2, seq=24, batch=2, output=True, norm=True)
    inner = layer_function(layer, Mode.named(mode), kernel=KERNELS["torch-cpu-flash"])

    def run(leaves):  # rows first in memory, as Megatron has them
        return inner({**leaves, "x": leaves["x"].transpose(0, 1).sin().contiguous().transpose(0, 1)})

    error = max(graph_errors(run, layer.leaves(), "inductor").values())
    return error, torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for CPUs")
def test_inductor_finds_what_it_was_told_also_after_processes_with_other_settings(tmp_path):
    """Sizes and strides of results, and code that another process compiled, where it is for the same call."""
    for mode, seen in (("fused", False), ("keep_heads", False), ("fused", True)):
        error, hits = run_in_process(_by_inductor, tmp_path, mode)
        assert error < 1e-12, mode
        assert bool(hits) == seen, (mode, hits)


def test_rotary_tables_that_require_gradients_are_refused():
    layer = make_layer(8, 4)
    layer.sin.requires_grad_()
    with pytest.raises(ValueError, match=r"q rotary tables require gradients, which RotateHalf does not give\. Detach"):
        layer_function(layer)(layer.leaves())


def test_importing_does_not_import_the_compiler():
    """Which takes a second."""
    code = "import sys, upipe_integrations, deepspeed_plugin; print('torch._dynamo' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=120
    )
    assert result.stdout.strip() == "False", result.stderr


def _compiled_models() -> dict[str, float]:
    """A model compiled whole, and layer by layer into one graph each; packed documents that change."""
    from tests.attached import attached
    from tests.models import make_model, shard

    errors = {}
    for family, memory, whole in (("qwen3", "keep", True), ("llama", "fused", False)):
        torch.compiler.reset()
        model = make_model(family, dtype=torch.float64)
        attached(model, 4, dist.group.WORLD, memory=memory)
        ids = shard(torch.arange(16)[None])

        def run(call, cut, model=model, ids=ids):
            positions = torch.cat([torch.arange(cut), torch.arange(16 - cut)])[None]
            model.zero_grad()
            out = call(input_ids=ids, position_ids=shard(positions), use_cache=False).logits
            out.sin().sum().backward()
            return {"out": out.detach(), **{name: p.grad for name, p in model.named_parameters()}}

        cuts = (16, 5)
        wanted = [run(model, cut) for cut in cuts]
        if whole:
            run_compiled = torch.compile(model, backend="aot_eager")
            explained = torch._dynamo.explain(model)(
                input_ids=ids, position_ids=shard(torch.arange(16)[None]), use_cache=False
            )
            errors[f"{family}, graph breaks"] = explained.graph_break_count - 1
        else:
            run_compiled = model
            for layer in model.model.layers:
                layer.compile(fullgraph=True, backend="aot_eager")
        for cut, right in zip(cuts, wanted, strict=True):
            errors[f"{family}, {memory}, {cut}"] = max(relative_errors(run(run_compiled, cut), right).values())
    return errors


def test_models_break_once_at_their_door_and_their_layers_not_at_all():
    pytest.importorskip("transformers")
    for errors in run_ranks(2, _compiled_models):
        assert len(errors) == 5
        assert {case: error for case, error in errors.items() if error > 1e-12} == {}
