"""Carries out a JobHost's commands about relays: starts their processes, tells them what they are to know, and looks
whether they answer. It decides nothing, except that a relay that does not answer for the limit is killed.

What happens to a relay becomes an event of the JobHost. Everything that waits is done in threads, and everything else
in the supervising thread of the JobRunner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.host.carry.event_queue import Event
from penstock.host.carry.links import AllWorkers, Link
from penstock.host.decide.commands import HostCommand, KillRelay, StartRelay
from penstock.host.decide.process_commands import GetStatus, TellRelay
from penstock.host.process.hangs import SilenceDetector
from penstock.host.process.watched_process import LastWords
from penstock.runtime.errors import PenstockError
from penstock.runtime.status import RelayStatus

if TYPE_CHECKING:
    from penstock.host.carry.processes import RelayHandle, RelayStarter
    from penstock.host.decide.job_host import JobHost


# A relay that has not answered for this time may be stopped.
_SILENT_S = 1.0


class RelayRunner:
    """See the module's docstring. `put`: takes an event of the JobHost. `limit_s`: a relay that is silent for so long
    is killed."""

    def __init__(
        self, starter: RelayStarter, put: Callable[[Event], None], start_timeout_s: float, limit_s: float
    ) -> None:
        self._starter = starter
        self._put = put
        self._start_timeout_s = start_timeout_s
        self._limit_s = limit_s
        self._questions = AllWorkers()  # to relays, by number
        self._handles: dict[int, RelayHandle] = {}
        self._links: dict[int, Link] = {}
        self._wanted: set[int] = set()
        self._watched = False
        self._closed = threading.Event()

    def carry_out(self, command: StartRelay | KillRelay | TellRelay) -> None:
        """Carries out a command. Waits for nothing."""
        if isinstance(command, StartRelay):
            self._wanted.add(command.number)
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="penstock-ping-relays", daemon=True).start()
            threading.Thread(target=self._start, args=(command,), name="penstock-relay", daemon=True).start()
        elif isinstance(command, TellRelay):
            self._tell(command)
        else:
            self._kill(command.number)

    def status(self, patience_s: float) -> dict[int, RelayStatus]:
        """Returns the relays' own status, by number, of relays that answer within `patience_s` seconds."""
        try:
            return self._questions.ask(GetStatus(), patience_s)
        except PenstockError:  # one has just ended
            return {}

    def close(self) -> None:
        """Asks no relay anything more, and kills relays that do not answer. Whoever has started the others ends
        them."""
        self._closed.set()
        for number, silent_s in self._questions.silent().items():
            if silent_s > _SILENT_S:
                self._kill(number)
        self._questions.close()
        for link in self._links.values():
            link.close()

    def _start(self, command: StartRelay) -> None:
        """Starts a relay, and waits until its process has ended. Runs in a thread of its own."""
        number = command.number
        node = self._starter.node_name(command.node_id)  # later, the job may know nothing of a node that is lost
        try:
            handle = self._starter.start_relay(number, command.node_id, time.monotonic() + self._start_timeout_s)
        except Exception as error:  # whatever the carrier raises: a job runs without relays too
            why = f"it could not be started: {error}"
            self._put(lambda host: self._died(host, number, node, why))
            return
        if self._closed.is_set():
            handle.kill()
            return
        self._put(lambda host: self._ready(host, number, handle))
        reason = "it has ended"
        try:
            handle.run()
        except Exception as error:  # ProcessDied, or an error of the relay itself
            crash = (handle.process.last_words() or LastWords()).crash
            reason = f"{error}; its own doing: {crash.what}" if crash else str(error)
        handle.kill()
        self._put(lambda host: self._died(host, number, node, reason))

    def _ready(self, host: JobHost, number: int, handle: RelayHandle) -> list[HostCommand]:
        if number not in self._wanted:
            handle.kill()
            return []
        self._handles[number] = handle
        self._links[number] = Link(number, handle.info["control"])
        self._questions.connect(number, handle.info["control"], number)
        return host.of_relays(lambda relays, now: relays.relay_ready(number, handle.info, now), time.monotonic())

    def _died(self, host: JobHost, number: int, node: str, reason: str) -> list[HostCommand]:
        self._wanted.discard(number)
        self._questions.disconnect(number)
        if self._handles.pop(number, None) is not None:
            self._links.pop(number).close()
        return host.of_relays(lambda relays, now: relays.relay_died(number, node, reason, now), time.monotonic())

    def _tell(self, command: TellRelay) -> None:
        number = command.number
        if (link := self._links.get(number)) is not None:  # otherwise it has died, and the JobHost will hear of it

            def knows(host: JobHost) -> list[HostCommand]:
                return host.of_relays(lambda relays, now: relays.relay_knows(number, now), time.monotonic())

            link.send(
                command,
                lambda _: self._put(knows),
                lambda _: self._put(lambda _: self._kill(number)),  # `_start` tells of its end
            )

    def _kill(self, number: int) -> list[HostCommand]:
        self._wanted.discard(number)
        if (handle := self._handles.get(number)) is not None:
            handle.kill()
        return []

    def _watch(self) -> None:
        """Kills relays that have been silent for the limit, because they are stopped, or their loop hangs. The pings
        also show the relays that this process lives."""
        silence: SilenceDetector[int] = SilenceDetector(self._limit_s)
        while not self._closed.wait(silence.period_s):
            for number in silence.look([number for number, _ in self._questions.ping()]):
                self._put(lambda _, number=number: self._kill(number))  # type: ignore[misc]
