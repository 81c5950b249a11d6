"""Starts and ends the JVM of this process's Spark driver. PySpark allows one at a time.

A JVM must not outlive its session. PySpark would keep its JVM for the next session, with the options of the first one,
so that RayDP's classes could be missing. A JVM that was there before is never ended here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.bridge.session.diagnosis import SparkUnavailable

logger = logging.getLogger(__name__)
_TAIL = 80  # lines of the JVM's output that are kept for the diagnosis
_pause = threading.Event()  # never set
STOP_SECONDS = 20.0  # after which the JVM is killed


class DidNotStart(Exception):
    """A start has failed. The text has all that is known."""


class Jvm:
    """The driver's JVM. It is started here and not by PySpark, which waits without a limit, holds a lock while it
    waits, and shows all that the JVM writes. `kill` may interrupt `launch` at any time."""

    def __init__(self) -> None:
        self.gateway: Any = None  # ours, and only then ours to end
        self._lines: deque[str] = deque(maxlen=_TAIL)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # in which the JVM says its port
        self._killed = False
        self._lock = threading.Lock()

    def said(self) -> str:
        """Returns the last lines that the JVM has written."""
        return "\n".join(self._lines)

    def launch(self, settings: Mapping[str, str]) -> Any:
        """Starts the JVM with these settings. Returns PySpark's gateway to it."""
        from pyspark.find_spark_home import _find_spark_home  # noqa: PLC2701
        from pyspark.java_gateway import launch_gateway
        from pyspark.serializers import UTF8Deserializer, read_int

        command = [os.path.join(_find_spark_home(), "bin", "spark-submit")]
        for key, value in settings.items():
            command += ["--conf", f"{key}={value}"]
        with self._lock:
            if self._killed:
                raise RuntimeError("given up")
            self._folder = folder = tempfile.TemporaryDirectory(prefix="penstock-spark-", ignore_cleanup_errors=True)
            file = Path(folder.name, "port")
            self._process = process = subprocess.Popen(
                [*command, "pyspark-shell"],
                stdin=subprocess.PIPE,  # it ends when this pipe does, so also when this process is killed
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "_PYSPARK_DRIVER_CONN_INFO_PATH": str(file)},
                start_new_session=True,  # Ctrl-C is for this process, which then stops Spark in order
            )
        with folder:
            listener = threading.Thread(target=self._listen, args=(process,), name="penstock-spark-log", daemon=True)
            listener.start()
            while not file.exists():
                if process.poll() is not None:
                    listener.join(5)
                    raise RuntimeError("JAVA_GATEWAY_EXITED")
                _pause.wait(0.02)
            with file.open("rb") as stream:  # it appears under this name when it is whole
                port, secret = read_int(stream), UTF8Deserializer().loads(stream)
        # PySpark's own way of joining a JVM that somebody else has started.
        names = {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
        os.environ.update(names)
        try:
            self.gateway = launch_gateway()
        finally:
            for name in names:
                os.environ.pop(name, None)
        return self.gateway

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            logger.debug("Spark: %s", text)
        process.stdout.close()

    def kill(self) -> None:
        """Ends the JVM and the processes that it has started, if it was launched here."""
        with self._lock:
            self._killed = True
            process, folder = self._process, self._folder
        if self.gateway is not None:
            with contextlib.suppress(Exception):  # its JVM may have gone
                self.gateway.shutdown()
        if process is not None:
            self._end(process)
        if folder is not None:
            # The thread that launches may never run again, because this process may end now. And the JVM may have
            # written after that thread had removed the folder.
            folder.cleanup()
        if self.gateway is not None:
            forget(self.gateway)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        if self.gateway is not None:  # it leaves by itself, and takes its temporary files away
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the group is its own, with what the start script has started
            process.wait()


def forget(gateway: Any) -> None:
    """Lets PySpark have another JVM next time, because this one has ended."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._gateway is not gateway:
        return
    if SparkContext._active_spark_context is not None:  # it could not be stopped in order
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SparkContext._active_spark_context.stop()
    SparkContext._gateway = None
    SparkContext._jvm = None
    SparkSession._instantiatedSession = None
    SparkSession._activeSession = None


def refuse_second() -> None:
    """Raises SparkUnavailable when this process has a session already."""
    from pyspark import SparkContext

    active = SparkContext._active_spark_context
    if active is not None:
        raise SparkUnavailable(
            f"Spark cannot be used: this process has a Spark session already ({active.appName} on {active.master}), "
            "and can have one only. Stop it first."
        )
