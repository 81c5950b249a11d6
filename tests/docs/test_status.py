"""The page of the status is that of its structs, and each of their fields is explained."""

from __future__ import annotations

import pytest

from penstock.runtime.status import Part
from tests.docs.status_page import PAGE, described, page, parts


def test_the_page_is_made_from_the_structs() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make status`"


@pytest.mark.parametrize("part", parts())
def test_each_field_is_explained_in_its_order(part: type[Part]) -> None:
    _, entries = described(part)
    assert tuple(entries) == part.__struct_encode_fields__
