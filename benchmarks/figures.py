"""Draws the figures of docs/how-it-works.md: one attention layer of Llama3-8B on one of 8 ranks at 1M tokens.

The layer runs through the engine (and through plain Ulysses) on tensors without data, as in ``memory.py``; every bar is
an operator that ran, its height what was live then. Dashed lines are the closed forms of
``upipe_integrations.planning.closed_forms``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from upipe_integrations import Mode, Schedule
from upipe_integrations.bench.layers import Layer, upipe_layer
from upipe_integrations.bench.ulysses import ulysses_layer
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.closed_forms import LayerShape, ulysses_peak, upipe_peak
from upipe_integrations.planning.measure import FlashWorkspace, LiveMemory, empty_layer, fake_ranks

SHAPE = LayerShape(heads=32, kv_heads=8, head_dim=128, hidden_size=4096)
RANKS, CHUNK_HEADS, TOKENS = 8, 8, 1 << 20
KINDS = {
    "matrix product": "#4c78a8",
    "all-to-all": "#e45756",
    "attention": "#54a24b",
    "rotary, copies, sums": "#b8b8b8",
}
_VIEWS = (
    *("prim.device", "aten.view", "aten._unsafe_view", "aten.t", "aten.permute", "aten.slice", "aten.select"),
    *("aten.unsqueeze", "aten.squeeze", "aten.transpose", "aten.alias", "aten.detach", "aten.split_with_sizes"),
    *("aten.expand", "aten.as_strided", "aten.empty", "aten.empty_like", "aten.new_empty"),
)


@dataclass(frozen=True)
class Event:
    """An operator that ran: its kind, and GiB live at its end."""

    kind: str
    gib: float


class _Recorder(LiveMemory):
    """Live memory, operator by operator; views and bare allocations are no events of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args=(), kwargs=None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = str(func).rsplit(".", 1)[0]
        if name not in _VIEWS:
            self.events.append((name, self.current))
        return result


def trace(attention: Callable[[Layer], Tensor]) -> tuple[list[Event], list[Event]]:
    """(forward, backward) of one layer, output projection included, on one rank of the default group."""
    with FakeTensorMode(allow_non_fake_inputs=True), _Recorder() as live:
        tensors = empty_layer(SHAPE, TOKENS // RANKS)
        before = live.current
        live.events.clear()
        y = attention(Layer(*tensors, head_dim=SHAPE.head_dim))
        forward = len(live.events)
        dy = torch.empty_like(y)
        edge = torch.autograd.graph.get_gradient_edge(y)
        del y
        torch.autograd.backward(edge, dy)
        events = [Event(_kind(name), (size - before) / 2**30) for name, size in live.events]
    return events[:forward], events[forward:]


def _kind(operator: str) -> str:
    if "alltoall" in operator:
        return "all-to-all"
    if "attention" in operator:
        return "attention"
    return "matrix product" if operator in ("aten.mm", "aten.addmm", "aten.addmm_") else "rotary, copies, sums"


def traces() -> dict[str, tuple[list[Event], list[Event]]]:
    """Ulysses, then UPipe in every memory mode."""

    def ulysses(layer: Layer) -> Tensor:
        return ulysses_layer(layer, dist.group.WORLD, FlashWorkspace())

    def upipe(memory: str) -> Callable[[Layer], Tensor]:
        return lambda layer: upipe_layer(layer, schedule(), Mode.named(memory), dist.group.WORLD, FlashWorkspace())

    with fake_ranks(RANKS):
        return {"Ulysses": trace(ulysses), **{memory: trace(upipe(memory)) for memory in MEMORY}}


def schedule() -> Schedule:
    """UPipe's."""
    return Schedule.build(heads=SHAPE.heads, kv_heads=SHAPE.kv_heads, ranks=RANKS, chunk_heads=CHUNK_HEADS)


def closed_form(name: str) -> float:
    """GiB of the training peak, without weight gradients."""
    form = ulysses_peak(SHAPE, RANKS) if name == "Ulysses" else upipe_peak(SHAPE, schedule(), Mode.named(name))
    return form.gib(TOKENS, SHAPE.head_dim).training


def _thinned(events: list[Event], most: int = 100) -> list[Event]:
    """At most `most` events: of neighbours, the one with most memory."""
    step = -(-len(events) // most)
    return [max(events[first : first + step], key=lambda e: e.gib) for first in range(0, len(events), step)]


def _bars(axes: Any, events: list[Event], first: int = 0) -> None:
    places = range(first, first + len(events))
    axes.bar(places, [e.gib for e in events], width=1.0, align="edge", color=[KINDS[e.kind] for e in events])


def _legend(figure: Any, patches: Any) -> None:
    handles = [patches.Patch(color=color, label=kind) for kind, color in KINDS.items()]
    figure.legend(handles=handles, loc="lower center", ncols=len(KINDS), frameon=False)


def draw_stages(found: dict[str, tuple[list[Event], list[Event]]], path: Path) -> None:
    """Forward of Ulysses above forward of UPipe: operators from left to right, and what is live."""
    from matplotlib import patches
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, 1, figsize=(9, 5.5), sharey=True)
    titles = {
        "Ulysses": "Ulysses: all heads at once",
        "keep": f"UPipe: {len(schedule().stages)} stages, buffers reused",
    }
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        events = found[name][0]
        _bars(axes, events)
        attends = [place for place, event in enumerate(events) if event.kind == "attention"]
        for number, place in enumerate(attends if name != "Ulysses" else (), start=1):
            axes.annotate(
                f"stage {number}", (place + 0.5, events[place].gib), (0, 14), "data", "offset points", ha="center"
            )
        axes.set(title=title, ylabel="GiB live", xlim=(0, len(events)), xticks=[])
    panels[1].set_xlabel("forward of one layer, operator by operator (not to the scale of time)")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    _legend(figure, patches)
    _save(figure, path)


def draw_memory(found: dict[str, tuple[list[Event], list[Event]]], path: Path) -> None:
    """Forward and backward of every method, side by side, with the closed form of the peak."""
    from matplotlib import patches
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(2.3 * len(found), 4), sharey=True)
    for axes, (name, parts) in zip(panels, found.items(), strict=True):
        forward, backward = map(_thinned, parts)
        _bars(axes, forward)
        _bars(axes, backward, len(forward))
        form = closed_form(name)
        axes.axhline(form, color="black", linestyle="--", linewidth=1)
        axes.annotate(f"{form:.2f} GiB", (0, form), (3, 3), "data", "offset points")
        axes.axvline(len(forward), color="black", linewidth=0.8)
        axes.set(title=name, xlim=(0, len(forward) + len(backward)), xticks=[])
        axes.set_xlabel("forward | backward")
    panels[0].set_ylabel("GiB live")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    _legend(figure, patches)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    # Text stays text, and nothing depends on the day: a file that changes says that a figure has.
    figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")


def draw(folder: Path) -> list[Path]:
    """All figures into `folder`; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "upipe", "font.size": 9})
    found = traces()
    files = [folder / "stages.svg", folder / "memory.svg"]
    for file, drawn_by in zip(files, (draw_stages, draw_memory), strict=True):
        drawn_by(found, file)
    return files


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs/figures"), help="default: %(default)s")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for file in draw(folder):
        print(file)


if __name__ == "__main__":
    main()
