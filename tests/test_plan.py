"""``upipe plan``: its figures against measurement and the paper, its words, and its errors."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import run_in_process, run_in_processes
from upipe_integrations.commands import main as cli
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning import components
from upipe_integrations.planning.components import Method
from upipe_integrations.planning.models import PRESETS, Model, find_model
from upipe_integrations.planning.plan import Plan
from upipe_integrations.planning.report import as_dict
from upipe_integrations.planning.setup import Setup

PAGE = Path(__file__).parents[1] / "docs" / "plan.md"
M = 1 << 20
_ON_THE_PAGE = r"```console\n\$ (upipe plan .*)\n(?:.*\n)*?```"
PAPER = {"offload": ("activations",), "tiled_mlp": True, "tiled_loss": True}


def _longest(plan: Plan) -> dict[str, int]:
    return {str(method): plan.longest(method) for method in plan.methods}


# ---------------------------------------------------------------- figures


def test_the_papers_picture():
    """Llama3-8B on 8 x 80 GB: Ring and Ulysses run 3M and not 4M, UPipe runs 5M."""
    longest = _longest(Plan(PRESETS["llama3-8b"], Setup(8, 80, **PAPER)))
    for name in ("Ring", "Ulysses"):
        assert 3 * M <= longest[name] < 4 * M
    assert 5 * M <= longest["UPipe keep, U=8"] < 6 * M
    names = [f"UPipe {mode}, U=8" for mode in MEMORY]
    assert sorted(names, key=longest.get) == names
    assert longest["UPipe fused, U=8"] > 6 * M
    assert longest["UPipe blocks, U=8"] > 7 * M


def test_the_papers_picture_on_16_gpus():
    longest = _longest(Plan(PRESETS["llama3-8b"], Setup(16, 80, **PAPER)))
    assert 9 * M <= longest["UPipe keep, U=16"] < 10 * M
    larger = _longest(Plan(PRESETS["qwen3-32b"], Setup(16, 80, **PAPER)))
    assert larger["Ring"] < larger["Ulysses"] < 4 * M <= larger["UPipe keep, U=16"]


def test_components_by_hand():
    """Llama3-8B at 1M tokens on 8 ranks: 8.03 billion parameters, 131072 rows of 8192 bytes (1 GiB), u = 256 MiB."""
    model = PRESETS["llama3-8b"]
    assert model.parameters == 8_029_995_008
    plan = Plan(model, Setup(8, 80, **PAPER), memory=("keep",))
    ulysses = plan.memory(Method("ulysses"), M)
    assert ulysses.parameters == ulysses.gradients == pytest.approx(8.03 * 2 / 8 / 1.0737, rel=1e-3)
    assert ulysses.optimizer == pytest.approx(6 * ulysses.parameters)
    assert ulysses.saved == 2 and ulysses.host == 32
    assert ulysses.attention == 40 / 4 + 2
    upipe = plan.memory(Method("upipe", "keep", 8), M)
    assert upipe.attention == 24 / 4 + 2
    assert upipe.loss == 3 + 3
    whole = Plan(model, Setup(8, 80)).memory(Method("upipe", "fused", 8), M)
    assert whole.saved == 32 and whole.host == 0
    assert whole.mlp == 6 * 3.5 + 4
    assert whole.loss == pytest.approx(3 + 12 * 131072 * 128256 / 2**30)
    parts = whole.parameters + whole.gradients + whole.optimizer + whole.saved + whole.loss + whole.workspace
    assert whole.total == pytest.approx(parts + 0.08 * (whole.saved + whole.loss))


def test_what_is_switched_on_changes_its_component_alone():
    def memory(**changes):
        setup = Setup(8, 80, **{"zero": 2, **changes})
        return Plan(PRESETS["llama3-8b"], setup).memory(Method("upipe", "keep", 8), M)

    base = vars(memory())
    for changes, fields in (
        ({"zero": 1}, {"gradients"}),
        ({"zero": 3}, {"parameters", "workspace"}),
        ({"offload": ("optimizer",)}, {"gradients", "optimizer", "host"}),
        ({"offload": ("activations",)}, {"saved", "host", "reserve"}),
        ({"zero": 3, "offload": ("parameters",)}, {"parameters", "workspace", "host"}),
        ({"checkpointing": "none"}, {"saved", "mlp", "reserve"}),
        ({"checkpointing": "selective"}, {"saved", "mlp", "reserve"}),
        ({"tiled_mlp": True}, {"mlp"}),
        ({"tiled_loss": True}, {"loss", "reserve"}),
        ({"dp": 2}, {"gradients", "optimizer"}),
        ({"lora_rank": 16}, {"gradients", "optimizer", "parameters", "attention", "workspace"}),
    ):
        changed = {name for name, value in vars(memory(**changes)).items() if value != base[name]}
        assert changed == fields, changes


def test_lora_trains_adapters_alone():
    """Rank 16 on q, o (4096 to 4096), k, v (to 1024), gate, up (to 14336) and down (back), in 32 layers."""
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))

    def memory(rank: int):
        setup = Setup(8, 80, lora_rank=rank, **PAPER)
        return Plan(PRESETS["llama3-8b"], setup).memory(Method("upipe", "keep", 8), M)

    whole, lora = memory(0), memory(16)
    assert lora.parameters == pytest.approx((8_029_995_008 + adapters) * 2 / 8 / 2**30)
    assert lora.gradients == pytest.approx(adapters * 2 / 8 / 2**30)
    assert lora.optimizer == pytest.approx(adapters * 12 / 8 / 2**30)
    # `[L, 16]` of q, k and v, and its gradient in float32, and the gradient of the attention output, 4 units, which an
    # adapted output projection has whole; gathered: two layers, or the output layer, no gradients.
    assert lora.attention - whole.attention == pytest.approx(3 * (2 + 4) * 16 * M / 8 / 2**30 + 4 / 4)
    assert whole.workspace - lora.workspace == pytest.approx(2 * 128256 * 4096 / 2**30)
    plan = Plan(PRESETS["llama3-8b"], Setup(8, 80, lora_rank=16, **PAPER))
    recommended = as_dict(plan, [5 * M])["recommended"]
    assert recommended["ds_config"] and recommended["megatron"] is None
    assert "PEFT's LoRA, r=16, on all linear layers" in recommended["notes"]["deepspeed"][0]
    longest = _longest(plan)
    assert 6 * M < longest["UPipe keep, U=8"] < 7 * M


def test_pipelines_and_tensor_parallelism_split_what_they_split():
    model = PRESETS["llama3-70b"]

    def memory(**changes):
        setup = Setup(4, 80, host="megatron", zero=1, **changes)
        return Plan(model, setup).memory(Method("upipe", "keep", 4), M)

    one, tensor, pipeline = memory(), memory(tp=4), memory(pp=4)
    assert tensor.parameters == one.parameters / 4
    assert tensor.saved == one.saved / 4
    # dy and dx (16 units each), the layer's input and the gradient of its output: only the last is split.
    assert tensor.attention > one.attention / 4
    assert pipeline.parameters * 4 == pytest.approx(
        one.parameters + 2 * model.embedding_parameters * 2 / 2**30, rel=1e-6
    )
    assert pipeline.saved == one.saved  # a quarter of the layers, four microbatches


class _KeepsItsInput(torch.autograd.Function):
    """What a fused norm keeps and makes; and attention that keeps nothing else."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        return torch.empty_like(grad)


def _mlp_peak() -> float:
    """Row tensors at the peak of a checkpointed layer whose attention keeps its input alone, less weight gradients."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.checkpoint import checkpoint

    from upipe_integrations.planning.measure import LiveMemory

    L, E, N = 1 << 20, 4096, 14336
    with FakeTensorMode(), LiveMemory() as live:
        gate, up = (torch.empty(N, E, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        down = torch.empty(E, N, dtype=torch.bfloat16, requires_grad=True)
        x = torch.empty(1, L, E, dtype=torch.bfloat16, requires_grad=True)

        def layer(x):
            h = x + _KeepsItsInput.apply(_KeepsItsInput.apply(x))  # a norm, and attention
            n = _KeepsItsInput.apply(h)
            return h + F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down)

        y = checkpoint(layer, x, use_reentrant=False)
        edge, dy = torch.autograd.graph.get_gradient_edge(y), torch.empty_like(y)
        del y
        before = live.current - dy.nbytes
        live.reset_peak()
        torch.autograd.backward(edge, dy)
        return (live.peak - before) / dy.nbytes


def test_the_mlp_is_6_of_its_width_and_4_of_the_layers():
    assert run_in_process(_mlp_peak) == pytest.approx(6 * 3.5 + 4, rel=0.02)


# Model, ranks, chunk_heads and length. Every shape at one million tokens; a shorter length once for each model, as
# the forms are in units of the length. Tracing blocks takes seconds a row, so its shapes differ in kind: those left out
# have the stages of another row (Llama3-8B in stages of 8 those of Llama3.2-1B, Qwen3-32B in stages of 16 too).
_ALL_STAGES = ("keep_heads", "keep", "recompute", "fused")
_SHAPES = (
    ("llama3-8b", 8, (8, 16, 32), M, _ALL_STAGES),
    ("llama3-8b", 8, (8,), M // 8, _ALL_STAGES),
    ("llama3-8b", 8, (16, 32), M, ("blocks",)),
    ("qwen3-32b", 16, (16, 32), M, _ALL_STAGES),
    ("qwen3-32b", 16, (16,), M // 8, _ALL_STAGES),
    ("qwen3-32b", 16, (32,), M, ("blocks",)),
    ("qwen2.5-7b", 8, (8, 16, 24), M, (*_ALL_STAGES, "blocks")),  # 28 heads: uneven groups, a last stage filled up
    ("qwen2.5-7b", 8, (16,), M // 4, _ALL_STAGES),
    ("llama3.2-1b", 8, (8,), M, (*_ALL_STAGES, "blocks")),
)
_PRINTED = ["plan", "llama3-8b", "--chunk-heads", "8", "--memory", "fused", "--trace"]


def _outputs(commands: list[list[str]]) -> list[tuple[int, str]]:
    """Exit status and output of each command line of ``upipe``."""
    found = []
    for words in commands:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            status = cli.main(words)
        found.append((status, printed.getvalue()))
    return found


_TRACERS = 2


def _traces(tracer: int, commands: list[list[str]]) -> tuple[list[tuple[str, float]], list[tuple[int, str]]]:
    """The share of one of the processes: differences by name, and outputs of the command lines."""
    share = slice(tracer, None, _TRACERS)
    differences = []
    for name, ranks, heads, tokens, modes in _SHAPES[share]:
        plan = Plan(PRESETS[name], Setup(ranks, 80), chunk_heads=heads, memory=modes)
        differences += [(f"{name} {t.method} {tokens}", t.difference) for t in plan.trace([tokens])]
    return differences, _outputs(commands[share])


@pytest.fixture(scope="module")
def traced():
    """Everything that is traced here, in processes at once: the differences by name, and outputs by command line."""
    pages = [shlex.split(command)[1:] for command in re.findall(_ON_THE_PAGE, PAGE.read_text())]
    commands = [_PRINTED, [*_PRINTED, "--json"], *pages]
    differences, outputs = [], {}
    for tracer, (found, printed) in enumerate(run_in_processes(_TRACERS, _traces, commands, seconds=400)):
        differences += found
        outputs |= dict(zip(map(tuple, commands[tracer::_TRACERS]), printed, strict=True))
    return differences, outputs


def test_closed_forms_are_what_the_engine_takes(traced):
    differences, _ = traced
    assert len(differences) == (3 + 2 + 3 + 1 + 3) * 4 + 2 + 1 + 3 + 1
    for name, difference in differences:
        assert abs(difference) < 0.02, (name, difference)


# ---------------------------------------------------------------- what it says


def test_advice_switches_on_what_is_needed_and_no_more():
    plan = Plan(PRESETS["llama3-8b"], Setup(8, 80))
    assert plan.recommended(5 * M) is None
    better = plan.advice(5 * M)
    assert better.recommended(5 * M)
    assert better.setup == Setup(8, 80, **PAPER)
    assert Plan(PRESETS["llama3-8b"], Setup(8, 80, tiled_loss=True)).advice(M // 4).setup.offload == ()
    assert plan.advice(64 * M) is None
    megatron = Plan(PRESETS["llama3-8b"], Setup(8, 80, host="megatron", zero=0)).advice(M // 8)
    assert megatron.setup.zero == 1


def test_recommended_is_what_costs_least_work():
    plan = Plan(PRESETS["llama3-8b"], Setup(8, 80, **PAPER))
    assert str(plan.recommended(M)) == "UPipe keep_heads, U=16"
    assert str(plan.recommended(5 * M)) == "UPipe keep_heads, U=8"
    assert str(plan.recommended(int(5.5 * M))) == "UPipe keep, U=8"
    assert str(plan.recommended(6 * M)) == "UPipe fused, U=8"


def test_longest_is_the_last_that_fits():
    plan = Plan(PRESETS["qwen3-8b"], Setup(8, 80, **PAPER))
    for method in plan.methods:
        tokens = plan.longest(method)
        assert plan.memory(method, tokens).total <= 80 < plan.memory(method, tokens + 8 * 1024).total
    assert Plan(PRESETS["llama3-70b"], Setup(8, 24)).longest(Method("ulysses")) == 0


def test_a_plan_in_a_pipe_imports_no_torch_and_prints_no_control_characters():
    """Nor do the settings and the help of every subcommand import it."""
    code = (
        "import sys; from upipe_integrations.commands import main as cli; parser = cli._parser()\n"
        "for action in parser._actions:\n"
        "    for command in (action.choices or {}).values(): command.format_help()\n"
        "parser.format_help(); status = cli.main(['plan', 'llama3-8b', '--seq-len', '128K,5M'])\n"
        "sys.exit(status or any(name in sys.modules for name in ('torch', 'matplotlib', 'rich')))"
    )
    environment = {**os.environ, "TERM": "xterm-256color", "FORCE_COLOR": "1"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0 and result.stderr == ""
    assert all(character.isprintable() for line in result.stdout.splitlines() for character in line)
    assert "at 5M tokens (5242880)" in result.stdout


@pytest.mark.parametrize(
    ("word", "tokens"), [("5M", 5 * M), ("5000000", 5_000_000), ("1.5m", 3 * M // 2), ("128k", 131072)]
)
def test_lengths(word, tokens, capsys):
    assert cli.main(["plan", "llama3-8b", "--seq-len", word, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["tokens"] for row in rows} == {tokens}


def test_json_has_what_the_table_has(capsys):
    words = ["plan", "llama3-8b", "--seq-len", "1M,2M", "--chunk-heads", "8", "--memory", "keep,fused", "--tiled-loss"]
    assert cli.main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["rows"]) == 2 * 5
    assert said["recommended"] is None and said["traced"] == []
    cli.main(words)
    table = capsys.readouterr().out
    (line,) = re.findall(r"^UPipe fused, U=8 .*$", table.split("at 2M")[0], re.MULTILINE)
    row = next(row for row in said["rows"] if row["memory"] == "fused" and row["tokens"] == M)
    gib = row["gib"]
    names = (
        "parameters",
        "gradients",
        "optimizer",
        "saved",
        "attention",
        "mlp",
        "loss",
        "workspace",
        "reserve",
        "total",
    )
    assert line.split()[3:13] == [f"{gib[name]:.1f}" for name in names]
    assert row["fits"] == ("!" not in line)
    longest = next(entry for entry in said["longest"] if entry["memory"] == "fused")
    assert line.endswith(f" {longest['tokens'] // 1024}K")


def test_trace_is_printed_and_in_the_json(traced):
    _, outputs = traced
    _, printed = outputs[tuple(_PRINTED)]
    assert re.search(r"^UPipe fused, U=8 +1M +5\.078 +5\.09\d +-0\.\d%$", printed, re.MULTILINE)
    _, as_json = outputs[(*_PRINTED, "--json")]
    (row,) = json.loads(as_json)["traced"]
    assert row["closed_form_gib"] == pytest.approx(row["measured_gib"], rel=0.02)


def _settings_of_blocks(ds_config: dict, arguments: list[str]) -> tuple[int, str]:
    from deepspeed_plugin.settings import read_settings
    from megatron_patch.arguments import add_arguments

    settings = read_settings(ds_config)
    known, _ = add_arguments(argparse.ArgumentParser()).parse_known_args(arguments)
    assert known.context_parallel_impl == "upipe"
    assert (str(settings.chunk_heads), settings.memory) == (str(known.upipe_chunk_heads), known.upipe_memory)
    return settings.chunk_heads, settings.memory


def test_the_blocks_are_what_the_hosts_read(capsys):
    pytest.importorskip("deepspeed")
    capsys.readouterr()  # DeepSpeed prints when it is imported
    words = [
        "plan",
        "llama3-8b",
        "--tiled-loss",
        "--tiled-mlp",
        "--offload",
        "activations,optimizer",
        "--seq-len",
        "6M",
    ]
    assert cli.main([*words, "--json"]) == 0
    recommended = json.loads(capsys.readouterr().out)["recommended"]
    config = recommended["ds_config"]
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert config["sequence_parallel_size"] == 8
    got = run_in_process(_settings_of_blocks, config, recommended["megatron"])
    assert got == (recommended["chunk_heads"], recommended["memory"])


def _known_to_megatron(arguments: list[str]) -> list[str]:
    """What Megatron's own parser, with UPipe's arguments, does not know."""
    import upipe_autoload

    upipe_autoload.megatron()
    from megatron.training import arguments as megatron

    return megatron.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_known_args(arguments)[1]


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron is not installed")
def test_megatron_knows_every_argument(capsys):
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("megatron.training is not installed")
    words = [
        "plan",
        "qwen3-32b",
        "--host",
        "megatron",
        "--ranks",
        "2",
        "--tp",
        "2",
        "--pp",
        "2",
        "--offload",
        "optimizer",
    ]
    assert cli.main([*words, "--seq-len", "4K", "--json", "--gpu-memory", "141"]) == 0
    recommended = json.loads(capsys.readouterr().out)["recommended"]
    assert recommended["ds_config"] is None
    arguments = recommended["megatron"]
    assert {"--pipeline-model-parallel-size", "--sequence-parallel", "--optimizer-cpu-offload"} <= set(arguments)
    assert run_in_process(_known_to_megatron, arguments) == []


def test_a_plot_is_drawn(tmp_path, capsys):
    file = tmp_path / "plan.png"
    assert cli.main(["plan", "llama3-8b", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["plan", "llama3-8b", "--plot", str(tmp_path / "none" / "plan.png")]) == 2
    assert "none/plan.png: No such file or directory" in capsys.readouterr().err


def test_a_plot_without_matplotlib(monkeypatch, capsys):
    real = builtins.__import__

    def blocked(name, *rest, **named):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", blocked)
    assert cli.main(["plan", "llama3-8b", "--plot", "plan.png"]) == 2
    assert capsys.readouterr().err == "upipe plan: --plot: needs matplotlib. Install it with: pip install matplotlib\n"


# ---------------------------------------------------------------- models


CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}


def _written(folder: Path, config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_a_config_by_file_folder_and_cache(tmp_path):
    folder = _written(tmp_path / "mine", CONFIG)
    expected = Model("x", 4, 256, 512, 8, 2, 32, 1000, tied=True)
    for name in (folder, folder / "config.json"):
        assert vars(find_model(str(name))) | {"name": "x"} == vars(expected)
    _written(tmp_path / "hub" / "models--some--model" / "snapshots" / "abc", {"text_config": CONFIG})
    assert find_model("some/model", tmp_path / "hub").layers == 4
    whole = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"} | {"head_dim": 64}
    model = find_model(str(_written(tmp_path / "other", whole)))
    assert (model.kv_heads, model.head_dim) == (8, 64)


def test_presets_are_what_transformers_calls_them():
    """Sizes that name a model: billions of parameters, norms and biases aside."""
    for name, billions in {
        "llama3-8b": 8.03, "llama3-70b": 70.55, "llama3-405b": 405.8, "llama3.2-1b": 1.236, "llama3.2-3b": 3.213,
        "mistral-7b": 7.248, "qwen2.5-7b": 7.616, "qwen2.5-14b": 14.77, "qwen2.5-32b": 32.76, "qwen2.5-72b": 72.71,
        "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.721, "qwen3-4b": 4.022, "qwen3-8b": 8.191, "qwen3-14b": 14.77,
        "qwen3-32b": 32.76,
    }.items():  # fmt: skip
        assert PRESETS[name].parameters / 1e9 == pytest.approx(billions, rel=1e-3), name
    assert len(PRESETS) == 16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {key: v for key, v in CONFIG.items() if key not in ("vocab_size", "hidden_size")},
            "lacks hidden_size, vocab_size",
        ),
        (CONFIG | {"num_key_value_heads": 3}, "num_attention_heads = 8 with num_key_value_heads = 3"),
        (CONFIG | {"num_hidden_layers": "four"}, "num_hidden_layers = 'four': must be a positive integer"),
        (CONFIG | {"hidden_size": -256}, "hidden_size = -256: must be a positive integer"),
        (CONFIG | {"num_experts": 128}, "num_experts = 128: mixtures of experts"),
        (CONFIG | {"kv_lora_rank": 256}, "kv_lora_rank = 256: latent attention can't be planned"),
        ("{", "is not JSON"),
        ([1], "must be an object of settings"),
        ({"text_config": 3}, "text_config = 3: must be an object"),
    ],
)
def test_a_config_that_is_wrong_is_one_line(config, message, tmp_path, capsys):
    folder = _written(tmp_path, config)
    assert cli.main(["plan", str(folder)]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_a_folder_without_a_config(tmp_path, capsys):
    assert cli.main(["plan", str(tmp_path)]) == 2
    assert "config.json: No such file or directory" in capsys.readouterr().err


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["llama3-9b"], "the closest presets are llama3-8b"),
        (["zzz"], "presets are llama3-8b, llama3-70b"),
        (["llama3-8b", "--seq-len", "five"], "--seq-len five: must be tokens such as 128K"),
        (["llama3-8b", "--seq-len", "0"], "--seq-len 0: must be tokens"),
        (["llama3-8b", "--seq-len=-5M"], "--seq-len -5M: must be tokens"),
        (["llama3-8b", "--seq-len", "1M,"], "--seq-len : must be tokens"),
        (["llama3-8b", "--seq-len", "1000001"], "8 ranks that share a sequence must divide it; 1000008 is the next"),
        (["llama3-8b", "--ranks", "0"], "--ranks 0: must be positive"),
        (["llama3-8b", "--ranks", "64"], "--ranks 64: more than the 32 query heads of llama3-8b"),
        (["llama3-8b", "--lora-rank", "-1"], "--lora-rank -1: must be positive, or 0"),
        (["llama3-8b", "--lora-rank", "8", "--trace"], "--trace with --lora-rank: measures a layer whose weights"),
        (["llama3-8b", "--lora-rank", "8", "--host", "megatron"], "--lora-rank 8: UPipe serves PEFT's LoRA under"),
        (["llama3-8b", "--gpu-memory", "-80"], "--gpu-memory -80: must be a positive number of GiB"),
        (["llama3-8b", "--gpu-memory", "nan"], "--gpu-memory nan: must be a positive number"),
        (["llama3-8b", "--chunk-heads", "12"], "upipe.chunk_heads = 12: must be a multiple of the 8"),
        (["llama3-8b", "--chunk-heads", "64"], "upipe.chunk_heads = 64: larger than the model's 32 query heads"),
        (["llama3-8b", "--chunk-heads", "a"], "--chunk-heads a: must be numbers"),
        (["llama3-8b", "--memory", "fuse"], "upipe.memory = 'fuse': no such memory (did you mean 'fused'?)"),
        (["llama3-8b", "--offload", "optimiser"], "--offload optimiser: no such word (did you mean 'optimizer'?)"),
        (["llama3-8b", "--offload", "parameters", "--zero", "2"], "only ZeRO-3 moves them"),
        (["llama3-8b", "--offload", "optimizer", "--zero", "0"], "needs a stage of ZeRO"),
        (["llama3-8b", "--offload", "activations", "--checkpointing", "none"], "inputs of checkpointed layers"),
        (["llama3-8b", "--tp", "2"], "DeepSpeed with UPipe has neither"),
        (["llama3-8b", "--host", "megatron", "--tp", "3", "--ranks", "2"], "--tp 3: must divide the 32 query heads"),
        (["llama3-8b", "--host", "megatron", "--pp", "33", "--ranks", "2"], "--pp 33: more than the 32 layers"),
        (["llama3-8b", "--host", "megatron", "--zero", "3"], "distributed optimizer alone"),
        (["llama3-8b", "--host", "megatron", "--tiled-mlp"], "Megatron has no such MLP"),
        (["llama3-8b", "--host", "megatron", "--checkpointing", "selective"], "Megatron keeps a layer's input alone"),
        (["llama3-8b", "--host", "megatron", "--offload", "activations"], "leaves the inputs"),
        (["llama3-8b", "--host", "megatron", "--offload", "parameters"], "they stay on the GPU"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(words, message, capsys):
    assert cli.main(["plan", *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("upipe plan: ") and message in printed.err
    assert len(printed.err.splitlines()) == 1 and printed.out == ""


@pytest.mark.parametrize(
    "words", [["llama3-8b", "--ranks", "x"], ["llama3-8b", "--zero", "4"], [], ["llama3-8b", "--tple"]]
)
def test_wrong_words_are_one_line_and_exit_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", *words])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and len(error.splitlines()) == 1 and error.startswith("upipe")


# ---------------------------------------------------------------- docs/plan.md


def test_the_page_shows_what_the_commands_print(traced):
    _, outputs = traced

    def with_output(match: re.Match) -> str:
        status, printed = outputs[tuple(shlex.split(match[1])[1:])]
        assert status == 0, match[1]
        return f"```console\n$ {match[1]}\n{printed}```"

    written = re.sub(_ON_THE_PAGE, with_output, PAGE.read_text())
    assert written.count("$ upipe plan") == 7
    if os.environ.get("UPIPE_WRITE_DOCS"):
        PAGE.write_text(written)
    assert PAGE.read_text() == written, "run UPIPE_WRITE_DOCS=1 pytest tests/test_plan.py and commit docs/plan.md"


def test_the_pages_longest_contexts_are_the_plans():
    offloaded = PAPER | {"offload": ("activations", "optimizer")}
    plans = [_longest(Plan(PRESETS["llama3-8b"], Setup(8, 80, **stack))) for stack in (PAPER, offloaded)]
    rows = re.findall(r"^\| (.+?) \| [^|]*\| (\S+)M \| (\S+)M \|$", PAGE.read_text(), re.MULTILINE)
    names = {"Ring": "Ring", "Ulysses": "Ulysses", "UPipe, U = 8": "UPipe keep, U=8"}
    names |= {f"`memory` = `{mode}`": f"UPipe {mode}, U=8" for mode in ("recompute", "fused", "blocks")}
    expected = [(name, *(f"{longest[method] / M:.2f}" for longest in plans)) for name, method in names.items()]
    assert rows == expected


def test_the_window_of_the_reserve(monkeypatch):
    """As docs/plan.md says: from 7.3% to 9.2% the paper's verdicts for Llama3-8B come out, and how far its UPipe goes.

    That is `keep` with the output projection left to the model.
    """
    monkeypatch.setattr(Setup, "plain_output", False)

    def verdicts(reserve: float) -> tuple[bool, ...]:
        monkeypatch.setattr(components, "RESERVE", reserve)
        plan = Plan(PRESETS["llama3-8b"], Setup(8, 80, **PAPER), chunk_heads=(8,), memory=("keep",))
        methods = {str(method): method for method in plan.methods}
        asked = [(name, n) for name in ("Ring", "Ulysses") for n in (3, 4)] + [("UPipe keep, U=8", 5)]
        return tuple(plan.memory(methods[name], n * M).total <= 80 for name, n in asked)

    the_papers = (True, False, True, False, True)
    assert [verdicts(r) == the_papers for r in (0.072, 0.073, 0.08, 0.092, 0.093)] == [False, True, True, True, False]
    monkeypatch.setattr(components, "RESERVE", 0.08)
    offloaded = PAPER | {"offload": ("activations", "optimizer")}
    longest = [_longest(Plan(PRESETS["llama3-8b"], Setup(8, 80, **stack))) for stack in (PAPER, offloaded)]
    said = "comes to {:.2f}M ({:.2f}M)".format(*(of["UPipe keep, U=8"] / M for of in longest))
    assert said in PAGE.read_text().replace("\n", " ")


def test_the_readme_says_the_same():
    longest = _longest(Plan(PRESETS["llama3-8b"], Setup(8, 80, **PAPER)))
    readme = (PAGE.parents[1] / "README.md").read_text()
    section = readme[readme.index("## Plan, check, bench, info") : readme.index("## Supported")]
    (command,) = re.findall(r"^upipe (plan .*)$", section, re.MULTILINE)
    assert cli.main(shlex.split(command)) == 0
    rows = dict(re.findall(r"^\| (.+?) \| (\S+)M \|$", section, re.MULTILINE))
    modes = {"UPipe, `chunk_heads` = 8": "keep"} | {
        f"the same, `memory` = `{mode}`": mode for mode in ("fused", "blocks")
    }
    expected = {name: longest[name] for name in ("Ring", "Ulysses")}
    expected |= {name: longest[f"UPipe {mode}, U=8"] for name, mode in modes.items()}
    assert {name: float(value) for name, value in rows.items()} == {n: round(t / M, 2) for n, t in expected.items()}
