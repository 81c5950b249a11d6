"""The process from which Spark forks its Python workers, with all loaded that a range needs (docs/papers.md: D4).

Spark ends Python workers that have had nothing to do for a minute, which is most of them when a burst begins. Those
that it starts then would each load pyarrow and Penstock first, all cores at once, and the first answers would be late.

Spark runs this module, which the setting `spark.python.daemon.module` names, in place of `pyspark.daemon`.
"""

from __future__ import annotations

import penstock.bridge.python_range

__all__ = ["main", "penstock"]


def main() -> None:
    """Starts Python workers for Spark until Spark closes this process's input."""
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
