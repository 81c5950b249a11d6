"""A driver on a host of the tests, with a job that sends each record to all tasks of all hosts: `python -m
benchmarks.broadcast_peer JSON`. It prints one line of JSON with what was counted.

The source sends a record now and then until all channels have joined the stream of relays. Then it is silent while the
counters are read, sends the records that count, each as a batch of its own, and is silent again. So nothing else of the
job is in the difference between the counters.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import penstock as ps
from benchmarks.common import wait_until
from penstock.runtime.relaying.root import MulticastRoot
from penstock.runtime.sinks import SinkContext, SinkWriter
from penstock.runtime.sources import Reader, SourceContext, Split

_EVERY_S = 0.01
_WARMING = b"warming "


def records(count: int, size: int) -> Iterator[bytes]:
    """What counts: records of `size` bytes, each another one."""
    rest = bytes(size - 8)
    for number in range(count):
        yield number.to_bytes(8, "little") + rest


def digest(found: Iterable[bytes]) -> int:
    """What a task must have seen, in order."""
    value = 0
    for record in found:
        value = zlib.crc32(record, value)
    return value


class Gated(ps.sources.Source):
    """See the module's docstring. The steps are files in a folder: joined, quiet, go, done, end."""

    def __init__(self, folder: str, count: int, size: int, tasks: int, relays: bool) -> None:
        self.folder, self.count, self.size, self.tasks, self.relays = Path(folder), count, size, tasks, relays

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("gated")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        if not self.relays:
            # In this process only, which ends with the job: its root never hears of a relay.
            MulticastRoot.use = lambda root, relays: None  # type: ignore[method-assign]
        return _GatedReader(self)


class _GatedReader(Reader):
    def __init__(self, source: Gated) -> None:
        self._source = source
        self._rest = records(source.count, source.size)
        self._steps = self._run()
        self._wait_s = _EVERY_S

    def read(self, limit: int) -> list[Any]:
        return next(self._steps, [])

    def ready_in(self) -> float:
        return self._wait_s

    def offsets(self) -> dict[str, Any]:
        return {}

    def _run(self) -> Iterator[list[Any]]:
        """Yields what each read returns."""
        folder = self._source.folder
        while not (folder / "joined").exists():
            yield [_WARMING]
        (folder / "quiet").touch()
        while not (folder / "go").exists():
            yield []
        before = _counters()
        self._wait_s = 0.0
        for record in self._rest:
            yield [record]
        self._wait_s = _EVERY_S
        while sum(1 for _ in folder.glob("task-*")) < self._source.tasks:
            yield []
        after = _counters()
        found = {what: after[what] - before[what] for what in before}
        (folder / "written").write_text(json.dumps(found))
        (folder / "written").rename(folder / "done")
        while not (folder / "end").exists():
            yield []
        self.finished = True
        yield []


def _counters() -> dict[str, float]:
    """The bytes and frames that this host has sent so far, and the time, also of this thread on a processor."""
    found = {"wall_s": time.monotonic(), "thread_s": time.thread_time(), "bytes": 0.0, "frames": 0.0}
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() != "lo":
            fields = counters.split()
            found["bytes"] += int(fields[8])
            found["frames"] += int(fields[9])
    return found


class Tally(ps.sinks.Sink):
    """Leaves a file with the digest when all records that count have come."""

    def __init__(self, folder: str, count: int) -> None:
        self._folder, self._count = folder, count

    def writer(self, context: SinkContext) -> SinkWriter:
        return _TallyWriter(Path(self._folder) / f"task-{context.index}", self._count)


class _TallyWriter(SinkWriter):
    def __init__(self, path: Path, count: int) -> None:
        self._path, self._left, self._digest = path, count, 0

    def write(self, records: list[Any]) -> None:
        for record in records:
            if record != _WARMING:
                self._digest = zlib.crc32(record, self._digest)
                self._left -= 1
        if not self._left and not self._path.exists():
            self._path.write_text(str(self._digest))

    def close(self, failed: bool) -> None:
        if not failed:  # a record that comes twice, or after the last, shows
            self._path.write_text(str(self._digest))


def main(settings: dict[str, Any]) -> None:
    """Runs it."""
    import ray

    from penstock.actors.cluster import NAMESPACE

    ray.init(namespace=NAMESPACE, logging_level="error", log_to_driver=False)
    folder, count, size, tasks = Path(settings["folder"]), settings["count"], settings["size"], settings["tasks"]
    flow = ps.Flow("bench-broadcast")
    source = Gated(str(folder), count, size, tasks, settings["relays"])
    flow.read(source, parallelism=1).broadcast().write(Tally(str(folder), count), parallelism=tasks)
    over: dict[str, Any] = {"nodes": settings["hosts"]} if settings["hosts"] > 1 else {}
    if settings["relays"] and 1 < settings["hosts"] == settings["workers"]:
        # By itself a job sends directly to so few machines with one worker each.
        over["trees"] = settings["hosts"] - 1
    job = ps.run(flow, workers=settings["workers"], epoch_interval_s=None, **over)

    def joined() -> bool:
        status = job.status()
        assert status["state"] in ("STARTING", "RUNNING"), status
        if status["state"] != "RUNNING":
            return False
        elsewhere = _elsewhere(status)
        ready = sum(relay["state"] == "ready" for relay in status["relays"])
        if not settings["relays"]:
            return ready == len(elsewhere)
        return _members(status) == sum(elsewhere.values()) and not any(
            stream["switching"] for worker in status["workers"] for stream in worker["streams"]
        )

    wait_until(lambda: job.status()["state"] == "RUNNING", "the job runs", 120.0, 0.05)
    begun = time.monotonic()
    try:
        wait_until(joined, "all channels have joined", 120.0, 0.05)
    except TimeoutError:
        print(json.dumps(job.status().plain()), file=sys.stderr)
        raise
    seconds = time.monotonic() - begun
    (folder / "joined").touch()
    wait_until((folder / "quiet").exists, "the source is silent")
    before = job.status()
    (folder / "go").touch()
    wait_until((folder / "done").exists, "all tasks have all records", 300.0)
    after = job.status()
    (folder / "end").touch()
    job.wait(300.0, progress=False)
    (stream_before, stream_after) = (_stream(status) for status in (before, after))
    sent = {what: stream_after[what] - stream_before[what] for what in ("entries", "bytes", "encodings", "encoding_ms")}
    counted = json.loads((folder / "done").read_text())
    right = digest(records(count, size))
    print(
        json.dumps(
            {
                "right": [int((folder / f"task-{task}").read_text()) for task in range(tasks)] == [right] * tasks,
                "joined_s": seconds,
                "members": _members(after),
                "elsewhere": list(_elsewhere(after).values()),
                "stream": sent,
                "host": counted,
                "transports": _sent(after) - _sent(before),
            }
        )
    )


def _home(status: dict[str, Any]) -> str:
    """The node of the source's worker."""
    (index,) = {task["worker"] for task in status["tasks"] if task["number"] == _source(status)}
    return str(status["workers"][index]["node_id"])


def _source(status: dict[str, Any]) -> int:
    return int(min(task["number"] for task in status["tasks"]))


def _elsewhere(status: dict[str, Any]) -> dict[str, int]:
    """The number of receivers on each node but the source's."""
    found: dict[str, int] = {}
    for task in status["tasks"]:
        node = status["workers"][task["worker"]]["node_id"]
        if task["number"] != _source(status) and node != _home(status):
            found[node] = found.get(node, 0) + 1
    return found


def _members(status: dict[str, Any]) -> int:
    return sum(int(stream["members"]) for worker in status["workers"] for stream in worker["streams"])


def _stream(status: dict[str, Any]) -> dict[str, Any]:
    """The stream of the only log to all; on one host there is none."""
    streams = [stream for worker in status["workers"] for stream in worker["streams"]]
    return streams[0] if streams else {"entries": 0, "bytes": 0, "encodings": 0, "encoding_ms": 0.0}


def _sent(status: dict[str, Any]) -> int:
    """The bytes that the workers of the source's node have sent to other nodes."""
    home = _home(status)
    return sum(sum(worker["sent_bytes"].values()) for worker in status["workers"] if worker["node_id"] == home)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
