"""Speed of one attention layer: UPipe against plain Ulysses and DeepSpeed's DistributedAttention, in one run.

Ranks are processes started here, over gloo with one thread each, or NCCL in bfloat16 where every rank finds a GPU. In
every repetition each contender runs once in turn, starting from another one each time, so that what disturbs the
machine disturbs all alike. Before anything is timed, outputs and gradients of all are compared with Ulysses's.

Steps: forward (no gradients), training (forward and backward), and training with the layer under PyTorch's
non-reentrant checkpoint. Reported: medians over repetitions of wall seconds (of the slowest rank) and of CPU seconds
(of all ranks), and their ratios to Ulysses's.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from layers import Layer, random_layer, upipe_layer
from progress import report
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from ulysses import LocalAttention, attend_all_heads, ulysses_layer

from upipe_integrations import KernelRequest, Mode, Schedule, select_kernel
from upipe_integrations.checkpoint import context_fn
from upipe_integrations.kernels import KERNELS, Kernel
from upipe_integrations.memory import LayerShape
from upipe_integrations.mode import ACCUMULATE, MEMORY

FORWARD, TRAINING, CHECKPOINTED = "forward", "training", "training, checkpointed"
STEPS = {"no": (FORWARD, TRAINING), "yes": (FORWARD, CHECKPOINTED), "both": (FORWARD, TRAINING, CHECKPOINTED)}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Largest Frobenius norm of a difference to Ulysses, relative. Both round sums of the same few thousand terms in their
own order: some ten units of float32's precision, and in bfloat16 two errors of 5e-3 to 1.5e-2 each (docs/precision.md).
A wrong head, row or mask shows as 0.1 and more."""
Run = Callable[[Layer], Tensor]


@dataclass(frozen=True)
class Contender:
    """Who runs; `chunk_heads` and `mode` are UPipe's."""

    method: str
    chunk_heads: int | None = None
    mode: Mode | None = None

    @property
    def name(self) -> str:
        """In tables."""
        if self.mode is None:
            return self.method
        exact = " float32" if self.mode.accumulate == "float32" else ""
        blocks = f" {self.mode.query_blocks}" if self.mode.memory == "blocks" else ""
        ahead = " overlap" if self.mode.overlap else ""
        return f"upipe U={self.chunk_heads} {self.mode.memory}{blocks}{exact}{ahead}"

    def checkpoint_options(self) -> dict[str, Any]:
        """For ``torch.utils.checkpoint``: keep the result of attention that is an operator."""
        return {"context_fn": context_fn} if self.mode is not None and self.mode.operator else {}

    def run_on(self, shape: LayerShape, kernel: Kernel) -> Run:
        """The layer's forward on the default group."""
        group = dist.group.WORLD
        if self.method == "ulysses":
            return lambda layer: ulysses_layer(layer, group, kernel)
        if self.method == "deepspeed":
            return _deepspeed(kernel)
        mode, ranks = self.mode, dist.get_world_size()
        assert mode is not None and self.chunk_heads is not None
        schedule = Schedule.build(heads=shape.heads, kv_heads=shape.kv_heads, ranks=ranks, chunk_heads=self.chunk_heads)
        return lambda layer: upipe_layer(layer, schedule, mode, group, kernel)


def _deepspeed(kernel: Kernel) -> Run:
    """DeepSpeed's DistributedAttention around the same kernel."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    class Local(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return LocalAttention.apply(kernel, *(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
    attention = DistributedAttention(Local(), dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda layer: F.linear(attend_all_heads(layer, lambda q, k, v: attention(q, k, v, 0)), layer.wo)


@dataclass(frozen=True)
class Job:
    """What every rank does."""

    shape: LayerShape
    ranks: int
    tokens: tuple[int, ...]
    contenders: tuple[Contender, ...]
    steps: tuple[str, ...]
    repeats: int
    warmup: int
    kernel: str
    device: str
    profile: bool

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 on GPUs, float32 elsewhere."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32


# ---------------------------------------------------------------- one rank


def _rank_main(rank: int, port: int, job: Job, results: Any) -> None:
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
    dist.barrier()
    dist.destroy_process_group()


def _results(rank: int, job: Job) -> Iterator[dict[str, Any]]:
    """Every run's seconds, or profiles of this rank; a collective of all ranks."""
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
    kernel = select_kernel(job.kernel, KernelRequest(device, job.dtype, job.shape.head_dim))
    runs = {contender: contender.run_on(job.shape, kernel) for contender in job.contenders}
    for tokens in job.tokens:
        layer = random_layer(job.shape, tokens, job.dtype).shard(rank, job.ranks).map(lambda t: t.to(device))
        layer, dy = layer.as_leaves(), layer.x.flip(1).clone()
        _verify(runs, layer, dy, job.dtype)
        if job.profile:
            for contender, run in runs.items():
                yield {"contender": contender, "tokens": tokens, "profile": _profile(run, layer, dy)}
            continue
        for repetition in range(-job.warmup, job.repeats):
            for step in job.steps:
                for contender in _rotated(list(runs), repetition):
                    wall, cpu = _timed(step, runs[contender], layer, dy, contender.checkpoint_options())
                    yield {
                        "contender": contender,
                        "tokens": tokens,
                        "step": step,
                        "counts": repetition >= 0,
                        "wall": wall,
                        "cpu": cpu,
                    }


def _rotated(items: list, by: int) -> list:
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
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    _do(step, run, layer, dy, options)
    _synchronize(layer)
    mine = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], device=layer.x.device)
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    walls, cpus = torch.stack(of_ranks).T.tolist()
    return max(walls), sum(cpus)


def _synchronize(layer: Layer) -> None:
    if layer.x.is_cuda:
        torch.cuda.synchronize()


def _verify(runs: dict[Contender, Run], layer: Layer, dy: Tensor, dtype: torch.dtype) -> None:
    """Raises where a contender's output or a gradient is not Ulysses's."""
    right: list[Tensor] = []
    for contender, run in runs.items():
        got = [_do(TRAINING, run, layer, dy), *(leaf.grad for leaf in layer.leaves().values())]
        right = right or got
        for name, ours, theirs in zip(("y", *layer.leaves()), got, right, strict=True):
            error = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
            assert error <= TOLERANCE[dtype], f"{contender.name}: {name} differs from Ulysses's by {error:.1e}"


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


def run_job(job: Job) -> Iterator[dict[str, Any]]:
    """What rank 0 yields, as it does; raises with a rank's traceback where one fails."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    ranks = mp.start_processes(
        _rank_main, (port, job, results), nprocs=job.ranks, join=False, daemon=True, start_method="spawn"
    )
    done = False
    while not done:
        done = ranks.join(timeout=0.05)
        while not results.empty():
            yield results.get()


def samples_of(job: Job) -> dict[tuple[int, str, Contender], list[tuple[float, float]]]:
    """(wall, CPU) of every repetition that counts, by tokens, step and contender."""
    runs = len(job.tokens) * (job.warmup + job.repeats) * len(job.steps) * len(job.contenders)
    samples: dict[tuple[int, str, Contender], list[tuple[float, float]]] = {}
    for done, result in enumerate(run_job(job), 1):
        report(done, runs, f"{result['tokens']} tokens")
        if result["counts"]:
            key = result["tokens"], result["step"], result["contender"]
            samples.setdefault(key, []).append((result["wall"], result["cpu"]))
    return samples


def rows_of(job: Job) -> list[dict[str, Any]]:
    """Medians of every contender, and their ratios to Ulysses's, by tokens and step."""
    samples = samples_of(job)
    rows = []
    for tokens, step, contender in itertools.product(job.tokens, job.steps, job.contenders):
        mine, ulysses = samples[tokens, step, contender], samples[tokens, step, job.contenders[0]]
        wall, cpu = (median(s[i] for s in mine) for i in (0, 1))
        rows.append(
            {
                "tokens": tokens,
                "step": step,
                "contender": contender.name,
                "chunk_heads": contender.chunk_heads,
                "mode": contender.mode.memory if contender.mode else None,
                "wall_s": wall,
                "cpu_s": cpu,
                "wall_ratio": wall / median(s[0] for s in ulysses),
                "cpu_ratio": cpu / median(s[1] for s in ulysses),
                "samples": mine,
            }
        )
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """A row per contender; the spread is of wall seconds, (largest - smallest) / median."""
    print(f"{'tokens':>8} {'step':22} {'contender':26} {'wall s':>8} {'CPU s':>8} {'wall':>6} {'CPU':>6} {'spread':>7}")
    for row in rows:
        walls = [wall for wall, _ in row["samples"]]
        spread = (max(walls) - min(walls)) / row["wall_s"]
        print(
            f"{row['tokens']:8} {row['step']:22} {row['contender']:26} {row['wall_s']:8.3f} {row['cpu_s']:8.3f} "
            f"{row['wall_ratio']:6.2f} {row['cpu_ratio']:6.2f} {spread:7.0%}"
        )


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Ratio to Ulysses over tokens, a panel per step; wall drawn through, CPU dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps, contenders = ([*dict.fromkeys(row[key] for row in rows)] for key in ("step", "contender"))
    figure, panels = plt.subplots(1, len(steps), figsize=(4.5 * len(steps), 4), sharey=True, squeeze=False)
    for panel, step in zip(panels[0], steps, strict=True):
        for number, contender in enumerate(contenders):
            mine = [row for row in rows if (row["step"], row["contender"]) == (step, contender)]
            tokens = [row["tokens"] for row in mine]
            color = f"C{number}"
            panel.plot(tokens, [row["wall_ratio"] for row in mine], "o-", color=color, label=contender)
            panel.plot(tokens, [row["cpu_ratio"] for row in mine], ":", color=color)
        panel.set(title=step, xlabel="tokens", xscale="log")
        panel.set_xticks(tokens, [f"{t / 1024:g}K" for t in tokens], minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("seconds in Ulysses's (wall; CPU dotted)")
    panels[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def print_profiles(job: Job, most: int = 16) -> None:
    """Self seconds (and calls) of rank 0's operators in one training step, a column per contender."""
    by_tokens: dict[int, list[dict[str, Any]]] = {}
    for result in run_job(job):
        by_tokens.setdefault(result["tokens"], []).append(result)
    for tokens, results in by_tokens.items():
        print(f"{tokens} tokens; self seconds (calls) of rank 0 in one training step")
        print(f"{'operator':44}" + "".join(f"{r['contender'].name:>24}" for r in results))
        keys = {key for r in results for key in r["profile"]}
        ranked = sorted(keys, key=lambda k: -max(r["profile"].get(k, (0, 0))[0] for r in results))
        for key in ranked[:most]:
            cells = (r["profile"].get(key, (0.0, 0)) for r in results)
            print(f"{key[:43]:44}" + "".join(f"{seconds:16.4f} ({calls:5})" for seconds, calls in cells))
        totals = (sum(seconds for seconds, _ in r["profile"].values()) for r in results)
        print(f"{'all':44}" + "".join(f"{total:16.4f}        " for total in totals) + "\n")


def contenders_of(arguments: argparse.Namespace) -> tuple[Contender, ...]:
    """Ulysses first."""
    found = [Contender("ulysses")]
    if not arguments.no_deepspeed:
        if importlib.util.find_spec("deepspeed"):
            found.append(Contender("deepspeed"))
        else:
            print("deepspeed is not installed: its DistributedAttention is left out")
    for U, memory in itertools.product(
        arguments.chunk_heads or (arguments.ranks, 4 * arguments.ranks), arguments.modes
    ):
        kept = not arguments.plain_checkpoint
        mode = Mode(memory, arguments.query_blocks, arguments.accumulate, arguments.overlap, operator=kept)
        found.append(Contender("upipe", U, mode))
    return tuple(found)


def job_of(arguments: argparse.Namespace) -> Job:
    """The job; sizes that do not fit raise here."""
    contenders = contenders_of(arguments)
    for U in {c.chunk_heads for c in contenders} - {None}:
        Schedule.build(heads=arguments.heads, kv_heads=arguments.kv_heads, ranks=arguments.ranks, chunk_heads=U)
    return Job(
        LayerShape(arguments.heads, arguments.kv_heads, arguments.head_dim, arguments.hidden_size),
        arguments.ranks,
        tuple(arguments.tokens),
        contenders,
        STEPS[arguments.checkpoint],
        arguments.repeats,
        arguments.warmup,
        arguments.kernel,
        "cuda" if torch.cuda.device_count() >= arguments.ranks else "cpu",
        arguments.profile,
    )


def conditions(job: Job) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        **asdict(job.shape),
        "ranks": job.ranks,
        "device": torch.cuda.get_device_name() if job.device == "cuda" else f"{os.cpu_count()} CPU cores",
        "dtype": str(job.dtype).removeprefix("torch."),
        "kernel": job.kernel,
        "repeats": job.repeats,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", nargs="+", type=int, default=[4096, 8192, 16384], help="over all ranks; default: 4K 8K 16K")
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=64)
    add("--hidden-size", type=int, default=2048)
    add("--ranks", type=int, default=2)
    add("--chunk-heads", nargs="+", type=int, help="UPipe's, over all ranks; default: the ranks, and four times them")
    add("--modes", nargs="+", choices=MEMORY, default=["keep", "fused"], help="UPipe's memory modes")
    add("--query-blocks", type=int, default=4, help="of mode blocks")
    add("--accumulate", choices=ACCUMULATE, default="auto", help="UPipe's sums")
    add("--checkpoint", choices=STEPS, default="both", help="train with the layer checkpointed, without, or both")
    add("--plain-checkpoint", action="store_true", help="do not keep UPipe's result under the checkpoint")
    add("--overlap", action="store_true", help="send UPipe's next stage during attention")
    add("--repeats", type=int, default=5, help="that count; medians are of these")
    add("--warmup", type=int, default=1, help="repetitions before")
    add("--kernel", choices=["auto", *KERNELS], default="auto", help="local attention of all")
    add("--no-deepspeed", action="store_true", help="leave DeepSpeed's DistributedAttention out")
    add("--json", type=Path, metavar="FILE", help="conditions, medians, ratios and every sample")
    add("--plot", type=Path, metavar="FILE", help="ratios over tokens as a picture")
    add("--profile", action="store_true", help="instead: seconds by operator of one training step on rank 0")
    return parser.parse_args()


def main() -> None:
    """The command."""
    arguments = parse()
    job = job_of(arguments)
    before = conditions(job)
    if job.profile:
        print_profiles(job)
        return
    rows = rows_of(job)
    print(", ".join(f"{name} {value}" for name, value in before.items()))
    print_table(rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"conditions": before, "rows": rows}, indent=1))
    if arguments.plot is not None:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
