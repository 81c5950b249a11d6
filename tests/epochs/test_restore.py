"""From what the tasks of one plan saved to the tasks of another: nothing is lost, and nothing has two owners."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import pytest

from penstock.runtime.epochs.manifest import FORMAT, Blob, TaskEntry
from penstock.runtime.epochs.restore import check, kinds_with_state, read_changed, read_same, same_tasks
from penstock.runtime.epochs.snapshot import counters_of, encode_snapshot
from penstock.runtime.errors import FlowError, StoreError
from penstock.runtime.operators.stateless import Map
from penstock.runtime.program.flow import Flow
from penstock.runtime.program.plan import Plan, TaskId, fused_by_key, replanned, rescaled
from penstock.runtime.records import class_evolution
from penstock.runtime.records.key_groups import key_groups
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.memory import Memory
from penstock.runtime.state.aggregate import merge_of
from penstock.runtime.state.keyed import KeyedDelta, KeyedValues, KeyedWhole, StageState

GROUPS = 16
STATE = {f"key {i}": i for i in range(200)}


def groups_of(keys: list[Any]) -> list[int]:
    return list(array("H", key_groups(keys, GROUPS)))


def flow_of(sources: int, counts: int, sinks: int, name: str = "count", key_groups: int = GROUPS) -> Flow:
    flow = Flow("job", key_groups=key_groups)
    stream = flow.read(Memory(range(100), splits=5), parallelism=sources).map(str, parallelism=sources)
    stream.key_by(str).count(name=name, parallelism=counts).write(Null(), parallelism=sinks)
    return flow


def saved(plan: Plan, finished: bool = False) -> list[TaskEntry]:
    """What the tasks of a plan would save, with STATE in the operator "count"."""
    entries = []
    for task in plan.tasks:
        chain = plan.chains[task.chain]
        states: dict[str, Any] = {}
        for operator in chain.operators:
            state = None
            if operator.name == "count":
                mine = set(plan.groups(task) or ())
                kept = [key for key, group in zip(STATE, groups_of(list(STATE)), strict=True) if group in mine]
                state = StageState({"state": KeyedWhole({key: STATE[key] for key in kept})})
            elif operator.kind == "read":
                state = StageState(own=[split.at(split.payload[0] + 1) for split in chain.splits[task.index]])
            elif operator.is_sink:
                state = StageState(own=["transaction of", task.index])
            states[operator.name] = (state, (100 + task.number, 10 * task.index + 7, 1, 3 + task.number))
        for exchange in plan.exchanges:
            if exchange.source == task.chain:  # what was skipped on the way
                states[plan.chains[exchange.target].operators[0].name] = (None, (0, 0, 2, 0))
        entries.append(entry_of(plan, task, states, finished))
    return entries


def entry_of(plan: Plan, task: TaskId, states: Any, finished: bool = False) -> TaskEntry:
    """What a manifest says of a task of a plan that saved these states."""
    chain = plan.chains[task.chain]
    data = b"".join(encode_snapshot(states, GROUPS))
    return TaskEntry(
        number=task.number,
        name=plan.task_name(task),
        index=task.index,
        parallelism=chain.parallelism,
        operators=[operator.name for operator in chain.operators],
        finished=finished,
        groups=plan.groups(task),
        blobs=[Blob(f"snapshots/000001-{task.number}", len(data), 0, data)],
    )


def get(blob: Blob) -> bytes:
    assert blob.data is not None
    return blob.data


def check_counters(plan: Plan, entries: list[TaskEntry]) -> None:
    """What an operator's tasks have counted together is what those did that saved it."""
    before: Counter[tuple[str, int]] = Counter()
    after: Counter[tuple[str, int]] = Counter()
    for entry in entries:
        for name, counters in counters_of(get(entry.blobs[0])).items():
            before.update({(name, place): count for place, count in enumerate(counters)})
    known = {operator.name for chain in plan.chains for operator in chain.operators}
    for task in plan.tasks:
        for name, state in read_changed(plan, task, entries, get)[0].items():
            after.update({(name, place): count for place, count in enumerate(state.counters)})
    saved = {operator for entry in entries for operator in entry.operators}
    for chain in plan.chains:
        for sender, key_by, keyed in zip(chain.operators, chain.operators[1:], chain.operators[2:], strict=False):
            if key_by.kind == "key_by" and key_by.name not in saved:  # fused just now: its records came by a channel
                assert after.pop((key_by.name, 0), 0) == after[sender.name, 1]
                assert after.pop((key_by.name, 1), 0) == after[keyed.name, 0]
    assert +after == Counter({place: count for place, count in before.items() if place[0] in known and count})


def check_all_there(plan: Plan, entries: list[TaskEntry], splits: int = 5) -> None:
    """Every key, split and transaction goes to exactly one task of the plan: keys to the owner of their group."""
    state: dict[Any, Any] = {}
    read: Counter[str] = Counter()
    transactions: list[Any] = []
    for task in plan.tasks:
        states, finished, whole, given = read_changed(plan, task, entries, get)
        assert not finished
        assert whole
        mine = states["count"].maps.get("state", {}) if "count" in states else {}
        assert set(groups_of(list(mine))) <= set(plan.groups(task) or ())
        assert not mine.keys() & state.keys()
        state.update(mine)
        for split in given or ():
            read[split.name] += 1
            assert split.offset == split.payload[0] + 1
        for operator in plan.chains[task.chain].operators:
            if operator.is_sink:
                transactions += states[operator.name].own
    check_counters(plan, entries)
    assert state == STATE
    assert sorted(read.values()) == [1] * splits
    assert len(transactions) == len([entry for entry in entries if "write" in entry.operators])


@pytest.mark.parametrize("seed", range(60))
def test_any_plan_continues_from_any_other(seed: int) -> None:
    rng = random.Random(seed)
    before = flow_of(rng.randrange(1, 5), rng.randrange(1, 9), rng.randrange(1, 4)).plan()
    after = flow_of(rng.randrange(1, 5), rng.randrange(1, 9), rng.randrange(1, 4)).plan()
    check_all_there(after, saved(before))


def test_a_sink_that_has_something_to_commit_is_not_forgotten() -> None:
    plan = flow_of(1, 1, 1).plan()
    (sink,) = [operator.name for chain in plan.chains for operator in chain.operators if operator.is_sink]
    check(plan, kinds_with_state(plan), plan.key_groups, [sink])
    for name in ("gone", "count"):  # under this name there is something else
        with pytest.raises(FlowError, match=f"has no sinks '{name}', and records of these were prepared .* '{sink}'"):
            check(plan, kinds_with_state(plan), plan.key_groups, [sink, name])


@pytest.mark.parametrize("seed", range(60))
def test_rescaling_again_and_again(seed: int) -> None:
    """Numbers of tasks and channels stay or are new; groups move only where they must."""
    rng = random.Random(seed)
    flow = flow_of(rng.randrange(1, 4), rng.randrange(1, 6), rng.randrange(1, 4))
    plan = flow.plan()
    for _ in range(6):
        operator = rng.choice(["read", "count", "write"])
        parallelism = rng.randrange(1, 9)
        entries = saved(plan)
        if parallelism > 1 and fused_by_key(plan, operator):
            after = replanned(flow.graph, plan, operator, parallelism, flow.chaining)
        else:
            after = rescaled(plan, operator, parallelism)
            old = plan.chain_of(operator)
            for task in plan.tasks:
                if task.chain != old.index:
                    assert after.by_number[task.number] == task
            moved = sum(
                after.groups(task) is not None and set(after.groups(task) or ()) != set(plan.groups(task) or ())
                for task in after.tasks
                if task.chain != old.index
            )
            assert moved == 0
            channels = [
                exchange.channel(sender, receiver)
                for exchange in after.exchanges
                for sender in range(exchange.senders)
                for receiver in exchange.targets(sender)
            ]
            assert len(set(channels)) == len(channels)
        assert after.chain_of(operator).parallelism == parallelism
        assert len({task.number for task in after.tasks}) == len(after.tasks)
        if "read" in {name for entry in entries for name in entry.operators} and plan.chain_of("read").splits[0]:
            check_all_there(after, entries)
        chain = after.chain_of("read")
        chain.splits = flow_of(chain.parallelism, 1, 1).plan().chain_of("read").splits
        plan = after


def test_the_same_tasks_are_known_and_read_as_they_were() -> None:
    plan = flow_of(2, 3, 3).plan()
    entries = saved(plan)
    assert same_tasks(plan, entries)
    assert not same_tasks(flow_of(2, 4, 3).plan(), entries)
    for task in plan.tasks:
        states, finished, whole, splits = read_same(plan, task, entries, get)
        assert not finished
        assert not whole
        assert (splits is not None) == ("read" in states)
        assert {name: state.counters for name, state in states.items()}.keys() == {
            operator.name for operator in plan.chains[task.chain].operators
        } | {plan.chains[way.target].operators[0].name for way in plan.exchanges if way.source == task.chain}


@dataclass(frozen=True)
class Account:
    """As of a program that was edited: in place of keys that were saved as their names only."""

    name: str
    zone: str = "x"

    def __reduce__(self) -> Any:
        return (str.upper if self.zone == "lost" else Account), (self.name,)


def entries_of(state: dict[Any, Any], plan: Plan, groups: Callable[[Any], Any]) -> list[TaskEntry]:
    """What the tasks of a plan saved of a state, each the keys whose groups were its own by these stand-ins."""
    entries = saved(plan)
    of_key = dict(zip(state, groups_of(list(map(groups, state))), strict=True))
    for place, entry in enumerate(entries):
        if "count" in entry.operators:
            kept = {key: value for key, value in state.items() if of_key[key] in (entry.groups or ())}
            data = b"".join(encode_snapshot({"count": (StageState({"state": KeyedWhole(kept)}), (0,) * 4)}, GROUPS))
            blob = Blob(entry.blobs[0].name, len(data), 0, data)
            entries[place] = replace(entry, operators=["count"], blobs=[blob])
    return entries


@pytest.mark.parametrize("tasks", [1, 2, 3, 8])
def test_keys_of_an_edited_class_are_found_in_their_groups_of_today(tasks: int) -> None:
    """With one field more the keys have other hashes than when they were saved, with as many tasks too."""
    state = {Account(f"k{i}"): i for i in range(200)}
    entries = entries_of(state, flow_of(1, 4, 1).plan(), lambda account: account.name)
    plan = flow_of(1, tasks, 1).plan()
    found: dict[Any, Any] = {}
    for task in plan.tasks:
        states = read_changed(plan, task, entries, get, other_program=True)[0]
        mine = states["count"].maps.get("state", {}) if "count" in states else {}
        assert set(groups_of(list(mine))) <= set(plan.groups(task) or ())
        assert not found.keys() & mine.keys()
        found.update(mine)
    assert found == state


def test_keys_that_have_become_equal_are_refused() -> None:
    """Each would take the state of the other for its own."""
    state = {Account(name, "lost"): 1 for i in range(20) for name in (f"k{i}", f"K{i}")}
    entries = entries_of(state, flow_of(1, 4, 1).plan(), lambda account: account.name)
    plan = flow_of(1, 4, 1).plan()
    says = (
        "operator 'count': several keys that were saved are now equal, to 'K.* members of an Enum class .* the values"
    )
    with pytest.raises(FlowError, match=says):
        [read_changed(plan, task, entries, get, other_program=True) for task in plan.tasks]


def test_keys_that_are_not_hashable_any_more_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = flow_of(1, 1, 1).plan()
    entries = saved(plan)
    at = next(i for i, entry in enumerate(entries) if "count" in entry.operators)
    for delta in (KeyedDelta([(1, Account("a"))], [1], []), KeyedValues(0, [Account("a")], {Account("a"): 1})):
        data = b"".join(encode_snapshot({"count": (StageState({"state": delta}), (0,) * 4)}, GROUPS))
        entries[at] = replace(entries[at], operators=["count"], blobs=[Blob("part", len(data), 0, data)])
        with monkeypatch.context() as patch:
            patch.setattr(Account, "__hash__", None)
            with pytest.raises(
                FlowError, match=r"^operator 'count': Account .* is not hashable, and objects of it were"
            ):
                [read_changed(plan, task, entries, get, other_program=True) for task in plan.tasks]


def test_keys_whose_class_has_lost_a_field_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that differed in it only have become one already when they are read."""
    plan = flow_of(1, 1, 1).plan()
    entries = entries_of({(1, Account("a")): 1}, plan, lambda key: key[1].name)
    monkeypatch.setitem(class_evolution._other, Account, ["name", "branch"])
    with pytest.raises(FlowError, match=r"operator 'count' has keys of the class Account, which had .*'branch'"):
        [read_changed(plan, task, entries, get, other_program=True) for task in plan.tasks]


@pytest.mark.parametrize("same", [True, False])
def test_keys_of_a_resumed_job_whose_class_has_other_fields_are_refused(
    same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may belong to other key groups by that, and would not be found again."""
    plan = flow_of(1, 2 if same else 1, 1).plan()  # a task that also reads needs the state of its source
    entries = saved(plan)
    at = next(i for i, entry in enumerate(entries) if "count" in entry.operators)
    whole = StageState({"state": KeyedWhole({(1, Account("a")): 1})})
    data = b"".join(encode_snapshot({"count": (whole, (0,) * 4)}, GROUPS))
    entries[at] = replace(entries[at], operators=["count"], blobs=[Blob("part", len(data), 0, data)])
    task = plan.by_number[entries[at].number]

    def read() -> Any:
        by_number = {entry.number: entry for entry in entries}
        return read_same(plan, task, by_number, get) if same else read_changed(plan, task, entries, get)

    assert read()[0]["count"].maps["state"] == {(1, Account("a")): 1}
    monkeypatch.setitem(class_evolution._other, Account, ["name", "branch"])
    with pytest.raises(
        FlowError, match=r"'count' has keys of the class Account, which had the fields 'name', 'branch'"
    ):
        read()


@dataclass(frozen=True)
class Holder:
    key: Any


@dataclass(frozen=True)
class Tagged:
    """As of a program that was edited: the tag is new, and another one each time a key is read."""

    name: str
    tag: str = field(default_factory=lambda: uuid4().hex)

    def __reduce__(self) -> Any:
        return Tagged, (self.name,)


@pytest.mark.parametrize("around", [lambda key: key, lambda key: (1, ("x", key)), Holder])
@pytest.mark.parametrize("title", ["state", "nested:map:last", "nested:deadlines:event:"])
@pytest.mark.parametrize("tasks", [1, 3])
def test_keys_with_a_new_field_that_differs_each_time_are_refused(
    tasks: int, title: str, around: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task would read other keys, which may belong to several tasks or to none, and deltas name no saved key."""
    key = around(Tagged("a"))
    place: Any = (key, 5) if title.startswith("nested") else key
    first, later = KeyedWhole({place: 1}), KeyedDelta([], [], [place], size=0)
    entries = saved(flow_of(1, 1, 1).plan())
    at = next(i for i, entry in enumerate(entries) if "count" in entry.operators)
    parts = [
        b"".join(encode_snapshot({"count": (StageState({title: delta}), (0,) * 4)}, GROUPS)) for delta in (first, later)
    ]
    blobs = [Blob(f"part {i}", len(part), 0, part) for i, part in enumerate(parts)]
    plan = flow_of(1, tasks, 1).plan()
    monkeypatch.setitem(class_evolution._other, Tagged, ["name"])
    says = r"operator 'count' has keys of the class Tagged, which had no fields 'tag' .* Give .* a plain default"
    for some in (blobs, blobs[:1]):
        entries[at] = replace(entries[at], operators=["count"], blobs=some)
        for task in plan.tasks:
            if "count" in [operator.name for operator in plan.chains[task.chain].operators]:
                with pytest.raises(FlowError, match=says):
                    read_changed(plan, task, entries, get, other_program=True)


def test_what_has_ended_says_nothing_again() -> None:
    before = flow_of(2, 3, 3).plan()
    after = flow_of(2, 2, 2).plan()
    for task in after.tasks:
        states, finished, _, _ = read_changed(after, task, saved(before, finished=True), get)
        assert finished
        assert not (states["count"].maps if "count" in states else {})


def test_names_kinds_and_key_groups_must_fit() -> None:
    kinds = kinds_with_state(flow_of(1, 2, 1).plan())
    assert kinds == {"read": "read", "count": "count"}
    check(flow_of(3, 5, 2).plan(), kinds, GROUPS)
    with pytest.raises(FlowError, match=r"no operators 'count', .* without saved state: 'map', 'other', 'write'"):
        check(flow_of(1, 2, 1, name="other").plan(), kinds, GROUPS)
    with pytest.raises(FlowError, match=r"key_groups=32, .* give Flow\(key_groups=16\)"):
        check(flow_of(1, 2, 1, key_groups=32).plan(), kinds, GROUPS)
    flow = Flow("job", key_groups=GROUPS)
    flow.read(Memory([1])).key_by(str).sum(name="count").write(Null())
    with pytest.raises(FlowError, match="is a sum; the state that was saved under that name is the state of a count"):
        check(flow.plan(), kinds, GROUPS)


@pytest.mark.parametrize("parallelism", [0, -1, True, 2.0, "2"])
def test_nonsense_is_refused(parallelism: Any) -> None:
    with pytest.raises(FlowError, match="must be 1 or more"):
        rescaled(flow_of(1, 2, 1).plan(), "count", parallelism)


def test_what_cannot_be_rescaled_says_why() -> None:
    plan = flow_of(1, 2, 1).plan()
    with pytest.raises(FlowError, match="no operator 'nothing'; it has: 'read'"):
        rescaled(plan, "nothing", 2)
    with pytest.raises(FlowError, match="key_groups=16, and a keyed operator can have at most 16"):
        rescaled(plan, "count", 17)
    flow = Flow("job")
    flow.read(Memory([1]), parallelism=2).rebalance().map(str, parallelism=2).forward().map(
        str, name="next", parallelism=2
    ).rebalance().write(Null(), parallelism=1)
    chained = flow.plan()
    assert rescaled(chained, "next", 3).chain_of("map").parallelism == 3  # fused
    flow.chaining = False
    with pytest.raises(FlowError, match="forward from 'map' to 'next' needs equal parallelism"):
        rescaled(flow.plan(), "next", 3)


def test_the_same_number_of_tasks_changes_nothing() -> None:
    """New channels would wait for receivers that nobody makes."""
    plan = flow_of(2, 3, 1).plan()
    assert rescaled(plan, "count", 3) is plan


@pytest.mark.parametrize("fused", [False, True])
def test_a_rescaled_source_still_knows_what_to_read(fused: bool) -> None:
    """The job may have to begin anew, with nothing saved."""
    flow = Flow("job", key_groups=GROUPS)
    flow.read(Memory(list(range(100))), parallelism=1 if fused else 3).key_by(str).count(parallelism=1).write(Null())
    plan = flow.plan()
    listed = {split.name for splits in plan.chain_of("read").splits for split in splits}
    assert listed
    assert fused_by_key(plan, "read") == fused
    after = replanned(flow.graph, plan, "read", 2, flow.chaining) if fused else rescaled(plan, "read", 2)
    assert len(after.chain_of("read").splits) == 2
    assert {split.name for splits in after.chain_of("read").splits for split in splits} == listed


def test_a_fused_key_by_is_rescaled_by_the_name_of_what_it_is_for() -> None:
    flow = Flow("job")
    flow.read(Memory([1]), parallelism=1).key_by(str).count(parallelism=1).write(Null(), parallelism=1)
    plan = flow.plan()
    with pytest.raises(
        FlowError, match=r"rescale\('count.key_by', 4\): this operator computes the keys of 'count'; rescale 'count'"
    ):
        replanned(flow.graph, plan, "count.key_by", 4, flow.chaining)


class Remembers(Map):
    """An operator of a kind that the restoring of another plan has never heard of."""

    kind = "remember"


def test_state_of_an_unknown_kind_is_not_dropped_in_silence() -> None:
    flow = Flow("job", key_groups=GROUPS)
    stream = flow.read(Memory(range(10), splits=2), parallelism=2)
    remembers = stream.map(str, name="remembers", parallelism=2)
    remembers.write(Null(), parallelism=2)
    flow.graph.operators["remembers"].__class__ = Remembers
    plan = flow.plan()
    entries = []
    for task in plan.tasks:
        chain = plan.chains[task.chain]
        states: Any = {operator.name: (None, (0, 0, 0, 0)) for operator in chain.operators}
        for operator in chain.operators:
            if operator.kind == "read":
                states[operator.name] = (StageState(own=list(chain.splits[task.index])), (0, 0, 0, 0))
        entries.append((task, states))

    after = rescaled(plan, "remembers", 1)
    saved = [entry_of(plan, *each) for each in entries]
    for task in after.tasks:
        read_changed(after, task, saved, get)  # it has saved nothing: fine
    for _, states in entries:
        if "remembers" in states:
            states["remembers"] = (StageState(own="what it remembers"), (0, 0, 0, 0))
    saved = [entry_of(plan, *each) for each in entries]
    told = rf"operator 'remembers' is a remember, and task .* has saved state of it, in format {FORMAT}\."
    task = next(task for task in after.tasks if "remembers" in [o.name for o in after.chains[task.chain].operators])
    with pytest.raises(StoreError, match=told):
        read_changed(after, task, saved, get)


def test_a_log_that_nobody_can_merge_is_named() -> None:
    with pytest.raises(StoreError, match="is to be merged as 'median'"):
        merge_of("median")
