"""`from penstock.sources import Memory`: the package penstock.runtime.sources itself, by its short name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from penstock.runtime import sources

if TYPE_CHECKING:
    from penstock.runtime.sources import *  # noqa: F403  all of its public names, and those that are yet to come
else:
    sys.modules[__name__] = sources
