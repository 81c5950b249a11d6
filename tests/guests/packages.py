"""The Debian packages that guests are made of, and the emulator that runs them.

Everything is downloaded with `apt-get download` and unpacked below `build/guests`. Nothing is installed, and no right
of root is needed. A guest's system is made of Debian packages alone, so that it has the Python that Debian's pyverbs is
built for, whatever Python the machine has.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Where everything is unpacked: `system`, `kernel` and, where the machine has no emulator, `emulator`.
PLACE = ROOT / "build" / "guests"

#: The kernels, the preferred one first: newer ones have had more of the faults of software RoCE corrected.
KERNELS = ("linux-image-6.12-amd64", "linux-image-amd64")
EMULATOR = "qemu-system-x86"
#: What the system of a guest consists of: Python, pyverbs, and the libraries that either one loads.
SYSTEM = (
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5"),
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libpython3.11"),
    *("python3-pyverbs", "libibverbs1", "ibverbs-providers", "librdmacm1", "libnl-3-200", "libnl-route-3-200"),
)
# No guest reads these, and every byte is loaded at each start.
_UNUSED = (
    *("usr/share", "lib/udev", "usr/lib/x86_64-linux-gnu/gconv", "usr/lib/x86_64-linux-gnu/perl-base"),
    *(f"usr/lib/python3.11/{name}" for name in ("distutils", "lib2to3", "pydoc_data", "idlelib", "turtledemo")),
    *(f"usr/lib/python3.11/{name}" for name in ("ensurepip", "tkinter", "venv", "wsgiref", "sqlite3", "dbm")),
    *(f"usr/lib/x86_64-linux-gnu/{name}" for name in ("libtsan.so.2", "audit")),
)


class Missing(Exception):
    """This machine cannot run guests; the message says why, and what to do."""


def fetched() -> bool:
    """Returns whether `fetch` has done its work, of this version of the lists above."""
    try:
        return json.loads((PLACE / "made-of.json").read_text()) == _recipe()
    except (OSError, ValueError):
        return False


def need() -> None:
    """Raises Missing when guests cannot be run as things stand."""
    if not fetched():
        raise Missing(
            "guests with software RoCE are made of Debian packages, which `make guests` downloads and unpacks below "
            "build/guests (150 MB; nothing is installed)"
        )


def fetch() -> None:
    """Downloads and unpacks everything, unless that has been done. Raises Missing when that is impossible here."""
    if fetched():
        return
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        if not shutil.which(tool):
            raise Missing(f"guests are made of Debian packages, and there is no {tool} here")
    shutil.rmtree(PLACE, ignore_errors=True)
    _unpack([_kernel()], PLACE / "kernel")
    _unpack(SYSTEM, PLACE / "system")
    if not shutil.which("qemu-system-x86_64"):
        _unpack(_lacking(EMULATOR), PLACE / "emulator")
    for name in _UNUSED:
        thing = PLACE / "system" / name
        shutil.rmtree(thing) if thing.is_dir() else thing.unlink(missing_ok=True)
    (PLACE / "made-of.json").write_text(json.dumps(_recipe()))


def emulator() -> tuple[list[str], dict[str, str]]:
    """Returns the beginning of the emulator's command line, and its environment."""
    installed = shutil.which("qemu-system-x86_64")
    if installed:
        return [installed], dict(os.environ)
    usr = PLACE / "emulator" / "usr"
    libraries = [usr / "lib/x86_64-linux-gnu", PLACE / "emulator/lib/x86_64-linux-gnu"]
    libraries += [path for path in libraries[0].glob("*") if path.is_dir()]
    environment = dict(os.environ, LD_LIBRARY_PATH=":".join(map(str, libraries)))
    data = [part for name in ("qemu", "seabios") for part in ("-L", str(usr / "share" / name))]
    return [str(usr / "bin/qemu-system-x86_64"), *data], environment


def python() -> list[str]:
    """Returns the beginning of a command line that runs the guests' Python on this machine, to compile for it."""
    system = PLACE / "system"
    libraries = ":".join(str(system / name) for name in ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"))
    loader = str(system / "lib64/ld-linux-x86-64.so.2")
    return [
        "env",
        f"PYTHONHOME={system / 'usr'}",
        loader,
        "--library-path",
        libraries,
        str(system / "usr/bin/python3.11"),
    ]


def _recipe() -> list[list[str]]:
    return [list(KERNELS), list(SYSTEM), list(_UNUSED)]


def _kernel() -> str:
    """Returns the package that holds the kernel itself: the names in KERNELS stand for the newest one of a kind."""
    for name in KERNELS:
        told = subprocess.run(["apt-cache", "depends", name], capture_output=True, text=True, check=False)
        for line in told.stdout.splitlines():
            kind, _, package = line.strip().partition(": ")
            if kind == "Depends" and package.startswith("linux-image-"):
                return package
    raise Missing(f"apt knows none of the packages {', '.join(KERNELS)} (apt-get update)")


def _lacking(package: str) -> list[str]:
    """Returns the packages that installing one would install here."""
    command = ["apt-get", "--simulate", "--quiet", "install", "--no-install-recommends", package]
    told = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    if told.returncode:
        raise Missing(f"apt cannot tell what {package} needs (apt-get update): {told.stderr.strip()[-300:]}")
    return [line.split()[1] for line in told.stdout.splitlines() if line.startswith("Inst ")]


def _unpack(names: Iterable[str], place: Path) -> None:
    """Downloads packages and unpacks them at a place."""
    place.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=PLACE) as packages:
        command = ["apt-get", "--quiet", "download", *names]
        told = subprocess.run(command, cwd=packages, capture_output=True, text=True, check=False)
        if told.returncode:
            said = told.stderr.strip()[-300:]
            raise Missing(f"apt could not download what guests are made of (apt-get update): {said}")
        for package in sorted(Path(packages).iterdir()):
            subprocess.run(["dpkg-deb", "-x", str(package), str(place)], check=True)
