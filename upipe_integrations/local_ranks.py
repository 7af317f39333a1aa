"""Ranks on this machine: processes with a process group that run what they are given and send back what comes of it.

They are forked from a server that has imported torch once. They meet at a file, not at a port, which another program
could take first. They end with the process that started them: when it closes them, on Ctrl-C, at a time limit, when
one of them fails, and when that process is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_RESULT, _END, _FAILED = "result", "end", "failed"
# The last two are imported by the first backward and by the first call of attention: two seconds in every rank.
_PRELOAD = ("torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
_SECONDS_TO_LEAVE = 5


class TimeLimit(RuntimeError):
    """Ranks did not finish in time; the message says which."""


class LocalRanks:
    """Living ranks. A context manager; leaving it ends them.

    Args:
        ranks: how many.
        backend: of the default group: ``"gloo"``; ``"nccl"``, with a GPU for each rank; None for no group.
        threads: of PyTorch in each rank.
        timeout: of the group's collectives.
        preload: modules that the server imports once for all ranks, if it has not been started yet. They must not
            start threads.
        environment: variables of the ranks beside RANK, LOCAL_RANK and WORLD_SIZE.
    """

    def __init__(
        self,
        ranks: int,
        *,
        backend: str | None = "gloo",
        threads: int = 1,
        timeout: timedelta = timedelta(minutes=5),
        preload: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOAD, *preload])
        self._folder = tempfile.TemporaryDirectory(prefix="upipe-ranks-")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._idle = False
        variables = {"WORLD_SIZE": str(ranks), **(environment or {})}
        group = {"init_method": f"file://{self._folder.name}/group", "world_size": ranks, "timeout": timeout}
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), **variables}
                args = (theirs, rank, mine, threads, {"backend": backend, "rank": rank, **group})
                process = context.Process(target=_rank_main, args=args, daemon=True)
                process.start()
                self._processes.append(process)
                theirs.close()
        except BaseException:
            self.close()
            raise

    def call(self, function: Callable[..., Any], *args: Any, seconds: float | None = None) -> list[Any]:
        """What `function(*args)` returns on the ranks, by rank. Raises as :meth:`each`."""
        (results,) = self.each(_once, function, args, seconds=seconds)
        return results

    def each(
        self,
        function: Callable[..., Iterator[Any]],
        *args: Any,
        seconds: float | None = None,
        in_all: float | None = None,
    ) -> Iterator[list[Any]]:
        """What the generators `function(*args)` of the ranks yield, as it comes: a list by rank for every step.

        Ranks go on while the caller looks at a list. After an error, or before the last list, they are good for
        nothing but :meth:`close`.

        Args:
            function: found by its name in its module, as pickle does it; so are its arguments and results.
            args: the same on every rank.
            seconds: for one step.
            in_all: seconds for all steps.

        Raises:
            TimeLimit: a step took longer than `seconds`, or all of them longer than `in_all`.
            RuntimeError: a rank failed (its traceback is in the message) or died.
        """
        self._idle = False
        work = pickle.dumps((function, args))
        for pipe in self._pipes:
            with suppress(ConnectionError):  # of a rank that is gone: what it left is read below
                pipe.send_bytes(work)
        last = float("inf") if in_all is None else time.monotonic() + in_all
        while True:
            end = last if seconds is None else min(last, time.monotonic() + seconds)
            kinds, results = zip(*self._step(end), strict=True)
            if set(kinds) == {_END}:
                break
            assert set(kinds) == {_RESULT}, f"ranks took different numbers of steps: {kinds}"
            yield list(results)
        self._idle = True

    def _step(self, end: float) -> list[tuple[str, Any]]:
        """The next message of every rank."""
        start = time.monotonic()
        messages: dict[int, tuple[str, Any]] = {}
        while len(messages) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in messages}
            ready = wait(list(waiting), None if end == float("inf") else max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeLimit(f"ranks {sorted(waiting.values())} did not finish in {end - start:.0f} s.")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                message = _received(pipe)
                if message is None:
                    raise RuntimeError(f"rank {rank} died without a result.")
                kind, value = messages[rank] = pickle.loads(message)
                if kind == _FAILED:
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
        return [messages[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """End the ranks: idle ones leave their group first. Nothing of them is left."""
        for pipe in self._pipes:
            pipe.close()
        end = time.monotonic() + (_SECONDS_TO_LEAVE if self._idle else 0)
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port() -> int:
    """A port that nothing listens on now, for programs that must be told one; another may take it first."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _once(function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[Any]:
    yield function(*args)


def _rank_main(
    pipe: Connection, rank: int, environment: Mapping[str, str], threads: int, group: Mapping[str, Any]
) -> None:
    """Do the work that comes, until the other end is closed or something fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us, which ends its ranks
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    try:
        if group["backend"] == "nccl":
            torch.cuda.set_device(rank)
        if group["backend"] is not None:
            dist.init_process_group(**group)
        while (work := _received(pipe)) is not None:
            function, args = pickle.loads(work)
            for result in function(*args):
                _send(pipe, _RESULT, result)
            _send(pipe, _END, None)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        with suppress(OSError):  # nobody may be there to read it
            _send(pipe, _FAILED, traceback.format_exc())
    started_by = multiprocessing.parent_process()
    if started_by is not None and not started_by.is_alive():  # it was killed, and its folder is left to us
        shutil.rmtree(os.path.dirname(group["init_method"].removeprefix("file://")), ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a training framework would keep the interpreter from ending


def _received(pipe: Connection) -> bytes | None:
    """What came; None where the other end is closed."""
    try:
        return pipe.recv_bytes()
    except (EOFError, ConnectionError):
        return None


def _send(pipe: Connection, kind: str, value: Any) -> None:
    """By plain pickle, which copies tensors: multiprocessing's would share memory of a process that may end."""
    pipe.send_bytes(pickle.dumps((kind, value)))
