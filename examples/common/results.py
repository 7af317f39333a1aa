"""What every demo's runs have, how far they are apart, and how their losses are drawn."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One run's figures; lists are by step."""

    name: str
    ranks: int
    losses: list[float]
    grad_norms: list[float]
    seconds: list[float]
    tokens_per_second: float
    upipe: str | None = None
    """What the plugin says it replaced; None without UPipe."""


def largest_difference(values: Sequence[float], reference: Sequence[float]) -> float:
    """Relative to the reference; NaN if there is one anywhere."""
    differences = [abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True)]
    # max() keeps or drops a NaN depending on where it stands.
    return max(differences) if all(d == d for d in differences) else float("nan")


def from_first_to_last(values: Sequence[float]) -> str:
    """A cell of a table."""
    return f"{values[0]:.3f} → {values[-1]:.3f}"


def write_json(path: Path, content: Mapping[str, Any], runs: Sequence[TrainingRun]) -> None:
    """All figures: `content`, and under ``runs`` every run's."""
    everything = {**content, "runs": [dataclasses.asdict(run) for run in runs]}
    path.write_text(json.dumps(everything, indent=2) + "\n")


def draw_curves(axes: Any, curves: Mapping[str, Sequence[float]], styles: Sequence[Mapping[str, Any]]) -> None:
    """Curves by step that coincide, all to be seen."""
    for (name, values), style in zip(curves.items(), styles, strict=True):
        axes.plot(range(1, len(values) + 1), values, label=name, **style)
    axes.set(xlabel="Step")
    axes.grid(alpha=0.3)
    axes.legend()


# From a wide pale line below to markers on top.
BELOW: dict[str, Any] = {"color": "#b0bec5", "linewidth": 8, "solid_capstyle": "round"}
BETWEEN: dict[str, Any] = {"color": "#1565c0", "linewidth": 2.5}
ON_TOP: dict[str, Any] = {"color": "#e65100", "linewidth": 0, "marker": "o", "markersize": 4}
