"""Finds where records of several tasks meet before a watermark operator.

The watermark of a task is the greatest time that the task has seen, less what the user allows. When the task gets
records of several senders, and one sender is behind the others, its records are behind the watermark: they are late,
and windows drop them. This does not depend on the records alone. A sender can be behind because its worker has less of
the machine, or because it has gone back to an epoch. Such an exchange *mixes* the records. So does one that passes on
what a task of a source has read of several splits, in whatever order it reads them. A plan with mixing can run,
so this module only says where the mixing is; it must never refuse a plan.
"""

from __future__ import annotations

from penstock.runtime.operators.watermarks import MakeWatermarks
from penstock.runtime.program.plan import Chain, Exchange, Plan


def mixing(plan: Plan) -> dict[str, list[str]]:
    """Returns the watermark operators before which records of several tasks meet, each with the exchanges by which the
    records come together, in words."""
    found: dict[str, list[str]] = {}
    for chain in plan.chains:
        marks = [operator.name for operator in chain.operators if isinstance(operator, MakeWatermarks)]
        if marks and (exchanges := _mixing_before(plan, chain)):
            found[marks[0]] = [_named(plan, exchange) for exchange in exchanges]  # a second one sees no other records
    return found


def mixing_words(mixed: dict[str, list[str]]) -> str:
    """Describes the mixing for the user, with the remedy. Empty when there is none."""
    if not mixed:
        return ""
    where = "; ".join(f"before {mark!r} by {' and '.join(exchanges)}" for mark, exchanges in mixed.items())
    return (
        f"records of several tasks or splits meet before they get watermarks: {where}. When one of these is behind the "
        "others, which can happen with more workers or after a failure, its records are late. Assign watermarks right "
        "after the source, with its parallelism: put .watermark(...) directly after .read(...), without a parallelism "
        "of its own, and before rebalance(), union(), map_async() and the like; for a second .watermark(...), read the "
        "source a second time"
    )


def _mixing_before(plan: Plan, chain: Chain) -> list[Exchange]:
    """Returns the exchanges that mix, on all ways to a chain."""
    found: list[Exchange] = []
    seen = {chain.index}
    waiting = [chain.index]
    while waiting:
        target = plan.chains[waiting.pop()]
        coming = [exchange for exchange in plan.exchanges if exchange.target == target.index]
        if any(len(_senders(plan, coming, receiver)) > 1 for receiver in range(target.parallelism)):
            found += coming
        else:  # only in the tasks of the source is it known which split a record comes from
            found += [
                exchange for exchange in coming if any(len(one) > 1 for one in plan.chains[exchange.source].splits)
            ]
        for exchange in coming:
            if exchange.source not in seen:
                seen.add(exchange.source)
                waiting.append(exchange.source)
    return found


def _senders(plan: Plan, exchanges: list[Exchange], receiver: int) -> set[tuple[int, int]]:
    """Returns the tasks, each as its chain and index, whose records a receiver can get. Tasks of a source that have
    nothing to read do not count, if it is known what each task reads."""
    found: set[tuple[int, int]] = set()
    for exchange in exchanges:
        splits = plan.chains[exchange.source].splits
        known = any(splits)
        found |= {(exchange.source, i) for i in exchange.origins(receiver) if not known or splits[i]}
    return found


def _named(plan: Plan, exchange: Exchange) -> str:
    output = f".{exchange.output}" if exchange.output else ""
    head = plan.chains[exchange.target].operators[0].name
    return (
        f"{exchange.grouping.name} from '{exchange.operator}{output}' (x{exchange.senders}) "
        f"to {head!r} (x{exchange.receivers})"
    )
