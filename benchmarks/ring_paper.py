"""The ring experiments of the TurboStream paper (docs/papers.md: T13): latency by message size, rate and ring size.

The paper compares with Netty; TCP over loopback, a Unix socket and ZeroMQ stand in for it. Sender on core 0, receiver
on core 1. Both sides of the ring are used as Penstock's transport uses them: large messages are read in place.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic_ns
from typing import Any

from benchmarks.common import Bench, WrongResult, median, pin, quantile
from penstock.runtime.transport.ring import Message, Ring, Wait

_STAMP = struct.Struct("<qI")
_SIZE = struct.Struct("<I")
_CONTEXT = mp.get_context("spawn")
_RING = 2 * 1024 * 1024
_SPIN_NS = 150_000  # a paced sender sleeps up to this long before a message is due, then looks at the clock

SIZES = tuple(kb * 1000 for kb in (10, 20, 40, 80, 160, 320))
RATES = (100, 300, 1_000, 3_000)
RING_CHANNELS = ("ring", "ring, sleeping")
PEERS = ("tcp loopback", "unix socket", "zeromq ipc")


def run(bench: Bench) -> None:
    """See the module."""
    channels = bench.pick((*RING_CHANNELS, *PEERS), ("ring", "tcp loopback"))
    by_size = _points(
        bench, channels, [(size, 100) for size in bench.pick(SIZES, (SIZES[0], SIZES[-1]))], bench.pick(200, 30)
    )
    _cases(bench, by_size, channels)
    _plot(bench, "ring_paper_size.png", "100 messages/s, ring 2 MB", by_size, channels, 0, "message bytes")
    for size in bench.pick((10_000, 40_000), (10_000,)):
        by_rate = _points(
            bench, channels, [(size, rate) for rate in bench.pick(RATES, (RATES[-1],))], bench.pick(6_000, 600)
        )
        _cases(bench, by_rate, channels)
        _plot(
            bench,
            f"ring_paper_rate_{size // 1000}kb.png",
            f"{size // 1000} KB messages, ring 2 MB",
            by_rate,
            channels,
            1,
            "messages/s",
        )
    _ring_sizes(bench)


def _points(
    bench: Bench, channels: tuple[str, ...], points: list[tuple[int, int]], most: int
) -> dict[tuple[int, int], dict[str, list[tuple[float, float]]]]:
    results: dict[tuple[int, int], dict[str, list[tuple[float, float]]]] = {}
    for size, rate in points:
        count = min(most, 2 * rate) if not bench.quick else min(most, rate)
        turns: dict[str, Callable[[], tuple[float, float]]] = {
            channel: partial(measure, channel, size, rate, count, _RING) for channel in channels
        }
        results[size, rate] = bench.take_turns(turns, unit=f"us p50, p99 at {size} B, {rate}/s")
    return results


def _cases(bench: Bench, results: Any, channels: tuple[str, ...]) -> None:
    for (size, rate), by_channel in results.items():
        for index, what in enumerate(("p50", "p99")):
            medians = {channel: median(r[index] for r in by_channel[channel]) for channel in channels}
            for peer in channels:
                if peer in PEERS:
                    bench.case(
                        f"{what}, {size:,} B at {rate:,}/s beside {peer}",
                        medians["ring"],
                        "us",
                        peer=peer,
                        peer_figure=medians[peer],
                        config="ring 2 MB; sender core 0, receiver core 1",
                        runs=[r[index] for r in by_channel["ring"]],
                        peer_runs=[r[index] for r in by_channel[peer]],
                    )
            if "ring, sleeping" in medians:
                bench.case(
                    f"{what}, {size:,} B at {rate:,}/s, ring that never spins",
                    medians["ring, sleeping"],
                    "us",
                    runs=[r[index] for r in by_channel["ring, sleeping"]],
                )


def _plot(bench: Bench, file: str, title: str, results: Any, channels: tuple[str, ...], axis: int, x: str) -> None:
    curves = {
        channel: [(point[axis], median(p50 for p50, _ in by[channel])) for point, by in results.items()]
        for channel in channels
    }
    bench.plot(file, f"one-way latency (p50), {title}", curves, x, "us", log_x=axis == 1, log_y=True)


def _ring_sizes(bench: Bench) -> None:
    size, rate = 8_000, 3_000
    count = bench.pick(6_000, 600)
    curves: dict[str, list[tuple[float, float]]] = {"p50": [], "p99": []}
    turns: dict[str, Callable[[], tuple[float, float]]] = {}
    for bits in bench.pick(range(14, 22), range(15, 22, 3)):
        capacity = 1 << bits
        with Ring.create(capacity) as ring:
            if ring.max_message < size:
                continue
        turns[f"{capacity}"] = partial(measure, "ring, sleeping", size, rate, count, capacity)
    results = bench.take_turns(turns, unit=f"us p50, p99 in a ring of so many bytes, {size} B at {rate}/s")
    for label, runs in results.items():
        times = int(label) / size
        for index, what in enumerate(("p50", "p99")):
            figure = median(r[index] for r in runs)
            curves[what].append((times, figure))
            bench.case(
                f"{what}, ring of {times:.0f} x the message, {size:,} B at {rate:,}/s",
                figure,
                "us",
                config="ring that never spins; sender core 0, receiver core 1",
                runs=[r[index] for r in runs],
            )
    bench.plot(
        "ring_paper_ring.png",
        f"one-way latency, {size // 1000} KB messages at {rate}/s",
        curves,
        "ring / message",
        "us",
        log_x=True,
        log_y=True,
        lines={"50 x": 50, "100 x": 100},
    )


# --- one measurement: a sender and a receiver, each in a process of its own ------------------------------------------


def measure(channel: str, size: int, rate: int, count: int, capacity: int) -> tuple[float, float]:
    """(p50, p99) one way in us; every message is checked for its number."""
    here, there = _CONTEXT.Pipe(duplex=False)
    go = _CONTEXT.Event()
    ring: Ring | None = None
    address: Any
    if channel.startswith("ring"):
        ring = Ring.create(capacity)
        address = ring.address
    elif channel == "tcp loopback":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = free.getsockname()
    else:
        address = os.path.join(tempfile.mkdtemp(prefix="bench-"), "s")
    receiver = _CONTEXT.Process(target=_receive, args=(channel, address, count, go, there))
    sender = _CONTEXT.Process(target=_send, args=(channel, address, size, rate, count, go))
    try:
        receiver.start()
        sender.start()
        if not here.poll(60 + 2 * count / rate):
            raise TimeoutError(f"{channel}: no result")
        result: tuple[float, float] | str = here.recv()
        if isinstance(result, str):
            raise WrongResult(f"{channel}: {result}")
        return result
    finally:
        for process in (receiver, sender):
            if process.pid is not None:
                process.kill()
                process.join()
        if ring is not None:
            ring.close()
        elif isinstance(address, str):
            if os.path.exists(address):
                os.unlink(address)
            os.rmdir(os.path.dirname(address))


def _send(channel: str, address: Any, size: int, rate: int, count: int, go: Any) -> None:
    pin(0)
    go.wait()
    send = _sender(channel, address)
    body = bytes(size - _STAMP.size)
    start = monotonic_ns() + 50_000_000
    for i in range(count):
        due = start + i * 1_000_000_000 // rate
        while (left := due - monotonic_ns()) > 0:
            if left > 2 * _SPIN_NS:
                time.sleep((left - _SPIN_NS) / 1e9)
        send(_STAMP.pack(monotonic_ns(), i), body)
    time.sleep(30)  # until it is ended: a queue of the channel may still hold messages


def _sender(channel: str, address: Any) -> Callable[[bytes, bytes], object]:
    if channel.startswith("ring"):
        producer = Ring.attach(address).producer()
        return lambda head, body: producer.write_parts(1, (head, body))
    if channel == "zeromq ipc":
        import zmq

        out = zmq.Context().socket(zmq.PUSH)
        out.connect(f"ipc://{address}")
        return lambda head, body: out.send(head + body)
    family = socket.AF_INET if channel == "tcp loopback" else socket.AF_UNIX
    stream = socket.socket(family, socket.SOCK_STREAM)
    stream.connect(address)
    if family == socket.AF_INET:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return lambda head, body: stream.sendall(_SIZE.pack(len(head) + len(body)) + head + body)


def _receive(channel: str, address: Any, count: int, go: Any, out: Any) -> None:
    pin(1)
    took: list[float] = []
    for payload in _receiver(channel, address, go):
        stamp, number = _STAMP.unpack_from(payload)
        took.append((monotonic_ns() - stamp) / 1e3)
        if number != len(took) - 1:
            out.send(f"message {number} came as number {len(took) - 1}")
            return
        if len(took) == count:
            break
    late = sorted(took[count // 10 :])  # the first tenth warms up
    out.send((quantile(late, 0.5), quantile(late, 0.99)))


def _receiver(channel: str, address: Any, go: Any) -> Iterator[Any]:
    if channel.startswith("ring"):
        consumer = Ring.attach(address).consumer(Wait.SLEEP if channel == "ring, sleeping" else Wait.DEFAULT)
        go.set()
        while True:
            for _, payload in consumer.drain(timeout=None):
                if isinstance(payload, Message):
                    view = payload.view()
                    yield view
                    view.release()
                    payload.release()
                else:
                    yield payload
    elif channel == "zeromq ipc":
        import zmq

        into = zmq.Context().socket(zmq.PULL)
        into.bind(f"ipc://{address}")
        go.set()
        while True:
            yield into.recv()
    else:
        listener = socket.socket(socket.AF_INET if channel == "tcp loopback" else socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
        go.set()
        stream = listener.accept()[0].makefile("rb", buffering=1 << 20)
        while head := stream.read(_SIZE.size):
            yield stream.read(*_SIZE.unpack(head))
