"""Strangers are told, but not so often that they fill the log."""

from __future__ import annotations

import pytest

from penstock.runtime.transport import strangers


def test_a_machine_is_told_once_in_a_while_and_so_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(strangers.time, "monotonic", lambda: now)
    told = strangers.Told()
    assert [told.may_tell("first"), told.may_tell("first")] == [True, False]
    others = [told.may_tell(str(i)) for i in range(2 * strangers._TOLD_MAX)]
    assert sum(others) == strangers._TOLD_MAX - 1
    now = strangers._TOLD_S
    assert told.may_tell("first")
    assert told.may_tell("another, in the place of those that are forgotten")
