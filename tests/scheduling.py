"""Which tests one process of the suite runs in a row (`make test`, pytest-xdist): those that share a costly fixture.

Files whose tests share nothing but the session-wide cluster are dealt out test by test, so that no process is left with
a long file at the end.
"""

from __future__ import annotations

from xdist.scheduler.loadscope import LoadScopeScheduling

#: The tests of these folders run in one process: they share a fixture of the folder.
FOLDERS = ("tests/bridge/spark/",)
#: The tests of these files are dealt out one by one: most start processes, and none needs what another has made.
APART = (
    "tests/apps/test_cli.py",
    "tests/docs/test_examples.py",
    "tests/e2e/test_bad_input.py",
    "tests/e2e/test_dual.py",
    "tests/e2e/test_ends.py",
    "tests/e2e/test_migration.py",
    "tests/e2e/test_recovery.py",
    "tests/e2e/test_shapes.py",
    "tests/e2e/test_store_faults.py",
    "tests/guests/test_guests.py",
    "tests/hosts/test_hosts.py",
    "tests/ring/test_stress.py",
)


class ByFixture(LoadScopeScheduling):
    """Deals out folders, files or single tests, as the lists above say."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        for folder in FOLDERS:
            if file.startswith(folder):
                return folder
        return nodeid if file in APART else file
