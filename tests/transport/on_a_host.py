"""A worker's end of the TCP transport on a host of tests/namespaces, which sends a numbered message every 2 ms.

    python -m tests.transport.on_a_host WORKER HOST

Each line on the standard input is answered by a line: an address connects to the peer, `look` says how many messages
have come and whether all in order, `silent` for how many seconds which peers have not answered.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
from collections import deque

from penstock.runtime.transport.tcp import TcpTransport
from tests import planting
from tests.transport.networks import KEY

_EVERY_S = 0.002
_MESSAGE = struct.Struct("<Q")


def main() -> None:
    """Runs until the standard input ends."""
    worker, host = int(sys.argv[1]), sys.argv[2]
    transport = TcpTransport(worker, KEY, host)
    lines: deque[str] = deque()
    over = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            lines.append(line.strip())
            transport.wake()
        over.set()
        transport.wake()

    threading.Thread(target=listen, daemon=True).start()
    print(transport.address, flush=True)
    sent = came = 0
    in_order = True
    connected = False
    due = time.monotonic()
    while not over.is_set():
        for _, message in transport.receive(max(0.0, due - time.monotonic())):
            (number,) = _MESSAGE.unpack(message)
            in_order = in_order and number == came
            came += 1
        while lines:
            line = lines.popleft()
            if line == "look":
                print(json.dumps([came, in_order]), flush=True)
            elif line == "silent":
                print(json.dumps({link.peer: link.for_s for link in transport.silent_links()}), flush=True)
            else:
                transport.connect({1 - worker: line})
                connected = True
                print(json.dumps("connected"), flush=True)
        if connected and time.monotonic() >= due:
            due = max(due + _EVERY_S, time.monotonic() - 0.1)
            if transport.send(1 - worker, 0, (_MESSAGE.pack(sent),)):
                sent += 1
    transport.close()


if __name__ == "__main__":
    with planting.planted(os.environ.get(planting.VARIABLE)):
        main()
