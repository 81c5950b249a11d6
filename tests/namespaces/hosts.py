"""Several hosts on one machine, for tests of what happens between machines.

    with Hosts(3) as hosts:
        hosts[0].run([sys.executable, "script.py"])
        hosts[1].link.cut()
        hosts[2].crash()

Each host has what a machine has of its own: a network address behind a cable of its own (`link`), /dev/shm, processes
with a /proc of their own, a name, a boot id and a machine id, a monotonic clock (where the kernel has that), and /run,
with Ray's temporary directory and a directory for files that no other host sees (`own`). All other files are the
machine's, and all hosts share them. The network of the machine itself is neither used nor touched.

What must never happen: that a host, a process on one, or a network device is left when the tests have ended, however
they ended; that two test processes meet each other's hosts; that a process of the machine is ended by accident.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.namespaces.links import Link, Ways
from tests.namespaces.spaces import PATH, Space, own_clocks

ROOT = Path(__file__).parents[2]
SHM_BYTES = 2 << 30
#: A directory that each host has for itself.
OWN = Path("/run/own")

_NETWORK = "10.88.0"
_CLOCK_AHEAD_S = 100_000  # by so much the monotonic clock of each host is ahead of the one before


class Host:
    """One host. It is up when `Hosts` has made it, until it crashes."""

    def __init__(self, hosts: Hosts, number: int) -> None:
        self.number = number
        self.name = f"penstock-host-{number}"
        self.address = f"{_NETWORK}.{number + 1}"
        self._hosts = hosts
        self._space: Space | None = None
        self._link: Link | None = None
        self._started: list[subprocess.Popen[str]] = []
        self._cores: frozenset[int] = frozenset()  # none: all

    def boot(self) -> None:
        """Starts the host, after a crash as a machine that has forgotten everything, at the same address."""
        assert not self.up, f"{self.name} is up"
        self.close()
        settings = {
            "name": self.name,
            "hosts": self._hosts.names,
            "own": str(OWN),
            "shm_bytes": SHM_BYTES,
            "boot_id": str(uuid.uuid4()),
            "machine_id": uuid.uuid5(uuid.NAMESPACE_DNS, self.name).hex,
        }
        switch = self._hosts.switch
        ahead_s = (self.number + 1) * _CLOCK_AHEAD_S if self._hosts.own_clocks else 0
        self._space = Space(switch, settings, ahead_s)
        self._link = Link(self._space, switch, self.number, self._hosts.segment)
        self._space.configure(
            "ip",
            [
                "link set lo up",
                f"addr add {self.address}/24 dev eth0",
                "link set eth0 up",
                "route add default dev eth0",  # who asks for the address by which others reach us, asks by this route
                *(["link set eth0 gso_max_segs 1"] if self._hosts.segmented else []),
            ],
        )

    @property
    def space(self) -> Space:
        """Its namespaces."""
        assert self._space is not None, f"{self.name} has not been started"
        return self._space

    @property
    def link(self) -> Link:
        """Its cable."""
        assert self._link is not None, f"{self.name} has not been started"
        return self._link

    @property
    def others(self) -> list[Host]:
        """The other hosts, by their numbers."""
        return [host for host in self._hosts if host is not self]

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return self._space is not None and self._space.alive

    def command(self, arguments: Sequence[str | os.PathLike[str]], directory: str | Path | None = None) -> list[str]:
        """Returns the command that runs a program on this host, in the caller's directory or another. The program ends
        with the process that runs the command."""
        enter = ["nsenter", *self.space.enter(*self.space.whole), "setpriv", "--pdeathsig", "KILL"]
        cores = ["taskset", "-c", ",".join(map(str, sorted(self._cores)))] if self._cores else []
        within = ["sh", "-c", 'cd "$0" && exec "$@"', str(directory or Path.cwd())]
        return [*enter, *cores, *within, *map(str, arguments)]

    def start(
        self,
        arguments: Sequence[str | os.PathLike[str]],
        env: Mapping[str, str] | None = None,
        directory: str | Path | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Starts a program on this host. `env`: in addition to this process's. It ends with the host."""
        process: subprocess.Popen[str] = subprocess.Popen(
            self.command(arguments, directory),
            env={**self.environment(), **(env or {})},
            text=True,
            start_new_session=True,
            **{"stdin": subprocess.DEVNULL, **options},
        )
        self._started.append(process)
        return process

    def run(
        self,
        arguments: Sequence[str | os.PathLike[str]],
        env: Mapping[str, str] | None = None,
        directory: str | Path | None = None,
        *,
        limit_s: float = 300.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program on this host to its end, and returns what it printed."""
        process = self.start(arguments, env, directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=limit_s)
        finally:
            self._end(process)
        if check and process.returncode:
            raise AssertionError(
                f"{self.name}: {' '.join(map(str, arguments))} ended with {process.returncode}\n{out}\n{err}"
            )
        return subprocess.CompletedProcess(list(arguments), process.returncode, out, err)

    def python(self, text: str, *arguments: str, **options: Any) -> str:
        """Runs a text as a Python program on this host, and returns what it printed."""
        return self.run([sys.executable, "-c", text, *arguments], **options).stdout

    def environment(self) -> dict[str, str]:
        """The environment of programs on this host."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        # The hosts have one home directory, and no token of Ray that only they know.
        return {
            **mine,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{PATH}",
            "RAY_TMPDIR": "/run",
            "RAY_AUTH_MODE": "disabled",
        }

    def _end(self, process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            process.kill()
        process.wait()
        for end in (process.stdin, process.stdout, process.stderr):
            if end is not None:
                end.close()
        if process in self._started:
            self._started.remove(process)

    def path(self, path: str | Path) -> Path:
        """Returns where this process finds a path of the host, also one that only the host has."""
        return Path(f"/proc/{self.space.pid}/root") / str(path).lstrip("/")

    def processes(self) -> dict[int, str]:
        """Returns the processes of the host, by the ids that they have there, with their commands; without process 1
        and those that have ended."""
        found = {}
        for entry in self.path("/proc").iterdir():
            if entry.name.isdigit() and entry.name != "1":
                try:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                except OSError:  # it has just ended
                    continue
                if command:
                    found[int(entry.name)] = command
        return found

    def use_cores(self, cores: Iterable[int]) -> None:
        """Has all processes of the host, those that run and those that are started later, run on these cores only. For
        benchmarks: two machines have no core in common."""
        self._cores = frozenset(cores)
        own = os.stat(f"/proc/{self.space.pid}/ns/pid").st_ino
        for task in Path("/proc").glob("[0-9]*/task/[0-9]*"):
            with suppress(OSError):  # it has just ended
                if os.stat(task / "ns/pid").st_ino == own:
                    os.sched_setaffinity(int(task.name), self._cores)

    def segments(self) -> list[str]:
        """Returns the names in the host's /dev/shm."""
        return sorted(entry.name for entry in self.path("/dev/shm").iterdir())

    def kill(self, pid: int, signal: str = "KILL") -> None:
        """Sends a signal to a process of the host, if there still is one with this id."""
        assert pid > 1, "process 1 is the host itself: crash() ends that"
        enter = ["nsenter", *self.space.enter("pid")]
        subprocess.run([*enter, "sh", "-c", f"kill -{signal} {pid}"], capture_output=True, check=False)

    def crash(self, *, silent: bool = True) -> None:
        """Ends all processes of the host at once. Silently, as when the power fails: nobody hears from it any more.
        Else its kernel still closes all connections."""
        if silent:
            self.link.cut()
        self.close()

    def close(self) -> None:
        """Ends the host and what was started on it. May be called again."""
        if self._space is not None:
            self._space.close()
        if self._link is not None:
            self._link.close()
            self._link = None
        for process in list(self._started):
            self._end(process)


class Hosts(Sequence[Host]):
    """Some hosts and the switch between them."""

    def __init__(self, count: int, *, one_clock: bool = False) -> None:
        """Makes and boots them. `one_clock`: they all have the machine's monotonic clock, for benchmarks."""
        self.own_clocks = own_clocks() and not one_clock
        self.names = "127.0.0.1 localhost\n"
        self.segmented = False
        self._hosts = [Host(self, number) for number in range(count)]
        for host in self._hosts:
            self.names += f"{host.address} {host.name}\n"
        self.switch = Space()
        try:
            self.switch.configure("ip", ["link add switch type bridge", "link set switch up"])
            for host in self._hosts:
                host.boot()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, number: Any) -> Any:
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def cut_between(self, one: int, other: int, ways: Ways = "both") -> None:
        """Two hosts do not reach each other any more, or only in the other way, while both reach all others."""
        if ways != "back":
            self[other].link.cut_from(self[one].address)
        if ways != "there":
            self[one].link.cut_from(self[other].address)

    def restore_between(self, one: int, other: int) -> None:
        """Ends a cut of `cut_between`. A host that has been booted since has none."""
        self[other].link.restore_from(self[one].address)
        self[one].link.restore_from(self[other].address)

    def segment(self) -> None:
        """Has each host send frames of the size that a real cable has. Between devices of one machine, TCP sends up to
        64 KiB in one frame, and one lost frame would be many."""
        if not self.segmented:
            self.segmented = True
            for host in self._hosts:
                if host.up:
                    host.space.configure("ip", ["link set eth0 gso_max_segs 1"])

    def close(self) -> None:
        """Ends all hosts. May be called again."""
        for host in self._hosts:
            host.close()
        self.switch.close()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
