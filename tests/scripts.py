"""Running a script's ``main`` in this process: no interpreter starts, and nothing is imported a second time."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock


class Ran(NamedTuple):
    """What a script left, as a shell would have it."""

    returncode: int
    stdout: str
    stderr: str


def run_script(script: Path, *arguments: str) -> Ran:
    """``python SCRIPT ARGUMENTS``, as a module that is imported once: its ``main()`` is called."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    path, argv = [str(script.parent), *sys.path], [str(script), *arguments]
    with mock.patch.object(sys, "path", path), mock.patch.object(sys, "argv", argv):
        module = importlib.import_module(script.stem)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                module.main()
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
                if isinstance(stop.code, str):
                    print(stop.code, file=sys.stderr)
    return Ran(status, out.getvalue(), err.getvalue())
