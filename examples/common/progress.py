"""A bar for every run of a demo, and what the run reported."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.common.runs import RunFailed


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """Bars for the runs inside; a run that fails, or Ctrl-C, ends the program with what there is to say."""
    # Ended from outside as by Ctrl-C: the running processes are stopped on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    columns = (
        TextColumn("{task.description:>14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[news]}"),
    )
    try:
        with Progress(*columns, console=console) as progress:
            yield progress
    except RunFailed as failure:
        print(failure, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit("interrupted; all runs are stopped.")


def collect(
    records: Generator[dict[str, Any]], progress: Progress, *, name: str, steps: int, tokens: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Show a run while it goes on.

    Args:
        records: of the run, from ``follow``. Those with a ``loss`` are steps.
        progress: the bars.
        name: of the run.
        steps: that it will take.
        tokens: of a step.

    Returns:
        What every run has, by the names of ``TrainingRun``; and what else it reported.
    """
    bar = progress.add_task(name, total=steps, news="starting")
    taken: list[dict[str, float]] = []
    facts: dict[str, Any] = {}
    with closing(records):  # however this ends, the processes end with it
        for record in records:
            if "loss" in record:
                taken.append(record)
                news = f"loss {record['loss']:.3f}, {tokens / record['seconds']:,.0f} tokens/s"
                progress.update(bar, advance=1, news=news)
            else:
                facts |= record
                if "upipe" in record:
                    progress.console.print(record["upipe"], style="dim", highlight=False)
    timed = [step["seconds"] for step in taken[1:]]  # the first step also warms up
    figures = {
        "losses": [step["loss"] for step in taken],
        "grad_norms": [step["grad_norm"] for step in taken],
        "seconds": [step["seconds"] for step in taken],
        "tokens_per_second": tokens * len(timed) / sum(timed),
    }
    return figures, facts
