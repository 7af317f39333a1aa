"""The demo, run small; and that its comparison can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.deepspeed import demo, results

pytest.importorskip("deepspeed")
ROOT = Path(__file__).parents[1]


def _demo(*arguments: str) -> subprocess.CompletedProcess:
    launched = os.pathsep.join([str(ROOT / "tests" / "launched"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "COLUMNS": "120", "PYTHONPATH": launched}
    command = [sys.executable, "-m", "examples.deepspeed.demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)


def test_a_small_demo_agrees_and_leaves_its_files(tmp_path):
    result = _demo("--steps", "2", "--seq-len", "256", "--output-dir", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert "2 attention layers replaced (LlamaAttention)" in result.stdout
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert [len(run["losses"]) for run in figures["runs"]] == [2, 2, 2]
    assert [run["ranks"] for run in figures["runs"]] == [1, 2, 2]


def test_bad_arguments_are_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo", "--seq-len", "513", "--output-dir", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        demo.main()
    assert stop.value.code == 2
    assert "513" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("losses", "norms"), [([2.0, 1.1], [3.0, 2.0]), ([2.0, 1.0], [6.0, 4.0]), ([2.0, float("nan")], [3.0, 2.0])]
)
def test_runs_that_differ_are_reported(losses, norms):
    def run(name, losses, norms):
        return results.RunResult(
            name=name,
            ranks=2,
            losses=losses,
            grad_norms=norms,
            seconds=[1.0, 1.0],
            tokens_per_second=1.0,
            attention_bytes=1,
        )

    reference, same = (run(name, [2.0, 1.0], [3.0, 2.0]) for name in ("single process", "Ulysses"))
    assert results.verdict(results.compare([reference, same])) is None
    sentence = results.verdict(results.compare([reference, same, run("UPipe", losses, norms)]))
    assert "UPipe" in sentence and "Ulysses" not in sentence
