"""Finds the processes of Spark on this machine."""

from __future__ import annotations

import contextlib

import psutil


def spark_children() -> set[int]:
    """Returns the children of this process that are JVMs of PySpark, or the scripts that start them."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it may have ended
            if "pyspark-shell" in child.cmdline():
                found.add(child.pid)
    return found


def listeners(ports: set[int]) -> dict[int, int]:
    """Returns the process that listens at each port of this machine, as far as this user may know.

    Spark knows its executors by address only. Its own way to learn more is to run a task.
    """
    if not ports:
        return {}
    return {
        connection.laddr.port: connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports and connection.pid is not None
    }
