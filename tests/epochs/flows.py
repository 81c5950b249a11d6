"""Flows for the simulated cluster with epochs: those of tests/program/random_flows.py and more state.

What is more: state that goes, records that their receivers change, and timers. When a timer fires depends on the time,
but what its calls add up to does not, so that too is known without running.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from penstock.runtime.expressions import count, max_, mean, sum_
from penstock.runtime.operators.process import ProcessContext, ProcessFunction
from penstock.runtime.sinks.collect import Collect
from tests.program.random_flows import Place, RandomFlow, mix, random_flow
from tests.runtime.sim import Trickle


class Tallies(ProcessFunction):
    """Counts the records of each key, and says what has come since it last did so whenever one of the key's timers
    fires. It keeps account of the timers that must fire, and takes a wrong one for an error."""

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> None:
        state = ctx.get()
        if state is None:
            state = {"since": 0, "armed": []}
            ctx.set(state)
        state["since"] += 1
        armed = state["armed"]
        n = mix(record, self.salt)
        if n % 11 == 0:
            ctx.cancel_timer()
            armed.clear()
        elif n % 7 == 0 and armed:
            ctx.cancel_timer(at_ms=armed.pop(n % len(armed)))
        if not armed or n % 5 == 0:
            self._arm(ctx, armed, n)

    def on_timer(self, ctx: ProcessContext, key: Any, at_ms: int) -> list[Any]:
        state = ctx.get()
        assert state is not None, f"key {key}: a timer fired for a key without state"
        assert at_ms in state["armed"], f"key {key}: a timer fired at {at_ms}; set are {state['armed']}"
        state["armed"].remove(at_ms)
        since, state["since"] = state["since"], 0
        n = mix((key, since), self.salt)
        if not state["armed"] and n % 3:
            ctx.clear()
        elif since and n % 4 == 0:
            self._arm(ctx, state["armed"], n)
        return [(key, since)] if since else []

    def finish(self, ctx: ProcessContext) -> None:
        for key, state in ctx.state.items():
            assert not state["since"], f"key {key}: a timer that was set has not fired at the end"

    def _arm(self, ctx: ProcessContext, armed: list[int], n: int) -> None:
        at = ctx.set_timer(after_s=(n // 100 % 40) ** 2 * 0.0001)
        if at not in armed:
            armed.append(at)


def epoch_flow(seed: int) -> RandomFlow:
    """A flow of the seed's choosing."""
    made = random_flow(seed)
    rng = random.Random(f"epochs {seed}")
    if rng.random() < 0.4:
        _tallies(made, rng.choice(made.places), rng)
    if rng.random() < 0.4:
        _rounds(made, rng.choice(made.places), rng)
    if rng.random() < 0.5:
        _changed(made, max(made.places, key=lambda place: min(len(place.records), 100)), rng)
    totals = random.Random(f"totals {seed}")  # of its own: the rest of a seed's flow stays as it was
    if totals.random() < 0.3:
        _totals(made, totals.choice(made.places), totals)
    to_all = random.Random(f"to all {seed}")
    if to_all.random() < 0.3:
        _to_all(made, seed, to_all)
    return made


def _key(rng: random.Random) -> Any:
    keys, salt = rng.choice((1, 3, 50)), rng.randrange(100)
    return lambda record: mix(record, salt) % keys


def _tallies(made: RandomFlow, place: Place, rng: random.Random) -> None:
    key = _key(rng)
    stream = place.stream.key_by(key).process(Tallies(rng.randrange(100)), parallelism=rng.randrange(1, 4))
    totals = dict(Counter(map(key, place.records)))
    if rng.random() < 0.5:
        name = f"tallies of {len(totals)} keys"
        sink = Collect()
        stream.write(sink, parallelism=rng.randrange(1, 3))
        made.sums[sink.channel] = (name, totals)
    else:
        total = stream.key_by(lambda pair: pair[0]).sum(
            lambda pair: pair[1], emit="final", parallelism=rng.randrange(1, 3)
        )
        _write(made, f"sums of tallies of {len(totals)} keys", total, list(totals.items()), rng)


def _rounds(made: RandomFlow, place: Place, rng: random.Random) -> None:
    """State that is forgotten every few records of a key."""
    key, size = _key(rng), rng.choice((2, 3, 7))

    def work(ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        n = ctx.get(0) + 1
        if n == size:
            ctx.clear()
            return [("round", key)]
        ctx.set(n)
        return []

    rounds = Counter(map(key, place.records))
    expected = [("round", k) for k, n in rounds.items() for _ in range(n // size)]
    stream = place.stream.key_by(key).process(work, parallelism=rng.randrange(1, 4))
    _write(made, f"rounds of {size}", stream, expected, rng)


def _totals(made: RandomFlow, place: Place, rng: random.Random) -> None:
    """Several results of a key at once, of values of which some are null; sums of them are exact in any order."""
    key, salt = _key(rng), rng.randrange(100)

    def row(record: Any) -> dict[str, Any]:
        n = mix(record, salt) % 3000
        return {"key": key(record), "n": n, "x": n / 8 if n % 3 else None}

    results = place.stream.map(row, parallelism=rng.randrange(1, 4)).key_by("key")
    stream = results.agg(
        n=count(), total=sum_("n"), top=max_("x"), mean=mean("x"), emit="final", parallelism=rng.randrange(1, 4)
    )
    groups: dict[int, list[dict[str, Any]]] = {}
    for each in map(row, place.records):
        groups.setdefault(each["key"], []).append(each)
    expected = []
    for found, rows in groups.items():
        xs = [each["x"] for each in rows if each["x"] is not None]
        total = sum(each["n"] for each in rows)
        expected.append((found, len(rows), total, max(xs, default=None), sum(xs) / len(xs) if xs else None))
    _write(made, "totals", stream.map(lambda pair: (pair[0], *pair[1].values()), parallelism=1), expected, rng)


def _to_all(made: RandomFlow, seed: int, rng: random.Random) -> None:
    """Records of several senders go to all tasks, for long enough that relays come into it."""
    senders, receivers, n = rng.randrange(1, 4), rng.randrange(2, 7), rng.choice((100, 400, 800))
    records = [[(sender, i, "x" * rng.choice((0, 20))) for i in range(n // senders)] for sender in range(senders)]
    salt = rng.randrange(100)
    stream = made.flow.read(Trickle(records, seed), parallelism=senders, name="announcer").rebalance()
    if rng.random() < 0.5:
        stream = stream.map(lambda record: record, parallelism=rng.randrange(1, 4))
    copies = stream.broadcast().map(lambda record: (salt, record[:2]), parallelism=receivers, name="all")
    expected = [(salt, record[:2]) for part in records for record in part] * receivers
    _write(made, f"to all of {receivers}", copies, expected, rng)


def _changed(made: RandomFlow, place: Place, rng: random.Random) -> None:
    """Records that whoever gets them changes."""

    def change(record: list[Any]) -> list[Any]:
        record[0] += 1
        return record

    stream = place.stream.map(lambda record: [0, record], parallelism=2)
    for _ in range(3):
        stream = stream.rebalance().map(change, parallelism=rng.randrange(1, 4))
    expected = [(3, record) for record in place.records]
    _write(made, "changed", stream.map(tuple, parallelism=1), expected, rng)


def _write(made: RandomFlow, name: str, stream: Any, records: list[Any], rng: random.Random) -> None:
    sink = Collect()
    stream.write(sink, parallelism=rng.randrange(1, 3))
    made.expected[sink.channel] = (name, Counter(records))
