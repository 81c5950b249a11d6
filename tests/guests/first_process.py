"""The first process of a guest: makes the software RoCE device, runs the command, and switches the guest off.

Only Debian's Python and its standard library are there, and this module is all that knows it: modules are loaded, file
systems mounted and addresses given by system calls, so that a guest needs no shell and no other tool.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import time
import traceback
from pathlib import Path

FILE_SYSTEMS = (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/dev/shm"), ("tmpfs", "/tmp"))
DEVICE = "rxe0"
INTERFACE = "eth0"

_FINIT_MODULE = 313  # the number of the system call on x86-64
_POWER_OFF = 0x4321_FEDC
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8913, 0x8914, 0x8916, 0x891C, 0x8922
_IFF_UP = 1
# rdma_netlink.h: the command that `rdma link add` sends, and its attributes.
_NETLINK_RDMA, _NEW_LINK, _DEVICE_NAME, _NETDEV_NAME, _LINK_TYPE = 20, (5 << 10) + 3, 2, 51, 65

libc = ctypes.CDLL(None, use_errno=True)


def must(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(kind: str, where: str, what: str = "none", options: str = "") -> None:
    Path(where).mkdir(parents=True, exist_ok=True)
    must(libc.mount(what.encode(), where.encode(), kind.encode(), 0, options.encode()), f"mount {where}")


def load_modules() -> None:
    for name in Path("/modules/order").read_text().split():
        with open(f"/modules/{name}", "rb") as file:
            must(libc.syscall(_FINIT_MODULE, file.fileno(), b"", 0), f"load {name}")


def set_interface(name: str, request: int, value: bytes) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        return fcntl.ioctl(control, request, struct.pack("16s24s", name.encode(), value))


def switch_interface(name: str, up: bool) -> None:
    """Connects an interface, or cuts it off."""
    flags = struct.unpack_from("H", set_interface(name, _SIOCGIFFLAGS, b""), 16)[0]
    set_interface(name, _SIOCSIFFLAGS, struct.pack("H", flags | _IFF_UP if up else flags & ~_IFF_UP))


def set_address(name: str, address: str) -> None:
    for request, text in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.0")):
        set_interface(name, request, struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(text)))
    switch_interface(name, True)


def make_rdma_device() -> None:
    """Does what `rdma link add rxe0 type rxe netdev eth0` does."""
    body = b""
    for kind, text in ((_DEVICE_NAME, DEVICE), (_LINK_TYPE, "rxe"), (_NETDEV_NAME, INTERFACE)):
        value = text.encode() + b"\0"
        body += struct.pack("HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_RDMA) as link:
        link.bind((0, 0))
        link.send(struct.pack("IHHII", 16 + len(body), _NEW_LINK, 0x5, 1, 0) + body)  # a request with an answer
        error = struct.unpack_from("i", link.recv(4096), 16)[0]
    if error:
        raise OSError(-error, f"make {DEVICE}: {os.strerror(-error)}")


def run(command: list[str], environment: dict[str, str]) -> int:
    """Runs the command, and reaps what else ends meanwhile, because orphans come to the first process."""
    child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode


def main() -> None:
    for kind, where in FILE_SYSTEMS:
        mount(kind, where)
    _write_to("/dev/console")  # until the channels are there
    guest = json.loads(Path("/guest.json").read_text())
    ports = {Path(name, "name").read_text().strip(): Path("/dev") / name.name for name in _ports(2)}
    load_modules()
    switch_interface("lo", True)
    set_interface(INTERFACE, _SIOCSIFMTU, struct.pack("i", guest["mtu"]))
    set_address(INTERFACE, guest["address"])
    make_rdma_device()
    if guest["shared"]:
        mount("9p", guest["shared"], "shared", "trans=virtio,version=9p2000.L")
    _write_to(str(ports["output"]))
    os.environ.update(guest["environment"])
    os.chdir(guest["directory"])
    status = run(guest["command"], dict(os.environ))
    with open(ports["status"], "w") as file:
        file.write(f"{status} {time.clock_gettime(time.CLOCK_BOOTTIME):.1f}\n")


def _write_to(device: str) -> None:
    file = os.open(device, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)


def _ports(number: int) -> list[Path]:
    """Returns the channels to the machine outside, when all are there."""
    while len(found := list(Path("/sys/class/virtio-ports").glob("*/name"))) < number:
        time.sleep(0.01)
    return [name.parent for name in found]


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # whatever it is, it must be told before the guest goes
        traceback.print_exc()
    finally:
        libc.reboot(_POWER_OFF)
