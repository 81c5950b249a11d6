"""`resume` of a job whose program cannot be loaded any more: one error, with the file, the cause and the remedy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from tests.e2e.processes import LIMIT_S

SOURCE = """
def checked(number: int) -> int:
    if number == 600:
        raise ValueError("the job is to fail")
    return number
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The module and the store of a job that has failed after an epoch, and its name."""
    folder = tmp_path_factory.mktemp("program")
    module = folder / "penstock_orders.py"
    module.write_text(SOURCE)
    sys.path.insert(0, str(folder))
    orders = importlib.import_module("penstock_orders")
    flow = ps.Flow("changed")
    flow.read(ps.sources.Generator(lambda number: number, 1000)).map(orders.checked).write(ps.sinks.Null())
    job = ps.run(flow, workers=1, local=True, epoch_interval_s=0.05, checkpoints=folder / "store")
    with pytest.raises(ps.JobFailed, match="the job is to fail"):
        job.wait(LIMIT_S, progress=False)
    return module, folder / "store", "changed"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("other = 1\n", r"refers to has changed since: AttributeError: .*'checked' .*orders\.py.* under its old name"),
        ("def checked(:\n", r"cannot be imported: SyntaxError: .*penstock_orders\.py:1\)\. Correct the file"),
        ('raise RuntimeError("no licence")\n', r"RuntimeError: no licence \(.*penstock_orders\.py:1 in <module>"),
        ("import sys\nsys.exit(3)\n", r"called sys.exit\(3\) \(.*penstock_orders\.py:2 in <module>"),
        ("import no_such_module\n", r"No module named 'no_such_module'.*PYTHONPATH"),
        (None, r"No module named 'penstock_orders'.*PYTHONPATH"),
    ],
)
def test_the_error_names_the_file_the_cause_and_the_remedy(
    source: str | None, words: str, failed: tuple[Path, Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, store, name = failed
    if source is None:
        module.unlink()
    else:
        module.write_text(source)
    monkeypatch.delitem(sys.modules, "penstock_orders", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    with pytest.raises(ps.StoreError, match=f"job '{name}' cannot be resumed here, because .*{words}") as raised:
        ps.resume(name, local=True, checkpoints=store)
    assert str(raised.value).endswith("The epochs in the store stay as they are")
    assert list((store / name / "manifests").iterdir()), "the epochs are gone"


def test_a_program_that_is_put_back_can_be_resumed(
    failed: tuple[Path, Path, str], monkeypatch: pytest.MonkeyPatch, fresh_name: Callable[[], str]
) -> None:
    module, store, name = failed
    module.write_text(SOURCE.replace("600", "-1"))
    monkeypatch.delitem(sys.modules, "penstock_orders", raising=False)
    importlib.invalidate_caches()
    job = ps.resume(name, local=True, checkpoints=store)
    job.wait_for(lambda status: status["records_read"] > 700, LIMIT_S)
    job.cancel()
    assert job.wait(LIMIT_S, progress=False)["state"] == "CANCELLED"
