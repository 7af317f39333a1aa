"""Speed of one attention layer, UPipe beside plain Ulysses and whoever else is to be compared, in one run.

Ranks are processes started here, over gloo with one thread each, or NCCL where every rank finds a GPU. In every
repetition each contender runs once in turn, starting from another one each time, so that what disturbs the machine
disturbs all alike. Before anything is timed, outputs and gradients of all are compared with the first's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from upipe_integrations.all_to_all import gather_over_group
from upipe_integrations.bench.job import (
    CHECKPOINTED,
    FORWARD,
    TOLERANCE,
    TRAINING,
    Contender,
    Job,
    Profile,
    Sample,
    StepPeak,
)
from upipe_integrations.bench.layers import Layer, Run, random_layer
from upipe_integrations.kernels import select_kernel
from upipe_integrations.local_ranks import LocalRanks, TimeLimit


def _results_of_rank_0(job: Job) -> Iterator[Sample | StepPeak | Profile | None]:
    """What rank 0 yields; as many times None on the others."""
    rank = dist.get_rank()
    for result in _results(rank, job):
        yield result if rank == 0 else None
    _meet(_device(rank, job))


def _device(rank: int, job: Job) -> torch.device:
    return torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")


def _results(rank: int, job: Job) -> Iterator[Sample | StepPeak | Profile]:
    """Every run's seconds, or profiles of this rank; a collective of all ranks."""
    device = _device(rank, job)
    kernel = select_kernel(job.kernel, job.request())
    runs = {contender: contender.run_on(job.shape, kernel) for contender in job.contenders}
    for tokens in job.tokens:
        layer = random_layer(job.shape, tokens, job.dtype).shard(rank, job.ranks).map(lambda t: t.to(device))
        layer, dy = layer.as_leaves(), layer.x.flip(1).clone()
        _verify(runs, layer, dy, job.dtype)
        if job.profile:
            for contender, run in runs.items():
                yield Profile(contender, tokens, _profile(run, layer, dy))
            continue
        if job.peaks and layer.x.is_cuda:
            for step, (contender, run) in itertools.product(job.steps, runs.items()):
                yield StepPeak(contender, tokens, step, _peak(step, run, layer, dy, contender.checkpoint_options()))
        for repetition in range(-job.warmup, job.repeats):
            for step in job.steps:
                for contender in _rotated(list(runs), repetition):
                    wall, cpu = _timed(step, runs[contender], layer, dy, contender.checkpoint_options())
                    yield Sample(contender, tokens, step, repetition >= 0, wall, cpu)


_T = TypeVar("_T")


def _rotated(items: list[_T], by: int) -> list[_T]:
    by %= len(items)
    return items[by:] + items[:by]


def _do(step: str, run: Run, layer: Layer, dy: Tensor, options: dict[str, Any] | None = None) -> Tensor:
    for leaf in layer.leaves().values():
        leaf.grad = None
    if step == FORWARD:
        with torch.no_grad():
            return run(layer)
    y = checkpoint(run, layer, use_reentrant=False, **(options or {})) if step == CHECKPOINTED else run(layer)
    y.backward(dy)
    return y.detach()


def _timed(step: str, run: Run, layer: Layer, dy: Tensor, options: dict[str, Any]) -> tuple[float, float]:
    """(wall seconds of the slowest rank, CPU seconds of all)."""
    _synchronize(layer)
    _meet(layer.x.device)
    wall, cpu = time.perf_counter(), time.process_time()
    _do(step, run, layer, dy, options)
    _synchronize(layer)
    mine = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], device=layer.x.device)
    walls, cpus = torch.stack(gather_over_group(mine, dist.group.WORLD)).T.tolist()
    return max(walls), sum(cpus)


def _peak(step: str, run: Run, layer: Layer, dy: Tensor, options: dict[str, Any]) -> float:
    """The allocator's peak beyond the layer's tensors, the incoming gradient included."""
    for leaf in layer.leaves().values():
        leaf.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - (0 if step == FORWARD else dy.nbytes)
    _do(step, run, layer, dy, options)
    mine = torch.tensor([torch.cuda.max_memory_allocated() - before], dtype=torch.float64, device=layer.x.device)
    return float(torch.cat(gather_over_group(mine, dist.group.WORLD)).max())


def _meet(device: torch.device) -> None:
    """All ranks are here before any goes on."""
    gather_over_group(torch.zeros(1, device=device), dist.group.WORLD)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _synchronize(layer: Layer) -> None:
    if layer.x.is_cuda:
        torch.cuda.synchronize()


def _verify(runs: dict[Contender, Run], layer: Layer, dy: Tensor, dtype: torch.dtype) -> None:
    """Raises where a contender's output or a gradient is not the first's."""
    right: list[Tensor] = []
    for contender, run in runs.items():
        got = [_do(TRAINING, run, layer, dy)]
        got += [leaf.grad for leaf in layer.leaves().values() if leaf.grad is not None]
        right = right or got
        for name, ours, theirs in zip(("y", *layer.leaves()), got, right, strict=True):
            error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
            if not error <= TOLERANCE[dtype]:
                first = next(iter(runs)).name
                raise RuntimeError(f"{contender.name}: {name} differs from that of {first} by {error:.1e}")


def _profile(run: Run, layer: Layer, dy: Tensor) -> dict[str, tuple[float, int]]:
    """Operator to (self seconds, calls) of one training step."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = layer.x.is_cuda
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        _do(TRAINING, run, layer, dy)
        _synchronize(layer)
    events = seen.key_averages()
    return {e.key: ((e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e6, e.count) for e in events}


def run_job(job: Job, seconds: float | None = None) -> Generator[Sample | StepPeak | Profile]:
    """What rank 0 yields, as it does, for at most `seconds`. Closing it ends the ranks.

    Raises:
        RuntimeError: a rank failed (its traceback is in the message), or a contender's result is not the first's.
    """
    backend = "nccl" if job.device == "cuda" else "gloo"
    with LocalRanks(job.ranks, backend=backend, timeout=timedelta(minutes=10), preload=[__name__]) as started:
        with suppress(TimeLimit):
            for by_rank in started.each(_results_of_rank_0, job, in_all=seconds):
                yield by_rank[0]
