"""Output caches: what they hold against a plain list, exact memory, files that are gone with their entries."""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.runtime.errors import PenstockError
from penstock.runtime.exchange import output_cache as module
from penstock.runtime.exchange.output_cache import Entry, OnDisk, OutputCache, OutputCaches

DATA, END, BARRIER, WATERMARK = 1, 2, 4, 5
MEMORY = 500


@pytest.fixture(autouse=True)
def small_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted for an entry besides its bytes is of the size of these tests' messages, and so are slabs."""
    monkeypatch.setattr(module, "ENTRY_BYTES", 7)
    monkeypatch.setattr(module, "SLAB_MESSAGE", 10)
    monkeypatch.setattr(module, "_SLAB_LEAST", 32)
    monkeypatch.setattr(module, "_SLAB_MOST", 256)
    monkeypatch.setattr(module, "_FILE_LEAST", MEMORY)


@pytest.fixture(scope="module", autouse=True)
def no_files_of_others() -> None:
    """Simulated clusters of other tests are garbage with thousands of open files, which `open_files` would look at."""
    gc.collect()


def held_bytes(entries: Iterable[Entry]) -> int:
    """What these entries must count for in memory."""
    return sum(entry[3] + module.ENTRY_BYTES for entry in entries if entry[3] and not isinstance(entry[4], OnDisk))


def places(entries: Iterable[Entry]) -> list[OnDisk | None]:
    """Where each entry is."""
    return [entry[4] if isinstance(entry[4], OnDisk) else None for entry in entries]


def on_disk(entries: Iterable[Entry]) -> dict[int, Any]:
    """The files in which some of these entries are."""
    return {id(place.file): place.file for place in places(entries) if place is not None}


def open_files(directory: Path) -> int:
    """This process's open files in a directory, those without a name too."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{number}").startswith(f"{directory}/")
        except FileNotFoundError:
            continue
    return count


class Modelled:
    """A cache beside a plain list of (kind, stamp, bytes)."""

    def __init__(self, output_caches: OutputCaches) -> None:
        self.cache = output_caches.cache()
        self.entries: list[tuple[int, int, bytes]] = []
        self.first = 0
        self.completed = 0
        self.epoch = 0
        self.ended = False

    def append(self, rng: Random, largest: int) -> None:
        chance = rng.random()
        if self.ended:
            return
        if chance < 0.15:
            self.epoch += rng.choice((1, 1, 2))
            kind, stamp, data = BARRIER, self.epoch, b"b"
        elif chance < 0.18:
            kind, stamp, data, self.ended = END, 0, b"e", True
        elif chance < 0.28:
            kind, stamp, data = WATERMARK, rng.randrange(-1000, 1000), b"w"
        else:
            kind, stamp, data = DATA, rng.randrange(1000), rng.randbytes(rng.randint(1, largest))
        self.entries.append((kind, stamp, data))
        self.cache.append(entry_of(kind, stamp, data))

    def complete(self, epoch: int) -> None:
        """The model's own: the barrier of an epoch and what came before it goes, or all but the end; the last watermark
        before that stays."""
        self.kept_mark: int | None = None
        if epoch > self.completed:
            self.completed = epoch
            stamps = [stamp if kind == BARRIER else 0 for kind, stamp, _ in self.entries]
            if epoch in stamps:
                self.drop_but_watermark(stamps.index(epoch) + 1)
            elif self.ended and self.entries:
                self.drop_but_watermark(len(self.entries) - 1)
        assert self.cache.complete(BARRIER, END, WATERMARK, epoch) == self.kept_mark

    def drop_but_watermark(self, count: int) -> None:
        marks = [at for at in range(count) if self.entries[at][0] == WATERMARK]
        last = self.entries[marks[-1]] if marks else None
        self.kept_mark = self.first + marks[-1] if marks else None
        self.drop(count)
        if last is not None:
            self.entries.insert(0, last)
            self.first -= 1

    def drop(self, count: int) -> None:
        del self.entries[:count]
        self.first += count

    def check(self) -> None:
        cache = self.cache
        assert [(entry[0], entry[1], b"".join(cache.parts(entry))) for entry in cache.entries] == self.entries
        assert (cache.first, cache.end) == (self.first, self.first + len(self.entries))
        for some in (0, len(self.entries) // 2, len(self.entries)):
            records = sum(kind == DATA for kind, _, _ in self.entries[some:])
            assert cache.unsent_records(cache.first + some) == records
        assert cache.in_memory == held_bytes(cache.entries)
        assert all(type(entry) is tuple for entry in cache.entries), "the garbage collector would look through them"


def entry_of(kind: int, stamp: int, data: bytes) -> Entry:
    """An entry as channels make them: signals take no memory."""
    if kind != DATA:
        return kind, stamp, 0, 0, data
    cut = len(data) // 3
    return kind, stamp, 1, len(data), data[:cut], memoryview(data)[cut:]


def check_all(output_caches: OutputCaches, caches: list[Modelled], directory: Path, files: bool = True) -> None:
    """`files`: look at the process's open files too, of which those of other tests may be thousands."""
    for cache in caches:
        cache.check()
    entries = [entry for cache in caches for entry in cache.cache.entries]
    assert output_caches.used == held_bytes(entries)
    assert output_caches.spilled_messages == sum(place is not None for place in places(entries))
    assert output_caches.spilled == sum(entry[3] for entry in entries if isinstance(entry[4], OnDisk))
    assert output_caches.used <= output_caches.memory_bytes
    assert output_caches.full == (output_caches.spilled >= output_caches.disk_bytes)
    if files:
        assert open_files(directory) == len(on_disk(entries))
    assert not os.listdir(directory), "a file with a name would remain"


@pytest.mark.parametrize("tens", range(8))
def test_caches_against_plain_lists(tens: int, tmp_path: Path) -> None:
    spilled = [run_random_acts(10 * tens + i, tmp_path) for i in range(10)]
    assert sum(map(bool, spilled)) >= 5, "too little goes to disk to test anything"


def run_random_acts(seed: int, tmp_path: Path) -> int:
    """Everything that can be done to caches; the most bytes that were on disk."""
    print(f"seed {seed}")
    rng = Random(seed)
    output_caches = OutputCaches(MEMORY, 4000, str(tmp_path))
    caches = [Modelled(output_caches) for _ in range(rng.randint(1, 4))]
    largest = rng.choice((3, 60, 2 * MEMORY))
    most_spilled = 0
    for turn in range(200):
        chosen = rng.choice(caches)
        act = rng.choices(("append", "complete", "spill", "clear"), (60, 5, 2, 0.3))[0]
        if act == "append":
            before = [cache.cache.in_memory for cache in caches]
            made_before = [len(cache.entries) for cache in caches]
            chosen.append(rng, largest)
            made = [cache.entries[n:] for cache, n in zip(caches, made_before, strict=True)]
            wanted = [
                n + sum(len(data) + module.ENTRY_BYTES for kind, _, data in new if kind == DATA)
                for n, new in zip(before, made, strict=True)
            ]
            after = [cache.cache.in_memory for cache in caches]
            gone = [i for i in range(len(caches)) if after[i] != wanted[i]]
            if sum(wanted) > MEMORY:
                assert len(gone) == 1, "one cache goes to disk"
                assert wanted[gone[0]] == max(wanted), "the largest"
                assert after[gone[0]] == 0
            else:
                assert not gone
        elif act == "complete":
            chosen.complete(rng.randint(0, chosen.epoch + 2) if rng.random() < 0.5 else chosen.epoch)
        elif act == "spill":
            chosen.cache.spill()
            assert chosen.cache.in_memory == 0
        elif act == "clear":
            chosen.drop(len(chosen.entries))
            chosen.cache.clear()
        check_all(output_caches, caches, tmp_path, files=turn % 20 == 19)
        most_spilled = max(most_spilled, output_caches.spilled)
    for cache in caches:
        if not cache.ended and rng.random() < 0.5:
            cache.epoch = max(cache.epoch, cache.completed) + 1
            cache.entries.append((BARRIER, cache.epoch, b"b"))
            cache.cache.append(entry_of(BARRIER, cache.epoch, b"b"))
            cache.complete(cache.epoch)
        else:
            cache.drop(len(cache.entries))
            cache.cache.clear()
        check_all(output_caches, caches, tmp_path)
    assert (output_caches.used, output_caches.spilled, open_files(tmp_path)) == (0, 0, 0)
    assert not any(cache.cache._slabs for cache in caches)
    assert (
        output_caches._slab_bytes == sum(size * len(free) for size, free in output_caches._slabs.items()) <= MEMORY / 2
    )
    return most_spilled


def test_slabs_are_used_again() -> None:
    output_caches = OutputCaches(1 << 20)
    cache = output_caches.cache()
    slabs: dict[int, bytearray] = {}  # the slabs too, or a new one might get the id of one that is gone
    for epoch in range(1, 40):
        for i in range(20):
            cache.append(entry_of(DATA, 0, bytes([epoch]) * (20 + i)))
        slabs |= {id(entry[4]): entry[4] for entry in cache.entries if isinstance(entry[4], bytearray)}
        cache.append(entry_of(BARRIER, epoch, b"b"))
        assert held(cache)[-2] == (DATA, 0, bytes([epoch]) * 39)
        cache.complete(BARRIER, END, WATERMARK, epoch - 1)
    assert len(slabs) < 20, f"{len(slabs)} slabs for two epochs of {20 * 30} bytes"


@pytest.mark.parametrize("seed", range(5))
def test_without_epochs_nothing_is_kept(seed: int) -> None:
    rng = Random(seed)
    cache = OutputCache()
    assert not cache.keeps
    waiting: list[bytes] = []
    for i in range(200):
        if rng.random() < 0.5:
            waiting.append(b"%d" % i)
            cache.append(entry_of(DATA, 0, waiting[-1]))
        elif waiting:
            assert b"".join(cache.parts(cache.entries[0])) == waiting.pop(0)
            cache.drop_before(cache.first + 1)
        assert len(cache.entries) == len(waiting) == cache.end - cache.first
    cache.clear()
    assert not cache.entries


# --- epochs -----------------------------------------------------------------------------------------------------


def filled(output_caches: OutputCaches, *what: tuple[int, int, bytes]) -> OutputCache:
    cache = output_caches.cache()
    for kind, stamp, data in what:
        cache.append(entry_of(kind, stamp, data))
    return cache


def held(cache: OutputCache) -> list[tuple[int, int, bytes]]:
    return [(entry[0], entry[1], b"".join(cache.parts(entry))) for entry in cache.entries]


@pytest.mark.parametrize("memory", [0, 10**6], ids=["spilled", "in memory"])
def test_a_sender_that_ended_before_the_epoch_keeps_only_its_end(memory: int, tmp_path: Path) -> None:
    output_caches = OutputCaches(memory, directory=str(tmp_path))
    cache = filled(output_caches, (DATA, 0, b"one"), (BARRIER, 4, b"b"), (DATA, 0, b"two"), (END, 0, b"e"))
    assert cache.complete(BARRIER, END, WATERMARK, 5) is None
    assert held(cache) == [(END, 0, b"e")]
    assert cache.first == 3, "its number stays"
    assert (output_caches.used, output_caches.spilled, cache.in_memory, open_files(tmp_path)) == (0, 0, 0, 0)
    cache.complete(BARRIER, END, WATERMARK, 6)
    assert held(cache) == [(END, 0, b"e")], "later epochs change nothing"
    assert cache.first == 3


def test_a_sender_that_ended_after_the_epoch_keeps_what_followed(tmp_path: Path) -> None:
    output_caches = OutputCaches(directory=str(tmp_path))
    cache = filled(output_caches, (DATA, 0, b"one"), (BARRIER, 4, b"b"), (DATA, 0, b"two"), (END, 0, b"e"))
    cache.complete(BARRIER, END, WATERMARK, 4)
    assert held(cache) == [(DATA, 0, b"two"), (END, 0, b"e")]
    assert output_caches.used == 3 + module.ENTRY_BYTES


@pytest.mark.parametrize("again", [0, 1, 2, 3])
def test_the_same_epoch_again_or_an_older_one_changes_nothing(again: int) -> None:
    """Above all not for a sender that has ended since: only its end would be kept."""
    output_caches = OutputCaches()
    cache = filled(output_caches, (BARRIER, 2, b"b"), (BARRIER, 3, b"b"), (DATA, 0, b"two"), (END, 0, b"e"))
    cache.complete(BARRIER, END, WATERMARK, 3)
    before = held(cache), cache.first, output_caches.used
    assert before == ([(DATA, 0, b"two"), (END, 0, b"e")], 2, 3 + module.ENTRY_BYTES)
    cache.complete(BARRIER, END, WATERMARK, again)
    assert (held(cache), cache.first, output_caches.used) == before
    assert cache.completed == 3


def test_an_epoch_that_was_passed_over_goes_with_the_next() -> None:
    output_caches = OutputCaches()
    cache = filled(
        output_caches, (DATA, 0, b"one"), (BARRIER, 1, b"b"), (DATA, 0, b"two"), (BARRIER, 3, b"b"), (DATA, 0, b"x")
    )
    cache.complete(BARRIER, END, WATERMARK, 3)
    assert held(cache) == [(DATA, 0, b"x")]


def test_records_stamped_like_an_epoch_are_no_barrier() -> None:
    cache = filled(OutputCaches(), (DATA, 5, b"one"), (BARRIER, 5, b"b"), (DATA, 5, b"two"))
    cache.complete(BARRIER, END, WATERMARK, 5)
    assert held(cache) == [(DATA, 5, b"two")]


def test_the_last_watermark_before_a_complete_epoch_stays_until_there_is_a_later_one() -> None:
    """A receiver that goes back must learn it, and it takes no memory."""
    output_caches = OutputCaches()
    cache = filled(output_caches, (DATA, 0, b"one"), (WATERMARK, 5, b"v"), (WATERMARK, 6, b"w"), (BARRIER, 1, b"b"))
    assert cache.complete(BARRIER, END, WATERMARK, 1) == 2, "it was entry 2"
    assert held(cache) == [(WATERMARK, 6, b"w")]
    assert (output_caches.used, cache.first, cache.end) == (0, 3, 4)
    for epoch in (2, 3):
        cache.append(entry_of(DATA, 0, b"two"))
        cache.append(entry_of(BARRIER, epoch, b"b"))
        before = cache.first
        assert cache.complete(BARRIER, END, WATERMARK, epoch) == before
        assert held(cache) == [(WATERMARK, 6, b"w")]
        assert cache.first == cache.end - 1 == before + 2
        assert output_caches.used == 0
    cache.append(entry_of(WATERMARK, 7, b"x"))
    cache.append(entry_of(BARRIER, 4, b"b"))
    cache.append(entry_of(END, 0, b"e"))
    cache.complete(BARRIER, END, WATERMARK, 4)
    assert held(cache) == [(WATERMARK, 7, b"x"), (END, 0, b"e")]
    cache.complete(BARRIER, END, WATERMARK, 5)
    assert held(cache) == [(WATERMARK, 7, b"x"), (END, 0, b"e")]


# --- disks ------------------------------------------------------------------------------------------------------


def test_files_are_few_however_many_channels_share_the_memory(tmp_path: Path) -> None:
    """The largest of many caches is small: a file for each would use up the process's descriptors."""
    output_caches = OutputCaches(10_000, directory=str(tmp_path))
    caches = [output_caches.cache() for _ in range(200)]
    rng = Random(1)
    data = [rng.randbytes(100) for _ in range(3000)]
    for i, payload in enumerate(data):
        caches[i % 200].append(entry_of(DATA, 0, payload))
    assert output_caches.spilled >= 280_000
    assert open_files(tmp_path) <= output_caches.spilled // 10_000 + 1
    for i, cache in enumerate(caches):
        assert [entry[2] for entry in held(cache)] == data[i::200]
    for cache in caches[:-1]:
        cache.clear()
    assert [entry[2] for entry in held(caches[-1])] == data[199::200]
    caches[-1].clear()
    assert (output_caches.used, output_caches.spilled, open_files(tmp_path)) == (0, 0, 0)


def test_files_are_few_however_little_memory_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory each message goes to disk as soon as it is there: a file for each would use up the descriptors."""
    monkeypatch.undo()
    output_caches = OutputCaches(0, directory=str(tmp_path))
    cache = output_caches.cache()
    for number in range(2000):
        cache.append((DATA, 0, 1, 4, number.to_bytes(4, "little")))
    assert output_caches.spilled_messages == 2000
    assert open_files(tmp_path) == 1
    assert [bytes(part) for entry in cache.entries for part in cache.parts(entry)] == [
        number.to_bytes(4, "little") for number in range(2000)
    ]


def test_the_room_of_old_epochs_is_free_while_newer_ones_wait(tmp_path: Path) -> None:
    output_caches = OutputCaches(1000, directory=str(tmp_path))
    cache = output_caches.cache()
    for epoch in range(1, 50):
        for _ in range(epoch % 7):
            cache.append(entry_of(DATA, 0, b"x" * 300))
        cache.append(entry_of(BARRIER, epoch, b"b"))
        cache.complete(BARRIER, END, WATERMARK, epoch - 5)
        files = on_disk(cache.entries)
        assert len(files) == open_files(tmp_path)
        # Each file may have an old part, and was begun with less than the memory's bytes in it.
        assert sum(os.fstat(file.fileno()).st_size for file in files.values()) <= output_caches.spilled + 2 * 1000


class State:
    """Everything that a failed spill must leave as it was."""

    def __init__(self, output_caches: OutputCaches, caches: list[OutputCache]) -> None:
        self.of = [
            output_caches.used,
            output_caches.spilled,
            [(held(cache), cache.first, cache.in_memory, places(cache.entries)) for cache in caches],
        ]


def assert_refused(output_caches: OutputCaches, caches: list[OutputCache], why: str) -> None:
    """What is appended stays in memory, and so does all else, while the sources wait. When that is too much, the error
    says what to do."""
    assert not output_caches.full
    payload = b"z" * (output_caches.memory_bytes + 1)
    wanted = [*held(caches[0]), (DATA, 0, payload), (DATA, 0, payload)]
    caches[0].append(entry_of(DATA, 0, payload))
    assert output_caches.full
    for failing in (lambda: caches[0].append(entry_of(DATA, 0, payload)), caches[0].spill):
        with pytest.raises(PenstockError) as caught:
            failing()
        message = str(caught.value)
        for part in (
            f"{output_caches.memory_bytes:,} bytes of memory",
            output_caches.directory,
            why,
            "Free space",
            "TMPDIR",
            "status()",
        ):
            assert part in message
        assert held(caches[0]) == wanted
        after = State(output_caches, caches).of
        assert caches[0].in_memory == held_bytes(caches[0].entries)
        assert output_caches.used == sum(cache.in_memory for cache in caches)
        del caught
    with pytest.raises(PenstockError):
        caches[0].spill()
    assert State(output_caches, caches).of == after


def assert_recovers(output_caches: OutputCaches, caches: list[OutputCache], directory: Path) -> None:
    """With room again all goes to disk, and comes back."""
    wanted = [held(cache) for cache in caches]
    for cache in caches:
        cache.spill()
    assert [held(cache) for cache in caches] == wanted
    assert output_caches.used == 0
    for cache in caches:
        cache.clear()
    assert not output_caches.full
    assert (output_caches.used, output_caches.spilled, open_files(directory)) == (0, 0, 0)


def two_caches(output_caches: OutputCaches) -> list[OutputCache]:
    """The first has entries on disk and in memory."""
    first = filled(output_caches, (DATA, 0, b"on disk"), (BARRIER, 1, b"b"))
    first.spill()
    for i in range(5):
        first.append(entry_of(DATA, i, b"%d" % i * 20))
    return [first, filled(output_caches, (DATA, 0, b"other"))]


def test_a_directory_that_is_gone_is_told_and_loses_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    output_caches = OutputCaches(MEMORY, directory=str(directory))
    caches = [
        filled(output_caches, (DATA, 0, b"one"), (BARRIER, 1, b"b"), (DATA, 0, b"two")),
        filled(output_caches, (DATA, 0, b"other")),
    ]
    directory.rmdir()
    assert_refused(output_caches, caches, "No such file or directory")
    directory.mkdir()
    assert_recovers(output_caches, caches, directory)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to write more into any file of this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 7, 8, 50, 107, 300])
def test_a_disk_that_takes_no_more_is_told_and_loses_nothing(room: int, tmp_path: Path) -> None:
    output_caches = OutputCaches(MEMORY, directory=str(tmp_path))
    caches = two_caches(output_caches)
    with files_of_at_most(room):
        assert_refused(output_caches, caches, os.strerror(errno.EFBIG))
    assert open_files(tmp_path) == 1, "of what was on disk before"
    assert_recovers(output_caches, caches, tmp_path)


def test_writes_that_take_a_part_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do when a signal comes, or on some network disks."""
    whole = os.pwrite
    monkeypatch.setattr(module.os, "pwrite", lambda fd, data, at: whole(fd, memoryview(data)[:3], at))
    output_caches = OutputCaches(MEMORY, directory=str(tmp_path))
    assert_recovers(output_caches, two_caches(output_caches), tmp_path)


def test_many_small_messages_count_for_more_than_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a million messages of one byte would be a megabyte: they go to disk by their number, and when too many
    are there too, the sources wait."""
    monkeypatch.setattr(module, "ENTRY_BYTES", 300)
    monkeypatch.setattr(module, "DISK_MESSAGES", 40)
    output_caches = OutputCaches(10 * 301, directory=str(tmp_path))
    cache = output_caches.cache()
    for i in range(10):
        cache.append(entry_of(DATA, i, b"x"))
    assert not output_caches.spilled_messages
    for i in range(34):
        cache.append(entry_of(DATA, i, b"x"))
    assert output_caches.spilled_messages == 44
    assert output_caches.full
    cache.clear()
    assert not output_caches.full
    assert (output_caches.used, output_caches.spilled, output_caches.spilled_messages) == (0, 0, 0)
