"""PEFT's adapters on tiny models, with weights that do something, and the gradients that are trained."""

from __future__ import annotations

from typing import Any

import torch


def with_lora(model: torch.nn.Module, targets: str, **options: Any) -> torch.nn.Module:
    """`model` with an adapter on the projections that `targets` names by letter, or by name."""
    from peft import LoraConfig, get_peft_model

    options = {"r": 3, "lora_alpha": 5, **options}
    return shaken(get_peft_model(model, LoraConfig(target_modules=_modules(targets), **options)))


def _modules(targets: str) -> str | list[str]:
    if targets == "all-linear":
        return targets
    return targets.split(",") if "_" in targets else [f"{letter}_proj" for letter in targets]


def shaken(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """With adapters that do something: B is made zero by PEFT."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def trained_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """The reduced gradients that there are, by name, between backward and step."""
    from deepspeed.utils import safe_get_full_grad

    named = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    if engine.zero_optimization_stage() == 0:
        assert all(p.grad is None for p in engine.module.parameters() if not p.requires_grad)
        return {name: p.grad.clone() for name, p in named.items()}
    return {name: safe_get_full_grad(p).clone() for name, p in named.items()}
