"""Transformers' Trainer and Accelerate under ALST, as ``accelerate launch --use_deepspeed`` sets them up."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.engines import ds_config, forget_ulysses
from tests.models import make_model

LR, SEQ = 1e-3, 32


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of which one has no labels in its first half, so that a rank has far fewer than the other."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for i in range(count):
        ids = torch.randint(0, 64, (SEQ,), generator=generator)
        labels = ids.clone()
        if i % 2:
            labels[: SEQ // 2 - 1] = -100
        mask = torch.ones(SEQ, dtype=torch.long)
        made.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(SEQ), "attention_mask": mask})
    return made


def accelerate_on_cpu(forget: bool = True) -> None:
    """What ``accelerate launch --use_deepspeed`` sets up, but for the backend it would take on a GPU."""
    import deepspeed_plugin

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(backend="gloo")
    if forget:
        forget_ulysses()
    deepspeed_plugin.register()


def parallelism(ranks: int = 2):
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_size=ranks, sp_backend="deepspeed", sp_handler=handler)


def training_arguments(config: dict, folder: Path, **options):
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        eval_on_start=True,
        report_to=[],
        disable_tqdm=True,
        deepspeed=config,
        accelerator_config={"use_configured_state": True},
        **options,
    )


def make_trainer(stage: int, extra: dict, folder: Path, model: torch.nn.Module | None = None, **options):
    from transformers import Trainer

    accelerate_on_cpu()
    arguments = training_arguments(
        ds_config(stage, gradient_accumulation_steps=2, **extra),
        folder,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        parallelism_config=parallelism(),
        **options,
    )
    return Trainer(model=model or make_model("llama"), args=arguments, train_dataset=rows(8), eval_dataset=rows(2))


def history(trainer) -> list[float]:
    """Every logged loss, gradient norm and evaluation loss, in order."""
    kept = ("loss", "grad_norm", "eval_loss")
    return [float(entry[key]) for entry in trainer.state.log_history for key in kept if key in entry]
