"""The lives of a job's workers: which process each worker has, and how large its ring has grown.

A worker's *incarnation* is the number of its present process. Incarnations of a worker only grow, so that whatever an
earlier process of the worker says late is known to be late.
"""

from __future__ import annotations

from typing import Any, Literal

from penstock.runtime.lifecycle import State, StateMachine, Table
from penstock.runtime.worker.blackbox import Crash


class LifeState(State):
    """The state of a worker's process, as far as a JobHost knows."""

    NONE = "NONE", "The worker has no process: none has been started, or the last one is dead to the job."
    STARTING = "STARTING", "A process is being started, and has not said yet that it is ready."
    RUNNING = "RUNNING", "The run loop of the process runs."


LifeEvent = Literal["start", "ready", "not started", "over"]
"""`start`: the host commands that a process be started. `ready`, `not started`: the carrier reports what became of it.
`over`: the run loop has ended, or the process has died."""

LIFE: Table[LifeState, LifeEvent] = Table(
    LifeState,
    LifeState.NONE,
    {
        (LifeState.NONE, "start"): LifeState.STARTING,
        (LifeState.STARTING, "ready"): LifeState.RUNNING,
        (LifeState.STARTING, "not started"): LifeState.NONE,
        (LifeState.RUNNING, "over"): LifeState.NONE,
    },
)


class _Life(StateMachine[LifeState, LifeEvent]):
    """One worker's present process, by its incarnation."""

    __slots__ = ("incarnation", "info")

    def __init__(self, worker: int, first: int) -> None:
        super().__init__(LIFE, f"process of worker {worker}")
        self.incarnation = first
        self.info: dict[str, Any] | None = None

    def of(self, incarnation: int, event: LifeEvent) -> None:
        """Take an event of the process of this incarnation."""
        if incarnation != self.incarnation:
            raise self.refusal(event, f"of process {incarnation}; the present one is {self.incarnation}")
        self.move(event)


class WorkerLives:
    """See the module's docstring."""

    def __init__(self, workers: int, first: int = 0) -> None:
        """`first`: no incarnation so far has a larger number."""
        self._lives = {worker: _Life(worker, first) for worker in range(workers)}
        self._ring_sizes: dict[int, int] = {}
        self._hung: dict[tuple[int, int], Crash | None] = {}
        self.running: set[int] = set()  # the workers whose run loop runs

    def starting(self, worker: int) -> int:
        """A process is being started for this worker. Returns its incarnation."""
        life = self._lives[worker]
        life.move("start")
        life.incarnation += 1
        return life.incarnation

    def ready(self, worker: int, incarnation: int, info: dict[str, Any]) -> None:
        """The process can now build tasks. `info`: what it has said of itself."""
        life = self._lives[worker]
        life.of(incarnation, "ready")
        life.info = info
        self.running.add(worker)

    def not_started(self, worker: int, incarnation: int) -> None:
        """The process could not be started."""
        self._lives[worker].of(incarnation, "not started")

    def over(self, worker: int) -> None:
        """The run of the worker's present process has ended, or the process has died."""
        self._lives[worker].move("over")
        self.running.discard(worker)

    def present(self, worker: int, incarnation: int) -> bool:
        """Whether this is the worker's present process, and its run loop runs. If not, whatever the process has said
        comes late: it is dead to the job."""
        life = self._lives[worker]
        return life.incarnation == incarnation and life.state == LifeState.RUNNING

    def without_run(self) -> list[int]:
        """Returns the workers whose run loop does not run."""
        return sorted(self._lives.keys() - self.running)

    def incarnation(self, worker: int) -> int:
        """The number of the worker's last process."""
        return self._lives[worker].incarnation

    def infos(self) -> list[dict[str, Any]]:
        """The report of each worker's last process about itself, and the state of the worker's process now, in the
        order of the workers."""
        lives = (life for _, life in sorted(self._lives.items()))
        return [{**life.info, "state": life.state.name} for life in lives if life.info is not None]

    @property
    def all_have_started(self) -> bool:
        """Whether each worker has had a process that was ready."""
        return all(life.info is not None for life in self._lives.values())

    def pid(self, worker: int) -> int | None:
        """The process id of the worker's last process."""
        info = self._lives[worker].info
        return None if info is None else info["pid"]

    def addresses(self) -> dict[int, str]:
        """By worker: where the rings of the workers that run are now."""
        return {
            worker: life.info["address"]
            for worker, life in sorted(self._lives.items())
            if worker in self.running and life.info is not None
        }

    def ring_has_changed(self, worker: int, address: str) -> None:
        """The worker's ring has another address now."""
        info = self._lives[worker].info
        assert info is not None
        info["address"] = address

    def hangs(self, worker: int, incarnation: int, crash: Crash | None) -> None:
        """The process is about to be killed because it hangs, which counts as this crash; None: it was stopped."""
        self._hung[worker, incarnation] = crash

    def hung(self, worker: int, incarnation: int) -> tuple[bool, Crash | None]:
        """Whether this process was killed because it hung, and the crash that this counts as. Forgets it."""
        key = (worker, incarnation)
        return key in self._hung, self._hung.pop(key, None)

    # --- rings ---------------------------------------------------------------------------------------------

    def ring_bytes(self, worker: int) -> int:
        """The size of ring that the worker's next process needs; 0: any."""
        return self._ring_sizes.get(worker, 0)

    def ring_has_grown(self, worker: int, ring_bytes: int) -> None:
        """The worker's ring is so large. Records as large may come again when the process has died."""
        self._ring_sizes[worker] = max(ring_bytes, self._ring_sizes.get(worker, 0))

    @property
    def largest_ring(self) -> int:
        """The size of the largest ring so far; 0 before the first report of one."""
        return max(self._ring_sizes.values(), default=0)
