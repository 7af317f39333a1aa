"""Running one function on several gloo ranks.

Processes are forked from a server that has already imported torch (and, where installed, deepspeed,
transformers and megatron), so a group costs about a second; still, tests run many cases in each group they start.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_PRELOAD = ["torch", "torch.distributed", "tests.preload"]


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    # The server must stay single-threaded, whatever it imports.
    context.set_forkserver_preload(_PRELOAD)
    return context


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _main(rank: int, world: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], pipe: Connection):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if world:
            dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=120))
        result, error = function(*args), None
        if world:
            dist.barrier()
    except BaseException:
        result, error = None, traceback.format_exc()
    # Through torch.save: plain pickling would share memory by file descriptors of a process about to end.
    buffer = io.BytesIO()
    torch.save((result, error), buffer)
    pipe.send_bytes(buffer.getvalue())
    pipe.close()
    if error is None and dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)


def run_in_process(function: Callable[..., Any], *args: Any, seconds: float = 300) -> Any:
    """``function(*args)`` in a process of its own, with no process group."""
    return _run(0, function, args, seconds)[0]


def run_ranks(world: int, function: Callable[..., Any], *args: Any, seconds: float = 300) -> list[Any]:
    """``function(*args)`` on `world` ranks of a fresh default group; the results by rank.

    Raises:
        AssertionError: a rank raised (its traceback is in the message), or not all were done in `seconds`.
    """
    return _run(world, function, args, seconds)


def _run(world: int, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> list[Any]:
    import torch

    processes_wanted = max(world, 1)
    context = _context()
    port = free_port()
    pipes, processes = [], []
    for rank in range(processes_wanted):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(rank, world, port, function, args, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    results: dict[int, Any] = {}
    end = time.monotonic() + seconds
    try:
        while len(results) < processes_wanted:
            pending = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(pending, timeout=max(0.0, end - time.monotonic()))
            assert ready, f"ranks {[r for r in range(processes_wanted) if r not in results]} not done after {seconds} s"
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    blob = pipe.recv_bytes()
                except EOFError:
                    raise AssertionError(f"rank {rank} died without a result") from None
                results[rank], error = torch.load(io.BytesIO(blob), weights_only=False)
                assert error is None, f"rank {rank} of {world}:\n{error}"
    finally:
        for process in processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(processes_wanted)]
