"""Namespaces of Linux for the hosts of the tests, made by programs that every distribution has (util-linux, iproute2).

A *space* is process 1 in namespaces of its own, and all that runs in them. Spaces have no names that another test
process could use too: they are known by the process id of their process 1, and go with it. Who may not make namespaces
of the machine makes them in a user namespace, where the kernel allows that.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")

# Administrators' programs are not in everybody's PATH.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/bin", "/bin"])

_INIT = Path(__file__).with_name("init.py")

# What the hosts need of the kernel, in one go: mounts, a bridge, a pair of devices, a limited rate, a filter.
_TRIAL = """
mount -t proc proc /proc && mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /dev/shm || exit 1
ip link add name trial type bridge && ip link add name trial0 type veth peer name trial1 || exit 1
tc qdisc add dev trial0 root tbf rate 1mbit burst 16kb latency 50ms && tc qdisc add dev trial0 clsact || exit 1
tc filter add dev trial0 egress prio 1 protocol all bpf da bytecode '1,6 0 0 4'
"""


@functools.cache
def why_not() -> str | None:
    """Returns why this process cannot make hosts, or None when it can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        return f"no program {', '.join(missing)} (Debian: apt-get install iproute2 util-linux)"
    trial = subprocess.run(
        [*_unshare(_user(), _HOST), "sh", "-c", _TRIAL],
        capture_output=True,
        text=True,
        env=_environment(),
        check=False,
    )
    if trial.returncode:
        said = " ".join(trial.stderr.split()) or f"exit code {trial.returncode}"
        return f"this user may not make hosts of namespaces, or the kernel lacks something for it: {said}"
    return None


@functools.cache
def own_clocks() -> bool:
    """Returns whether a host can have a monotonic clock of its own."""
    tried = [*_unshare(_user(), ()), *_clock(1000), "true"]
    return subprocess.run(tried, capture_output=True, env=_environment(), check=False).returncode == 0


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": PATH}


def _user() -> tuple[str, ...]:
    return () if os.geteuid() == 0 else ("--user", "--map-root-user")


_HOST = ("--mount", "--uts", "--ipc", "--net", "--pid")
_SWITCH = ("--mount", "--net", "--pid")


def _unshare(user: Sequence[str], kinds: Sequence[str]) -> list[str]:
    return ["unshare", *user, *kinds, "--fork", "--kill-child"]


def _clock(ahead_s: int) -> list[str]:
    return ["--time", "--monotonic", str(ahead_s), "--boottime", str(ahead_s)]


class Space:
    """Namespaces of their own and the processes in them."""

    def __init__(
        self, within: Space | None = None, settings: Mapping[str, Any] | None = None, ahead_s: int = 0
    ) -> None:
        """Makes a network of its own; with settings (see init.py), also everything else that a host has of its own.

        `within`: whose user namespace it shares. `ahead_s`: by how much its monotonic clock is ahead of the machine's.
        """
        kinds = _SWITCH if settings is None else _HOST
        enter = [] if within is None or not _user() else ["nsenter", *within.enter("user")]
        command = [*enter, *_unshare(() if within else _user(), kinds), *(_clock(ahead_s) if ahead_s else ())]
        self._process = subprocess.Popen(
            [*command, sys.executable, "-I", "-S", str(_INIT), json.dumps(settings or {})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the tests, which end the host themselves
            env=_environment(),
        )
        self._clock = bool(ahead_s)
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if said != b"ready\n":
            said += self._process.stdout.read()
            self.close()
            raise RuntimeError(f"a host of the tests could not be made: {said.decode(errors='replace')}")
        #: The id of process 1, as seen from here.
        (init,) = psutil.Process(self._process.pid).children()
        self.pid: int = init.pid

    def enter(self, *kinds: str) -> list[str]:
        """Returns what makes nsenter enter the namespaces of these kinds; a user namespace always, if there is one."""
        user = ["--user", "--preserve-credentials"] if _user() else []
        return ["--target", str(self.pid), *user, *(f"--{kind}" for kind in kinds if kind != "user")]

    @property
    def whole(self) -> tuple[str, ...]:
        """The kinds of namespaces of a host."""
        return ("mount", "uts", "ipc", "net", "pid", *(("time",) if self._clock else ()))

    def configure(self, program: str, lines: Sequence[str], *, force: bool = False) -> None:
        """Has ip or tc carry out these commands in the network of this space. Raises RuntimeError for the first that
        fails; with `force`, all are tried, and it does not matter which of them fail."""
        command = ["nsenter", *self.enter("net"), program, *(["-force"] if force else []), "-batch", "-"]
        text = "\n".join(lines) + "\n"
        done = subprocess.run(command, input=text, capture_output=True, text=True, env=_environment(), check=False)
        if done.returncode and not force:
            raise RuntimeError(f"{program}: {' '.join(done.stderr.split())} (of {lines})")

    @property
    def alive(self) -> bool:
        """Whether its process 1 still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends all its processes at once, and returns when they have ended."""
        if self.alive and hasattr(self, "pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)
        self._process.wait()

    def close(self) -> None:
        """Ends it. May be called again."""
        if hasattr(self, "pid"):
            self.kill()
        for end in (self._process.stdin, self._process.stdout):
            if end is not None:
                end.close()
        if not hasattr(self, "pid"):  # it has not come up: without its input it ends
            self._process.kill()
        self._process.wait()
