"""One small GPT pretrained by Megatron two ways: its own attention on one rank, UPipe on two. Both must print the same.

Trains on the source of Python's standard library with ``megatron.training.pretrain``, on CPUs: in one process without
context parallelism, and on two ranks with UPipe, which nothing but Megatron's command line turns on. Compares the
losses and gradient norms that Megatron prints. The training script is train.py, which on_cpu.py runs without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import Version
from rich.console import Console
from rich.progress import Progress

from examples.common.progress import collect, progress_bars
from examples.common.runs import follow, log_of
from examples.megatron.arguments import read_arguments
from examples.megatron.dataset import build
from examples.megatron.results import RunResult, disagreement, draw, printed, table, write_results

_ARGUMENTS = Path(__file__).resolve().parents[2] / "configs" / "megatron" / "demo.args"
RANKS = 2

_ENVIRONMENT = {
    # What is compiled differs by shape, and so by the number of ranks.
    "TORCHDYNAMO_DISABLE": "1",
    # Megatron asks for it with context parallelism, for the sake of GPUs.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Keeps the hooks of an installed plugin out of the run without it.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "PYTHONWARNINGS": "ignore",
}


def missing() -> str | None:
    """What this Python lacks for the demo, as a sentence; or None."""
    if importlib.util.find_spec("megatron") is None:
        return "megatron-core is not installed. pip install 'upipe-integrations[megatron]'"
    release, python = version("megatron-core"), platform.python_version()
    if importlib.util.find_spec("megatron.training") is None:
        return (
            f"megatron-core {release} on Python {python} has no megatron.training, which comes with 0.17 and newer. "
            "Install megatron-core 0.19 on Python 3.12: PYTHON=python3.12 make setup"
        )
    if Version(release) < Version("0.19"):
        return f"megatron-core {release}: the demo's script is written for 0.19. pip install 'megatron-core>=0.19'"
    return None


def run(name: str, upipe: list[str], shared: list[str], arguments: argparse.Namespace, progress: Progress) -> RunResult:
    """Train once, with a bar in `progress`; every rank has one core.

    Args:
        name: of the run.
        upipe: Megatron's arguments that turn UPipe on; without any it is Megatron alone on one rank.
        shared: its other arguments.
        arguments: of the demo.
        progress: the bars.
    """
    slug = name.lower().replace(" ", "-")
    ranks = RANKS if upipe else 1
    launcher = ["-m", "megatron_patch"] if upipe else []
    records = follow(
        [*launcher, str(Path(__file__).with_name("on_cpu.py")), *shared, *upipe],
        name=slug,
        ranks=ranks,
        threads=1,
        output_dir=arguments.output_dir,
        environment=_ENVIRONMENT,
    )
    tokens = arguments.seq_len * int(shared[shared.index("--global-batch-size") + 1])
    figures, facts = collect(records, progress, name=name, steps=arguments.steps, tokens=tokens)
    first, *_, last = (log_of(slug, rank, arguments.output_dir).read_text() for rank in (0, *range(ranks)))
    said = next((line for line in first.splitlines() if line.startswith("upipe:")), None)
    if said:
        progress.console.print(said, style="dim", highlight=False)
    return RunResult(name=name, ranks=ranks, upipe=said, **figures, **facts, **printed(last))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit code: 0 if the runs agree, 1 if they do not or one of them failed, 2 for bad arguments or for a "
        "package that is missing.",
    )
    parser.add_argument("--steps", type=int, default=30, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    parser.add_argument(
        "--chunk-heads", type=int, default=4, help="query heads per stage, of 16 (default: %(default)s)"
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("demo-output") / "megatron",
        help="for demo.png, demo.json and logs (default: %(default)s)",
    )
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise ValueError for what no run could be started with."""
    if arguments.steps < 2:
        raise ValueError(f"--steps {arguments.steps}: must be at least 2, as the first step is not timed.")
    if arguments.seq_len < 1 or arguments.seq_len % (2 * RANKS):
        raise ValueError(
            f"--seq-len {arguments.seq_len}: must be a positive multiple of {2 * RANKS}, as Megatron gives each of the "
            f"{RANKS} ranks two pieces of a sequence."
        )


def given(arguments: argparse.Namespace, data: Path) -> list[str]:
    """Megatron's arguments that the demo's own stand for, and those of its data set in the folder `data`."""
    options = {
        "--data-path": data / "text",
        "--data-cache-path": data / "cache",
        "--train-iters": arguments.steps,
        "--seed": arguments.seed + 1,  # Megatron wants it positive
        "--seq-length": arguments.seq_len,
        "--max-position-embeddings": arguments.seq_len,
    }
    return [str(part) for option in options.items() for part in option]


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    lacking = missing()
    if lacking:
        print(f"error: {lacking}", file=sys.stderr)
        sys.exit(2)
    try:
        check_arguments(arguments)
        arguments.output_dir = arguments.output_dir.resolve()
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

    console.print(
        f"Training on {RANKS} CPU cores, one a rank; what the runs print goes to {arguments.output_dir}/*.log",
        highlight=False,
    )
    upipe = ["--context-parallel-size", str(RANKS), "--context-parallel-impl", "upipe"]
    upipe += ["--upipe-chunk-heads", str(arguments.chunk_heads)]
    with TemporaryDirectory() as data:
        shared = [*read_arguments(_ARGUMENTS), *given(arguments, Path(data))]
        count = build(Path(data) / "text")
        console.print(f"{count:,} bytes of Python's standard library, as a data set of Megatron", highlight=False)
        with progress_bars(console) as progress:
            alone = run("Megatron alone", [], shared, arguments, progress)
            with_upipe = run("UPipe", upipe, shared, arguments, progress)

    console.print(table(alone, with_upipe))
    settings = {
        "arguments": shared,
        "upipe": upipe,
        "versions": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "megatron-core": version("megatron-core"),
        },
    }
    write_results(arguments.output_dir / "demo.json", settings, alone, with_upipe)
    draw(arguments.output_dir / "demo.png", alone, with_upipe)
    console.print(
        f"Figure and figures: {arguments.output_dir}/demo.png, {arguments.output_dir}/demo.json", highlight=False
    )
    complaint = disagreement(alone, with_upipe)
    if complaint:
        print(complaint, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
