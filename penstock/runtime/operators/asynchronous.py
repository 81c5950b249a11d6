"""The operator `map_async`: a call of the user's function for each record, many of them under way at a time.

The function mostly waits for others: a database, a service. A coroutine function runs on one asyncio loop in one thread
for each task; any other function in threads of the task (callers.py). The task's own thread never waits for a call: it
begins calls for the records that it gets, is woken once for many answers, and takes them (calls_in_flight.py).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from penstock.runtime.errors import FlowError, shorten
from penstock.runtime.operators.base import Operator, Stage, StageContext
from penstock.runtime.operators.callers import Caller, LoopCaller, ThreadCaller
from penstock.runtime.operators.calls_in_flight import CallsInFlight
from penstock.runtime.records.userfunc import OwnFunction, check_function, is_coroutine_function, returns_nothing
from penstock.runtime.units import flag, number, number_above_zero, seconds, whole

#: The errors after which `map_async` makes a call again; None: all.
RetryOn = type[BaseException] | tuple[type[BaseException], ...] | None


def _classes(retry_on: Any, what: str) -> tuple[type[BaseException], ...]:
    """Returns the classes of the errors after which a call is made again."""
    if retry_on is None:
        return (BaseException,)
    classes = retry_on if isinstance(retry_on, tuple) else (retry_on,)
    if not classes or not all(isinstance(each, type) and issubclass(each, BaseException) for each in classes):
        raise FlowError(
            f"{what}: retry_on={shorten(retry_on)}; give a class of errors or a tuple of them, such as "
            "(ConnectionError, TimeoutError), or None for all errors"
        )
    return classes


class MapAsync(Operator):
    """One output for each record: what `fn` returns, in calls of which many are under way at a time."""

    kind = "map_async"
    one_to_one = True
    begins_chain = True
    own_can_move = True
    why_not_in_spark = "its calls are under way in the worker"

    def __init__(
        self,
        fn: Callable[[Any], Any],
        concurrency: int = 100,
        timeout_s: float | timedelta | None = None,
        ordered: bool = True,
        retries: int = 0,
        retry_wait_s: float | timedelta = 0.0,
        retry_on: RetryOn = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        what = f"map_async {self.name!r}"
        check_function(fn, what, opens=True, awaits=True)
        if returns_nothing(fn) and getattr(fn, "__name__", "") != "<lambda>":
            raise FlowError(
                f"{what}: its function never returns anything but None, so there would be a None for each record; "
                "return what is to be sent downstream, as in: return record"
            )
        self.fn = fn
        self.concurrency = whole(concurrency, f"{what}: concurrency")
        self.ordered = flag(ordered, f"{what}: ordered")
        self.retries = whole(retries, f"{what}: retries", least=0)
        where = f"{what}: timeout_s"
        self.timeout_s = None if timeout_s is None else number_above_zero(seconds(timeout_s, where), where, ", or None")
        self.retry_wait_s = number(seconds(retry_wait_s, f"{what}: retry_wait_s"), f"{what}: retry_wait_s")
        self.retry_on = _classes(retry_on, what)
        if retry_on is not None and not self.retries:
            raise FlowError(
                f"{what}: retry_on says which failed calls are made again, and retries=0; give retries=1 or more"
            )
        #: Makes what makes the calls of a task. Tests give another one, to decide when calls end.
        self.caller: Callable[[OwnFunction, str, Callable[[], None]], Caller] = (
            LoopCaller if is_coroutine_function(fn) else ThreadCaller
        )

    def stage(self, context: StageContext) -> Stage:
        return CallsInFlight(context, self)
