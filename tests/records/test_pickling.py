"""One pickler: a class of the main script is one class in all processes of a job, and in its later lives.

Each case runs in a main script of its own, tests/records/pickling_main.py, with other processes beside it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.errors import CodecError
from penstock.runtime.records import pickling

SCRIPT = Path(__file__).with_name("pickling_main.py")


def run(case: str, directory: Path, script: Path = SCRIPT) -> None:
    done = subprocess.run([sys.executable, script, case, directory], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "case",
    [
        "agree",
        "structs",
        "slots",
        "enums",
        "remade",
        "streams",
        "refused",
        "named_objects",
        "keys",
        "no_code",
        "own_process",
        "strays",
        "namesakes",
        "redefined",
        "importable",
    ],
)
def test_classes_of_the_main_script(case: str, tmp_path: Path) -> None:
    run(case, tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State that a process of another main script has saved."""
    directory = tmp_path_factory.mktemp("saved")
    run("save", directory)
    return directory


@pytest.mark.parametrize("case", ["load", "resume", "gone"])
def test_state_of_an_earlier_life(case: str, saved: Path) -> None:
    run(case, saved)


@pytest.mark.parametrize("case", ["edited", "required"])
def test_state_of_an_earlier_life_in_an_edited_script(case: str, saved: Path, tmp_path: Path) -> None:
    script = tmp_path / "edited.py"
    text = SCRIPT.read_text()
    of_key, of_order = "    user: str\n    mode: Mode\n", "    made = 0\n"
    assert text.count(of_key) == text.count(of_order) == 1
    if case == "edited":
        text = text.replace(of_key, of_key + '    zone: str = "x"\n')
        new = '    note: str = "none"\n    tags: list[int] = field(default_factory=list)\n\n'
    else:
        new = "    note: str = field(kw_only=True)\n\n"
    script.write_text(text.replace(of_order, new + of_order))
    run(case, saved, script)


@pytest.mark.parametrize("case", ["reordered", "without"])
def test_values_and_members_that_are_saved_by_name(case: str, saved: Path, tmp_path: Path) -> None:
    """Pickle has only the places of values, and only the values of members."""
    script = tmp_path / "edited.py"
    text = SCRIPT.read_text()
    if case == "reordered":
        changes = {
            "    start: int\n    end: int\n    via": "    end: int\n    via",
            "Route, ...] = ()\n": 'Route, ...] = ()\n    name: str = "x"\n    start: int = 0\n',
            "    start: int\n    end: int\n\n\nclass Long": "    end: int\n    start: int\n\n\nclass Long",
            "Leg(7, end=8)": "Leg(8, start=7)",
            "    RED = auto()\n    GREEN": "    PINK = auto()\n    GREEN",
            "    GREEN = auto()\n": "    GREEN = auto()\n    RED = auto()\n",
            "    LOW = auto()\n": "    LEAST = 7\n    LOW = 7\n",  # it has another name and value, and its old name too
            "    READ = auto()\n": "    LIST = auto()\n    READ = auto()\n",
        }
    else:
        changes = {"    RED = auto()\n    GREEN": "    PINK = auto()\n    GREEN", "[Colour.RED, ": "["}
    for before, now in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, now)
    script.write_text(text)
    run(case, saved, script)


@pytest.mark.parametrize("mode", ["r", "a+", "w"])
def test_open_files_do_not_travel(mode: str, tmp_path: Path) -> None:
    """A copy of them would: another process would read the copy, and write into it."""
    (tmp_path / "words").touch()
    with (tmp_path / "words").open(mode) as file:
        for value in (file, {"words": [file]}, lambda: file):
            with pytest.raises(TypeError, match=r"cannot pickle the open file '.*/words'.*Open it in the worker"):
                pickling.dumps(value)
            with pytest.raises(TypeError, match=r"cannot pickle the open file '.*/words'"):
                pickling.Program().dumps(value)


@pytest.mark.parametrize(("number", "words"), [(0, "class"), (1, "second class"), (3, "4th class")])
def test_a_class_of_the_same_name_that_is_gone_is_named_with_its_number(number: int, words: str) -> None:
    with pytest.raises(CodecError, match=f"^there is no {words} Gone of module __main__ in this program"):
        pickling._find("of another program", "__main__", "Gone", number)


def test_what_cannot_be_pickled_raises() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        pickling.dumps([threading.Lock()])

    class Held:
        lock = threading.Lock()

    with pytest.raises(TypeError, match="cannot pickle"):
        pickling.dumps(Held())
    with pytest.raises(TypeError, match="cannot pickle"):
        pickling.Program().dumps(Held())


def test_a_definition_that_cannot_be_read_leaves_no_half_made_class() -> None:
    class Mine:
        value: Any = None

    class Boom:
        def __reduce__(self) -> Any:
            return (_boom, ())

    Mine.value = Boom()
    data = pickling.Program().dumps(Mine)
    assert pickling.loads(pickling.Program().dumps(int)) is int
    with pytest.raises(ZeroDivisionError):
        pickling.loads(data)
    assert not pickling._unfinished


def _boom() -> None:
    raise ZeroDivisionError


def test_a_host_that_has_not_joined_a_program_names_its_classes_and_sends_no_code() -> None:
    class Order:
        pass

    program = pickling.Program()
    program.dumps(Order())
    assert b"_begin" in pickling.dumps(Order())
    named = pickling.dumps(Order(), program)
    assert b"_begin" not in named
    assert b"_find" in named
