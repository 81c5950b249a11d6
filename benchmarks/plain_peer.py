"""The plain contestants: loops in one process, and a feeder with a loop after a pipe.

`python -m benchmarks.plain_peer JSON`.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import select
import struct
import sys
import time
from collections import defaultdict
from typing import Any

from benchmarks.common import pin
from benchmarks.pacing import Latencies, Pacer, split, word_of
from benchmarks.stamps import Counts, FirstRead, Lines
from benchmarks.text import NEEDLE, key

_HEAD = struct.Struct("<I")


def wordcount(settings: dict[str, Any]) -> None:
    """Split and count."""
    counts: defaultdict[str, int] = defaultdict(int)
    first, end = FirstRead(settings["out"]), Counts(settings["out"])
    first.now()
    for path in settings["paths"]:
        with open(path, encoding="utf-8") as file:
            for line in file:
                for word in line.split():
                    counts[key(word)] += 1
    end.write(list(counts.items()))
    first.save()
    end.save()


def grep(settings: dict[str, Any]) -> None:
    """Search each line."""
    search = re.compile(NEEDLE).search
    first, end = FirstRead(settings["out"]), Lines(settings["out"])
    first.now()
    found = []
    for path in settings["paths"]:
        with open(path, encoding="utf-8") as file:
            for line in file:
                if search(line):
                    found.append(line)  # noqa: PERF401
    end.write(found)
    first.save()
    end.save()


def feeder_and_loop(settings: dict[str, Any]) -> None:
    """A child makes the paced records and sends what is due through a pipe, pickled; this process runs the loop."""
    with open(settings["texts"], encoding="utf-8") as file:
        texts = file.read().splitlines()
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.close(out)
        _feed(Pacer(texts, settings["rate"], settings["records"]), into)
        os._exit(0)
    os.close(into)
    pin(1)
    latencies = Latencies(settings["out"], settings["updates"])
    latencies.open()
    record = latencies.record
    search = re.compile(NEEDLE).search
    words = settings["flow"] == "wordcount_latency"
    counts: dict[str, int] = {}
    with os.fdopen(out, "rb") as pipe:
        while head := pipe.read(_HEAD.size):
            for item in pickle.loads(pipe.read(*_HEAD.unpack(head))):
                if words:
                    for pair in split(item):
                        word = word_of(pair)
                        counts[word] = count = counts.get(word, 0) + 1
                        record((word, pair[1], count))
                elif search(item[1]):
                    record((item[1], item[0], 1))
    latencies.save()
    os.waitpid(child, 0)


def _feed(pacer: Pacer, into: int) -> None:
    pin(0)
    while not pacer.finished:
        records = pacer.due(1_000)
        if records:
            payload = pickle.dumps(records, 5)
            message = memoryview(_HEAD.pack(len(payload)) + payload)
            while message:
                message = message[os.write(into, message) :]
        else:
            wait = pacer.next_in_ns() / 1e9
            if wait > 0.001:
                time.sleep(wait)
            else:
                select.select([], [], [], wait)


FLOWS = {"wordcount": wordcount, "grep": grep, "wordcount_latency": feeder_and_loop, "grep_latency": feeder_and_loop}


def main() -> None:
    """Run one."""
    settings = json.loads(sys.argv[1])
    FLOWS[settings["flow"]](settings)


if __name__ == "__main__":
    main()
