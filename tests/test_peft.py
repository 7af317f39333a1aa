"""PEFT's adapters on the projections that UPipe reads: LoRA equal to the unpatched PEFT model, the rest refused.

Without an engine in float64 first, then under real DeepSpeed engines, and with dropout against plain ALST, which draws
its masks from the same states of the generators.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.adapters import shaken, trained_gradients, with_lora
from tests.attached import attached, exact_norms, sharded
from tests.engines import UPIPE, ds_config, forget_ulysses, forward, make_engine, register_ulysses
from tests.models import make_batch, make_model, single_process, worst
from tests.ranks import run_in_process, run_ranks
from tests.zoo import tiny_model
from upipe_integrations.mode import MEMORY

pytest.importorskip("deepspeed")
pytest.importorskip("peft")
os.environ.setdefault("DS_ACCELERATOR", "cpu")


def of_zoo(family: str) -> torch.nn.Module:
    """A model of any family, with an attention that keeps float64."""
    model = tiny_model(family).double()
    model.set_attn_implementation("sdpa")
    return model


# ---------------------------------------------------------------- every subset, in every mode, float64

SUBSETS = ["".join(s) for size in (1, 2, 3, 4) for s in itertools.combinations("qkvo", size)]
FAMILIES = {
    "llama with bias": lambda: make_model("llama with bias", dtype=torch.float64),
    "qwen3": lambda: make_model("qwen3", dtype=torch.float64),
    "olmo2": lambda: of_zoo("olmo2"),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_rslora": True, "rank_pattern": {"q_proj": 5, "v_proj": 2}},
    {"bias": "lora_only"},
    {"bias": "all", "alpha_pattern": {"k_proj": 2}},
    {"lora_bias": True},
]


def _case_of(number: int, targets: str) -> tuple[str, str, dict[str, Any]]:
    """Family, memory mode and options: all of each come by, an adapter on o only where it is a module's own call."""
    family = list(FAMILIES)[number % 3]
    modes = ("keep", "recompute") if "o" in targets else ("keep", "recompute", "fused", "blocks")
    options = OPTIONS[number % 5]
    if options == {"lora_bias": True} and family != "llama with bias":
        options = OPTIONS[0]  # needs a bias in the model
    return family, modes[number % len(modes)], options


def _errors_of_subsets() -> dict[tuple, float]:
    errors = {}
    batch = make_batch(batch=2)
    for number, targets in enumerate([*SUBSETS, *SUBSETS[::-1]]):
        family, memory, options = _case_of(number, targets)
        model = with_lora(exact_norms(FAMILIES[family]()), targets, **options)
        wanted = single_process(model, batch)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert wanted.keys() - {"loss", "logits"} == trained
        attached(model, (2, 8)[number % 2], dist.group.WORLD, memory=memory)
        errors[number, targets, family, memory] = max(worst(sharded(model, batch, dist.group.WORLD), wanted).values())
    for number, memory in enumerate(("keep", "recompute", "fused", "blocks")):  # q, k and v in one weight
        options = ({}, {"use_rslora": True}, {"bias": "all"}, {})[number]
        model = with_lora(exact_norms(of_zoo("phi3")), "qkv_proj", **options)
        wanted = single_process(model, batch)
        attached(model, 4, dist.group.WORLD, memory=memory)
        errors[number, "qkv", "phi3", memory] = max(worst(sharded(model, batch, dist.group.WORLD), wanted).values())
    for family, targets, memory in (  # a weight by KV head; latents, which are made by modules
        ("falcon", "query_key_value,dense", "keep_heads"),
        ("gpt_neox", "query_key_value", "blocks"),
        ("minicpm3", "q_a_proj,kv_a_proj_with_mqa,o_proj", "recompute"),
    ):
        model = with_lora(exact_norms(of_zoo(family)), targets)
        wanted = single_process(model, batch)
        attached(model, 4, dist.group.WORLD, memory=memory)
        errors[0, targets, family, memory] = max(worst(sharded(model, batch, dist.group.WORLD), wanted).values())
    # Anything else where UPipe does not read.
    from peft import IA3Config, get_peft_model

    ia3 = IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"])
    model = get_peft_model(exact_norms(FAMILIES["qwen3"]()), ia3)
    wanted = single_process(model, batch)
    attached(model, 4, dist.group.WORLD)
    errors[0, "MLP", "ia3", "keep"] = max(worst(sharded(model, batch, dist.group.WORLD), wanted).values())
    return errors


def test_lora_on_any_projections_equals_the_unpatched_model():
    """Public fault 20: output, loss and every gradient that PEFT trains, and no other."""
    for errors in run_ranks(2, _errors_of_subsets):
        assert len(errors) == 2 * len(SUBSETS) + 4 + 3 + 1
        assert {memory for *_, memory in errors} == set(MEMORY)
        assert {case: error for case, error in errors.items() if error > 1e-10} == {}


# ---------------------------------------------------------------- what may change after UPipe was put in


def _changes(model: Any) -> Any:
    """(what was done, context to call the model in), one after the other; PEFT's own API throughout."""
    from peft import LoraConfig

    yield "as set up", contextlib.nullcontext()
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "o_proj"]))
    shaken(model, 1)
    model.set_adapter("second")
    yield "another adapter, added later", contextlib.nullcontext()
    model.base_model.set_adapter(["default", "second"])
    yield "both at once", contextlib.nullcontext()
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("second", 0.3)
    yield "another scale", contextlib.nullcontext()
    yield "disabled", model.disable_adapter()
    model.merge_adapter()
    yield "merged", contextlib.nullcontext()
    yield "merged, then disabled", model.disable_adapter()
    yield "enabled again", contextlib.nullcontext()
    model.merge_adapter()
    model.unmerge_adapter()
    yield "unmerged", contextlib.nullcontext()
    model.delete_adapter("default")
    yield "one deleted", contextlib.nullcontext()
    model.eval()
    yield "in evaluation", contextlib.nullcontext()


def _errors_of_changes() -> dict[str, float]:
    """The same is done to a model with UPipe and to one without."""
    batch, errors = make_batch(batch=2), {}
    plain = with_lora(exact_norms(make_model("llama with bias", dtype=torch.float64)), "qv", bias="all")
    model = copy.deepcopy(plain)
    attached(model, 4, dist.group.WORLD)
    losses = []
    for (name, context), (_, ours) in zip(_changes(plain), _changes(model), strict=True):
        with context:
            wanted = single_process(plain, batch)
        with ours:
            got = sharded(model, batch, dist.group.WORLD)
        errors[name] = max(worst(got, wanted).values())
        losses.append(float(wanted["loss"]))
    assert len({round(loss, 6) for loss in losses}) == 6, "every state that should differ from the others does"
    return errors


def test_adapters_may_be_added_switched_merged_and_disabled_later():
    for errors in run_ranks(2, _errors_of_changes):
        assert len(errors) == 11
        assert {case: error for case, error in errors.items() if error > 1e-10} == {}


# ---------------------------------------------------------------- precision


def _errors_of_float32_adapters() -> dict[str, float]:
    """Mean error of the adapters' gradients in a bfloat16 model against the same model in float32, UPipe or not."""
    batch, found = make_batch(seq=64), {}
    for name, autocast in (("cast by PEFT", False), ("autocast", True)):
        model = with_lora(make_model("llama", dtype=torch.bfloat16), "qkvo")
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        exact = single_process(copy.deepcopy(model).float(), batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            theirs = single_process(model, batch)
            attached(model, 4, dist.group.WORLD)
            ours = sharded(model, batch, dist.group.WORLD)
        for who, got in (("theirs", theirs), ("ours", ours)):
            grads = [(got[k].float() - t).norm() / t.norm() for k, t in exact.items() if "lora_" in k]
            assert len(grads) == 2 * 4 * 2
            found[f"{name}, {who}"] = float(torch.stack(grads).mean())
    return found


def test_adapters_in_float32_beside_a_bfloat16_model():
    """PEFT's default (``autocast_adapter_dtype``): UPipe errs as the unpatched model does."""
    for found in run_ranks(2, _errors_of_float32_adapters):
        for name in ("cast by PEFT", "autocast"):
            assert 0 < found[f"{name}, ours"] < 1.15 * found[f"{name}, theirs"], found


# ---------------------------------------------------------------- engines


def lora_engine(stage: int, extra: dict, targets: str = "qkvo", **options: Any):
    """An engine of a tiny Llama with adapters, after ALST's registration; `extra` is of the ds_config."""
    model = with_lora(make_model("llama"), targets, **options)
    return make_engine(model, ds_config(stage, **extra), register_ulysses(model, 2))


def lora_step(engine: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step."""
    from deepspeed_plugin import group_mean_loss

    _, loss = forward(engine, batch)
    engine.backward(loss)
    grads = trained_gradients(engine)
    engine.step()
    return {"loss": group_mean_loss(engine, loss), **grads}


CHECKPOINTING = {"none": None, "reentrant": {"use_reentrant": True}, "non-reentrant": {"use_reentrant": False}}


def _checkpoint(engine: Any, how: str) -> None:
    from deepspeed_plugin import enable_checkpointing

    if how == "selective":
        enable_checkpointing(engine.module)
    elif CHECKPOINTING[how] is not None:
        engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[how])
        if how == "reentrant":  # or no layer has an input to differentiate, with a frozen embedding
            engine.module.enable_input_require_grads()
    engine.train()


def _stages() -> dict[str, float]:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    batch, errors = make_batch(seq=32), {}
    for targets, options, cases in [
        ("qkvo", {}, [("keep", "none"), ("recompute", "reentrant"), ("keep", "selective")]),
        ("qv", {"bias": "lora_only"}, [("fused", "non-reentrant"), ("blocks", "none"), ("fused", "selective")]),
    ]:
        forget_ulysses()
        model = with_lora(make_model("llama"), targets, **options)
        plain, wanted = single_process(model, batch), single_process(model.double(), batch)
        errors[f"{targets}, unpatched"] = max(worst(plain, wanted).values())
        del wanted["logits"]
        # Hooks that gather and release are ZeRO-3's alone: one case at each of the others.
        for stage, (memory, how) in [*enumerate(cases), *((3, case) for case in cases)]:
            settings = {"upipe": {"chunk_heads": 4, "memory": memory}}
            engine = lora_engine(stage, settings, targets, **options)
            _checkpoint(engine, how)
            before = {name: p for name, p in engine.module.named_parameters() if not p.requires_grad}
            got = lora_step(engine, batch)
            errors[f"{targets}, {stage}, {memory}, {how}"] = max(worst(got, wanted).values())
            if stage == 3:  # public fault 19
                held = [name for name, p in before.items() if p.ds_status != ZeroParamStatus.NOT_AVAILABLE]
                held += [n for n, p in engine.module.named_parameters() if p.ds_status != ZeroParamStatus.NOT_AVAILABLE]
                assert held == []
            engine.destroy()
    return errors


def test_lora_at_every_zero_stage_is_one_process():
    """Gradients of the adapters alone, with every kind of checkpointing; ZeRO-3 has all parameters in parts again."""
    for errors in run_ranks(2, _stages):
        assert len(errors) == 2 * (1 + 3 + 3)
        unpatched = {targets: errors.pop(f"{targets}, unpatched") for targets in ("qkvo", "qv")}
        assert max(unpatched.values()) < 3e-5
        # As far from float64 as the unpatched model in float32 is; sums are in another order.
        assert {case: error for case, error in errors.items() if error > 2 * unpatched[case.split(",")[0]]} == {}


def _alive_in_backward() -> list[int]:
    """Layers of which a projection or a B is gathered, whenever attention runs backward under ZeRO-3."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    from upipe_integrations.kernels import TorchCpuFlash

    model = with_lora(make_model("qwen3", num_hidden_layers=4), "qkv")
    engine = make_engine(model, ds_config(3, **UPIPE), register_ulysses(model, 2))
    layers = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    # Weight and B of q, k and v, the weight of o, and two norms.
    assert [len(layer.upipe._external_params) for layer in layers] == [3 * 2 + 1 + 2] * 4
    parameters = [[p for m in (a.q_proj, a.k_proj, a.v_proj, a.o_proj) for p in m.parameters()] for a in layers]
    seen, backward = [], TorchCpuFlash.backward

    def watched(self, *args):
        gathered = [any(p.ds_status == ZeroParamStatus.AVAILABLE for p in of_layer) for of_layer in parameters]
        seen.append(sum(gathered))
        return backward(self, *args)

    TorchCpuFlash.backward = watched
    lora_step(engine, make_batch(seq=32))
    return seen


def test_zero_3_gathers_one_layer_at_a_time():
    """Public fault 19: the base and the adapters; also of the first layer, whose input needs no gradient."""
    for seen in run_ranks(2, _alive_in_backward):
        assert seen == [1] * (4 * 2)


# ---------------------------------------------------------------- dropout


def _dropout() -> dict[str, float]:
    """Against plain ALST at the same stage, from the same state of each rank's generator."""
    batch, errors = make_batch(seq=32), {}

    def step(stage: int, extra: dict, how: str, seed: int) -> dict[str, torch.Tensor]:
        engine = lora_engine(stage, extra, lora_dropout=0.4)
        _checkpoint(engine, how)
        torch.manual_seed(seed + dist.get_rank())
        result = lora_step(engine, batch)
        engine.destroy()
        return result

    for stage in (1, 3):
        wanted = step(stage, {}, "none", 0)
        for how in (*CHECKPOINTING, "selective") if stage == 3 else ("none", "non-reentrant"):
            errors[f"{stage}, {how}"] = max(worst(step(stage, UPIPE, how, 0), wanted).values())
    assert max(worst(step(3, UPIPE, "none", 10), wanted).values()) > 0.1, "another mask is seen"
    return errors


def test_lora_dropout_is_what_ulysses_draws():
    """And drawn again in the recomputation under checkpointing of every kind."""
    for errors in run_ranks(2, _dropout):
        assert len(errors) == 4 + 2
        # float32 with sums in another order, each of the two as far from float64 as in the test above.
        assert {case: error for case, error in errors.items() if error > 3e-5} == {}


# ---------------------------------------------------------------- Trainer


def _trained(folder: str) -> dict[str, Any]:
    """The Trainer's history without the key and with it, dropout and all, and what it saved."""
    from tests.trainers import history, make_trainer

    found: dict[str, Any] = {}
    for name, extra in {"ulysses": {}, "upipe": UPIPE}.items():
        model = with_lora(make_model("llama"), "qkvo", lora_dropout=0.2)
        trainer = make_trainer(3, extra, Path(folder) / name, model)
        trainer.train()
        assert (trainer.model_wrapped.upipe is not None) == bool(extra)
        found[name] = history(trainer)
    found["files"] = [path.name for path in (Path(folder) / "upipe" / "checkpoint-4").iterdir()]
    forget_ulysses()
    return found


def test_the_trainer_trains_and_saves_adapters(tmp_path):
    pytest.importorskip("accelerate")
    for found in run_ranks(2, _trained, str(tmp_path)):
        assert len(found["upipe"]) == 2 * 4 + 3  # losses and norms, and evaluations
        assert found["upipe"] == pytest.approx(found["ulysses"], rel=1e-4)
        assert "adapter_model.safetensors" in found["files"] and "model.safetensors" not in found["files"]


# ---------------------------------------------------------------- refusals


class QuantisedLinear(torch.nn.Linear):
    """Stands for a linear layer whose weight is not the matrix."""


def _refusals() -> dict[str, str]:
    import peft

    targets = ["v_proj"]
    configs: dict[str, Any] = {
        "dora": peft.LoraConfig(target_modules=targets, use_dora=True),
        "alora": peft.LoraConfig(target_modules=targets, alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM"),
        "bdlora": peft.LoraConfig(
            target_modules=targets, use_bdlora=peft.BdLoraConfig(target_modules_bd_b=targets, nblocks=2)
        ),
        "parameters": peft.LoraConfig(target_modules=[], target_parameters=["v_proj.weight"]),
        "ia3": peft.IA3Config(target_modules=targets, feedforward_modules=[]),
        "adalora": peft.AdaLoraConfig(target_modules=targets, total_step=10),
        "vera": peft.VeraConfig(target_modules=targets, r=2),
        "loha": peft.LoHaConfig(target_modules=targets, r=2),
        "oft": peft.OFTConfig(target_modules=targets, oft_block_size=4),
        "boft": peft.BOFTConfig(target_modules=targets, boft_block_size=4),
        "saved module": peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["v_proj"]),
        "saved norm": peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["k_norm"]),
        "norm": peft.LNTuningConfig(target_modules=["q_norm"]),
        "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    }
    messages = {}

    def refused(name: str, model: torch.nn.Module, memory: str = "keep") -> None:
        try:
            attached(model, 4, memory=memory)
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)
        assert not any(hasattr(m, "upipe") or "forward" in vars(m) for m in model.modules()), name

    for name, config in configs.items():
        refused(name, peft.get_peft_model(make_model("qwen3"), config))
    for memory in ("fused", "blocks"):
        refused(f"output {memory}", with_lora(make_model("qwen3"), "qo"), memory)

    refused("latent", with_lora(of_zoo("minicpm3"), "q_a_proj,kv_b_proj"))
    model = make_model("qwen3")
    for layer in model.model.layers:
        layer.self_attn.k_proj = QuantisedLinear(48, layer.self_attn.k_proj.out_features, bias=False)
    refused("quantised", with_lora(model, "k"))
    model = with_lora(make_model("qwen3"), "k")
    for name, module in model.named_modules():
        if name.endswith("k_proj"):
            del module.lora_variant
    refused("old peft", model)
    model = with_lora(make_model("qwen3"), "k")
    for name, module in model.named_modules():
        if name.endswith("k_proj"):
            module.forward = torch.nn.functional.relu  # as X-LoRA does
    try:
        attached(model, 4)
    except ValueError as error:
        messages["own forward"] = str(error)
    return messages


@pytest.fixture(scope="module")
def refusals():
    return run_in_process(_refusals)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "dora",
            r"layers\.0\.self_attn .*v_proj has the adapter 'default' of the kind DoraLinearVariant.*Leave",
        ),
        ("alora", r"v_proj has the adapter 'default' of the kind ALoraLinearVariant: plain LoRA is supported"),
        ("bdlora", r"v_proj has the adapter 'default' of the kind BdLoraLinearVariant"),
        ("parameters", r"v_proj is a .*ParamWrapper, not a plain torch\.nn\.Linear or PEFT's LoRA of one"),
        ("latent", r"kv_b_proj has an adapter, and makes heads of latents.*leave kv_b_proj out of its target modules"),
        ("ia3", r"v_proj is a peft\.tuners\.ia3.*Linear, not a plain .*leave v_proj out of its target modules, load"),
        ("adalora", r"v_proj is a peft\.tuners\.adalora.*SVDLinear, not a plain"),
        ("vera", r"v_proj is a peft\.tuners\.vera.*, not a plain"),
        ("loha", r"v_proj is a peft\.tuners\.loha.*, not a plain"),
        ("oft", r"v_proj is a peft\.tuners\.oft.*, not a plain"),
        ("boft", r"v_proj is a peft\.tuners\.boft.*, not a plain"),
        ("saved module", r"v_proj is a .*ModulesToSaveWrapper, not a plain"),
        (
            "saved norm",
            r"k_norm is a .*ModulesToSaveWrapper with modules inside: adapters of norms.*Leave it out",
        ),
        ("norm", r"q_norm is a .*LNTuningLayer with modules inside: adapters of norms are not"),
        ("prompt", r"PeftModelForCausalLM.* PROMPT_TUNING puts virtual tokens"),
        ("prefix", r"PeftModelForCausalLM.* PREFIX_TUNING puts virtual tokens"),
        (
            "output fused",
            r"o_proj has an adapter.*upipe\.memory = 'fused'.*or set upipe\.memory to 'recompute', or",
        ),
        ("output blocks", r"o_proj has an adapter.*upipe\.memory = 'blocks'.*or set upipe\.memory to 'recompute'"),
        ("quantised", r"k_proj is LoRA of a .*QuantisedLinear, not of a plain torch\.nn\.Linear: adapters of adapters"),
        ("own forward", r"k_proj is LoRA with a forward that was put in its place\. Merge the adapter"),
        ("old peft", r"k_proj is LoRA of a PEFT that does not say what kind .*Install peft 0\.16"),
    ],
)
def test_other_adapters_are_refused_by_name(refusals, case, message):
    """At setup, with the model left as it was."""
    with pytest.raises(ValueError, match=message):
        raise ValueError(refusals[case])


def _remedied() -> dict[str, float]:
    """Errors of logits and every gradient against the unpatched model, by the refusal whose advice was followed."""
    import peft

    def merged(model: Any) -> torch.nn.Module:
        plain = model.merge_and_unload()
        return plain.requires_grad_(True)

    def dora() -> Any:
        config = peft.LoraConfig(target_modules=["v_proj"], use_dora=True, init_lora_weights=False)
        return peft.get_peft_model(make_model("llama with bias", dtype=torch.float64), config)

    def lora(targets: str, family: str = "llama with bias") -> Any:
        return with_lora(make_model(family, dtype=torch.float64), targets).double()

    def saved_norm() -> Any:
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])  # and not k_norm
        return shaken(peft.get_peft_model(make_model("qwen3", dtype=torch.float64), config)).double()

    cases: dict[str, tuple[Any, str]] = {
        "dora, merged": (lambda: merged(dora()), "keep"),
        "dora, without the option": (lambda: lora("v"), "keep"),
        "dora, left out of its targets": (lambda: lora("q"), "keep"),
        "output in fused, merged": (lambda: merged(lora("qo")), "fused"),
        "output in fused, recomputed": (lambda: lora("qo"), "recompute"),
        "latent, merged": (lambda: merged(with_lora(of_zoo("minicpm3"), "q_a_proj,kv_b_proj").double()), "keep"),
        "latent, left out": (lambda: with_lora(of_zoo("minicpm3"), "q_a_proj").double(), "keep"),
        "norm, left out of modules_to_save": (saved_norm, "keep"),
        "quantised, in another dtype": (lambda: make_model("qwen3", dtype=torch.float64), "keep"),
    }
    batch, errors = make_batch(seq=8), {}
    for name, (make, memory) in cases.items():
        torch.manual_seed(0)
        model = exact_norms(make())
        wanted = single_process(model, batch)
        attached(model, 4, memory=memory)
        errors[name] = max(worst(single_process(model, batch), wanted).values())
        assert len(wanted) > 2, name
    return errors


def test_what_a_refusal_advises_ends_in_a_right_run():
    """Public fault 45."""
    errors = run_in_process(_remedied)
    assert len(errors) == 9 and {name: error for name, error in errors.items() if not error < 1e-6} == {}


def _refused_later() -> dict[str, str]:
    """What is changed after setup so that it can't be served any more."""
    import peft

    messages = {}

    def refused(name: str, model: Any, **arguments: Any) -> None:
        batch = make_batch(seq=8)
        positions = torch.arange(8)[None]
        try:
            model(input_ids=batch["input_ids"], position_ids=positions, use_cache=False, **arguments)
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)

    model = with_lora(make_model("llama"), "qv")
    attached(model, 4)
    refused("nothing", model)
    model.add_adapter("other", peft.LoraConfig(target_modules=["v_proj"], use_dora=True))
    refused("not active", model)
    model.set_adapter("other")
    refused("switched", model)
    model.set_adapter("default")
    model.eval()
    refused("by sample", model, adapter_names=["default"])
    return messages


def test_what_comes_later_is_refused_in_the_next_forward():
    messages = run_in_process(_refused_later)
    assert messages.pop("nothing") == messages.pop("not active") == "accepted"
    assert "LlamaAttention.v_proj has the adapter 'other' of the kind DoraLinearVariant" in messages["switched"]
    assert "LlamaAttention.q_proj was called with adapters by sample (adapter_names)" in messages["by sample"]


def _disabled_while_merged() -> str:
    """PEFT takes merged adapters out of the weight in forward, of which a ZeRO-3 rank has a part."""
    import deepspeed

    engine = lora_engine(3, UPIPE, "qv")
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        engine.module.merge_adapter()
    forward(engine, make_batch(seq=32))
    try:
        with engine.module.disable_adapter():
            forward(engine, make_batch(seq=32))
    except ValueError as error:
        return str(error)
    return "accepted"


def test_merged_and_disabled_under_zero_3_is_refused():
    for message in run_ranks(2, _disabled_while_merged):
        assert "q_proj has merged adapters that are disabled, and ZeRO-3" in message
        assert "Call unmerge_adapter() under deepspeed.zero.GatheredParameters" in message
