"""Options have one definition, which `run`, the documentation and the command agree with."""

from __future__ import annotations

import inspect
import re

import penstock as ps
from penstock.jobs.options import Option, described, paragraphs
from tests.docs.options_table import PAGE, page, tables


def test_run_takes_each_option_with_its_default() -> None:
    taken = {name: each.default for name, each in inspect.signature(ps.run).parameters.items() if name != "flow"}
    assert list(taken.items()) == [(each.name, each.default) for each in described()]


def test_help_of_run_describes_the_options() -> None:
    assert (inspect.getdoc(ps.run) or "").endswith(paragraphs())


def test_each_option_is_described_by_sentences_with_its_default() -> None:
    for each in described():
        assert each.heading, each.name
        assert each.text.endswith((".", ".)")), each.name
        assert len(each.sentence) < 150, each.name
        assert each.default is None or each.default_words == words_of(each), each.name


def words_of(option: Option) -> str:
    """The default of an option as its description has it."""
    if option.name.endswith("_bytes"):
        return f"{option.default >> 10} KiB" if option.default < 1 << 20 else f"{option.default >> 20} MiB"
    shown = str(option.default) if isinstance(option.default, bool | str) else f"{option.default:g}"
    return f"{shown} s" if option.name.endswith("_s") else shown


def test_the_page_has_the_tables_of_options() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "the tables are old: run `make options`"
    assert tables() in page()


def test_the_page_says_the_consequences_of_sizes_of_options_that_there_are() -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = text.partition("### Too small, too large")[2].partition("\n#")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert named
    assert set(named) <= {each.name for each in described()}
