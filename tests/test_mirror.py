"""The tests mirror the house: the tests of a module lie in the folder of the module's room.

`tests/<room>/test_<module>.py` tests `penstock/**/<room>/<module>.py`. Folders that stand for a kind of test, and not
for a room, are named in KINDS.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Folders of tests that start whole jobs or machines, or that test something outside of the package.
KINDS = {"benchmarks", "docs", "e2e", "guests", "heads", "local", "namespaces", "ring", "servers"}


def rooms() -> dict[str, set[str]]:
    """Returns for each module's name the rooms with a module of this name."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "penstock").rglob("*.py"):
        parts = path.relative_to(ROOT / "penstock").with_suffix("").parts
        inside = parts[1:] if parts[0] == "runtime" and len(parts) > 2 else parts
        found[parts[-1]].add(inside[0] if len(inside) > 1 else "")
    return found


def test_each_folder_of_tests_is_a_room_or_a_kind() -> None:
    folders = {path.name for path in (ROOT / "penstock").rglob("*") if path.is_dir()}
    here = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert not here - folders - KINDS
    assert not KINDS - here


def test_the_tests_of_a_module_lie_in_the_folder_of_its_room() -> None:
    known = rooms()
    astray = {}
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        its_rooms = known.get(path.stem.removeprefix("test_"), set()) - {""}
        if path.parent.name not in KINDS and its_rooms and path.parent.name not in its_rooms:
            astray[f"{path.parent.name}/{path.name}"] = sorted(its_rooms)
    assert not astray
