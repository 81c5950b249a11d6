"""The process of a relay, on any carrier: what the JobMaster asks it, and the loop of its relay (docs/papers.md: W2).

The relay's loop runs in the main thread, and control threads answer the JobMaster. A question goes through the loop, so
that a loop that does not come round shows as silence. A relay that hears nothing from the JobMaster for the limit ends
itself: nothing of a job may be left where nobody looks for it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from penstock.host.decide.process_commands import GetStatus, Ping, TellRelay
from penstock.host.process.control import ControlServer
from penstock.host.process.hangs import on_silence
from penstock.host.process.loop_thread import prepare_loop_thread
from penstock.host.process.machine import machine_id
from penstock.host.process.network import Network, make_transport
from penstock.runtime.relaying.relay import Relay
from penstock.runtime.relaying.relay_loop import RelayLoop
from penstock.runtime.transport.shm import RING_BYTES
from penstock.runtime.worker.blackbox import BlackBox

logger = logging.getLogger(__name__)


class RelayProcess:
    """See the module's docstring. The calls come in the order prepare, run. `leave` is called when the JobMaster has
    been silent for the limit."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self._over = threading.Event()

    def prepare(
        self, number: int, job: str, network: Network, ring_bytes: int | None, host: str, node: str
    ) -> dict[str, Any]:
        """Becomes the relay of this number, and returns where it can be reached. `ring_bytes`: of the job's workers.
        `node`: the node on which this process runs. `host`: the numeric address of its machine."""
        self._job = job
        self._limit_s = network.node_timeout_s
        self._box = BlackBox()
        # Its own inbox gets small messages only. It stays where it is, so that a worker finds it, however late.
        transport = make_transport(number, ring_bytes, RING_BYTES, network, host, keeps_size=True)
        self._relay = Relay(number, transport)
        self._loop = RelayLoop(self._relay, transport)
        self._control = ControlServer(self.obey, network.ports(host))
        on_silence(lambda: self._control.heard, self._limit_s, self._silent, self._over)
        return {
            "number": number,
            "pid": os.getpid(),
            "node_id": node,
            "machine": machine_id(),
            "address": transport.address,
            "control": self._control.end,
            "blackbox": self._box.address,
        }

    def run(self) -> None:
        """Runs the relay. Returns only when the JobMaster has been silent; raises an error when the relay has
        failed."""
        prepare_loop_thread()
        self._box.watch_this_process()
        self._loop.run()

    # --- answered by control threads ---------------------------------------------------------------------------

    def obey(self, command: TellRelay | GetStatus | Ping) -> Any:
        """Carries out a command in the loop, so that the answer shows that the loop has come round."""
        match command:
            case TellRelay(_, workers, relays):
                return self._loop.call(lambda: self._relay.use(workers, relays)).result()
            case GetStatus():
                return self._loop.call(self._relay.status).result()
            case Ping():
                return self._loop.call(lambda: None).result()

    def _silent(self) -> None:
        self._over.set()
        logger.warning("job %s: a relay has heard nothing of its JobMaster for %g s", self._job, self._limit_s)
        self._box.leaves(f"it had heard nothing of the JobMaster for {self._limit_s:g} s")
        self._leave()
