"""What benchmarks/rdma_verbs.py runs in each of two guests. Guest 1 measures, and prints a line of JSON for each
figure; guest 0 serves."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.guests import bare
from tests.guests.first_process import libc
from tests.guests.torture import Other, own_address

assert bare
import pyverbs.enums as enums  # noqa: E402
from pyverbs.addr import GID, AHAttr, GlobalRoute  # noqa: E402
from pyverbs.cq import CQ  # noqa: E402
from pyverbs.device import Context  # noqa: E402
from pyverbs.mr import MR  # noqa: E402
from pyverbs.pd import PD  # noqa: E402
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr  # noqa: E402
from pyverbs.wr import SGE, RecvWR, SendWR  # noqa: E402

from penstock.runtime.transport.rdma import RdmaTransport, find_port  # noqa: E402
from penstock.runtime.transport.tcp import TcpTransport  # noqa: E402

SIZES = (100, 4096, 65_536)
IN_FLIGHT = 16
RECEIVES = 64
KEY = b"the secret of one job, 32 bytes."
MESSAGE = b"x" * 100


def report(**figure: Any) -> None:
    print("figure " + json.dumps(figure), flush=True)


# --- verbs ------------------------------------------------------------------------------------------------------------


class Verbs:
    """A queue pair to the other guest, and a buffer at both ends."""

    def __init__(self, other: Other) -> None:
        port = find_port(own_address())
        self.context = Context(name=port.device)
        domain = PD(self.context)
        self.queue = CQ(self.context, 4 * RECEIVES, None, None, 0)
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE
        self.memory = MR(domain, SIZES[-1], access)
        capacity = QPCap(max_send_wr=RECEIVES, max_recv_wr=RECEIVES, max_send_sge=1, max_recv_sge=1)
        attributes = QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self.queue, rcq=self.queue, cap=capacity)
        self.pair = QP(domain, attributes)
        init = QPAttr(port_num=port.number)
        init.qp_access_flags = access
        self.pair.to_init(init)
        other.tell([self.pair.qp_num, port.gid, self.memory.buf, self.memory.rkey])
        number, gid, self.there, self.key = other.hear()
        ready = QPAttr(port_num=port.number)
        ready.dest_qp_num, ready.rq_psn, ready.path_mtu = number, 0, enums.IBV_MTU_4096
        ready.max_dest_rd_atomic, ready.min_rnr_timer = IN_FLIGHT, 12
        route = GlobalRoute(dgid=GID(gid), sgid_index=port.gid_index)
        ready.ah_attr = AHAttr(gr=route, is_global=1, port_num=port.number)
        self.pair.to_rtr(ready)
        ready.sq_psn, ready.timeout, ready.retry_cnt, ready.rnr_retry = 0, 14, 7, 7
        ready.max_rd_atomic = IN_FLIGHT
        self.pair.to_rts(ready)

    def request(self, opcode: int, size: int) -> SendWR:
        request = SendWR(opcode=opcode, num_sge=1, sg=[SGE(self.memory.buf, size, self.memory.lkey)])
        request.set_wr_rdma(self.key, self.there)
        return request

    def take(self) -> int:
        count, completions = self.queue.poll(IN_FLIGHT)
        for one in completions:
            assert one.status == enums.IBV_WC_SUCCESS, one.status
        if not count:
            os.sched_yield()
        return int(count)

    def post(self, request: SendWR) -> None:
        self.pair.post_send(request)

    def measure(self, opcode: int, size: int, count: int) -> tuple[float, float]:
        """Returns the median time of one request, and how many a second complete when several are under way."""
        request, times = self.request(opcode, size), []
        for _ in range(count):
            begin = time.perf_counter()
            self.post(request)
            while not self.take():
                pass
            times.append(time.perf_counter() - begin)
        posted = done = 0
        begin = time.perf_counter()
        while done < 2 * count:
            while posted < 2 * count and posted - done < IN_FLIGHT:
                self.post(request)
                posted += 1
            done += self.take()
        return statistics.median(times), 2 * count / (time.perf_counter() - begin)

    def receive(self, size: int, count: int) -> None:
        """Takes the messages of the other end's `measure`."""
        request = RecvWR(num_sge=1, sg=[SGE(self.memory.buf, size, self.memory.lkey)])
        for _ in range(RECEIVES):
            self.pair.post_recv(request)
        self.ready()
        done = 0
        while done < 3 * count:
            for _ in range(taken := self.take()):
                self.pair.post_recv(request)
            done += taken

    ready: Callable[[], None] = staticmethod(lambda: None)


def verbs(other: Other, own: int, count: int) -> None:
    for name, opcode in (
        ("READ", enums.IBV_WR_RDMA_READ),
        ("WRITE", enums.IBV_WR_RDMA_WRITE),
        ("send/recv", enums.IBV_WR_SEND),
    ):
        for size in SIZES:
            pair = Verbs(other)
            if own == 0:
                if opcode == enums.IBV_WR_SEND:
                    pair.ready = lambda: other.tell("ready")
                    pair.receive(size, count)
                else:
                    other.tell("ready")
                other.hear()
            else:
                other.hear()
                latency, rate = pair.measure(opcode, size, count)
                report(what="verb", name=name, size=size, us=1e6 * latency, per_s=rate, mb_per_s=rate * size / 1e6)
                other.tell("done")


# --- transports -------------------------------------------------------------------------------------------------------


class SystemCalls:
    """Counts the system calls of this thread, by the kernel's own trace point."""

    def __init__(self) -> None:
        libc.mount(b"tracefs", b"/sys/kernel/tracing", b"tracefs", 0, None)
        with open("/sys/kernel/tracing/events/raw_syscalls/sys_enter/id") as file:
            number = int(file.read())
        # struct perf_event_attr: a trace point, the size of this first version, and which one; nothing else is set.
        attributes = ctypes.create_string_buffer(struct.pack("<IIQ", 2, 64, number).ljust(64, b"\0"), 64)
        self.file = libc.syscall(298, attributes, 0, -1, -1, 0)
        if self.file < 0:
            raise OSError(ctypes.get_errno(), "perf_event_open")

    def count(self) -> int:
        return int.from_bytes(os.read(self.file, 8), "little")


def busy() -> float:
    """Returns for how many seconds the processor of the guest has worked, for processes and for the network."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, interrupts, soft = (int(word) for word in file.readline().split()[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def send(transport: TcpTransport, own: int) -> None:
    """Sends one message."""
    while not transport.send(1 - own, 0, (MESSAGE,)):
        transport.receive(0.01)


def take(transport: TcpTransport, number: int) -> None:
    """Receives so many messages."""
    while number > 0:
        number -= len(transport.receive(1.0))


def transports(other: Other, own: int, trips: int, count: int) -> None:
    calls = SystemCalls()
    kinds: dict[str, Any] = {"RDMA": RdmaTransport, "TCP": TcpTransport}
    for name in ("RDMA", "TCP", "RDMA", "TCP"):
        transport = kinds[name](own, KEY, own_address())
        other.tell(transport.address)
        transport.connect({1 - own: other.hear()})

        # One message there and back, both ends asleep in between.
        times = []
        for _ in range(trips):
            if own == 1:
                begin = time.perf_counter()
                send(transport, own)
                take(transport, 1)
                times.append(time.perf_counter() - begin)
            else:
                take(transport, 1)
                send(transport, own)
        # Many messages from guest 1 to guest 0.
        before, used, called, worked = time.perf_counter(), time.process_time(), calls.count(), busy()
        if own == 1:
            for number in range(count):
                send(transport, own)
                if not number & 255:
                    transport.receive(0)
            take(transport, 1)
        else:
            take(transport, count)
            send(transport, own)
        took = time.perf_counter() - before
        figures = {
            "cpu_us": 1e6 * (time.process_time() - used) / count,
            "guest_us": 1e6 * (busy() - worked) / count,
            "calls": (calls.count() - called) / count,
        }
        if own == 0:
            other.tell(figures)
        else:
            report(
                what="transport",
                name=name,
                us=1e6 * statistics.median(times) / 2,
                per_s=count / took,
                sender=figures,
                receiver=other.hear(),
            )
        transport.close()


def main() -> None:
    requests, trips, count = (int(argument) for argument in sys.argv[1:])
    own = int(os.environ["GUEST"])
    assert mmap.PAGESIZE
    other = Other()
    other.patience(600)
    verbs(other, own, requests)
    transports(other, own, trips, count)


if __name__ == "__main__":
    main()
