"""The ``upipe`` command, as a user runs it."""

from __future__ import annotations

import pytest
import torch

import upipe_integrations
from upipe_integrations import kernels
from upipe_integrations.commands import check as check_cli
from upipe_integrations.commands import main as cli
from upipe_integrations.config import KERNEL_NAMES
from upipe_integrations.proof import check
from upipe_integrations.proof.check import Finding

BASE = ["--heads", "6", "--kv-heads", "3", "--head-dim", "16", "--seq-len", "64", "--ranks", "4", "--chunk-heads", "4"]


def test_the_documented_example_agrees(capsys):
    status = cli.main(["check", *BASE])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "6 query and 3 KV heads of 16, 1 x 64 tokens, 4 ranks, 2 stages of 4 heads" in printed.out
    rows = [line.split()[0] for line in printed.out.splitlines() if line.endswith(" ok")]
    assert rows == ["out", "dx", "dwq", "dwk", "dwv", "dwo"]
    assert "ok: the output and 5 gradients agree with one process" in printed.out


@pytest.mark.parametrize(
    "options",
    [
        [
            "--packed",
            "10,20,34",
            "--window",
            "9",
            "--sinks",
            "--layout",
            "zigzag",
            "--bias",
            "--norm",
            "--dtype",
            "float32",
        ],
        ["--softcap", "2", "--scale", "0.5", "--value-dim", "8", "--partial", "--batch", "2", "--kernel", "math"],
        [
            *[
                "--memory",
                "blocks",
                "--query-blocks",
                "2",
                "--overlap",
                "--bias",
                "--sinks",
                "--layout",
                "zigzag",
                "--accumulate",
                "float32",
            ]
        ],
        ["--full", "--packed", "4", "--layout", "packed-zigzag", "--ranks", "2", "--dtype", "bfloat16"],
    ],
)
def test_features_agree(options, capsys):
    base = ["--heads", "6", "--kv-heads", "3", "--head-dim", "16", "--seq-len", "64"]
    assert cli.main(["check", *base, *options]) == 0, capsys.readouterr().out


def test_a_difference_is_exit_1(monkeypatch, capsys):
    """The comparison can fail: the single process is given another scale."""
    right = check.single_process

    def wrong(case):
        results = right(case)
        results["dwk"] = results["dwk"] * 1.0001
        return results

    monkeypatch.setattr(check, "single_process", wrong)
    assert cli.main(["check", "--heads", "2", "--head-dim", "8", "--seq-len", "16"]) == 1
    printed = capsys.readouterr().out
    assert "DIFFERS: dwk" in printed
    assert printed.count(" ok") == 5


def test_a_nan_does_not_agree():
    assert not Finding("out", float("nan"), 1e-10).agrees


def test_a_rank_that_fails_is_reported(monkeypatch, capsys):
    """A kernel whose operator raises on the ranks: exit 1 with the rank's traceback, and nothing hangs."""
    case = check.Case(heads=2, kv_heads=2, head_dim=8, seq_len=16, ranks=2, chunk_heads=2)
    object.__setattr__(case, "dtype", torch.int32)
    monkeypatch.setattr(check_cli, "_cases", lambda options, asked: [case])
    monkeypatch.setattr(kernels, "select_kernel", lambda name, request: kernels.KERNELS["math"])
    assert cli.main(["check", "--heads", "2", "--seq-len", "16", "--head-dim", "8"]) == 1
    assert "failed:\nTraceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq-len", "62"], "a sequence of 62 tokens on 4 sequence-parallel ranks: 4 must divide it."),
        (["--chunk-heads", "3"], "upipe.chunk_heads = 3: must be a multiple of the 4"),
        (["--chunk-heads", "8"], "upipe.chunk_heads = 8: larger than the model's 6 query heads"),
        (["--kv-heads", "4"], "6 query heads, 4 KV heads"),
        (["--heads", "0"], "heads = 0: must be positive"),
        (["--ranks", "0"], "ranks = 0: must be positive"),
        (["--head-dim", "7"], "head_dim = 7: must be even"),
        (["--partial", "--memory", "fused"], "partial: the form for heads that are projected already"),
        (["--query-blocks", "0"], "upipe.query_blocks = 0: must be positive"),
        (["--packed", "10,20"], "--packed 10,20: lengths must be positive and add up to the 64 tokens"),
        (["--packed", "5"], "--packed 5: the number of equal documents must divide the 64 tokens"),
        (["--packed", "a"], "--packed a: must be lengths such as"),
        (["--layout", "packed-zigzag"], "--layout packed-zigzag: needs --packed"),
        (["--window", "4", "--full"], "window = 4 with causal = False"),
        (["--kernel", "torch-cuda-flash"], "upipe.kernel = 'torch-cuda-flash': it can't serve this model"),
        (["--kernel", "torch-cpu-flash", "--softcap", "1"], "it does not do softcap"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(options, message, capsys):
    assert cli.main(["check", *BASE, *options, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("upipe check: ") and message in error
    assert len(error.strip().splitlines()) == 1


def test_wrong_words_are_exit_2():
    with pytest.raises(SystemExit) as stop:
        cli.main(["check", "--heads", "six"])
    assert stop.value.code == 2


def test_help_says_what_it_does(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["check", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "upipe check --heads 6 --kv-heads 3" in " ".join(text.split())
    assert "Exit status" in text


def test_info_names_versions_kernels_and_hosts(capsys):
    assert cli.main(["info", "--no-probe"]) == 0  # tests/test_autoload.py has the hosts tried
    text = capsys.readouterr().out
    assert torch.__version__ in text
    for name in (*kernels.KERNELS, "deepspeed", "megatron-core"):
        assert name in text
    assert "auto takes torch-cpu-flash" in text


def test_kernel_names_are_those_of_the_kernels():
    assert tuple(kernels.KERNELS) == KERNEL_NAMES


def test_everything_exported_is_there():
    assert all(getattr(upipe_integrations, name) is not None for name in upipe_integrations.__all__)
    assert set(upipe_integrations.__all__) <= set(dir(upipe_integrations))
    with pytest.raises(AttributeError, match="has no attribute 'upip'"):
        upipe_integrations.upip  # noqa: B018
