"""The `penstock` command: what it takes, what it refuses, what it prints."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import penstock
from penstock.apps import cli, text
from penstock.apps.catalog import APPS


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["stop", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "usage: penstock" in out
    if arguments != ["stop", "--help"]:
        assert "wordcount" in out


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("command", ["run", "explain"])
def test_help_of_every_application(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, name, "--help"]) == 0
    assert "--workers" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["run"], ["status"], ["walk"], ["run", "sol", "--workers", "0"]])
def test_what_cannot_be_parsed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "explain"])
def test_an_unknown_application(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "wordcont"]) == 2
    err = capsys.readouterr().err
    assert "'wordcont'; did you mean 'wordcount'?" in err
    assert all(name in err for name in APPS)
    assert cli.main([command, "xyz"]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["fast", "0", "5000:10x", "1000,2000", "-1"])
def test_a_rate_that_is_none(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "sol", f"--rate={rate}"]) == 2
    assert "rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wordcount", "--input", "no-such-file.txt"], "no-such-file.txt"),
        (["grep", "--pattern", "("], "not a regular expression"),
        (["wordcount", "--parallelism", "129"], "key_groups"),
    ],
)
@pytest.mark.parametrize("command", ["run", "explain"])
def test_a_flow_that_cannot_run_says_so_in_one_message(
    command: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("penstock: ")
    assert message in captured.err
    assert "Traceback" not in captured.err
    with pytest.raises(penstock.FlowError):
        cli.main([command, *arguments, "--debug"])


def test_an_output_that_exists_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "part-00000.txt").write_text("mine\n")
    assert cli.main(["run", "wordcount", "--output", str(tmp_path)]) == 2
    assert "part" in capsys.readouterr().err
    assert (tmp_path / "part-00000.txt").read_text() == "mine\n"


def test_the_list_of_applications(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["apps"]) == 0
    out = capsys.readouterr().out
    for app in APPS.values():
        assert app.name in out
        assert app.about in out
    assert "--pattern P" in out


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "wordcount", "--workers", "2", "--parallelism", "3"]) == 0
    out = capsys.readouterr().out
    assert "words   flat_map str.split  <- lines" in out
    assert "physical plan: 6 tasks on 2 workers" in out
    assert "count > counts  x3" in out


def test_explaining_does_not_load_ray() -> None:
    code = (
        "import sys; from penstock.apps.cli import main; code = main(['explain', 'sol']); "
        "sys.exit(code or 'ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


class FakeJob:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: queue.Queue[str] = queue.Queue()

    def stop(self) -> None:
        self.told.put("stop")

    def cancel(self) -> None:
        self.told.put("cancel")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupts_stop_then_cancel_then_give_up(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    job = FakeJob()
    before = signal.getsignal(number)
    with cli._Interrupts(job) as interrupts:  # type: ignore[arg-type]
        signal.raise_signal(number)
        assert job.told.get(timeout=10) == "stop"
        signal.raise_signal(number)
        assert job.told.get(timeout=10) == "cancel"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert interrupts.count == 3
    assert signal.getsignal(number) is before
    assert "again to cancel" in capsys.readouterr().err


# --- with Ray --------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("command", "end"), [("stop", "FINISHED"), ("cancel", "CANCELLED")])
def test_looking_after_a_running_job(command: str, end: str, capsys: pytest.CaptureFixture[str]) -> None:
    flow = penstock.Flow(f"cli-{command}")
    flow.read(penstock.sources.Generator(str, rate=500), name="numbers").write(penstock.sinks.Null())
    job = penstock.run(flow)
    assert cli.main(["status", flow.name]) == 0
    assert "numbers" in capsys.readouterr().out
    assert cli.main(["status", flow.name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == flow.name
    assert cli.main([command, flow.name, "--no-wait"]) == 0
    assert cli.main([command, flow.name]) in (0, 1)  # 1: it has ended, and is gone, in the meantime
    assert job.wait(progress=False)["state"] == end


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("command", ["status", "stop", "cancel"])
def test_a_job_that_does_not_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "nobody"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("penstock: no job 'nobody'")
    assert "Traceback" not in err


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_detached_run_returns_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "sol", "--name", "cli-detached", "--workers", "1", "--duration", "0", "--detached"]
    assert cli.main(arguments) == 0
    assert "next: penstock status cli-detached" in capsys.readouterr().err
    assert cli.main(arguments) == 1  # it runs already
    assert "cli-detached" in capsys.readouterr().err
    assert cli.main(["stop", "cli-detached"]) == 0
    assert "finished" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_job_that_fails_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9\n".encode("latin-1"))
    assert cli.main(["run", "wordcount", "--name", "cli-fails", "--input", str(tmp_path / "latin.txt")]) == 1
    err = capsys.readouterr().err
    assert "penstock: job 'cli-fails' failed" in err
    assert "Traceback" not in err


def penstock_command(*arguments: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.apps.cli", *arguments, "--address", "local"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


@pytest.mark.ray
def test_wordcount_end_to_end() -> None:
    lines = text.read_lines([str(text.default_path())])
    running = penstock_command("run", "wordcount", "--no-progress")
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    assert "wordcount finished" in err
    assert "next: penstock" in err
    passes = int(found[1]) if (found := re.search(r"(\d+) times over", err)) else 1
    expected = Counter({word: n * passes for word, n in _words(lines).items()})
    *top, total = out.splitlines()
    shown = {line.split()[1]: int(line.split()[0].replace(",", "")) for line in top}
    assert len(shown) == 20
    assert shown == {word: expected[word] for word in shown}
    assert min(shown.values()) >= sorted(expected.values())[-20]
    assert total == f"{expected.total():,} words, {len(expected):,} different"


@pytest.mark.ray
def test_every_count_of_wordcount_in_files(tmp_path: Path) -> None:
    corpus = text.packaged_path()
    running = penstock_command("run", "wordcount", "--input", str(corpus), "--output", "counts", cwd=tmp_path)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    written = [line.split("\t") for part in (tmp_path / "counts").iterdir() for line in part.read_text().splitlines()]
    expected = _words(corpus.read_text(encoding="utf-8").splitlines())
    assert len(written) == len(expected)
    assert {word: int(n) for word, n in written} == expected


@pytest.mark.ray
def test_ctrl_c_drains_an_endless_job() -> None:
    running = penstock_command("run", "wordcount", "--rate", "2000")
    assert running.stderr is not None
    said = ""
    for line in running.stderr:
        said += line
        if " running " in line:
            break
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0, said + err
    assert "stopping" in err
    read = re.search(r"wordcount finished: ([\d,]+) records", err)
    assert read is not None, err
    lines = text.read_lines([str(text.default_path())])
    seen = [lines[i % len(lines)] for i in range(int(read[1].replace(",", "")))]
    total = re.search(r"^([\d,]+) words", out, re.MULTILINE)
    assert total is not None, out
    # Two tasks make every second line each, so at the end one may be a few lines ahead of the other.
    assert int(total[1].replace(",", "")) == pytest.approx(_words(seen).total(), rel=0.05)


def _words(lines: list[str]) -> Counter[str]:
    return Counter(word.lower() for line in lines for word in line.split())
