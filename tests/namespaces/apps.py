"""The applications over several hosts: whatever the number of hosts, the answer is that of a plain loop.

    python -m tests.namespaces.apps                            all applications of APPS on 1, 2 and 4 hosts
    python -m tests.namespaces.apps --apps ysb --hosts 2 --dual off
    python -m tests.namespaces.apps --apps rides,stock --hosts 2,4 --moves 5

YSB goes through Spark in micro-batches. Spark is RayDP's, with an executor on each of as many hosts. So there are
workers that send their micro-batches to a bridge on another host, and executors that read them from there.

Each job has four workers on the given number of hosts, and its workers must have been there. With "spark-only" Spark
must have answered so many records that workers of each host are among those that sent them. The requests of
ride-hailing go to the tasks of all workers: over several hosts through multicast trees, whose relays must have handed
over entries on each other host. With --moves, records come at a pace, and so many times a task moves to another host.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.apps import grep, sol, text, wordcount, ysb
from penstock.apps.app import Cycle
from penstock.apps.rides import topology as rides
from penstock.apps.rides.city import TIME_MS, Locations, Requests
from penstock.apps.stock import topology as stock
from penstock.apps.stock.orders import Orders, is_valid
from penstock.apps.ysb_events import Events, EventSource
from penstock.bridge.session import SparkOptions
from tests.apps.rides_checker import expected as expected_rides
from tests.apps.stock_checker import expected as expected_trades
from tests.e2e.processes import wait_until
from tests.e2e.switch_campaign import Held
from tests.namespaces import spaces
from tests.namespaces.hosts import ROOT, Hosts
from tests.namespaces.ray_cluster import RayCluster

APPS = ("wordcount", "grep", "sol", "ysb", "rides", "stock")
HOSTS = (1, 2, 4)
WORKERS = 4
PATTERN = "string"
LIMIT_S = 600.0  # of anything; Spark takes minutes to start on a busy machine
# Of each host: all workers, and two executors of Spark.
_CPUS = WORKERS + 2
_EXECUTOR_BYTES = 512 << 20
_IN_SPARK_LEAST = 1_000


@dataclass
class Case:
    """A flow, its answer when it has run, and the right one."""

    flow: ps.Flow
    answer: Callable[[], Any]
    right: Any
    source: Held | None = None  # which waits for Spark
    read: int | None = None  # how many records all sources have; None: as many as were asked for
    trees: Path | None = None  # the file for which the source waits, where records go to the tasks of all workers


_MOVE_S = 6.0  # for so long records come for each task that is to move meanwhile
_pace_s: float | None = None  # of this process


def generated(fn: Callable[[int], Any], limit: int) -> ps.sources.Generator[Any]:
    """The source of a case."""
    return ps.sources.Generator(fn, rate=None if _pace_s is None else limit / _pace_s, limit=limit)


def wordcount_case(records: int, _: Path) -> Case:
    lines = text.read_lines([str(text.packaged_path())])
    counts = ps.sinks.Collect()
    flow = wordcount.topology(generated(Cycle(lines), records), counts, "apps-wordcount")
    read = [lines[number % len(lines)] for number in range(records)]
    return Case(flow, lambda: dict(counts.records()), Counter(word.lower() for line in read for word in line.split()))


def grep_case(records: int, _: Path) -> Case:
    lines = text.read_lines([str(text.packaged_path())])
    matches, number = ps.sinks.Collect(), ps.sinks.Collect()
    source = generated(Cycle(lines), records)
    flow = grep.topology(source, PATTERN, matches, number, "apps-grep")
    found = Counter(line for number in range(records) if PATTERN in (line := lines[number % len(lines)]))
    return Case(flow, lambda: (Counter(matches.records()), number.records()), (found, [(1, found.total())]))


def sol_case(records: int, _: Path) -> Case:
    messages = sol.messages(100)
    arrived = ps.sinks.Collect()
    flow = sol.topology(generated(Cycle(messages), records), sink=arrived, name="apps-sol")
    right = Counter(messages[number % len(messages)] for number in range(records))
    return Case(flow, lambda: Counter(arrived.records()), right)


def ysb_case(records: int, holds: Path) -> Case:
    events, rows = Events(4, rate="2000:10s,8000:10s"), ps.sinks.Collect()
    tasks = WORKERS
    source = Held(
        EventSource(events, limit=records),  # type: ignore[arg-type]
        {holds / "Spark is ready": records // 20 // tasks, holds / "Spark has answered": records // 4 * 3 // tasks},
    )
    flow = ysb.topology(source, events.campaigns(), ysb.Store(rows), name="apps-ysb")
    return Case(flow, lambda: ysb.stored(rows.records()), dict(ysb.recount(events, records)), source)


def rides_case(records: int, holds: Path) -> Case:
    """A request for each 25 locations. The matches of the checker take the square of the time of the city."""
    drivers, every_s = 300, 3.0
    located = min(records, 12_000)
    asked = located // 25
    locations = Locations(7, drivers=drivers, every_s=every_s)
    requests = Requests(7, per_s=asked * drivers / every_s / located)
    ready = holds / "trees are ready"
    # At a pace at which relays tell what they do. A hold that is not the last one lets nothing through.
    paced = ps.sources.Generator(requests, rate=asked / 5, limit=asked)
    held = Held(paced, {ready: asked // 10 // WORKERS, holds / "is never there": asked})
    sources = generated(locations, located), held
    found = ps.sinks.Collect()
    flow = rides.topology(*sources, found, name="apps-rides")
    asked_for = list(map(requests, range(asked)))
    best = expected_rides(map(locations, range(located)), asked_for, rides.RADIUS_M)
    right = sorted(
        (request[0], *((match.driver, match.distance_m) if match else (None, None)), request[TIME_MS])
        for request in asked_for
        for match in [best[request[0]]]
    )
    read = located + asked + rides.POSTS
    return Case(flow, lambda: sorted(found.records()), right, read=read, trees=ready)


def stock_case(records: int, _: Path) -> Case:
    orders = Orders(7, symbols=50, rate=500.0)
    trades = ps.sinks.Collect()
    source = generated(orders, records)
    flow = stock.topology(source, ps.sinks.Null(), ps.sinks.Null(), trades, lifetime_s=None, name="apps-stock")
    right = Counter(map(tuple, expected_trades(filter(is_valid, map(orders, range(records))))))
    return Case(flow, lambda: Counter(map(tuple, trades.records())), right)


CASES: dict[str, Callable[[int, Path], Case]] = {
    "wordcount": wordcount_case,
    "grep": grep_case,
    "sol": sol_case,
    "ysb": ysb_case,
    "rides": rides_case,
    "stock": stock_case,
}


def driver(settings: dict[str, Any]) -> None:
    """The part that runs on host 0: one application, on a number of hosts. Prints what is told of it, as JSON."""
    import ray
    from ray.util.placement_group import placement_group

    from penstock.actors.cluster import NAMESPACE

    global _pace_s
    if settings["moves"]:
        _pace_s = _MOVE_S * settings["moves"]
    ray.init(namespace=NAMESPACE, logging_level="error", log_to_driver=False)
    count, folder = settings["hosts"], Path(settings["folder"])
    case = CASES[settings["app"]](settings["records"], folder)
    options: dict[str, Any] = {}
    if case.source is not None and settings["dual"] != "off":
        nodes = sorted(node["NodeManagerAddress"] for node in ray.nodes())[:count]
        group = placement_group([{"CPU": 1, "memory": _EXECUTOR_BYTES, f"node:{node}": 0.001} for node in nodes])
        spark = SparkOptions(
            kind="raydp", cores=1, executors=count, memory="512M", placement_group=group, start_s=LIMIT_S
        )
        options = {"dual": settings["dual"], "spark": spark}
    if case.trees:
        options["trees"] = 1  # whatever the load: small records to few hosts would go straight to the workers
    began = time.monotonic()
    job = ps.run(case.flow, workers=WORKERS, nodes=count, checkpoints=folder / "epochs", **options)
    if case.source is not None and "dual" in options:
        _let_go(job, case.source, count)
    if case.trees:
        if count > 1:
            wait_until(lambda: _have_trees(job.status(), count), "all streams have trees", LIMIT_S)
        case.trees.touch()
    moved = _move(job, settings["moves"])
    status = job.wait(LIMIT_S, progress=False)
    on = {worker["node_id"] for worker in status["workers"]}
    assert len(on) == count, f"the workers were on {len(on)} hosts"
    assert status["records_read"] == (settings["records"] if case.read is None else case.read)
    handed = sorted(relay["handed_over"] for relay in status["relays"])
    if case.trees and count > 1 and moved:  # a host may have none of the receivers any more
        assert sum(handed), "the relays have handed over nothing"
    elif case.trees and count > 1:
        assert len(handed) == count, f"there are {len(handed)} relays"
        assert handed[0], f"the relays have handed over {handed} entries"
    found = case.answer()
    if found != case.right:
        raise AssertionError(f"the answer is wrong: {str(found)[:500]}, and right would be {str(case.right)[:500]}")
    in_spark = _in_spark(status)
    if "dual" in options and settings["dual"] == "spark-only":
        least = settings["records"] * (count - 1) // count
        assert in_spark > least, f"Spark answered {in_spark:,} records, and {least:,} are those of the other hosts"
    print(
        json.dumps(
            {
                "seconds": time.monotonic() - began,
                "answers": len(case.right),
                "in_spark": in_spark,
                "handed": sum(handed),
                "read": status["records_read"],
                "moved": moved,
            }
        )
    )


def _move(job: ps.Job, moves: int) -> int:
    """Moves tasks to other hosts, one after the other. Returns how many have moved."""
    rng, moved, refused = random.Random(moves), 0, ""
    if moves:
        wait_until(lambda: job.status()["records_read"] > 0, "records come", LIMIT_S)
    while moved < moves and (status := job.status())["state"] not in ("FINISHED", "FAILED"):
        node_of = {worker["index"]: worker["node_id"] for worker in status["workers"]}
        task = rng.choice(status["tasks"])
        others = [worker for worker, node in node_of.items() if node != node_of[task["worker"]]]
        try:
            job.migrate({task["name"]: rng.choice(others)})
        except ps.JobError as error:  # the task has ended, or the job
            refused = str(error)
            continue
        moved += 1
    assert moved == moves, f"{moved} of {moves} tasks have moved before the job ended; {refused}"
    return moved


def _in_spark(status: dict[str, Any]) -> int:
    return sum(one["records_in_spark"] for one in (status.get("dual") or {"ranges": []})["ranges"])


def _have_trees(status: dict[str, Any], count: int) -> bool:
    """Whether there is a relay on each host, and whatever goes to all tasks goes through a tree."""
    assert status["state"] not in ("FAILED", "FINISHED"), status["error"]
    streams = [stream for worker in status["workers"] for stream in worker.get("streams", ())]
    ready = [relay for relay in status["relays"] if relay["state"] == "ready"]
    return len(ready) == count and bool(streams) and not any(stream["no_tree"] for stream in streams)


def _let_go(job: ps.Job, source: Held, count: int) -> None:
    """Let the source go on, first when Spark is ready, and to its end when Spark has answered."""
    ready, answered = source.holds

    def status() -> dict[str, Any]:
        found = job.status()
        assert found["state"] not in ("FAILED", "FINISHED"), found["error"]
        return found

    def executors() -> dict[str, int | None]:
        found: dict[str, int | None] = (status().get("dual") or {"processes": {}})["processes"].get("executors", {})
        return found

    try:
        wait_until(lambda: len(executors()) == count, "Spark has an executor for each host", LIMIT_S)
    except AssertionError as error:
        raise AssertionError(f"{error}; the job says: {status().get('dual')}") from None
    # Only processes of the bridge's own host are known.
    on_other_hosts = sum(process is None for process in executors().values())
    assert on_other_hosts == count - 1, f"{on_other_hosts} executors are on other hosts than the bridge"

    def all_divert() -> bool:
        return all(one["state"] == "OPERATION" for one in status()["dual"]["ranges"])

    wait_until(all_divert, "all tasks divert their input", LIMIT_S)
    ready.touch()
    wait_until(lambda: _in_spark(status()) >= _IN_SPARK_LEAST, "Spark has answered", LIMIT_S)
    answered.touch()


def run(apps: list[str], counts: list[int], records: int, dual: str, moves: int = 0) -> None:
    """Runs the applications on these numbers of hosts, and moves so many tasks of each to other hosts meanwhile."""
    with Hosts(max(counts)) as hosts:
        cluster = RayCluster(hosts, _CPUS)
        for app in apps:
            for count in counts:
                with tempfile.TemporaryDirectory(prefix="penstock-apps-") as folder:
                    settings = {"app": app, "hosts": count, "records": records, "dual": dual, "folder": folder}
                    settings["moves"] = moves if count > 1 else 0
                    program = f"from tests.namespaces.apps import driver; driver({settings!r})"
                    printed = hosts[0].python(program, env=cluster.environment, directory=ROOT, limit_s=3 * LIMIT_S)
                said = json.loads(printed.splitlines()[-1])
                through = f", {said['in_spark']:,} of them through Spark" if said["in_spark"] else ""
                if said["moved"]:
                    through += f", {said['moved']} moves to another host"
                if said["handed"]:
                    through += f", {said['handed']:,} entries through trees"
                print(
                    f"{app} on {count} host{'s' * (count > 1)}: {said['read']:,} records{through}, {said['answers']:,} "
                    f"answers, all right, {said['seconds']:.1f} s",
                    flush=True,
                )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.namespaces.apps", description=__doc__.split("\n\n")[0])
    parser.add_argument("--apps", default=",".join(APPS))
    parser.add_argument("--hosts", default=",".join(map(str, HOSTS)))
    parser.add_argument("--records", type=int, default=40_000)
    parser.add_argument("--dual", default="spark-only", help="of YSB: spark-only, toggle:SECONDS, on or off")
    parser.add_argument("--moves", type=int, default=0, metavar="N", help="tasks that move to another host (0)")
    options = parser.parse_args()
    if reason := spaces.why_not():
        parser.error(reason)
    counts = [int(count) for count in options.hosts.split(",")]
    run(options.apps.split(","), counts, options.records, options.dual, options.moves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
