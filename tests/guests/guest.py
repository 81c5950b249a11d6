"""Runs a command in small guests that have a software RoCE device.

No machine of the tests has a verbs device. So the RDMA transport is tested in guests: Debian's kernel in QEMU, with the
kernel's own rdma_rxe on a virtual Ethernet that the guests share. A guest has no disk and sees no file of this machine:
its system and the project's files are archives that the kernel unpacks into memory. What the command writes to its
standard output comes out here, and so does its exit status.

An emulated processor runs a program 15 to 20 times slower than this machine does. Times that are taken in a guest can
only be compared with others that are taken there.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import lzma
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.guests import packages

#: Where the project's files are in a guest.
HOME = "/penstock"
#: Pure Python packages of this machine's environment that a guest gets.
LIBRARIES = {"pytest": ("pytest", "_pytest", "py"), "pluggy": ("pluggy",), "iniconfig": ("iniconfig",)}
LIBRARIES |= {"packaging": ("packaging",), "pygments": ("pygments",)}
#: What jobs need besides.
JOB_LIBRARIES = {name: (name,) for name in ("cloudpickle", "msgspec", "typing_extensions")}
#: Where a guest sees the folder that it shares with the others and with this machine.
SHARED = "/shared"
#: The Python of the guests, for which a job's native core must be built.
PYTHON = (3, 11)

# rdma_rxe asks the crypto layer for crc32 by name, and a guest has nobody who would load it on demand.
_MODULES = ("virtio_net", "crc32_generic", "ib_uverbs", "rdma_rxe", "9pnet_virtio", "9p")
_EMPTY_FOLDERS = ("proc", "sys", "dev", "tmp", "root", "modules")
# The kernel would panic when its timer does not tick at once, as on a machine that is busy.
_KERNEL_OPTIONS = "random.trust_cpu=on mitigations=off no_timer_check"
#: A jumbo frame, so that a READ of 4 KiB is one packet.
_MTU = 4500
# Of pygments, pytest loads little.
_UNUSED = ("styles/[!_d]*", "lexers/[!_dp]*", "lexers/[dp][!iy]*", "lexers/_*_*")


@dataclass
class Ended:
    """How a guest's command has ended."""

    status: int | None  # None: the guest ended before its command, or was ended
    output: str
    console: str


@dataclass
class Guests:
    """Guests that run a command each. Every command sees in its environment who it is and where the others are."""

    commands: Sequence[Sequence[str]]
    #: Which of the project's files the guests get, as patterns below the repository.
    files: Sequence[str] = ("penstock/**/*.py", "tests/guests/*.py", "tests/transport/*.py")
    environment: Mapping[str, str] = field(default_factory=dict)
    memory_mib: int = 512
    processors: int = 1
    #: Whether the guests can run jobs, with the native core that this machine has.
    jobs: bool = False
    #: A folder of this machine that all guests see as SHARED.
    shared: Path | None = None
    #: Called with the number of the guest and each line of output.
    line: Callable[[int, str], None] = lambda number, line: None

    def run(self, limit_s: float) -> list[Ended]:
        """Starts the guests, waits until all have ended, and returns how. Ends them after `limit_s`."""
        packages.need()
        if self.jobs and sys.version_info[:2] != PYTHON:
            raise packages.Missing(
                f"guests run jobs with the native core of this Python, which must be {PYTHON[0]}.{PYTHON[1]} as theirs"
            )
        kernel = _only(packages.PLACE.glob("kernel/boot/vmlinuz-*"))
        with tempfile.TemporaryDirectory(prefix="guests-") as name:
            place = Path(name)
            archives = [_system_archive(), _libraries_archive("libraries", LIBRARIES), _project_archive(self.files)]
            if self.jobs:
                archives += [_libraries_archive("job-libraries", JOB_LIBRARIES), _core_archive()]
            for_all = b"".join(archives)
            running: list[subprocess.Popen[str]] = []
            readers: list[threading.Thread] = []
            outputs: list[list[str]] = [[] for _ in self.commands]
            try:
                for number, cables in enumerate(_cable_ends(len(self.commands))):
                    archive = place / f"{number}.cpio"
                    archive.write_bytes(for_all + _archive([_file("guest.json", self._told(number))]))
                    process = self._start(kernel, archive, place, number, cables)
                    running.append(process)
                    assert process.stdout is not None
                    reading = (number, process.stdout, outputs[number])
                    readers.append(threading.Thread(target=self._read, args=reading, daemon=True))
                    readers[-1].start()
                until = time.monotonic() + limit_s
                while (alive := [one.poll() is None for one in running]) and any(alive) and time.monotonic() < until:
                    if any(not (there or _said(place, number, "status")) for number, there in enumerate(alive)):
                        break  # it has ended before its command, and the others may wait for it in vain
                    time.sleep(0.1)
            finally:
                for process in running:
                    process.kill()
                    process.wait()
                for reader in readers:
                    reader.join()
            return [self._ended(place, number, lines) for number, lines in enumerate(outputs)]

    def _told(self, number: int) -> bytes:
        addresses = [_address(other) for other in range(len(self.commands))]
        names = {"GUEST": str(number), "GUESTS": ",".join(addresses), "PATH": "/usr/bin:/bin", "HOME": "/root"}
        names["GUEST_ADDRESS"] = addresses[number]
        names |= {"PYTHONPATH": f"{HOME}:{HOME}/libraries", "PYTHONUNBUFFERED": "1", **self.environment}
        command = list(self.commands[number])
        told = {"command": command, "address": addresses[number], "directory": HOME, "environment": names, "mtu": _MTU}
        told["shared"] = None if self.shared is None else SHARED
        return json.dumps(told).encode()

    def _start(
        self, kernel: Path, archive: Path, place: Path, number: int, cables: list[socket.socket]
    ) -> subprocess.Popen[str]:
        begin, environment = packages.emulator()
        command = [*begin, "-machine", "pc", "-accel", "tcg,thread=multi", "-cpu", "max"]
        command += ["-nodefaults", "-no-user-config"]
        command += ["-display", "none", "-no-reboot", "-m", str(self.memory_mib), "-smp", str(self.processors)]
        command += ["-kernel", str(kernel), "-initrd", str(archive)]
        command += ["-append", f"console=ttyS0 panic=-1 {_KERNEL_OPTIONS}"]
        command += ["-serial", f"file:{place}/{number}.console", "-device", "virtio-serial-pci"]
        for name, path in (("output", "/dev/stdout"), ("status", f"{place}/{number}.status")):
            command += ["-chardev", f"file,id={name},path={path}"]
            command += ["-device", f"virtserialport,chardev={name},name={name}"]
        command += ["-netdev", "hubport,id=net,hubid=0"]
        for cable in cables:
            end = f"cable{cable.fileno()}"
            command += ["-netdev", f"socket,id={end},fd={cable.fileno()}"]
            command += ["-netdev", f"hubport,id={end}-plug,hubid=0,netdev={end}"]
        command += ["-device", f"virtio-net-pci,netdev=net,romfile=,mac=52:54:00:00:00:{number + 1:02x}"]
        if self.shared is not None:
            command += ["-virtfs", f"local,path={self.shared},mount_tag=shared,security_model=none"]
        with (place / f"{number}.emulator").open("w") as errors:
            process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[cable.fileno() for cable in cables],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
            )
        for cable in cables:
            cable.close()
        return process

    def _read(self, number: int, output: IO[str], lines: list[str]) -> None:
        for line in output:
            lines.append(line)
            self.line(number, line.rstrip("\r\n"))

    def _ended(self, place: Path, number: int, lines: list[str]) -> Ended:
        status, console, emulator = (_said(place, number, kind) for kind in ("status", "console", "emulator"))
        return Ended(int(status.split()[0]) if status else None, "".join(lines), console + emulator)


def _said(place: Path, number: int, kind: str) -> str:
    """Returns what a guest has written there so far."""
    file = place / f"{number}.{kind}"
    return file.read_text(errors="replace") if file.exists() else ""


def _address(number: int) -> str:
    return f"10.99.0.{number + 1}"


def _cable_ends(guests: int) -> list[list[socket.socket]]:
    """Returns the ends of Ethernet cables that each guest has. Those of all others come together at guest 0, whose
    emulator is the hub. A single guest has none, and is alone on its network."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(guests - 1)]
    return [[near for near, _ in pairs], *([far] for _, far in pairs)]


# --- archives ---------------------------------------------------------------------------------------------------------

_Entry = tuple[str, int, bytes]  # name, mode, content


def _file(name: str, content: bytes, mode: int = 0o644) -> _Entry:
    return name, stat.S_IFREG | mode, content


def _archive(entries: Iterable[_Entry]) -> bytes:
    """Returns a cpio archive in the form that the kernel unpacks: "newc", of root, without times."""
    out = bytearray()
    for number, (name, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        raw = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(raw), 0)
        out += b"070701" + b"".join(b"%08X" % value for value in fields) + raw
        out += bytes(-len(out) % 4) + content
        out += bytes(-len(out) % 4)
    return bytes(out)


def _tree(place: Path, below: str = "") -> Iterator[_Entry]:
    """Yields what is at a place, folders before what they contain."""
    for path in sorted(place.rglob("*")):
        name = str(Path(below) / path.relative_to(place))
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            yield name, mode, os.readlink(path).encode()
        else:
            yield name, mode, path.read_bytes() if stat.S_ISREG(mode) else b""


def _system_archive() -> bytes:
    """Returns the archive of the guests' system. The modules are compiled, because a guest would have to compile them
    at each start."""
    first = (Path(__file__).parent / "first_process.py").read_bytes()

    def entries() -> Iterator[_Entry]:
        system = packages.PLACE / "system"
        _compile(system / "usr/lib")
        for name in _EMPTY_FOLDERS:
            yield name, stat.S_IFDIR | 0o755, b""
        yield from _tree(system)
        yield "usr/bin/python3", stat.S_IFLNK | 0o777, b"python3.11"
        yield _file("init", b"#!/usr/bin/python3.11 -S\n" + first, 0o755)
        modules = list(_modules(_MODULES))
        for name, content in modules:
            yield _file(f"modules/{name}.ko", content)
        yield _file("modules/order", "".join(f"{name}.ko\n" for name, _ in modules).encode())

    return _kept("system", f"{hashlib.sha256(first).hexdigest()} {_MODULES}", entries)


def _libraries_archive(archive: str, libraries: Mapping[str, Sequence[str]]) -> bytes:
    """Returns the archive of packages, each with the modules that it consists of."""
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in libraries)

    def entries() -> Iterator[_Entry]:
        with tempfile.TemporaryDirectory(prefix="guests-") as name:
            home = Path(name) / HOME.strip("/")
            for module in (module for modules in libraries.values() for module in modules):
                found = importlib.util.find_spec(module)
                assert found is not None
                assert found.origin is not None
                origin, place = Path(found.origin), home / "libraries"
                place.mkdir(parents=True, exist_ok=True)
                if origin.name == "__init__.py":
                    shutil.copytree(origin.parent, place / module, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copyfile(origin, place / origin.name)
            for pattern in _UNUSED:
                for path in (home / "libraries/pygments").glob(pattern):
                    path.unlink()
            _compile(home)
            yield from _tree(Path(name))

    return _kept(archive, versions, entries)


def _core_archive() -> bytes:
    """Returns the archive of the native core, where the project's own files are."""
    found = importlib.util.find_spec("penstock.runtime._native")
    assert found is not None
    assert found.origin is not None
    origin = Path(found.origin)
    place = Path(HOME.strip("/"), "penstock/runtime", origin.name)
    return _archive([_file(str(place), origin.read_bytes(), 0o755)])


def _project_archive(patterns: Sequence[str]) -> bytes:
    """Returns the archive of the project's own files."""
    with tempfile.TemporaryDirectory(prefix="guests-") as name:
        home = Path(name) / HOME.strip("/")
        for path in (path for pattern in patterns for path in packages.ROOT.glob(pattern)):
            target = home / path.relative_to(packages.ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        _compile(home)
        return _archive(_tree(Path(name)))


def _kept(name: str, made_from: str, entries: Callable[[], Iterator[_Entry]]) -> bytes:
    """Returns an archive that is made once, and again when it is made from something else."""
    archive = packages.PLACE / f"{name}.cpio"
    origin = packages.PLACE / f"{name}.made-from"
    if not (archive.exists() and origin.exists() and origin.read_text() == made_from):
        archive.write_bytes(_archive(entries()))
        origin.write_text(made_from)
    return archive.read_bytes()


def _compile(place: Path) -> None:
    options = ["-q", "-j", "1", "--invalidation-mode", "unchecked-hash"]
    command = [*packages.python(), "-S", "-m", "compileall", *options, str(place)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _modules(wanted: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yields kernel modules, each after those that it needs."""
    top = _only(packages.PLACE.glob("kernel/lib/modules/*"))
    files = {path.name.split(".")[0].replace("-", "_"): path for path in top.rglob("*.ko*")}
    done: set[str] = set()
    waiting = [name for name in reversed(wanted) if name in files]  # the others are built in
    while waiting:
        name = waiting[-1]
        content = files[name].read_bytes()
        if files[name].suffix == ".xz":
            content = lzma.decompress(content)
        needs = re.search(rb"\0depends=([^\0]*)\0", content)
        before = [one.replace("-", "_") for one in (needs.group(1).decode().split(",") if needs else []) if one]
        before = [one for one in before if one not in done]
        if before:
            waiting += before
            continue
        waiting.pop()
        if name not in done:
            done.add(name)
            yield name, content


def _only(found: Iterable[Path]) -> Path:
    paths = list(found)
    if len(paths) != 1:
        raise packages.Missing(f"expected one file, found {paths} (rm -r build/guests; make guests)")
    return paths[0]
