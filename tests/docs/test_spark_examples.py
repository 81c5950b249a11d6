"""The examples for users of Spark run as printed, beside a Spark session."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.bridge.session import Session
from tests.docs.test_examples import ON_SPARK, ROOT, run_examples


def test_examples_for_users_of_spark(
    spark_session: Session, spark_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(spark_folder)  # nothing else is written where Spark reads and writes
    namespace = {"__name__": "__main__", "spark": spark_session.spark.newSession()}
    run_examples(ROOT / "docs" / ON_SPARK, namespace, monkeypatch)
