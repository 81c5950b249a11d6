"""Connected streams: two streams that become the two inputs of one operator (Flink: connect, broadcast state).

Records must never be told apart by what they are: an operator with two inputs knows by which one a record came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.runtime.errors import FlowError
from penstock.runtime.exchange import grouping
from penstock.runtime.mistakes import called, checks_options, no_method
from penstock.runtime.operators.connected import Connected
from penstock.runtime.operators.process import ProcessFunction
from penstock.runtime.program.flow import K_co, KeyedStream, Options, Stream, T_co, warned_of_event_timers
from penstock.runtime.records.userfunc import check_picklable

if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault
    from typing_extensions import Unpack

    V_co = WithDefault("V_co", covariant=True, default=Any)
else:
    V_co = TypeVar("V_co", covariant=True)


@checks_options
class ConnectedStreams(Generic[K_co, T_co, V_co]):
    """A stream with keys, and another one with keys or for all tasks. `process` or `process_batches` makes an
    operator of them."""

    def __init__(self, first: KeyedStream[K_co, T_co], second: KeyedStream[Any, V_co] | Stream[V_co]) -> None:
        flow = first._stream._flow
        if isinstance(second, KeyedStream):
            other = second._stream
        elif isinstance(second, Stream):
            other = second
            if not all(isinstance(tap.grouping, grouping.All) for tap in second._taps):
                raise FlowError(
                    "connect() needs a second stream with keys, b.key_by(...), or one for all tasks, b.broadcast(); "
                    f"got {second!r}"
                )
        else:
            raise FlowError(f"connect() takes a stream with keys, or one that is broadcast, got {called(second)}")
        check_same_flow("connect()", first._stream, other)
        self._flow = flow
        self._first = first._stream
        self._second = other
        self._broadcast = not isinstance(second, KeyedStream)

    def __repr__(self) -> str:
        return f"<ConnectedStreams of flow {self._flow.name!r}: {self._first._places()}; {self._second._places()}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_method(self, name, {})

    def process(
        self,
        process: ProcessFunction | Callable[..., Iterable[Any] | None],
        second: Callable[..., Iterable[Any] | None] | None = None,
        *,
        outputs: tuple[str, ...] = (),
        on_timer: Callable[..., Iterable[Any] | None] | None = None,
        on_event_timer: Callable[..., Iterable[Any] | None] | None = None,
        hold_s: float | timedelta = 0.0,
        **options: Unpack[Options],
    ) -> Stream[Any]:
        """Applies a function to the records of each input, with state by key that both functions see.

        Both inputs keyed: a `penstock.CoProcessFunction`, or two functions, each fn(ctx, key, record). The second one
        for all tasks: a `penstock.BroadcastProcessFunction`, or fn(ctx, key, record) and fn(ctx, record), of which the
        second may change `ctx.broadcast`, the map that all tasks have alike. The rest is as in
        `KeyedStream.process`."""
        if isinstance(process, ProcessFunction):
            check_picklable(process, "process")
        operator = Connected(
            process,
            second,
            broadcast=self._broadcast,
            outputs=outputs,
            on_timer=on_timer,
            on_event_timer=on_event_timer,
            hold_s=hold_s,
            **options,
        )
        return warned_of_event_timers(operator, self._flow._add(operator, (self._first,), (self._second,)))

    def process_batches(
        self,
        process: ProcessFunction | Callable[..., Iterable[Any] | None],
        second: Callable[..., Iterable[Any] | None] | None = None,
        *,
        batch_size: int = 1024,
        outputs: tuple[str, ...] = (),
        **options: Unpack[Options],
    ) -> Stream[Any]:
        """Applies a function to lists of records of the first input, with a map that all tasks have alike: for a model
        that takes many records at once, and that a record of the second input replaces.

        The second input is for all tasks. Give a `penstock.BroadcastProcessFunction` with a method process_batch(self,
        ctx, records), or fn(ctx, records) and fn(ctx, record), of which the second may change `ctx.broadcast`. Each
        epoch saves this map. A list has the records that are ready, at most `batch_size`, in whatever order their keys
        have; there is no current key, so there is no state of a key and no timer. When a call fails, all of its records
        do."""
        if not self._broadcast:
            raise FlowError(
                "process_batches() needs a second stream that is broadcast, a.connect(b.broadcast()): lists have "
                "records of several keys, so there is no state of a key; for two streams with keys use process()"
            )
        if isinstance(process, ProcessFunction):
            check_picklable(process, "process_batches")
        operator = Connected(process, second, broadcast=True, batch_size=batch_size, outputs=outputs, **options)
        return self._flow._add(operator, (self._first,), (self._second,))


def check_same_flow(what: str, first: Stream[Any], second: Stream[Any]) -> None:
    """Raises FlowError when two streams are of different flows."""
    if first._flow is not second._flow:
        raise FlowError(f"{what} of streams of two flows: {first._flow.name!r} and {second._flow.name!r}")
