"""Which relay serves which worker: what the JobMaster tells the workers of a job that spans nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RelayMap:
    """The relays that are ready. Each life of a relay has a number of its own."""

    #: The address of each relay's transport, by the number of the relay.
    addresses: Mapping[int, str] = field(default_factory=dict)
    #: The relay of each worker's node. Workers are missing while their node has none.
    of_worker: Mapping[int, int] = field(default_factory=dict)
    #: The process of each relay, by the number of the relay. Only workers of its own node can make use of it.
    pids: Mapping[int, int] = field(default_factory=dict)
