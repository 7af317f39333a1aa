"""``upipe bench``: time and memory of a model's attention layer against plain Ulysses, on this machine."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upipe_integrations.commands.parsing import (
    INTERRUPTED,
    add_dtype,
    add_kernel,
    add_model,
    add_number,
    add_stage_settings,
    numbers,
    tokens,
    words,
)
from upipe_integrations.config import UPipeConfig
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.closed_forms import LayerShape
from upipe_integrations.planning.models import PRESETS, find_config

if TYPE_CHECKING:
    from upipe_integrations.bench.job import Job
    from upipe_integrations.bench.results import Measured


_LAYER = LayerShape(heads=32, kv_heads=8, head_dim=64, hidden_size=2048)


# The names of speed.STEPS, which needs torch.
_CHECKPOINT = ("no", "yes", "both")


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """The subcommand's words."""
    parser = commands.add_parser(
        "bench",
        help="time and memory of an attention layer against Ulysses on this machine",
        usage="upipe bench [MODEL] [options]",
        description="Run one attention layer on ranks of this machine through plain Ulysses and through UPipe, over "
        "chunk_heads, memory modes and lengths, and print medians of seconds, peak memory, and ratios to Ulysses's. "
        "Results are compared before anything is timed; contenders take turns, so that what disturbs the machine "
        "disturbs all alike. Ctrl-C prints what there is and ends with 130.",
        epilog="Memory is the allocator's peak on GPUs; elsewhere it is traced on fake tensors in bfloat16 with what "
        "FlashAttention allocates, and in forward without the output projection where the mode does not fuse it. "
        "Attention is causal: a MODEL's windows, caps and sinks are left out. example: upipe bench llama3-8b --ranks 2 "
        f"--chunk-heads 2 8 --tokens 4K 8K --plot bench.png. Presets: {', '.join(PRESETS)}.",
    )
    add_model(parser, required=False)
    layer = parser.add_argument_group("layer, where no MODEL is named")
    for option, field in (("--heads", "heads"), ("--kv-heads", "kv_heads"), ("--head-dim", "head_dim")):
        add_number(layer, option, f"default: {getattr(_LAYER, field)}")
    add_number(layer, "--hidden", f"hidden size (default: {_LAYER.hidden_size})")
    what = parser.add_argument_group("what is measured")
    add_number(what, "--ranks", "ranks to start (default: %(default)s)", default=2)
    what.add_argument("--tokens", nargs="+", default=["1K", "4K"], metavar="N", help="lengths (default: 1K 4K)")
    what.add_argument("--chunk-heads", nargs="+", metavar="N", help="query heads per stage (default: as --ranks)")
    what.add_argument("--modes", nargs="+", metavar="MODE", help=f"of {', '.join(MEMORY)} (default: all)")
    add_stage_settings(what, "of mode blocks (default: %(default)s)", query_blocks=4, accumulate="auto")
    what.add_argument(
        "--checkpoint",
        choices=_CHECKPOINT,
        default="no",
        help="train with the layer checkpointed, UPipe's result kept (default: %(default)s)",
    )
    add_kernel(what, default="auto")
    add_dtype(what, "default: bfloat16 on GPUs, float32 elsewhere")
    add_number(what, "--repeats", "that count (default: %(default)s)", default=3)
    add_number(what, "--warmup", "before them (default: %(default)s)", default=1)
    what.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop then, with what there is")
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="conditions, medians, ratios and samples; - is standard output")
    out.add_argument("--plot", metavar="FILE.png", help="draw ratios over tokens; needs matplotlib")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from upipe_integrations.bench.results import Measured

    if options.time_limit is not None and not 0 < options.time_limit < float("inf"):
        raise ValueError(f"--time-limit {options.time_limit:g}: must be a positive number of seconds.")
    _check_writable(options)
    job = _job(options)
    conditions = job.conditions()
    measured = Measured(job)
    interrupted = False
    try:
        _measure(measured, options.time_limit)
    except KeyboardInterrupt:
        interrupted = True
    except RuntimeError as error:
        print(f"upipe bench: {error}", file=sys.stderr)
        return 1
    _report(options, conditions, measured)
    if not measured.complete:
        why = "interrupted" if interrupted else f"stopped by --time-limit {options.time_limit:g}"
        there = f"{len(measured.rows())} of {measured.wanted} rows, some of fewer runs"
        print(f"upipe bench: {why}: {there}", file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def _check_writable(options: argparse.Namespace) -> None:
    """Minutes must not be lost to a folder that is not there, or to matplotlib."""
    for option, file in (("--json", options.json), ("--plot", options.plot)):
        if file not in (None, "-") and not Path(file).absolute().parent.is_dir():
            raise ValueError(f"{option} {file}: there is no folder {Path(file).parent}.")
    if options.plot is not None:
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError:
            raise ValueError("--plot: needs matplotlib. Install it with: pip install matplotlib") from None


def _job(options: argparse.Namespace) -> Job:
    """Raises ValueError for words that do not fit."""
    import torch

    from upipe_integrations.bench.job import STEPS, Job, Ulysses, UPipe, best_device
    from upipe_integrations.mode import Mode

    shape = _shape(options)
    device = best_device(options.ranks)
    dtype = options.dtype or ("bfloat16" if device == "cuda" else "float32")
    chunk_heads: tuple[int, ...] = (options.ranks,)
    if options.chunk_heads is not None:
        chunk_heads = numbers("--chunk-heads", ",".join(options.chunk_heads))
    modes = MEMORY if options.modes is None else words(",".join(options.modes))
    contenders = []
    for U, memory in itertools.product(dict.fromkeys(chunk_heads), modes):
        settings = UPipeConfig(U, options.kernel, memory, options.query_blocks, options.accumulate, options.overlap)
        if options.ranks > 0 and min(shape.heads, shape.kv_heads) > 0:  # else the job says it
            settings.schedule(heads=shape.heads, kv_heads=shape.kv_heads, ranks=options.ranks)
        mode = Mode.named(memory, options.query_blocks, options.accumulate, options.overlap, operator=True)
        contenders.append(UPipe(U, mode))
    return Job(
        shape,
        options.ranks,
        tuple(tokens("--tokens", word) for word in ",".join(options.tokens).split(",")),
        (Ulysses(), *contenders),
        STEPS[options.checkpoint],
        options.repeats,
        options.warmup,
        options.kernel,
        device,
        getattr(torch, dtype),
        peaks=True,
    )


def _shape(options: argparse.Namespace) -> LayerShape:
    given = {
        "heads": options.heads,
        "kv_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "hidden_size": options.hidden,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if options.model is None:
        sizes = {**vars(_LAYER), **given}
        if "heads" in given and "kv_heads" not in given:
            sizes["kv_heads"] = sizes["heads"]
        return LayerShape(**sizes)
    if given:
        raise ValueError(f"{', '.join(given)} with a MODEL, which has its own: leave out one or the other.")
    layer = find_config(options.model).attention()[0]
    return LayerShape(layer.heads, layer.kv_heads, layer.head_dim, layer.hidden_size)


def _measure(measured: Measured, seconds: float | None) -> None:
    """Fills `measured`, with a bar on stderr; Ctrl-C comes out of it with the ranks ended."""
    from upipe_integrations.bench.job import Sample
    from upipe_integrations.bench.on_ranks import run_job
    from upipe_integrations.bench.peaks import traced_peaks

    job = measured.job
    with _bar(job.runs) as advance:
        if job.device != "cuda":
            for peak in traced_peaks(job):
                measured.add(peak)
        with closing(run_job(job, seconds)) as results:
            for result in results:
                measured.add(result)
                if isinstance(result, Sample):
                    advance(f"{result.tokens} tokens, {result.step}")


@contextmanager
def _bar(total: int) -> Iterator[Callable[[str], None]]:
    """What is called after every run: a bar where stderr is a terminal and rich is installed, else nothing."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        Progress = None  # type: ignore[assignment, misc]
    if Progress is None or not sys.stderr.isatty():
        yield lambda text: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


def _report(options: argparse.Namespace, conditions: dict[str, Any], measured: Measured) -> None:
    from upipe_integrations.bench.report import plot, table

    rows = measured.rows()
    if options.json is not None:
        text = json.dumps({"conditions": conditions, "complete": measured.complete, "rows": rows}, indent=1)
        if options.json == "-":
            print(text)
        else:
            try:
                Path(options.json).write_text(text)
            except OSError as error:
                raise ValueError(f"--json {options.json}: {error.strerror}.") from None
    if options.json != "-":
        print(", ".join(f"{name} {value}" for name, value in conditions.items()))
        print(table(rows) if rows else "nothing was measured")
    if options.plot is not None and rows:
        plot(rows, options.plot)
