"""A plan of Spark that is made once and used for every micro-batch (docs/papers.md: D4).

Making the plan of a range takes hundreds of round trips between Python and the JVM, most of them for expressions that
are the same for every micro-batch. A `PlanTape` remembers the calls that made a frame's plan out of another frame, with
their arguments, which are objects of the JVM. Playing the tape on the frame of the next micro-batch takes one round
trip for each step.

It must never be played on a frame with another schema than that of the frame it was made with: the steps look at types
while they are recorded, and not while they are played.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# The methods of a Dataset of the JVM, and of a grouped one, that make another one of it. A method that is not named
# here is passed on and not remembered.
_REMEMBERED = frozenset({"select", "filter", "withColumn", "join", "drop", "groupBy", "agg"})

_Call = tuple[str, tuple[Any, ...]]


class _Recorded:
    """A Dataset of the JVM that knows by which calls it was made."""

    def __init__(self, made: Any, calls: tuple[_Call, ...]) -> None:
        self.made = made
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.made, name)
        if name not in _REMEMBERED:
            return method

        def call(*args: Any) -> _Recorded:
            return _Recorded(method(*args), (*self.calls, (name, args)))

        return call


class PlanTape:
    """The calls that make the plan of some steps; see the module's docstring."""

    def __init__(self, calls: tuple[_Call, ...]) -> None:
        self.calls = calls

    @classmethod
    def record(cls, frame: DataFrame, steps: Callable[[DataFrame], DataFrame]) -> tuple[PlanTape, DataFrame]:
        """Applies the steps to a frame. Returns the tape, and the frame that the steps have made."""
        from pyspark.sql import DataFrame

        session = frame.sparkSession
        recorded: Any = steps(DataFrame(_Recorded(frame._jdf, ()), session))._jdf
        return cls(recorded.calls), DataFrame(recorded.made, session)

    def play(self, frame: DataFrame) -> DataFrame:
        """Returns what the steps make of another frame of the same schema."""
        from pyspark.sql import DataFrame

        made: Any = frame._jdf
        for name, args in self.calls:
            made = getattr(made, name)(*args)
        return DataFrame(made, frame.sparkSession)
