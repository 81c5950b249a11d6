"""The logical graph of a flow: operators and the edges between them, as plain data.

`runtime/program/flow.py` builds it, this module checks it, and `runtime/program/plan.py` turns it into tasks. It must
never know parallel tasks, workers or Ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

from penstock.runtime.errors import FlowError
from penstock.runtime.exchange.grouping import All, Forward, Grouping
from penstock.runtime.operators.base import Operator
from penstock.runtime.operators.ends import Read
from penstock.runtime.records.userfunc import may_keep

# The remedy when one line adds two operators of the same name.
#: The job whose store the directory of a savepoint is, whatever job it was made from. No flow may have this name.
SAVEPOINT = "savepoint"

_AGAIN = (
    ". In a notebook make the Flow in the same cell, so that a cell that is run again begins anew; in a loop give each "
    "a name of its own"
)


@dataclass(frozen=True, eq=False)  # an edge is itself: what it holds of the user's may not compare or hash
class Edge:
    """An edge from operator `source` (its side output `output`, or the main output when None) to the input `port` of
    operator `target`. A `grouping` of None means: forward when the parallelism is equal, otherwise in turn."""

    source: str
    target: str
    grouping: Grouping | None = None
    output: str | None = None
    port: int = 0


@dataclass
class Graph:
    """The operators by name, in the order in which they were added, and the edges."""

    name: str
    operators: dict[str, Operator] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)

    def add(self, operator: Operator) -> None:
        """Adds an operator. A default name that is taken gets a number. A name that the user gives must be free."""
        if operator.name in self.operators:
            if operator.explicit_name:
                first = self.operators[operator.name].declared_at
                raise FlowError(
                    f"flow {self.name!r}: two operators are named {operator.name!r}"
                    + (f" (the first at {first})" if first else "")
                    + "; names must be unique, because recovery and metrics identify operators by name"
                    + (_AGAIN if first == operator.declared_at else "")
                )
            n = 2
            while f"{operator.kind}_{n}" in self.operators:
                n += 1
            operator.name = f"{operator.kind}_{n}"
        self.operators[operator.name] = operator

    def connect(self, edge: Edge) -> None:
        """Adds an edge, and refuses a cycle."""
        for end in (edge.source, edge.target):
            if end not in self.operators:
                known = ", ".join(self.operators)
                raise FlowError(f"flow {self.name!r} has no operator {end!r}; it has: {known}")
        if isinstance(self.operators[edge.target], Read):
            raise FlowError(f"flow {self.name!r}: {edge.target!r} is a source; nothing can be fed into it")
        if self.operators[edge.source].is_sink and edge.output is None:
            raise FlowError(
                f"flow {self.name!r}: only dead letters leave the sink {edge.source!r}; to use the records twice, "
                "keep the stream that you write to the sink in a variable"
            )
        if any(_same_way(known, edge) for known in self.edges):
            raise FlowError(
                f"flow {self.name!r}: {edge.source!r} feeds {edge.target!r} already; twice would double its records"
            )
        path = self._path(edge.target, edge.source)
        if path is not None:
            raise FlowError(
                f"flow {self.name!r}: connecting {edge.source!r} to {edge.target!r} makes a cycle: "
                + " -> ".join([*path, edge.target])
                + ". A flow must be acyclic: with bounded queues a cycle can block itself."
            )
        self.edges.append(edge)

    def outgoing(self, name: str) -> list[Edge]:
        """Returns the edges that leave an operator."""
        return [edge for edge in self.edges if edge.source == name]

    def incoming(self, name: str) -> list[Edge]:
        """Returns the edges that lead to an operator."""
        return [edge for edge in self.edges if edge.target == name]

    def ordered(self) -> list[str]:
        """Returns the names of the operators: each after all that feed it, otherwise in the order of declaration."""
        sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(self.operators, ()))
        for edge in self.edges:
            sorter.add(edge.target, edge.source)
        return list(sorter.static_order())

    def validate(self) -> None:
        """Raises FlowError unless the graph can run."""
        if not any(isinstance(op, Read) for op in self.operators.values()):
            raise FlowError(f"flow {self.name!r} reads nothing; start it with flow.read(source)")
        for name, operator in self.operators.items():
            ports = {edge.port for edge in self.incoming(name)}
            if not isinstance(operator, Read) and len(ports) < operator.inputs:
                raise FlowError(f"flow {self.name!r}: operator {name!r} has no input")
        for name in self._half_broadcast():
            raise FlowError(
                f"flow {self.name!r}: operator {name!r} gets records of broadcast() beside others, and its function is "
                "an object of a class. What such an object keeps of a record, as of a rule or a new model, is in no "
                "epoch: after a failure some tasks would continue without it. Connect the two streams: "
                "records.key_by(...).connect(rules.broadcast()).process(...), or for lists of records "
                ".process_batches(...), with a penstock.BroadcastProcessFunction, whose map ctx.broadcast is saved "
                "with each epoch. If the object keeps nothing of the records, give a plain function that calls it"
            )
        for name in self.dangling():
            raise FlowError(
                f"flow {self.name!r}: nothing uses the main output of operator {name!r}; end the stream with "
                ".write(sink), e.g. .write(penstock.sinks.Null())"
            )

    def _half_broadcast(self) -> Iterator[str]:
        """Yields the operators whose function may keep something of the records that all of its tasks get, while each
        task gets others of its own."""
        to_all: dict[str, set[bool]] = {}  # by operator: whether what it gets goes to all tasks; both is possible
        for name in self.ordered():
            operator, gets = self.operators[name], set[bool]()
            for edge in self.incoming(name):
                stays = edge.grouping is None or isinstance(edge.grouping, Forward)
                gets |= to_all[edge.source] if stays else {isinstance(edge.grouping, All)}
            stateless = operator.inputs == 1 and not operator.keyed and not isinstance(operator, Read)
            if stateless and len(gets) > 1 and may_keep(getattr(operator, "fn", None)):
                yield name
            to_all[name] = gets if stateless else {False}

    def has_before(self, name: str, kind: type[Operator]) -> bool:
        """Whether an operator, or another one on each way of records to it, is of a kind."""
        seen: set[str] = set()
        stack = [name]
        while stack:
            at = stack.pop()
            if at in seen or isinstance(self.operators[at], kind):
                continue
            seen.add(at)
            if isinstance(self.operators[at], Read):
                return False
            stack += [edge.source for edge in self.incoming(at)]
        return True

    def dangling(self) -> Iterator[str]:
        """Yields the operators whose main output has no reader."""
        for name, operator in self.operators.items():
            if not operator.is_sink and all(edge.output is not None for edge in self.outgoing(name)):
                yield name

    def _path(self, start: str, end: str) -> list[str] | None:
        """Returns a path along the edges, or None."""
        stack = [[start]]
        seen = set()
        while stack:
            path = stack.pop()
            if path[-1] == end:
                return path
            if path[-1] in seen:
                continue
            seen.add(path[-1])
            stack += [[*path, edge.target] for edge in self.outgoing(path[-1])]
        return None


def _same_way(a: Edge, b: Edge) -> bool:
    """Whether two edges bring the same records to the same input. A stream may feed both inputs of an operator, as in a
    join of a stream with itself."""
    return (a.source, a.output, a.target, a.port) == (b.source, b.output, b.target, b.port)
