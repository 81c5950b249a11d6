"""Which part of the time of steps is processor time, by clocks that are made up and by those of this machine."""

from __future__ import annotations

import gc
import hashlib
import threading
import time
import weakref
from dataclasses import dataclass

import pytest

from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.memory import Memory
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker.processor_time import EVERY, Clocks, ProcessorTime, present_threads
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.wiring import build

S = 1_000_000_000
OLD, NEW = 1, 2  # threads of Penstock, and of somebody else


@dataclass(eq=False)
class Task:
    busy_ns: int = 0
    cpu_ns: int = 0
    waits_ns: int = 0
    threads_ns: int = 0

    def runs(self, seconds: float) -> None:
        self.busy_ns += int(seconds * S)


class Machine:
    """Clocks of a loop, of a thread of Penstock, and of a thread that a function has started."""

    def __init__(self) -> None:
        self.loop = threading.get_native_id()
        self.ns = {self.loop: 7 * S, OLD: 3 * S, NEW: 2 * S}
        self.core_wait_ns = S
        self.own = {self.loop, OLD}  # whose clocks can be read
        clocks = Clocks(
            lambda: self.ns[self.loop],
            lambda: sum(self.ns.values()),
            lambda thread: self.ns.get(thread, 0) if thread in self.own else 0,
            lambda _: self.core_wait_ns,
        )
        self.time = ProcessorTime([self.loop, OLD], clocks)
        self.time.begin()

    def takes(self, thread: int, seconds: float) -> None:
        self.ns[thread] += int(seconds * S)


def test_a_task_that_waits_takes_no_core() -> None:
    """Two tasks run for equally long, of which one waits for nine tenths. The loop itself takes a tenth more."""
    machine, works, waits = Machine(), Task(), Task()
    machine.time.note(works, S // 100, S // 100)
    machine.time.note(waits, S // 100, S // 1000)
    works.runs(1.0)
    waits.runs(1.0)
    machine.takes(machine.loop, 1.21)
    machine.time.divide([works, waits])
    assert (works.cpu_ns, waits.cpu_ns) == (int(1.1 * S), int(0.11 * S))
    assert (works.waits_ns, waits.waits_ns) == (0, int(0.9 * S))
    assert machine.time.loop_ns == int(1.21 * S)


def test_to_wait_for_a_core_is_nobodys_load() -> None:
    """The steps of both take twice as long as they work. The kernel says that this was for want of a core, or that it
    was so for a part of it."""
    machine, one, other = Machine(), Task(), Task()
    for lacks, waits in ((1.0, 0.0), (0.4, 0.6)):
        for task in (one, other):
            machine.time.note(task, S // 100, S // 200)
            task.runs(1.0)
        machine.takes(machine.loop, 1.0)
        machine.core_wait_ns += int(lacks * S)
        before = [one.waits_ns, other.waits_ns]
        machine.time.divide([one, other])
        assert [one.waits_ns - before[0], other.waits_ns - before[1]] == pytest.approx([waits / 2 * S] * 2)
    assert (one.cpu_ns, other.cpu_ns) == (S, S)
    assert machine.time.core_wait_ns == int(1.4 * S)


def test_threads_of_functions_are_told_apart_from_penstocks() -> None:
    machine, one, other = Machine(), Task(), Task()
    one.runs(3.0)
    other.runs(1.0)
    machine.takes(machine.loop, 1.0)
    machine.takes(OLD, 5.0)
    machine.takes(NEW, 2.0)
    machine.time.divide([one, other])
    assert machine.time.threads_ns == 2 * S
    assert (one.threads_ns, other.threads_ns) == (3 * S // 2, S // 2)
    machine.time.divide([one, other])
    assert one.threads_ns == 3 * S // 2, "nothing has happened since"


def test_a_thread_that_penstock_starts_later_is_told_by_its_name() -> None:
    """Threads of functions have other names."""
    machine, task = Machine(), Task()
    task.runs(1.0)
    until = threading.Event()
    started = [threading.Thread(target=until.wait, name=name, daemon=True) for name in ("penstock-later", "later")]
    try:
        for thread in started:
            thread.start()
            assert thread.native_id is not None
            machine.ns[thread.native_id] = 0
            machine.own.add(thread.native_id)
            machine.takes(thread.native_id, 3.0)
        machine.time.divide([task])
        assert machine.time.threads_ns == 3 * S
    finally:
        until.set()
        for thread in started:
            thread.join()


def test_what_was_measured_long_ago_counts_less(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    machine, task, other = Machine(), Task(), Task()
    machine.time.divide([task, other])
    for _ in range(10):  # it waited for most of the time
        machine.time.note(task, S // 10, S // 1000)
        machine.time.note(other, S // 10, S // 10)
        now[0] += 60 * S
        machine.time.divide([task, other])
    machine.time.note(task, S // 10, S // 10)  # now it works
    machine.time.note(other, S // 10, S // 10)
    task.runs(1.0)
    other.runs(1.0)
    machine.takes(machine.loop, 2.0)
    machine.time.divide([task, other])
    assert task.cpu_ns > 0.9 * other.cpu_ns


def test_a_task_that_has_gone_is_forgotten() -> None:
    machine, gone, stays = Machine(), Task(), Task()
    machine.time.note(gone, S, S)
    gone.runs(1.0)
    machine.time.divide([stays])
    stays.runs(1.0)
    machine.takes(machine.loop, 1.0)
    machine.time.divide([stays])
    assert (gone.cpu_ns, stays.cpu_ns) == (0, S)


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        hashlib.sha256(b"x" * 10_000)


def test_a_real_loop_beside_functions_that_wait_and_such_that_start_threads() -> None:
    """Each of three functions takes some 2 ms of each record: it works, sleeps, or has a thread work."""
    flow = Flow("three", chaining=False)
    records = flow.read(Memory(range(8 * EVERY)), name="in", parallelism=1)

    def works(n: int) -> int:
        work(0.002)
        return n

    def waits(n: int) -> int:
        time.sleep(0.002)
        return n

    def threads(n: int) -> int:
        thread = threading.Thread(target=work, args=(0.002,))
        thread.start()
        thread.join()
        return n

    for function in (works, waits, threads):
        records.map(function, name=function.__name__, parallelism=1).write(Null(), name=f"{function.__name__}-out")
    own = present_threads()
    plan = flow.plan(1)
    transport = MemoryNetwork(1).transport(0)
    wiring = build(
        plan,
        {task.number: 0 for task in plan.tasks},
        0,
        transport,
        clock=time.monotonic_ns,
        report=lambda _: None,
    )
    cpu = ProcessorTime(own)
    loop = RunLoop(wiring, transport, time.monotonic_ns, cpu=cpu)
    thread = threading.Thread(target=loop.run, name="penstock-test-loop")
    before = time.process_time_ns()
    thread.start()
    while thread.is_alive():
        thread.join(0.02)
        loop.load()
    whole = time.process_time_ns() - before
    tasks = {task.name.partition("[")[0]: task for task in wiring.tasks.values()}
    assert sum(task.cpu_ns for task in tasks.values()) == pytest.approx(cpu.loop_ns, rel=0.01)
    assert cpu.loop_ns + cpu.threads_ns < 1.05 * whole
    assert tasks["works"].cpu_ns > 0.6 * cpu.loop_ns
    assert tasks["waits"].cpu_ns < 0.4 * tasks["waits"].busy_ns
    assert tasks["waits"].waits_ns > 0.3 * 8 * EVERY * 0.002 * S
    assert cpu.threads_ns > 0.5 * 8 * EVERY * 0.002 * S


def test_a_task_that_was_removed_leaves_nothing_in_memory() -> None:
    """Its state may be most of what the worker has."""
    flow = Flow("removed")
    flow.read(Memory(["a", "b"])).key_by(lambda record: record).count(name="count").write(Null())
    plan = flow.plan(1)
    transport = MemoryNetwork(1).transport(0)
    placed = {task.number: 0 for task in plan.tasks}
    wiring = build(plan, placed, 0, transport, clock=time.monotonic_ns, report=lambda _: None)
    loop = RunLoop(wiring, transport, time.monotonic_ns, cpu=ProcessorTime(present_threads()))
    assert loop.cpu is not None
    for task in wiring.tasks.values():
        loop.cpu.note(task, S, S)
    removed = [weakref.ref(task) for task in wiring.tasks.values()]
    del task
    loop.remove_tasks(set(placed), 0)
    gc.collect()
    assert [task() for task in removed] == [None] * len(removed)
