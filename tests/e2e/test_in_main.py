"""Programs whose classes are all in the main script, or in a notebook: keyed, killed, rescaled, saved and resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).with_name("in_main.py")
LIMIT_S = 500  # a watchdog

# A cell that is run again with another version: what runs from then on is of the new class.
CELL = """
@dataclass(frozen=True)
class Word:
    text: str
    version = {version}

def seen(word):
    assert isinstance(word, Word)
    return word

flow, counts = ps.Flow({name!r}), ps.sinks.Collect()
flow.read(ps.sources.Memory([Word("a"), Word("b"), Word("a")])).rebalance().map(seen).key_by(lambda word: word).count(
    emit="final").map(lambda pair: (*pair, pair[0].version)).write(counts)
ps.run(flow, workers=2, local=True).wait()
assert {{(type(word) is Word, word.text, n, version) for word, n, version in counts.records()}} == {{
    (True, "a", 2, {version}), (True, "b", 1, {version})}}, counts.records()
"""


def test_a_main_script(cluster: str, fresh_name: Callable[[], str], tmp_path: Path) -> None:
    directory = tmp_path / f"{fresh_name()}-{os.getpid()}"
    for part in ("first", "second"):
        done = subprocess.run(
            [sys.executable, SCRIPT, directory, part], capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("ok") == {"first": 1, "second": 2}[part]


@pytest.fixture
def new_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Callable[[str], None]]]:
    """Starts a notebook's kernel, in place of the one before, and returns what runs a cell in it."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    with ExitStack() as last:

        def start() -> Callable[[str], None]:
            last.close()
            manager = KernelManager(kernel_name="python3")
            manager.start_kernel(cwd=str(tmp_path))
            last.callback(manager.shutdown_kernel, now=True)
            client = manager.client()
            last.callback(client.stop_channels)
            client.start_channels()
            client.wait_for_ready(timeout=LIMIT_S)

            def run(code: str) -> None:
                shown: list[Any] = []
                reply = client.execute_interactive(code, timeout=LIMIT_S, output_hook=shown.append, store_history=True)
                output = "".join(str(message["content"].get("text", "")) for message in shown)
                content = reply["content"]
                assert content["status"] == "ok", "\n".join([*content.get("traceback", ()), output])

            return run

        yield start


def test_a_notebook(
    cluster: str, fresh_name: Callable[[], str], tmp_path: Path, new_kernel: Callable[[], Callable[[str], None]]
) -> None:
    """Its failed job is resumed in a fresh kernel, whose classes are others. That such a job outlives its JobMaster:
    test_a_main_script."""
    name = f"{fresh_name()}-{os.getpid()}"
    for part in ("first(directory, its_master_dies=False)", "second(directory)"):
        run_cell = new_kernel()
        run_cell(SCRIPT.read_text())
        run_cell(f"directory = Path({str(tmp_path / name)!r})")
        run_cell(part)
    for version in (1, 2):
        run_cell(CELL.format(version=version, name=f"{name}-cell"))
