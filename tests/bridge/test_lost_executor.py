"""A micro-batch on RayDP of which an executor is killed: the answer is exact, and only what was lost runs again."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock as ps
from penstock.bridge.forms import RangeForm, as_columns, as_records, range_form
from penstock.bridge.operation import Operations
from penstock.bridge.session import Session, SparkOptions, open_session
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.records.batch import KeyedBatch
from tests.e2e.processes import wait_gone, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

NUMBERS = 400
STOPS = 60  # the record of each executor at which its function waits
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def session(cluster: str) -> Iterator[Session]:
    """A RayDP session of two executors with a core each."""
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        pytest.skip("there is no Java here")
    pytest.importorskip("raydp", reason="RayDP is not installed")
    import ray

    group = ray.util.placement_group([{"CPU": 1, "memory": 1 << 30}] * 2)
    try:
        assert group.wait(60)
        options = SparkOptions(
            kind="raydp",
            cores=1,
            executors=2,
            memory="1g",
            put=ray.put,
            placement_group=group,
            bundle_indexes=[0, 1],
            start_s=240,
        )
        with open_session(options) as opened:
            wait_until(lambda: len(opened.executors()) == 2, "both executors are there", LIMIT_S)
            yield opened
    finally:
        ray.util.remove_placement_group(group)


class Marked:
    """Notes which executor has processed a number. Each executor waits in the midst of its part until it may go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = 0

    def __call__(self, number: int) -> int:
        executor = next(each.pid for each in psutil.Process().parents() if each.name() == "java")
        with open(self.folder / "calls", "a", encoding="utf-8") as file:
            file.write(f"{number} {executor}\n")
        self.calls += 1
        if self.calls == STOPS:
            (self.folder / f"waits-{executor}").touch()
            until = time.monotonic() + LIMIT_S
            while not (self.folder / "go").exists():
                assert time.monotonic() < until
                time.sleep(0.01)
        return number + 1

    def noted(self) -> list[tuple[int, int]]:
        """The numbers that were processed, each with the executor."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [(int(number), int(executor)) for number, executor in map(str.split, lines)]

    def waiting(self) -> set[int]:
        """The executors that wait."""
        return {int(path.name.partition("-")[2]) for path in self.folder.glob("waits-*")}


def records_out(stream: Stream) -> None:
    stream.write(ps.sinks.Null())


def counts_out(stream: Stream) -> None:
    stream.key_by(int).count().write(ps.sinks.Null())


@pytest.mark.parametrize("build", [records_out, counts_out])
def test_a_micro_batch_that_loses_an_executor_is_exact_and_repeats_only_its_part(
    build: Callable[[Stream], None], session: Session, tmp_path: Path
) -> None:
    """What runs again is at most the part that the lost executor had."""
    wait_until(lambda: len(session.executors()) == 2, "both executors are there", LIMIT_S)
    marked = Marked(tmp_path)
    flow = Flow("lost", parallelism=1)
    build(flow.read(ps.sources.Memory([0])).map(marked, name="marked"))
    plan = flow.plan(1, check_sinks=False)
    form = range_form(plan, plan.chains[0])
    assert isinstance(form, RangeForm)
    operations = Operations(session, [form])
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(operations.answer, form.chain, form.position, as_columns(list(range(NUMBERS))))
        wait_until(lambda: len(marked.waiting()) == 2, "both executors are in the midst of their parts", LIMIT_S)
        before = marked.noted()
        lost = min(marked.waiting())
        assert lost in {executor.pid for executor in session.executors()}
        os.kill(lost, signal.SIGKILL)
        wait_gone([lost], 60)
        (tmp_path / "go").touch()
        answer = answering.result(LIMIT_S)

    assert not answer.unprocessed
    assert answer.counts == {1: (NUMBERS, NUMBERS)}
    if build is records_out:
        assert [number for batch in answer.batches for number in batch] == list(range(1, NUMBERS + 1)), "in their order"
    else:
        counts: Counter[Any] = Counter()
        for batch in answer.batches:
            assert isinstance(batch, KeyedBatch)
            for key, count in zip(batch.keys, batch.values, strict=True):
                counts[key] += count
        assert counts == Counter(range(1, NUMBERS + 1))

    times = Counter(number for number, _ in marked.noted())
    others = {number for number, executor in before if executor != lost}
    mine = {number for number, executor in before if executor == lost}
    assert (len(mine), len(others)) == (STOPS, STOPS)
    assert set(times) == set(range(NUMBERS))
    assert all(times[number] == 1 for number in others), "what another executor has done is not done again"
    assert all(times[number] == 2 for number in mine)
    assert max(times.values()) == 2
    again = {number for number, count in times.items() if count > 1}
    assert again <= part_of(mine), "nothing of the other part"


def part_of(numbers: set[int]) -> set[int]:
    """The part of the micro-batch in which some numbers are."""
    lists = as_columns(list(range(NUMBERS)))
    first = as_records(lists.slice(0, -(-lists.num_rows // 2)))
    return set(first) if min(numbers) in first else set(range(NUMBERS)) - set(first)
