"""Attention as an operator, and selective checkpointing: what runs, what is sent, and that it is the same."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.engine import PRODUCTS_IN_PLACE, projections_of, relative_errors, run_sharded
from tests.ranks import on_pool
from tests.reference import make_layer, reference
from tests.ulysses import AllToAll, Attend
from upipe_integrations import Mode, OutputProjection, Schedule, Staging, upipe_attention
from upipe_integrations.engine.checkpoint import context_fn
from upipe_integrations.kernels import KERNELS, MathKernel
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.measure import LiveMemory


class CountingKernel(MathKernel):
    def __init__(self):
        self.forwards = self.backwards = 0

    def forward(self, *args):
        self.forwards += 1
        return super().forward(*args)

    def backward(self, *args):
        self.backwards += 1
        return super().backward(*args)


def _operator_errors() -> dict[str, float]:
    worst = {}
    for memory in MEMORY:
        layer = make_layer(8, 2, seq=24, batch=2, bias=True, norm=True, sinks=True, output=True)
        mode = Mode.named(memory, query_blocks=2, operator=True)
        got = run_sharded(layer, 2, dist.group.WORLD, mode=mode)
        worst[memory] = max(relative_errors(got, reference(layer)).values())
    plain = make_layer(8, 2, seq=24, rotary=False)
    got = run_sharded(plain, 2, dist.group.WORLD, mode=Mode(operator=True))
    worst["plain"] = max(relative_errors(got, reference(plain)).values())
    return worst


def test_the_operator_is_the_same_in_every_mode():
    for worst in on_pool(2, _operator_errors):
        assert max(worst.values()) < 1e-10, worst


def _ulysses(x, layer, leaves, rows):
    """A plain Ulysses on the same kernel, its exchanges by autograd."""
    D, projections = layer.head_dim, projections_of(layer, leaves, rows)

    def heads(p):
        t = torch.nn.functional.linear(x, p.weights.weight, p.weights.bias).unflatten(2, (-1, D))
        if p.rotary is not None:
            cos, sin = p.rotary.cos[:, :, None], p.rotary.sin[:, :, None]
            t = t * cos + torch.cat((-t[..., D // 2 :], t[..., : D // 2]), -1) * sin
        return AllToAll.apply(t, True).transpose(1, 2)

    out = Attend.apply(heads(projections.q), heads(projections.k), heads(projections.v), layer.kernel)
    return torch.nn.functional.linear(AllToAll.apply(out.transpose(1, 2), False).flatten(2), leaves["wo"])


METHODS = {
    "ulysses": (None, False, False),
    "checkpointed ulysses": (None, True, False),
    "keep_heads": ("keep_heads", False, False),
    "keep": ("keep", False, False),
    "fused": ("fused", False, False),
    "checkpointed": ("fused", True, False),
    "selective": ("fused", True, True),
    "selective, keep_heads": ("keep_heads", True, True),
}
"""Memory mode (None: Ulysses), whether the layer is checkpointed, and whether that keeps attention's results."""


def _layer_by(memory: str | None, checkpointed: bool, selective: bool) -> dict[str, object]:
    """Gradients, kernel calls, elements sent and flops of a layer: a norm before attention, and something after it."""
    rank, C = dist.get_rank(), dist.get_world_size()
    layer = make_layer(8, 8, seq=24, batch=1, output=True)
    layer.kernel = CountingKernel()
    rows = slice(rank * 24 // C, (rank + 1) * 24 // C)
    leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
    x = layer.x[:, rows].clone().requires_grad_()
    schedule = Schedule.build(heads=8, kv_heads=8, ranks=C, chunk_heads=2 * C)

    def run(x):
        h = torch.nn.functional.layer_norm(x, x.shape[-1:])
        if memory is None:
            return _ulysses(h, layer, leaves, rows).sin()
        mode = Mode.named(memory, operator=selective)
        projections = projections_of(layer, leaves, rows)
        output = OutputProjection(leaves["wo"])
        return upipe_attention(
            h, projections, Staging(schedule, dist.group.WORLD, layer.kernel, mode=mode), output=output
        ).sin()

    sent = 0
    original = dist.all_to_all_single

    def counted(received, send, *args, **kwargs):
        nonlocal sent
        sent += send.numel()
        return original(received, send, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        extra = {"context_fn": context_fn} if selective else {}
        counter = FlopCounterMode(display=False, custom_mapping=PRODUCTS_IN_PLACE)
        with contextlib.nullcontext() if selective else counter as flops:
            out = checkpoint(run, x, use_reentrant=False, **extra) if checkpointed else run(x)
            out.backward(layer.dout[:, rows])
    finally:
        dist.all_to_all_single = original
    return {
        "grads": {"x": x.grad, **{name: t.grad for name, t in leaves.items() if name != "x"}},
        "calls": (layer.kernel.forwards, layer.kernel.backwards),
        "sent": sent,
        "flops": flops.get_total_flops() if flops else None,
    }


def _all_methods() -> dict[str, dict]:
    return {name: _layer_by(*how) for name, how in METHODS.items()}


def test_what_each_method_runs_and_sends():
    for results in on_pool(2, _all_methods):
        right = results["ulysses"]["grads"]
        for name, result in results.items():
            assert max(relative_errors(result["grads"], right).values()) < 1e-12, name
        stages = 2
        calls = {name: result["calls"] for name, result in results.items()}
        assert calls["ulysses"] == (1, 1) and calls["checkpointed ulysses"] == (2, 1)
        for name in ("keep_heads", "keep", "selective, keep_heads"):
            assert calls[name] == (stages, stages)
        for name in ("fused", "selective"):  # attends again in backward
            assert calls[name] == (2 * stages, stages)
        assert calls["checkpointed"] == (3 * stages, stages)
        # Ulysses: q, k, v, out forward, again under a checkpoint, and their gradients backward.
        one = results["ulysses"]["sent"] // 8
        sent = {name: result["sent"] // one for name, result in results.items()}
        assert sent == {
            "ulysses": 8,
            "checkpointed ulysses": 12,
            "keep_heads": 9,  # out again
            "keep": 12,  # and q, k, v
            "fused": 12,
            "checkpointed": 16,
            "selective": 12,  # the result is kept, so the forward is not run again
            "selective, keep_heads": 9,
        }
        # Products and attention are Ulysses's where heads are kept; else q, k and v are projected once more.
        flops = {name: results[name]["flops"] for name in ("ulysses", "keep_heads", "keep")}
        projected_again = 3 * 2 * (24 // 2) * right["wq"].numel()
        assert flops["keep_heads"] == flops["ulysses"]
        assert flops["keep"] == flops["ulysses"] + projected_again


@pytest.mark.parametrize("memory", MEMORY)
def test_what_selective_checkpointing_keeps(memory):
    """What was attended and lse, and received heads; or y, where neither is kept; not y as well."""
    layer, mode = make_layer(8, 4, seq=64, output=True), Mode.named(memory, query_blocks=2, operator=True)
    leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)
    output = OutputProjection(leaves["wo"])

    def run(x):
        projections = projections_of(layer, leaves, slice(None))
        return upipe_attention(x, projections, Staging(schedule, None, KERNELS["math"], mode=mode), output=output).sin()

    with LiveMemory() as live:
        for _ in range(2):  # the inputs count from the first time
            before = live.current
            out = checkpoint(run, leaves["x"], use_reentrant=False, context_fn=context_fn)
            kept = live.current - before - 8 * out.numel()
            del out
    rows, D = 64, layer.head_dim
    attended, lse, heads = rows * 8 * D, rows * 8, rows * (8 + 2 * 4) * D
    expected = {"keep_heads": attended + lse + heads, "keep": attended + lse, "recompute": attended}
    assert kept == 8 * expected.get(memory, rows * leaves["wo"].shape[0])


def test_the_operator_refuses_double_backward():
    layer = make_layer(8, 4)
    leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)
    projections = projections_of(layer, leaves, slice(None))
    out = upipe_attention(leaves["x"], projections, Staging(schedule, None, MathKernel(), mode=Mode(operator=True)))
    (dx,) = torch.autograd.grad(out.square().sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


def test_calls_are_forgotten_with_their_last_use():
    import gc

    from upipe_integrations.engine.operators import _NUMBERED

    layer = make_layer(8, 4)
    gc.collect()
    before = len(_NUMBERED)  # of compiled code
    run_sharded(layer, 2, None, mode=Mode(operator=True))
    gc.collect()
    assert len(_NUMBERED) == before
