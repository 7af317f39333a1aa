"""``upipe bench``: what it measures and writes, and that it may be stopped. No time is asserted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import run_in_process
from upipe_integrations import Mode, Schedule
from upipe_integrations.bench import on_ranks, peaks
from upipe_integrations.bench.job import STEPS, Job, Sample, StepPeak, Ulysses, UPipe
from upipe_integrations.commands import bench as bench_cli
from upipe_integrations.commands import main as cli
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.closed_forms import LayerShape, ulysses_peak
from upipe_integrations.planning.measure import fake_ranks, measured_upipe_peak

ROOT = Path(__file__).parents[1]
SMALL = ["--heads", "8", "--kv-heads", "2", "--head-dim", "16", "--hidden", "64"]


def _started(*words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "upipe_integrations.commands.main", "bench", *SMALL, *words]
    # What makes programs colour a pipe.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "FORCE_COLOR": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=ROOT, preexec_fn=_as_from_a_terminal
    )


def _as_from_a_terminal() -> None:
    """A session of its own, in which Ctrl-C does something: a shell's jobs in the background ignore it."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_it_compares_times_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    figures, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    words = ["--tokens", "32", "64", "--chunk-heads", "2", "4,8", "--modes", "fused", MEMORY[0], "--warmup", "0"]
    words += ["--repeats", "2", "--checkpoint", "both", "--json", str(figures), "--plot", str(picture)]
    status = cli.main(["bench", *SMALL, *words])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert err == "" and all(character.isprintable() for line in out.splitlines() for character in line)
    written = json.loads(figures.read_text())
    contenders = ["ulysses", *(f"upipe U={U} {mode}" for U in (2, 4, 8) for mode in ("fused", MEMORY[0]))]
    rows = written["rows"]
    assert [(row["tokens"], row["step"], row["contender"]) for row in rows] == [
        (tokens, step, name)
        for tokens in (32, 64)
        for step in ("forward", "training", "training, checkpointed")
        for name in contenders
    ]
    assert written["complete"] and written["conditions"]["dtype"] == "float32"
    for row in rows:
        ulysses = next(r for r in rows if (r["tokens"], r["step"]) == (row["tokens"], row["step"]))
        assert len(row["samples"]) == 2 and row["wall_s"] > 0
        assert row["wall_ratio"] == row["wall_s"] / ulysses["wall_s"]
        assert row["peak_ratio"] == pytest.approx(row["peak_mib"] / ulysses["peak_mib"])
        assert f"{row['peak_mib']:.1f} {row['peak_ratio']:6.2f}" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def _traced() -> list[float]:
    layer = LayerShape(heads=32, kv_heads=8, head_dim=128, hidden_size=4096)
    mode, tokens = Mode.named("fused", operator=True), 1 << 20
    contenders = (Ulysses(), UPipe(8, mode))
    import torch

    job = Job(layer, 8, (tokens,), contenders, ("forward", "training"), 1, 0, "auto", "cpu", torch.float32)
    found = {(peak.contender.name, peak.step): peak.bytes for peak in peaks.traced_peaks(job)}
    unit = tokens * 128 * 2
    with fake_ranks(8):
        schedule = Schedule.build(heads=32, kv_heads=8, ranks=8, chunk_heads=8)
        fused = measured_upipe_peak(layer, schedule, Mode.named("fused"), tokens)
    closed = ulysses_peak(layer, 8)
    return [
        found["ulysses", "forward"] / unit / closed.forward,
        found["ulysses", "training"] / unit / closed.training,
        found["upipe U=8 fused", "forward"] / unit / fused.forward,
        found["upipe U=8 fused", "training"] / unit / fused.training,
    ]


def test_memory_is_what_the_plan_traces():
    assert run_in_process(_traced) == pytest.approx([1, 1, 1, 1], rel=0.02)


# ---------------------------------------------------------------- stopped


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found |= {int(child)} | _descendants(int(child))
    return found


def _wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_ctrl_c_prints_what_there_is_and_ends_the_ranks():
    process = _started("--tokens", "32", "--repeats", "1000000", "--modes", "keep")
    alive: set[int] = set()

    def two_ranks_run() -> bool:
        assert process.poll() is None, process.communicate()
        alive.update(_descendants(process.pid))
        # The server they are forked from, its resource tracker, and they.
        return len(alive) >= 4

    _wait_until(two_ranks_run, 120)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err and err.startswith("upipe bench: interrupted: ") and len(err.splitlines()) == 1
    assert out.startswith("heads 8, ")
    _wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in alive))


def _faked(monkeypatch, runs: int, error: BaseException | None = None) -> None:
    """The ranks, replaced by `runs` samples of a second each and what ends them."""

    def run_job(job, seconds):
        samples = [
            Sample(contender, tokens, step, True, 1.0 + 0.5 * repetition, 2.0)
            for tokens in job.tokens
            for repetition in range(job.repeats)
            for step in job.steps
            for contender in job.contenders
        ]
        yield from samples[:runs]
        if error is not None:
            raise error

    monkeypatch.setattr(on_ranks, "run_job", run_job)
    monkeypatch.setattr(peaks, "traced_peaks", lambda job: [StepPeak(c, 32, "forward", 2**20) for c in job.contenders])


RUN = ["bench", *SMALL, "--tokens", "32", "--modes", "keep", "--repeats", "2"]  # 2 contenders, 2 steps


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (None, 0)])
def test_partial_results_are_kept(error, status, monkeypatch, capsys):
    _faked(monkeypatch, 5, error)
    assert cli.main([*RUN, "--json", "-", "--time-limit", "9"]) == status
    printed = capsys.readouterr()
    why = "interrupted" if error else "stopped by --time-limit 9"
    assert printed.err == f"upipe bench: {why}: 4 of 4 rows, some of fewer runs\n"
    written = json.loads(printed.out)
    assert not written["complete"]
    ulysses, upipe, *_ = written["rows"]
    assert ulysses["samples"] == [[1.0, 2.0], [1.5, 2.0]] and upipe["samples"] == [[1.0, 2.0]]
    assert upipe["wall_ratio"] == 1 / 1.25 and upipe["peak_ratio"] == 1


def test_nothing_measured_is_said(monkeypatch, capsys, tmp_path):
    picture = tmp_path / "bench.png"
    _faked(monkeypatch, 0, KeyboardInterrupt())
    assert cli.main([*RUN, "--plot", str(picture)]) == 130
    assert "nothing was measured" in capsys.readouterr().out and not picture.exists()
    _faked(monkeypatch, 1, KeyboardInterrupt())
    assert cli.main([*RUN, "--plot", str(picture)]) == 130
    assert capsys.readouterr().out.count(" 1.00 ") >= 1 and picture.exists()  # Ulysses, alone


def test_a_rank_that_fails_is_exit_1(monkeypatch, capsys):
    _faked(monkeypatch, 1, RuntimeError("upipe U=2 keep: dwk differs from that of ulysses by 1.0e-01"))
    assert cli.main(RUN) == 1
    assert capsys.readouterr().err == "upipe bench: upipe U=2 keep: dwk differs from that of ulysses by 1.0e-01\n"


def _verdicts() -> list[str]:
    import torch

    from upipe_integrations.bench.layers import random_layer

    layer = random_layer(LayerShape(4, 2, 8, 32), 16, torch.float64).as_leaves()

    def run(layer, factor=1.0):
        y = sum(layer.x @ w.T @ w for w in (layer.wq, layer.wk, layer.wv))
        return y + factor * (layer.x @ layer.wo @ layer.wo.T)

    said = []
    for factor in (1.0, 1.001, float("nan")):
        runs = {Ulysses(): run, UPipe(2, Mode()): lambda layer, factor=factor: run(layer, factor)}
        try:
            on_ranks._verify(runs, layer, torch.ones_like(layer.x), torch.float64)
            said.append("agree")
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_contenders_are_compared_before_they_are_timed():
    agree, scaled, nan = _verdicts()
    assert agree == "agree"
    assert re.fullmatch(r"upipe U=2 keep: y differs from that of ulysses by \d\.\de-04", scaled)
    assert nan.startswith("upipe U=2 keep: y differs")


# ---------------------------------------------------------------- words


def _job(*words: str) -> Job:
    return bench_cli._job(cli._parser().parse_args(["bench", *words]))


def test_what_is_not_said():
    job = _job()
    assert job.tokens == (1024, 4096) and job.shape == LayerShape(32, 8, 64, 2048)
    assert [(c.chunk_heads, c.mode and c.mode.memory) for c in job.contenders] == [
        (None, None),
        *((2, mode) for mode in MEMORY),
    ]
    assert all(c.mode.operator for c in job.contenders[1:])  # so that a checkpoint keeps the result
    assert job.steps == ("forward", "training") and str(job.dtype) == "torch.float32"
    assert _job("--heads", "6").shape.kv_heads == 6
    assert tuple(STEPS) == bench_cli._CHECKPOINT


def test_a_model_and_every_word():
    words = ["--modes", "blocks", "--query-blocks", "2", "--accumulate", "float32", "--overlap", "--kernel", "math"]
    words += ["--dtype", "bfloat16", "--warmup", "0", "--repeats", "7", "--checkpoint", "yes", "--chunk-heads", "8,16"]
    job = _job("llama3-8b", "--ranks", "4", "--tokens", "4K,1M", *words)
    assert job.shape == LayerShape(32, 8, 128, 4096) and job.tokens == (4096, 1 << 20) and job.ranks == 4
    mode = Mode.named("blocks", 2, "float32", True, operator=True)
    assert job.contenders[1:] == (UPipe(8, mode), UPipe(16, mode))
    assert job.contenders[1].name == "upipe U=8 blocks 2 float32 overlap"
    assert (job.repeats, job.warmup, job.kernel, str(job.dtype)) == (7, 0, "math", "torch.bfloat16")
    assert job.steps == ("forward", "training, checkpointed")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["llama3-8b", "--heads", "8"], "heads with a MODEL, which has its own"),
        (["--heads", "0"], "heads = 0: must be positive"),
        (
            ["--heads", "6", "--kv-heads", "4"],
            "6 query heads, 4 KV heads, 2 ranks: each must be positive",
        ),
        (["--hidden", "-1"], "hidden_size = -1: must be positive"),
        (["--head-dim", "7"], "head_dim = 7: must be even"),
        (["--ranks", "0", "--chunk-heads", "2"], "ranks = 0: must be positive"),
        (["--ranks", "3", "--chunk-heads", "3"], "ranks = 3 with 32 query and 8 KV heads: plain Ulysses"),
        (["--chunk-heads", "3"], "upipe.chunk_heads = 3: must be a multiple of the 2"),
        (["--chunk-heads", "two"], "--chunk-heads two: must be numbers such as 8"),
        (["--modes", "kept"], "upipe.memory = 'kept': no such memory (did you mean 'keep'?)"),
        (["--modes", "blocks", "--query-blocks", "3"], "query_blocks = 3: must divide the 512 rows of a rank"),
        (["--modes", "keep", "--query-blocks", "0"], "upipe.query_blocks = 0: must be positive"),
        (["--tokens", "1001"], "tokens = 1001: the 2 ranks must divide it; 1002 is the next"),
        (["--repeats", "0"], "repeats = 0: must be positive"),
        (["--warmup", "-1"], "warmup = -1: must not be negative"),
        (["--time-limit", "0"], "--time-limit 0: must be a positive number of seconds"),
        (["--time-limit", "nan"], "--time-limit nan: must be a positive number of seconds"),
        (["--dtype", "float64", "--kernel", "torch-efficient"], "it can't serve this model"),
        (["--json", "none/bench.json"], "--json none/bench.json: there is no folder none"),
        (["--plot", "none/bench.png"], "--plot none/bench.png: there is no folder none"),
    ],
)
def test_wrong_words_are_one_line_and_exit_2(words, message, capsys):
    assert cli.main(["bench", *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("upipe bench: ") and message in printed.err
    assert len(printed.err.splitlines()) == 1 and printed.out == ""
