"""Attention as an operator, and selective checkpointing: what runs, what is sent, and that it is the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.engine import projections_of, relative_errors, run_sharded
from tests.ranks import run_ranks
from tests.reference import make_layer, reference
from upipe_integrations import Mode, OutputProjection, Schedule, upipe_attention
from upipe_integrations.checkpoint import context_fn
from upipe_integrations.kernels import MathKernel


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
    for memory in ("keep", "recompute", "fused", "blocks"):
        layer = make_layer(8, 2, seq=24, batch=2, bias=True, norm=True, sinks=True, output=True)
        mode = Mode(memory, query_blocks=2, operator=True)
        got = run_sharded(layer, 2, dist.group.WORLD, mode=mode)
        worst[memory] = max(relative_errors(got, reference(layer)).values())
    plain = make_layer(8, 2, seq=24, rotary=False)
    got = run_sharded(plain, 2, dist.group.WORLD, mode=Mode(operator=True))
    worst["plain"] = max(relative_errors(got, reference(plain)).values())
    return worst


def test_the_operator_is_the_same_in_every_mode():
    for worst in run_ranks(2, _operator_errors):
        assert max(worst.values()) < 1e-10, worst


def _ulysses(x, layer, leaves, rows):
    """A plain Ulysses on the same kernel, its three exchanges by autograd."""
    kernel, C, D = layer.kernel, dist.get_world_size(), layer.head_dim
    projections = projections_of(layer, leaves, rows)

    def heads(p):
        t = torch.nn.functional.linear(x, p.weight, p.bias).unflatten(2, (-1, D))
        if p.rotary is not None:
            cos, sin = p.rotary.cos[:, :, None], p.rotary.sin[:, :, None]
            t = t * cos + torch.cat((-t[..., D // 2 :], t[..., : D // 2]), -1) * sin
        return _Exchange.apply(t, C, _to_heads, _to_sequence).transpose(1, 2)

    out = _Attend.apply(heads(projections.q), heads(projections.k), heads(projections.v), kernel)
    return torch.nn.functional.linear(
        _Exchange.apply(out.transpose(1, 2), C, _to_sequence, _to_heads).flatten(2), leaves["wo"]
    )


SENT: list[int] = []


def _all_to_all(pieces):
    SENT[-1] += pieces.numel()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return received


def _to_heads(t, C):  # [B, L, H, D] -> [B, S, H/C, D]
    return _all_to_all(t.unflatten(2, (C, -1)).permute(2, 0, 1, 3, 4).contiguous()).permute(1, 0, 2, 3, 4).flatten(1, 2)


def _to_sequence(t, C):  # and back
    return _all_to_all(t.unflatten(1, (C, -1)).permute(1, 0, 2, 3, 4).contiguous()).permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """One of the two above forward, and the other backward."""

    @staticmethod
    def forward(ctx, t, C, there, back):
        ctx.back, ctx.C = back, C
        return there(t, C)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad, ctx.C), None, None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, kernel):
        from upipe_integrations import AttentionSpec

        out, lse = kernel.forward(q, k, v, AttentionSpec())
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx, dout):
        from upipe_integrations import AttentionSpec

        q, k, v, out, lse = ctx.saved_tensors
        return *ctx.kernel.backward(dout, q, k, v, out, lse, AttentionSpec()), None


def _checkpointed_layer(method: str) -> dict[str, object]:
    """Gradients, kernel calls and elements sent of one checkpointed layer: a norm before attention, and after it."""
    rank, C = dist.get_rank(), dist.get_world_size()
    layer = make_layer(8, 8, seq=24, batch=1, output=True)
    layer.kernel = CountingKernel()
    rows = slice(rank * 24 // C, (rank + 1) * 24 // C)
    leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
    x = layer.x[:, rows].clone().requires_grad_()
    schedule = Schedule.build(heads=8, kv_heads=8, ranks=C, chunk_heads=2 * C)
    mode = Mode("fused", operator=method == "selective")

    def run(x):
        h = torch.nn.functional.layer_norm(x, x.shape[-1:])
        if method == "ulysses":
            y = _ulysses(h, layer, leaves, rows)
        else:
            projections = projections_of(layer, leaves, rows)
            output = OutputProjection(leaves["wo"])
            y = upipe_attention(h, projections, schedule, dist.group.WORLD, layer.kernel, output=output, mode=mode)
        return y.sin()

    SENT.append(0)
    original = dist.all_to_all_single

    def counted(received, send, *args, **kwargs):
        if method != "ulysses":
            SENT[-1] += send.numel()
        return original(received, send, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        extra = {"context_fn": context_fn} if method == "selective" else {}
        out = run(x) if method == "alone" else checkpoint(run, x, use_reentrant=False, **extra)
        out.backward(layer.dout[:, rows])
    finally:
        dist.all_to_all_single = original
    grads = {"x": x.grad, **{name: t.grad for name, t in leaves.items() if name != "x"}}
    return {
        "grads": grads,
        "forwards": layer.kernel.forwards,
        "backwards": layer.kernel.backwards,
        "sent": SENT[-1],
    }


def _all_methods() -> dict[str, dict]:
    return {name: _checkpointed_layer(name) for name in ("alone", "ulysses", "plain", "selective")}


def test_selective_checkpointing_runs_no_third_forward_and_sends_no_more_than_ulysses():
    for results in run_ranks(2, _all_methods):
        right = results["alone"]["grads"]
        for name in ("ulysses", "plain", "selective"):
            assert max(relative_errors(results[name]["grads"], right).values()) < 1e-12, name
        stages = 2
        calls = {name: (r["forwards"], r["backwards"]) for name, r in results.items()}
        assert calls["alone"] == (2 * stages, stages)  # fused attends again in backward
        assert calls["ulysses"] == (2, 1)
        assert calls["plain"] == (3 * stages, stages)
        assert calls["selective"] == (2 * stages, stages)
        # q, k, v, out forward; twice under a checkpoint; once more backward. Fused: q, k, v again and dout, dq, out,
        # dk, dv backward; the result is kept, so the forward is not run again.
        once = results["ulysses"]["sent"] // 3
        assert results["selective"]["sent"] == results["ulysses"]["sent"]
        assert results["plain"]["sent"] == 4 * once


def test_the_operator_refuses_double_backward():
    layer = make_layer(8, 4)
    leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
    schedule = Schedule.build(heads=8, kv_heads=4, ranks=1, chunk_heads=2)
    projections = projections_of(layer, leaves, slice(None))
    out = upipe_attention(leaves["x"], projections, schedule, None, MathKernel(), mode=Mode(operator=True))
    (dx,) = torch.autograd.grad(out.square().sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


def test_calls_are_forgotten_with_their_last_use():
    import gc

    from upipe_integrations.operators import _PREPARED

    layer = make_layer(8, 4)
    gc.collect()
    before = len(_PREPARED)  # of compiled code
    run_sharded(layer, 2, None, mode=Mode(operator=True))
    gc.collect()
    assert len(_PREPARED) == before
