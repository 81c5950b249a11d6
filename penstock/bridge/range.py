"""The switch range: which operators go to Spark together when a burst begins at one of them (docs/papers.md: D3).

From DO (ICPP 2018), section 4.3. lambda_m is the magnification of operator m: records out over records in. When the
queue grows before operator p, the *switch point*, the range ends at the first operator q with

    lambda_(p-1) * lambda_p * ... * lambda_q < 1                                            (Eq. 8)

that is, where fewer records leave than came into the operator before p: from there on nobody is under pressure. It is
the shortest such range, because every operator in it pays the latency of a micro-batch. Operator p-1 counts, as what it
multiplies is part of the burst, but stays outside: its tasks spread their records over Spark's executors. (The paper's
own run of the Yahoo benchmark, section 6.5, puts four operations into Spark where Eq. 8 ends at the filter, which
passes a third: `below` can be set lower for such ranges.)

The paper has chains only. On a graph without cycles we take the following, which is the same on a chain.

- **Volumes instead of a product.** What came into the operators before p is 1. Operator p is handed lambda_(p-1): what
  they all hand on over what they all took. An operator hands lambda times what it was handed, *all of it to each* of
  its successors (a fork copies); one with several inputs (a union) is handed the sum. Operators belong to the range as
  long as what they are handed is not below 1: for a chain this is Eq. 8, read from the other side.
- **One entry.** Records come in at p alone: any other operator belongs to the range only if *all* its inputs come from
  within. So a union lies within when all its branches do; else it is where the range ends, and takes Spark's results
  beside its other inputs. From this it follows that a range is connected, and convex (no way leaves it and comes back:
  the operator by which it came back would be fed from outside), so at a barrier it can be taken out as one piece.
- **Several ends.** After a fork each branch ends for itself; what leaves at each end goes to the record tasks.
- **It ends earlier** before an operator with no batch form. A stateful operator whose partial results merge can be an
  end, with nothing downstream of it in the range: Spark makes partial results, the state stays in the record tasks, so
  nothing has to move when the range comes back. A side output that is used has no batch form unless the caller says so
  (`Vertex.side_outputs_cross`); what it feeds is never in the range. Sinks never are: they commit by epochs.
- **Sources** that can hand over columns as they read them, and feed p only, go in front of p if all that feeds p is
  such: then no record of the burst ever becomes a Python object. A source that is the switch point itself but cannot do
  so makes the operator after it the switch point.

Without measurements a magnification counts as 1. Nothing here knows of Ray, of Spark, or of operators' classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter


@dataclass(frozen=True)
class Vertex:
    """One operator, as the range sees it. All counts are of one period, which is the same for all operators."""

    name: str
    successors: tuple[str, ...] = ()  # by its main output
    side_successors: tuple[str, ...] = ()  # by side outputs
    records_in: float = 0.0  # of a source: what it has read
    records_out: float = 0.0  # by its main output
    source: bool = False
    sink: bool = False
    mergeable: bool = False  # stateful, and partial results of it can be merged: it may be an end
    hands_columns: bool = False  # a source that can hand over columns, without making records of them
    side_outputs_cross: bool = False

    @property
    def magnification(self) -> float:
        """Records out over records in, the paper's lambda; 1 when nothing was measured."""
        return self.records_out / self.records_in if self.records_in > 0 else 1.0


@dataclass(frozen=True)
class SwitchRange:
    """Operators that run in the same paradigm from now on.

    `operators`: in an order in which each operator comes after all operators of the range that feed it. Among them are
    the sources that hand their columns over within the range.
    """

    operators: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class NoRange:
    """Says that there is no range, and why."""

    reason: str


Crosses = Callable[[str], str | None]
"""Why an operator has no batch form, or None if it has one."""


def switch_range(
    vertices: Iterable[Vertex],
    point: str,
    crosses: Crosses,
    *,
    below: float = 1.0,
    absorb_ends: bool = False,
) -> SwitchRange | NoRange:
    """Returns the range that goes to Spark when the queue before `point` is a burst.

    `below`: the 1 of Eq. 8. `absorb_ends`: take in a mergeable operator right after the range even where it is handed
    less. Its partial results are at most one for each key, so fewer records come back from Spark.
    """
    graph = _Graph(vertices)
    if point not in graph.vertices:
        raise ValueError(f"there is no operator {point!r}; there are: {', '.join(graph.vertices)}")
    head = graph.vertices[point]
    if head.source:
        nexts = (*head.successors, *head.side_successors)
        if len(nexts) != 1:
            return NoRange(f"source {point!r} feeds {len(nexts)} operators: a range begins at one")
        head = graph.vertices[nexts[0]]
        if len(graph.before[head.name]) > 1:
            return NoRange(
                f"source {point!r} feeds {head.name!r}, which others feed too: its queue is not the source's"
            )
    reason = graph.obstacle(head, crosses)
    if reason is not None:
        return NoRange(f"{head.name!r} cannot cross: {reason}")

    inside = {head.name}
    handed = {head.name: graph.magnification_before(head)}
    stops: list[str] = []
    for name in graph.order:
        before = graph.before[name]
        if name in inside or inside.isdisjoint(before):
            continue
        vertex = graph.vertices[name]
        volume = sum(
            handed[feeding] * graph.vertices[feeding].magnification
            for feeding in before
            if feeding in inside and name in graph.vertices[feeding].successors
        )
        stop = graph.stop(vertex, inside, crosses)
        by_main = any(name in graph.vertices[feeding].successors for feeding in before if feeding in inside)
        if by_main and volume < below and not (absorb_ends and vertex.mergeable):
            stops.append(f"{name!r} is handed {volume:.3g} of what came, below {below:g}")
        elif stop is not None:
            stops.append(f"before {name!r}: {stop}")
        else:
            inside.add(name)
            handed[name] = volume
    feeders = graph.before[head.name]
    if all(graph.hands_columns_to(feeding, head.name) for feeding in feeders):
        inside.update(feeders)
    operators = tuple(name for name in graph.order if name in inside)
    return SwitchRange(operators, "; ".join(stops) or "up to where the flow ends")


class _Graph:
    """The vertices by name, with the operators that feed each."""

    def __init__(self, vertices: Iterable[Vertex]) -> None:
        self.vertices = {vertex.name: vertex for vertex in vertices}
        self.before: dict[str, list[str]] = {name: [] for name in self.vertices}
        for name in self.vertices:
            for following in self.after(name):
                if following not in self.before:
                    raise ValueError(f"{name!r} feeds {following!r}, which is not among: {', '.join(self.vertices)}")
                self.before[following].append(name)
        self.order = self._ordered()

    def after(self, name: str) -> list[str]:
        """Returns the operators that an operator feeds, by any output."""
        vertex = self.vertices[name]
        return list(dict.fromkeys((*vertex.successors, *vertex.side_successors)))

    def magnification_before(self, head: Vertex) -> float:
        """Returns lambda_(p-1), of all operators that feed p by main outputs; 1 when there are none."""
        feeding = [self.vertices[name] for name in self.before[head.name]]
        # A source takes in what it gives out: the burst comes from outside.
        main = [v for v in feeding if head.name in v.successors and v.records_in > 0 and not v.source]
        read = sum(v.records_out for v in feeding if head.name in v.successors and v.source)
        taken = sum(v.records_in for v in main) + read
        return (sum(v.records_out for v in main) + read) / taken if taken > 0 else 1.0

    def obstacle(self, vertex: Vertex, crosses: Crosses) -> str | None:
        """Returns why an operator cannot be in any range, or None."""
        if vertex.source:
            return "it is a source"
        if vertex.sink:
            return "it is a sink, and commits by epochs"
        reason = crosses(vertex.name)
        if reason is None and vertex.side_successors and not vertex.side_outputs_cross:
            reason = f"its side output to {vertex.side_successors[0]!r} has no batch form"
        return reason

    def stop(self, vertex: Vertex, inside: set[str], crosses: Crosses) -> str | None:
        """Returns why an operator that is fed from within a range cannot be in the range, or None."""
        reason = self.obstacle(vertex, crosses)
        if reason is not None:
            return reason
        for feeding in self.before[vertex.name]:
            if feeding not in inside and not vertex.mergeable:
                return f"{feeding!r}, which is not in the range, feeds it too"
            if feeding not in inside:
                continue
            if self.vertices[feeding].mergeable:
                return f"the state of {feeding!r} stays with the record tasks"
            if vertex.name in self.vertices[feeding].side_successors:
                return f"a side output of {feeding!r} feeds it"
        return None

    def hands_columns_to(self, name: str, target: str) -> bool:
        """Returns whether an operator is a source whose columns a range that begins at `target` can take."""
        vertex = self.vertices[name]
        return vertex.source and vertex.hands_columns and self.after(name) == [target] and not vertex.side_successors

    def _ordered(self) -> list[str]:
        """Returns the names of the operators, each after all operators that feed it."""
        sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(self.vertices, ()))
        for name in self.vertices:
            for following in self.after(name):
                sorter.add(following, name)
        try:
            return list(sorter.static_order())
        except CycleError as error:
            cycle = " -> ".join(map(repr, error.args[1]))
            raise ValueError(f"the flow has a cycle, {cycle}; a range is a part of a graph without cycles") from None
