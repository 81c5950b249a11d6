"""Functions that change records of other tasks are found, and the runtime itself changes none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import penstock as ps
from penstock.runtime.errors import RecordError
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.wiring import build


def spoil(record: dict[str, Any]) -> dict[str, Any]:
    record["n"] += 1
    return record


def spoil_batch(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for record in records:
        record.clear()
        yield record


def spoil_many(record: dict[str, Any]) -> list[dict[str, Any]]:
    record["more"] = [1]
    return [record]


def through(how: str, stream: Stream) -> Any:
    if how == "map":
        return stream.map(dict, name="copies").map(spoil, name="fine").map(str, name="text")
    if how == "map itself":
        return stream.map(lambda record: record, name="same").map(spoil, name="spoils").map(str, name="text")
    if how == "filter":
        return stream.filter(lambda record: bool(record.pop("n", True)), name="spoils")
    if how == "flat_map":
        return stream.flat_map(spoil_many, name="spoils")
    assert how == "map_batches"
    return stream.map_batches(spoil_batch, name="spoils")


@pytest.mark.parametrize("batch_size", [1, 7])
@pytest.mark.parametrize("how", ["map", "map itself", "filter", "flat_map", "map_batches"])
def test_the_operator_is_named_that_changes_a_shared_record(how: str, batch_size: int) -> None:
    flow = Flow("shared")
    stream = flow.read(ps.sources.Memory([{"n": n} for n in range(20)]), parallelism=1).broadcast()
    through(how, stream).write(ps.sinks.Collect(), name="out")
    if how == "map":
        assert len(ps.testing.run(flow, parallelism=3, batch_size=batch_size)["out"]) == 60
        return
    with pytest.raises(RecordError, match=r"(?s)operator 'spoils' failed.*other tasks have too") as caught:
        ps.testing.run(flow, parallelism=3, batch_size=batch_size)
    assert caught.value.operator == "spoils"


@pytest.mark.parametrize("chaining", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7])
@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("how", ["map", "map itself", "filter", "flat_map", "map_batches"])
def test_the_operator_is_named_that_changes_the_records_of_another_branch(
    how: str, parallelism: int, batch_size: int, chaining: bool
) -> None:
    flow = Flow("forked", chaining=chaining)
    stream = flow.read(ps.sources.Memory([{"n": n} for n in range(20)])).map(dict, name="copy")
    stream.map(lambda record: record["n"]).write(ps.sinks.Collect(), name="other")
    through(how, stream).write(ps.sinks.Collect(), name="out")
    if how == "map":
        out = ps.testing.run(flow, parallelism=parallelism, batch_size=batch_size)
        assert sorted(out["other"]) == list(range(20))
        return
    with pytest.raises(RecordError, match=r"(?s)operator 'spoils' failed.*other tasks have too") as caught:
        ps.testing.run(flow, parallelism=parallelism, batch_size=batch_size)
    assert caught.value.operator == "spoils"


def popped(record: dict[str, Any]) -> Any:
    return record.pop("n")


def kept(ctx: ps.ProcessContext, key: Any, record: dict[str, Any]) -> None:
    record["seen"] = True


FAR: dict[str, Any] = {
    "after a filter": lambda s: s.filter(bool).rebalance().map(spoil, name="spoils"),
    "after a filter and a key": lambda s: s.filter(bool).key_by("n").process(kept, name="spoils"),
    "two forks later": lambda s: s.filter(bool).rebalance().filter(bool).rebalance().map(spoil, name="spoils"),
    "a key function": lambda s: s.key_by(popped).count(name="spoils"),
    "a chooser": lambda s: s.partition_by(lambda r, n: r.pop("n") % n).map(str, name="spoils"),
    "a value of an aggregate": lambda s: s.key_by("n").sum(popped, name="spoils"),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("what", FAR)
def test_a_change_is_found_wherever_it_is_made(what: str, parallelism: int, first: bool) -> None:
    flow = Flow("forked")
    stream = flow.read(ps.sources.Memory([{"n": n} for n in range(20)]))
    if not first:
        stream.map(dict).write(ps.sinks.Collect(), name="other")
    FAR[what](stream).write(ps.sinks.Collect(), name="out")
    if first:
        stream.map(dict).write(ps.sinks.Collect(), name="other")
    with pytest.raises(RecordError, match="other tasks have too") as caught:
        ps.testing.run(flow, parallelism=parallelism)
    assert caught.value.operator == "spoils"


def test_copies_may_be_changed_behind_a_fork() -> None:
    """A branch that has made records of its own may change them, also in another task."""
    flow = Flow("copied")
    stream = flow.read(ps.sources.Memory([{"n": n} for n in range(20)]))
    stream.map(dict).rebalance().map(spoil).write(ps.sinks.Collect(), name="out")
    stream.map(lambda record: record["n"]).write(ps.sinks.Collect(), name="other")
    out = ps.testing.run(flow, parallelism=2)
    assert sorted(record["n"] for record in out["out"]) == list(range(1, 21))
    assert sorted(out["other"]) == list(range(20))


def audited(ctx: ps.ProcessContext, key: Any, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    ctx.output("audit", record)
    yield record


@pytest.mark.parametrize("spoils", ["main", "audit"])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_side_output_may_have_the_records_of_the_main_output(spoils: str, parallelism: int) -> None:
    flow = Flow("sides")
    both = flow.read(ps.sources.Memory([{"n": n} for n in range(20)])).key_by("n").process(audited, outputs=("audit",))
    for name, stream in (("main", both), ("audit", both.side_output("audit"))):
        stream.rebalance().map(spoil if name == spoils else dict, name=f"of {name}").write(ps.sinks.Null())
    with pytest.raises(RecordError, match="other tasks have too") as caught:
        ps.testing.run(flow, parallelism=parallelism)
    assert caught.value.operator == f"of {spoils}"


@pytest.mark.parametrize("how", ["map", "sink"])
def test_a_local_job_names_who_changed_the_records_of_another_branch(how: str, tmp_path: Any) -> None:
    flow = Flow("forked")
    stream = flow.read(ps.sources.Memory([{"n": n} for n in range(20)]))
    if how == "map":
        stream.map(spoil, name="spoils").write(ps.sinks.Null(), name="out")
    else:
        stream.write(ps.sinks.Call(popped), name="spoils")
    stream.map(lambda record: record["n"]).write(ps.sinks.Null(), name="other")
    with pytest.raises(ps.JobFailed, match=r"(?s)operator 'spoils' failed.*other tasks have too"):
        ps.run(flow, local=True, check_shared=True, checkpoints=str(tmp_path)).wait(progress=False)


def test_records_that_one_task_has_may_be_changed() -> None:
    flow = Flow("alone")
    flow.read(ps.sources.Memory([{"n": n} for n in range(20)]), parallelism=1).rebalance().map(spoil).write(
        ps.sinks.Collect(), name="out"
    )
    assert len(ps.testing.run(flow, parallelism=3)["out"]) == 20


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("epochs", [False, True])
def test_the_runtime_changes_no_batch_that_several_tasks_have(local: bool, epochs: bool) -> None:
    """Every kind of stage takes shared lists; what it passes on, gathers or keeps must not change them."""
    flow = Flow("shared", chaining=False)
    source = flow.read(ps.sources.Memory([]), parallelism=1).broadcast()
    gathered = source.map_batches(list, min_batch=5, linger_s=10, batch_size=8, parallelism=2)
    twice = source.flat_map(lambda record: [record, record], parallelism=2).rebalance().map(dict, parallelism=2)
    same = source.map(lambda record: record, parallelism=2)
    some = source.filter(lambda record: record["n"] % 2 == 0, parallelism=2)
    for stream in (gathered, twice, same, some, source):
        stream.write(ps.sinks.Collect(), parallelism=2)
    flow_plan = flow.plan(1)
    network = MemoryNetwork(2)
    placed = {task.number: 0 if local or not task.number else 1 for task in flow_plan.tasks}
    loops = []
    for worker in (0, 1):
        wiring = build(
            flow_plan,
            placed,
            worker,
            network.transport(worker),
            clock=time.monotonic_ns,
            report=lambda _: None,
            output_caches=OutputCaches() if epochs else None,
            on_snapshot=(lambda _: None) if epochs else None,
            check_shared=True,
        )
        loops.append(RunLoop(wiring, wiring._transport, time.monotonic_ns))
    for loop in loops:
        for task in loop.tasks:
            task.open()
    taken: list[tuple[Any, list[Any]]] = []
    shared = loops[0 if local else 1].wiring.shared_batches
    assert shared is not None
    add = shared.add

    def noted(batch: Any) -> None:
        taken.append((batch, list(batch)))
        add(batch)

    shared.add = noted  # type: ignore[method-assign]
    for loop in loops:
        for task in loop.tasks:
            for log in task.logs:
                log.on_shared = noted
    for i in range(30):
        for log in loops[0].tasks[0].logs:
            log.push([{"n": i * 10 + j} for j in range(i % 7 + 1)], 0)
            log.flush()
        for _ in range(3):
            for loop in loops:
                loop.deliver(loop.transport.receive(0))
                for task in loop.tasks[local or loop is loops[0] :]:
                    if task.runnable():
                        task.step()
    assert len(taken) >= 5 * 15
    assert all(list(batch) == before for batch, before in taken), "a list was changed"
