"""The main job: words counted equal collections.Counter, whatever the workers and the parallelism."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import penstock as ps

WORDS = "To be or not to be that is THE question whether 'tis nobler in the mind".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of lines with words in both cases, one of them compressed, one without a final newline."""
    directory = tmp_path_factory.mktemp("corpus")
    lines = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1 + i % 9)) for i in range(40_000)]
    (directory / "a.txt").write_text("\n".join(lines[:30_000]) + "\n")
    (directory / "b.txt").write_text("\n".join(lines[30_000:35_000]))
    with gzip.open(directory / "c.txt.gz", "wt") as packed:
        packed.write("\n".join(lines[35_000:]) + "\n")
    return directory


@pytest.fixture(scope="module")
def expected(corpus: Path) -> Counter[str]:
    text = (corpus / "a.txt").read_text() + (corpus / "b.txt").read_text() + "\n"
    with gzip.open(corpus / "c.txt.gz", "rt") as packed:
        text += packed.read()
    return Counter(text.lower().split())


def count_words(name: str, corpus: Path, **run: Any) -> dict[str, int]:
    flow = ps.Flow(name)
    counts = ps.sinks.Collect()
    (
        flow.read(ps.sources.TextFiles(str(corpus / "*")))
        .flat_map(str.split)
        .key_by(str.lower)
        .count(emit="final")
        .write(counts)
    )
    ps.run(flow, **run).wait(progress=False)
    records = counts.records()
    assert len({word for word, _ in records}) == len(records), "a word was counted in two places"
    return dict(records)


@pytest.mark.parametrize(("workers", "parallelism"), [(1, 3), (2, 1), (4, 8)])
def test_counts_equal_counter(corpus: Path, expected: Counter[str], workers: int, parallelism: int) -> None:
    counted = count_words(f"wc-{workers}-{parallelism}", corpus, workers=workers, parallelism=parallelism, local=True)
    assert counted == expected


def test_running_updates_end_at_the_totals(cluster: str, corpus: Path, expected: Counter[str]) -> None:
    flow = ps.Flow("wc-updates")
    updates = ps.sinks.Collect()
    (
        flow.read(ps.sources.TextFiles(str(corpus / "*")))
        .flat_map(str.split)
        .key_by(str.lower)
        .count()
        .write(updates, parallelism=1)
    )
    ps.run(flow, workers=2).wait(progress=False)
    last: dict[str, int] = {}
    for word, n in updates.records():
        assert n > last.get(word, 0), "updates of a key come in order"
        last[word] = n
    assert last == expected


def test_files_hold_every_word_once(corpus: Path, expected: Counter[str], tmp_path: Path) -> None:
    flow = ps.Flow("wc-files")
    (
        flow.read(ps.sources.TextFiles(str(corpus / "*")))
        .flat_map(str.split)
        .key_by(str.lower)
        .count(emit="final")
        .write(ps.sinks.Files(str(tmp_path / "counts")))
    )
    ps.run(flow, workers=2, local=True).wait(progress=False)
    parts = sorted((tmp_path / "counts").iterdir())
    assert [part.name for part in parts] == ["part-00000.txt", "part-00001.txt"]
    lines = [line.split("\t") for part in parts for line in part.read_text().splitlines()]
    assert {word: int(n) for word, n in lines} == expected
    assert len(lines) == len(expected)
