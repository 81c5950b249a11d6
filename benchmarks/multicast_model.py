"""The figures of the Whale paper's evaluation for 30 nodes and 120 to 480 tasks, and trees of up to 10,000 nodes: a
model (multicast_simulation.py), with the times that encoding, sending and receiving take on this machine
(docs/papers.md: W10).

What is measured, as CPU time of the thread that does it, for a record of 150 bytes and one of 16 KiB:

    t_s   encode a record (once, whatever the number of receivers)
    t_d   send an encoded record to one process, over TCP and this machine's loopback
    t_e   encode and send a record, as it is done for each task where tasks are addressed one by one
    t_r   receive and decode a record
    link  half of a round trip, without what is counted above

What is taken for granted: the tasks are spread evenly over the nodes, each node has one worker, and tasks on the
source's own node cost nothing. Nodes are equal. A record is a message of its own. The tasks take no time, so the
paper's gain by more tasks is not here. A message in a tree names all tasks on other nodes, because relays pass on what
they get; otherwise a message names the tasks of one worker.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.common import Bench, WrongResult, quantile
from benchmarks.multicast_simulation import Multicast, Steady, Story, Switched, Times, saturated, steady
from penstock.runtime.exchange.message import (
    ADDRESS_BYTES,
    DESTINATION_BYTES,
    address,
    decode_payload,
    encode_body,
    read_head,
)
from penstock.runtime.multicast.building import binomial, non_blocking, sequential
from penstock.runtime.multicast.queue_model import Cost, greatest_load
from penstock.runtime.multicast.self_adjustment import AdjustmentOptions
from penstock.runtime.multicast.tree import Tree
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.transport.framing import HEAD_BYTES
from penstock.runtime.transport.tcp import TcpTransport

SIZES = (150, 16 * 1024)
NODES = 30
PARALLELISM = (120, 240, 360, 480)
CAPACITY = 1024
#: The paper's steps, and the time of a copy by which they lead to 5, 3, 2, 1 and 2 children.
STEPS = (30_000, 60_000, 80_000, 100_000, 80_000)
COPY_OF_STEPS_S = 5.2e-6
#: The part of the largest rate at which latencies are compared.
LOAD = 0.8
_NEARLY = 0.95
_PAPER_TREE = "non-blocking, d*=3"
_LINK_BITS = 1e9
_FAR_S = 0.01
_KEY = b"the secret of one benchmark, 32 b"
_BURST = 16
_LIMIT_S = 60.0


# --- calibration ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What one record costs here, in seconds; see the module's docstring."""

    t_s: float
    t_d: float
    t_e: float
    t_r: float
    link: float
    bytes: int  # of the encoded body


def record_of(size: int) -> tuple[Any, ...]:
    """Returns a record that is encoded in about so many bytes."""
    return ("request 1234567", 30.6571, 104.0659, 1_700_000_000, "x" * (size - 50))


def _body(record: tuple[Any, ...], errors: ErrorHandler) -> bytes:
    return b"".join(encode_body([record], 1, errors)[1])


def _receive(bursts: int, pipe: Any) -> None:
    """The receiving process: answers each burst, and tells what a message has cost."""
    transport = TcpTransport(1, _KEY, "127.0.0.1")
    pipe.send(transport.address)
    transport.connect({0: pipe.recv()})
    pipe.send("ready")
    costs = []
    clock = time.thread_time_ns
    for wanted in [_BURST] * bursts + [1] * bursts:
        got, spent = 0, 0
        while got < wanted:
            before = clock()
            messages = transport.receive(_LIMIT_S)
            for _, message in messages:
                decode_payload(message, read_head(message))
            spent += clock() - before
            got += len(messages)
        if wanted == _BURST:
            costs.append(spent / wanted / 1e9)
        while not transport.send(0, 0, (b"got it",)):
            transport.receive(0.001)
    pipe.send(median(costs))
    pipe.recv()
    transport.close()


def measure(size: int, bursts: int) -> Measured:
    """Measures what a record costs, with a second process that receives."""
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(target=_receive, args=(2 * bursts, there), daemon=True)
    process.start()
    transport = TcpTransport(0, _KEY, "127.0.0.1")
    try:
        there_at = pipe.recv()
        pipe.send(transport.address)
        transport.connect({1: there_at})
        pipe.recv()
        errors = ErrorHandler("multicast_model")
        record = record_of(size)
        head, body = address([(7, 1)], 1), _body(record, errors)

        def send() -> None:
            while not transport.send(1, 0, (head, body)):
                transport.receive(0.001)

        def emit() -> None:
            made = encode_body([record], 1, errors)[1]
            while not transport.send(1, 0, (address([(7, 1)], 1), *made)):
                transport.receive(0.001)

        def burst(action: Callable[[], None], number: int) -> float:
            """Returns the CPU time of one action, in seconds."""
            before = time.thread_time_ns()
            for _ in range(number):
                action()
            spent = time.thread_time_ns() - before
            while not transport.receive(_LIMIT_S):
                pass
            return spent / number / 1e9

        copies, emits, encodings, halves = [], [], [], []
        for _ in range(bursts):
            copies.append(burst(send, _BURST))
            emits.append(burst(emit, _BURST))
            before = time.thread_time_ns()
            for _ in range(_BURST):
                encode_body([record], 1, errors)
            encodings.append((time.thread_time_ns() - before) / _BURST / 1e9)
        for _ in range(2 * bursts):
            began = time.monotonic_ns()
            burst(send, 1)
            halves.append((time.monotonic_ns() - began) / 2e9)
        t_r = pipe.recv()
        pipe.send("done")
        process.join(_LIMIT_S)
    finally:
        transport.close()
        process.kill()
    t_d = median(copies)
    link = max(0.0, median(halves) - t_d - t_r)
    return Measured(median(encodings), t_d, median(emits), t_r, link, len(body))


def calibrate(bench: Bench) -> dict[int, Measured]:
    """Measures both sizes in turns, and says what was found."""
    bursts = bench.pick(400, 40)
    turns = bench.take_turns({str(size): lambda size=size: measure(size, bursts) for size in SIZES})  # type: ignore[misc]
    found = {}
    for size in SIZES:
        runs = turns[str(size)]
        by_name = {name: [getattr(run, name) for run in runs] for name in ("t_s", "t_d", "t_e", "t_r", "link")}
        found[size] = Measured(**{name: median(values) for name, values in by_name.items()}, bytes=runs[0].bytes)
        for name, values in by_name.items():
            bench.case(f"{name}, {size:,} bytes", median(values) * 1e6, "us", runs=[value * 1e6 for value in values])
    return found


# --- the designs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Design:
    """A way to send each record to all tasks: the tree, what things take, and what the source encodes and sends for a
    record."""

    tree: Tree
    times: Times
    encoding_s: float
    sent_bytes: int

    @property
    def record_s(self) -> float:
        """How long the source is at a record."""
        return self.times.root_s(len(self.tree.of(self.tree.root)))


def times_of(measured: Measured, link_bits: float = math.inf) -> Times:
    """Returns the times of the model. A copy takes at least as long as the link is at it."""
    return Times(
        copy_s=max(measured.t_d, measured.bytes * 8 / link_bits),
        encode_s=measured.t_s,
        receive_s=measured.t_r,
        link_s=measured.link,
        control_s=measured.t_d,
    )


def designs(measured: Measured, tasks: int, nodes: int = NODES, link_bits: float = math.inf) -> dict[str, Design]:
    """Returns the designs by name. The source is on one of the nodes, with its share of the tasks."""
    workers = range(1, nodes)
    remote = tasks * (nodes - 1) // nodes
    times = times_of(measured, link_bits)
    head = HEAD_BYTES + ADDRESS_BYTES
    alone = HEAD_BYTES + ADDRESS_BYTES + DESTINATION_BYTES + measured.bytes
    each_s = max(measured.t_e, measured.bytes * 8 / link_bits)
    trees = {
        "to workers, sequential": sequential(0, workers),
        "binomial tree": binomial(0, workers),
        **{f"non-blocking, d*={limit}": non_blocking(0, workers, limit) for limit in (3, 2, 1)},
    }
    found = {
        "to tasks, sequential": Design(
            sequential(0, range(1, remote + 1)),
            replace(times, copy_s=each_s, encode_s=0.0),
            remote * measured.t_s,
            remote * alone,
        )
    }
    for name, tree in trees.items():
        copies = len(tree.of(0))
        named = DESTINATION_BYTES * remote * (1 if name == "to workers, sequential" else copies)
        found[name] = Design(tree, times, measured.t_s, copies * (head + measured.bytes) + named)
    return found


# --- figures against parallelism --------------------------------------------------------------------------------------


def compare(bench: Bench, label: str, measured: Measured, link_bits: float = math.inf) -> None:
    """The paper's Figs. 13 to 22 and 25 to 28: throughput, latency, share of encoding and traffic by parallelism."""
    records = bench.pick(20_000, 1500)
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {
        what: {} for what in ("throughput", "latency", "share", "sent")
    }
    for tasks in PARALLELISM:
        every = designs(measured, tasks, link_bits=link_bits)
        worst = every["to tasks, sequential"]
        common = LOAD / designs(measured, PARALLELISM[-1], link_bits=link_bits)["to tasks, sequential"].record_s
        found: dict[str, tuple[float, Steady, Steady, float, int]] = {}
        for name, design in every.items():
            most = saturated(design.tree, design.times, max(200, records // 10))
            busy = steady(design.tree, design.times, LOAD * most, records)
            quiet = steady(design.tree, design.times, common, records)
            share = design.encoding_s / design.record_s
            found[name] = (most, busy, quiet, share, design.sent_bytes)
            curves["throughput"].setdefault(name, []).append((tasks, most))
            curves["latency"].setdefault(name, []).append((tasks, busy.p50_s * 1e3))
            curves["share"].setdefault(name, []).append((tasks, share * 100))
            curves["sent"].setdefault(name, []).append((tasks, design.sent_bytes * 1e4 / 1e6))
        if tasks not in (PARALLELISM[0], PARALLELISM[-1]):
            continue
        storm = found["to tasks, sequential"]
        for name, (most, busy, quiet, share, sent) in found.items():
            where = f"{name}, {tasks} tasks, {label}"
            peer = None if name == "to tasks, sequential" else "to tasks, sequential"

            def case(
                what: str, figure: float, unit: str, other: float, where: str = where, peer: str | None = peer
            ) -> None:
                bench.case(
                    f"{what}, {where}", figure, unit, peer=peer, peer_figure=other if peer else None, config="model"
                )

            case("throughput", most, "records/s", storm[0])
            for share_of, at in (("p50", "p50_s"), ("p99", "p99_s")):
                case(
                    f"latency {share_of} at {LOAD:.0%} of its most",
                    getattr(busy, at) * 1e3,
                    "ms",
                    getattr(storm[1], at) * 1e3,
                )
            case(f"latency p50 at {common:,.0f}/s", quiet.p50_s * 1e3, "ms", storm[2].p50_s * 1e3)
            case("encoding's share of the source's time", share * 100, "%", storm[3] * 100)
            case("encoding of 10,000 records", every[name].encoding_s * 1e4, "s", worst.encoding_s * 1e4)
            case("sent for 10,000 records", sent * 1e4 / 1e6, "MB", storm[4] * 1e4 / 1e6)
    units = {"throughput": "records/s", "latency": "ms", "share": "%", "sent": "MB for 10,000 records"}
    file = label.replace(",", "").replace(" ", "-").replace("/", "-")
    for what, series in curves.items():
        bench.plot(
            f"multicast_model-{what}-{file}.png",
            f"{what}, {NODES} nodes, {label} (model)",
            series,
            "tasks",
            units[what],
            log_y=what != "share",
        )


def beside_the_paper(bench: Bench, measured: Measured) -> None:
    """The ratios that the paper gives for 480 tasks, and those of the model."""
    records = bench.pick(50_000, 2000)
    every = designs(measured, PARALLELISM[-1])
    most = {name: 1 / design.record_s for name, design in every.items()}
    tree, two = every[_PAPER_TREE], every["binomial tree"]

    def case(what: str, unit: str, name: str, figure: float, peer: str, other: float, paper: str) -> None:
        more = {"peer": peer, "peer_figure": other, "config": "model", "note": f"the paper: {paper}"}
        bench.case(f"{what}, {name}, as in the paper", figure, unit, **more)

    for peer, paper in (
        ("to tasks, sequential", "56.6x, also by RDMA and with the work of the tasks"),
        ("to workers, sequential", "1.4x"),
        ("binomial tree", "1.2x"),
    ):
        case("throughput", "records/s", _PAPER_TREE, most[_PAPER_TREE], peer, most[peer], paper)
    rate = _NEARLY * most["binomial tree"]
    ours, binomials = (steady(design.tree, design.times, rate, records) for design in (tree, two))
    what = f"latency p50 at {_NEARLY:.0%} of the binomial tree's most"
    case(what, "ms", _PAPER_TREE, ours.p50_s * 1e3, "binomial tree", binomials.p50_s * 1e3, "0.456 (average)")
    rate = _NEARLY * most["to workers, sequential"]
    sequentials = every["to workers, sequential"]
    ours, others = (steady(design.tree, design.times, rate, records) for design in (tree, sequentials))
    what = f"latency p50 at {_NEARLY:.0%} of the sequential most"
    case(what, "ms", _PAPER_TREE, ours.p50_s * 1e3, "to workers, sequential", others.p50_s * 1e3, "0.422 (average)")
    for name in ("to workers, sequential", _PAPER_TREE):
        sent = [every[one].sent_bytes * 1e4 / 1e6 for one in (name, "to tasks, sequential")]
        case("sent for 10,000 records", "MB", name, sent[0], "to tasks, sequential", sent[1], "0.081")


def by_rate(bench: Bench, measured: Measured) -> None:
    """The latency of each tree against the rate, beside a tree that has adjusted itself to this rate."""
    times = times_of(measured)
    records, seconds = bench.pick(40_000, 2000), bench.pick(4.0, 1.0)
    nodes = range(1, NODES)
    trees = {"sequential": sequential(0, nodes), "binomial": binomial(0, nodes)}
    trees |= {f"d*={limit}": non_blocking(0, nodes, limit) for limit in (3, 2, 1)}
    most = {name: 1 / times.root_s(len(tree.of(0))) for name, tree in trees.items()}
    curves: dict[str, list[tuple[float, float]]] = {}
    for part in (0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 0.95):
        rate = part * most["d*=1"]
        for name, tree in trees.items():
            if rate < _NEARLY * most[name]:
                found = steady(tree, times, rate, records)
                curves.setdefault(name, []).append((rate, found.p50_s * 1e3))
        model = Multicast(non_blocking(0, nodes, 1), 1, times, CAPACITY, adjusting=True)
        last = model.run([(seconds, rate)]).samples[-1]
        curves.setdefault("self-adjusting", []).append((rate, last.p50_s * 1e3))
        where = f"at {rate:,.0f}/s, self-adjusting, {NODES} nodes"
        bench.case(f"latency p50 {where}", last.p50_s * 1e3, "ms", config="model")
        bench.case(f"latency p99 {where}", last.p99_s * 1e3, "ms", config="model")
        bench.case(f"out-degree limit {where}", last.limit, "children", config="model")
    bench.plot(
        "multicast_model-rate-latency.png",
        f"latency p50, {NODES} nodes (model)",
        curves,
        "records/s",
        "ms",
        log_x=True,
        log_y=True,
    )


# --- rate steps -------------------------------------------------------------------------------------------------------


def steps_of(times: Times, seconds: float) -> list[tuple[float, float]]:
    """Returns the paper's steps, scaled so that two children are as much work for this machine as for the paper's."""
    factor = 2 * COPY_OF_STEPS_S / times.root_s(2)
    return [(seconds, rate * factor) for rate in STEPS]


def rate_steps(bench: Bench, measured: Measured) -> None:
    """The paper's Figs. 23 and 24: a tree that adjusts itself beside fixed ones, while the rate changes in steps."""
    times = times_of(measured)
    seconds = bench.pick(40.0, 3.0)
    profile = steps_of(times, seconds)
    nodes = range(1, NODES)
    chain = non_blocking(0, nodes, 1)
    late = AdjustmentOptions(early=1.0)
    far = replace(times, link_s=_FAR_S)
    adjusting = {
        "self-adjusting": Multicast(chain, 1, times, CAPACITY, adjusting=True),
        "self-adjusting, no early looks": Multicast(chain, 1, times, CAPACITY, adjusting=True, options=late),
        "self-adjusting, links of 10 ms": Multicast(chain, 1, far, CAPACITY, adjusting=True),
        "self-adjusting, links of 10 ms, root stops": Multicast(chain, 1, far, CAPACITY, adjusting=True, stops=True),
    }
    fixed = {
        "sequential": sequential(0, nodes),
        "binomial": binomial(0, nodes),
        **{f"d*={limit}": non_blocking(0, nodes, limit) for limit in (3, 2, 1)},
    }
    models = adjusting | {name: Multicast(tree, tree.out_degree, times, CAPACITY) for name, tree in fixed.items()}
    stories = {name: model.run(profile) for name, model in models.items()}
    for name, story in stories.items():
        if "links" not in name:
            _check_relays(name, story.longest_relay_queue)
        _tell_steps(bench, name, story, profile)
        if name in adjusting:
            _tell_switches(bench, name, story)
    marks = {f"{index + 1}: {rate:,.0f}/s": index * seconds for index, (_, rate) in enumerate(profile)}
    shown = {name: stories[name] for name in ("self-adjusting", *fixed)}
    every = max(1, len(stories["d*=1"].samples) // 200)
    values: dict[str, tuple[str, bool, Callable[[Story, int], float]]] = {
        "out-degree limit": ("children", False, lambda story, at: story.samples[at].limit),
        "queue": (
            "records in the queue and held by the source",
            True,
            lambda story, at: max(1, story.samples[at].queued + story.samples[at].held),
        ),
        "throughput": ("records/s", False, lambda story, at: story.completed[at] / story.interval_s),
        "latency p50": ("ms", True, lambda story, at: story.samples[at].p50_s * 1e3),
    }
    for what, (unit, log, value) in values.items():
        series = {
            name: [(story.samples[at].at_s, value(story, at)) for at in range(0, len(story.samples), every)]
            for name, story in shown.items()
            if what != "out-degree limit" or name != "sequential"
        }
        file = f"multicast_model-steps-{what.replace(' ', '-')}.png"
        bench.plot(file, f"{what} (model)", series, "s", unit, log_y=log, lines=marks)


def _check_relays(name: str, longest: int) -> None:
    """A relay's queue has no limit in the model, so the model holds only where none is needed."""
    if longest > CAPACITY:
        raise WrongResult(f"{name}: {longest:,} records wait at a relay, which has room for {CAPACITY:,}")


def _tell_steps(bench: Bench, name: str, story: Story, profile: list[tuple[float, float]]) -> None:
    """The figures of each step, and of the whole."""
    per = len(story.samples) // len(profile)
    for index, (seconds, rate) in enumerate(profile):
        window = slice(index * per, (index + 1) * per)
        samples = story.samples[window]
        what = f"step {index + 1} of {rate:,.0f}/s, {name}"
        done = sum(story.completed[window]) / seconds
        bench.case(f"throughput, {what}", done, "records/s", peer="input", peer_figure=rate, config="model")
        last = samples[-1]
        bench.case(f"latency p50 at the end, {what}", last.p50_s * 1e3, "ms", config="model")
        bench.case(f"latency p99 at the end, {what}", last.p99_s * 1e3, "ms", config="model")
        if story.switches:
            waited = sum(sample.held > 0 for sample in samples) * story.interval_s
            bench.case(f"out-degree limit at the end, {what}", last.limit, "children", config="model")
            bench.case(f"the source waits at looks of, {what}", waited, "s", config="model")
    bench.case(f"longest wait of a record at the source, {name}", story.longest_wait_s * 1e3, "ms", config="model")


def _tell_switches(bench: Bench, name: str, story: Story) -> None:
    """What the switches of a run cost."""
    late = sum(switch.took_s > switch.longest_s for switch in story.switches)
    note = "the queue is full already, or would be before a root that sends nothing has switched"
    bench.case(f"switches, {name}", len(story.switches), "switches", config="model")
    bench.case(f"switches too long by Theorem 4, {name}", late, "switches", config="model", note=note)
    note = "a node that gets a shorter way has early records from its new parent, and waits for the old one's"
    longest = story.longest_relay_queue
    bench.case(f"longest queue of a relay, {name}", longest, "records", config="model", note=note)
    rows: dict[str, tuple[str, Callable[[Switched], float]]] = {
        "a switch takes": ("ms", lambda switch: switch.took_s * 1e3),
        "the root stops for": ("ms", lambda switch: switch.stopped_s * 1e3),
        "longest gap at a node": ("ms", lambda switch: max(switch.gaps.values(), default=0.0) * 1e3),
        "nodes with another parent": ("nodes", lambda switch: len(switch.handed_over)),
        "control messages of a switch": ("messages", lambda switch: switch.messages),
    }
    for what, (unit, value) in rows.items():
        values = [float(value(switch)) for switch in story.switches]
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            if values:
                figure = quantile(sorted(values), share)
                bench.case(f"{what}, {label}, {name}", figure, unit, config="model", runs=values)


# --- many nodes -------------------------------------------------------------------------------------------------------


def many_nodes(bench: Bench, label: str, measured: Measured) -> None:
    """The largest rate and the latency of each tree, up to 10,000 nodes."""
    times = times_of(measured)
    cost = Cost(times.copy_s, times.encode_s)
    records = bench.pick(2000, 200)
    rates: dict[str, list[tuple[float, float]]] = {}
    delays: dict[str, list[tuple[float, float]]] = {}
    for nodes in (30, 100, 1000, 10_000):
        among = range(1, nodes)
        trees = {
            "sequential": sequential(0, among),
            "binomial": binomial(0, among),
            **{f"d*={limit}": non_blocking(0, among, limit) for limit in (3, 2, 1)},
        }
        for name, tree in trees.items():
            most = saturated(tree, times, records)
            latency = steady(tree, times, LOAD * most, records)
            _check_relays(name, latency.longest_relay_queue)
            rates.setdefault(name, []).append((nodes, most))
            delays.setdefault(name, []).append((nodes, latency.p50_s * 1e3))
            bench.case(
                f"largest rate, {name}, {nodes:,} nodes, {label}",
                most,
                "records/s",
                peer=f"Eq. 5, queue of {CAPACITY:,}",
                peer_figure=greatest_load(CAPACITY) / cost.record_s(len(tree.of(0))),
                config="model",
            )
            for share, value in (("p50", latency.p50_s), ("p99", latency.p99_s)):
                bench.case(
                    f"latency {share} at {LOAD:.0%} of it, {name}, {nodes:,} nodes, {label}",
                    value * 1e3,
                    "ms",
                    config="model",
                )
    title = f"{label} (model)"
    bench.plot(
        "multicast_model-nodes-rate.png", f"largest rate, {title}", rates, "nodes", "records/s", log_x=True, log_y=True
    )
    bench.plot(
        "multicast_model-nodes-latency.png", f"latency p50, {title}", delays, "nodes", "ms", log_x=True, log_y=True
    )


def run(bench: Bench) -> None:
    """See the module."""
    measured = calibrate(bench)
    for size in SIZES:
        compare(bench, f"{size:,} bytes", measured[size])
    compare(bench, f"{SIZES[1]:,} bytes, 1 Gbit/s", measured[SIZES[1]], _LINK_BITS)
    beside_the_paper(bench, measured[SIZES[0]])
    by_rate(bench, measured[SIZES[0]])
    rate_steps(bench, measured[SIZES[0]])
    many_nodes(bench, f"{SIZES[0]:,} bytes", measured[SIZES[0]])
