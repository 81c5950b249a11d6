"""The two tiers of the tests. `make test` runs the first one, and `make test-all` both.

The first tier is for every change: what one process, local processes and one Ray cluster show within minutes. The
second tier has what starts virtual machines, hosts of their own, Spark sessions or clusters for each test, what builds
the native core anew for the sanitizers, and what waits for real time limits. Each file is in exactly one tier.
"""

from __future__ import annotations

from typing import Literal

Tier = Literal["first", "second", "all"]

#: The files, and the folders, of the second tier.
SECOND = (
    "tests/bridge/spark/",
    "tests/bridge/test_arrow_raydp.py",
    "tests/bridge/test_lost_executor.py",
    "tests/bridge/test_session.py",
    "tests/docs/test_spark_examples.py",
    "tests/e2e/test_bursts.py",
    "tests/e2e/test_clusters.py",
    "tests/e2e/test_dual.py",
    "tests/e2e/test_pauses.py",
    "tests/e2e/test_spark.py",
    "tests/epochs/test_store_s3.py",
    "tests/guests/",
    "tests/namespaces/",
    "tests/ring/test_stress.py",
)


def tier_of(file: str) -> Tier:
    """Returns the tier of a test file, by its path from the root of the repository."""
    return "second" if file.startswith(SECOND) else "first"
