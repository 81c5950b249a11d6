"""Batch forms: what a range of operators is in the operation stream, made from the operators (docs/papers.md: D1).

A range is taken from a chain of the physical plan: the operators after the source, as long as each can cross, and
where they end in a key exchange with a combiner, the partial aggregates too (the state stays in its tasks). A Python
function runs as itself: `RangeRun` drives the very stages that the record tasks have, over the rows of one partition.

It must never let a record that fails take the operator's policy in Spark. Such a record comes back as it was before the
operator that failed, and the task processes it from there on. There the failure is counted once and goes to the right
output. What the operators before it have made stays, and so does what became of the other records (docs/papers.md: D5).

It must never give a function twice what can be used only once, such as an iterator that an operator has made. A record
that has become something of this kind comes back as it was before the range.
"""

from __future__ import annotations

import copy
import datetime as dt
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pyarrow as pa

from penstock.runtime.errors import RecordError
from penstock.runtime.exchange.grouping import Key
from penstock.runtime.exchange.message import decode_body, encode_body
from penstock.runtime.operators.aggregated import Aggregated
from penstock.runtime.operators.base import EXPAND_RECORDS_MAX, Operator, Stage, StageContext
from penstock.runtime.operators.batches import Gathering, MapBatches
from penstock.runtime.operators.late import LATE
from penstock.runtime.operators.micro_batch import MicroBatchResult, Unprocessed
from penstock.runtime.operators.stateless import KeyBy
from penstock.runtime.operators.watermarks import Marking
from penstock.runtime.operators.windowing import WindowAggregated
from penstock.runtime.program.crossing import obstacle
from penstock.runtime.program.plan import Chain, Plan
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.codec import decode, encode
from penstock.runtime.records.key_groups import without_bad_keys
from penstock.runtime.records.userfunc import ErrorHandler, is_failure, select
from penstock.runtime.scalars import python_keys
from penstock.runtime.sources.base import Source, rows_of
from penstock.runtime.state.aggregate import Aggregate, add_all

# The column of records that have no columns of their own: lists of them, encoded.
ENCODED = "penstock:records"

# A list has at most so many records and at least so many. A large micro-batch has so many lists that all cores get
# about as many records (docs/papers.md: D5).
_LIST_MOST, _LIST_LEAST, _LISTS = 2048, 32, 64

# The least number of records that the stages get at a time. What 1,024 lines of text become fits into the processor's
# caches, and with 4,096 lines a count of words takes a fifth longer.
_PIECE_RECORDS = 1024

# Into so many parts records are divided of which one fails: of 1,024 records the operator that failed gets those beside
# it four times.
_PARTS = 16

# An operator that makes many records of one gets so many records at a time that it makes about so many at most: they
# are kept until it has come to the end without a failure. Until it is known how many it makes, it gets few records.
_EXPANDED = 16 * EXPAND_RECORDS_MAX
_EXPAND_FIRST = 32


@dataclass(frozen=True)
class RangeForm:
    """A range of a chain: its operators, the stage after them, and how it ends: with `selector` and `combiner` in
    partial results of the operator `aggregate`, by key, else in records. `source`: that of the chain. `first`: the
    position of the first of the operators in the chain."""

    chain: int
    position: int
    operators: tuple[Operator, ...]
    selector: Callable[[Any], Any] | None = None
    combiner: Aggregate | None = None
    aggregate: str | None = None
    source: Source | None = None
    first: int = 0

    @property
    def names(self) -> list[str]:
        """The names of the operators that cross."""
        return [operator.name for operator in self.operators]

    def within(self, operators: Collection[str]) -> int | None:
        """Returns the position up to which the range goes when only these operators go to Spark, or None when no part
        of it goes."""
        n = 0
        while n < len(self.operators) and self.operators[n].name in operators:
            n += 1
        if n == len(self.operators):
            return self.position if n or self.aggregate in operators else None
        return n + (self.source is not None) if n else None

    def before(self, position: int) -> RangeForm:
        """Returns the range that ends before a position, which `within` has returned."""
        if position == self.position:
            return self
        n = position - (self.source is not None)
        return RangeForm(self.chain, position, self.operators[:n], source=self.source, first=self.first)


def range_form(plan: Plan, chain: Chain) -> RangeForm | str:
    """Returns the range of a chain that can cross, or why there is none.

    No range begins with a keyed operator. Spark could only make partial results for it, and the tasks before it have
    made them already, if they can be merged at all."""
    first = 0 if chain.source is None else 1
    at = first
    while at < len(chain.operators) and obstacle(plan, chain.operators[at]) is None:
        at += 1
    operators = tuple(map(_strict, chain.operators[first:at]))
    source = None if chain.source is None else chain.source.source
    if source is None and chain.operators[0].keyed:
        return f"{chain.operators[0].name}: {chain.operators[0].why_not_in_spark}"
    if at == len(chain.operators):
        leaving = [exchange for exchange in plan.exchanges if exchange.source == chain.index]
        if len(leaving) == 1 and isinstance(key := leaving[0].grouping, Key) and leaving[0].combiner is not None:
            aggregate = plan.chains[leaving[0].target].operators[0].name
            return RangeForm(chain.index, at, operators, key.selector, leaving[0].combiner, aggregate, source, first)
    elif isinstance(key_by := chain.operators[at], KeyBy):
        aggregated = chain.operators[at + 1]
        combiner = _combiner(plan, aggregated)
        if combiner is not None:
            return RangeForm(chain.index, at + 1, operators, key_by.selector, combiner, aggregated.name, source, first)
    if not operators:
        stopped = chain.operators[min(at, len(chain.operators) - 1)]
        return f"{stopped.name}: {obstacle(plan, stopped) or 'nothing is left to do between the source and it'}"
    return RangeForm(chain.index, at, operators, source=source, first=first)


def _combiner(plan: Plan, operator: Operator) -> Aggregate | None:
    if isinstance(operator, Aggregated):
        return operator.combiner
    if isinstance(operator, WindowAggregated):
        late = any(exchange.operator == operator.name and exchange.output == LATE for exchange in plan.exchanges)
        return None if late else operator.combiner
    return None


def _strict(operator: Operator) -> Operator:
    """Returns the operator with the policy that every failure ends the micro-batch."""
    operator = copy.copy(operator)
    operator.on_error = "fail"
    operator.outputs = ()
    return operator


# What an error in Spark says in place of the advice to give the operator a policy: it may have one, and the record may
# fail in Spark only.
_COMES_BACK = "the record comes back from Spark to its task, where the operator's on_error decides if it fails again"


class _GivenBack(ErrorHandler):
    """Gives back the records of a piece that cannot be added to partial results."""

    def __init__(self, run: RangeRun) -> None:
        super().__init__("key_by", remedy=_COMES_BACK)
        self._run = run

    def handle(self, record: Any, error: BaseException, records: int = 1) -> None:
        """See ErrorHandler; `record` is a key and a record."""
        if isinstance(error, RecordError) or not is_failure(error):
            raise error
        self._run.give_back_to_key(record[1], str(self.failure(record, error)))


class RangeRun:
    """Runs a range over the rows of one partition, as the record tasks would. Records that fail are given back."""

    def __init__(self, form: RangeForm) -> None:
        self._form = form
        self._stages: list[Stage] = []
        for operator in form.operators:
            stage = operator.stage(StageContext(operator))
            stage.errors.remedy = _COMES_BACK
            stage.open()
            self._stages.append(stage)
        self.end = form.first + len(form.operators)  # the position after the operators
        calls = [operator.batch_size for operator in form.operators if isinstance(operator, MapBatches)]
        self.piece = max([_PIECE_RECORDS, *calls])  # the number of records to give to `take` at a time
        self._errors = ErrorHandler("key_by", "fail", remedy=_COMES_BACK)
        self._given_back = _GivenBack(self)
        self._partials: dict[Any, Any] = {} if form.combiner is None else form.combiner.new_state()
        self._batches: list[Batch | Unprocessed] = []

    def take(self, records: list[Any]) -> None:
        """Runs some records through the range. When an operator fails, only this operator is run again, on parts of its
        input, until the records that fail are known. The results keep their order."""
        if not records:
            return
        before = self._counts()
        try:
            results = list(self._through(records, 0))
        except RecordError as error:
            # What some operator got cannot be used again. So what was made of the records does not count, and they are
            # run again from the beginning, in parts.
            for stage, counts in zip(self._stages, before, strict=True):
                stage.records_in, stage.records_out = counts
            if len(records) == 1:
                self._give_back(Unprocessed(self._form.first, records, str(error)))
                return
            for part in _parts(records):
                self.take(part)
            return
        for result in results:
            if isinstance(result, Unprocessed):
                self._give_back(result)
            elif isinstance(result, _Prepared):
                self._add(result)
            else:
                self._append(result)

    def _through(self, batch: list[Any], first: int) -> Iterator[list[Any] | _Prepared | Unprocessed]:
        """Yields in order the results of the stages from `first` on for a batch that is not empty, and then the
        selector of the key, if there is one. Raises RecordError when this has to begin again before the first stage."""
        for i in range(first, len(self._stages)):
            stage = self._stages[i]
            if stage.expands:
                for part in self._small_enough(stage, batch):
                    yield from self._expanded(part, i)
                return
            try:
                out = stage.run(batch)
            except RecordError as error:
                failure = error
                break
            assert isinstance(out, list)
            stage.records_in += len(batch)
            stage.records_out += len(out)
            if not out:
                return
            batch = out
        else:
            i = len(self._stages)
            try:
                result = batch if self._form.combiner is None else self._prepared(batch)
            except RecordError as error:
                failure = error
            else:
                yield result
                return
        yield from self._apart(batch, i, failure)

    def _small_enough(self, stage: Stage, batch: list[Any]) -> Iterator[list[Any]]:
        """Yields a batch in parts of which a stage does not make too many records."""
        at = 0
        while at < len(batch):
            if isinstance(stage, Gathering):  # its function may need a full batch
                size = len(batch)
            elif not stage.records_in:
                size = _EXPAND_FIRST
            else:
                size = max(1, _EXPANDED * stage.records_in // max(1, stage.records_out))
            yield batch[at : at + size]
            at += size

    def _expanded(self, batch: list[Any], i: int) -> Iterator[list[Any] | _Prepared | Unprocessed]:
        """Yields the same as `_through`, for an expanding stage. What it makes is kept until it has come to the end of
        the batch: what a record that fails has left behind does not count."""
        stage = self._stages[i]
        try:
            pieces = list(stage.expand(batch))
        except RecordError as error:
            failure = error
        else:
            stage.records_in += len(batch)
            for piece in pieces:
                assert isinstance(piece, list)
                stage.records_out += len(piece)
                yield from self._through(piece, i + 1)
            return
        yield from self._apart(batch, i, failure)

    def _apart(self, batch: list[Any], i: int, failure: RecordError) -> Iterator[list[Any] | _Prepared | Unprocessed]:
        """Yields the same as `_through`, for a batch of which a record has failed in a stage. A single record comes
        back."""
        if i > 0 and not all(map(_can_be_used_again, batch)):
            raise failure
        if len(batch) == 1:
            yield Unprocessed(self._form.first + i, batch, str(failure))
            return
        for part in _parts(batch):
            yield from self._through(part, i)

    def _counts(self) -> list[tuple[int, int]]:
        return [(stage.records_in, stage.records_out) for stage in self._stages]

    def give_back_to_key(self, record: Any, why: str) -> None:
        """Notes that the task must process a record itself, from the selector of the key on."""
        self._give_back(Unprocessed(self.end, [record], why))

    def _give_back(self, back: Unprocessed) -> None:
        last = self._batches[-1] if self._batches else None
        if isinstance(last, Unprocessed) and last.position == back.position:
            last.records.extend(back.records)
        else:
            self._batches.append(Unprocessed(back.position, list(back.records), back.why))

    def answer(self) -> MicroBatchResult:
        """Returns the results of all records."""
        combiner = self._form.combiner
        batches = self._batches
        if combiner is not None and self._partials:
            batches = [KeyedBatch(*combiner.shipped(self._partials), True), *batches]
        seen = [stage.greatest for stage in self._stages if isinstance(stage, Marking) and stage.greatest is not None]
        for stage in self._stages:
            stage.close(False)
        counts = dict(enumerate(self._counts(), self._form.first))
        return MicroBatchResult(batches, max(seen, default=None), counts=counts)

    def _append(self, piece: list[Any]) -> None:
        if self._batches and isinstance(last := self._batches[-1], list):
            last += piece
        else:
            self._batches.append(list(piece))  # a function may keep its list

    def _prepared(self, piece: list[Any]) -> _Prepared:
        """Returns records with the keys and values by which they are added to partial results."""
        form = self._form
        assert form.combiner is not None
        assert form.selector is not None
        records, keys = select(form.selector, piece, self._errors)
        keys = python_keys(keys)
        # A partial result stands for many records. So a record with a bad key must be found before it is combined.
        keys, records = without_bad_keys(keys, records, self._errors)
        return _Prepared(piece, *form.combiner.prepare(keys, records, self._errors))

    def _add(self, prepared: _Prepared) -> None:
        assert self._form.combiner is not None
        records, keys, values = prepared.records, prepared.keys, prepared.values
        # A record of several windows has several values, of which some may have been added already.
        errors = self._given_back if len(values) == len(records) else self._errors
        add_all(self._form.combiner.add, self._partials, keys, values, errors, records)


@dataclass(frozen=True)
class _Prepared:
    """Records that are ready to be added to partial results."""

    records: list[Any]
    keys: list[Any]
    values: list[Any]


def _parts(records: list[Any]) -> Iterable[list[Any]]:
    size = -(-len(records) // _PARTS)
    return [records[start : start + size] for start in range(0, len(records), size)]


# Values that are the same however often they were looked at, beside collections of them.
_VALUES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, Decimal, UUID}
    | {dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone}
)


def _can_be_used_again(value: Any) -> bool:
    """Whether a function that has had a value cannot have used it up, as it would an iterator. Functions do not change
    records in place."""
    kind = type(value)
    if kind in _VALUES or isinstance(value, Enum):
        return True
    inside: list[Any] = list(vars(value).values()) if hasattr(value, "__dict__") else []
    if kind is dict:
        inside += [*value, *value.values()]
    elif kind in (list, set, frozenset) or isinstance(value, tuple):
        inside += value
    elif is_dataclass(value):
        inside += [getattr(value, each.name, None) for each in fields(value)]
    else:
        return False
    try:
        return all(map(_can_be_used_again, inside))
    except RecursionError:  # it contains itself
        return False


# --- micro-batches as Arrow ----------------------------------------------------------------------------------------


def as_columns(input_: Any) -> pa.RecordBatch:
    """Returns a micro-batch as it travels: the columns of its source as they are, or a list of records, encoded."""
    if isinstance(input_, pa.RecordBatch):
        return input_
    rows = []
    size = min(_LIST_MOST, max(_LIST_LEAST, -(-len(input_) // _LISTS)))
    for start in range(0, max(1, len(input_)), size):
        codec, payload = encode(input_[start : start + size])
        rows.append(codec.to_bytes(2, "little") + payload)
    return pa.record_batch([pa.array(rows, pa.binary())], [ENCODED])


def as_records(columns: pa.RecordBatch) -> list[Any]:
    """Returns the records of the result of `as_columns`."""
    if columns.schema.names != [ENCODED]:
        return rows_of(columns)
    records: list[Any] = []
    for row in columns.column(0).to_pylist():
        records += decode(int.from_bytes(row[:2], "little"), memoryview(row)[2:])
    return records


#: The schema of what a partition answers: a batch encoded, and the greatest time seen. Of what could not be processed
#: also from which position on the task must process it, and why. The first row has the counts of the stages.
ANSWER_SCHEMA = "batch binary, greatest bigint, position bigint, why string, counts string"


def answer_rows(answer: MicroBatchResult) -> pa.RecordBatch:
    """Returns a partition's answer as rows."""
    errors = ErrorHandler("bridge", "fail")
    rows: list[tuple[bytes | None, int | None, str | None]] = []
    for batch in answer.batches:
        if isinstance(batch, Unprocessed):
            # A function's message may have halves of characters, which a column of texts cannot have.
            why = batch.why.encode("utf-8", "backslashreplace").decode()
            rows.append((b"".join(encode_body(batch.records, 0, errors)[1]), batch.position, why))
        else:
            rows.append((b"".join(encode_body(batch, 0, errors)[1]), None, None))
    batches, positions, reasons = zip(*(rows or [(None, None, None)]), strict=True)
    columns = [
        pa.array(batches, pa.binary()),
        pa.array([answer.greatest] * len(batches), pa.int64()),
        pa.array(positions, pa.int64()),
        pa.array(reasons, pa.string()),
        pa.array([json.dumps(answer.counts), *([None] * (len(batches) - 1))], pa.string()),
    ]
    return pa.record_batch(columns, ["batch", "greatest", "position", "why", "counts"])


def answer_of(rows: pa.Table) -> MicroBatchResult:
    """Returns the answer of all partitions, in their order."""
    batches: list[Batch | Unprocessed] = []
    columns = [rows.column(name).to_pylist() for name in ("batch", "position", "why")]
    for encoded, position, why in zip(*columns, strict=True):
        batch = None if encoded is None else decode_body(encoded)
        if batch and position is not None:
            assert isinstance(batch, list)
            batches.append(Unprocessed(position, batch, why))
        elif batch:
            batches.append(batch)
    greatest = [time for time in rows.column("greatest").to_pylist() if time is not None]
    counts: dict[int, tuple[int, int]] = {}
    for told in rows.column("counts").to_pylist():
        for position, (taken, given) in json.loads(told or "{}").items():
            so_far = counts.get(int(position), (0, 0))
            counts[int(position)] = so_far[0] + taken, so_far[1] + given
    return MicroBatchResult(batches, max(greatest, default=None), counts=counts)
