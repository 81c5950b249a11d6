"""Restores tasks: reads what tasks have saved, and gives it to the tasks that continue, also when the plan has changed.

State belongs to operators, by name, and within them to key groups. Splits belong to sources, and what sinks have
prepared belongs to sinks. So a job may continue with another parallelism, with other operators fused, or with a changed
flow, as long as the operators that have state still exist under their names. The state of a key must never be given to
two tasks, nor to none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.runtime.epochs.manifest import FORMAT, Blob, TaskEntry
from penstock.runtime.epochs.snapshot import Bytes, Merged, counters_of, holding, names
from penstock.runtime.errors import FlowError, StoreError
from penstock.runtime.operators.base import Operator
from penstock.runtime.operators.ends import Read, Write
from penstock.runtime.operators.watermarks import MakeWatermarks
from penstock.runtime.program.plan import Plan, TaskId
from penstock.runtime.records.class_evolution import (
    classes_changed,
    with_other_fields,
    with_varying_fields,
    without_fields,
)
from penstock.runtime.records.pickling import unhashable
from penstock.runtime.sources.base import Split, share
from penstock.runtime.state.keyed import Counters, SavedState
from penstock.runtime.worker.run_loop import Saved

Get = Callable[[Blob], Bytes]


def read_same(plan: Plan, task: TaskId, entries: Mapping[int, TaskEntry], get: Get) -> Saved:
    """Reads the saved state of a task that has not changed. `entries` are by task number, and contain those of
    `savers_of`."""
    entry = entries[task.number]
    merged = Merged(plan.key_groups, _check_same_keys)
    merged.add_task((get(blob) for blob in entry.blobs), None)
    sharing = {operator.name for operator in plan.chains[task.chain].operators if operator.shares}
    if sharing and task.index:
        merged.add_shared((get(blob) for blob in entries[plan.task(task.chain, 0).number].blobs), sharing)
    source = plan.chains[task.chain].source
    splits = None if source is None else [split for own in merged.operators[source.name].own for split in own]
    return merged.operators, entry.finished, False, splits


def savers_of(plan: Plan, task: TaskId) -> set[int]:
    """Returns the numbers of the tasks whose entries `read_same` needs for a task. The first task of a chain saves what
    all tasks share."""
    if any(operator.shares for operator in plan.chains[task.chain].operators):
        return {task.number, plan.task(task.chain, 0).number}
    return {task.number}


def read_changed(
    plan: Plan, task: TaskId, entries: Sequence[TaskEntry], get: Get, *, other_program: bool = False
) -> Saved:
    """Reads the saved state of another plan's tasks, for one task of this plan. If another program saved it, its
    classes may have had other fields. A key may then belong to another key group than the one under which it was saved,
    so each task looks for its keys in everything that all tasks saved."""
    chain = plan.chains[task.chain]
    groups = plan.groups(task)
    states: dict[str, SavedState] = {}
    splits: list[Split] | None = None
    known = [entry for operator in chain.operators for entry in entries if operator.name in entry.operators]
    finished = bool(known) and all(entry.finished for entry in known)
    unknown: list[Operator] = []
    for operator in chain.operators:
        savers = [entry for entry in entries if operator.name in entry.operators]
        if isinstance(operator, Read):
            if savers:
                splits = _splits(operator, savers, get, chain.parallelism)[task.index]
        elif operator.keyed:
            assert groups is not None
            states[operator.name] = _keyed(operator, savers, get, set(groups), plan.key_groups, other_program)
        elif operator.is_sink or operator.own_can_move:
            mine = [entry for entry in savers if entry.index % chain.parallelism == task.index]
            states[operator.name] = SavedState(own=_own(operator, mine, get, plan.key_groups))
        elif isinstance(operator, MakeWatermarks):
            running = [entry for entry in savers if not entry.finished]
            states[operator.name] = SavedState(own=_own(operator, running, get, plan.key_groups))
        else:
            unknown.append(operator)
    _check_stateless(unknown, known, get)
    for name, counters in _counters(plan, task, entries, get).items():
        states.setdefault(name, SavedState()).counters = counters
    return states, finished, True, splits


def _counters(plan: Plan, task: TaskId, entries: Sequence[TaskEntry], get: Get) -> dict[str, Counters]:
    """Returns the counters from which a task continues: those of its operators, and those of the records on the way to
    the next operators. State may be assigned to several tasks, but each counter continues in exactly one of them.
    Otherwise the job would count the same records several times, or lose them."""
    chain = plan.chains[task.chain]
    found: dict[str, Counters] = {operator.name: (0, 0, 0, 0) for operator in chain.operators}
    own = set(found)
    known = {operator.name for each in plan.chains for operator in each.operators}
    for entry in entries:
        if entry.index % chain.parallelism == task.index and not own.isdisjoint(entry.operators):
            # The records that were skipped on the way to the next operators count for the last operator of the task,
            # wherever that one is now.
            on_the_way = known - set(entry.operators) if entry.operators[-1] in own else set()
            for name, (taken, given, skipped, late) in counters_of(get(entry.blobs[-1])).items():
                if name in own or name in on_the_way:
                    before = found.get(name, (0, 0, 0, 0))
                    found[name] = (before[0] + taken, before[1] + given, before[2] + skipped, before[3] + late)
    # A key_by that was fused just now has had no counters of its own: on a channel nothing is counted.
    saved = {name for entry in entries for name in entry.operators}
    for sender, key_by, keyed in zip(chain.operators, chain.operators[1:], chain.operators[2:], strict=False):
        if key_by.kind == "key_by" and key_by.name not in saved:
            found[key_by.name] = (found[sender.name][1], found[keyed.name][0], 0, 0)
    return found


def same_tasks(plan: Plan, entries: Iterable[TaskEntry]) -> bool:
    """Whether the entries belong to the plan's own tasks."""
    saved = {entry.number: entry for entry in entries}
    if saved.keys() != plan.by_number.keys():
        return False
    for task in plan.tasks:
        chain, entry = plan.chains[task.chain], saved[task.number]
        layout = ([operator.name for operator in chain.operators], task.index, chain.parallelism, plan.groups(task))
        if layout != (entry.operators, entry.index, entry.parallelism, entry.groups):
            return False
    return True


def kinds_with_state(plan: Plan) -> dict[str, str]:
    """Returns the operators that have state, and the kinds of their state."""
    operators = [operator for chain in plan.chains for operator in chain.operators]
    stateful = [
        operator for operator in operators if operator.keyed or operator.own_can_move or isinstance(operator, Read)
    ]
    return {operator.name: operator.state_kind for operator in stateful}


def cannot_take_back(plan: Plan) -> list[str]:
    """Returns the sinks that cannot take back their commits."""
    operators = [operator for chain in plan.chains for operator in chain.operators]
    return [operator.name for operator in operators if isinstance(operator, Write) and not operator.sink.takes_back]


def check(plan: Plan, saved: Mapping[str, str], key_groups: int, uncommitted: Iterable[str] = ()) -> None:
    """Raises FlowError when a flow cannot continue from the saved state of operators with these names and kinds, and
    with committables of these sinks."""
    now = {operator.name: operator.state_kind for chain in plan.chains for operator in chain.operators}
    sinks = {operator.name for chain in plan.chains for operator in chain.operators if operator.is_sink}
    if missing := sorted(set(uncommitted) - sinks):
        raise FlowError(
            f"flow {plan.name!r} has no sinks {names(missing)}, and records of these were prepared and perhaps not "
            "committed, which would be lost. Sinks are matched by name: give the sink that is to commit them the name "
            "under which they were prepared (name=...). Or stop the job with a savepoint (stop(savepoint=...)), which "
            f"commits everything, and start from that. Sinks of the flow: {names(sorted(sinks))}"
        )
    lost = sorted(saved.keys() - now.keys())
    if lost:
        new = sorted(now.keys() - saved.keys())
        raise FlowError(
            f"flow {plan.name!r} has no operators {names(lost)}, and there is saved state of these. Operators are "
            "matched by name: give the operator that is to have the state the name under which it was saved "
            f"(name=...). Operators of the flow without saved state: {names(new)}"
        )
    for name, kind in saved.items():
        if now[name] != kind:
            raise FlowError(
                f"operator {name!r} of flow {plan.name!r} is a {now[name]}; the state that was saved under that name "
                f"is the state of a {kind}. Give the new operator another name"
            )
    if saved and key_groups != plan.key_groups:
        raise FlowError(
            f"flow {plan.name!r} has key_groups={plan.key_groups}, and its state was saved with "
            f"key_groups={key_groups}, which cannot change: give Flow(key_groups={key_groups})"
        )


def _keyed(
    operator: Operator, savers: list[TaskEntry], get: Get, groups: set[int], key_groups: int, other_program: bool
) -> SavedState:
    merged = Merged(key_groups, _check_keys if other_program else _check_same_keys)
    for entry in savers:
        # A task that had ended has emitted its last results, and no other task may emit them again.
        if not entry.finished and (other_program or entry.groups is None or not groups.isdisjoint(entry.groups)):
            merged.add_task((get(blob) for blob in entry.blobs), groups, operators={operator.name})
    if operator.shares:
        for entry in savers:
            if entry.index == 0:
                merged.add_shared((get(blob) for blob in entry.blobs), {operator.name})
    return merged.operators.get(operator.name, SavedState())


def _check_same_keys(operator: str, keys: Iterable[Any]) -> None:
    """Raises FlowError when keys of the same job are of a class that has other fields now. They may belong to other key
    groups by that, and a job that is resumed keeps them where they are."""
    for key in keys if classes_changed() else ():
        if (found := with_other_fields(key)) is not None:
            class_, fields = found
            raise FlowError(
                f"operator {operator!r} has keys of the class {class_.__qualname__}, which had the fields "
                f"{names(fields)} when the job saved them. A job that is resumed cannot take keys with other fields: "
                "resume it with the class as it was, take a savepoint, and start a job with the new class from that"
            )


def _check_keys(operator: str, keys: Iterable[Any]) -> None:
    """Raises FlowError when keys are of a class that has lost fields, or that has new ones with another value each
    time. In the first case several keys may have become equal, and only one of them would keep its state. In the second
    case one key would become several, and each task would find another one in what was saved."""
    for key in keys:
        try:
            hash(key)
        except TypeError as error:
            if (unfit := unhashable([key])) is None:
                raise
            raise FlowError(
                f"operator {operator!r}: {unfit.words}. Keep the class as it was; or give the new class another name, "
                "and start the job without the savepoint"
            ) from error
        if (found := without_fields(key)) is not None:
            class_, fields = found
            raise FlowError(
                f"operator {operator!r} has keys of the class {class_.__qualname__}, which had the fields "
                f"{names(fields)} when they were saved. Keys that differed in these fields only are equal now, and "
                "a key can have the state of one only. Keep the fields of a class of keys"
            )
        if (found := with_varying_fields(key)) is not None:
            class_, fields = found
            raise FlowError(
                f"operator {operator!r} has keys of the class {class_.__qualname__}, which had no fields "
                f"{names(fields)} when they were saved. A default_factory may make another value each time that a key "
                "is read, so that one key becomes several, which are not equal. Give a new field of a class of keys a "
                "plain default"
            )


def _check_stateless(operators: list[Operator], entries: Iterable[TaskEntry], get: Get) -> None:
    """Raises StoreError when one of these operators has saved state, because such state cannot be assigned to other
    tasks."""
    kinds = {operator.name: operator.state_kind for operator in operators}
    looked: set[int] = set()
    for entry in entries:
        if entry.number in looked or entry.finished or kinds.keys().isdisjoint(entry.operators):
            continue
        looked.add(entry.number)
        for name in sorted(kinds.keys() & holding(get(entry.blobs[-1]))):
            raise StoreError(
                f"operator {name!r} is a {kinds[name]}, and task {entry.name} has saved state of it, in format "
                f"{FORMAT}. This release of Penstock cannot assign state of that kind to the tasks of another plan: "
                "run the job with the flow, the parallelism and the number of workers with which it was saved, or with "
                "the release that can"
            )


def _own(operator: Operator, savers: list[TaskEntry], get: Get, key_groups: int) -> list[object]:
    own: list[object] = []
    for entry in savers:
        merged = Merged(key_groups)
        merged.add_task((get(blob) for blob in entry.blobs), (), operators={operator.name})
        if operator.name in merged.operators:
            own += merged.operators[operator.name].own
    return own


def _splits(operator: Read, savers: list[TaskEntry], get: Get, parallelism: int) -> list[list[Split]]:
    """Assigns the saved splits to the new tasks. The job reads the saved splits, whatever the source would list
    today."""
    saved: list[Split] = []
    for entry in savers:
        merged = Merged(0)
        merged.add_task([get(blob) for blob in entry.blobs[-1:]], (), operators={operator.name})
        saved += [split for own in merged.operators[operator.name].own for split in own]
    return share(saved, parallelism)
