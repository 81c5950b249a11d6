"""Runs a relay: waits for messages, lets the relay take them, and carries out what other threads ask for in between.

A relay that has nothing to do sleeps in its transport. It must never wait anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from penstock.runtime.calls import Calls
from penstock.runtime.errors import PenstockError
from penstock.runtime.relaying.relay import Relay
from penstock.runtime.transport.base import PeerTransport

_T = TypeVar("_T")

# The first and the longest wait for room, of which no message tells. Each wait is twice as long as the one before.
_ROOM_WAIT_FIRST_S = 0.0001
_ROOM_WAIT_MAX_S = 0.005


class RelayEnded(PenstockError):
    """The relay does nothing any more."""


class RelayLoop:
    """See the module's docstring. `run` is called in one thread, and everything else in any thread."""

    def __init__(self, relay: Relay, transport: PeerTransport) -> None:
        self.relay = relay
        self._transport = transport
        self._calls = Calls(transport.wake, lambda: RelayEnded("the relay has ended"))
        self._over = False

    def run(self) -> None:
        """Runs until `end` is called."""
        relay, transport = self.relay, self._transport
        wait_s: float | None = None
        room_wait_s = 0.0
        try:
            while not self._over:
                for sender, message in transport.receive(wait_s):
                    relay.take(sender, message)
                self._calls.carry_out()
                relay.flush()
                if relay.waiting:
                    room_wait_s = min(_ROOM_WAIT_MAX_S, 2 * room_wait_s or _ROOM_WAIT_FIRST_S)
                    wait_s = room_wait_s
                else:
                    wait_s, room_wait_s = None, 0.0
                if self._calls.waiting:
                    wait_s = 0.0
        finally:
            self._calls.end()

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Lets the thread of `run` call a function between two messages."""
        return self._calls.ask(function)

    def end(self) -> None:
        """Makes `run` return."""
        self._over = True
        self._transport.wake()
