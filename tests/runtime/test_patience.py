"""What fails for an instant, and may pass: it is tried again, and nothing is lost or doubled."""

from __future__ import annotations

import errno
import logging
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.errors import PenstockError, RecordError, SourceError, StoreError
from penstock.runtime.patience import PATIENCE_S, Patience, may_pass
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sinks.append import AppendFile
from penstock.runtime.sinks.base import SinkContext
from penstock.runtime.sinks.call import Call
from penstock.runtime.sinks.files import Files
from penstock.runtime.sinks.places import LocalPlace, RawFile
from penstock.runtime.status import StallStatus


class Unavailable(Exception):
    """A library's own error, of a server that restarts."""


def locked(code: int = 5) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = code  # type: ignore[attr-defined]
    return error


def of(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionResetError("reset"), True),
        (TimeoutError("no answer"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), True),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), False),
        (locked(), True),
        (locked(5 | 2 << 8), True),
        (locked(1), False),  # no such table
        (sqlite3.IntegrityError("UNIQUE constraint failed"), False),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (ValueError("no number"), False),
        (KeyError("field"), False),
        (StoreError("full", may_pass=True), True),
        (StoreError("a bad URL"), False),
        (of(PenstockError("Files: cannot write"), OSError(errno.EIO, "Input/output error")), True),
        (of(RecordError("a record", operator="out", record="1", location=None), TimeoutError("of a function")), False),
        (of(SourceError("the input is gone"), OSError(errno.EIO, "Input/output error")), False),
    ],
)
def test_only_errors_that_may_pass_do(error: Exception, passes: bool) -> None:
    assert may_pass(error) == passes


def test_a_connector_names_errors_of_its_own() -> None:
    assert not may_pass(Unavailable())
    assert may_pass(Unavailable(), (Unavailable,))


class Waits:
    """A patience whose waits take no time, and that notes them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []
        self.patience = Patience(clock=lambda: self.now)
        self.patience._given_up.wait = self._wait  # type: ignore[method-assign, assignment]

    def _wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self.now += timeout
        return self.patience._given_up.is_set()


def failing(times: int, error: Exception) -> Callable[[], str]:
    left = [error] * times

    def step() -> str:
        if left:
            raise left.pop()
        return "done"

    return step


def test_the_waits_double_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    waits = Waits()
    with caplog.at_level(logging.WARNING):
        assert waits.patience.call("commit() of out[0]", failing(4, locked())) == "done"
    assert waits.waits == [0.05, 0.1, 0.2, 0.4]
    began, ended = caplog.messages
    assert began.startswith("commit() of out[0] has failed by an error that may pass, and is tried again for 60 s")
    assert "database is locked" in began
    assert ended == "commit() of out[0] is done, after it had failed for 0.8 s"
    assert waits.patience.told() == []


def test_after_the_limit_the_error_counts() -> None:
    waits = Waits()
    with pytest.raises(sqlite3.OperationalError, match="database is locked"):
        waits.patience.call("commit() of out[0]", failing(1_000_000, locked()))
    assert sum(waits.waits) == pytest.approx(PATIENCE_S)
    assert max(waits.waits) <= 5.0
    assert waits.patience.told() == []


def test_an_error_of_the_data_counts_at_once_also_after_others() -> None:
    waits = Waits()
    with pytest.raises(ValueError, match="no number"):
        waits.patience.call("write() of out[0]", failing(1, ValueError("no number")))
    assert waits.waits == []
    steps = iter([locked(), ValueError("no number")])

    def step() -> None:
        raise next(steps)

    with pytest.raises(ValueError, match="no number"):
        waits.patience.call("write() of out[0]", step)
    assert len(waits.waits) == 1


def test_the_status_tells_what_fails_and_for_how_long() -> None:
    waits = Waits()
    waits.patience.failed("read() of rows[0]", ConnectionResetError("reset by peer"))
    waits.now += 2.0
    assert waits.patience.told() == [StallStatus("read() of rows[0]", 2.0, 60.0, "ConnectionResetError: reset by peer")]


def test_the_status_tells_of_a_step_that_takes_long_and_of_one_of_a_part() -> None:
    waits = Waits()
    part = waits.patience.part(5.0)

    def long() -> list[StallStatus]:
        assert waits.patience.told() == []
        waits.now += 2.0
        return waits.patience.told()

    assert part.watched("commit() of out[0]", long) == [StallStatus("commit() of out[0]", 2.0)]
    assert waits.patience.told() == []
    part.failed("commit() of out[0]", ConnectionResetError("reset by peer"))
    assert [stall.limit_s for stall in waits.patience.told()] == [5.0]


def test_a_part_is_given_up_with_the_worker_or_alone() -> None:
    patience = Patience()
    alone, other = patience.part(), patience.part()
    alone.give_up()
    with pytest.raises(TimeoutError):
        alone.call("commit() of out[0]", failing(1_000, TimeoutError("no answer")))
    assert other.call("commit() of out[1]", failing(1, TimeoutError("no answer"))) == "done"
    patience.give_up()
    for part in (other, patience.part()):
        with pytest.raises(TimeoutError):
            part.call("commit() of out[1]", failing(1_000, TimeoutError("no answer")))


def test_a_worker_that_ends_waits_no_longer() -> None:
    patience = Patience()
    patience.give_up()
    with pytest.raises(TimeoutError):
        patience.call("commit() of out[0]", failing(1_000, TimeoutError("no answer")))


@pytest.mark.parametrize("batches", [False, True])
def test_an_idempotent_function_is_called_again_and_another_one_is_not(batches: bool) -> None:
    calls: list[Any] = []
    failures = [TimeoutError("no answer"), TimeoutError("no answer")]

    def put(given: Any) -> None:
        calls.append(given)
        if failures and given in (2, [1, 2, 3]):
            raise failures.pop()

    waits = Waits()
    context = SinkContext("out", 0, 1, errors=ErrorHandler("out"), patience=waits.patience)
    writer = Call(put, batches=batches, idempotent=True).writer(context)
    writer.write([1, 2, 3])
    assert calls == ([[1, 2, 3]] * 3 if batches else [1, 2, 2, 2, 3])
    failures += [TimeoutError("no answer")]
    with pytest.raises(RecordError, match="no answer"):
        Call(put, batches=batches).writer(context).write([1, 2, 3])


class Flaky(LocalPlace):
    """The file system of this machine, whose files fail now and then after some of the bytes."""

    def __init__(self) -> None:
        self.failures = 3

    def create(self, path: str, exclusive: bool) -> RawFile:
        file = super().create(path, exclusive)
        write = file.write

        def sometimes(data: Any, /) -> Any:
            if self.failures and len(data) < 8:
                self.failures -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(data[:4])  # the system may take less than it is given

        file.write = sometimes  # type: ignore[method-assign]
        return file


def test_a_file_continues_after_the_bytes_that_the_system_has_taken(tmp_path: Path) -> None:
    place, waits = Flaky(), Waits()
    file = AppendFile(
        str(tmp_path / "out"),
        compress=False,
        place=place,
        patiently=lambda step: waits.patience.call("writing of out[0]", step),
    )
    file.append(b"0123456789")
    file.flush()
    file.sync()
    assert (tmp_path / "out").read_bytes() == b"0123456789"
    assert place.failures == 0
    assert len(waits.waits) == 3


def test_files_write_with_the_patience_of_their_worker(tmp_path: Path) -> None:
    waits = Waits()
    context = SinkContext("out", 0, 1, patience=waits.patience)
    place = Flaky()
    part = Files(tmp_path).open_part(str(tmp_path / "part"), context, place=place)
    part.append(b"0123456789")
    part.flush()
    part.close()
    assert (tmp_path / "part").read_bytes() == b"0123456789"
    assert len(waits.waits) == 3
