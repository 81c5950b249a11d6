"""Functions that other threads let a loop's thread call: each is called once, or refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from penstock.runtime.calls import Calls
from penstock.runtime.errors import PenstockError

LIMIT_S = 60.0


def calls(wake: Callable[[], None] = lambda: None) -> Calls:
    return Calls(wake, lambda: PenstockError("it has ended"))


def test_what_functions_return_or_raise_belongs_to_who_asked() -> None:
    woken: list[str] = []
    asked = calls(lambda: woken.append("woken"))
    answers = [asked.ask(lambda: 1), asked.ask(lambda: {}["a"]), asked.ask(lambda: exit(3))]  # type: ignore[func-returns-value]
    assert len(woken) == len(asked.waiting) == 3
    asked.carry_out()
    assert answers[0].result(LIMIT_S) == 1
    assert isinstance(answers[1].exception(LIMIT_S), KeyError)
    assert isinstance(answers[2].exception(LIMIT_S), SystemExit)
    assert not asked.waiting


def test_after_the_end_everything_is_refused() -> None:
    asked = calls()
    before = asked.ask(lambda: 1)
    asked.end()
    for answer in (before, asked.ask(lambda: 1)):
        with pytest.raises(PenstockError, match="it has ended"):
            answer.result(LIMIT_S)


def test_who_asks_while_the_loop_ends_does_not_wait_for_ever() -> None:
    """The loop has looked for the last time, and the function comes before the loop says that it has ended."""

    def end() -> None:
        asked.end()

    asked = calls(end)
    with pytest.raises(PenstockError, match="it has ended"):
        asked.ask(lambda: 1).result(LIMIT_S)


def test_many_threads() -> None:
    asked = calls()
    done: list[int] = []
    answers: list[list[Future[None]]] = [[] for _ in range(4)]

    def ask(mine: list[Future[None]]) -> None:
        mine.extend(asked.ask(lambda: done.append(1)) for _ in range(500))

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in answers]
    for thread in threads:
        thread.start()
    while len(done) < 300:
        asked.carry_out()
    asked.end()
    for thread in threads:
        thread.join(LIMIT_S)
    refused = sum(answer.exception(LIMIT_S) is not None for mine in answers for answer in mine)
    assert len(done) + refused == 2000
