"""docs/supported.md is what a run of this test finds: ``UPIPE_WRITE_DOCS=1 pytest tests/test_docs.py`` writes it.

Kernels that run here are run, each feature against the independent reference; those that need a GPU say what
they accept and refuse. The table of DeepSpeed's stack names the test that shows each row, which must be there. Then
the site, its figures and the page of numbers.
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
from tests.scripts import run_script
from upipe_integrations import Dropout, KernelRequest, Mode, Schedule
from upipe_integrations.kernels import KERNELS
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.closed_forms import LayerShape, ulysses_peak, upipe_peak

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

HEAD = """# Supported and refused: kernels, features, and the rest of DeepSpeed's stack

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

STACK_HEAD = """
## With the rest of DeepSpeed's stack

- **as plain Ulysses**: losses, gradient norms and weights of three steps are those of plain Ulysses without the setting
  (float32; where DeepSpeed computes in bfloat16 or 8 bits, no farther from float32 than plain Ulysses is with it).
- **as one process**: loss and every gradient are those of the whole sequence in one process.
- **refused**: a `ValueError` that names the setting and the remedy, before the model is touched.

Tests are in `tests/test_stack.py`, or in the file named.

"""
STACK: tuple[tuple[str, str, str], ...] = (
    (
        "ZeRO 0 to 3, gradient checkpointing of both kinds",
        "as one process",
        "`test_deepspeed.py`: `test_equals_ulysses_and_one_process_at_every_zero_stage`",
    ),
    (
        "`zero.Init` before the engine",
        "as one process",
        "`test_deepspeed.py`: `test_a_model_partitioned_from_the_start`",
    ),
    (
        "`offload_param`, `offload_optimizer` to the CPU (NVMe was not run)",
        "as plain Ulysses",
        "`test_trains_as_plain_ulysses_does`",
    ),
    ("`overlap_comm`, leaf modules around a layer", "as plain Ulysses", "`test_trains_as_plain_ulysses_does`"),
    (
        "ZeRO++: hpZ, qgZ (with a stand-in for DeepSpeed's quantizer, which needs a GPU)",
        "as plain Ulysses",
        "`test_trains_as_plain_ulysses_does`",
    ),
    (
        "`bf16_master_weights_and_grads`, `bf16_optimizer_states`, `torch_autocast`; ZeRO++ qwZ (the same stand-in)",
        "as plain Ulysses",
        "`test_low_precision_errs_as_ulysses_does`",
    ),
    ("TiledMLP, `sequence_tiled_compute`", "as plain Ulysses", "`test_trains_as_plain_ulysses_does`"),
    ("`engine.compile()`", "as plain Ulysses", "`test_trains_as_plain_ulysses_does`"),
    (
        "`torch.compile` of the model or its layers",
        "as without",
        "`test_compile.py`: `test_models_break_once_at_their_door_and_their_layers_not_at_all`",
    ),
    (
        (
            "saved activations in host memory: `save_on_cpu`, DeepSpeed's "
            "`CheckpointHiddenStatesOffload`, its `cpu_checkpointing`"
        ),
        "as one process, in every memory mode and form of checkpointing",
        "`test_saved_activations_may_be_kept_on_the_host`, `test_offloaded_activations_leave_the_device`",
    ),
    (
        "frozen parameters: any of q, k, v, o, embeddings",
        "as one process, without buffers for their gradients",
        (
            "`test_frozen_parameters_leave_the_other_gradients_as_they_are`, "
            "`test_frozen_projections_have_no_gradient_buffers`"
        ),
    ),
    (
        "lengths and batch sizes that change from step to step",
        "as one process; a length that the ranks do not divide is refused on every rank",
        "`test_lengths_and_batch_sizes_change_from_step_to_step`",
    ),
    (
        "`no_grad`, `inference_mode`, `eval()` on shards",
        "as one process",
        "`test_forwards_without_gradients_and_generate`",
    ),
    (
        "`disable_in_eval`: evaluation and `generate()` on whole sequences",
        "the unpatched model",
        "`test_deepspeed.py`: `test_evaluation_with_disable_in_eval_is_the_unpatched_model`",
    ),
    (
        "`generate()` with sharded attention",
        "refused, without waiting for other ranks",
        "`test_forwards_without_gradients_and_generate`",
    ),
    (
        "several models in a process; an engine with the key and one without",
        "as one process each",
        (
            "`test_deepspeed.py`: `test_two_models_with_different_heads`; "
            "`test_an_engine_with_the_key_beside_one_without`"
        ),
    ),
    (
        "checkpoints saved with the key and loaded without, and the reverse",
        "equal weights, the same steps after",
        "`test_checkpoints_know_nothing_of_upipe`",
    ),
    (
        "universal checkpoints, between UPipe, plain Ulysses (which loads them at ZeRO-3 alone) and one rank",
        "equal weights, the same steps after",
        "`test_universal_checkpoints`",
    ),
    (
        (
            "AutoSP, AutoTP, DeepCompile, ZenFlow, ZeRO++'s frozen weights in 8 bits, the hybrid engine, AutoEP, "
            "random layer-token dropping, `partition_activations` with ALST's mpu"
        ),
        "refused",
        "`test_is_refused_before_the_model_is_touched`",
    ),
    (
        "`PipelineModule`, FPDT's modules, DeepSpeed's MoE layer with ALST's mpu",
        "refused",
        "`test_is_refused_before_the_model_is_touched`",
    ),
    ("MiCS, compression, progressive layer dropping, legacy curriculum learning", "no longer in DeepSpeed 0.19", ""),
)


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
    rows = [
        "| | | shown by |",
        "|---" * 3 + "|",
        *(f"| {what} | {outcome} | {tests} |" for what, outcome, tests in STACK),
    ]
    return HEAD + "\n".join(lines) + "\n" + STACK_HEAD + "\n".join(rows) + "\n"


def test_the_page_is_what_a_run_finds():
    page = _page()
    if os.environ.get("UPIPE_WRITE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "run UPIPE_WRITE_DOCS=1 pytest tests/test_docs.py and commit docs/supported.md"


def test_the_tests_that_the_stack_names_are_there():
    default = "test_stack.py"
    for what, outcome, tests in STACK:
        named = re.findall(r"(?:`(test_\w+\.py)`: )?`(test_\w+)`", tests)
        assert named or "no longer in DeepSpeed" in outcome, what
        for file, test in named:
            assert f"\ndef {test}(" in (Path(__file__).parent / (file or default)).read_text(), test


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
    assert run_script(ROOT / "benchmarks" / "figures.py", str(folder)).returncode == 0
    for name in ("stages.svg", "memory.svg"):
        committed = ROOT / "docs" / "figures" / name
        bars = [file.read_text().count("<path d=") for file in (folder / name, committed)]
        assert bars[0] == bars[1] > 50
        assert _texts(folder / name) == _texts(committed), "run UPIPE_WRITE_DOCS=1 pytest tests/test_docs.py"
    forms = [ulysses_peak(_LLAMA, 8), *(upipe_peak(_LLAMA, _SCHEDULE, Mode.named(memory)) for memory in MEMORY)]
    drawn = [text for text in _texts(folder / "memory.svg") if text.endswith(" GiB")]
    assert drawn == [f"{form.gib(1 << 20, 128).training:.2f} GiB" for form in forms]
    assert [t for t in _texts(folder / "stages.svg") if t.startswith("stage ")] == [f"stage {n}" for n in range(1, 5)]


_LLAMA = LayerShape(heads=32, kv_heads=8, head_dim=128, hidden_size=4096)
_SCHEDULE = Schedule.build(heads=32, kv_heads=8, ranks=8, chunk_heads=8)


# ---------------------------------------------------------------- docs/numbers.md


@pytest.fixture
def report(monkeypatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "report.py"))


def test_the_numbers_are_those_of_the_results(report):
    page = report["page"](ROOT / "benchmarks" / "results")
    assert page == (ROOT / "docs" / "numbers.md").read_text(), "run python benchmarks/report.py"
    rows = json.loads((ROOT / "benchmarks" / "results" / "memory.json").read_text())["rows"]
    mine = [row for row in rows if row["model"] == "Llama3-8B on 8" and row["chunk_heads"] in (None, 8)]
    measured = {row["mode"] or "Ulysses": row["training_units"] for row in mine}
    for memory in MEMORY:
        if memory in measured:  # a new mode is there once `python benchmarks/report.py --run memory` has been run again
            # The forms leave out weight gradients, 0.31 at this length, and FlashAttention's row sums.
            assert 0 <= measured[memory] - upipe_peak(_LLAMA, _SCHEDULE, Mode.named(memory)).training < 0.8
    assert len(measured) >= 5 and 0 <= measured["Ulysses"] - ulysses_peak(_LLAMA, 8).training < 0.8


def test_a_run_leaves_its_command_and_conditions(report, tmp_path):
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path, dirs_exist_ok=True)
    arguments = "--json --models 'Llama3-8B on 8' --tokens 131072 --modes keep"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        report["run"]("memory", arguments, tmp_path)
    page = report["page"](tmp_path)
    assert f"python benchmarks/memory.py {arguments}\n" in page and "fake tensors, torch 2." in page
    assert len(re.findall(r"^\| Llama3-8B on 8 \| upipe \| (?:8|16) \| keep \| 131,072 \| \d", page, re.MULTILINE)) == 2
