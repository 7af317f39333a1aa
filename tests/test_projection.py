"""What hosts with fused weights or adapters need: places in one weight, blocks of rows, columns of x, gradients into
the host's buffer, low-rank terms, neighbouring rotary pairs, rows of x split once more. float64 on ranks, against one
process."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from tests.engine import LAYOUTS, PRODUCTS_IN_PLACE, per_head_norm, relative_errors, spec_of
from tests.pairwise import pairwise
from tests.ranks import on_pool
from tests.reference import Layer, attend, make_layer, reference
from upipe_integrations import (
    AttentionProjections,
    AttentionSpec,
    HeadBlock,
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
)
from upipe_integrations.kernels import KERNELS
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.measure import LiveMemory

D = 8


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """Weights or biases as one whose rows are, group by group, the queries, the key and the value."""
    parts = [t.unflatten(0, (groups, -1)) for t in (q, k, v)]
    return torch.cat(parts, 1).flatten(0, 1)


def places_of(heads: int, groups: int) -> dict[str, tuple[int, ...]]:
    """Where query, key and value heads are in such a weight, counted one by one."""
    found: dict[str, list[int]] = {"q": [], "k": [], "v": []}
    for place in range(heads + 2 * groups):
        within = place % (heads // groups + 2)
        found["q" if within < heads // groups else "kv"[within - heads // groups]].append(place)
    return {name: tuple(places) for name, places in found.items()}


def split_groups(grad: torch.Tensor, heads: int, groups: int) -> dict[str, torch.Tensor]:
    """The inverse of :func:`grouped`, row by row."""
    by_head = grad.unflatten(0, (-1, D))
    return {name: torch.cat([by_head[i] for i in places]) for name, places in places_of(heads, groups).items()}


def run_fused(layer: Layer, chunk_heads: int, mode: Mode, layout: Layout, accumulate: bool) -> dict[str, torch.Tensor]:
    """The layer with one weight and one bias for q, k and v, on all ranks; results as the reference's."""
    C, rank = dist.get_world_size(), dist.get_rank()
    H, K = layer.heads, layer.kv_heads
    rows = layout.rows(rank, layer.x.shape[1], C)
    leaves = {name: t.clone() for name, t in layer.leaves().items() if name[0] not in "wb" or name in ("wo", "bo")}
    leaves["x"] = leaves["x"][:, rows].clone()
    leaves["w"] = grouped(layer.wq, layer.wk, layer.wv, K)
    leaves["b"] = grouped(layer.bq, layer.bk, layer.bv, K)
    for t in leaves.values():
        t.requires_grad_()
    buffers = {name: torch.ones_like(leaves[name]).detach() for name in ("w", "wo")} if accumulate else {}
    rotary = RotateHalf(layer.cos[:, rows], layer.sin[:, rows])
    norm = {name: HeadFunction(per_head_norm, (leaves[f"{name}_gain"],)) for name in "qk"}
    places = places_of(H, K)
    projections = AttentionProjections(
        *(
            Projection(
                Weights(leaves["w"], leaves["b"], accumulate_into=buffers.get("w")),
                D,
                function=norm.get(name),
                rotary=rotary if name in "qk" else None,
                places=places[name],
            )
            for name in "qkv"
        )
    )
    schedule = Schedule.build(heads=H, kv_heads=K, ranks=C, chunk_heads=chunk_heads)
    output = OutputProjection(leaves["wo"], leaves["bo"], buffers.get("wo"))
    out = upipe_attention(
        leaves["x"],
        projections,
        Staging(schedule, dist.group.WORLD, KERNELS["math"], layout=layout, mode=mode),
        spec_of(layer),
        output=output,
    )
    out.backward(layer.dout[:, rows])
    grads = {name: t.grad for name, t in leaves.items()}
    if accumulate:
        assert grads["w"] is None and grads["wo"] is None
        grads["w"] = buffers["w"] - 1
        grads["wo"] = buffers["wo"] - 1
    for name, t in grads.items():
        if name != "x":
            dist.all_reduce(t)
    results = {"out": _whole(out.detach(), rows), "dx": _whole(grads["x"], rows)}
    for kind in "wb":
        results |= {f"d{kind}{name}": t for name, t in split_groups(grads[kind], H, K).items()}
    return results | {f"d{name}": grads[name] for name in ("q_gain", "k_gain", "wo", "bo")}


def _whole(part: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`[B, S, ...]` of every rank's rows, summed where they meet."""
    whole = part.new_zeros(part.shape[0], part.shape[1] * dist.get_world_size(), part.shape[2])
    whole[:, rows] = part
    dist.all_reduce(whole)
    return whole


MODES = {name: Mode.named(name, query_blocks=2) for name in MEMORY}


FUSED_CASES = pairwise(
    {
        "ranks": (2, 3),
        "heads": ((8, 4), (8, 8), (8, 2), (12, 2)),
        "per_rank": (1, 2),
        "mode": tuple(MODES),
        "layout": tuple(LAYOUTS),
        "accumulate": (False, True),
    }
)


def _errors_of_fused(cases: list[dict]) -> dict[tuple, float]:
    C = dist.get_world_size()
    worst = {}
    for case in cases:
        seq = 24 if C == 3 else 16
        layer = make_layer(*case["heads"], head_dim=D, seq=seq, batch=2, bias=True, norm=True, output=True)
        mode, layout = MODES[case["mode"]], LAYOUTS[case["layout"]]
        got = run_fused(layer, case["per_rank"] * C, mode, layout, case["accumulate"])
        worst[tuple(case.values())] = max(relative_errors(got, reference(layer)).values())
    return worst


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_weight_for_queries_keys_and_values(ranks):
    """With its gradient by autograd, and added to a buffer of the caller's."""
    cases = [case for case in FUSED_CASES if case["ranks"] == ranks]
    assert {(case["mode"], case["accumulate"]) for case in FUSED_CASES} == set(itertools.product(MODES, (False, True)))
    for worst in on_pool(ranks, _errors_of_fused, cases):
        assert len(worst) == len(cases) >= 5
        assert {case: error for case, error in worst.items() if error > 1e-10} == {}


def test_gradients_go_to_the_buffer_in_its_own_dtype():
    x = torch.randn(1, 8, 16, dtype=torch.bfloat16)
    weight = torch.randn(6 * D, 16, dtype=torch.bfloat16, requires_grad=True)
    buffer = torch.zeros(6 * D, 16, dtype=torch.float32)
    places = places_of(2, 2)
    projections = AttentionProjections(
        *(Projection(Weights(weight, accumulate_into=buffer), D, places=places[n]) for n in "qkv")
    )
    schedule = Schedule.build(heads=2, kv_heads=2, ranks=1, chunk_heads=1)
    upipe_attention(x, projections, Staging(schedule, None, KERNELS["math"])).sum().backward()
    assert weight.grad is None and buffer.abs().amax(1).min() > 0


@pytest.mark.parametrize("places", [(0, 1, 1), (0, 1), (0, 1, 6), (-1, 0, 1)])
def test_places_that_do_not_fit_are_refused(places):
    weight = torch.randn(6 * D, 16)
    good = Projection(Weights(weight), D, places=(0, 1, 2))
    projections = AttentionProjections(dataclasses.replace(good, places=places), good, good)
    schedule = Schedule.build(heads=3, kv_heads=3, ranks=1, chunk_heads=1)
    with pytest.raises(ValueError, match=r"q places .* must name 3 different heads of the 6"):
        upipe_attention(torch.randn(1, 8, 16), projections, Staging(schedule, None, KERNELS["math"]))


# ---------------------------------------------------------------- blocks of rows, columns of x


def _with_shared(heads: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    return torch.cat([heads, shared[:, :, None].expand(-1, -1, heads.shape[2], -1)], -1)


def latent_layer(H: int, K: int, value_dim: int) -> Layer:
    """A layer as latent attention sees it, written out: queries read the first 14 columns of x, keys and values the
    next 10, and the last 3 of every key are the last 3 columns of x as they are."""
    layer = make_layer(
        H, K, head_dim=D, value_dim=value_dim, size=27, seq=16, batch=2, bias=True, rotary=False, output=True
    )
    layer.wq[:, 14:] = 0
    by_head = layer.wk.unflatten(0, (K, D))
    by_head[..., :14], by_head[..., 24:] = 0, 0
    by_head[:, D - 3 :] = torch.nn.functional.pad(torch.eye(3, dtype=torch.float64), (24, 0))
    layer.bk.unflatten(0, (K, D))[:, D - 3 :] = 0
    layer.wv[:, :14], layer.wv[:, 24:] = 0, 0
    return layer


def run_latent(layer: Layer, chunk_heads: int, mode: Mode) -> dict[str, torch.Tensor]:
    """Keys (without what they share) and values side by side in one weight; results as :func:`in_parts`'."""
    C, rank = dist.get_world_size(), dist.get_rank()
    K, Dv, own = layer.kv_heads, layer.value_dim, D - 3
    x = layer.x.chunk(C, 1)[rank]
    kv = [t.unflatten(0, (K, -1)) for t in (layer.wk, layer.wv, layer.bk, layer.bv)]
    leaves = {
        "x": x[..., :24],
        "shared": x[..., 24:],
        "wq": layer.wq[:, :14],
        "bq": layer.bq,
        "wkv": torch.cat([kv[0][:, :own], kv[1]], 1)[..., 14:24].flatten(0, 1),
        "bkv": torch.cat([kv[2][:, :own], kv[3]], 1).flatten(),
        "wo": layer.wo,
        "bo": layer.bo,
    }
    leaves = {name: t.clone().contiguous().requires_grad_() for name, t in leaves.items()}
    share = HeadFunction(_with_shared, (leaves["shared"],), by_row=(0,))
    latent = {"weights": Weights(leaves["wkv"], leaves["bkv"]), "columns": range(14, 24)}
    projections = AttentionProjections(
        Projection(Weights(leaves["wq"], leaves["bq"]), D, columns=range(14)),
        Projection(head_dim=D, function=share, block=HeadBlock(own + Dv, range(own)), **latent),
        Projection(head_dim=Dv, block=HeadBlock(own + Dv, range(own, own + Dv)), **latent),
    )
    schedule = Schedule.build(heads=layer.heads, kv_heads=K, ranks=C, chunk_heads=chunk_heads)
    output = OutputProjection(leaves["wo"], leaves["bo"])
    out = upipe_attention(
        leaves["x"], projections, Staging(schedule, dist.group.WORLD, KERNELS["math"], mode=mode), output=output
    )
    out.backward(layer.dout.chunk(C, 1)[rank])
    results = {}
    for name, t in (("out", out.detach()), *((f"d{name}", t.grad) for name, t in leaves.items())):
        if name in ("out", "dx", "dshared"):
            results[name] = _whole(t, torch.arange(16).chunk(C)[rank])
        else:
            dist.all_reduce(t)
            results[name] = t
    return results


def in_parts(wanted: dict[str, torch.Tensor], K: int, value_dim: int) -> dict[str, torch.Tensor]:
    """The reference's results where :func:`run_latent` has them."""
    own = D - 3
    wk, wv, bk, bv = (wanted[f"d{name}"].unflatten(0, (K, -1)) for name in ("wk", "wv", "bk", "bv"))
    return {
        "out": wanted["out"],
        "dx": wanted["dx"][..., :24],
        "dshared": wanted["dx"][..., 24:],
        "dwq": wanted["dwq"][:, :14],
        "dbq": wanted["dbq"],
        "dwkv": torch.cat([wk[:, :own], wv], 1)[..., 14:24].flatten(0, 1),
        "dbkv": torch.cat([bk[:, :own], bv], 1).flatten(),
        "dwo": wanted["dwo"],
        "dbo": wanted["dbo"],
    }


LATENT_CASES = pairwise(
    {"heads": ((8, 8, D), (8, 2, 6), (10, 10, 6), (9, 9, D)), "mode": tuple(MODES), "per_rank": (1, 2)},
    lambda case: case["heads"][2] == D or MODES[case["mode"]].query_blocks == 1,
)


def _errors_of_latent() -> dict[tuple, float]:
    C = dist.get_world_size()
    worst = {}
    for case in LATENT_CASES:
        H, K, Dv = case["heads"]
        layer = latent_layer(H, K, Dv)
        got = run_latent(layer, case["per_rank"] * C, MODES[case["mode"]])
        worst[tuple(case.values())] = max(relative_errors(got, in_parts(reference(layer), K, Dv)).values())
    return worst


def test_keys_and_values_in_one_weight_of_a_part_of_x():
    """Heads of more than their projection, rows of a head in blocks of another size, columns of x: as MLA has them."""
    for worst in on_pool(4, _errors_of_latent):
        assert len(worst) == len(LATENT_CASES) >= 4 * len(MODES) - 2
        assert {case: error for case, error in worst.items() if error > 1e-10} == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": range(8, 17)}, r"k columns range\(8, 17\): must be consecutive columns of the input's 16"),
        ({"columns": range(0, 16, 2)}, r"k columns .* must be consecutive"),
        ({"columns": range(8)}, r"k weight of shape \(24, 16\): must be \(24, 8\)"),
        ({"block": HeadBlock(12, range(D))}, r"k weight of shape \(24, 16\): must be \(36, 16\), 3 heads of 12"),
        ({"block": HeadBlock(8, range(2, D))}, r"k block of 6 features for heads of 8: .* or a function"),
    ],
)
def test_blocks_and_columns_that_do_not_fit_are_refused(changes, message):
    good = Projection(Weights(torch.randn(3 * D, 16)), D)
    projections = AttentionProjections(good, dataclasses.replace(good, **changes), good)
    schedule = Schedule.build(heads=3, kv_heads=3, ranks=1, chunk_heads=1)
    with pytest.raises(ValueError, match=message):
        upipe_attention(torch.randn(1, 8, 16), projections, Staging(schedule, None, KERNELS["math"]))


@pytest.mark.parametrize("rows", [range(0), range(4, 2), range(0, 4, 2), range(2, 9), range(-1, 3)])
def test_features_outside_of_their_block_are_refused(rows):
    with pytest.raises(ValueError, match=r"of a block of 8: must be consecutive ones"):
        HeadBlock(8, rows)


# ---------------------------------------------------------------- low-rank terms

R = 3


def _low_rank_leaves(layer: Layer, names: str, fused: bool) -> dict[str, torch.Tensor]:
    """A (`a..`) and B (`u..`) of each term; a fused weight has one."""
    generator = torch.Generator().manual_seed(7)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

    heads = {"q": layer.heads, "k": layer.kv_heads, "v": layer.kv_heads}
    leaves = {} if not fused else {"a": rand(R, 24)}
    for n in names:
        leaves |= {f"u{n}": rand(heads[n] * D, R)} | ({} if fused else {f"a{n}": rand(R, 24)})
    return leaves


def _low_rank_reference(layer: Layer, adapters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole layer in one process, its weights W + 0.5 B A by autograd."""
    leaves = {name: t.clone().requires_grad_() for name, t in (layer.leaves() | adapters).items()}
    merged = dict(leaves)
    for n in "qkv":
        if f"u{n}" in leaves:
            merged[f"w{n}"] = leaves[f"w{n}"] + 0.5 * leaves[f"u{n}"] @ leaves.get(f"a{n}", leaves.get("a"))
    out = attend(layer, merged)
    out.backward(layer.dout)
    return {"out": out.detach(), **{f"d{name}": t.grad for name, t in leaves.items()}}


def _run_low_rank(
    layer: Layer, adapters: dict[str, torch.Tensor], chunk_heads: int, mode: Mode, *, fused: bool, frozen: bool
) -> dict[str, torch.Tensor]:
    """The same on ranks; a frozen layer's own weights and biases get no gradients, and none are made."""
    C, rank = dist.get_world_size(), dist.get_rank()
    layout = Layout.zigzag()
    rows = layout.rows(rank, layer.x.shape[1], C)
    leaves = {name: t.clone() for name, t in (layer.leaves() | adapters).items()}
    leaves["x"] = leaves["x"][:, rows].clone()
    if fused:
        for kind, tensors in {"w": (layer.wq, layer.wk, layer.wv), "u": [adapters[f"u{n}"] for n in "qkv"]}.items():
            leaves[kind] = grouped(*tensors, layer.kv_heads)
    for name, t in leaves.items():
        t.requires_grad_(not (frozen and name[0] in "wb"))
    rotary = RotateHalf(layer.cos[:, rows], layer.sin[:, rows])
    norm = {n: HeadFunction(per_head_norm, (leaves[f"{n}_gain"],)) for n in "qk" if f"{n}_gain" in leaves}

    def term(n: str) -> LowRank | None:
        if f"u{n}" not in leaves:
            return None
        return LowRank(0.5 * leaves["x"] @ leaves[f"a{n}"].T, leaves[f"u{n}"])

    places = places_of(layer.heads, layer.kv_heads)
    shared = term("") if fused else None
    projections = AttentionProjections(
        *(
            Projection(
                Weights(leaves["w" if fused else f"w{n}"], leaves.get(f"b{n}"), low_rank=shared if fused else term(n)),
                D,
                function=norm.get(n),
                rotary=rotary if n in "qk" else None,
                places=places[n] if fused else None,
            )
            for n in "qkv"
        )
    )
    schedule = Schedule.build(heads=layer.heads, kv_heads=layer.kv_heads, ranks=C, chunk_heads=chunk_heads)
    out = upipe_attention(
        leaves["x"],
        projections,
        Staging(schedule, dist.group.WORLD, KERNELS["math"], layout=layout, mode=mode),
        spec_of(layer),
        output=OutputProjection(leaves["wo"], leaves.get("bo")),
    )
    out.backward(layer.dout[:, rows])
    grads = {name: t.grad for name, t in leaves.items() if t.grad is not None}
    for name, t in grads.items():
        if name != "x":
            dist.all_reduce(t)
    results = {"out": _whole(out.detach(), rows), "dx": _whole(grads.pop("x"), rows)}
    if fused:
        for kind in "wu":
            if kind in grads:
                split = split_groups(grads.pop(kind), layer.heads, layer.kv_heads)
                results |= {f"d{kind}{n}": t for n, t in split.items()}
    unread = [f"{kind}{n}" for kind in "wu" for n in "qkv"] if fused else []
    return results | {f"d{name}": t for name, t in grads.items() if name not in unread}


LOW_RANK_CASES = pairwise(
    {
        "ranks": (2, 3),
        "names": ("q", "k", "v", "qk", "qv", "kv", "qkv"),
        "mode": tuple(MODES),
        "heads": ((8, 4), (8, 2), (6, 3)),
        "whole": (True, False),
        "frozen": (True, False),
        "batch": (1, 2),
        "fused": (False, True),
    },
    lambda case: not case["fused"] or (case["names"] == "qkv" and not case["whole"]),
)
"""`whole`: with biases and norms."""


def _errors_of_low_rank(cases: list[dict]) -> dict[tuple, float]:
    C = dist.get_world_size()
    worst = {}
    for case in cases:
        whole, frozen, fused = case["whole"], case["frozen"], case["fused"]
        layer = make_layer(*case["heads"], head_dim=D, seq=24, batch=case["batch"], bias=whole, norm=whole, output=True)
        adapters = _low_rank_leaves(layer, case["names"], fused)
        wanted = _low_rank_reference(layer, adapters)
        if frozen:
            wanted = {name: t for name, t in wanted.items() if name[:2] not in ("dw", "db")}
        got = _run_low_rank(layer, adapters, C, MODES[case["mode"]], fused=fused, frozen=frozen)
        assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
        worst[tuple(case.values())] = max(relative_errors(got, wanted).values())
    return worst


@pytest.mark.parametrize("ranks", [2, 3])
def test_low_rank_terms_on_any_projections(ranks):
    """Every mode, weights trained or frozen, beside biases and norms, and of a fused weight."""
    cases = [case for case in LOW_RANK_CASES if case["ranks"] == ranks]
    assert {case["names"] for case in cases} == {"q", "k", "v", "qk", "qv", "kv", "qkv"}
    assert {case["mode"] for case in LOW_RANK_CASES if case["fused"]} == set(MODES)
    for worst in on_pool(ranks, _errors_of_low_rank, cases):
        assert len(worst) == len(cases) and {case["fused"] for case in cases} == {False, True}
        assert {case: error for case, error in worst.items() if error > 1e-10} == {}


@pytest.mark.parametrize("memory", ["keep", "blocks"])
def test_a_low_rank_term_keeps_its_own_precision(memory):
    """A float32 term beside bfloat16 weights: the sum is rounded, its parts and its gradients are not."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight = rand(1, 64, 16, dtype=torch.bfloat16), rand(2 * D, 16, dtype=torch.bfloat16)
    a = rand(1, 64, R, dtype=torch.float32).requires_grad_()
    b = rand(2 * D, R, dtype=torch.float32).requires_grad_()
    plain = Projection(Weights(weight), D)
    out = upipe_attention(
        x,
        AttentionProjections(plain, plain, Projection(Weights(weight, low_rank=LowRank(a, b)), D)),
        Staging(
            Schedule.build(heads=2, kv_heads=2, ranks=1, chunk_heads=1), None, KERNELS["math"], mode=Mode.named(memory)
        ),
        AttentionSpec(window=1),
        output=OutputProjection(torch.eye(2 * D, dtype=torch.bfloat16)) if memory == "blocks" else None,
    )
    dout = rand(*out.shape, dtype=torch.bfloat16)
    out.backward(dout)
    wanted = ((x @ weight.T).float() + a @ b.T).to(torch.bfloat16)
    assert float((out == wanted).float().mean()) > 0.99  # sums in another order may round to a neighbour
    for got, want in ((a.grad, dout.float() @ b), (b.grad, dout[0].float().T @ a[0])):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want.detach().reshape(got.shape), rtol=1e-5, atol=1e-5)


def _backward_of(mode: Mode, frozen: bool) -> tuple[int, int]:
    """(products, bytes at the peak) of a layer's backward; its low-rank term is trained."""
    E = 20
    q, k, v = (torch.randn(4 * D, E, requires_grad=not frozen) for _ in "qkv")
    wo = torch.randn(E, 4 * D, requires_grad=not frozen)
    x, b = torch.randn(1, 8, E, requires_grad=True), torch.randn(4 * D, R, requires_grad=True)
    out = upipe_attention(
        x,
        AttentionProjections(
            Projection(Weights(q, low_rank=LowRank(x[..., :R], b)), D),
            Projection(Weights(k), D),
            Projection(Weights(v), D),
        ),
        Staging(Schedule.build(heads=4, kv_heads=4, ranks=1, chunk_heads=1), None, KERNELS["math"], mode=mode),
        output=OutputProjection(wo),
    )
    with FlopCounterMode(display=False, custom_mapping=PRODUCTS_IN_PLACE) as products, LiveMemory() as live:
        out.backward(torch.randn_like(out))
    assert bool(x.grad.any()) and bool(b.grad.any()) and (q.grad is None) == frozen
    return products.get_total_flops(), live.peak


@pytest.mark.parametrize("memory", list(MODES))
def test_a_frozen_weight_costs_no_gradient(memory):
    """Neither the product nor the memory."""
    trained, frozen = (_backward_of(MODES[memory], frozen) for frozen in (False, True))
    assert trained[0] - frozen[0] == 4 * 2 * 8 * 20 * 4 * D
    assert trained[1] - frozen[1] >= 4 * 4 * D * 20 * 4


@pytest.mark.parametrize(
    ("of_input", "of_weight"),
    [((1, 8, R), (2 * D, 2)), ((1, 4, R), (2 * D, R)), ((8, R), (2 * D, R)), ((1, 8, R), (D, R))],
)
def test_low_rank_terms_that_do_not_fit_are_refused(of_input, of_weight):
    weight = torch.randn(2 * D, 16)
    plain = Projection(Weights(weight), D)
    bad = Projection(Weights(weight, low_rank=LowRank(torch.zeros(of_input), torch.zeros(of_weight))), D)
    schedule = Schedule.build(heads=2, kv_heads=2, ranks=1, chunk_heads=1)
    with pytest.raises(ValueError, match=r"k low-rank term with an input of shape .* must be \(1, 8, 'R'\)"):
        upipe_attention(
            torch.randn(1, 8, 16), AttentionProjections(plain, bad, plain), Staging(schedule, None, KERNELS["math"])
        )


# ---------------------------------------------------------------- rotary of neighbours


@pytest.mark.parametrize("rotated", [D, D - 2])
def test_rotary_of_neighbouring_pairs(rotated):
    """By complex numbers, pair (2d, 2d + 1) by its own angle; and the transpose is the inverse."""
    angle = torch.randn(1, 6, rotated // 2, dtype=torch.float64)
    table = angle.repeat_interleave(2, -1)
    rotary = RotateHalf(table.cos(), table.sin(), interleaved=True)
    heads = torch.randn(2, 6, 1, 3, D, dtype=torch.float64)
    got = torch.empty_like(heads)
    rotary.rotate(heads, got)
    z = torch.view_as_complex(heads[..., :rotated].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)[:, :, None, None]).flatten(-2)
    wanted = torch.cat([turned, heads[..., rotated:]], -1)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-14)
    back = torch.empty_like(heads)
    rotary.rotate(got, back, inverse=True)
    torch.testing.assert_close(back, heads, rtol=0, atol=1e-14)


# ---------------------------------------------------------------- rows of x split once more


def _errors_of_split_rows() -> dict[tuple, float]:
    """World 4: two ranks share a shard of the sequence, each with half of the heads and half of the rows."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    sequence = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    part, shard = rank % 2, rank // 2
    H, K = 8, 4
    worst = {}
    for batch in (1, 2):
        layer = make_layer(H, K, head_dim=D, seq=16, batch=batch, bias=True)
        wanted = reference(layer)
        rows = Layout.zigzag().rows(shard, 16, 2)
        mine = rows.chunk(2)[part]
        for U in (2, 4):
            heads, kv = (torch.arange(n * D).chunk(2)[part] for n in (H, K))
            leaves = {"x": layer.x[:, mine].clone()}
            for name, which in (("q", heads), ("k", kv), ("v", kv)):
                leaves |= {f"{kind}{name}": getattr(layer, f"{kind}{name}")[which].clone() for kind in "wb"}
            for t in leaves.values():
                t.requires_grad_()
            rotary = RotateHalf(layer.cos[:, rows], layer.sin[:, rows])
            projections = AttentionProjections(
                *(
                    Projection(Weights(leaves[f"w{n}"], leaves[f"b{n}"]), D, rotary=rotary if n in "qk" else None)
                    for n in "qkv"
                )
            )
            schedule = Schedule.build(heads=H // 2, kv_heads=K // 2, ranks=2, chunk_heads=U)
            out = upipe_attention(
                leaves["x"],
                projections,
                Staging(schedule, sequence[part], KERNELS["math"], layout=Layout.zigzag(), x_group=pairs[shard]),
            )
            saved = [t for t in out.grad_fn.saved_tensors if t is not None and t.shape[-1:] == (24,)]
            assert [tuple(t.shape) for t in saved if t.dim() == 3] == [(batch, 4, 24)], "only the part of x is kept"
            out.backward(layer.dout[:, rows][..., heads])
            got = {"out": out.detach(), "dx": leaves["x"].grad}
            expected = {"out": wanted["out"][:, rows][..., heads], "dx": wanted["dx"][:, mine]}
            for name, which in (("q", heads), ("k", kv), ("v", kv)):
                for kind in "wb":
                    grad = leaves[f"{kind}{name}"].grad
                    dist.all_reduce(grad, group=sequence[part])
                    got[f"d{kind}{name}"], expected[f"d{kind}{name}"] = grad, wanted[f"d{kind}{name}"][which]
            worst[batch, U] = max(relative_errors(got, expected).values())
    return worst


def test_rows_of_x_split_over_a_second_group():
    for worst in on_pool(4, _errors_of_split_rows):
        assert len(worst) == 4 and max(worst.values()) < 1e-10, worst
