"""Head counts, masks, variants, layouts and the partial form: float64, against one process, alone and in pairs."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist

from tests.engine import FEATURES, LAYOUTS, UNSERVED, projections_of, relative_errors, run_sharded, spec_of
from tests.pairwise import pairwise
from tests.ranks import on_pool
from tests.reference import attend, make_layer, reference
from upipe_integrations import (
    AttentionSpec,
    Dropout,
    FunctionKernel,
    Layout,
    Mode,
    Schedule,
    Staging,
    UPipeConfig,
    upipe_attention,
)
from upipe_integrations.kernels import KERNELS, KernelRequest, math
from upipe_integrations.kernels.base import Kernel, regions

# Any numbers of heads: ranks that do not divide them, KV heads and ranks that do not divide each other.
UNEVEN = [(6, 3), (7, 7), (12, 2), (14, 2), (10, 5), (28, 4), (9, 3), (5, 1), (40, 8)]


def _pairs(kernel: str) -> list[tuple[str, ...]]:
    names = [name for name in FEATURES if name not in UNSERVED.get(kernel, ())]
    clash = [
        {"documents", "documents by row"},
        {"other value size", "smaller value size"},
        {"window", "full"},
    ]
    pairs = [pair for pair in itertools.combinations(names, 2) if set(pair) not in clash]
    return [(name,) for name in names] + pairs


def _layer(names: tuple[str, ...], heads: int, kv_heads: int, seed: int = 0):
    options = {key: value for name in names for key, value in FEATURES[name].items()}
    return make_layer(heads, kv_heads, seq=24, batch=3, seed=seed, **options)


RANKS = (2, 3, 4)
KERNEL_NAMES = ("math", "torch-cpu-flash")


def _feature_cases() -> list[dict]:
    """Every feature with every number of ranks, kernel and layout; each pair of features once, over these in turn."""
    alone = pairwise(
        {"names": [(name,) for name in FEATURES], "ranks": RANKS, "kernel": KERNEL_NAMES, "layout": tuple(LAYOUTS)},
        lambda case: case["names"] in _pairs(case["kernel"]),
    )
    places = itertools.cycle(itertools.product(KERNEL_NAMES, RANKS, LAYOUTS))
    pairs = []
    for names in (names for names in _pairs("math") if len(names) == 2):
        kernel, ranks, layout = next(places)
        kernel = kernel if names in _pairs(kernel) else "math"
        pairs.append({"names": names, "ranks": ranks, "kernel": kernel, "layout": layout})
    return alone + pairs


FEATURE_CASES = _feature_cases()


def _errors_of_features(cases: list[dict]) -> dict[tuple, float]:
    C = dist.get_world_size()
    worst = {}
    for case in cases:
        # 8 query heads divide evenly on 2 and 4 ranks; on 3 they are padded.
        layer = _layer(case["names"], 8, 4)
        got = run_sharded(layer, C, dist.group.WORLD, case["kernel"], layout=LAYOUTS[case["layout"]])
        worst[tuple(case.values())] = max(relative_errors(got, reference(layer)).values())
    return worst


@pytest.mark.parametrize("ranks", RANKS)
def test_features_alone_and_in_pairs(ranks):
    """Public faults 14, 21, 22, 28, 33."""
    cases = [case for case in FEATURE_CASES if case["ranks"] == ranks]
    for worst in on_pool(ranks, _errors_of_features, cases):
        assert len(worst) == len(cases) > 20
        assert {names: error for names, error in worst.items() if error > 1e-10} == {}


def test_cases_have_every_pair_of_features():
    assert {case["names"] for case in FEATURE_CASES} == set(_pairs("math"))
    for name in FEATURES:
        of_it = [case for case in FEATURE_CASES if name in case["names"]]
        assert {case["ranks"] for case in of_it} == set(RANKS)
        assert {case["layout"] for case in of_it} == set(LAYOUTS)
        assert {case["kernel"] for case in of_it} == {k for k in KERNEL_NAMES if name not in UNSERVED.get(k, ())}


HEAD_CASES = pairwise(
    {"ranks": RANKS, "heads": UNEVEN, "stage": ("smallest", "twice", "one")},
    lambda case: case["heads"][0] >= case["ranks"] * (2 if case["stage"] == "twice" else 1),
)
"""`stage`: as many query heads per stage as there are ranks, twice as many, or all that divide evenly."""


def _errors_of_heads(cases: list[dict]) -> dict[tuple, float]:
    C = dist.get_world_size()
    worst = {}
    for case in cases:
        H, K = case["heads"]
        U = {"smallest": C, "twice": 2 * C, "one": (H // C) * C}[case["stage"]]
        layer = make_layer(H, K, seq=24, batch=2, bias=True, sinks=True, norm=H < 15)
        got = run_sharded(layer, U, dist.group.WORLD, "torch-cpu-flash")
        worst[H, K, U, case["stage"]] = max(relative_errors(got, reference(layer)).values())
    return worst


@pytest.mark.parametrize("ranks", RANKS)
def test_any_number_of_heads(ranks):
    """Public fault 4, and the padding of a last stage."""
    cases = [case for case in HEAD_CASES if case["ranks"] == ranks]
    assert {case["heads"] for case in cases} == set(UNEVEN)
    for worst in on_pool(ranks, _errors_of_heads, cases):
        assert len(worst) == len(cases)
        assert {case: error for case, error in worst.items() if error > 1e-10} == {}


# ---------------------------------------------------------------- the partial form


PARTIAL_CASES = pairwise(
    {
        "ranks": (2, 4),
        "heads": ((8, 4), (14, 2), (8, 1)),
        "form": ("batch", "sequence"),
        "names": ((), ("documents", "sinks"), ("window", "other value size")),
        "layout": tuple(LAYOUTS),
        "mode": ("keep", "keep_heads"),
    }
)


def _errors_of_partial(cases: list[dict]) -> dict[tuple, float]:
    C = dist.get_world_size()
    worst = {}
    for case in cases:
        layer, mode = _layer(case["names"], *case["heads"]), Mode.named(case["mode"])
        layout = LAYOUTS[case["layout"]]
        got = run_sharded(layer, C, dist.group.WORLD, "math", layout=layout, partial=case["form"], mode=mode)
        worst[tuple(case.values())] = max(relative_errors(got, reference(layer)).values())
    return worst


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_partial_form(ranks):
    cases = [case for case in PARTIAL_CASES if case["ranks"] == ranks]
    for worst in on_pool(ranks, _errors_of_partial, cases):
        assert len(worst) == len(cases) >= 3
        assert {case: error for case, error in worst.items() if error > 1e-10} == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(q=t["q"][:, :, :6]), r"q of shape .*8 heads, head size"),
        (lambda t: t.update(v=t["v"].float()), r"v of shape .* must be torch.float64"),
        (lambda t: t.update(k=t["k"][..., :4]), r"query heads of 8 and key heads of 4"),
        (lambda t: t.update(k=t["k"][:, :8]), r"batch and rows as q's"),
    ],
)
def test_given_heads_that_do_not_fit_are_refused(change, message):
    from upipe_integrations import upipe_attention_qkv

    tensors = {"q": torch.randn(1, 16, 8, 8).double(), "k": torch.randn(1, 16, 4, 8).double()}
    tensors["v"] = tensors["k"]
    change(tensors)
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)
    with pytest.raises(ValueError, match=message):
        upipe_attention_qkv(**tensors, staging=Staging(schedule, None, KERNELS["math"]))


# ---------------------------------------------------------------- layouts


def test_layouts_deal_and_collect():
    """Public fault 28: known answers, and the inverse."""
    t = torch.arange(8)
    assert [Layout.contiguous().deal(t, 0, r, 2).tolist() for r in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [Layout.zigzag().deal(t, 0, r, 2).tolist() for r in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    packed = Layout.packed_zigzag((0, 4, 8))
    assert [packed.deal(t, 0, r, 2).tolist() for r in range(2)] == [[0, 3, 4, 7], [1, 2, 5, 6]]
    for layout, C in itertools.product(
        (Layout.contiguous(), Layout.zigzag(), Layout.packed_zigzag((0, 12, 24))), (1, 2, 3)
    ):
        whole = torch.randn(2, 24, 5)
        parts = [layout.deal(whole, 1, rank, C) for rank in range(C)]
        assert torch.equal(layout.collect(parts, 1), whole)
        if layout.documents is None:
            for rank in range(C):
                numbers = [layout.row_of(rank, row, 24, C) for row in range(24 // C)]
                assert numbers == layout.rows(rank, 24, C).tolist()


@pytest.mark.parametrize(
    ("layout", "length", "message"),
    [
        (Layout.contiguous(), 7, r"sequence of 7 tokens on 2 .*: 2 must divide it. Pad it on the right with 1 tokens"),
        (Layout.zigzag(), 10, r"sequence of 10 tokens on 2 .*: 4 must divide it.*with 2 tokens"),
        (Layout.packed_zigzag((0, 6, 12)), 12, r"document \[0, 6\) of 6 tokens on 2 .*: 4 must divide it"),
        (Layout.packed_zigzag((0, 4, 8)), 12, r"layout documents \(0, 4, 8\): must start at 0 and end at .* 12"),
    ],
)
def test_lengths_that_do_not_fit_a_layout_are_refused(layout, length, message):
    with pytest.raises(ValueError, match=message):
        layout.check(length, 2)


def _packed_layouts() -> dict[str, float]:
    C = dist.get_world_size()
    bounds = (0, 8, 16, 24)
    errors = {}
    for name, layout in {
        "zigzag by document": Layout.packed_zigzag(bounds),
        "whole zigzag with documents": Layout.zigzag(),
        "contiguous with documents": Layout.contiguous(),
    }.items():
        layer = make_layer(8, 2, seq=24, documents=(bounds,), sinks=True)
        got = run_sharded(layer, C, dist.group.WORLD, "torch-cpu-flash", layout=layout)
        errors[name] = max(relative_errors(got, reference(layer)).values())
    layer = make_layer(8, 2, seq=24)  # the layout says nothing about who attends whom
    got = run_sharded(layer, C, dist.group.WORLD, layout=Layout.packed_zigzag(bounds))
    errors["zigzag by document, one document"] = max(relative_errors(got, reference(layer)).values())
    return errors


def test_packed_layouts():
    for errors in on_pool(4, _packed_layouts):
        assert max(errors.values()) < 1e-10, errors


def _a_padded_tail() -> float:
    """Public fault 31: 7 real tokens padded to 8; the last real one's output is that of the 7 alone."""
    layer = make_layer(8, 4, seq=8)
    got = run_sharded(layer, 4, dist.group.WORLD)["out"][:, :7]
    short = make_layer(8, 4, seq=8)
    short.x, short.cos, short.sin = short.x[:, :7], short.cos[:, :7], short.sin[:, :7]
    wanted = attend(short, short.leaves())
    return float((got - wanted).abs().max() / wanted.abs().max())


def test_a_padded_tail_changes_nothing_before_it():
    for error in on_pool(2, _a_padded_tail):
        assert error < 1e-10


# ---------------------------------------------------------------- dropout


def _kept(layer, dropout: Dropout) -> torch.Tensor:
    """The mask of every head as the math kernel draws it, for the reference."""
    spec = spec_of(layer, dropout)
    B, S = layer.x.shape[:2]
    kept = torch.zeros(layer.heads, B, S, S, dtype=layer.x.dtype)
    for head in range(layer.heads):
        of_head = dataclasses.replace(spec, dropout=dataclasses.replace(dropout, heads=(head,)))
        for region in regions(spec, B, S, math._BLOCK_ROWS):
            part = kept[head, region.batch, region.rows, region.keys]
            part.copy_(math._kept(torch.ones_like(part)[:, None], region, of_head)[:, 0])
    return kept


DROPOUT_CASES = pairwise(
    {"ranks": RANKS, "names": [(), *((name,) for name in FEATURES)], "heads": ((8, 1), (8, 2), (7, 1))},
    lambda case: case["heads"][0] >= case["heads"][1] * case["ranks"],
)
"""`heads`: query heads, and how many of a stage are on a rank."""


def _dropout_errors(cases: list[dict]) -> dict[tuple, float]:
    C = dist.get_world_size()
    worst = {}
    dropout = Dropout(0.4, seed=7)
    for case in cases:
        heads, per_rank = case["heads"]
        layer = _layer(case["names"], heads, 1 if heads == 7 else 4)
        layer.kept = _kept(layer, dropout)
        got = run_sharded(layer, per_rank * C, dist.group.WORLD, dropout=dropout, layout=Layout.zigzag())
        worst[tuple(case.values())] = max(relative_errors(got, reference(layer)).values())
    return worst


@pytest.mark.parametrize("ranks", RANKS)
def test_dropout_with_every_feature_does_not_depend_on_ranks_or_stages(ranks):
    """One mask for the reference, whatever heads share a stage; and the same in backward as in forward."""
    cases = [case for case in DROPOUT_CASES if case["ranks"] == ranks]
    assert {case["names"] for case in cases} == {(), *((name,) for name in FEATURES)}
    for worst in on_pool(ranks, _dropout_errors, cases):
        assert len(worst) == len(cases)
        assert {case: error for case, error in worst.items() if error > 1e-10} == {}


def test_another_seed_is_another_mask():
    layer = make_layer(8, 4, seq=24)
    one, other = (run_sharded(layer, 8, None, dropout=Dropout(0.4, seed=seed)) for seed in (7, 8))
    assert relative_errors(other, one)["out"] > 0.1


def test_dropout_gradients_are_those_of_its_forward():
    """Finite differences of the same mask, in float64."""
    layer = make_layer(4, 2, seq=12, softcap=2.0, sinks=True)
    got = run_sharded(layer, 2, None, dropout=Dropout(0.3, seed=3))
    for name in ("x", "wq", "wv", "sinks"):
        leaf = getattr(layer, name)
        direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        outs = []
        for step in (1e-6, -1e-6):
            setattr(layer, name, leaf + step * direction)
            outs.append(run_sharded(layer, 2, None, dropout=Dropout(0.3, seed=3))["out"])
        setattr(layer, name, leaf)
        slope = float(((outs[0] - outs[1]) / 2e-6 * layer.dout).sum())
        assert slope == pytest.approx(float((got[f"d{name}"] * direction).sum()), rel=1e-6)


def test_dropout_keeps_the_rate_and_the_mean():
    layer = make_layer(4, 4, seq=256, head_dim=4)
    layer.wv = torch.zeros_like(layer.wv)
    layer.bq, layer.bk, layer.bv = (torch.zeros(16).double(), torch.zeros(16).double(), torch.ones(16).double())
    out = run_sharded(layer, 2, None, dropout=Dropout(0.25, seed=1))["out"]
    assert float(out.mean()) == pytest.approx(1.0, abs=0.02)
    assert float(out[:, 0].unique().numel()) == 2  # one key: all or nothing
    assert sorted(out[:, 0].unique().tolist()) == pytest.approx([0.0, 1 / 0.75])


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_dropout_rates_are_checked(rate):
    with pytest.raises(ValueError, match=rf"dropout rate = {rate}: must be at least 0 and below 1"):
        Dropout(rate, 0)


# ---------------------------------------------------------------- any attention function


def _function_kernel() -> float:
    """A function no kernel has: sigmoid attention, on 2 ranks, against one process's autograd."""

    def sigmoid_attention(q, k, v, spec):
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        weights = torch.sigmoid(q @ k.mT * spec.scale_for(q.shape[3])).tril()
        return weights @ v

    layer = make_layer(8, 2, norm=True)
    wanted = run_sharded(layer, 8, None, FunctionKernel(sigmoid_attention))
    got = run_sharded(layer, 4, dist.group.WORLD, FunctionKernel(sigmoid_attention), layout=Layout.zigzag())
    softmax = FunctionKernel(
        lambda q, k, v, spec: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=spec.causal, enable_gqa=True
        )
    )
    known = relative_errors(run_sharded(layer, 4, dist.group.WORLD, softmax), reference(layer))
    return max(*relative_errors(got, wanted).values(), *known.values())


def test_any_differentiable_function_is_a_kernel():
    for error in on_pool(2, _function_kernel):
        assert error < 1e-10


# ---------------------------------------------------------------- refusals name both settings


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        (
            KERNELS["torch-cpu-flash"],
            {"softcap": 2.0},
            r"kernel 'torch-cpu-flash' with softcap: it does not do softcap",
        ),
        (
            KERNELS["torch-cpu-flash"],
            {"dropout": Dropout(0.1, 0), "window": 4},
            r"'torch-cpu-flash' with sliding window, dropout: it does not do dropout",
        ),
        (
            FunctionKernel(lambda q, k, v, spec: q),
            {"sinks": True},
            r"kernel 'function' with sinks: a function returns no log-sum-exp",
        ),
        (KERNELS["torch-cuda-flash"], {}, r"kernel 'torch-cuda-flash': it needs CUDA tensors"),
    ],
)
def test_a_kernel_that_can_not_do_it_is_refused_before_any_exchange(kernel, options, message):
    layer = make_layer(8, 4, sinks=options.pop("sinks", False))
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)
    projections = projections_of(layer, layer.leaves(), slice(None))
    with pytest.raises(ValueError, match=message):
        upipe_attention(
            layer.x,
            projections,
            Staging(schedule, None, kernel),
            AttentionSpec(**options),
            sinks=layer.leaves().get("sinks"),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"window = 0 with causal = True: must be positive"),
        ({"window": 4, "causal": False}, r"window = 4 with causal = False: .* needs causal attention"),
        ({"softcap": 0.0}, r"softcap = 0\.0: must be positive"),
        ({"documents": ((0, 4, 4),)}, r"documents \(0, 4, 4\): must be boundaries that start at 0 and rise"),
        ({"documents": ((1, 4),)}, r"documents \(1, 4\)"),
    ],
)
def test_specs_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**options)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (((0, 8),), r"documents of batch row 0 end at 8 .* must end at the sequence length 16"),
        (((0, 16),) * 3, r"there are 3 rows of them: .* for each of 1 batch rows or once for all"),
    ],
)
def test_documents_that_do_not_fit_are_refused(documents, message):
    layer = make_layer(8, 4, documents=documents)
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)
    projections = projections_of(layer, layer.leaves(), slice(None))
    with pytest.raises(ValueError, match=message):
        upipe_attention(layer.x, projections, Staging(schedule, None, KERNELS["math"]), spec_of(layer))


def test_auto_finds_a_kernel_for_every_feature():
    from upipe_integrations import select_kernel

    for names in _pairs("math"):
        layer = _layer(names, 8, 4)
        request = KernelRequest(
            layer.x.device, layer.x.dtype, 8, layer.value_dim, spec_of(layer), layer.sinks is not None
        )
        kernel: Kernel = select_kernel("auto", request)
        assert kernel.name == ("math" if "softcap" in names else "torch-cpu-flash")


def test_settings_serve_uneven_heads():
    assert len(UPipeConfig(8).schedule(heads=28, kv_heads=4, ranks=8).stages) == 4
