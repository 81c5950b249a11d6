"""Where the time of a micro-batch goes between a record task and its answer from Spark (docs/papers.md: D4).

The hand-over of the Yahoo topology's range is taken apart step by step, in a process of its own, on plain PySpark and
on RayDP, for a small and a large micro-batch, with a plan that is made anew for each micro-batch and with the plan that
is kept. The steps are those of `Operations.answer` and of the worker's link. Besides seconds there are figures that
other load on the machine hardly moves: CPU seconds of the driver with its JVM, and round trips between the two.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

import psutil
import pyarrow as pa

import penstock as ps
from benchmarks.common import Bench, median, print_table, run_script
from benchmarks.spark_session import KINDS, session_of
from penstock.apps import ysb
from penstock.apps.ysb_events import Events, EventSource
from penstock.bridge.arrow import micro_batch
from penstock.bridge.forms import RangeForm, RangeRun, as_records, range_form
from penstock.bridge.kept_plan import KeptPlan
from penstock.bridge.native import native
from penstock.bridge.operation import Operations
from penstock.bridge.python_range import take_in_pieces
from penstock.bridge.reused_memory import ReusedMemory, shared_file
from penstock.bridge.session import Session
from penstock.runtime.program.flow import Flow
from penstock.runtime.records.pickling import dumps

STEPS = ("write", "map", "frame", "make the plan", "put the input below it", "run and collect", "decode", "reply")


def _round_trips() -> Callable[[], int]:
    """Counts the commands that go to the JVM from now on."""
    from py4j.clientserver import JavaClient
    from py4j.java_gateway import GatewayClient

    sent = [0]

    def counted(send: Any) -> Any:
        def send_command(self: Any, *args: Any, **named: Any) -> Any:
            sent[0] += 1
            return send(self, *args, **named)

        return send_command

    for client in (GatewayClient, JavaClient):
        if "send_command" in vars(client):
            client.send_command = counted(client.send_command)
    return lambda: sent[0]


def _processes(session: Session) -> list[int]:
    """This process and the session's executors."""
    return list({os.getpid(), *(executor.pid for executor in session.executors() if executor.pid is not None)})


def busy_s(pids: list[int]) -> float:
    """The CPU seconds of these processes and of all below them: the JVM, and the Python workers, which Spark reuses. In
    hundredths."""
    found = {pid: psutil.Process(pid) for pid in pids}
    for process in list(found.values()):
        found.update((child.pid, child) for child in process.children(recursive=True))
    times = [process.cpu_times() for process in found.values()]
    return sum(each.user + each.system for each in times)


def _measure(session: Session, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns for each size and plan, kept or anew, the medians of seconds by step, of CPU seconds, and of round
    trips."""
    events = Events(rate="20000")
    topology = ysb.topology(EventSource(events), events.campaigns(), ps.sinks.Null()).plan(1)
    form = range_form(topology, topology.chains[0])
    assert isinstance(form, RangeForm)
    compiled = native(form, session, ["value"])
    assert compiled is not None
    assert compiled.end is not None
    trips = _round_trips()
    pids = _processes(session)
    found: dict[str, Any] = {}
    plan: KeptPlan | None = None
    for size in settings["sizes"]:
        batch = events.events_arrow(0, size)
        ways: dict[str, list[dict[str, float]]] = {"anew": [], "kept": []}
        for number in range(settings["warm"] + settings["repeats"]):
            for way, taken in ways.items():
                at: list[float] = []
                cpu, sent = busy_s(pids), trips()
                at.append(time.perf_counter())
                fd = os.memfd_create("bench-spark-handover")
                with pa.OSFile(f"/proc/self/fd/{fd}", "wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
                    stream.write_batch(batch)
                at.append(time.perf_counter())
                with pa.memory_map(f"/proc/self/fd/{fd}") as source:
                    (columns,) = pa.ipc.open_stream(source)
                    at.append(time.perf_counter())
                    with micro_batch(session, columns, parts=session.cores) as rows:
                        at.append(time.perf_counter())
                        if way == "anew" or plan is None:
                            plan = KeptPlan.of(compiled.apply(rows))
                            assert plan is not None
                        at.append(time.perf_counter())
                        jplan = plan.above(rows)
                        at.append(time.perf_counter())
                        table = plan.collect(jplan)
                        at.append(time.perf_counter())
                answer = compiled.end(table)
                at.append(time.perf_counter())
                dumps((answer.batches, answer.greatest))
                at.append(time.perf_counter())
                os.close(fd)
                if number >= settings["warm"]:
                    steps = {step: end - begin for step, begin, end in zip(STEPS, at, at[1:], strict=False)}
                    sent = trips() - sent
                    taken.append({**steps, "all": at[-1] - at[0], "cpu": busy_s(pids) - cpu, "trips": sent})
        found[str(size)] = {
            way: {key: (mean if key == "cpu" else median)([one[key] for one in taken]) for key in taken[0]}
            for way, taken in ways.items()
        }
    return found


_YAHOO, _HEAVY = "Yahoo", "a heavy map_batches"

# The least share of a record task's records that a CPU second of Spark is to process.
_GOALS = {_YAHOO: 0.75, _HEAVY: 0.9}


def _heavy(rows: list[Any]) -> list[Any]:
    """A heavy function of the user's: some 30 us a record."""
    return [sum(map(hash, row * 6)) for row in rows]


def _ways(session: Session, settings: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Returns for two ranges the CPU seconds of a million records as the record tasks process them, and in each way in
    which Spark can, one after the other in each round, and each round after those in which Java still compiles."""
    events = Events(rate="20000")
    count = settings["count"]
    pids = _processes(session)
    heavy = Flow("heavy")
    heavy.read(EventSource(events)).map_batches(_heavy).write(ps.sinks.Null())
    yahoo = ysb.topology(EventSource(events), events.campaigns(), ps.sinks.Null())
    found: dict[str, dict[str, list[float]]] = {}
    for name, flow, size, warm in ((_YAHOO, yahoo, count, settings["warm"]), (_HEAVY, heavy, count // 8, 2)):
        plan = flow.plan(1, check_sinks=False)
        form = range_form(plan, plan.chains[0])
        assert isinstance(form, RangeForm)
        operations = Operations(session, [form])
        ways = operations.ways(form, ("value",))
        batch = events.events_arrow(0, size)
        took: dict[str, list[float]] = {}
        for number in range(warm + settings["rounds"]):
            for way in ("records", *ways):
                began = busy_s(pids)
                if way == "records":
                    run = RangeRun(form)
                    take_in_pieces(run, batch, as_records)
                    run.answer()
                else:
                    operations.answer(form.chain, form.position, batch, way)
                if number >= warm:
                    took.setdefault(way, []).append((busy_s(pids) - began) / size * 1e6)
        found[name] = took
    return found


def _writing(bench: Bench) -> None:
    """What it takes to write an event into memory that an earlier micro-batch has left, and into new memory."""
    count, rounds = bench.pick((200_000, 15), (20_000, 3))
    batch = Events(rate="20000").events_arrow(0, count)
    makers: dict[str, Callable[[], Any]] = {
        "shared memory": partial(shared_file, "bench-spark-handover"),
        "memory of the process, for Ray's object store": io.BytesIO,
    }
    for name, make in makers.items():
        kept, new = ReusedMemory(make), ReusedMemory(make, limit=0)
        again: list[float] = []
        anew: list[float] = []
        for _ in range(rounds):
            for memory, took in ((kept, again), (new, anew)):
                began = time.perf_counter()
                with memory.lend() as buffer:
                    with pa.ipc.new_stream(buffer, batch.schema) as stream:
                        stream.write_batch(batch)
                    buffer.truncate()
                    took.append((time.perf_counter() - began) / count * 1e9)
        kept.close()
        bench.case(
            f"an event written into {name} that is written again",
            median(again),
            "ns",
            peer="new memory",
            peer_figure=median(anew),
            config=f"{count:,} events of {batch.nbytes / count:.0f} bytes",
            runs=again,
            peer_runs=anew,
            checked=False,
        )


def main(settings: dict[str, Any]) -> None:
    """See the module."""
    with session_of(settings["kind"], 2, settings["memory"]) as session:
        found = {"steps": _measure(session, settings["steps"]), "ways": _ways(session, settings["ways"])}
    print(json.dumps(found))


def run(bench: Bench) -> None:
    """See the module."""
    _writing(bench)
    sizes, warm, repeats = bench.pick(([1_000, 100_000], 10, 12), ([1_000], 2, 3))
    steps = {"sizes": sizes, "warm": warm, "repeats": repeats}
    count, warm, rounds = bench.pick((400_000, 8, 7), (20_000, 1, 1))
    kinds = bench.pick(KINDS, {"raydp": KINDS["raydp"]})  # a session takes most of a short run
    found: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        settings = {
            "kind": kind,
            "memory": "2g",
            "steps": steps,
            "ways": {"count": count, "warm": warm, "rounds": rounds},
        }
        found[kind] = json.loads(run_script("benchmarks.spark_handover", settings, timeout=1800).splitlines()[-1])
    rows = []
    for kind in kinds:
        for size, ways in found[kind]["steps"].items():
            for way, taken in ways.items():
                rows.append(
                    (kind, size, f"plan {way}", *(f"{taken[step] * 1e3:.1f}" for step in (*STEPS, "all", "cpu")))
                )
            for figure, unit in (("trips", "round trips"), ("cpu", "CPU s"), ("all", "s")):
                bench.case(
                    f"a micro-batch of {size} events, {kind}",
                    ways["kept"][figure],
                    unit,
                    peer="with a plan made anew",
                    peer_figure=ways["anew"][figure],
                    config="2 cores; CPU is that of the driver, its JVM and the executor",
                    checked=False,
                )
    best: dict[str, dict[str, float]] = {name: {} for name in _GOALS}
    for kind, name_of_kind in kinds.items():
        for name, took in found[kind]["ways"].items():
            records = took.pop("records")
            # The machine's speed changes from round to round, and hardly within a round. A process that has ended in a
            # round has taken its CPU seconds along.
            shares = {
                way: [one / other for one, other in zip(records, took[way], strict=True) if min(one, other) > 0]
                for way in took
            }
            kept = max(shares, key=lambda way: median(shares[way]))
            best[name][kind] = median(shares[kept])
            for way, runs in shares.items():
                spark, record = 1e6 / median(took[way]), 1e6 / median(records)
                bench.case(
                    f"{name} in Spark, the way {way!r}, {kind}",
                    median(runs),
                    "of a record task's records/CPU s",
                    config=f"{name_of_kind}, 2 cores, {count:,} events and an eighth of them",
                    note=f"medians of records/CPU s: {spark:,.0f} in Spark, {record:,.0f} in a record task",
                    goal=f">= {_GOALS[name]}" if way == kept else None,
                    runs=runs,
                )
    for name, shares_of_kinds in best.items():
        bench.case(
            f"{name} in its best way, RayDP",
            shares_of_kinds["raydp"],
            "of a record task's records/CPU s",
            peer=kinds.get("pyspark"),
            peer_figure=shares_of_kinds.get("pyspark"),
            goal=">= 0.95" if "pyspark" in kinds else None,
        )
    columns = ("session", "events", "", *STEPS, "all", "CPU")
    print_table("ms of a micro-batch by step, medians", columns, rows)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
