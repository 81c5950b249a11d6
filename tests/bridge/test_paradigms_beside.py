"""The hybrid beside both paradigms alone, in virtual time: the same load for three ranges, whose burst detectors differ
only in their mode.

What cannot be: a Spark whose micro-batches take less than it takes to see a burst and to switch. There the hybrid has
what comes meanwhile on top, and no more.
"""

from __future__ import annotations

import pytest

from penstock.bridge.burst import BurstOptions, Mode
from penstock.bridge.cost import BatchCost, Calibration
from tests.bridge.simulated_range import SimulatedRange

SWITCH_S = 0.3
STEP_S = 0.05
CALM = 0.4  # times PD
BURST_S = 20.0


def beside(record_rate: float, spark: BatchCost, burst: float, burst_s: float = BURST_S) -> list[SimulatedRange]:
    """The hybrid, records only and Spark only, before, in and after a burst of so many times PD."""

    def simulated(mode: Mode) -> SimulatedRange:
        run = SimulatedRange(
            lambda now: record_rate * (burst if 20 <= now < 20 + burst_s else CALM),
            record_rate,
            spark=spark,
            prepare_s=2.0,
            switch_s=SWITCH_S,
            calibration=Calibration(None, spark, prepare_s=2.0, switch_s=0.5),
            step_s=STEP_S,
            mode=lambda now: mode,
            under_way_max=2,
            options=BurstOptions(ahead=True),
        )
        run.run(20 + burst_s + 30)
        return run

    return [simulated(mode) for mode in ("auto", "off", "spark-only")]


@pytest.mark.parametrize("record_rate", [4_000.0, 50_000.0])
@pytest.mark.parametrize(
    ("quicker", "burst"), [(3.0, 1.5), (3.0, 2.0), (5.0, 1.5), (5.0, 2.0), (5.0, 3.0), (10.0, 2.0), (10.0, 3.0)]
)
def test_where_it_pays_the_hybrid_is_as_good_as_the_better_paradigm(
    record_rate: float, quicker: float, burst: float
) -> None:
    hybrid, records, spark = beside(record_rate, BatchCost(0.25, quicker * record_rate), burst)
    assert hybrid.delay(0.99) <= spark.delay(0.99) + 2.5 * STEP_S, "the switch makes no peak of its own"
    assert hybrid.delay(0.99) < 0.5 * records.delay(0.99)
    assert hybrid.most < 0.8 * records.most
    assert hybrid.most <= spark.most + burst * record_rate * SWITCH_S, "what comes while it switches, at most"
    assert hybrid.delay(0.1) < 0.5 * spark.delay(0.1), "in the calm it is in records"
    assert hybrid.left <= spark.left


@pytest.mark.parametrize("burst", [0.8, 1.2, 1.5, 2.0])
@pytest.mark.parametrize("burst_s", [5.0, BURST_S])
def test_where_it_does_not_pay_the_hybrid_stays_in_records(burst: float, burst_s: float) -> None:
    """Spark is quicker by a tenth, which its fixed cost takes up."""
    hybrid, records, _ = beside(4_000.0, BatchCost(0.25, 4_400.0), burst, burst_s)
    assert hybrid.states == [(0.0, "RECORD")]
    assert hybrid.delay(0.99) <= 1.1 * records.delay(0.99)
    assert hybrid.most <= 1.1 * records.most


def test_a_burst_that_is_over_when_it_is_seen_does_not_go_to_spark() -> None:
    hybrid, records, _ = beside(4_000.0, BatchCost(0.25, 12_000.0), 1.5, burst_s=1.0)
    assert hybrid.states == [(0.0, "RECORD")]
    assert hybrid.delay(0.99) == records.delay(0.99)
