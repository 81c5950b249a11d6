"""Carries frames between two network devices, and keeps each for a time: a long cable, where the kernel has no netem.

    python wire.py DEVICE OTHER DELAY DELAY_BACK

The delays, in seconds, are those from DEVICE to OTHER and back; lines of standard input replace them. It prints
`ready` when it carries, and when a line has been taken. It ends with its standard input. Frames keep their order.

Frames are read with the kernel's notes on them (PACKET_VNET_HDR), so that large segments and checksums that are still
to be computed come out as they went in.
"""

import os
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23
_ALL = 3  # ETH_P_ALL
_FRAME = 10 + 14 + 4 + 65536
_SNDBUFFORCE, _RCVBUFFORCE = 32, 33
_BUFFER = 64 << 20
_AT_ONCE = 64  # frames of one device, before the other has its turn


def opened(device: str) -> socket.socket:
    """Returns a socket that receives all that comes in by a device, and sends there."""
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    raw.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    raw.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    for forced, allowed in ((_SNDBUFFORCE, socket.SO_SNDBUF), (_RCVBUFFORCE, socket.SO_RCVBUF)):
        try:
            raw.setsockopt(socket.SOL_SOCKET, forced, _BUFFER)
        except PermissionError:  # not in a user namespace
            raw.setsockopt(socket.SOL_SOCKET, allowed, _BUFFER)
    raw.bind((device, _ALL))
    raw.setblocking(False)
    return raw


class Direction:
    """What is under way in one direction."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float) -> None:
        self.source, self.target, self.delay_s = source, target, delay_s
        self.queue: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Takes what has come."""
        queue, receive = self.queue, self.source.recv
        due = time.monotonic() + self.delay_s
        try:
            for _ in range(_AT_ONCE):
                queue.append((due, receive(_FRAME)))
        except OSError:  # nothing more is there, or the device is just going
            pass

    def give(self) -> float | None:
        """Sends what is due, and returns when the next frame is."""
        queue, send = self.queue, self.target.send
        now = time.monotonic()
        while queue:
            due = queue[0][0]
            if due > now:
                return due
            with suppress(OSError):  # no room, or the device is just going: the frame is lost, as frames may be
                send(queue.popleft()[1])
        return None


def main(device: str, other: str, out_s: float, back_s: float) -> None:
    """Carries until standard input ends."""
    one, two = opened(device), opened(other)
    out, back = Direction(one, two, out_s), Direction(two, one, back_s)
    print("ready", flush=True)
    while True:
        dues = [due for due in (out.give(), back.give()) if due is not None]
        wait_s = max(0.0, min(dues) - time.monotonic()) if dues else None
        ready, _, _ = select.select([one, two, 0], [], [], wait_s)
        for direction in (out, back):
            if direction.source in ready:
                direction.take()
        if 0 in ready:
            line = os.read(0, 4096).split()
            if not line:
                return
            out.delay_s, back.delay_s = float(line[-2]), float(line[-1])
            print("ready", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
