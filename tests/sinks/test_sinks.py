"""Sinks: whole outputs or none, nothing overwritten by accident, and the failing record named."""

from __future__ import annotations

import datetime as dt
import errno
import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime import sinks, sources
from penstock.runtime.errors import FlowError, PenstockError, RecordError
from penstock.runtime.records.codec import decode, encode
from penstock.runtime.records.userfunc import DeadLetter, ErrorHandler
from penstock.runtime.sinks.base import Sink, SinkContext
from penstock.runtime.sources.base import SourceContext


def context(policy: Any = "fail", index: int = 0, parallelism: int = 1, report: Any = None) -> SinkContext:
    errors = ErrorHandler("out", policy=policy, dead_letters=[] if policy == "dead_letter" else None)
    given = {} if report is None else {"report": report}
    return SinkContext("out", index, parallelism, errors=errors, **given)


def put(sink: Sink, *batches: list[Any], where: SinkContext | None = None, failed: bool = False) -> None:
    """What the run loop does with a writer."""
    writer = sink.writer(where or context())
    try:
        for batch in batches:
            writer.write(batch)
            writer.flush()
        if not failed:
            writer.finish()
    except BaseException:
        writer.close(True)
        raise
    writer.close(failed)


# --- files --------------------------------------------------------------------------------------------------------


def test_text_files(tmp_path: Path) -> None:
    sink = sinks.Files(tmp_path / "new" / "out")
    sink.check()
    put(sink, ["a", "é"], [], ["", ("k", 1), [1.5, None], 7, {"x": 1}])
    assert (tmp_path / "new" / "out" / "part-00000.txt").read_text() == "a\né\n\nk\t1\n1.5\tNone\n7\n{'x': 1}\n"


def test_a_part_appears_when_it_is_whole(tmp_path: Path) -> None:
    writer = sinks.Files(tmp_path).writer(context(index=3, parallelism=4))
    writer.write(["a"])
    assert os.listdir(tmp_path) == [".part-00003.txt.inprogress"]
    assert (tmp_path / ".part-00003.txt.inprogress").read_text() == ""
    writer.flush()
    assert (tmp_path / ".part-00003.txt.inprogress").read_text() == "a\n"
    writer.write(["b"])
    writer.finish()
    assert os.listdir(tmp_path) == ["part-00003.txt"]
    writer.close(False)
    writer.close(False)
    assert (tmp_path / "part-00003.txt").read_text() == "a\nb\n"


@pytest.mark.parametrize("finished", [False, True])
def test_nothing_stays_of_a_failed_job(tmp_path: Path, finished: bool) -> None:
    writer = sinks.Files(tmp_path).writer(context())
    writer.write(["a"])
    if finished:
        writer.finish()
    writer.close(True)
    assert os.listdir(tmp_path) == []


def test_without_finish_there_is_no_part(tmp_path: Path) -> None:
    writer = sinks.Files(tmp_path).writer(context())
    writer.write(["a"])
    writer.close(False)
    assert os.listdir(tmp_path) == []


def test_leftovers_of_a_killed_job_are_written_over(tmp_path: Path) -> None:
    (tmp_path / ".part-00000.txt.inprogress").write_text("old and longer\n")
    sink = sinks.Files(tmp_path)
    sink.check()
    put(sink, ["new"])
    assert os.listdir(tmp_path) == ["part-00000.txt"]
    assert (tmp_path / "part-00000.txt").read_text() == "new\n"


def test_does_not_overwrite_unless_told(tmp_path: Path) -> None:
    put(sinks.Files(tmp_path), ["old"])
    for i in (1, 2, 3):
        put(sinks.Files(tmp_path), ["old"], where=context(index=i, parallelism=4))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FlowError, match=r"already holds 4 part files \(part-00000\.txt, .*overwrite=True"):
        sinks.Files(tmp_path, format="jsonl").check()
    sink = sinks.Files(tmp_path, format="jsonl", overwrite=True)
    sink.check()
    assert len(os.listdir(tmp_path)) == 5  # nothing is deleted before the job starts
    for i in (0, 1):
        put(sink, ["new"], where=context(index=i, parallelism=2))
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "part-00000.jsonl", "part-00001.jsonl"]


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FlowError, match="is a file; give a directory"):
        sinks.Files(tmp_path / "file").check()
    with pytest.raises(FlowError, match=r"file' is no directory\. Remove it"):
        sinks.Files(tmp_path / "file" / "below").check()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(FlowError, match=r"no permission to write in .*the right to"):
        sinks.Files(tmp_path / "new").check()


def test_a_full_disk_is_said_clearly(tmp_path: Path) -> None:
    writer = sinks.Files(tmp_path).writer(context())

    class Full:
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self) -> None:
            pass

    writer._file._file.close()  # type: ignore[attr-defined]
    writer._file._file = Full()  # type: ignore[attr-defined]
    writer.write(["a"])
    with pytest.raises(PenstockError, match=r"cannot write .*part-00000.*No space left.*Free some space"):
        writer.flush()
    writer.close(True)
    assert os.listdir(tmp_path) == []


def test_large_writes_leave_before_flush(tmp_path: Path) -> None:
    writer = sinks.Files(tmp_path).writer(context())
    writer.write(["x" * 1000] * 1000)
    assert (tmp_path / ".part-00000.txt.inprogress").stat().st_size == 1_001_000
    writer.close(True)


@given(st.lists(st.lists(st.text(alphabet="ab\u2028\x0bé\r\n", max_size=5), max_size=10), max_size=5), st.booleans())
def test_what_files_writes_textfiles_reads(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[str]], packed: bool
) -> None:
    """What would be read as another text is not written."""
    place = tmp_path_factory.mktemp("out")
    put(sinks.Files(place, compression="gzip" if packed else None), *batches, where=context("skip"))
    source = sources.TextFiles(str(place / "part-*"))
    reader = source.reader(source.splits(1), SourceContext("read", 0, 1, ErrorHandler("read")))
    got: list[Any] = []
    while not reader.finished:
        got += reader.read(100)
    assert got == [text for batch in batches for text in batch if "\n" not in text and not text.endswith("\r")]


def test_gzip(tmp_path: Path) -> None:
    put(sinks.Files(tmp_path, format="jsonl", compression="gzip"), [1], [2])
    assert os.listdir(tmp_path) == ["part-00000.jsonl.gz"]
    assert gzip.decompress((tmp_path / "part-00000.jsonl.gz").read_bytes()) == b"1\n2\n"


def test_json_lines(tmp_path: Path) -> None:
    records = [{"a": [1, None, "x\ny\u2028"]}, "s", 2.5, dt.date(2020, 1, 2)]
    put(sinks.Files(tmp_path, format="jsonl"), records)
    lines = (tmp_path / "part-00000.jsonl").read_bytes().decode().split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [*records[:3], "2020-01-02"]


def test_a_format_function(tmp_path: Path) -> None:
    sink = sinks.Files(tmp_path, format=lambda r: f"{r['k']},{r['v']}", suffix=".csv")
    put(sink, [{"k": "a", "v": 1}, {"k": "b", "v": 2}])
    assert (tmp_path / "part-00000.csv").read_text() == "a,1\nb,2\n"
    put(sinks.Files(tmp_path / "raw", format=lambda r: bytes([r, 10]), suffix=".bin"), [1, 2])
    assert (tmp_path / "raw" / "part-00000.bin").read_bytes() == b"\x01\n\x02\n"


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no text for this")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("format", "bad", "message"),
    [
        ("text", "two\nlines", "line end in it"),
        ("text", ("a", "b\n"), "line end in it"),
        ("text", "a\r", r"ends with '\\r'"),
        ("text", ("a", "b\r"), r"ends with '\\r'"),
        ("text", "\ud800", "surrogates not allowed"),
        ("text", Unprintable(), "no text for this"),
        ("jsonl", threading.Lock(), "lock"),
        ("jsonl", {"a": "\ud800"}, "surrogates not allowed"),
        (lambda r: r, 5, "must return str or bytes, it returned int"),
        (lambda r: r, "a\nb", "line end in it"),
    ],
)
def test_a_record_that_cannot_be_written(tmp_path: Path, format: Any, bad: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        put(sinks.Files(tmp_path / "fail", format=format), ["a", bad, "b"])
    assert os.listdir(tmp_path / "fail") == []
    where = context("dead_letter")
    put(sinks.Files(tmp_path / "skip", format=format, suffix=".txt"), ["a", bad, "b"], where=where)
    quote = '"' if format == "jsonl" else ""
    text = (tmp_path / "skip" / "part-00000.txt").read_text()
    assert text == f"{quote}a{quote}\n{quote}b{quote}\n"
    assert where.errors.skipped == 1
    assert where.errors.dead_letters is not None
    assert where.errors.dead_letters[0].record is bad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"directory": ""}, "needs a directory"),
        ({"directory": None}, "needs a directory"),
        ({"format": "csv"}, "format must be"),
        ({"compression": "zip"}, "compression must be"),
        ({"suffix": "csv"}, "suffix must start"),
        ({"part_bytes": 0}, "part_bytes must be a number of bytes above 0, .* got 0"),
        ({"part_bytes": 1.5}, "part_bytes must be"),
        ({"part_bytes": True}, "part_bytes must be"),
        ({"part_s": -1}, "part_s=-1; it must be 0 seconds or more"),
        ({"part_s": float("nan")}, "part_s=nan; it must be"),
        ({"part_s": "60"}, "part_s='60'; give seconds or a timedelta"),
    ],
)
def test_files_refuses_what_makes_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FlowError, match=message):
        sinks.Files(**{"directory": "x", **change})


def test_a_relative_directory_is_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sinks.Files("out/").directory == str(tmp_path / "out")


# --- the driver's side --------------------------------------------------------------------------------------------


def test_collect() -> None:
    sent: list[tuple[str, list[Any]]] = []
    sink = sinks.Collect()
    with pytest.raises(FlowError, match="no job with this sink was run"):
        sink.records()
    sink.bind(lambda: [record for channel, records in sent if channel == sink.channel for record in records])
    copy = cloudpickle.loads(cloudpickle.dumps(sink))
    assert copy.channel == sink.channel != sinks.Collect().channel
    batch = [1, 2]
    put(copy, batch, [], [3], where=context(report=lambda *what: sent.append(what)))
    batch.clear()
    assert sink.records() == [1, 2, 3]
    with pytest.raises(FlowError, match="no job with this sink"):
        copy.records()


def test_collect_has_a_limit() -> None:
    sink = sinks.Collect(limit=3)
    put(sink, [1, 2, 3], where=context(report=lambda *_: None))
    with pytest.raises(PenstockError, match="more than limit=3 records"):
        put(sink, [1, 2, 3], [4], where=context(report=lambda *_: None))
    sink.bind(lambda: [1, 2, 3, 4])  # two tasks within the limit each
    with pytest.raises(PenstockError, match="more than limit=3 records"):
        sink.records()
    with pytest.raises(FlowError, match="limit must be a whole number of records"):
        sinks.Collect(limit=-1)


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("policy", ["skip", "dead_letter"])
def test_collect_applies_the_policy_to_records_that_cannot_travel(policy: str, limit: int | None) -> None:
    sent: list[Any] = []
    where = context(policy, report=lambda _, records: sent.append(decode(*encode(records))))
    lock = threading.Lock()
    letter = DeadLetter("parse", lock, "ValueError: no", None)
    put(sinks.Collect(limit), [lock], [1, lock, letter], [2, lock], where=where)
    assert sent == [[1, letter.shortened()], [2]]
    assert where.errors.skipped == 3
    if policy == "dead_letter":
        assert [dead.record for dead in where.errors.dead_letters or ()] == [lock] * 3
    with pytest.raises(PenstockError, match="more than limit=2 records"):
        put(sinks.Collect(2), [1, lock, 2, lock], [3], where=where)


def test_collect_names_the_operator_and_the_record_that_cannot_travel() -> None:
    where = context(report=lambda _, records: encode(records))
    with pytest.raises(
        RecordError, match="operator 'out' failed: CodecError: a record of type lock cannot be"
    ) as caught:
        put(sinks.Collect(), ["good", threading.Lock()], where=where)
    assert "TypeError: cannot pickle '_thread.lock' object" in str(caught.value)
    assert "record: <unlocked _thread.lock" in str(caught.value)


def test_console() -> None:
    sent: list[Any] = []
    sink = sinks.Console(limit=3)
    assert sink.prints
    where = context("skip", report=lambda channel, lines: sent.append((channel, lines)))
    put(sink, ["a", ("b", 1)], [Unprintable(), "d"], ["e"], where=where)
    assert sent == [("console", ["a", "('b', 1)"])]
    assert where.errors.skipped == 1
    with pytest.raises(FlowError, match="limit must be a whole number of records"):
        sinks.Console(limit=-1)


# --- functions ----------------------------------------------------------------------------------------------------


def test_call_for_each_record() -> None:
    seen: list[int] = []

    def take(record: int) -> None:
        if record == 2:
            raise ValueError("not two")
        seen.append(record)

    with pytest.raises(RecordError, match=r"not two(.|\n)*record: 2(.|\n)*test_sinks\.py:\d+ in take"):
        put(sinks.Call(take), [1, 2, 3])
    seen.clear()
    writer = sinks.Call(take).writer(where := context("skip"))
    writer.write([1, 2, 3])
    assert seen == [1, 3]
    assert where.errors.skipped == 1


def test_call_for_batches() -> None:
    seen: list[list[int]] = []
    writer = sinks.Call(seen.append, batches=True).writer(context())
    batch = [1, 2]
    writer.write(batch)
    writer.write([])
    batch.clear()
    assert seen == [[1, 2]]

    def fail(records: list[int]) -> None:
        raise ValueError("no")

    with pytest.raises(RecordError, match=r"record: \[1, 2\]"):
        put(sinks.Call(fail, batches=True), [1, 2])


def test_call_refuses_what_cannot_be_called_or_travel() -> None:
    lock = threading.Lock()
    with pytest.raises(FlowError, match="needs a function"):
        sinks.Call("print")  # type: ignore[arg-type]
    with pytest.raises(FlowError, match="cannot be pickled"):
        sinks.Call(lambda record: lock)


def test_null() -> None:
    put(sinks.Null(), [1, 2], [])


def test_every_sink_travels_and_describes_itself() -> None:
    for sink in (
        sinks.Files("out", format=lambda r: f"<{r}>"),
        sinks.Files("out", format="jsonl", compression="gzip"),
        sinks.Console(),
        sinks.Console(limit=5),
        sinks.Collect(limit=5),
        sinks.Call(print),
        sinks.Call(print, batches=True),
        sinks.Call(print, batches=True, idempotent=True),
        sinks.Null(),
    ):
        copy = cloudpickle.loads(cloudpickle.dumps(sink))
        assert copy.describe() == sink.describe() == repr(sink)
        assert sink.describe().startswith(type(sink).__name__)
        sink.check()


def test_every_sink_says_what_a_failure_can_do_to_its_records() -> None:
    assert sinks.Files("out").guarantee == "exactly once"
    assert sinks.Collect().guarantee == "exactly once"
    assert sinks.Console().guarantee == "at least once"
    assert sinks.Null().guarantee == "idempotent"
    assert sinks.Call(print).guarantee == "at least once"
    told = sinks.Call(len, idempotent=True)  # not print: Ray puts one of its own in its place
    assert told.describe() == "Call(len, idempotent=True)"
    assert cloudpickle.loads(cloudpickle.dumps(told)).guarantee == "idempotent"
