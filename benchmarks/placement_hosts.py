"""What crosses between four hosts by default and with tasks in turn, for SOL, the Throughput test and rides; and what a
plan expects of a broadcast beside what the job sends. See README.md."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

from benchmarks.common import Bench, Skipped, median
from tests.namespaces import spaces
from tests.namespaces.hosts import ROOT, Hosts
from tests.namespaces.ray_cluster import RayCluster

HOSTS = 4
APPS = ("sol", "throughput", "rides")


def run(bench: Bench) -> None:
    """Measures, where hosts can be made."""
    if reason := spaces.why_not():
        raise Skipped(reason)
    records = bench.pick(50_000, 4_000)
    with Hosts(HOSTS, one_clock=True) as hosts:
        env = RayCluster(hosts).environment

        def job(app: str, placement: str) -> dict[str, Any]:
            given = json.dumps({"app": app, "placement": placement, "hosts": HOSTS, "records": records})
            ran = hosts[0].run([sys.executable, "-m", "benchmarks.placement_peer", given], env, ROOT)
            found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
            return found

        for app in APPS:
            methods = bench.pick(("auto", "traffic", "round-robin"), ("auto", "round-robin"))
            found = bench.take_turns({how: partial(job, app, how) for how in methods})
            ours, theirs = ([float(one["sent"]) / 1e6 for one in found[how]] for how in ("auto", "round-robin"))
            planned = [found[how][-1]["planned"] for how in ("auto", "round-robin")]
            bench.case(
                f"{app}: sent between {HOSTS} hosts",
                median(ours),
                "MB",
                peer="tasks in turn",
                peer_figure=median(theirs),
                goal="<= 1.02",
                config=f"{records:,} records, {HOSTS} workers",
                note=f"the plans expect {planned[0] / planned[1]:.2f} times as much{_beside(found)}",
                runs=ours,
                peer_runs=theirs,
            )
        found = bench.take_turns({"broadcast": partial(job, "broadcast", "auto")})
        ratios = [one["sent"] / (one["planned"] * one["made"]) for one in found["broadcast"]]
        for goal in (">= 0.95", "<= 1.05"):
            bench.case(
                f"broadcast: sent between {HOSTS} hosts, of what the plan expects ({goal})",
                median(ratios),
                "",
                goal=goal,
                config=f"records of 4 KiB, {HOSTS} workers",
                runs=ratios,
            )


def _beside(found: dict[str, list[dict[str, Any]]]) -> str:
    """What is sent by the plan that takes all tasks for equally heavy, where it has run."""
    if "traffic" not in found:
        return ""
    return f'; "traffic" sends {median(float(one["sent"]) / 1e6 for one in found["traffic"]):.3g} MB'
