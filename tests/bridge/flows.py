"""Flows whose operators can cross to Spark, for tests of ranges and of the scheduler."""

from __future__ import annotations

import penstock as ps
from penstock.runtime.program.flow import Flow


def fork() -> Flow:
    """Three ranges: `read` (chain 0) feeds `few` and `many`."""
    flow = Flow("fork", parallelism=2)
    parsed = flow.read(ps.sources.Memory([]), name="read").map(str.strip, name="parse")
    few = parsed.filter(str.isdigit, name="few").map(int, name="number")
    many = parsed.flat_map(list, name="many")
    few.key_by(lambda n: n).count(name="numbers").write(ps.sinks.Null(), name="a")
    many.key_by(lambda c: c).count(name="letters").write(ps.sinks.Null(), name="b")
    return flow
