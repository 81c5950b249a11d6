"""Memory that is written again: nobody gets memory that somebody has, and it does not grow without end."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bridge.reused_memory import ReusedMemory, path_of, shared_file

MAKERS: list[Callable[[], Any]] = [io.BytesIO, partial(shared_file, "penstock-test")]


def contents(buffer: Any) -> bytes:
    """What another process would read."""
    if isinstance(buffer, io.BytesIO):
        return buffer.getvalue()
    with open(path_of(buffer), "rb") as file:
        return file.read()


@given(
    st.sampled_from(MAKERS),
    st.lists(st.tuples(st.booleans(), st.integers(0, 200)), max_size=60),
    st.integers(0, 300),
)
def test_each_has_what_it_wrote_and_little_is_kept(
    make: Callable[[], Any], steps: list[tuple[bool, int]], limit: int
) -> None:
    memory = ReusedMemory(make, limit)
    taken: list[tuple[Any, bytes]] = []
    made = set()
    for number, (take, size) in enumerate(steps):
        if take or not taken:
            buffer = memory.take()
            made.add(buffer)
            text = bytes([number]) * size
            buffer.write(text)
            buffer.truncate()
            taken.append((buffer, text))
        else:
            buffer, _ = taken.pop(size % len(taken))
            memory.give_back(buffer)
        assert all(contents(buffer) == text for buffer, text in taken)
        idle = [buffer for buffer in made - {buffer for buffer, _ in taken} if not buffer.closed]
        assert sum(len(contents(buffer)) for buffer in idle) <= limit
    for buffer, _ in taken:
        memory.give_back(buffer)
    memory.close()
    assert all(buffer.closed for buffer in made)


@pytest.mark.parametrize("make", MAKERS)
def test_memory_is_used_again(make: Callable[[], Any]) -> None:
    memory = ReusedMemory(make)
    first = memory.take()
    first.write(b"x" * 100)
    first.truncate()
    second = memory.take()
    assert second is not first
    memory.give_back(first)
    assert memory.take() is first
    assert first.tell() == 0


def test_a_file_is_there_as_long_as_it_is_open() -> None:
    file = shared_file("penstock-test")
    path = path_of(file)
    assert os.path.exists(path)
    assert not os.get_inheritable(file.fileno())
    file.close()
    assert not os.path.exists(path)
