"""The launcher of local ranks: what it brings back, what it says when one fails, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_pool, run_in_process
from upipe_integrations.local_ranks import LocalRanks, TimeLimit

ROOT = Path(__file__).parents[1]


def _gone(pids, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def _sums(steps: int):
    for step in range(steps):
        total = torch.tensor([dist.get_rank() + step])
        dist.all_reduce(total)
        yield total


def _who() -> dict:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OF_THE_TEST")
    return {"pid": os.getpid(), "threads": torch.get_num_threads(), **{name: os.environ[name] for name in names}}


def test_results_come_by_rank_and_nothing_is_left():
    with LocalRanks(2, threads=3, environment={"OF_THE_TEST": "yes"}) as ranks:
        steps = [[t.item() for t in by_rank] for by_rank in ranks.each(_sums, 3)]
        assert steps == [[1, 1], [3, 3], [5, 5]]
        who = ranks.call(_who)
        folder = Path(ranks._folder.name)
        assert list(folder.iterdir())
    assert not folder.exists() and _gone([rank["pid"] for rank in who], 0)
    for rank, seen in enumerate(who):
        assert seen["RANK"] == seen["LOCAL_RANK"] == str(rank) and seen["WORLD_SIZE"] == "2"
        assert seen["threads"] == 3 and seen["OF_THE_TEST"] == "yes"


def _one_raises() -> None:
    if dist.get_rank() == 1:
        raise KeyError("what rank 1 lacks")
    time.sleep(600)  # in a collective it would say that the connection is lost


def _one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(1)
    time.sleep(600)


def _one_sleeps() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (_one_raises, RuntimeError, r"rank 1 failed:\nTraceback [\s\S]*KeyError: 'what rank 1 lacks'"),
        (_one_dies, RuntimeError, r"rank 1 died without a result\."),
        (_one_sleeps, TimeLimit, r"ranks \[1\] did not finish in 2 s\."),
    ],
)
def test_a_rank_that_fails_is_named_and_all_are_ended(function, error, message):
    with LocalRanks(2) as ranks:
        pids = ranks.call(os.getpid)
        with pytest.raises(error, match=message):
            ranks.call(function, seconds=2 if function is _one_sleeps else 60)
    assert _gone(pids, 0)


def test_ranks_end_when_the_process_that_started_them_is_killed():
    code = (
        "import time; from upipe_integrations.local_ranks import LocalRanks; import os\n"
        "if __name__ == '__main__':\n"
        "    ranks = LocalRanks(2); print(ranks._folder.name, *ranks.call(os.getpid), flush=True); time.sleep(600)"
    )
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    folder, *pids = started.stdout.readline().split()
    assert len(pids) == 2 and Path(folder).exists()
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert _gone(pids) and not Path(folder).exists()


# ---------------------------------------------------------------- the pool of the tests


def _leaves_a_group() -> None:
    dist.destroy_process_group()


def test_functions_on_the_pool_share_ranks_until_one_fails():
    first, second = on_pool(2, os.getpid), on_pool(2, os.getpid)
    assert first == second
    with pytest.raises(AssertionError, match=r"rank 1 failed:\n[\s\S]*what rank 1 lacks"):
        on_pool(2, _one_raises)
    assert _gone(first, 0)
    third = on_pool(2, os.getpid)
    assert not set(first) & set(third)
    with pytest.raises(AssertionError, match="failed:\n"):
        on_pool(2, _leaves_a_group)
    assert _gone(third, 0)


def _has_no_group() -> bool:
    return not dist.is_initialized()


def test_a_process_alone_has_no_group():
    assert run_in_process(_has_no_group)
