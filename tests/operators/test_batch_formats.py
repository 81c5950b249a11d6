"""Functions that are classes, which each task makes once, and batches as columns of numpy, pandas and Arrow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.runtime.errors import FlowError, RecordError


class Model:
    """A function that takes long to load."""

    def __init__(self, factor: int, plus: int = 0) -> None:
        self.factor, self.plus, self.opened = factor, plus, False

    def open(self) -> None:
        self.opened = True

    def __call__(self, record: Any) -> Any:
        assert self.opened
        if isinstance(record, list):
            return [self(each) for each in record]
        return [record * self.factor + self.plus] if self.factor == 7 else record * self.factor + self.plus


class Plain:
    """A function that takes no options."""

    def __call__(self, record: Any) -> Any:
        return record


class Open:
    """A function that takes options of any name."""

    def __init__(self, plus: int, /, **rest: int) -> None:
        self.plus = plus + sum(rest.values())

    def __call__(self, record: Any) -> Any:
        return record + self.plus


def test_a_class_may_take_any_names() -> None:
    flow = ps.Flow("open")
    stream = flow.read(ps.sources.Memory([1, 2, 3]))
    stream.map(Open, fn_constructor_args=(2,), fn_constructor_kwargs={"plus": 3, "more": 4}).write(ps.sinks.Collect())
    assert ps.testing.run(flow) == {"write": [10, 11, 12]}


def test_a_class_is_made_once_in_each_task() -> None:
    flow = ps.Flow("models")
    stream = flow.read(ps.sources.Memory([1, 2, 3]))
    stream.map(Model, fn_constructor_args=(2,)).write(ps.sinks.Collect(), name="one")
    stream.flat_map(Model, fn_constructor_kwargs={"factor": 7}).write(ps.sinks.Collect(), name="several")
    batches = stream.map_batches(Model, fn_constructor_kwargs={"factor": 3, "plus": 1})
    batches.write(ps.sinks.Collect(), name="batches")
    out = ps.testing.run(flow)
    assert out == {"one": [2, 4, 6], "several": [7, 14, 21], "batches": [4, 7, 10]}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda s: s.map(Model), "map: Model.__init__: missing a required argument: 'factor'"),
        (
            lambda s: s.map(Model, fn_constructor_kwargs={"factor": 2, "fcator": 1}),
            "fn_constructor_kwargs: Model has no parameter 'fcator'; did you mean 'factor'? it takes: factor, plus",
        ),
        (
            lambda s: s.flat_map(Model, fn_constructor_args=(2,), fn_constructor_kwargs={"speed": 1}),
            "flat_map: fn_constructor_kwargs: Model has no parameter 'speed'; it takes: factor, plus",
        ),
        (
            lambda s: s.map_batches(Plain, fn_constructor_kwargs={"speed": 1}),
            "map_batches: fn_constructor_kwargs: Plain has no parameter 'speed'; it takes: nothing",
        ),
        (
            lambda s: s.map(Model, fn_constructor_args=(2,), fn_constructor_kwargs={"factor": 1}),
            "multiple values for argument 'factor'",
        ),
        (lambda s: s.map(abs, fn_constructor_args=(1,)), "are for a class, whose object is the function"),
        (lambda s: s.map_batches(abs, batch_format="polars"), "it must be 'list', 'numpy', 'pandas' or 'arrow'"),
    ],
)
def test_a_class_that_cannot_be_made_is_refused(make: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(FlowError) as caught:
        make(ps.Flow("f").read(ps.sources.Memory([1])))
    assert words in str(caught.value)


def as_numpy(batch: Any) -> Any:
    return {"id": batch["id"], "double": batch["price"] * 2}


def as_pandas(batch: Any) -> Any:
    return batch.assign(double=batch["price"] * 2)[["id", "double"]]


def as_arrow(batch: Any) -> Any:
    import pyarrow.compute as pc

    return batch.append_column("double", pc.multiply(batch["price"], 2)).select(["id", "double"])


@pytest.mark.parametrize("form", [as_numpy, as_pandas, as_arrow])
def test_batches_may_be_columns(form: Callable[[Any], Any]) -> None:
    flow = ps.Flow("columns")
    stream = flow.read(ps.sources.Memory([{"id": i, "price": i / 2} for i in range(10)]))
    stream.map_batches(form, batch_format=form.__name__.removeprefix("as_")).write(ps.sinks.Collect(), name="out")
    out = ps.testing.run(flow, batch_size=4)["out"]
    assert out == [{"id": i, "double": float(i)} for i in range(10)]
    assert {type(value) for row in out for value in row.values()} == {int, float}, "records have Python's own numbers"


@pytest.mark.parametrize(
    ("form", "returns", "words"),
    [
        ("numpy", [1], "return a dict of arrays by name"),
        ("numpy", {"a": [1], "b": [1, 2]}, "arrays of different lengths (a: 1, b: 2)"),
        ("pandas", {"a": [1]}, "return a pandas DataFrame"),
        ("arrow", {"a": [1]}, "return a pyarrow Table"),
    ],
)
def test_what_is_no_batch_of_columns_is_named(form: Any, returns: Any, words: str) -> None:
    flow = ps.Flow("columns")
    stream = flow.read(ps.sources.Memory([{"id": 1}]))
    stream.map_batches(lambda batch: returns, batch_format=form).write(ps.sinks.Collect(), name="out")
    with pytest.raises(RecordError) as caught:
        ps.testing.run(flow)
    assert words in str(caught.value)
