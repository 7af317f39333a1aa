"""What models do to logits between their head and their loss is done in the tiled loss too, or refused by name."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from tests.models import make_batch, worst
from tests.ranks import run_in_process
from tests.zoo import FAMILIES, VOCABULARY, tiny_model

os.environ.setdefault("DS_ACCELERATOR", "cpu")

SOFTCAP = "div, 30.0; tanh; mul, 30.0"
# Families in which something is done to logits, among them some whose attention UPipe does not serve.
DONE = {
    "beam": f"float; {SOFTCAP}",
    "blt": "float",
    "cohere": "mul, 0.25",
    "cohere_compass_text": "mul, 0.25",
    "falcon_h1": "mul, 0.4",
    "gemma2": SOFTCAP,
    "gemma3n_text": SOFTCAP,
    "granite": "div, 3.0",
    "granitemoe": "div, 3.0",
    "hyperclovax": "mul, 3.0",
    "inkling2_text": f"float; {SOFTCAP}",  # by a module of its own
    "llama": "nothing",
    "nanochat": "div, 15.0; tanh; mul, 15.0",
    "opt": "contiguous",
    "recurrent_gemma": SOFTCAP,
    "vaultgemma": SOFTCAP,
    "xlstm": f"float; {SOFTCAP}",
}
NO_FLOAT64 = ("inkling2_text",)


class Engine:
    """As much of an engine as the loss asks for; one process."""

    sequence_parallel_size = 1

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, **inputs):
        return self.module(**inputs)


def tiled(model: torch.nn.Module, batch: dict[str, torch.Tensor], reduction: str, **inputs) -> dict[str, torch.Tensor]:
    """The tiled loss of one process, and every gradient."""
    from deepspeed_plugin.loss import target_log_probs

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


def _families() -> dict[str, tuple[str, float]]:
    """What each family does to logits, and the largest error of the tiled loss."""
    from transformers.utils import logging

    from deepspeed_plugin.logits import logits_function

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    results = {}
    batch = make_batch(seq=12, vocab=VOCABULARY)
    for family in DONE:
        if family not in FAMILIES:
            continue  # an older Transformers
        model = tiny_model(family).eval()
        if family not in NO_FLOAT64:
            model.double()
        error = max(worst(tiled(model, batch, "sum"), whole(model, batch)).values())
        results[family] = str(logits_function(model, model.get_output_embeddings())), error
    return results


def test_what_families_do_to_logits_is_done_to_tiles():
    pytest.importorskip("transformers")
    results = run_in_process(_families)
    assert {family: what for family, (what, _) in results.items()} == {f: DONE[f] for f in results}
    allowed = {family: 2e-6 if family in NO_FLOAT64 else 1e-13 for family in results}
    assert {family: error for family, (_, error) in results.items() if error > allowed[family]} == {}
