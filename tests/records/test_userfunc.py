"""User functions over whole lists: no record is lost silently, and the culprit and its line are right."""

from __future__ import annotations

import json
import pickle
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.errors import FlowError, RecordError, describe, shorten
from penstock.runtime.records.userfunc import (
    POLICIES,
    DeadLetter,
    ErrorHandler,
    OnError,
    apply,
    check_function,
    consume,
    returns_nothing,
    select,
    user_line,
)

# What a user's function does with a record: returns, raises an error, or raises what map() takes for the end.
fates = st.lists(st.sampled_from(("ok", "error", "stop")), max_size=12)


def obey(record: tuple[int, str]) -> int:
    number, fate = record
    if fate == "error":
        raise ValueError(number)
    if fate == "stop":
        raise StopIteration
    return number


def handler(policy: OnError) -> ErrorHandler:
    return ErrorHandler("op", policy, "flow.py:1", [] if policy == "dead_letter" else None)


@given(fates, st.sampled_from((map, filter)))
def test_apply_lets_go_of_exactly_the_records_that_fail(what: list[str], loop: Any) -> None:
    records = list(enumerate(what, 1))
    errors = handler("dead_letter")
    out = apply(partial(loop, obey), records, errors)
    good = [record for record in records if record[1] == "ok"]
    assert out == ([number for number, _ in good] if loop is map else good)
    assert errors.dead_letters is not None
    assert [letter.record for letter in errors.dead_letters] == [record for record in records if record[1] != "ok"]
    assert errors.skipped == len(records) - len(good)


@given(fates)
def test_select_keeps_records_and_results_parallel(what: list[str]) -> None:
    records = list(enumerate(what, 1))
    errors = handler("skip")
    kept, out = select(obey, records, errors)
    assert [number for number, _ in kept] == out == [number for number, fate in records if fate == "ok"]
    assert errors.skipped == len(records) - len(kept)


@given(fates)
def test_consume_tells_the_indices_of_failures(what: list[str]) -> None:
    done: list[int] = []
    failed = consume(lambda it: done.extend(map(obey, it)), list(enumerate(what)), handler("skip"))
    assert failed == [i for i, fate in enumerate(what) if fate != "ok"]


@given(fates)
def test_fail_names_the_first_culprit(what: list[str]) -> None:
    records = list(enumerate(what))
    bad = [record for record in records if record[1] != "ok"]
    if not bad:
        assert apply(partial(map, obey), records, handler("fail")) == [number for number, _ in records]
        return
    with pytest.raises(RecordError) as caught:
        apply(partial(map, obey), records, handler("fail"))
    assert caught.value.record == repr(bad[0])
    assert caught.value.operator == "op"


def test_a_stop_iteration_for_the_only_record_is_an_error() -> None:
    with pytest.raises(RecordError, match="StopIteration"):
        apply(partial(map, obey), [(1, "stop")], handler("fail"))


def _line_of(fn: Any, record: Any) -> str | None:
    try:
        fn(record)
    except Exception as error:
        return user_line(error)
    raise AssertionError("should have raised")


def parse(text: str) -> Any:
    return json.loads(text)


def nested(text: str) -> Any:
    return parse(text)


class Accident(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def crash(record: Any) -> Any:
    raise Accident


def test_the_location_is_the_users_deepest_line() -> None:
    first = parse.__code__.co_firstlineno
    line = _line_of(nested, "{")
    assert line is not None
    assert line.startswith(f"{__file__}:{first + 1} in parse")
    assert "json.loads(text)" in line


def test_the_location_of_a_lambda_is_its_line() -> None:
    fail = lambda record: record["x"]
    line = _line_of(fail, {})
    assert line is not None
    assert line.startswith(f"{__file__}:{fail.__code__.co_firstlineno} in <lambda>")


def test_a_callback_called_by_a_library_is_the_users_line() -> None:
    line = _line_of(lambda record: json.dumps(record, default=lambda value: value.missing), object())
    assert line is not None
    assert line.startswith(__file__)
    assert "value.missing" in line


def test_a_builtin_has_no_line_so_the_declaration_stands_for_it() -> None:
    with pytest.raises(RecordError, match=r"operator declared at flow\.py:1") as caught:
        apply(partial(map, int), ["1", "x"], handler("fail"))
    assert caught.value.record == "'x'"
    assert caught.value.location == "flow.py:1"


def test_a_library_function_given_directly_is_located_in_the_library() -> None:
    with pytest.raises(RecordError) as caught:
        apply(partial(map, json.loads), ["1", "{"], handler("fail"))
    assert caught.value.location is not None
    assert "json" in caught.value.location


def test_the_message_has_operator_record_line_and_remedy() -> None:
    with pytest.raises(RecordError) as caught:
        apply(partial(map, parse), ["1", "{" * 10_000], handler("fail"))
    message = str(caught.value)
    for part in ("operator 'op' failed: JSONDecodeError", "(10,002 characters)", "in parse", "on_error='skip'"):
        assert part in message
    assert len(message) < 2000


@pytest.mark.parametrize("policy", POLICIES)
def test_an_error_that_cannot_be_printed_is_handled_all_the_same(policy: OnError) -> None:
    errors = handler(policy)
    if policy == "fail":
        with pytest.raises(RecordError, match="Accident"):
            apply(partial(map, crash), [1], errors)
    else:
        assert apply(partial(map, crash), [1], errors) == []
        assert errors.skipped == 1


def test_dead_letters_tell_operator_record_error_and_line() -> None:
    errors = handler("dead_letter")
    apply(partial(map, parse), ["1", "{"], errors)
    assert errors.dead_letters is not None
    (letter,) = errors.dead_letters
    assert isinstance(letter, DeadLetter)
    assert (letter.operator, letter.record) == ("op", "{")
    assert letter.error.startswith("JSONDecodeError: ")
    assert letter.location is not None
    assert letter.location.startswith(__file__)
    assert pickle.loads(pickle.dumps(letter)) == letter


def test_a_record_error_passes_through_every_policy() -> None:
    inner = RecordError("inner", operator="a", record="r", location=None)

    def fail(record: Any) -> Any:
        raise inner

    for policy in POLICIES:
        with pytest.raises(RecordError) as caught:
            apply(partial(map, fail), [1], handler(policy))
        assert caught.value is inner


def test_an_interrupt_is_a_failed_record_only_where_no_keyboard_can_make_it() -> None:
    def interrupt(record: Any) -> Any:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as where a keyboard is
    try:
        with pytest.raises(KeyboardInterrupt):
            apply(partial(map, interrupt), [1], handler("skip"))
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in a worker
        assert apply(partial(map, interrupt), [1], handler("skip")) == []
    finally:
        signal.signal(signal.SIGINT, before)


class Hidden(BaseException):
    """Of which nothing can be shown."""

    def __init__(self, raises: BaseException | None) -> None:
        super().__init__()
        self.raises = raises

    def __repr__(self) -> str:
        if self.raises is None:
            return 7  # type: ignore[return-value]
        raise self.raises

    __str__ = __repr__


@pytest.mark.parametrize("raises", [ValueError(), SystemExit("repr exits"), GeneratorExit(), None])
def test_what_cannot_be_shown_fails_as_any_other_record(raises: BaseException | None) -> None:
    hidden = Hidden(raises)

    def fail(record: Any) -> Any:
        raise record

    errors = handler("dead_letter")
    assert apply(partial(map, fail), [hidden, SystemExit(hidden)], errors) == []
    letters = errors.dead_letters or []
    assert [letter.error for letter in letters] == [
        f"Hidden (its text cannot be shown: its __str__ raises {type(raises or TypeError()).__name__})",
        f"called sys.exit(<Hidden whose repr raises {type(raises or TypeError()).__name__}>)",
    ]
    assert "whose repr raises" in letters[0].shortened().record
    with pytest.raises(
        RecordError, match=r"operator 'op' failed: Hidden \(its text cannot be shown: its __str__ raises "
    ):
        apply(partial(map, fail), [hidden], handler("fail"))


def test_an_interrupt_while_something_is_shown_is_one() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    try:
        for show in (shorten, describe):
            with pytest.raises(KeyboardInterrupt):
                show(Hidden(KeyboardInterrupt()))
    finally:
        signal.signal(signal.SIGINT, before)


def test_functions_must_be_callable_and_must_travel() -> None:
    with pytest.raises(FlowError, match="map 'm' needs a function, got 3 of type int"):
        check_function(3, "map 'm'")
    lock = threading.Lock()

    def locked(record: Any) -> Any:
        with lock:
            return record

    with pytest.raises(FlowError, match=r"test_userfunc\.py:\d+ cannot be pickled") as caught:
        check_function(locked, "map 'm'")
    assert "inside the function" in str(caught.value)


class _Says:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, record: Any) -> Any:
        return self.value

    def nothing(self, record: Any) -> None:
        self.value = record


def _only_raises(record: Any) -> Any:
    raise ValueError(record)


def _sometimes(record: Any) -> Any:
    if record:
        return True
    return None


def _with_a_block(record: Any) -> Any:
    with suppress(ValueError):
        return int(record)


def _without_return(record: Any) -> Any:
    for _ in range(3):
        if record:
            return
    with suppress(ValueError):
        int(record)


@pytest.mark.parametrize(
    "function",
    [
        bool, print, len, partial(_sometimes), _Says(1), _only_raises, _sometimes, _with_a_block, lambda r: r or None,
        lambda r: r and None, lambda r: None if r else 1, lambda r: (yield), lambda r: not r,
    ],
)  # fmt: skip
def test_a_function_that_may_return_something(function: Any) -> None:
    assert not returns_nothing(function)


@pytest.mark.parametrize("function", [_without_return, lambda r: None, _Says(1).nothing])
def test_a_function_that_never_returns_anything(function: Any) -> None:
    assert returns_nothing(function)


def test_a_very_long_message_is_cut() -> None:
    said = describe(ValueError("x" * 50_000_000))
    assert said.startswith("ValueError: xxx")
    assert said.endswith("... (50,000,012 characters)")
    assert len(said) < 6_000


def test_a_function_of_the_main_script_in_a_process_pool_is_explained() -> None:
    """In a worker plain pickle, which the pool uses, finds nothing of the main script."""

    def helper(record: int) -> int:
        return record

    helper.__module__, helper.__qualname__ = "__main__", "helper"

    def call(record: int) -> int:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(helper, record).result()

    with pytest.raises(RecordError, match=r"(?s)helper.*must be in a module of its own, which the main script imports"):
        apply(partial(map, call), [1], handler("fail"))
