"""DeepSpeed's DistributedAttention in stages: against one process, against DeepSpeed's own, and in engines."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.models import worst
from tests.ranks import run_ranks

pytest.importorskip("deepspeed")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

S, B, D, ROTATED = 8, 2, 6, 4


class PlainAttention(nn.Module):
    """Causal attention of `[S, B, n, D]` (or `[B, S, n, D]`) with an additive mask and a scale, in plain torch."""

    def __init__(self, sequence_first: bool, flat: bool = False, dropout: float = 0.0, value_scale: float = 1.0):
        super().__init__()
        self.order = (1, 2, 0, 3) if sequence_first else (0, 2, 1, 3)
        self.back = (2, 0, 1, 3) if sequence_first else (0, 2, 1, 3)
        self.flat = flat
        self.dropout = dropout
        self.value_scale = value_scale
        self.heads = []

    def forward(self, q, k, v, mask, *, scale):
        q, k, v = (t.permute(self.order) for t in (q, k, v))
        self.heads.append((q.shape[1], k.shape[1]))
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(2, 3) * scale + mask
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=q.dtype).triu(1)
        probabilities = nn.functional.dropout(scores.softmax(-1), self.dropout)
        out = (probabilities @ v * self.value_scale).permute(self.back)
        return out.flatten(2) if self.flat else out


def _rotated(t, angles, sequence_dim: int):
    """Rotation of pairs (i, i + half) of the first ROTATED of D, by complex numbers."""
    shape = [1, 1, 1, ROTATED // 2]
    shape[sequence_dim] = S
    first, second, rest = t.split([ROTATED // 2, ROTATED // 2, D - ROTATED], -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).view(shape)
    return torch.cat([turned.real, turned.imag, rest], -1)


def _tensors(heads: int, kv_heads: int, sequence_first: bool) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(7)

    def tensor(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    first = (S, B) if sequence_first else (B, S)
    angles = tensor(S, ROTATED // 2)
    # As Megatron-DeepSpeed passes them: permuted (1, 0, 2, 3) they line up with the exchanged heads.
    tables = torch.cat([angles, angles], 1)
    tables = tables[None, :, None] if sequence_first else tables[:, None, None]
    return SimpleNamespace(
        q=tensor(*first, heads, D),
        k=tensor(*first, kv_heads, D),
        v=tensor(*first, kv_heads, D),
        dout=tensor(*first, heads, D),
        mask=tensor(S, S),
        angles=angles,
        rotary=(tables.cos(), tables.sin()),
    )


def _one_process(t: SimpleNamespace, local: nn.Module, sequence_first: bool, rotary: bool) -> dict[str, torch.Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in (t.q, t.k, t.v))
    dim = 0 if sequence_first else 1
    turned = [_rotated(x, t.angles, dim) if rotary else x for x in (q, k)]
    out = local(*turned, v, t.mask, scale=0.3)
    out.backward(t.dout.reshape(out.shape))
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def _on_ranks(
    t: SimpleNamespace, attention: nn.Module, sequence_first: bool, rotary: bool, group
) -> dict[str, torch.Tensor]:
    C, rank, dim = dist.get_world_size(group), dist.get_rank(group), 0 if sequence_first else 1
    q, k, v = (x.chunk(C, dim)[rank].clone().requires_grad_() for x in (t.q, t.k, t.v))
    out = attention(q, k, v, 1 - dim, t.rotary if rotary else None, t.mask, scale=0.3)
    out.backward(t.dout.chunk(C, dim)[rank].reshape(out.shape))
    results = {}
    for name, x in {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}.items():
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(C)]
        dist.all_gather(parts, x.contiguous(), group=group)
        results[name] = torch.cat(parts, dim)
    return results


CASES = [
    # heads, KV heads, chunk_heads in ranks
    (8, 8, 1),
    (8, 4, 2),
    (8, 1, 1),
    (6, 3, 1),
    (7, 7, 1),
]


def _every_form() -> dict[str, float]:
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention as Theirs

    import deepspeed_plugin

    deepspeed.init_distributed("gloo")
    world, errors = dist.group.WORLD, {}
    C = dist.get_world_size()
    for heads, kv_heads, chunks in CASES:
        for sequence_first in (True, False):
            for rotary in (True, False):
                for flat in (False, True):
                    case = f"{heads}/{kv_heads}, sequence first {sequence_first}, rotary {rotary}, flat {flat}"
                    t = _tensors(heads, kv_heads, sequence_first)
                    local = PlainAttention(sequence_first, flat)
                    wanted = _one_process(t, local, sequence_first, rotary)
                    gather = 0 if sequence_first else 1
                    local.heads.clear()
                    ours = deepspeed_plugin.DistributedAttention(
                        local, world, gather_idx=gather, chunk_heads=chunks * C, overlap=flat
                    )
                    got = _on_ranks(t, ours, sequence_first, rotary, world)
                    errors[case] = max(worst(got, wanted).values())
                    assert max(n for n, _ in local.heads) <= chunks, case  # no call has more heads than a stage's
                    if not flat and heads % C == kv_heads % C == 0:
                        theirs = Theirs(local, world, gather_idx=gather)
                        got = _on_ranks(t, theirs, sequence_first, rotary, world)
                        errors[f"{case}, DeepSpeed's"] = max(worst(got, wanted).values())
    return errors


@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_process_and_deepspeeds_own(world):
    for errors in run_ranks(world, _every_form):
        assert sum("DeepSpeed's" not in case for case in errors) == len(CASES) * 8
        assert sum("DeepSpeed's" in case for case in errors) >= 2 * 4
        assert {case: error for case, error in errors.items() if error > 1e-12} == {}


def _random() -> dict[str, object]:
    """Dropout in the local attention: gradients are of the masks that forward drew, and random states go on alike."""
    import deepspeed_plugin

    t = _tensors(4, 4, True)
    local = PlainAttention(True, dropout=0.4)
    attention = deepspeed_plugin.DistributedAttention(local, dist.group.WORLD, chunk_heads=2)
    torch.manual_seed(dist.get_rank())
    leaf = t.v.chunk(2)[dist.get_rank()].clone().requires_grad_()
    q, k = (x.chunk(2)[dist.get_rank()] for x in (t.q, t.k))
    out = attention(q, k, leaf, 1, None, t.mask, scale=0.3)
    after = torch.get_rng_state()
    dout = t.dout.chunk(2)[dist.get_rank()]
    out.backward(dout)
    # Attention is linear in v: dv . v = dout . out, of the same masks only.
    products = torch.stack([(leaf.grad * leaf.detach()).sum(), (dout * out.detach()).sum()])
    dist.all_reduce(products)
    torch.manual_seed(dist.get_rank())
    again = attention(q, k, leaf, 1, None, t.mask, scale=0.3)
    torch.manual_seed(dist.get_rank() + 5)
    other = attention(q, k, leaf, 1, None, t.mask, scale=0.3)
    return {
        "products": products.tolist(),
        "went on": torch.equal(torch.get_rng_state(), after),
        "again": torch.equal(again, out),
        "other": torch.equal(other, out),
    }


def test_dropout_is_drawn_again_as_it_was():
    for result in run_ranks(2, _random):
        of_v, of_out = result["products"]
        assert of_v == pytest.approx(of_out, rel=1e-12)
        assert result["again"] and not result["other"]


def _kept() -> int:
    """Elements that autograd keeps for backward, of a call with 8 stages."""
    import deepspeed_plugin

    t = _tensors(8, 8, True)
    attention = deepspeed_plugin.DistributedAttention(PlainAttention(True), None, chunk_heads=1)
    q, k, v = (x.requires_grad_() for x in (t.q, t.k, t.v))
    attention(q, k, v, 1, None, t.mask, scale=0.3)  # the first call also tries the local attention
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        attention(q, k, v, 1, None, t.mask, scale=0.3)
    return sum(sizes)


def test_nothing_of_a_stage_is_kept():
    assert run_ranks(1, _kept) == [4 * S * B * 8 * D]  # q, k, v and the output; no scores, no exchanged heads


class Block(nn.Module):
    def __init__(self, attention: nn.Module, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(heads * D, 3 * heads * D)
        self.out = nn.Linear(heads * D, heads * D)
        self.attention = attention

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, D)).unbind(2)
        return x + self.out(self.attention(q, k, v, 1, None, mask, scale=0.3).flatten(2))


class Model(nn.Module):
    """What a Megatron-DeepSpeed model looks like to DeepSpeed: its own DistributedAttention, sequence first."""

    def __init__(self, group, heads: int = 4, **options):
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention

        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            Block(DistributedAttention(PlainAttention(True), group, **options), heads) for _ in range(2)
        )

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x, mask)
        return x.square().sum()


def _engine(model, stage: int, extra: dict):
    import deepspeed
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu

    import deepspeed_plugin

    deepspeed_plugin.register()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **extra,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    return engine


def _in_engines() -> dict[str, object]:
    import deepspeed
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu

    deepspeed.init_distributed("gloo")
    mpu.initialize_sequence_parallel(2)
    group = mpu.get_sequence_parallel_group()
    x = torch.randn(S, B, 4 * D, generator=torch.Generator().manual_seed(1)).chunk(2)[dist.get_rank()]
    mask = torch.zeros(S, S)
    results: dict[str, object] = {}
    for stage in (1, 3):
        for name, extra in {"theirs": {}, "ours": {"upipe": {"chunk_heads": 2, "overlap": True}}}.items():
            engine = _engine(Model(group), stage, extra)
            losses = []
            for _ in range(3):
                loss = engine(x, mask)
                engine.backward(loss)
                engine.step()
                losses += [float(loss.detach()), float(engine.get_global_grad_norm())]
            results[f"{stage} {name}"] = losses
            results[f"{stage} {name} heads"] = {n for b in engine.module.blocks for n in b.attention.local_attn.heads}
            if extra:
                results["summary"], results["layers"] = engine.upipe.summary, engine.upipe.layers
                engine.upipe.undo()
                results["undone"] = not any(
                    hasattr(m, "upipe") or "forward" in vars(m) for m in engine.module.modules()
                )
            engine.destroy()
    return results


def test_the_key_replaces_the_modules_of_a_model():
    for results in run_ranks(2, _in_engines):
        for stage in (1, 3):
            assert results[f"{stage} theirs heads"] == {(2, 2)} and results[f"{stage} ours heads"] == {(1, 1)}
            assert results[f"{stage} ours"] == pytest.approx(results[f"{stage} theirs"], rel=1e-5)
        assert results["layers"] == ["blocks.0.attention", "blocks.1.attention"]
        assert "2 DistributedAttention modules run in stages of 2 query heads" in results["summary"]
        assert "local attention (PlainAttention)" in results["summary"]
        assert results["undone"]


class Trained(PlainAttention):
    def __init__(self):
        super().__init__(True)
        self.sink = nn.Parameter(torch.zeros(1))


def _refused() -> dict[str, str]:
    import deepspeed
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu
    from deepspeed.sequence.layer import DistributedAttention as Theirs

    import deepspeed_plugin

    deepspeed.init_distributed("gloo")
    mpu.initialize_sequence_parallel(2)
    group = mpu.get_sequence_parallel_group()

    class Own(Theirs):
        def forward(self, *args):
            return args[0]

    messages = {}

    def attempt(name, function):
        try:
            function()
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)

    def engine_of(change=None, **block):
        model = Model(group)
        if change:
            change(model)
        _engine(model, 1, {"upipe": {"chunk_heads": 2, **block}})

    def set_(**attributes):
        return lambda model: [setattr(b.attention, k, v) for b in model.blocks for k, v in attributes.items()]

    def replace(module):
        return lambda model: setattr(model.blocks[1], "attention", module)

    attempt("stream", lambda: engine_of(set_(sp_stream=object())))
    attempt("memory", lambda: engine_of(memory="fused"))
    attempt("kernel", lambda: engine_of(kernel="math"))
    attempt("multiple", lambda: engine_of(chunk_heads=3))
    attempt("indices", lambda: engine_of(set_(scatter_idx=1, gather_idx=2)))
    attempt("trained", lambda: engine_of(set_(local_attn=Trained())))
    attempt("own forward", lambda: engine_of(replace(Own(PlainAttention(True), group))))
    ours = deepspeed_plugin.DistributedAttention(PlainAttention(True), group, chunk_heads=2)
    attempt("own class", lambda: engine_of(replace(ours)))

    t = _tensors(4, 4, True)
    q, k, v = (x.chunk(2)[dist.get_rank()].clone().requires_grad_() for x in (t.q, t.k, t.v))

    def call(local, *args, batch_dim_idx=1, backward=True, **options):
        attention = deepspeed_plugin.DistributedAttention(local, group, chunk_heads=2, **options)
        out = attention(q, k, v, batch_dim_idx, None, *args)
        if backward:
            out.sum().backward()

    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    calls = []

    def forgetful(q, k, v):
        calls.append(1)
        return v * len(calls)

    attempt("batch", lambda: call(lambda q, k, v: v, batch_dim_idx=0, backward=False))
    attempt("heads", lambda: call(lambda q, k, v: torch.cat([v, v], 2), backward=False))
    attempt("argument", lambda: call(lambda q, k, v, w: v * w, weight, backward=False))
    attempt("kv heads", lambda: call(lambda q, k, v: v, num_kv_heads=3, backward=False))
    # Refused before any exchange, also where one rank alone would find it.
    only = dist.get_rank() == 1
    attempt("hidden", lambda: call(lambda q, k, v: (q + k + v) * weight, backward=False))
    attempt("hidden on a rank", lambda: call(lambda q, k, v: (q + k + v) * (weight if only else 1), backward=False))
    attempt("not repeatable", lambda: call(lambda q, k, v: forgetful(q, k, q + k + v), backward=False))
    attempt("not repeatable on a rank", lambda: call(lambda q, k, v: forgetful(q, k, v) if only else v, backward=False))
    attempt("fine", lambda: call(lambda q, k, v: q + k + v))
    return messages


def _uneven() -> str:
    """What ranks say of a call with 6 query and 3 KV heads, where some have no head of the last stage."""
    import deepspeed_plugin

    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    t = _tensors(6, 3, True)
    q, k, v = (x.chunk(4)[dist.get_rank()].clone().requires_grad_() for x in (t.q, t.k, t.v))
    local = PlainAttention(True)
    said = []
    for hidden in (True, False):

        def attend(q, k, v, mask, scale, hidden=hidden):
            return local(q, k, v, mask, scale=scale) * (weight if hidden else 1)

        attention = deepspeed_plugin.DistributedAttention(attend, dist.group.WORLD, chunk_heads=4)
        try:
            attention(q, k, v, 1, None, t.mask, scale=0.3).sum().backward()
            said.append("accepted")
        except ValueError as error:
            said.append(str(error))
    return " | ".join(said)


def test_ranks_without_a_head_of_a_stage_do_not_wait():
    first, *others = run_ranks(4, _uneven)
    assert set(others) == {first}
    assert "ranks [0, 1, 2, 3] the local attention reads a tensor" in first and first.endswith("| accepted")


@pytest.fixture(scope="module")
def refusals():
    return run_ranks(2, _refused)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("stream", r"blocks\.0\.attention has an sp_stream.*use upipe\.overlap"),
        ("memory", r"upipe\.memory = 'fused': blocks\.0\.attention attends by a local attention of its own"),
        ("kernel", r"upipe\.kernel = 'math': .* only 'auto' is possible\. Leave upipe\.kernel out"),
        ("multiple", r"chunk_heads = 3: must be a multiple of the 2 ranks of blocks\.0\.attention's group"),
        ("indices", r"scatter_idx = 1 and gather_idx = 2: must be 2 \(heads\) and 0 or 1"),
        ("trained", r"trained parameters \(sink\), which would get no gradient"),
        ("own forward", r"blocks\.1\.attention is a Own with a forward of its own"),
        ("own class", r"blocks\.1\.attention has UPipe already\. Remove the 'upipe' key"),
        ("batch", r"batch_dim_idx = 0 with gather_idx = 0: one of the first two"),
        ("heads", r"the local attention gave \(8, 2, 2, 6\) for a query of \(8, 2, 1, 6\).*1 heads"),
        ("argument", r"an argument of the local attention beyond q, k and v requires a gradient"),
        ("kv heads", r"the key's heads a multiple of num_kv_heads = 3"),
        ("hidden on a rank", r"on sequence-parallel ranks \[1\] the local attention reads a tensor beyond"),
        ("not repeatable on a rank", r"on sequence-parallel ranks \[1\] the local attention gave another result"),
        ("hidden", r"reads a tensor beyond its arguments that requires a gradient"),
        (
            "not repeatable",
            r"gave another result when it was called again, as it is in backward.*Set attention dropout to 0",
        ),
        ("fine", "accepted"),
    ],
)
def test_what_can_not_be_served_is_refused(refusals, case, message):
    first, second = (messages[case] for messages in refusals)
    assert first == second
    with pytest.raises(ValueError, match=message):
        raise ValueError(first)
