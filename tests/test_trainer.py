"""Transformers' Trainer and a loop with Accelerate, as people write them: the key in the ds_config is all that is new.

Reference is the same script without the key, which is plain ALST Ulysses, at the same ZeRO stage.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.engines import UPIPE, ds_config, forget_ulysses
from tests.models import make_model
from tests.ranks import run_ranks
from tests.trainers import LR, SEQ, accelerate_on_cpu, history, make_trainer, parallelism, rows, training_arguments

pytest.importorskip("deepspeed")
pytest.importorskip("accelerate")
os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _train(folder: str) -> dict[str, dict]:
    runs = {}
    for stage in (1, 2, 3):
        for name, extra, options in [
            ("ulysses", {}, {}),
            ("upipe", UPIPE, {}),
            ("fused", {"upipe": {"chunk_heads": 2, "memory": "fused"}}, {}),
            (
                "checkpointed",
                UPIPE,
                {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
            ),
        ]:
            where = Path(folder) / f"{name}-{stage}"
            trainer = make_trainer(stage, extra, where, **options)
            trainer.train()
            assert (trainer.model_wrapped.upipe is not None) == bool(extra)
            result = {"history": history(trainer), "files": sorted(p.name for p in where.iterdir())}
            if not options:
                # ALST's data loader can't skip batches, with or without UPipe: a resumed run sees the first again.
                again = make_trainer(stage, extra, where, ignore_data_skip=True)
                again.train(resume_from_checkpoint=str(where / "checkpoint-2"))
                result["resumed"] = history(again)
            runs[f"{stage} {name}"] = result
    forget_ulysses()
    plain = make_model("llama").eval()
    with torch.no_grad():
        losses = [plain(**{name: t[None] for name, t in row.items()}).loss for row in rows(2)]
    runs["single process"] = float(sum(losses)) / len(losses)
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_ranks(2, _train, str(tmp_path_factory.mktemp("trainer")), seconds=500)


def _close(got: list[float], wanted: list[float]) -> bool:
    # Adam's first steps divide by the root of tiny squares, so rounding grows from step to step.
    return len(got) == len(wanted) and got == pytest.approx(wanted, rel=1e-4)


def test_the_trainer_logs_what_it_logs_with_plain_ulysses(runs):
    """Training losses, gradient norms and evaluation losses of 4 steps, of 2 micro-batches each."""
    for by_run in runs:
        for run, result in by_run.items():
            if run != "single process":
                wanted = by_run[f"{run.split()[0]} ulysses"]["history"]
                assert len(wanted) == 1 + 4 * 2 + 2
                assert _close(result["history"], wanted), run


def test_the_trainer_saves_and_resumes(runs):
    for by_run in runs:
        for stage in (1, 2, 3):
            results = {name: by_run[f"{stage} {name}"] for name in ("ulysses", "upipe", "fused")}
            for name, result in results.items():
                assert result["files"] == ["checkpoint-2", "checkpoint-4"]
                assert _close(result["resumed"], results["ulysses"]["resumed"]), name
                # Up to the checkpoint the history is what was saved; from there on it goes on, not from the start.
                assert result["resumed"][:6] == result["history"][:6]
                assert result["resumed"][6] < result["history"][1]


def test_evaluation_is_that_of_the_whole_sequence(runs):
    for by_run in runs:
        for run, result in by_run.items():
            if run != "single process":
                assert result["history"][0] == pytest.approx(by_run["single process"], rel=1e-5), run


def _loop() -> dict[str, list[float]]:
    """The loop of Accelerate's documentation on sequence parallelism."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from torch.utils.data import DataLoader

    losses = {}
    for stage in (1, 3):
        for name, extra in {"ulysses": {}, "upipe": UPIPE}.items():
            accelerate_on_cpu()
            config = ds_config(stage, **extra)
            del config["optimizer"]
            plugin = DeepSpeedPlugin(hf_ds_config={**config, "zero_allow_untested_optimizer": True})
            accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=parallelism())
            model = make_model("llama")
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
            loader = DataLoader(rows(4), batch_size=1)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            assert (model.upipe is not None) == bool(extra)
            group = model.seq_parallel_group
            lengths, got = [], []
            for batch in loader:
                shift_labels = batch.pop("shift_labels")
                lengths.append(shift_labels.shape[1])
                logits = model(**batch).logits
                loss = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), ignore_index=-100, reduction="sum")
                counted = (shift_labels != -100).sum()
                every = torch.distributed.nn.functional.all_gather(loss, group=group)
                counts = torch.distributed.nn.functional.all_gather(counted, group=group)
                mean = sum(every) / sum(counts)
                accelerator.backward(mean)
                optimizer.step()
                optimizer.zero_grad()
                got += [float(mean.detach()), float(model.get_global_grad_norm())]
            assert set(lengths) == {SEQ // 2}  # cut once
            losses[f"{stage} {name}"] = got
    return losses


def test_a_loop_with_accelerate_computes_what_it_computes_with_plain_ulysses():
    for losses in run_ranks(2, _loop):
        for stage in (1, 3):
            assert len(losses[f"{stage} ulysses"]) == 4 * 2
            assert losses[f"{stage} upipe"] == pytest.approx(losses[f"{stage} ulysses"], rel=1e-4)


def _heads_alst_refuses(folder: str) -> dict[str, list[float] | str]:
    """6 heads and 3 KV heads on 4 ranks: two Trainers in one process with the key, then one without."""
    from transformers import Trainer

    shape = {"num_attention_heads": 6, "num_key_value_heads": 3}
    row = rows(1)[0]
    forget_ulysses()
    plain = make_model("llama", **shape)
    loss = plain(**{name: t[None] for name, t in row.items()}).loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    results: dict[str, list[float] | str] = {"single process": [float(loss), float(loss), float(norm)]}
    for run, extra in {"first": UPIPE, "second": UPIPE, "no key": {}}.items():
        accelerate_on_cpu(forget=run != "second")
        config = ds_config(3, gradient_accumulation_steps=2, **extra)
        arguments = training_arguments(
            config, Path(folder), max_steps=1, save_strategy="no", parallelism_config=parallelism(ranks=4)
        )
        trainer = Trainer(
            model=make_model("llama", **shape), args=arguments, train_dataset=[row] * 8, eval_dataset=[row] * 4
        )
        try:
            trainer.train()
            results[run] = history(trainer)
        except ValueError as error:
            results[run] = str(error)
    return results


def test_the_trainer_with_heads_that_alst_refuses(tmp_path):
    """Evaluation loss, training loss and gradient norm are one process's; without the key it fails as before."""
    for results in run_ranks(4, _heads_alst_refuses, str(tmp_path)):
        for run in ("first", "second"):
            assert results[run] == pytest.approx(results["single process"], rel=1e-5), run
        assert results["no key"] == "Attention head count 6 is not divisible by SP size 4"
