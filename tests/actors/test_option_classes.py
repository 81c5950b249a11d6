"""Classes of options name what they refuse."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Any

import pytest

import penstock as ps
from penstock.bridge.session import SparkOptions
from penstock.jobs.options import JobOptions
from penstock.placement.adoption import AdoptionOptions
from penstock.placement.options import PlacementOptions
from penstock.runtime.errors import FlowError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "flink"}, "kind='flink'; it must be 'auto', 'raydp' or 'pyspark'"),
        *(({"memory": wrong}, f"memory={wrong!r}; give a text with a number above 0") for wrong in ("lots", 5, None)),
        *(({"memory": wrong}, f"memory={wrong!r}; give a text") for wrong in ("0g", "-2g", "", "2x", "g", "0.0g")),
        *(
            ({name: wrong}, f"{name}={wrong!r}; it must be a whole number, 1 or more")
            for name in ("cores", "executors")
            for wrong in (0, 2.5, math.nan, math.inf, "2", True, None)
        ),
        ({"cores": 1_000_000}, "cores=1000000; an executor has 4,096 cores at most; give more executors"),
        *(({"cpus": wrong}, f"cpus={wrong!r}; it must be a number, 0 or more") for wrong in (-1, "1", math.nan)),
        ({"python": ""}, "python=''; it must be a text that is not empty"),
        ({"python": 3}, "python=3; it must be a text"),
        ({"master": " "}, "master=' '; it must be a text"),
        ({"name": ""}, "name=''; it must be a text"),
        ({"name": None}, "name=None; it must be a text"),
        ({"conf": "abc"}, "conf='abc'; it must be a dict of settings"),
        ({"conf": {5: "x"}}, "conf has the key 5; it must be the name"),
        ({"conf": {"spark.a": None}}, "conf has spark.a=None; it must be a text"),
        ({"put": 5}, "put=5; it must be a function, or None"),
        ({"stand_in": 5}, "stand_in=5; it must be a function, or None"),
        *(
            ({name: wrong}, f"{name}={wrong!r}; ")
            for name in ("start_s", "prepare_s")
            for wrong in (0, -1, "x", math.nan, True)
        ),
    ],
    ids=repr,
)
def test_wrong_options_of_spark(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        SparkOptions(**wrong)
    assert isinstance(caught.value, FlowError)


@pytest.mark.parametrize(
    "right",
    [
        *({"memory": amount} for amount in ("512M", "2g", "1.5g", "2 GB", "1024", "100m", "2gb", "1T")),
        {"conf": {"spark.sql.shuffle.partitions": 7, "spark.sql.ansi.enabled": True}},
        {"cores": 256, "executors": 1_000, "cpus": 0, "master": "spark://a:7077", "python": "/of/another/machine"},
        {"start_s": timedelta(seconds=2), "prepare_s": 1, "put": print},
    ],
    ids=", ".join,  # of the names: processes must collect the same tests, and an object shows its address
)
def test_options_of_spark_that_are_right(right: dict[str, Any]) -> None:
    made = SparkOptions(**right)
    for name, value in right.items():
        assert getattr(made, name) == (value.total_seconds() if isinstance(value, timedelta) else value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(
            ({name: wrong}, f"{name}={wrong!r}; it must be a number, 0 or more")
            for name in ("factor", "margin", "busy", "node_cost")
            for wrong in (math.nan, "x", -1, True)
        ),
        *(
            ({"core_bytes_per_s": wrong}, f"core_bytes_per_s={wrong!r}; it must be a number above 0, or None")
            for wrong in (0, -1, math.nan, math.inf, "x")
        ),
        *(
            ({name: wrong}, f"{name}={wrong!r}; ")
            for name in ("horizon_s", "rest_s", "pause_s", "node_hop_s", "network_hop_s")
            for wrong in (-1, "x", math.nan)
        ),
    ],
    ids=repr,
)
def test_wrong_options_of_adoption(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        AdoptionOptions(**wrong)
    assert isinstance(caught.value, FlowError)


def test_options_of_adoption_that_are_right() -> None:
    AdoptionOptions(factor=0, margin=math.inf, busy=math.inf, node_cost=0, core_bytes_per_s=1, rest_s=0, pause_s=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"adoption": None}, "adoption=None; it must be penstock.placement.adoption.AdoptionOptions(...)"),
        ({"adoption": 5}, "adoption=5; it must be penstock.placement.adoption.AdoptionOptions(...)"),
        ({"grow": "x"}, "grow='x'; it must be True or False"),
        ({"replan_s": math.inf}, "replan_s=inf; it is endless. Leave out replan_s"),
        ({"replan_s": 1e-9}, "replan_s=1e-09; it is below 0.01 seconds, the least. Leave out"),
        ({"replan_s": -1}, "replan_s=-1; it must be above 0. Leave out"),
        ({"replan_s": math.nan}, "replan_s=nan; it must be above 0. Leave out"),
        ({"replan_s": "x"}, "replan_s='x'; give seconds or a timedelta"),
        ({"pin": ["m"]}, "pin=['m']; it must be a dict: give what a node must have by operator"),
        ({"pin": {"x": {}}}, "pin names an operator 'x'; the flow has: m, n"),
        ({"pin": {"m": 5}}, "pin: 'm' has 5, which is no dict; give what"),
        ({"pin": {"m": {5: "a"}}}, "pin: 'm' has 5, which is no name; give what"),
        *(
            (
                {"pin": {"m": {"GPU": wrong}}},
                f"pin: 'm' has GPU={wrong!r}; a label has a text, and a resource an amount",
            )
            for wrong in (-1, math.nan, math.inf, None, True)
        ),
    ],
    ids=repr,
)
def test_wrong_options_of_placement(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(FlowError, match=f"^{re.escape(message)}"):
        PlacementOptions(**wrong).checked(2, ["m", "n"], epochs=True)


def test_options_of_placement_that_are_right() -> None:
    pin = {"m": {"GPU": 0.5, "rack": "a"}, "n": {"ssd": 1}}
    given = PlacementOptions("traffic", 2, timedelta(seconds=3), pin=pin, at_least=1, grow=True)  # type: ignore[arg-type]
    assert given.checked(2, ["m", "n"], epochs=True).period_s == 3.0


@pytest.mark.parametrize(
    ("dual", "problem"),
    [
        ("maybe", "'maybe' is not a mode"),
        ("", "'' is not a mode"),
        ("on:3", "'on:3' is not a mode"),
        ("off,delta=0.3", "'off' takes no settings"),
        ("toggle", "the seconds are missing, as in 'toggle:3'"),
        ("toggle:", "the seconds are missing, as in 'toggle:3'"),
        ("toggle:x", "'x' in 'toggle:x' is not a finite number"),
        ("toggle:nan", "'nan' in 'toggle:nan' is not a finite number"),
        ("toggle:-3", "toggle_s=-3.0; it must be above 0"),
        ("toggle:0", "toggle_s=0.0; it must be above 0"),
        ("on,delta=0.3,delta=0.4", "'delta' is given twice"),
        ("on,delta=2", "delta=2.0; it must be a number, above 0 and below 1"),
        ("on,speed=3", "'speed' is not a setting"),
        ("on,", "'' is not a setting"),
        ("on,k", "'k' has no value"),
        ("on,k=x", "'x' in 'k=x' is not a finite number"),
        ("on,margin=-1", "margin=-1.0; it must be a number, 0 or more"),
    ],
)
def test_wrong_texts_of_dual(dual: str, problem: str) -> None:
    message = f"dual={dual!r}: {problem}"
    with pytest.raises(ps.FlowError, match=f"^{re.escape(message)}.*; use 'off', 'on', 'spark-only' or 'toggle:SEC"):
        JobOptions(dual=dual).dual_options()


def test_a_session_for_a_job_without_spark_is_refused() -> None:
    with pytest.raises(
        ps.FlowError, match=r"^spark starts no Spark with dual='off'; give dual as 'on', .* leave out spark"
    ):
        JobOptions(spark=SparkOptions()).dual_options()
    assert JobOptions().dual_options() is None
    assert JobOptions(dual="on", spark=SparkOptions(cores=3)).dual_options() is not None
