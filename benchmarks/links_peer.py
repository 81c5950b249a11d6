"""A plain program on each host of `hosts_links`: takes bodies over a socket and sends them on to its children.

`python -m benchmarks.links_peer JSON`. It prints `ready` when it listens, and at the end a line of JSON. A root begins
when a line comes by its standard input. All hosts have one monotonic clock.
"""

from __future__ import annotations

import json
import resource
import socket
import struct
import sys
import time
from typing import Any

PORT = 9100
_STAMP = struct.Struct("<q")
_NS = 1_000_000_000


def _connected(addresses: list[str]) -> list[socket.socket]:
    children = [socket.create_connection((address, PORT), timeout=60) for address in addresses]
    for child in children:
        child.settimeout(None)
        child.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return children


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def send(settings: dict[str, Any], children: list[socket.socket]) -> dict[str, Any]:
    """Sends bodies of `bytes` to the children in turn for `seconds`, `rate` a second or as many as it can."""
    size, rate = settings["bytes"], settings["rate"]
    rest = bytes(size - _STAMP.size)
    started = time.monotonic_ns()
    until = started + int(settings["seconds"] * _NS)
    sent = 0
    while True:
        due = now = time.monotonic_ns()
        if rate:
            due = started + sent * _NS // rate
            if due > now:
                time.sleep((due - now) / _NS)
        if due >= until:
            break
        body = _STAMP.pack(due) + rest
        for child in children:
            child.sendall(body)
        sent += 1
    return {"sent": sent}


def forward(settings: dict[str, Any], parent: socket.socket, children: list[socket.socket]) -> dict[str, Any]:
    """Takes bodies until the parent closes, and sends each on; when each came, and how old it was."""
    body = memoryview(bytearray(settings["bytes"]))
    arrived, ages = [], []
    while True:
        got = 0
        while got < len(body):
            more = parent.recv_into(body[got:])
            if not more:
                assert not got, "the connection ended within a body"
                return {"arrived": arrived, "ages": ages}
            got += more
        now = time.monotonic_ns()
        arrived.append(now)
        ages.append(now - _STAMP.unpack_from(body)[0])
        for child in children:
            child.sendall(body)


def answer(parent: socket.socket) -> dict[str, Any]:
    """Sends back what comes, at once."""
    while data := parent.recv(65536):
        parent.sendall(data)
    return {}


def ask(child: socket.socket, count: int, rate: int) -> dict[str, Any]:
    """How long a byte takes there and back, so many times; `rate` times a second, or one after the other."""
    took: list[int] = []
    started = time.monotonic_ns()
    while len(took) < count:
        if rate:
            time.sleep(max(0, started + len(took) * _NS // rate - time.monotonic_ns()) / _NS)
        since = time.perf_counter_ns()
        child.sendall(b"?")
        child.recv(1)
        took.append(time.perf_counter_ns() - since)
    return {"took": took}


def main(settings: dict[str, Any]) -> None:
    """Plays its part: "send", "forward", "ask" or "answer"."""
    part = settings["part"]
    if part in ("send", "ask"):
        children = _connected(settings["children"])
        print("ready", flush=True)
        sys.stdin.readline()
        before = _cpu_s()
        done = send(settings, children) if part == "send" else ask(children[0], settings["count"], settings["rate"])
    else:
        door = socket.create_server(("", PORT))
        print("ready", flush=True)
        parent, _ = door.accept()
        parent.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        children = _connected(settings.get("children", []))
        before = _cpu_s()
        done = forward(settings, parent, children) if part == "forward" else answer(parent)
    for child in children:
        child.close()
    print(json.dumps({**done, "cpu_s": _cpu_s() - before}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
