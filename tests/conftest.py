"""A run of the tests fails where it leaves a process behind."""

from __future__ import annotations

import os
import signal
import uuid
from contextlib import suppress

import pytest

from tests.processes import MARK, left

_RUN = uuid.uuid4().hex


def pytest_configure() -> None:
    os.environ[MARK] = _RUN


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if getattr(session.config.option, "dist", "no") != "no":  # its workers, which look for themselves
        return
    for process, words in left(_RUN, seconds=10).items():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\nERROR: a test left process {process} behind: {words}", red=True)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
