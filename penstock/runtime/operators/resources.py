"""The resources that each task of an operator needs, such as GPUs: the options `num_gpus` and `resources`, named as in
Ray Data. `program/bound_tasks.py` says in which worker such a task runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.runtime.errors import WrongValue, shorten
from penstock.runtime.units import number, number_above_zero

#: What Ray calls GPUs.
GPU = "GPU"

#: Amounts by the name of the resource, all above 0.
Needs = Mapping[str, float]

_INSTEAD = {
    "CPU": "cpus_per_worker of run() says how many CPUs a worker reserves",
    GPU: "use num_gpus",
    "memory": "Penstock reserves no memory",
    "object_store_memory": "Penstock does not use Ray's object store for records",
}


def needs_of(num_gpus: float, resources: Mapping[str, float] | None, operator: str) -> dict[str, float]:
    """Returns the needs of each task of an operator. Raises WrongValue for options that cannot be."""
    found: dict[str, float] = {}
    if gpus := number(num_gpus, f"operator {operator!r}: num_gpus"):
        found[GPU] = gpus
    if resources is not None:
        example = "give the amount that each task needs by the resource's name, as in resources={'fpga': 1}"
        if not isinstance(resources, Mapping):
            raise WrongValue(f"operator {operator!r}: resources={shorten(resources)}; {example}")
        for name, amount in resources.items():
            if not isinstance(name, str) or not name:
                raise WrongValue(f"operator {operator!r}: resources has {shorten(name)}, which is no name; {example}")
            if name in _INSTEAD:
                raise WrongValue(f"operator {operator!r}: resources has {name!r}; {_INSTEAD[name]}")
            found[name] = number_above_zero(amount, f"operator {operator!r}: resources[{name!r}]")
    for name, amount in found.items():
        if amount > 1 and amount != int(amount):
            raise WrongValue(
                f"operator {operator!r}: {amount:g} {name}; Ray gives away parts of one {name}, and otherwise whole "
                "ones: use a whole number, or one below 1"
            )
    return found


def together(several: Iterable[Needs]) -> dict[str, float]:
    """Returns the sum of several needs."""
    found: dict[str, float] = {}
    for needs in several:
        for name, amount in needs.items():
            found[name] = found.get(name, 0.0) + amount
    return found


def told_needs(needs: Needs) -> str:
    """Describes needs for people."""
    return " and ".join(f"{amount:g} {_unit(name, amount)}" for name, amount in needs.items())


def _unit(name: str, amount: float) -> str:
    return "GPUs" if name == GPU and amount > 1 else name
