"""The physical plan: chains of fused operators, their tasks, and the channels between tasks.

`make_plan` is a pure function of the logical graph and a few numbers. It fuses an edge into a chain (a function call)
when both ends have the same parallelism, no other edge enters or leaves there, and no exchange is needed: with forward
grouping, or with grouping by key between two single tasks. Every other edge becomes an `Exchange`: one channel from
each sender task to each receiver task that it can reach (docs/papers.md: A2, W1). `placement/` decides which worker
runs a task. Every worker must get the same plan.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from penstock.runtime.errors import FlowError
from penstock.runtime.exchange.grouping import Forward, Grouping, Key, Rebalance
from penstock.runtime.operators.aggregated import Aggregated
from penstock.runtime.operators.base import Operator
from penstock.runtime.operators.ends import Read, Write
from penstock.runtime.operators.fork import OTHERS, Fork
from penstock.runtime.operators.late import LATE
from penstock.runtime.operators.resources import together
from penstock.runtime.operators.stateless import KeyBy
from penstock.runtime.operators.watermarks import MakeWatermarks
from penstock.runtime.operators.windowing import WindowAggregated
from penstock.runtime.program.graph import Edge, Graph
from penstock.runtime.records.key_groups import KeyGroups
from penstock.runtime.records.pickling import Program
from penstock.runtime.records.userfunc import DEAD_LETTERS, check_picklable
from penstock.runtime.sources.base import Split, share
from penstock.runtime.state.aggregate import Aggregate
from penstock.runtime.units import whole


@dataclass
class Chain:
    """Operators that are fused into one kind of task."""

    index: int
    operators: list[Operator]
    parallelism: int
    splits: list[list[Split]] = field(default_factory=list)  # of a source: the splits of each task
    table: bytes | None = None  # of keyed operators: which task owns each key group (runtime/records/key_groups.py)

    @property
    def name(self) -> str:
        return " > ".join(operator.name for operator in self.operators)

    @property
    def needs(self) -> dict[str, float]:
        """The resources of a worker beside CPU time that each of its tasks needs: what all of its operators need,
        together."""
        return together(operator.needs for operator in self.operators)

    @property
    def source(self) -> Read | None:
        head = self.operators[0]
        return head if isinstance(head, Read) else None


@dataclass(frozen=True)
class Exchange:
    """An edge between two chains. The id of a channel is first_channel + sender * receivers + receiver. With forward
    grouping there are only the channels with sender == receiver."""

    index: int
    source: int  # the number of the sending chain
    target: int  # the number of the receiving chain
    operator: str  # the operator in the source chain whose output is sent
    output: str | None  # the side output of that operator, or None for the main output
    grouping: Grouping
    combiner: Aggregate | None
    first_channel: int
    senders: int
    receivers: int
    implied: bool = False  # the user said nothing of the grouping: forward where parallelism is equal, else rebalance
    port: int = 0  # the input of the first operator of the receiving chain

    def channel(self, sender: int, receiver: int) -> int:
        """Returns the id of the channel from the task of a sender's index to that of a receiver's index."""
        return self.first_channel + sender * self.receivers + receiver

    def targets(self, sender: int) -> list[int]:
        """Returns the indexes of the receivers to which a sender has channels."""
        return [sender] if isinstance(self.grouping, Forward) else list(range(self.receivers))

    def origins(self, receiver: int) -> list[int]:
        """Returns the indexes of the senders that have channels to a receiver."""
        return [receiver] if isinstance(self.grouping, Forward) else list(range(self.senders))


@dataclass(frozen=True)
class TaskId:
    """A task: its number in the job, its chain, and its index in the chain."""

    number: int
    chain: int
    index: int


@dataclass
class Plan:
    """All chains, exchanges and tasks of a job. All workers have the same plan."""

    name: str
    key_groups: int
    chains: list[Chain]
    exchanges: list[Exchange]
    tasks: list[TaskId]

    @cached_property
    def by_number(self) -> dict[int, TaskId]:
        """The tasks by their numbers, which have gaps after a rescale."""
        return {task.number: task for task in self.tasks}

    @cached_property
    def time_grain(self) -> int | None:
        """The number of milliseconds of which all times are multiples at which operators wait for a watermark. None: no
        operator waits for one, or none makes one."""
        operators = [operator for chain in self.chains for operator in chain.operators]
        grains = [operator.time_grain for operator in operators if operator.time_grain is not None]
        made = any(isinstance(operator, MakeWatermarks) for operator in operators)
        return math.gcd(*grains) if grains and made else None

    @cached_property
    def side_outputs(self) -> set[tuple[str, str]]:
        """The side outputs that the flow uses, as (operator, side output)."""
        return {(exchange.operator, exchange.output) for exchange in self.exchanges if exchange.output is not None}

    @cached_property
    def _by_place(self) -> dict[tuple[int, int], TaskId]:
        return {(task.chain, task.index): task for task in self.tasks}

    def task(self, chain: int, index: int) -> TaskId:
        """Returns a task by its chain and index."""
        return self._by_place[chain, index]

    def groups(self, task: TaskId) -> list[int] | None:
        """Returns the key groups that a task owns, or None when its records have no keys."""
        table = self.chains[task.chain].table
        return (
            None if table is None else [group for group, owner in enumerate(array("H", table)) if owner == task.index]
        )

    def chain_of(self, operator: str) -> Chain:
        """Returns the chain of an operator. Raises FlowError when there is none."""
        for chain in self.chains:
            if any(operator == known.name for known in chain.operators):
                return chain
        names = ", ".join(repr(known.name) for chain in self.chains for known in chain.operators)
        raise FlowError(f"job {self.name!r} has no operator {operator!r}; it has: {names}")

    def task_name(self, task: TaskId) -> str:
        """Returns the name of a task for people: operators and index, counted from 0."""
        return f"{self.chains[task.chain].name}[{task.index}]"


def make_plan(
    graph: Graph,
    *,
    parallelism: int | None,
    key_groups: int,
    workers: int,
    chaining: bool = True,
    list_splits: bool = True,
    check_sinks: bool = True,
    fuse_keys: bool = True,
) -> Plan:
    """Makes the plan of a graph. Raises FlowError when the flow cannot run. It lists the splits of the sources and
    checks the places of the sinks, unless it is told not to: a job that continues from saved state has both already.
    `fuse_keys`: a single task that sends to a keyed operator with a single task is fused with it."""
    graph.validate()
    workers = whole(workers, "workers")
    filled: dict[str, str] = {}
    for name, operator in graph.operators.items():
        if isinstance(operator, Write) and (place := operator.sink.fills) is not None:
            if place in filled:
                raise FlowError(
                    f"the sinks {filled[place]!r} and {name!r} both write to {place!r} and would overwrite each "
                    "other's files; give each sink a place of its own, or unite their streams. (If you ran a notebook "
                    "cell twice that adds to a Flow, create the Flow in the same cell)"
                )
            filled[place] = name
    tasks_of = _parallelism(graph, parallelism or workers)
    for name, operator in graph.operators.items():
        if operator.keyed and tasks_of[name] > key_groups:
            raise FlowError(
                f"operator {name!r}: parallelism {tasks_of[name]} is above the flow's key_groups={key_groups}; "
                "give Flow(key_groups=...) at least the parallelism"
            )
        if isinstance(operator, Write) and check_sinks:
            operator.sink.check()
    for edge in graph.edges:
        if isinstance(edge.grouping, Forward) and tasks_of[edge.source] != tasks_of[edge.target]:
            raise FlowError(
                f"forward from {edge.source!r} ({tasks_of[edge.source]} tasks) to {edge.target!r} "
                f"({tasks_of[edge.target]} tasks): forward needs equal parallelism; use rebalance()"
            )

    graph = _with_watermarks_in_sources(graph, tasks_of)
    tasks_of |= {name: tasks_of[graph.incoming(name)[0].source] for name in graph.operators.keys() - tasks_of.keys()}
    on_the_way = {edge for name in graph.operators for edge in _way_from_source(graph, name, tasks_of)}
    fused = {
        edge for edge in graph.edges if (chaining or edge in on_the_way) and _can_fuse(graph, edge, tasks_of, fuse_keys)
    }
    chains: list[Chain] = []
    chain_of: dict[str, int] = {}
    for name in graph.ordered():
        operator = graph.operators[name]
        feeding = [edge for edge in graph.incoming(name) if edge in fused]
        if feeding:
            chain = chains[chain_of[feeding[0].source]]
            if isinstance(feeding[0].grouping, Key):
                chain.operators.append(_fused_key_by(feeding[0].grouping, operator))
            chain.operators.append(operator)
        else:
            chain = Chain(len(chains), [operator], tasks_of[name])
            chains.append(chain)
        if operator.keyed:
            chain.table = KeyGroups(key_groups).table(chain.parallelism)
        chain_of[name] = chain.index

    for chain in chains:
        for operator in chain.operators:
            if isinstance(operator, MakeWatermarks) and operator.max_drift_ms is not None and chain.source is None:
                raise FlowError(
                    f"watermark {operator.name!r}: max_drift_s holds back the source, so .watermark(...) must be in "
                    "the tasks of the source: put it directly after .read(...), without a parallelism of its own, and "
                    "read the source once for each of two watermarks"
                )
    exchanges: list[Exchange] = []
    channels = 0
    for edge in [*graph.edges, *_letters_on_the_way(graph, fused)]:
        if edge in fused:
            continue
        source, target = chains[chain_of[edge.source]], chains[chain_of[edge.target]]
        exchange = Exchange(
            index=len(exchanges),
            source=source.index,
            target=target.index,
            operator=edge.source,
            output=edge.output,
            grouping=edge.grouping or (Forward() if source.parallelism == target.parallelism else Rebalance()),
            combiner=_combiner(graph, edge, target),
            first_channel=channels,
            senders=source.parallelism,
            receivers=target.parallelism,
            implied=edge.grouping is None,
            port=edge.port,
        )
        channels += source.parallelism * target.parallelism
        exchanges.append(exchange)

    tasks: list[TaskId] = []
    for chain in chains:
        if chain.source is not None and not list_splits:
            chain.splits = [[] for _ in range(chain.parallelism)]
        elif chain.source is not None:
            chain.splits = share(chain.source.source.splits(chain.parallelism), chain.parallelism)
        tasks += [TaskId(len(tasks) + i, chain.index, i) for i in range(chain.parallelism)]
    return Plan(graph.name, key_groups, chains, exchanges, tasks)


def _parallelism(graph: Graph, default: int) -> dict[str, int]:
    """Returns the number of tasks of each operator. A watermark operator without a parallelism of its own has that of
    its input, unless the user has said how records are divided among its tasks: where records of several tasks meet
    before the watermarks, one task that is behind makes its records late."""
    tasks_of: dict[str, int] = {}
    for name in graph.ordered():
        operator = graph.operators[name]
        tasks_of[name] = operator.parallelism or default
        edges = graph.incoming(name)
        divided = any(edge.grouping is not None and not isinstance(edge.grouping, Forward) for edge in edges)
        if isinstance(operator, MakeWatermarks) and operator.parallelism is None and not divided:
            tasks_of[name] = max(tasks_of[edge.source] for edge in edges)
    return tasks_of


def _way_from_source(graph: Graph, name: str, tasks_of: dict[str, int]) -> list[Edge]:
    """Returns the edges from a source to a watermark operator that should be in its tasks, because only there it is
    known which split each record comes from. They are fused also without chaining. Returns no edges when some operator
    on the way cannot be in the tasks of the source, or when this is no watermark operator."""
    if not isinstance(graph.operators[name], MakeWatermarks):
        return []
    way: list[Edge] = []
    while not isinstance(operator := graph.operators[name], Read):
        edges = graph.incoming(name)
        edge = edges[0]
        direct = edge.output is None and (edge.grouping is None or isinstance(edge.grouping, Forward))
        if len(edges) > 1 or not direct or tasks_of[edge.source] != tasks_of[name]:
            return []
        if operator.keyed or operator.inputs > 1 or operator.begins_chain:
            return []
        way.append(edge)
        name = edge.source
    return way[::-1]


def _with_watermarks_in_sources(graph: Graph, tasks_of: dict[str, int]) -> Graph:
    """Returns the graph in which each operator on the way from a source to a watermark operator has one reader, so that
    the watermark operator can be fused with the source, where each split has a watermark of its own. The others read
    behind the watermark operator, which passes all records on, so they get what they got before. Where other operators
    come first, or the watermark operator may leave out records that fail, a fork gives them their records. Of several
    watermark operators at the ends of one fork none can be in the tasks of the source, and a second one only where the
    first one has no other readers: what leaves a task has the watermarks of its last operator."""
    found = copy(graph)
    found.operators, found.edges = dict(graph.operators), list(graph.edges)
    for name in graph.operators:
        for edge in _way_from_source(found, name, tasks_of):
            others = [other for other in found.outgoing(edge.source) if other.output is None and other is not edge]
            if not others:
                continue
            ends = (edge.source, *(other.target for other in others))
            if any(isinstance(graph.operators[end], MakeWatermarks) for end in ends):
                break  # the others would get the wrong watermarks
            if edge.target == name and graph.operators[name].on_error == "fail":
                reader, output = name, None
            else:
                fork = Fork(name=f"{edge.source}.fork")
                fork.declared_at = graph.operators[edge.source].declared_at
                found.operators[fork.name] = fork
                found.edges[found.edges.index(edge)] = replace(edge, source=fork.name)
                found.edges.append(Edge(edge.source, fork.name))
                reader, output = fork.name, OTHERS
            for other in others:
                found.edges[found.edges.index(other)] = replace(other, source=reader, output=output)
    return found


def fused_by_key(plan: Plan, operator: str) -> bool:
    """Whether the operator is fused with one for which its records have keys. More tasks then need another plan."""
    return any(fused.kind == "key_by" for fused in plan.chain_of(operator).operators)


def replanned(graph: Graph, plan: Plan, operator: str, parallelism: int, chaining: bool) -> Plan:
    """Plans the graph again, with another number of tasks for one operator and the numbers of `plan` for all others.
    The sources read what they read in `plan`. Raises FlowError for a key_by that was fused, because it is part of
    another operator."""
    if operator not in graph.operators:
        names = [known.name for known in plan.chain_of(operator).operators]
        raise FlowError(
            f"rescale({operator!r}, {parallelism}): this operator computes the keys of "
            f"{names[names.index(operator) + 1]!r}; rescale {names[names.index(operator) + 1]!r} instead"
        )
    graph = copy(graph)
    graph.operators = {name: copy(known) for name, known in graph.operators.items()}
    for name, known in graph.operators.items():
        if name == operator:
            known.parallelism = parallelism
        elif not isinstance(known, MakeWatermarks) or known.parallelism is not None:  # others follow their input
            known.parallelism = plan.chain_of(name).parallelism
    made = make_plan(
        graph,
        parallelism=None,
        key_groups=plan.key_groups,
        workers=1,
        chaining=chaining,
        list_splits=False,
        check_sinks=False,
    )
    for chain in made.chains:
        if chain.source is not None:
            chain.splits = _assigned(plan.chain_of(chain.source.name), chain.parallelism)
    return made


def rescaled(plan: Plan, operator: str, parallelism: int) -> Plan:
    """Returns the plan with another number of tasks for an operator, and for the operators that are fused with it.

    Tasks and channels that stay keep their numbers, and new ones get numbers that were never used. As many key groups
    as possible stay with the task that owns them. Returns the same plan when it has this number already. Raises
    FlowError when the operator cannot have it.
    """
    chain = plan.chain_of(operator)
    if not isinstance(parallelism, int) or isinstance(parallelism, bool) or parallelism < 1:
        raise FlowError(f"rescale({operator!r}, {parallelism!r}): the parallelism must be 1 or more")
    assert parallelism == 1 or not fused_by_key(plan, operator)
    if chain.table is not None and parallelism > plan.key_groups:
        raise FlowError(
            f"rescale({operator!r}, {parallelism}): the flow has key_groups={plan.key_groups}, and a keyed operator "
            f"can have at most {plan.key_groups} tasks"
        )
    if parallelism == chain.parallelism:
        return plan
    table = chain.table and KeyGroups(plan.key_groups).rescaled(chain.table, parallelism)
    chains = list(plan.chains)
    splits = _assigned(chain, parallelism)
    chains[chain.index] = replace(chain, parallelism=parallelism, table=table, splits=splits)
    next_channel = max((e.first_channel + e.senders * e.receivers for e in plan.exchanges), default=0)
    exchanges = []
    for exchange in plan.exchanges:
        if chain.index not in (exchange.source, exchange.target):
            exchanges.append(exchange)
            continue
        senders, receivers = chains[exchange.source].parallelism, chains[exchange.target].parallelism
        grouping = exchange.grouping
        if exchange.implied:
            grouping = Forward() if senders == receivers else Rebalance()
        elif isinstance(grouping, Forward) and senders != receivers:
            ends = f"{exchange.operator!r} to {chains[exchange.target].operators[0].name!r}"
            raise FlowError(
                f"rescale({operator!r}, {parallelism}): forward from {ends} needs equal parallelism; use rebalance()"
            )
        exchanges.append(
            replace(exchange, grouping=grouping, senders=senders, receivers=receivers, first_channel=next_channel)
        )
        next_channel += senders * receivers
    tasks = [task for task in plan.tasks if task.chain != chain.index or task.index < parallelism]
    next_task = max(task.number for task in plan.tasks) + 1
    for i in range(chain.parallelism, parallelism):
        tasks.append(TaskId(next_task, chain.index, i))
        next_task += 1
    return Plan(plan.name, plan.key_groups, chains, exchanges, tasks)


def _assigned(chain: Chain, parallelism: int) -> list[list[Split]]:
    """Assigns a chain's splits to another number of tasks. They are needed only when the job begins again from the
    start, because saved state contains the splits too."""
    return share([split for splits in chain.splits for split in splits], parallelism)


def packed_with_plan(program: Program, plan: Plan, value: Any) -> bytes:
    """Returns a value that contains the operators of a plan, as bytes for the job's processes. Raises FlowError that
    names the operator whose function cannot travel any more, because the program has changed what it refers to since
    the flow was written."""
    try:
        return program.dumps(value)
    except Exception:  # the classes of what functions refer to decide what pickling them raises
        for chain in plan.chains:
            for operator in chain.operators:
                check_picklable(vars(operator), f"operator {operator.name!r}")
        raise


def letters_of(operator: str) -> str:
    """Returns the name of the side output by which a sender passes on records that failed on their way to an
    operator."""
    return f"{DEAD_LETTERS}:{operator}"


def _letters_on_the_way(graph: Graph, fused: set[Edge]) -> Iterator[Edge]:
    """Yields edges for dead letters that arise in a sender (a key function raised an error, a record cannot be
    encoded). They lead from the sender directly to where the receiving operator's dead letters go."""
    for letters in graph.edges:
        if letters.output == DEAD_LETTERS:
            senders = dict.fromkeys(edge.source for edge in graph.incoming(letters.source) if edge not in fused)
            for sender in senders:
                yield Edge(sender, letters.target, letters.grouping or Rebalance(), letters_of(letters.source))


def _can_fuse(graph: Graph, edge: Edge, tasks_of: dict[str, int], fuse_keys: bool) -> bool:
    target = graph.operators[edge.target]
    if edge.output is not None or len(graph.incoming(edge.target)) != 1 or target.inputs > 1 or target.begins_chain:
        return False
    if len([e for e in graph.outgoing(edge.source) if e.output is None]) != 1:
        return False
    if isinstance(edge.grouping, Key):
        return fuse_keys and tasks_of[edge.source] == tasks_of[edge.target] == 1
    if edge.grouping is None or isinstance(edge.grouping, Forward):
        return tasks_of[edge.source] == tasks_of[edge.target]
    return False


def _fused_key_by(key: Key, operator: Operator) -> KeyBy:
    key_by = KeyBy(key.selector, name=f"{operator.name}.key_by", on_error=operator.on_error)
    key_by.declared_at = operator.declared_at
    key_by.outputs = ()  # its failures are counted; the dead letters are the keyed operator's
    return key_by


def _combiner(graph: Graph, edge: Edge, target: Chain) -> Aggregate | None:
    head = target.operators[0]
    if isinstance(edge.grouping, Key) and isinstance(head, Aggregated):
        return head.combiner
    if isinstance(edge.grouping, Key) and isinstance(head, WindowAggregated):
        # A flow that uses late records must get single records, so nothing may be combined before.
        shows_late = any(known.output == LATE for known in graph.outgoing(head.name))
        return None if shows_late else head.combiner
    return None
