"""The operator that a plan puts behind an operator whose records others read too, while the way to a watermark goes on
in the same task.

A chain is a line: only its last operator can have several readers. The fork passes its records on, and gives them to a
side output for all other readers. It must never change a record, nor leave one out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.runtime.operators.base import Operator, Stage, StageContext
from penstock.runtime.records.batch import Batch

#: The side output for the readers that are not in the task.
OTHERS = "others"


class Fork(Operator):
    """Passes records on, and gives them to the side output OTHERS too."""

    kind = "fork"
    one_to_one = True
    why_not_in_spark = "it divides the records of a source among several operators"

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self.outputs = (OTHERS,)

    def stage(self, context: StageContext) -> Stage:
        return Forking(context)


class Forking(Stage):
    on_shared: Callable[[Batch], None] | None = None  # is told of the records that several operators get

    def run(self, batch: Batch) -> Batch:
        assert isinstance(batch, list)
        if self.on_shared is not None:
            self.on_shared(batch)
        self.context.side[OTHERS].extend(batch)
        return batch
