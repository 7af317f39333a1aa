"""docs/numbers.md from what the benchmarks measured: benchmarks/results/*.json, one file a benchmark.

``python benchmarks/report.py --run`` runs memory.py, precision.py and speed.py first, small enough for two minutes on
two CPU cores; without ``--run`` the page is made of the files that are there. Each file has the command that made it.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "numbers.md"

HELD = {True: "yes", False: "**no**", None: "-"}

QUICK = {
    "memory": "--json --models 'Llama3-8B on 8' 'Qwen3-32B on 16' --tokens 1048576",
    "precision": "--layers 8/2 --tokens 256 --head-dim 32 --hidden-size 128 --stages 1 4 8 --blocks 4 --kernels auto",
    "speed": "--heads 8 --kv-heads 2 --head-dim 32 --hidden-size 256 --tokens 2048 --chunk-heads 2 --modes keep fused "
    "--no-deepspeed --repeats 3",
}
"""The benchmarks' arguments. What takes an hour at full size is in docs/precision.md and docs/speed.md."""

HEAD = """# Measured numbers

Written by `python benchmarks/report.py` from `benchmarks/results/`; with `--run` it measures first, in small sizes. No
GPU was used but for the first table. The record at full size, with what follows from it, is on the pages
[Precision](precision.md) and [Speed](speed.md); memory is at full size here.

"""
GPU = """## On GPUs

What `benchmarks/proof.py` finds, a line a finding. To fill the table:

```text
python benchmarks/proof.py proof-output --gpus 8
cp proof-output/proof.json benchmarks/results/gpu.json
python benchmarks/report.py
```

"""
MEMORY = """## Memory

Peak of one attention layer on one rank at 1M tokens in bf16, in units of one [tokens, head size] tensor: every operator
of forward and backward ran on tensors without data, live storages were counted. `tests/test_memory.py` holds the closed
forms to them.

"""
PRECISION = """## Precision

Relative errors (times 1000) of one bf16 layer against float64; the last column is the largest in plain Ulysses's of the
same tensor.

"""
SPEED = """## Speed

One layer, UPipe beside plain Ulysses in one interleaved run, medians. At this size stages cost most: their overhead is
constant, attention grows with the square of the length. CPU seconds are the sum of the ranks. The load is the
machine's at the start, in running processes: where it is above the number of cores, seconds say little.

"""


def run(name: str, arguments: str, folder: Path) -> None:
    """Run a benchmark and write its results with the command and what they depend on."""
    file, words = folder / f"{name}.json", shlex.split(arguments)
    to_file = [] if name == "memory" else ["--json", str(file)]  # memory.py prints an object a line
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *words, *to_file]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    if name == "memory":
        import torch

        conditions = f"fake tensors, torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}"
        found: dict[str, Any] = {
            "conditions": conditions,
            "rows": [json.loads(line) for line in done.stdout.splitlines()],
        }
    else:
        found = json.loads(file.read_text())
    shown = f"python benchmarks/{name}.py {arguments}"
    file.write_text(json.dumps({"command": shown, **found}, indent=1) + "\n")


def gpu_section(folder: Path) -> str:
    """What ``proof.py`` found on a GPU; before it was run on one, the same table, empty."""
    file = folder / "gpu.json"
    from proof import figures

    if file.exists():
        found = json.loads(file.read_text())
        rows = [(row["step"], row["what"], row["held"], figures(row).replace("|", "/")) for row in found["rows"]]
    else:
        rows = [(name, "-", None, "not run yet") for name in proof_steps()]
    lines = ["| step | what | held | figures |", "|---|---|---|---|"]
    lines += [f"| {step} | {what} | {HELD[held]} | {words} |" for step, what, held, words in rows]
    return GPU + "\n".join(lines) + "\n\n"


def proof_steps() -> list[str]:
    """The steps of ``proof.py``, on one GPU and on several."""
    from proof import ONE, SEVERAL, steps_of

    return list(dict.fromkeys([*steps_of(ONE), *steps_of(SEVERAL)]))


def page(folder: Path) -> str:
    """The page of the results in `folder`."""
    parts = [HEAD, gpu_section(folder)]
    for name, (text, columns) in SECTIONS.items():
        found = json.loads((folder / f"{name}.json").read_text())
        parts += [text, f"```bash\n{found['command']}\n```\n\n", f"Conditions: {_conditions(found['conditions'])}.\n\n"]
        parts += _table(columns, found["rows"])
    return "".join(parts).rstrip() + "\n"


def _conditions(found: Any) -> str:
    if isinstance(found, str):
        return found
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items())


def _table(columns: dict[str, str], rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    for row in rows:
        yield f"| {' | '.join(_cell(row[key], form) for key, form in columns.items())} |\n"
    yield "\n"


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


_PRECISION = ("layer", "mode", "stages", "blocks", "sums", "y", "dx", "dwq", "dwk", "dwv", "dwo", "worst / Ulysses")
SECTIONS = {
    "memory": (
        MEMORY,
        {
            **dict.fromkeys(("model", "method", "chunk_heads", "mode"), ""),
            **{"tokens": ",", "forward_units": ".2f", "training_units": ".2f", "GiB": ".2f"},
        },
    ),
    "precision": (PRECISION, dict.fromkeys(_PRECISION, "")),
    "speed": (
        SPEED,
        {
            **{"tokens": ",", "step": "", "contender": "", "wall_s": ".3f", "cpu_s": ".3f"},
            **{"wall_ratio": ".2f", "cpu_ratio": ".2f"},
        },
    ),
}
"""By benchmark: its text, and its columns with how they are written."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", choices=QUICK, metavar="BENCHMARK", help="measure these (all) before")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: benchmarks/results")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/numbers.md")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    for name in () if options.run is None else options.run or QUICK:
        run(name, QUICK[name], options.results)
    options.page.write_text(page(options.results))
    print(options.page)


if __name__ == "__main__":
    main()
