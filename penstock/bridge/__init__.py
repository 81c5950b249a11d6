"""Floor 4: the operation stream, bursts through Spark (PAPERS rows D1 to D6), and the door for users of Spark:
`from_spark` and `follow` (and `Stream.to_spark`). The only floor that imports pyspark and raydp, and only inside
functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.bridge.spark_sink import follow
    from penstock.bridge.spark_source import from_spark

__all__ = ["follow", "from_spark"]


def __getattr__(name: str) -> object:
    """They load pyarrow, which takes a quarter of a second: only when they are used."""
    if name == "from_spark":
        from penstock.bridge.spark_source import from_spark

        return from_spark
    if name == "follow":
        from penstock.bridge.spark_sink import follow

        return follow
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
