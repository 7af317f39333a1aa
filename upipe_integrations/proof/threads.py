"""Ranks as threads of one process, on one device: what several ranks do where there is one GPU.

PyTorch's group of threads is for its own tests. It exchanges tensors in memory, each rank's by its own thread, and lets
backward run in the thread that called it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

from upipe_integrations.proof.case import Case
from upipe_integrations.proof.check import Result, findings
from upipe_integrations.proof.sharded import sharded


def check_in_threads(cases: Sequence[Case], *, seconds: float = 120) -> Iterator[Result]:
    """The result of each case, with its ranks as threads. The process may have no process group.

    Raises:
        RuntimeError: a rank failed or did not finish a case in `seconds`.
    """
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    _install_threaded_pg()
    try:
        for case in cases:
            yield Result(tuple(findings(case, _on_threads(case, seconds))))
    finally:
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]


def _on_threads(case: Case, seconds: float) -> list[dict[str, Tensor]]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    found: dict[int, dict[str, Tensor]] = {}
    failed: dict[int, Exception] = {}

    def rank(number: int) -> None:
        try:
            dist.init_process_group("threaded", rank=number, world_size=case.ranks, store=store)
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    found[number] = {name: t.double().cpu() for name, t in sharded(case, number).items()}
            finally:
                dist.destroy_process_group()
        except Exception as error:  # told by the thread that waits
            failed[number] = error

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(case.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        if failed:
            number, error = min(failed.items())
            raise RuntimeError(f"rank {number} failed: {error}") from error
    if len(found) < case.ranks:
        raise RuntimeError(f"ranks did not finish in {seconds} s: {sorted(set(range(case.ranks)) - set(found))}")
    return [found[number] for number in range(case.ranks)]
