"""The calls of one task of `map_async` that are under way: their order, timeouts and retries, watermarks and epochs.

What happens at a barrier: the snapshot contains the records whose results have not left the stage, and the calls are
made again after a restore. A call may thus be made twice, but its result leaves once. The records are saved as they
were before their calls, which may change them at any time. Results are not saved, because they need not be picklable.

More calls than `concurrency` must never be under way, nor may any be lost: each record ends as one result or one
failure, whatever its calls do. A watermark must never overtake a record that came before it.

A late call (callers.py) keeps its place among the `concurrency` calls, and the job continues with the other places.
When late calls have all places, no call begins, and a warning says so.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from penstock.runtime.errors import CodecError, describe
from penstock.runtime.event_time.watermark import IDLE, Watermark
from penstock.runtime.operators.answer_queue import Answer, AnswerQueue
from penstock.runtime.operators.base import EXPAND_RECORDS_MAX, Stage, StageContext
from penstock.runtime.operators.callers import END_WHEN_CANCELLED, TOO_LATE, Attempt, Caller, NotAwaited, timed_out
from penstock.runtime.records.batch import Batch
from penstock.runtime.records.codec import decode, encode
from penstock.runtime.records.userfunc import OwnFunction, is_failure
from penstock.runtime.state.keyed import SavedState, StageState

if TYPE_CHECKING:
    from penstock.runtime.operators.asynchronous import MapAsync

logger = logging.getLogger(__name__)

_WAIT_MOST_S = 60.0  # the longest wait before a retry, unless the user gives a longer one

# When late calls have had all places for so long, a warning says so. A coroutine that ends when it is cancelled is late
# for less, unless it takes its time to clean up.
_FULL_NS = 1_000_000_000

_REMEDY = (
    "to let calls take longer, raise timeout_s (None: no limit); to try again, raise retries; to continue after such "
    "records, give the operator on_error='skip' or on_error='dead_letter'"
)


class Call(Answer):
    """A record whose result has not left the stage."""

    __slots__ = ("answered", "error", "place", "record", "saved", "stamp", "tries", "value")

    def __init__(self, record: Any, saved: tuple[int, bytes] | None, stamp: int) -> None:
        self.record = record
        self.saved = saved  # the record as it was before the first call
        self.stamp = stamp
        self.tries = 0
        self.place = 0  # in the queue
        self.answered = False
        self.value: Any = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self.answered


class CallsInFlight(Stage):
    """The stage of `map_async` in a task, whose work goes on outside of the thread that runs the task. `expand` begins
    the work for records, and `collect` yields what has come of it. It is the first stage of its task
    (`Operator.begins_chain`), which sets the fields, and gives it at most `room` records. Only the task's thread calls
    it.

    Watermarks wait inside the stage: `watermark` takes one, and returns the last one whose earlier records have all
    been collected. `collect` stops behind a watermark, so that the task passes each of them on.
    """

    expands = True
    event_time = True
    timed = True  # its task is asked when it has work although no message comes
    alone = False  # whether `expand` yields the outputs itself, and nothing is under way when it ends
    stamp = 0  # the stamp of the records that come next
    oldest = 0  # the least stamp of the records that the last piece of `collect` comes from

    def __init__(self, context: StageContext, operator: MapAsync) -> None:
        super().__init__(context)
        self._own = OwnFunction(operator.fn)
        self._make_caller = operator.caller
        self._caller: Caller | None = None
        self._concurrency = operator.concurrency
        self._ordered = operator.ordered
        self._retries = operator.retries
        self._timeout_s = operator.timeout_s
        self._timeout_ns = None if operator.timeout_s is None else int(operator.timeout_s * 1e9)
        self._retry_wait_s = operator.retry_wait_s
        self._retry_on = operator.retry_on
        self._saves = context.epochs or operator.retries > 0
        self._clock: Callable[[], int] = time.monotonic_ns
        self._wake: Callable[[], None] = lambda: None
        self._queue = AnswerQueue[Call, Watermark]()
        self._finished: deque[Call] = deque()  # answered, and not collected, if no order is wanted
        self._deadlines: OrderedDict[Attempt, int] = OrderedDict()  # of attempts under way, in the order of time
        # A heap of the calls that are tried again: when, a number that no other call has, and the call.
        self._again: list[tuple[int, int, Call]] = []
        self._put_back = 0  # how many calls have been tried again
        self._returned: deque[tuple[int, bytes]] = deque()  # records from an epoch, that the task has not given yet
        self._mark_in: int | None = None  # the last watermark that has come
        # The last watermark that has come before the task has given all records from an epoch, which were before it.
        self._mark_behind: int | None = None
        self._mark_out: int | None = None  # the last one whose earlier records have all been collected
        self._seen = False  # whether a result was looked at
        self._full_since: int | None = None  # the time since when late calls have all places, as far as was seen
        self._warned = False  # whether a warning has said so

    # --- what the task asks --------------------------------------------------------------------------------------

    def attach(self, clock: Callable[[], int], wake: Callable[[], None]) -> None:
        """Gives the stage a clock, in ns, for timed actions, and a function that wakes its task's thread. It is called
        before `open`."""
        self._clock, self._wake = clock, wake

    @property
    def room(self) -> int:
        """The number of records that it takes now."""
        if self._caller is None:
            return 0
        places = self._free - len(self._again)
        return max(0, min(places, (1 if self.alone else self._concurrency) - self._queue.waiting))

    @property
    def under_way(self) -> int:
        """The number of records that it has taken, and whose outputs were not collected. Other threads may ask."""
        return self._queue.waiting + len(self._returned)

    @property
    def returned(self) -> int:
        """The number of records that an epoch has saved, and that the task has to give it again before all others."""
        return len(self._returned)

    def take_returned(self, most: int) -> Batch:
        """Takes a number of the returned records from it, in order."""
        taken = [self._returned.popleft() for _ in range(min(most, len(self._returned)))]
        # They are counted again when the task gives them. Not before: the next epoch may save them first.
        self.records_in -= len(taken)
        try:
            return [record for saved in taken for record in decode(*saved)]
        except CodecError as error:
            raise self.errors.failure("(a record from an epoch)", error) from error

    def ready(self) -> bool:
        """Whether `collect` would do something now."""
        if self._caller is None:
            return False
        if self._caller.answered or self._finished or self._queue.ready():
            return True
        due = self._due()
        return due is not None and due <= self._clock()

    def settled(self) -> bool:
        """Whether nothing will be ready later that is not ready now, unless it gets more records."""
        if self._caller is None:
            return True
        self._take_answers()  # otherwise nobody is woken for the next ones
        # Late calls that have all places will most likely end soon, and then there is room.
        full = not self._warned and self._caller.late >= self._concurrency
        return not self._again and not self._caller.running and not full

    def ready_in(self) -> float | None:
        """Returns in how many seconds it is ready without waking its task, or None when it never is."""
        assert self._caller is not None
        answer, due = self._caller.answer_in(), self._due()
        if due is None:
            return answer
        wait = max(0, due - self._clock()) / 1e9
        return wait if answer is None else min(wait, answer)

    def _due(self) -> int | None:
        """Returns the time of the next timeout, retry or warning."""
        due = next(iter(self._deadlines.values())) if self._deadlines else None
        # A retry without a place has to wait until a late call has ended, which wakes the task's thread.
        if self._again and self._free > 0 and (due is None or self._again[0][0] < due):
            due = self._again[0][0]
        if self._full_since is not None and (due is None or self._full_since + _FULL_NS < due):
            due = self._full_since + _FULL_NS
        return due

    @property
    def _free(self) -> int:
        """The number of calls that may begin."""
        assert self._caller is not None
        return self._concurrency - self._caller.running - self._caller.late

    # --- opening and closing -------------------------------------------------------------------------------------

    def open(self) -> None:
        self._caller = self._make_caller(self._own, self.context.operator.name, self._wake)
        self._caller.task, self._caller.timeout_s = self.context.index, self._timeout_s
        self._caller.open()

    def close(self, failed: bool) -> None:
        if self._caller is not None:
            self._caller.close()

    # --- calls ---------------------------------------------------------------------------------------------------

    def expand(self, batch: Batch) -> Iterator[Batch]:
        assert isinstance(batch, list)
        assert self._caller is not None
        attempts: list[Attempt] = []
        now = 0 if self._timeout_ns is None else self._clock()
        for record in batch:
            saved: tuple[int, bytes] | None = None
            if self._saves:
                try:
                    saved = encode([record], saved=True)
                except CodecError as error:
                    self.errors.handle(record, error)
                    continue
            call = Call(record, saved, self.stamp)
            if self.alone:
                yield from self._alone(call)
            else:
                call.place = self._queue.put(call)
                attempts.append(self._try(call, now))
        if attempts:
            self._caller.begin(attempts)
        if self._mark_behind is not None and not self._returned:
            self._queue.mark(Watermark(self._mark_behind))
            self._mark_behind = None

    def _try(self, call: Call, now: int) -> Attempt:
        attempt = Attempt(call, self._record_of(call))
        if self._timeout_ns is not None:
            self._deadlines[attempt] = now + self._timeout_ns
        return attempt

    def _record_of(self, call: Call) -> Any:
        """Returns the record for the next try, as it was before the first one."""
        call.tries += 1
        if call.tries > 1 and call.saved is not None:
            return decode(*call.saved)[0]
        return call.record

    def _alone(self, call: Call) -> Iterator[Batch]:
        """Makes a call while no other is under way, waits for it, and yields its result, so that a record that ends the
        process is found (runtime/worker/record_by_record.py)."""
        assert self._caller is not None
        while not call.answered:
            value, error = None, None
            self._see_whether_full()
            try:
                attempt = Attempt(call, self._record_of(call))
                # Only a retry ever waits. It waits no longer than the call might take, because this thread has other
                # tasks too.
                self._caller.wait_for_place(self._concurrency)
                value = self._caller.call(attempt)
            except BaseException as raised:  # it is handled below
                error = raised
            self._see_whether_full()
            self._tried(call, value, error, 0)
            if not call.answered:
                self._again.clear()
                time.sleep(self._wait_s(call))
        self._finished.clear()
        out: list[Any] = []
        self._give(call, out)
        if out:
            yield out

    def _look(self) -> None:
        """Takes the answers that have come, and takes the steps that are due."""
        assert self._caller is not None
        now = self._take_answers()
        self._see_whether_full()
        while self._deadlines:
            attempt, due = next(iter(self._deadlines.items()))
            if due > now:
                break
            del self._deadlines[attempt]
            frame, still_s = self._caller.where(attempt), self._caller.stood_still()
            if self._caller.abandon(attempt):
                self._tried(attempt.call, None, timed_out(self._timeout_s, frame, still_s), now)
        self._see_whether_full()
        attempts: list[Attempt] = []
        while self._again and self._again[0][0] <= now and len(attempts) < self._free:
            attempts.append(self._try(heappop(self._again)[2], now))
        if attempts:
            self._caller.begin(attempts)

    def _see_whether_full(self) -> None:
        """Notes since when late calls have all places, and warns once when they keep them."""
        assert self._caller is not None
        if self._warned or self._caller.late < self._concurrency:
            self._full_since = None
            return
        now = self._clock()
        if self._full_since is None:
            self._full_since = now
        elif now - self._full_since >= _FULL_NS:
            self._full_since, self._warned = None, True
            logger.warning(
                "operator %r, task %d: no call can begin, because all places (concurrency=%d) are taken by calls that "
                "have not ended although their time was over (timeout_s=%g). The task takes no records until one of "
                "them has ended. %s",
                self.context.operator.name,
                self.context.index,
                self._concurrency,
                self._timeout_s,
                END_WHEN_CANCELLED,
            )

    def _take_answers(self) -> int:
        """Takes the answers that have come. Returns the time, if anything here depends on it."""
        assert self._caller is not None
        now = self._clock() if self._timeout_ns is not None or self._retries else 0
        for attempt in self._caller.take():
            self._deadlines.pop(attempt, None)
            self._tried(attempt.call, attempt.value, attempt.error, now)
        return now

    def _tried(self, call: Call, value: Any, error: BaseException | None, now: int) -> None:
        """Takes the answer of an attempt, which may have to be made again."""
        again = isinstance(error, self._retry_on) and is_failure(error) and not isinstance(error, NotAwaited)
        if error is not None and again and call.tries <= self._retries:
            self._put_back += 1
            heappush(self._again, (now + int(self._wait_s(call) * 1e9), self._put_back, call))
            return
        call.value, call.error, call.answered = value, error, True
        if not self._ordered:
            self._finished.append(call)

    def _wait_s(self, call: Call) -> float:
        """Returns how long to wait before the next try: twice as long as before the one before."""
        most_s = max(_WAIT_MOST_S, self._retry_wait_s)
        return min(most_s, self._retry_wait_s * 2.0 ** min(call.tries - 1, 60))

    # --- results -------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Batch]:
        """Yields outputs that are there, in pieces of limited size, and sets `oldest` before each of them."""
        self._look()
        out: list[Any] = []
        while True:
            item = self._next()
            if isinstance(item, Call):
                self.oldest = min(self.oldest, item.stamp) if out else item.stamp
                self._give(item, out)
                if len(out) < EXPAND_RECORDS_MAX:
                    continue
            if out:
                yield out
                out = []
            if isinstance(item, Watermark):
                self._mark_out = item.value
            if not isinstance(item, Call):
                return

    def _next(self) -> Call | Watermark | None:
        """Takes the next result that may leave, or the next watermark."""
        if self._finished:
            call = self._finished.popleft()
            self._queue.remove(call.place)
            return call
        return self._queue.take()

    def _give(self, call: Call, out: list[Any]) -> None:
        """Adds the result of a call, or handles its failure."""
        if call.error is None:
            if not self._seen:
                self._seen = True
                if isinstance(call.value, AsyncGenerator):
                    slip = (
                        "the function returned an asynchronous generator, which nobody reads; read it in the function"
                    )
                    raise self.errors.failure(call.record, TypeError(slip))
            out.append(call.value)
            return
        errors = self.errors
        if isinstance(call.error, NotAwaited):
            raise errors.failure(call.record, call.error)
        before = errors.step, errors.remedy
        if call.tries > 1:
            errors.step += f" in {call.tries} tries"
        if describe(call.error).startswith(f"{TimeoutError.__name__}: {TOO_LATE}"):
            errors.remedy = errors.remedy or _REMEDY
        try:
            errors.handle(call.record, call.error)
        finally:
            errors.step, errors.remedy = before

    # --- watermarks ----------------------------------------------------------------------------------------------

    def watermark(self, watermark: int | None) -> int | None:
        if watermark is not None and watermark != self._mark_in:
            self._mark_in = watermark
            last = self._queue.last()
            if self._returned:
                self._mark_behind = watermark
            elif not self._queue:
                self._mark_out = watermark
            elif isinstance(last, Watermark) and IDLE not in (last.value, watermark):
                last.value = watermark  # nothing came between them
            else:
                self._queue.mark(Watermark(watermark))
        return self._mark_out

    # --- epochs --------------------------------------------------------------------------------------------------

    def snapshot(self, epoch: int, whole: bool) -> StageState:
        # Never None: the state of an earlier snapshot would still hold.
        return StageState(own=[*(call.saved for call in self._queue.answers()), *self._returned])

    def restore(self, epoch: int, saved: SavedState) -> None:
        self._returned.extend(record for own in saved.own for record in own)
