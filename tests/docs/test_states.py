"""docs/states.md shows the tables of states that the code has."""

from __future__ import annotations

import pytest

from penstock.runtime.lifecycle import Table
from tests.docs.states_page import PAGE, SECTIONS, page


def test_the_page_is_made_from_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "the page is old: run `make states`"


@pytest.mark.parametrize("table", [table for _, _, table in SECTIONS], ids=[heading for heading, _, _ in SECTIONS])
def test_a_table_reaches_each_of_its_states_and_from_each_an_end_or_the_start(table: Table) -> None:  # type: ignore[type-arg]
    after = {state: {to for (at, _), to in table.answers.items() if at is state} for state in table.states}

    def reached(state: str) -> set[str]:
        seen: set[str] = set()
        ahead = {state}
        while ahead:
            seen |= ahead
            ahead = {to for at in ahead for to in after[at] if isinstance(to, table.states)} - seen
        return seen

    assert reached(table.start) == set(table.states)
    ends = table.ends() or {table.start}
    assert all(reached(state) & ends for state in table.states)
    assert all(state.sentence.endswith(".") for state in table.states)
