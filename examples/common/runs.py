"""Running a training script on some processes of this machine, followed through the file its first rank writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from upipe_integrations.local_ranks import free_port

_ROOT = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.1
_SECONDS_TO_STOP = 5
# Long enough for the slowest step and the first import of everything, short enough not to look hung forever.
_SECONDS_WITHOUT_NEWS = 180


class RunFailed(Exception):
    """A rank failed or fell silent; the message says which, and what it left in its log."""


def follow(
    command: Sequence[str],
    *,
    name: str,
    ranks: int,
    threads: int,
    output_dir: Path,
    environment: Mapping[str, str],
) -> Iterator[dict[str, Any]]:
    """Run Python with `command` on `ranks` processes of this machine; yield the records that rank 0 reports.

    The script is given ``--report FILE`` and appends one JSON object per line to the file. What rank R prints
    goes to :func:`log_of` it. No process outlives this generator.

    Args:
        command: what comes after ``python``: a script, or ``-m`` and a module, and its arguments.
        name: of the run, for its files.
        ranks: processes.
        threads: of each.
        output_dir: where its files go.
        environment: what they are given beside what a launcher sets.

    Raises:
        RunFailed: as soon as one rank fails, or when none has reported anything for a while.
    """
    report = output_dir / f"{name}.jsonl"
    report.write_text("")
    logs = [log_of(name, rank, output_dir) for rank in range(ranks)]
    command = [sys.executable, *command, "--report", str(report)]
    environments = [{**each, **environment} for each in _environments(ranks, threads)]
    with _started(command, environments, logs) as processes, report.open() as lines:
        last_news = time.monotonic()
        while True:
            # In this order: what was written before the last process ended is still read.
            ended = all(process.poll() is not None for process in processes)
            for line in _whole_lines(lines):
                last_news = time.monotonic()
                yield json.loads(line)
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            if failed:
                raise RunFailed("\n\n".join(_failure(name, rank, processes[rank], logs[rank]) for rank in failed))
            if ended:
                return
            if time.monotonic() - last_news > _SECONDS_WITHOUT_NEWS:
                raise RunFailed(f"{name}: nothing heard for {_SECONDS_WITHOUT_NEWS} seconds; see {logs[0]}.")
            time.sleep(_POLL_SECONDS)


def log_of(name: str, rank: int, output_dir: Path) -> Path:
    """The file that has what a rank printed."""
    return output_dir / f"{name}-rank{rank}.log"


def _environments(ranks: int, threads: int) -> list[Mapping[str, str]]:
    """What a launcher sets, by rank, and this checkout on the path."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
    }
    return [{**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


@contextmanager
def _started(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], logs: Sequence[Path]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One process per environment, each in a session of its own so that it is stopped with its children."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for environment, log in zip(environments, logs, strict=True):
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
        yield processes
    finally:
        _stop(processes)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes that still run, kindly first."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + _SECONDS_TO_STOP
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


def _whole_lines(file: Any) -> Iterator[str]:
    """Lines that were written to the end since the last call; a half-written one is left for the next."""
    while True:
        place = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(place)
            return
        yield line


def _failure(name: str, rank: int, process: subprocess.Popen[bytes], log: Path) -> str:
    """What a failed rank left in its log: from the last traceback on, or the last lines."""
    text = log.read_text(errors="replace")
    start = text.rfind("Traceback (most recent call last)")
    said = text[start:] if start >= 0 else "\n".join(text.splitlines()[-20:])
    return f"{name}: rank {rank} ended with exit code {process.returncode}; from {log}:\n\n{said.rstrip()}"
