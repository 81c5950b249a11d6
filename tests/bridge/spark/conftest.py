"""The one PySpark session of this folder's tests: a session takes ten seconds to start, and a process has only one."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.bridge.session import Session, SparkOptions, open_session

_HERE = Path(__file__).parent
_open = ExitStack()  # holds the session until the folder's last test has run
_sessions: list[Session] = []


@pytest.fixture
def session() -> Session:
    """A PySpark session with two cores, the same for all tests of the folder."""
    pytest.importorskip("pyspark", reason="PySpark is not installed")
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        pytest.skip("there is no Java here")
    if not _sessions:
        _sessions.append(_open.enter_context(open_session(SparkOptions(kind="pyspark", cores=2))))
    return _sessions[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the session behind the folder's last test: other folders start sessions of their own."""
    if nextitem is None or _HERE not in nextitem.path.parents:
        _sessions.clear()
        _open.close()
