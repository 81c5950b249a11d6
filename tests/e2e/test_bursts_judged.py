"""What is wrong with a burst by the figures of its own status (tests/e2e/bursts.py)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.bursts import Case, Model, Sample, Seen, Server, Shares, Work, _wrong

FIGURES: dict[str, Any] = {
    "queue": 3_000.0,
    "held_up": 0.0,
    "queue_soon": 4_000.0,
    "queue_switch": 1_000.0,
    "queue_up": 1_000.0,
    "arrival_rate": 2_000.0,
    "record_rate": 900.0,
    "operation_rate": 8_000.0,
    "operation_capacity": 7_000.0,
    "fixed_s": 0.1,
    "interval_s": 0.5,
    "switch_s": 0.2,
    "return_s": 0.1,
}
CALM = {"queue": 2.0, "queue_soon": None, "arrival_rate": 200.0}


def status(state: str, burst: bool, answered: int = 0, **figures: Any) -> dict[str, Any]:
    """What a status says of the range."""
    return {
        "state": state,
        "burst": burst,
        "records_in_spark": answered,
        "figures": FIGURES | figures,
        "did_not_pay": [],
        "failed": None,
    }


def burst(switched_at: float | None, answered_at: float = 2.5, back_at: float = 12.0, **figures: Any) -> Seen:
    """A burst of 8 s that is seen after a second, sampled every tenth of a second."""
    seen = Seen(8.0)
    for tenth in range(160):
        at = tenth / 10
        there = switched_at is not None and switched_at <= at < back_at
        answered = 100 if switched_at is not None and at >= answered_at else 0
        shown = figures if 1.0 <= at < 8.0 else CALM
        one = status("OPERATION" if there else "RECORD", 1.0 <= at < 8.0, answered, **shown)
        seen.samples.append(Sample(at, {"work": one}))
    return seen


def found(seen: Seen, model: Model | None = Model(), **options: Any) -> list[str]:  # noqa: B008  it is frozen
    return list(_wrong(seen, model, **options))


def test_a_burst_that_switches_by_its_figures_and_comes_back_is_right() -> None:
    assert found(burst(1.5)) == []


def test_a_burst_that_does_not_switch_although_its_figures_say_so_is_wrong() -> None:
    (wrong,) = found(burst(None))
    assert wrong.startswith("not switched, although its figures say so since 1.0 s: queue 3,000, ")


@pytest.mark.parametrize(
    "against",
    [
        {"operation_capacity": 1_000.0},  # not quicker by the margin
        {"queue_soon": 900.0},  # not long enough
        {"queue_soon": None, "held_up": 2_500.0},  # it waits for others
        {"arrival_rate": 100.0, "queue_soon": None, "operation_capacity": 1_200.0, "switch_s": 3.0},  # too late
        {"record_rate": None},  # nobody knows
    ],
)
def test_a_burst_is_judged_by_its_own_figures(against: dict[str, Any]) -> None:
    assert found(burst(None, **against)) == []
    (wrong,) = found(burst(1.5, **against))
    assert wrong.startswith("switched at 1.5 s, against its figures: ")


def test_with_a_k_by_hand_the_queue_alone_decides() -> None:
    model = Model.of("on,k=0.2,delta=0.3")
    assert model == Model(k=0.2)
    assert found(burst(1.5, operation_capacity=1_000.0), model) == []
    assert len(found(burst(None, operation_capacity=1_000.0), model)) == 1


def test_modes_that_ask_no_figures_are_not_judged_by_them() -> None:
    assert Model.of("toggle:3") is None
    assert Model.of("on,margin=0.5") == Model(margin=0.5)
    assert found(burst(None), None) == []


def test_a_range_that_has_just_come_back_may_stay() -> None:
    assert found(burst(None, return_s=3.0)) == [], "three times what the way there and back takes"


@pytest.mark.parametrize("switched_at", [None, 1.5])
def test_a_range_that_remembers_a_switch_that_did_not_pay_is_not_judged(switched_at: float | None) -> None:
    seen = burst(switched_at)
    for sample in seen.samples:
        sample.ranges["work"]["did_not_pay"] = [{"why": "it did not"}]
    assert found(seen) == []


def test_what_is_given_by_hand_counts_in_place_of_the_model() -> None:
    assert found(burst(None), switches=False) == []
    assert found(burst(None), switches=True) == ["not switched"]
    assert found(burst(1.5), switches=False) == ["switched"]


def test_the_first_answer_has_a_limit() -> None:
    assert found(burst(1.5, answered_at=4.2)) == ["first answer from Spark only after 4.2 s"]
    assert found(burst(1.5, answered_at=4.2), answered_s=5.0) == []
    assert found(burst(1.5, answered_at=99.0)) == ["no answer from Spark"]


def test_a_range_that_stays_in_spark_is_wrong() -> None:
    assert found(burst(1.5, back_at=99.0)) == ["not back"]


def test_shares_of_a_hot_key() -> None:
    """Small micro-batches, and those with other keys, cannot be even."""
    even = [f"7 {part} {40 + part % 2} 50 50" for part in range(4)]
    shares = Shares.of([*even, "8 0 40 20 20", "9 0 40 190 10", "9 1 41 10 10"])
    assert shares.largest(4) == 0.25
    assert shares.wrong(4) is None
    assert shares.processes == {40: 130, 41: 110}
    assert "of its 2 processes 54.2%, 45.8%; largest share of a part 25.0% (of 4 cores)" in shares.story(4)
    assert Shares.of(["7 0 40 150 150", "7 1 41 50 50"]).wrong(4) == "a part got 75% of the hot key, of 4 cores"
    assert Shares.of(even).wrong(8) == "no micro-batch of the hot key had enough records for all cores"


def test_only_parts_in_spark_are_noted(tmp_path: Any) -> None:
    work = Work(None, False, tmp_path / "shares")
    work.open()
    work(1)
    work.close()
    assert not (tmp_path / "shares").exists()


def test_records_of_a_hot_key_are_counted_by_the_server(tmp_path: Any) -> None:
    case = Case("hot", tmp_path)
    case.server = Server(case.flag, hot=True)
    case.server.sent, case.server.hot = 2, 30
    case.sink.records = lambda: [(0, 1), (1, 1), (-1, 29)]  # type: ignore[method-assign]
    assert case.wrong(2) == "of 30 records of the hot key 29 were counted"
    case.sink.records = lambda: [(0, 1), (1, 1), (-1, 30)]  # type: ignore[method-assign]
    assert case.wrong(2) is None
    case.close()
