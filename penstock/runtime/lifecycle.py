"""State machines as tables: which events are possible in which state, and what each of them leads to.

A component whose behaviour depends on what happened to it before has a *table* (`Table`), and each object a *machine*
(`StateMachine`) that keeps its state by this table. An event is answered in one of three ways:

- It is *taken*: the machine goes to the next state, which may be the same one.
- It is *passed over*, because it is legitimately late or has no effect in this state. The table says why.
- It is *refused* with an InvalidTransition, which tells the machine, its state, the event, and the transitions that led
  there. A refused event is a fault of Penstock's own.

So no event is ignored without a reason that somebody has written down. Events are answered in a microsecond; none
belongs to the path of single records or batches.

The pages of the documentation draw the tables (`Table.diagram`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

# The transitions that an InvalidTransition tells of.
STORY_LENGTH = 24


class State(str, Enum):
    """A state, with a sentence that gives its meaning: `RUNNING = "RUNNING", "The tasks run."`

    A state is equal to its name, and prints as its name.
    """

    sentence: str

    def __new__(cls, name: str, sentence: str) -> Self:
        state = str.__new__(cls, name)
        state._value_ = name
        state.sentence = sentence
        return state

    # As Enum has them they differ between the releases of Python, and the hash is slow.
    __str__ = str.__str__
    __hash__ = str.__hash__

    def __format__(self, format_spec: str) -> str:
        return str.__format__(self, format_spec)


S = TypeVar("S", bound=State)
E = TypeVar("E", bound=str)


@dataclass(frozen=True)
class PassedOver:
    """The entry of a table for an event that has no effect in a state. `because`: a clause without a full stop."""

    because: str


class InvalidTransition(RuntimeError):
    """An event came in a state that excludes it: a fault of Penstock's own. The message tells what led there."""

    def __init__(self, machine: str, state: str, event: str, possible: tuple[str, ...], story: tuple[str, ...]) -> None:
        only = ", ".join(map(repr, possible)) or "nothing"
        led = "\n  ".join(story) or "nothing yet"
        super().__init__(
            f"{machine}: {event!r} came in state {state}, where only {only} can come. What led there:\n  {led}"
        )
        self.machine = machine
        self.state = state
        self.event = event
        self.possible = possible
        self.story = story

    def __reduce__(self) -> tuple[object, ...]:
        return (InvalidTransition, (self.machine, self.state, self.event, self.possible, self.story))


class Table(Generic[S, E]):
    """The states of a component, the events, and the state to which each event leads."""

    def __init__(
        self,
        states: type[S],
        start: S,
        transitions: Mapping[tuple[S, E], S],
        passed_over: Iterable[tuple[E, Iterable[S], str]] = (),
    ) -> None:
        """`transitions`: the next state, by state and event. `passed_over`: events that have no effect in some states,
        and why."""
        self.states = states
        self.start = start
        self.answers: dict[tuple[S, E], S | PassedOver] = dict(transitions)
        for event, where, because in passed_over:
            reason = PassedOver(because)
            for state in where:
                assert (state, event) not in self.answers, f"{event!r} in {state} is in the table twice"
                self.answers[state, event] = reason

    def possible(self, state: S) -> tuple[E, ...]:
        """The events that can come in a state, including events that are passed over."""
        return tuple(event for at, event in self.answers if at is state)

    def ends(self) -> frozenset[S]:
        """The states that no event leaves."""
        left = {state for (state, _), after in self.answers.items() if after is not state and isinstance(after, State)}
        return frozenset(self.states) - left

    def diagram(self) -> str:
        """The table as a state diagram in Mermaid's notation, without events that leave the state as it is."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.start}"]
        arrows: dict[tuple[S, S], list[E]] = {}
        for (state, event), after in self.answers.items():
            if isinstance(after, State) and after is not state:
                arrows.setdefault((state, after), []).append(event)
        for state in self.states:
            lines += [f"    {at} --> {to}: {', '.join(events)}" for (at, to), events in arrows.items() if at is state]
        lines += [f"    {state} --> [*]" for state in self.states if state in self.ends()]
        return "\n".join(lines)

    def rows(self) -> list[tuple[str, str, str]]:
        """For each state: its name, its sentence, and the events that are taken and leave it as it is."""
        return [
            (
                state,
                state.sentence,
                ", ".join(event for (at, event), after in self.answers.items() if at is after is state),
            )
            for state in self.states
        ]

    def reasons(self) -> list[tuple[str, str, str]]:
        """For each event that is passed over: the event, the states, and why."""
        where: dict[tuple[E, str], list[str]] = {}
        for (state, event), answer in self.answers.items():
            if isinstance(answer, PassedOver):
                where.setdefault((event, answer.because), []).append(state)
        return [(event, ", ".join(states), because) for (event, because), states in where.items()]


class StateMachine(Generic[S, E]):
    """The state of one object, by a table. `name` is what an InvalidTransition calls the object."""

    __slots__ = ("_since", "_story", "name", "state", "table")

    def __init__(self, table: Table[S, E], name: str) -> None:
        self.table = table
        self.name = name
        self.state: S = table.start
        self._story: deque[tuple[S, E, S, str]] = deque(maxlen=STORY_LENGTH)  # transitions to another state
        self._since: dict[E, int] = {}  # how often each event has come since the last of these

    def move(self, event: E, why: str = "") -> bool:
        """Take an event. Returns whether it was taken: False when the table passes it over. `why` is for the story.

        Raises InvalidTransition when the event is impossible in this state; the state stays as it is.
        """
        state = self.state
        after: Any = self.table.answers.get((state, event))
        if after is state:
            self._since[event] = self._since.get(event, 0) + 1
            return True
        if after is None:
            raise self.refusal(event)
        if isinstance(after, PassedOver):
            self._since[event] = self._since.get(event, 0) + 1
            return False
        self._story.append((state, event, after, why))
        self._since.clear()
        self.state = after
        return True

    def refusal(self, event: str, why: str = "") -> InvalidTransition:
        """The error for an event that is impossible now. `why`: when not the state alone excludes it."""
        what = f"{event} ({why})" if why else event
        return InvalidTransition(self.name, self.state, what, self.table.possible(self.state), self.story())

    def story(self) -> tuple[str, ...]:
        """The last transitions, oldest first, and the events since then."""
        told = [f"{at} --{event}--> {to}" + (f" ({why})" if why else "") for at, event, to, why in self._story]
        if self._since:
            told.append("since then: " + ", ".join(f"{event} x {count}" for event, count in self._since.items()))
        return tuple(told)
