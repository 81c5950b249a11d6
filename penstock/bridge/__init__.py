"""Floor 4: the operation stream, bursts through Spark (docs/papers.md: D1 to D6), and the door for users of Spark:
`from_spark` and `follow` (and `Stream.to_spark`). The only floor that imports pyspark and raydp, and only inside
functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from penstock.bridge.spark_sink import follow
    from penstock.bridge.spark_source import from_spark

__all__ = ["follow", "from_spark"]

if not TYPE_CHECKING:  # else every misspelt name would be an object to those who check types
    __getattr__, __dir__ = lazy_names(
        __name__, {"follow": "penstock.bridge.spark_sink", "from_spark": "penstock.bridge.spark_source"}
    )
