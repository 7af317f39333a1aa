"""What the demo's runs gave: whether they agree, and the table, the figure and the file that show it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.common.results import (
    BELOW,
    BETWEEN,
    ON_TOP,
    TrainingRun,
    draw_curves,
    from_first_to_last,
    largest_difference,
    write_json,
)

MEBIBYTE = 2**20
COMPARED_STEPS = 40
"""Steps that are compared. Training amplifies rounding: from about step 30 on, differences grow tenfold every 20
steps, for Ulysses as for UPipe, until the runs are as far apart as runs of two seeds, all of them right."""
LOSS_TOLERANCE = 1e-5
"""Largest relative difference of a step's loss. The runs compute the same function in float32 and differ in the
order of sums only: at most 5e-7 was measured (a few units in the last place). Positions or heads that go astray
show as 1e-3 and more."""
NORM_TOLERANCE = 1e-3
"""The same for a step's gradient norm. It is a sum over all weights and more sensitive to weights that already
differ by rounding: at most 1.4e-5 was measured. Gradients scaled by the number of ranks would be off by 1."""


@dataclass(frozen=True, kw_only=True)
class RunResult(TrainingRun):
    """One run's figures."""

    attention_bytes: int


@dataclass(frozen=True)
class Difference:
    """Largest relative differences of a run from the first one, over the steps that are compared."""

    loss: float
    grad_norm: float

    @property
    def tolerated(self) -> bool:
        """Whether both are within tolerance; a NaN is not."""
        return self.loss <= LOSS_TOLERANCE and self.grad_norm <= NORM_TOLERANCE


def compare(runs: Sequence[RunResult]) -> dict[str, Difference]:
    """How far each run but the first is from the first, by name."""
    reference, *others = runs
    n = COMPARED_STEPS
    return {
        run.name: Difference(
            largest_difference(run.losses[:n], reference.losses[:n]),
            largest_difference(run.grad_norms[:n], reference.grad_norms[:n]),
        )
        for run in others
    }


def verdict(differences: Mapping[str, Difference]) -> str | None:
    """A sentence that says which runs differ too much, or None if none does."""
    failed = [
        f"{name} (losses by {d.loss:.1e}, gradient norms by {d.grad_norm:.1e})"
        for name, d in differences.items()
        if not d.tolerated
    ]
    if not failed:
        return None
    return (
        f"The runs do not agree: {', '.join(failed)} differ from the single process by more than the tolerated "
        f"{LOSS_TOLERANCE:.0e} in losses or {NORM_TOLERANCE:.0e} in gradient norms (relative)."
    )


def table(runs: Sequence[RunResult], differences: Mapping[str, Difference]) -> Table:
    """One column per run; narrow enough for 80 characters."""
    result = Table(
        title=f"{len(runs[0].losses)} training steps, three ways",
        caption=(
            f"Differences: largest of the first {min(len(runs[0].losses), COMPARED_STEPS)} steps, relative to the "
            "single process (tolerated: "
            f"{LOSS_TOLERANCE:.0e} for losses, {NORM_TOLERANCE:.0e} for gradient norms). Attention memory: peak of "
            "live tensors of one layer in training, beyond its input and weights; what a kernel "
            "allocates and frees within itself is not seen."
        ),
        caption_justify="left",
        width=80,
    )
    result.add_column("")
    for run in runs:
        result.add_column(run.name, justify="right", no_wrap=True)
    shown = [differences.get(run.name) for run in runs]
    rows = {
        "Ranks": [str(run.ranks) for run in runs],
        "Loss, first to last": [from_first_to_last(run.losses) for run in runs],
        "Loss difference": [f"{d.loss:.1e}" if d else "" for d in shown],
        "Gradient norm": [from_first_to_last(run.grad_norms) for run in runs],
        "Norm difference": [f"{d.grad_norm:.1e}" if d else "" for d in shown],
        "Tokens/s, all ranks": [f"{run.tokens_per_second:,.0f}" for run in runs],
        "Attention memory/rank": [f"{run.attention_bytes / MEBIBYTE:.2f} MiB" for run in runs],
    }
    for label, cells in rows.items():
        result.add_row(label, *cells)
    return result


def write_results(
    path: Path, settings: Mapping[str, Any], runs: Sequence[RunResult], differences: Mapping[str, Difference]
) -> None:
    """All figures; `settings` is what the runs were started with."""
    content = {
        "settings": dict(settings),
        "tolerance": {"loss": LOSS_TOLERANCE, "grad_norm": NORM_TOLERANCE, "compared_steps": COMPARED_STEPS},
        "agree": verdict(differences) is None,
        "differences": {name: dataclasses.asdict(d) for name, d in differences.items()},
    }
    write_json(path, content, runs)


def draw(path: Path, runs: Sequence[RunResult]) -> None:
    """Loss curves, one on top of the other and all to be seen, and attention memory as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), width_ratios=(3, 2), layout="constrained")
    styles: list[dict[str, Any]] = [BELOW, BETWEEN, ON_TOP]
    draw_curves(left, {run.name: run.losses for run in runs}, styles)
    left.set(title="Training loss", ylabel="Loss (nats per byte)")

    mebibytes = [run.attention_bytes / MEBIBYTE for run in runs]
    bars = right.bar(
        [f"{run.name}\n({run.ranks} rank{'s' if run.ranks > 1 else ''})" for run in runs],
        mebibytes,
        color=[style["color"] for style in styles],
        width=0.6,
    )
    right.bar_label(bars, [f"{value:.2f} MiB" for value in mebibytes], padding=3)
    right.margins(y=0.12)
    right.set(title="Peak memory of one attention layer in training", ylabel="Live tensors per rank (MiB)")
    right.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
