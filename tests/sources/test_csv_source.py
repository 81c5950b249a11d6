"""The CSV source: what Python's csv module reads, with types; and a recovery after any row continues after this row."""

from __future__ import annotations

import csv
import datetime as dt
import decimal
import gzip
import io
import pickle
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.runtime import sinks, sources, testing
from penstock.runtime.errors import FlowError, RecordError, SourceError
from penstock.runtime.event_time.windows import Tumbling
from penstock.runtime.program.flow import Flow
from penstock.runtime.sources import blocks
from penstock.runtime.sources.base import Source, SourceContext, rows_of
from penstock.runtime.sources.marks import FilePosition
from tests.sources.test_sources import context, drain, read_all, write

ORDERS = b'''\
id,item,price,sold
1,"tea, green",2.5,2024-03-01
2,"two
lines",3,2024-03-02

3,"say ""hi""",,2024-03-03
'''
DAYS = [dt.date(2024, 3, day) for day in (1, 2, 3)]


def test_types_are_those_that_show(tmp_path: Path) -> None:
    source = sources.Csv(write(tmp_path / "orders.csv", ORDERS))
    assert read_all(source) == [
        {"id": 1, "item": "tea, green", "price": 2.5, "sold": DAYS[0]},
        {"id": 2, "item": "two\nlines", "price": 3.0, "sold": DAYS[1]},
        {"id": 3, "item": 'say "hi"', "price": None, "sold": DAYS[2]},
    ]
    assert source.fields() == ["id", "item", "price", "sold"]
    assert repr(source) == f"Csv('{tmp_path}/orders.csv')"


@pytest.mark.parametrize("packed", [False, True])
def test_columns_and_types(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("orders.csv.gz" if packed else "orders.csv")
    path.write_bytes(gzip.compress(ORDERS) if packed else ORDERS)
    source = sources.Csv(path, columns=["sold", "id"], types={"id": str, "sold": str})
    assert read_all(source)[0] == {"sold": "2024-03-01", "id": "1"}
    assert source.fields() == ["sold", "id"]
    source = sources.Csv(path, types={"price": decimal.Decimal, "id": pa.int8(), "sold": dt.datetime})
    assert read_all(source)[0] == {
        "id": 1,
        "item": "tea, green",
        "price": decimal.Decimal("2.5"),
        "sold": dt.datetime(2024, 3, 1),
    }
    assert read_all(sources.Csv(path, types=str))[2] == {
        "id": "3",
        "item": 'say "hi"',
        "price": "",
        "sold": "2024-03-03",
    }


@pytest.mark.parametrize(
    ("content", "options", "rows"),
    [
        (b"1;x\n2;y\n", {"header": ["a", "b"], "delimiter": ";"}, [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]),
        (b"1,x\n", {"header": False}, [{"_1": 1, "_2": "x"}]),
        (b"a\n1", {}, [{"a": 1}]),
        (b"a,b", {}, []),
        (b"a,b\n", {}, []),
        (b"", {"header": ["a"]}, []),
        (b"\n\n", {"header": False}, []),
        (b"a,b\nNA,NA\n-,\n", {"null_values": ["NA", "-"]}, [{"a": None, "b": None}, {"a": None, "b": ""}]),
        (b'a,b\n1,"NA"\n,NA\n', {"null_values": ["NA", ""]}, [{"a": 1, "b": None}, {"a": None, "b": None}]),
        (b'a\tb\n"1\t2"\n', {"delimiter": "\t", "quote": None}, [{"a": '"1', "b": '2"'}]),
        (b"a,b\nx\\,y,2\n", {"escape": "\\"}, [{"a": "x,y", "b": 2}]),
        ("n\né\n".encode("latin-1"), {"encoding": "latin-1"}, [{"n": "é"}]),
        ("n\né".encode("utf-16"), {"encoding": "utf-16"}, [{"n": "é"}]),
        ("\ufeffn\né\n".encode(), {}, [{"n": "é"}]),
        ('\ufeff"a\nb",c\n1,2\n'.encode(), {}, [{"a\nb": 1, "c": 2}]),
        (b"id\n007\n", {"types": {"id": str}}, [{"id": "007"}]),
    ],
    ids=str,
)
def test_dialects(tmp_path: Path, content: bytes, options: dict[str, Any], rows: list[Any]) -> None:
    assert read_all(sources.Csv(write(tmp_path / "x.csv", content), **options)) == rows


def test_several_files_have_one_task_each_and_one_set_of_types(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", b"n,t\n1.5,x\n")
    write(tmp_path / "b.csv", b"n,t\n2,7\n")
    source = sources.Csv(tmp_path / "*.csv")
    assert [split.name for split in source.splits(8)] == [f"{tmp_path}/a.csv", f"{tmp_path}/b.csv"]
    assert read_all(source, parallelism=2) == [{"n": 1.5, "t": "x"}, {"n": 2.0, "t": "7"}]


def test_as_columns(tmp_path: Path) -> None:
    source = sources.Csv(write(tmp_path / "orders.csv", ORDERS))
    assert source.hands_columns
    reader = source.reader(source.splits(1), context())
    rows = []
    while not reader.finished:
        rows += rows_of(reader.read_arrow(2))
    assert rows == read_all(source)
    assert rows_of(source.sample(2)) == rows[:2]
    assert rows_of(source.sample(9)) == rows


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"header": "ab"}, "header must be"),
        ({"columns": []}, "columns must be a list of names"),
        ({"columns": ["a", "a"]}, "each once"),
        ({"types": {"a": list}}, r"types\['a'\] must be a pyarrow.DataType or one of str, int"),
        ({"delimiter": ",,"}, "delimiter must be one ASCII character"),
        ({"delimiter": None}, "delimiter must be one"),
        ({"quote": ""}, "quote must be one"),
        ({"null_values": "NA"}, "null_values must be a list"),
        ({"encoding": "nosuch"}, "encoding='nosuch'; it must be a text encoding"),
        ({"max_record_bytes": 0}, "max_record_bytes=0; it must be a whole number, 1 or more"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options: Any, words: str) -> None:
    with pytest.raises(FlowError, match=f"Csv: .*{words}|Csv: {words}"):
        sources.Csv("x.csv", **options)


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (b"", {}, "is empty, and so has no header"),
        (b"\n\n", {}, "is empty, and so has no header"),
        (b"a,b\n1,2\n", {"columns": ["c"]}, "has no column 'c'; it has a, b"),
        (b"a,b\n1,2\n", {"types": {"c": int}}, "has no column 'c'; it has a, b"),
        (b"a,a\n1,2\n", {}, "several columns of the name a"),
        (b"a\n" + b"x" * 99 + b"\n" + b"y" * 99, {"max_record_bytes": 50}, "longer than 50 bytes.*quote"),
    ],
    ids=["empty", "blank", "column", "type", "twice", "long"],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes, options: Any, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        read_all(sources.Csv(write(tmp_path / "x.csv", content), **options))


def test_other_columns_in_another_file(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", b"a,b\n1,2\n")
    write(tmp_path / "b.csv", b"a,c\n1,2\n")
    with pytest.raises(SourceError, match=r"(?s)do not have the same fields.*b: null.*c: null"):
        sources.Csv(tmp_path / "*.csv").splits(1)


BAD = b"id,price\n1,2.5\n\nbad\n2,dear\n3,4,5\n4,1\n5,\xff\n"


def test_rows_that_cannot_be_read_go_to_the_policy_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", BAD)
    source = sources.Csv(path, types={"id": int, "price": float})
    with pytest.raises(RecordError, match=r"x\.csv, row at byte 16: it has 1 fields, and the file 2 columns"):
        read_all(source)
    where = context("dead_letter")
    assert drain(source.reader(source.splits(1), where)) == [{"id": 1, "price": 2.5}, {"id": 4, "price": 1.0}]
    letters = where.errors.dead_letters
    assert letters is not None
    assert [letter.record for letter in letters] == [
        "bad",
        {"id": "2", "price": "dear"},
        "3,4,5",
        {"id": "5", "price": "\ufffd"},
    ]
    assert (
        "row at byte 20: column 'price': Failed to parse string: 'dear' as a scalar of type double" in letters[1].error
    )
    assert "row at byte 37" in letters[3].error


def test_an_empty_text_of_a_row_that_cannot_be_read_is_a_text(tmp_path: Path) -> None:
    """As it is in the rows that can be read; a field that may be None is None."""
    path = write(tmp_path / "x.csv", b"id,name,price\n1,,2.5\nbad,,\n")
    types = {"id": int, "name": str, "price": float}
    for null_values, empty in ((None, ""), ([""], None)):
        source = sources.Csv(path, types=types, null_values=null_values)
        where = context("dead_letter")
        (good,) = drain(source.reader(source.splits(1), where))
        assert where.errors.dead_letters is not None
        (letter,) = where.errors.dead_letters
        assert (good["name"], letter.record) == (empty, {"id": "bad", "name": empty, "price": None})


@pytest.mark.parametrize("type", [int, float, bool, decimal.Decimal, dt.date, dt.datetime, pa.decimal128(5, 2)])
def test_a_value_of_another_type_is_a_failed_record(tmp_path: Path, type: Any) -> None:
    good = {bool: "true", dt.date: "2024-03-01", dt.datetime: "2024-03-01"}.get(type, "1")
    rows = [good] * 10
    rows[6] = "x"
    content = "k,v\n" + "".join(f"{k},{v}\n" for k, v in enumerate(rows))
    source = sources.Csv(write(tmp_path / "x.csv", content.encode()), types={"v": type})
    where = context("dead_letter")
    assert [row["k"] for row in drain(source.reader(source.splits(1), where))] == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    letters = where.errors.dead_letters
    assert letters is not None
    assert [letter.record for letter in letters] == [{"k": "6", "v": "x"}]
    assert f"row at byte {content.index('6,x')}: column 'v'" in letters[0].error


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("all_columns", [True, False])
def test_offsets_make_datetimes_aware(tmp_path: Path, header: bool, all_columns: bool) -> None:
    times = ["2024-03-01T12:00:00Z", "2024-03-01 14:00:00.5+02:00", "2024-03-01 12:00:00", "2024-03-01", "bad"]
    noon = dt.datetime(2024, 3, 1, 12, tzinfo=dt.timezone.utc)
    name = "at" if header else "_1"
    types: Any = dt.datetime if all_columns else {name: dt.datetime}

    def read(rows: list[str]) -> tuple[list[Any], list[str]]:
        content = "".join(f"{row}\n" for row in ["at"] * header + rows)
        source = sources.Csv(write(tmp_path / "x.csv", content.encode()), header=header, types=types)
        where = context("dead_letter")
        found = [row[name] for row in drain(source.reader(source.splits(1), where))]
        return found, [letter.error for letter in where.errors.dead_letters or ()]

    assert read(times[:2]) == ([noon, noon + dt.timedelta(seconds=0.5)], [])
    assert read([*reversed(times)])[0] == [noon + dt.timedelta(seconds=0.5), noon]
    found, errors = read(times)
    assert found == [noon, noon + dt.timedelta(seconds=0.5)]
    assert len(errors) == 3
    assert f"where values have none, give it, as in types={{'{name}': pyarrow.timestamp(\"us\")}}" in errors[0]
    found, errors = read(times[2:])
    assert (found, len(errors)) == ([dt.datetime(2024, 3, 1, 12), dt.datetime(2024, 3, 1)], 1)


def test_a_datetime_with_an_offset_in_a_column_without(tmp_path: Path) -> None:
    source = sources.Csv(write(tmp_path / "x.csv", b"at\n2024-03-01T12:00:00Z\n"), types={"at": pa.timestamp("us")})
    with pytest.raises(
        RecordError, match=r"have one, give it, as in types=\{'at': pyarrow.timestamp\(\"us\", \"UTC\"\)\}"
    ):
        read_all(source)


def test_a_column_of_datetimes_is_event_time(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", b"k,at\na,2024-03-01T12:00:01Z\na,2024-03-01T12:00:02+00:00\n")
    flow = Flow("times")
    rows = flow.read(sources.Csv(path, types={"at": dt.datetime})).watermark("at")
    rows.key_by("k").window(Tumbling(10)).count().write(sinks.Collect(), name="out")
    ((key, start, end, count),) = testing.run(flow)["out"]
    assert (key, end - start, count) == ("a", 10_000, 2)


def test_text_that_is_not_valid_in_the_encoding(tmp_path: Path) -> None:
    source = sources.Csv(write(tmp_path / "x.csv", b"n,t\n1,a\n2,\xff\n3,c\n"))
    with pytest.raises(RecordError, match=r"x\.csv, row at byte 8: column 't': .*invalid UTF8"):
        read_all(source)
    assert read_all(source, policy="skip") == [{"n": 1, "t": "a"}, {"n": 3, "t": "c"}]


def test_a_type_that_only_later_rows_do_not_have(tmp_path: Path) -> None:
    """The first 256 KiB show whole numbers."""
    rows = [f"{i},{i % 7}" for i in range(300_000)]
    rows[250_000] = "many,1"
    path = write(tmp_path / "x.csv", ("id,n\n" + "\n".join(rows)).encode())
    source = sources.Csv(path)
    with pytest.raises(RecordError, match=r"row at byte \d+: column 'id': .*'many' as a scalar of type int64"):
        read_all(source)
    where = context("skip")
    found = drain(source.reader(source.splits(1), where), 8192)
    assert [row["id"] for row in found] == [i for i in range(300_000) if i != 250_000]
    assert where.errors.skipped == 1


def resumed(source: Source, limit: int, policy: str) -> tuple[list[Any], int]:
    """All that is read when the job goes back after each read, and how many rows failed."""
    splits = source.splits(1)
    rows: list[Any] = []
    failed = 0
    while True:
        where: SourceContext = context(policy)
        reader = source.reader(splits, where)
        got = reader.read(limit)
        offsets, ended = reader.offsets(), reader.finished
        reader.close()
        failed += where.errors.skipped
        rows += got
        if ended:
            return rows, failed
        splits = pickle.loads(pickle.dumps([split.at(offsets[split.name]) for split in splits]))


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_recovery_continues_after_any_row(tmp_path: Path, limit: int) -> None:
    write(tmp_path / "a.csv", BAD + b"6,1\n7,x\n\n8,2\n9,\n10\n11,12\n")
    write(tmp_path / "b.csv", b"id,price\n1,2\n2,3\n")
    source = sources.Csv(tmp_path / "*.csv", types={"id": int, "price": float}, max_record_bytes=30)
    where = context("skip")
    whole = [row for split in source.splits(1) for row in drain(source.reader([split], where))]
    assert [row["id"] for row in whole] == [1, 4, 6, 8, 9, 11, 1, 2]
    assert where.errors.skipped == 6
    assert resumed(source, limit, "skip") == (whole, 6)


def test_a_recovery_does_not_read_on_in_another_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", ORDERS)
    source = sources.Csv(path)
    (split,) = source.splits(1)
    path.unlink()
    write(path, ORDERS.replace(b"tea", b"tee"))
    with pytest.raises(SourceError, match="is not the file any more"):
        drain(source.reader([split.at(FilePosition.after(23, b""))], context()))


NUMBERS = b"id,word\n" + b"".join(b"%d,word %d\n" % (i, i % 7) for i in range(3000))


def write_in_parts(path: Path, *parts: bytes) -> None:
    """Writes a file, in which each part of a gzip file is packed by itself: the same parts have the same bytes."""
    path.write_bytes(b"".join(gzip.compress(part, mtime=0) if path.suffix == ".gz" else part for part in parts))


def half_read(source: Source, rows: int) -> Any:
    """The split of a job that has read so many rows, as it is saved."""
    (split,) = source.splits(1)
    reader = source.reader([split], context("skip"))
    while rows:
        got = reader.read(rows)
        assert got
        rows -= len(got)
    offsets = reader.offsets()
    reader.close()
    assert reader.offsets() == offsets
    return pickle.loads(pickle.dumps(split.at(offsets[split.name])))


@pytest.mark.parametrize("block", [1 << 10, 1 << 20])
@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz"])
@pytest.mark.parametrize("growth", [b"", b"1,more\n" * 10_000], ids=["as large", "larger"])
def test_a_recovery_does_not_read_on_in_other_rows(tmp_path: Path, name: str, growth: bytes, block: int) -> None:
    """As when what writes a file begins each with the same rows."""
    rng = random.Random(1)
    same = b"id,word\n" + b"".join(b"%d,%s\n" % (i, rng.randbytes(8).hex().encode()) for i in range(1000))
    write_in_parts(path := tmp_path / name, same, NUMBERS)
    original = path.read_bytes()
    source = sources.Csv(path, types=str, max_record_bytes=block)
    saved = half_read(source, 1500)
    assert drain(source.reader([saved], context()))[0] == {"id": "499", "word": "word 2"}
    write_in_parts(path, same, NUMBERS.replace(b"word", b"WORD") + growth)
    assert path.read_bytes()[:4096] == original[:4096]
    with pytest.raises(SourceError, match=r"x\.csv.* is not the file any more .* it has other bytes before byte"):
        drain(source.reader([saved], context("skip")))
    path.write_bytes(original)  # put back
    assert len(drain(source.reader([saved], context()))) == 2501


def test_a_recovery_does_not_read_on_in_a_file_that_has_become_shorter(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", NUMBERS)
    source = sources.Csv(path)
    saved = half_read(source, 1500)
    write(path, NUMBERS[: len(NUMBERS) // 3])
    with pytest.raises(SourceError, match="shortened or replaced while the job ran"):
        drain(source.reader([saved], context()))


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz"])
def test_a_file_that_was_copied_renamed_or_appended_to_is_read_on(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, NUMBERS)
    source = sources.Csv(path, max_record_bytes=1 << 10)
    saved = half_read(source, 1500)
    path.rename(tmp_path / f"1-{name}")  # the inode
    assert len(drain(source.reader([saved], context()))) == 1500
    (tmp_path / f"1-{name}").unlink()
    write(path, NUMBERS)
    with path.open("ab") as file:
        file.write(gzip.compress(b"7,more\n") if name.endswith(".gz") else b"7,more\n")
    # What is appended to a gzip file cannot be told from the rest of it.
    assert len(drain(source.reader([saved], context()))) == (1501 if name.endswith(".gz") else 1500)


def test_other_columns_and_types_may_be_read_from_the_offset(tmp_path: Path) -> None:
    """As when a changed flow continues from a savepoint: the file is the same."""
    path = write(tmp_path / "x.csv", NUMBERS)
    saved = half_read(sources.Csv(path), 1500)
    source = sources.Csv(path, columns=["id"], types=str, max_record_bytes=50)
    (split,) = source.splits(1)
    assert drain(source.reader([split.at(saved.offset)], context()))[0] == {"id": "1500"}


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz"])
@pytest.mark.parametrize("block", [1 << 10, 1 << 20])
def test_the_backlog_is_the_rows_that_are_left(tmp_path: Path, name: str, block: int) -> None:
    """By the bytes that are left and the mean size of a row; of a gzip file by a guess at its content's size."""
    rows = b"".join(b"%07d,x\n" % i for i in range(20_000))
    paths = [write(tmp_path / f"{part}-{name}", b"id,word\n" + rows) for part in range(2)]
    source = sources.Csv([str(path) for path in paths], types=str, max_record_bytes=block)
    splits = source.splits(1)
    reader = source.reader(splits, context())
    assert reader.backlog() == pytest.approx(sum(split.weight for split in splits) / 100, abs=1), "by a guess"
    assert len(reader.read(50)) == 50
    whole = 40_000 if not name.endswith(".gz") else 20_000 + splits[1].weight / 10
    assert reader.backlog() == pytest.approx(whole - 50, rel=0.02)
    while (reader.offsets()[splits[1].name] or 0) < 50_000:
        assert reader.read(1_000)
    if not name.endswith(".gz"):
        left = 20_000 - reader.offsets()[splits[1].name] / 10
        assert reader.backlog() == pytest.approx(left, rel=0.02)
        again = source.reader([split.at(reader.offsets()[split.name]) for split in splits], context())
        assert again.read(10)
        assert again.backlog() == pytest.approx(left, rel=0.05)
    drain(reader)
    assert reader.backlog() == 0


fields = st.text(alphabet="ab ,;\"'\n\r\té\u2028\U0001f600", max_size=6)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1"])
@pytest.mark.parametrize("value", ["ab\r\nc", "\r\n", "\r\r\n\n\r", "\r" * 9])
def test_line_ends_in_values_are_kept_wherever_blocks_begin(tmp_path: Path, encoding: str, value: str) -> None:
    for padding in range(28):
        rows = [{"a": "x" * padding, "b": value}, {"a": value, "b": "y" * 30}, {"a": "", "b": value}]
        content = "a,b\r\n" + "".join(f'"{row["a"]}","{row["b"]}"\r\n' for row in rows)
        path = write(tmp_path / "x.csv", content.encode(encoding))
        assert read_all(sources.Csv(path, types=str, encoding=encoding, max_record_bytes=64)) == rows, padding


@given(
    rows=st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(fields, min_size=n, max_size=n), max_size=9)),
    delimiter=st.sampled_from(",;\t"),
    # With line ends of "\n" alone it writes a "\r" without quotes around it, which is the end of a row to others.
    how=st.sampled_from([(csv.QUOTE_MINIMAL, "\r\n"), (csv.QUOTE_ALL, "\r\n"), (csv.QUOTE_ALL, "\n")]),
    block=st.sampled_from([150, 1 << 20]),
    limit=st.integers(1, 4),
)
def test_what_the_csv_module_writes_is_what_it_reads(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[list[str]],
    delimiter: str,
    how: tuple[Any, str],
    block: int,
    limit: int,
) -> None:
    names = [f"column {i}" for i in range(len(rows[0]) if rows else 2)]
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, quoting=how[0], lineterminator=how[1])
    writer.writerows([names, *rows])
    path = tmp_path_factory.getbasetemp() / "property.csv"
    path.write_bytes(text.getvalue().encode())
    text.seek(0)
    expected = list(csv.DictReader(text, delimiter=delimiter))
    source = sources.Csv(path, types=str, delimiter=delimiter, max_record_bytes=block)
    assert read_all(source, limit=limit) == expected
    assert resumed(source, limit, "fail") == (expected, 0)


# --- types of several files, some of which are empty ---------------------------------------------------------------


def folder(path: Path, files: list[str]) -> Path:
    """Writes files with these contents; every second one is packed."""
    path.mkdir(exist_ok=True)
    for old in path.iterdir():
        old.unlink()
    for i, content in enumerate(files):
        if i % 2:
            # Zeros after the end are padding, as tapes and some writers of blocks leave it.
            (path / f"{i}.csv.gz").write_bytes(gzip.compress(content.encode()) + bytes(i % 4 * 100))
        else:
            (path / f"{i}.csv").write_text(content)
    return path / "*.csv*"


@pytest.mark.parametrize("first", ["", "n,t\n", "n,t\n,\n"], ids=["empty", "header only", "without values"])
def test_a_file_without_values_does_not_say_what_a_column_is(tmp_path: Path, first: str) -> None:
    pattern = folder(tmp_path / "in", [first, "n,t\n1,a\n", "n,t\n2,b\n"])
    rows = [row for row in read_all(sources.Csv(pattern)) if row["n"] is not None]
    assert rows == [{"n": 1, "t": "a"}, {"n": 2, "t": "b"}]
    assert sources.Csv(pattern).fields() == ["n", "t"]
    assert rows_of(sources.Csv(pattern).sample(9))[-2:] == rows


def test_a_value_in_a_column_whose_first_rows_have_none_is_a_failed_record(tmp_path: Path) -> None:
    rows = "".join(f"{i},\n" for i in range(60_000))
    source = sources.Csv(write(tmp_path / "x.csv", f"i,n\n{rows}60000,5\n".encode()))
    with pytest.raises(RecordError, match=r"column 'n': it had no value in the first rows .* types=\{'n': str\}"):
        read_all(source, limit=8192)
    assert read_all(source, limit=8192, policy="skip")[-1] == {"i": 59_999, "n": None}
    assert read_all(sources.Csv(tmp_path / "x.csv", types={"n": int}), limit=8192)[-1] == {"i": 60_000, "n": 5}


@pytest.mark.parametrize(
    ("values", "named", "wider"),
    [
        (("1", "2.5"), "float", [1.0, 2.5]),
        (("1", "x"), "str", ["1", "x"]),
        (("true", "2"), "str", ["true", "2"]),
        (("2024-03-01", "2024-03-01T12:00:00"), "datetime", [dt.datetime(2024, 3, 1), dt.datetime(2024, 3, 1, 12)]),
        (("2024-03-01T12:00:00", "2024-03-01T12:00:00Z"), "str", ["2024-03-01T12:00:00", "2024-03-01T12:00:00Z"]),
    ],
    ids=str,
)
def test_files_that_disagree_about_a_type(tmp_path: Path, values: tuple[str, str], named: str, wider: Any) -> None:
    pattern = folder(tmp_path / "in", ["v,w\n", *(f"v,w\n{value},1\n" for value in values)])
    words = (
        rf"column 'v' has the type .* rows of '.*/1.csv.gz', and .* '.*/2.csv'.*types=\{{'v': {named}\}}, .*widen=True"
    )
    with pytest.raises(SourceError, match=words):
        sources.Csv(pattern).splits(1)
    assert [row["v"] for row in read_all(sources.Csv(pattern, widen=True))] == wider
    assert [row["v"] for row in read_all(sources.Csv(pattern, types={"v": str}))] == list(values)
    assert [row["w"] for row in read_all(sources.Csv(pattern, columns=["w"]))] == [1, 1], "not read, not compared"


def test_the_first_values_of_any_file_show_offsets(tmp_path: Path) -> None:
    pattern = folder(tmp_path / "in", ["at\n", "at\nbad\n", "at\n2024-03-01T12:00:00Z\n"])
    noon = dt.datetime(2024, 3, 1, 12, tzinfo=dt.timezone.utc)
    assert read_all(sources.Csv(pattern, types={"at": dt.datetime}), policy="skip") == [{"at": noon}]


values = {
    "i": st.one_of(st.none(), st.integers(-9, 9)),
    "f": st.one_of(st.none(), st.sampled_from([0.5, 2.0, -1.25])),
    "t": st.text(alphabet='ab "\n\r', max_size=3),
}


@given(
    files=st.lists(st.one_of(st.none(), st.lists(st.fixed_dictionaries(values), max_size=3)), min_size=1, max_size=5),
    parallelism=st.integers(1, 3),
)
def test_a_folder_of_empty_and_packed_files_has_the_rows_and_types_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[dict[str, Any]] | None], parallelism: int
) -> None:
    """None: an empty file."""
    contents = []
    for rows in files:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(values), lineterminator="\r\n")
        if rows is not None:
            writer.writeheader()
            writer.writerows({**row, "t": f"text {row['t']}"} for row in rows)
        contents.append(text.getvalue())
    source = sources.Csv(folder(tmp_path_factory.getbasetemp() / "folder", contents))
    if all(rows is None for rows in files):
        with pytest.raises(SourceError, match="is empty, and so has no header"):
            source.splits(1)
        return
    found = read_all(source, parallelism=parallelism)
    wanted = [{**row, "t": f"text {row['t']}"} for rows in files for row in rows or ()]
    assert sorted(repr(sorted(row.items())) for row in found) == sorted(repr(sorted(row.items())) for row in wanted)


# --- gzip files ----------------------------------------------------------------------------------------------------


def test_the_rows_before_the_damage_of_a_gzip_file_are_read(tmp_path: Path) -> None:
    data = gzip.compress(NUMBERS)
    for name, content in (("cut", data[: len(data) // 2]), ("crc", data[:-8] + bytes(8))):
        (tmp_path / f"{name}.csv.gz").write_bytes(content)
        source = sources.Csv(tmp_path / f"{name}.csv.gz")
        where = context("dead_letter")
        rows = drain(source.reader(source.splits(1), where))
        assert rows[:2] == [{"id": 0, "word": "word 0"}, {"id": 1, "word": "word 1"}]
        assert len(rows) == 3000 if name == "crc" else 500 < len(rows) < 3000
        assert where.errors.dead_letters is not None
        (letter,) = where.errors.dead_letters
        assert letter.record == str(tmp_path / f"{name}.csv.gz")
        assert "is damaged" in letter.error
        with pytest.raises(RecordError, match="is damaged"):
            read_all(source)


def test_a_gzip_file_that_is_damaged_before_its_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv.gz").write_bytes(b"a,b\n1,2\n")
    with pytest.raises(SourceError, match=r"cannot read '.*x\.csv\.gz': .* is damaged"):
        sources.Csv(tmp_path / "x.csv.gz").splits(1)


# --- where rows begin ----------------------------------------------------------------------------------------------


@example(content=",\\", options={"escape": "\\"}, encoding="utf-8", block=1, limit=1)
@example(content='"a"";,a\na"\na,a\n', options={"escape": "\\"}, encoding="utf-8", block=40, limit=1)
@given(
    content=st.text(alphabet='a,"\r\n\\\ufeff', max_size=30),
    options=st.sampled_from([{}, {"quote": None}, {"escape": "\\"}, {"escape": "\\", "quote": None}]),
    encoding=st.sampled_from(["utf-8", "utf-8", "utf-16"]),
    block=st.integers(1, 40),
    limit=st.integers(1, 3),
)
def test_rows_are_the_same_wherever_blocks_begin(
    tmp_path_factory: pytest.TempPathFactory,
    content: str,
    options: dict[str, Any],
    encoding: str,
    block: int,
    limit: int,
) -> None:
    """Quotes may be anywhere, and escapes before anything: pyarrow says which rows there are in the whole file."""
    path = tmp_path_factory.getbasetemp() / "rows.csv"
    path.write_bytes(content.encode(encoding))
    source = sources.Csv(path, header=["x", "y"], types=str, encoding=encoding, **options)
    bad: list[Any] = []

    def skip(row: Any) -> str:
        bad.append(row)
        return "skip"

    rows: list[Any] = []
    data = content.encode().removeprefix(b"\xef\xbb\xbf")
    if data.strip(b"\r\n"):
        dialect = pa_csv.ParseOptions(
            quote_char=options.get("quote", '"') or False,
            double_quote="escape" not in options,
            escape_char=options.get("escape", False),
            newlines_in_values=True,
            invalid_row_handler=skip,
        )
        columns = pa_csv.ConvertOptions(column_types={"x": pa.string(), "y": pa.string()})
        whole = pa_csv.ReadOptions(use_threads=False, block_size=1 << 20, column_names=["x", "y"])
        # A row may begin with what is no byte order mark there, and would be dropped.
        rows = pa_csv.read_csv(io.BytesIO(b"\n" + data), whole, dialect, columns).to_pylist()
    with mock.patch.object(blocks, "BLOCK", block):
        assert resumed(source, limit, "skip") == (rows, len(bad))
