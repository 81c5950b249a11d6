"""What a JobMaster's next life knows of its job, whatever has become of the store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.actors.head_memory import HeadMemory
from penstock.host.carry.notes import Notes


def test_what_one_life_notes_the_next_ones_know() -> None:
    memory: dict[str, bytes] = {}
    first, next_life = (Notes("job", "actor 1", memory) for _ in range(2))
    assert not next_life.noted("stop")
    first.note("stop")
    first.note("stop")
    assert next_life.noted("stop")
    assert not next_life.noted("epochs")
    assert not Notes("other job", "actor 1", memory).noted("stop")


def test_another_actor_s_notes_on_a_job_of_that_name_do_not_count() -> None:
    """It was killed, or the program that it belonged to."""
    memory: dict[str, bytes] = {}
    Notes("job", "actor 1", memory).note("epochs")
    later = Notes("job", "actor 2", memory)
    assert not later.noted("epochs")
    later.note("epochs")
    assert later.noted("epochs")


@pytest.mark.ray
def test_notes_are_with_the_head_of_the_cluster(cluster: str, fresh_name: Callable[[], str]) -> None:
    notes = Notes(fresh_name(), "actor", HeadMemory())
    assert not notes.noted("cancel")
    notes.note("cancel")
    assert notes.noted("cancel")
    notes.forget()
    notes.forget()
    assert not notes.noted("cancel")


def test_that_a_job_has_ended_is_not_forgotten() -> None:
    """A JobMaster that is killed after it has deleted the job's epochs must not run the job anew in its next life."""
    memory: dict[str, bytes] = {}
    first, next_life = (Notes("job", "actor 1", memory) for _ in range(2))
    first.note("epochs")
    first.note("ended")
    first.forget()
    assert not next_life.noted("epochs")
    assert next_life.noted("ended")
    assert not Notes("job", "actor 2", memory).noted("ended"), "the next job of this name"
