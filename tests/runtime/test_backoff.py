"""The waits between tries: they double, have a limit, and start anew after a success."""

from __future__ import annotations

import pytest

from penstock.runtime.backoff import Backoff


def test_waits_double_up_to_the_limit_and_start_anew_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.failed() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.succeeded()
    assert [backoff.failed() for _ in range(2)] == [0.5, 1.0]


def test_free_failures_need_no_wait() -> None:
    backoff = Backoff(0.5, 3.0, free=2)
    for _ in range(2):
        assert [backoff.failed() for _ in range(4)] == [0.0, 0.0, 0.5, 1.0]
        backoff.succeeded()


@pytest.mark.parametrize(("first_s", "wait"), [(0.1, 5.0), (0.0, 0.0)])
def test_failures_without_end_wait_as_long_as_the_limit_says(first_s: float, wait: float) -> None:
    backoff = Backoff(first_s, 5.0)
    assert {backoff.failed() for _ in range(5_000)} >= {wait}
    assert backoff.failed() == wait
