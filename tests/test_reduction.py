"""Losses under every setting of DeepSpeed that changes how gradients are summed, and with a balance loss of routers.

Loss, every gradient and the logged norm are those of one process: many engines in one start of ranks.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.engines import UPIPE, ds_config, forget_ulysses, gradients, make_engine, register_ulysses
from tests.models import make_batch, make_model, shard, worst
from tests.ranks import run_ranks

pytest.importorskip("deepspeed")

Tensors = dict[str, torch.Tensor]
TINY = {"num_hidden_layers": 1}


def _settings(ranks: int) -> dict[str, dict]:
    """What changes the sum of gradients, where DeepSpeed takes it: its own assertions leave the others out."""
    cases: dict[str, dict] = {}
    for stage, scatter, contiguous, predivide, prescale in itertools.product(
        (0, 1, 2, 3), (True, False), (True, False), (1.0, 2.0, 4.0), (False, True)
    ):
        zero = {"reduce_scatter": scatter, "contiguous_gradients": contiguous}
        if stage == 0 and not (scatter and contiguous):
            continue  # not read
        if scatter and stage >= 2 and (predivide != 1.0 or prescale):
            continue  # refused by DeepSpeed
        if predivide == 4.0 and ranks == 2 and stage != 3:
            continue  # as 2 on 4 ranks
        if prescale and predivide != 1.0:
            continue  # not read
        name = f"stage {stage} scatter {scatter} contiguous {contiguous} predivide {predivide} prescale {prescale}"
        cases[name] = {
            "stage": stage,
            "zero": zero,
            "gradient_predivide_factor": predivide,
            "prescale_gradients": prescale,
        }
    return cases


def _replica_batches(replicas: int) -> list[Tensors]:
    return [make_batch(seq=16, seed=1 + replica) for replica in range(replicas)]


def _one_process(batches: list[Tensors]) -> Tensors:
    """Gradients of the mean of the replicas' losses, as DeepSpeed has it, of an unpatched model."""
    forget_ulysses()
    model = make_model("llama", **TINY)
    losses = []
    for batch in batches:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
    torch.stack(losses).mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _config(stage: int, zero: dict, **more) -> dict:
    config = ds_config(stage, **UPIPE, **more)
    config["zero_optimization"] |= zero
    return config


def _step(config: dict, batch: Tensors) -> Tensors:
    import deepspeed_plugin

    model = make_model("llama", **TINY)
    engine = make_engine(model, config, register_ulysses(model, 2))
    group = engine.seq_parallel_group
    ids, positions = shard(batch["input_ids"], group), shard(torch.arange(16)[None], group)
    logits = engine(input_ids=ids, position_ids=positions, use_cache=False).logits
    engine.backward(deepspeed_plugin.sequence_parallel_loss(engine, logits, shard(batch["labels"], group)))
    grads = gradients(engine)
    engine.destroy()
    return grads


def _errors() -> dict[str, float]:
    replicas = dist.get_world_size() // 2
    batches = _replica_batches(replicas)
    wanted, mine = _one_process(batches), batches[dist.get_rank() // 2]
    errors = {}
    for name, settings in _settings(dist.get_world_size()).items():
        errors[name] = max(worst(_step(_config(**settings), mine), wanted).values())
    return errors


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_setting_that_changes_the_sum_of_gradients(ranks):
    for errors in run_ranks(ranks, _errors, seconds=500):
        assert {name: error for name, error in errors.items() if not error < 1e-5} == {}
        assert len(errors) > 20


def _buckets() -> dict[str, tuple[str, float]]:
    """What is said where no factor is right, and the error after each remedy."""
    batch = make_batch(seq=16)
    wanted = _one_process([batch])
    small = {"reduce_scatter": False, "reduce_bucket_size": 100}
    results = {}
    remedies = {"reduce_bucket_size": 64 * 48, "reduce_scatter": True, "contiguous_gradients": False}
    for name, value in remedies.items():
        try:
            _step(_config(3, small), batch)
            message = "accepted"
        except ValueError as error:
            message = str(error)
        results[name] = message, max(worst(_step(_config(3, {**small, name: value}), batch), wanted).values())
    return results


def test_where_no_factor_is_right_it_is_refused_and_each_remedy_ends_in_a_right_run():
    for results in run_ranks(2, _buckets):
        for message, error in results.values():
            assert "reduce_bucket_size = 100 with reduce_scatter = false at ZeRO-3: a parameter has 3072" in message
            assert (
                "Set reduce_bucket_size to 3072 or more, reduce_scatter to true, or contiguous_gradients to" in message
            )
            assert error < 1e-5


# ---------------------------------------------------------------- the balance loss of routers


BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def _balanced() -> dict[str, float]:
    """Errors of loss and gradients, by family, ZeRO stage and form of the loss."""
    import deepspeed_plugin

    errors = {}
    batches = [make_batch(seq=16, batch=2, seed=seed) for seed in (1, 2)]  # two micro-batches of a step
    for family in ("mixtral", "qwen2_moe", "qwen3_moe"):
        forget_ulysses()
        plain = make_model(family, **BALANCED)
        losses = []
        for batch in batches:
            output = plain(input_ids=batch["input_ids"], use_cache=False)
            loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())
            assert float(output.aux_loss) > 0
            losses.append(loss + 0.5 * output.aux_loss)
        total = torch.stack(losses).mean()
        total.backward()
        grads = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        wanted = {"loss": total.detach(), **grads}
        for stage, tiled in ((1, False), (1, True), (3, False), (3, True)):
            model = make_model(family, **BALANCED)
            config = ds_config(stage, **UPIPE, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=2)
            engine = make_engine(model, {**config, "gradient_clipping": 0.0}, register_ulysses(model, 2))
            means = []
            for batch in batches:
                ids, labels = shard(batch["input_ids"]), shard(batch["labels"])
                inputs = {"input_ids": ids, "position_ids": shard(torch.arange(16).expand(2, 16)), "use_cache": False}
                if tiled:
                    share = deepspeed_plugin.tiled_sequence_parallel_loss(engine, inputs, labels, tile_rows=3)
                else:
                    share = deepspeed_plugin.sequence_parallel_loss(engine, engine(**inputs), labels)
                engine.backward(share)
                means.append(deepspeed_plugin.group_mean_loss(engine, share))
                if batch is not batches[-1]:
                    engine.step()
            got = {"loss": torch.stack(means).mean(), **gradients(engine)}
            got = {name: got[name] for name in wanted}
            errors[f"{family} stage {stage} tiled {tiled}"] = max(worst(got, wanted).values())
            engine.destroy()
    return errors


def test_the_balance_of_routers_is_that_of_the_whole_sequence():
    for errors in run_ranks(2, _balanced):
        assert {name: error for name, error in errors.items() if not error < 2e-5} == {}
        assert len(errors) == 12


def _unbalanced() -> dict[str, str]:
    import deepspeed_plugin

    batch = make_batch(seq=16)
    model = make_model("mixtral", **BALANCED)
    engine = make_engine(model, ds_config(1, **UPIPE), register_ulysses(model, 2))
    ids, labels = shard(batch["input_ids"]), shard(batch["labels"])
    inputs = {"input_ids": ids, "position_ids": shard(torch.arange(16)[None]), "use_cache": False}
    output = engine(**inputs)
    calls = {
        "bare logits": lambda: deepspeed_plugin.sequence_parallel_loss(engine, output.logits, labels),
        "log-probabilities": lambda: deepspeed_plugin.sequence_log_probs(engine, inputs, labels),
        "as the Trainer": lambda: engine(**inputs, labels=labels, shift_labels=labels),
        "padding": lambda: engine(**inputs, attention_mask=shard((torch.arange(16) < 12).long()[None])),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "accepted"
        except ValueError as error:
            said[name] = str(error)
    model.config.output_router_logits = False  # the remedy of all
    for name, call in calls.items():
        output = engine(**inputs)
        call()
        said[f"{name}, off"] = "accepted"
    return said


def test_where_the_balance_would_be_left_out_or_wrong_it_is_refused():
    for said in run_ranks(2, _unbalanced):
        assert "Pass the model's whole output in the place of logits" in said["bare logits"]
        assert "which log-probabilities leave out" in said["log-probabilities"]
        assert "would add the balance loss of this rank's rows alone" in said["as the Trainer"]
        assert "the balance of the routers leaves those out" in said["padding"]
        assert all(message == "accepted" for name, message in said.items() if name.endswith("off"))
