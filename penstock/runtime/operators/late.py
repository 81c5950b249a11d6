"""Stages that compare the times of records with the watermark, and the records that come too late for them.

A record that is left out must never be lost silently: it is counted, or goes to the side output "late" if the flow uses
it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from penstock.runtime.event_time.watermark import wrong_unit
from penstock.runtime.operators.base import KeyedStage, StageContext
from penstock.runtime.state.keyed import SavedState

#: The side output of records that no window accepts any more.
LATE = "late"


def late_words(dropped: Mapping[str, int], mixing: str = "") -> str:
    """Describes the records that came too late, by operator, for the user. Empty when there are none. `mixing` says
    where records of several tasks meet before watermarks, which is the likely cause."""
    where = ", ".join(f"{late:,} at operator {name!r}" for name, late in dropped.items() if late)
    if not where:
        return ""
    return (
        f"records or partial results came too late for their windows and were dropped: {where}. "
        + (f"The likely cause: {mixing}. Otherwise give" if mixing else "Give")
        + " watermark() a larger out_of_orderness_s, or window() a larger lateness_s, or take the records with "
        'side_output("late").'
    )


class EventTimeStage(KeyedStage):
    """A stage whose state ends by the watermark. `own_time`: it does not take the time of a record as the watermark
    operator does, so that the two may be in different units."""

    event_time = True
    time_option = "time="  # what gives the times of records, for messages

    def __init__(self, context: StageContext, own_time: bool = False) -> None:
        super().__init__(context)
        self._watermark: int | None = None  # the greatest watermark so far
        self._unit_known = not own_time

    def _check_unit(self, times: Collection[int], records: Iterable[Any], span: int = 0) -> None:
        """Fails when the first times that the stage compares with a watermark are most likely not in milliseconds. They
        lie from `times` to a `span` after them."""
        if self._unit_known or self._watermark is None or not times:
            return
        self._unit_known = True
        if (error := wrong_unit(times, span, self._watermark, self.time_option)) is not None:
            raise self.errors.failure(next(iter(records)), error)

    def _leave_out(self, records: Sequence[Any]) -> None:
        """Leaves out records that have come too late."""
        self.late += len(records)
        side = self.context.side.get(LATE)
        if side is not None:
            side += records

    def own_state(self) -> Any:
        return (self._watermark,)

    def restore(self, epoch: int, saved: SavedState) -> None:
        super().restore(epoch, saved)
        # Of several tasks one may have had a lesser watermark than another. It drops a little later what it has.
        self._watermark = min((mark for mark, *_ in saved.own if mark is not None), default=None)
        self._unit_known = self._unit_known or self._watermark is not None
