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
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

import penstock
from penstock.apps import cli, text
from penstock.apps.app import Built
from penstock.apps.catalog import APPS
from penstock.jobs import progress
from penstock.runtime.errors import PenstockError
from penstock.runtime.status import (
    EpochsStatus,
    JobStatus,
    MachineStatus,
    NodeStatus,
    OperatorStatus,
    PlacementStatus,
    RelayStatus,
    WorkerStatus,
)
from tests.e2e.processes import LIMIT_S, descendants, kill, wait_gone, wait_until


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


def test_a_misspelt_option_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "wordcount", "--wrokers", "2"]) == 2
    assert "unrecognized arguments: --wrokers; did you mean --workers?" in capsys.readouterr().err
    assert cli.main(["jobs", "--zzz"]) == 2
    assert "unrecognized arguments: --zzz\n" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["stop", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "usage: penstock" in out
    if arguments != ["stop", "--help"]:
        assert "wordcount" in out
        assert "penstock run orders.py:flow" in out


def test_there_is_no_rate_of_records_that_were_counted_before_a_savepoint() -> None:
    status = JobStatus(name="job", state="FINISHED", records_read=1000)
    assert cli._summary(status, 2.0) == "job finished: 1,000 records in 2.0 s; 500 records/s"
    assert (
        cli._summary(status, 2.0, "started from the savepoint")
        == "job finished 2.0 s after it started from the savepoint"
    )


@pytest.mark.parametrize("name", ["savepoint", "rescale", "resume"])
def test_help_of_what_epochs_are_good_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: penstock {name}" in out
    assert "NAME" in out


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("command", ["run", "explain", "plan"])
def test_help_of_every_application(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, name, "--help"]) == 0
    assert "--parallelism" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run"],
        ["walk"],
        ["run", "sol", "--workers", "0"],
        ["run", "sol", "--max-restarts=-1"],
        ["run", "sol", "--epoch-interval=-1"],
        ["savepoint"],
        ["savepoint", "sol", "s3:/bucket/x"],
        ["rescale", "hop"],
        ["rescale", "sol", "hop"],
        ["rescale", "sol", "hop", "0"],
        ["resume"],
        ["resume", "sol", "--workers", "0"],
    ],
)
def test_what_cannot_be_parsed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "explain", "plan"])
def test_an_unknown_application(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "wordcont"]) == 2
    err = capsys.readouterr().err
    assert "'wordcont'; did you mean 'wordcount'?" in err
    assert all(name in err for name in APPS)
    assert cli.main([command, "xyz"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_an_application_that_only_a_clone_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(APPS, "linear-road")
    assert cli.main(["run", "linear-road"]) == 2
    assert "clone the repository, run make setup there, and then .venv/bin/penstock run linear-road" in (
        capsys.readouterr().err
    )


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
@pytest.mark.parametrize("command", ["run", "explain", "plan"])
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


@pytest.mark.parametrize(
    ("place", "typed"),
    [
        ("/saved here", "'/saved here'"),
        ("s3://bucket/saved", "s3://bucket/saved"),
        ("s3://KEY:SECRET@bucket/saved?region=eu", "s3://bucket/saved (with the keys and options of the URL)"),
    ],
)
def test_a_command_to_type_has_no_keys(place: str, typed: str) -> None:
    assert cli._to_type(place) == typed


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


def test_explaining_and_planning_do_not_load_ray() -> None:
    code = (
        "import sys; from penstock.apps.cli import main; code = main(['explain', 'sol']) or main(['plan', 'sol']); "
        "sys.exit(code or 'ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_a_place_for_epochs_that_are_not_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "sol", "--epoch-interval", "0", "--checkpoints", str(tmp_path)]) == 2
    assert "--epoch-interval 0" in capsys.readouterr().err
    assert cli.main(["run", "sol", "--epoch-interval", "0", "--savepoint", str(tmp_path)]) == 2
    assert "needs epochs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replan", "0"], "--replan 0; it must be above 0. Leave out --replan for"),
        (["--replan", "5", "--epoch-interval", "0"], "and --epoch-interval 0 turns epochs off; leave out --replan or"),
        (["--savepoint", "/x", "--epoch-interval", "0"], "leave out --epoch-interval or --savepoint"),
        (["--nodes", "5"], "--nodes 5; it must be 1 to 2, because each node gets"),
        (["--node-timeout", "0.1"], "--node-timeout 0.1; it must be 1 to 600 seconds: heartbeats come four times"),
        (["--ring-bytes", "5000"], "--ring-bytes 5000; it must be a power of two"),
        (["--dual", "on,delta={x}"], "--dual 'on,delta={x}': '{x}' in 'delta={x}' is not a finite number; use 'off'"),
        (["--local", "--dual", "on"], "--dual on is not for local jobs"),
        (["--local", "--detached"], "leave out --detached or --local"),
        (
            ["--tls-files", "/none/a.pem", "b", "c"],
            "--tls-files: the certificate '/none/a.pem' cannot be read: No such",
        ),
        (["--tls", "--transport", "rdma"], "--transport rdma sends in the clear, and --tls asks for encryption"),
        (["--local", "--ports", "20000-20999"], "--ports 20000-20999 is not for local jobs"),
        (["--local", "--replan", "2.5"], "--replan 2.5 is not for local jobs"),
    ],
)
def test_a_refusal_names_the_options_of_the_command(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "sol", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert not re.search(
        r"(replan_s|epoch_interval_s|ring_bytes|\w=)", err.replace("delta=", "").replace("toggle_s", "")
    )


def test_nothing_to_resume_or_to_start_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["resume", "nobody", "--checkpoints", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("penstock: there is no epoch of a job 'nobody' in ")
    assert str(tmp_path) in err
    assert "Traceback" not in err
    assert cli.main(["run", "sol", "--savepoint", str(tmp_path / "none")]) == 1
    assert "there is no savepoint" in capsys.readouterr().err


def test_places_are_the_same_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given: list[SimpleNamespace] = []
    for action in ("_savepoint", "_run"):
        monkeypatch.setattr(cli, action, lambda options: given.append(options) or 0)
    assert cli.main(["savepoint", "job", "here/it/is"]) == 0
    assert given[0].words == ["job", str(tmp_path / "here" / "it" / "is")]
    assert cli.main(["run", "sol", "--checkpoints", "~/epochs", "--savepoint", "s3://bucket/x"]) == 0
    assert given[1].checkpoints == os.path.expanduser("~/epochs")
    assert given[1].savepoint == "s3://bucket/x"


RUNNING = JobStatus(name="job", state="RUNNING")


def status_of(**epochs: Any) -> JobStatus:
    known = EpochsStatus(complete=12, begun=13, age_s=0.42, store="/state/job")
    return RUNNING.changed(epochs=known.changed(**epochs))


def test_progress_tells_of_trouble_and_of_nothing_else() -> None:
    calm = status_of()
    assert progress.trouble(calm) == ""
    assert progress.trouble(RUNNING) == ""
    assert progress.line(calm).endswith("p99 -")
    troubled = status_of(restarts=2, last_failure="epoch 13: no space").changed(state="RECOVERING")
    assert progress.line(troubled).startswith("job recovering ")
    assert progress.line(troubled).endswith(", restarted twice; epochs: epoch 13: no space")


def test_the_line_about_epochs() -> None:
    line = progress.epochs(status_of())
    assert line == "epoch 12 complete, 0.4 s ago; no restarts; last failure: none; in /state/job"
    line = progress.epochs(status_of(complete=0, age_s=None, restarts=3, last_failure="no space"))
    assert line == "no epoch complete yet; restarted 3 times; last failure: no space; in /state/job"


def workers_on(*nodes: str) -> list[WorkerStatus]:
    return [
        WorkerStatus(index=i, pid=170 + i, state="RUNNING", node_id=node, tasks=[i]) for i, node in enumerate(nodes)
    ]


def placement(node_ids: list[str], *machines: tuple[str, str, str, float]) -> PlacementStatus:
    """Returns the placement on two nodes, and these machines: id, name, state, and seconds of silence."""
    return PlacementStatus(
        nodes=[NodeStatus(name=name, workers=1) for name in ("left", "right")],
        node_ids=node_ids,
        machines=[
            MachineStatus(node_id=node_id, name=name, state=state, silent_s=silent_s)
            for node_id, name, state, silent_s in machines
        ],
    )


def relays(*known: tuple[str, str]) -> list[RelayStatus]:
    return [RelayStatus(number=i, node_id=node_id, state=state) for i, (node_id, state) in enumerate(known)]


def test_the_processes_of_a_job_on_one_machine_do_not_name_it() -> None:
    status = RUNNING.changed(workers=workers_on("a1", "a1"))
    assert progress.processes(status) == ["worker 0: process 170, 1 task", "worker 1: process 171, 1 task"]


def test_the_processes_of_a_job_on_several_machines() -> None:
    left, right, gone = workers_on("a1", "b2", "c3")
    status = RUNNING.changed(
        workers=[left, right.changed(silent_s=4.2), gone.changed(state="NONE")],
        placement=placement(
            ["a1", "b2"], ("b2", "right", "silent", 4.4), ("c3", "gone", "lost", 5.0), ("d4", "calm", "ok", 0.0)
        ),
        relays=relays(("a1", "ready"), ("b2", "lost")),
    )
    assert progress.processes(status) == [
        "worker 0 on left: process 170, 1 task",
        "worker 1 on right: process 171, 1 task, silent for 4 s",
        "worker 2 on gone: process 172, 1 task; the process has gone, and another one is started",
        "machine right: silent for 4 s",
        "machine gone: lost",
        "relays: left ready, right lost",
    ]


def test_a_machine_that_came_back_is_told_from_the_lost_one_of_its_name() -> None:
    back, gone, far = "6bc20f8f77", "28a2fe3f96", "0d16e8cd58"
    status = RUNNING.changed(
        workers=workers_on("a1", back),
        placement=placement(
            ["a1", back],
            (gone, "right (28a2fe3f)", "lost", 5.0),
            (far, "far (0d16e8cd)", "lost", 5.0),
            (back, "right (6bc20f8f)", "ok", 0.0),
        ),
        relays=relays(("a1", "ready"), (back, "starting")),
    )
    assert progress.processes(status) == [
        "worker 0 on left: process 170, 1 task",
        "worker 1 on right (6bc20f8f): process 171, 1 task",
        "machine right (28a2fe3f): lost",
        "machine far (0d16e8cd): lost",
        "machine right (6bc20f8f): ok",
        "relays: left ready, right (6bc20f8f) starting",
    ]


class Rescaled:
    """A job of three operators, of which two are fused."""

    name = "shop"

    def __init__(self, state: str = "RUNNING") -> None:
        self.state = state
        self.tasks = {"orders": 2, "balance": 4, "files": 4}

    def status(self) -> JobStatus:
        operators = {name: OperatorStatus(parallelism=tasks) for name, tasks in self.tasks.items()}
        return JobStatus(name=self.name, state=self.state, operators=operators)

    def rescale(self, operator: str, parallelism: int) -> None:
        for name in ("balance", "files") if operator != "orders" else ("orders",):
            self.tasks[name] = parallelism


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        ("files", "balance and files run in 1 task each; next"),
        ("orders", "orders runs in 1 task; next"),
    ],
)
def test_rescale_names_all_operators_that_have_changed(
    operator: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Rescaled()
    monkeypatch.setattr(cli, "_attach", lambda options: job)
    assert cli.main(["rescale", "shop", operator, "1"]) == 0
    assert f"job 'shop': {said}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["stop", "cancel"])
def test_a_job_that_has_ended_before_is_not_said_to_end_now(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_attach", lambda options: Rescaled("FINISHED"))
    assert cli.main([command, "shop"]) == 0
    assert capsys.readouterr().err == "job 'shop' had ended before: finished\n"


class FakeJob:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: queue.Queue[str] = queue.Queue()

    def stop(self) -> None:
        self.told.put("stop")

    def cancel(self) -> None:
        self.told.put("cancel")


def test_ctrl_c_while_a_flow_is_loaded(tmp_path: Path) -> None:
    flow = tmp_path / "slow.py"
    flow.write_text(f"open({str(tmp_path / 'loads')!r}, 'w')\nimport time\nwhile True: time.sleep(0.1)\n")
    # A suite that runs in the background of a shell ignores the signal, and its children would do so too.
    command = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "penstock.apps.cli",
        "run",
        f"{flow}:flow",
        "--local",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until((tmp_path / "loads").exists, "the flow is being loaded")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == cli.INTERRUPTED


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
        signal.raise_signal(number)
    assert interrupts.count == 4
    if number == signal.SIGINT:  # at the end of the program one more would be a failure of its own
        assert signal.signal(number, before) == signal.SIG_IGN
    assert signal.getsignal(number) is before
    said = capsys.readouterr().err
    assert ("press Ctrl-C again to cancel" in said) == (number == signal.SIGINT)
    assert ("another SIGTERM cancels the job" in said) == (number == signal.SIGTERM)


# --- standard output that is closed, full, or not read ----------------------------------------------------------


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which $p is the command; $? of the command goes to the end of standard error."""
    program = f"p='{sys.executable} -m penstock.apps.cli'; {line}"
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", ["explain wordcount", "--help"])
def test_results_that_nobody_wants_are_no_failure(arguments: str) -> None:
    closed = shell(f"$p {arguments} >&-")
    assert (closed.returncode, closed.stderr) == (0, "")
    unread = shell(f"( $p {arguments}; echo $? >&2 ) | exec 0<&-")
    assert unread.stderr == "0\n"


def test_results_that_cannot_be_written_are_one_message() -> None:
    full = shell("$p explain wordcount >/dev/full")
    said = "penstock: the results cannot be written to standard output: No space left on device\n"
    assert (full.returncode, full.stderr) == (1, said)


def test_a_command_without_standard_error() -> None:
    result = shell("$p apps 2>&-")
    assert result.returncode == 0
    assert "wordcount" in result.stdout
    assert shell("$p explain nonsense >&- 2>&-").returncode == 2


class EndedJob:
    name = "sol"

    def wait(self, *, progress: bool) -> JobStatus:
        return JobStatus(name="sol", state="FINISHED", records_read=5, running_s=1.0)


def test_the_end_of_a_job_is_told_though_its_results_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = SimpleNamespace(detached=False, progress=False, savepoint=None)
    built = Built(penstock.Flow("sol"), "intro", lambda status, ran: ["a result"], ["penstock apps"])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(PenstockError, match="No space left on device"):
            cli._until_the_end(EndedJob(), options, built)  # type: ignore[arg-type]
        monkeypatch.undo()
    assert "sol finished: 5 records" in capsys.readouterr().err


# --- with Ray --------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("command", "end"), [("stop", "FINISHED"), ("cancel", "CANCELLED")])
def test_looking_after_a_running_job(command: str, end: str, capsys: pytest.CaptureFixture[str]) -> None:
    flow = penstock.Flow(f"cli-{command}")
    flow.read(penstock.sources.Generator(str, rate=500), name="numbers").write(penstock.sinks.Null())
    job = penstock.run(flow)
    wait_until(lambda: job.state == "RUNNING", "the job runs")
    assert cli.main(["status", flow.name]) == 0
    assert "numbers" in capsys.readouterr().out
    assert cli.main(["status", flow.name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == flow.name
    assert cli.main([command, flow.name, "--no-wait"]) == 0
    assert cli.main([command, flow.name]) in (0, 1)  # 1: it has ended, and is gone, in the meantime
    assert job.wait(progress=False)["state"] == end


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("arguments", [["status"], ["stop"], ["cancel"], ["savepoint", "/x"], ["rescale", "hop", "2"]])
def test_a_job_that_does_not_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([arguments[0], "nobody", *arguments[1:]]) == 1
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


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_job_without_epochs_has_no_savepoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "sol", "--name", "cli-bare", "--workers", "1", "--duration", "0", "--detached"]
    assert cli.main([*arguments, "--epoch-interval", "0"]) == 0
    assert cli.main(["status", "cli-bare"]) == 0
    assert "epoch" not in capsys.readouterr().out
    assert cli.main(["savepoint", "cli-bare", str(tmp_path)]) == 1
    assert "needs epochs" in capsys.readouterr().err
    assert cli.main(["cancel", "cli-bare"]) == 0


def test_a_job_is_stopped_with_a_savepoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped:
        name = "words"

        def stop(self, *, savepoint: str) -> str:
            places.append(savepoint)
            return savepoint

    places: list[str] = []
    monkeypatch.setattr(cli, "_attach", lambda options: Stopped())
    assert cli.main(["stop", "words", "--savepoint", str(tmp_path)]) == 0
    assert places == [str(tmp_path)]
    said = capsys.readouterr().err
    assert f"job 'words' has stopped, and is saved in {tmp_path};" in said
    assert f"next: penstock run APP --savepoint {tmp_path}" in said


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_savepoint_rescale_and_recovery_of_a_detached_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, saved = "cli-epochs", str(tmp_path / "saved")
    run = ["run", "wordcount", "--name", name, "--rate", "1000", "--checkpoints", str(tmp_path / "epochs")]
    assert cli.main([*run, "--epoch-interval", "0.2", "--detached"]) == 0
    job = penstock.attach(name)
    wait_until(lambda: job.status().get("epochs", {}).get("complete"), "an epoch is complete")

    assert cli.main(["resume", name, "--checkpoints", str(tmp_path / "epochs")]) == 1
    assert "is running" in capsys.readouterr().err
    assert cli.main(["savepoint", name, saved]) == 0
    assert f"next: penstock run APP --savepoint {saved}" in capsys.readouterr().err
    assert cli.main(["savepoint", name, saved]) == 1
    assert "holds a savepoint already" in capsys.readouterr().err

    assert cli.main(["rescale", name, "count", "3"]) == 0
    assert re.search(r"count.* runs? in 3 tasks", capsys.readouterr().err)
    assert job.status()["operators"]["count"]["parallelism"] == 3
    assert cli.main(["rescale", name, "counting", "3"]) == 2
    assert "has no operator 'counting'; it has: 'lines'" in capsys.readouterr().err

    kill(job.status()["workers"][1]["pid"])
    wait_until(lambda: job.status()["epochs"]["restarts"] == 1, "the death was noticed")
    wait_until(lambda: job.state == "RUNNING", "the job runs again")
    assert cli.main(["status", name]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^epoch \d+ complete.*; restarted once; last failure: .*; in .*epochs/cli-epochs$", out, re.M), (
        out
    )
    assert cli.main(["stop", name, "--savepoint", saved]) == 1
    assert "holds a savepoint already" in capsys.readouterr().err
    saved = str(tmp_path / "stopped")
    assert cli.main(["stop", name, "--savepoint", saved]) == 0
    assert job.wait(progress=False)["state"] == "FINISHED"

    capsys.readouterr()
    again = ["run", "wordcount", "--name", f"{name}-2", "--rate", "1000", "--savepoint", saved, "--workers", "1"]
    assert cli.main([*again, "--detached"]) == 0
    continued = penstock.attach(f"{name}-2")
    wait_until(lambda: continued.status().get("epochs", {}).get("complete"), "it continues")
    assert cli.main(["stop", f"{name}-2"]) == 0
    assert continued.wait(progress=False)["state"] == "FINISHED"
    other = ["run", "sol", "--name", f"{name}-3", "--savepoint", saved]
    assert cli.main(other) == 2
    assert "there is saved state of these" in capsys.readouterr().err


def penstock_command(*arguments: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.apps.cli", *arguments],
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
    running = penstock_command("run", "wordcount", "--address", "local")
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    assert "starting Ray on this machine, for this program alone" in err
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
@pytest.mark.usefixtures("cluster")
def test_every_count_of_wordcount_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a directory that is named from where the command runs, not from where its workers do."""
    monkeypatch.chdir(tmp_path)
    corpus = text.packaged_path()
    assert cli.main(["run", "wordcount", "--name", "cli-files", "--input", str(corpus), "--output", "counts"]) == 0
    written = [line.split("\t") for part in (tmp_path / "counts").iterdir() for line in part.read_text().splitlines()]
    expected = _words(corpus.read_text(encoding="utf-8").splitlines())
    assert len(written) == len(expected)
    assert {word: int(n) for word, n in written} == expected


@pytest.mark.ray
def test_ctrl_c_drains_an_endless_job(cluster: str) -> None:
    running = penstock_command("run", "wordcount", "--name", "cli-drained", "--rate", "2000", "--address", cluster)
    assert running.stderr is not None
    said = ""
    for line in running.stderr:
        said += line
        if " running " in line:
            break
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0, said + err
    assert f"joined the Ray cluster at {cluster}" in said
    assert "stopping" in err
    read = re.search(r"cli-drained finished: ([\d,]+) records", err)
    assert read is not None, err
    lines = text.read_lines([str(text.default_path())])
    seen = [lines[i % len(lines)] for i in range(int(read[1].replace(",", "")))]
    total = re.search(r"^([\d,]+) words", out, re.MULTILINE)
    assert total is not None, out
    # Two tasks make every second line each, so at the end one may be a few lines ahead of the other.
    assert int(total[1].replace(",", "")) == pytest.approx(_words(seen).total(), rel=0.05)


@pytest.fixture
def commands() -> Iterator[list[subprocess.Popen[str]]]:
    """Commands that a test has started: those that still run at its end are killed."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for running in started:
        if running.poll() is None:
            running.kill()
        running.communicate()


@pytest.mark.ray
def test_resume_after_failing_and_after_the_cluster_s_death(
    cluster: str, tmp_path: Path, commands: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker dies, which the job must not bear; resumed, its driver dies with the cluster; resumed, it comes to the
    counts of every word."""
    name, seconds, rate = "cli-resumed", 8, 1000
    epochs = tmp_path / "epochs" / name / "manifests"

    def last_epoch() -> int:
        found = [int(path.stem) for path in epochs.glob("[0-9]*.json")] if epochs.is_dir() else []
        return max(found, default=0)

    options = ["--name", name, "--input", str(text.packaged_path()), "--rate", str(rate), "--duration", str(seconds)]
    options += ["--output", "counts", "--checkpoints", "epochs", "--epoch-interval", "0.2", "--max-restarts", "0"]
    failing = penstock_command("run", "wordcount", *options, "--address", cluster, cwd=tmp_path)
    commands.append(failing)
    wait_until(lambda: last_epoch() >= 2, "two epochs are complete")
    kill(penstock.attach(name).status()["workers"][0]["pid"])
    _, err = failing.communicate(timeout=60)
    assert failing.returncode == 1, err
    assert f"job '{name}' failed: worker " in err
    where = str(tmp_path / "epochs")
    assert f"next: penstock resume {name} --checkpoints {where}" in err

    before = last_epoch()
    local = ["--no-progress", "--address", "local"]
    killed = penstock_command("resume", name, "--checkpoints", where, *local, cwd=tmp_path)
    commands.append(killed)
    wait_until(lambda: last_epoch() >= before + 2, "it continues, with new epochs")
    family = descendants(killed.pid)
    kill(killed.pid)
    wait_gone(family, LIMIT_S)

    capsys.readouterr()
    assert cli.main(["resume", name, "--checkpoints", where, "--workers", "1"]) == 0
    err = capsys.readouterr().err
    assert re.search(rf"{name}: continues from epoch \d+, which was saved \d+ s ago", err), err
    assert re.search(rf"{name} finished [\d.]+ s after it was resumed", err), err
    assert not (tmp_path / "epochs" / name).exists()
    lines = text.read_lines([str(text.packaged_path())])
    expected = _words([lines[i % len(lines)] for i in range(seconds * rate)])
    written = [line.split("\t") for part in (tmp_path / "counts").iterdir() for line in part.read_text().splitlines()]
    assert {word: int(n) for word, n in written} == expected
    assert len(written) == len(expected)


def _words(lines: list[str]) -> Counter[str]:
    return Counter(word.lower() for line in lines for word in line.split())


def test_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Where tasks would run, beside the others, and as a picture."""
    picture = tmp_path / "plan.svg"
    assert cli.main(["plan", "sol", "--nodes", "2", "--slots", "2", "--tasks", "3", f"--picture={picture}"]) == 0
    out = capsys.readouterr().out
    assert "node 1: " in out
    assert "node 2: " in out
    assert sum(line.startswith("  worker ") for line in out.splitlines()) == 4
    assert all(name in out for name in ("penstock", "TurboStream", "T-Storm-like", "JStorm", "round-robin"))
    drawn = ET.fromstring(picture.read_text())
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("spout[0]") == 1
    assert sum(text is not None and text.startswith("bolt-2[") for text in texts) == 3


def test_a_picture_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "sol", "--tasks=1", "--picture=/no/such/place.svg"]) == 2
    assert "the picture cannot be written to /no/such/place.svg" in capsys.readouterr().err


def test_ctrl_c_in_the_middle_of_a_write_stops_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python refuses to write to a stream in a signal handler that interrupts a write to that stream."""

    def refuse(text: str) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    monkeypatch.setattr(cli, "_say", refuse)
    job = FakeJob()
    interrupts = cli._Interrupts(job)  # type: ignore[arg-type]
    interrupts._handle(signal.SIGINT, None)
    assert job.told.get(timeout=60) == "stop"
    interrupts._handle(signal.SIGINT, None)
    assert job.told.get(timeout=60) == "cancel"
