"""A session of Penstock's for a benchmark, of plain PySpark or of RayDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from benchmarks.common import ray_cluster, stop_ray
from penstock.bridge.session import Session, SparkOptions, open_session

Kind = Literal["pyspark", "raydp"]
KINDS: dict[Kind, str] = {"pyspark": "plain PySpark", "raydp": "RayDP"}
_START_S = 180.0


@contextmanager
def session_of(kind: Kind, cores: int, memory: str) -> Iterator[Session]:
    """A session of one executor, on cores of this machine."""
    if kind == "pyspark":
        with open_session(SparkOptions(kind=kind, cores=cores, memory=memory, start_s=_START_S)) as session:
            yield session
        return
    import ray

    ray_cluster()
    try:
        options = SparkOptions(kind=kind, cores=cores, memory=memory, start_s=_START_S, put=ray.put)
        with open_session(options) as session:
            yield session
    finally:
        stop_ray()
