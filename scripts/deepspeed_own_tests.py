"""DeepSpeed's own tests of ALST (``tests/unit/ulysses_alst``), from a checkout, run three ways on CPU ranks.

    python scripts/deepspeed_own_tests.py CHECKOUT [ARGUMENTS FOR PYTEST]

First as they are, then with ``deepspeed_plugin`` imported, then with the ``upipe`` key in the ds_config of every
sequence-parallel engine they build; an engine they build without ``mpu`` is the one they compare it with, and stays
as it is. Prints a table, and exits with 1 if a test that passes the first way does not pass the others.

The checkout is only read. The hub's model that the tests load is replaced by a random one of the same name in the
folder they are run in, where Transformers looks first. Needs DeepSpeed, Transformers and pytest; use a checkout of the
installed DeepSpeed's version. DS_ACCELERATOR (default: cpu) is the device.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

HUB_MODEL = "hf-internal-testing/tiny-random-LlamaForCausalLM"
TESTS = Path("tests", "unit", "ulysses_alst")
RANKS = 2
# What Python runs when it starts: the tests start processes of their own, where nothing else would reach.
STARTUP = {
    "DeepSpeed alone": "",
    "plugin": "import upipe_autoload\nupipe_autoload.deepspeed()\n",
    "plugin and key": "import upipe_autoload, deepspeed_own_tests\nupipe_autoload.deepspeed()\n"
    "deepspeed_own_tests.add_key({log!r})\n",
}


def main(arguments: list[str]) -> int:
    """Run the tests three ways and print what came of it; returns the exit status."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        return 0 if set(arguments) & {"-h", "--help"} else 2
    checkout = Path(arguments[0]).resolve()
    if not (checkout / TESTS).is_dir():
        print(
            f"CHECKOUT = {arguments[0]}: has no {TESTS}, so it is no checkout of DeepSpeed. Clone "
            "https://github.com/deepspeedai/DeepSpeed and give its folder.",
            file=sys.stderr,
        )
        return 2
    outcomes: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / HUB_MODEL)
        for way, startup in STARTUP.items():
            outcomes[way] = run(way, startup, checkout, Path(folder), arguments[1:])
        log = Path(folder) / "engines"
        engines = len(log.read_text().splitlines()) if log.exists() else 0
    print("\n".join(table(outcomes)))
    print(f"\nProcesses' engines that trained with the key: {engines}")
    worse = regressions(outcomes)
    for line in worse:
        print(line, file=sys.stderr)
    return 1 if worse or not outcomes["DeepSpeed alone"] else 0


def make_model(folder: Path) -> None:
    """A random Llama of the hub's model's size, saved to `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def run(way: str, startup: str, checkout: Path, folder: Path, more: list[str]) -> dict[str, str]:
    """Outcome ("passes", or what went wrong) of every test, by name."""
    start = folder / way.replace(" ", "-")
    start.mkdir()
    (start / "sitecustomize.py").write_text(startup.format(log=str(folder / "engines")))
    here = Path(__file__).resolve()
    found_first = [start, here.parent, here.parents[1], checkout / "tests"]
    environment = {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(RANKS),  # a CPU counts as so many devices
        "OMP_NUM_THREADS": "1",
        "DS_UNITTEST_TIMEOUT": "300",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, found_first), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # an installed plugin would be there each way
        "HF_HUB_OFFLINE": "1",
    }
    report = start / "report.xml"
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(checkout / "tests")]
    words += ["--junitxml", str(report), str(checkout / TESTS), *more]
    print(f"{way}: {' '.join(words)}", flush=True)
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if not report.exists():
        print(done.stdout[-4000:] + done.stderr[-4000:], file=sys.stderr)
        return {}
    return dict(_outcome(case) for case in ElementTree.parse(report).iter("testcase"))


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    name = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
    for kind, verb in (("failure", "fails"), ("error", "fails"), ("skipped", "skipped")):
        reason = case.find(kind)
        if reason is not None:
            first = (reason.get("message") or "").strip().splitlines() or [""]
            return name, f"{verb}: {first[0][:120]}"
    return name, "passes"


def table(outcomes: dict[str, dict[str, str]]) -> list[str]:
    """Lines of a Markdown table, a row for each test."""
    names = sorted(set().union(*outcomes.values()))
    rows = [[f"`{name}`", *(by_test.get(name, "did not run") for by_test in outcomes.values())] for name in names]
    return [f"| {' | '.join(cells)} |" for cells in (["test", *outcomes], ["---"] * (len(outcomes) + 1), *rows)]


def regressions(outcomes: dict[str, dict[str, str]]) -> list[str]:
    """What passes the first way and does not another way."""
    (_, alone), *others = outcomes.items()
    return [
        f"{name} passes without the plugin; {way}: {by_test.get(name, 'did not run')}"
        for way, by_test in others
        for name, outcome in alone.items()
        if outcome == "passes" and by_test.get(name) != "passes"
    ]


def add_key(log: str) -> None:
    """Let ``deepspeed.initialize`` of this process add the key to sequence-parallel engines; count them in `log`."""
    import wrapt

    def wrap(module: Any) -> None:
        wrapt.wrap_function_wrapper(module, "initialize", functools.partial(initialize_with_key, log))

    wrapt.register_post_import_hook(wrap, "deepspeed")


def initialize_with_key(log: str, wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``deepspeed.initialize``, as the tests call it: by keyword."""
    mpu = kwargs.get("mpu")
    if mpu is None:
        return wrapped(*args, **kwargs)
    key = {"upipe": {"chunk_heads": mpu.get_sequence_parallel_world_size()}}
    result = wrapped(*args, **{**kwargs, "config": {**kwargs["config"], **key}})
    assert result[0].upipe is not None, "the key was there and UPipe is not on"
    with open(log, "a") as file:
        file.write(f"{result[0].upipe.summary}\n")
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
