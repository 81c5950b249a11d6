"""Downloads the servers of the tests of connectors into `build/servers`, once, and checks each file by its hash.

Apache Kafka comes from Maven Central, as the jars of pom.xml. Nothing is installed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Where everything is kept; `build` is not under version control.
PLACE = HERE.parents[1] / "build" / "servers"


class Missing(Exception):
    """A server cannot be had on this machine. The message says why, and what to do."""


def kafka_jars() -> Path:
    """Returns the folder of Kafka's jars. Raises Missing unless `make servers` has fetched them and Java is there."""
    if not shutil.which("java"):
        raise Missing("Kafka's server needs Java 17 (Debian: apt-get install openjdk-17-jre-headless)")
    folder = PLACE / "kafka"
    if not (folder / "whole").exists():
        raise Missing("the jars of Kafka's server are not here: `make servers` downloads them (54 MB)")
    return folder


def fetch_kafka() -> None:
    """Downloads Kafka's jars, unless they are here. Raises Missing when they cannot be had, or are not the pinned
    ones."""
    folder = PLACE / "kafka"
    if (folder / "whole").exists():
        return
    if not shutil.which("mvn"):
        raise Missing("Kafka's jars are downloaded by Maven, which is not here (Debian: apt-get install maven)")
    PLACE.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    command = ["mvn", "-B", "-f", str(HERE / "pom.xml"), "dependency:copy-dependencies", f"-DoutputDirectory={folder}"]
    with (PLACE / "maven.log").open("w") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        raise Missing(f"Maven could not download Kafka's jars; {PLACE / 'maven.log'} says why")
    pinned = {name: digest for digest, name in map(str.split, (HERE / "kafka.sha256").read_text().splitlines())}
    found = {jar.name: hashlib.sha256(jar.read_bytes()).hexdigest() for jar in folder.glob("*.jar")}
    if found != pinned:
        strange = sorted({name for name, _ in found.items() ^ pinned.items()})
        shutil.rmtree(folder)
        raise Missing(f"these jars are not the ones of tests/servers/kafka.sha256, and were deleted: {strange[:5]}")
    (folder / "whole").touch()
