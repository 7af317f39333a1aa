"""Rows of ``speed.Measured`` as a table and as a plot."""

from __future__ import annotations

from typing import Any


def table(rows: list[dict[str, Any]]) -> str:
    """A row per contender; the spread is of wall seconds, (largest - smallest) / median."""
    peaks = any("peak_mib" in row for row in rows)
    head = f"{'tokens':>8} {'step':22} {'contender':26} {'wall s':>8} {'CPU s':>8} {'wall':>6} {'CPU':>6} {'spread':>7}"
    lines = [head + (f" {'peak MiB':>9} {'peak':>6}" if peaks else "")]
    for row in rows:
        walls = [wall for wall, _ in row["samples"]]
        spread = (max(walls) - min(walls)) / row["wall_s"]
        line = (
            f"{row['tokens']:8} {row['step']:22} {row['contender']:26} {row['wall_s']:8.3f} {row['cpu_s']:8.3f} "
            f"{row['wall_ratio']:6.2f} {row['cpu_ratio']:6.2f} {spread:7.0%}"
        )
        lines.append(line + (f" {row['peak_mib']:9.1f} {row['peak_ratio']:6.2f}" if "peak_mib" in row else ""))
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], file: str) -> None:
    """Ratios to Ulysses over tokens, a panel per step: wall drawn through, CPU dotted; below, of peak memory.

    Raises:
        ValueError: matplotlib is not installed, or can't write `file`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot: needs matplotlib. Install it with: pip install matplotlib") from None
    steps, contenders = ([*dict.fromkeys(row[key] for row in rows)] for key in ("step", "contender"))
    peaks = all("peak_ratio" in row for row in rows)
    size = (4.5 * len(steps), 4 * (1 + peaks))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1 + peaks, len(steps), sharey="row", squeeze=False)
    for column, step in enumerate(steps):
        for number, contender in enumerate(contenders):
            mine = [row for row in rows if (row["step"], row["contender"]) == (step, contender)]
            tokens, color = [row["tokens"] for row in mine], f"C{number}"
            panels[0][column].plot(tokens, [row["wall_ratio"] for row in mine], "o-", color=color, label=contender)
            panels[0][column].plot(tokens, [row["cpu_ratio"] for row in mine], ":", color=color)
            if peaks:
                panels[1][column].plot(tokens, [row["peak_ratio"] for row in mine], "o-", color=color)
        for panel in panels[:, column]:
            ticks = sorted({row["tokens"] for row in rows})
            panel.set(title=step, xlabel="tokens", xscale="log")
            panel.set_xticks(ticks, [f"{t / 1024:g}K" for t in ticks], minor=False)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("seconds in Ulysses's (wall; CPU dotted)")
    panels[0][-1].legend(fontsize="small")
    if peaks:
        panels[1][0].set_ylabel("peak memory in Ulysses's")
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise ValueError(f"--plot {file}: {error.strerror}.") from None
