"""Rounding errors of one bf16 attention layer against float64, Ulysses beside UPipe in every mode.

UPipe adds up over stages what Ulysses computes in one product, so in bf16 it rounds more often. This measures it:
relative errors (Frobenius norm of the difference over that of the right result) of y, dx and every weight gradient.
One process is a group of one rank, in which stages add up as they do on many.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from progress import report
from torch import Tensor

from upipe_integrations import KernelRequest, Mode, Schedule, select_kernel
from upipe_integrations.bench.layers import Layer, random_layer, upipe_layer
from upipe_integrations.bench.ulysses import ulysses_layer
from upipe_integrations.kernels import KERNELS
from upipe_integrations.mode import ACCUMULATE, MEMORY
from upipe_integrations.planning.closed_forms import LayerShape

TENSORS = ("y", "dx", "dwq", "dwk", "dwv", "dwo")
TARGETS = {"auto": 1.15, "float32": 1.05}
"""Largest error allowed, in Ulysses's, by what sums are made in."""
STAGES_OF_TARGET = 8
"""The default's target is for this many stages at most; exact sums must hold theirs for any number."""

Errors = dict[str, float]


@dataclass(frozen=True)
class Run:
    """UPipe in one mode."""

    stages: int
    mode: Mode

    @property
    def counts(self) -> bool:
        """Whether a target is set for it."""
        return self.mode.accumulate == "float32" or self.stages <= STAGES_OF_TARGET

    def cells(self) -> list[str]:
        """Its columns in a table."""
        blocks = str(self.mode.query_blocks) if self.mode.memory == "blocks" else "-"
        return [self.mode.memory, str(self.stages), blocks, self.mode.accumulate]


@dataclass(frozen=True)
class Table:
    """All errors of one layer."""

    shape: LayerShape
    kernel: str
    ulysses: Errors
    upipe: dict[Run, Errors]

    def worst_ratio(self, run: Run) -> float:
        """The largest error of the run's tensors in Ulysses's of the same tensor."""
        return max(self.upipe[run][name] / self.ulysses[name] for name in TENSORS)

    def worst(self, accumulate: str, memory: str | None = None, stages: int | None = None) -> tuple[float, str]:
        """(ratio, where) of the worst run with a target, in all modes or one, of at most so many stages."""
        runs = [r for r in self.upipe if r.counts and r.mode.accumulate == accumulate]
        runs = [r for r in runs if stages is None or r.stages <= stages]
        run = max((r for r in runs if memory in (None, r.mode.memory)), key=self.worst_ratio)
        name = max(TENSORS, key=lambda name: self.upipe[run][name] / self.ulysses[name])
        blocks = f", {run.mode.query_blocks} blocks" if run.mode.memory == "blocks" else ""
        return self.worst_ratio(run), f"{name}, {run.mode.memory}, {run.stages} stages{blocks}"

    @property
    def title(self) -> str:
        """The layer in words."""
        plural = "" if self.shape.kv_heads == 1 else "s"
        return f"{self.shape.heads} query heads on {self.shape.kv_heads} KV head{plural}, kernel {self.kernel}"


def exact(layer: Layer, dy: Tensor) -> dict[str, Tensor]:
    """y and gradients in float64, head by head: no code shared with the engine or with Ulysses."""
    D = layer.head_dim
    x, wq, wk, wv, wo = (t.double().requires_grad_() for t in (layer.x, layer.wq, layer.wk, layer.wv, layer.wo))
    turn = torch.complex(layer.cos.double(), layer.sin.double())[0, :, : D // 2]
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    group = wq.shape[0] // wk.shape[0]
    grads = [torch.zeros_like(t) for t in (x, wq, wk, wv, wo)]
    y = torch.zeros_like(x)
    for head in range(wq.shape[0] // D):
        of_q, of_kv = (slice(i * D, (i + 1) * D) for i in (head, head // group))
        q, k, v = (_by_angle(x[0] @ wq[of_q].T, turn), _by_angle(x[0] @ wk[of_kv].T, turn), x[0] @ wv[of_kv].T)
        weights = (q @ k.T / math.sqrt(D)).masked_fill(hidden, float("-inf")).softmax(-1)
        part = (weights @ v @ wo[:, of_q].T)[None]
        # A head at a time, so that only one head's scores are kept.
        for total, grad in zip(grads, torch.autograd.grad(part, (x, wq, wk, wv, wo), dy.double()), strict=True):
            total += grad
        y += part.detach()
    return dict(zip(TENSORS, (y, *grads), strict=True))


def _by_angle(t: Tensor, turn: Tensor) -> Tensor:
    half = t.shape[-1] // 2
    turned = torch.complex(t[:, :half], t[:, half:]) * turn
    return torch.cat((turned.real, turned.imag), -1)


def errors_of(layer: Layer, dy: Tensor, attention, right: dict[str, Tensor]) -> Errors:
    """Relative errors of ``attention(layer)`` and its gradients."""
    mine = layer.as_leaves()
    y = attention(mine)
    y.backward(dy)
    got = (y.detach(), *(leaf.grad for leaf in mine.leaves().values()))
    return {
        name: float((t.cpu().double() - right[name]).norm() / right[name].norm())
        for name, t in zip(TENSORS, got, strict=True)
    }


def runs_of(shape: LayerShape, stages: list[int], modes: list[str], blocks: list[int]) -> Iterator[Run]:
    """Every run that the layer allows: at least a head per stage."""
    for memory, accumulate, s in itertools.product(modes, ACCUMULATE, stages):
        if shape.heads % s == 0:
            for b in blocks if memory == "blocks" else [Mode().query_blocks]:
                yield Run(s, Mode.named(memory, b, accumulate))


def measure(shape: LayerShape, kernel: str, arguments: argparse.Namespace) -> Table:
    """Errors of every run on one layer with one kernel."""
    device = torch.device(arguments.device)
    layer = random_layer(shape, arguments.tokens, torch.bfloat16, arguments.seed)
    dy = random_layer(shape, arguments.tokens, torch.bfloat16, arguments.seed + 1).x
    right = exact(layer, dy)
    layer, dy = layer.map(lambda t: t.to(device)), dy.to(device)
    attend = select_kernel(kernel, KernelRequest(device, torch.bfloat16, shape.head_dim))
    ulysses = errors_of(layer, dy, lambda mine: ulysses_layer(mine, None, attend), right)
    upipe = {}
    runs = list(runs_of(shape, arguments.stages, arguments.modes, arguments.blocks))
    for number, run in enumerate(runs):
        report(number, len(runs), f"{shape.heads}/{shape.kv_heads} heads")
        schedule = Schedule.build(
            heads=shape.heads, kv_heads=shape.kv_heads, ranks=1, chunk_heads=shape.heads // run.stages
        )
        upipe[run] = errors_of(
            layer, dy, lambda mine, s=schedule, m=run.mode: upipe_layer(mine, s, m, None, attend), right
        )
    report(len(runs), len(runs))
    return Table(shape, attend.name, ulysses, upipe)


def rows_of(table: Table) -> Iterator[list[str]]:
    """Header and rows: errors x 1000, then the worst ratio to Ulysses."""
    yield ["mode", "stages", "blocks", "sums", *TENSORS, "worst / Ulysses"]
    yield ["Ulysses", "-", "-", "-", *(f"{1e3 * table.ulysses[name]:.2f}" for name in TENSORS), "1.00"]
    for run, errors in table.upipe.items():
        missed = " !" if run.counts and table.worst_ratio(run) > TARGETS[run.mode.accumulate] else ""
        figures = (f"{1e3 * errors[name]:.2f}" for name in TENSORS)
        yield [*run.cells(), *figures, f"{table.worst_ratio(run):.2f}{missed}"]


def verdicts(table: Table) -> Iterator[str]:
    """A line for each target: whether it holds, and the worst case."""
    for accumulate, most in TARGETS.items():
        if any(r.counts and r.mode.accumulate == accumulate for r in table.upipe):
            worst, where = table.worst(accumulate)
            scope = f", up to {STAGES_OF_TARGET} stages" if accumulate == "auto" else ""
            held = "holds" if worst <= most else "MISSED"
            yield f"{table.title}: {accumulate} at most {most}{scope}: {held}, worst {worst:.3f} ({where})"


def print_text(tables: list[Table]) -> None:
    """Aligned tables, then the targets."""
    for table in tables:
        print(f"{table.title}: relative errors x 1000")
        for row in rows_of(table):
            print(" ".join(f"{cell:>10}" for cell in row))
        print()
    for table in tables:
        print(*verdicts(table), sep="\n")


PAGE = """# Precision of the sums

Written by `python benchmarks/precision.py --markdown {path}` ({conditions}).

UPipe adds up over stages what Ulysses computes in one product: y (in the modes that fuse the output projection), dx,
and dK and dV of KV heads that several stages attend. Each sum in bf16 rounds once more. Below are relative errors
(Frobenius norm of the difference over that of the right result, times 1000) of the output and of every gradient of one
layer with bf16 inputs and weights, against float64 on the same bf16 values, which shares no code with either. Ulysses
is bf16 autograd around the same kernel. "Sums" is the setting `accumulate`; the last column is the largest of the
row's six errors in Ulysses's of the same tensor, with `!` where a target is missed.

`keep_heads` is not among the modes: the q, k and v it keeps are, bit by bit, those that `keep` makes again.

Two layers show the two kinds of sums in one process. With 32 query heads on 8 KV heads, up to 8 stages have KV heads
of their own, as with multi-head attention; a model with grouped heads on 8 ranks shares them among its stages. dx is a
sum of as many products as there are stages (dq, dk and dv of a stage are one). With 8 query heads on
1 KV head, which is what one of 8 ranks has of Qwen3-32B, every stage adds to the same dK and dV.

## Targets

The default (`auto`) at most {auto} times Ulysses's error of every tensor up to {stages} stages; everything in float32
at most {float32} times, at any number of stages.

{verdicts}

## What follows

The largest error of any tensor in Ulysses's of the same tensor, by mode:

{summary}

- The default holds its target, and costs no memory at the training peak:
  - y over more than 4 stages is summed in float32, which is memory of forward, where no peak is; up to 4 stages its sum
    in bf16 is the largest of the errors that are left.
  - dK and dV of KV heads that several stages share have a running sum, which lives at the very peak: in float32 it
    would cost two more [tokens, KV heads of a stage] tensors. It is made in float16 with a power of two for every row
    (`projections/sums.py`), in the memory of bf16 and with three more bits; in bf16 dWv would have 1.25 times
    Ulysses's error at 8 stages.
  - `blocks` adds to dx for each block of a stage and once more for dK and dV, so its dx is summed in the same way (in
    bf16: 1.16 at 8 stages); elsewhere a stage adds one product, which bf16 sums at 8 stages as well as Ulysses sums
    its three. dK, dV and weight gradients over blocks are summed in float32.
- `accumulate` = `float32` holds its target at any number of stages. It costs another [rows, hidden size] tensor for dx
  in backward (in the fused modes for y in forward too), and two more [tokens, KV heads of a stage] tensors where stages
  share KV heads. It is worth that from 16 stages on, where dx in bf16 shows.
- A product that is added to a sum of a wider type is computed in it (on CUDA by a bf16 product with float32 results):
  rounded to bf16 first, y over 2 stages and dWo over 2 blocks would have 1.06 to 1.08 times Ulysses's error.
- `torch-cpu-flash` adds dK and dV up in bf16 over tiles of query rows, of 64 rows for 192 to 767 rows and of 256
  beyond, so that one call over 512 rows has errors of dx, dWk and dWv a quarter larger than one over 1024. In between
  the kernel is given 256 rows at a time (`upipe_integrations/kernels/torch_flash.py`), whose sums are float32: without,
  2 blocks of 1024 tokens had 1.23 and 1.30 times Ulysses's error. At 4096 tokens the targets hold too: `auto` at most
  1.05 (32/8 heads) and 1.06 (8/1), `float32` 0.99 and 1.01 (`benchmarks/precision.py --tokens 4096 --layers 32/8
  --stages 1 4 8 --blocks 2 4 --modes keep fused blocks --kernels torch-cpu-flash`; `--layers 8/1 --hidden-size 512`).

{tables}"""


def summary_of(tables: list[Table]) -> str:
    """Worst ratios by layer, sums and mode, as a table."""
    modes = list(dict.fromkeys(run.mode.memory for table in tables for run in table.upipe))
    lines = [["layer", "sums", "stages", *modes], ["---"] * 3 + ["---:"] * len(modes)]
    for table, (accumulate, most) in itertools.product(tables, (("auto", 4), ("auto", 8), ("float32", None))):
        scope = "any" if most is None else f"up to {most}"
        if any(run.counts and (most is None or run.stages <= most) for run in table.upipe):
            worst = (f"{table.worst(accumulate, memory, most)[0]:.2f}" for memory in modes)
            lines.append([table.title, accumulate, scope, *worst])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def conditions_of(arguments: argparse.Namespace) -> str:
    """What the figures depend on."""
    return (
        f"{arguments.tokens} tokens, hidden size {arguments.hidden_size}, heads of {arguments.head_dim}, "
        f"seed {arguments.seed}, {arguments.device}, torch {torch.__version__.split('+')[0]}, "
        f"Python {platform.python_version()}"
    )


def write_json(tables: list[Table], path: Path, arguments: argparse.Namespace) -> None:
    """Conditions, and every row of every table."""
    rows = []
    for table in tables:
        header, *lines = rows_of(table)
        rows += [{"layer": table.title, **dict(zip(header, line, strict=True))} for line in lines]
    path.write_text(json.dumps({"conditions": conditions_of(arguments), "rows": rows}, indent=1))


def write_markdown(tables: list[Table], path: Path, arguments: argparse.Namespace) -> None:
    """The page of the docs."""
    parts = []
    for table in tables:
        header, *rows = rows_of(table)
        lines = [header, ["---"] * 4 + ["---:"] * (len(header) - 4), *rows]
        parts.append(f"\n## {table.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    page = PAGE.format(
        path="docs/precision.md",
        conditions=conditions_of(arguments),
        stages=STAGES_OF_TARGET,
        verdicts="\n".join(f"- {line}." for table in tables for line in verdicts(table)),
        summary=summary_of(tables),
        tables="".join(parts),
        **TARGETS,
    )
    path.write_text(page)


def shape_of(text: str) -> tuple[int, int]:
    """'32/8' as (32, 8)."""
    heads, kv_heads = (int(n) for n in text.split("/"))
    return heads, kv_heads


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", nargs="+", type=shape_of, default=[(32, 8), (8, 1)], metavar="H/K", help="query heads / KV heads"
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="default: 1 2 4 8 16")
    others = [mode for mode in MEMORY if mode != "keep_heads"]
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MEMORY,
        default=others,
        help="default: all but keep_heads, which errs as keep does",
    )
    parser.add_argument("--blocks", nargs="+", type=int, default=[2, 4, 8], help="query blocks in mode blocks")
    parser.add_argument(
        "--kernels", nargs="+", choices=["auto", *KERNELS], default=["auto", "math"], help="default: auto math"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: a GPU, if any"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page of the docs, besides")
    parser.add_argument("--json", type=Path, metavar="FILE", help="conditions and every row, besides")
    return parser.parse_args()


def main() -> None:
    """The command."""
    arguments = parse()
    tables = []
    for kernel, (heads, kv_heads) in itertools.product(arguments.kernels, arguments.layers):
        shape = LayerShape(heads, kv_heads, arguments.head_dim, arguments.hidden_size)
        tables.append(measure(shape, kernel, arguments))
    print_text(tables)
    if arguments.markdown is not None:
        write_markdown(tables, arguments.markdown, arguments)
    if arguments.json is not None:
        write_json(tables, arguments.json, arguments)


if __name__ == "__main__":
    main()
