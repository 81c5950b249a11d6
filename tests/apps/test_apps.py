"""Each application in this process, its answer against plain Python's."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest

import penstock as ps
from penstock.apps import grep, sol, text, throughput, wordcount
from penstock.apps.app import Cycle, described_rate
from penstock.apps.catalog import APPS
from penstock.apps.latest import Latest
from penstock.runtime.sinks import Collect, SinkContext
from penstock.runtime.status import JobStatus, OperatorStatus
from tests.apps.parsed import parsed

LINES = text.packaged_path().read_text(encoding="utf-8").splitlines()


def words(lines: list[str]) -> Counter[str]:
    return Counter(word.lower() for line in lines for word in line.split())


def options(app: str, *arguments: str) -> SimpleNamespace:
    return parsed(APPS[app], *arguments)


# --- the text --------------------------------------------------------------------------------------------------


def test_the_text_is_part_of_the_package() -> None:
    data = resources.files("penstock.apps") / "data"
    assert (data / "public_domain.txt").is_file()
    assert "public domain" in (data / "README.md").read_text(encoding="utf-8")
    assert len(LINES) > 100
    assert all(line == line.rstrip() for line in LINES)


def test_the_packaged_text_serves_where_there_is_no_novel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_NOVEL", Path("no-such-novel.txt"))
    assert text.default_path() == text.packaged_path()


def test_a_novel_beside_the_working_directory_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "novel.txt").write_text("It was the best of times\n")
    monkeypatch.setattr(text, "_NOVEL", Path("..", "novel.txt"))
    monkeypatch.chdir(tmp_path / "work")
    assert text.default_path() == tmp_path / "novel.txt"


def test_lines_are_read_as_a_job_reads_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\ntwo\x0cthree\nlast")
    assert text.read_lines([str(tmp_path / "*.txt")]) == ["one", "", "two\x0cthree", "last"]


def test_without_options_a_small_text_comes_several_whole_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "default_path", text.packaged_path)
    opened = text.open_text(options("wordcount"), show_rate=1_000, show_s=1.5)
    assert opened.passes == -(-1_500 // len(LINES))
    assert isinstance(opened.source, ps.sources.Generator)
    assert opened.source.limit == opened.passes * len(LINES)


@pytest.mark.parametrize(
    ("arguments", "bounded", "passes"),
    [
        ((), True, 1),
        (("--rate", "max"), True, 1),
        (("--rate", "100"), False, None),
        (("--rate", "100", "--duration", "3"), True, None),
        (("--rate", "100", "--duration", "0"), False, None),
        (("--passes", "3"), True, 3),
        (("--rate", "max", "--passes", "3"), True, 3),
    ],
)
def test_when_the_text_ends(arguments: tuple[str, ...], bounded: bool, passes: int | None) -> None:
    given = options("wordcount", "--input", str(text.packaged_path()), *arguments)
    opened = text.open_text(given, show_rate=5_000, show_s=3.0)
    assert opened.source.bounded is bounded
    assert opened.passes == passes


def test_two_ends_are_one_too_many() -> None:
    with pytest.raises(ps.FlowError, match="give one of them"):
        text.open_text(options("wordcount", "--passes", "2", "--duration", "3"))


def test_an_empty_text_cannot_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ps.FlowError, match="empty"):
        text.open_text(options("wordcount", "--input", str(tmp_path / "empty.txt"), "--passes", "2"))


# --- the applications ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 1000])
def test_wordcount(parallelism: int, batch_size: int) -> None:
    flow = wordcount.topology(ps.sources.Memory([]), ps.sinks.Collect())
    out = ps.testing.run(flow, LINES, parallelism=parallelism, batch_size=batch_size)
    assert dict(out["counts"]) == words(LINES)


def test_wordcount_as_the_command_builds_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("To be or\nnot to be\n")
    (tmp_path / "b.txt").write_text("BE\n\n")
    built = APPS["wordcount"].build(options("wordcount", "--input", str(tmp_path / "*.txt"), "--passes", "2"))
    out = ps.testing.run(built.flow)
    assert dict(out["counts"]) == {"to": 4, "be": 6, "or": 2, "not": 2}


@pytest.mark.parametrize("pattern", ["string", "^And", "a{3,}", "[Gg]reat(er)?"])
def test_grep(pattern: str) -> None:
    flow = grep.topology(ps.sources.Memory([]), pattern, ps.sinks.Console(), ps.sinks.Collect())
    out = ps.testing.run(flow, LINES, parallelism=2, batch_size=7)
    import re

    expected = [line for line in LINES if re.search(pattern, line)]
    assert Counter(out["matches"]) == Counter(expected)
    assert dict(out["number"]) == ({1: len(expected)} if expected else {})


def test_the_default_pattern_matches_the_packaged_text() -> None:
    assert any(grep.PATTERN in line for line in LINES)


def test_grep_refuses_what_is_no_expression() -> None:
    with pytest.raises(ps.FlowError, match="not a regular expression"):
        grep.topology(ps.sources.Memory([]), "(", ps.sinks.Console(), ps.sinks.Collect())


def test_sol_hands_every_message_through_all_levels() -> None:
    made = sol.messages(100)
    assert len(made) == len(set(made)) == 100
    assert all(len(message) == 100 and set(message) <= set("012345678") for message in made)
    flow = sol.topology(ps.sources.Generator(Cycle(made), limit=1_000), levels=5, tasks=3)
    out = ps.testing.run(flow, batch_size=10)
    assert Counter(out["sink"]) == Counter(dict.fromkeys(made, 10))
    assert [name for name in flow.graph.ordered() if name.startswith("bolt")] == [f"bolt-{i}" for i in range(1, 6)]
    assert len(flow.plan(2).chains) == 6  # the spout and five bolts: shuffles are never fused


def test_sol_with_fewer_possible_messages_than_wanted() -> None:
    assert len(sol.messages(1)) == 9


def test_throughput_hands_every_record_over() -> None:
    made = throughput.records(20)
    assert len({identity for identity, _ in made}) == len(made)
    assert all(len(i) == 5 and len(value) == 20 and set(i + value) <= set("abcdefgh") for i, value in made)
    flow = throughput.topology(ps.sources.Generator(Cycle(made), limit=2_500))
    out = ps.testing.run(flow, parallelism=2, batch_size=100)
    assert Counter(out["sink"]) == Counter(made[i % len(made)] for i in range(2_500))


def test_every_application_builds_with_no_options_and_says_what_comes_next() -> None:
    for name, app in APPS.items():
        built = app.build(options(name))
        assert built.flow.name == name
        assert built.flow.plan(2).tasks
        assert built.intro
        assert all("penstock" in step or "sort" in step for step in built.next_steps)


# --- what they share -------------------------------------------------------------------------------------------


def test_latest_passes_on_one_record_a_key_and_only_at_the_end() -> None:
    reported: list[tuple[str, list[object]]] = []
    sink = Latest(ps.sinks.Collect())
    writer = sink.writer(SinkContext("counts", 0, 1, lambda channel, records: reported.append((channel, records))))
    writer.write([("a", 1), ("b", 1)])
    writer.write([("a", 2)])
    writer.flush()
    assert reported == []
    writer.finish()
    assert reported == [(sink.channel, [("a", 2), ("b", 1)])]
    writer.close(failed=False)


def test_rates_for_people() -> None:
    assert described_rate(None) == described_rate("max") == "as fast as possible"
    assert described_rate("5000") == "5,000 records/s"
    assert described_rate("5000:10s,60000") == "5,000 records/s for 10 s, then 60,000 records/s"


@pytest.mark.parametrize("app", ["wordcount", "grep"])
def test_keys_in_the_url_of_an_output_are_not_printed(app: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collect, "records", lambda sink: [])
    given = options(app, "--input", str(text.packaged_path()), "--output", "s3://KEY:SECRET@bucket/out?region=eu")
    prepared = APPS[app].build(given)
    status = JobStatus(name="job", state="FINISHED", records_read=1, operators={"words": OperatorStatus(records_out=1)})
    said = [prepared.intro, *prepared.results(status, 1.0), *prepared.next_steps, repr(prepared.flow)]
    assert "s3://bucket/out" in " ".join(said)
    assert not any(word in line for line in said for word in ("KEY", "SECRET", "region=eu"))
    assert not any("part-" in line for line in said), "no command that reads a folder of this machine"


def test_the_command_that_sorts_what_was_written_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "my counts"
    prepared = wordcount.APP.build(options("wordcount", "--input", str(text.packaged_path()), "--output", str(folder)))
    assert prepared.next_steps == (f"sort -k2 -n -r '{folder}'/part-* | head",)
