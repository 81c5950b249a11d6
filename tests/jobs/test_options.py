"""Options have one definition, which `run`, the documentation and the command agree with."""

from __future__ import annotations

import inspect
import re

import penstock as ps
from penstock.jobs.options import described
from tests.docs.options_table import PAGE, page, table


def test_run_takes_each_option_with_its_default() -> None:
    taken = {name: each.default for name, each in inspect.signature(ps.run).parameters.items() if name != "flow"}
    assert list(taken.items()) == [(name, default) for name, default, _ in described()]


def test_help_of_run_describes_each_option() -> None:
    text = inspect.getdoc(ps.run) or ""
    for name, _, about in described():
        assert re.search(rf"^`{name}` \(.+?\): ", text.replace("\n", " ").replace(" `", "\n`"), re.MULTILINE), name
        assert about.text.partition(" ")[0] in text


def test_the_page_has_the_table_of_options() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "the table is old: run `make options`"
    assert table() in page()


def test_the_meaning_of_each_option_is_made_of_sentences() -> None:
    for name, _, about in described():
        assert about.text.endswith((".", ".)")), name
        assert len(about.sentence) < 150, name
