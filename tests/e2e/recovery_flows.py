"""Flows whose output is known beforehand to the last record, for tests and campaigns that kill their processes.

Each reads made-up records at a pace, passes exchanges, and writes to committing sinks (Files and Collect) in a form in
which a record that is lost, doubled, out of order or made from wrong state shows: counters are written at every step,
so a word's lines must be 1, 2, 3 ... in this order. What must come out is worked out by a plain loop over the same
function of the same indices.

Functions that travel to workers are made inside other functions, so that workers need not find this module.
"""

from __future__ import annotations

import gzip
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.runtime.sinks.base import Sink

WORDS = 1000
_MAIN_FLOW = Path(__file__).with_name("main_flow.py")
NEEDLE = "needle"
LARGE_BYTES, LARGE_EVERY = 5_000_000, 20_000


@dataclass
class RecoveryFlow:
    """A flow, and what it must come to. `check()` is to be called when the job has finished; it raises AssertionError.
    `sources`: the names of its sources."""

    flow: ps.Flow
    directory: Path
    check: Callable[[], None]
    sources: tuple[str, ...] = ("source",)
    collected: ps.sinks.Collect | None = None
    records: int = 0
    more: dict[str, Any] = field(default_factory=dict)


def word_of() -> Callable[[int], str]:
    """A fixed vocabulary with skew: index -> word; the commonest is some 10 % of all."""

    def word(i: int) -> str:
        share = (i * 2654435761 & 0xFFFFFFFF) / 2**32
        return f"w{int(WORDS * share**3)}"

    return word


def parts(directory: Path) -> dict[int, list[str]]:
    """The lines of each task's part files, in the order of the parts' names."""
    lines: dict[int, list[str]] = defaultdict(list)
    for path in sorted(directory.glob("part-*")):
        index = int(path.name.split("-")[1].split(".")[0])
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.name.endswith(".gz") else data).decode()
        assert not text or text.endswith("\n"), f"{path.name} ends within a line"
        lines[index] += text.splitlines()
    return lines


def hidden_files(directory: Path) -> list[str]:
    """What a finished job must not leave."""
    return sorted(path.name for path in directory.glob(".*")) if directory.exists() else []


def differences(what: str, found: Counter[Any], expected: Counter[Any]) -> str:
    """Lost and doubled records in words; empty when there are none."""
    lost, more = expected - found, found - expected
    if not lost and not more:
        return ""
    return (
        f"{what}: {sum(lost.values()):,} of {sum(expected.values()):,} lost, {sum(more.values()):,} too many; "
        f"lost e.g. {list(lost)[:5]}, too many e.g. {list(more)[:5]}"
    )


def counted_up(what: str, entries: Iterator[tuple[str, int]], totals: Counter[str]) -> None:
    """The numbers that come with each key must be 1, 2, 3 ... up to its total."""
    last: Counter[str] = Counter()
    for key, number in entries:
        assert number == last[key] + 1, f"{what}: {key!r} has number {number} after {last[key]}"
        last[key] = number
    problem = differences(what, last, totals)
    assert not problem, problem


def files_sink(directory: Path, seed: int, **options: Any) -> Sink:
    """A Files sink, of one of the ways to cut parts; by the seed."""
    seconds = (0.0, 60.0, 1.5)[seed % 3]
    compression: Any = "gzip" if seed % 4 == 3 else None
    return ps.sinks.Files(directory, part_s=seconds, compression=compression, **options)


def word_count(name: str, directory: Path, records: int, rate: float, seed: int = 0) -> RecoveryFlow:
    """Lines of text -> words -> counts by word, each count written."""
    word = word_of()

    def line(i: int) -> str:
        return word(i) if i // 8 % 2 else f"{word(i)} {word(i + 1).upper()}"

    flow = ps.Flow(name)
    sampled = ps.sinks.Collect()
    counts = (
        flow.read(ps.sources.Generator(line, rate=rate, limit=records), name="source")
        .flat_map(str.split)
        .key_by(str.lower)
        .count(emit="every")
    )
    counts.write(files_sink(directory, seed))
    counts.filter(lambda pair: pair[1] % 50 == 0).write(sampled)

    def check() -> None:
        totals = Counter(text for i in range(records) for text in line(i).lower().split())
        for index, lines in parts(directory).items():
            for text in lines:
                assert text.count("\t") == 1, f"task {index} wrote {text!r}"
        counted_and_sampled(directory, sampled, totals)

    return RecoveryFlow(flow, directory, check, collected=sampled, records=records)


def counted_and_sampled(directory: Path, sampled: ps.sinks.Collect, totals: Counter[str]) -> None:
    """Files have each key with 1, 2, 3 ... up to its total, and the Collect sink has every fiftieth of these."""
    entries = (text.split("\t") for lines in parts(directory).values() for text in lines)
    counted_up("Files", ((key, int(number)) for key, number in entries), totals)
    expected = Counter((key, n) for key, total in totals.items() for n in range(50, total + 1, 50))
    problem = differences("Collect", Counter(sampled.records()), expected)
    assert not problem, problem


def grep(name: str, directory: Path, records: int, rate: float, seed: int = 0) -> RecoveryFlow:
    """Lines, of which some hold a word: no state but that of source and sinks. Some lines are far larger than a ring
    is at first, and than what a channel may have under way."""
    word = word_of()
    large = "x" * LARGE_BYTES

    def line(i: int) -> str:
        tail = large if i % LARGE_EVERY == 5 else word(i + 7)
        return f"{i} {word(i)} {NEEDLE if i % 7 == 3 or i % 1000 < 20 else 'hay'} {tail}"

    flow = ps.Flow(name)
    sampled = ps.sinks.Collect()
    found = (
        flow.read(ps.sources.Generator(line, rate=rate, limit=records), name="source")
        .rebalance()
        .filter(lambda text: NEEDLE in text)
    )
    found.write(files_sink(directory, seed))
    found.filter(lambda text: text.startswith("1")).write(sampled)

    def check() -> None:
        expected = Counter(text for i in range(records) if NEEDLE in (text := line(i)))
        written = parts(directory)
        problem = differences("Files", Counter(text for lines in written.values() for text in lines), expected)
        assert not problem, problem
        splits = max(written) + 1
        for index, lines in written.items():
            last: dict[int, int] = {}
            for i in (int(text.split()[0]) for text in lines):
                assert i > last.get(i % splits, -1), f"task {index}: record {i} came after {last[i % splits]}"
                last[i % splits] = i
        expected = Counter(text for text in expected if text.startswith("1"))
        problem = differences("Collect", Counter(sampled.records()), expected)
        assert not problem, problem

    return RecoveryFlow(flow, directory, check, collected=sampled, records=records)


def timers(name: str, directory: Path, records: int, rate: float, seed: int = 0) -> RecoveryFlow:
    """A ProcessFunction that says by timers how many records each key has had since the last time, and at the end its
    state."""
    word = word_of()

    class Tallies(ps.ProcessFunction):
        """State of a key: [records, records since the last tally, tallies, when the timer is due or None]."""

        def process(self, ctx: ps.ProcessContext, key: str, record: tuple[str, int]) -> None:
            state = ctx.get() or [0, 0, 0, None]
            state[0] += 1
            state[1] += 1
            if record[1] % 31 == 0 and state[3] is not None:
                ctx.cancel_timer(at_ms=state[3] if record[1] % 2 else None)
                state[3] = None
            if state[3] is None:
                state[3] = ctx.set_timer(after_s=0.01 + record[1] % 50 / 100)
            ctx.set(state)

        def on_timer(self, ctx: ps.ProcessContext, key: str, at_ms: int) -> list[Any]:
            state = ctx.get()
            assert state is not None, f"{key}: a timer of {at_ms} without state"
            assert state[3] == at_ms, f"{key}: a timer of {at_ms} where {state[3]} was set"
            assert state[1] > 0, f"{key}: a timer without records"
            since, state[1], state[3] = state[1], 0, None
            state[2] += 1
            ctx.set(state)
            return [("tally", key, state[2], since)]

        def finish(self, ctx: ps.ProcessContext) -> list[Any]:
            return [("state", key, state) for key, state in ctx.state.items()]

    flow = ps.Flow(name)
    sampled = ps.sinks.Collect()
    tallies = (
        flow.read(ps.sources.Generator(lambda i: (word(i), i), rate=rate, limit=records), name="source")
        .key_by(lambda record: record[0])
        .process(Tallies())
    )
    tallies.filter(lambda record: record[0] == "tally").write(files_sink(directory, seed))
    tallies.filter(lambda record: record[0] == "state").write(sampled)

    def check() -> None:
        totals = Counter(map(word, range(records)))
        sums: Counter[str] = Counter()
        numbers: Counter[str] = Counter()
        for lines in parts(directory).values():
            for text in lines:
                _, key, number, since = text.split("\t")
                assert int(number) == numbers[key] + 1, f"{key}: tally {number} after {numbers[key]}"
                numbers[key] += 1
                sums[key] += int(since)
        problem = differences("tallies in Files", sums, totals)
        assert not problem, problem
        states = [(key, state) for _, key, state in sampled.records()]
        assert len(states) == len(dict(states)), "the state of a key came twice"
        assert dict(states) == {key: [totals[key], 0, numbers[key], None] for key in totals}

    return RecoveryFlow(flow, directory, check, collected=sampled, records=records)


def to_all(name: str, directory: Path, records: int, rate: float, seed: int = 0) -> RecoveryFlow:
    """Records that go to each of five tasks, so that several of them run in one worker. Some are far larger than a
    message is at first."""
    word = word_of()
    tasks, sources = 5, 2
    large = "x" * (LARGE_BYTES // 20)

    def line(i: int) -> str:
        return f"{i} {large if i % LARGE_EVERY == 5 else word(i)}"

    flow = ps.Flow(name)
    sampled = ps.sinks.Collect()
    source = flow.read(ps.sources.Generator(line, rate=rate, limit=records), name="source", parallelism=sources)
    every = source.broadcast().map(lambda text: text, name="every", parallelism=tasks)
    every.write(files_sink(directory, seed), parallelism=tasks)
    every.filter(lambda text: text.endswith("7"), parallelism=tasks).write(sampled)

    def check() -> None:
        expected = Counter(line(i) for i in range(records))
        written = parts(directory)
        assert sorted(written) == list(range(tasks))
        for index, lines in written.items():
            problem = differences(f"Files, task {index}", Counter(lines), expected)
            assert not problem, problem
            last: dict[int, int] = {}
            for i in (int(text.split()[0]) for text in lines):
                assert i > last.get(i % sources, -1), f"task {index}: record {i} came after {last[i % sources]}"
                last[i % sources] = i
        sevens = Counter({text: tasks for text in expected if text.endswith("7")})
        problem = differences("Collect", Counter(sampled.records()), sevens)
        assert not problem, problem

    return RecoveryFlow(flow, directory, check, collected=sampled, records=records)


def few(name: str, directory: Path, records: int, rate: float, seed: int = 0) -> RecoveryFlow:
    """Records of which most are equal: one constant and three words. However often a process dies while some task has
    one of them, none is to be taken for a record that kills, neither where such records are skipped nor where one would
    fail the job."""
    texts = ("tick", "the", "tick", "be", "tick", "to")

    flow = ps.Flow(name)
    sampled = ps.sinks.Collect()
    source = flow.read(ps.sources.Generator(lambda i: texts[i % 6], rate=rate, limit=records), name="source")
    ticks = source.filter(lambda text: text == "tick", name="ticks").rebalance()
    words = source.filter(lambda text: text != "tick", name="words").rebalance()
    counts = (
        ticks.map(str.upper, name="constant", on_error="skip")
        .union(words.map(str.upper, name="three"))
        .key_by(str.lower)
        .count(emit="every", on_error="skip")
    )
    counts.write(files_sink(directory, seed))
    counts.filter(lambda pair: pair[1] % 50 == 0).write(sampled)

    def check() -> None:
        counted_and_sampled(directory, sampled, Counter(texts[i % 6] for i in range(records)))

    return RecoveryFlow(flow, directory, check, collected=sampled, records=records)


def in_main(name: str, directory: Path, records: int, rate: float, seed: int = 0) -> RecoveryFlow:
    """Records, keys and state of dataclasses and enums that the main script defines (tests/e2e/main_flow.py), anew for
    each run, as a cell of a notebook would that is run again."""
    main = vars(sys.modules["__main__"])
    exec(compile(_MAIN_FLOW.read_text(), str(_MAIN_FLOW), "exec"), main)
    trade_of, check_trades = main["trade_of"], main["check_trades"]
    assert trade_of.__module__ == "__main__"
    flow, quotes, kinds = main["trade_flow"](name, records, rate, files_sink(directory, seed))

    def check() -> None:
        keys = Counter(trade_of(i).key for i in range(records))
        totals = Counter({f"{key.name} {key.kind.name}": total for key, total in keys.items()})
        entries = (text.split("\t") for lines in parts(directory).values() for text in lines)
        counted_up("Files", ((key, int(number)) for key, number in entries), totals)
        check_trades(records, quotes.records(), kinds.records())

    return RecoveryFlow(flow, directory, check, collected=quotes, records=records)


FLOWS: dict[str, Callable[..., RecoveryFlow]] = {
    "wordcount": word_count,
    "grep": grep,
    "timers": timers,
    "to all": to_all,
    "few": few,
    "main": in_main,
}
