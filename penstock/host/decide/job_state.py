"""The states of a job, as drivers see them, and the events that lead from one to the next.

The host of a job keeps a `JobLife`, and tells it what it does:

    life = JobLife("job 'wordcount'")
    life.connected()             # it carries out a ConnectTasks: all tasks run
    life.removed(planned=False)  # it carries out a RemoveTasks: tasks are removed, and will be built again
    life.stop()                  # a driver has asked for it; False when the job has ended already
    life.end("FAILED")           # it has decided how the job ends
    life.state, life.ended       # for the status

An event that is impossible in a state, for example a second end after the first one has been told, raises
InvalidTransition. The host therefore decides on the end of a job once.
"""

from __future__ import annotations

from typing import Literal

from penstock.runtime.lifecycle import State, StateMachine, Table


class JobState(State):
    """The state in the life of a job, as a driver sees it."""

    STARTING = "STARTING", "Workers are started, and the tasks are built for the first time."
    RUNNING = "RUNNING", "All tasks run."
    RECOVERING = "RECOVERING", "A worker was lost; its tasks and the tasks downstream go back."
    MOVING = "MOVING", "Tasks are built again because somebody has asked for it: a migration, a rescale, a replan."
    STOPPING = "STOPPING", "The job is to stop: what the sources have read goes through, or a savepoint is written."
    FINISHED = "FINISHED", "The job has ended well; everything is committed."
    CANCELLED = "CANCELLED", "Somebody has ended the job at once."
    FAILED = "FAILED", "The job has ended by an error, which the status tells."


JobEvent = Literal["stop", "halt", "connect", "connect to stop", "recover", "move", "finish", "cancel", "fail"]
"""`stop`: a driver asks for it. `connect`, `connect to stop`: all tasks are built and connected, and run; in the second
case somebody has asked the job to stop before. `recover`, `move`: tasks are removed, after a death or because somebody
has asked for it. `halt`: all tasks have stopped, and the job ends when its savepoint is written, or its tasks are
connected again. `finish`, `cancel`, `fail`: the host has decided how the job ends."""

_S = JobState
LIVING = (_S.STARTING, _S.RUNNING, _S.RECOVERING, _S.MOVING, _S.STOPPING)
ENDED = (_S.FINISHED, _S.CANCELLED, _S.FAILED)

JOB: Table[JobState, JobEvent] = Table(
    JobState,
    JobState.STARTING,
    {
        (_S.STARTING, "connect"): _S.RUNNING,
        (_S.STARTING, "connect to stop"): _S.STOPPING,
        (_S.STARTING, "recover"): _S.STARTING,  # a worker has died before any task ran
        (_S.STARTING, "stop"): _S.STARTING,  # the sources hear of it when they are built
        (_S.RUNNING, "stop"): _S.STOPPING,
        (_S.RUNNING, "recover"): _S.RECOVERING,
        (_S.RUNNING, "move"): _S.MOVING,
        (_S.RUNNING, "finish"): _S.FINISHED,
        (_S.RECOVERING, "connect"): _S.RUNNING,
        (_S.RECOVERING, "connect to stop"): _S.STOPPING,
        (_S.RECOVERING, "recover"): _S.RECOVERING,  # another death, or tasks that could not be built
        (_S.RECOVERING, "stop"): _S.RECOVERING,
        (_S.MOVING, "connect"): _S.RUNNING,
        (_S.MOVING, "connect to stop"): _S.STOPPING,
        (_S.MOVING, "recover"): _S.RECOVERING,
        (_S.MOVING, "stop"): _S.MOVING,
        (_S.STOPPING, "stop"): _S.STOPPING,
        (_S.STOPPING, "recover"): _S.RECOVERING,
        (_S.STOPPING, "move"): _S.MOVING,
        (_S.STOPPING, "finish"): _S.FINISHED,
        **{(state, "halt"): _S.STOPPING for state in LIVING},
        (_S.STOPPING, "connect"): _S.RUNNING,
        (_S.STOPPING, "connect to stop"): _S.STOPPING,
        **{(state, "cancel"): _S.CANCELLED for state in LIVING},
        **{(state, "fail"): _S.FAILED for state in LIVING},
    },
    [("stop", ENDED, "the job ended before the driver's request came")],
)


class JobLife(StateMachine[JobState, JobEvent]):
    """The state of one job. Used by one thread; others may read `state`, `ended` and `stopping`."""

    __slots__ = ("_has_run", "stopping")

    def __init__(self, name: str) -> None:
        super().__init__(JOB, name)
        # Whether somebody has asked for a stop. This is no state: a job that is to stop may start, recover or move.
        self.stopping = False
        self._has_run = False

    @property
    def ended(self) -> bool:
        """Whether the job has ended, however it ended."""
        return self.state in ENDED

    def stop(self) -> bool:
        """Note that somebody has asked for a stop. Returns False when the job has ended already."""
        taken = self.move("stop")
        self.stopping = self.stopping or taken
        return taken

    def connected(self) -> bool:
        """Note that the tasks run. Returns whether this is for the first time."""
        first, self._has_run = not self._has_run, True
        self.move("connect to stop" if self.stopping else "connect")
        return first

    def halted(self) -> None:
        """Note that all tasks have stopped, because the job is to end with a savepoint."""
        self.move("halt")

    def removed(self, *, planned: bool, why: str = "") -> None:
        """Note that tasks are removed, to be built again; `planned`: as of the coordinator's RemoveTasks."""
        self.move("move" if planned else "recover", why)

    def end(self, state: JobState | Literal["FINISHED", "CANCELLED", "FAILED"], why: str = "") -> None:
        """Note how the job ends."""
        events: dict[str, JobEvent] = {"FINISHED": "finish", "CANCELLED": "cancel", "FAILED": "fail"}
        self.move(events[state], why)
