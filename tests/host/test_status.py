"""A job's status from its workers' reports: sums, rates, and what is not known yet."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.host.decide.status import StatusBuilder, hook_words
from penstock.runtime.event_time.windows import Tumbling
from penstock.runtime.program.flow import Flow
from penstock.runtime.program.plan import Plan
from penstock.runtime.relaying.relay import Relay
from penstock.runtime.relaying.wire import FIRST_RELAY
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.memory import Memory
from penstock.runtime.status import RelayStatus, WorkerStatus
from penstock.runtime.transport.base import PeerTransport
from penstock.runtime.worker.load import OperatorReport, TaskLoad
from penstock.runtime.worker.metrics import Histogram

SECOND = 1_000_000_000


def plan() -> Plan:
    flow = Flow("job")
    flow.read(Memory([1, 2]), parallelism=1).rebalance().map(str, on_error="skip").write(Null())
    flow.parallelism = 2
    return flow.plan(2)


PLACED = {0: 0, 1: 0, 2: 1}
WORKERS = [{"index": i, "pid": 100 + i, "state": "RUNNING", "node_id": "n"} for i in range(2)]


def report(worker: int, seconds: float, records: int, **changes: Any) -> dict[str, Any]:
    """What a worker says after this long, with every counter of its tasks at `records`."""
    latency = Histogram()
    latency.add(2000, max(records, 1))
    made = plan()
    tasks = []
    for number in (n for n, w in PLACED.items() if w == worker):
        task = {
            "number": number,
            "finished": False,
            "blocked": False,
            "chain": made.tasks[number].chain,
            "queued": 3,
            "backlog": 20 if number == 0 else 0,
            "under_way": 0 if number == 0 else 100,
            "begun": 0,
            "sends": [(1, records, 5, 0)] if number == 0 else [],
            "at_ns": int(seconds * SECOND),
            "unsent": 1,
            "busy_ns": int(seconds * SECOND / 4),
            "cpu_ns": int(seconds * SECOND / 8),
            "threads_ns": int(seconds * SECOND / 2) if number == 0 else 0,
            "operators": [
                OperatorReport(operator.name, records, records, 1, 0)
                for operator in made.chains[made.tasks[number].chain].operators
            ],
            "skipped_on_the_way": {"map": 2} if number == 0 else {"write": 1},
            "latency_us": latency.sparse(),
            "latency_all_us": latency.sparse(),
        }
        tasks.append(TaskLoad(**{**task, **changes}))
    return {
        "index": worker,
        "time_ns": int(seconds * SECOND),
        "loop_ns": int(seconds * SECOND / 5),
        "core_wait_ns": int(seconds * SECOND / 10),
        "threads_ns": int(seconds * SECOND / 2),
        "tasks": tasks,
    }


def builder() -> StatusBuilder:
    made = StatusBuilder(plan())
    made.place(PLACED, WORKERS)
    return made


def test_before_any_report_everything_is_there_and_nothing_counted() -> None:
    status = builder().build("RUNNING", [], 0)
    assert set(status["operators"]) == {"read", "map", "write"}
    assert status["operators"]["map"]["parallelism"] == 2
    assert status["records_read"] == status["records_written"] == status["skipped"] == 0
    assert status["latency_ms"] == {"p50": None, "p99": None}
    assert [task["worker"] for task in status["tasks"]] == [0, 0, 1]
    json.dumps(status.plain())


def test_the_last_status_before_any_is_starting() -> None:
    made = StatusBuilder(plan())
    assert made.last()["state"] == "STARTING"
    made.place(PLACED, WORKERS)
    made.build("RUNNING", [], 0)
    assert made.last()["state"] == "RUNNING"


def test_counters_are_summed_over_tasks() -> None:
    status = builder().build("RUNNING", [report(0, 1, 10), report(1, 1, 30)], 0)
    assert status["operators"]["map"]["records_in"] == 40
    assert {name: operator["skipped"] for name, operator in status["operators"].items()} == {
        "read": 1,
        "map": 2 + 2,
        "write": 2 + 2,
    }
    assert status["operators"]["map"]["queued"] == 6
    assert status["operators"]["write"]["queued"] == 0, "what waits, waits before the chain's first operator"
    assert {name: operator["waiting"] for name, operator in status["operators"].items()} == {
        "read": 3 + 20,
        "map": 2 * (3 + 100) + 5,
        "write": 0,
    }
    assert (status["records_read"], status["records_written"]) == (10, 40)
    assert status["skipped"] == 1 + 4 + 4
    assert [worker["queued"] for worker in status["workers"]] == [6, 3]
    assert status["latency_all_ms"]["p50"] == pytest.approx(2, rel=0.04)


def test_what_a_fused_key_function_skipped_is_of_the_operator_that_it_finds_keys_for() -> None:
    flow = Flow("job", parallelism=1)
    flow.read(Memory([1, 2])).key_by(lambda n: 1 // n).count(on_error="skip").write(Null())
    made = StatusBuilder(flow.plan(1))
    made.place({0: 0}, WORKERS[:1])
    counters = {"read": 0, "count.key_by": 3, "count": 2, "write": 0}
    operators = [OperatorReport(name, 9, 9, n) for name, n in counters.items()]
    told = report(0, 1, 9, operators=operators, skipped_on_the_way={})
    status = made.build("RUNNING", [{**told, "tasks": told["tasks"][:1]}], 0)
    assert status["operators"]["count"]["skipped"] == status["skipped"] == 5
    assert sum(operator["skipped"] for operator in status["operators"].values()) == 5


@pytest.mark.parametrize("taken", [False, True])
def test_late_records_are_dropped_where_nobody_takes_them(taken: bool) -> None:
    flow = Flow("job", parallelism=1)
    counts = flow.read(Memory([1, 2])).watermark(int).key_by(int).window(Tumbling(1)).count(name="counts")
    counts.write(Null())
    if taken:
        counts.side_output("late").write(Null(), name="late")
    made = flow.plan(1)
    builder = StatusBuilder(made)
    builder.place({task.number: 0 for task in made.tasks}, WORKERS[:1])
    (sample,) = [task for task in report(0, 1, 9)["tasks"] if task.number == 0]
    tasks = [
        sample.changed(
            number=task.number,
            skipped_on_the_way={},
            operators=[
                OperatorReport(op.name, 9, 9, 0, 3 * (op.name == "counts")) for op in made.chains[task.chain].operators
            ],
        )
        for task in made.tasks
    ]
    status = builder.build("RUNNING", [{**report(0, 1, 9), "tasks": tasks}], 0)
    assert status["operators"]["counts"]["late"] == 3
    assert status["late_dropped"] == ({} if taken else {"counts": 3})


def test_rates_are_the_difference_of_two_reports() -> None:
    made = builder()
    first = made.build("RUNNING", [report(0, 10, 100), report(1, 10, 100)], 0)
    assert first["read_per_s"] == 0
    status = made.build("RUNNING", [report(0, 12, 300), report(1, 11, 400)], 0)
    assert status["read_per_s"] == status["operators"]["read"]["out_per_s"] == 100
    assert status["operators"]["map"]["in_per_s"] == 100 + 300
    assert status["operators"]["map"]["busy"] == 0.25
    assert status["operators"]["map"]["cpu"] == 0.125
    assert status["operators"]["read"]["cpu"] == 0.125 + 0.5, "with the threads of its functions"
    assert [worker["cpu"] for worker in status["workers"]] == [0.2, 0.2]
    assert [worker["cpu_wait"] for worker in status["workers"]] == [0.1, 0.1]
    assert [worker["cpu_threads"] for worker in status["workers"]] == [0.5, 0.5]


@pytest.mark.parametrize("gap", [0.05, 0.1, 0.3, 0.49, 0.5, 0.7, 3.0])
def test_rates_are_right_however_often_one_asks(gap: float) -> None:
    made = builder()
    for i in range(40):
        status = made.build("RUNNING", [report(0, 1 + i * gap, int(1000 * i * gap))], 0)
        if i * gap >= 1:
            assert status["read_per_s"] == pytest.approx(1000, rel=0.1)


@given(st.lists(st.floats(0.01, 2), min_size=3, max_size=30))
def test_rates_are_taken_over_half_a_second_at_least(gaps: list[float]) -> None:
    """A burst of one record in the last hundredth of a second is no rate of a hundred records a second."""
    made = builder()
    now = 1.0
    for gap in gaps:
        made.build("RUNNING", [report(0, now, 0)], 0)
        now += gap
    status = made.build("RUNNING", [report(0, now, 1)], 0)
    if sum(gaps) >= 1:
        assert 0 < status["read_per_s"] <= 2.001


def test_the_same_report_twice_changes_nothing() -> None:
    made = builder()
    made.build("RUNNING", [report(0, 1, 0)], 0)
    status = made.build("RUNNING", [report(0, 2, 100)], 0)
    assert made.build("RUNNING", [report(0, 2, 100)], 0)["read_per_s"] == status["read_per_s"] == 100


def test_a_worker_that_is_silent_keeps_its_counts() -> None:
    made = builder()
    made.build("RUNNING", [report(0, 1, 10), report(1, 1, 30)], 0)
    assert made.build("RUNNING", [report(0, 2, 20)], 0)["operators"]["map"]["records_in"] == 50


def test_what_a_worker_says_of_another_plan_does_not_count() -> None:
    """While a plan changes: the numbers are those of other tasks."""
    made = builder()
    made.build("RUNNING", [report(0, 1, 10), report(1, 1, 30)], 0)
    flow = Flow("job", parallelism=1)
    flow.read(Memory([1, 2])).map(str, on_error="skip").rebalance().write(Null(), parallelism=2)
    other = made.of(flow.plan(2))
    other.place(PLACED, WORKERS)
    status = other.build("RUNNING", [report(0, 2, 20), report(1, 2, 40)], 0)
    assert status["records_read"] == 0
    assert status["operators"]["map"]["records_in"] == 0
    json.dumps(status.plain())


def test_a_task_that_has_moved_counts_where_it_is() -> None:
    made = builder()
    made.build("RUNNING", [report(0, 1, 10), report(1, 1, 30)], 0)
    made.place({**PLACED, 2: 0}, WORKERS)
    moved = report(0, 2, 20)
    moved["tasks"].append(report(1, 2, 50)["tasks"][0])
    status = made.build("RUNNING", [moved], 0)
    assert status["operators"]["map"]["records_in"] == 20 + 50


def test_a_task_that_has_moved_to_a_worker_that_has_said_nothing_is_as_the_worker_before_told() -> None:
    made = builder()
    made.build("RUNNING", [report(1, 1, 30)], 0)
    made.build("RUNNING", [report(1, 2, 60)], 0)
    made.place({**PLACED, 2: 0}, WORKERS)
    status = made.build("MOVING", [], 0)
    assert status["operators"]["map"]["records_in"] == 60
    assert (status["operators"]["map"]["in_per_s"], status["operators"]["map"]["busy"]) == (30, 0.25)


def test_a_task_that_went_back_has_no_negative_rates() -> None:
    """It counts on from what its epoch had counted, and its process is another."""
    made = builder()
    made.build("RUNNING", [report(0, 1, 500), report(1, 1, 500)], 0)
    status = made.build("RUNNING", [report(0, 2, 100, busy_ns=0), report(1, 2, 100, busy_ns=0)], 0)
    assert status["operators"]["map"]["records_in"] == 200
    assert status["read_per_s"] == status["operators"]["map"]["in_per_s"] == status["operators"]["map"]["busy"] == 0
    assert {task["busy"] for task in status["tasks"]} == {0}


def test_a_relay_that_has_said_nothing_yet_has_zeros_for_what_it_will_say() -> None:
    relay = Relay(FIRST_RELAY, cast(PeerTransport, None))
    assert relay.status() == RelayStatus(number=FIRST_RELAY)


def test_of_several_calls_that_do_not_return_the_longest_is_told() -> None:
    def closing(worker: int, for_s: float, failure: str | None = None) -> dict[str, Any]:
        return {
            "index": worker,
            "hook": {"operator": f"op{worker}", "name": "close", "for_s": for_s, "failure": failure},
        }

    none = {"index": 0, "hook": None}
    rows = [WorkerStatus(**info) for info in WORKERS]
    assert hook_words([none, closing(1, 9.0)], rows, 10) is None
    assert hook_words([none, closing(1, 12.0)], rows, 10) == (
        "close() of operator 'op1', which has not returned for 12 s in worker 1 (process 101). Correct what it waits "
        "for; to end the job without it, cancel the job."
    )
    said = hook_words([closing(0, 13.0, "it was full."), closing(1, 12.0)], rows, 10)
    assert said is not None
    assert "'op0', which has not returned for 13 s in worker 0 (process 100), nor have calls in 1 more" in said
    assert "; what failed before: it was full. Correct" in said
