"""Speed of one attention layer, UPipe beside plain Ulysses and whoever else is to be compared, in one run.

Ranks are processes started here, over gloo with one thread each, or NCCL where every rank finds a GPU. In every
repetition each contender runs once in turn, starting from another one each time, so that what disturbs the machine
disturbs all alike. Before anything is timed, outputs and gradients of all are compared with the first's.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import platform
import signal
import socket
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes
from torch.utils.checkpoint import checkpoint

from upipe_integrations.all_to_all import gather_over_group
from upipe_integrations.bench.layers import SPEC, Layer, Run, random_layer, upipe_layer
from upipe_integrations.bench.ulysses import ulysses_layer
from upipe_integrations.checkpoint import context_fn
from upipe_integrations.kernels import Kernel, KernelRequest, select_kernel
from upipe_integrations.kernels.base import block_refusal
from upipe_integrations.memory import LayerShape
from upipe_integrations.mode import Mode
from upipe_integrations.schedule import Schedule

FORWARD, TRAINING, CHECKPOINTED = "forward", "training", "training, checkpointed"
STEPS = {"no": (FORWARD, TRAINING), "yes": (FORWARD, CHECKPOINTED), "both": (FORWARD, TRAINING, CHECKPOINTED)}
"""What is timed, by whether training is with the layer under PyTorch's non-reentrant checkpoint."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 3e-2}
"""Largest Frobenius norm of a difference to the first contender, relative. Both round sums of the same few thousand
terms in their own order: some ten units of float32's precision, and in bfloat16 two errors of 5e-3 to 1.5e-2 each
(docs/precision.md). A wrong head, row or mask shows as 0.1 and more."""


class Contender(Protocol):
    """Who runs. An object that can be pickled and is equal to its copies."""

    @property
    def name(self) -> str:
        """In tables."""
        ...

    @property
    def chunk_heads(self) -> int | None:
        """UPipe's, over all ranks."""
        ...

    @property
    def mode(self) -> Mode | None:
        """UPipe's."""
        ...

    def checkpoint_options(self) -> dict[str, Any]:
        """For ``torch.utils.checkpoint``."""
        ...

    def run_on(self, shape: LayerShape, kernel: Kernel) -> Run:
        """The layer's forward on the default group."""
        ...


@dataclass(frozen=True)
class Ulysses:
    """Plain Ulysses."""

    chunk_heads: None = None
    mode: None = None
    name = "ulysses"

    def checkpoint_options(self) -> dict[str, Any]:
        """None."""
        return {}

    def run_on(self, shape: LayerShape, kernel: Kernel) -> Run:
        """See :class:`Contender`."""
        return lambda layer: ulysses_layer(layer, dist.group.WORLD, kernel)


@dataclass(frozen=True)
class UPipe:
    """The engine."""

    chunk_heads: int
    mode: Mode

    @property
    def name(self) -> str:
        """See :class:`Contender`."""
        exact = " float32" if self.mode.accumulate == "float32" else ""
        blocks = f" {self.mode.query_blocks}" if self.mode.blocks > 1 else ""
        ahead = " overlap" if self.mode.overlap else ""
        return f"upipe U={self.chunk_heads} {self.mode.memory}{blocks}{exact}{ahead}"

    def checkpoint_options(self) -> dict[str, Any]:
        """Keep the result of attention that is an operator."""
        return {"context_fn": context_fn} if self.mode.operator else {}

    def schedule(self, shape: LayerShape, ranks: int) -> Schedule:
        """Of the layer."""
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
        return Schedule.build(**heads, ranks=ranks, chunk_heads=self.chunk_heads)

    def run_on(self, shape: LayerShape, kernel: Kernel) -> Run:
        """See :class:`Contender`."""
        schedule = self.schedule(shape, dist.get_world_size())
        return lambda layer: upipe_layer(layer, schedule, self.mode, dist.group.WORLD, kernel)


@dataclass(frozen=True)
class Job:
    """What every rank does.

    Args:
        shape: the layer.
        ranks: that hold the sequence.
        tokens: lengths, over all ranks.
        contenders: all are compared with the first.
        steps: of ``STEPS``.
        repeats: that count; ``warmup`` more come before.
        kernel: local attention of all.
        device: ``"cuda"`` or ``"cpu"``.
        dtype: of everything.
        profile: take profiles in the place of times.
        peaks: on GPUs, take the allocator's peak of each step, too.

    Raises:
        ValueError: sizes that do not fit each other, or a kernel that can't serve them.
    """

    shape: LayerShape
    ranks: int
    tokens: tuple[int, ...]
    contenders: tuple[Contender, ...]
    steps: tuple[str, ...]
    repeats: int
    warmup: int
    kernel: str
    device: str
    dtype: torch.dtype
    profile: bool = False
    peaks: bool = False

    def __post_init__(self) -> None:
        given = {**asdict(self.shape), "ranks": self.ranks, "repeats": self.repeats}
        for name, value in given.items():
            if value < 1:
                raise ValueError(f"{name} = {value}: must be positive.")
        if self.warmup < 0:
            raise ValueError(f"warmup = {self.warmup}: must not be negative.")
        H, K, C = self.shape.heads, self.shape.kv_heads, self.ranks
        if self.shape.head_dim % 2:
            raise ValueError(f"head_dim = {self.shape.head_dim}: must be even, as heads are rotated in pairs.")
        if H % C or (K % C and C % K):
            raise ValueError(
                f"ranks = {C} with {H} query and {K} KV heads: plain Ulysses, which all are compared with, needs ranks "
                "that divide both (or a multiple of the KV heads). Use other ranks; upipe check proves any."
            )
        kernel = select_kernel(self.kernel, self.request())
        for contender, tokens in itertools.product(self.contenders, self.tokens):
            if tokens % C:
                raise ValueError(f"tokens = {tokens}: the {C} ranks must divide it; {-(-tokens // C) * C} is the next.")
            if isinstance(contender, UPipe):
                contender.schedule(self.shape, C)
            blocks = 1 if contender.mode is None else contender.mode.blocks
            if tokens // C % blocks:
                raise ValueError(f"query_blocks = {blocks}: must divide the {tokens // C} rows of a rank.")
            reason = block_refusal(kernel, SPEC) if blocks > 1 else None
            if reason is not None:
                raise ValueError(f"memory blocks with kernel {kernel.name}: {reason}.")

    def request(self) -> KernelRequest:
        """What the kernel must serve."""
        return KernelRequest(torch.device(self.device), self.dtype, self.shape.head_dim)

    @property
    def runs(self) -> int:
        """Samples there will be."""
        repetitions = self.warmup + self.repeats
        return len(self.tokens) * repetitions * len(self.steps) * len(self.contenders)

    def conditions(self) -> dict[str, Any]:
        """What the figures depend on."""
        return {
            **asdict(self.shape),
            "ranks": self.ranks,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else f"{os.cpu_count()} CPU cores",
            "dtype": str(self.dtype).removeprefix("torch."),
            "kernel": self.kernel,
            "repeats": self.repeats,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "load": [round(load, 2) for load in os.getloadavg()],
        }


def best_device(ranks: int) -> str:
    """``"cuda"`` where every rank finds a GPU."""
    return "cuda" if 0 < ranks <= torch.cuda.device_count() else "cpu"


@dataclass(frozen=True)
class Sample:
    """One run: wall seconds of the slowest rank, CPU seconds of all; warm-up does not count."""

    contender: Contender
    tokens: int
    step: str
    counts: bool
    wall: float
    cpu: float


@dataclass(frozen=True)
class StepPeak:
    """Bytes of a step on the rank that takes most, beyond the layer's input and weights."""

    contender: Contender
    tokens: int
    step: str
    bytes: float


@dataclass(frozen=True)
class Profile:
    """Of one training step on rank 0: operator to (self seconds, calls)."""

    contender: Contender
    tokens: int
    operators: dict[str, tuple[float, int]]


# ---------------------------------------------------------------- one rank


def _rank_main(rank: int, port: int, job: Job, results: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's, which ends its ranks
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.ranks)
    )
    torch.set_num_threads(1)
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if job.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=job.ranks, timeout=timedelta(minutes=10))
    parent = multiprocessing.parent_process()
    for result in _results(rank, job):
        if parent is None or not parent.is_alive():  # it was killed: nobody waits for this any more
            return
        if rank == 0:
            results.put(result)
    _meet(_device(rank, job))
    dist.destroy_process_group()


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


# ---------------------------------------------------------------- the process that starts them


def run_job(job: Job, seconds: float | None = None) -> Generator[Sample | StepPeak | Profile]:
    """What rank 0 yields, as it does, for at most `seconds`. Closing it ends the ranks.

    Raises:
        RuntimeError: a rank failed (its traceback is in the message), or a contender's result is not the first's.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # Imports torch once, not in every rank.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    results = context.SimpleQueue()
    ranks = start_processes(
        _rank_main, (port, job, results), nprocs=job.ranks, join=False, daemon=True, start_method="forkserver"
    )
    assert ranks is not None
    end = float("inf") if seconds is None else time.monotonic() + seconds
    try:
        done = False
        while not done and time.monotonic() < end:
            done = ranks.join(timeout=0.05)
            while not results.empty():
                yield results.get()
    except ProcessException as error:
        raise RuntimeError(str(error).strip()) from None
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


class Measured:
    """The samples of a job, as they come."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.samples: dict[tuple[int, str, Contender], list[Sample]] = {}
        self.peaks: dict[tuple[int, str, Contender], float] = {}

    def add(self, result: Sample | StepPeak | Profile) -> None:
        """Keep it, if it counts."""
        if isinstance(result, StepPeak):
            self.peaks[result.tokens, result.step, result.contender] = result.bytes
        elif isinstance(result, Sample) and result.counts:
            self.samples.setdefault((result.tokens, result.step, result.contender), []).append(result)

    @property
    def wanted(self) -> int:
        """Rows of the whole job."""
        return len(self.job.tokens) * len(self.job.steps) * len(self.job.contenders)

    @property
    def complete(self) -> bool:
        """Whether all that the job asks for is there."""
        job = self.job
        keys = itertools.product(job.tokens, job.steps, job.contenders)
        return all(len(self.samples.get(key, ())) == job.repeats for key in keys)

    def rows(self) -> list[dict[str, Any]]:
        """Medians of every contender, and ratios to the first's, by tokens and step; of what there is."""
        rows = []
        for tokens, step, contender in itertools.product(self.job.tokens, self.job.steps, self.job.contenders):
            mine = self.samples.get((tokens, step, contender))
            first = self.samples.get((tokens, step, self.job.contenders[0]))
            if not mine or not first:
                continue
            wall, cpu = _medians(mine)
            first_wall, first_cpu = _medians(first)
            rows.append(
                {
                    "tokens": tokens,
                    "step": step,
                    "contender": contender.name,
                    "chunk_heads": contender.chunk_heads,
                    "mode": contender.mode.memory if contender.mode else None,
                    "wall_s": wall,
                    "cpu_s": cpu,
                    "wall_ratio": wall / first_wall,
                    "cpu_ratio": cpu / first_cpu,
                    "samples": [(sample.wall, sample.cpu) for sample in mine],
                    **self._peak(tokens, step, contender),
                }
            )
        return rows

    def _peak(self, tokens: int, step: str, contender: Contender) -> dict[str, float]:
        mine = self.peaks.get((tokens, step, contender))
        first = self.peaks.get((tokens, step, self.job.contenders[0]))
        if mine is None or first is None:
            return {}
        return {"peak_mib": mine / 2**20, "peak_ratio": mine / first}


def _medians(samples: Iterable[Sample]) -> tuple[float, float]:
    samples = list(samples)
    return median(sample.wall for sample in samples), median(sample.cpu for sample in samples)
