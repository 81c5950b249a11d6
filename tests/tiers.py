"""The two tiers of the tests. `make test` runs the first one, and `make test-all` both.

The first tier is for every change: it needs one process, local processes or one Ray cluster, and takes minutes. The
second tier starts virtual machines, hosts, Spark sessions, and clusters for single tests, builds the
native core for the sanitizers, kills JobMasters, and waits for real time limits. Each file is in exactly one tier.
"""

from __future__ import annotations

from typing import Literal

Tier = Literal["first", "second", "all"]

#: The files, and the folders, of the second tier.
SECOND = (
    "tests/benchmarks/test_state_memory.py",
    "tests/bridge/spark/",
    "tests/bridge/test_arrow_raydp.py",
    "tests/bridge/test_lost_executor.py",
    "tests/bridge/test_session.py",
    "tests/connectors/",
    "tests/docs/test_spark_examples.py",
    "tests/e2e/test_bursts.py",
    "tests/e2e/test_clusters.py",
    "tests/e2e/test_dual.py",
    "tests/e2e/test_ends.py",
    "tests/e2e/test_in_main.py",
    "tests/e2e/test_pauses.py",
    "tests/e2e/test_spark.py",
    "tests/e2e/test_store_faults.py",
    "tests/epochs/test_store_s3.py",
    "tests/guests/",
    "tests/namespaces/",
    "tests/placement/test_groups.py",
    "tests/placement/test_jobs_over_nodes.py",
    "tests/ring/test_stress.py",
)


def tier_of(file: str) -> Tier:
    """Returns the tier of a test file, by its path from the root of the repository."""
    return "second" if file.startswith(SECOND) else "first"
