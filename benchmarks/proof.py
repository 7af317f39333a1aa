"""The proof on GPUs, by one command: what this project says of kernels, memory and speed, held against a machine.

    python benchmarks/proof.py OUTPUT_FOLDER                  on one GPU, nine minutes at most
    python benchmarks/proof.py OUTPUT_FOLDER --gpus 8         and then on several, over NCCL
    python benchmarks/proof.py OUTPUT_FOLDER --dry-run        every step in small, on CPUs

It needs PyTorch and this checkout alone; steps of DeepSpeed, Transformers and Megatron are left out, and say so, where
these are not installed. Every step runs in a process of its own for at most its seconds. After each, everything so far
is in OUTPUT_FOLDER/proof.json; at the end a table is printed. The exit status is 0 where all held.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ONE, SEVERAL = "proof_steps", "proof_ranks"


def steps_of(module: str) -> dict[str, tuple[Any, int]]:
    """The steps of a module beside this one, by name: a function, and its seconds."""
    steps: dict[str, tuple[Any, int]] = importlib.import_module(module).STEPS
    return steps


def rows_of(module: str, name: str, small: bool) -> Iterator[dict[str, Any]]:
    """The rows of a step, in this process; an error in it is a row that did not hold."""
    step, _ = steps_of(module)[name]
    with warnings.catch_warnings():
        if small:
            warnings.simplefilter("ignore")
        try:
            yield from step(small)
        except Exception as error:
            words = " ".join(str(error).split())[-600:]
            yield {"what": "the step itself", "held": False, "failed": f"{type(error).__name__}: {words}"}


def run_step(
    module: str, name: str, small: bool, folder: Path, variables: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """The rows of a step, from a process that is ended at its limit; what else it says is in FOLDER/NAME.log.

    `variables` of its environment are set besides.
    """
    _, seconds = steps_of(module)[name]
    lines, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    lines.write_text("")
    command = [sys.executable, __file__, str(folder), "--step", module, name, *(["--dry-run"] if small else [])]
    environment = {**os.environ, **(variables or {}), "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    with log.open("w") as said:
        try:
            done = subprocess.run(command, stdout=said, stderr=said, timeout=seconds, env=environment, check=False)
            ended = None if done.returncode == 0 else f"ended with status {done.returncode}, see {log.name}"
        except subprocess.TimeoutExpired:
            ended = f"not done in {seconds} s, see {log.name}"
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines.read_text().splitlines()]
    return rows if ended is None else [*rows, {"what": "the step itself", "held": False, "failed": ended}]


def visible(gpus: int) -> dict[str, str]:
    """The variable by which a process sees the first `gpus` of the GPUs that this one sees."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = [str(n) for n in range(gpus)] if given is None else given.split(",")[:gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(numbers)}


def table(found: list[dict[str, Any]]) -> str:
    """All rows, a line each: the step, what was looked at, whether it held, and the figures."""
    lines = [("step", "what", "held", "figures")]
    for row in found:
        words = figures(row)
        lines.append((row["step"], row["what"], {True: "yes", False: "NO", None: "-"}[row["held"]], words))
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    return "\n".join(
        "  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[3]]).rstrip()
        for line in lines
    )


def figures(row: dict[str, Any]) -> str:
    """What a finding has beside its step, what was looked at and whether it held, in words."""
    given = {key: value for key, value in row.items() if key not in ("step", "what", "held")}
    cells = {key: f"{value:.3g}" if isinstance(value, float) else str(value) for key, value in given.items()}
    return ", ".join(f"{key.replace('_', ' ')} {cell}" for key, cell in cells.items())


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUTPUT_FOLDER")
    parser.add_argument("--gpus", type=int, default=1, help="with more than one, the steps on several follow")
    parser.add_argument("--dry-run", action="store_true", help="every step in small, on CPUs")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps alone")
    parser.add_argument("--step", nargs=2, metavar=("MODULE", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    folder, small = options.folder.resolve(), options.dry_run
    if options.step:
        module, name = options.step
        with (folder / f"{name}.jsonl").open("a") as lines:
            for row in rows_of(module, name, small):
                print(json.dumps(row), file=lines, flush=True)
        return 0
    if not small and not _has_gpu():
        print("error: there is no GPU here; --dry-run runs every step in small on CPUs.", file=sys.stderr)
        return 2
    names = [(module, name) for module in _modules(options) for name in steps_of(module)]
    known = {name for _, name in names}
    for name in options.only or ():
        if name not in known:
            print(f"error: --only {name}: no such step. Known: {', '.join(sorted(known))}.", file=sys.stderr)
            return 2
    found: list[dict[str, Any]] = []
    begin = time.monotonic()
    for module, name in names:
        if options.only and name not in options.only:
            continue
        started = time.monotonic()
        rows = run_step(module, name, small, folder, {} if small else visible(options.gpus))
        found += [{"step": name, **row} for row in rows]
        bad = sum(row["held"] is False for row in rows)
        report = f"{len(rows)} findings, {bad} did not hold" if bad else f"{len(rows)} findings"
        print(f"{name:16} {time.monotonic() - started:5.0f} s  {report}", flush=True)
        result = {"dry_run": small, "seconds": time.monotonic() - begin, "rows": found}
        (folder / "proof.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{table(found)}\n\n{folder / 'proof.json'}")
    return int(any(row["held"] is False for row in found))


def _modules(options: argparse.Namespace) -> list[str]:
    return [ONE, SEVERAL] if options.gpus > 1 or options.dry_run else [ONE]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    sys.exit(main())
