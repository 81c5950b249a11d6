"""What `help()` says of options."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.bridge.burst import BurstOptions
from penstock.bridge.session import SparkOptions
from penstock.placement.adoption import AdoptionOptions
from penstock.placement.options import PlacementOptions


@pytest.mark.parametrize("options", [BurstOptions, AdoptionOptions, PlacementOptions, SparkOptions])
def test_every_field_of_options_is_explained(options: type) -> None:
    known = options.__doc__ or ""
    assert [one.name for one in dataclasses.fields(options) if f"`{one.name}`" not in known] == []
