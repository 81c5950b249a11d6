"""`from penstock.testing import run`: the module penstock.runtime.testing itself, by its short name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from penstock.runtime import testing

if TYPE_CHECKING:
    from penstock.runtime.sinks.sink_check import check_sink
    from penstock.runtime.testing import Pause, run
    from penstock.runtime.torment import torment

    __all__ = ["Pause", "check_sink", "run", "torment"]
else:
    sys.modules[__name__] = testing
