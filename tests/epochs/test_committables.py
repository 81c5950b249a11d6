"""A job that goes back first commits what its sinks have prepared, in all workers, and then makes their writers."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.runtime.epochs.coordinator import BuildTasks, ConnectTasks
from penstock.runtime.epochs.participant import Participant
from penstock.runtime.errors import RecordError
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks.base import Committable
from penstock.runtime.sinks.two_phases import SavedSink
from penstock.runtime.sources.memory import Memory
from penstock.runtime.state.keyed import SavedState
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.wiring import Wiring, WiringOptions
from tests.sinks.test_two_phases import Outside


def going_back(sink: Outside, monkeypatch: pytest.MonkeyPatch, *saved: SavedSink) -> Participant:
    """A worker whose tasks are about to be built from this, which tasks have saved of the sink."""
    flow = Flow("job")
    flow.read(Memory([1], splits=1), parallelism=1).write(sink, name="out", parallelism=1)
    plan = flow.plan(1)
    transport = MemoryNetwork(1).transport(0)
    clock = lambda: 0
    options = WiringOptions(clock, lambda reported: None, output_caches=OutputCaches(1 << 20))
    participant = Participant(None, plan.key_groups, lambda report: None, lambda work: None)
    placed = {task.number: 0 for task in plan.tasks}
    participant.loop = RunLoop(Wiring(plan, placed, 0, transport, options), transport, clock)
    states = {"out": SavedState(own=list(saved))}
    monkeypatch.setattr(
        participant, "read", lambda command: {number: (dict(states), False, True, None) for number in placed}
    )
    return participant


def obey(participant: Participant, command: Any) -> None:
    future = participant.obey(command)
    participant.loop.do_calls()
    future.result(0)


def test_all_is_committed_before_writers_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sink = Outside()
    saved = [SavedSink("here", [Committable(4, 0, "a")]), SavedSink("removed", [Committable(5, 7, "b")])]
    participant = going_back(sink, monkeypatch, *saved)
    tasks = frozenset(participant.loop.wiring.plan.by_number)
    obey(participant, BuildTasks(tasks, 2, 5, {}))
    assert sink.committed == [[(4, "a"), (5, "b")]]
    assert sink.calls == ["committer", "close committer"]  # other workers may still be committing
    obey(participant, ConnectTasks(tasks, 2, ()))
    assert sink.calls[2:] == ["writer", ("restore", 5, ["here", "removed"])]


def test_a_commit_that_fails_for_good_is_told_to_whoever_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Outside()
    sink.failures = [RuntimeError("the transaction is lost")]
    participant = going_back(sink, monkeypatch, SavedSink(None, [Committable(4, 0, "a")]))
    tasks = frozenset(participant.loop.wiring.plan.by_number)
    with pytest.raises(RecordError, match="operator 'out' failed: RuntimeError: the transaction is lost"):
        participant.obey(BuildTasks(tasks, 2, 5, {}))
    assert sink.calls == ["committer", "close committer"]
