"""docs/faults.md: every kind of fault has tests, and they are there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).parent
ROW = re.compile(r"\| (\d+) \| .+ \| (`.+`) \|")


def test_every_fault_has_tests_that_exist():
    rows = [ROW.fullmatch(line) for line in (TESTS.parent / "docs" / "faults.md").read_text().splitlines()]
    named = {int(row[1]): row[2] for row in rows if row}
    assert list(named) == list(range(1, 47))
    for number, names in named.items():
        for name in names.split(", "):
            file, function = name.strip("`").split("::")
            assert function in _functions(file), f"fault {number}: {name}"


@functools.cache
def _functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / f"{file}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
