"""Peak memory of one attention layer over sequence lengths, measured on fake tensors: no GPU, no memory needed.

Every operator of forward and backward runs at full scale on tensors without data, on one rank of a process group
without peers; live storages are counted exactly, with what FlashAttention 2 allocates inside its backward. Counted:
everything between the layer's input and output, the incoming gradient and weight gradients. Not counted: input,
weights, rotary tables, and in forward the output projection where it is not part of the attention. The unit is one
[tokens, head size] tensor in bfloat16; GiB is the training peak.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass

from progress import report

from upipe_integrations import Mode, Schedule
from upipe_integrations.bench.peaks import measured_ulysses_peak
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.closed_forms import LayerShape, PeakUnits, ulysses_peak, upipe_peak
from upipe_integrations.planning.measure import fake_ranks, measured_upipe_peak


@dataclass(frozen=True)
class Setting:
    """A model on some ranks."""

    shape: LayerShape
    ranks: int


LLAMA3_8B = LayerShape(heads=32, kv_heads=8, head_dim=128, hidden_size=4096)
QWEN3_32B = LayerShape(heads=64, kv_heads=8, head_dim=128, hidden_size=5120)
SETTINGS = {
    "Llama3-8B on 8": Setting(LLAMA3_8B, 8),
    "Qwen3-32B on 8": Setting(QWEN3_32B, 8),
    "Qwen3-32B on 16": Setting(QWEN3_32B, 16),
}
TOKENS = tuple(2**n for n in range(17, 24))
COLUMNS = ("model", "method", "chunk_heads", "mode", "tokens", "forward_units", "training_units", "GiB")


@dataclass(frozen=True)
class Case:
    """One row to measure; `chunk_heads` and `mode` are None for Ulysses."""

    model: str
    chunk_heads: int | None
    mode: str | None
    tokens: int

    @property
    def setting(self) -> Setting:
        """The model and its ranks."""
        return SETTINGS[self.model]

    def schedule(self) -> Schedule:
        """UPipe's schedule."""
        shape = self.setting.shape
        assert self.chunk_heads is not None
        return Schedule.build(
            heads=shape.heads, kv_heads=shape.kv_heads, ranks=self.setting.ranks, chunk_heads=self.chunk_heads
        )

    def closed_form(self) -> PeakUnits:
        """What the closed form says."""
        if self.mode is None:
            return ulysses_peak(self.setting.shape, self.setting.ranks)
        return upipe_peak(self.setting.shape, self.schedule(), Mode.named(self.mode))

    def measured(self) -> PeakUnits:
        """Peaks on one rank of the default group, which has the setting's ranks."""
        shape = self.setting.shape
        if self.mode is None:
            return measured_ulysses_peak(shape, self.tokens)
        return measured_upipe_peak(shape, self.schedule(), Mode.named(self.mode), self.tokens)

    def row(self) -> dict[str, object]:
        """The case and what was measured; GiB is the training peak."""
        units = self.measured()
        gib = units.gib(self.tokens, self.setting.shape.head_dim).training
        method = "ulysses" if self.mode is None else "upipe"
        figures = (round(units.forward, 3), round(units.training, 3), round(gib, 3))
        values = (self.model, method, self.chunk_heads, self.mode, self.tokens, *figures)
        return dict(zip(COLUMNS, values, strict=True))


def cases(models: list[str], tokens: list[int], modes: list[str]) -> Iterator[Case]:
    """All that is asked for, model by model: Ulysses, then UPipe with one and two query heads per rank and stage."""
    for model, S in itertools.product(models, tokens):
        C = SETTINGS[model].ranks
        yield Case(model, None, None, S)
        for U, mode in itertools.product((C, 2 * C), modes):
            yield Case(model, U, mode, S)


def measured_rows(wanted: list[Case]) -> Iterator[tuple[Case, dict[str, object]]]:
    """A row per case, with progress on stderr; cases of one number of ranks must follow each other."""
    for ranks, group in itertools.groupby(enumerate(wanted), lambda numbered: numbered[1].setting.ranks):
        with fake_ranks(ranks):
            for number, case in group:
                report(number, len(wanted), case.model)
                yield case, case.row()
    report(len(wanted), len(wanted))


def print_table(rows: Iterator[tuple[Case, dict[str, object]]]) -> None:
    """Columns of the JSON, and the closed form of the training peak beside the measured one."""
    widths = (16, 8, 11, 10, 9, 14, 15, 9)
    print(" ".join(f"{c:>{w}}" for c, w in zip(COLUMNS, widths, strict=True)) + "  closed form")
    for case, row in rows:
        values = ["-" if v is None else f"{v:.2f}" if isinstance(v, float) else v for v in row.values()]
        line = " ".join(f"{v:>{w}}" for v, w in zip(values, widths, strict=True))
        print(f"{line}  {case.closed_form().training:11.2f}", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--models", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    parser.add_argument("--modes", nargs="+", choices=MEMORY, default=list(MEMORY), help="default: all")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="default: 128K to 8M")
    arguments = parser.parse_args()
    rows = measured_rows(list(cases(arguments.models, arguments.tokens, arguments.modes)))
    if not arguments.json:
        print_table(rows)
        return
    for _, row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
