"""What a record costs in each step between two workers, and the codec beside others; one process, core 0."""

from __future__ import annotations

import io
import marshal
import pickle
import random
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

from benchmarks.common import Bench, WrongResult, median, pinned
from benchmarks.text import vocabulary
from penstock.runtime.records.codec import decode, encode
from penstock.runtime.records.key_groups import KeyGroups, partition
from penstock.runtime.transport.ring import Ring, Wait

SIZES = (1, 10, 100, 1000)


def records_of(kind: str, n: int) -> list[Any]:
    """Records that do not repeat an object, as records that come from outside do not."""
    chance = random.Random(n)
    words = ["".join(word) for word in chance.choices(vocabulary(), k=n)]
    if kind == "words":
        return words
    return [(i, word, chance.random(), i % 7 == 0, f"{word}-{i}") for i, word in enumerate(words)]


def ns_each(step: Callable[[], object], records: int, budget_ns: int) -> float:
    """The least ns a record in several lots of calls."""
    step()
    started = perf_counter_ns()
    step()
    calls = max(1, budget_ns // 10 // max(1, perf_counter_ns() - started))
    lots = []
    for _ in range(10):
        started = perf_counter_ns()
        for _ in range(calls):
            step()
        lots.append((perf_counter_ns() - started) / calls)
    return min(lots) / records


def ring_ns(payload: bytes, records: int, budget_ns: int) -> tuple[float, float]:
    """(write, drain) in ns a record for messages of this payload, with its copies."""
    write_lots: list[float] = []
    read_lots: list[float] = []
    with (
        Ring.create(2 * 1024 * 1024) as ring,
        ring.consumer(Wait.SLEEP, zero_copy_min=None) as consumer,
        ring.producer() as producer,
    ):
        messages = max(1, min(256, ring.capacity // 2 // (len(payload) + 64)))
        head = bytes(24)
        until = perf_counter_ns() + budget_ns
        while perf_counter_ns() < until or not write_lots:
            started = perf_counter_ns()
            for _ in range(messages):
                producer.try_write_parts(1, (head, payload))
            written = perf_counter_ns()
            got = consumer.drain(messages)
            read = perf_counter_ns()
            if len(got) != messages or got[0][1] != head + payload:
                raise WrongResult("the ring gave back something else")
            write_lots.append((written - started) / messages)
            read_lots.append((read - written) / messages)
    return min(write_lots) / records, min(read_lots) / records


def arrow_codec(kind: str) -> tuple[Callable[[list[Any]], Any], Callable[[Any], list[Any]]]:
    """Rows to Arrow IPC bytes and back to Python rows."""
    import pyarrow as pa

    def to_bytes(records: list[Any]) -> bytes:
        columns = [records] if kind == "words" else list(zip(*records, strict=True))
        batch = pa.record_batch([pa.array(column) for column in columns], [str(i) for i in range(len(columns))])
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return sink.getvalue()

    def from_bytes(payload: bytes) -> list[Any]:
        with pa.ipc.open_stream(payload) as reader:
            columns = [column.to_pylist() for column in reader.read_all().columns]
        return columns[0] if kind == "words" else list(zip(*columns, strict=True))

    return to_bytes, from_bytes


def run(bench: Bench) -> None:
    """See the module."""
    with pinned(0):
        for kind in ("words", "5-field tuples"):
            for n in SIZES:
                _steps(bench, kind, n)


def _steps(bench: Bench, kind: str, n: int) -> None:
    budget = bench.pick(100_000_000, 3_000_000)
    records = records_of(kind, n)
    keys = records if kind == "words" else [record[1] for record in records]
    table = KeyGroups().table(2)
    code, payload = encode(records)
    ours: tuple[Callable[[list[Any]], Any], Callable[[Any], list[Any]]] = (
        lambda records: encode(records)[1],
        lambda payload: decode(code, payload),
    )
    codecs = {
        "penstock": ours,
        "pickle 5": (lambda records: pickle.dumps(records, 5), pickle.loads),
        "marshal": (marshal.dumps, marshal.loads),
        "arrow": arrow_codec(kind),
    }
    contestants: dict[str, Callable[[], float]] = {
        "partition": partial(ns_each, partial(partition, keys, (records,), table, 2), n, budget)
    }
    for name, (to_bytes, from_bytes) in codecs.items():
        encoded = to_bytes(records)
        if from_bytes(encoded) != records:
            raise WrongResult(f"{name} does not give the records back")
        contestants[f"encode {name}"] = partial(ns_each, partial(to_bytes, records), n, budget)
        contestants[f"decode {name}"] = partial(ns_each, partial(from_bytes, encoded), n, budget)
    rings: list[tuple[float, float]] = []

    def ring() -> float:
        rings.append(ring_ns(payload, n, budget))
        return sum(rings[-1])

    contestants["ring"] = ring
    results: dict[str, list[float]] = {label: [] for label in contestants}
    for _ in range(bench.runs):
        for label, contestant in contestants.items():
            results[label].append(contestant())
    what = f"{kind}, {n} a list"
    steps = {
        "encode": results["encode penstock"],
        "partition": results["partition"],
        "write": [write for write, _ in rings],
        "read": [read for _, read in rings],
        "decode": results["decode penstock"],
    }
    for step, runs in steps.items():
        bench.case(f"{step}, {what}", median(runs), "ns/record", config="core 0", runs=runs)
    totals = {
        name: [a + b for a, b in zip(results[f"encode {name}"], results[f"decode {name}"], strict=True)]
        for name in codecs
    }
    for peer in ("pickle 5", "marshal", "arrow"):
        bench.case(
            f"encode and decode beside {peer}, {what}",
            median(totals["penstock"]),
            "ns/record",
            peer=peer,
            peer_figure=median(totals[peer]),
            config="core 0",
            runs=totals["penstock"],
            peer_runs=totals[peer],
        )
