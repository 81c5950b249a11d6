"""Jobs whose checkpoint store fails them: damaged, gone for a while, full, read-only, on an S3 that is down."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from tests.e2e.jobs import run
from tests.e2e.kill_campaign import Watch, master_pid
from tests.e2e.processes import LIMIT_S, kill, wait_until
from tests.e2e.recovery_flows import RecoveryFlow, counted_up, differences, hidden_files, parts

#: The state that an epoch saves is to be a file of its own, and not a part of the manifest. When every key has changed,
#: a task saves one small number for each of its keys and no key, which are 10 KB with so many keys.
KEYS = 20_000
LONG_S = 600.0  # between epochs
RATE = 5000.0


def removed(store: Path) -> None:
    """Remove the store of a running job at one instant: the job writes to it meanwhile, and what is removed file by
    file may not be empty at the end."""
    gone = store.with_name(f"{store.name}-gone")
    store.rename(gone)
    shutil.rmtree(gone)


def key_of(i: int) -> str:
    """The key of a record, which ends with a number below KEYS. Such numbers alone would be packed very well."""
    number = i * 7919 % KEYS
    return f"key {number * 2_654_435_761 % 2**32:x} {number}"


def many_keys(name: str, directory: Path) -> RecoveryFlow:
    """Counts of many keys, until the job is stopped: the state of an epoch is too much to be kept in the manifest.
    `records` is to be set before check()."""
    flow = ps.Flow(name)
    sampled = ps.sinks.Collect()
    source = ps.sources.Generator(key_of, rate=RATE)
    counts = flow.read(source, name="source", parallelism=1).key_by(str.lower).count(emit="every", name="count")
    counts.write(ps.sinks.Files(directory, part_s=0))
    counts.filter(lambda pair: pair[0].endswith("00")).write(sampled)

    def check() -> None:
        totals = Counter(map(key_of, range(made.records)))
        entries = (text.split("\t") for lines in parts(directory).values() for text in lines)
        counted_up("Files", ((key, int(number)) for key, number in entries), totals)
        expected = Counter((key, n) for key, total in totals.items() if key[-2:] == "00" for n in range(1, total + 1))
        problem = differences("Collect", Counter(sampled.records()), expected)
        assert not problem, problem
        assert not hidden_files(directory)

    made = RecoveryFlow(flow, directory, check, collected=sampled)
    return made


def finish(job: Any, made: RecoveryFlow) -> dict[str, Any]:
    """Stop the job, and look whether its results are exact; its last status."""
    job.stop()
    status: dict[str, Any] = job.wait(2 * LIMIT_S, progress=False)
    assert status["state"] == "FINISHED"
    made.records = status["operators"]["source"]["records_out"]
    made.check()
    return status


def epochs_of(job: Any) -> dict[str, Any]:
    found: dict[str, Any] = job.status().get("epochs", {"complete": 0, "begun": 0, "last_failure": None, "restarts": 0})
    return found


def fresh_epoch(job: Any, at_least: int = 2) -> int:
    """Wait for an epoch to become complete; its number."""
    wait_until(lambda: epochs_of(job)["complete"] >= at_least, "epochs are complete")
    before = epochs_of(job)["complete"]
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        now: int = epochs_of(job)["complete"]
        if now > before:
            return now
        time.sleep(0.03)
    raise AssertionError("no epoch became complete")


def blobs_of(store: Path, epoch: int) -> list[str]:
    """The files that an epoch's manifest names, of all tasks."""
    manifest = json.loads((store / f"manifests/{epoch:010d}.json").read_text())["manifest"]
    return [blob["name"] for task in manifest["tasks"] for blob in task["blobs"] if blob["data"] is None]


def own_blobs(store: Path, epoch: int) -> list[str]:
    """The files that an epoch's manifest names and that were written for this epoch."""
    return [blob for blob in blobs_of(store, epoch) if f"/{epoch:08d}-" in blob]


def two_epochs(job: Any, store: Path, folder: Path) -> int:
    """Let a job whose epochs are far apart (LONG_S) complete epochs until each task of "count" has a file of its own in
    the last two; the number of the last one. No other epoch is completed before a test asks for one, however slow the
    machine is. What has changed little is kept in the manifest, and a status may be older than a savepoint: that much
    has changed since the savepoint before is known when the next savepoint is there. A worker whose tasks have no file
    of the last epoch would read nothing of what a test damages."""
    tasks = {task["number"] for task in job.plan() if "count[" in task["name"]}
    with_files = 0
    for number in range(20):
        written = job.status().get("records_written", 0)
        much = written + (1 + number) * RATE  # ever more, because a status may be older by any number of records
        wait_until(lambda n=much: job.status().get("records_written", 0) > n, "much has changed")
        job.savepoint(folder / f"savepoint-{number}")
        complete: int = epochs_of(job)["complete"]
        own = {int(blob.split("-")[1]) for blob in own_blobs(store, complete)}  # of other tasks, too
        with_files = with_files + 1 if tasks <= own else 0
        if with_files == 2:
            return complete
    raise AssertionError("there are no two epochs in a row in which each task has a file of its own")


def logged(text: str) -> bool:
    """Whether some process of the session's cluster has written this to its log."""
    import ray

    session = Path(ray._private.worker._global_node.get_session_dir_path())
    return any(text in path.read_text(errors="replace") for path in (session / "logs").glob("worker-*.err"))


def damage(path: Path, how: str) -> None:
    """Change a file in the way of a bad disk, by a process that has nothing to do with the job."""
    data = bytearray(path.read_bytes())
    if how == "truncated":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def both(name: str) -> tuple[str, str]:
    """A file of a store and its copy."""
    return name, f"copies/{name.rpartition('/')[2]}"


# --- damage --------------------------------------------------------------------------------------------------------


def test_a_damaged_snapshot(cluster: str, fresh_name: Callable[[], str], tmp_path: Path) -> None:
    """So is its copy. It is found out, and the epoch before is used; what the sinks had committed since is undone, and
    done again."""
    name = fresh_name()
    made = many_keys(name, tmp_path / "out")
    store = tmp_path / "epochs" / name
    job = run(made.flow, workers=2, checkpoints=tmp_path / "epochs", epoch_interval_s=LONG_S)
    watch = Watch(job)
    try:
        epoch = two_epochs(job, store, tmp_path)
        assert (store / f"manifests/{epoch - 1:010d}.json").exists()
        for blob in own_blobs(store, epoch):
            for file in both(blob):
                damage(store / file, "flipped")  # what is missing or cut would be seen, and saved anew, at once
        at = time.monotonic()
        pid = job.status()["workers"][1]["pid"]
        kill(pid)
        wait_until(lambda: epochs_of(job)["restarts"] == 2 and job.state == "RUNNING", "the job runs again")
        job.savepoint(tmp_path / "last")
        assert epochs_of(job)["complete"] > epoch, "epochs continue, with new numbers"
        status = finish(job, made)
        after = [s.status["epochs"]["complete"] for s in watch.samples if s.at > at]
    finally:
        watch.close()
    assert min(after) == epoch - 1, f"it went back to {min(after)} from {epoch}"
    assert status["epochs"]["restarts"] == 2
    wait_until(lambda: logged(f"job {name} falls back to an epoch before epoch {epoch}: "), "the log says so")
    assert logged("has changed since it was written")


def test_a_damaged_manifest(cluster: str, fresh_name: Callable[[], str], tmp_path: Path) -> None:
    """The JobMaster that is born again passes over it."""
    name = fresh_name()
    made = many_keys(name, tmp_path / "out")
    store = tmp_path / "epochs" / name
    job = run(made.flow, workers=1, checkpoints=tmp_path / "epochs", epoch_interval_s=LONG_S)
    epoch = two_epochs(job, store, tmp_path)
    master = master_pid(job)
    for file in both(f"manifests/{epoch:010d}.json"):
        damage(store / file, "flipped")
    kill(master)
    wait_until(lambda: epochs_of(job)["complete"] == epoch - 1 and job.state == "RUNNING", "the job runs again")
    job.savepoint(tmp_path / "last")
    assert epochs_of(job)["complete"] > epoch, "epochs continue, with new numbers"
    finish(job, made)
    wait_until(
        lambda: logged(f"job {name} falls back to an older epoch, because one is damaged: epoch {epoch}: "),
        "the log says so",
    )


def test_every_epoch_is_damaged(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    name = fresh_name()
    made = many_keys(name, tmp_path / "out")
    store = tmp_path / "epochs" / name
    job = run(made.flow, workers=2, checkpoints=tmp_path / "epochs", epoch_interval_s=1.5, local=True)
    fresh_epoch(job)
    for path in [*(store / "snapshots").iterdir(), *(store / "copies").glob("*-*")]:
        with suppress(FileNotFoundError):
            damage(path, "flipped")
    pids = [worker["pid"] for worker in job.status()["workers"]]
    kill(pids[0])
    with pytest.raises(ps.JobFailed) as failed:
        job.wait(LIMIT_S, progress=False)
    message = str(failed.value)
    assert f"epochs in {store} can be used" in message
    assert "has changed since it was written" in message
    assert "Restore the directory from a backup, or start the job anew with another checkpoint store" in message
    assert "Traceback" not in message
    assert (store / "manifests").is_dir(), "what there is stays, for people to look at"


def test_a_store_that_is_named_from_here_and_removed(
    cluster: str, fresh_name: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers run in other directories than the program that starts the job, and find the store. When the store is
    removed, the status says so, everything is saved anew while the job lives, and then any death is as good as ever."""
    monkeypatch.chdir(tmp_path)
    name = fresh_name()
    made = many_keys(name, tmp_path / "out")
    store = tmp_path / "here" / name
    job = run(made.flow, workers=1, checkpoints="here", epoch_interval_s=0.5)
    fresh_epoch(job)
    assert epochs_of(job)["store"] == str(store)
    assert epochs_of(job)["damage"] is None
    kept = {f"snapshots/{path.name}" for path in (store / "snapshots").iterdir()}
    assert kept
    removed(store)
    wait_until(lambda: epochs_of(job)["damage"] is not None, "it is noticed")
    assert f"the store {store} has lost snapshots or records: " in epochs_of(job)["damage"]
    assert "is saved again with the next epoch" in epochs_of(job)["damage"]

    def newest() -> dict[str, Any]:
        for path in sorted((store / "manifests").glob("*.json"), reverse=True):
            with suppress(FileNotFoundError):  # nobody needs it any more
                found: dict[str, Any] = json.loads(path.read_text())["manifest"]
                return found
        return {"epoch": 0, "tasks": [], "program": None}

    def names(manifest: dict[str, Any]) -> set[str]:
        return {blob["name"] for task in manifest["tasks"] for blob in task["blobs"]}

    wait_until(lambda: newest()["epoch"] > 0 and not kept & names(newest()), "everything is saved anew")
    complete = epochs_of(job)["complete"]
    wait_until(lambda: epochs_of(job)["complete"] > complete, "epochs continue")

    def resumable() -> bool:
        program = newest()["program"]
        return program is not None and (program["data"] is not None or (store / program["name"]).exists())

    wait_until(resumable, "the program is there again")
    master = master_pid(job)
    kill(job.status()["workers"][0]["pid"])
    wait_until(lambda: epochs_of(job)["restarts"] == 1 and job.state == "RUNNING", "the job runs again")
    kill(master)
    complete = fresh_epoch(job)
    assert not logged(f"job {name} falls back to an epoch before epoch")
    finish(job, made)
    assert not list((tmp_path / "here").rglob("*"))


# --- gone for a while ----------------------------------------------------------------------------------------------


def test_a_store_that_is_gone_for_a_while(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    """A file is in place of a directory, of one after the other: whatever is written fails. The job continues, and so
    do epochs afterwards."""
    name = fresh_name()
    made = many_keys(name, tmp_path / "out")
    job = run(made.flow, workers=2, checkpoints=tmp_path / "epochs", epoch_interval_s=0.5, local=True)
    fresh_epoch(job)
    for what in (".", "snapshots", "manifests"):
        place = (tmp_path / "epochs" / name / what).resolve()
        place.rename(tmp_path / "aside")
        place.write_text("in the way")
        why = "Something else has that name"
        wait_until(lambda why=why: why in (epochs_of(job)["last_failure"] or ""), f"the status says why: {what}")
        complete, written = epochs_of(job)["complete"], job.status()["records_written"]
        wait_until(lambda n=written: job.status()["records_written"] > n + RATE, "the job continues")
        assert epochs_of(job)["complete"] == complete
        assert job.state == "RUNNING"
        place.unlink()
        (tmp_path / "aside").rename(place)
        wait_until(lambda n=complete: epochs_of(job)["complete"] > n, "epochs become complete again")
        assert epochs_of(job)["last_failure"] is None
    kill(job.status()["workers"][0]["pid"])
    wait_until(lambda: epochs_of(job)["restarts"] == 1 and job.state == "RUNNING", "the job runs again")
    finish(job, made)


def test_deaths_while_the_store_is_gone(cluster: str, fresh_name: Callable[[], str], tmp_path: Path) -> None:
    """What must be read to continue cannot be read: the job waits, and continues when it can."""
    name = fresh_name()
    made = many_keys(name, tmp_path / "out")
    place = tmp_path / "epochs" / name
    job = run(made.flow, workers=1, checkpoints=tmp_path / "epochs", epoch_interval_s=0.5)
    fresh_epoch(job)
    place.rename(tmp_path / "aside")
    place.write_text("in the way")
    master = master_pid(job)
    kill(job.status()["workers"][0]["pid"])
    wait_until(lambda: "could not be read" in (epochs_of(job)["last_failure"] or ""), "the status says why it waits")
    assert epochs_of(job)["restarts"] == 1, "only deaths count"
    gone = {worker["pid"] for worker in job.status()["workers"]}
    kill(master)
    started = time.monotonic()
    wait_until(lambda: time.monotonic() - started > 3 or job.state == "FAILED", "some time passes")
    place.unlink()
    (tmp_path / "aside").rename(place)
    wait_until(lambda: not gone & {worker["pid"] for worker in job.status()["workers"]}, "the job has new processes")
    wait_until(lambda: job.state == "RUNNING", "the job runs again")
    finish(job, made)


IN_A_NAMESPACE = """
import os, sys, time
from pathlib import Path
import penstock as ps
from tests.e2e.processes import kill, wait_until
from tests.e2e.test_store_faults import RATE, epochs_of, finish, fresh_epoch, many_keys

disk, out = Path(sys.argv[1]), Path(sys.argv[2])
made = many_keys("namespace", out)
job = ps.run(made.flow, workers=2, local=True, checkpoints=disk, epoch_interval_s=0.5)
try:
    fresh_epoch(job)

    def fails(reason):
        wait_until(lambda: reason in (epochs_of(job)["last_failure"] or ""), f"the status says {reason!r}")
        complete, written = epochs_of(job)["complete"], job.status()["records_written"]
        wait_until(lambda: job.status()["records_written"] > written + RATE, "the job continues")
        assert epochs_of(job)["complete"] == complete
        return complete

    def goes_on(complete):
        wait_until(lambda: epochs_of(job)["complete"] > complete + 1, "epochs become complete again")
        assert epochs_of(job)["last_failure"] is None, epochs_of(job)

    with open(disk / "other", "wb", buffering=0) as other:
        try:
            while other.write(bytes(65536)):
                pass
        except OSError:
            pass
        complete = fails("No space left on device. Free some space")
    (disk / "other").unlink()
    goes_on(complete)
    print("full: passed", flush=True)
    assert os.system(f"mount -o remount,ro {disk}") == 0
    complete = fails("Read-only file system. Mount it for writing")
    assert os.system(f"mount -o remount,rw {disk}") == 0
    goes_on(complete)
    print("read-only: passed", flush=True)
    kill(job.status()["workers"][1]["pid"])
    wait_until(lambda: epochs_of(job)["restarts"] == 1 and job.state == "RUNNING", "the job runs again")
    finish(job, made)
finally:
    job.cancel()
print("exact", flush=True)
"""


def test_a_disk_that_is_full_and_one_that_is_read_only(tmp_path: Path) -> None:
    command = ("unshare", "--user", "--map-root-user", "--mount")
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user and mount namespaces here, so no small disk of our own can be mounted")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ("sh", "-c", 'mount -t tmpfs -o size=8m none "$0" && exec "$@"', str(disk))
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    child = subprocess.Popen(
        [*command, *mount, sys.executable, "-c", textwrap.dedent(IN_A_NAMESPACE), str(disk), str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, _ = child.communicate(timeout=4 * LIMIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        child.wait(30)
    assert child.returncode == 0, out
    assert out.splitlines()[-1] == "exact"


# --- an object store -----------------------------------------------------------------------------------------------


def test_epochs_on_s3(fresh_name: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker dies, then the server, then, while there is none, another worker."""
    pytest.importorskip("moto.server")
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    from tests.epochs.test_store_s3 import objects, place, serving

    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    backend.reset()
    backend.create_bucket("bucket", "us-east-1")
    made = many_keys(fresh_name(), tmp_path / "out")
    with serving() as port:
        job = run(made.flow, workers=2, checkpoints=place(port), local=True)
        fresh_epoch(job, 1)
        assert epochs_of(job)["store"].startswith("s3://bucket/some/prefix/")
        assert "secret" not in json.dumps(job.status().plain())
        first = job.status()["workers"][1]["pid"]
        kill(first)
        wait_until(lambda: first not in {worker["pid"] for worker in job.status()["workers"]}, "it is made again")
        complete = fresh_epoch(job)
    wait_until(lambda: epochs_of(job)["last_failure"] is not None, "the status says why")
    assert "can be reached" in epochs_of(job)["last_failure"]
    written = job.status()["records_written"]
    wait_until(lambda: job.status()["records_written"] > written + RATE, "the job continues")
    second = job.status()["workers"][0]["pid"]
    kill(second)
    # For what tasks had saved, or first for a manifest of which it is not known whether it was written.
    why = re.compile("could not be read|cannot read")
    wait_until(lambda: why.search(epochs_of(job)["last_failure"] or "") is not None, "it waits for the server")
    with serving(port):
        wait_until(lambda: epochs_of(job)["complete"] > complete, "epochs become complete again")
        finish(job, made)
        assert objects() == {}
    backend.reset()


# --- gone with the JobMaster -----------------------------------------------------------------------------------------


def test_a_store_that_is_removed_before_the_master_dies(
    cluster: str, fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    """Nobody is left who could save anything anew. From the beginning the job would double what it has committed."""
    name = fresh_name()
    made = many_keys(name, tmp_path / "out")
    job = run(made.flow, workers=1, checkpoints=tmp_path / "epochs", epoch_interval_s=0.2)
    wait_until(lambda: list((tmp_path / "out").glob("part-*")), "something is committed")
    master = master_pid(job)
    os.kill(master, signal.SIGSTOP)
    before = parts(tmp_path / "out")
    removed(tmp_path / "epochs" / name)
    kill(master)
    with pytest.raises(ps.StoreError, match=rf"gone: somebody has deleted.*penstock\.resume\('{name}'\)") as failed:
        job.wait(LIMIT_S, progress=False)
    assert "run the flow anew" in str(failed.value)
    after = parts(tmp_path / "out")
    assert {part: after[part] for part in before} == before
