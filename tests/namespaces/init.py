"""Process 1 of a host of the tests (tests/namespaces/hosts.py): makes its directories, then waits for its end.

    python init.py SETTINGS      in new namespaces; SETTINGS is a JSON object

It prints `ready` when the host can be used. The kernel ends every process of the host together with this one. This
process ends when its standard input does, and nobody but the process that asked for the host has the other end: so a
host does not outlive the tests, however they end. It imports nothing that starts slowly.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_BIND = 4096  # MS_BIND


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    """Calls mount(2). Raises OSError."""
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    if _LIBC.mount(*arguments, ctypes.c_ulong(flags), None if options is None else options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} (mount of {source} on {target})")


def write(path: str, text: str) -> str:
    """Writes a file, and returns its path."""
    with open(path, "w") as file:
        file.write(text)
    return path


def main(settings: dict[str, Any]) -> None:
    """Sets the host up, says so, and waits."""
    mount("proc", "/proc", "proc")
    write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")  # of devices that come; else they talk by themselves
    if settings:
        # /run is private on every machine, and exists on each. Ray's directories and the host's own files are there.
        mount("tmpfs", "/run", "tmpfs", options="mode=755")
        mount("tmpfs", "/dev/shm", "tmpfs", options=f"size={settings['shm_bytes']},mode=1777")
        os.mkdir(settings["own"])
        socket.sethostname(settings["name"])
        mount(write("/run/hosts", settings["hosts"]), "/etc/hosts", flags=_BIND)
        mount(write("/run/boot_id", settings["boot_id"] + "\n"), "/proc/sys/kernel/random/boot_id", flags=_BIND)
        if os.path.exists("/etc/machine-id"):
            mount(write("/run/machine-id", settings["machine_id"] + "\n"), "/etc/machine-id", flags=_BIND)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then removes orphans that have ended
    print("ready", flush=True)
    while os.read(0, 1):
        pass


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
