"""docs/options.md is made of the code's own definitions: ``UPIPE_WRITE_DOCS=1 pytest tests/test_options_page.py``."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_patch.arguments import add_arguments
from megatron_patch.options import IMPL, PREFIX, RULES, flag
from upipe_integrations import Mode, UPipeConfig
from upipe_integrations.commands import main as cli
from upipe_integrations.config import KERNEL_NAMES
from upipe_integrations.mode import ACCUMULATE, MEMORY

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "options.md"

HEAD = """# Every option

Written by `UPIPE_WRITE_DOCS=1 pytest tests/test_options_page.py` from the definitions that the code itself parses and
validates; the same test fails when this page is not true.

"""
DS_CONFIG = """## ds_config

The block `upipe` of a ds_config, beside `sequence_parallel_size`. Nothing else turns UPipe on, and without the block
nothing changes. A key or a value that is not here is an error that names the closest known one.

"""
MEGATRON = """## Megatron

Arguments that are added to Megatron's own. Under `--yaml-cfg` they are keys of `model_parallel`, with underscores. A
default that is not named here is that of the key above.

"""
REFUSED = """### Settings of Megatron that UPipe refuses

With `--context-parallel-impl upipe`, before any process group is built. [UPipe in Megatron](megatron.md) says more.

"""
COMMAND = """## The upipe command

Exit status 2 and one line for wrong input, on every subcommand.

"""
ENVIRONMENT = """## Environment variables

UPipe is configured by none. These of other projects are read:

"""
VARIABLES = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "PyTorch's: `0` keeps its entry points from being loaded, and a configuration key "
    "or argument alone turns UPipe on no more. Import `deepspeed_plugin`, or start with `python -m megatron_patch`. "
    "`upipe info` says which it is",
    "HF_HUB_CACHE": "Hugging Face's: where `upipe plan` finds downloaded models by name",
    "HF_HOME": "the same, one folder up",
    "XDG_CACHE_HOME": "the same, two folders up",
}
_VALUES = {"kernel": ("auto", *KERNEL_NAMES), "memory": MEMORY, "accumulate": ACCUMULATE}


def _described(owner: Any) -> dict[str, str]:
    """Names under ``Args:`` in the docstring of `owner`, and what it says of each."""
    (block,) = re.findall(r"^Args:\n((?:    .*\n|\n)+)", inspect.cleandoc(owner.__doc__) + "\n", re.MULTILINE)
    entries = re.findall(r"^    (\w+): (.*\n(?:     +.*\n)*)", block, re.MULTILINE)
    return {
        name: " ".join(re.sub(r":\w+:|``", lambda m: "`" if m[0] == "``" else "", text).split())
        for name, text in entries
    }


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in cells) + "\n"


def _code(values: Any) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _ds_config() -> Iterator[tuple[str, ...]]:
    meaning = _described(UPipeConfig)
    for field in dataclasses.fields(UPipeConfig):
        kinds = {"int": "a positive integer", "bool | str": '`true`, `false`, `"both"`'}
        kind = kinds.get(field.type, "")
        values = _code(f'"{value}"' for value in _VALUES[field.name]) if field.name in _VALUES else kind
        default = "required" if field.default is dataclasses.MISSING else f"`{json.dumps(field.default)}`"
        yield f"`{field.name}`", values, default, meaning[field.name]


def _megatron() -> Iterator[tuple[str, ...]]:
    for action in add_arguments(argparse.ArgumentParser(add_help=False))._actions:
        own = {IMPL: "`native`", f"{PREFIX}chunk_heads": "`auto`"}
        default = own.get(action.dest) or f"`{getattr(UPipeConfig(1), action.dest.removeprefix(PREFIX))}`"
        yield (
            f"`{action.option_strings[0]}`",
            _takes(action),
            "off" if action.nargs in (0, "?") else default,
            action.help,
        )


def _refused() -> Iterator[tuple[str, ...]]:
    for rule in RULES:
        remedy = rule.remedy.format(flag=flag(rule.names[0]), impl=flag(IMPL))
        yield _code(map(flag, rule.names)), rule.reason, remedy


def _takes(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "a switch"
    if action.nargs == "?":
        return f"a switch, or {_code(action.choices)}"
    if action.choices is not None:
        return _code(action.choices)
    return f"`{action.metavar}`" if action.metavar else "a value"


def _commands() -> Iterator[str]:
    (commands,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in commands.choices.items():
        yield f"### upipe {name}\n\n{parser.description}\n\n"
        for group in parser._action_groups:
            shown = [a for a in group._group_actions if not isinstance(a, argparse._HelpAction)]
            if shown:
                title = "" if group.title in ("options", "positional arguments") else f"**{group.title}**\n\n"
                yield title + _table(("option", "takes", "meaning"), map(_cli_row, shown))


def _cli_row(action: argparse.Action) -> tuple[str, ...]:
    name = _code(action.option_strings) if action.option_strings else f"`{action.metavar}`"
    text = action.help % {"default": f"`{action.default}`"}
    if action.required and action.option_strings:
        text += " (required)"
    return name, "" if not action.option_strings else _takes(action), text


def _page() -> str:
    columns = ("", "values", "default", "meaning")
    modes = _described(Mode) | _described(Mode.named)
    return "".join(
        (
            HEAD,
            DS_CONFIG,
            _table(("key", *columns[1:]), _ds_config()),
            f"**memory**: {modes['memory']}\n\n**accumulate**: {modes['accumulate']}\n\n",
            MEGATRON,
            _table(("argument", *columns[1:]), _megatron()),
            REFUSED,
            _table(("setting", "why", "instead"), _refused()),
            COMMAND,
            *_commands(),
            ENVIRONMENT,
            _table(("variable", "meaning"), ((f"`{name}`", text) for name, text in VARIABLES.items())),
            "Those that a launcher sets for every rank (`RANK`, `WORLD_SIZE`, ...) are read by PyTorch and the host.\n",
        )
    )


def test_the_page_is_what_the_code_defines():
    page = _page()
    if os.environ.get("UPIPE_WRITE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, (
        "run UPIPE_WRITE_DOCS=1 pytest tests/test_options_page.py and commit docs/options.md"
    )


def test_every_key_and_value_is_described():
    meaning, modes = _described(UPipeConfig), _described(Mode) | _described(Mode.named)
    assert all(meaning[field.name] for field in dataclasses.fields(UPipeConfig))
    assert all(f'"{mode}"' in modes["memory"] for mode in MEMORY)
    assert all(f'"{sums}"' in modes["accumulate"] for sums in ACCUMULATE)


def _variables_read(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
            yield node.args[0].value
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            yield node.slice.value


def test_every_variable_that_is_read_is_listed():
    files = [
        f
        for package in ("upipe_integrations", "deepspeed_plugin", "megatron_patch")
        for f in (ROOT / package).rglob("*.py")
    ]
    found = {name for file in [*files, ROOT / "upipe_autoload.py"] for name in _variables_read(file)}
    assert found == set(VARIABLES)


@pytest.mark.parametrize("words", [["plan"], ["check"], ["bench"], ["info"]])
def test_every_option_of_the_command_is_on_the_page(words, capsys):
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    options = set(re.findall(r"^ +(?:-\w, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}
    section = re.search(rf"^### upipe {words[0]}\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    assert options == set(re.findall(r"^\| `(--[\w-]+)`", section, re.MULTILINE))
