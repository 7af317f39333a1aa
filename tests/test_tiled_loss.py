"""Losses without whole logits, losses of whole sequences, and losses of accumulated steps (public faults 7 to 11)."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.models import make_model, shard, worst
from tests.ranks import on_pool, run_ranks
from upipe_integrations.planning.measure import LiveMemory
from upipe_integrations.sharding import count_labels, mean_token_loss, sequence_sums
from upipe_integrations.tiled_loss import token_log_probs

os.environ.setdefault("DS_ACCELERATOR", "cpu")
VOCABULARY, HIDDEN = 11, 6
BETA = 0.1  # DPO's usual; at 1, float32 roundings of sums of log-probabilities reach 1e-5 of the gradient


# ---------------------------------------------------------------- the core, in float64


def _leaves(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"hidden": (2, 8, HIDDEN), "weight": (VOCABULARY, HIDDEN), "bias": (VOCABULARY,)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }


def _labels() -> torch.Tensor:
    labels = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(5))
    labels[0, 2:4] = labels[1, 4:] = -100
    return labels


def _untiled(hidden, weight, bias, labels) -> torch.Tensor:
    log_probs = torch.log_softmax(hidden @ weight.T + (0 if bias is None else bias), -1)
    targets = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return targets * (labels != -100)


@pytest.mark.parametrize("tile_rows", [1, 3, 16, 99])
@pytest.mark.parametrize("frozen", ["", "hidden", "weight"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_tiles_are_the_whole(tile_rows, frozen, with_bias):
    weights = torch.randn(2, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    results = []
    for function in (_untiled, lambda *args: token_log_probs(*args, tile_rows=tile_rows)):
        leaves = _leaves()
        if frozen:
            leaves[frozen].requires_grad_(False)
        bias = leaves["bias"] if with_bias else None
        out = function(leaves["hidden"], leaves["weight"], bias, _labels())
        (out * weights).sum().backward()
        results.append({"out": out.detach(), **{n: t.grad for n, t in leaves.items() if t.grad is not None}})
    wanted, got = results
    assert len(wanted) == 4 - bool(frozen) - (not with_bias)
    assert max(worst(got, wanted).values()) < 1e-13


@pytest.mark.parametrize("tile_rows", [3, 99])
@pytest.mark.parametrize(
    "function",
    [lambda z: 2 * torch.tanh(z / 2), lambda z: z / 3, lambda z: z[..., : VOCABULARY - 2], lambda z: z],
    ids=["softcap", "scale", "cut", "nothing"],
)
def test_what_is_done_to_logits_is_done_to_tiles(function, tile_rows):
    """A cut vocabulary is that of padded heads: its last rows get a gradient of 0."""
    labels = _labels().clamp(max=VOCABULARY - 3)

    def reference(hidden, weight, bias, labels):
        log_probs = torch.log_softmax(function(hidden @ weight.T + bias), -1)
        return log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)

    def ours(*arguments):
        return token_log_probs(*arguments, logits_function=function, tile_rows=tile_rows)

    results = []
    for log_probs in (reference, ours):
        leaves = _leaves()
        out = log_probs(leaves["hidden"], leaves["weight"], leaves["bias"], labels)
        (out * torch.arange(16).view(2, 8)).sum().backward()
        results.append({"out": out.detach(), **{name: t.grad for name, t in leaves.items()}})
    assert max(worst(results[1], results[0]).values()) < 1e-13


def test_bf16_sums_over_tiles_lose_nothing():
    """Two hundred tiles: the head's gradient is as near the exact one as that of whole bfloat16 logits."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 800, 32, generator=generator).bfloat16()
    weight = torch.randn(50, 32, generator=generator).bfloat16()
    labels = torch.randint(0, 50, (1, 800), generator=generator)

    def gradient(function, dtype):
        leaf = weight.to(dtype).requires_grad_()
        function(hidden.to(dtype), leaf, None, labels).sum().backward()
        return leaf.grad.double()

    exact = gradient(_untiled, torch.float64)
    error = (gradient(lambda *a: token_log_probs(*a, tile_rows=4), torch.bfloat16) - exact).norm() / exact.norm()
    assert 0 < error < 2**-8


def test_autocast_computes_in_its_dtype():
    leaves = {name: t.detach().float().requires_grad_() for name, t in _leaves().items()}
    arguments = (leaves["hidden"], leaves["weight"], leaves["bias"], _labels())
    with torch.autocast("cpu", torch.bfloat16):
        got = token_log_probs(*arguments, tile_rows=3)
        logits = F.linear(*arguments[:3]).float()
    wanted = -F.cross_entropy(logits.flatten(0, 1), _labels().flatten(), reduction="none").view(2, 8)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
    got.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in leaves.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_rows": 0}, "tile_rows = 0: must be at least 1"),
        (
            {"shifted_labels": torch.zeros(2, 7, dtype=torch.long)},
            r"shift_labels \(2, 7\) and hidden states \(2, 8, 6\)",
        ),
    ],
)
def test_bad_arguments_are_refused(change, message):
    arguments = {**_leaves(), "shifted_labels": _labels(), "tile_rows": 4} | change
    with pytest.raises(ValueError, match=message):
        token_log_probs(**arguments)


def test_one_tile_of_logits_is_alive():
    """Peak over forward and backward: three float32 tensors of a tile, and the gradients."""
    rows, tile, V, E = 4096, 128, 4096, 64
    hidden, weight = torch.randn(1, rows, E, requires_grad=True), torch.randn(V, E, requires_grad=True)
    labels = torch.randint(0, V, (1, rows))
    with LiveMemory() as memory:
        hidden.sum(), weight.sum(), labels.sum()
        before = memory.current
        memory.reset_peak()
        token_log_probs(hidden, weight, None, labels, tile_rows=tile).sum().backward()
        peak = memory.peak - before
    gradients = 4 * (rows * E + 2 * V * E)  # the sum of the weight's, and its copy in the weight's dtype
    per_row = 64 * rows
    assert 2 * 4 * tile * V < peak < 3 * 4 * tile * V + gradients + per_row < 4 * rows * V / 3


def _float64_ranks() -> dict[str, dict[str, torch.Tensor]]:
    """Share of the mean, and a preference loss, on this rank's rows: what was summed over ranks."""
    group, results = dist.group.WORLD, {}
    for name in ("tiled", "untiled", "preference", "no labels"):
        leaves, labels = _leaves(), shard(_labels())
        if name == "no labels" and dist.get_rank() == 1:
            labels = torch.full_like(labels, -100)
        hidden = leaves["hidden"].chunk(2, 1)[dist.get_rank()]
        if name == "untiled":
            loss = mean_token_loss(F.linear(hidden, leaves["weight"], leaves["bias"]), labels, group)
        else:
            log_probs = token_log_probs(hidden, leaves["weight"], leaves["bias"], labels, tile_rows=3)
            loss = -log_probs.sum() / count_labels(labels, group)
        if name == "preference":
            sums = sequence_sums(log_probs, group)
            loss = -F.logsigmoid(sums[0] - sums[1])
        loss.backward()
        found = {"loss": loss.detach().clone(), **{n: t.grad for n, t in leaves.items()}}
        for key, t in found.items():
            if (name, key) != ("preference", "loss"):  # the whole loss on every rank already
                dist.all_reduce(t)
        results[name] = found
    return results


def test_two_ranks_are_one_process_in_float64():
    """Public faults 9, 10: gradients of the mean and of a loss of whole sequences; a rank without labels."""
    wanted = {}
    for name in ("tiled", "untiled", "preference", "no labels"):
        leaves, labels = _leaves(), _labels()
        if name == "no labels":
            labels[:, 4:] = -100
        log_probs = _untiled(leaves["hidden"], leaves["weight"], leaves["bias"], labels)
        loss = -log_probs.sum() / (labels != -100).sum()
        if name == "preference":
            loss = -F.logsigmoid(log_probs[0].sum() - log_probs[1].sum())
        loss.backward()
        wanted[name] = {"loss": loss.detach(), **{n: t.grad for n, t in leaves.items()}}
    for results in on_pool(2, _float64_ranks):
        assert results.keys() == wanted.keys()
        for name, found in results.items():
            assert max(worst(found, wanted[name]).values()) < 1e-12, name


# ---------------------------------------------------------------- DeepSpeed engines


def _micro_batches(batch: int = 1, replica: int = 0) -> list[dict[str, torch.Tensor]]:
    """Two, of very different numbers of labels; rank 1 of 2 has none of the second's."""
    result = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(10 * replica + seed)
        ids = torch.randint(0, 64, (batch, 16), generator=generator)
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        if seed == 2:
            labels[:, 3 + replica :] = -100
        result.append({"input_ids": ids, "labels": labels})
    return result


def _logits(model, batch):
    positions = torch.arange(16).expand_as(batch["input_ids"])
    return model(input_ids=batch["input_ids"], position_ids=positions, use_cache=False).logits


def _one_process(model, name: str, micro_batches) -> dict[str, torch.Tensor]:
    total = sum((b["labels"] != -100).sum() for b in micro_batches)
    loss = torch.zeros(())
    for batch in micro_batches:
        logits, labels = _logits(model, batch), batch["labels"]
        if name == "preference":
            scores = _untiled_from(logits, labels).sum(1)
            loss = loss - F.logsigmoid(BETA * (scores[0] - scores[1])) / len(micro_batches)
        elif name == "preference mean":
            scores = _untiled_from(logits, labels).sum(1) / (labels != -100).sum(1)
            loss = loss - F.logsigmoid(BETA * (scores[0] - scores[1])) / len(micro_batches)
        else:
            summed = -_untiled_from(logits, labels).sum()
            divisor = {
                "mean": len(micro_batches) * (labels != -100).sum(),
                "sum": len(micro_batches),
                "step": total,
            }[name.split()[-1]]
            loss = loss + summed / divisor
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}


def _untiled_from(logits, labels):
    targets = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return targets * (labels != -100)


def _engine_loss(engine, name: str, batch, micro_batches) -> tuple[torch.Tensor, torch.Tensor]:
    """What to pass to backward, and what to log."""
    import deepspeed_plugin

    group = engine.seq_parallel_group
    labels = shard(batch["labels"], group)
    positions = shard(torch.arange(16).expand_as(batch["input_ids"]), group)
    inputs = {"input_ids": shard(batch["input_ids"], group), "position_ids": positions, "use_cache": False}
    if name.startswith("preference"):
        how = "mean" if name.endswith("mean") else "sum"
        scores = deepspeed_plugin.sequence_log_probs(engine, inputs, labels, reduction=how, tile_rows=5)
        with torch.no_grad():  # as a reference model's are computed
            reference = deepspeed_plugin.sequence_log_probs(engine, inputs, labels, reduction=how, tile_rows=7)
        assert not reference.requires_grad
        torch.testing.assert_close(reference, scores.detach())
        loss = -F.logsigmoid(BETA * (scores[0] - scores[1]))
        return loss, loss.detach()
    how = {"reduction": "sum" if name.endswith("sum") else "mean"}
    if name.endswith("step"):
        shards = [shard(b["labels"], group) for b in micro_batches]
        how["step_tokens"] = deepspeed_plugin.labelled_tokens(engine, shards)
    if name.startswith("tiled"):
        loss = deepspeed_plugin.tiled_sequence_parallel_loss(engine, inputs, labels, tile_rows=5, **how)
    else:
        loss = deepspeed_plugin.sequence_parallel_loss(engine, engine(**inputs).logits, labels, **how)
    return loss, deepspeed_plugin.group_mean_loss(engine, loss)


def _run_step(engine, name, micro_batches) -> dict[str, torch.Tensor]:
    from tests.engines import gradients

    logged = torch.zeros(())
    for number, batch in enumerate(micro_batches):
        engine.set_gradient_accumulation_boundary(number + 1 == len(micro_batches))
        loss, to_log = _engine_loss(engine, name, batch, micro_batches)
        engine.backward(loss)
        logged = logged + to_log / len(micro_batches)
    return {"loss": logged, **gradients(engine)}


ENGINE_CASES = ("tiled mean", "tiled sum", "tiled step", "whole sum", "whole step", "preference", "preference mean")


def _engines(stage: int) -> dict[str, float]:
    from tests.engines import ds_config, forget_ulysses, make_engine, register_ulysses

    errors = {}
    for tied in (False, True):
        for name in ENGINE_CASES:
            micro_batches = _micro_batches(2 if name.startswith("preference") else 1)
            forget_ulysses()
            wanted = _one_process(make_model("llama", tie_word_embeddings=tied), name, micro_batches)
            model = make_model("llama", tie_word_embeddings=tied)
            config = ds_config(stage, upipe={"chunk_heads": 4}, gradient_accumulation_steps=2)
            config["train_micro_batch_size_per_gpu"] = 1
            engine = make_engine(model, config, register_ulysses(model, 2))
            engine.train()
            got = _run_step(engine, name, micro_batches)
            errors[f"{name}{', tied' * tied}"] = max(worst(got, wanted).values())
            if stage == 3:
                from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

                assert model.lm_head.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
            engine.destroy()
    return errors


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_engines_are_one_process_with_accumulation(stage):
    """Public faults 7 to 11: every form of the loss, two micro-batches, tied embeddings or not."""
    pytest.importorskip("deepspeed")
    for errors in run_ranks(2, _engines, stage):
        assert len(errors) == 2 * len(ENGINE_CASES)
        assert {case: error for case, error in errors.items() if not error < 5e-6} == {}


def _replicas() -> dict[str, float]:
    """SP 2 x DP 2 with other numbers of labels on each replica: the step's tokens weigh the same."""
    from tests.engines import ds_config, forget_ulysses, make_engine, register_ulysses

    errors = {}
    replicas = [_micro_batches(replica=r) for r in range(2)]
    forget_ulysses()
    wanted = _one_process(make_model("llama"), "tiled step", [b for r in replicas for b in r])
    for stage in (1, 3):
        model = make_model("llama")
        config = ds_config(stage, upipe={"chunk_heads": 4}, gradient_accumulation_steps=2)
        engine = make_engine(model, config, register_ulysses(model, 2))
        got = _run_step(engine, "tiled step", replicas[dist.get_rank() // 2])
        dist.all_reduce(got["loss"])
        got["loss"] /= dist.get_world_size()
        errors[f"stage {stage}"] = max(worst(got, wanted).values())
        engine.destroy()
    return errors


def test_tokens_of_replicas_weigh_the_same():
    pytest.importorskip("deepspeed")
    for errors in run_ranks(4, _replicas):
        assert {case: error for case, error in errors.items() if not error < 5e-6} == {}


def _refused() -> dict[str, str]:
    import deepspeed_plugin
    from tests.engines import ds_config, make_engine

    deepspeed_plugin.register()
    results = {}
    ids = torch.randint(0, 64, (1, 8))
    for name, loss, inputs, options in [
        ("labels", "tiled_sequence_parallel_loss", {"input_ids": ids, "labels": ids}, {}),
        ("softcap", "tiled_sequence_parallel_loss", {"input_ids": ids}, {}),
        ("head", "tiled_sequence_parallel_loss", {"input_ids": ids}, {}),
        ("rows", "tiled_sequence_parallel_loss", {"input_ids": ids, "logits_to_keep": 2}, {}),
        ("reduction", "sequence_log_probs", {"input_ids": ids}, {"reduction": "none"}),
        ("both", "tiled_sequence_parallel_loss", {"input_ids": ids}, {"reduction": "sum", "step_tokens": 5}),
    ]:
        model = make_model("llama")
        if name == "softcap":
            model.register_forward_hook(lambda m, a, out: type(out)(logits=30 * torch.tanh(out.logits / 30)))
        if name == "head":
            model.lm_head = torch.nn.Sequential(model.lm_head)
        engine = make_engine(model, ds_config(0))
        try:
            getattr(deepspeed_plugin, loss)(engine, inputs, ids, **options)
            results[name] = "accepted"
        except ValueError as error:
            results[name] = str(error)
        assert name == "head" or "forward" not in vars(model.lm_head)
        if name in ("softcap", "head"):  # the message says to use sequence_parallel_loss
            logits = engine(input_ids=ids).logits
            right = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
            error = deepspeed_plugin.sequence_parallel_loss(engine, logits, ids) - right
            assert "Use sequence_parallel_loss" in results[name] and abs(float(error.detach())) < 1e-5, name
        engine.destroy()
    return results


class _RowsOfLogits(TorchDispatchMode):
    """The most rows of any tensor that ends with the vocabulary."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            # Tensors on the meta device have a shape and no memory.
            if isinstance(t, torch.Tensor) and t.device.type != "meta" and t.dim() and t.shape[-1] == 64:
                self.most = max(self.most, t.numel() // 64)
        return result


def _rows_of_logits() -> dict[bool, int]:
    import deepspeed_plugin
    from tests.engines import ds_config, make_engine

    found = {}
    ids = torch.randint(0, 64, (1, 100))
    for tiled in (True, False):
        engine = make_engine(make_model("llama"), ds_config(2))
        with _RowsOfLogits() as rows:
            if tiled:
                loss = deepspeed_plugin.tiled_sequence_parallel_loss(engine, {"input_ids": ids}, ids, tile_rows=5)
            else:
                loss = deepspeed_plugin.sequence_parallel_loss(engine, engine(input_ids=ids).logits, ids)
            engine.backward(loss)
        found[tiled] = rows.most
        engine.destroy()
    return found


def test_an_engine_never_has_whole_logits():
    pytest.importorskip("deepspeed")
    hidden = 48  # rows of the head's weight, transposed for its product
    assert run_ranks(1, _rows_of_logits) == [{True: hidden, False: 100}]


def test_what_the_tiled_loss_cannot_serve_is_refused_by_name():
    pytest.importorskip("deepspeed")
    (results,) = run_ranks(1, _refused)
    for name, message in {
        "labels": "inputs has labels: take them out",
        "softcap": "LlamaForCausalLM changes logits after its output head",
        "head": "LlamaForCausalLM has Sequential as its output head",
        "rows": "leave logits_to_keep out",
        "reduction": "reduction = 'none': must be",
        "both": "leave one of them out",
    }.items():
        assert message in results[name]
