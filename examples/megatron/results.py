"""What the demo's runs gave: whether Megatron printed the same, and the table, the figure and the file that show it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.common.results import (
    BELOW,
    ON_TOP,
    TrainingRun,
    draw_curves,
    from_first_to_last,
    largest_difference,
    write_json,
)

_PRINTED = re.compile(r"^.* iteration +\d+/.*\| lm loss: (\S+) \|.*\| grad norm: (\S+) \|", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class RunResult(TrainingRun):
    """One run's figures; those that were printed are as Megatron printed them."""

    printed_losses: list[str]
    printed_norms: list[str]


def printed(log: str) -> dict[str, list[str]]:
    """The losses and gradient norms that Megatron printed, by step."""
    found = _PRINTED.findall(log)
    return {"printed_losses": [loss for loss, _ in found], "printed_norms": [norm for _, norm in found]}


def apart(a: str, b: str) -> Decimal:
    """How far two printed numbers are apart, in units of the last digit; infinitely where one is not a number.

    Runs that are right may be one apart, where what is rounded lies between two numbers.
    """
    first, second = Decimal(a), Decimal(b)
    if not (first.is_finite() and second.is_finite()):
        return Decimal("Infinity")
    places = max(int(first.as_tuple().exponent), int(second.as_tuple().exponent))
    return abs(first - second).scaleb(-places)


def disagreement(reference: RunResult, run: RunResult) -> str | None:
    """A sentence that says where `run` printed something else than `reference`, or None."""
    steps = len(reference.losses)
    for of in (reference, run):
        if not len(of.losses) == len(of.printed_losses) == len(of.printed_norms) == steps:
            return f"{of.name}: Megatron printed {len(of.printed_losses)} of {steps} steps."
    for what, ours, theirs in (
        ("loss", run.printed_losses, reference.printed_losses),
        ("gradient norm", run.printed_norms, reference.printed_norms),
    ):
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
            if apart(a, b) > 1:
                return (
                    f"The runs do not agree: in step {step} {run.name} printed a {what} of {a} and {reference.name} "
                    f"{b}, which are more than one unit of the last digit apart."
                )
    return None


def _same(ours: Sequence[str], theirs: Sequence[str]) -> str:
    return f"{sum(a == b for a, b in zip(ours, theirs, strict=False))} of {len(theirs)}"


def table(reference: RunResult, run: RunResult) -> Table:
    """One column per run; narrow enough for 80 characters."""
    result = Table(
        title=f"{len(reference.losses)} training steps, two ways",
        caption=(
            "The same: steps of which Megatron printed every digit alike; in others the last one is rounded to the "
            "other side. Differences are relative, the largest of all steps, of what was not rounded. "
            "Megatron's own attention on a CPU forms the matrix of scores, so speed is not compared."
        ),
        caption_justify="left",
        width=80,
    )
    result.add_column("")
    for each in (reference, run):
        result.add_column(each.name, justify="right", no_wrap=True)
    loss = largest_difference(run.losses, reference.losses)
    norm = largest_difference(run.grad_norms, reference.grad_norms)
    both = (reference, run)
    rows = {
        "Ranks": [str(each.ranks) for each in both],
        "Loss, first to last": [from_first_to_last(each.losses) for each in both],
        "Printed losses, the same": ["", _same(run.printed_losses, reference.printed_losses)],
        "Loss difference": ["", f"{loss:.1e}"],
        "Gradient norm": [from_first_to_last(each.grad_norms) for each in both],
        "Printed norms, the same": ["", _same(run.printed_norms, reference.printed_norms)],
        "Norm difference": ["", f"{norm:.1e}"],
    }
    for label, cells in rows.items():
        result.add_row(label, *cells)
    return result


def write_results(path: Path, settings: Mapping[str, Any], reference: RunResult, run: RunResult) -> None:
    """All figures; `settings` is what the runs were started with."""
    content = {"settings": dict(settings), "agree": disagreement(reference, run) is None}
    write_json(path, content, [reference, run])


def draw(path: Path, reference: RunResult, run: RunResult) -> None:
    """Losses and gradient norms, one on top of the other and all to be seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    draw_curves(left, {each.name: each.losses for each in (reference, run)}, [BELOW, ON_TOP])
    left.set(title="Training loss", ylabel="Loss (nats per byte)")
    draw_curves(right, {each.name: each.grad_norms for each in (reference, run)}, [BELOW, ON_TOP])
    right.set(title="Gradient norm before clipping", ylabel="Norm")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
