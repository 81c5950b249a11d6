"""The text of `flow.explain()`: the logical and the physical plan, for people. It must never change the
flow.
"""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from penstock.runtime.exchange.grouping import Grouping, Key
from penstock.runtime.operators.aggregated import Aggregated, Reduce
from penstock.runtime.operators.asynchronous import MapAsync
from penstock.runtime.operators.base import Operator
from penstock.runtime.operators.batches import MapBatches
from penstock.runtime.operators.columnar import Columnar
from penstock.runtime.operators.ends import Read, Write
from penstock.runtime.operators.joins import IntervalJoin, TemporalJoin
from penstock.runtime.operators.lookup import Lookup
from penstock.runtime.operators.outside_lookup import OutsideLookup, Reloaded
from penstock.runtime.operators.processing import Processing
from penstock.runtime.operators.resources import told_needs
from penstock.runtime.operators.watermarks import MakeWatermarks
from penstock.runtime.operators.windowing import WindowAggregated
from penstock.runtime.operators.windows import Windows
from penstock.runtime.program.crossing import staying
from penstock.runtime.program.mixing import mixing, mixing_words
from penstock.runtime.program.plan import Exchange, Plan
from penstock.runtime.records.userfunc import ListSelector

if TYPE_CHECKING:
    from penstock.runtime.program.flow import Flow


def explain(flow: Flow, plan: Plan, workers: int) -> str:
    """Returns the operators with their inputs, and then the chains of tasks and the exchanges between them."""
    return "\n".join([*_logical(flow), "", *_physical(plan, workers), "", *_paradigms(flow, plan), ""])


def _paradigms(flow: Flow, plan: Plan) -> list[str]:
    """Says which operators can run in the operation stream, and why the others cannot."""
    reasons = staying(plan)
    names = flow.graph.ordered()
    width = max(map(len, names))
    lines = ["in a burst (dual=...)"]
    for name in names:
        reason = reasons.get(name)
        lines.append(f"  {name:<{width}}  {'can go to Spark' if reason is None else f'stays: {reason}'}")
    return lines


def _logical(flow: Flow) -> list[str]:
    graph = flow.graph
    lines = [f"flow {flow.name}", "", "logical plan"]
    names = graph.ordered()
    width = max(map(len, names))
    for name in names:
        inputs = [
            edge.source + (f".{edge.output}" if edge.output else "") + _grouped(edge.grouping)
            for edge in graph.incoming(name)
        ]
        detail = describe(graph.operators[name])
        origin = f"  <- {', '.join(inputs)}" if inputs else ""
        lines.append(f"  {name:<{width}}  {detail}{origin}")
    return lines


def _grouped(grouping: Grouping | None) -> str:
    return f" ({grouping.name})" if grouping is not None else ""


def describe(operator: Operator) -> str:
    """Describes an operator in a few words."""
    if isinstance(operator, Read):
        return operator.source.describe()
    if isinstance(operator, Write):
        return operator.sink.describe()
    if isinstance(operator, Aggregated):
        return f"{operator.aggregate}, emits {operator.emit}"
    if isinstance(operator, Reduce):
        return f"{operator.kind}, emits {operator.emit}"
    if isinstance(operator, WindowAggregated):
        late = f", {operator.lateness_ms} ms late" if operator.lateness_ms else ""
        return f"{operator.aggregate} in {operator.window}{late}, emits {operator.emit}"
    if isinstance(operator, Windows):
        late = f", {operator.lateness_ms} ms late" if operator.lateness_ms else ""
        return f"{getattr(operator.function, 'aggregate', operator.function.name)} in {operator.window}{late}"
    if isinstance(operator, IntervalJoin):
        return f"{operator.how} join with what is from {operator.lower} to {operator.upper} ms later"
    if isinstance(operator, TemporalJoin):
        return f"{operator.how} join with the version of its time"
    if isinstance(operator, MakeWatermarks):
        return f"watermark {_function(operator.time)} less {operator.out_of_orderness_ms} ms"
    if isinstance(operator, Columnar):
        return repr(operator.closure).strip("<>")
    if isinstance(operator, Lookup):
        return f"{operator.how} lookup of {len(operator.rows):,} rows on {operator.left}"
    if isinstance(operator, OutsideLookup):
        table = operator.table
        return (
            f"{operator.how} lookup in {table if isinstance(table, Reloaded) else _function(table)} on {operator.left}"
        )
    if isinstance(operator, MapBatches):
        least = (
            "" if operator.linger_s is None else f" (from {operator.min_batch} on, or after {operator.linger_s:g} s)"
        )
        return f"map_batches {_function(operator.fn)}, up to {operator.batch_size} {operator.batch_format}{least}"
    if isinstance(operator, MapAsync):
        order = "" if operator.ordered else ", in any order"
        return f"map_async {_function(operator.fn)}, up to {operator.concurrency} at a time{order}"
    if isinstance(operator, Processing):
        outputs = f", side outputs {', '.join(operator.outputs)}" if operator.outputs else ""
        return f"process {_function(operator.process)}{outputs}"
    return f"{operator.kind} {_function(getattr(operator, 'fn', None))}"


def _function(fn: object) -> str:
    if isinstance(fn, ListSelector):  # it says which value it takes
        return repr(fn)
    return str(getattr(fn, "__qualname__", None) or type(fn).__name__)


def _physical(plan: Plan, workers: int) -> list[str]:
    tasks = len(plan.tasks)
    lines = [f"physical plan: {tasks} task{'s' * (tasks != 1)} on {workers} worker{'s' * (workers != 1)}"]
    for chain in plan.chains:
        n = sum(map(len, chain.splits))
        splits = f", {n} split{'s' * (n != 1)}" if chain.source else ""
        needs = f", each task needs {told_needs(chain.needs)}" if chain.needs else ""
        lines.append(f"  [{chain.index}] {chain.name}  x{chain.parallelism}{splits}{needs}")
        outgoing = (exchange for exchange in plan.exchanges if exchange.source == chain.index)
        lines += [f"      -> [{exchange.target}] {_exchange(exchange)}" for exchange in outgoing]
    if said := mixing_words(mixing(plan)):
        lines += ["", *wrap(f"warning: {said}.", width=100, initial_indent="  ", subsequent_indent="  ")]
    return lines


def _exchange(exchange: Exchange) -> str:
    channels = sum(len(exchange.targets(sender)) for sender in range(exchange.senders))
    words = [exchange.grouping.name]
    if exchange.output:
        words.append(f"from side output {exchange.output}")
    if isinstance(exchange.grouping, Key) and exchange.combiner is not None:
        words.append(f"{exchange.combiner.name} combined before sending")
    words.append(f"{channels} channel{'s' * (channels != 1)}")
    return ", ".join(words)
