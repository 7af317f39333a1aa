"""Runs train.py and reports every step before it is rounded; without a GPU, under the shim of this project's tests.

    python -m megatron_patch examples/megatron/on_cpu.py [ARGUMENTS OF MEGATRON] --report FILE

On a GPU neither is needed: run train.py.
"""

from __future__ import annotations

import argparse
import inspect
import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.megatron_cpu import use_cpu_for_training


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--report", type=Path, required=True)
    arguments, sys.argv[1:] = parser.parse_known_args()
    if not torch.cuda.is_available():
        use_cpu_for_training()
    _report_steps(arguments.report)
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")


def _report_steps(path: Path) -> None:
    """Have rank 0 append what Megatron logs of a step to the file at `path`, as JSON lines."""
    import torch.distributed as dist
    from megatron.training import training

    log, signature = training.training_log, inspect.signature(training.training_log)
    ended = time.perf_counter()

    def log_and_report(*args: Any, **kwargs: Any) -> Any:
        nonlocal ended
        began, ended = ended, time.perf_counter()
        step = signature.bind(*args, **kwargs).arguments
        if dist.get_rank() == 0:
            record = {
                "loss": float(step["loss_dict"]["lm loss"]),
                "grad_norm": float(step["grad_norm"]),
                "seconds": ended - began,
            }
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        return log(*args, **kwargs)

    training.training_log = log_and_report


if __name__ == "__main__":
    main()
