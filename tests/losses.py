"""Losses of one process, with and without whole logits, and their gradients."""

from __future__ import annotations

import torch


class Engine:
    """As much of an engine as the loss asks for; one process."""

    sequence_parallel_size = 1

    def zero_optimization_stage(self) -> int:
        return 0

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, **inputs):
        return self.module(**inputs)


def tiled(model: torch.nn.Module, batch: dict[str, torch.Tensor], reduction: str, **inputs) -> dict[str, torch.Tensor]:
    """The tiled loss of one process, and every gradient."""
    from deepspeed_plugin.losses.loss import target_log_probs

    given = {"input_ids": batch["input_ids"], "use_cache": False, **inputs}
    loss = -target_log_probs(Engine(model), given, batch["labels"], tile_rows=5).sum()
    if reduction == "mean":
        loss = loss / (batch["labels"] != -100).sum()
    return {"loss": loss.detach(), **gradients(model, loss)}


def whole(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The sum of token losses from the model's own logits, and every gradient."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    targets = torch.log_softmax(logits.double(), -1).gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    loss = -(targets * (batch["labels"] != -100)).sum()
    return {"loss": loss.detach(), **gradients(model, loss)}


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
