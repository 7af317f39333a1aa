"""What models do to logits between their head and their loss is done in the tiled loss too, or refused by name."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from tests.losses import Engine, gradients, tiled, whole
from tests.models import make_batch, make_model, shard, worst
from tests.ranks import run_in_process, run_ranks
from tests.zoo import FAMILIES, VOCABULARY, tiny_model

os.environ.setdefault("DS_ACCELERATOR", "cpu")

SOFTCAP = "div, 30.0; tanh; mul, 30.0"
# Each kind of thing that is done to logits, in families served or not; test_every_family.py runs all that are served.
DONE = {
    "beam": f"float; {SOFTCAP}",
    "cohere": "mul, 0.25",
    "gemma2": SOFTCAP,
    "granite": "div, 3.0",
    "hyperclovax": "mul, 3.0",
    "inkling2_text": f"float; {SOFTCAP}",  # by a module of its own
    "llama": "nothing",
    "nanochat": "div, 15.0; tanh; mul, 15.0",
    "opt": "contiguous",
}
NO_FLOAT64 = ("inkling2_text",)


def _families() -> dict[str, tuple[str, float]]:
    """What each family does to logits, and the largest error of the tiled loss."""
    from transformers.utils import logging

    from deepspeed_plugin.losses.logits import logits_function

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


# ---------------------------------------------------------------- Liger


def liger_fused_linear_cross_entropy(
    input,
    weight,
    target,
    bias=None,
    ce_weight=None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype=None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
):
    """In the place of Liger's, which needs a GPU: its signature, and its values for the arguments used."""
    assert (input.dim(), target.dim(), reduction, accum_dtype) == (2, 1, "sum", torch.float32)
    logits = torch.nn.functional.linear(input, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    targets = torch.log_softmax(logits, -1).gather(-1, target.clamp(min=0)[:, None])[:, 0]
    return -(targets * (target != ignore_index)).sum()


def _with_stand_in_for_liger() -> None:
    functional = types.ModuleType("liger_kernel.transformers.functional")
    functional.liger_fused_linear_cross_entropy = liger_fused_linear_cross_entropy
    transformers = types.ModuleType("liger_kernel.transformers")
    transformers.functional = functional
    sys.modules["liger_kernel"] = types.ModuleType("liger_kernel")
    sys.modules |= {m.__name__: m for m in (transformers, functional)}


def _engines() -> dict[str, float]:
    """A softcap and a scale, with either kernel, as engines of two ranks, against one process."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    import deepspeed_plugin
    from tests.test_deepspeed import ds_config, forget_ulysses, make_engine, register_ulysses
    from tests.test_deepspeed import gradients as engine_gradients

    def model_with(function, tied: bool) -> torch.nn.Module:
        model = make_model("llama", tie_word_embeddings=tied)

        class Changed(type(model)):
            def forward(self, input_ids, **kwargs):
                logits = self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state)
                return CausalLMOutputWithPast(logits=function(logits))

        model.__class__ = Changed
        return model

    def softcap(logits):
        return 2 * torch.tanh(logits / 2)

    def scale(logits):
        return 0.3 * logits

    _with_stand_in_for_liger()
    errors = {}
    batch = make_batch(seq=16)
    for name, function, kernel, stage in [
        ("softcap", softcap, "torch", 1),
        ("softcap", softcap, "torch", 3),
        ("softcap", softcap, "liger", 3),
        ("scale", scale, "torch", 3),
        ("nothing", lambda logits: logits, "liger", 2),
    ]:
        forget_ulysses()
        wanted = whole(model_with(function, stage == 3), batch)
        model = model_with(function, stage == 3)
        engine = make_engine(model, ds_config(stage, upipe={"chunk_heads": 4}), register_ulysses(model, 2))
        group = engine.seq_parallel_group
        positions = torch.arange(16).expand_as(batch["input_ids"])
        inputs = {"input_ids": shard(batch["input_ids"], group), "position_ids": shard(positions, group)}
        how = {"kernel": kernel} if kernel == "liger" else {"tile_rows": 5}
        labels = shard(batch["labels"], group)
        loss = deepspeed_plugin.tiled_sequence_parallel_loss(
            engine, {**inputs, "use_cache": False}, labels, reduction="sum", **how
        )
        engine.backward(loss)
        got = {"loss": deepspeed_plugin.group_mean_loss(engine, loss), **engine_gradients(engine)}
        errors[f"{name}, {kernel}, stage {stage}"] = max(worst(got, wanted).values())
        engine.destroy()
    return errors


def test_engines_do_it_too():
    pytest.importorskip("deepspeed")
    for errors in run_ranks(2, _engines):
        assert len(errors) == 5
        assert {case: error for case, error in errors.items() if not error < 1e-5} == {}


def _signature_of_liger() -> list[str]:
    from liger_kernel.transformers import functional

    return list(inspect.signature(functional.liger_fused_linear_cross_entropy).parameters)


def test_the_stand_in_has_the_signature_of_liger():
    pytest.importorskip("liger_kernel")
    ours = list(inspect.signature(liger_fused_linear_cross_entropy).parameters)
    assert _signature_of_liger()[: len(ours)] == ours


def _liger_interpreted() -> dict[str, float]:
    """Liger's own kernels, run by Triton's interpreter; the second model's forward is Liger's, which fuses its loss."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    from deepspeed_plugin.losses.loss import tiled_sequence_parallel_loss

    batch = make_batch(seq=12)
    inputs = {"input_ids": batch["input_ids"], "use_cache": False}
    model = make_model("llama")
    wanted = whole(model, batch)
    loss = tiled_sequence_parallel_loss(Engine(model), inputs, batch["labels"], reduction="sum", kernel="liger")
    errors = {"liger": max(worst({"loss": loss.detach(), **gradients(model, loss)}, wanted).values())}
    apply_liger_kernel_to_llama(
        rope=False, rms_norm=False, swiglu=False, cross_entropy=False, fused_linear_cross_entropy=True
    )
    model = make_model("llama").train()
    errors["its forward, our tiles"] = max(worst(tiled(model, batch, "sum"), wanted).values())
    output = model(**inputs, labels=batch["labels"], shift_labels=batch["labels"])
    model.zero_grad(set_to_none=True)
    tokens = (batch["labels"] != -100).sum()
    loss = output.loss * tokens  # the model's own is the mean
    errors["its forward and loss"] = max(worst({"loss": loss.detach(), **gradients(model, loss)}, wanted).values())
    return errors


def test_liger_itself_is_the_torch_kernel():
    pytest.importorskip("liger_kernel")
    pytest.importorskip("triton")
    # A new interpreter: Triton decides at its import.
    code = "import json; from tests.test_logits import _liger_interpreted as run; print(json.dumps(run()))"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    errors = json.loads(result.stdout.splitlines()[-1])
    assert len(errors) == 3
    assert {case: error for case, error in errors.items() if not error < 1e-5} == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_liger_on_a_gpu_is_the_torch_kernel():
    pytest.importorskip("liger_kernel")
    from deepspeed_plugin.losses.loss import tiled_sequence_parallel_loss

    results = []
    for kernel in ("torch", "liger"):
        model, batch = make_model("llama").cuda(), make_batch(seq=64)
        inputs = {"input_ids": batch["input_ids"].cuda(), "use_cache": False}
        loss = tiled_sequence_parallel_loss(
            Engine(model), inputs, batch["labels"].cuda(), reduction="sum", kernel=kernel
        )
        results.append({"loss": loss.detach(), **gradients(model, loss)})
    assert max(worst(results[1], results[0]).values()) < 1e-4


# ---------------------------------------------------------------- refusals


def _refused() -> dict[str, str]:
    from deepspeed_plugin.losses.loss import tiled_sequence_parallel_loss

    batch = make_batch(seq=8)
    results = {}

    class SquaresItsLogits(type(make_model("llama"))):
        def forward(self, input_ids, **kwargs):
            hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
            return CausalLMOutputWithPast(logits=self.lm_head(hidden) ** 2)

    def masks_some(self, input_ids, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids, use_cache=False).last_hidden_state)
        logits[..., :2] = -1e9
        return CausalLMOutputWithPast(logits=logits)

    class MasksSome(type(make_model("llama"))):
        forward = masks_some

    from transformers.modeling_outputs import CausalLMOutputWithPast

    for name, change, how in [
        ("unknown operation", lambda m: setattr(m, "__class__", SquaresItsLogits), {}),
        ("in place", lambda m: setattr(m, "__class__", MasksSome), {}),
        ("outside", lambda m: m.register_forward_hook(lambda m, a, out: type(out)(logits=out.logits / 2)), {}),
        ("liger, missing", lambda m: None, {"kernel": "liger"}),
        ("kernel", lambda m: None, {"kernel": "triton"}),
        ("tiles of liger", lambda m: None, {"kernel": "liger", "tile_rows": 5}),
        ("old liger", lambda m: None, {"kernel": "liger"}),
        ("liger, scale", lambda m: None, {"kernel": "liger"}),
        ("router", lambda m: None, {}),
    ]:
        model = make_model("llama")
        inputs = {"input_ids": batch["input_ids"], "use_cache": False}
        if name == "liger, missing":
            sys.modules["liger_kernel"] = None
        elif name == "old liger":
            _with_stand_in_for_liger()
            sys.modules["liger_kernel.transformers.functional"].liger_fused_linear_cross_entropy = lambda x, w, y: None
        elif name == "liger, scale":
            _with_stand_in_for_liger()
            model = tiny_model("cohere")
        elif name == "router":
            model = make_model("mixtral")
            inputs["output_router_logits"] = True
            sys.modules[type(model).__module__].load_balancing_loss_func = lambda logits, *rest: logits[0].sum()
        change(model)
        try:
            tiled_sequence_parallel_loss(Engine(model), inputs, batch["labels"], **how)
            results[name] = "accepted"
        except (ValueError, ImportError) as error:
            results[name] = str(error)
        assert "forward" not in vars(model.lm_head)
    return results


def test_what_is_not_known_is_refused_by_name():
    pytest.importorskip("transformers")
    results = run_in_process(_refused)
    for name, message in {
        "unknown operation": "the model does 'pow' to its logits",
        "in place": "the model does '__setitem__' to its logits",
        "outside": r"LlamaForCausalLM changes logits after its output head.*done: div, 2; shown: nothing",
        "liger, missing": "needs liger-kernel: pip install liger-kernel",
        "kernel": "kernel = 'triton': must be",
        "tiles of liger": "Liger chooses its tiles; leave it out",
        "old liger": "has no accum_dtype, bias, ignore_index, reduction, softcap in",
        "liger, scale": "CohereForCausalLM does mul, 0.25 to its logits, and Liger knows a softcap alone",
        "router": "output_router_logits = True: the balance loss of MixtralForCausalLM is not the one that is served",
    }.items():
        assert re.search(message, results[name]), (name, results[name])
