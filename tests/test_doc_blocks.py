"""Every code block of README.md and docs/ runs, or where that takes GPUs or minutes is read by the parser it is for."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pages import PAGES, ROOT, blocks, commands
from tests.ranks import run_in_process, run_ranks
from upipe_integrations.commands import info
from upipe_integrations.commands import main as cli

os.environ.setdefault("DS_ACCELERATOR", "cpu")
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.training")

# Commands that are not run, and why; each is read by its own parser below. What runs in seconds is not here.
PARSED_ONLY = {
    "make": "its targets take minutes, and have tests of their own",
    "pip": "it would change this environment",
    "torchrun": "it starts as many processes as there are GPUs; the scripts of the tutorials run below",
    "deepspeed": "the same",
    "accelerate": "the same",
    "python": "the benchmarks and examples take minutes at full size, and have tests of their own",
    "pytest": "it writes pages; the same tests run without it",
}


def test_every_block_says_what_it_is():
    labels = {"python", "bash", "json", "yaml", "diff", "console", "text"}
    assert [b for b in blocks() if b.label not in labels] == []
    assert sum(page.read_text().count("```") for page in PAGES) == 2 * len(blocks())
    assert {b.page for b in blocks("console")} == {"docs/plan.md"}  # tests/test_plan.py runs those
    # Text is what a program prints: no command and no code hides in it.
    assert not any(
        re.search(r"^(\$|import |from |pip |make |upipe plan|torchrun )", b.text, re.MULTILINE) for b in blocks("text")
    )


# ---------------------------------------------------------------- python


def _needs_ranks(text: str) -> bool:
    return re.search(r"\b(dist|engine|Trainer|Accelerator)\b", text) is not None


def _plain_blocks(pages: list[str]) -> list[str]:
    """Run, page by page in one namespace each."""
    ran = []
    for page in pages:
        # A module of that name, as classes and functions of the page belong to one.
        module = types.ModuleType("page_" + re.sub(r"\W", "_", page))
        sys.modules[module.__name__] = module
        for block in blocks("python", page):
            if not _needs_ranks(block.text):
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(block.compiled(), vars(module))
                ran.append(f"{page}:{block.line}")
        if page == "docs/megatron.md":
            assert vars(module)["spec"].submodules.self_attention.module.__name__ == "UPipeSelfAttention"
    return ran


def test_python_of_one_process_runs():
    pytest.importorskip("transformers")
    pytest.importorskip("megatron.core")
    plain = [b for b in blocks("python") if not _needs_ranks(b.text)]
    ran = run_in_process(_plain_blocks, list(dict.fromkeys(b.page for b in plain)))
    assert ran == [f"{b.page}:{b.line}" for b in plain] and len(ran) >= 9


def _printed(code: Any, names: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    return printed.getvalue()


def _after_diff(page: str, added: bool) -> str:
    """The ds_config of a page's diff, with the lines that it adds or without."""
    (block,) = blocks("diff", page)
    lines = block.text.splitlines()
    assert all(line[0] in " +" for line in lines)
    return "\n".join(line[1:] for line in lines if added or line[0] == " ")


def _deepspeed_tutorial() -> dict[str, str]:
    page, printed = "docs/tutorials/deepspeed.md", {}
    script, *later = blocks("python", page)
    for name in ("without", "with"):
        _forget()
        Path("ds_config.json").write_text(_after_diff(page, name == "with"))
        dist.barrier()
        names: dict[str, Any] = {}
        printed[name] = _printed(script.compiled(), names)
        assert (names["engine"].upipe is not None) == (name == "with")
    for block in later:
        exec(block.compiled(), names)
    assert names["loss"].isfinite() and names["model"].is_gradient_checkpointing
    printed["summary"] = names["engine"].upipe.summary
    return printed


def _trainer_tutorial() -> list[float]:
    from tests.trainers import accelerate_on_cpu

    page = "docs/tutorials/trainer.md"
    accelerate_on_cpu()
    Path("ds_config.json").write_text(blocks("json", page)[0].text)
    dist.barrier()
    script, loop = blocks("python", page)
    names: dict[str, Any] = {}
    # On CPUs the backend has to be said.
    on_cpus = 'report_to=[], disable_tqdm=True, accelerator_config={"use_configured_state": True},'
    changes = {"report_to=[],": on_cpus}
    exec(script.compiled(changes), names)
    assert names["trainer"].model_wrapped.upipe is not None
    accelerate_on_cpu()
    exec(loop.compiled(), names)
    history = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
    return [*history, float(names["loss"].detach())]


def _readme() -> list[float]:
    """The README's lines for an ALST script, on what such a script has, and the losses that may take their place."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

    import deepspeed_plugin
    from tests.models import make_batch, make_model, shard

    _forget()
    config = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2, "upipe": {"chunk_heads": 2}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    Path("ds_config.json").write_text(json.dumps(config))
    dist.barrier()
    batch = make_batch()
    positions = torch.arange(16)
    row = {"input_ids": batch["input_ids"][0], "labels": batch["input_ids"][0], "position_ids": positions}
    names: dict[str, Any] = {
        "deepspeed": deepspeed,
        "deepspeed_plugin": deepspeed_plugin,
        "UlyssesSPAttentionHF": UlyssesSPAttentionHF,
        "UlyssesSPDataLoaderAdapter": UlyssesSPDataLoaderAdapter,
        "model": make_model("llama"),
        "loader": torch.utils.data.DataLoader([row, row]),
        "sp_rank": dist.get_rank(),
        "sp_group": dist.group.WORLD,
        "sp_world_size": 2,
        "device": "cpu",
        "inputs": {"input_ids": shard(batch["input_ids"]), "position_ids": shard(positions[None])},
    }
    (script,) = (b for b in blocks("python", "README.md") if _needs_ranks(b.text))
    exec(script.compiled({"sequence_parallel_size=8": "sequence_parallel_size=2"}), names)
    assert names["engine"].upipe is not None
    given = names["inputs"]
    names |= {"input_ids": given["input_ids"], "position_ids": given["position_ids"]}
    for losses in blocks("python", "docs/losses.md"):
        exec(losses.compiled(), names)
    return [float(names["loss"].detach()), *names["scores"].tolist()]


def _peft() -> float:
    """LoRA on the model of an ALST script."""
    import deepspeed

    from tests.engines import UPIPE, ds_config, forward, register_ulysses
    from tests.models import make_batch, make_model

    _forget()
    Path("ds_config.json").write_text(json.dumps(ds_config(1, **UPIPE)))
    dist.barrier()
    model = make_model("llama")
    names: dict[str, Any] = {"deepspeed": deepspeed, "model": model, "mpu": register_ulysses(model, 2)}
    (block,) = blocks("python", "docs/peft.md")
    exec(block.compiled(), names)
    assert names["engine"].upipe is not None
    _, loss = forward(names["engine"], make_batch(seq=32))
    names["engine"].backward(loss)
    return float(loss.detach())


def _host() -> None:
    (block,) = blocks("python", "docs/howto/host.md")
    exec(block.compiled(), {})


def _forget() -> None:
    import deepspeed_plugin
    from tests.engines import forget_ulysses

    forget_ulysses()
    deepspeed_plugin.register()


def _on_ranks(folder: str) -> dict[str, Any]:
    where = Path(folder) / str(dist.get_rank())
    where.mkdir()
    os.chdir(where)
    _host()
    return {
        "deepspeed": _deepspeed_tutorial(),
        "readme": _readme(),
        "peft": _peft(),
        "trainer": _trainer_tutorial(),
    }


def test_python_of_ranks_runs_and_the_key_changes_no_loss(tmp_path):
    pytest.importorskip("deepspeed")
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    places = {b.page for b in blocks("python") if _needs_ranks(b.text)}
    tutorials = {"docs/tutorials/deepspeed.md", "docs/tutorials/trainer.md"}
    assert places == {"README.md", "docs/losses.md", "docs/howto/host.md", "docs/peft.md"} | tutorials
    first, second = run_ranks(2, _on_ranks, str(tmp_path))
    step = re.compile(r"^step \d+: loss (\S+), gradient norm (\S+)$", re.MULTILINE)
    page = (ROOT / "docs" / "tutorials" / "deepspeed.md").read_text()
    texts = {**first["deepspeed"], "page": page}
    figures = {name: [*map(float, sum(step.findall(texts[name]), ()))] for name in ("without", "with", "page")}
    assert len(figures["without"]) == 4 * 2
    assert figures["with"] == pytest.approx(figures["without"], abs=2e-4)  # printed with four digits
    assert figures["page"] == pytest.approx(figures["with"], abs=2e-3)  # another machine's rounding, through four steps
    begins = re.search(r"`(UPipe: [^`]+)`", page)[1]
    assert first["deepspeed"]["summary"].startswith(begins)
    assert len(first["trainer"]) == 4 + 1
    assert all(map(math.isfinite, [*first["readme"], first["peft"]]))
    # Scores are of whole sequences, on every rank alike.
    assert first["readme"][1:] == pytest.approx(second["readme"][1:], rel=1e-6)


# ---------------------------------------------------------------- configurations


def test_json_and_diffs_are_ds_configs():
    pytest.importorskip("deepspeed")
    from deepspeed_plugin.settings import read_settings

    texts = [b.text for b in blocks("json")] + [_after_diff(b.page, True) for b in blocks("diff")]
    assert len(texts) >= 3
    for text in texts:
        config = json.loads(text)
        assert read_settings(config).chunk_heads % config["sequence_parallel_size"] == 0
    for block in blocks("diff"):
        before, after = (json.loads(_after_diff(block.page, added)) for added in (False, True))
        assert after.pop("upipe") and before == after


def test_yaml_is_megatrons():
    yaml = pytest.importorskip("yaml")
    from megatron_patch.options import options_from

    found = blocks("yaml")
    assert found
    for block in found:
        section = types.SimpleNamespace(**yaml.safe_load(block.text)["model_parallel"])
        assert options_from(section).config.chunk_heads == section.context_parallel_size


# ---------------------------------------------------------------- commands


def test_commands_of_upipe_run(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    # tests/test_autoload.py has `upipe info` import the hosts.
    monkeypatch.setattr(info, "_PROBE", "print('patched: True')")
    found = dict.fromkeys(c.words for c in commands() if c.program == "upipe")
    benches = [words for words in found if words[1] == "bench"]  # for GPUs; tests/test_bench.py runs small ones
    assert benches and {words[1] for words in found} >= {"plan", "check", "info"}
    for words in benches:
        assert cli._parser().parse_args(words[1:]).run
    for words in found.keys() - benches:
        assert cli.main(words[1:]) == 0, (words, capsys.readouterr().err)


def test_other_commands_have_a_parser():
    assert {c.program for c in commands()} - {"upipe"} == set(PARSED_ONLY)


def test_targets_of_make_exist():
    for command in commands():
        if command.program == "make":
            subprocess.run(["make", "-n", *command.words[1:]], cwd=ROOT, check=True, capture_output=True)


def test_what_pip_installs_exists():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11 and newer
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for command in commands():
        if command.program == "pip":
            assert command.words[1] == "install"
            for word in command.words[2:]:
                name, extra = re.fullmatch(r"([\w-]+)(?:\[(\w+)\])?", word).groups()
                if name == project["name"]:
                    assert extra in project["optional-dependencies"]
                else:
                    assert name == "torch" or word == "--no-build-isolation"


def test_pytest_is_given_files_that_exist():
    for command in commands():
        if command.program == "pytest":
            assert all((ROOT / word).is_file() for word in command.words[1:])


class _Parsed(Exception):
    pass


def _reads_its_arguments(monkeypatch, words: list[str]) -> None:
    """The script's own parser takes `words`: SCRIPT or -m MODULE, and arguments."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, *args, **kwargs):
        parse(parser, *args, **kwargs)
        raise _Parsed

    with monkeypatch.context() as patch, pytest.raises(_Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.chdir(ROOT)
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        if words[0] == "-m":
            patch.setattr(sys, "argv", words[1:])
            runpy.run_module(words[1], run_name="__main__")
        else:
            patch.setattr(sys, "argv", words)
            runpy.run_path(words[0], run_name="__main__")


def test_scripts_take_their_arguments(monkeypatch):
    found = [list(c.words[1:]) for c in commands() if c.program == "python"]
    assert found
    for words in found:
        _reads_its_arguments(monkeypatch, words)


def _started(words: tuple[str, ...]) -> tuple[list[str], int] | None:
    """What a launcher starts, in how many processes: (script or -m module, and its arguments; processes)."""
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(words[1:])
        module = ["-m"] if options.module else []
        return [*module, options.training_script, *options.training_script_args], int(options.nproc_per_node)
    if words[0] == "deepspeed":
        runner = pytest.importorskip("deepspeed.launcher.runner")
        options = runner.parse_args(words[1:])
        return [options.user_script, *options.user_args], options.num_gpus
    if words[0] == "accelerate":
        assert words[1] == "launch"
        launch = pytest.importorskip("accelerate.commands.launch")
        options = launch.launch_command_parser().parse_args(words[2:])
        assert options.use_deepspeed
        return [options.training_script, *options.training_script_args], options.num_processes
    return None


def test_launchers_take_their_arguments_and_start_what_is_there():
    found = [(c.page, _started(c.words)) for c in commands() if c.program in ("torchrun", "deepspeed", "accelerate")]
    assert len(found) >= 8
    for page, (started, processes) in found:
        assert processes in (2, 8)
        name = next(word for word in started if word != "-m")
        if name in ("train.py", "host.py"):  # the page's own, which runs above
            assert blocks("python", page)
        else:
            assert name in ("pretrain_gpt.py", "megatron_patch"), name


# What "..." stands for.
REST = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --attention-dropout 0 --train-iters 10 --lr 1e-5 --data-path text --split 100,0,0 "
    "--tokenizer-type NullTokenizer --vocab-size 256 --eval-interval 100"
)


def _of_megatron(given: list[tuple[list[str], int]]) -> list[int]:
    """`chunk_heads` of every command line, by Megatron's own parser."""
    os.environ.update(RANK="0", LOCAL_RANK="0")
    from tests.megatron_cpu import use_cpu_for_training

    use_cpu_for_training()
    from megatron.training import argument_utils, arguments

    from megatron_patch.patches import patch_arguments, patch_config

    patch_arguments(arguments)
    patch_config(argument_utils)
    found = []
    for words, ranks in given:
        os.environ["WORLD_SIZE"] = str(ranks)
        sys.argv = ["pretrain_gpt.py", *words]
        args = arguments.parse_args()
        arguments.validate_args(args)
        found.append(arguments.core_transformer_config_from_args(args).upipe.config.chunk_heads)
    return found


@pytest.mark.skipif(not HAS_MEGATRON, reason="megatron.training is not installed (megatron-core 0.17 and newer)")
def test_megatron_takes_its_arguments():
    given = []
    for command in commands():
        if "pretrain_gpt.py" in command.words:
            words, ranks = _started(command.words)
            words = words[words.index("pretrain_gpt.py") + 1 :]
            if words[-1] == "...":
                rest = dict(re.findall(r"(--\S+) (\S+)", REST))
                words = words[:-1] + [w for pair in rest.items() if pair[0] not in words for w in pair]
            given.append((words, ranks))
    assert len(given) >= 6
    assert run_in_process(_of_megatron, given) == [8] * len(given)
