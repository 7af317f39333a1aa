"""What the README says is true: its ds_configs, its keys, its memory table; and what docs/ has in its place.

Their code runs in test_doc_blocks.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.pages import PAGES, blocks
from tests.ranks import run_in_process
from upipe_integrations import Mode, Schedule, UPipeConfig
from upipe_integrations.kernels import KERNELS
from upipe_integrations.planning.closed_forms import LayerShape, ulysses_peak, upipe_peak

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MEMORY_PAGE = (ROOT / "docs" / "memory.md").read_text()
MEGATRON_PAGE = (ROOT / "docs" / "megatron.md").read_text()


def _prose(text: str) -> list[str]:
    """Lines outside of code blocks and tables."""
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in text.splitlines() if not line.lstrip().startswith("|")]


def test_the_readme_is_short_and_no_line_is_long():
    lines = README.splitlines()
    assert len(lines) <= 200
    assert [line for line in lines if len(line) > 160] == []
    contributing = ROOT / "CONTRIBUTING.md"
    # Written by the command they name, so that a line may be a whole docstring or a program's output.
    pages = [page for page in PAGES if not re.search(r"^Written by", page.read_text(), re.MULTILINE)]
    assert len(pages) > 20
    for page in (*pages, contributing):
        assert [line for line in _prose(page.read_text()) if len(line) > 160] == [], page.name


def test_ds_config_blocks_and_files_are_valid():
    pytest.importorskip("deepspeed")
    from deepspeed_plugin.settings import read_settings

    configs = [json.loads(block.text) for block in blocks("json", "README.md")]
    configs += [json.loads(path.read_text()) for path in sorted((ROOT / "configs" / "deepspeed").glob("*.json"))]
    assert len(configs) >= 2
    for config in configs:
        assert read_settings(config).chunk_heads % config["sequence_parallel_size"] == 0


def test_every_key_and_kernel_is_listed_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", README, re.MULTILINE))
    for field in dataclasses.fields(UPipeConfig):
        default = "required" if field.default is dataclasses.MISSING else f"`{json.dumps(field.default)}`"
        assert rows[field.name] == default
    (of_kernels,) = re.findall(r"^- \*\*`kernel`\*\*(.*?)^- ", MEMORY_PAGE, re.DOTALL | re.MULTILINE)
    assert [name for name in re.findall(r"`([\w-]+)`", of_kernels) if name in KERNELS] == list(KERNELS)
    described = dict(re.findall(r"^- \*\*`(\w+)`\*\* \((\S+)\):", MEMORY_PAGE, re.MULTILINE))
    assert described == {key: default for key, default in rows.items() if key in described}
    assert described.keys() == {field.name for field in dataclasses.fields(UPipeConfig)} - {"memory"}


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


def _attention_of_the_spec_on_the_page():
    (block,) = (block for block in blocks("python", "docs/megatron.md") if "UPipeConfig(chunk_heads=8)" in block.text)
    names: dict[str, object] = {}
    exec(block.compiled(), names)
    attention = names["spec"].submodules.self_attention
    return attention.module.__name__, attention.params["upipe"]


def test_the_megatron_block_makes_a_spec_with_upipe():
    pytest.importorskip("megatron.core")
    from megatron_patch import UPipeOptions

    found = run_in_process(_attention_of_the_spec_on_the_page)
    assert found == ("UPipeSelfAttention", UPipeOptions(UPipeConfig(chunk_heads=8)))


def test_every_megatron_argument_is_listed_with_its_default():
    from megatron_patch.arguments import add_arguments

    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| (\S+) \|", MEGATRON_PAGE, re.MULTILINE))
    actions = add_arguments(argparse.ArgumentParser(add_help=False))._actions
    assert rows.keys() == {action.option_strings[0] for action in actions}
    own = {"context_parallel_impl": "native", "upipe_chunk_heads": "auto"}
    for action in actions:
        default = own.get(action.dest, getattr(UPipeConfig(1), action.dest.removeprefix("upipe_"), None))
        assert rows[action.option_strings[0]] == ("off" if default is False else f"`{default}`")


def test_every_refused_megatron_setting_is_listed():
    from megatron_patch.options import RULES, flag

    section = MEGATRON_PAGE[MEGATRON_PAGE.index("## What is refused") :]
    cells = re.findall(r"^\| (`--.*?) \| .* \|$", section, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(--[\w-]+)", cell)}
    wanted = {flag(name) for rule in RULES for name in rule.names}
    assert wanted <= listed
    # Beside the rules: query groups, whose own check names the ranks that they must divide.
    assert listed - wanted <= {"--num-query-groups", "--tensor-model-parallel-size"}
