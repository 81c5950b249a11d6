"""A user's program that starts a stream and waits for its first result, in a process of its own:
`python -m benchmarks.local_peer JSON`. It prints how long it took, and what memory all its processes use then."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

WORKERS = 2
_LIMIT_S = 60.0


def words(number: int) -> str:
    """A line of input."""
    return f"word-{number % 10} and more"


class FirstResult:
    """Called with each result, in whatever process: writes down when the first one came."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._told = False

    def __call__(self, result: Any) -> None:
        if not self._told:
            self._told = True
            draft = f"{self._place}.{os.getpid()}"
            Path(draft).write_text(str(time.monotonic_ns()))
            os.replace(draft, self._place)


def start_penstock(place: str, local: bool) -> Callable[[], None]:
    """Starts the word count as a job. Returns what ends it: a program that only exits leaves the processes of its Ray
    for some seconds, and the next round's job of this name would meet them."""
    import penstock as ps

    flow = ps.Flow("bench-first-result", parallelism=WORKERS)
    lines = flow.read(ps.sources.Generator(words, 1000))
    lines.flat_map(str.split).key_by(str.lower).count().write(ps.sinks.Call(FirstResult(place)))
    job = ps.run(flow, workers=WORKERS, local=local, **({} if local else {"address": "local"}))

    def end() -> None:
        job.cancel()
        job.wait(60, progress=False)

    return end


def start_bytewax(place: str) -> Callable[[], None]:
    """Starts the word count in a thread of this process, with as many worker threads. It ends with the process."""
    import threading

    from bytewax.run import cli_main

    from benchmarks.bytewax_first import dataflow

    flow = dataflow(words, FirstResult(place))
    threading.Thread(target=cli_main, args=(flow,), kwargs={"workers_per_process": WORKERS}, daemon=True).start()
    return lambda: None


def memory() -> int:
    """The memory (PSS) of this process and all below it, in bytes: what they share counts once."""
    here = psutil.Process()
    return sum(process.memory_full_info().pss for process in [here, *here.children(recursive=True)])


def main(who: str, place: str) -> None:
    """Start, wait, print."""
    # The program has its library loaded before it starts anything.
    importlib.import_module("benchmarks.bytewax_first" if who == "bytewax" else "penstock")
    began = time.monotonic_ns()
    if who == "bytewax":
        end = start_bytewax(place)
    else:
        end = start_penstock(place, who == "local")
    until = time.monotonic() + _LIMIT_S
    while not os.path.exists(place):
        if time.monotonic() > until:
            raise SystemExit(f"{who}: no result within {_LIMIT_S:g} s")
        time.sleep(0.005)
    first = int(Path(place).read_text())
    time.sleep(1.0)  # the memory of a program that runs, not of one that starts
    print(json.dumps({"seconds": (first - began) / 1e9, "bytes": memory()}), flush=True)
    end()
    os._exit(0)  # Bytewax' thread has no other end


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
