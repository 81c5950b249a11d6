"""What `help()` says of options."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest

from penstock.bridge.burst import BurstOptions
from penstock.bridge.session import SparkOptions
from penstock.placement.adoption import AdoptionOptions
from penstock.placement.options import PlacementOptions


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else repr(value)


@pytest.mark.parametrize("options", [BurstOptions, SparkOptions, PlacementOptions, AdoptionOptions])
def test_help_explains_each_field_with_its_default(options: type[Any]) -> None:
    text = (inspect.getdoc(options) or "").replace("'", '"')
    made = options()
    for field in dataclasses.fields(options):
        found = getattr(made, field.name)
        default = "AdoptionOptions()" if found == AdoptionOptions() else shown(found).replace("'", '"')
        assert re.search(rf"^`{field.name}` \({re.escape(default)}\): \S", text, re.MULTILINE), field.name
