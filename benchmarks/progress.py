"""Progress on stderr: one line that is written over in a terminal, and nothing where stderr is a file or a pipe."""

from __future__ import annotations

import sys


def report(done: int, total: int, text: str = "") -> None:
    """Say how far a run is; the last one ends the line."""
    if not sys.stderr.isatty():
        return
    bar = "#" * round(30 * done / max(total, 1))
    end = "\n" if done == total else ""
    print(f"\r[{bar:<30}] {done}/{total} {text:<40}", end=end, file=sys.stderr, flush=True)
