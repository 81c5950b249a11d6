"""Where a checkpoint store can be, and what is said about places where it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.epochs.files import LocalFiles
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import SnapshotDamaged, StoreError, StoreUnreachable


@pytest.mark.parametrize("form", ["{}", "{}/", "file://{}", "file://localhost{}/", "FILE://{}"])
def test_directories(form: str, tmp_path: Path) -> None:
    assert Store.open(form.format(tmp_path), "job").place == f"{tmp_path}/job"


def test_directories_as_people_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store.open("here", "job").place == f"{tmp_path}/here/job"
    assert Store.open(Path("here"), "job").place == f"{tmp_path}/here/job"
    assert Store.open("~/there", "job").place == f"{tmp_path}/there/job"
    assert Store.open("odd:name", "job").place == f"{tmp_path}/odd:name/job"
    assert Store.open(f"file://{tmp_path}/a%20b", "job").place == f"{tmp_path}/a b/job"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "needs a directory or a URL, got ''"),
        (b"bytes", "needs a directory or a URL, got b'bytes'"),
        ("a\0b", "zero byte"),
        ("s3:bucket/x", "a URL has '//' after s3:"),
        ("file:/x", "a URL has '//' after file:"),
        ("file://host/x", "write file:///path"),
        ("file:///x?y=1", "write file:///path"),
        ("s3://", "the bucket is missing; write s3://bucket/prefix"),
        ("s3:///x", "the bucket is missing"),
        ("s3://b/x?colour=red", "S3 has no option 'colour'; it has anonymous, attempts, connect_timeout, "),
        ("s3://b/x?attempts=0", "attempts='0'; it must be a number from 1 to 3600"),
        ("s3://b/x?request_timeout=soon", "request_timeout='soon'; it must be a number"),
        ("gs://", "the bucket is missing; write gs://bucket/prefix"),
        ("gs://bucket/x?colour=red", "colour.*Correct the URL"),
        ("nosuch://x", "nosuch.*Correct the URL"),
    ],
    ids=str,
)
def test_urls_that_cannot_be(url: Any, words: str) -> None:
    if url == "nosuch://x":
        pytest.importorskip("fsspec")
    with pytest.raises(StoreError, match=words) as caught:
        Store.open(url, "job")
    assert type(caught.value) is StoreError


@pytest.mark.parametrize("job", ["", "a/b", "..", ".hidden", "a b", "x" * 101])
def test_names_of_jobs_that_are_no_directories(job: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no job can be named"):
        Store.open(tmp_path, job)


@pytest.mark.parametrize(
    "url", ["s3://key:hush@b/x?colour=red&session_token=hush", "nosuch://me:hush@host/x?password=hush"]
)
def test_keys_are_in_no_message(url: str) -> None:
    with pytest.raises(StoreError) as caught:
        Store.open(url, "job")
    assert "hush" not in str(caught.value)
    place = "s3://b/x/job" if url.startswith("s3") else "nosuch://host/x/job"
    assert place in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(StoreError, match=r"memory:// needs the package fsspec \(pip install fsspec\), on every node"):
        Store.open("memory://x", "job")


def test_a_package_that_fsspec_misses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    with pytest.raises(StoreError, match=r'sftp:// needs one more package: .*"paramiko"'):
        Store.open("sftp://host/x", "job")


def test_hdfs_without_hadoop_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAVA_HOME", "HADOOP_HOME", "ARROW_LIBHDFS_DIR"):
        monkeypatch.setenv(name, "/nowhere")
    with pytest.raises(StoreError, match=r"HDFS needs Java and Hadoop's native library on every node") as caught:
        Store.open("hdfs://127.0.0.1:1/x", "job")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("scheme", ["gs", "gcs"])
def test_google_s_store_does_not_keep_us_for_15_minutes(scheme: str) -> None:
    url = f"{scheme}://anonymous@bucket/x?scheme=http&endpoint_override=127.0.0.1:1&retry_limit_seconds=1"
    store = Store.open(url, "job")
    assert store.place == f"{scheme}://bucket/x/job"
    with pytest.raises(StoreUnreachable, match=f"cannot list {scheme}://bucket/x/job/manifests: "):
        store.latest()


def test_a_directory_needs_no_pyarrow(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from penstock.runtime.epochs.store import Store\n"
        "store = Store.open(sys.argv[1], 'job')\n"
        "store.get(store.put('snapshots/000001-1-0', [b'x' * 9999]))\n"
        "assert store.latest() is None\n"
        "store.destroy()\n"
        "assert not {'pyarrow', 'fsspec'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def test_a_missing_manifest_is_damage_and_a_missing_store_is_none(tmp_path: Path) -> None:
    store = Store(LocalFiles(f"{tmp_path}/job", False), "job")
    assert store.latest() is None
    with pytest.raises(SnapshotDamaged, match=r"manifests/0000000001.json is missing: epoch 1 is not complete"):
        store.read_manifest(1)
