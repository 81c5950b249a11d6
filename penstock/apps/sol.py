"""SOL, the speed-of-light benchmark of the TurboStream paper (docs/papers.md: T13): what do hops alone cost?

    spout -> bolt-1 -> bolt-2 -> ... -> bolt-5 -> nothing          (shuffle between all of them)

One source makes messages of random digits; every bolt hands on what it gets. Whatever latency there is, is ours.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace

from penstock.apps.app import App, Built, Cycle, add_load_options, described_rate
from penstock.apps.command_line import COUNT, Options
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks import Null, Sink
from penstock.runtime.sources import Generator, Source
from penstock.runtime.status import JobStatus

_MESSAGES = 100  # distinct ones, as in the storm-benchmark
_DURATION_S = 10.0


def messages(size: int, seed: int = 0) -> list[str]:
    """Returns distinct texts of `size` digits from 0 to 8."""
    digits = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < min(_MESSAGES, 9**size):
        made["".join(digits.choices("012345678", k=size))] = None
    return list(made)


def topology(
    source: Source, *, levels: int = 5, tasks: int | None = None, sink: Sink | None = None, name: str = "sol"
) -> Flow:
    """Builds the flow: one source task, then `levels` bolts of `tasks` tasks each. What arrives is dropped, if there is
    no `sink`."""
    flow = Flow(name)
    stream = flow.read(source, name="spout", parallelism=1)
    for level in range(1, levels + 1):
        stream = stream.shuffle().map(const, name=f"bolt-{level}", parallelism=tasks)
    stream.write(sink or Null(), name="sink", parallelism=tasks)
    return flow


def const(record: str) -> str:
    """Does nothing with a record and returns it."""
    return record


def _add_options(parser: Options) -> None:
    add_load_options(parser, rate="5000", duration=f"{_DURATION_S:g}")
    parser.add("--size", metavar="B", type=COUNT, default=100, help="bytes of each record (100)")
    parser.add("--levels", metavar="N", type=COUNT, default=5, help="number of bolts in a row (5)")
    parser.add("--tasks", metavar="N", type=COUNT, default=5, help="number of tasks of each bolt (5)")


def _build(options: SimpleNamespace) -> Built:
    rate = options.rate or "5000"
    duration = _DURATION_S if options.duration is None else options.duration
    source = Generator(Cycle(messages(options.size)), None if rate == "max" else rate, duration_s=duration or None)

    def results(status: JobStatus, seconds: float) -> Iterable[str]:
        yield "latency since the source, in the last seconds"
        width = max(map(len, status.operators))
        for name, operator in status.operators.items():
            latency = operator["latency_ms"]
            if latency["p50"] is not None:
                yield f"  {name:<{width}}  p50 {latency['p50']:8.3f} ms   p99 {latency['p99']:8.3f} ms"

    return Built(
        topology(source, levels=options.levels, tasks=options.tasks, name=options.name),
        f"{options.levels} bolts of {options.tasks} tasks in a row, records of {options.size} bytes, "
        f"{described_rate(rate)}" + (f" for {duration:g} s" if duration else ", until you stop it with Ctrl-C"),
        results,
        ("penstock run sol --rate 5000:5s,40000:5s --duration 20", "penstock explain sol"),
    )


APP = App("sol", "measure the latency of operators that only pass records on", _add_options, _build)
