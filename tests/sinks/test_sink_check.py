"""The trial of sinks: it passes those of Penstock, and finds what is wrong with others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.runtime.sinks.base import Committable, Sink, SinkCommitter, SinkContext, SinkWriter

SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("settings", "every_s"), [({}, 0.0), ({"part_s": 0}, 0.0), ({"part_bytes": 30}, 3600.0)])
def test_files_pass(seed: int, settings: dict[str, Any], every_s: float, tmp_path: Path) -> None:
    sink = ps.sinks.Files(tmp_path, **settings)
    sink.commit_interval_s = every_s
    ps.testing.check_sink(sink, lambda: [line for part in tmp_path.glob("part-*") for line in lines(part)], seed=seed)


def lines(part: Path) -> list[str]:
    return part.read_text().splitlines()


class Place(Sink):
    """A place in memory, with one thing that may be wrong."""

    guarantee = "exactly once"
    takes_back = False

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.there: list[str] = []
        self.done: set[tuple[int, int]] = set()

    def writer(self, context: SinkContext) -> SinkWriter:
        return PlaceWriter(self)

    def committer(self, context: SinkContext) -> SinkCommitter:
        return PlaceCommitter(self)


class PlaceWriter(SinkWriter):
    def __init__(self, sink: Place) -> None:
        self.sink = sink
        self.records: list[str] = []

    def write(self, records: list[Any]) -> None:
        if self.sink.wrong == "writes at once":
            self.sink.there += records
        else:
            self.records += records

    def prepare(self, epoch: int) -> Any:
        records, self.records = self.records, []
        if self.sink.wrong == "drops":
            del records[:1]
        if self.sink.wrong == "commits when it prepares":
            self.sink.there += records
            return None
        return records or None


class PlaceCommitter(SinkCommitter):
    def __init__(self, sink: Place) -> None:
        self.sink = sink

    def commit(self, committables: list[Committable]) -> None:
        for one in committables[:1] if self.sink.wrong == "commits only the first" else committables:
            if (one.epoch, one.index) not in self.sink.done or self.sink.wrong == "commits again":
                self.sink.done.add((one.epoch, one.index))
                self.sink.there += one.data


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sink_that_keeps_the_rules_passes(seed: int) -> None:
    place = Place()
    ps.testing.check_sink(place, lambda: place.there, seed=seed)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("writes at once", "readers see record .*: of an epoch that is not complete"),
        ("commits when it prepares", "readers see record .*: of an epoch that is not complete"),
        ("drops", "readers do not see record"),
        ("commits only the first", "readers do not see record"),
        ("commits again", "readers see record .*: twice"),
    ],
)
def test_each_wrong_turn_is_found(wrong: str, told: str) -> None:
    def all_seeds() -> None:
        for seed in SEEDS:
            place = Place(wrong)
            show: Callable[[], list[str]] = lambda place=place: place.there  # type: ignore[misc]
            ps.testing.check_sink(place, show, seed=seed)

    with pytest.raises(AssertionError, match=told):
        all_seeds()
