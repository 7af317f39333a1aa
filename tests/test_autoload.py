"""Zero-code activation: the project installed, and a training script that knows nothing of it.

A copy of the project is installed, without its dependencies, to a folder that is put on PYTHONPATH: its metadata
are found there as those of any installed package.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron_arguments import MODEL, UPIPE, needs_training
from tests.ranks import free_port

ROOT = Path(__file__).parents[1]

SCRIPT = """
import {first}
import os, sys, torch
assert "deepspeed_plugin" not in sys.modules or {first_is_host}
import deepspeed, transformers
assert "upipe_integrations" in sys.modules or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0"
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
import deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which is compiled for half a minute, and not called
ranks = int(os.environ.get("WORLD_SIZE", 1))
deepspeed.init_distributed("gloo")
# Heads that ALST refuses on 2 ranks, before it knows of the key.
config = transformers.LlamaConfig(hidden_size=48, intermediate_size=16, num_hidden_layers=1, num_attention_heads=3,
    num_key_value_heads=3, vocab_size=64, attn_implementation="sdpa")
model = transformers.LlamaForCausalLM(config)
mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", ranks, micro_batch_size=1)
engine, *_ = deepspeed.initialize(model=model, mpu=mpu, config={{
    "train_micro_batch_size_per_gpu": 1, "optimizer": {{"type": "Adam", "params": {{"torch_adam": True}}}},
    "zero_optimization": {{"stage": 1}}, "sequence_parallel_size": ranks, "upipe": {{"chunk_heads": ranks}}}})
upipe = getattr(engine, "upipe", None)
result = f"RESULT {{torch.distributed.get_rank()}} {{ranks}} {{None if upipe is None else upipe.layers}}\\n"
os.write(1, result.encode())  # whole: the ranks share a pipe
"""
ON = "['model.layers.0.self_attn']"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the project installed."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("upipe_integrations", "deepspeed_plugin", "megatron_patch"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("upipe_autoload.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", site, source], check=True, timeout=120)
    return site


def _run(command: list[str], installed: Path, **environment: str) -> str:
    variables = {**os.environ, "PYTHONPATH": str(installed), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    variables |= environment
    result = subprocess.run(
        command, cwd=installed, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _python(code: str, installed: Path, **environment: str) -> str:
    return _run([sys.executable, "-c", code], installed, **environment)


NEW_MODULES = """
import sys, torch
print(sorted({name.split(".")[0] for name in sys.modules} & {"wrapt", "upipe_autoload", "upipe_integrations",
    "deepspeed_plugin", "megatron_patch", "deepspeed", "transformers", "accelerate", "megatron"}))
"""


OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@pytest.fixture(scope="module")
def told(installed) -> dict[str, list[str]]:
    """With the hook and without it, by one interpreter each: the modules that `import torch` loads, and `upipe info`.

    Without it no host is tried.
    """
    info = "\nfrom upipe_integrations.commands import main\nmain.main(['info'{word}])"
    on = _python(NEW_MODULES + info.format(word=""), installed)
    off = _python(NEW_MODULES + info.format(word=", '--no-probe'"), installed, **OFF)
    return {"on": on.splitlines(), "off": off.splitlines()}


def test_import_torch_loads_the_hook_and_nothing_else(told):
    assert told["on"][0] == "['upipe_autoload', 'wrapt']"
    assert told["off"][0] == "[]"


def test_import_torch_survives_without_wrapt(installed):
    blocked = """
import logging, sys
sys.modules["wrapt"] = None
logging.basicConfig(stream=sys.stdout)
import torch
print(torch.ones(2).sum())
"""
    printed = _python(blocked, installed)
    assert "tensor(2.)" in printed
    for plugin in ("deepspeed_plugin", "megatron_patch"):
        assert f"{plugin} is not turned on by configuration alone (ModuleNotFoundError: " in printed


def test_info_says_what_is_on(told):
    def about_autoload(lines: list[str]) -> list[str]:
        first = next(number for number, line in enumerate(lines) if line.startswith("autoload"))
        return [" ".join(line.split()) for line in lines[first : first + 3]]

    state, *hosts = about_autoload(told["on"])
    assert state == "autoload on for deepspeed, megatron: configuration is enough"
    for host, line in zip(("deepspeed", "megatron"), hosts, strict=True):
        there = importlib.util.find_spec(host) is not None
        said = "is patched in a process that imports it" if there else "is not installed"
        assert line == f"{host} entry point upipe_{host}, loaded by `import torch`; {host} {said}"
    off, deepspeed, _ = about_autoload(told["off"])
    assert "off for deepspeed, megatron: TORCH_DEVICE_BACKEND_AUTOLOAD is set" in off
    assert "upipe_deepspeed, not loaded by `import torch`; deepspeed" in deepspeed


@needs_training
def test_megatrons_arguments_are_there_in_an_unmodified_script(installed):
    script = installed / "pretrain.py"
    script.write_text(
        "from megatron.training.arguments import parse_args\nprint('RESULT', parse_args().upipe_chunk_heads)\n"
    )
    words = [sys.executable, str(script), *MODEL, *UPIPE, "--upipe-chunk-heads", "8"]
    assert "RESULT 8" in _run(words, installed)


def _script(installed: Path, first: str = "torch") -> Path:
    path = installed / f"train_with_{first}_first.py"
    path.write_text(SCRIPT.format(first=first, first_is_host=first == "deepspeed"))
    return path


# Two ranks under one of them: what ALST refuses there is put off. A rank is an interpreter that imports everything.
LAUNCHERS = {
    "python": (1, [sys.executable]),
    "torchrun": (2, [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]),
    "accelerate": (
        1,
        [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "1"]
        + ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"],
    ),
    "deepspeed": (1, [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1"]),
}


def _launched(launcher: str, script: list[str], installed: Path, **environment: str) -> list[str]:
    ranks, command = LAUNCHERS[launcher]
    port = str(free_port())
    if launcher == "python":
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        environment["MASTER_PORT"] = port
    else:
        flag = {"torchrun": "--master-port"}.get(launcher, "--main_process_port")
        command = [*command, "--master_port" if launcher == "deepspeed" else flag, port]
    printed = _run([*command, *script], installed, **environment)
    results = sorted(line[line.index("RESULT") :] for line in printed.splitlines() if "RESULT" in line)
    assert len(results) == ranks, printed
    return [line.split(None, 3)[3] for line in results]


def test_the_variable_of_pytorch_turns_it_off(installed):
    pytest.importorskip("deepspeed")
    assert _launched("python", [str(_script(installed))], installed, **OFF) == ["None"]


@pytest.mark.parametrize(
    ("launcher", "first"),
    [("python", "torch"), ("torchrun", "deepspeed"), ("accelerate", "transformers"), ("deepspeed", "torch")],
)
def test_the_key_is_enough_under_every_launcher_and_in_every_import_order(launcher, first, installed):
    """A launcher starts each rank as an interpreter of its own, so `first` is what that one imports first."""
    pytest.importorskip("deepspeed")
    ranks, _ = LAUNCHERS[launcher]
    assert _launched(launcher, [str(_script(installed, first))], installed) == [ON] * ranks


def test_the_key_is_enough_for_a_module_under_deepspeeds_launcher(installed):
    pytest.importorskip("deepspeed")
    module = ["--module", _script(installed).stem]
    assert _launched("deepspeed", module, installed) == [ON]
