"""What the README says is true: its ds_configs, its keys, its memory table. Its code runs in test_doc_blocks.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import textwrap
from pathlib import Path

import pytest

from tests.ranks import run_in_process
from upipe_integrations import Mode, Schedule, UPipeConfig
from upipe_integrations.kernels import KERNELS
from upipe_integrations.planning.closed_forms import LayerShape, ulysses_peak, upipe_peak

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _blocks(info: str) -> list[str]:
    """Code blocks that open with `info`, at the margin or in a list."""
    return [
        textwrap.dedent(block) for block in re.findall(rf"^ *```{info}\n(.*?)```", README, re.DOTALL | re.MULTILINE)
    ]


def test_ds_config_blocks_and_files_are_valid():
    pytest.importorskip("deepspeed")
    from deepspeed_plugin.settings import read_settings

    configs = [json.loads(block) for block in _blocks("json")]
    configs += [json.loads(path.read_text()) for path in sorted((ROOT / "configs" / "deepspeed").glob("*.json"))]
    assert len(configs) >= 2
    for config in configs:
        assert read_settings(config).chunk_heads % config["sequence_parallel_size"] == 0


def test_every_key_and_kernel_is_listed_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", README, re.MULTILINE))
    for field in dataclasses.fields(UPipeConfig):
        default = "required" if field.default is dataclasses.MISSING else f"`{json.dumps(field.default)}`"
        assert rows[field.name] == default
    assert all(f"`{name}`" in README for name in KERNELS)


def test_the_memory_table_is_the_closed_forms():
    models = (LayerShape(32, 8, 128, 4096), LayerShape(64, 8, 128, 5120))

    def row(name, peaks):
        values = [f"{v:.2f} GiB" for peak in peaks for v in (peak.forward, peak.training)]
        cells = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", README, re.MULTILINE).group(1)
        assert [cell.strip(" *") for cell in cells.split("|")] == values

    row("Ulysses", [ulysses_peak(m, 8).gib(1 << 20, 128) for m in models])
    for U, memory, name in (
        (8, "keep", "UPipe, `chunk_heads` = 8"),
        (8, "keep_heads", "the same, `memory` = `keep_heads`"),
        (8, "recompute", "the same, `memory` = `recompute`"),
        (8, "fused", "the same, `memory` = `fused`"),
        (8, "blocks", "the same, `memory` = `blocks`"),
        (16, "keep", "UPipe, `chunk_heads` = 16"),
    ):
        schedules = [Schedule.build(heads=m.heads, kv_heads=m.kv_heads, ranks=8, chunk_heads=U) for m in models]
        peaks = [upipe_peak(m, s, Mode.named(memory)).gib(1 << 20, 128) for m, s in zip(models, schedules, strict=True)]
        row(name, peaks)


def _attention_of_the_spec_in_the_readme():
    (block,) = (block for block in _blocks("python") if "upipe_spec" in block)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    attention = names["spec"].submodules.self_attention
    return attention.module.__name__, attention.params["upipe"]


def test_the_megatron_block_makes_a_spec_with_upipe():
    pytest.importorskip("megatron.core")
    from megatron_patch import UPipeOptions

    found = run_in_process(_attention_of_the_spec_in_the_readme)
    assert found == ("UPipeSelfAttention", UPipeOptions(UPipeConfig(chunk_heads=8)))


def test_every_megatron_argument_is_listed_with_its_default():
    from megatron_patch.arguments import add_arguments

    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| (\S+) \|", README, re.MULTILINE))
    actions = add_arguments(argparse.ArgumentParser(add_help=False))._actions
    assert rows.keys() == {action.option_strings[0] for action in actions}
    own = {"context_parallel_impl": "native", "upipe_chunk_heads": "auto"}
    for action in actions:
        default = own.get(action.dest, getattr(UPipeConfig(1), action.dest.removeprefix("upipe_"), None))
        assert rows[action.option_strings[0]] == ("off" if default is False else f"`{default}`")


def test_every_refused_megatron_setting_is_listed():
    from megatron_patch.options import RULES, flag

    (refused,) = re.findall(r"^\| refused, by name \| (.*) \|$", README, re.MULTILINE)
    listed = re.findall(r"`(--[\w-]+)`", refused)
    assert listed == [flag(rule.names[0]) for rule in RULES]


def test_every_file_of_the_map_exists():
    for line in README[README.index("## Files") :].splitlines():
        for name in re.findall(r"^  (\w+(?:\.py|/))(?:, (\w+\.py))?  ", line):
            for file in filter(None, name):
                assert list(ROOT.glob(f"*/{file}")), line
