"""The `penstock` command with a user's own flow, and with jobs whose name is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import penstock as ps
from penstock.apps import cli

OWN = """
import dataclasses, enum
import penstock as ps
from beside import louder

class Kind(enum.Enum):
    EVEN = "even"
    ODD = "odd"

@dataclasses.dataclass(frozen=True)
class Order:
    kind: Kind

def made(i):
    return Order(Kind.EVEN if i % 2 == 0 else Kind.ODD)

def known(order):
    return isinstance(order, Order)

def named(key, count):
    return louder(key.kind.value), count

def build():
    flow = ps.Flow("own")
    orders = flow.read(ps.sources.Generator(made, limit=1000), name="orders").rebalance()
    counts = orders.filter(known).key_by(lambda order: order).count(emit="final")
    counts.map(lambda pair: named(*pair)).write(ps.sinks.Collect(), name="counts")
    return flow

flow = build()
not_a_flow = 3
if __name__ == "__main__":
    raise SystemExit("the file is not run as a program")
"""

MAKERS = """
import penstock as ps

def build(limit: int = 10) -> ps.Flow:
    flow = ps.Flow("made")
    flow.read(ps.sources.Memory(range(limit)), name="numbers").write(ps.sinks.Null())
    return flow

def with_argument(limit: int) -> ps.Flow:
    return build(limit)

def another() -> str:
    return "ps.Flow"
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    """A user's file with a flow, which imports from the file beside it."""
    (tmp_path / "beside.py").write_text("def louder(text):\n    return text.upper()\n")
    (tmp_path / "orders.py").write_text(OWN)
    return tmp_path / "orders.py"


@pytest.mark.parametrize("name", ["", ":flow", ":build"])
def test_the_plan_of_a_flow_of_one_s_own(name: str, own_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", f"{own_file}{name}", "--workers", "3"]) == 0
    out = capsys.readouterr().out
    assert "orders" in out
    assert "counts" in out


FILLED = """
import penstock as ps
flow = ps.Flow("filled")
flow.read(ps.sources.Memory(["a"]), name="words").write(ps.sinks.Files({place!r}))
"""


@pytest.fixture
def filled(own_file: Path, tmp_path: Path) -> Path:
    """A file with a flow whose sink has written its directory already."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "part-00000.txt").write_text("a\n")
    own_file.write_text(FILLED.format(place=str(tmp_path / "out")))
    return own_file


@pytest.mark.parametrize("command", ["explain", "plan"])
def test_a_plan_is_shown_although_the_sink_s_place_is_not_empty(
    command: str, filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, str(filled)]) == 0
    assert "words" in capsys.readouterr().out
    assert cli.main(["run", str(filled)]) == 2
    assert "already holds 1 part files" in capsys.readouterr().err


def test_a_savepoint_lets_sinks_continue_in_their_place(
    filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.actors.cluster.connect", lambda *_, **__: pytest.fail("Ray is not needed to see it"))
    places = ["--checkpoints", str(tmp_path / "epochs"), "--savepoint", str(tmp_path / "nowhere")]
    assert cli.main(["run", str(filled), *places]) == 1
    assert "there is no savepoint in" in capsys.readouterr().err


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_a_file_whose_function_returns_the_flow(
    future: str, own_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_file.write_text(future + MAKERS)
    assert cli.main(["explain", str(own_file)]) == 0
    assert "numbers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (":nothing", OWN, r"defines no 'nothing'; flows that it has: flow"),
        (":flw", "def flow():\n    pass\n", r"defines no 'flw', and no flow; functions that might return one: flow$"),
        (":not_a_flow", OWN, r"is no flow, and no function that returns one: it is int"),
        ("", OWN + "\nother = build()", r"has 2 flows; say which one: .*orders.py:flow, .*orders.py:other"),
        ("", MAKERS + "def other() -> 'ps.Flow':\n    return build()\n", r"has 2 flows; .*:build, .*orders.py:other"),
        ("", "def build():\n    return 3\ndef with_argument(a):\n    return a\n", r"has no flow.*that it has: build\n"),
        (":nothing", MAKERS, r"defines no 'nothing'; flows that it has: build"),
        ("", "import penstock\n1 / 0\n", r"could not be loaded: ZeroDivisionError: .*orders.py:2\)"),
        (":make", "def make():\n    return {}['a']\n", r"could not make its flow: KeyError: 'a' \(.*orders.py:2\)"),
        ("", "import penstock as ps\nps.Flow('a b')\n", r"flow name 'a b'"),
        ("", "import sys\nsys.exit('give a file')\n", r"could not be loaded: SystemExit: give a file \(.*below if __n"),
        (":make", "def make():\n    raise SystemExit\n", r"could not make its flow: SystemExit: no reason given"),
    ],
)
def test_files_without_the_flow_that_is_meant(
    name: str, text: str, message: str, own_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_file.write_text(text)
    assert cli.main(["run", f"{own_file}{name}"]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert "Traceback" not in err


def test_help_has_names_as_they_are(own_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = own_file.with_name("50%Orders.py")
    mine.write_text(OWN.replace('"own"', '"Own"'))
    assert cli.main(["run", str(mine), "--help"]) == 0
    assert "The flow 'Own' of" in capsys.readouterr().out
    assert cli.main(["run", f"{mine}:flow", "--workers", "none"]) == 2


def test_a_file_that_is_not_there_and_a_module_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "nowhere/orders.py:flow"]) == 2
    assert "there is no file nowhere/orders.py" in capsys.readouterr().err
    assert cli.main(["explain", "no_such_module:flow"]) == 2
    assert "module no_such_module could not be loaded: ModuleNotFoundError" in capsys.readouterr().err


def test_the_pace_of_one_s_own_generators(own_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(own_file), "--rate", "500:1s,10:1s", "--duration", "3", "--name", "other"]
    assert cli.main(["explain", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("flow other\n")
    assert "on 2 workers" in out
    assert "500/s for 1 s, 10/s for 1 s, limit=1,000, duration=3 s" in out
    own_file.write_text(
        "import penstock as ps\nflow = ps.Flow('a')\nflow.read(ps.sources.Memory([])).write(ps.sinks.Null())"
    )
    assert cli.main(["run", str(own_file), "--rate", "10"]) == 2
    assert "--rate and --duration pace Generator sources; flow 'a' reads Memory" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_flow_of_one_s_own_runs_with_two_workers(own_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", f"{own_file}:build", "--workers", "2", "--rate", "2000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "counts: 2 records"
    assert sorted(lines[1:]) == ["  ('EVEN', 500)", "  ('ODD', 500)"]


def printed(capsys: pytest.CaptureFixture[str], begins: str) -> str:
    """What was printed from a line on that begins so. Ray prints what the processes of its cluster say in between, as
    of the jobs of earlier tests; each such line is coloured."""
    lines = capsys.readouterr().out.splitlines()
    return "\n".join(line for line in lines[lines.index(begins) :] if not line.startswith("\x1b"))


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_the_only_job_needs_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 1
    assert "no job runs" in capsys.readouterr().err
    assert cli.main(["jobs"]) == 0
    flows = [ps.Flow(name) for name in ("only-one", "another")]
    for flow in flows:
        flow.read(ps.sources.Generator(str, rate=500)).write(ps.sinks.Null())
    first = ps.run(flows[0])
    assert cli.main(["status", "--json"]) == 0
    assert json.loads(printed(capsys, "{"))["name"] == "only-one"
    second = ps.run(flows[1])
    assert cli.main(["jobs", "--json"]) == 0
    assert {status["name"] for status in json.loads(printed(capsys, "["))} == {"only-one", "another"}
    assert cli.main(["jobs"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert cli.main(["stop"]) == 1
    assert "several jobs run: another, only-one" in capsys.readouterr().err
    second.cancel()
    second.wait(progress=False)
    assert cli.main(["cancel", "--no-wait"]) == 0
    assert first.wait(progress=False)["state"] == "CANCELLED"
