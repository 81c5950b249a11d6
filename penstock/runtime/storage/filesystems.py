"""The file systems that a user can name by a URL, for the checkpoint store and for sinks.

A place is a directory, file:///path, s3://bucket/prefix, or anything else that pyarrow or fsspec opens. This module
reads such names and opens remote places. Its callers read and write the files.

A URL must never be taken for the name of a directory, and the keys in it must never get into a message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)

# A request to S3 fails when connecting takes longer than the first time, or when no byte is transferred for the second
# one, and is repeated once. A put to a server that accepts connections and then says nothing takes about four times as
# long.
_CONNECT_SECONDS = 5.0
_REQUEST_SECONDS = 8.0
_ATTEMPTS = 2
_GCS_SECONDS = "30"  # for all tries of one request; pyarrow's own limit is 15 minutes

#: The schemes that pyarrow opens by their URL. It also opens S3. All others are left to fsspec.
_ARROW = ("gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")
#: fsspec's names of the file systems in which a file is visible when it is closed, and in which renaming is copying.
_OBJECTS = "s3 s3a gs gcs abfs abfss az adl wasb oci ocilake oss obs cos cosn tos r2 b2 swift hf memory"
#: What object stores say, in pyarrow's words, when another try will not help.
_REFUSALS = (
    "ACCESS_DENIED",
    "ACCOUNT_PROBLEM",
    "INVALID_ACCESS_KEY_ID",
    "INVALID_CLIENT_TOKEN_ID",
    "INVALID_SIGNATURE",
    "MISSING_AUTHENTICATION_TOKEN",
    "NO_SUCH_BUCKET",
    "SIGNATURE_DOES_NOT_MATCH",
    "UNRECOGNIZED_CLIENT",
    "HTTP status 401",
    "HTTP status 403",
    "PermissionDenied",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "AuthenticationFailed",
    "AuthorizationFailure",
)


#: What to do about a file system that is mounted read-only, or has become so by a fault of its disk.
MOUNT_IT = "Mount it for writing"


class BadPlace(Exception):
    """A name cannot be used as it is. The message begins with the name, without keys, and says what to change."""


@dataclass(frozen=True)
class Remote:
    """A place in a file system of pyarrow.fs. `place` is its URL for people, without keys and options. `rename` moves a
    file in one step, if readers can see a file that is being written; None: a file appears when it is closed. `refresh`
    forgets what was listed before."""

    system: Any
    root: str
    place: str
    rename: Callable[[str, str], object] | None = None
    refresh: Callable[[], object] | None = None


def is_url(name: str) -> bool:
    """Whether a name is a URL, and not a path."""
    return _URL.fullmatch(name) is not None


def local_path(name: str) -> str | None:
    """Returns the path that a name stands for, if it is a path or a file:// URL. Returns None for another URL. Raises
    BadPlace."""
    match = _URL.fullmatch(name)
    if match is None:
        scheme, colon, _ = name.partition(":")
        if colon and scheme in ("file", "s3", "memory", *_ARROW):
            raise BadPlace(f"{name!r}: a URL has '//' after {scheme}:, a directory has no {scheme}:")
        return name
    if match.group(1).lower() != "file":
        return None
    parts = urlsplit(name)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path.startswith("/"):
        raise BadPlace(f"{name!r}: write file:///path, with three slashes and nothing after the path")
    return unquote(parts.path)


def shown(url: str, below: str = "") -> str:
    """Returns a URL for people, with a folder below it, and without keys and options."""
    scheme, _, rest = url.partition("://")
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return _join(f"{scheme}://{host.rpartition('@')[2]}{slash}{path}".rstrip("/"), below)


def named(place: str) -> str:
    """Returns a path or URL of the user for people. A URL loses its keys and options."""
    return shown(place) if is_url(place) else place


def refuses(reason: str) -> bool:
    """Whether a file system's message means that another try will not help."""
    return any(word in reason for word in _REFUSALS)


def one_line(text: str) -> str:
    """Returns a file system's message, which may be long, in one line."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= 500 else f"{text[:500]}..."


def not_writable(directory: str) -> str | None:
    """Returns the reason why files cannot be made in a directory of this machine, with the remedy; None: they can."""
    if os.access(directory, os.W_OK | os.X_OK):
        return None
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        return f"cannot write in {directory!r}: Read-only file system. {MOUNT_IT}"
    return f"no permission to write in {directory!r}. Give the user that runs the job the right to"


def open_remote(url: str, below: str = "", *, look: bool = True, attempts: int = _ATTEMPTS) -> Remote:
    """Opens the place of a URL that is not on this machine, or a folder below it. Nothing is created there.

    `look`: check whether it can be used, as far as the file system tells at once. `attempts`: how often S3 is asked, if
    the URL does not say it.

    Raises BadPlace, and OSError when the file system fails or does not answer.
    """
    match = _URL.fullmatch(url)
    assert match is not None, f"{url!r} is no URL"
    scheme = match.group(1).lower()
    place = shown(url, below)
    try:
        if scheme == "s3":
            return _open_s3(url, below, place, look, attempts)
        if scheme in _ARROW:
            return _open_arrow(url, scheme, below, place)
        return _open_fsspec(url, below, scheme, place)
    except BadPlace:
        raise
    except Exception as error:  # the library of each file system has its own errors
        text = one_line(str(error).replace(url, place))  # the URL may contain keys
        if "libhdfs" in text or "libjvm" in text:
            raise BadPlace(
                f"{place}: HDFS needs Java and Hadoop's native library on every node "
                f"(JAVA_HOME, HADOOP_HOME, CLASSPATH): {text}"
            ) from None
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise OSError(text) from None
        raise BadPlace(f"{place} cannot be opened: {text}. Correct the URL.") from None


def _join(root: str, below: str) -> str:
    return f"{root}/{below}" if below else root


def _open_s3(url: str, below: str, place: str, look: bool, attempts: int) -> Remote:
    """Opens S3. pyarrow's own function for S3 URLs takes neither timeouts nor retries."""
    from pyarrow.fs import AwsStandardS3RetryStrategy, FileType, S3FileSystem, resolve_s3_region

    parts = urlsplit(url)
    keys, _, bucket = parts.netloc.rpartition("@")
    root = "/".join([bucket, *filter(None, unquote(parts.path).split("/"))])
    if not bucket:
        raise BadPlace(f"{place}: the bucket is missing; write s3://bucket/prefix")
    options: dict[str, Any] = {"connect_timeout": _CONNECT_SECONDS, "request_timeout": _REQUEST_SECONDS}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "attempts":
            attempts = int(_number(place, name, value))
        elif name in ("connect_timeout", "request_timeout"):
            options[name] = _number(place, name, value)
        elif name in ("anonymous", "force_virtual_addressing"):
            options[name] = value.lower() in ("", "1", "true", "yes")
        elif name in _S3_OPTIONS:
            options[name] = value
        else:
            known = ", ".join(sorted({*_S3_OPTIONS, *_S3_MORE}))
            raise BadPlace(f"{place}: S3 has no option {name!r}; it has {known}")
    if keys:
        key, _, secret = keys.partition(":")
        options |= {"access_key": unquote(key), "secret_key": unquote(secret)}
    located = "region" in options or "endpoint_override" in options
    if not located and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & os.environ.keys():
        options["region"] = resolve_s3_region(bucket)
    # Delayed: a small object then takes one request instead of the three of a multipart upload.
    system = S3FileSystem(
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=attempts), allow_delayed_open=True, **options
    )
    try:
        missing = look and system.get_file_info(bucket).type == FileType.NotFound
    except OSError as error:
        if not isinstance(error, PermissionError) and not refuses(str(error)):
            raise
        missing = False  # keys without the right to look at the bucket may still have rights to its objects
    if missing:
        raise BadPlace(f"{place}: there is no bucket {bucket!r}; make it, or correct the URL")
    return Remote(system, _join(root, below), place)


_S3_OPTIONS = (
    *("region", "scheme", "endpoint_override", "session_token"),
    *("role_arn", "session_name", "external_id", "tls_ca_file_path"),
)
_S3_MORE = ("anonymous", "attempts", "connect_timeout", "force_virtual_addressing", "request_timeout")


def _number(place: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 1 <= number <= 3600:
        raise BadPlace(f"{place}: {name}={value!r}; it must be a number from 1 to 3600")
    return number


def _open_arrow(url: str, scheme: str, below: str, place: str) -> Remote:
    from pyarrow.fs import FileSystem

    if scheme in ("gs", "gcs"):
        parts = urlsplit(url)
        options = {"retry_limit_seconds": _GCS_SECONDS, **dict(parse_qsl(parts.query))}
        url = parts._replace(query=urlencode(options)).geturl()
    system, root = FileSystem.from_uri(url)
    root = root.rstrip("/")
    if not root and scheme not in ("hdfs", "viewfs"):
        raise BadPlace(f"{place}: the bucket is missing; write {scheme}://bucket/prefix")
    rename = system.move if scheme in ("hdfs", "viewfs") else None
    return Remote(system, _join(root, below), place, rename)


def _open_fsspec(url: str, below: str, scheme: str, place: str) -> Remote:
    try:
        url_to_fs = import_module("fsspec.core").url_to_fs
    except ImportError:
        known = ", ".join(("file", "s3", *_ARROW))
        raise BadPlace(
            f"{place}: {scheme}:// needs the package fsspec (pip install fsspec), on every node. "
            f"Without it Penstock knows directories and {known}."
        ) from None
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    try:
        system, root = url_to_fs(url)
    except ImportError as error:
        raise BadPlace(f"{place}: {scheme}:// needs one more package: {error}") from None
    except ValueError as error:
        text = str(error).replace(url, place)
        raise BadPlace(f"{place}: fsspec cannot open it: {text}. Correct the URL.") from None
    files = PyFileSystem(FSSpecHandler(system))
    rename = None if scheme in _OBJECTS.split() else system.mv
    return Remote(files, _join(root.rstrip("/"), below), place, rename, system.invalidate_cache)
