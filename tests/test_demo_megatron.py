"""The Megatron demo, run small; and that its comparison can fail."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from examples.megatron import demo, results

ROOT = Path(__file__).parents[1]
needs_megatron = pytest.mark.skipif(demo.missing() is not None, reason=str(demo.missing()))


def _demo(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", "-m", "examples.megatron.demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


def _main(monkeypatch, *arguments: str) -> int:
    """The demo's exit status, run in this process."""
    monkeypatch.setattr(sys, "argv", ["demo", *arguments])
    with pytest.raises(SystemExit) as stop:
        demo.main()
    return stop.value.code


@needs_megatron
def test_a_small_demo_agrees_and_leaves_its_files(tmp_path):
    result = _demo("--steps", "2", "--seq-len", "128", "--output-dir", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    figures = json.loads((tmp_path / "demo.json").read_text())
    alone, upipe = figures["runs"]
    assert figures["agree"] is True
    assert [alone["ranks"], upipe["ranks"]] == [1, 2]
    assert alone["upipe"] is None and "2 attention layers" in upipe["upipe"] and "4 stages" in upipe["upipe"]
    assert len(alone["printed_losses"]) == len(upipe["losses"]) == 2
    assert float(upipe["printed_losses"][0]) == pytest.approx(upipe["losses"][0], rel=1e-6)
    # The runs are not one run twice: float32 sums in another order somewhere.
    assert (alone["losses"], alone["grad_norms"]) != (upipe["losses"], upipe["grad_norms"])


@needs_megatron
def test_bad_arguments_are_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    status = _main(monkeypatch, "--seq-len", "130", "--output-dir", str(tmp_path / "out"))
    said = capsys.readouterr().err
    assert status == 2
    assert "130" in said and "multiple of 4" in said
    assert not (tmp_path / "out").exists()


@needs_megatron
def test_a_run_that_fails_says_why(tmp_path, monkeypatch, capsys):
    """The run with UPipe; that Megatron trains alone is what the test above shows."""
    run = demo.run
    monkeypatch.setattr(demo, "run", lambda name, *given: run(name, *given) if name == "UPipe" else None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # this process's own stay
    words = ["--steps", "2", "--seq-len", "32", "--chunk-heads", "3", "--output-dir", str(tmp_path)]
    assert _main(monkeypatch, *words) == 1
    assert "--upipe-chunk-heads = 3" in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "demo.json").exists()


@pytest.mark.parametrize(
    ("installed", "release", "said"),
    [
        ((), "", "pip install 'upipe-integrations[megatron]'"),
        (("megatron",), "0.16.1", "Install megatron-core 0.19 on Python 3.12"),
        (("megatron", "megatron.training"), "0.18.0", "written for 0.19"),
        (("megatron", "megatron.training"), "0.19.2", None),
    ],
)
def test_what_is_missing_is_said(monkeypatch, installed, release, said):
    monkeypatch.setattr(demo, "version", lambda package: release)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    sentence = demo.missing()
    assert (sentence is None) if said is None else (said in sentence and release in sentence)


LINE = (
    " [2026-01-01 00:00:00.000000] iteration        {step}/       2 | consumed samples:            2 | elapsed time "
    "per iteration (ms): 766.1 | learning rate: 3.000000E-03 | global batch size:     2 | lm loss: {loss} | loss "
    "scale: 1.0 | grad norm: {norm} | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def _run(name: str, losses: list[str], norms: list[str]) -> results.RunResult:
    steps = enumerate(zip(losses, norms, strict=True), start=1)
    log = "\n".join(["before", *(LINE.format(step=step, loss=a, norm=b) for step, (a, b) in steps), "after"])
    return results.RunResult(
        name=name,
        ranks=1,
        losses=[1.0, 1.0],
        grad_norms=[1.0, 1.0],
        seconds=[1.0, 1.0],
        tokens_per_second=1.0,
        **results.printed(log),
    )


def test_printed_lines_are_read():
    run = _run("a run", ["5.140353E+00", "5.015875E+00"], ["7.819", "6.376"])
    assert run.printed_losses == ["5.140353E+00", "5.015875E+00"]
    assert run.printed_norms == ["7.819", "6.376"]


@pytest.mark.parametrize(
    ("a", "b", "units"),
    [
        ("5.140353E+00", "5.140354E+00", 1),
        ("5.140353E+00", "5.140353E+00", 0),
        ("9.999999E-01", "1.000000E+00", Decimal("0.1")),
        ("7.819", "7.817", 2),
    ],
)
def test_units_of_the_last_digit(a, b, units):
    assert results.apart(a, b) == results.apart(b, a) == units


REFERENCE = _run("Megatron alone", ["5.140353E+00", "5.015875E+00"], ["7.819", "6.376"])


@pytest.mark.parametrize(
    ("losses", "norms", "said"),
    [
        (["5.140353E+00", "5.015876E+00"], ["7.819", "6.377"], None),
        (["5.140353E+00", "5.015877E+00"], ["7.819", "6.376"], "step 2 UPipe printed a loss of 5.015877"),
        (["5.140353E+00", "5.015875E+00"], ["15.638", "6.376"], "step 1 UPipe printed a gradient norm of 15.638"),
        (["5.140353E+00", "nan"], ["7.819", "6.376"], "step 2 UPipe printed a loss of nan"),
        (["5.140353E+00"], ["7.819"], "UPipe: Megatron printed 1 of 2 steps"),
    ],
)
def test_runs_that_differ_are_reported(losses, norms, said):
    sentence = results.disagreement(REFERENCE, _run("UPipe", losses, norms))
    assert (sentence is None) if said is None else (said in sentence)


def test_a_step_that_was_not_taken_is_reported():
    short = dataclasses.replace(REFERENCE, name="UPipe", losses=[1.0])
    assert "UPipe: Megatron printed 2 of" in results.disagreement(REFERENCE, short)
