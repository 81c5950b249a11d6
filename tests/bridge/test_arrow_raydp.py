"""The tests of micro-batches through Spark once more, with RayDP's session in place of PySpark's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from penstock.bridge.session import Session, SparkOptions, open_session
from tests.bridge.spark.test_arrow import (
    test_a_frame_keeps_its_data_without_the_block,
    test_a_job_that_fails_says_why_and_leaves_the_session_well,
    test_all_types_come_back_as_they_went,
    test_empty_batches_keep_their_types,
    test_forms_of_a_batch,
    test_frames_of_users,
    test_large_batches_are_cut_for_all_cores_and_stay_in_order,
    test_micro_batches_of_all_sizes_are_written_into_the_same_memory,
    test_names_differ_by_case,
    test_nothing_stays_behind,
    test_several_micro_batches_in_flight,
    test_small_batches_are_not_cut,
    test_the_executor_is_known,
    test_widened_types_reach_spark,
)
from tests.bridge.spark.test_kept_plan import (
    test_the_plan_of_a_schema_is_made_once,
    test_the_records_of_one_key_are_divided_among_all_parts,
)
from tests.bridge.spark.test_operations import test_counts_of_words_of_many_lines
from tests.e2e.processes import wait_gone

__all__ = [
    "session",
    "test_a_frame_keeps_its_data_without_the_block",
    "test_a_job_that_fails_says_why_and_leaves_the_session_well",
    "test_all_types_come_back_as_they_went",
    "test_counts_of_words_of_many_lines",
    "test_empty_batches_keep_their_types",
    "test_forms_of_a_batch",
    "test_frames_of_users",
    "test_large_batches_are_cut_for_all_cores_and_stay_in_order",
    "test_micro_batches_of_all_sizes_are_written_into_the_same_memory",
    "test_names_differ_by_case",
    "test_nothing_stays_behind",
    "test_several_micro_batches_in_flight",
    "test_small_batches_are_not_cut",
    "test_the_executor_is_known",
    "test_the_plan_of_a_schema_is_made_once",
    "test_the_records_of_one_key_are_divided_among_all_parts",
    "test_widened_types_reach_spark",
]

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def session(cluster: str) -> Iterator[Session]:
    """A RayDP session of one executor, whose process must be gone when it has ended."""
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        pytest.skip("there is no Java here")
    pytest.importorskip("raydp", reason="RayDP is not installed")
    import ray

    group = ray.util.placement_group([{"CPU": 2, "memory": 2 << 30}])
    try:
        assert group.wait(30)
        options = SparkOptions(
            kind="raydp", cores=2, put=ray.put, placement_group=group, bundle_indexes=[0], start_s=120
        )
        with open_session(options) as opened:
            yield opened
            (executor,) = opened.executors()
        assert executor.pid is not None
        wait_gone([executor.pid], 60)
    finally:
        ray.util.remove_placement_group(group)
