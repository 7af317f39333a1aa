"""The benchmarks, run small: that they run, what they write, and that their figures are what they claim. Not timed."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.ranks import run_in_process
from tests.scripts import Ran, run_script
from upipe_integrations import Mode, Schedule
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.closed_forms import LayerShape, ulysses_peak, upipe_peak

ROOT = Path(__file__).parents[1]
LLAMA3_8B = LayerShape(heads=32, kv_heads=8, head_dim=128, hidden_size=4096)
SMALL = ("--head-dim", "16", "--hidden-size", "64")


def _run(script: str, *arguments: str) -> Ran:
    """A script that starts no ranks, in a process of its own that torch is imported in already."""
    result = run_in_process(_without_gpus, ROOT / "benchmarks" / script, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def _without_gpus(script: Path, *arguments: str) -> Ran:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return run_script(script, *arguments)


def _run_on_ranks(*arguments: str) -> Ran:
    """``speed.py``, which starts ranks from here, on CPUs."""
    with mock.patch("torch.cuda.device_count", return_value=0):
        return run_script(ROOT / "benchmarks" / "speed.py", *arguments)


def test_memory_writes_an_object_a_line_that_its_closed_form_agrees_with():
    tokens = 1 << 20
    result = _run(
        "memory.py", "--json", "--models", "Llama3-8B on 8", "--tokens", str(tokens), "--modes", "keep_heads", "fused"
    )
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["method"], row["chunk_heads"], row["mode"]) for row in rows] == [
        ("ulysses", None, None),
        ("upipe", 8, "keep_heads"),
        ("upipe", 8, "fused"),
        ("upipe", 16, "keep_heads"),
        ("upipe", 16, "fused"),
    ]
    for row in rows:
        assert list(row) == [
            "model", "method", "chunk_heads", "mode", "tokens", "forward_units", "training_units", "GiB"
        ]  # fmt: skip
        if row["mode"] is None:
            form = ulysses_peak(LLAMA3_8B, 8)
        else:
            schedule = Schedule.build(heads=32, kv_heads=8, ranks=8, chunk_heads=row["chunk_heads"])
            form = upipe_peak(LLAMA3_8B, schedule, Mode.named(row["mode"]))
        # Weight gradients, 0.31 at this length, and FlashAttention's row sums are not in the forms.
        assert form.forward - 0.05 <= row["forward_units"] <= form.forward + 0.15
        assert form.training - 0.05 <= row["training_units"] <= form.training + 0.6
        unit = tokens * 128 * 2 / 2**30
        assert row["GiB"] == pytest.approx(row["training_units"] * unit, abs=1e-3)


def test_memory_prints_a_table():
    result = _run("memory.py", "--models", "Qwen3-32B on 16", "--tokens", "131072", "--modes", "recompute")
    assert result.stdout.startswith("           model")
    assert [line.split()[3] for line in result.stdout.splitlines()[1:]] == ["ulysses", "upipe", "upipe"]


def test_precision_prints_errors_and_verdicts_and_writes_the_page(tmp_path):
    page = tmp_path / "precision.md"
    arguments = ("--layers", "8/2", "--tokens", "128", *SMALL, "--stages", "1", "8", "--blocks", "2")
    result = _run("precision.py", *arguments, "--kernels", "auto", "--markdown", str(page))
    rows = [line.split() for line in result.stdout.splitlines() if re.match(r" +(keep|recompute|fused|blocks) ", line)]
    assert len(rows) == 4 * 2 * 2
    for row in rows:
        # bf16 has 8 bits: below 2e-3 nothing was rounded, above 3e-2 something is wrong.
        assert all(2 < float(error) < 30 for error in row[4:10]), row
    errors = {tuple(row[:4]): [float(error) for error in row[4:10]] for row in rows}
    rounded, exact = (errors["fused", "8", "-", sums] for sums in ("auto", "float32"))
    assert rounded[1] > exact[1]  # dx of eight stages
    assert rounded[0] == exact[0]  # y of more than four stages is summed in float32 by default
    assert len(re.findall(r"at most 1\.\d+.*: (?:holds|MISSED), worst \d\.\d{3}", result.stdout)) == 2
    text = page.read_text()
    assert text.startswith("# Precision")
    assert all(f"| {row[0]} | {row[1]} |" in text for row in rows)


def test_speed_compares_every_contender_and_writes_its_files(tmp_path):
    figures, picture = tmp_path / "speed.json", tmp_path / "speed.png"
    layer = ("--heads", "8", "--kv-heads", "2", *SMALL, "--tokens", "32", "64", "--chunk-heads", "2", "4")
    files = ("--json", str(figures), "--plot", str(picture))
    modes = ("--modes", *MEMORY, "--query-blocks", "2")
    result = _run_on_ranks(*layer, *modes, "--repeats", "2", *files)
    assert result.returncode == 0, result.stderr
    written = json.loads(figures.read_text())
    rows = written["rows"]
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    assert contenders[0] == "ulysses" and ("deepspeed" in contenders or "deepspeed is not installed" in result.stdout)
    assert [c for c in contenders if c.startswith("upipe")] == [
        f"upipe U={U} {mode}" for U in (2, 4) for mode in (*MEMORY[:-1], "blocks 2")
    ]
    assert len(rows) == 2 * 3 * len(contenders)
    for row in rows:
        assert len(row["samples"]) == 2 and row["wall_s"] > 0
        if row["contender"] == "ulysses":
            assert row["wall_ratio"] == row["cpu_ratio"] == 1
    assert written["conditions"]["ranks"] == 2
    assert picture.stat().st_size > 10_000
    assert all(f" {c} " in result.stdout for c in contenders)


def test_speed_profiles_operators():
    layer = ("--heads", "4", "--kv-heads", "2", *SMALL, "--tokens", "32", "--chunk-heads", "2", "--modes", "keep")
    result = _run_on_ranks(*layer, "--profile", "--no-deepspeed")
    assert result.returncode == 0, result.stderr
    assert re.search(
        r"operator +ulysses +upipe U=2 keep\n(.+ \d\.\d+ \( *\d+\) +\d\.\d+ \( *\d+\)\n){16}all ", result.stdout
    )


def test_speed_reports_a_size_that_does_not_fit():
    with pytest.raises(ValueError, match="multiple of the 2 ranks"):
        _run_on_ranks("--chunk-heads", "3")


def test_the_gpu_script_is_valid_and_says_how_it_is_used():
    script = ROOT / "benchmarks" / "run_gpu.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    result = subprocess.run([str(script)], capture_output=True, text=True)
    assert result.returncode == 2 and "OUTPUT_FOLDER" in result.stderr


# ---------------------------------------------------------------- the proof


@pytest.fixture
def proof(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("proof")


def _rows(module: str, name: str) -> list[dict]:
    """A step in small, as ``--dry-run`` has it, in this process."""
    import proof

    return list(proof.rows_of(module, name, True))


_ON_ONE = ("kernels", "modes", "memory", "speed", "synchronisation", "compiled", "sliding_window")
_ON_SEVERAL = ("exact", "exchange", "training", "million", "megatron")


@pytest.mark.parametrize("name", _ON_ONE)
def test_every_step_of_the_proof_on_one_gpu_runs_in_small(proof, name):
    rows = run_in_process(_rows, proof.ONE, name, seconds=200)
    assert rows and {row["what"]: row for row in rows if row["held"] is False} == {}
    assert name in ("speed", "synchronisation") or any(row["held"] for row in rows)


@pytest.mark.parametrize("name", _ON_SEVERAL)
def test_every_step_of_the_proof_on_several_gpus_runs_in_small(proof, name):
    missing = importlib.import_module("proof_ranks")._missing("deepspeed", "megatron.training")
    if missing and name in ("training", "million", "megatron"):
        pytest.skip(missing)
    with mock.patch("torch.cuda.device_count", return_value=0):
        rows = list(proof.rows_of(proof.SEVERAL, name, True))
    assert rows and {row["what"]: row for row in rows if row["held"] is False} == {}
    assert not any("left_out" in row for row in rows)


def test_the_steps_that_are_run_here_are_all_there_are(proof):
    run_elsewhere = {"environment", "offsets"}
    assert set(proof.steps_of(proof.ONE)) == {*_ON_ONE, *run_elsewhere}
    assert set(proof.steps_of(proof.SEVERAL)) == set(_ON_SEVERAL)
    assert sum(seconds for _, seconds in proof.steps_of(proof.ONE).values()) <= 9 * 60


def test_the_proof_by_its_command(proof, tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "proof.py"), str(tmp_path), "--dry-run"]
    done = subprocess.run([*command, "--only", "environment", "offsets"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "proof.json").read_text())
    assert written["dry_run"] and {row["step"] for row in written["rows"]} == {"environment", "offsets"}
    assert re.search(r"^environment +the kernel of auto +yes +chosen torch-cpu-flash", done.stdout, re.MULTILINE)
    unknown = subprocess.run([*command, "--only", "kernel"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "--only kernel: no such step. Known: compiled," in unknown.stderr


def _in_time(step: str, seconds: float):
    return {"good": (lambda small: iter([{"what": "x", "held": True}]), 5), step: (_never, seconds)}


def _never(small):
    yield {"what": "before", "held": True}
    raise ValueError("a kernel\nfailed")


def test_a_step_that_fails_or_does_not_end_is_a_finding(proof, tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "steps_of", lambda module: _in_time("bad", 1))
    first, second = proof.rows_of("any", "bad", False)
    assert first["held"] and second == {
        "what": "the step itself", "held": False, "failed": "ValueError: a kernel failed"
    }  # fmt: skip
    # In a process of its own, which imports torch for longer than it is given.
    monkeypatch.setattr(proof, "steps_of", lambda module: {"modes": (None, 0.2)})
    (row,) = proof.run_step(proof.ONE, "modes", True, tmp_path)
    assert row["held"] is False and row["failed"] == "not done in 0.2 s, see modes.log"
    assert "NO" in proof.table([{"step": "modes", **row}])


def test_the_proof_uses_as_many_gpus_as_it_is_told(proof, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert proof.visible(2) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert proof.visible(2) == {"CUDA_VISIBLE_DEVICES": "4,5"}


def test_the_page_has_the_table_of_the_proof(proof, tmp_path):
    report = importlib.import_module("report")
    assert "| kernels | - | - | not run yet |" in report.gpu_section(tmp_path)
    rows = [{"step": "kernels", "what": "flash-attn-2", "held": True, "worst": 0.00123}]
    (tmp_path / "gpu.json").write_text(json.dumps({"rows": rows}))
    assert "| kernels | flash-attn-2 | yes | worst 0.00123 |" in report.gpu_section(tmp_path)


def test_time_that_nothing_else_runs_beside():
    ranks = importlib.import_module("proof_ranks")
    union = ranks._union([(5, 6), (0, 2), (1, 3)])
    assert union == [(0, 3), (5, 6)]
    assert ranks._overlap(union, [(1, 2), (2.5, 5.5)]) == [(1, 2), (2.5, 3), (5, 5.5)]
    assert ranks._length(union) == 4
