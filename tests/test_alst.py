"""ALST's own script, where ALST refuses: with the key it trains as one process does, without it fails as before.

The script is that of DeepSpeed's documentation on Ulysses for Transformers, its loss included, and knows nothing of
UPipe. What it must fail with is read from the same script with the plugin off.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.engines import ds_config, forget_ulysses, gradients
from tests.models import make_model, single_process, worst
from tests.ranks import run_ranks

pytest.importorskip("deepspeed")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

RANKS, SEQ = 4, 16
FROZEN = {"optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}}}  # each step has the same weights


@dataclass(frozen=True)
class _Case:
    family: str = "llama"
    heads: tuple[int, int] = (8, 4)
    batches: tuple[int, ...] = (1,)
    changes: dict[str, Any] = field(default_factory=dict)

    def model(self) -> torch.nn.Module:
        heads, kv_heads = self.heads
        shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 4 * heads}
        shape["num_hidden_layers"] = 1
        return make_model(self.family, **shape, **self.changes)


CASES = {
    "6 heads, 3 KV heads": _Case(heads=(6, 3)),
    "14 heads, 2 KV heads": _Case("qwen2", heads=(14, 2)),
    "12 heads, 6 KV heads": _Case("qwen3", heads=(12, 6), changes={"head_dim": 8}),
    "no head_dim in the config": _Case("mixtral", changes={"head_dim": None}),
    "another batch size": _Case(batches=(2, 1)),
}

SECOND = "12 heads, 6 KV heads"  # trained beside another model


def _samples(count: int) -> list[dict[str, torch.Tensor]]:
    """This rank's sequences; in one of two a rank has one label, where the others have four."""
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    samples = []
    for i in range(count):
        ids = torch.randint(0, 64, (SEQ,), generator=generator)
        labels = ids.clone()
        if i % 2:
            labels[: SEQ // dist.get_world_size()] = -100
        samples.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(SEQ)})
    return samples


def _loader(batches: tuple[int, ...]) -> DataLoader:
    ends = torch.tensor(batches).cumsum(0).tolist()
    rows = [list(range(end - size, end)) for size, end in zip(batches, ends, strict=True)]
    return DataLoader(_samples(ends[-1]), batch_sampler=rows)


def _setup(model, config: dict, **options):
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, "sdpa", sequence_parallel_size=dist.get_world_size(), micro_batch_size=1, **options
    )
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    return engine


def _train(engine, batches: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    """Loss and every gradient of each step."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups

    group, size = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_world_size()
    rank = groups._get_sequence_parallel_rank()
    steps = []
    for batch in UlyssesSPDataLoaderAdapter(_loader(batches), rank, group, size, engine.device):
        logits = engine(**batch).logits
        shift_labels = batch["shift_labels"].contiguous()  # the loss takes a view of it
        counted = (shift_labels != -100).sum()
        loss = engine.module.loss_function(
            logits=logits, labels=None, shift_labels=shift_labels, vocab_size=engine.module.config.vocab_size
        )
        losses = torch.distributed.nn.functional.all_gather(loss, group=group)
        counts = torch.distributed.nn.functional.all_gather(counted, group=group)
        mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
        engine.backward(mean)
        steps.append({"loss": mean.detach(), **gradients(engine)})
        engine.step()
    return steps


def _wanted(model, batches: tuple[int, ...], factor: int) -> list[dict[str, torch.Tensor]]:
    """What one process computes in the same steps: every rank's batch in turn."""
    steps = []
    for mine in _loader(batches):
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, {"input_ids": mine["input_ids"], "labels": mine["labels"]})
        for batch in every:
            labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            step = single_process(model, {"input_ids": batch["input_ids"], "labels": labels})
            del step["logits"]
            steps.append({name: t if name == "loss" else t * factor for name, t in step.items()})
    return steps


def _outcome(function, *args, **options) -> str:
    """What `function` raises, with what it says."""
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def _served(runs: list[tuple[int, _Case, int]]) -> list[float]:
    """The largest error of each run: ZeRO stage, case, chunk_heads."""
    import deepspeed

    import deepspeed_plugin

    deepspeed_plugin.register()
    deepspeed.init_distributed("gloo")
    errors, ranks = [], dist.get_world_size()
    for stage, case, chunk_heads in runs:
        forget_ulysses()
        wanted = _wanted(case.model(), case.batches, 1 if stage == 3 else ranks)  # below ZeRO-3 DeepSpeed sums
        engine = _setup(case.model(), ds_config(stage, upipe={"chunk_heads": chunk_heads}, **FROZEN))
        got = _train(engine, case.batches)
        assert len(got) == ranks * len(case.batches)
        errors.append(max(max(worst(*pair).values()) for pair in zip(got, wanted, strict=True)))
        engine.destroy()
    return errors


def test_the_same_script_with_the_key_trains_as_one_process():
    cases = {(3, name) for name in CASES if name != SECOND} | {(1, "6 heads, 3 KV heads")}
    runs = [(stage, CASES[name], 4) for stage, name in sorted(cases)]
    for errors in run_ranks(RANKS, _served, runs):
        assert len(errors) == len(CASES)
        assert [(run, error) for run, error in zip(runs, errors, strict=True) if error > 2e-5] == []


def test_28_heads_on_8_ranks():
    """Qwen2.5-7B's heads, on a node."""
    for errors in run_ranks(8, _served, [(3, _Case("qwen2", heads=(28, 4)), 8)]):
        assert len(errors) == 1 and errors[0] < 2e-5


def _script(case: _Case, config: dict) -> None:
    forget_ulysses()
    _train(_setup(case.model(), config), case.batches)


def _two_models(config: dict) -> None:
    forget_ulysses()
    for heads in ((8, 4), (4, 2)):
        _setup(_Case(heads=heads).model(), config)


def _refused() -> dict[str, Any]:
    import deepspeed
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import deepspeed_plugin

    deepspeed.init_distributed("gloo")
    config = ds_config(1, **FROZEN)
    results: dict[str, Any] = {}
    for plugin in ("off", "on"):
        deepspeed_plugin.unregister() if plugin == "off" else deepspeed_plugin.register()
        of_cases = {name: _outcome(_script, case, config) for name, case in CASES.items()}
        results[plugin] = {**of_cases, "two models": _outcome(_two_models, config)}

    # Neither an engine nor the key: the attention that was refused says so itself, but in evaluation where disabled.
    import deepspeed.runtime.sequence_parallel.ulysses_sp as alst

    def register(model, implementation="sdpa", ranks=RANKS, **options):
        return alst.UlyssesSPAttentionHF.register_with_transformers(model, implementation, ranks, 1, **options)

    forget_ulysses()
    model = CASES["6 heads, 3 KV heads"].model()
    ids = torch.arange(SEQ)[None]
    with torch.no_grad():
        wanted = model.eval()(ids).logits
    register(model, disable_in_eval=True)
    results["called"] = _outcome(model.train(), ids, position_ids=ids)
    with torch.no_grad():
        results["evaluated"] = torch.equal(model.eval()(ids).logits, wanted)
    # An engine of another implementation is no way around it.
    other = _Case(changes={"attn_implementation": "eager"}).model()
    results["other implementation"] = _outcome(deepspeed.initialize, model=other, config=config)
    # The first refusal stays the one that is raised, whatever is registered after it.
    register(model, disable_in_eval=True)
    try:
        deepspeed.initialize(model=model, config=config)
    except ValueError as error:
        results["first"] = f"{error}; {getattr(error, '__notes__', [])}"
    # Not served, so refused at once, as without the plugin.
    results["other setting"] = _outcome(register, model)
    results["other size"] = _outcome(register, model, ranks=2, disable_in_eval=True)
    results["eager"] = _outcome(register, other, "eager")
    results["no length"] = _outcome(register, model, seq_length_is_variable=False)
    results["table"] = "uattn" in ALL_ATTENTION_FUNCTIONS["sdpa"].__code__.co_freevars
    return results


@pytest.fixture(scope="module")
def refused():
    return run_ranks(RANKS, _refused)


def test_without_the_key_it_fails_as_without_the_plugin(refused):
    words = {
        "6 heads, 3 KV heads": "ValueError: Attention head count 6 is not divisible by SP size 4",
        "14 heads, 2 KV heads": "ValueError: Attention head count 14 is not divisible by SP size 4",
        "12 heads, 6 KV heads": "ValueError: KV attention head count 6 is not divisible by SP size 4 or vice versa",
        "two models": "AssertionError: sequence parallel group is already initialized",
    }
    for result in refused:
        assert result["on"] == result["off"]
        assert {name: result["on"][name] for name in words} == words
        assert result["on"]["no head_dim in the config"].startswith("TypeError: ")
        assert "query input tensor does not match the required shape" in result["on"]["another batch size"]


def test_a_refused_attention_raises_when_it_is_called(refused):
    for result in refused:
        assert result["called"] == "ValueError: Attention head count 6 is not divisible by SP size 4"
        assert result["evaluated"] and result["table"]
        assert result["other implementation"] == result["called"]
        assert result["first"].startswith("Attention head count 6 is not divisible by SP size 4; [")
        if sys.version_info >= (3, 11):
            assert 'add "upipe": {"chunk_heads": N} to the ds_config' in result["first"]


def test_what_upipe_does_not_serve_either_is_refused_at_once(refused):
    for result in refused:
        again = "AssertionError: sequence parallel group is already initialized"
        assert result["other setting"] == result["other size"] == again
        assert "eager attn_implementation isn't currently supported" in result["eager"]
        assert "`seq_length_is_variable` needs to be `True`" in result["no length"]


def _several() -> dict[str, Any]:
    """Two models with other heads, registered, built, trained and evaluated in turn; then each without the key."""
    import deepspeed

    import deepspeed_plugin

    deepspeed_plugin.register()
    deepspeed.init_distributed("gloo")
    cases = {"first": _Case(heads=(8, 4)), "second": CASES[SECOND]}
    forget_ulysses()
    wanted = {name: _wanted(case.model(), (1,), 1) for name, case in cases.items()}
    ids = torch.arange(13)[None]  # whole, and of a length that makes no shards
    with torch.no_grad():
        whole = {name: case.model().eval()(ids).logits for name, case in cases.items()}
    config = ds_config(3, upipe={"chunk_heads": 4}, **FROZEN)
    engines, results = {}, {}
    for name, case in cases.items():
        engines[name] = _setup(case.model(), config, disable_in_eval=True)
    for turn in range(2):
        for name, engine in engines.items():
            got = _train(engine, (1,))
            results[f"{name} {turn}"] = max(max(worst(*pair).values()) for pair in zip(got, wanted[name], strict=True))
            engine.eval()
            with torch.no_grad():
                logits = engine(input_ids=ids).logits
            results[f"{name} {turn} evaluated"] = float((logits - whole[name]).abs().max())
            engine.train()
    results["groups"] = float(engines["first"].seq_parallel_group is not engines["second"].seq_parallel_group)
    # Engines without the key are built now; one that calls what was refused fails then.
    engine, *_ = deepspeed.initialize(model=CASES[SECOND].model(), config=ds_config(3, **FROZEN))
    results["no key"] = _outcome(engine, input_ids=ids, position_ids=ids)
    return results


def test_two_models_are_registered_trained_and_evaluated_in_one_process():
    """Public fault 35, in the script as people write it; one set of process groups serves both."""
    for results in run_ranks(RANKS, _several):
        assert results.pop("no key") == "AssertionError: sequence parallel group is already initialized"
        assert len(results) == 2 * 2 * 2 + 1
        assert {name: error for name, error in results.items() if error > 2e-5} == {}
