"""The table of planted faults: what somebody might write in good faith, and what must find it.

A test that no fault turns red guards nothing. So each entry says what is changed, in which file, and which command must
fail while the fault is planted. `make campaign-planted` plants each one and runs its command.
The entries stand beside what finds them, in the modules of ENTRIES. To add a fault, write in one of these modules:

    @planted_fault("penstock/runtime/exchange/inbox.py", Seeds(12))
    def _skip_alignment() -> Any:
        '''A task takes up records that come after a barrier before the other channels have brought it.'''
        return mock.patch.object(Inbox, "put", ...)
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

#: The modules that hold entries.
ENTRIES = (
    "tests.epochs.planted",
    "tests.epochs.planted_host",
    "tests.epochs.planted_sinks",
    "tests.epochs.planted_links",
    "tests.epochs.planted_relays",
    "tests.epochs.planted_inputs",
    "tests.bridge.planted_scheduler",
    "tests.epochs.planted_order",
    "tests.benchmarks.planted",
    "tests.multicast.planted",
    "tests.transport.planted",
    "tests.planted_elsewhere",
)
#: A fault that is to be found by seeds must be found within so many.
SEEDS = 1000
#: Names the fault that a pytest process plants before it imports the tests (tests/conftest.py).
VARIABLE = "PENSTOCK_PLANT"

Plant = Callable[[], contextlib.AbstractContextManager[Any]]


def _any_seed(faults: Any) -> bool:
    return True


@dataclass(frozen=True)
class Seeds:
    """The simulated cluster finds the fault (tests/epochs/campaign.py).

    `first` is a seed that finds it; `may_find` says by the faults of a seed whether that seed can, and `operator` says
    so of an operator: the seed's flow must have one.
    """

    first: int = 1
    may_find: Callable[[Any], bool] = _any_seed
    operator: Callable[[Any], bool] | None = None

    def command(self, name: str, seed: int, seeds: int) -> list[str]:
        """The command that looks for a fault in some seeds; without a name, what runs them as they are."""
        plant = ["--plant", name, "--failures", "1"] if name else []
        return [sys.executable, "-m", "tests.epochs.campaign", *plant, "--seed", str(seed), "--seeds", str(seeds)]


@dataclass(frozen=True)
class Test:
    """A test finds the fault: its id, or that of its file, as pytest takes it."""

    __test__ = False  # it is no test itself
    node: str

    def command(self) -> list[str]:
        """The command that runs the test."""
        return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", self.node]


@dataclass(frozen=True)
class PlantedFault:
    """An entry of the table."""

    name: str
    what: str
    file: str
    finder: Seeds | Test
    plant: Plant

    def command(self) -> str:
        """What to type so as to see the fault found."""
        if isinstance(self.finder, Test):
            return f"{VARIABLE}={self.name} python {' '.join(self.finder.command()[1:])}"
        return f"python {' '.join(self.finder.command(self.name, self.finder.first, 1)[1:])}"


_TABLE: dict[str, PlantedFault] = {}


def planted_fault(file: str, finder: Seeds | Test) -> Callable[[Plant], Plant]:
    """Enter the fault that the decorated function plants: its docstring says what is changed."""

    def enter(plant: Plant) -> Plant:
        name = plant.__name__.strip("_").replace("_", "-")
        assert name not in _TABLE, f"two planted faults are called {name}"
        assert plant.__doc__, f"the planted fault {name} does not say what it changes"
        _TABLE[name] = PlantedFault(name, plant.__doc__, file, finder, plant)
        return plant

    return enter


def table() -> dict[str, PlantedFault]:
    """All planted faults by name."""
    for module in ENTRIES:
        importlib.import_module(module)
    return _TABLE


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant a fault while a block runs (None: none)."""
    with table()[name].plant() if name else contextlib.nullcontext():
        yield
