"""Parquet and Arrow files: the rows that pyarrow reads, shared by row group and record batch."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.runtime import sources
from penstock.runtime.errors import FlowError, SourceError
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sources.base import Source, SourceContext, share

CONTEXT = SourceContext("read", 0, 1, ErrorHandler("read"))
ROWS = [{"i": i, "name": f"n{i % 7}" if i % 5 else None, "x": i / 2} for i in range(1000)]


def write_parquet(path: Path, rows: list[dict[str, Any]] = ROWS, group: int = 100) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def write_arrow(path: Path, stream: bool = False, batch: int = 64) -> Path:
    table = pa.Table.from_pylist(ROWS)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_the_backlog_is_what_is_left_as_far_as_files_tell(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows"
    source: Source = sources.Parquet(write_parquet(path)) if kind == "parquet" else sources.Arrow(write_arrow(path))
    splits = source.splits(1)
    reader = source.reader(splits, CONTEXT)
    assert reader.backlog() == (1_000 if kind == "parquet" else 0)
    assert len(reader.read(30)) == 30
    assert reader.backlog() == (970 if kind == "parquet" else 34), "of an Arrow file the rows at hand"
    again = source.reader([split.at(reader.offsets()[split.name]) for split in splits], CONTEXT)
    assert again.backlog() == (970 if kind == "parquet" else 0)
    while not reader.finished:
        reader.read(64)
    assert reader.backlog() == 0


def read_all(source: Source, parallelism: int = 1, limit: int = 64) -> list[Any]:
    out: list[Any] = []
    for mine in share(source.splits(parallelism), parallelism):
        reader = source.reader(mine, CONTEXT)
        while not reader.finished:
            out += reader.read(limit)
        reader.close()
    return out


def by_i(rows: list[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: row["i"])


@pytest.mark.parametrize("parallelism", [1, 3])
def test_all_rows_once(tmp_path: Path, parallelism: int) -> None:
    for source in (
        sources.Parquet(write_parquet(tmp_path / "a.parquet")),
        sources.Arrow(write_arrow(tmp_path / "a.arrow")),
        sources.Arrow(write_arrow(tmp_path / "a.stream", stream=True)),
    ):
        assert by_i(read_all(source, parallelism)) == ROWS
        assert source.fields() == ["i", "name", "x"]
    assert len(sources.Parquet(tmp_path / "a.parquet").splits(3)) == 10
    assert len(sources.Arrow(tmp_path / "a.arrow").splits(3)) == 3
    assert len(sources.Arrow(tmp_path / "a.stream").splits(3)) == 1


def test_columns_and_filters(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    source = sources.Parquet(path, columns=["x", "name"], filters=[("i", ">=", 250), ("i", "<", 260)])
    assert read_all(source) == [{"x": row["x"], "name": row["name"]} for row in ROWS[250:260]]
    assert source.fields() == ["x", "name"]
    assert len(source.splits(1)) == 1  # the other row groups cannot have a match
    either = sources.Parquet(path, filters=[[("i", "=", 3)], [("name", "in", ["n1"]), ("i", "<", 10)]])
    assert [row["i"] for row in read_all(either)] == [1, 3, 8]
    assert read_all(sources.Parquet(path, filters=[("i", "<", 0)])) == []


@pytest.mark.parametrize("kind", ["parquet", "filtered", "file", "stream"])
def test_a_new_reader_continues_at_the_offsets(tmp_path: Path, kind: str) -> None:
    source: Source
    if kind in ("parquet", "filtered"):
        filters = [("x", ">", 20.0)] if kind == "filtered" else None
        source = sources.Parquet(write_parquet(tmp_path / "a"), filters=filters)
    else:
        source = sources.Arrow(write_arrow(tmp_path / "a", stream=kind == "stream"))
    whole = by_i(read_all(source))
    splits = source.splits(2)
    got: list[Any] = []
    for limit in (1, 30, 7, 100, 64, 33):
        reader = source.reader(splits, CONTEXT)
        got += reader.read(limit)
        got += reader.read(limit)
        splits = [split.at(reader.offsets()[split.name]) for split in splits]
        reader.close()
    reader = source.reader(splits, CONTEXT)
    while not reader.finished:
        got += reader.read(64)
    assert by_i(got) == whole


def test_inputs_that_cannot_be_read_are_named_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"PAR1 no")
    (tmp_path / "empty").write_bytes(b"")
    for name in ("bad", "empty"):
        with pytest.raises(SourceError, match=f"{name}.*not a Parquet file"):
            sources.Parquet(tmp_path / name).splits(1)
        with pytest.raises(SourceError, match=f"{name}.*neither an Arrow IPC file nor"):
            sources.Arrow(tmp_path / name).splits(1)
    with pytest.raises(SourceError, match="No such file"):
        sources.Parquet(tmp_path / "missing").fields()
    path = write_parquet(tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"no column 'y', 'z'; it has i, name, x"):
        sources.Parquet(path, columns=["y"], filters=[("z", "=", 1)]).splits(1)
    with pytest.raises(FlowError, match="list of column names"):
        sources.Parquet(path, columns="i")
    with pytest.raises(FlowError, match="tuples such as"):
        sources.Parquet(path, filters=[("i", ">")])  # type: ignore[list-item]
    with pytest.raises(FlowError, match="do not fit"):
        sources.Parquet(path, filters=[("i", ">", "text")]).splits(1)


def test_files_must_have_the_same_fields(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet", [{"i": "text", "name": "n", "x": 1.0}])
    with pytest.raises(SourceError, match=r"(?s)a\.parquet.*i: int64.*b\.parquet.*i: string"):
        sources.Parquet(str(tmp_path / "*.parquet")).splits(1)
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["i", "i"])
    pq.write_table(table, tmp_path / "twice")
    with pytest.raises(SourceError, match="several columns of the name i"):
        sources.Parquet(tmp_path / "twice").splits(1)


def test_damage_found_while_reading(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    source = sources.Parquet(path)
    splits = source.splits(1)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(SourceError, match="row group"):
        source.reader(splits, CONTEXT).read(10)
    path = write_arrow(tmp_path / "a.stream", stream=True)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(SourceError, match=r"a\.stream"):
        read_all(sources.Arrow(path))


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_a_recovery_does_not_read_on_in_another_file(tmp_path: Path, kind: str) -> None:
    def write(rows: list[dict[str, Any]]) -> Path:
        if kind == "parquet":
            return write_parquet(tmp_path / "table", rows)
        table = pa.Table.from_pylist(rows)
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(tmp_path / "table", table.schema) as out:
            out.write_table(table, 64)
        return tmp_path / "table"

    path = write(ROWS)
    source: Any = sources.Parquet(path) if kind == "parquet" else sources.Arrow(path)
    splits = source.splits(1)
    before = read_all(source)
    path.rename(tmp_path / "renamed")
    write([{**row, "i": row["i"] + 1} for row in ROWS])
    assert drain_of(source, splits) == before
    (tmp_path / "renamed").unlink()
    with pytest.raises(SourceError, match=r"table' is not the file any more .*Put the file back"):
        drain_of(source, splits)


def drain_of(source: Source, splits: list[Any]) -> list[Any]:
    reader = source.reader(splits, CONTEXT)
    out = []
    while not reader.finished:
        out += reader.read(64)
    return out


def test_values_keep_their_types(tmp_path: Path) -> None:
    row = {
        "i": 2**62,
        "b": True,
        "n": None,
        "t": "é\u2028",
        "raw": b"\xff",
        "at": dt.datetime(2020, 1, 1),
        "l": [1, None],
    }
    pq.write_table(pa.Table.from_pylist([row, dict.fromkeys(row)]), tmp_path / "a.parquet")
    assert read_all(sources.Parquet(tmp_path / "a.parquet")) == [row, dict.fromkeys(row)]
