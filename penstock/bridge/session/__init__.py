"""The one door to Spark: all other code asks here for a session, whatever provides it (docs/papers.md: D1, D4).

The operation stream runs its micro-batches as DataFrame work in a Spark session. Two things can provide one: RayDP
(raydp_session.py) or plain PySpark (local_session.py). opening.py chooses one and tests it; diagnosis.py says why
none can be had.

What must never happen:

- A wait without an end: starting, testing and stopping are bounded (in_time.py).
- A Ray cluster started by accident (raydp_session.py).
- A JVM that outlives `stop` (jvm.py).
- pyspark or raydp loaded by those who do not use Spark: both are imported inside functions.
"""

from __future__ import annotations

from penstock.bridge.session.diagnosis import SparkUnavailable
from penstock.bridge.session.opening import executor_needs, open_session
from penstock.bridge.session.options import SparkOptions
from penstock.bridge.session.session import Session

__all__ = ["Session", "SparkOptions", "SparkUnavailable", "executor_needs", "open_session"]
