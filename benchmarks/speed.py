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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from progress import report
from torch import Tensor

from upipe_integrations import Mode, Schedule
from upipe_integrations.bench.job import STEPS, Contender, Job, Profile, Ulysses, UPipe, best_device
from upipe_integrations.bench.layers import Run
from upipe_integrations.bench.on_ranks import run_job
from upipe_integrations.bench.report import plot, table
from upipe_integrations.bench.results import Measured
from upipe_integrations.bench.ulysses import LocalAttention, attend_all_heads
from upipe_integrations.commands.parsing import add_overlap
from upipe_integrations.kernels import KERNELS, Kernel
from upipe_integrations.mode import ACCUMULATE, MEMORY
from upipe_integrations.planning.closed_forms import LayerShape


@dataclass(frozen=True)
class DeepSpeed:
    """DeepSpeed's DistributedAttention around the same kernel."""

    chunk_heads: None = None
    mode: None = None
    name = "deepspeed"

    def checkpoint_options(self) -> dict[str, Any]:
        """None."""
        return {}

    def run_on(self, shape: LayerShape, kernel: Kernel) -> Run:
        """See ``Contender``."""
        return _deepspeed(kernel)


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


def measured_rows(job: Job) -> list[dict[str, Any]]:
    """Rows of the whole job, with progress on stderr."""
    measured = Measured(job)
    for done, result in enumerate(run_job(job), 1):
        report(done, job.runs, f"{result.tokens} tokens")
        measured.add(result)
    return measured.rows()


def print_profiles(job: Job, most: int = 16) -> None:
    """Self seconds (and calls) of rank 0's operators in one training step, a column per contender."""
    by_tokens: dict[int, list[Profile]] = {}
    for result in run_job(job):
        by_tokens.setdefault(result.tokens, []).append(result)
    for tokens, results in by_tokens.items():
        print(f"{tokens} tokens; self seconds (calls) of rank 0 in one training step")
        print(f"{'operator':44}" + "".join(f"{r.contender.name:>24}" for r in results))
        keys = {key for r in results for key in r.operators}
        ranked = sorted(keys, key=lambda k: -max(r.operators.get(k, (0, 0))[0] for r in results))
        for key in ranked[:most]:
            cells = (r.operators.get(key, (0.0, 0)) for r in results)
            print(f"{key[:43]:44}" + "".join(f"{seconds:16.4f} ({calls:5})" for seconds, calls in cells))
        totals = (sum(seconds for seconds, _ in r.operators.values()) for r in results)
        print(f"{'all':44}" + "".join(f"{total:16.4f}        " for total in totals) + "\n")


def contenders_of(arguments: argparse.Namespace) -> tuple[Contender, ...]:
    """Ulysses first."""
    found: list[Contender] = [Ulysses()]
    if not arguments.no_deepspeed:
        if importlib.util.find_spec("deepspeed"):
            found.append(DeepSpeed())
        else:
            print("deepspeed is not installed: its DistributedAttention is left out")
    for U, memory in itertools.product(
        arguments.chunk_heads or (arguments.ranks, 4 * arguments.ranks), arguments.modes
    ):
        kept = not arguments.plain_checkpoint
        mode = Mode.named(memory, arguments.query_blocks, arguments.accumulate, arguments.overlap, operator=kept)
        found.append(UPipe(U, mode))
    return tuple(found)


def job_of(arguments: argparse.Namespace) -> Job:
    """The job; sizes that do not fit raise here."""
    contenders, device = contenders_of(arguments), best_device(arguments.ranks)
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
        device,
        torch.bfloat16 if device == "cuda" else torch.float32,
        arguments.profile,
    )


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
    add_overlap(parser)
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
    before = job.conditions()
    if job.profile:
        print_profiles(job)
        return
    rows = measured_rows(job)
    print(", ".join(f"{name} {value}" for name, value in before.items()))
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"conditions": before, "rows": rows}, indent=1))
    if arguments.plot is not None:
        plot(rows, str(arguments.plot))


if __name__ == "__main__":
    main()
