"""The folder of rows that Spark writes for from_spark: nobody else can read it when Penstock makes it."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.bridge.spark_source import _place


def test_a_folder_that_is_made_is_the_owners_alone_and_one_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = Path(_place(tmp_path / "new" / "rows"))
        there = tmp_path / "there"
        there.mkdir(0o755)
        assert _place(there) == str(there)
    finally:
        os.umask(before)
    assert made.stat().st_mode & 0o777 == 0o700
    assert there.stat().st_mode & 0o777 == 0o755
