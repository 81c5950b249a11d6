"""Runs tests with pytest in a guest: python3 -m tests.guests.suite ARGUMENTS."""

from __future__ import annotations

import sys

import pytest

from tests.guests import bare

if __name__ == "__main__":
    assert bare
    sys.exit(pytest.main(["--import-mode=importlib", "-p", "no:cacheprovider", "-q", *sys.argv[1:]]))
