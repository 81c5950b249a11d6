"""run() and resume() check each option, and name it, before Ray is asked for anything."""

from __future__ import annotations

import inspect
import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.placement.options import PlacementOptions
from penstock.runtime.transport import ring


class Connected(Exception):
    """All options were accepted."""


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any, **__: Any) -> None:
        raise Connected

    monkeypatch.setattr("penstock.actors.cluster.connect", connect)


def run(**options: Any) -> ps.Job:
    flow = ps.Flow("options")
    flow.read(ps.sources.Memory([1])).write(ps.sinks.Null())
    return ps.run(flow, **{"epoch_interval_s": None, **options})


OPTIONS = [name for name in inspect.signature(ps.run).parameters if name != "flow"]
NUMBERS = [
    name
    for name, parameter in inspect.signature(ps.run).parameters.items()
    if {"int", "float"} & set(re.findall(r"\w+", str(parameter.annotation)))
]


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_a_wrong_type_is_named(name: str) -> None:
    with pytest.raises(ps.FlowError, match=rf"\b{name}=<object object"):
        run(**{name: object()})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["2", True, -1, float("nan")], ids=repr)
def test_a_number_that_is_none_or_too_small_is_named(name: str, value: Any) -> None:
    with pytest.raises(ps.FlowError, match=rf"\b{name}={value!r}; "):
        run(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 2.5}, "workers=2.5; it must be a whole number, 1 or more"),
        ({"workers": 0}, "workers=0; it must be a whole number, 1 or more"),
        ({"window_bytes": 1023}, "window_bytes=1023; it must be a whole number, 1,024 or more"),
        ({"cache_bytes": None}, "cache_bytes=None; it must be a whole number, 1 or more"),
        ({"ring_bytes": 1_000_000}, "ring_bytes=1000000; it must be a power of two, .*, such as 1048576"),
        ({"ring_bytes": 1 << 50}, "it must be a power of two, 1,024 to 17,179,869,184"),
        ({"transport": "udp"}, "transport='udp'; it must be one of auto, tcp"),
        ({"ports": 5}, "ports=5; it must be the first and the last port"),
        ({"ports": (20_000,)}, r"ports=\(20000,\); it must be the first and the last port"),
        ({"ports": (20_999, 20_000)}, "from 1 to 65535"),
        ({"ports": (True, 20_000)}, "from 1 to 65535"),
        ({"ports": (0, 20_000)}, "from 1 to 65535"),
        ({"tls": "yes"}, r"tls='yes'; it must be True, False or penstock.Tls\("),
        ({"tls": ps.Tls("a", "b", 5)}, "tls: authority=5; it must be the path of a file"),  # type: ignore[arg-type]
        ({"tls": ps.Tls("/none/a.pem", "b", "c")}, "tls: the certificate '/none/a.pem' cannot be read: No such file"),
        ({"tls": True, "transport": "rdma"}, "transport='rdma' sends in the clear, and tls asks for encryption"),
        ({"trees": "binomial"}, "trees='binomial'; it must be 'auto', a number of 1 or more, or 'toggle:SECONDS'"),
        ({"trees": "toggle:0"}, "trees='toggle:0'; it must be"),
        ({"trees": 0}, "trees=0; it must be"),
        *(
            ({"node_timeout_s": wrong}, rf"node_timeout_s={re.escape(repr(wrong))}; it must be 1 to 600 seconds: heart")
            for wrong in (0, -1, math.nan, 0.001, 0.999, 600.5, 1e9, math.inf, timedelta(milliseconds=100))
        ),
        ({"spares": 1}, "spares=1; it must be True or False"),
        ({"start_timeout_s": 0}, "start_timeout_s=0; it must be above 0"),
        ({"epoch_interval_s": 0}, "epoch_interval_s=0; it must be above 0, or None for a job without epochs"),
        ({"placement": PlacementOptions(nodes="1")}, "nodes='1'; it must be 1 with one worker"),  # type: ignore[arg-type]
        ({"placement": PlacementOptions(replan_s="1")}, "replan_s='1'; give seconds"),  # type: ignore[arg-type]
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ps.FlowError, match=message):
        run(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 2, "parallelism": 3, "ring_bytes": 1024, "window_bytes": 1024, "cache_bytes": 1},
        {"transport": "tcp", "ports": [20_000, 20_999], "node_timeout_s": timedelta(seconds=3), "spares": False},
        {"tls": True, "transport": "tcp", "trees": 1, "node_timeout_s": 1},
        {"cpus_per_worker": 0, "max_restarts": 0, "max_attempts": 1, "detached": True, "address": "local"},
        {"cpus_per_worker": 0.5, "start_timeout_s": timedelta(seconds=1), "ring_bytes": ring.MAX_CAPACITY},
    ],
)
def test_options_that_are_right(options: dict[str, Any]) -> None:
    with pytest.raises(Connected):
        run(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": 5}, "name=5; it must be the name of a job"),
        ({"workers": 0}, "workers=0; it must be a whole number, 1 or more"),
        ({"workers": "2"}, "workers='2'; it must be a whole number"),
        ({"detached": 1}, "detached=1; it must be True or False"),
        ({"checkpoints": 5}, "checkpoints=5; it must be a directory, or a URL"),
    ],
)
def test_wrong_options_of_resume(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ps.FlowError, match=message):
        ps.resume(**{"name": "options", "checkpoints": tmp_path, **options})


def test_the_sizes_of_a_ring_are_those_of_the_native_core() -> None:
    with ring.Ring.create(ring.MIN_CAPACITY) as smallest:
        assert smallest.capacity == ring.MIN_CAPACITY
    for size in (ring.MIN_CAPACITY // 2, ring.MAX_CAPACITY * 2):
        with pytest.raises(ring.RingError, match=f"from {ring.MIN_CAPACITY} to {ring.MAX_CAPACITY} bytes"):
            ring.Ring.create(size)
