"""The ring beside its peers, from Python, process to process, in one run: latency and messages a second.

    python benchmarks/ring_peers.py [--quick] [--json FILE]

Latency is one way: the sender's clock is in the message, both processes read the same monotonic clock. The sender
keeps its rate by the clock and does not wait for the receiver. Sender and receiver are pinned to a core each. Every
figure is the median of the runs' medians; the runs of the channels take turns, so that a machine that is busy for a
while is so for all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from penstock.runtime.transport.ring import Ring, Wait, recommended_capacity

STAMP = struct.Struct("<d")
CONTEXT = mp.get_context("spawn")


# ---- channels: what a sender and a receiver do. `make` runs in the parent and gives what is passed to both.


def ring_make(size: int) -> Any:
    return Ring.create(max(recommended_capacity(size), 2 * 1024 * 1024))


def ring_pass(ring: Ring) -> Any:
    return ring.address


def ring_sender(address: str) -> Callable[[bytes], object]:
    write = Ring.attach(address).producer().write
    return lambda payload: write(1, payload)


def ring_receiver(wait: Wait) -> Callable[[str], Iterator[bytes | memoryview]]:
    def receive(address: str) -> Iterator[bytes | memoryview]:
        drain = Ring.attach(address).consumer(wait).drain

        def messages() -> Iterator[bytes | memoryview]:
            while True:
                for _, payload in drain(timeout=None):
                    if isinstance(payload, bytes):
                        yield payload
                    else:  # read in place, as iceoryx2's are
                        with payload.view() as view:
                            yield view
                        payload.release()

        return messages()

    return receive


def queue_receiver(queue: Any) -> Iterator[bytes]:
    return iter(queue.get, None)


def pipe_receiver(ends: Any) -> Iterator[bytes]:
    return iter(ends[0].recv_bytes, None)


def queue_sender(queue: Any) -> Callable[[bytes], object]:
    return lambda payload: queue.put(bytes(payload))  # a copy: a thread of the queue pickles it later


def socket_receiver(ends: Any) -> Iterator[memoryview]:
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    return iter(lambda: view[: ends[0].recv_into(buffer)], None)


def socket_make(_: int) -> Any:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
    return ends


def zmq_make(_: int) -> str:
    return f"ipc://{tempfile.mkdtemp()}/zmq"


def zmq_sender(address: str) -> Callable[[bytes], object]:
    import zmq

    s = zmq.Context().socket(zmq.PUSH)
    s.set_hwm(20_000)
    s.connect(address)
    return s.send


def zmq_receiver(address: str) -> Iterator[bytes]:
    import zmq

    s = zmq.Context().socket(zmq.PULL)
    s.set_hwm(20_000)
    s.bind(address)
    return iter(s.recv, None)


def iceoryx_make(size: int) -> Any:
    return (f"penstock-bench-{os.getpid()}-{time.monotonic_ns()}", size)


def iceoryx_open(name: str) -> tuple[Any, Any, Any]:
    import ctypes

    import iceoryx2 as iox2

    iox2.set_log_level(iox2.LogLevel.Error)
    node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
    service = (
        node.service_builder(iox2.ServiceName.new(name))
        .publish_subscribe(iox2.Slice[ctypes.c_uint8])
        .enable_safe_overflow(False)
        .subscriber_max_buffer_size(256)
        .max_publishers(8)
        .history_size(0)
        .open_or_create()
    )
    event = node.service_builder(iox2.ServiceName.new(name + "-event")).event().open_or_create()
    return node, service, event


def iceoryx_sender(passed: Any) -> Callable[[bytes | bytearray], object]:
    import ctypes

    import iceoryx2 as iox2

    name, size = passed
    node, service, event = iceoryx_open(name)
    publisher = (
        service.publisher_builder()
        .initial_max_slice_len(size)
        .backpressure_strategy(iox2.BackpressureStrategy.RetryUntilDelivered)
        .create()
    )
    notifier = event.notifier_builder().create()

    def send(payload: bytes | bytearray) -> None:
        sample = publisher.loan_slice_uninit(len(payload))
        source = payload if isinstance(payload, bytes) else (ctypes.c_char * len(payload)).from_buffer(payload)
        ctypes.memmove(sample.payload().as_ptr(), source, len(payload))
        sample.assume_init().send()
        notifier.notify()

    send.keep = node  # type: ignore[attr-defined]
    return send


def iceoryx_receiver(passed: Any) -> Iterator[memoryview]:
    import ctypes

    node, service, event = iceoryx_open(passed[0])
    subscriber = service.subscriber_builder().create()
    listener = event.listener_builder().create()

    def messages() -> Iterator[bytes]:
        while True:
            sample = subscriber.receive()
            if sample is None:
                listener.blocking_wait()
                continue
            payload = sample.payload()
            yield memoryview((ctypes.c_char * payload.len()).from_address(payload.as_ptr()))
            sample.delete()

    messages.keep = node  # type: ignore[attr-defined]
    return messages()


def same(x: Any) -> Any:
    return x


CHANNELS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "ring": (ring_make, ring_pass, ring_sender, ring_receiver(Wait.DEFAULT)),
    "ring sleep": (ring_make, ring_pass, ring_sender, ring_receiver(Wait.SLEEP)),
    "ring spin": (ring_make, ring_pass, ring_sender, ring_receiver(Wait.SPIN)),
    "mp.Queue": (lambda _: CONTEXT.Queue(), same, queue_sender, queue_receiver),
    "pipe": (lambda _: CONTEXT.Pipe(duplex=False), same, lambda ends: ends[1].send_bytes, pipe_receiver),
    "unix socket": (socket_make, same, lambda ends: ends[1].send, socket_receiver),
    "zeromq ipc": (zmq_make, same, zmq_sender, zmq_receiver),
    "iceoryx2": (iceoryx_make, same, iceoryx_sender, iceoryx_receiver),
}
OURS = ("ring", "ring sleep", "ring spin")


def pin(core: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


# ---- the two roles


def send_paced(channel: str, passed: Any, size: int, rate: int, count: int, ready: Any) -> None:
    pin(0)
    send = CHANNELS[channel][2](passed)
    payload = bytearray(size)
    ready.wait()
    clock = time.perf_counter
    start = clock()
    for i in range(count):
        while clock() - start < i / rate:
            pass
        STAMP.pack_into(payload, 0, clock())
        send(payload)
    time.sleep(5 if channel == "zeromq ipc" else 0.5)  # its messages leave from a thread of this process


def receive_paced(channel: str, passed: Any, count: int, ready: Any, out: Any) -> None:
    pin(1)
    messages = CHANNELS[channel][3](passed)
    clock = time.perf_counter
    ready.set()
    took = []
    for payload in messages:
        took.append(clock() - STAMP.unpack_from(payload)[0])
        if len(took) == count:
            break
    late = sorted(took[count // 10 :])
    out.send((late[len(late) // 2] * 1e6, late[len(late) * 99 // 100] * 1e6))


def send_flood(channel: str, passed: Any, size: int, count: int, core: int | None, ready: Any) -> None:
    if core is not None:
        pin(core)
    send = CHANNELS[channel][2](passed)
    body = bytes(size)
    if channel == "ring":  # the channel's own call, as for the others
        write = Ring.attach(passed).producer().write
        ready.wait()
        for _ in range(count):
            write(1, body)
    else:
        ready.wait()
        for _ in range(count):
            send(body)
    time.sleep(1)


def receive_flood(channel: str, passed: Any, count: int, core: int | None, ready: Any, out: Any) -> None:
    if core is not None:
        pin(core)
    if channel == "ring":
        consumer = Ring.attach(passed).consumer()
        ready.set()
        seen = len(consumer.drain(timeout=None))
        start = time.perf_counter()
        first = seen
        while seen < count:
            seen += len(consumer.drain(timeout=None))
    else:
        messages = CHANNELS[channel][3](passed)
        ready.set()
        next(messages)
        start = time.perf_counter()
        first = seen = 1
        for _ in messages:
            seen += 1
            if seen == count:
                break
    out.send((seen - first) / (time.perf_counter() - start))


def run(
    channel: str, size: int, senders: int, receiver: Callable[..., None], sender: Callable[..., None], *args: Any
) -> Any:
    make, to_pass, _, _ = CHANNELS[channel]
    made = make(size)
    passed = to_pass(made)
    ready = CONTEXT.Event()
    here, there = CONTEXT.Pipe(duplex=False)
    flood = sender is send_flood
    if flood:
        (count,) = args
        core = None if senders > 1 else 1
        reader = CONTEXT.Process(target=receiver, args=(channel, passed, count * senders, core, ready, there))
        writers = [
            CONTEXT.Process(target=sender, args=(channel, passed, size, count, None if senders > 1 else 0, ready))
            for _ in range(senders)
        ]
    else:
        rate, count = args
        reader = CONTEXT.Process(target=receiver, args=(channel, passed, count, ready, there))
        writers = [CONTEXT.Process(target=sender, args=(channel, passed, size, rate, count, ready))]
    processes = [reader, *writers]
    for p in processes:
        p.start()
    try:
        if not here.poll(60):
            raise TimeoutError(f"{channel}: no result")
        return here.recv()
    finally:
        for p in processes:
            p.kill()
            p.join()


def machine() -> dict[str, Any]:
    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")
    return {
        "machine": f"{model or platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "versions": {"python": platform.python_version(), **{n: of(n) for n in ("penstock", "pyzmq", "iceoryx2")}},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one run of each instead of five")
    parser.add_argument("--only", help="the channels to run, separated by commas")
    parser.add_argument("--json", help="also append one JSON object a figure to this file")
    options = parser.parse_args()
    runs = 1 if options.quick else 5
    channels = options.only.split(",") if options.only else list(CHANNELS)
    about = machine()

    def attempt(channel: str, *args: Any) -> Any:
        try:
            return run(channel, *args)
        except (ImportError, TimeoutError, EOFError) as error:
            print(f"  {channel}: {error!r}", file=sys.stderr)
            return None

    def report(name: str, unit: str, figures: dict[str, float], better: Callable[..., float]) -> None:
        peers = {c: f for c, f in figures.items() if c not in OURS}
        best = better(peers, key=lambda c: peers[c]) if peers else None
        for channel, figure in figures.items():
            ratio = figure / peers[best] if best else None
            line = {
                "name": f"{name}, {channel}",
                "figure": round(figure, 3),
                "unit": unit,
                "peer": best,
                "peer_figure": best and round(peers[best], 3),
                "ratio": ratio and round(ratio, 3),
                "runs": runs,
            }
            print(f"{name:44} {channel:12} {figure:12.2f} {unit:4} {'' if ratio is None else f'{ratio:8.2f} x {best}'}")
            if options.json:
                with Path(options.json).open("a", encoding="utf-8") as out:
                    print(json.dumps({**line, **about}), file=out)

    for size, rate, count in ((100, 20_000, 20_000), (10_000, 3_000, 4_000), (40_000, 3_000, 4_000)):
        p50: dict[str, list[float]] = {}
        p99: dict[str, list[float]] = {}
        for _ in range(runs):
            for channel in channels:
                result = attempt(channel, size, 1, receive_paced, send_paced, rate, count)
                if result:
                    p50.setdefault(channel, []).append(result[0])
                    p99.setdefault(channel, []).append(result[1])
        name = f"one way, {size} B at {rate}/s"
        report(f"{name}, p50", "us", {c: statistics.median(v) for c, v in p50.items()}, min)
        report(f"{name}, p99", "us", {c: statistics.median(v) for c, v in p99.items()}, min)
    for senders in (1, 4):
        rates: dict[str, list[float]] = {}
        for _ in range(runs):
            for channel in channels:
                if channel in OURS[1:]:
                    continue
                count = {"ring": 4_000_000}.get(channel, 200_000) // senders
                result = attempt(channel, 100, senders, receive_flood, send_flood, count)
                if result:
                    rates.setdefault(channel, []).append(result / 1e6)
        report(f"100 B messages, {senders} producers", "M/s", {c: statistics.median(v) for c, v in rates.items()}, max)


if __name__ == "__main__":
    main()
