"""The Files sink in jobs with epochs: final at commit, whole at any point, and again from any state."""

from __future__ import annotations

import errno
import gzip
import json
import os
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime import sinks, sources
from penstock.runtime.errors import FlowError, PenstockError, RecordError
from penstock.runtime.program.flow import Flow
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sinks.base import SinkContext
from tests.sinks.one_task import OneTask


def begin(where: Path, index: int = 0, parallelism: int = 1, *, restoring: bool = False, **settings: Any) -> OneTask:
    errors = ErrorHandler("out", policy="fail")
    context = SinkContext("out", index, parallelism, epochs=True, restoring=restoring, errors=errors)
    return OneTask(sinks.Files(where, **settings), context)


def again(
    where: Path, epoch: int, prepared: list[Any], index: int = 0, parallelism: int = 1, **settings: Any
) -> OneTask:
    """A later writer, gone back to an epoch."""
    writer = begin(where, index, parallelism, restoring=True, **settings)
    writer.restore(epoch, pickle.loads(pickle.dumps(prepared)))
    return writer


def finals(where: Path) -> dict[str, str]:
    """What readers see."""
    return {part.name: text_of(part) for part in sorted(where.glob("part-*"))}


def text_of(part: Path) -> str:
    data = part.read_bytes()
    return (gzip.decompress(data) if part.suffix == ".gz" else data).decode()


def hidden(where: Path) -> list[str]:
    return sorted(name for name in os.listdir(where) if name.startswith("."))


# --- the two phases -----------------------------------------------------------------------------------------------


def test_a_short_job_makes_one_part_with_the_plain_name(tmp_path: Path) -> None:
    writer = begin(tmp_path, index=2, parallelism=3)
    assert os.listdir(tmp_path) == []
    writer.write(["a"])
    for epoch in (1, 2, 3):
        writer.prepare(epoch)
        writer.commit(epoch)
    writer.write(["b"])
    writer.finish()
    assert finals(tmp_path) == {}
    state = writer.prepare(4)
    assert finals(tmp_path) == {}
    for data in (state.state, [one.data for one in state.committables]):
        assert data == json.loads(json.dumps(data))  # plain data
    writer.commit(3)
    assert finals(tmp_path) == {}
    writer.commit(4)
    writer.commit(4)
    writer.close(False)
    writer.close(False)
    assert finals(tmp_path) == {"part-00002.txt": "a\nb\n"}
    assert hidden(tmp_path) == []


def test_an_unbounded_job_shows_results_while_it_runs(tmp_path: Path) -> None:
    writer = begin(tmp_path, part_s=60)
    now = 0.0
    writer._clock = lambda: now
    for epoch in range(1, 151):
        writer.write([str(epoch)])
        now += 1
        writer.prepare(epoch)
        writer.commit(epoch)
    names = ["part-00000-0000000001.txt", "part-00000-0000000061.txt"]
    assert list(finals(tmp_path)) == names
    assert len(hidden(tmp_path)) == 1
    writer.finish()
    writer.prepare(151)
    writer.commit(152)  # 151 was passed over
    writer.close(False)
    assert list(finals(tmp_path)) == [*names, "part-00000-0000000121.txt"]
    assert hidden(tmp_path) == []
    text = subprocess.run(f"cat {tmp_path}/part-*", shell=True, check=True, capture_output=True, text=True).stdout
    assert text.split() == [str(n) for n in range(1, 151)]


def test_an_idle_task_shows_what_it_has_got(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    writer._clock = lambda: 0.0
    writer.write(["a"])
    writer.prepare(1)
    writer._clock = lambda: 60.0
    writer.prepare(2)
    writer.commit(2)
    assert list(finals(tmp_path)) == ["part-00000-0000000001.txt"]


def test_large_parts_are_closed(tmp_path: Path) -> None:
    writer = begin(tmp_path, part_bytes=10, part_s=float("inf"))
    for epoch in range(1, 7):
        writer.write(["123"])
        writer.prepare(epoch)
        writer.commit(epoch)
    assert list(finals(tmp_path).values()) == ["123\n" * 3] * 2


def test_zero_seconds_is_a_part_an_epoch(tmp_path: Path) -> None:
    writer = begin(tmp_path, part_s=0)
    for epoch in range(1, 4):
        writer.write([epoch])
        writer.prepare(epoch)
    writer.prepare(4)
    assert finals(tmp_path) == {}
    writer.commit(2)
    assert list(finals(tmp_path).values()) == ["1\n", "2\n"]
    writer.commit(4)
    assert list(finals(tmp_path).values()) == ["1\n", "2\n", "3\n"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_task_without_records_has_a_part_as_without_epochs(tmp_path: Path, packed: bool) -> None:
    writer = begin(tmp_path, compression="gzip" if packed else None)
    writer.prepare(1)
    writer.write([])
    assert os.listdir(tmp_path) == []
    writer.finish()
    writer.prepare(2)
    writer.commit(2)
    writer.close(False)
    (name,) = os.listdir(tmp_path)
    assert name == "part-00000.txt" + ".gz" * packed
    if packed:
        subprocess.run(["gzip", "-t", tmp_path / name], check=True)
    assert list(finals(tmp_path).values()) == [""]


def test_the_end_after_a_closed_part_makes_no_empty_one(tmp_path: Path) -> None:
    writer = begin(tmp_path, part_s=0)
    writer.write(["a"])
    writer.prepare(1)
    writer.finish()
    writer.prepare(2)
    writer.commit(2)
    assert finals(tmp_path) == {"part-00000-0000000001.txt": "a\n"}


def test_a_record_that_cannot_be_written_begins_no_file(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    with pytest.raises(RecordError):
        writer.write(["two\nlines"])
    assert os.listdir(tmp_path) == []


# --- gzip ---------------------------------------------------------------------------------------------------------


def test_gzip_is_whole_at_every_noted_length(tmp_path: Path) -> None:
    writer = begin(tmp_path, compression="gzip")
    lengths = []
    for epoch in range(1, 5):
        writer.write([f"{epoch}" * 1000])
        for n in (2 * epoch, 2 * epoch + 1):  # the second time there is nothing new
            begun = writer.prepare(n).state["begun"]
            assert begun is not None
            lengths.append(begun["length"])
    (name,) = hidden(tmp_path)
    data = (tmp_path / name).read_bytes()
    assert lengths[::2] == lengths[1::2]
    for epoch, length in zip(range(1, 5), lengths[::2], strict=True):
        assert gzip.decompress(data[:length]).decode().split() == [f"{e}" * 1000 for e in range(1, epoch + 1)]
    assert data.count(b"\x1f\x8b\x08") == 4  # members
    writer.finish()
    writer.prepare(10)
    writer.commit(10)
    assert (tmp_path / "part-00000.txt.gz").read_bytes() == data
    subprocess.run(["gzip", "-t", tmp_path / "part-00000.txt.gz"], check=True)


# --- going back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("closed", [None, True])
def test_what_was_prepared_survives_and_nothing_else(tmp_path: Path, packed: bool, closed: bool | None) -> None:
    settings: dict[str, Any] = {"compression": "gzip" if packed else None}
    old = begin(tmp_path, **settings)
    old.write(["a"])
    state = old.prepare(1)
    old.write(["lost"])
    old.flush()
    if closed:
        old.close(True)
    new = again(tmp_path, 1, [state], **settings)
    if not closed:  # the old writer is not dead, only slow
        old.write(["stale"])
        old.flush()
        old.finish()
        with pytest.raises(PenstockError, match="no longer there"):
            old.prepare(2)
    name = "part-00000-000000000{}.txt" + ".gz" * packed
    assert finals(tmp_path) == {name.format(1): "a\n"}
    new.write(["b"])
    if not closed:
        old.write(["stale"])
        old.close(True)
    new.finish()
    new.prepare(2)
    new.commit(2)
    new.close(False)
    assert finals(tmp_path) == {name.format(1): "a\n", name.format(2): "b\n"}
    assert hidden(tmp_path) == []


def test_pending_parts_are_committed_once_more(tmp_path: Path) -> None:
    old = begin(tmp_path, part_s=0)
    for epoch in (1, 2):
        old.write([epoch])
        state = old.prepare(epoch)
    old.close(True)
    assert len(hidden(tmp_path)) == 2
    for _ in range(3):
        again(tmp_path, 2, [state])
        assert list(finals(tmp_path).values()) == ["1\n", "2\n"]
        assert hidden(tmp_path) == []


def test_a_pending_part_that_is_gone_is_an_error(tmp_path: Path) -> None:
    old = begin(tmp_path, part_s=0)
    old.write(["a"])
    state = old.prepare(7)
    old.commit(7)
    (tmp_path / "part-00000-0000000001.txt").unlink()
    message = r"part-00000-0000000001\.txt' of epoch 7 is lost: .*another job has written to this .*overwrite"
    with pytest.raises(PenstockError, match=message) as raised:
        again(tmp_path, 7, [state])
    assert "empty file" not in str(raised.value), "records would be lost without a word"


@pytest.mark.parametrize("how", ["deleted", "folder deleted", "folder made anew", "folder moved"])
def test_no_epoch_counts_on_a_file_that_is_not_there(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    writer = begin(folder)
    writer.write(["a"])
    writer.prepare(1)
    writer.commit(1)
    writer.write(["b"])
    if how == "deleted":
        (folder / hidden(folder)[0]).unlink()
    elif how == "folder moved":
        folder.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(folder)
        if how == "folder made anew":
            folder.mkdir()
    with pytest.raises(PenstockError, match=r"no longer there: somebody.* deleted or moved it, or the folder .*out"):
        writer.prepare(2)


@pytest.mark.parametrize("found", ["is not there", "has only 1 bytes"])
def test_an_unfinished_part_that_is_gone_is_an_error(tmp_path: Path, found: str) -> None:
    old = begin(tmp_path)
    old.write(["abc"])
    state = old.prepare(1)
    old.close(True)
    (name,) = hidden(tmp_path)
    if found == "is not there":
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text("a")
    with pytest.raises(PenstockError, match=f"{found}, and epoch 1 counts on 4 bytes of it. .*lost.*overwrite=True"):
        again(tmp_path, 1, [state])


def test_back_to_an_older_epoch_than_the_last(tmp_path: Path) -> None:
    old = begin(tmp_path, part_bytes=4, part_s=float("inf"))
    states = {}
    for epoch in range(1, 7):
        old.write([epoch])
        states[epoch] = old.prepare(epoch)
        old.commit(epoch)
    old.finish()
    states[7] = old.prepare(7)
    old.commit(7)
    assert list(finals(tmp_path).values()) == ["1\n2\n", "3\n4\n", "5\n6\n"]
    new = again(tmp_path, 3, [states[3]])  # in the midst of a committed part
    assert list(finals(tmp_path).values()) == ["1\n2\n", "3\n"]
    new.write(["x"])
    new.finish()
    new.prepare(9)
    new.commit(9)
    assert list(finals(tmp_path).values()) == ["1\n2\n", "3\n", "x\n"]
    again(tmp_path, 2, [states[2]])
    assert list(finals(tmp_path).values()) == ["1\n2\n"]
    again(tmp_path, 0, [])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_plain_part_goes_back_too(tmp_path: Path, epoch: int) -> None:
    old = begin(tmp_path)
    if epoch:
        old.write(["a"])
    state = old.prepare(1)
    old.write(["b"])
    old.finish()
    old.prepare(2)
    old.commit(2)
    assert list(finals(tmp_path)) == ["part-00000.txt"]
    new = again(tmp_path, 1, [state])
    assert finals(tmp_path) == ({"part-00000-0000000001.txt": "a\n"} if epoch else {})
    new.finish()
    new.prepare(3)
    new.commit(3)
    assert "".join(finals(tmp_path).values()) == "a\n" * epoch
    assert len(finals(tmp_path)) == 1


def test_from_the_start_again(tmp_path: Path) -> None:
    old = begin(tmp_path)
    old.write(["a"])
    old.prepare(1)
    new = again(tmp_path, 0, [])
    new.write(["a"])
    new.finish()
    new.prepare(1)
    new.commit(1)
    assert finals(tmp_path) == {"part-00000.txt": "a\n"}
    assert hidden(tmp_path) == []


def test_an_ended_task_that_is_built_again_has_only_that_to_say(tmp_path: Path) -> None:
    old = begin(tmp_path)
    old.write(["a"])
    old.finish()
    state = old.prepare(1)
    old.commit(1)
    new = again(tmp_path, 4, [state])
    assert new.prepare(5).committables == []
    new.commit(5)
    new.close(False)
    assert finals(tmp_path) == {"part-00000.txt": "a\n"}
    assert hidden(tmp_path) == []


def test_another_number_of_tasks(tmp_path: Path) -> None:
    """1 -> 3 -> 2 tasks; nothing is named twice, and what is of no task now is cleared away."""
    (one,) = [begin(tmp_path)]
    one.write(["0.1"])
    state = one.prepare(1)
    three = [again(tmp_path, 1, [state] * (i == 2), i, 3) for i in range(3)]
    assert list(finals(tmp_path).values()) == ["0.1\n"]
    for i, writer in enumerate(three):
        writer.write([f"{i}.2"])
    states = [writer.prepare(2) for writer in three]
    for i, writer in enumerate(three):
        writer.write([f"{i}.lost"])
        writer.prepare(3)
        writer.write([f"{i}.lost"])
    two = [again(tmp_path, 2, [states[1]], 0, 2), again(tmp_path, 2, [states[2], states[0]], 1, 2)]
    three[2].write(["stale"])
    three[2].finish()
    with pytest.raises(PenstockError, match="no longer there"):
        three[2].prepare(4)
    three[2].write(["stale"])
    for i, writer in enumerate(two):
        writer.write([f"{i}.3"])
        writer.finish()
        writer.prepare(4)
    for writer in two:
        writer.commit(4)
        writer.close(False)
    assert finals(tmp_path) == {
        "part-00000-0000000001.txt": "0.1\n",
        "part-00000-0000000002.txt": "0.2\n",
        "part-00000-0000000003.txt": "0.3\n",
        "part-00001-0000000002.txt": "1.2\n",
        "part-00001-0000000003.txt": "1.3\n",
        "part-00002-0000000002.txt": "2.2\n",
    }
    assert hidden(tmp_path) == []


def test_a_changed_suffix_leaves_old_parts_their_names(tmp_path: Path) -> None:
    old = begin(tmp_path)
    old.write(["a"])
    state = old.prepare(1)
    new = again(tmp_path, 1, [state], format="jsonl")
    new.write(["b"])
    new.finish()
    new.prepare(2)
    new.commit(2)
    assert finals(tmp_path) == {"part-00000-0000000001.txt": "a\n", "part-00000-0000000002.jsonl": '"b"\n'}
    assert hidden(tmp_path) == []


def test_sinks_of_other_suffixes_share_a_directory(tmp_path: Path) -> None:
    text = begin(tmp_path)
    lines = begin(tmp_path, format="jsonl")
    text.write(["a"])
    lines.write(["a"])
    state = text.prepare(1)
    lines.prepare(1)
    lines.write(["b"])
    new = again(tmp_path, 1, [state])
    new.write(["b"])
    for writer in (new, lines):
        writer.finish()
        writer.prepare(2)
        writer.commit(2)
        writer.close(False)
    assert finals(tmp_path) == {
        "part-00000-0000000001.txt": "a\n",
        "part-00000-0000000002.txt": "b\n",
        "part-00000.jsonl": '"a"\n"b"\n',
    }
    assert hidden(tmp_path) == []


def test_a_writer_that_should_have_been_restored_says_so(tmp_path: Path) -> None:
    writer = begin(tmp_path, restoring=True)
    for use in (lambda: writer.write(["a"]), writer.finish, lambda: writer.prepare(1)):
        with pytest.raises(RuntimeError, match=r"before restore\(\)"):
            use()
    old = begin(tmp_path)
    with pytest.raises(RuntimeError, match=r"restore\(1\) was given the state of epoch 2"):
        writer.restore(1, [old.prepare(2)])


# --- starting and closing -----------------------------------------------------------------------------------------


def test_old_parts_are_deleted_at_the_start_of_the_job_only(tmp_path: Path) -> None:
    names = ["part-00000.txt", "part-00000-0000000061.csv", "part-00003-0000000001.txt"]
    leftovers = [".part-00000-0000000071.0a1b2c3d.txt.inprogress", ".part-00000.txt.inprogress"]
    kept = ["notes.txt", "part-00000-c000.snappy.parquet", "part-00001.txt"]
    for name in [*names, *leftovers, *kept]:
        (tmp_path / name).write_text("old")
    with pytest.raises(FlowError, match="already holds 4 part files"):
        sinks.Files(tmp_path).check()
    begin(tmp_path, 0, 2, restoring=True, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == sorted([*names, *leftovers, *kept])
    again(tmp_path, 0, [], 0, 2, overwrite=True)  # the job's first writers died before they could
    assert sorted(os.listdir(tmp_path)) == kept
    for name in [*names, *leftovers]:
        (tmp_path / name).write_text("old")
    begin(tmp_path, 0, 2, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == kept
    old = begin(tmp_path, 0, 2, overwrite=True)
    old.write(["a"])
    state = old.prepare(1)
    again(tmp_path, 1, [state], 0, 2, overwrite=True)
    assert finals(tmp_path) == {"part-00000-0000000001.txt": "a\n", "part-00001.txt": "old"} | {
        "part-00000-c000.snappy.parquet": "old"
    }


def test_a_new_job_leaves_what_the_resume_of_a_failed_one_needs(tmp_path: Path) -> None:
    failed = begin(tmp_path)
    failed.write(["a"])
    state = failed.prepare(1)
    failed.write(["b"])
    failed.close(failed=True)
    left = hidden(tmp_path)
    assert left
    assert finals(tmp_path) == {}
    flow = Flow("new")
    flow.read(sources.Memory([1])).write(sinks.Files(tmp_path))
    with pytest.raises(FlowError, match=r"1 unfinished files \(\.part-00000.* penstock\.resume\(\) .* overwrite=True"):
        flow.plan(1)
    for other in (sinks.Files(tmp_path, suffix=".csv"), sinks.Files(tmp_path, overwrite=True)):
        other.check()  # of files with another ending it would delete none; or the user said so
    assert hidden(tmp_path) == left
    resumed = again(tmp_path, 1, [state])
    resumed.write(["b"])
    resumed.finish()
    resumed.prepare(2)
    resumed.commit(2)
    resumed.close(failed=False)
    assert "".join(finals(tmp_path).values()) == "a\nb\n"
    assert not hidden(tmp_path)


def test_closing_deletes_only_what_nobody_counts_on(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    writer.write(["a"])
    writer.close(True)
    assert os.listdir(tmp_path) == []
    for failed in (False, True):
        writer = begin(tmp_path, part_s=0)
        writer.write(["a"])
        writer.prepare(1)  # closed
        writer._part_s = 99
        writer.write(["b"])
        state = writer.prepare(2)  # open
        writer.close(failed)
        writer.close(failed)
        assert finals(tmp_path) == {}
        assert len(hidden(tmp_path)) == 2
        new = again(tmp_path, 2, [state])
        assert list(finals(tmp_path).values()) == ["a\n", "b\n"]
        new.write(["c"])
        new.finish()
        new.close(failed)  # finished, and never prepared
        assert list(finals(tmp_path).values()) == ["a\n", "b\n"]
        assert hidden(tmp_path) == []
        again(tmp_path, 0, [])


def test_closing_deletes_a_part_begun_since_the_last_prepare(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    writer.write(["a"])
    writer.prepare(1)
    writer._part_s = 0
    writer.prepare(2)
    promised = hidden(tmp_path)
    writer.write(["b"])
    assert len(hidden(tmp_path)) == 2
    writer.close(True)
    assert hidden(tmp_path) == promised


def test_closing_before_the_last_commit_leaves_it_to_a_later_writer(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    writer.write(["a"])
    writer.finish()
    state = writer.prepare(1)
    writer.close(False)
    assert finals(tmp_path) == {}
    again(tmp_path, 1, [state])
    assert finals(tmp_path) == {"part-00000.txt": "a\n"}


# --- failures -----------------------------------------------------------------------------------------------------


class Full:
    """A file on a disk that has just become full."""

    def __init__(self, file: Any, room: int = 1) -> None:
        self.file = file
        self.room = room

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written: int = self.file.write(bytes(data[: self.room]))
        self.room -= written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


FULL = r"cannot write .*part-00000.*No space left.*Free some space.*what the job committed stays"


@pytest.mark.parametrize("during", ["write", "flush", "prepare", "finish"])
def test_a_full_disk_loses_nothing_that_was_prepared(tmp_path: Path, during: str) -> None:
    writer = begin(tmp_path)
    writer.write(["a"])
    state = writer.prepare(1)
    assert writer._file is not None
    writer._file._file = Full(writer._file._file)  # type: ignore[assignment]
    if during != "write":
        writer.write(["b"])
    use = {
        "write": lambda: writer.write(["x" * 1_000_000]),
        "flush": writer.flush,
        "prepare": lambda: writer.prepare(2),
        "finish": writer.finish,
    }[during]
    with pytest.raises(PenstockError, match=FULL):
        use()
    with pytest.raises(PenstockError, match=FULL):  # what was held back is nowhere: nothing more may be promised
        writer.prepare(2)
    writer.close(True)
    again(tmp_path, 1, [state])
    assert finals(tmp_path) == {"part-00000-0000000001.txt": "a\n"}


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_the_systems_refusals_are_said_clearly(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def both(epoch: int) -> Any:
        state = writer.prepare(epoch)
        writer.commit(epoch)
        return state

    writer = begin(tmp_path, part_s=0)
    writer.write(["a"])
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        for _ in range(2):
            with pytest.raises(PenstockError, match=r"cannot write .*quota.*Free some space"):
                both(1)
    state = both(2)
    assert list(finals(tmp_path).values()) == ["a\n"]
    again(tmp_path, 2, [state])


def test_a_failed_fsync_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = begin(tmp_path, part_s=0)
    writer.write(["a"])
    assert writer._file is not None
    mine = writer._file._file.fileno()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if descriptor == mine:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(PenstockError, match=r"Input/output error.*Check the disk"):
            writer.prepare(1)
    with pytest.raises(PenstockError, match="Input/output error"):
        writer.prepare(2)


def test_a_full_disk_while_going_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = begin(tmp_path)
    old.write(["abc"])
    state = old.prepare(1)
    old.close(True)
    before = hidden(tmp_path)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "part-00000")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(PenstockError, match=FULL):
            again(tmp_path, 1, [state])
    assert os.listdir(tmp_path) == before  # the copy is gone, the original is not
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(PenstockError, match=FULL):
            again(tmp_path, 1, [state])
    again(tmp_path, 1, [state])
    assert finals(tmp_path) == {"part-00000-0000000001.txt": "abc\n"}
    assert hidden(tmp_path) == []


class Killed(BaseException):
    """The process ends here."""


def test_killed_at_any_call_of_a_commit_or_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after each system call that changes the directory; then again, and it comes to the same."""
    left = 0

    def deadly(call: Any, late: bool) -> Any:
        def wrapped(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0 and not (late and left == -1):
                raise Killed
            result = call(*args)
            if left < 0:
                raise Killed
            return result

        return wrapped

    for late in (False, True):
        for kill_at in range(100):
            where = tmp_path / f"{late}{kill_at}"
            old = begin(where, part_s=0)
            for epoch in (1, 2, 3):
                old.write([epoch])
                old.prepare(epoch)
            old._part_s = 99
            old.write([4])
            state = old.prepare(4)
            old.write(["lost"])
            old.flush()
            left = kill_at
            killed = False
            with monkeypatch.context() as patch:
                for name in ("replace", "unlink", "fsync"):
                    patch.setattr(os, name, deadly(getattr(os, name), late))
                try:
                    old.commit(4)
                    again(where, 4, [state])
                except Killed:
                    killed = True
            assert set(finals(where).values()) <= {"1\n", "2\n", "3\n", "4\n"}
            again(where, 4, [state])
            assert list(finals(where).values()) == ["1\n", "2\n", "3\n", "4\n"]
            assert hidden(where) == []
            if not killed:
                break
        assert kill_at > 8


# --- a cancelled job ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_cancelled_job_shows_what_complete_epochs_have(tmp_path: Path, compression: str | None) -> None:
    writer = begin(tmp_path, compression=compression)
    states = []
    for epoch, record in enumerate("abc", 1):
        writer.write([record])
        states.append(writer.prepare(epoch))
    writer.commit(1)
    writer.write(["d"])
    stale = tmp_path / ".part-00000-0000000001.00000000.txt.inprogress"
    stale.touch()
    writer.cancel(2)
    writer.close(True)
    assert list(finals(tmp_path).values()) == ["a\nb\n"]
    assert set(hidden(tmp_path)) <= {stale.name if compression else ""}
    # The program may have died before it noted that the job is cancelled, and the job be resumed.
    again(tmp_path, 2, [states[1]], compression=compression).close(True)
    assert list(finals(tmp_path).values()) == ["a\nb\n"]


def test_a_cancelled_job_shows_complete_epochs_of_a_part_that_was_closed_later(tmp_path: Path) -> None:
    writer = begin(tmp_path, part_bytes=4)
    writer.write(["a"])
    writer.prepare(1)
    writer.write(["b"])
    writer.prepare(2)  # closes the part
    writer.write(["c"])
    writer.prepare(3)
    writer.cancel(1)
    writer.close(True)
    assert finals(tmp_path) == {"part-00000-0000000001.txt": "a\n"}
    assert hidden(tmp_path) == []


def test_a_job_that_is_cancelled_before_its_first_epoch_leaves_nothing(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    writer.write(["a"])
    writer.prepare(1)
    writer.cancel(0)
    writer.close(True)
    assert os.listdir(tmp_path) == []
