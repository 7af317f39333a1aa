"""Reading configs/megatron/*.args: a command line's arguments with comments."""

from __future__ import annotations

import shlex
from pathlib import Path


def read_arguments(file: Path) -> list[str]:
    """The arguments in a file, as ``$(grep -v '^#' FILE)`` gives them to a command."""
    return [word for line in file.read_text().splitlines() if not line.startswith("#") for word in shlex.split(line)]
