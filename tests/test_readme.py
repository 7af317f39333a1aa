"""What the README says is run: its Python, its ds_config, its keys and its memory table."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from upipe_integrations import Mode, Schedule, UPipeConfig
from upipe_integrations.kernels import KERNELS
from upipe_integrations.memory import LayerShape, ulysses_peak, upipe_peak

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _blocks(info: str) -> list[str]:
    return re.findall(rf"```{info}\n(.*?)```", README, re.DOTALL)


def test_python_blocks_run():
    blocks = _blocks("python")
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


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
        (8, "recompute", "the same, `memory` = `recompute`"),
        (8, "fused", "the same, `memory` = `fused`"),
        (8, "blocks", "the same, `memory` = `blocks`"),
        (16, "keep", "UPipe, `chunk_heads` = 16"),
    ):
        schedules = [Schedule.build(heads=m.heads, kv_heads=m.kv_heads, ranks=8, chunk_heads=U) for m in models]
        peaks = [upipe_peak(m, s, Mode(memory)).gib(1 << 20, 128) for m, s in zip(models, schedules, strict=True)]
        row(name, peaks)


def test_every_file_of_the_map_exists():
    for line in README[README.index("## Files") :].splitlines():
        for name in re.findall(r"^  (\w+(?:\.py|/))(?:, (\w+\.py))?  ", line):
            for file in filter(None, name):
                assert list(ROOT.glob(f"*/{file}")), line
