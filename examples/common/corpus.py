"""The text that the demos train on, which every machine has: the source of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

# Folders of tests, of what is installed beside the library, and of modules that are tables rather than text.
_LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "dist-packages", "encodings", "pydoc_data"}


def library_files() -> list[Path]:
    """The library's modules, in an order that is the same on every rank."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in library.rglob("*.py") if not _left_out(path.relative_to(library)))


def _left_out(path: Path) -> bool:
    # _sysconfigdata*.py is written when Python is built: tables again, and others on every machine.
    return bool(_LEFT_OUT.intersection(path.parts)) or path.name.startswith("_sysconfigdata")
