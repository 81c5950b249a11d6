"""Runs tests with pytest in a guest, and then torments its peers there (tests/guests/torture.py):

python3 -m tests.guests.suite PYTEST-ARGUMENTS [-- MESSAGES SEED DEATHS]
"""

from __future__ import annotations

import sys

import pytest

from tests.guests import bare, torture

if __name__ == "__main__":
    assert bare
    arguments = sys.argv[1:]
    tests = arguments[: arguments.index("--")] if "--" in arguments else arguments
    status = pytest.main(["--import-mode=importlib", "-p", "no:cacheprovider", "-v", "--no-header", *tests])
    if status == 0 and tests != arguments:
        torture.torment(*map(int, arguments[len(tests) + 1 :]))
    sys.exit(status)
