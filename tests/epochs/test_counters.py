"""A task continues its counters from the epoch to which it goes back."""

from __future__ import annotations

from collections import Counter
from typing import Any

from penstock.runtime.epochs.snapshot import counters_of, encode_snapshot
from penstock.runtime.event_time.windows import Tumbling
from penstock.runtime.program.flow import Stream
from penstock.runtime.sinks.call import Null
from penstock.runtime.state.keyed import SavedState
from penstock.runtime.worker.load import task_load
from penstock.runtime.worker.task import Task
from tests.operators.test_map_batches import MS, Paced, World


def key(record: int) -> int:
    if record % 10 == 0:
        raise ValueError(f"{record} has no key")
    return record % 3


def stream(read: Stream) -> Any:
    """Each tenth record is skipped on the way to the window; of the others all but the first second's are late."""
    marked = read.map(lambda at: at // MS, name="ms").watermark(lambda ms: 10_000 - 5 * ms)
    return marked.key_by(key).window(Tumbling(1)).count(name="count", on_error="skip").write(Null())


def counted(tasks: list[Task]) -> tuple[dict[str, int], int]:
    """Records skipped, by the operator whose policy let them go, and late, as a job's status sums them up."""
    told = [task_load(task, lambda channel: None) for task in tasks]
    skipped: Counter[str] = Counter()
    for one in told:
        skipped.update({operator.name: operator.skipped for operator in one.operators})
        skipped.update(one.skipped_on_the_way)
    return +skipped, sum(operator.late for one in told for operator in one.operators)


def test_what_was_skipped_on_the_way_and_late_is_counted_on() -> None:
    world = World()
    tasks = world.tasks(stream, Paced(world, 1000, 2), chaining=False, epochs=True)
    source = tasks[0]
    assert source.input.is_read
    while world.now < 1000 * MS:
        world.turn(tasks)
    source.trigger(1)
    while len(world.snapshots) < len(tasks):
        world.turn(tasks)
    before = counted(tasks)
    assert before[0].keys() == {"count"}
    assert min(before[0]["count"], before[1]) > 50
    saved = {
        snapshot.task.number: counters_of(b"".join(encode_snapshot(snapshot.states, 128)))
        for snapshot in world.snapshots
    }
    again = World().tasks(stream, Paced(world, 1000, 2), chaining=False, epochs=True)
    assert counted(again) == ({}, 0)
    for task in again:
        states = {name: SavedState(counters=counts) for name, counts in saved[task.task.number].items()}
        task.restore(1, states, finished=False, whole_next=True)
    assert counted(again) == before
