"""Sources in general, and those of lines: every line once, whatever the splits, the limits and the restarts."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import socket
import struct
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.runtime import sources
from penstock.runtime.errors import FlowError, RecordError, SourceError
from penstock.runtime.records.userfunc import DeadLetter, ErrorHandler
from penstock.runtime.sources import files
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split, share
from penstock.runtime.sources.blocks import ABANDONED, FileRange, LineBlocks, ranges
from penstock.runtime.sources.json_lines import JsonDecoder
from penstock.runtime.sources.lines import TextDecoder, Unreadable
from penstock.runtime.sources.threaded import ThreadReader


def context(policy: str = "fail", wake: Any = lambda: None) -> SourceContext:
    letters: list[Any] | None = [] if policy == "dead_letter" else None
    errors = ErrorHandler("read", policy=policy, dead_letters=letters)  # type: ignore[arg-type]
    return SourceContext("read", 0, 1, errors, wake)


def drain(reader: Reader, limit: int = 1000) -> list[Any]:
    out: list[Any] = []
    while not reader.finished:
        records = reader.read(limit)
        assert len(records) <= limit
        out += records
    reader.close()
    return out


def read_all(source: Source, parallelism: int = 1, limit: int = 1000, policy: str = "fail") -> list[Any]:
    """All that the tasks of a source read, one task after the other."""
    out: list[Any] = []
    splits = source.splits(parallelism)
    assert len({split.name for split in splits}) == len(splits)
    for mine in share(splits, parallelism):
        out += drain(source.reader(mine, context(policy)), limit)
    return out


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def expected_lines(content: bytes) -> list[str]:
    lines = content.split(b"\n")
    last = lines.pop()
    out = [line[:-1] if line.endswith(b"\r") else line for line in lines]
    return [line.decode() for line in out + ([last] if last else [])]


line_bytes = st.text(alphabet="ab é\u2028\x0b\x0c\x85\r\U0001f600", max_size=8).map(str.encode)
contents = st.builds(
    lambda lines, ends, final: b"".join(a + b for a, b in zip(lines, ends, strict=False)) + final,
    st.lists(line_bytes, max_size=25),
    st.lists(st.sampled_from([b"\n", b"\r\n"]), min_size=25, max_size=25),
    line_bytes,
)


# --- which files --------------------------------------------------------------------------------------------------


def test_reads_a_path_a_pattern_and_a_list_each_file_once(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", b"b\n")
    write(tmp_path / "a.txt", b"a\n")
    write(tmp_path / "odd[1].txt", b"odd\n")
    (tmp_path / "sub.txt").mkdir()
    write(tmp_path / "sub.txt" / "c.txt", b"c\n")
    assert read_all(sources.TextFiles(tmp_path / "a.txt")) == ["a"]
    assert read_all(sources.TextFiles(str(tmp_path / "?.txt"))) == ["a", "b"]
    assert read_all(sources.TextFiles([tmp_path / "a.txt", f"{tmp_path}/*.txt"])) == ["a", "b", "odd"]
    assert sorted(read_all(sources.TextFiles(f"{tmp_path}/**/*.txt"))) == ["a", "b", "c", "odd"]
    assert read_all(sources.TextFiles(tmp_path / "odd[1].txt")) == ["odd"]


def test_relative_paths_are_made_absolute_for_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt", b"a\n")
    monkeypatch.chdir(tmp_path)
    (split,) = sources.TextFiles("*.txt").splits(1)
    assert split.payload.path == str(tmp_path / "a.txt")


def test_inputs_that_cannot_be_read_are_named_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SourceError,
        match=r"missing\.txt.*No such file.*Check the name\. Process \d+ on machine \S+ does not see the file",
    ):
        sources.TextFiles(tmp_path / "missing.txt").splits(1)
    with pytest.raises(SourceError, match=r"no file matches.*\*\.log"):
        sources.TextFiles(str(tmp_path / "*.log")).splits(1)
    with pytest.raises(SourceError, match=r"is a directory.*\*"):
        sources.TextFiles(tmp_path).splits(1)
    (tmp_path / "only").mkdir()
    with pytest.raises(SourceError, match="matches 1 directories"):
        sources.TextFiles(str(tmp_path / "onl*")).splits(1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="is a pipe"):
        sources.TextFiles(tmp_path / "pipe").splits(1)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SourceError, match="dangling"):
        sources.TextFiles(tmp_path / "dangling").splits(1)
    path = write(tmp_path / "secret.txt", b"x\n")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(SourceError, match=r"secret\.txt.*Permission denied.*the right to read"):
        sources.TextFiles(path).splits(1)


@pytest.mark.parametrize("patterns", [[], "", [""], 5, [5], None])
def test_refuses_what_is_no_pattern(patterns: Any) -> None:
    with pytest.raises(FlowError, match="TextFiles"):
        sources.TextFiles(patterns)


@pytest.mark.parametrize("name", ["TextFiles", "JsonLines", "Parquet", "Arrow"])
def test_a_url_is_no_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = getattr(sources, name)
    with pytest.raises(FlowError, match=rf"{name}: 's3://bucket/x\*' is a URL.* path.*mount the bucket") as caught:
        source(["a", "s3://me:hush@bucket/x*"])
    assert "hush" not in str(caught.value)
    with pytest.raises(FlowError, match=rf"{name}: 's3:/bucket/x': a URL has '//' after s3:"):
        source(Path("s3://bucket/x"))
    assert source(f"file://{tmp_path}/a%20b").patterns == (f"{tmp_path}/a b",)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-le", "cp037", "no-such", "hex"])
def test_refuses_an_encoding_without_line_bytes(encoding: str) -> None:
    with pytest.raises(FlowError, match=encoding):
        sources.TextFiles("x", encoding=encoding)


# --- lines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"\n\n", ["", ""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r\r\n", ["a\r"]),
        (b"a\rb\nc\r", ["a\rb", "c\r"]),
        ("a\u2028b\x0bc\x0cd\x85e\n".encode(), ["a\u2028b\x0bc\x0cd\x85e"]),
        (b"\xef\xbb\xbfa\n", ["\ufeffa"]),
    ],
)
def test_lines(tmp_path: Path, suffix: str, content: bytes, lines: list[str]) -> None:
    assert read_all(sources.TextFiles(write(tmp_path / f"x{suffix}", content))) == lines


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf", b"\xef\xbb\xbf\n", b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", b"a\n"])
def test_utf8_sig_drops_the_mark_at_the_start_only(tmp_path: Path, content: bytes) -> None:
    source = sources.TextFiles(write(tmp_path / "x", content), encoding="utf-8-sig")
    assert read_all(source) == expected_lines(content.removeprefix(b"\xef\xbb\xbf"))


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "shift_jis", "gb18030", "utf-7", "iso2022_jp"])
def test_other_encodings(tmp_path: Path, encoding: str) -> None:
    lines = ["plain", "", "1+1=2", "" if encoding in ("latin-1", "cp1252") else "日本"]
    content = b"".join(line.encode(encoding) + b"\r\n" for line in lines)
    assert read_all(sources.TextFiles(write(tmp_path / "x", content), encoding=encoding)) == lines


def test_utf7_does_not_make_two_lines_of_one() -> None:
    assert TextDecoder("utf-7")(b"a+AAo-b\n", "x", 0) == (["a\nb"], True)


@pytest.mark.parametrize("parallelism", [1, 2, 3, 7])
def test_tasks_share_a_large_file(tmp_path: Path, parallelism: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{i} " + "x" * random.Random(i).randrange(60) for i in range(60_000)]
    path = write(tmp_path / "x.txt", "\n".join(lines).encode())
    source = sources.TextFiles(path)
    splits = source.splits(parallelism)
    assert len(splits) == parallelism
    assert all(split.weight >= files.MIN_RANGE for split in splits)
    assert sorted(read_all(source, parallelism)) == sorted(lines)
    assert len(sources.TextFiles(path, parallel=False).splits(parallelism)) == 1
    monkeypatch.setattr(files, "MIN_RANGE", path.stat().st_size)
    assert len(source.splits(parallelism)) == 1


def test_many_files_are_not_divided() -> None:
    assert ranges("f", 1000, 4, 1 << 18) == [FileRange("f", 0, 1000)]
    assert ranges("f", 0, 4, 1 << 18) == [FileRange("f", 0, 0)]
    assert ranges("f", 10, 3, 1) == [FileRange("f", 0, 3), FileRange("f", 3, 6), FileRange("f", 6, 10)]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines")


def read_range(part: FileRange, limit: int = 1000, offset: int | None = None) -> tuple[list[Any], Any]:
    reader = files.LineReader([Split("s", part, offset)], context(), TextDecoder("utf-8"), 1 << 20, "TextFiles")
    return drain(reader, limit), reader.offsets()["s"]


@given(contents, st.integers(1, 9))
@example(b"\n" * 10, 3)
@example(b"a" * 50 + b"\n", 4)
def test_any_division_of_a_file_gives_every_line_once(scratch: Path, content: bytes, block: int) -> None:
    path = str(write(scratch / "cut.txt", content))
    lines = expected_lines(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.runtime.sources.blocks.BLOCK", block)
        patch.setattr("penstock.runtime.sources.blocks._BEYOND", block)
        for cut in range(len(content) + 1):
            got = []
            for part in (FileRange(path, 0, cut), FileRange(path, cut, len(content))):
                got += read_range(part)[0]
            assert got == lines, cut


@given(contents, st.integers(1, 6), st.integers(1, 40), st.data())
def test_many_ranges_give_every_line_once(
    scratch: Path, content: bytes, count: int, block: int, data: st.DataObject
) -> None:
    path = str(write(scratch / "ranges.txt", content))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), min_size=count, max_size=count)))
    cuts = [0, *cuts, len(content)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.runtime.sources.blocks.BLOCK", block)
        got = [line for a, b in pairwise(cuts) for line in read_range(FileRange(path, a, b))[0]]
    assert got == expected_lines(content)


@given(
    contents,
    contents,
    st.sampled_from(["r.txt", "r.txt.gz"]),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=6),
    st.integers(3, 40),
)
def test_a_new_reader_continues_at_the_offsets(
    scratch: Path, first: bytes, second: bytes, name: str, parallelism: int, reads: list[tuple[int, bool]], block: int
) -> None:
    paths = [write(scratch / f"{i}{name}", content) for i, content in enumerate((first, second))]
    source = sources.TextFiles(paths)
    lines = expected_lines(first) + expected_lines(second)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "MIN_RANGE", 1)
        patch.setattr("penstock.runtime.sources.blocks.BLOCK", block)
        splits = sorted(source.splits(parallelism), key=lambda s: (s.payload.path, s.payload.start))
        got: list[Any] = []
        for limit, lose in reads:
            reader = source.reader(splits, context())
            got += reader.read(limit)
            offsets = reader.offsets()
            more = reader.read(limit)
            if not lose:
                got += more
                offsets = reader.offsets()
            reader.close()
            assert lose or reader.offsets() == offsets
            splits = [split.at(offsets[split.name]) for split in splits]
        got += drain(source.reader(splits, context()), 3)
    assert got == lines


def test_offsets_are_byte_positions(tmp_path: Path) -> None:
    content = "é\r\nab\n\nlast".encode()
    for name in ("x.txt", "x.txt.gz"):
        source = sources.TextFiles(write(tmp_path / name, content))
        splits = source.splits(1)
        reader = source.reader(splits, context())
        seen = [reader.offsets()[splits[0].name]]
        while reader.read(1):
            seen.append(reader.offsets()[splits[0].name])
        assert seen == [None, 4, 7, 8, 12]


def test_a_reader_without_splits_is_finished() -> None:
    for source in (sources.TextFiles("x"), sources.Memory([]), sources.Generator(str), sources.SocketLines("x", 1)):
        reader = source.reader([], context())
        assert reader.finished
        assert reader.read(10) == []
        assert reader.offsets() == {}
        reader.close()


def test_a_line_longer_than_allowed_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x.bin", b"short\n" + b"x" * 1_000_000)
    with pytest.raises(SourceError, match=r"line at byte 6 of .*x\.bin.* longer than 1,000 bytes"):
        read_all(sources.TextFiles(path, max_line_bytes=1000))


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz"])
@pytest.mark.parametrize("block", [4, 16, 1 << 18])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"", b"\nmore\n"])
def test_a_line_with_its_end_is_bounded(
    name: str, block: int, end: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.sources.blocks.BLOCK", block)
    lines = b"one\n" + b"y" * 10 + b"\r\n\n"
    source = sources.TextFiles(write(tmp_path / name, lines + b"x" * 11 + end), max_line_bytes=10)
    reader = source.reader(source.splits(1), context())
    assert [reader.read(1) for _ in range(3)] == [["one"], ["y" * 10], [""]]
    with pytest.raises(SourceError, match=r"the line at byte 17 of .* is longer than 10 bytes.*raise max_line_bytes"):
        reader.read(1)
    reader.close()
    fits = sources.TextFiles(write(tmp_path / name, lines + b"x" * 10 + end), max_line_bytes=10)
    assert read_all(fits) == ["one", "y" * 10, "", "x" * 10, *(["more"] if b"more" in end else [])]


def test_a_long_line_of_another_range_is_not_an_error_of_this_one(tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", b"one\ntwo\n" + b"x" * 11 + b"\nend\n")
    for start, end, lines in ((0, 5, b"one\ntwo\n"), (9, 24, b"end\n")):
        blocks = LineBlocks(FileRange(str(path), start, end), None, 10, "TextFiles")
        assert b"".join(iter(blocks.next, b"")) == lines


# --- files that change or are damaged -----------------------------------------------------------------------------


def test_a_file_that_vanishes_or_shrinks_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", b"abc\n" * 1000)
    source = sources.TextFiles(path)
    splits = source.splits(1)
    path.write_bytes(b"abc\n" * 10)
    with pytest.raises(SourceError, match=r"has 40 bytes now, at least 4000 were there"):
        drain(source.reader(splits, context("skip")))
    path.unlink()
    with pytest.raises(SourceError, match=r"x\.txt.*No such file.*every machine"):
        drain(source.reader(splits, context("skip")))


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.sources.blocks.BLOCK", 16)
    path = write(tmp_path / "x.txt", b"abc\n" * 1000)
    source = sources.TextFiles(path)
    reader = source.reader(source.splits(1), context())
    assert reader.read(1) == ["abc"]
    os.truncate(path, 100)
    with pytest.raises(SourceError, match="has 100 bytes now"):
        drain(reader)


def test_a_file_that_grows_is_read_to_where_it_ended(tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", b"one\nhal")
    source = sources.TextFiles(path)
    splits = source.splits(1)
    with path.open("ab") as file:
        file.write(b"f\nthree\n")
    assert drain(source.reader(splits, context())) == ["one", "half"]


def half_read(source: Any) -> list[Split]:
    """The splits of a job that has read three records, as they are saved."""
    splits = source.splits(1)
    reader = source.reader(splits, context())
    assert len(reader.read(3)) == 3
    offsets = reader.offsets()
    reader.close()
    saved: list[Split] = pickle.loads(pickle.dumps([split.at(offsets[split.name]) for split in splits]))
    return saved


LINES = "".join(f"line {i}\n" for i in range(1000)).encode()


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
@pytest.mark.parametrize("growth", [b"", b"and more\n" * 10_000], ids=["as large", "larger"])
@pytest.mark.parametrize("first", [True, False], ids=["another beginning", "the same beginning"])
def test_a_recovery_does_not_read_on_in_another_file(tmp_path: Path, suffix: str, growth: bytes, first: bool) -> None:
    """As when logs are rotated, which may all begin with the same bytes."""
    header = b"" if first else b"# header\n" * 1000
    path = write(tmp_path / f"log.{suffix}", header + LINES)
    original = path.read_bytes()
    source = sources.TextFiles(path)
    (split,) = source.splits(1)
    reader = source.reader([split], context())
    while reader.read(100)[-1] != "line 499":
        pass
    saved = pickle.loads(pickle.dumps(split.at(reader.offsets()[split.name])))
    assert drain(source.reader([saved], context()))[0] == "line 500"
    write(path, header + LINES.replace(b"line", b"LINE") + growth)
    for at in (saved, split) if first else (saved,):
        with pytest.raises(SourceError, match=r"log\.txt.* is not the file any more .* rotated.*Put the file back"):
            drain(source.reader([at], context("skip")))
    path.write_bytes(original)  # put back
    assert drain(source.reader([saved], context()))[0] == "line 500"


@pytest.mark.parametrize("again", [True, False], ids=["a new one", "none"])
def test_a_file_that_was_renamed_is_read_on(tmp_path: Path, again: bool) -> None:
    path = write(tmp_path / "log", LINES)
    source = sources.TextFiles(path)
    saved = half_read(source)
    path.rename(tmp_path / "log.1")
    with (tmp_path / "log.1").open("ab") as file:
        file.write(b"said later\n")
    if again:
        write(tmp_path / "log", LINES.replace(b"line", b"LINE"))
    assert drain(source.reader(saved, context())) == [f"line {i}" for i in range(3, 1000)]


def test_a_file_that_was_copied_back_is_read_on(tmp_path: Path) -> None:
    path = write(tmp_path / "log", LINES)
    source = sources.TextFiles(path)
    saved = half_read(source)
    path.unlink()
    write(tmp_path / "log", LINES + b"more\n")
    assert drain(source.reader(saved, context())) == [f"line {i}" for i in range(3, 1000)]


def test_offsets_of_earlier_releases_are_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "log", LINES)
    split = Split(str(path), FileRange(str(path), 0, len(LINES)), offset=len("line 0\n"))
    assert drain(sources.TextFiles(path).reader([split], context()))[0] == "line 1"


def test_a_shrunk_gzip_file_is_an_error_on_recovery(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gz", b"abc\n" * 10)
    source = sources.TextFiles(path)
    (split,) = source.splits(1)
    with pytest.raises(SourceError, match="has 40 bytes now, at least 44"):
        drain(source.reader([split.at(44)], context()))
    assert drain(source.reader([split.at(40)], context())) == []


def test_bad_bytes_go_to_the_policy_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", b"good\nb\xffd\r\nfine\nend\xc3")
    with pytest.raises(RecordError, match=r"x\.txt, line at byte 5: not valid utf-8: .* at byte 1"):
        read_all(sources.TextFiles(path))
    where = context("dead_letter")
    source = sources.TextFiles(path)
    reader = source.reader(source.splits(1), where)
    assert drain(reader, 1) == ["good", "fine"]
    assert where.errors.skipped == 2
    letters = where.errors.dead_letters
    assert letters is not None
    assert all(isinstance(letter, DeadLetter) for letter in letters)
    assert [letter.record for letter in letters] == [b"b\xffd", b"end\xc3"]


def test_a_bad_line_counts_when_it_is_passed_not_before(tmp_path: Path) -> None:
    source = sources.TextFiles(write(tmp_path / "x.txt", b"a\n\xff\nb\n"))
    (split,) = source.splits(1)
    before = context("skip")
    reader = source.reader([split], before)
    assert reader.read(1) == ["a"]
    assert before.errors.skipped == 0
    again = context("skip")
    assert drain(source.reader([split.at(reader.offsets()[split.name])], again)) == ["b"]
    assert again.errors.skipped == 1


def gzip_lines() -> tuple[bytes, bytes]:
    content = b"".join(b"%d %d\n" % (i, random.Random(i).getrandbits(64)) for i in range(20_000))
    return content, gzip.compress(content)


def damage(packed: bytes, kind: str) -> bytes:
    if kind == "truncated":
        return packed[: len(packed) // 2]
    if kind == "no trailer":
        return packed[:-4]
    if kind == "flipped":
        middle = len(packed) // 2
        return packed[:middle] + bytes(b ^ 0xFF for b in packed[middle : middle + 64]) + packed[middle + 64 :]
    return b"plain text\n" + packed


@pytest.mark.parametrize("kind", ["truncated", "no trailer", "flipped", "not gzip"])
def test_a_damaged_gzip_file_is_one_failed_record(tmp_path: Path, kind: str) -> None:
    content, packed = gzip_lines()
    (tmp_path / "a.gz").write_bytes(damage(packed, kind))
    write(tmp_path / "b.txt", b"other\n")
    source = sources.TextFiles(str(tmp_path / "*"))
    with pytest.raises(RecordError, match=r"gzip file .*a\.gz.* is damaged before its byte \d+, \d+ bytes into"):
        read_all(source)
    lines = content.decode().splitlines()
    where = context("dead_letter")
    reader = source.reader(source.splits(1), where)
    got = drain(reader)
    assert got[-1] == "other"
    if kind == "flipped":  # what makes no sense shows a little after the first wrong byte
        assert got[:5000] == lines[:5000]
    else:
        assert got[:-1] == lines[: len(got) - 1]
    if kind == "no trailer":
        assert len(got) == len(lines) + 1
    elif kind != "not gzip":
        assert len(got) > len(lines) // 4
    assert where.errors.skipped == 1
    assert where.errors.dead_letters is not None
    assert where.errors.dead_letters[0].record == str(tmp_path / "a.gz")
    # A restart from any point of the damaged file hands out the same rest, and after it nothing.
    gz, other = source.splits(1)
    assert reader.offsets()[gz.name] == ABANDONED
    assert drain(source.reader([gz.at(ABANDONED), other], context())) == ["other"]
    if kind != "not gzip":
        offset = sum(len(line) + 1 for line in lines[:1000])
        assert drain(source.reader([gz.at(offset)], context("skip"))) == got[1000:-1]


def test_gzip_members_and_padding_are_one_file(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"a\nb") + gzip.compress(b"") + gzip.compress(b"c\n") + b"\0" * 99)
    assert read_all(sources.TextFiles(tmp_path / "x.gz")) == ["a", "bc"]
    (tmp_path / "empty.gz").write_bytes(b"")
    assert read_all(sources.TextFiles(tmp_path / "empty.gz")) == []


def test_a_very_compressible_file_comes_in_bounded_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gz", b"a\n" * 5_000_000)
    blocks = LineBlocks(FileRange(str(path)), None, 1 << 20, "TextFiles")
    total = 0
    while block := blocks.next():
        assert len(block) <= 1 << 20
        total += len(block)
    assert total == 10_000_000


def test_closing_a_reader_releases_its_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", b"a\n" * 10_000_000)
    source = sources.TextFiles(path)
    before = len(os.listdir("/proc/self/fd"))
    reader = source.reader(source.splits(1), context())
    reader.read(10)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert reader.read(10) == []


# --- JSON lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\n\n[1, "x\\ny"]\r\n  \n"s"\nnull\n12345678901234567890123'
    source = sources.JsonLines(write(tmp_path / f"x{suffix}", content))
    assert read_all(source) == [{"a": 1}, [1, "x\ny"], "s", None, 12345678901234567890123]


def test_malformed_json_goes_to_the_policy_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", b'{"a":1}\n{"a":\n2}\n{"a":3} {"a":4}\n{"b":"\xff"}\n{"a":5}\n' + b"[" * 100_000)
    with pytest.raises(RecordError, match=r"x\.jsonl, line at byte 8: not a JSON value"):
        read_all(sources.JsonLines(path))
    where = context("dead_letter")
    source = sources.JsonLines(path)
    assert drain(source.reader(source.splits(1), where)) == [{"a": 1}, {"a": 5}]
    assert where.errors.dead_letters is not None
    assert [letter.record[:9] for letter in where.errors.dead_letters] == [
        b'{"a":',
        b"2}",
        b'{"a":3} {',
        b'{"b":"\xff"}',
        b"[[[[[[[[[",
    ]


json_piece = st.sampled_from(
    ['{"a":1}', "{}", '{"a":', "1}", "{", "}", " ", "", "1", "1 2", "{} {}", '"', '"}', '{"', "[", "]", '{"a":"}', "\r"]
)


@given(st.lists(st.lists(json_piece, max_size=3).map("".join), max_size=8), st.booleans())
def test_a_block_of_json_is_what_its_lines_are(lines: list[str], final: bool) -> None:
    decoder = JsonDecoder()
    data = "\n".join(lines).encode() + (b"\n" if final and lines else b"")
    got, clean = decoder(data, "x", 0)
    each: list[Any] = []
    for line in data.split(b"\n")[: -1 if data.endswith(b"\n") or not data else None]:
        records, _ = decoder(line + b"\n", "x", 1)
        assert len(records) == 1
        each += records
    shown = [("bad", r.record) if isinstance(r, Unreadable) else r for r in got]
    assert shown == [("bad", r.record) if isinstance(r, Unreadable) else r for r in each]
    assert clean == (not any(isinstance(r, Unreadable) for r in got))


@given(
    st.lists(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=4), max_size=3), max_size=30),
    st.integers(1, 4),
    st.integers(1, 7),
)
def test_json_lines_resume(scratch: Path, records: list[Any], parallelism: int, limit: int) -> None:
    import json

    path = write(scratch / "resume.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode())
    source = sources.JsonLines(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "MIN_RANGE", 20)
        splits = sorted(source.splits(parallelism), key=lambda s: s.payload.start)
    reader = source.reader(splits, context())
    got = reader.read(limit)
    got += drain(source.reader([s.at(reader.offsets()[s.name]) for s in splits], context()), limit)
    assert got == records


@pytest.mark.parametrize("name", ["lines.txt", "lines.txt.gz"])
def test_the_backlog_of_files_is_the_lines_that_are_left(tmp_path: Path, name: str) -> None:
    """By the bytes that are left and the mean size of a line; of a gzip file by a guess at its content's size."""
    lines = [f"{i:010}{'x' * (i % 3)}" for i in range(100_000)]
    paths = [write(tmp_path / f"{part}-{name}", "\n".join(lines).encode()) for part in range(2)]
    source = sources.TextFiles([str(path) for path in paths])
    splits = source.splits(1)
    reader = source.reader(splits, context())
    assert reader.backlog() > 0, "before the first line, by a guess"
    assert len(reader.read(1_000)) == 1_000
    sizes = [os.path.getsize(path) * 3 for path in paths]
    whole = 200_000 if not name.endswith(".gz") else sum(sizes) / 12
    assert reader.backlog() == pytest.approx(whole - 1_000, rel=0.01)
    while len(reader._waiting) or reader.backlog() > 50_000:  # type: ignore[attr-defined]
        assert reader.read(1_000)
    if not name.endswith(".gz"):
        again = source.reader([s.at(reader.offsets()[s.name]) for s in splits], context())
        assert again.backlog() == pytest.approx(50_000 * 12 / 100, rel=0.05), "before the first line, by a guess"
        assert len(again.read(1_000)) == 1_000
        assert again.backlog() == pytest.approx(49_000, rel=0.05)
    drain(reader)
    assert reader.backlog() == 0


def test_a_file_whose_rest_cannot_be_read_has_no_backlog(tmp_path: Path) -> None:
    path = write(tmp_path / "lines.txt.gz", b"a line\n" * 1000)
    source = sources.TextFiles(str(path))
    (split,) = source.splits(1)
    assert source.reader([split], context()).backlog() > 0
    assert source.reader([split.at(ABANDONED)], context()).backlog() == 0


# --- memory -------------------------------------------------------------------------------------------------------


def test_the_backlog_of_memory_is_what_is_left() -> None:
    source = sources.Memory(range(100), splits=3)
    reader = source.reader(source.splits(1), context())
    assert reader.backlog() == 100
    assert len(reader.read(40)) == 33, "a range at a time"
    assert len(reader.read(10)) == 10
    assert reader.backlog() == 57
    drain(reader)
    assert reader.backlog() == 0


@given(st.lists(st.integers()), st.integers(1, 9), st.none() | st.integers(1, 9), st.integers(1, 5))
def test_memory(records: list[int], parallelism: int, count: int | None, limit: int) -> None:
    source = sources.Memory(iter(records), splits=count)
    splits = source.splits(parallelism)
    assert drain(source.reader(splits, context()), limit) == records
    reader = source.reader(splits, context())
    got = reader.read(limit)
    got += drain(source.reader([s.at(reader.offsets()[s.name]) for s in splits], context()), limit)
    assert got == records


def test_memory_refuses_what_it_cannot_use() -> None:
    with pytest.raises(FlowError, match="iterable"):
        sources.Memory(5)  # type: ignore[arg-type]
    with pytest.raises(FlowError, match="cannot be pickled"):
        sources.Memory([threading.Lock()])
    with pytest.raises(FlowError, match="splits must be a whole number"):
        sources.Memory([1], splits=0)

    def broken() -> Any:
        yield 1
        raise TypeError("the user's own")

    with pytest.raises(TypeError, match="the user's own"):
        sources.Memory(broken())


# --- sockets ------------------------------------------------------------------------------------------------------


class Server:
    """A TCP server on a free port; `serve(connection)` runs in a thread for each connection, in turn."""

    def __init__(self, *serve: Any) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._run, args=(serve,), daemon=True)
        self.thread.start()

    def _run(self, serve: Any) -> None:
        for one in serve:
            connection, _ = self.listener.accept()
            with connection:
                one(connection)
        self.listener.close()

    def join(self) -> None:
        self.thread.join(10)
        assert not self.thread.is_alive()


def drain_socket(reader: Reader, woken: threading.Event, limit: int = 100, count: int | None = None) -> list[Any]:
    """Read as the run loop does: wait only when the reader says that it will wake us."""
    out: list[Any] = []
    while not reader.finished and (count is None or len(out) < count):
        woken.clear()
        records = reader.read(limit if count is None else min(limit, count - len(out)))
        out += records
        if not records and not reader.finished and reader.ready_in() is None:
            assert woken.wait(10), "the reader did not wake its task"
    return out


def opened(source: sources.SocketLines, where: SourceContext, offset: int | None = None) -> ThreadReader:
    """A reader as a task has it."""
    (split,) = source.splits(4)
    return ThreadReader(source.reader([split.at(offset)], where), where.wake, "reader")


def test_socket_lines_until_the_server_closes() -> None:
    pieces = [b"one\r\ntw", b"o\n\nthr", b"ee\n\xff\nlast"]
    server = Server(lambda c: [c.sendall(piece) for piece in pieces])
    woken = threading.Event()
    where = context("skip", woken.set)
    source = sources.SocketLines("127.0.0.1", server.port)
    assert not source.bounded
    (split,) = source.splits(4)
    reader = opened(source, where, 10)
    assert drain_socket(reader, woken) == ["one", "two", "", "three", "last"]
    assert where.errors.skipped == 1
    assert reader.offsets() == {split.name: 16}
    reader.close()
    server.join()


def test_socket_holds_the_sender_back() -> None:
    sent = 0
    lines = [f"{i}" for i in range(300_000)]
    blocked = threading.Event()

    def serve(connection: socket.socket) -> None:
        nonlocal sent
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        data = memoryview("".join(line + "\n" for line in lines).encode())
        connection.settimeout(0.3)
        while data:
            try:
                done = connection.send(data[:4096])
            except TimeoutError:
                blocked.set()
                continue
            data = data[done:]
            sent += done

    server = Server(serve)
    woken = threading.Event()
    source = sources.SocketLines("127.0.0.1", server.port, max_buffered=50)
    reader = opened(source, context(wake=woken.set))
    assert blocked.wait(20), "nothing stopped the sender"
    assert sent < len("".join(lines)) // 2 + len(lines)
    assert len(reader.reader._lines) < 50 + (32 << 10)  # type: ignore[attr-defined]  # and what one read may bring
    assert drain_socket(reader, woken, limit=1000) == lines
    reader.close()
    server.join()


def test_the_backlog_of_a_socket_is_what_is_held_here_and_in_the_kernel() -> None:
    count, line = 8_000, b"x" * 9 + b"\n"
    done = threading.Event()

    def serve(connection: socket.socket) -> None:
        for _ in range(count // 1_000):
            connection.sendall(line * 1_000)
        done.wait(20)

    server = Server(serve)
    woken = threading.Event()
    source = sources.SocketLines("127.0.0.1", server.port, max_buffered=50)
    reader = opened(source, context(wake=woken.set))
    until = time.monotonic() + 20
    while abs(reader.backlog() - count) > 1:  # a line may lie in both places
        assert time.monotonic() < until, f"{reader.backlog()} of {count:,} lines are known to wait"
        time.sleep(0.01)
    assert len(reader.reader._lines) < 50 + (32 << 10)  # type: ignore[attr-defined]  # and what one read may bring
    assert reader.is_full()
    assert len(drain_socket(reader, woken, count=5_000)) == 5_000
    while abs(reader.backlog() - 3_000) > 1:  # the thread may be about to take more from the kernel
        assert time.monotonic() < until, f"{reader.backlog():,} lines are known to wait"
        time.sleep(0.01)
    done.set()
    assert len(drain_socket(reader, woken)) == 3_000
    assert reader.backlog() == 0
    assert not reader.is_full()
    reader.close()
    server.join()


def test_socket_that_cannot_be_reached_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    woken = threading.Event()
    source = sources.SocketLines("127.0.0.1", port)
    reader = opened(source, context(wake=woken.set))
    with pytest.raises(SourceError, match=rf"cannot connect to 127.0.0.1:{port}: .*refused.*nc -lk {port}.*reconnect"):
        drain_socket(reader, woken)
    reader.close()


def test_socket_reconnects() -> None:
    server = Server(lambda c: c.sendall(b"one\n"), lambda c: c.sendall(b"two\n"))
    woken = threading.Event()
    source = sources.SocketLines("127.0.0.1", server.port, reconnect=True)
    reader = opened(source, context(wake=woken.set))
    assert drain_socket(reader, woken, count=2) == ["one", "two"]
    assert not reader.finished
    reader.close()
    assert not reader._thread.is_alive()
    server.join()


@pytest.mark.parametrize("full", [False, True])
def test_socket_close_ends_the_thread(full: bool) -> None:
    done = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"x\n" * (10 if full else 1))
        done.wait(10)

    server = Server(serve)
    woken = threading.Event()
    source = sources.SocketLines("127.0.0.1", server.port, max_buffered=5)
    reader = opened(source, context(wake=woken.set))
    assert woken.wait(10)
    reader.close()
    assert not reader._thread.is_alive()
    done.set()
    server.join()


def test_socket_line_without_end_is_bounded() -> None:
    def serve(connection: socket.socket) -> None:
        try:
            while True:
                connection.sendall(b"x" * 10_000)
        except OSError:
            pass

    server = Server(serve)
    woken = threading.Event()
    source = sources.SocketLines("127.0.0.1", server.port, max_line_bytes=100_000)
    reader = opened(source, context(wake=woken.set))
    with pytest.raises(SourceError, match="a line of more than 100,000 bytes"):
        drain_socket(reader, woken)
    reader.close()
    server.join()


@pytest.mark.parametrize("pieces", [[b"x" * 11 + b"\n"], [b"x" * 6, b"x" * 5 + b"\r\n"], [b"fine\n" + b"x" * 11]])
def test_socket_line_with_its_end_is_bounded(pieces: list[bytes]) -> None:
    done = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"one\n" + b"y" * 10 + b"\r\n")
        for piece in pieces:
            time.sleep(0.05)  # for a read of its own; the answer is the same without
            connection.sendall(piece)
        done.wait(10)

    server = Server(serve)
    woken = threading.Event()
    source = sources.SocketLines("127.0.0.1", server.port, max_line_bytes=10)
    reader = opened(source, context(wake=woken.set))
    assert drain_socket(reader, woken, count=2) == ["one", "y" * 10]
    if pieces[0].startswith(b"fine"):
        assert drain_socket(reader, woken, count=1) == ["fine"]
    with pytest.raises(SourceError, match="a line of more than 10 bytes"):
        drain_socket(reader, woken)
    reader.close()
    done.set()
    server.join()


def reset(connection: socket.socket) -> None:
    """Ends a connection as a machine that has lost it does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("broken", [False, True])
def test_socket_that_reconnects_leaves_out_a_line_that_breaks_off(
    broken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    taken = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"one\ntw")
        taken.wait(10)  # a reset takes away what nobody has read
        if broken:
            reset(connection)

    server = Server(serve, lambda c: c.sendall(b"two\nth"), lambda c: c.sendall(b"three\n"))
    woken = threading.Event()
    source = sources.SocketLines("127.0.0.1", server.port, reconnect=True)
    reader = opened(source, context(wake=woken.set))
    found = drain_socket(reader, woken, count=1)
    taken.set()
    assert found + drain_socket(reader, woken, count=2) == ["one", "two", "three"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all("in the middle of a line, and the 2 bytes of this line" in text for text in said)
    reader.close()
    assert len(caplog.records) == 2
    server.join()


def test_socket_that_breaks_hands_out_no_part_of_a_line() -> None:
    taken = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"one\ntw")
        taken.wait(10)
        reset(connection)

    server = Server(serve)
    woken = threading.Event()
    source = sources.SocketLines("127.0.0.1", server.port)
    reader = opened(source, context(wake=woken.set))
    assert drain_socket(reader, woken, count=1) == ["one"]
    taken.set()
    with pytest.raises(SourceError, match=r"the connection to .* broke: .*reset"):
        drain_socket(reader, woken)
    reader.close()
    server.join()


@pytest.mark.parametrize("port", [0, -1, 70_000])
def test_socket_refuses_what_is_no_port(port: int) -> None:
    with pytest.raises(FlowError, match=rf"port={port}; it must be a whole number from 1 to 65535"):
        sources.SocketLines("localhost", port)


# --- all of them --------------------------------------------------------------------------------------------------


def test_every_source_travels_and_describes_itself() -> None:
    for source in (
        sources.TextFiles(["a*", "b"], encoding="latin-1"),
        sources.JsonLines("a"),
        sources.Parquet("a", columns=["x"], filters=[("x", ">", 1)]),
        sources.Arrow("a"),
        sources.Memory([1, 2]),
        sources.Generator(str, "10:1s,20", limit=5, arrivals="poisson"),
        sources.SocketLines("localhost", 99),
    ):
        copy = cloudpickle.loads(cloudpickle.dumps(source))
        assert copy.describe() == source.describe() == repr(source)
        assert type(source).__name__ in source.describe()
        assert pickle.loads(pickle.dumps(source)).describe() == source.describe()
        assert type(source).__doc__


@pytest.mark.parametrize("kind", ["text", "json", "csv", "parquet", "arrow", "memory"])
@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_a_reader_says_from_which_split_records_come_and_which_splits_have_ended(
    tmp_path: Path, kind: str, limit: int
) -> None:
    rows = [{"part": part, "n": n} for part in "abc" for n in range(40)]
    source: Any
    if kind == "memory":
        source = sources.Memory(rows, splits=3)
    else:
        for part in "abc":
            mine, path = [row for row in rows if row["part"] == part], tmp_path / part
            table = pa.Table.from_pylist(mine)
            if kind == "parquet":
                pq.write_table(table, path)
            elif kind == "arrow":
                with pa.ipc.new_file(str(path), table.schema) as writer:
                    writer.write_table(table)
            elif kind == "csv":
                path.write_text("part,n\n" + "".join(f"{row['part']},{row['n']}\n" for row in mine))
            else:
                path.write_text("".join(json.dumps(row) + "\n" for row in mine))
        of = {
            "text": sources.TextFiles,
            "json": sources.JsonLines,
            "csv": sources.Csv,
            "parquet": sources.Parquet,
            "arrow": sources.Arrow,
        }
        source = of[kind](str(tmp_path / "?"))
    splits = source.splits(1)
    assert len(splits) == 3
    reader = source.reader(splits, SourceContext("read", 0, 1, ErrorHandler("read")))
    of_split: dict[str, set[str]] = {split.name: set() for split in splits}
    ended: set[str] = set()
    while not reader.finished:
        records = reader.read(limit)
        if records:
            assert reader.split not in ended
            assert not reader.has_ended(reader.split) or kind == "memory"
            of_split[reader.split] |= {json.loads(r)["part"] if kind == "text" else r["part"] for r in records}
        began = [name for name, parts in of_split.items() if parts]
        ended |= {name for name in began if reader.has_ended(name)}
    assert sorted(map(sorted, of_split.values())) == [["a"], ["b"], ["c"]]
    assert ended == set(of_split)


def test_parts_of_a_file_are_read_in_the_order_of_their_numbers() -> None:
    names = [f"log.txt[{first}:{first + 5}]" for first in range(0, 60, 5)] + ["²", "", "log", "log.txt"]
    (mine,) = share([Split(name) for name in reversed(names)], 1)
    assert [split.name for split in mine if "[" in split.name] == names[:12]
    assert sorted(split.name for split in mine) == sorted(names)
