"""Memory modes: the same output and gradients in all of them, with every feature, alone and checkpointed."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.engine import FEATURES, LAYOUTS, UNSERVED, projections_of, relative_errors, run_sharded
from tests.pairwise import pairwise
from tests.ranks import on_pool, run_in_process
from tests.reference import make_layer, reference
from upipe_integrations import (
    AttentionProjections,
    Dropout,
    HeadFunction,
    Layout,
    Mode,
    OutputProjection,
    Projection,
    Schedule,
    Staging,
    Weights,
    upipe_attention,
)
from upipe_integrations.kernels import KERNELS, MathKernel
from upipe_integrations.planning.measure import fake_ranks

MODES = {
    "keep_heads": Mode.named("keep_heads"),
    "keep": Mode.named("keep"),
    "recompute": Mode.named("recompute"),
    "fused": Mode.named("fused"),
    "fused, exact sums": Mode.named("fused", accumulate="float32"),
    "blocks": Mode.named("blocks", query_blocks=2),
    "keep, overlap": Mode(overlap=True),
    "keep_heads, overlap": Mode.named("keep_heads", overlap=True),
    "blocks, overlap": Mode.named("blocks", query_blocks=2, overlap=True),
    "fused, overlap": Mode.named("fused", overlap=True),
    "keep, overlap both": Mode(overlap="both"),
    "fused, overlap both": Mode.named("fused", overlap="both"),
    "blocks, overlap both": Mode.named("blocks", query_blocks=2, overlap="both"),
}
NOT_IN_BLOCKS = {"other value size", "smaller value size"}


CASES = pairwise(
    {
        "ranks": (2, 3, 4),
        "feature": ("none", *FEATURES),
        "mode": tuple(MODES),
        "kernel": ("math", "torch-cpu-flash", "math, alone"),
        "heads": ((8, 2), (7, 1)),
        "layout": tuple(LAYOUTS),
        "outside": (False, True),
    },
    lambda case: (
        case["feature"] not in UNSERVED.get(case["kernel"], ())
        and not ("blocks" in case["mode"] and case["feature"] in NOT_IN_BLOCKS)
        and (MODES[case["mode"]].keeps_output or not case["outside"])
    ),
)


class _Alone(MathKernel):
    """A kernel that would copy what shares a buffer, which it is not given."""

    copies_slices = True

    def backward(self, dout, q, k, v, out, lse, spec):
        assert all(t.untyped_storage().nbytes() == t.numel() * t.itemsize for t in (dout, out))
        return super().backward(dout, q, k, v, out, lse, spec)


def _errors_of_features(cases: list[dict]) -> dict[tuple, float]:
    C = dist.get_world_size()
    worst = {}
    for case in cases:
        layer = make_layer(*case["heads"], seq=24, batch=3, output=True, **FEATURES.get(case["feature"], {}))
        got = run_sharded(
            layer,
            C,
            dist.group.WORLD,
            _Alone() if case["kernel"] == "math, alone" else case["kernel"],
            layout=LAYOUTS[case["layout"]],
            mode=MODES[case["mode"]],
            outside=case["outside"],
        )
        worst[tuple(case.values())] = max(relative_errors(got, reference(layer)).values())
    return worst


def _deterministic() -> dict[str, tuple[float, bool]]:
    """(error, whether a second run gives the same bits) where new memory is filled with NaN."""
    layer = make_layer(7, 1, seq=24, batch=2, output=True, sinks=True)
    right, found = reference(layer), {}
    torch.use_deterministic_algorithms(True)
    try:
        for name, mode in MODES.items():
            first, second = (
                run_sharded(layer, 4, dist.group.WORLD, "torch-cpu-flash", layout=Layout.zigzag(), mode=mode)
                for _ in range(2)
            )
            found[name] = (
                max(relative_errors(first, right).values()),
                all(torch.equal(first[key], second[key]) for key in first),
            )
    finally:
        torch.use_deterministic_algorithms(False)
    return found


def test_with_deterministic_algorithms_every_mode_reads_only_what_it_wrote():
    for found in on_pool(2, _deterministic):
        assert found.keys() == MODES.keys()
        assert {name: error for name, (error, same) in found.items() if error > 1e-10 or not same} == {}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_mode_with_every_feature(ranks):
    cases = [case for case in CASES if case["ranks"] == ranks]
    assert {case["mode"] for case in cases} == set(MODES)
    assert {case["feature"] for case in cases} == {"none", *FEATURES}
    for worst in on_pool(ranks, _errors_of_features, cases):
        assert len(worst) == len(cases) >= 1 + len(FEATURES)
        assert {case: error for case, error in worst.items() if error > 1e-10} == {}


def test_every_mode_meets_every_feature_that_it_serves():
    met = {(case["mode"], case["feature"]) for case in CASES}
    in_blocks = sum("blocks" in mode for mode in MODES)
    assert len(met) == len(MODES) * (1 + len(FEATURES)) - in_blocks * len(NOT_IN_BLOCKS)


# ---------------------------------------------------------------- overlap


class _Exchanges:
    """What is sent, waited for and attended, in order, on one rank of a group without peers."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._sent = 0

    def all_to_all_single(self, received, send, group=None, async_op=False):
        received.copy_(send)
        self._sent += 1
        number, order = self._sent, self.order
        order.append(f"send {number}")
        if not async_op:
            return None

        class Work:
            def wait(self) -> None:
                order.append(f"wait {number}")

        return Work()


def _order(overlap: bool | str, memory: str) -> list[str]:
    exchanges = _Exchanges()

    class Noted(MathKernel):
        def forward(self, q, k, v, spec):
            exchanges.order.append("attend")
            return super().forward(q, k, v, spec)

        def backward(self, *tensors):
            exchanges.order.append("differentiate")
            return super().backward(*tensors)

    with fake_ranks(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", exchanges.all_to_all_single)
        layer = make_layer(8, 2, seq=8, output=True)
        run_sharded(layer, 4, dist.group.WORLD, Noted(), mode=Mode.named(memory, overlap=overlap))
    return exchanges.order


def test_what_travels_while_what_is_attended():
    """Two stages; K and V of both heads travel with the first."""
    kv_q_1, forward = ["send 1", "send 2"], {}
    for overlap in (False, True, "both"):
        order = run_in_process(_order, overlap, "keep")
        forward[overlap] = order[: [i for i, what in enumerate(order) if what == "attend"][1] + 1]
    assert forward[False] == [*kv_q_1, "attend", "send 3", "send 4", "attend"]
    assert forward[True] == [*kv_q_1, "wait 1", "wait 2", "send 3", "attend", "send 4", "wait 3", "attend"]
    # What the first stage attended, 4, is on its way while the second attends.
    assert forward["both"] == [*kv_q_1, "wait 1", "wait 2", "send 3", "attend", "send 4", "wait 3", "attend"]
    both = run_in_process(_order, "both", "keep")
    assert both[len(forward["both"]) :][0] == "wait 4"
    for memory in ("keep", "fused"):
        order = run_in_process(_order, "both", memory)
        first, second = (i for i, what in enumerate(order) if what == "differentiate")
        waited = {what.split()[1] for what in order[:second] if what.startswith("wait")}
        sent = {what.split()[1] for what in order[first:second] if what.startswith("send")}
        assert sent and not sent & waited, "the first stage's gradients travel while the second is differentiated"


@pytest.mark.parametrize("mode", ["keep_heads", "recompute", "fused"])
def test_dropout_is_the_same_when_attention_is_run_again(mode):
    layer = make_layer(8, 4, seq=24, output=True)
    wanted = run_sharded(layer, 2, None, dropout=Dropout(0.3, seed=5))
    got = run_sharded(layer, 2, None, dropout=Dropout(0.3, seed=5), mode=Mode.named(mode))
    assert max(relative_errors(got, wanted).values()) < 1e-12


def _checkpointed(mode: str, use_reentrant: bool) -> float:
    """A layer under activation checkpointing, two forwards before the first backward, strided gradients."""
    rank, C = dist.get_rank(), dist.get_world_size()
    grads = []
    for checkpoint in (False, True):
        runs = []
        for seed in (1, 2):
            layer = make_layer(8, 4, bias=True, norm=True, batch=2, output=True, sinks=True, seed=seed)
            L = layer.x.shape[1] // C
            rows = slice(rank * L, (rank + 1) * L)
            leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
            leaves["x"] = layer.x[:, rows].clone().requires_grad_()
            schedule = Schedule.build(heads=8, kv_heads=4, ranks=C, chunk_heads=C)

            def run(x, layer=layer, leaves=leaves, rows=rows, schedule=schedule):
                output = OutputProjection(leaves["wo"], leaves["bo"])
                return upipe_attention(
                    x,
                    projections_of(layer, leaves, rows),
                    Staging(schedule, dist.group.WORLD, KERNELS["math"], mode=Mode.named(mode)),
                    sinks=leaves["sinks"],
                    output=output,
                ).sin()

            if checkpoint:
                out = torch.utils.checkpoint.checkpoint(run, leaves["x"], use_reentrant=use_reentrant)
            else:
                out = run(leaves["x"])
            runs.append((layer, leaves, rows, out))
        for layer, _, rows, out in reversed(runs):
            out.backward(layer.dout[:, rows].transpose(1, 2).contiguous().transpose(1, 2))
        grads.append({f"{i}{name}": t.grad for i, (_, leaves, *_) in enumerate(runs) for name, t in leaves.items()})
    return max(relative_errors(grads[1], grads[0]).values())


def _both_kinds() -> dict[tuple, float]:
    return {(mode, kind): _checkpointed(mode, kind) for mode in ("fused",) for kind in (True, False)}


def test_fused_layers_under_checkpointing():
    """Public faults 17, 18."""
    for errors in on_pool(2, _both_kinds):
        assert max(errors.values()) < 1e-12


def _collectives() -> dict[str, list[int]]:
    """Elements sent by each exchange of a forward and backward, in order."""
    sent: dict[str, list[int]] = {}
    original = dist.all_to_all_single

    def counted(received, send, *args, **kwargs):
        sent[name].append(send.numel())
        return original(received, send, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        for name, mode in MODES.items():
            sent[name] = []
            run_sharded(make_layer(8, 4, output=True), 4, dist.group.WORLD, mode=mode)
    finally:
        dist.all_to_all_single = original
    return sent


def test_ranks_exchange_the_same_in_the_same_order():
    """Public fault 30; and K with V, q with dout and out, go in one exchange each."""
    by_rank = on_pool(2, _collectives)
    assert by_rank[0] == by_rank[1]
    head = 8 * 8  # one head of one rank: L * D for 16 rows on 2 ranks
    q, kv, back = 4 * head, 2 * 2 * head, 2 * head
    forward = [kv, q, q] * 2
    assert by_rank[0]["keep"] == forward + [kv, 3 * q, q, back, back] * 2
    assert by_rank[0]["recompute"] == forward + [kv, 2 * q, q, back, back] * 2
    assert by_rank[0]["fused"] == forward + [kv, 2 * q, q, q, back, back] * 2
    # What was kept as it was received is not sent again: as many bytes as Ulysses, and the output.
    assert by_rank[0]["keep_heads"] == forward + [2 * q, q, back, back] * 2
    # Looking ahead changes the order, on every rank alike, and nothing else.
    for name in ("keep", "fused", "blocks"):
        ahead, at_once = by_rank[0][f"{name}, overlap"], by_rank[0][name]
        assert sorted(ahead) == sorted(at_once) and ahead != at_once
    # A block of half the rows: q and dout go, and dq and the output come back.
    assert by_rank[0]["blocks"] == forward + [kv, *(q, q) * 2, back, back] * 2


def test_kept_heads_are_bit_by_bit_those_that_keep_makes_again():
    layer = make_layer(8, 2, batch=2, norm=True, bias=True, dtype=torch.bfloat16)
    kept, again = (
        run_sharded(layer, 2, None, "torch-cpu-flash", mode=Mode.named(mode)) for mode in ("keep_heads", "keep")
    )
    assert all(torch.equal(kept[name], t) for name, t in again.items())


def test_kept_heads_are_freed_stage_by_stage_unless_the_graph_is_retained():
    """By the number of tensors of a stage's size that a kernel finds alive in backward."""
    layer = make_layer(8, 4)
    leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)
    received: list[weakref.ref] = []
    alive: list[int] = []

    class Watching(MathKernel):
        def forward(self, q, k, v, spec):
            received.extend(weakref.ref(t.untyped_storage()) for t in (q, k))  # v is in k's buffer
            return super().forward(q, k, v, spec)

        def backward(self, *args):
            alive.append(sum(t() is not None for t in received))
            return super().backward(*args)

    for operator in (False, True):
        mode = Mode.named("keep_heads", operator=operator)
        out = upipe_attention(
            leaves["x"], projections_of(layer, leaves, slice(None)), Staging(schedule, None, Watching(), mode=mode)
        )
        for retain_graph, expected in ((True, [8, 8, 8, 8]), (False, [8, 6, 4, 2])):
            alive.clear()
            out.backward(layer.dout, retain_graph=retain_graph)
            assert alive == expected
        received.clear()
    for name, grad in reference(layer).items():  # four backwards of one layer
        if name != "out":
            torch.testing.assert_close(leaves[name[1:]].grad, 4 * grad, rtol=1e-10, atol=1e-12)


def test_frozen_weights_get_no_gradient_and_send_no_output():
    layer = make_layer(8, 4, output=True, bias=True)
    leaves = {name: t.clone() for name, t in layer.leaves().items()}
    leaves["x"].requires_grad_()
    leaves["bo"].requires_grad_()
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)
    out = upipe_attention(
        leaves["x"],
        projections_of(layer, leaves, slice(None)),
        Staging(schedule, None, KERNELS["math"], mode=Mode.named("fused")),
        output=OutputProjection(leaves["wo"], leaves["bo"]),
    )
    out.backward(layer.dout)
    wanted = reference(layer)
    torch.testing.assert_close(leaves["x"].grad, wanted["dx"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(leaves["bo"].grad, wanted["dbo"], rtol=1e-10, atol=1e-12)
    assert leaves["wo"].grad is None and leaves["wq"].grad is None


def test_exact_sums_are_more_exact_in_bf16():
    """dx over 16 stages and y over 4: summed in float32 they err less; y over more stages is by default."""
    layer = make_layer(16, 4, head_dim=32, size=128, seq=256, output=True, dtype=torch.bfloat16)
    exact = dataclasses.replace(
        layer, **{name: t.double() for name, t in vars(layer).items() if isinstance(t, torch.Tensor)}
    )
    wanted = reference(exact)  # from the rounded inputs, so that only the engine's own errors are left
    errors = {}
    for chunk_heads in (1, 4):
        for accumulate in ("auto", "float32"):
            mode = Mode.named("fused", accumulate=accumulate)
            got = run_sharded(layer, chunk_heads, None, "torch-cpu-flash", mode=mode)
            errors[16 // chunk_heads, accumulate] = {
                name: float((got[name].double() - t).norm() / t.norm()) for name, t in wanted.items()
            }
    assert errors[16, "float32"]["dx"] < 0.95 * errors[16, "auto"]["dx"]
    assert errors[16, "float32"]["out"] == errors[16, "auto"]["out"]
    assert errors[4, "float32"]["out"] < 0.97 * errors[4, "auto"]["out"]
    for stages in (4, 16):
        for name, error in errors[stages, "float32"].items():
            assert error < 1.02 * errors[stages, "auto"][name], (stages, name)


def test_sums_over_stages_and_blocks_lose_nothing_to_one_stage_in_bf16():
    """dK and dV of a KV head that 16 stages share, and weight gradients in blocks: by default as in one stage."""
    layer = make_layer(16, 1, head_dim=32, size=128, seq=256, output=True, dtype=torch.bfloat16)
    exact = dataclasses.replace(
        layer, **{name: t.double() for name, t in vars(layer).items() if isinstance(t, torch.Tensor)}
    )
    wanted = reference(exact)
    errors = {}
    for chunk_heads, mode in (
        (16, Mode.named("fused")),
        (1, Mode.named("fused")),
        (1, Mode.named("blocks", query_blocks=8)),
    ):
        got = run_sharded(layer, chunk_heads, None, "math", mode=mode)
        errors[chunk_heads, mode.memory] = {
            name: float((got[name].double() - t).norm() / t.norm()) for name, t in wanted.items()
        }
    for case in ((1, "fused"), (1, "blocks")):
        for name in ("dwk", "dwv"):
            assert errors[case][name] < 1.1 * errors[16, "fused"][name], (case, name)
        for name in ("dwq", "dwo"):
            assert errors[case][name] < 1.01 * errors[16, "fused"][name], (case, name)


@pytest.mark.parametrize(
    ("mode", "output", "message"),
    [
        ("fused", False, r"memory mode 'fused' without an output projection: .*Pass output="),
        ("fused", "narrow", r"output weight of shape \(28, 60\): must be \[output size, 64\], 8 heads of 8"),
    ],
)
def test_modes_and_outputs_that_do_not_fit_are_refused(mode, output, message):
    layer = make_layer(8, 4, output=True)
    weight = layer.wo[:, :60] if output == "narrow" else layer.wo
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)
    projections = projections_of(layer, layer.leaves(), slice(None))
    with pytest.raises(ValueError, match=message):
        upipe_attention(
            layer.x,
            projections,
            Staging(schedule, None, KERNELS["math"], mode=Mode.named(mode)),
            output=OutputProjection(weight) if output else None,
        )


BLOCK_CASES = pairwise(
    {
        "ranks": (2, 3),
        "blocks": (2, 3, 4, 6, 12),
        "layout": tuple(LAYOUTS),
        "heads": ((8, 4, "C"), (8, 1, "2C"), (6, 2, 6), (7, 7, "C")),
        "kernel": ("math", "torch-cpu-flash"),
    },
    lambda case: case["layout"] == "contiguous" or case["blocks"] in (2, 4),
)
"""`heads`: query heads, KV heads, and query heads per stage, some by the number C of ranks."""


def _errors_of_blocks(cases: list[dict]) -> dict[tuple, float]:
    C = dist.get_world_size()
    worst = {}
    for case in cases:
        heads, kv_heads, stage = case["heads"]
        layer = make_layer(heads, kv_heads, seq=72, batch=2, bias=True, norm=True, sinks=True, output=True)
        chunk_heads = {"C": C, "2C": 2 * C}.get(stage, stage)
        mode, layout = Mode.named("blocks", query_blocks=case["blocks"]), LAYOUTS[case["layout"]]
        got = run_sharded(layer, chunk_heads, dist.group.WORLD, case["kernel"], layout=layout, mode=mode)
        worst[tuple(case.values())] = max(relative_errors(got, reference(layer)).values())
    return worst


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_blocks(ranks):
    cases = [case for case in BLOCK_CASES if case["ranks"] == ranks]
    assert {case["blocks"] for case in cases} == {2, 3, 4, 6, 12}
    for worst in on_pool(ranks, _errors_of_blocks, cases):
        assert len(worst) == len(cases) >= 5
        assert {case: error for case, error in worst.items() if error > 1e-10} == {}


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_blocks_on_a_group_of_one_rank(blocks):
    layer = make_layer(8, 2, seq=24, output=True, documents=((0, 7, 24),), window=5)
    mode = Mode.named("blocks", query_blocks=blocks)
    got = run_sharded(layer, 2, None, "torch-cpu-flash", mode=mode)
    assert max(relative_errors(got, reference(layer)).values()) < 1e-10


def test_rows_of_a_function_are_cut_in_blocks():
    """A caller's own rotary, whose tables have a row per token."""
    layer = make_layer(8, 4, seq=24, output=True)

    def rotate(heads, cos, sin):
        half = heads.shape[-1] // 2
        return heads * cos[:, :, None] + torch.cat((-heads[..., half:], heads[..., :half]), -1) * sin[:, :, None]

    leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
    function = HeadFunction(rotate, (layer.cos, layer.sin), by_row=(0, 1))
    projections = AttentionProjections(
        Projection(Weights(leaves["wq"]), 8, function=function),
        Projection(Weights(leaves["wk"]), 8, function=function),
        Projection(Weights(leaves["wv"]), 8),
    )
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)
    out = upipe_attention(
        leaves["x"],
        projections,
        Staging(schedule, None, KERNELS["math"], mode=Mode.named("blocks", query_blocks=4)),
        output=OutputProjection(leaves["wo"]),
    )
    out.backward(layer.dout)
    wanted = reference(layer)
    for name, t in leaves.items():
        torch.testing.assert_close(t.grad, wanted[f"d{name}"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "layout", "kernel", "message"),
    [
        ({"blocks": 5}, None, "math", r"query_blocks = 5: must divide the 24 rows of a rank\. Set it to a number"),
        (
            {"blocks": 3},
            Layout.zigzag(),
            "math",
            r"must divide the 24 rows of a rank and, in a zigzag",
        ),
        ({}, Layout.packed_zigzag((0, 8, 24)), "math", r"memory mode 'blocks' with a packed zigzag layout"),
        ({"value_dim": 4}, None, "math", r"'blocks' with value heads of another size is not supported"),
        (
            {"dropout": Dropout(0.1, 0)},
            None,
            "math",
            r"'blocks' with kernel 'math' and dropout: dropout can't be drawn",
        ),
        ({}, None, "torch-cudnn", r"'blocks' with kernel 'torch-cudnn': it can't attend blocks of rows"),
        (
            {"window": 4},
            None,
            "torch-cuda-flash",
            r"'torch-cuda-flash' and sliding window: it can't do sliding window in",
        ),
    ],
)
def test_what_blocks_can_not_do_is_refused(options, layout, kernel, message):
    options = dict(options)
    mode = Mode.named("blocks", query_blocks=options.pop("blocks", 2))
    dropout = options.pop("dropout", None)
    layer = make_layer(8, 4, seq=24, output=True, **options)
    with pytest.raises(ValueError, match=message):
        run_sharded(layer, 2, None, kernel, layout=layout, dropout=dropout, mode=mode)


# ---------------------------------------------------------------- head functions that know the head and the row


def _scaled(heads, by_head, by_row):
    return heads * by_head * by_row


def _by_head_and_row() -> dict[str, float]:
    """Factors per head and per row, both with gradients, against plain attention of one process."""
    C, rank, S, D, E = dist.get_world_size(), dist.get_rank(), 16, 4, 12
    errors = {}
    for heads, kv_heads, chunk_heads in ((8, 4, 4), (6, 3, 4), (8, 2, 8)):
        generator = torch.Generator().manual_seed(heads)
        sizes = {
            "x": (2, S, E),
            "q": (heads * D, E),
            "k": (kv_heads * D, E),
            "v": (kv_heads * D, E),
            "o": (E, heads * D),
        }
        sizes |= {"qh": (heads, D), "kh": (kv_heads, D), "qr": (2, S, 1, 1), "kr": (1, S, 1, 1), "dy": (2, S, E)}
        whole = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}

        def leaves(rows, whole=whole):
            by_row = {"x", "qr", "kr", "dy"}
            return {n: (t[:, rows] if n in by_row else t).clone().requires_grad_(n != "dy") for n, t in whole.items()}

        t = leaves(slice(None))
        q = _scaled((t["x"] @ t["q"].t()).unflatten(2, (heads, D)), t["qh"], t["qr"]).transpose(1, 2)
        k = _scaled((t["x"] @ t["k"].t()).unflatten(2, (kv_heads, D)), t["kh"], t["kr"]).transpose(1, 2)
        v = (t["x"] @ t["v"].t()).unflatten(2, (kv_heads, D)).transpose(1, 2)
        k, v = (s.repeat_interleave(heads // kv_heads, 1) for s in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        (out.transpose(1, 2).flatten(2) @ t["o"].t()).backward(t["dy"])
        wanted = {name: leaf.grad for name, leaf in t.items() if name != "dy"}
        for mode in (Mode.named("keep_heads"), Mode.named("fused"), Mode.named("blocks", query_blocks=2)):
            rows = slice(rank * S // C, (rank + 1) * S // C)
            mine = leaves(rows)
            functions = {n: HeadFunction(_scaled, (mine[f"{n}h"], mine[f"{n}r"]), (1,), (0,)) for n in "qk"}
            projections = AttentionProjections(
                Projection(Weights(mine["q"]), D, function=functions["q"]),
                Projection(Weights(mine["k"]), D, function=functions["k"]),
                Projection(Weights(mine["v"]), D),
            )
            y = upipe_attention(
                mine["x"],
                projections,
                Staging(
                    Schedule.build(heads=heads, kv_heads=kv_heads, ranks=C, chunk_heads=chunk_heads),
                    dist.group.WORLD,
                    KERNELS["math"],
                    mode=mode,
                ),
                output=OutputProjection(mine["o"]),
            )
            y.backward(mine["dy"])
            for name, grad in wanted.items():
                got = mine[name].grad
                if name in ("x", "qr", "kr"):
                    grad = grad[:, rows]
                else:
                    dist.all_reduce(got)
                error = float((got - grad).abs().max() / grad.abs().max())
                errors[f"{heads}/{kv_heads}, {mode.memory}, d{name}"] = error
    return errors


@pytest.mark.parametrize("world", [2, 4])
def test_head_functions_by_head_and_by_row(world):
    for errors in on_pool(world, _by_head_and_row):
        assert len(errors) == 3 * 3 * 9
        assert {case: error for case, error in errors.items() if error > 1e-10} == {}
