"""What micro-batches of the Yahoo topology cost in Spark, through the very path of a job; a process of its own.

Settings: kind, cores (a list), memory, sizes, repeats. Prints {"batches": {cores: [[rows, seconds], ...]}} from the
hand-over of the Arrow columns to the partial counts, and what the hand-over costs the worker before it: "made_s" to
make the columns, "sent_s" to write them, an event, and the "bytes" of one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import pyarrow as pa

import penstock as ps
from benchmarks.spark_session import session_of
from penstock.apps import ysb
from penstock.apps.ysb_events import Events, EventSource
from penstock.bridge.forms import RangeForm, range_form
from penstock.bridge.operation import Operations


def main(settings: dict[str, Any]) -> None:
    """See the module."""
    events = Events(rate="20000")
    plan = ysb.topology(EventSource(events), events.campaigns(), ps.sinks.Null()).plan(1)
    form = range_form(plan, plan.chains[0])
    assert isinstance(form, RangeForm)
    batches: dict[int, list[tuple[int, float]]] = {}
    for cores in settings["cores"]:
        with session_of(settings["kind"], cores, settings["memory"]) as session:
            operations = Operations(session, [form])
            operations.prepare(form.chain)
            batches[cores] = []
            for _ in range(settings["repeats"]):
                for size in settings["sizes"]:
                    columns = events.events_arrow(0, size)
                    began = time.perf_counter()
                    operations.answer(form.chain, form.position, columns)
                    batches[cores].append((size, time.perf_counter() - began))
    size = max(settings["sizes"])
    began = time.perf_counter()
    columns = events.events_arrow(0, size)
    made = time.perf_counter() - began
    fd = os.memfd_create("bench-spark-costs")
    began = time.perf_counter()
    with pa.OSFile(f"/proc/self/fd/{fd}", "wb") as file, pa.ipc.new_stream(file, columns.schema) as stream:
        stream.write_batch(columns)
    sent = time.perf_counter() - began
    os.close(fd)
    handed = {"made_s": made / size, "sent_s": sent / size, "bytes": columns.nbytes / size}
    print(json.dumps({"batches": batches, **handed}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
