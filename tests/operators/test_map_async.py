"""`map_async`: one result a record whatever its calls do, in bounded numbers, over barriers and other plans, and a run
loop that sleeps while calls are under way."""

from __future__ import annotations

import asyncio
import functools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from heapq import heappop
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import testing
from penstock.runtime.epochs.manifest import Blob, TaskEntry
from penstock.runtime.epochs.restore import check, kinds_with_state, read_changed, read_same
from penstock.runtime.epochs.snapshot import encode_snapshot
from penstock.runtime.errors import FlowError, RecordError
from penstock.runtime.event_time.watermark import IDLE
from penstock.runtime.event_time.windows import Tumbling
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.operators.answer_queue import Answer, AnswerQueue
from penstock.runtime.operators.asynchronous import MapAsync
from penstock.runtime.operators.base import StageContext, run_stages
from penstock.runtime.operators.callers import Attempt, Caller, LoopCaller, ThreadCaller
from penstock.runtime.operators.calls_in_flight import CallsInFlight
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.program.plan import Plan
from penstock.runtime.records.userfunc import OwnFunction
from penstock.runtime.sinks.call import Null
from penstock.runtime.sinks.collect import Collect
from penstock.runtime.sources.memory import Memory
from penstock.runtime.state.keyed import SavedState
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker.blackbox import BlackBox, Watcher
from penstock.runtime.worker.record_by_record import RecordByRecord, RecordByRecordMode, digest_of
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.task import Snapshot, Task
from penstock.runtime.worker.wiring import SinkRecords, Wiring, WiringOptions
from tests.program.random_flows import Chance
from tests.runtime.sim import Trickle

GROUPS = 128


class Event(threading.Event):
    """One that a function may refer to although the function must be able to travel."""

    def __reduce__(self) -> Any:
        return Event, ()


class Watching(Watcher):
    """The same for the watcher of a black box."""

    def __reduce__(self) -> Any:
        return Event, ()


class Lock:
    """The same for a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return Lock, ()


class Life:
    """The tasks of a plan in one worker, from the start or from what earlier ones have saved, in real time."""

    def __init__(self, plan: Plan, entries: list[TaskEntry] | None = None, *, epochs: bool = True) -> None:
        self.plan = plan
        self.reported: list[SinkRecords] = []
        self.snapshots: dict[int, TaskEntry] = {}
        transport = MemoryNetwork(1).transport(0)
        saved = {} if entries is None else {task.number: _saved(plan, task, entries) for task in plan.tasks}
        self.wiring = Wiring(
            plan,
            {task.number: 0 for task in plan.tasks},
            0,
            transport,
            WiringOptions(
                clock=time.monotonic_ns,
                report=self.reported.append,
                output_caches=OutputCaches() if epochs else None,
                on_snapshot=self._saved if epochs else None,
            ),
        )
        splits = {number: given for number, (_, _, _, given) in saved.items() if given is not None}
        self.wiring.build_tasks(splits=splits, epoch=1 if saved else 0)
        self.loop = RunLoop(self.wiring, transport, time.monotonic_ns)
        for number, (states, finished, whole_next, _) in saved.items():
            task = self.wiring.tasks[number]
            task.open()
            task.restore(1, states, finished=finished, whole_next=whole_next)

    def _saved(self, snapshot: Snapshot) -> None:
        data = b"".join(encode_snapshot(snapshot.states, GROUPS))
        task, chain = snapshot.task, self.plan.chains[snapshot.task.chain]
        entry = TaskEntry(
            number=task.number,
            name=self.plan.task_name(task),
            index=task.index,
            parallelism=chain.parallelism,
            operators=[operator.name for operator in chain.operators],
            finished=snapshot.finished,
            groups=self.plan.groups(task),
            blobs=[Blob(f"snapshots/{snapshot.epoch}-{task.number}", len(data), 0, data)],
        )
        self.snapshots.setdefault(task.number, entry)  # when it has ended later, that is of a later epoch

    @property
    def records(self) -> list[Any]:
        return [record for reported in self.reported for record in reported.records]

    def before(self, epoch: int) -> list[Any]:
        """What the sinks have got before the barrier of an epoch."""
        return [record for reported in self.reported if reported.epoch <= epoch for record in reported.records]

    def stage(self) -> Any:
        (task,) = [task for task in self.loop.tasks if task.pending is not None]
        return task.pending

    def step(self, rng: random.Random) -> bool:
        """A step of some task that can run."""
        self.loop.deliver(self.loop.transport.receive(0))
        tasks = [task for task in self.loop.tasks if task.runnable()]
        if tasks:
            rng.choice(tasks).step()
        return bool(tasks)

    def close(self) -> None:
        for task in self.loop.tasks:
            task.close(True)


def _saved(plan: Plan, task: Any, entries: list[TaskEntry]) -> Any:
    def get(blob: Blob) -> bytes:
        assert blob.data is not None
        return blob.data

    numbers = {entry.number for entry in entries}
    if numbers == plan.by_number.keys() and all(
        entry.parallelism == plan.chains[plan.by_number[entry.number].chain].parallelism for entry in entries
    ):
        return read_same(plan, task, {entry.number: entry for entry in entries}, get)
    return read_changed(plan, task, entries, get)


def flow_of(build_stream: Callable[[Stream], Stream], records: Any) -> Flow:
    flow = Flow("f", parallelism=1)
    build_stream(flow.read(Memory(records))).write(Collect())
    return flow


def run(build_stream: Callable[[Stream], Stream], records: Any) -> list[Any]:
    """A flow to its end, with the functions themselves and not copies; what has reached the sink."""
    life = Life(flow_of(build_stream, records).plan(1), epochs=False)
    life.loop.run()
    return life.records


KINDS = ("coroutine", "blocking")


def called(kind: str, blocking: Callable[[Any], Any], waits_s: Callable[[Any], float] = lambda record: 0.0) -> Any:
    """A function of this kind that waits before it does something."""

    async def wait(record: Any) -> Any:
        await asyncio.sleep(waits_s(record))
        return blocking(record)

    def block(record: Any) -> Any:
        time.sleep(waits_s(record))
        return blocking(record)

    return of_kind(kind, wait, block)


def of_kind(kind: str, coroutine: Callable[[Any], Any], blocking: Callable[[Any], Any]) -> Any:
    """The function of a kind."""
    return {"coroutine": coroutine, "blocking": blocking}[kind]


# --- results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_results_leave_in_the_order_of_their_records(kind: str) -> None:
    fn = called(kind, lambda n: n * n, lambda n: n * 7 % 5 / 1000)
    assert run(lambda s: s.map_async(fn, concurrency=8), range(100)) == [n * n for n in range(100)]


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_order_results_leave_when_they_are_ready(kind: str) -> None:
    slow = Event()
    left: list[int] = []

    def note(n: int) -> int:
        left.append(n)
        if len(left) == 19:  # those of all other records
            slow.set()
        return n

    async def wait(n: int) -> int:
        while n == 0 and not slow.is_set():
            await asyncio.sleep(0.001)
        return n

    def block(n: int) -> int:
        if n == 0:
            slow.wait()
        return n

    fn = of_kind(kind, wait, block)
    out = run(lambda s: s.map_async(fn, concurrency=4, ordered=False).map(note), range(20))
    assert sorted(out) == list(range(20))
    assert out[-1] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ordered", [True, False])
def test_a_window_misses_no_result_although_calls_end_in_any_order(kind: str, ordered: bool) -> None:
    fn = called(kind, lambda record: record, lambda record: record[0] * 7 % 5 / 2000)
    late = Collect()
    flow = Flow("f", parallelism=1)
    stream = flow.read(Memory([(n, n) for n in range(200)])).watermark(1)
    stream = stream.map_async(fn, concurrency=16, ordered=ordered)
    counts = stream.key_by(lambda record: 0).window(Tumbling(0.01), time=1).count()
    counts.write(Collect(), name="counts")
    counts.side_output("late").write(late, name="late")
    life = Life(flow.plan(1), epochs=False)
    life.loop.run()
    assert sorted(record[3] for record in life.records) == [10] * 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ordered", [True, False])
def test_no_more_calls_than_allowed_are_under_way(kind: str, ordered: bool) -> None:
    lock, now, most, full = Lock(), 0, 0, Event()

    def count(change: int) -> None:
        nonlocal now, most
        with lock:
            now += change
            most = max(most, now)
            if now >= 7:
                full.set()

    async def wait(n: int) -> int:
        count(1)
        while not full.is_set():  # the first calls wait for one another
            await asyncio.sleep(0.001)
        await asyncio.sleep(n % 3 / 1000)
        count(-1)
        return n

    def block(n: int) -> int:
        count(1)
        full.wait(60)
        time.sleep(n % 3 / 1000)
        count(-1)
        return n

    fn = of_kind(kind, wait, block)
    assert sorted(run(lambda s: s.map_async(fn, concurrency=7, ordered=ordered), range(300))) == list(range(300))
    assert most == 7


def test_a_task_takes_no_more_input_while_its_calls_are_under_way() -> None:
    life = Life(flow_of(lambda s: held(s, concurrency=5), range(1000)).plan(1), epochs=False)
    for task in life.loop.tasks:
        task.open()
    while life.step(random.Random(1)):
        pass
    stage = life.stage()
    (task,) = [task for task in life.loop.tasks if task.pending is not None]
    assert (stage.under_way, stage.room, stage.records_in) == (5, 0, 5)
    assert task.input.queued == 995
    assert task.gathered == 5
    stage._caller.answer(3)
    assert not task.runnable() or (task.step(), stage.records_in) == (None, 5), "the first one is still under way"
    stage._caller.answer(0)
    while life.step(random.Random(1)):
        pass
    assert stage.records_in == 6
    assert not task.finished
    life.close()


def test_blocking_calls_run_in_threads_of_the_task_and_as_many_as_are_needed() -> None:
    threads: set[int] = set()

    def work(n: int) -> int:
        threads.add(threading.get_ident())
        time.sleep(0.002)
        return n

    assert run(lambda s: s.map_async(work, concurrency=3), range(30)) == list(range(30))
    assert len(threads) == 3
    assert threading.get_ident() not in threads


def test_coroutines_of_a_task_run_in_one_thread() -> None:
    threads: set[int] = set()

    async def work(n: int) -> int:
        threads.add(threading.get_ident())
        return n

    assert run(lambda s: s.map_async(work), range(30)) == list(range(30))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_partials_and_objects_are_functions_too() -> None:
    async def add(more: int, n: int) -> int:
        return n + more

    class Adds:
        async def __call__(self, n: int) -> int:
            return n + 1

    assert run(lambda s: s.map_async(functools.partial(add, 2)).map_async(Adds()), range(5)) == list(range(3, 8))


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_names_the_operator_the_record_and_the_line(kind: str) -> None:
    fn = called(kind, lambda n: 1 // n)
    with pytest.raises(RecordError, match="operator 'invert' failed: ZeroDivisionError") as caught:
        run(lambda s: s.map_async(fn, name="invert"), [2, 1, 0])
    assert caught.value.operator == "invert"
    assert caught.value.record == "0"
    assert (caught.value.location or "").startswith(__file__)


@pytest.mark.parametrize("kind", KINDS)
def test_failed_records_are_skipped_or_become_dead_letters(kind: str) -> None:
    fn = called(kind, lambda n: 6 // (n % 3))
    assert run(lambda s: s.map_async(fn, on_error="skip"), range(9)) == [6, 3] * 3
    flow = Flow("f")
    stream = flow.read(Memory([])).map_async(fn, on_error="dead_letter")
    stream.write(Null(), name="good")
    stream.dead_letters().map(lambda letter: (letter.record, letter.error)).write(Null(), name="bad")
    out = testing.run(flow, range(9), batch_size=4)
    assert out["good"] == [6, 3] * 3
    assert [record for record, _ in out["bad"]] == [0, 3, 6]
    assert "ZeroDivisionError" in out["bad"][0][1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_takes_too_long_has_failed(kind: str) -> None:
    ended = Event()
    cancelled: list[int] = []

    async def wait(n: int) -> int:
        try:
            await asyncio.sleep(n * 10)
        except asyncio.CancelledError:
            cancelled.append(n)
            raise
        return n

    def block(n: int) -> int:
        if n:
            ended.wait()
        return n

    fn = of_kind(kind, wait, block)
    try:
        assert run(lambda s: s.map_async(fn, timeout_s=0.03, on_error="skip"), [0, 1, 0, 1, 0]) == [0, 0, 0]
        assert len(cancelled) == (0 if kind == "blocking" else 2)
        with pytest.raises(RecordError, match=r"TimeoutError: the call has not ended within timeout_s=0\.03") as caught:
            run(lambda s: s.map_async(fn, timeout_s=0.03), [1])
        assert "raise timeout_s" in str(caught.value)
        assert (caught.value.location or "").startswith(__file__), "the line at which the call was"
    finally:
        ended.set()


@pytest.mark.parametrize("over", [False, True])
def test_a_timeout_says_when_a_coroutine_has_held_up_the_others(over: bool) -> None:
    blocks_s = 0.4 if over else 1.0  # it has ended before the time of the others is over, or it has not

    async def fn(n: int) -> int:
        if n == 3:
            await asyncio.sleep(0.05)
            time.sleep(blocks_s)
        await asyncio.sleep(100)
        return n

    def letters(fn: Any) -> list[str]:
        flow = Flow("f", parallelism=1)
        stream = flow.read(Memory(range(4))).map_async(fn, timeout_s=0.5, on_error="dead_letter")
        stream.write(Collect(), name="out")
        stream.dead_letters().write(Collect(), name="letters")
        return [letter.error for letter in testing.run(flow, batch_size=4)["letters"]]

    async def waits(n: int) -> None:
        await asyncio.sleep(100)

    told = letters(fn)
    assert len(told) == 4
    assert all("TimeoutError: the call has not ended within timeout_s=0.5. Meanwhile the" in each for each in told)
    assert all("stood still for 0." in each and "await asyncio.to_thread(" in each for each in told)
    assert letters(waits) == ["TimeoutError: the call has not ended within timeout_s=0.5"] * 4


class Late:
    """Functions that go on for the records below `late`, whatever becomes of their calls, until they are let go."""

    def __init__(self, late: int) -> None:
        self.let_go = [Event() for _ in range(late)]
        self.begun: list[int] = []
        self.under_way = 0
        self.most = 0  # the number of calls that were under way at a time
        self._lock = Lock()

    def _count(self, change: int) -> None:
        with self._lock:
            self.under_way += change
            self.most = max(self.most, self.under_way)

    def function(self, kind: str) -> Any:
        async def go_on(n: int) -> int:
            self.begun.append(n)
            self._count(1)
            while n < len(self.let_go) and not self.let_go[n].is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.002)
            self._count(-1)
            return n

        def block(n: int) -> int:
            self.begun.append(n)
            self._count(1)
            if n < len(self.let_go):
                self.let_go[n].wait()
            self._count(-1)
            return n

        return of_kind(kind, go_on, block)

    def end(self) -> None:
        for each in self.let_go:
            each.set()


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, f"not within 30 s: {what}"
        time.sleep(0.002)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_never_end_take_no_other_places_than_their_own(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    late = Late(10)
    try:
        fn = late.function(kind)
        out = run(lambda s: s.map_async(fn, concurrency=11, timeout_s=0.1, on_error="skip"), range(30))
        assert out == list(range(10, 30))
        assert late.most <= 11
        assert "no call can begin" not in caplog.text
    finally:
        late.end()


def test_calls_that_keep_their_threads_are_told(caplog: pytest.LogCaptureFixture) -> None:
    late = Late(5)
    fn = late.function("blocking")
    try:
        build = lambda s: s.map_async(fn, concurrency=3, timeout_s=0.05, on_error="skip", name="calls")
        assert run(build, range(6)) == [5]
    finally:
        late.end()
    told = [record.getMessage() for record in caplog.records if "in time" in record.getMessage()]
    assert [said.partition(", and")[0] for said in told] == [
        f"operator 'calls', task 0: calls that have not ended in time so far: {calls}" for calls in (1, 2, 4)
    ]
    assert "and 4 of them still go on" in told[-1]
    assert "Give what the function waits for a timeout of its own" in told[-1]
    assert "calls that had not ended when the task did, and are left to themselves: 5." in caplog.text


def test_a_function_that_never_returns_does_not_use_up_the_threads() -> None:
    never = Event()

    def block(n: int) -> int:
        if n % 2:
            never.wait()
        return n

    began = time.monotonic()
    try:
        out = run(lambda s: s.map_async(block, concurrency=1, timeout_s=0.02, on_error="skip"), range(20))
        assert out == list(range(0, 20, 2))
        assert time.monotonic() - began < 5
    finally:
        never.set()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_coroutine_whose_time_is_over_has_failed_at_once_and_keeps_its_place_until_it_has_ended(
    ordered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    late = Late(5)
    fn = late.function("coroutine")
    life = Life(
        flow_of(
            lambda s: s.map_async(
                fn, concurrency=3, timeout_s=0.1, ordered=ordered, on_error="skip", name="calls", retries=0
            ),
            range(20),
        ).plan(1),
        epochs=False,
    )
    stage = life.stage()
    loop = threading.Thread(target=life.loop.run)
    loop.start()
    try:
        until(lambda: stage.errors.skipped >= 3, "the first calls have failed")
        until(lambda: "no call can begin" in caplog.text or len(late.begun) > 3, "a warning, or one call too many")
        assert (sorted(late.begun), late.under_way) == ([0, 1, 2], 3)
        late.let_go[1].set()
        until(lambda: stage.errors.skipped == 4, "the next call has begun, and has failed")
        assert (sorted(late.begun), late.under_way) == ([0, 1, 2, 3], 3)
        late.end()
        loop.join(30)
        assert not loop.is_alive()
        assert sorted(life.records)[-15:] == list(range(5, 20))
        assert late.most == 3
        (said,) = [record.getMessage() for record in caplog.records if "no call can begin" in record.getMessage()]
        assert "operator 'calls', task 0: " in said
        assert "(concurrency=3)" in said
        assert "(timeout_s=0.1)" in said
        assert "it must not catch asyncio.CancelledError" in said
    finally:
        late.end()
        life.loop.halt()
        loop.join(30)


def test_a_coroutine_is_called_again_only_when_it_has_a_place(caplog: pytest.LogCaptureFixture) -> None:
    late = Late(1)
    fn = late.function("coroutine")
    life = Life(
        flow_of(lambda s: s.map_async(fn, concurrency=1, timeout_s=0.1, retries=1, retry_wait_s=0.001), [0, 1]).plan(1),
        epochs=False,
    )
    loop = threading.Thread(target=life.loop.run)
    loop.start()
    try:
        until(lambda: "no call can begin" in caplog.text or len(late.begun) > 1, "a warning, or one call too many")
        assert (late.begun, life.loop.passes < 100) == ([0], True), "the run loop sleeps meanwhile"
        late.end()
        loop.join(30)
        assert (life.records, late.begun, late.most) == ([0, 1], [0, 0, 1], 1)
    finally:
        late.end()
        life.loop.halt()
        loop.join(30)


def test_places_are_counted_until_late_calls_have_ended() -> None:
    now, wakes = 0, 0

    def wake() -> None:
        nonlocal wakes
        wakes += 1

    operator = MapAsync(lambda n: n, concurrency=3, timeout_s=1, retries=1, retry_wait_s=1, on_error="skip")
    operator.caller = Held
    stage: Any = operator.stage(StageContext(operator))
    assert stage.room == 0, "it is not open"
    stage.attach(lambda: now, wake)
    stage.open()
    list(stage.expand(["a", "b"]))
    assert (stage.room, stage.settled()) == (1, False)
    now += 10**9
    assert collected(stage) == []
    assert (stage.room, stage.under_way, stage._caller.late) == (0, 2, 2), "a retry will need a place too"
    now += 10**9
    assert collected(stage) == []
    assert [attempt.record for attempt in stage._caller.attempts] == ["a", "b", "a"], "there was one place"
    assert not stage.ready()
    stage._caller.answer(2)
    assert collected(stage) == ["a"]
    assert [attempt.record for attempt in stage._caller.attempts] == ["a", "b", "a", "b"]
    stage._caller.answer(3)
    assert collected(stage) == ["b"]
    assert (stage.room, stage.under_way, stage.settled()) == (1, 0, True)
    before = wakes
    stage._caller.answer(0)
    assert (stage.room, wakes) == (2, before + 1), "the task learns that there is room"
    stage._caller.answer(0)
    stage._caller.answer(1)
    assert (stage.room, stage._caller.late, stage._caller.answered) == (3, 0, 0), "each has ended once"


@pytest.mark.parametrize("caller", [LoopCaller, ThreadCaller])
def test_a_call_that_was_given_up_before_it_began_has_no_place(caller: type[Caller]) -> None:
    late = Late(1)
    fn = late.function("coroutine" if caller is LoopCaller else "blocking")
    calls = caller(OwnFunction(fn), "calls", lambda: None)
    calls.open()
    try:
        first, second = (Attempt(None, n) for n in (1, 2))  # type: ignore[arg-type]
        assert calls.abandon(first)
        calls.begin([first, second])
        until(lambda: calls.answered == 1 and calls.late == 0, "the second call has an answer, and the first a place")
        assert late.begun == [2]
        assert [attempt.record for attempt in calls.take()] == [2]
    finally:
        calls.close()


@pytest.mark.parametrize("by_another", [False, True])
def test_a_coroutine_that_is_cancelled_before_its_first_step_has_no_place(by_another: bool) -> None:
    held_up, goes_on = Event(), Event()

    async def fn(n: int) -> None:
        if by_another:  # the second call is cancelled, and does not begin at all
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
        held_up.set()
        goes_on.wait()  # without awaiting anything

    calls = LoopCaller(OwnFunction(fn), "calls", lambda: None)
    calls.open()
    try:
        first, second = (Attempt(None, n) for n in (1, 2))  # type: ignore[arg-type]
        calls.begin([first, second])
        assert held_up.wait(30)
        assert calls.abandon(second)
        assert calls.late == 1
        goes_on.set()
        until(lambda: calls.late == 0, "the second call has ended")
    finally:
        goes_on.set()
        calls.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_failed_calls_are_made_again(kind: str, how: str) -> None:
    tries: Counter[int] = Counter()
    over = Event()

    def work(n: int) -> int:
        tries[n] += 1
        if tries[n] <= n:
            if how == "fails":
                raise ConnectionError("try again")
            over.wait()
        return n

    async def wait(n: int) -> int:
        tries[n] += 1
        if tries[n] <= n:
            if how == "fails":
                raise ConnectionError("try again")
            await asyncio.sleep(100)
        return n

    fn = of_kind(kind, wait, work)
    options: dict[str, Any] = {} if how == "fails" else {"timeout_s": 0.3}
    try:
        out = run(
            lambda s: s.map_async(fn, retries=2, retry_wait_s=0.001, on_error="skip", **options), [0, 1, 2, 3, 1000]
        )
        assert out == [0, 1, 2]
        assert tries == {0: 1, 1: 2, 2: 3, 3: 3, 1000: 3}
        tries.clear()
        with pytest.raises(RecordError, match="failed in 3 tries: "):
            run(lambda s: s.map_async(fn, retries=2, **options), [1000])
    finally:
        over.set()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("kind", ["coroutine", "function"])
@pytest.mark.parametrize("retry_on", [ConnectionError, (TimeoutError, ConnectionError), OSError])
def test_only_errors_that_may_pass_are_tried_again(retry_on: Any, kind: str, alone: bool) -> None:
    tries: Counter[int] = Counter()

    def work(n: int) -> int:
        tries[n] += 1
        if n >= 10:
            raise ValueError("it will never pass")
        if tries[n] <= n:
            raise ConnectionRefusedError("try again")
        return n

    async def wait(n: int) -> int:
        return work(n)

    fn: Any = wait if kind == "coroutine" else work
    operator = MapAsync(fn, retries=2, retry_on=retry_on, on_error="skip", name="calls")
    stage: Any = operator.stage(StageContext(operator))
    stage.alone = alone
    stage.open()
    out: list[Any] = []
    for n in (0, 1, 2, 3, 10):
        out += [record for piece in stage.expand([n]) for record in piece]
        while stage.under_way:
            out += [record for piece in stage.collect() for record in piece]
    stage.close(False)
    assert out == [0, 1, 2]
    assert tries == {0: 1, 1: 2, 2: 3, 3: 3, 10: 1}


@given(wait_s=st.floats(0, 100), failures=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_waits_before_retries_double_and_none_is_overtaken(wait_s: float, failures: list[int]) -> None:
    operator = MapAsync(lambda n: n, retries=10, retry_wait_s=wait_s, on_error="skip")
    stage: Any = operator.stage(StageContext(operator))
    dues: list[float] = []
    for tries in failures:
        stage._tried(SimpleNamespace(tries=tries + 1), None, ConnectionError(), 0)
        dues.append(min(wait_s * 2**tries, max(60, wait_s)))
    found = [heappop(stage._again)[0] / 1e9 for _ in failures]
    assert found == pytest.approx(sorted(dues), abs=1e-6)


def test_what_is_tried_again_is_a_class_of_errors() -> None:
    stream = Flow("f").read(Memory([1]))
    for wrong in ("ConnectionError", [ConnectionError], (), int, ConnectionError("x"), (ConnectionError, "x")):
        with pytest.raises(FlowError, match=r"retry_on=.*give a class of errors or a tuple of them"):
            stream.map_async(str, retries=1, retry_on=wrong)  # type: ignore[arg-type]
    with pytest.raises(FlowError, match="retry_on says which failed calls are made again, and retries=0"):
        stream.map_async(str, retry_on=ConnectionError)


def test_each_try_gets_the_record_as_it_came() -> None:
    seen: list[int] = []

    def work(record: dict[str, int]) -> int:
        record["n"] += 1
        seen.append(record["n"])
        if len(seen) < 3:
            raise ConnectionError
        return record["n"]

    assert run(lambda s: s.map_async(work, retries=5), [{"n": 0}]) == [1]
    assert seen == [1, 1, 1]


def test_sys_exit_in_a_call_is_a_failure_of_the_record() -> None:
    async def leave(n: int) -> int:
        raise SystemExit(3)

    assert run(lambda s: s.map_async(leave, on_error="skip"), [1, 2]) == []


def test_a_coroutine_may_cancel_all_others_of_its_loop() -> None:
    """Some are cancelled before their first step. Each is a failed record, and the job neither hangs nor loses one."""

    async def work(n: int) -> int:
        if n % 10 == 0:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
        else:
            await asyncio.sleep(0)
        return n

    def failing(stream: Stream) -> Stream:
        calls = stream.map_async(work, concurrency=8, on_error="dead_letter")
        calls.dead_letters().map(lambda letter: (letter.record, letter.error)).write(Collect(), name="failed")
        return calls

    out = run(failing, range(100))
    failed = dict(record for record in out if isinstance(record, tuple))
    assert sorted([*failed, *(record for record in out if isinstance(record, int))]) == list(range(100))
    assert failed
    assert all("CancelledError" in error for error in failed.values())


@pytest.mark.parametrize("alone", [False, True])
def test_a_coroutine_that_closes_its_loop_is_a_failed_record(alone: bool) -> None:
    async def work(n: int) -> int:
        await asyncio.sleep(0)
        if n == 3:
            asyncio.get_running_loop().close()
        await asyncio.sleep(0.001)
        return n

    def calls(**options: Any) -> Callable[[Stream], Stream]:
        return lambda stream: stream.map_async(work, concurrency=4, name="ask", **options)

    assert run_perhaps_alone(calls(on_error="skip"), range(20), alone) == [n for n in range(20) if n != 3]
    with pytest.raises(RecordError, match=r"operator 'ask' failed: .*a running event loop\n  record: 3\n") as caught:
        run_perhaps_alone(calls(), range(20), alone)
    assert "test_map_async.py" in str(caught.value), "the user's line"


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_call_that_stops_the_loop_does_no_harm(alone: bool, at_once: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def work(n: int) -> int:
        loop = asyncio.get_running_loop()
        if n % 5 == 0:
            loop.stop() if at_once else loop.call_soon(loop.stop)
        await asyncio.sleep(0.001)
        return n

    assert run_perhaps_alone(lambda s: s.map_async(work, concurrency=4, name="ask"), range(20), alone) == [*range(20)]
    assert caplog.text.count("operator 'ask': its function has stopped the asyncio loop") == 1


@pytest.mark.parametrize("alone", [False, True])
def test_sys_exit_in_a_task_of_a_coroutine_is_a_failure_of_the_record(
    alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def work(n: int) -> int:
        if n == 3:
            await asyncio.create_task(leave())
        await asyncio.sleep(0.001)
        return n

    def calls(stream: Stream) -> Stream:
        return stream.map_async(work, concurrency=4, on_error="skip")

    assert run_perhaps_alone(calls, range(20), alone) == [n for n in range(20) if n != 3]
    assert "asyncio loop" not in caplog.text


def test_an_open_that_stops_the_loop_does_no_harm() -> None:
    class Stopping:
        async def open(self) -> None:
            asyncio.get_running_loop().stop()

        async def __call__(self, n: int) -> int:
            return n

    assert run(lambda s: s.map_async(Stopping(), name="ask"), [1]) == [1]


def run_perhaps_alone(build_stream: Callable[[Stream], Stream], records: Any, alone: bool) -> list[Any]:
    """A flow to its end, in a task that makes one call at a time after deaths if `alone`."""
    if not alone:
        return run(build_stream, records)
    life = Life(flow_of(build_stream, records).plan(1))
    life.loop.box = BlackBox()
    for task in life.loop.tasks:
        if task.pending is not None:
            task.open()
            task.run_record_by_record(RecordByRecord(life.loop.box, task.task.number, RecordByRecordMode(), 0))
    return run_and_end(life)


def test_functions_that_have_no_one_result_are_refused() -> None:
    async def generator(n: int) -> Any:
        yield n

    def plain_generator(n: int) -> Any:
        yield n

    def nothing(n: int) -> None:
        print(n)

    async def two(a: int, b: int) -> int:
        return a + b

    async def work(n: int) -> int:
        return n

    stream = Flow("f").read(Memory([]))
    with pytest.raises(FlowError, match=r"async generator function .*return the value"):
        stream.map_async(generator)
    with pytest.raises(FlowError, match="is a generator function"):
        stream.map_async(plain_generator)
    with pytest.raises(FlowError, match="never returns anything but None"):
        stream.map_async(nothing)
    with pytest.raises(FlowError, match="does not take"):
        stream.map_async(two)
    with pytest.raises(FlowError, match="whose coroutine nobody would await"):
        stream.map(work)
    for wrong in ({"concurrency": 0}, {"timeout_s": 0}, {"retries": -1}, {"retry_wait_s": -1}, {"ordered": "no"}):
        with pytest.raises(FlowError, match=next(iter(wrong))):
            stream.map_async(work, **wrong)  # type: ignore[arg-type]


class Later:
    """Something that can be awaited, and is no coroutine."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __await__(self) -> Any:
        yield from asyncio.sleep(0.001).__await__()
        return self.n


async def in_a_moment(n: int, more: int = 0) -> int:
    await asyncio.sleep(0.001)
    return n + more


class Client:
    """An object whose calls return coroutines, and are none."""

    def __call__(self, n: int) -> Any:
        return in_a_moment(n)

    async def get(self, n: int) -> int:
        return await in_a_moment(n)


class AsyncClient:
    async def __call__(self, n: int) -> int:
        return await in_a_moment(n)


async def forgetful(n: int) -> Any:
    return in_a_moment(n)  # without `await`


COROUTINES: dict[str, Any] = {
    "partial": functools.partial(in_a_moment, more=0),
    "object of coroutines": AsyncClient(),
    "method": Client().get,
    "class of coroutines": AsyncClient,
    "coroutine of a coroutine": forgetful,
}


@pytest.mark.parametrize("way", COROUTINES)
def test_coroutine_functions_of_all_kinds_are_awaited(way: str) -> None:
    fn = COROUTINES[way]
    assert run(lambda s: s.map_async(fn, concurrency=5), range(20)) == list(range(20))
    assert run(lambda s: s.map_async(fn, timeout_s=60, ordered=False), [7]) == [7]
    flow = Flow("f", parallelism=1)
    flow.read(Memory(range(6))).map_async(fn).write(Collect(), name="out")
    assert testing.run(flow, fail_at=3)["out"] == list(range(6))


PLAIN: dict[str, Any] = {
    "lambda": lambda n: in_a_moment(n + 0),
    "object": Client(),
    "awaitable": functools.partial(Later),
    "only some": lambda n: in_a_moment(n) if n % 3 else n,
}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("way", PLAIN)
def test_a_plain_function_that_returns_a_coroutine_ends_the_job_whatever_on_error_says(way: str, alone: bool) -> None:
    """The mistake is the program's, so no record may be skipped for it."""
    with pytest.raises(RecordError, match=r"'ask' failed: .*must be awaited, and is not written with `async def`"):
        run_perhaps_alone(
            lambda s: s.map_async(PLAIN[way], name="ask", on_error="skip", retries=3, retry_wait_s=60), range(5), alone
        )


# --- opening, closing, idling --------------------------------------------------------------------------------------


class Opened:
    """Notes in a file what is called."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def note(self, what: str) -> None:
        with open(self.file, "a") as file:
            file.write(what + "\n")

    def open(self) -> Any:
        self.note("open")

    def __call__(self, n: int) -> Any:
        return n + 1

    def close(self) -> Any:
        self.note("close")


class OpenedInLoop(Opened):
    async def open(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.note("open")

    async def __call__(self, n: int) -> int:
        assert asyncio.get_running_loop() is self.loop
        return n + 1

    async def close(self) -> None:
        assert asyncio.get_running_loop() is self.loop
        self.note("close")


class HalfAsync(Opened):
    async def open(self) -> None:
        self.note("open")


@pytest.mark.parametrize("cls", [Opened, OpenedInLoop])
def test_objects_are_opened_and_closed_once_in_each_task(cls: type[Opened], tmp_path: Path) -> None:
    fn = cls(tmp_path / "log")
    assert sorted(run(lambda s: s.rebalance().map_async(fn, parallelism=3), range(30))) == list(range(1, 31))
    assert sorted((tmp_path / "log").read_text().split()) == ["close"] * 3 + ["open"] * 3


@pytest.mark.parametrize("cls", [Opened, OpenedInLoop])
def test_each_task_makes_and_opens_an_object_of_a_class(cls: type[Opened], tmp_path: Path) -> None:
    args = (tmp_path / "log",)
    out = run(lambda s: s.rebalance().map_async(cls, fn_constructor_args=args, parallelism=3), range(30))
    assert sorted(out) == list(range(1, 31))
    assert sorted((tmp_path / "log").read_text().split()) == ["close"] * 3 + ["open"] * 3


def test_coroutines_of_a_class_are_under_way_together() -> None:
    """They run on one loop, and not each in a thread."""

    class Meeting:
        def __init__(self, size: int) -> None:
            self.size, self.here, self.all_here = size, 0, asyncio.Event()

        async def __call__(self, n: int) -> int:
            self.here += 1
            if self.here == self.size:
                self.all_here.set()
            await self.all_here.wait()
            return n + self.size

    out = run(lambda s: s.map_async(Meeting, fn_constructor_kwargs={"size": 20}, concurrency=20), range(20))
    assert out == list(range(20, 40))


def test_arguments_of_constructors_are_for_classes() -> None:
    stream = Flow("f").read(Memory([]))
    with pytest.raises(FlowError, match="are for a class, whose object is the function"):
        stream.map_async(called("coroutine", int), fn_constructor_args=(1,))
    with pytest.raises(FlowError, match="map_async: fn_constructor_kwargs: Opened has no parameter 'path'"):
        stream.map_async(Opened, fn_constructor_kwargs={"path": 1})


def test_an_async_open_of_a_plain_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"open\(\) is an async function"):
        run(lambda s: s.map_async(HalfAsync(tmp_path / "log")), [1])


def test_a_stage_that_was_never_opened_can_be_closed() -> None:
    operator = MapAsync(called("coroutine", int))
    operator.stage(StageContext(operator)).close(True)


@pytest.mark.parametrize("how", ["coroutine", "stubborn", "blocked", "thread"])
def test_closing_does_not_wait_for_calls_that_hang(how: str, caplog: pytest.LogCaptureFixture) -> None:
    began, over = Event(), Event()

    async def hang(n: int) -> int:
        began.set()
        if how == "blocked":
            over.wait()
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1000 if how == "coroutine" else 0.01)
            if how == "coroutine":
                raise asyncio.CancelledError
        return n

    def block(n: int) -> int:
        began.set()
        over.wait()
        return n

    fn = block if how == "thread" else hang
    life = Life(flow_of(lambda s: s.map_async(fn), [1]).plan(1), epochs=False)
    loop = threading.Thread(target=life.loop.run)
    loop.start()
    try:
        assert began.wait(10)
        at = time.monotonic()
        life.loop.halt()
        loop.join(10)
        assert time.monotonic() - at < 4
        assert ("holds up its asyncio loop" in caplog.text) == (how == "blocked")
        told = "task 0: calls that had not ended when the task did, and are left to themselves: 1."
        assert (told in caplog.text) == (how in ("stubborn", "thread"))
        assert ("must not catch asyncio.CancelledError" in caplog.text) == (how == "stubborn")
        assert ("Give what the function waits for a timeout" in caplog.text) == (how == "thread")
    finally:
        over.set()
        for thread in threading.enumerate():
            if thread.name == "map_async calls":
                thread.join(10)
                assert not thread.is_alive()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_loop_sleeps_while_calls_are_under_way(kind: str) -> None:
    fn = called(kind, lambda n: n, lambda n: 0.5)
    life = Life(flow_of(lambda s: s.map_async(fn, timeout_s=30), range(20)).plan(1), epochs=False)
    cpu = time.process_time()
    life.loop.run()
    assert life.records == list(range(20))
    assert time.process_time() - cpu < 0.2
    assert life.loop.passes < 60


def test_a_thousand_coroutines_wake_the_run_loop_a_few_times() -> None:
    fn = called("coroutine", lambda n: n, lambda n: 0.05)
    life = Life(flow_of(lambda s: s.map_async(fn, concurrency=1000), range(3000)).plan(1), epochs=False)
    life.loop.run()
    assert life.records == list(range(3000))
    assert life.loop.passes < 600


# --- in testing.run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_a_simulated_run_waits_for_calls_and_is_the_same_each_time(batch_size: int) -> None:
    fn = called("coroutine", lambda n: n, lambda n: random.random() / 500)
    flow = Flow("f")
    stream = flow.read(Memory([]), name="a")
    stream.map_async(fn, concurrency=10).union(stream).write(Null())
    outputs = [testing.run(flow, range(40), batch_size=batch_size, parallelism=2)["write"] for _ in range(4)]
    assert sorted(outputs[0]) == sorted([*range(40), *range(40)])
    assert all(output == outputs[0] for output in outputs)


def test_timeouts_and_retries_of_a_simulated_run_count_real_time() -> None:
    fn = called("coroutine", lambda n: n, lambda n: n)
    flow = Flow("f")
    flow.read(Memory([])).map_async(fn, timeout_s=0.05, retries=1, retry_wait_s=0.05, on_error="skip").write(Null())
    began = time.monotonic()
    assert testing.run(flow, [0, 100, 0])["write"] == [0, 0]
    assert 0.15 <= time.monotonic() - began < 5


def test_a_simulated_run_waits_for_a_late_call_that_has_the_last_place() -> None:
    now = 0

    async def wait(n: int) -> tuple[int, int]:
        nonlocal now
        now += 1
        try:
            await asyncio.sleep(100 if n == 0 else 0)
        finally:
            most = now
            await asyncio.sleep(0.3 if n == 0 else 0)
            now -= 1
        return n, most

    flow = Flow("f")
    flow.read(Memory([])).map_async(wait, concurrency=1, timeout_s=0.1, on_error="skip").write(Null())
    assert testing.run(flow, range(5))["write"] == [(1, 1), (2, 1), (3, 1), (4, 1)]


# --- epochs --------------------------------------------------------------------------------------------------------


def by_chance(stream: Stream, seed: int, fn: Callable[[Any], Any], **options: Any) -> Stream:
    out = stream.map_async(fn, **options)
    operator = out._flow.graph.operators["calls"]
    assert isinstance(operator, MapAsync)
    operator.caller = functools.partial(Chance, seed=str(seed), flaky=options.get("retries", 0), looks=(0, 3, 20, 60))
    return out


def changing(record: list[int]) -> tuple[int, int]:
    record[1] += 1
    return record[0], record[1]


def changing_flow(seed: int, parallelism: int) -> Flow:
    rng = random.Random(seed)
    flow = Flow("f", parallelism=1)
    by_chance(
        flow.read(Trickle([[[n, 0] for n in range(at, 100, 4)] for at in range(4)], seed)).rebalance(),
        seed,
        changing,
        name="calls",
        concurrency=rng.choice((1, 3, 8)),
        ordered=rng.random() < 0.5,
        retries=rng.choice((0, 2)),
        parallelism=parallelism,
    ).write(Collect())
    return flow


def until_saved(life: Life, steps: int, rng: random.Random) -> list[TaskEntry]:
    """Some steps, and then an epoch; what it has saved."""
    for task in life.loop.tasks:
        if not task.opened:
            task.open()
    for _ in range(steps):
        life.step(rng)
    life.loop.trigger(1)
    while life.snapshots.keys() != life.plan.by_number.keys():
        life.step(rng)
    return list(life.snapshots.values())


@pytest.mark.parametrize("change", [(1, 1), (3, 3), (1, 3), (3, 1), (3, 2)])
def test_each_result_leaves_once_wherever_a_job_goes_back_to(change: tuple[int, int]) -> None:
    before, after = change
    saved = 0
    for seed in range(30):
        rng = random.Random(seed)
        first = Life(changing_flow(seed, before).plan(1))
        entries = until_saved(first, seed, rng)
        for _ in range(rng.randrange(20)):  # all that follows is lost
            first.step(rng)
        pending = [task.pending for task in first.loop.tasks if task.pending is not None]
        first.close()
        second = Life(changing_flow(seed, after).plan(1), entries)
        saved += sum(task.pending.returned for task in second.loop.tasks if task.pending is not None)
        got = [*first.before(1), *run_and_end(second)]
        assert Counter(got) == Counter((n, 1) for n in range(100)), f"seed {seed}"
        taken = sum(stage.records_in for task in second.loop.tasks for stage in task.stages[:1] if task.pending)
        assert taken == 100, f"seed {seed}: counted {taken}"
        assert len(pending) == before
    assert saved > 30, "epochs had records under way"


def test_saved_records_come_back_in_their_order_and_no_more_at_a_time_than_allowed() -> None:
    operator = MapAsync(called("blocking", int), concurrency=2)
    operator.caller = Held
    first: Any = operator.stage(StageContext(operator, epochs=True))
    first.open()
    assert list(first.expand(["a", "b"])) == []
    own = first.snapshot(1, True).own
    stage: Any = operator.stage(StageContext(operator, epochs=True))
    stage.open()
    stage.restore(1, SavedState(own=[own, own]))  # of two tasks
    assert (stage.returned, stage.under_way, stage.room) == (4, 4, 2)
    assert list(stage.expand(stage.take_returned(2))) == []
    assert [attempt.record for attempt in stage._caller.attempts] == ["a", "b"]
    assert (stage.returned, stage.under_way, stage.room) == (2, 4, 0)
    assert stage.watermark(5) is None, "it follows the records that have yet to be given again"
    assert stage.snapshot(2, True).own == [*own, *own], "what waits is saved again, behind what is under way"


def test_records_that_two_epochs_have_saved_are_counted_once() -> None:
    """The second epoch saves them before the task has given them again."""
    operator = MapAsync(called("blocking", int), concurrency=2)
    operator.caller = Held
    own: list[object] = []
    counted = 0
    for epoch in (1, 2, 3):
        stage: Any = operator.stage(StageContext(operator, epochs=True))
        stage.open()
        if epoch == 1:
            assert list(run_stages([stage], ["a", "b"], 0)) == []
        else:
            stage.records_in = counted  # as the task does, before it restores the stage
            stage.restore(epoch - 1, SavedState(own=[own]))
        assert stage.records_in == 2
        own, counted = stage.snapshot(epoch, True).own, stage.records_in
    assert list(run_stages([stage], stage.take_returned(2), 0)) == []
    assert (stage.records_in, stage.returned, stage.under_way) == (2, 0, 2)


def test_a_flow_without_the_operator_cannot_continue_from_its_calls() -> None:
    saved = kinds_with_state(changing_flow(1, 1).plan(1))
    assert saved["calls"] == "map_async"
    with pytest.raises(FlowError, match="'calls'"):
        check(flow_of(lambda s: s.map(list), []).plan(1), saved, GROUPS)


def test_what_is_saved_is_the_record_before_its_call() -> None:
    operator = MapAsync(changing)
    operator.caller = functools.partial(Chance, seed="1", flaky=0)
    stage: Any = operator.stage(StageContext(operator, epochs=True))
    stage.open()
    record = [7, 0]
    assert list(stage.expand([record])) == []
    assert record == [7, 1]
    own = stage.snapshot(1, True).own
    again: Any = operator.stage(StageContext(operator, epochs=True))
    again.restore(1, SavedState(own=[own]))
    assert again.take_returned(5) == [[7, 0]]


# --- watermarks ----------------------------------------------------------------------------------------------------


class Held(Caller):
    """Calls end when a test says so."""

    def __init__(self, function: Any, name: str, wake: Callable[[], None]) -> None:
        super().__init__(function, name, wake)
        self.attempts: list[Attempt] = []

    def begin(self, attempts: list[Attempt]) -> None:
        self.running += len(attempts)
        self.attempts += attempts

    def answer(self, number: int) -> None:
        attempt = self.attempts[number]
        self.settle(attempt, self._function.fn(attempt.record), None)

    def call(self, record: Any, timeout_s: float | None) -> Any:
        return self._function.fn(record)

    def _end_calls(self) -> None:
        pass


def held(stream: Stream, **options: Any) -> Stream:
    out = stream.map_async(lambda n: n, name="calls", **options)
    operator = out._flow.graph.operators["calls"]
    assert isinstance(operator, MapAsync)
    operator.caller = Held
    return out


def held_stage(ordered: bool) -> Any:
    operator = MapAsync(lambda n: n, ordered=ordered)
    operator.caller = Held
    stage = operator.stage(StageContext(operator))
    assert isinstance(stage, CallsInFlight)
    stage.open()
    return stage


def collected(stage: Any) -> list[Any]:
    return [record for piece in stage.collect() for record in piece]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_watermark_follows_the_records_that_came_before_it(ordered: bool) -> None:
    stage = held_stage(ordered)
    assert stage.watermark(None) is None
    assert stage.watermark(5) == 5, "nothing is under way"
    list(stage.expand(["a", "b"]))
    assert stage.watermark(10) == 5
    assert stage.watermark(20) == 5, "it takes the place of the one before"
    list(stage.expand(["c"]))
    assert stage.watermark(20) == 5
    assert stage.watermark(IDLE) == 5
    assert stage.watermark(20) == 5
    stage._caller.answer(2)
    stage._caller.answer(1)
    assert collected(stage) == ([] if ordered else ["c", "b"])
    assert not stage.ready()
    assert stage.watermark(20) == 5
    stage._caller.answer(0)
    assert stage.ready()
    assert collected(stage) == (["a", "b"] if ordered else ["a"])
    assert stage.watermark(20) == 20, "each watermark is passed on by itself"
    assert collected(stage) == (["c"] if ordered else [])
    assert stage.watermark(20) == IDLE
    assert collected(stage) == []
    assert stage.watermark(20) == 20
    assert stage.under_way == 0
    assert not stage.ready()


def test_markers_and_answers_keep_their_places_in_the_queue() -> None:
    class Number(Answer):
        def __init__(self, number: int) -> None:
            self.number, self.answered = number, False

        def done(self) -> bool:
            return self.answered

    queue: AnswerQueue[Number, str] = AnswerQueue()
    first, second, third = numbers = [Number(n) for n in range(3)]
    queue.put(first)
    queue.mark("a")
    place = queue.put(second)
    queue.mark("b")
    queue.put(third)
    assert (queue.answers(), queue.waiting) == (numbers, 3)
    assert queue.take() is None
    second.answered = third.answered = True
    assert not queue.ready()
    first.answered = True
    assert [queue.take(), queue.take()] == [first, "a"]
    queue.remove(place)
    assert queue.waiting == 1
    assert queue.last() is third
    assert [queue.take(), queue.take(), queue.take()] == ["b", third, None]
    assert not queue


# --- record by record ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("timeout_s", [None, 10.0])
def test_record_by_record_each_call_is_noted_while_nothing_else_is_under_way(
    kind: str, timeout_s: float | None
) -> None:
    box = BlackBox()
    watcher = Watching(box.address)
    noted: list[tuple[Any, Any]] = []

    def work(n: int) -> int:
        noted.append((n, watcher.read()))
        if n == 3 and len(noted) < 6:
            raise ConnectionError
        return n

    life = Life(
        flow_of(
            lambda s: s.map_async(called(kind, work), timeout_s=timeout_s, retries=2, name="calls", on_error="skip"),
            range(10),
        ).plan(1)
    )
    life.loop.box = box
    mode = RecordByRecordMode(values={(0, digest_of([7])): "it kills"})
    for task in life.loop.tasks:
        if task.pending is not None:
            task.open()
            task.run_record_by_record(RecordByRecord(box, task.task.number, mode, 0))
    assert run_and_end(life) == [n for n in range(10) if n != 7]
    assert [n for n, _ in noted] == [0, 1, 2, 3, 3, 3, 4, 5, 6, 8, 9]
    assert all(note is not None and note.digest == digest_of([n]) for n, note in noted)
    assert life.stage().errors.skipped == 1


@pytest.mark.parametrize("retries", [0, 2])
def test_record_by_record_a_late_call_keeps_its_place_too(retries: int, caplog: pytest.LogCaptureFixture) -> None:
    late = Late(1)
    fn = late.function("coroutine")
    life = Life(
        flow_of(
            lambda s: s.map_async(fn, concurrency=1, timeout_s=0.1, retries=retries, on_error="skip"), range(5)
        ).plan(1)
    )
    life.loop.box = BlackBox()
    stage = life.stage()
    for task in life.loop.tasks:
        if task.pending is not None:
            task.open()
            task.run_record_by_record(RecordByRecord(life.loop.box, task.task.number, RecordByRecordMode(), 0))
    loop = threading.Thread(target=run_and_end, args=(life,))
    loop.start()
    try:
        until(lambda: "no call can begin" in caplog.text or len(late.begun) > 1, "a warning, or one call too many")
        assert (late.begun, stage.errors.skipped) == ([0], 1)
        late.end()
        loop.join(30)
        assert (life.records, late.begun, late.most) == ([1, 2, 3, 4], [0, 1, 2, 3, 4], 1)
    finally:
        late.end()
        loop.join(30)


def run_and_end(life: Life) -> list[Any]:
    """A job with epochs to its end, which nobody else says here."""

    def ends() -> Iterator[Task]:
        return (task for task in life.loop.tasks if not task.finished)

    for task in life.loop.tasks:
        if not task.opened:
            task.open()
    while any(ends()):
        wait = life.loop._wait()
        life.loop.deliver(life.loop.transport.receive(0.001 if wait is None else min(wait, 0.001)))
        for task in life.loop.tasks:
            if task.runnable():
                life.loop.box.note(task.task.number) if life.loop.box else None
                task.step()
    for task in life.loop.tasks:
        task.close(False)
    return life.records


# --- plans ---------------------------------------------------------------------------------------------------------


def test_it_begins_a_chain_and_others_may_follow_it_there() -> None:
    flow = Flow("f", parallelism=2)
    stream = flow.read(Memory([])).map(str, name="before").map_async(called("coroutine", int), name="calls")
    stream.map(str, name="after").write(Null())
    chains = [[operator.name for operator in chain.operators] for chain in flow.plan(1).chains]
    assert chains == [["read", "before"], ["calls", "after", "write"]]
    assert "map_async called.<locals>.wait, up to 100 at a time" in flow.explain().replace("test_map_async.", "")
