"""The states of a task, from the time when it is built to its end, and the events that lead from one to the next.

What a task does in its next step depends on its state, and on data that change with single steps: the work that is
under way, channels that wait for room, gathered records. These data are no states.
"""

from __future__ import annotations

from typing import Literal

from penstock.runtime.lifecycle import State, Table


class TaskState(State):
    """The activity of a task."""

    MADE = "MADE", "It has its channels; its operators are not open."
    READY = "READY", "Its operators are open, with what an epoch has saved for them; it has taken up nothing yet."
    RUNNING = "RUNNING", "It takes up its input as records."
    DIVERTED = "DIVERTED", "It sends its input to Spark in micro-batches, and takes up the answers."
    RETURNING = "RETURNING", "It sends no more micro-batches, and takes up the answers to the last ones."
    PARKED = "PARKED", "It has stopped after a barrier, because it is to run on another worker, or the job is to stop."
    ENDING = "ENDING", "It has no more input, and makes its last outputs."
    DRAINING = "DRAINING", "It has told its receivers that it has ended, and sends what still waits in its channels."
    FINISHED = "FINISHED", "All that it has made has been sent."
    CLOSED = "CLOSED", "It was removed before it had finished."


TaskEvent = Literal[
    # What the task is told:
    "open",
    "restore",
    "restore its end",
    "take records one by one",
    "trigger",
    "ask to park",
    "unpark",
    "divert",
    "undivert",
    "close",
    # What its steps lead to:
    "start",
    "answered",
    "park",
    "input ended",
    "say the end",
    "sent",
]
"""`restore its end`: the task had ended in the epoch from which it continues. `ask to park`: a request
for a later barrier. `answered`: all micro-batches are. `sent`: nothing waits in its channels."""

_S = TaskState
_LIVE = (_S.READY, _S.RUNNING, _S.DIVERTED, _S.RETURNING, _S.PARKED)
#: The states in which a task has no more input.
AT_END = (_S.ENDING, _S.DRAINING, _S.FINISHED)
#: The states in which nothing happens without a message or a call.
AT_REST = (_S.PARKED, _S.FINISHED, _S.CLOSED)

TASK: Table[TaskState, TaskEvent] = Table(
    TaskState,
    TaskState.MADE,
    {
        (_S.MADE, "open"): _S.READY,
        (_S.READY, "restore"): _S.READY,
        (_S.READY, "restore its end"): _S.ENDING,
        # The places of records are counted from the first record that the task takes.
        (_S.READY, "take records one by one"): _S.READY,
        (_S.READY, "start"): _S.RUNNING,
        **{(state, "trigger"): state for state in _LIVE},
        **{(state, "ask to park"): state for state in _LIVE if state is not _S.PARKED},
        (_S.RUNNING, "park"): _S.PARKED,
        (_S.PARKED, "unpark"): _S.RUNNING,
        **{(state, "divert"): _S.DIVERTED for state in (_S.READY, _S.RUNNING, _S.DIVERTED)},
        (_S.DIVERTED, "undivert"): _S.RETURNING,
        (_S.RETURNING, "undivert"): _S.RETURNING,
        (_S.DIVERTED, "answered"): _S.RUNNING,  # its input has ended
        (_S.RETURNING, "answered"): _S.RUNNING,
        (_S.RUNNING, "input ended"): _S.ENDING,
        (_S.ENDING, "say the end"): _S.DRAINING,
        (_S.DRAINING, "sent"): _S.FINISHED,
        **{(state, "close"): _S.CLOSED for state in (_S.MADE, *_LIVE, _S.ENDING, _S.DRAINING)},
        (_S.FINISHED, "close"): _S.FINISHED,
    },
    [
        ("take records one by one", (_S.ENDING,), "it had ended in the epoch from which it continues"),
        ("trigger", AT_END, "its end is its part of this epoch and of all later ones"),
        ("ask to park", AT_END, "its input has ended, so it stays where it is"),
        (
            "unpark",
            (_S.READY, _S.RUNNING, _S.DIVERTED, _S.RETURNING, *AT_END),
            "it has not stopped; the command goes to all tasks of a worker",
        ),
        (
            "divert",
            (_S.RETURNING,),
            "the answers on their way belong to the range before; it is asked for again",
        ),
        ("divert", (_S.PARKED,), "it is about to move; it is asked for again"),
        ("divert", AT_END, "its input has ended"),
        ("undivert", (_S.READY, _S.RUNNING, _S.PARKED, *AT_END), "its input does not go to Spark"),
    ],
)
