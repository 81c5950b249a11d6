"""`from penstock.sinks import Files`: the package penstock.runtime.sinks itself, by its short name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from penstock.runtime import sinks

if TYPE_CHECKING:
    from penstock.runtime.sinks import *  # noqa: F403  all of its public names, and those that are yet to come
else:
    sys.modules[__name__] = sinks
