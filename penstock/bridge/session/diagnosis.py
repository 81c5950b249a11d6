"""Finds out why Spark cannot be used, and the remedy: what is installed, which Java there is, and what errors mean."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from penstock.bridge.session.settings import APP_MASTER_OPTIONS, DRIVER_OPTIONS
from penstock.runtime.errors import PenstockError

logger = logging.getLogger(__name__)
_OLDEST_JAVA, _NEWEST_JAVA = 11, 23  # Spark 3.5 uses what Java 24 has removed


class SparkUnavailable(PenstockError):
    """There is no Spark session, or it does not work. The message names the cause and the remedy."""


@dataclass(frozen=True)
class Java:
    """The java program that would run. `origin` says what has chosen it; `major` is None when it does not answer."""

    origin: Literal["JAVA_HOME", "PATH"]
    path: str | None
    major: int | None


def diagnose(versions: Mapping[str, str | None], java: Java | None, error_text: str) -> str:
    """Says why Spark cannot be used, with the remedy. Returns "" when nothing speaks against it and `error_text` is
    empty.

    `versions` has the packages that are needed: None for a package that is not installed, and no key for one that does
    not matter.
    """
    cause = _wrong_packages(versions) or (_wrong_java(java) if java else "")
    if not cause and error_text:
        for pattern, explanation in _SYMPTOMS:
            if found := re.search(pattern, error_text, re.DOTALL):
                cause = explanation.format(*found.groups())
                break
        else:
            cause = f"{essence(error_text)}."
            if java and java.major and java.major > 17:
                cause += f" Java {java.major} may be the reason: Spark 3.5 is made for 11 and 17."
    if not cause:
        return ""
    found_here = [f"{name} {version or 'missing'}" for name, version in versions.items()]
    if java and java.major:
        found_here.append(f"Java {java.major} at {java.path}")
    return f"Spark cannot be used: {cause} (Found: {', '.join(found_here)}.)"


def _wrong_packages(versions: Mapping[str, str | None]) -> str:
    if "pyspark" in versions and versions["pyspark"] is None:
        return "PySpark is not installed; install it with: pip install 'penstock-streaming[spark]'."
    if "raydp" not in versions:
        return ""
    if versions["raydp"] is None:
        return "RayDP is not installed; install it with: pip install 'penstock-streaming[spark]'."
    if "ray" in versions and versions["ray"] is None:
        return "RayDP needs Ray, which is not installed; install it with: pip install ray."
    raydp, pyspark, ray = (_numbers(versions.get(name)) for name in ("raydp", "pyspark", "ray"))
    if raydp < (1, 7) and pyspark > (3, 5, 7):
        return (
            f"RayDP {versions['raydp']} works with PySpark up to 3.5.7, not with {versions['pyspark']}; "
            "install it with: pip install 'pyspark==3.5.7'."
        )
    if ray and ray < (2, 37):
        return f"RayDP {versions['raydp']} needs Ray 2.37 or newer; upgrade Ray."
    return ""


def _wrong_java(java: Java) -> str:
    which = f"{java.origin} points to {java.path}" if java.origin == "JAVA_HOME" else f"the PATH leads to {java.path}"
    remedy = "Install Java 17 and let JAVA_HOME, or the PATH without it, lead to it."
    if java.path is None:
        return f"there is no java on the PATH and JAVA_HOME is not set. {remedy}"
    if java.major is None:
        return f"{which}, which is not a Java that runs. {remedy}"
    if java.major < _OLDEST_JAVA:
        return f"{which}, which is Java {java.major}, too old. {remedy}"
    if java.major > _NEWEST_JAVA:
        return f"{which}, which is Java {java.major}, too new for Spark 3.5. {remedy}"
    return ""


#: What errors say, and what that means. The first that is found counts.
_SYMPTOMS: tuple[tuple[str, str], ...] = (
    (
        r"InaccessibleObjectException.{0,300}?module ([\w.]+) does not \"opens ([\w.]+)",
        "Java refuses access to {1}: the option --add-opens={0}/{1}=ALL-UNNAMED is missing. A `conf` that sets "
        f"{APP_MASTER_OPTIONS} or {DRIVER_OPTIONS} replaces Penstock's: add the option there.",
    ),
    (
        r"InaccessibleObjectException",
        "Java refuses access to its own classes: an option --add-opens is missing. A `conf` that sets "
        f"{APP_MASTER_OPTIONS} or {DRIVER_OPTIONS} replaces Penstock's: add the option there.",
    ),
    (
        r"(?:Executor|System) memory (\d+) must be at least (\d+)",
        "the executors' memory is too small: {0} bytes, and Spark needs at least {1}. Ask for more with `memory`, "
        'such as "1g".',
    ),
    (
        r"(?:Invalid maximum heap size|Too small (?:initial|maximum) heap|Could not reserve enough space)[^\n]*",
        'Java takes no such heap. Ask for another amount with `memory`, such as "1g".',
    ),
    (
        r"OutOfMemoryError: ([^\n]*)",
        "the JVM ran out of memory ({0}). Ask for more with `memory`, or spark.driver.memory in `conf`.",
    ),
    (
        r"UnsupportedClassVersionError",
        "some JVM is too old for the classes it was given. Let JAVA_HOME and the PATH of every node lead to the same "
        "Java 17.",
    ),
    (
        r"getSubject is (?:not supported|supported only)|Security Manager",
        "the JVM is too new for Spark 3.5. Install Java 17 and let JAVA_HOME lead to it.",
    ),
    (
        r"'JavaPackage' object is not callable|NoSuchMethodError|NoClassDefFoundError|ClassNotFoundException"
        r"|No shim|py4j\.Py4JException: Method",
        "the versions of PySpark, RayDP and Ray do not fit each other, or SPARK_HOME leads to another Spark. "
        "PySpark 3.5.7 with RayDP 1.6.5 is known to work: pip install 'penstock-streaming[spark]', and unset "
        "SPARK_HOME.",
    ),
    (
        r"No module named '?(pyspark|py4j|pyarrow)|Python in worker has different version",
        "the executors run another Python than this one. Unset spark.pyspark.python, or set `python`.",
    ),
    (
        r"(\d+ of \d+) executors came up",
        "timed out: {0} executors came up. The cluster has no free cores or memory for more, or cannot be reached: "
        "ask for fewer or smaller ones, or give a busy cluster more time with `start_s`.",
    ),
    (
        r"All masters are unresponsive|Could not parse Master URL|Failed to connect to master|Invalid master URL",
        "no Spark master answers at `master`. Check its address, and that it runs the same version of Spark.",
    ),
    (
        r"(timed out: [^\n]*)",
        "{0}. Give a busy machine more time with `start_s`, and look for other causes with "
        'conf={{"spark.log.level": "INFO"}} and logging at DEBUG.',
    ),
    (
        r"UnknownHostException|BindException|Cannot assign requested address",
        "the driver cannot use its own host name. Set SPARK_LOCAL_IP to an address of this machine.",
    ),
    (r"No space left on device", "there is no space left on a disk that Spark writes to. See spark.local.dir."),
    (r"JAVA_GATEWAY_EXITED|Java gateway process exited", "its JVM ended as soon as it was started."),
)


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version or "")[:3])


def essence(text: str) -> str:
    """Returns the line of a long error text that says most: the innermost cause, or the last line."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("Caused by: ")]
    raised = [line for line in lines if re.match(r"(?:: )?[\w.]+(?:Error|Exception|Failed)\b", line)]
    best = (causes or raised or lines)[-1]
    return best.removeprefix("Caused by: ").lstrip(": ")[:400].rstrip(".")


def text_of(error: BaseException) -> str:
    """Returns the text of an error of Spark, also when its JVM has gone."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # py4j's errors ask the JVM for their text, and it may be the JVM that has gone
        return f"{type(error).__name__}: the JVM has ended"


def installed_versions() -> dict[str, str | None]:
    """Returns the installed versions, without loading any package."""
    versions: dict[str, str | None] = {}
    for name in ("pyspark", "raydp", "ray"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def find_java(*, path_only: bool = False) -> Java:
    """Returns the java that Spark's scripts would run. `path_only`: the java of RayDP's own processes, which ignore
    JAVA_HOME."""
    home = "" if path_only else os.environ.get("JAVA_HOME", "")
    path = f"{home}/bin/java" if home else shutil.which("java")
    origin: Literal["JAVA_HOME", "PATH"] = "JAVA_HOME" if home else "PATH"
    if path is None:
        return Java(origin, None, None)
    try:
        out = subprocess.run(
            [path, "-version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20, check=False
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return Java(origin, path, None)
    found = re.search(r'version "(?:1\.)?(\d+)', out)
    return Java(origin, path, int(found[1]) if found else None)


def require(versions: Mapping[str, str | None], *javas: Java) -> None:
    """Raises SparkUnavailable when something that is needed is missing or does not fit."""
    for java in javas:
        if problem := diagnose(versions, java, ""):
            raise SparkUnavailable(problem)


def unavailable(kind: str, error_text: str) -> SparkUnavailable:
    """Returns the error for a failure in a session of this kind.

    It is not chained to Spark's own error, because that error would be asked for its text when there is no JVM left
    that knows it.
    """
    logger.debug("Spark failed: %s", error_text)
    versions = installed_versions()
    if kind != "raydp":
        versions = {"pyspark": versions["pyspark"]}
    return SparkUnavailable(diagnose(versions, find_java(), error_text))
