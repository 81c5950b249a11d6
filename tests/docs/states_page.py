"""Writes docs/states.md from the tables of states in the code: `make states`. A test says when the page is old."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

from penstock.bridge.burst import RANGE
from penstock.bridge.spark_life import SPARK_LIFE
from penstock.host.decide.job_state import JOB
from penstock.host.decide.worker_lives import LIFE
from penstock.runtime.epochs.coordinator import COORDINATOR
from penstock.runtime.exchange.channel_state import CHANNEL
from penstock.runtime.lifecycle import Table
from penstock.runtime.worker.task_state import TASK

PAGE = Path(__file__).parents[2] / "docs" / "states.md"

INTRO = """\
# States

Some components of Penstock behave differently according to what has happened to them before. Each of them has a table
of its states in the code, and this page is made from these tables (`make states`). An event is answered in one of three
ways:

- It is *taken*: the component goes to the next state, or stays in its state.
- It is *passed over*, because it is legitimately late or has no effect in this state.
- It is *refused*, because it is impossible. It raises an `InvalidTransition`, which tells the state, the event and what
  led there. A refused event is a fault of Penstock's own.

`penstock/runtime/lifecycle.py` describes tables and machines.
"""

#: The heading of a section, what it says, and its table.
SECTIONS: list[tuple[str, str, Table[Any, Any]]] = [
    (
        "A job",
        "What `job.status()` shows. The table is in `penstock/host/decide/job_state.py`. A job that is asked to stop "
        "may start, recover or move first; then `connect to stop` takes the place of `connect`. A program that "
        "has no answer yet from the JobMaster of another program's job shows UNKNOWN, which is no state of the job.",
        JOB,
    ),
    (
        "The coordinator",
        "What the coordinator of a job's epochs waits for. The table is in `penstock/runtime/epochs/coordinator.py`. "
        "While the coordinator is RUNNING, a manifest may be on its way to the store, and tasks may be about to move; "
        "neither is a state, as epochs continue meanwhile.",
        COORDINATOR,
    ),
    (
        "A task",
        "What a task does with its next step. The table is in `penstock/runtime/worker/task_state.py`. Whether "
        "channels wait for room or credit, and whether operators have gathered records, is no state: both come and go "
        "with single steps.",
        TASK,
    ),
    (
        "A channel",
        "What the sender's end of a channel between two tasks does. The table is in "
        "`penstock/runtime/exchange/channel_state.py`. How much credit a channel has is no state.",
        CHANNEL,
    ),
    (
        "The process of a worker",
        "What the host of a job knows of a worker's present process; `job.status()` shows it in the worker's "
        "`state`. The table is in `penstock/host/decide/worker_lives.py`.",
        LIFE,
    ),
    (
        "The Spark of a job",
        "Whether a job can use Spark just now (`run(dual=...)`). The table is in `penstock/bridge/spark_life.py`.",
        SPARK_LIFE,
    ),
    (
        "A range of operators",
        'Where a range of operators runs (`job.status()["dual"]`). The table is in `penstock/bridge/burst.py`.',
        RANGE,
    ),
]


def page() -> str:
    """The whole page."""
    return INTRO + "".join(_section(*section) for section in SECTIONS)


def _section(heading: str, text: str, table: Table[Any, Any]) -> str:
    reasons = table.reasons()
    return "\n".join(
        [
            f"\n## {heading}\n",
            f"{fill(text, 120)}\n",
            f"```mermaid\n{table.diagram()}\n```\n",
            *_grid(("state", "meaning", "events that leave it as it is"), table.rows()),
            *(["", *_grid(("event", "is passed over in", "because"), reasons)] if reasons else []),
            "",
        ]
    )


def _grid(head: tuple[str, ...], rows: list[tuple[str, str, str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [head, ("---",) * len(head), *rows]]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
