"""Running one function on several gloo ranks.

Processes are forked from a server that has already imported torch (and, where tests of hosts were collected, deepspeed,
transformers and megatron). :func:`on_pool` runs it on ranks that stay for the next test, :func:`run_ranks` on fresh
ones, for functions that leave something behind in their process.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from upipe_integrations.local_ranks import LocalRanks, free_port

# Helper modules of tests of hosts: where none was imported, the server need not import any host.
_OF_HOSTS = ("tests.models", "tests.megatron_cpu", "tests.megatron_models")
_TIMEOUT = timedelta(seconds=120)


def _preload() -> list[str]:
    # Not tests.conftest or any module with state: the server must stay single-threaded.
    hosts = ["tests.preload"] if any(name in sys.modules for name in _OF_HOSTS) else []
    return ["upipe_integrations.attention", *hosts]


def run_in_process(function: Callable[..., Any], *args: Any, seconds: float = 300) -> Any:
    """``function(*args)`` in a process of its own, with no process group."""
    return _fresh(1, None, function, args, seconds)[0]


def run_in_processes(processes: int, function: Callable[..., Any], *args: Any, seconds: float = 300) -> list[Any]:
    """``function(number, *args)`` in as many processes at once, with no process group; the results by number."""
    return _fresh(processes, None, _numbered, (function, args), seconds)


def _numbered(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(int(os.environ["RANK"]), *args)


def run_ranks(world: int, function: Callable[..., Any], *args: Any, seconds: float = 300) -> list[Any]:
    """``function(*args)`` on `world` ranks of a fresh default group; the results by rank.

    Raises:
        AssertionError: a rank raised (its traceback is in the message), or not all were done in `seconds`.
    """
    return _fresh(world, "gloo", _together, (function, args), seconds)


def _fresh(
    world: int, backend: str | None, function: Callable[..., Any], args: tuple[Any, ...], seconds: float
) -> list[Any]:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # DeepSpeed and Megatron read them
    if backend is None:
        environment["WORLD_SIZE"] = "0"
    with LocalRanks(world, backend=backend, timeout=_TIMEOUT, preload=_preload(), environment=environment) as ranks:
        return _called(ranks, function, args, seconds)


def _called(ranks: LocalRanks, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> list[Any]:
    try:
        return ranks.call(function, *args, seconds=seconds)
    except RuntimeError as error:
        raise AssertionError(str(error)) from None


def _together(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A rank must not leave while others still need it."""
    import torch.distributed as dist

    result = function(*args)
    if dist.is_initialized():
        dist.barrier()
    return result


# ---------------------------------------------------------------- ranks that stay


@functools.cache
def _pool(world: int) -> list[LocalRanks]:
    """The living ranks of this size: one pool, or none yet."""
    return []


def on_pool(world: int, function: Callable[..., Any], *args: Any, seconds: float = 300) -> list[Any]:
    """:func:`run_ranks` on ranks that are there already: no process starts, and all functions share a default group.

    For functions that leave nothing behind: no changed module, no default group of their own. After a failure, or
    where something was left behind, the ranks are ended, and the next function gets new ones.
    """
    pools = _pool(world)
    if not pools:
        pools.append(LocalRanks(world, timeout=_TIMEOUT, preload=_preload()))
        atexit.register(pools[0].close)
    try:
        results = _called(pools[0], _healthy, (world, function, args), seconds)
    except BaseException:
        pools.pop().close()
        raise
    return results


def _healthy(world: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What the function returns; raises where it leaves another group than it found."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    group = dist.group.WORLD
    result = function(*args)
    assert dist.is_initialized() and dist.group.WORLD is group and dist.get_world_size() == world
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    dist.barrier()
    return result
