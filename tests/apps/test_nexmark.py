"""Every Nexmark query beside its reference: with 1, 2 and 4 tasks, and with events that are out of order."""

from __future__ import annotations

import random
from typing import Any

import pytest

import penstock as ps
from penstock.apps.nexmark.events import Events
from penstock.apps.nexmark.queries import QUERIES
from tests.apps.nexmark_reference import answers, settled

SKEW_MS = 3000
EVENTS = {tasks: [Events(seed=tasks, rate=60)(n) for n in range(3000)] for tasks in (1, 2, 4)}


def shuffled(events: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """The events in another order, of which none is more than the skew behind one before it."""
    rng = random.Random(seed)
    return sorted(events, key=lambda event: event["date_time"] + rng.uniform(0, 0.99 * SKEW_MS))


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("parallelism", [1, 2, 4])
def test_a_query_gives_its_reference(query: str, parallelism: int) -> None:
    events = EVENTS[parallelism]
    flow = ps.Flow(query, parallelism=parallelism)
    read = flow.read(ps.sources.Memory([]), name="events", parallelism=1)
    marked = read.watermark("date_time", out_of_orderness_s=SKEW_MS / 1000)
    QUERIES[query](marked).write(ps.sinks.Collect(), name="out")
    given = shuffled(events, parallelism)
    results = ps.testing.run(flow, given, parallelism=parallelism, batch_size=7 * parallelism)["out"]
    found, expected = settled(query, results), answers(query, events)
    assert expected, "this many events have no answer, so they show nothing"
    lost, more = list((expected - found).items())[:3], list((found - expected).items())[:3]
    assert found == expected, f"lost {lost}, too much {more}"
