"""The engine against single-process attention, float64: output and every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.engine import per_head_norm, projections_of, relative_errors, run_sharded
from tests.pairwise import pairwise
from tests.ranks import on_pool
from tests.reference import make_layer, reference
from upipe_integrations import (
    HeadFunction,
    Projection,
    Schedule,
    Staging,
    UPipeConfig,
    Weights,
    upipe_attention,
)
from upipe_integrations.kernels import KERNELS

HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (16, 4), (32, 8)]
VARIANTS = {
    "plain": {},
    "batch": {"batch": 3},
    "bias": {"bias": True, "batch": 3},
    "norm": {"norm": True},
    "bias and norm": {"bias": True, "norm": True, "batch": 3},
    "full": {"causal": False, "batch": 3},
    "no rotary": {"rotary": False},
}


def _chunk_heads(case: dict) -> int:
    return case["heads"][0] if case["stage"] == "all heads" else case["stage"] * case["ranks"]


CASES = pairwise(
    {
        "ranks": (2, 4),
        "heads": HEADS,
        "stage": (1, 2, 3, "all heads"),
        "variant": tuple(VARIANTS),
        "kernel": ("math", "torch-cpu-flash"),
    },
    lambda case: _chunk_heads(case) <= case["heads"][0],
)
"""`stage`: query heads per rank."""


def _errors(cases: list[dict]) -> dict[tuple, float]:
    worst = {}
    for case in cases:
        layer = make_layer(*case["heads"], **VARIANTS[case["variant"]])
        got = run_sharded(layer, _chunk_heads(case), dist.group.WORLD, case["kernel"])
        worst[tuple(case.values())] = max(relative_errors(got, reference(layer)).values())
    return worst


@pytest.mark.parametrize("ranks", [2, 4])
def test_output_and_every_gradient_equal_the_single_process(ranks):
    cases = [case for case in CASES if case["ranks"] == ranks]
    for worst in on_pool(ranks, _errors, cases):
        assert len(worst) == len(cases) >= len(VARIANTS)
        assert {case: error for case, error in worst.items() if error > 1e-10} == {}


@pytest.mark.parametrize("chunk_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_group_of_one_rank_works(chunk_heads, variant):
    layer = make_layer(8, 4, **VARIANTS[variant])
    errors = relative_errors(run_sharded(layer, chunk_heads, None), reference(layer))
    assert max(errors.values()) < 1e-10


def _two_groups_of_two() -> dict[str, float]:
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    layer = make_layer(8, 2, bias=True, seed=dist.get_rank() // 2)
    return relative_errors(run_sharded(layer, 4, pair), reference(layer))


def test_group_ranks_are_not_global_ranks():
    """Public fault 6: ranks 2 and 3 form a group of their own, with other data."""
    for errors in on_pool(4, _two_groups_of_two):
        assert max(errors.values()) < 1e-10


def _batch_rows_see_only_themselves() -> bool:
    layer = make_layer(8, 4, batch=2)
    alone = run_sharded(layer, 4, dist.group.WORLD)["out"][:1]
    layer.x[1] = 1e3
    return bool(torch.equal(run_sharded(layer, 4, dist.group.WORLD)["out"][:1], alone))


def _checkpointed(use_reentrant: bool) -> float:
    """Gradients under activation checkpointing, with a gradient that is not contiguous."""
    layer = make_layer(8, 4, bias=True, norm=True, batch=2)
    rank, C = dist.get_rank(), dist.get_world_size()
    L = layer.x.shape[1] // C
    rows = slice(rank * L, (rank + 1) * L)
    schedule = UPipeConfig(4).schedule(heads=8, kv_heads=4, ranks=C)
    grads = []
    for checkpoint in (False, True):
        leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
        leaves["x"] = layer.x[:, rows].clone().requires_grad_()

        def run(x, leaves=leaves):
            projections = projections_of(layer, leaves, rows)
            out = upipe_attention(x, projections, Staging(schedule, dist.group.WORLD, KERNELS["math"]))
            return out.sin()

        if checkpoint:
            out = torch.utils.checkpoint.checkpoint(run, leaves["x"], use_reentrant=use_reentrant)
        else:
            out = run(leaves["x"])
        strided = layer.dout[:, rows].transpose(1, 2).contiguous().transpose(1, 2)
        assert not strided.is_contiguous()
        out.backward(strided)
        grads.append({name: t.grad for name, t in leaves.items()})
    return max(relative_errors(grads[1], grads[0]).values())


def _several_forwards_before_a_backward() -> float:
    layers = [make_layer(8, 4, seed=s) for s in (1, 2)]
    C = dist.get_world_size()
    L = 16 // C
    rows = slice(dist.get_rank() * L, (dist.get_rank() + 1) * L)
    schedule = UPipeConfig(C).schedule(heads=8, kv_heads=4, ranks=C)
    worst = 0.0
    outs = []
    for layer in layers:
        leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
        projections = projections_of(layer, leaves, rows)
        x = leaves["x"][:, rows]
        outs.append(
            (layer, leaves, upipe_attention(x, projections, Staging(schedule, dist.group.WORLD, KERNELS["math"])))
        )
    for layer, leaves, out in reversed(outs):
        out.backward(layer.dout[:, rows])
        for t in leaves.values():
            dist.all_reduce(t.grad)
        wanted = reference(layer)
        errors = relative_errors(
            {f"d{name}": t.grad for name, t in leaves.items()}, {k: v for k, v in wanted.items() if k != "out"}
        )
        worst = max(worst, *errors.values())
    return worst


def _frozen_weights_get_no_gradient() -> bool:
    layer = make_layer(8, 4, bias=True)
    leaves = {name: t.clone() for name, t in layer.leaves().items()}
    L = 16 // dist.get_world_size()
    rows = slice(dist.get_rank() * L, (dist.get_rank() + 1) * L)
    x = leaves["x"][:, rows].clone().requires_grad_()
    leaves["wv"].requires_grad_()
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=dist.get_world_size(), chunk_heads=4)
    out = upipe_attention(x, projections_of(layer, leaves, rows), Staging(schedule, dist.group.WORLD, KERNELS["math"]))
    out.backward(layer.dout[:, rows])
    dist.all_reduce(leaves["wv"].grad)
    right = torch.allclose(leaves["wv"].grad, reference(layer)["dwv"], rtol=1e-10)
    return right and leaves["wq"].grad is None and leaves["bv"].grad is None


def _ways_of_use() -> dict[str, object]:
    return {
        "rows": _batch_rows_see_only_themselves(),
        "reentrant": _checkpointed(True),
        "non-reentrant": _checkpointed(False),
        "several": _several_forwards_before_a_backward(),
        "frozen": _frozen_weights_get_no_gradient(),
    }


def test_ways_of_use():
    """Public faults 5, 17, 18: batch rows, both checkpointing kinds, strided gradients, several forwards."""
    for results in on_pool(2, _ways_of_use):
        assert results["rows"] and results["frozen"]
        assert results["reentrant"] < 1e-12
        assert results["non-reentrant"] < 1e-12
        assert results["several"] < 1e-10


def test_a_function_of_heads_may_rotate_too():
    """A caller's own rotary (any differentiable function) equals the built-in one."""
    layer = make_layer(8, 4)

    def rotate(heads, cos, sin):
        half = heads.shape[-1] // 2
        turned = torch.cat((-heads[..., half:], heads[..., :half]), -1)
        return heads * cos[:, :, None] + turned * sin[:, :, None]

    leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
    built_in = projections_of(layer, leaves, slice(None))
    function = HeadFunction(rotate, (layer.cos, layer.sin))
    own = type(built_in)(
        Projection(Weights(leaves["wq"]), 8, function=function),
        Projection(Weights(leaves["wk"]), 8, function=function),
        built_in.v,
    )
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)
    upipe_attention(leaves["x"], own, Staging(schedule, None, KERNELS["math"])).backward(layer.dout)
    wanted = reference(layer)
    for name, t in leaves.items():
        torch.testing.assert_close(t.grad, wanted[f"d{name}"], rtol=1e-10, atol=1e-12)


def test_partial_rotary_leaves_the_rest_of_a_head():
    layer = make_layer(8, 4, norm=True)
    quarter = make_layer(8, 4, head_dim=4)
    layer.cos, layer.sin = quarter.cos, quarter.sin
    got = run_sharded(layer, 2, None)

    def attend_with_part(layer):
        from tests import reference as r

        full = r.turn
        r.turn = lambda t, cos, sin: torch.cat([full(t[..., :4], cos, sin), t[..., 4:]], -1)
        try:
            return r.reference(layer)
        finally:
            r.turn = full

    assert max(relative_errors(got, attend_with_part(layer)).values()) < 1e-10


def test_autocast_computes_in_its_dtype_and_returns_full_precision_gradients():
    layer = make_layer(8, 4, norm=True, bias=True, dtype=torch.float32, seq=64)
    leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = upipe_attention(
            leaves["x"], projections_of(layer, leaves, slice(None)), Staging(schedule, None, KERNELS["torch-cpu-flash"])
        )
    assert out.dtype == torch.bfloat16
    out.backward(layer.dout.bfloat16())
    wanted = reference(layer)
    for name, t in leaves.items():
        assert t.grad.dtype == torch.float32
        # bf16 keeps 8 bits; a chain of a projection, scores and a softmax loses about two more.
        error = (t.grad - wanted[f"d{name}"]).norm() / wanted[f"d{name}"].norm()
        assert error < 4 * 2**-8, name


def test_bf16_errs_no_more_than_plain_bf16_attention():
    """Against float64, beside the same layer computed plainly in bf16 by PyTorch (autograd, SDPA)."""
    exact = make_layer(16, 4, head_dim=32, size=128, seq=256)
    wanted = reference(exact)
    layer = make_layer(16, 4, head_dim=32, size=128, seq=256, dtype=torch.bfloat16)
    got = run_sharded(layer, 4, None, "torch-cpu-flash")

    leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
    q, k, v = (
        torch.nn.functional.linear(leaves["x"], leaves[w]).unflatten(2, (-1, 32)).transpose(1, 2)
        for w in ("wq", "wk", "wv")
    )
    cos, sin = layer.cos[:, None], layer.sin[:, None]
    q, k = (t * cos + torch.cat((-t[..., 16:], t[..., :16]), -1) * sin for t in (q, k))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out = out.transpose(1, 2).flatten(2)
    out.backward(layer.dout)
    plain = {"out": out.detach(), **{f"d{name}": t.grad for name, t in leaves.items()}}

    for name, right in wanted.items():
        ours, theirs = (float((t[name].double() - right).norm() / right.norm()) for t in (got, plain))
        # dx is summed over 4 stages in bf16 and dK over 4 query heads: one rounding per sum more.
        assert ours < 1.25 * theirs, name


def test_double_backward_is_refused():
    layer = make_layer(8, 4)
    leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)
    out = upipe_attention(
        leaves["x"], projections_of(layer, leaves, slice(None)), Staging(schedule, None, KERNELS["math"])
    )
    (dx,) = torch.autograd.grad(out.square().sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(schedule=Schedule.build(heads=8, kv_heads=4, ranks=2, chunk_heads=2)), r"is for 2 ranks"),
        (lambda a: a.update(x=a["x"][0]), r"x of shape"),
        (lambda a: a.update(x=a["x"].long()), r"must be floating point"),
        (lambda a: a.update(schedule=Schedule.build(heads=4, kv_heads=4, ranks=1, chunk_heads=2)), r"q weight of"),
        (lambda a: a.update(x=a["x"][:, :8]), r"q rotary tables of shapes"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    layer = make_layer(8, 4)
    arguments = {"x": layer.x, "schedule": Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)}
    change(arguments)
    projections = projections_of(layer, layer.leaves(), slice(None))
    with pytest.raises(ValueError, match=message):
        upipe_attention(arguments["x"], projections, Staging(arguments["schedule"], None, KERNELS["math"]))


def test_per_head_norm_is_what_the_reference_does():
    """The helper used above is itself checked: rms_norm by torch against the written-out formula."""
    t, gain = torch.randn(2, 3, 4, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    expected = t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain
    torch.testing.assert_close(per_head_norm(t, gain), expected)
