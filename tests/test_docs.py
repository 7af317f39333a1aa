"""docs/supported.md is what a run of this test finds: ``UPIPE_WRITE_DOCS=1 pytest tests/test_docs.py`` writes it.

Kernels that run here are run, each feature against the independent reference; those that need a GPU say what
they accept and refuse. Then the site, its figures and the page of numbers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import relative_errors, run_sharded, spec_of
from tests.reference import make_layer, reference
from upipe_integrations import Dropout, KernelRequest, Mode, Schedule
from upipe_integrations.kernels import KERNELS
from upipe_integrations.memory import LayerShape, ulysses_peak, upipe_peak
from upipe_integrations.mode import MEMORY

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "supported.md"

FEATURES = {
    "causal": {},
    "full": {"causal": False},
    "custom scale": {"scale": 0.3},
    "GQA, MQA": {"kv_heads": 1},
    "sliding window": {"window": 5},
    "packed documents": {"documents": ((0, 3, 9, 16),)},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout": True},
    "value heads of another size": {"value_dim": 12},
    "float64": {"dtype": torch.float64},
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
}
HERE = ("torch-cpu-flash", "math")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 6e-2}

HEAD = """# Supported and refused, per kernel and feature

Written by `UPIPE_WRITE_DOCS=1 pytest tests/test_docs.py`; the same test fails when this page is not true.

- **exact**: run in that test through the engine and equal to single-process attention, output and every gradient
  (float64 unless the row names another dtype, then to its precision; dropout: equal to its own one-stage run).
- **accepted**: served by the kernel, which needs a GPU; its call form is tested with stand-ins, its values by tests
  marked `gpu`.
- **refused**: a `ValueError` that names the kernel and the feature, before any exchange. `auto` takes a kernel that
  can; `math` can everything on every device.

Any function `f(q, k, v, spec)` that PyTorch can differentiate is a kernel too (`FunctionKernel`), except for sinks.

Adapters are the same with every kernel: [peft.md](peft.md).

Combinations: every pair of features that a kernel serves alone it serves together (`tests/test_features.py` runs all
pairs on 2, 3 and 4 ranks, in the contiguous and the zigzag layout, with head counts that the ranks do not divide). A
window needs causal attention.

"""


def _outcome(name: str, options: dict) -> str:
    usual = torch.float64 if name in HERE else torch.bfloat16
    options = {"dtype": usual, **options}
    dropout = Dropout(0.3, seed=1) if options.pop("dropout", False) else None
    layer = make_layer(4, options.pop("kv_heads", 2), **options)
    device = torch.device("cpu" if name == "torch-cpu-flash" else "cuda")
    dtype = layer.x.dtype
    spec = spec_of(layer, dropout)
    request = KernelRequest(device, dtype, layer.head_dim, layer.value_dim, spec, layer.sinks is not None)
    reason = KERNELS[name].refusal(request)
    if reason and "not installed" not in reason:
        return "refused"
    if name not in HERE:
        return "accepted"
    got = run_sharded(layer, 2, None, name, dropout=dropout)
    wanted = reference(_double(layer)) if dropout is None else run_sharded(layer, 4, None, name, dropout=dropout)
    assert max(relative_errors(got, wanted).values()) < TOLERANCE[dtype]
    return "exact"


def _double(layer):
    for field, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            setattr(layer, field, value.double())
    return layer


def _page() -> str:
    names = list(KERNELS)
    lines = ["| | " + " | ".join(f"`{name}`" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for feature, options in FEATURES.items():
        cells = [_outcome(name, options) for name in names]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return HEAD + "\n".join(lines) + "\n"


def test_the_page_is_what_a_run_finds():
    page = _page()
    if os.environ.get("UPIPE_WRITE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "run UPIPE_WRITE_DOCS=1 pytest tests/test_docs.py and commit docs/supported.md"


# ---------------------------------------------------------------- the site and its figures


def _built(repository: Path, site: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)


needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None,
    reason="mkdocs is not installed: pip install 'upipe-integrations[docs]'",
)


@needs_mkdocs
def test_the_site_builds_without_a_warning(tmp_path):
    result = _built(ROOT, tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "troubleshooting.html").is_file() and (tmp_path / "figures" / "memory.svg").is_file()


@needs_mkdocs
def test_a_broken_link_fails_it(tmp_path):
    for name in ("docs", "scripts", "mkdocs.yml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    with (tmp_path / "docs" / "plan.md").open("a") as page:
        page.write("\n[a](nothing.md), [b](#nowhere), [c](../upipe_integrations/gone.py)\n")
    result = _built(tmp_path, tmp_path / "site")
    assert result.returncode == 1
    assert all(f"'{target}'" in result.stderr for target in ("nothing.md", "#nowhere", "../upipe_integrations/gone.py"))


def _texts(figure: Path) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)</text>", figure.read_text())


def test_the_figures_are_what_the_script_draws(tmp_path):
    folder = ROOT / "docs" / "figures" if os.environ.get("UPIPE_WRITE_DOCS") else tmp_path
    command = [sys.executable, str(ROOT / "benchmarks" / "figures.py"), str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=120)
    for name in ("stages.svg", "memory.svg"):
        committed = ROOT / "docs" / "figures" / name
        bars = [file.read_text().count("<path d=") for file in (folder / name, committed)]
        assert bars[0] == bars[1] > 50
        assert _texts(folder / name) == _texts(committed), "run UPIPE_WRITE_DOCS=1 pytest tests/test_docs.py"
    forms = [ulysses_peak(_LLAMA, 8), *(upipe_peak(_LLAMA, _SCHEDULE, Mode(memory)) for memory in MEMORY)]
    drawn = [text for text in _texts(folder / "memory.svg") if text.endswith(" GiB")]
    assert drawn == [f"{form.gib(1 << 20, 128).training:.2f} GiB" for form in forms]
    assert [t for t in _texts(folder / "stages.svg") if t.startswith("stage ")] == [f"stage {n}" for n in range(1, 5)]


_LLAMA = LayerShape(heads=32, kv_heads=8, head_dim=128, hidden_size=4096)
_SCHEDULE = Schedule.build(heads=32, kv_heads=8, ranks=8, chunk_heads=8)


# ---------------------------------------------------------------- docs/numbers.md


def _report() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "report.py"))


def test_the_numbers_are_those_of_the_results():
    page = _report()["page"](ROOT / "benchmarks" / "results")
    assert page == (ROOT / "docs" / "numbers.md").read_text(), "run python benchmarks/report.py"
    rows = json.loads((ROOT / "benchmarks" / "results" / "memory.json").read_text())["rows"]
    mine = [row for row in rows if row["model"] == "Llama3-8B on 8" and row["chunk_heads"] in (None, 8)]
    measured = {row["mode"] or "Ulysses": row["training_units"] for row in mine}
    for memory in MEMORY:
        if memory in measured:  # a new mode is there once `python benchmarks/report.py --run memory` has been run again
            # The forms leave out weight gradients, 0.31 at this length, and FlashAttention's row sums.
            assert 0 <= measured[memory] - upipe_peak(_LLAMA, _SCHEDULE, Mode(memory)).training < 0.8
    assert len(measured) >= 5 and 0 <= measured["Ulysses"] - ulysses_peak(_LLAMA, 8).training < 0.8


def test_a_run_leaves_its_command_and_conditions(tmp_path):
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path, dirs_exist_ok=True)
    report, arguments = _report(), "--json --models 'Llama3-8B on 8' --tokens 131072 --modes keep"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        report["run"]("memory", arguments, tmp_path)
    page = report["page"](tmp_path)
    assert f"python benchmarks/memory.py {arguments}\n" in page and "fake tensors, torch 2." in page
    assert len(re.findall(r"^\| Llama3-8B on 8 \| upipe \| (?:8|16) \| keep \| 131,072 \| \d", page, re.MULTILINE)) == 2
