"""`python -m benchmarks [--quick] [NAMES...]`: run benchmarks, print their tables, keep JSON lines and plots."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from pathlib import Path

from benchmarks import one_by_one
from benchmarks.common import RESULTS, Bench, Case, Skipped, about, print_cases, stop_ray

# Name -> (module, what it measures). In the order in which they run.
BENCHMARKS = {
    "record_path": ("record_path", "ns a record in each step between two workers; the codec beside others"),
    "exchange": ("exchange", "us a message from output to inbox: by key, to all tasks; encodings, bytes"),
    "ring_peers": ("ring_channels", "the ring beside sockets, ZeroMQ, iceoryx2: latency, messages a second"),
    "transport_link": ("transport_link", "messages between machines: TCP beside a bare socket pair and the ring"),
    "ring_paper": ("ring_paper", "the ring experiments of the paper (T13): message size, rate, ring size"),
    "multicast_model": ("multicast_model", "multicast to 480 tasks and 10,000 nodes: a model, calibrated here"),
    "hosts_links": ("hosts_links", "plain sockets and trees of plain forwarders over shaped links between hosts"),
    "relay_trees": ("relay_trees", "relays alone along multicast trees, over links of 100 Mbit/s between hosts"),
    "relay_keyed": ("relay_keyed", "keyed messages from worker to worker beside the way through relays"),
    "rate_steps": ("rate_steps", "steps of the rate: a tree of relays that adjusts itself beside fixed ones"),
    "broadcast_hosts": ("broadcast_hosts", "to all tasks of four hosts: bytes, encodings, with and without relays"),
    "hosts_jobs": ("hosts_jobs", "WordCount and single records over two hosts, beside one host and Bytewax"),
    "rdma_verbs": ("rdma_verbs", "READ, WRITE, send/recv, and RDMA beside TCP, in guests with software RoCE"),
    "wordcount_throughput": ("wordcount_throughput", "sentences a second, beside Bytewax, Ray actors, a plain loop"),
    "wordcount_latency": ("wordcount_latency", "due time to sink at 20,000 and 1,000 sentences a second"),
    "grep_throughput": ("grep_throughput", "lines a second through a regular expression, beside the same peers"),
    "grep_latency": ("grep_latency", "due time to sink of the lines found, at 20,000 and 1,000 lines a second"),
    "low_rate": ("low_rate", "one record a second through five stages on two workers"),
    "map_batches": ("map_batches", "calls of 20 ms at a rate: latency, records a call; 1 us a record at full speed"),
    "nexmark": ("nexmark", "Nexmark q1, q2, q4, q5, q7, q8 and q11: events a second, beside Flink SQL and Bytewax"),
    "linear_road": ("linear_road", "Linear Road: the most expressways of which all answers come within five seconds"),
    "map_async": ("map_async", "calls of 50 ms, 500 coroutines and 50 threads at a time: calls a second, CPU"),
    "checkpoint_cost": ("checkpoint_cost", "the same jobs with and without epochs; bytes and time of an epoch"),
    "state_memory": ("state_memory", "memory of JobMaster, compactions and workers beside 1 and 2 GB of state"),
    "recovery_time": ("recovery_time", "SIGKILL of one worker of four: until it runs, and at full rate again"),
    "ysb_latency": ("ysb_latency", "Yahoo events at low rates: bridge on, off, all in Spark, Structured Streaming"),
    "ysb_bursts": ("ysb_bursts", "Yahoo events in two bursts: queue, delay and paradigm over time, side by side"),
    "bursts_modelled": (
        "bursts_modelled",
        "two bursts beside a modelled Spark that is quicker: hybrid, records, Spark",
    ),
    "ysb_throughput": ("ysb_throughput", "the most Yahoo events a second: records, everything in Spark, Spark alone"),
    "ysb_operators": ("ysb_operators", "where the time of a Yahoo event goes, by operator"),
    "spark_text": ("spark_text", "WordCount and Grep beside Spark alone over the same files"),
    "spark_handover": ("spark_handover", "the hand-over of a micro-batch to Spark, taken apart; PySpark and RayDP"),
    "bridge_pays": ("bridge_pays", "from which cluster and load on a burst goes to Spark: a model, calibrated here"),
    "placement_plans": ("placement_plans", "plans of 1,000 and 10,000 tasks beside METIS; how planning grows"),
    "placement_hosts": ("placement_hosts", "bytes between four hosts by default, in turn, and as planned"),
    "placement_latency": ("placement_latency", "SOL and Throughput over nodes and workers, by placement"),
    "placement_online": ("placement_online", "latency before, while and after tasks move by themselves"),
    "monitor_cost": ("monitor_cost", "WordCount while what its tasks send is measured and planned by, and not"),
    "migration": ("migration", "how long a task stands still that moves to another worker"),
    "idle": ("idle", "CPU that a job with nothing to do uses"),
    "local_start": ("local_start", "local jobs beside Ray, Bytewax, a loop: start, memory, throughput, latency"),
    "kafka_to_kafka": ("kafka_to_kafka", "from topic to topic: records a second and delays, beside a plain loop"),
    "control": ("control", "start-up time; latency of job.status() under load"),
    "job_end": ("job_end", "time from the end of a job to the end of its last process"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run what was chosen; the exit code: 1 when a benchmark failed (a goal that is missed is no failure), and SKIPPED
    when this machine lacks what all of them need."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Penstock beside its peers, all in one run. See benchmarks/README.md for what each one means.",
        epilog="benchmarks: " + ", ".join(BENCHMARKS),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run, or beginnings of names (all)")
    parser.add_argument("--list", action="store_true", help="say what there is and end")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small inputs, one run: whether they work, not how fast; several run in a process each, and one that "
        "fails runs once more",
    )
    parser.add_argument(
        "--limit", type=float, default=240, metavar="S", help="with --quick: seconds for each of several (240)"
    )
    parser.add_argument(
        "--within", type=float, default=1500, metavar="S", help="with --quick: seconds after which none begins (1500)"
    )
    parser.add_argument("--runs", type=int, metavar="N", help="rounds of each measurement; medians are shown (5)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go (benchmarks/results[/quick])")
    options = parser.parse_args(arguments)
    if options.list:
        for name, (_, what) in BENCHMARKS.items():
            print(f"{name:22} {what}")
        return 0
    for name in options.names:
        if not any(known.startswith(name) for known in BENCHMARKS):
            parser.error(f"no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    if options.runs is not None and options.runs < 1:
        parser.error("--runs must be at least 1")
    chosen = [name for name in BENCHMARKS if not options.names or any(_means(given, name) for given in options.names)]
    runs = options.runs or (1 if options.quick else 5)
    out = options.out or (RESULTS / "quick" if options.quick else RESULTS)
    if options.quick and len(chosen) > 1:
        command = [sys.executable, "-m", "benchmarks", "--quick", "--runs", str(runs), "--out", str(out.absolute())]
        outcome = one_by_one.run(chosen, command, limit_s=options.limit, within_s=options.within)
        print(f"JSON lines and plots: {out}")
        for line in outcome.words():
            print(line, file=sys.stderr)
        return 1 if outcome.failed else 0
    return _run(chosen, quick=options.quick, runs=runs, out=out)


def _means(given: str, name: str) -> bool:
    """Returns whether a name, or the beginning of one, means this benchmark."""
    return given == name if given in BENCHMARKS else name.startswith(given)


def _run(chosen: list[str], *, quick: bool, runs: int, out: Path) -> int:
    """Runs benchmarks in this process, and returns the exit code."""
    here = about()
    cases: list[Case] = []
    failed: list[str] = []
    skipped: list[str] = []
    try:
        for name in chosen:
            started = time.monotonic()
            print(f"{name} ...", file=sys.stderr, flush=True)
            bench = Bench(name, quick=quick, runs=runs, out=out, about=here)
            try:
                importlib.import_module(f"benchmarks.{BENCHMARKS[name][0]}").run(bench)
            except Skipped as missing:
                skipped.append(name)
                print(f"{name} is skipped: {missing}", file=sys.stderr)
            except Exception:
                failed.append(name)
                traceback.print_exc()
            cases += bench.cases
            print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    finally:
        stop_ray()
    print_cases(cases)
    print(f"JSON lines and plots: {out}")
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else one_by_one.SKIPPED if skipped == chosen else 0


if __name__ == "__main__":
    sys.exit(main())
