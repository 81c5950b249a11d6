"""Says which operators of a plan can run in the operation stream, and why the others cannot (docs/papers.md: D1).

A task hands its input to Spark, so only the operators at the beginning of its chain can cross: an operator behind one
that stays gets its records in the task. `bridge/forms.py` makes the ranges of the chains by the same rule. An operator
must never be said to cross here when no range can contain it.
"""

from __future__ import annotations

from penstock.runtime.operators.base import Operator
from penstock.runtime.operators.stateless import KeyBy
from penstock.runtime.program.plan import Plan
from penstock.runtime.records.userfunc import DEAD_LETTERS


def obstacle(plan: Plan, operator: Operator) -> str | None:
    """Returns why an operator cannot cross wherever it stands in its chain, or None when it can."""
    if operator.why_not_in_spark is not None:
        return operator.why_not_in_spark
    used = [exchange.output for exchange in plan.exchanges if exchange.operator == operator.name and exchange.output]
    used = [output for output in used if output in operator.outputs and output != DEAD_LETTERS]
    return f"its side output {used[0]} is used" if used else None


def staying(plan: Plan) -> dict[str, str]:
    """Returns the operators of a plan that cannot run in the operation stream, each with its reason."""
    reasons: dict[str, str] = {}
    for chain in plan.chains:
        before: str | None = None  # the first operator behind the source that stays
        for operator in chain.operators:
            if isinstance(operator, KeyBy):
                continue
            reason = obstacle(plan, operator)
            if reason is None and before is not None:
                reason = f"it follows {before} in its chain, which stays"
            if reason is None:
                continue
            reasons[operator.name] = reason
            if operator is not chain.source and before is None:
                before = operator.name
    return reasons
