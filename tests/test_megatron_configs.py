"""configs/megatron/: Megatron's own parser takes every file, UPipe serves it, and the memory it names follows."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.megatron.arguments import read_arguments
from tests.ranks import run_in_process
from upipe_integrations import Mode, Schedule
from upipe_integrations.planning.closed_forms import LayerShape, upipe_peak

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None,
    reason="megatron.training is not installed (megatron-core 0.17 and newer, Python 3.12)",
)
FOLDER = Path(__file__).parents[1] / "configs" / "megatron"
# GPUs, and what an expert would look for in the TransformerConfig.
MODELS = {
    "llama3-8b-8gpu": (8, {"num_layers": 32, "hidden_size": 4096, "num_query_groups": 8, "qk_layernorm": False}),
    "qwen3-32b-16gpu": (16, {"num_layers": 64, "hidden_size": 5120, "num_query_groups": 8, "qk_layernorm": True}),
}
LENGTHS = {"256K": 1 << 18, "512K": 1 << 19, "1M": 1 << 20, "3M": 3 << 20, "5M": 5 << 20}
# What a user adds, as the files say.
ADDED = "--train-iters 10 --lr 1e-5 --data-path text --split 100,0,0 --tokenizer-type NullTokenizer --eval-interval 100"


def _parsed(name: str, gpus: int, length: int) -> dict[str, Any]:
    """The arguments as validated, and the options that the TransformerConfig carries."""
    os.environ.update(WORLD_SIZE=str(gpus), RANK="0", LOCAL_RANK="0")
    from tests.megatron_cpu import use_cpu_for_training

    use_cpu_for_training()
    from megatron.training import argument_utils, arguments

    from megatron_patch.options import check_arguments, options_from
    from megatron_patch.patches import patch_arguments, patch_config

    patch_arguments(arguments)
    patch_config(argument_utils)
    given = ["--seq-length", str(length), "--max-position-embeddings", str(length), *ADDED.split()]
    sys.argv = ["pretrain_gpt.py", *read_arguments(FOLDER / f"{name}.args"), *given]
    args = arguments.parse_args()
    arguments.validate_args(args)
    config = arguments.core_transformer_config_from_args(args)
    return {
        "args": {key: value for key, value in vars(args).items() if isinstance(value, int | float | str | None)},
        "notes": check_arguments(args, options_from(args)),
        "upipe": config.upipe,
        "carried by the model's config": argument_utils.gpt_config_from_args(args).upipe,
        "config": {key: getattr(config, key) for key in MODELS[name][1]},
    }


@pytest.mark.parametrize("name", MODELS)
def test_megatron_takes_the_file_and_the_memory_is_as_it_says(name):
    gpus, expected = MODELS[name]
    parsed = run_in_process(_parsed, name, gpus, LENGTHS["5M"])
    args = parsed["args"]
    assert parsed["config"] == expected
    assert parsed["notes"] == []
    options = parsed["upipe"]
    assert options == parsed["carried by the model's config"]
    assert options.config.chunk_heads == args["context_parallel_size"]
    assert args["world_size"] == gpus and args["data_parallel_size"] == 1
    assert args["seq_length"] == args["max_position_embeddings"] == LENGTHS["5M"]
    assert _table(FOLDER / f"{name}.args") == {
        row: [f"{sizes[row]:.0f}" for sizes in (_gib(args, options.config, length) for length in LENGTHS.values())]
        for row in ROWS
    }


def _table(file: Path) -> dict[str, list[str]]:
    """The rows of numbers in the comment that opens the file."""
    rows = re.findall(r"^#   (\D+?)((?: +\d+){5})$", file.read_text(), re.MULTILINE)
    return {name.strip(): numbers.split() for name, numbers in rows}


FIXED, INPUTS, ATTENTION, MLP, LOSS = "weights, gradients", "inputs of layers", "attention", "MLP", "logits and loss"
SUM, WITHOUT_LOSS = "all of it", "all but the loss"
ROWS = (FIXED, INPUTS, ATTENTION, MLP, LOSS, SUM, WITHOUT_LOSS)


def _gib(args: dict[str, Any], config: Any, length: int) -> dict[str, float]:
    """Memory of one GPU in GiB, by rows of the table."""
    E, F, V, D = args["hidden_size"], args["ffn_hidden_size"], args["vocab_size"], args["kv_channels"]
    H, K, layers = args["num_attention_heads"], args["num_query_groups"], args["num_layers"]
    C, T = args["context_parallel_size"], args["tensor_model_parallel_size"]
    rows, gathered = length / (C * T), length / C if T > 1 else 0
    parameters = layers * ((2 * H + 2 * K) * D * E + 3 * E * F) + 2 * V * E  # without norms
    schedule = Schedule.build(heads=H // T, kv_heads=K // T, ranks=C, chunk_heads=config.chunk_heads)
    attention = upipe_peak(LayerShape(H // T, K // T, D, E), schedule, Mode.named(config.memory))
    gib = 2**30
    sizes = {
        FIXED: parameters / T * 6 / gib,
        INPUTS: layers * rows * E * 2 / gib,
        ATTENTION: attention.gib(length, D).training + gathered * E * 2 / gib,
        MLP: ((5 * F + 6 * E) * rows + 2 * E * gathered) * 2 / gib,
        LOSS: V * rows * 6 / gib,
    }
    kept = sizes[FIXED] + sizes[INPUTS]
    sizes[WITHOUT_LOSS] = kept + max(sizes[ATTENTION], sizes[MLP])
    sizes[SUM] = kept + max(sizes[ATTENTION], sizes[MLP], sizes[LOSS])
    return sizes


@pytest.mark.parametrize("name", ["demo", *MODELS])
def test_a_shell_reads_the_file_as_the_tests_do(name):
    file = FOLDER / f"{name}.args"
    command = ["bash", "-c", """printf '%s\\n' $(grep -v '^#' "$0")""", str(file)]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert words == read_arguments(file)


def test_every_file_is_tested():
    assert {file.stem for file in FOLDER.glob("*.args")} == {"demo", *MODELS}
