"""Each test file is in exactly one tier, and `make` runs both."""

from __future__ import annotations

from pathlib import Path

from tests.tiers import SECOND, tier_of

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def test_each_name_of_the_second_tier_is_there() -> None:
    missing = [name for name in SECOND if not any(file.startswith(name) for file in FILES)]
    assert not missing


def test_no_name_of_the_second_tier_is_within_another() -> None:
    assert not [(one, other) for one in SECOND for other in SECOND if one != other and one.startswith(other)]


def test_both_tiers_have_files() -> None:
    tiers = {file: tier_of(file) for file in FILES}
    assert set(tiers.values()) == {"first", "second"}
    assert tiers["tests/test_tiers.py"] == "first"
