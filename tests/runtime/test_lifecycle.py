"""State machines as tables: what is taken, passed over and refused, and how a table is drawn."""

from __future__ import annotations

import json
import pickle
from typing import Literal

import pytest

from penstock.runtime.lifecycle import STORY_LENGTH, InvalidTransition, State, StateMachine, Table


class Door(State):
    """A door."""

    OPEN = "OPEN", "Anybody can walk in."
    SHUT = "SHUT", "Nobody can walk in."
    WALLED = "WALLED", "There is a wall now."


Event = Literal["push", "knock", "wall up"]

DOOR: Table[Door, Event] = Table(
    Door,
    Door.OPEN,
    {
        (Door.OPEN, "push"): Door.SHUT,
        (Door.OPEN, "knock"): Door.OPEN,
        (Door.SHUT, "push"): Door.OPEN,
        (Door.SHUT, "wall up"): Door.WALLED,
    },
    [("knock", (Door.SHUT, Door.WALLED), "nobody listens"), ("push", (Door.WALLED,), "it is a wall")],
)


def test_an_event_is_taken_passed_over_or_refused() -> None:
    door = StateMachine(DOOR, "the door")
    assert door.move("knock")
    assert door.state is Door.OPEN
    assert door.move("push", "a draught")
    assert door.state is Door.SHUT
    assert not door.move("knock")
    assert door.state is Door.SHUT
    assert door.move("wall up")
    assert not door.move("push")
    with pytest.raises(InvalidTransition):
        door.move("wall up")
    assert door.state is Door.WALLED


def test_a_refusal_tells_what_led_there() -> None:
    door = StateMachine(DOOR, "the door")
    for _ in range(3):
        door.move("knock")
    door.move("push", "a draught")
    door.move("push")
    door.move("knock")
    door.move("knock")
    with pytest.raises(InvalidTransition) as caught:
        door.move("wall up")
    assert str(caught.value).splitlines() == [
        "the door: 'wall up' came in state OPEN, where only 'push', 'knock' can come. What led there:",
        "  OPEN --push--> SHUT (a draught)",
        "  SHUT --push--> OPEN",
        "  since then: knock x 2",
    ]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert "'push (twice)' came in state OPEN" in str(door.refusal("push", "twice"))


def test_the_story_is_bounded() -> None:
    door = StateMachine(DOOR, "the door")
    for _ in range(1000):
        door.move("push")
        door.move("knock")
    assert len(door.story()) == STORY_LENGTH + 1


def test_a_state_is_its_name() -> None:
    state = Door.SHUT
    assert state == "SHUT"
    assert {"SHUT": 1}[state] == 1
    assert f"{state} {state:>6} {state!s}" == "SHUT   SHUT SHUT"
    assert json.dumps({"state": state}) == '{"state": "SHUT"}'
    assert pickle.loads(pickle.dumps(state)) is state
    assert Door("SHUT") is state
    assert state.sentence == "Nobody can walk in."


def test_a_table_is_drawn() -> None:
    assert DOOR.diagram().splitlines() == [
        "stateDiagram-v2",
        "    [*] --> OPEN",
        "    OPEN --> SHUT: push",
        "    SHUT --> OPEN: push",
        "    SHUT --> WALLED: wall up",
        "    WALLED --> [*]",
    ]
    assert DOOR.ends() == {Door.WALLED}
    assert DOOR.rows()[0] == ("OPEN", "Anybody can walk in.", "knock")
    assert DOOR.reasons() == [("knock", "SHUT, WALLED", "nobody listens"), ("push", "WALLED", "it is a wall")]


def test_an_event_has_one_answer_in_a_state() -> None:
    with pytest.raises(AssertionError, match="'push' in OPEN is in the table twice"):
        Table(Door, Door.OPEN, {(Door.OPEN, "push"): Door.SHUT}, [("push", (Door.OPEN,), "it sticks")])
