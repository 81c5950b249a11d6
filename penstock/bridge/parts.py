"""Describes a job's plan for the switch range, and divides a range into parts that lie in one chain each
(docs/papers.md: D3).

`range.py` chooses a range of a graph of operators. What goes to the operation stream is the input of tasks, and a task
runs a chain. So a range that spans several chains has a part in each: the first operators of that chain. Each part has
micro-batches of its own, whose results go to the next part by the usual channels. Therefore nothing else changes when a
range switches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from penstock.bridge.forms import RangeForm
from penstock.bridge.range import Crosses, Vertex
from penstock.runtime.operators.base import Operator
from penstock.runtime.operators.stateless import KeyBy
from penstock.runtime.program.plan import Chain, Plan
from penstock.runtime.records.userfunc import DEAD_LETTERS

Counts = Mapping[str, tuple[float, float]]
"""Records in and out of operators, of one period."""


def vertices(plan: Plan, forms: Iterable[RangeForm], counts: Counts) -> list[Vertex]:
    """Returns the plan's operators. A key function is no operator of its own: it belongs to the operator that it
    feeds."""
    merged = {form.aggregate for form in forms}
    found = []
    for chain in plan.chains:
        operators = _operators(chain)
        for operator, following in zip(operators, [*operators[1:], None], strict=True):
            main = [] if following is None else [following.name]
            side = {}
            for exchange in plan.exchanges:
                if exchange.operator == operator.name:
                    target = plan.chains[exchange.target].operators[0].name
                    if exchange.output is None:
                        main.append(target)
                    else:
                        side[target] = exchange.output
            records_in, records_out = counts.get(operator.name, (0.0, 0.0))
            is_source = operator is chain.source
            found.append(
                Vertex(
                    operator.name,
                    tuple(main),
                    tuple(side),
                    records_in,
                    records_out,
                    source=is_source,
                    sink=operator.kind == "write",
                    mergeable=operator.name in merged,
                    hands_columns=is_source and chain.source is not None and chain.source.source.hands_columns,
                    # In the operation stream, a record that fails makes the tasks process the whole micro-batch
                    # themselves.
                    side_outputs_cross=all(output == DEAD_LETTERS for output in side.values()),
                )
            )
    return found


def crosses(plan: Plan, forms: Iterable[RangeForm]) -> Crosses:
    """Returns why an operator of the plan has no batch form, or None if it has one."""
    merged = {form.aggregate for form in forms}
    reasons = {operator.name: operator.why_not_in_spark for chain in plan.chains for operator in chain.operators}
    return lambda name: None if name in merged else reasons[name]


def parts(forms: Iterable[RangeForm], operators: Collection[str]) -> dict[int, int]:
    """Returns, for each chain that is diverted when these operators go to Spark, the position up to which it is
    diverted."""
    found = {form.chain: form.within(operators) for form in forms}
    return {chain: position for chain, position in found.items() if position is not None}


def head(plan: Plan, chain: int) -> str:
    """Returns the operator before which a chain's input waits."""
    return plan.chains[chain].operators[0].name


def _operators(chain: Chain) -> list[Operator]:
    return [operator for operator in chain.operators if not isinstance(operator, KeyBy)]
