"""Nexmark as the command builds it: events of a rate and a seed, one query, its results and a few of them to see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.apps import cli
from penstock.apps.few import SHOWN, Few, told
from penstock.apps.nexmark import app
from penstock.apps.nexmark.events import Events
from penstock.apps.nexmark.queries import QUERIES
from penstock.runtime.errors import FlowError
from penstock.runtime.sinks import SinkContext
from penstock.runtime.status import JobStatus, Latency, OperatorStatus
from tests.apps.nexmark_reference import answers, settled
from tests.apps.parsed import parsed


def options(*arguments: str) -> SimpleNamespace:
    return parsed(app.APP, *arguments)


@pytest.mark.parametrize("query", ["q2", "q5", "q9"])
@pytest.mark.parametrize("parallelism", [1, 2, 4])
def test_a_query_gives_its_reference_from_several_source_tasks(query: str, parallelism: int) -> None:
    events = list(Events(3, 2_000, rate=100, skew_ms=500))
    source = ps.sources.Generator(Events(3, rate=100, skew_ms=500), limit=2_000)
    flow = app.topology(source, query, ps.sinks.Collect(), skew_ms=500)
    results = ps.testing.run(flow, parallelism=parallelism, batch_size=10)["results"]
    assert settled(query, results) == answers(query, events)


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_can_be_built_and_says_what_it_asks(query: str) -> None:
    built = app.APP.build(options("--query", query, "--rate", "max", "--events", "50"))
    assert built.flow.plan(2).tasks
    assert built.intro.startswith(f"{query}, ")


def test_two_ends_are_one_too_many() -> None:
    with pytest.raises(FlowError, match="give one of them"):
        app.APP.build(options("--events", "5", "--duration", "5"))


def test_the_last_few_results_of_each_task_are_kept_and_come_back_after_a_failure() -> None:
    reported: list[Any] = []
    context = SinkContext("results", 0, 1, lambda channel, records: reported.extend(records))
    sink = Few(ps.sinks.Collect(), 3)
    writer = sink.writer(context)
    writer.write([1, 2, 3, 4])
    assert writer.prepare(1) is None
    saved = writer.state()
    writer.write([5])
    again = sink.writer(context)
    again.restore(1, [saved])
    again.write([6])
    again.finish()
    assert reported == [3, 4, 6]


def test_what_is_told_of_results() -> None:
    results = OperatorStatus(records_in=30)
    status = JobStatus(name="job", state="FINISHED", operators={"results": results})
    assert list(told(status, 2.0, "results", "results")) == ["30 results, 15 a second"]
    status = JobStatus(
        name="job", state="FINISHED", operators={"results": results.changed(latency_ms=Latency(1.0, 2.0))}
    )
    assert "p50 1.0 ms, p99 2.0 ms" in list(told(status, 0.0, "results", "results"))[1]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--query", "q1", "--rate", "max", "--events", "2000", "--seed", "4"]
    assert cli.main(["run", "nexmark", *arguments, "--local", "--no-progress", "--epoch-interval", "0"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"{answers('q1', list(Events(4, 2000))).total():,} results of q1, ")
    assert sum(line.startswith("  {") for line in out) == SHOWN
