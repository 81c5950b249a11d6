"""A program that a process of the job cannot load."""

from __future__ import annotations

import pickle

import pytest

from penstock.host.process.loading import load_program
from penstock.runtime.errors import ProgramNotLoaded


class Failing:
    """What raises when it is unpickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[object, ...]:
        return _fail, (self.error,)


def _fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("No module named 'theirs'"), "ImportError: No module named 'theirs'"),
        (SystemExit(3), "called sys.exit(3)"),
    ],
)
def test_a_program_that_cannot_be_loaded_is_told_with_the_line(error: BaseException, said: str) -> None:
    with pytest.raises(ProgramNotLoaded) as failed:
        load_program(pickle.dumps(Failing(error)), "worker 3")
    assert str(failed.value).startswith("the job's program cannot be loaded in worker 3: ")
    assert said in str(failed.value)
    assert "test_loading.py:" in str(failed.value)
    assert failed.value.__cause__ is not None


def test_ctrl_c_is_no_failure_of_the_program() -> None:
    with pytest.raises(KeyboardInterrupt):
        load_program(pickle.dumps(Failing(KeyboardInterrupt())), "worker 3")
