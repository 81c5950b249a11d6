"""The programs of the transport alone in hosts_jobs.py: `python -m benchmarks.transport_peer JSON`.

Two TcpTransports on two hosts, without tasks. One sends encoded messages as quickly as it can for some seconds, then an
empty one. The other receives them, and says how many bytes of messages came in a second once the queues had filled. A
program prints the address of its transport, reads that of the other, and at the end prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from penstock.runtime.exchange.message import address, encode_body, read_head
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.transport.tcp import TcpTransport

KEY = b"the secret of one benchmark, 32 b"
_SENDER, _RECEIVER = 0, 1
_TASK = 0
_LIMIT_S = 60.0


def send(transport: TcpTransport, size: int, seconds: float) -> dict[str, Any]:
    """Sends for some seconds. All messages have about `size` bytes, and the same body, as if each record were sent to
    many tasks."""
    errors = ErrorHandler("transport_peer")
    body = encode_body([bytes(size)], 0, errors)[1]
    until = time.monotonic() + seconds
    sent = 0
    while time.monotonic() < until:
        for _ in range(8):
            message = (address([(0, 0)], sent), *body)
            while not transport.send(_RECEIVER, _TASK, message):
                transport.receive(0.001)
            sent += 1
    while not transport.send(_RECEIVER, _TASK, (b"",)):
        transport.receive(0.001)
    while not transport.leave():
        transport.receive(0.01)
    return {"sent": sent}


def receive(transport: TcpTransport, seconds: float) -> dict[str, Any]:
    """Receives until the empty message."""
    got = measured = 0
    started = first_at = last_at = 0.0
    over = False
    while not over:
        messages = transport.receive(_LIMIT_S)
        now = time.monotonic()
        started = started or now
        assert messages or now - started < seconds + _LIMIT_S, "the sender has gone"
        if not messages:
            continue
        over = not len(messages[-1][1])
        got += len(messages) - over
        if started + 0.3 * seconds <= now <= started + 0.95 * seconds:
            # What came before the first of these moments is not known to have come after its beginning.
            measured += sum(len(message) for _, message in messages) if first_at else 0
            first_at, last_at = first_at or now, now
        if not over:
            read_head(messages[-1][1])
    return {"received": got, "bytes_s": measured / (last_at - first_at)}


def main(settings: dict[str, Any]) -> None:
    """Plays its part."""
    number = settings["number"]
    transport = TcpTransport(number, KEY, settings["host"])
    print(json.dumps(transport.address), flush=True)
    transport.connect({1 - number: json.loads(sys.stdin.readline())})
    if number == _SENDER:
        found = send(transport, settings["bytes"], settings["seconds"])
    else:
        found = receive(transport, settings["seconds"])
    transport.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
