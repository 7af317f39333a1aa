"""UPipe under real DeepSpeed engines: against plain ALST Ulysses at the same stage, and against one process."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os

import pytest
import torch
import torch.distributed as dist

from tests.engines import (
    UPIPE,
    compare,
    ds_config,
    expected_of,
    forget_ulysses,
    forward,
    gradients,
    make_engine,
    register_ulysses,
    train_step,
)
from tests.models import make_batch, make_model, shard, single_process, worst
from tests.ranks import run_ranks
from tests.zoo import tiny_model

pytest.importorskip("deepspeed")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

# ---------------------------------------------------------------- equality at every stage, and checkpointing


SETTINGS = {  # what is in the ds_config, and how layers are checkpointed
    "upipe": (UPIPE, None),
    "upipe recompute": ({"upipe": {"chunk_heads": 2, "memory": "recompute"}}, None),
    "upipe fused": ({"upipe": {"chunk_heads": 2, "memory": "fused"}}, {"use_reentrant": False}),
    "upipe blocks": ({"upipe": {"chunk_heads": 4, "memory": "blocks"}}, {"use_reentrant": False}),
    "upipe reentrant": (UPIPE, {"use_reentrant": True}),
    "upipe non-reentrant": (UPIPE, {"use_reentrant": False}),
}
STAGE_FAMILIES = ("llama with bias", "qwen3")
# Every pair of a stage, a setting and a family: a family has a setting at every other stage.
STAGE_CASES = {
    (family, stage): [name for number, name in enumerate(SETTINGS) if (which + stage + number) % 2 == 0]
    for which, family in enumerate(STAGE_FAMILIES)
    for stage in (0, 1, 2, 3)
}


def _stages() -> dict[tuple[str, int, str], tuple[float, float]]:
    """Errors against one process and against plain Ulysses, by family, ZeRO stage and setting."""
    errors = {}
    batch = make_batch(seq=32)
    for family in STAGE_FAMILIES:
        wanted = expected_of(make_model(family), batch)
        for stage in (0, 1, 2, 3):
            results = {}
            for name in ("ulysses", *STAGE_CASES[family, stage]):
                extra, checkpointing = SETTINGS.get(name, ({}, None))
                model = make_model(family)
                mpu = register_ulysses(model, 2)
                engine = make_engine(model, ds_config(stage, **extra), mpu)
                assert (engine.upipe is not None) == bool(extra)
                if checkpointing is not None:
                    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
                model.train()
                if checkpointing == {"use_reentrant": True}:
                    model.enable_input_require_grads()
                results[name] = train_step(engine, batch)
                errors[family, stage, name] = compare(results[name], wanted), compare(results[name], results["ulysses"])
                engine.destroy()
    return errors


@pytest.fixture(scope="module")
def stage_errors():
    return run_ranks(2, _stages, seconds=500)


@pytest.mark.parametrize(
    ("family", "stage", "name"), [(*where, name) for where in STAGE_CASES for name in ("ulysses", *STAGE_CASES[where])]
)
def test_equals_ulysses_and_one_process_at_every_zero_stage(stage_errors, family, stage, name):
    """Public faults 7, 17: gradients and norms are the same at ZeRO 0-3, with checkpointing of both kinds."""
    for errors in stage_errors:
        # float32 with sums in another order: a few units in the last place of 2^-24.
        assert max(errors[family, stage, name]) < 5e-6


def _bf16() -> dict[str, float]:
    """Relative error of all gradients against float32, beside Ulysses's."""
    batch = make_batch(seq=64)
    wanted = expected_of(make_model("llama"), batch)
    errors = {}
    for stage in (1, 3):
        for name, extra in {"ulysses": {}, "upipe": UPIPE}.items():
            model = make_model("llama")
            engine = make_engine(model, ds_config(stage, bf16={"enabled": True}, **extra), register_ulysses(model, 2))
            got = train_step(engine, batch)
            grads = [(got[k].float() - w).norm() / w.norm() for k, w in wanted.items() if k not in ("norm", "loss")]
            errors[f"{stage} {name}"] = float(torch.stack(grads).mean())
            if extra:
                assert "in bfloat16" in engine.upipe.summary
            engine.destroy()
    return errors


def test_bf16_errs_as_ulysses_does():
    for errors in run_ranks(2, _bf16):
        for stage in (1, 3):
            assert 0 < errors[f"{stage} upipe"] < 1.15 * errors[f"{stage} ulysses"]


def _selective() -> dict[str, tuple[float, int]]:
    """(error, attention forwards) of a step under selective and plain checkpointing, at ZeRO 2 and 3."""
    import deepspeed_plugin
    from upipe_integrations.kernels import TorchCpuFlash

    calls = []
    forward_of_kernel = TorchCpuFlash.forward

    def counted(self, *args):
        calls.append(1)
        return forward_of_kernel(self, *args)

    batch = make_batch(seq=32)
    wanted = expected_of(make_model("qwen3"), batch)
    TorchCpuFlash.forward = counted
    results = {}
    for stage in (2, 3):
        for keep in (True, False):
            model = make_model("qwen3")
            settings = {"upipe": {"chunk_heads": 4, "memory": "fused"}}
            engine = make_engine(model, ds_config(stage, **settings), register_ulysses(model, 2))
            deepspeed_plugin.enable_checkpointing(engine.module, keep_attention=keep)
            engine.train()
            calls.clear()
            error = compare(train_step(engine, batch), wanted)
            results[f"{stage} {keep}"] = (error, len(calls))
            engine.destroy()
    try:
        deepspeed_plugin.enable_checkpointing(make_model("llama"))
    except ValueError as error:
        results["none"] = str(error)
    return results


def test_checkpointing_keeps_the_attention_result():
    layers, stages = 2, 2
    for results in run_ranks(2, _selective):
        assert "LlamaForCausalLM has no attention that UPipe replaced" in results.pop("none")
        assert {name: error for name, (error, _) in results.items() if error > 5e-6} == {}
        for stage in (2, 3):
            assert results[f"{stage} True"][1] == 2 * layers * stages  # forward, and again in the fused backward
            assert results[f"{stage} False"][1] == 3 * layers * stages


def _two_forwards() -> dict[str, float]:
    """Errors of gradients of two forwards under one backward, at ZeRO-3 as it is by default: it gathers ahead."""
    import deepspeed_plugin

    batches = [make_batch(seq=32, seed=seed) for seed in (1, 2)]
    plain = make_model("llama")
    for batch in batches:
        logits = plain(input_ids=batch["input_ids"], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    errors = {}
    for memory in ("keep_heads", "keep", "recompute", "fused", "blocks"):
        for threshold in (0, 100_000):
            model = make_model("llama")
            config = ds_config(3, upipe={"chunk_heads": 4, "memory": memory})
            config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": threshold}
            engine = make_engine(model, config, register_ulysses(model, 2))
            deepspeed_plugin.enable_checkpointing(engine.module)
            first, second = (forward(engine, batch)[1] for batch in batches)
            engine.backward(first + second)
            errors[f"{memory} {threshold}"] = max(worst(gradients(engine), wanted).values())
            engine.destroy()
    return errors


def test_checkpointing_of_two_forwards_under_one_backward():
    for errors in run_ranks(2, _two_forwards):
        assert len(errors) == 10 and {name: error for name, error in errors.items() if error > 5e-6} == {}


# ---------------------------------------------------------------- groups: two of two, by mpu and by mesh


def _two_by_two(route: str) -> dict[str, float]:
    """SP 2 x DP 2: each data-parallel rank has its own batch; gradients are averaged over them."""
    replica = dist.get_rank() // 2
    batches = [make_batch(seq=32, seed=s) for s in (1, 2)]
    per_batch = [expected_of(make_model("llama"), b) for b in batches]
    wanted = {k: torch.stack([w[k] for w in per_batch]).mean(0) for k in per_batch[0]}
    wanted["norm"] = torch.stack([t.norm() for k, t in wanted.items() if k not in ("loss", "norm")]).norm()
    errors = {}
    for stage in (0, 1, 2, 3) if route == "mpu" else (3,):
        model = make_model("llama")
        if route == "mpu":
            engine = make_engine(model, ds_config(stage, **UPIPE), register_ulysses(model, 2))
        else:
            sizes = {"sequence_parallel_size": 2, "data_parallel_size": 2}
            engine = make_engine(model, ds_config(stage, **UPIPE, **sizes))
        assert engine.train_batch_size() == 2
        got = train_step(engine, batches[replica], engine.seq_parallel_group)
        dist.all_reduce(got["loss"])  # the same on both ranks of a group, so the mean over all is over groups
        got["loss"] /= dist.get_world_size()
        errors[f"{route}, stage {stage}"] = compare(got, wanted)
        engine.destroy()
    return errors


@pytest.mark.parametrize("route", ["mpu", "mesh"])
def test_two_groups_of_two_ranks(route):
    """Public faults 6, 7, 26: group ranks, the gradient scale and the data-parallel size."""
    for errors in run_ranks(4, _two_by_two, route):
        assert {case: error for case, error in errors.items() if error > 5e-6} == {}


# ---------------------------------------------------------------- ZeRO-3 parameters


def _gathered(memory: str) -> dict[str, object]:
    """How many layers' attention weights are gathered whenever attention runs backward, and after the step."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    from upipe_integrations.kernels import TorchCpuFlash

    model = make_model("qwen3", num_hidden_layers=4)
    settings = {"upipe": {"chunk_heads": 4, "memory": memory}}
    engine = make_engine(model, ds_config(3, **settings), register_ulysses(model, 2))
    layers = [layer.self_attn for layer in model.model.layers]
    # Registered before the first forward; DeepSpeed would find out by itself, but only by gathering late.
    assert all(len(a.upipe._external_params) == (5 if memory == "recompute" else 6) for a in layers)

    def alive() -> int:
        projections = ("q_proj", "k_proj", "v_proj", *(() if memory == "recompute" else ("o_proj",)))
        return sum(
            any(getattr(a, name).weight.ds_status != ZeroParamStatus.NOT_AVAILABLE for name in projections)
            for a in layers
        )

    seen = []
    backward = TorchCpuFlash.backward

    def watched(self, *args):
        seen.append(alive())
        return backward(self, *args)

    TorchCpuFlash.backward = watched
    after = []
    for step in range(2):
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            else:
                model.gradient_checkpointing_disable()
            _, loss = forward(engine, make_batch(seq=32, seed=step))
            engine.backward(loss)
            engine.step()
            after.append(alive())
    return {"in backward": seen, "after": after}


@pytest.mark.parametrize("memory", ["keep", "recompute", "fused"])
def test_zero3_gathers_one_layer_at_a_time_and_keeps_none(memory):
    """Public fault 19."""
    for result in run_ranks(2, _gathered, memory):
        assert len(result["in backward"]) == 4 * 4 * 2  # steps, layers, stages
        assert set(result["in backward"]) == {1}
        assert set(result["after"]) == {0}


def _hooked_output_projections(stage: int) -> list[tuple[list[bool], list[int], float]]:
    """Hooks of a user's on output projections: of layer 0 before setup, of layer 1 after it, of layer 2 for a step."""
    batch = make_batch(seq=32)
    wanted = expected_of(make_model("llama", num_hidden_layers=4), batch)
    model, called = make_model("llama", num_hidden_layers=4), []
    layers = [layer.self_attn for layer in model.model.layers]

    def hook(module, given, result):
        called.append(next(i for i, layer in enumerate(layers) if layer.o_proj is module))

    first = layers[0].o_proj.register_forward_hook(hook)
    still = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "zero_allow_untested_optimizer": True}
    engine = make_engine(model, ds_config(stage, **UPIPE, **still), register_ulysses(model, 2))
    second, third = (layers[i].o_proj.register_forward_hook(hook) for i in (1, 2))
    runs = []
    for _ in range(2):
        projects = [layer.upipe.projects() for layer in layers]
        error = compare(train_step(engine, batch), wanted)
        runs.append((projects, sorted(called), error))
        called.clear()
        first.remove()
        third.remove()
    second.remove()
    return runs


@pytest.mark.parametrize("stage", [0, 3])
def test_hooks_of_the_output_projection_run(stage):
    """The layer is then called, as without UPipe; hooks of DeepSpeed, which ZeRO-3 puts on every layer, are none."""
    for (before, called, error), (after, called_after, error_after) in run_ranks(2, _hooked_output_projections, stage):
        assert (before, called) == ([False, False, False, True], [0, 1, 2])
        assert (after, called_after) == ([False, False, True, True], [1])  # as at first under ZeRO-3
        assert max(error, error_after) < 5e-6


def _other_families() -> dict[str, float]:
    """Families with sinks, softcap, a fused projection and latents, at ZeRO 2 and 3, checkpointed and not."""
    import deepspeed
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu

    deepspeed.init_distributed("gloo")
    mpu.initialize_sequence_parallel(2)
    batch = make_batch(seq=32)
    errors = {}
    for family in ("gpt_oss", "gemma2", "phi3", "afmoe", "olmo3", "deepseek_v3"):
        wanted = single_process(tiny_model(family), batch)
        del wanted["logits"]
        for stage, checkpointing in ((2, False), (3, False), (3, True)):
            model = tiny_model(family)
            engine = make_engine(model, ds_config(stage, **UPIPE), mpu)
            if checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            got = train_step(engine, batch)
            del got["norm"]
            errors[f"{family}, {stage}, {checkpointing}"] = max(worst(got, wanted).values())
            engine.destroy()
    return errors


def test_other_families_in_engines():
    for errors in run_ranks(2, _other_families):
        assert {case: error for case, error in errors.items() if error > 2e-5} == {}


def _partitioned_from_the_start() -> float:
    """A model built under zero.Init, as from_pretrained does at ZeRO-3: weights are never whole on a rank."""
    import deepspeed

    batch = make_batch(seq=32)
    plain = make_model("qwen3")
    wanted = expected_of(plain, batch)
    deepspeed.init_distributed("gloo")
    config = ds_config(3, **UPIPE)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = type(plain)(plain.config)
    assert all(p.numel() == 0 for p in model.parameters())
    weights = plain.state_dict()
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            parameter.data.copy_(weights[name])
    engine = make_engine(model, config, register_ulysses(model, 2))
    return compare(train_step(engine, batch), wanted)


def test_a_model_partitioned_from_the_start():
    for error in run_ranks(2, _partitioned_from_the_start):
        assert error < 5e-6


# ---------------------------------------------------------------- checkpoints of weights


def _state_dicts() -> dict[str, object]:
    plain = make_model("qwen3")
    state = {name: t.clone() for name, t in plain.state_dict().items()}
    batch = make_batch()
    wanted = single_process(plain, batch)["logits"]
    model = make_model("qwen3", seed=9)
    model.load_state_dict(state)
    engine = make_engine(model, ds_config(0, **UPIPE), register_ulysses(model, 2))
    logits, _ = forward(engine, batch)
    saved = engine.module.state_dict()
    return {
        "logits": float((logits.detach() - shard(wanted)).abs().max() / wanted.abs().max()),
        "keys": list(saved) == list(state),
        "equal": all(torch.equal(saved[name], t) for name, t in state.items()),
    }


def test_weights_of_a_single_process_model_load_and_save_unchanged():
    """Public fault 34: same logits with a state dict from elsewhere, and the same state dict back."""
    for result in run_ranks(2, _state_dicts):
        assert result["logits"] < 5e-6
        assert result["keys"] and result["equal"]


# ---------------------------------------------------------------- the switch


def _forms_of_config(tmp_path: str) -> dict[str, str]:
    import base64

    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    import deepspeed_plugin
    from deepspeed_plugin.settings import read_settings

    deepspeed.init_distributed("gloo")
    config = ds_config(1, sequence_parallel_size=1, upipe={"chunk_heads": 2})
    path = f"{tmp_path}/ds_config.json"
    with open(path, "w") as file:
        json.dump(config, file)
    coded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    ways = {
        "dict": {"config": config},
        "path": {"config": path},
        "base64": {"config": coded},
        "config_params": {"config_params": config},
        "args": {"args": argparse.Namespace(deepspeed_config=path)},
        "HfDeepSpeedConfig": {"config": HfDeepSpeedConfig(config).config},
    }
    result = {}
    for name, arguments in ways.items():
        engine, *_ = deepspeed.initialize(model=make_model("llama"), **arguments)
        result[name] = engine.upipe.summary
        engine.destroy()
    assert read_settings(HfDeepSpeedConfig(config)) == read_settings(config) == read_settings(path)

    del config["upipe"]
    plain, *_ = deepspeed.initialize(model=make_model("llama"), config=config)
    result["no key"] = str(plain.upipe is not None or any(hasattr(m, "upipe") for m in plain.module.modules()))
    deepspeed_plugin.unregister()
    engine, *_ = deepspeed.initialize(model=make_model("llama"), **ways["path"])
    result["unregistered"] = str(engine.upipe is not None)
    deepspeed_plugin.register()
    engine, *_ = deepspeed.initialize(model=make_model("llama"), **ways["path"])
    result["again"] = engine.upipe.summary
    return result


def test_every_form_of_config_turns_it_on_and_nothing_else_does(tmp_path):
    (result,) = run_ranks(1, _forms_of_config, str(tmp_path))
    assert result.pop("no key") == result.pop("unregistered") == "False"
    assert len(result) == 7
    for name, summary in result.items():
        assert "2 attention layers replaced (LlamaAttention)" in summary, name
        assert "on 1 ranks in 4 stages of 2 heads" in summary, name


def _printed_summaries() -> int:
    model = make_model("llama")
    mpu = register_ulysses(model, 2)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine = make_engine(model, ds_config(1, **UPIPE), mpu)
    return printed.getvalue().count(engine.upipe.summary)


def test_the_switch_says_what_it_did_on_rank_0():
    """Visible without any logging set-up."""
    assert run_ranks(2, _printed_summaries) == [1, 0]


def _two_models() -> list[float]:
    """Public fault 35: models with other heads in one process; plain ALST has one shape per process."""
    batch = make_batch(seq=32)
    shapes = [("llama", {}), ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2})]
    wanted = [expected_of(make_model(family, **changes), batch) for family, changes in shapes]
    models = [make_model(family, **changes) for family, changes in shapes]
    mpu = register_ulysses(models[0], 2)
    engines = [make_engine(model, ds_config(1, **UPIPE), mpu) for model in models]
    return [compare(train_step(engine, batch), w) for engine, w in zip(engines, wanted, strict=True)]


def test_two_models_with_different_heads():
    for errors in run_ranks(2, _two_models):
        assert max(errors) < 5e-6


def _packed_and_windowed() -> dict[str, float]:
    """Packed documents that cut through shards, and windows, at ZeRO 1 and 3, checkpointed too."""
    errors = {}
    batch = make_batch(seq=32, seed=4)
    positions = torch.cat([torch.arange(5), torch.arange(18), torch.arange(9)])[None]
    for family, changes in {
        "llama": {},
        "mistral": {"sliding_window": 6},
        "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    }.items():
        wanted = {}
        for name, where in {"packed": positions, "one document": torch.arange(32)[None]}.items():
            forget_ulysses()
            wanted[name] = single_process(make_model(family, **changes), batch, where)
        assert worst(wanted["packed"], wanted["one document"])["loss"] > 1e-3
        for stage, checkpointing in ((1, None), (3, True), (3, False)):
            model = make_model(family, **changes)
            engine = make_engine(model, ds_config(stage, **UPIPE), register_ulysses(model, 2))
            model.train()
            if checkpointing is not None:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
                model.enable_input_require_grads()
            for name, where in {"packed": positions, "one document": torch.arange(32)[None]}.items():
                _, loss = forward(engine, batch, positions=where)
                forward(engine, make_batch(seq=32))  # another forward, of one document, before the backward
                engine.backward(loss)
                got = {"loss": loss.detach(), **gradients(engine)}
                dist.all_reduce(got["loss"])
                got["loss"] /= 2 if stage == 3 else 1
                right = {key: t for key, t in wanted[name].items() if key != "logits"}
                errors[f"{family}, {stage}, {checkpointing}, {name}"] = max(worst(got, right).values())
                engine.zero_grad() if stage == 0 else engine.optimizer.zero_grad()
            engine.destroy()
    return errors


def test_packed_documents_and_windows():
    """Public faults 14, 21: where plain ALST with sdpa is silently wrong."""
    for errors in run_ranks(2, _packed_and_windowed):
        assert len(errors) == 3 * 3 * 2
        assert {case: error for case, error in errors.items() if error > 5e-6} == {}


def _lengths() -> list[int]:
    model = make_model("llama")
    engine = make_engine(model, ds_config(1, **UPIPE), register_ulysses(model, 2))
    seen = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
        layer.self_attn.register_forward_hook(lambda module, args, output: seen.append(output[0].shape[1]))
    forward(engine, make_batch(seq=32))
    return seen


def test_layers_hold_shards():
    """Public fault 23: the longest tensor between layers is S / C."""
    for seen in run_ranks(2, _lengths):
        assert seen == [16, 16] * 2


# ---------------------------------------------------------------- evaluation


def _evaluation() -> dict[str, object]:
    batch = make_batch(seq=13)  # odd: no shards could be made of it
    plain = make_model("llama").eval()
    with torch.no_grad():
        wanted = plain(input_ids=batch["input_ids"]).logits
        written = plain.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
    model = make_model("llama")
    engine = make_engine(model, ds_config(1, **UPIPE), register_ulysses(model, 2, disable_in_eval=True))
    engine.eval()
    with torch.no_grad():
        got = engine(input_ids=batch["input_ids"]).logits
        generated = engine.module.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
    engine.train()
    trained = train_step(engine, make_batch(seq=32))
    return {
        "equal": torch.equal(got, wanted),
        "generated": torch.equal(generated, written),
        "trained": float(trained["loss"]),
    }


def test_evaluation_with_disable_in_eval_is_the_unpatched_model():
    """Public fault 24, and generate() with a key/value cache."""
    for result in run_ranks(2, _evaluation):
        assert result["equal"] and result["generated"]
        assert result["trained"] > 0


def _sharded_evaluation() -> tuple[float, float]:
    """Errors of the logits of whole batches, and of those before padding on the right."""
    batch = make_batch(seq=32)
    wanted = single_process(make_model("llama"), batch)["logits"]
    short = {name: t[:, :27] for name, t in batch.items()}
    unpadded = single_process(make_model("llama"), short)["logits"]
    model = make_model("llama")
    engine = make_engine(model, ds_config(1, **UPIPE), register_ulysses(model, 2))
    engine.eval()
    with torch.no_grad():
        logits, _ = forward(engine, batch)
        padded, _ = forward(engine, {name: torch.nn.functional.pad(t, (0, 5)) for name, t in short.items()})
    mine = shard(torch.nn.functional.pad(unpadded, (0, 0, 0, 5)))
    real = shard(torch.arange(32)[None])[0] < 27
    return (
        float((logits - shard(wanted)).abs().max() / wanted.abs().max()),
        float((padded - mine)[:, real].abs().max() / unpadded.abs().max()),
    )


@pytest.fixture(scope="module")
def evaluated():
    return run_ranks(2, _sharded_evaluation)


def test_evaluation_on_shards(evaluated):
    for error, _ in evaluated:
        assert error < 5e-6


def test_a_padded_tail_changes_nothing_before_it(evaluated):
    """Public fault 31."""
    for _, error in evaluated:
        assert error < 5e-6


# ---------------------------------------------------------------- bad input: before the engine, and at its door


def _bad_configs() -> dict[str, str]:
    model = make_model("llama")
    mpu = register_ulysses(model, 2)
    cases = {
        "typo of ours": ({"upip": {"chunk_heads": 4}}, mpu),
        "typo of ours 2": ({"UPipe": {"chunk_heads": 4}}, mpu),
        "typo in block": ({"upipe": {"chunk_head": 4}}, mpu),
        "not a multiple": ({"upipe": {"chunk_heads": 3}}, mpu),
        "too large": ({"upipe": {"chunk_heads": 16}}, mpu),
        "not an integer": ({"upipe": {"chunk_heads": "4"}}, mpu),
        "no block": ({"upipe": True}, mpu),
        "kernel": ({"upipe": {"chunk_heads": 4, "kernel": "torch-cuda-flash"}}, mpu),
        "no group": (UPIPE, None),
        "no group, size": ({**UPIPE, "sequence_parallel_size": 2}, None),
        "other size": ({**UPIPE, "sequence_parallel_size": 4}, mpu),
        "mesh": ({**UPIPE, "sequence_parallel_size": 2, "data_parallel_size": 1}, None),
    }
    messages = {}
    for name, (extra, unit) in cases.items():
        try:
            make_engine(model, ds_config(1, **extra), unit)
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)
        assert not any(hasattr(m, "upipe") for m in model.modules()), name
    # An engine that can't be built (here: after UPipe was put in) leaves the model as it was.
    try:
        make_engine(model, {**ds_config(1, **UPIPE), "optimizer": {"type": "NoSuchOptimizer", "params": {}}}, mpu)
    except AssertionError as error:
        messages["undone"] = f"{error}; {any(hasattr(m, 'upipe') for m in model.modules())}"
    return messages


def _remedied_configs(mesh: bool) -> dict[str, float]:
    """Errors of a step against one process, by the refusal of a setting whose advice was followed.

    DeepSpeed keeps a mesh, or an mpu, for the process: they do not go together in one.
    """
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as state

    batch = make_batch(seq=32)
    wanted = expected_of(make_model("llama"), batch)
    sized = {**UPIPE, "sequence_parallel_size": 2}
    cases = {
        "no group, by ALST": (1, UPIPE, lambda model: register_ulysses(model, 2)),
        "no group, by DeepSpeed's groups": (1, sized, "groups"),
        "no group and mesh, at ZeRO-3": (3, {**sized, "data_parallel_size": 1}, None),
        "mesh, by an mpu": (1, sized, lambda model: register_ulysses(model, 2)),
        "kernel": (1, {"upipe": {"chunk_heads": 4, "kernel": "auto"}}, lambda model: register_ulysses(model, 2)),
        **{
            f"not a multiple: {value}": (2, {"upipe": {"chunk_heads": value}}, lambda model: register_ulysses(model, 2))
            for value in (2, 4, 8)
        },
    }
    errors = {}
    for name, (stage, extra, mpu) in cases.items():
        if mesh != (mpu is None):
            continue
        forget_ulysses()
        model = make_model("llama")
        if mpu == "groups":
            state.initialize_sequence_parallel(2)
            unit = state
        else:
            unit = mpu(model) if callable(mpu) else None
        engine = make_engine(model, ds_config(stage, **extra), unit)
        assert engine.upipe is not None, name
        errors[name] = compare(train_step(engine, batch, engine.seq_parallel_group), wanted)
        engine.destroy()
    return errors


def test_what_a_refused_setting_is_advised_ends_in_a_right_run():
    """Public fault 45."""
    for mesh, count in ((True, 1), (False, 7)):
        for errors in run_ranks(2, _remedied_configs, mesh):
            assert len(errors) == count and {name: error for name, error in errors.items() if not error < 5e-6} == {}


@pytest.fixture(scope="module")
def bad_configs():
    return run_ranks(2, _bad_configs)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("typo of ours", r"ds_config key 'upip': .*did you mean 'upipe'\? Write"),
        ("typo of ours 2", r"ds_config key 'UPipe': .*did you mean 'upipe'"),
        ("typo in block", r"upipe\.chunk_head = 4: unknown key \(did you mean 'chunk_heads'\?\)"),
        ("not a multiple", r"chunk_heads = 3: must be a multiple of the 2 .*Values that fit this model: 2, 4, 8"),
        ("too large", r"chunk_heads = 16: larger than the model's 8 query heads"),
        ("not an integer", r"chunk_heads = '4': must be an integer"),
        ("no block", r"upipe = True: must be a block"),
        ("kernel", r"upipe\.kernel = 'torch-cuda-flash': .*needs CUDA tensors"),
        ("no group", r"no sequence-parallel group\. To make one, pass deepspeed\.initialize\(\.\.\., mpu=\.\.\.\)"),
        ("mesh", r"stage = 1: with a device mesh .* does not reduce gradients over .*Use stage 3, or pass"),
        ("no group, size", r"no sequence-parallel group"),
        ("other size", r"sequence_parallel_size = 4: the sequence-parallel group that was set up has 2 ranks"),
    ],
)
def test_bad_settings_are_refused_before_the_engine_is_built(bad_configs, case, message):
    """Public faults 23, 36."""
    first, second = (messages[case] for messages in bad_configs)
    assert first == second
    with pytest.raises(ValueError, match=message):
        raise ValueError(first)


def _bad_inputs() -> dict[str, str]:
    rank = dist.get_rank()
    model = make_model("llama")
    engine = make_engine(model, ds_config(1, **UPIPE), register_ulysses(model, 2))
    ids = shard(make_batch(seq=32)["input_ids"])
    positions = shard(torch.arange(32)[None])
    jump = shard(torch.cat([torch.arange(20), torch.arange(5, 17)])[None])
    ones = torch.ones_like(ids)
    padded = torch.ones(1, 32, dtype=torch.long)
    padded[:, :4] = 0
    good = {"input_ids": ids, "position_ids": positions}
    cases = {
        "no positions": {"input_ids": ids},
        "not sharded": {"input_ids": make_batch(seq=32)["input_ids"], "position_ids": torch.arange(32)[None]},
        "jump": {**good, "position_ids": jump},
        "mrope": {**good, "position_ids": positions[None].expand(3, 1, 16)},
        "padded": {**good, "attention_mask": shard(padded)},
        "4-d mask": {**good, "attention_mask": torch.zeros(1, 1, 16, 16)},
        "lengths": {"input_ids": ids[:, : 16 - rank], "position_ids": positions[:, : 16 - rank]},
        "batches": {"input_ids": ids.expand(1 + rank, -1), "position_ids": positions.expand(1 + rank, -1)},
        "swapped": {**good, "position_ids": torch.arange(32)[None].chunk(2, 1)[1 - rank]},
        "cache": {**good, "past_key_values": _cache(model)},
        "attentions": {**good, "output_attentions": True},
        "labels": {**good, "labels": ids},
        "packed kwargs": {**good, "cu_seq_lens_q": torch.tensor([0, 20, 32])},
    }
    messages = {}
    for name, arguments in cases.items():
        try:
            engine(**arguments)
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)
    logits = engine(**good).logits
    masked = engine(**good, attention_mask=ones).logits
    positional = engine.module.model(ids, ones, positions).last_hidden_state
    plain = engine.module.model(**good).last_hidden_state
    messages["mask of ones"] = str(torch.equal(logits, masked) and torch.equal(positional, plain))
    given = engine(**good, shift_labels=ids)  # as the loop of ALST's documentation does
    messages["shift_labels alone"] = str(torch.equal(logits, given.logits) and given.loss is None)
    return messages


def _cache(model):
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


@pytest.fixture(scope="module")
def bad_inputs():
    return run_ranks(2, _bad_inputs)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no positions", r"ranks \[0, 1\]: position_ids are missing.*rank r of the group holds positions"),
        ("not sharded", r"position_ids start at \[0, 0\] by rank, .* start at \[0, 32\]: either"),
        ("jump", r"position_ids jump to \[0, 5\]: a packed document must start at 0"),
        ("mrope", r"must be \[batch or 1, rows of this rank\]"),
        ("padded", r"attention_mask hides tokens before others in batch rows \[0\].*Pad on the right"),
        ("4-d mask", r"ranks \[0, 1\]: attention_mask is not a \[batch, rows of this rank\] mask"),
        ("lengths", r"different shapes: batch \[1, 1\], rows \[16, 15\] by rank"),
        ("batches", r"different shapes: batch \[1, 2\]"),
        ("swapped", r"position_ids start at \[16, 0\] by rank.*out of order"),
        ("cache", r"called with a key/value cache \(generate\(\)\).*disable_in_eval=True"),
        ("attentions", r"output_attentions = True, which UPipe does not support"),
        (
            "labels",
            r"LlamaForCausalLM was called with labels, which it would shift .*last label of every shard is lost",
        ),
        ("packed kwargs", r"cu_seq_lens are not the boundaries of the documents that position_ids show"),
    ],
)
def test_bad_input_is_refused_on_every_rank_alike(bad_inputs, case, message):
    """Public faults 1, 12, 14, 15, 16, 25, 30."""
    first, second = (messages[case] for messages in bad_inputs)
    assert first == second
    with pytest.raises(ValueError, match=message):
        raise ValueError(first)


def test_a_mask_of_ones_is_no_mask(bad_inputs):
    assert all(messages["mask of ones"] == "True" for messages in bad_inputs)


def test_shift_labels_alone_change_nothing(bad_inputs):
    assert all(messages["shift_labels alone"] == "True" for messages in bad_inputs)


def test_a_model_whose_engine_fails_is_left_as_it_was(bad_configs):
    for messages in bad_configs:
        assert "NoSuchOptimizer" in messages["undone"] and messages["undone"].endswith("False")
