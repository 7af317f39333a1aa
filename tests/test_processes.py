"""A process that a test leaves behind is found, and fails the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.processes import MARK, left

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")

ORPHAN = """
import subprocess, sys
null = subprocess.DEVNULL
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=null, stderr=null).pid)
"""


def _orphan(run: str) -> int:
    """A process that sleeps, of a parent that has ended."""
    started = subprocess.run([sys.executable, "-c", ORPHAN], env={**os.environ, MARK: run}, capture_output=True)
    return int(started.stdout)


def test_an_orphan_is_found_until_it_ends():
    run = uuid.uuid4().hex
    process = _orphan(run)
    try:
        assert left(run).keys() == {process} and "time.sleep(600)" in left(run)[process]
        assert left(uuid.uuid4().hex) == {}
    finally:
        os.kill(process, signal.SIGKILL)
    assert left(run, seconds=10) == {}


def test_a_run_that_leaves_one_fails(tmp_path):
    root = Path(__file__).parents[1]
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure, pytest_sessionfinish\n")
    (tmp_path / "test_it.py").write_text(
        "import subprocess, sys\n\ndef test_leaves_one():\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    run = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, cwd=root)
    assert run.returncode == 1, run.stdout
    assert "1 passed" in run.stdout and "left process" in run.stdout and "time.sleep(600)" in run.stdout
