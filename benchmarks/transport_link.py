"""The TCP transport beside a bare socket pair, the ring and itself with TLS, between two processes of this machine, in
one run.

Throughput: one process sends bodies of one size as quickly as it can, the other one receives them. The bare pair sends
each body with one call (its length is known), and reads into a buffer of 1 MiB. CPU time is that of both processes, in
all their threads, with what the kernel does for them.

Latency: 100 bytes at 1,000 a second; both processes read the same monotonic clock. Of a bare pair, half of the round
trip.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import Bench, median, quantile
from penstock.runtime.transport.base import PeerTransport
from penstock.runtime.transport.certificates import JobCertificate
from penstock.runtime.transport.shm import ShmTransport
from penstock.runtime.transport.tcp import TcpTransport
from penstock.runtime.transport.tls import TlsContexts

_HOST = "127.0.0.1"
_KEY = b"the secret of one benchmark, 32 b"
_SIZES = (150, 2 * 1024, 32 * 1024, 256 * 1024)
_STAMP = struct.Struct("<q")
_LATENCY_BYTES = 100
_RATE = 1000
_LIMIT_S = 120.0


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _make(kind: str, worker: int, certificate: JobCertificate) -> Any:
    if kind == "shm":
        return ShmTransport(worker)
    return TcpTransport(worker, _KEY, _HOST, tls=TlsContexts(certificate) if kind == "tls" else None)


# --- throughput -------------------------------------------------------------------------------------------------------


def _receive(kind: str, size: int, count: int, pipe: Any, certificate: JobCertificate) -> None:
    """The receiving process."""
    transport: PeerTransport = _make(kind, 1, certificate)
    pipe.send(transport.address)
    transport.connect({0: pipe.recv()})
    pipe.send("ready")
    while not transport.receive(_LIMIT_S):  # the first message says that both are connected
        pass
    pipe.send("connected")
    before = _cpu_s()
    got = 0
    while got < count:
        messages = transport.receive(_LIMIT_S)
        got += len(messages)
        assert len(messages[-1][1]) == size, "a message of another size"
    pipe.send((time.monotonic(), _cpu_s() - before))
    pipe.recv()
    transport.close()


def _send(kind: str, size: int, count: int, certificate: JobCertificate) -> tuple[float, float]:
    """Returns the seconds and the CPU seconds of both processes for `count` bodies."""
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(target=_receive, args=(kind, size, count, there, certificate), daemon=True)
    process.start()
    transport: PeerTransport = _make(kind, 0, certificate)
    address = pipe.recv()
    pipe.send(transport.address)
    transport.connect({1: address})
    pipe.recv()
    body = os.urandom(size)
    parts = (body[:16], body[16:])  # as a message of a channel: a head and its batch
    send = transport.send
    transport.send(1, 0, parts)
    _until(transport, lambda: pipe.poll(0))
    pipe.recv()
    for _ in range(100):
        transport.receive(0.002)
    before, started = _cpu_s(), time.monotonic()
    for _ in range(count):
        while not send(1, 0, parts):
            transport.receive(0.001)
    while not pipe.poll(0):
        transport.receive(0.001)
    ended, cpu = pipe.recv()
    own = _cpu_s() - before
    pipe.send("done")
    process.join(_LIMIT_S)
    transport.close()
    return ended - started, own + cpu


def _until(transport: PeerTransport, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        transport.receive(0.001)


def _bare_receive(size: int, count: int, pipe: Any) -> None:
    with socket.create_server((_HOST, 0)) as listener:
        pipe.send(listener.getsockname())
        connection, _ = listener.accept()
    before = _cpu_s()
    buffer = memoryview(bytearray(1024 * 1024))
    left = size * count
    while left:
        got = connection.recv_into(buffer)
        assert got, "the sender has gone"
        left -= got
    pipe.send((time.monotonic(), _cpu_s() - before))
    pipe.recv()
    connection.close()


def _bare_send(size: int, count: int) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(target=_bare_receive, args=(size, count, there), daemon=True)
    process.start()
    connection = socket.create_connection(pipe.recv())
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    body = os.urandom(size)
    before, started = _cpu_s(), time.monotonic()
    for _ in range(count):
        connection.sendall(body)
    ended, cpu = pipe.recv()
    own = _cpu_s() - before
    pipe.send("done")
    process.join(_LIMIT_S)
    connection.close()
    return ended - started, own + cpu


# --- latency ----------------------------------------------------------------------------------------------------------


def _stamps(kind: str, count: int, pipe: Any, certificate: JobCertificate) -> None:
    """The receiving process: how old each message is when it comes."""
    transport: PeerTransport = _make(kind, 1, certificate)
    pipe.send(transport.address)
    transport.connect({0: pipe.recv()})
    pipe.send("ready")
    ages: list[int] = []
    now, unpack = time.monotonic_ns, _STAMP.unpack_from
    while len(ages) < count:
        messages = transport.receive(_LIMIT_S)
        at = now()
        ages += [at - unpack(message)[0] for _, message in messages]
    pipe.send(ages)
    pipe.recv()
    transport.close()


def _latency(kind: str, count: int, certificate: JobCertificate) -> list[int]:
    """Returns the ages of the messages, in ns."""
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    warm = _RATE // 4
    process = context.Process(target=_stamps, args=(kind, count + warm, there, certificate), daemon=True)
    process.start()
    transport: PeerTransport = _make(kind, 0, certificate)
    address = pipe.recv()
    pipe.send(transport.address)
    transport.connect({1: address})
    pipe.recv()
    rest = bytes(_LATENCY_BYTES - _STAMP.size)
    due = time.monotonic()
    for _ in range(count + warm):
        due += 1 / _RATE
        while (left := due - time.monotonic()) > 0:
            transport.receive(left)
        while not transport.send(1, 0, (_STAMP.pack(time.monotonic_ns()), rest)):
            transport.receive(0.001)
    while not pipe.poll(0):
        transport.receive(0.01)
    ages: list[int] = pipe.recv()
    pipe.send("done")
    process.join(_LIMIT_S)
    transport.close()
    return sorted(ages[warm:])


def _bare_echo(count: int, pipe: Any) -> None:
    with socket.create_server((_HOST, 0)) as listener:
        pipe.send(listener.getsockname())
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(count):
        connection.sendall(connection.recv(_LATENCY_BYTES, socket.MSG_WAITALL))
    connection.close()


def _bare_latency(count: int) -> list[int]:
    """Returns half of each round trip, in ns."""
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    warm = _RATE // 4
    process = context.Process(target=_bare_echo, args=(count + warm, there), daemon=True)
    process.start()
    connection = socket.create_connection(pipe.recv())
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    body = bytes(_LATENCY_BYTES)
    halves: list[int] = []
    due = time.monotonic()
    for _ in range(count + warm):
        due += 1 / _RATE
        time.sleep(max(0.0, due - time.monotonic()))
        at = time.monotonic_ns()
        connection.sendall(body)
        connection.recv(_LATENCY_BYTES, socket.MSG_WAITALL)
        halves.append((time.monotonic_ns() - at) // 2)
    process.join(_LIMIT_S)
    connection.close()
    return sorted(halves[warm:])


# --- the benchmark ----------------------------------------------------------------------------------------------------


def run(bench: Bench) -> None:
    """Measure throughput by body size, and latency."""
    certificate = JobCertificate.make()
    for size in _SIZES:
        total = bench.pick(400, 60) * 1024 * 1024
        count = max(200, min(total // size, bench.pick(300_000, 40_000)))
        contestants: dict[str, Callable[[], tuple[float, float]]] = {
            "tcp": lambda size=size, count=count: _send("tcp", size, count, certificate),
            "tls": lambda size=size, count=count: _send("tls", size, count, certificate),
            "bare": lambda size=size, count=count: _bare_send(size, count),
        }
        results = bench.take_turns(contestants, unit="(s, CPU s)")
        gigabytes = size * count / 1e9
        rate = {label: [gigabytes * 1000 / seconds for seconds, _ in runs] for label, runs in results.items()}
        bench.case(
            f"throughput of {size:,} bytes",
            median(rate["tcp"]),
            "MB/s",
            peer="bare socket pair",
            peer_figure=median(rate["bare"]),
            goal=">= 0.5",
            runs=rate["tcp"],
            peer_runs=rate["bare"],
        )
        bench.case(
            f"throughput of {size:,} bytes with TLS",
            median(rate["tls"]),
            "MB/s",
            peer="TCP without TLS",
            peer_figure=median(rate["tcp"]),
            runs=rate["tls"],
            peer_runs=rate["tcp"],
        )
        cpu = {label: [busy for _, busy in runs] for label, runs in results.items()}
        for unit, per in (("CPU s/GB", gigabytes), ("CPU us/message", count / 1e6)):
            bench.case(
                f"cost of {size:,} bytes",
                median(cpu["tcp"]) / per,
                unit,
                peer="bare socket pair",
                peer_figure=median(cpu["bare"]) / per,
                runs=[one / per for one in cpu["tcp"]],
                peer_runs=[one / per for one in cpu["bare"]],
            )
            bench.case(
                f"cost of {size:,} bytes with TLS",
                median(cpu["tls"]) / per,
                unit,
                peer="TCP without TLS",
                peer_figure=median(cpu["tcp"]) / per,
                runs=[one / per for one in cpu["tls"]],
                peer_runs=[one / per for one in cpu["tcp"]],
            )
    count = bench.pick(5000, 1000)
    ages = bench.take_turns(
        {
            "tcp": lambda: _latency("tcp", count, certificate),
            "tls": lambda: _latency("tls", count, certificate),
            "ring": lambda: _latency("shm", count, certificate),
            "bare": lambda: _bare_latency(count),
        }
    )
    for share in (0.5, 0.99):
        us = {label: [quantile(run, share) / 1000 for run in runs] for label, runs in ages.items()}
        limit = median(us["ring"]) + 2.5 * median(us["bare"])
        bench.case(
            f"one way, 100 bytes at {_RATE:,}/s, p{share * 100:g}",
            median(us["tcp"]),
            "us",
            peer="the ring + 2.5 x half a bare round trip" if share == 0.5 else None,
            peer_figure=limit if share == 0.5 else None,
            goal="<= 1" if share == 0.5 else None,
            runs=us["tcp"],
            note=f"ring {median(us['ring']):.1f} us, half a bare round trip {median(us['bare']):.1f} us",
        )
        bench.case(
            f"one way, 100 bytes at {_RATE:,}/s with TLS, p{share * 100:g}",
            median(us["tls"]),
            "us",
            peer="TCP without TLS",
            peer_figure=median(us["tcp"]),
            runs=us["tls"],
            peer_runs=us["tcp"],
        )
