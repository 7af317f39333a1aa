"""Processes that a run of the tests has left behind."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

MARK = "UPIPE_TEST_RUN"
"""Variable of the environment that all processes of a run have, with a value of its own."""


def left(run: str, seconds: float = 0.0) -> dict[int, str]:
    """Command lines of other processes of the run, by process id, that do not end within `seconds`.

    Those that multiprocessing ends with this process are none: its server, and what was started and is known to it.
    """
    end = time.monotonic() + seconds
    while (found := _others(run)) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def _others(run: str) -> dict[int, str]:
    known = {os.getpid(), *(process.pid for process in multiprocessing.active_children())}
    known |= {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    mark = f"{MARK}={run}".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) not in known and mark in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue  # it ended, or is another user's
    return found
