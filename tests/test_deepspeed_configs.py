"""configs/deepspeed/: DeepSpeed's own parser takes every file, UPipe serves it, and its README's memory follows."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import make_batch, make_model, shard, single_process, worst
from tests.ranks import run_in_process, run_ranks
from upipe_integrations import Mode, Schedule
from upipe_integrations.planning.closed_forms import LayerShape, upipe_peak
from upipe_integrations.planning.components import Method
from upipe_integrations.planning.measure import LiveMemory
from upipe_integrations.planning.models import PRESETS
from upipe_integrations.planning.plan import Plan
from upipe_integrations.planning.setup import Setup
from upipe_integrations.tiled_loss import TILE_ROWS

pytest.importorskip("deepspeed")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
FOLDER = Path(__file__).parents[1] / "configs" / "deepspeed"
README = (FOLDER / "README.md").read_text()
RANKS = {
    "demo": 2,
    "cpu-smoke": 2,
    "llama3-8b-8gpu-1m": 8,
    "llama3-8b-8gpu-3m": 8,
    "llama3-8b-8gpu-5m": 8,
    "llama3-8b-8gpu-lora": 8,
    "qwen3-32b-16gpu": 16,
}


def _read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


class _Mpu:
    """The sizes DeepSpeed's config class asks of an mpu, on as many GPUs as the file is for."""

    def __init__(self, ranks: int) -> None:
        self.get_data_parallel_world_size = lambda: 1
        self.get_model_parallel_world_size = lambda: 1
        self.get_sequence_parallel_world_size = lambda: ranks


def _parsed(name: str) -> dict[str, Any]:
    from unittest import mock

    from deepspeed.runtime.config import DeepSpeedConfig

    from deepspeed_plugin.settings import read_settings

    ranks = RANKS[name]
    with mock.patch("deepspeed.comm.get_world_size", lambda *a, **k: ranks):
        config = DeepSpeedConfig(str(FOLDER / f"{name}.json"), mpu=_Mpu(ranks))
    zero = config.zero_config
    return {
        "train_batch_size": config.train_batch_size,
        "stage": int(zero.stage),
        "bf16": config.bfloat16_config.enabled,
        "on the host": zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu",
        "buckets": (int(zero.reduce_bucket_size), int(zero.prefetch_bucket_size), int(zero.max_live_parameters)),
        "unknown to ZeRO": sorted(zero.model_extra or {}),
        "upipe": read_settings(str(FOLDER / f"{name}.json")),
    }


@pytest.mark.parametrize("name", RANKS)
def test_deepspeed_and_upipe_take_the_file(name):
    raw, parsed = _read(name), run_in_process(_parsed, name)
    assert raw["sequence_parallel_size"] == RANKS[name]
    assert parsed["train_batch_size"] == raw.get("gradient_accumulation_steps", 1)
    assert parsed["unknown to ZeRO"] == []
    assert parsed["upipe"].chunk_heads % RANKS[name] == 0
    if "gpu" in name:
        assert (parsed["stage"], parsed["bf16"], parsed["on the host"]) == (3, True, "lora" not in name)
        assert parsed["buckets"] == (200_000_000, 200_000_000, 600_000_000)


def test_every_file_is_tested_and_described():
    assert {file.stem for file in FOLDER.glob("*.json")} == RANKS.keys()
    assert set(re.findall(r"`([\w-]+)\.json`", README)) == RANKS.keys()


# ---------------------------------------------------------------- the memory tables of the README

SHAPES = {
    "llama": {"layers": 32, "E": 4096, "F": 14336, "V": 128256, "H": 32, "K": 8, "D": 128},
    "qwen": {"layers": 64, "E": 5120, "F": 25600, "V": 151936, "H": 64, "K": 8, "D": 128},
}
# Tensors of [L, E] that a Transformers layer has beside attention or at its MLP, with [L, F] ones where the MLP is
# whole (measured below; one fewer at the MLP unless memory is keep), and of [L, E] at the loss: an estimate.
BESIDE_ATTENTION, AT_TILED_MLP, AT_WHOLE_MLP, OF_WHOLE_MLP, AT_LOSS = 6, 19, 11, 6, 6
COLUMNS = {  # file, tokens, layer inputs on the host
    "llama": [
        ("llama3-8b-8gpu-1m", 1 << 20, False),
        ("llama3-8b-8gpu-3m", 3 << 20, True),
        ("llama3-8b-8gpu-5m", 5 << 20, True),
    ],
    "qwen": [("qwen3-32b-16gpu", n << 20, n > 1) for n in (1, 3, 5)],
}
ROWS = ("weights and ZeRO-3's buffers", "inputs of layers", "attention", "MLP in tiles", "loss", "all of it")
WHOLE = "for comparison: MLP, were it whole"
HOST = ("on the host, of one node: optimizer", "on the host, of one node: inputs of layers")


def _gib(name: str, tokens: int, offloaded: bool, m: dict[str, int]) -> dict[str, float]:
    """Memory of one GPU, and what a node of 8 has on the host, in GiB by row."""
    config = _read(name)
    C, zero = config["sequence_parallel_size"], config["zero_optimization"]
    E, F, V, H, K, D = (m[key] for key in "EFVHKD")
    row = tokens / C * E * 2  # bytes of one [L, E] tensor
    layer_parameters = (2 * H + 2 * K) * D * E + 3 * E * F
    parameters = m["layers"] * layer_parameters + 2 * V * E  # without norms
    schedule = Schedule.build(heads=H, kv_heads=K, ranks=C, chunk_heads=config["upipe"]["chunk_heads"])
    attention = (
        upipe_peak(LayerShape(H, K, D, E), schedule, Mode.named(config["upipe"]["memory"])).gib(tokens, D).training
    )
    inputs = m["layers"] * row
    without_output = config["upipe"]["memory"] != "keep"
    gib = 2**30
    sizes = {
        ROWS[0]: (2 * parameters / C + 2 * (zero["reduce_bucket_size"] + zero["stage3_max_live_parameters"])) / gib,
        ROWS[1]: 0 if offloaded else inputs / gib,
        ROWS[2]: attention + BESIDE_ATTENTION * row / gib,
        ROWS[3]: (AT_TILED_MLP - without_output) * row / gib,
        # The head's weight, its gradient in float32 and a tile's part of it; a tile's logits in 10 bytes.
        ROWS[4]: (AT_LOSS * row + 8 * V * E + 10 * TILE_ROWS * V) / gib,
    }
    sizes[ROWS[5]] = sizes[ROWS[0]] + sizes[ROWS[1]] + max(sizes[r] for r in ROWS[2:5])
    # On the host: float32 weights, two moments and gradients.
    whole = (AT_WHOLE_MLP - without_output) * row + OF_WHOLE_MLP * row * F / E
    return sizes | {
        WHOLE: whole / gib,
        HOST[0]: 16 * parameters / C * 8 / gib,
        HOST[1]: inputs * 8 / gib if offloaded else 0,
    }


@pytest.mark.parametrize("model", COLUMNS)
def test_the_memory_tables_follow(model):
    wanted = [_gib(name, tokens, offloaded, SHAPES[model]) for name, tokens, offloaded in COLUMNS[model]]
    section = README[README.index({"llama": "## Llama3-8B", "qwen": "## Qwen3-32B"}[model]) :]
    for row in (*ROWS, WHOLE, *HOST):
        cells = re.search(rf"^\| {re.escape(row)} \|(.*)\|$", section, re.MULTILINE).group(1)
        assert [cell.strip(" *") for cell in cells.split("|")] == [f"{sizes[row]:.0f}" for sizes in wanted], row


def test_the_table_of_lora_is_what_upipe_plan_says():
    config = _read("llama3-8b-8gpu-lora")
    U, memory = config["upipe"]["chunk_heads"], config["upipe"]["memory"]
    method = Method("upipe", memory, U)

    def plan(offload: tuple[str, ...], rank: int = 16) -> Plan:
        setup = Setup(8, 74.5, offload=offload, tiled_mlp=True, tiled_loss=True, lora_rank=rank)
        return Plan(PRESETS["llama3-8b"], setup, chunk_heads=(U,), memory=(memory,))

    wanted: dict[str, list[float]] = {}
    for tokens, offload in ((1 << 20, ()), (3 << 20, ("activations",)), (5 << 20, ("activations",))):
        m, whole = plan(offload).memory(method, tokens), plan(offload, 0).memory(method, tokens)
        for row, gib in (
            ("weights, gradients, optimizer", m.parameters + m.gradients + m.optimizer),
            ("inputs of layers", m.saved),
            ("the largest of attention, MLP and loss", max(m.attention, m.mlp, m.loss)),
            ("CUDA, NCCL, gathered weights and the allocator", m.workspace + m.reserve),
            ("all of it", m.total),
            ("for comparison: the whole model trained", whole.total),
        ):
            wanted.setdefault(row, []).append(gib)
    section = README[README.index("## LoRA of Llama3-8B") :]
    for row, sizes in wanted.items():
        cells = re.search(rf"^\| {re.escape(row)} \|(.*)\|$", section, re.MULTILINE).group(1)
        assert [cell.strip() for cell in cells.split("|")] == [f"{gib:.0f}" for gib in sizes], row
    longest = [plan(offload, rank).longest(method) / 2**20 for rank in (16, 0) for offload in ((), ("activations",))]
    said = "to {:.2f}M tokens, to {:.2f}M with the layers' inputs on the host ({:.2f}M and {:.2f}M where"
    assert said.format(*longest) in section


def _layer_peaks(E: int, F: int, tiles: int) -> tuple[float, float]:
    """Peaks of a layer's backward after recomputation, and what is there while attention's backward begins.

    In bytes by row, its input and gradient aside; attention is a copy that keeps nothing.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    L, seen = 16384, {}

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen["attention"] = memory.current - before
            return grad.clone()

    class Attention(torch.nn.Module):
        def forward(self, hidden_states, **_):
            return Copy.apply(hidden_states), None

    layer = LlamaDecoderLayer(LlamaConfig(hidden_size=E, intermediate_size=F, num_attention_heads=4), 0).bfloat16()
    layer.self_attn, mlp = Attention(), layer.mlp
    if tiles:

        def plain(mlp, x):
            return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

        mlp.forward = lambda x: TiledMLP.apply(plain, mlp, x, tiles, list(mlp.parameters()))
    x = torch.randn(1, L, E, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    with LiveMemory() as memory:
        for t in (x, dy, *layer.parameters()):
            t.sum()
        before = memory.current
        memory.reset_peak()
        layer(x).backward(dy)
        weight_gradients = sum(p.numel() for p in layer.parameters()) * 2
        return (memory.peak - before - weight_gradients) / L, (seen["attention"] - weight_gradients) / L


def test_the_tables_count_what_a_layer_of_transformers_allocates():
    """Attention's own input is one [L, E] more, and its kept output one at the MLP: not in the stand-in."""
    E, F = 128, 448  # as Llama3-8B's 4096 to 14336
    whole, beside = _layer_peaks(E, F, 0)
    tiled, _ = _layer_peaks(E, F, 32)
    assert 0.95 < whole / (2 * ((AT_WHOLE_MLP - 2) * E + OF_WHOLE_MLP * F)) < 1.03
    assert 0.95 < tiled / (2 * (AT_TILED_MLP - 2) * E) < 1.03
    assert 0.95 < beside / (2 * BESIDE_ATTENTION * E) < 1.03  # the incoming gradient is in it, and in the closed form


# ---------------------------------------------------------------- the recipe, small, on CPU ranks


def _recipe() -> dict[str, float]:
    """One step of two micro-batches with all that the recipes use: offloaded layer inputs, tiled MLP, tiled loss."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    import deepspeed_plugin
    from tests.engines import forget_ulysses, gradients, make_engine, register_ulysses

    def plain(mlp, x):
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

    errors = {}
    batch = make_batch(seq=32)
    for tiled_mlp in (False, True):
        forget_ulysses()
        wanted = single_process(make_model("llama"), batch)
        del wanted["logits"]
        model = make_model("llama")
        config = _read("cpu-smoke")
        config["bf16"]["enabled"] = False  # to see errors of 1e-5
        if tiled_mlp:
            for layer in model.model.layers:
                mlp = layer.mlp
                weights = [p.weight for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
                mlp.forward = lambda x, mlp=mlp, weights=weights: TiledMLP.apply(plain, mlp, x, 4, weights)
        engine = make_engine(model, config, register_ulysses(model, 2))
        model.activation_checkpointing_enable(offload=True)
        engine.train()
        positions = torch.arange(32).expand_as(batch["input_ids"])
        inputs = {"input_ids": shard(batch["input_ids"]), "position_ids": shard(positions), "use_cache": False}
        for _ in range(2):
            loss = deepspeed_plugin.tiled_sequence_parallel_loss(engine, inputs, shard(batch["labels"]), tile_rows=5)
            engine.backward(loss)
            mean = deepspeed_plugin.group_mean_loss(engine, loss)
            if not engine.is_gradient_accumulation_boundary():
                engine.step()
        errors[f"tiled MLP {tiled_mlp}"] = max(worst({"loss": mean, **gradients(engine)}, wanted).values())
        engine.step()
        engine.destroy()
    return errors


def _smoke_in_bf16() -> dict[str, float]:
    """The file as it is, two steps: how the tiled loss's gradients differ from those of whole logits, relative."""
    import deepspeed_plugin
    from tests.engines import gradients, make_engine, register_ulysses

    batch, found = make_batch(seq=32), {}
    for tiled in (False, True):
        model = make_model("llama")
        engine = make_engine(model, _read("cpu-smoke"), register_ulysses(model, 2))
        engine.train()
        labels, positions = shard(batch["labels"]), shard(torch.arange(32)[None])
        inputs = {"input_ids": shard(batch["input_ids"]), "position_ids": positions, "use_cache": False}
        for _ in range(4):
            if tiled:
                loss = deepspeed_plugin.tiled_sequence_parallel_loss(engine, inputs, labels, tile_rows=5)
            else:
                loss = deepspeed_plugin.sequence_parallel_loss(engine, engine(**inputs).logits, labels)
            engine.backward(loss)
            last = gradients(engine) if engine.is_gradient_accumulation_boundary() else None
            engine.step()
        found[tiled] = last
        engine.destroy()
    return {name: float((found[True][name] - t).norm() / t.norm()) for name, t in found[False].items()}


def test_the_smoke_file_trains_in_bf16():
    for errors in run_ranks(2, _smoke_in_bf16):
        assert len(errors) == 21
        # Logits are bfloat16 in both, with 2^-9 a rounding; their gradients are rounded once more when tiled.
        assert {name: error for name, error in errors.items() if not error < 2e-2} == {}


def _lora_recipe() -> dict[str, float]:
    """What the recipe with LoRA uses: adapters on all linear layers, MLPs in tiles too, beside the rest."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    import deepspeed_plugin
    from tests.adapters import trained_gradients, with_lora
    from tests.engines import forget_ulysses, make_engine, register_ulysses

    def plain(mlp, x):
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

    batch = make_batch(seq=32)
    forget_ulysses()
    wanted = single_process(with_lora(make_model("llama"), "all-linear"), batch)
    del wanted["logits"]
    model = with_lora(make_model("llama"), "all-linear")
    for mlp in (layer.mlp for layer in model.get_base_model().model.layers):
        weights = [p for p in mlp.parameters() if p.requires_grad]
        mlp.forward = lambda x, mlp=mlp, weights=weights: TiledMLP.apply(plain, mlp, x, 4, weights)
    config = _read("llama3-8b-8gpu-lora")
    config |= {"sequence_parallel_size": 2, "bf16": {"enabled": False}}
    config["optimizer"]["params"]["torch_adam"] = True
    engine = make_engine(model, config, register_ulysses(model, 2))
    engine.module.activation_checkpointing_enable(offload=True)
    engine.train()
    inputs = {"input_ids": shard(batch["input_ids"]), "position_ids": shard(torch.arange(32)[None]), "use_cache": False}
    loss = deepspeed_plugin.tiled_sequence_parallel_loss(engine, inputs, shard(batch["labels"]), tile_rows=5)
    engine.backward(loss)
    got = {"loss": deepspeed_plugin.group_mean_loss(engine, loss), **trained_gradients(engine)}
    engine.step()
    return worst(got, wanted)


def test_the_recipe_with_lora_is_one_process():
    pytest.importorskip("peft")
    for errors in run_ranks(2, _lora_recipe):
        assert len(errors) == 1 + 2 * 7 * 2
        assert {case: error for case, error in errors.items() if not error < 1e-5} == {}  # float32


def test_the_smoke_run_is_one_process():
    for errors in run_ranks(2, _recipe):
        assert {case: error for case, error in errors.items() if not error < 1e-5} == {}  # float32
