"""What tests/bridge/spark/test_main_classes.py runs: a main script whose classes go through Spark's Python workers.

As in a job, the script's own process only pickles the program; a second process, which has joined the program as the
bridge has, holds the Spark session, and a third makes the records and reads the answers as a worker does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import penstock as ps
from penstock.bridge.forms import RangeForm, as_columns, range_form
from penstock.bridge.operation import Operations
from penstock.bridge.session import Session, SparkOptions, open_session
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.records import pickling
from penstock.runtime.records.batch import KeyedBatch
from tests.records.pickling_main import Peer

COUNT = 500


class Mode(Enum):
    ON = "on"
    OFF = "off"


@dataclass(frozen=True)
class Key:
    user: str
    mode: Mode


@dataclass(frozen=True)
class Order:
    key: Key
    amount: int


@dataclass(frozen=True)
class Refund(Order):
    pass


def made(i: int) -> Order:
    return (Refund if i % 3 == 0 else Order)(Key(f"u{i % 7}", Mode.ON if i % 2 else Mode.OFF), i)


def is_meant(order: Any) -> bool:
    """What a class of the same name, but another one, would not pass."""
    match order:
        case Refund(key=Key(mode=Mode.ON)):
            return False
        case Order():
            return isinstance(order, Order) and isinstance(order.key, Key)
    return False


def doubled(order: Order) -> Order:
    assert order == made(order.amount), order
    assert (order.key.mode is Mode.ON) == (order.amount % 2 == 1), order
    return type(order)(order.key, 2 * order.amount)


def key(order: Order) -> Key:
    return order.key


EXPECTED = [doubled(order) for order in map(made, range(COUNT)) if is_meant(order)]
KEYS = Counter(order.key for order in EXPECTED)


def of_records(stream: Stream) -> Any:
    return stream.filter(is_meant).map(doubled).write(ps.sinks.Null())


def of_keys(stream: Stream) -> Any:
    return stream.filter(is_meant).map(doubled).key_by(key).count().write(ps.sinks.Null())


def form_of(build: Callable[[Stream], Any]) -> RangeForm:
    flow = Flow("flow", parallelism=2)
    build(flow.read(ps.sources.Memory([])))
    plan = flow.plan(1, check_sinks=False)
    form = range_form(plan, plan.chains[0])
    assert isinstance(form, RangeForm), form
    return form


def opened() -> None:
    """Runs in the bridge's process: Spark is started, and kept."""
    ps._session_of_a_test = open_session(SparkOptions(kind="pyspark", cores=2))  # type: ignore[attr-defined]


def closed() -> None:
    session: Session = ps._session_of_a_test  # type: ignore[attr-defined]
    session.stop()


def answered(form: RangeForm, columns: Any) -> list[Any]:
    """Runs in the bridge's process: what Spark's workers make of a micro-batch."""
    session: Session = ps._session_of_a_test  # type: ignore[attr-defined]
    return Operations(session, [form], pickling.program()).answer(form.chain, form.position, columns).batches


def columns_of(count: int) -> Any:
    """Runs in a worker's process: a micro-batch."""
    return as_columns([made(i) for i in range(count)])


def check_records(batches: list[list[Order]]) -> int:
    """Records that came from Spark's workers are those that this process would have made itself."""
    records = [record for batch in batches for record in batch]
    assert records == EXPECTED, f"{records[:3]} ... are not {EXPECTED[:3]} ..."
    for record, expected in zip(records, EXPECTED, strict=True):
        assert type(record) is type(expected)
        assert record.key.mode is expected.key.mode
    return len(records)


def check_keys(batches: list[KeyedBatch]) -> int:
    """Each key that came from Spark's workers, however many of them counted it, is one key here."""
    counts: Counter[Key] = Counter()
    for batch in batches:
        for one, count in zip(batch.keys, batch.values, strict=True):
            counts[one] += count
    assert counts == KEYS, f"{counts} is not {KEYS}"
    assert all(one.mode is Mode.ON or one.mode is Mode.OFF for one in counts)
    return len(counts)


def main() -> None:
    kept = pickling.Program()
    forms = [(form_of(of_records), check_records, len(EXPECTED)), (form_of(of_keys), check_keys, len(KEYS))]
    data = kept.dumps((forms, opened, answered, closed, columns_of))
    bridge, worker = Peer(data), Peer(data)
    bridge.call(opened)
    try:
        for form, check, expected in forms:
            # Twice: Spark's Python workers are the same processes the second time, and have the classes already.
            for columns in (worker.call(columns_of, COUNT), columns_of(COUNT)):
                batches = bridge.call(answered, form, columns)
                assert worker.call(check, batches) == expected
                assert check(batches) == expected  # type: ignore[operator]
    finally:
        bridge.call(closed)


if __name__ == "__main__":
    main()
