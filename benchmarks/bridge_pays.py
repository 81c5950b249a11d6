"""From which cluster and load on it pays to send a burst to Spark: a model of the product's own decision.

It measures, here, what the model is made of: the events a second of a core of record tasks, of a core of Spark, the
fixed cost of a micro-batch (fitted by `penstock.bridge.cost`), and what a record task can hand over a second. Spark is
RayDP, whose executor is a process of its own; plain PySpark, which has driver and executor in one, stands beside it.
Then it asks the `BurstDetector` of `penstock.bridge.burst`, with all its defaults, whether it switches within a minute
of a burst: R cores of record tasks, S cores of Spark that are *other* cores than these, a load of so many times what
the record tasks take, Spark made ready ahead.

Taken for granted, and optimistic for Spark: its speed grows with its cores, and the fixed cost does not; the network
carries what is handed over. Not in it: that the same S cores could be given to record tasks, by a rescale that takes
seconds and does not end with the burst. The table says how many of them it would take.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Bench, median, print_table, run_script, scratch, stop_ray
from benchmarks.spark_session import KINDS
from benchmarks.ysb_job import MEMORY, Form
from benchmarks.ysb_load import Load
from benchmarks.ysb_throughput import STEPS, Lines
from penstock.bridge.burst import BurstDetector, BurstOptions, Decision, Observation
from penstock.bridge.cost import BatchCost, BatchSpeed, Calibration, MicroBatch

_BURST_S = 60
_CLUSTERS = (1, 2, 4, 8, 16, 32)  # cores of record tasks
_SHOWN = 8  # of them, in the cases
_LOADS = (1.1, 1.5, 2.0, 3.0)  # times what the record tasks take
_GOAL_LOAD, _GOAL_CORES = 1.5, 20
_MOST = 64  # cores of Spark for each core of record tasks
_NETWORK = 10e9 / 8  # bytes a second


@dataclass(frozen=True)
class Costs:
    """Events a second and core, and the seconds of a micro-batch that are not for its events."""

    records: float
    spark: float
    fixed_s: float
    handed_over: float  # by a record task's core

    def batch(self, record_cores: int, spark_cores: int) -> BatchCost:
        """What a micro-batch costs there."""
        return BatchCost(self.fixed_s, min(self.spark * spark_cores, self.handed_over * record_cores))


def decision(costs: Costs, record_cores: int, spark_cores: int, load: float, seconds: int) -> Decision:
    """The detector's first decision for Spark in a burst of so many seconds, or the last one for records."""
    rate = costs.records * record_cores
    calibration = Calibration(record_rate=rate, batch=costs.batch(record_cores, spark_cores))
    detector = BurstDetector(BurstOptions(ahead=True), calibration)
    decided = detector.observe(Observation(0.0, 0.0, 0.0))
    detector.happened("ready", 0.0)
    for second in range(1, seconds + 1):
        queue = max(0.0, load - rate) * second
        seen = Observation(second, queue, load, processed=min(load, rate), busy_s=min(1.0, load / rate))
        decided = detector.observe(seen)
        if decided.wanted == "operation":
            break
    return decided


def switched_after(costs: Costs, record_cores: int, spark_cores: int, load: float) -> float | None:
    """Seconds from a burst's begin until the detector has its events sent to Spark; None: it does not in a minute."""
    decided = decision(costs, record_cores, spark_cores, load, _BURST_S)
    if decided.wanted == "record":
        return None
    return decided.figures.queue / (load - costs.records * record_cores)


def pays_from(costs: Costs, record_cores: int, load: float) -> int | None:
    """The least cores of Spark with which the detector switches; None: with none."""
    return _least(
        range(1, _MOST * record_cores + 1),
        lambda cores: switched_after(costs, record_cores, cores, load) is not None,
    )


def bears_from(costs: Costs, record_cores: int, load: float) -> int | None:
    """The least cores of Spark that keep up with the load."""
    return _least(range(1, _MOST * record_cores + 1), lambda cores: _keeps_up(load, costs.batch(record_cores, cores)))


def _keeps_up(load: float, cost: BatchCost) -> bool:
    """Whether micro-batches of the longest interval leave a fifth of it to spare."""
    longest_s = BurstOptions().timing.interval_max_s
    return cost.seconds(load * longest_s) <= 0.8 * longest_s


def _least(numbers: range, holds: Any) -> int | None:
    """The least number for which it holds, as it does for all above."""
    low, high = numbers[0], numbers[-1]
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def fit(batches: Iterable[tuple[int, float]]) -> BatchCost:
    """The cost of a micro-batch, by the product's fit."""
    speed = BatchSpeed()
    speed.add(MicroBatch(rows, seconds) for rows, seconds in batches)
    assert speed.cost is not None
    return speed.cost


def measure(bench: Bench) -> Costs:
    """The costs, each a case."""
    form = Form()
    load = Load(STEPS, paced=False, limit=bench.pick(8_000_000, 600_000))
    with scratch() as folder:
        lines = Lines.write(folder / "lines", load)
        rates = [lines.job(form) for _ in range((bench.runs + 1) // 2)]
    # The fit keeps the last micro-batches of each size. RayDP's two JVMs are warm after about six of the largest size;
    # plain PySpark's one JVM is sooner.
    sizes, repeats = bench.pick(([1_000, 10_000, 100_000, 400_000], 16), ([1_000, 100_000], 2))
    stop_ray()  # the record tasks have used it, and RayDP starts one of its own
    costs: dict[str, dict[int, BatchCost]] = {}
    said: dict[str, Any] = {}
    kinds = bench.pick(KINDS, {"raydp": KINDS["raydp"]})  # a session takes most of a short run
    for kind in kinds:
        cores = bench.pick([2, 1], [2]) if kind == "pyspark" else [2]
        asked = {"kind": kind, "cores": cores, "memory": MEMORY, "sizes": sizes, "repeats": repeats}
        said = json.loads(run_script("benchmarks.spark_costs", asked, timeout=900).splitlines()[-1])
        costs[kind] = {int(cores): fit(batches) for cores, batches in said["batches"].items()}
    two = costs["raydp"][2]
    found = Costs(
        median(rates) / form.workers,
        two.rate / 2,
        two.fixed_s,
        1 / (said["made_s"] + said["sent_s"]),
    )
    bench.case("a core of record tasks", found.records, "events/s", config=str(form), runs=rates)
    one = costs["pyspark"].get(1) if "pyspark" in costs else None
    for kind, name in kinds.items():
        cost = costs[kind][2]
        bench.case(
            f"a core of Spark, {name}",
            cost.rate / 2,
            "events/s",
            peer="a core of record tasks",
            peer_figure=found.records,
            config="2 cores, without the fixed cost",
            note=f"plain PySpark with 1 core {one.rate:,.0f} events/s, fixed {one.fixed_s:.3f} s" if one else None,
        )
        bench.case(f"fixed cost of a micro-batch, {name}", cost.fixed_s, "s", config="2 cores")
    bench.case(
        "events that a core hands over",
        found.handed_over,
        "events/s",
        note=f"an event: {said['made_s'] * 1e9:.0f} ns to make columns, {said['sent_s'] * 1e9:.0f} ns to write them",
    )
    bench.case("what 10 Gbit/s carry", _NETWORK / said["bytes"], "events/s", note=f"{said['bytes']:.0f} bytes an event")
    return found


def run(bench: Bench) -> None:
    """See the module."""
    costs = measure(bench)
    rows, curves = [], {}
    for load in _LOADS:
        found = {r: pays_from(costs, r, load * costs.records * r) for r in _CLUSTERS}
        bears = {r: bears_from(costs, r, load * costs.records * r) for r in _CLUSTERS}
        curves[f"load {load:g} times the records'"] = [(float(r), float(s)) for r, s in found.items() if s is not None]
        for r, s in found.items():
            rows.append(
                (
                    f"{r}",
                    f"{load * costs.records * r / 1e6:.2f} M/s ({load:g} times)",
                    "never" if s is None else f"{s}",
                    "-" if s is None else f"{switched_after(costs, r, s, load * costs.records * r):.0f} s",
                    "never" if bears[r] is None else f"{bears[r]}",
                    f"{-(-(load - 1) * r // 1):.0f}",
                )
            )
        # The goal is about a burst of 1.5 times the record tasks' rate: less than that is hardly a burst, and a larger
        # one needs a larger cluster.
        goal = f"< {_GOAL_CORES}" if load == _GOAL_LOAD else None
        if found[_SHOWN] is not None:
            bench.case(
                f"least cores of Spark with which a switch pays, beside {_SHOWN} of record tasks at {load:g} times "
                "their rate",
                float(found[_SHOWN] or 0),
                "cores",
                goal=goal,
                checked=False,
            )
        bench.case(
            f"least cores of Spark that keep up, for {_SHOWN} of record tasks at {load:g} times their rate",
            float(bears[_SHOWN] or 0),
            "cores",
            goal=goal if bears[_SHOWN] is not None else None,
            note="0: none do" if bears[_SHOWN] is None else f"the switch is made from {found[_SHOWN] or 'none'} on",
            checked=False,
        )
    columns = (
        "cores of records",
        "load",
        "cores of Spark: the switch pays",
        "switched after",
        "Spark keeps up",
        "or more record cores",
    )
    print_table("From how many cores of Spark, beside those of the records", columns, rows)
    here = costs.batch(2, 2)
    bench.case(
        "two cores that are for either: Spark beside the record tasks",
        here.capacity(BurstOptions().timing.interval_max_s),
        "events/s",
        peer="record tasks",
        peer_figure=2 * costs.records,
        note=decision(costs, 2, 2, 1.5 * 2 * costs.records, _BURST_S).reason,
        checked=False,
    )
    bench.plot(
        "bridge_pays.png",
        "From how many cores of Spark a burst goes there",
        curves,
        "cores of record tasks",
        "cores of Spark",
        log_x=True,
        log_y=True,
    )
