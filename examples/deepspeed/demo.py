"""One small model trained three ways from one seed: single process, Ulysses, UPipe. The results must agree.

Trains a byte-level Llama on the source of Python's standard library with DeepSpeed: in one process, and on
the CPU ranks of the configuration's sequence-parallel group with Ulysses (ALST) and with UPipe. Compares
losses and gradient norms of the first steps, and attention memory per rank. The training script is train.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from examples.common.progress import collect, progress_bars
from examples.common.runs import follow
from examples.deepspeed.results import RunResult, compare, draw, table, verdict, write_results

_DEFAULT_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "deepspeed" / "demo.json"


def run_configs(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The ds_config of each run, by name. The ``upipe`` key is all that UPipe and Ulysses differ in.

    Raises:
        ValueError: `config` has no ``upipe`` key, or no sequence-parallel group of at least two ranks.
    """
    ranks = config.get("sequence_parallel_size")
    if "upipe" not in config or not isinstance(ranks, int) or ranks < 2:
        raise ValueError(
            f"sequence_parallel_size = {ranks!r}, upipe = {config.get('upipe')!r}: the demo compares runs with and "
            "without UPipe, so its configuration needs both keys, with at least 2 ranks."
        )
    upipe = dict(config)
    ulysses = {key: value for key, value in upipe.items() if key != "upipe"}
    single = {key: value for key, value in ulysses.items() if key != "sequence_parallel_size"}
    return {"single process": single, "Ulysses": ulysses, "UPipe": upipe}


def run(
    name: str, ds_config: Mapping[str, Any], arguments: argparse.Namespace, *, cores: int, progress: Progress
) -> RunResult:
    """Train once, with a bar in `progress`; every run has the same number of cores to itself."""
    slug = name.lower().replace(" ", "-")
    config_file = arguments.output_dir / f"{slug}-config.json"
    config_file.write_text(json.dumps(ds_config, indent=2) + "\n")
    ranks = ds_config.get("sequence_parallel_size", 1)
    options = {
        "--config": config_file,
        "--steps": arguments.steps,
        "--seq-len": arguments.seq_len,
        "--seed": arguments.seed,
    }

    records = follow(
        ["-m", "examples.deepspeed.train", *(str(part) for option in options.items() for part in option)],
        name=slug,
        ranks=ranks,
        threads=cores // ranks,
        output_dir=arguments.output_dir,
        environment={"DS_ACCELERATOR": "cpu"},
    )
    figures, facts = collect(records, progress, name=name, steps=arguments.steps, tokens=arguments.seq_len)
    return RunResult(name=name, ranks=ranks, **figures, **facts)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit code: 0 if the runs agree, 1 if they do not or one of them failed, 2 for bad arguments.",
    )
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run (default: %(default)s)")
    parser.add_argument(
        "--seq-len", type=int, default=4096, help="tokens per sequence, one sequence per step (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    parser.add_argument(
        "--config",
        type=Path,
        default=_DEFAULT_CONFIG,
        help="DeepSpeed configuration of the UPipe run (default: %(default)s)",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("demo-output"),
        help="for demo.png, demo.json and logs (default: %(default)s)",
    )
    return parser.parse_args()


def check_arguments(steps: int, seq_len: int, ranks: int) -> None:
    """Raise ValueError for what no run could be started with."""
    if steps < 2:
        raise ValueError(f"--steps {steps}: must be at least 2, as the first step is not timed.")
    if steps % ranks:
        raise ValueError(f"--steps {steps}: must be a multiple of the {ranks} ranks, which load as many batches each.")
    if seq_len < ranks or seq_len % ranks:
        raise ValueError(
            f"--seq-len {seq_len}: must be a positive multiple of the {ranks} ranks that share a sequence."
        )


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    try:
        config = json.loads(arguments.config.read_text())
        configs = run_configs(config)
        cores = config["sequence_parallel_size"]
        check_arguments(arguments.steps, arguments.seq_len, cores)
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    console.print(
        f"Training on {cores} CPU cores; what the runs print goes to {arguments.output_dir}/*.log", highlight=False
    )
    with progress_bars(console) as progress:
        runs = [run(name, each, arguments, cores=cores, progress=progress) for name, each in configs.items()]

    differences = compare(runs)
    console.print(table(runs, differences))
    packages = ("torch", "deepspeed", "transformers")
    settings = {
        "steps": arguments.steps,
        "seq_len": arguments.seq_len,
        "seed": arguments.seed,
        "cores": cores,
        "config": config,
        "versions": {"python": platform.python_version(), **{package: version(package) for package in packages}},
    }
    write_results(arguments.output_dir / "demo.json", settings, runs, differences)
    draw(arguments.output_dir / "demo.png", runs)
    console.print(
        f"Figure and figures: {arguments.output_dir}/demo.png, {arguments.output_dir}/demo.json", highlight=False
    )
    complaint = verdict(differences)
    if complaint:
        print(complaint, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
