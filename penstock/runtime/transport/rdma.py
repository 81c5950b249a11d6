"""The transport between workers of different machines, over RDMA (docs/papers.md: W7, W8).

Streams, numbers, send regions and connections are those of tcp.py, and so is the way in which peers find each other and
prove that they belong to the job. What differs is how the bytes go. The TCP connection of a stream carries one exchange
of addresses, by which both ends make a reliable queue pair, and then only shows that the other process lives. The
receiver fetches the stream out of the sender's region by READs, and the two talk by short SENDs (read_stream.py).

When the queue pair or the TCP connection fails, both are given up, a new connection is made, and the stream goes on at
the last complete frame of the receiver. So nothing is lost and nothing comes twice, whatever was under way. When RDMA
fails again and again on a way that TCP can go, the stream goes over its TCP connection instead, and the log says so
once.

Regions are registered once and used again, because registering takes much longer than a READ. Work requests are made
once too: pyverbs gives the memory of a discarded one back in some versions only. Completions are taken in batches,
without a system call. Only a worker that has found nothing asks the device for an event, which makes `fileno` readable.
(Software RoCE needs a system call for each post. A device that is made for RDMA needs none.)

A receiver that has read everything waits for an answer of the sender, which `send` and `receive` give. So a worker must
serve its descriptor as long as it has peers, as run loops do: over TCP the kernel would go on sending by itself.

Only this module imports pyverbs, and only when a device is to be opened.

What must not happen: that the device writes into memory that has been given back, so the registration of a buffer is
ended before the buffer; or that a message of the other end finds no receive, which would break the connection.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import itertools
import logging
import mmap
import os
import platform
import select
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from penstock.runtime.errors import PenstockError
from penstock.runtime.transport.base import Buffer, LinkLoad
from penstock.runtime.transport.framing import BadFrame, FrameDecoder
from penstock.runtime.transport.peer_links import Connection, Link
from penstock.runtime.transport.read_stream import (
    MMS_BYTES,
    READS_MAX,
    RECEIVES,
    WORDS_BYTES,
    Published,
    Read,
    ReadStream,
)
from penstock.runtime.transport.send_stream import SendStream
from penstock.runtime.transport.tcp import CLOSE_S, OUTGOING_EVENTS, Incoming, Outgoing, TcpTransport

logger = logging.getLogger(__name__)

#: What Debian and Ubuntu call what is needed.
PACKAGES = "python3-pyverbs ibverbs-providers"

#: The size of the buffer in which the bytes of one stream land: the READs that may be under way fit into it.
LANDING_BYTES = READS_MAX * MMS_BYTES

# How many READs a queue pair may have under way at the device, and how the device tries again: after 67 ms, 7 times. A
# cut of about a second is noticed by nobody.
_READS_AT_ONCE = 16
_TIMEOUT = 14
_RETRIES = 7
# Our messages always find a receive, so there is nothing to be tried again.
_NOT_READY_RETRIES = 0
_MIN_NOT_READY_TIMER = 12

_COMPLETIONS = 64  # that one look takes
_QUEUE_LENGTH = 16_384  # of completions: some 200 peers
# A SEND in so many asks for a completion. The others are known to be done when that one is.
_SIGNALLED_EVERY = 8
# The receives for answers. One is under way at most.
_ANSWERS = 4

# While no receiver waits, a send looks for one that does, at most this often.
_LOOK_EVERY_S = 20e-6

# After so many failures in a row, which have carried nothing, a stream goes over TCP.
_FAILURES_MAX = 3

#: Two numbers: see read_stream.py.
_MESSAGE = struct.Struct("<QQ")

# What the ends tell each other over TCP: the form of the stream (RDMA or TCP); queue pair, first packet number, MTU,
# local identifier, READs at once, whether the words can be trusted, GID; address and key of the region, and of the
# words.
_SETUP = struct.Struct("<16sIIIHHI16sQIQI")
_OVER_RDMA = b"penstock rdma 1\n"
_OVER_TCP = b"penstock tcp  1\n"
_READY = b"\x01"

_RECEIVE, _READ, _SEND = range(3)

_opening = threading.Lock()


class NoRdma(PenstockError):
    """This machine has no usable device for RDMA; the message names the missing part."""


class Port(NamedTuple):
    """A port of a device, by which a host can be reached."""

    device: str
    number: int
    gid_index: int
    gid: str
    link: str  # "RoCE" or "InfiniBand"


class _Pyverbs:
    """The parts of pyverbs that are used, loaded when they are needed."""

    def __init__(self) -> None:
        try:
            from pyverbs import addr, cq, device, enums, fork, mr, pd, pyverbs_error, qp, wr
        except ImportError as error:
            raise NoRdma(f"pyverbs cannot be loaded ({error}); on Debian: apt-get install {PACKAGES}") from None
        self.addr, self.cq, self.device, self.enums, self.mr = addr, cq, device, enums, mr
        self.pd, self.error, self.qp, self.wr = pd, pyverbs_error.PyverbsError, qp, wr
        # A child of this process must not take over pages that the device knows.
        with suppress(self.error):
            fork.fork_init()

    def find(self, host: str) -> Port:
        """Returns the active port that a host's address belongs to, or else the first active one. Raises NoRdma."""
        found: list[Port] = []
        seen: list[str] = []
        for entry in self.device.get_device_list():
            name = entry.name.decode()
            seen.append(name)
            with suppress(self.error):
                context = self.device.Context(name=name)
                try:
                    found += self._active(context, name)
                finally:
                    context.close()
        if not found:
            raise NoRdma(
                f"no port of {', '.join(seen)} is active" if seen else "there is no device for RDMA on this machine"
            )
        address = ipaddress.ip_address(host)
        wanted = ipaddress.IPv6Address(f"::ffff:{host}") if address.version == 4 else address
        return next((port for port in found if ipaddress.ip_address(port.gid) == wanted), found[0])

    def _active(self, context: Any, name: str) -> list[Port]:
        enums = self.enums
        ports = []
        for number in range(1, context.query_device().phys_port_cnt + 1):
            port = context.query_port(number)
            if port.state != enums.IBV_PORT_ACTIVE:
                continue
            gids = [(index, context.query_gid(number, index).gid) for index in range(port.gid_tbl_len)][:256]
            infiniband = port.link_layer == enums.IBV_LINK_LAYER_INFINIBAND
            # RoCE: only version 2 can be routed, and all devices have it. Addresses of IPv4 first: others are often of
            # the link only.
            usable = [
                Port(name, number, index, gid, "InfiniBand" if infiniband else "RoCE")
                for index, gid in gids
                if int(ipaddress.ip_address(gid))
                and (infiniband or context.query_gid_type(number, index) == enums.IBV_GID_TYPE_SYSFS_ROCE_V2)
            ]
            usable.sort(key=lambda one: ipaddress.IPv6Address(one.gid).ipv4_mapped is None)
            ports += usable
        return ports


def find_port(host: str) -> Port:
    """Returns the port by which a host's address can be reached over RDMA. Raises NoRdma, which says what is
    missing."""
    return _Pyverbs().find(host)


class _Memory:
    """A buffer that the device knows."""

    def __init__(self, device: _Device, view: memoryview, *, readable: bool) -> None:
        """`readable`: the other end may READ it; otherwise this end lets the device write into it."""
        enums = device.verbs.enums
        self.view = view
        # It keeps the buffer where it is.
        self._held = (ctypes.c_char * len(view)).from_buffer(view)
        self.address = ctypes.addressof(self._held)
        access = enums.IBV_ACCESS_REMOTE_READ if readable else enums.IBV_ACCESS_LOCAL_WRITE
        self._region = device.verbs.mr.MR(device.domain, len(view), access, address=self.address)
        self.local_key: int = self._region.lkey
        self.remote_key: int = self._region.rkey

    def close(self) -> None:
        self._region.close()
        del self._held


class _Request:
    """A work request with one buffer, used again and again."""

    def __init__(self, verbs: _Pyverbs, opcode: int, flags: int) -> None:
        self.piece = verbs.wr.SGE(0, 0, 0)
        self.request = verbs.wr.SendWR(opcode=opcode, num_sge=1, sg=[self.piece], send_flags=flags)
        self.request.sg_list = self.piece  # from now on the request looks at the piece itself

    def set(self, address: int, length: int, key: int) -> None:
        self.piece.addr, self.piece.length, self.piece.lkey = address, length, key


class _ReadRequests:
    """The work requests of one READ: of data, which are in one piece in the sender's region or in two, and of the
    words. Only the last one asks for a completion."""

    def __init__(self, verbs: _Pyverbs) -> None:
        enums = verbs.enums
        read, signalled = enums.IBV_WR_RDMA_READ, enums.IBV_SEND_SIGNALED
        self.single = [_Request(verbs, read, 0), _Request(verbs, read, signalled)]
        self.double = [_Request(verbs, read, 0), _Request(verbs, read, 0), _Request(verbs, read, signalled)]
        for chain in (self.single, self.double):
            for first, second in itertools.pairwise(chain):
                first.request.next_wr = second.request


class _Requests:
    """The work requests of one stream. Those of a stream that has ended are used by the next one, and never given
    back: pyverbs frees them twice or not at all, depending on its version."""

    _idle: ClassVar[list[_Requests]] = []

    def __init__(self, verbs: _Pyverbs) -> None:
        enums = verbs.enums
        inline = enums.IBV_SEND_INLINE
        self.sends = [_Request(verbs, enums.IBV_WR_SEND, flag) for flag in (inline, inline | enums.IBV_SEND_SIGNALED)]
        self.reads = [_ReadRequests(verbs) for _ in range(READS_MAX)]
        # What is to be sent is copied when it is posted.
        self.message = ctypes.create_string_buffer(_MESSAGE.size)
        for send in self.sends:
            send.set(ctypes.addressof(self.message), _MESSAGE.size, 0)

    @classmethod
    def take(cls, verbs: _Pyverbs) -> _Requests:
        return cls._idle.pop() if cls._idle else cls(verbs)

    def give(self) -> None:
        self._idle.append(self)


class _Completions:
    """A completion queue, and the descriptor of its events."""

    def __init__(self, verbs: _Pyverbs, context: Any, length: int) -> None:
        self._error = verbs.error
        self._channel, self.descriptor = _open_channel(verbs, context)
        self.queue = verbs.cq.CQ(context, length, None, self._channel, 0)
        self._event_due = False  # an event was asked for, and a completion has come since
        self._asked = False

    def poll(self) -> Sequence[Any]:
        """Returns completions that have come. Makes no system call."""
        count, completions = self.queue.poll(_COMPLETIONS)
        if count and self._asked:
            self._event_due = True
        return completions if count else ()

    def ask(self) -> bool:
        """Makes the descriptor readable when the next completion comes. Returns False when some may have come before
        that, which `poll` returns."""
        if self._event_due:
            try:
                self._channel.get_cq_event(self.queue)
            except self._error:
                return True  # the event is still on its way, and makes the descriptor readable
            self.queue.ack_events(1)
            self._event_due = self._asked = False
        if self._asked:
            return True
        self.queue.req_notify()
        self._asked = True
        return False

    def event(self) -> None:
        """The descriptor is readable."""
        self._event_due = True

    def close(self) -> None:
        with suppress(self._error):
            self.queue.close()
            self._channel.close()


class _Device:
    """An open device: its completions, and the ends of streams that they are for. What this worker sends has a queue of
    its own, so that a `send` may look at it: no message comes by it."""

    def __init__(self, host: str) -> None:
        self.verbs = verbs = _Pyverbs()
        self.port = verbs.find(host)
        self.context = verbs.device.Context(name=self.port.device)
        self.domain = verbs.pd.PD(self.context)
        limits = self.context.query_device()
        port = self.context.query_port(self.port.number)
        self.mtu: int = port.active_mtu
        self.local_identifier: int = port.lid
        self.reads_at_once: int = min(_READS_AT_ONCE, limits.max_qp_rd_atom)
        length = min(_QUEUE_LENGTH, limits.max_cqe)
        self.outgoing = _Completions(verbs, self.context, length)
        self.incoming = _Completions(verbs, self.context, length)
        self._keys = itertools.count(1)
        self.ends: dict[int, _RdmaOutgoing | _RdmaIncoming] = {}  # by the key of their queue pair

    def new_key(self, end: _RdmaOutgoing | _RdmaIncoming) -> int:
        key = next(self._keys) & 0xFFFF_FFFF
        self.ends[key] = end
        return key

    def close(self) -> None:
        self.outgoing.close()
        self.incoming.close()
        with suppress(self.verbs.error):
            self.domain.close()
            self.context.close()


def _open_channel(verbs: _Pyverbs, context: Any) -> tuple[Any, int]:
    """Returns a channel of events and its descriptor, which pyverbs does not tell."""
    before = _event_descriptors()
    channel = verbs.cq.CompChannel(context)
    for descriptor in _event_descriptors() - before:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        return channel, descriptor
    raise NoRdma("the events of the device cannot be found")


def _event_descriptors() -> set[int]:
    """Returns the descriptors of this process by which devices tell of events."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
    return found


class _QueuePair:
    """One end of a reliable connection, of its making until one end gives it up."""

    def __init__(
        self,
        device: _Device,
        end: _RdmaOutgoing | _RdmaIncoming,
        completions: _Completions,
        sends: int,
        receives: int,
    ) -> None:
        verbs = device.verbs
        self._device = device
        self.key = device.new_key(end)
        capacity = verbs.qp.QPCap(
            max_send_wr=sends, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1, max_inline_data=_MESSAGE.size
        )
        enums = verbs.enums
        attributes = verbs.qp.QPInitAttr(
            qp_type=enums.IBV_QPT_RC, scq=completions.queue, rcq=completions.queue, cap=capacity, sq_sig_all=0
        )
        self.pair = verbs.qp.QP(device.domain, attributes)
        init = verbs.qp.QPAttr(port_num=device.port.number)
        init.qp_access_flags = enums.IBV_ACCESS_REMOTE_READ
        self.pair.to_init(init)
        self.first_packet = int.from_bytes(os.urandom(3), "little")
        self._sent = 0

    def setup(self, region: _Memory | None, words: _Memory | None, form: bytes = _OVER_RDMA) -> bytes:
        """Returns the parameters that the other end needs."""
        device = self._device
        return _SETUP.pack(
            form,
            self.pair.qp_num,
            self.first_packet,
            device.mtu,
            device.local_identifier,
            device.reads_at_once,
            platform.machine() in ("x86_64", "AMD64"),
            ipaddress.ip_address(device.port.gid).packed,
            region.address if region else 0,
            region.remote_key if region else 0,
            words.address if words else 0,
            words.remote_key if words else 0,
        )

    def connect(self, setup: tuple[Any, ...]) -> None:
        """Connects to the queue pair that the other end has named."""
        _, number, first_packet, mtu, identifier, reads, _, gid, *_ = setup
        device, verbs = self._device, self._device.verbs
        ready = verbs.qp.QPAttr(port_num=device.port.number)
        ready.dest_qp_num = number
        ready.rq_psn = first_packet
        ready.path_mtu = min(mtu, device.mtu)
        ready.max_dest_rd_atomic = min(reads, device.reads_at_once)
        ready.min_rnr_timer = _MIN_NOT_READY_TIMER
        route = verbs.addr.GlobalRoute(
            dgid=verbs.addr.GID(ipaddress.IPv6Address(gid).exploded), sgid_index=device.port.gid_index, hop_limit=64
        )
        ready.ah_attr = verbs.addr.AHAttr(gr=route, is_global=1, dlid=identifier, port_num=device.port.number)
        self.pair.to_rtr(ready)
        sending = verbs.qp.QPAttr(port_num=device.port.number)
        sending.sq_psn = self.first_packet
        sending.timeout = _TIMEOUT
        sending.retry_cnt = _RETRIES
        sending.rnr_retry = _NOT_READY_RETRIES
        sending.max_rd_atomic = min(reads, device.reads_at_once)
        self.pair.to_rts(sending)

    def name(self, kind: int, about: int) -> int:
        """Returns the number of a work request, by which its completion is known."""
        return self.key << 32 | kind << 16 | about

    def send(self, requests: _Requests, first: int, second: int) -> None:
        """Sends a message of two numbers."""
        send = requests.sends[self._sent % _SIGNALLED_EVERY == 0].request
        _MESSAGE.pack_into(requests.message, 0, first, second)
        send.wr_id = self.name(_SEND, 0)
        self.pair.post_send(send)
        self._sent += 1

    def close(self) -> None:
        self._device.ends.pop(self.key, None)
        with suppress(self._device.verbs.error):
            self.pair.close()


class _Receives:
    """Receives for messages of two numbers, each with its place in a buffer. They are made once for each peer."""

    def __init__(self, device: _Device, count: int) -> None:
        wr = device.verbs.wr
        self._memory = _Memory(device, memoryview(mmap.mmap(-1, mmap.PAGESIZE)), readable=False)
        address, key, size = self._memory.address, self._memory.local_key, _MESSAGE.size
        self.requests = [wr.RecvWR(num_sge=1, sg=[wr.SGE(address + size * index, size, key)]) for index in range(count)]

    def post(self, pair: _QueuePair, index: int) -> None:
        request = self.requests[index]
        request.wr_id = pair.name(_RECEIVE, index)
        pair.pair.post_recv(request)

    def post_all(self, pair: _QueuePair) -> None:
        for index in range(len(self.requests)):
            self.post(pair, index)

    def read(self, index: int) -> tuple[int, int]:
        return _MESSAGE.unpack_from(self._memory.view, _MESSAGE.size * index)

    def close(self) -> None:
        self._memory.close()


class _RdmaOutgoing(Outgoing):
    """The stream to one peer, and the queue pair over which the peer reads it."""

    def __init__(self, owner: RdmaTransport, worker: int, stream: SendStream) -> None:
        super().__init__(owner, worker, stream)
        self._rdma = owner
        self._device = device = owner.device
        self._words = _Memory(device, memoryview(mmap.mmap(-1, mmap.PAGESIZE)), readable=True)
        self._published = Published(stream, self._words.view[:WORDS_BYTES].cast("Q"))
        self._memory: _Memory | None = None
        self._receives = _Receives(device, RECEIVES)
        self._requests = _Requests.take(device.verbs)
        self._pair: _QueuePair | None = None
        self._setup = b""  # what has come of the receiver's set-up
        self._over_tcp = False  # on this connection

    def adopt(self, connection: Connection) -> None:
        self.end()
        self.connection = connection
        device = self._device
        view = self.stream.region.view
        if self._memory is None or self._memory.view is not view:
            if self._memory is not None:
                self._memory.close()
            self._memory = _Memory(device, view, readable=True)
        self._published.publish()
        try:
            self._pair = _QueuePair(device, self, device.outgoing, 4 * _SIGNALLED_EVERY, RECEIVES)
            self._receives.post_all(self._pair)
            connection.send(self._pair.setup(self._memory, self._words))
            self._owner.watch(connection, OUTGOING_EVENTS, self.on_event)
        except (OSError, device.verbs.error) as error:
            self.fail(error)

    def end(self) -> None:
        super().end()
        self._published.disconnect()
        if self._pair is not None:
            self._pair.close()
            self._pair = None
        self._setup = b""
        self._over_tcp = False

    def discard(self) -> None:
        """Gives back everything, for good."""
        self.end()
        for memory in (self._memory, self._words, self._receives):
            if memory is not None:
                memory.close()
        self._requests.give()

    def fail(self, error: object) -> None:
        """The connection cannot be used any more."""
        logger.debug("the stream to worker %d is interrupted: %s", self._worker, error)
        self.lost()

    def load(self) -> LinkLoad | None:
        """See Outgoing. No device says how much of its link is in use, and the TCP connection carries nothing."""
        return super().load() if self._over_tcp else None

    def on_event(self, event: int, messages: list[tuple[int, Buffer]]) -> None:
        """Takes the receiver's set-up, and then notices the end of the connection."""
        while (connection := self.connection) is not None and not self._over_tcp:
            try:
                data = connection.recv(_SETUP.size - len(self._setup) or 1)
                if not data or self.writable:
                    self.fail("the receiver has closed the connection")
                    return
                self._setup += data
                if len(self._setup) == _SETUP.size:
                    self._begin(connection, _SETUP.unpack(self._setup))
            except BlockingIOError:
                return
            except (OSError, BadFrame, self._device.verbs.error) as error:
                self.fail(error)
                return
        super().on_event(event, messages)

    def _begin(self, connection: Connection, setup: tuple[Any, ...]) -> None:
        """Begins to send, in the form that the receiver has chosen."""
        form = setup[0]
        if form == _OVER_TCP:
            self._over_tcp = True
        elif form == _OVER_RDMA and self._pair is not None:
            self._pair.connect(setup)
            connection.send(_READY)
            self.writable = True
        else:
            raise BadFrame("the receiver's set-up has no known form")

    def send_now(self, task: int, parts: Sequence[Buffer], size: int) -> bool:
        """See Outgoing. What the receiver reads is published by `write`."""
        return self._over_tcp and super().send_now(task, parts, size)

    def write(self) -> None:
        """Publishes the new content of the region, and wakes a receiver that waits for it."""
        if self._over_tcp:
            super().write()
            return
        pair, memory = self._pair, self._memory
        assert pair is not None
        assert memory is not None
        if self.stream.region.view is not memory.view:
            self.fail("the region has grown")
            return
        self._published.publish()
        if not self._published.armed:
            self._rdma.look(_LOOK_EVERY_S)
        else:
            self._tell(pair)

    def _tell(self, pair: _QueuePair) -> None:
        answer = self._published.answer()
        if answer is not None:
            try:
                pair.send(self._requests, *answer)
            except self._device.verbs.error as error:
                self.fail(error)

    def completed(self, kind: int, about: int, messages: list[tuple[int, Buffer]]) -> None:
        """A work request is done."""
        pair = self._pair
        if kind != _RECEIVE or pair is None:
            return
        position, said = self._receives.read(about)
        try:
            self._receives.post(pair, about)
            self._published.take(position, said)
            self._owner.has_room()
        except BadFrame as error:
            logger.error("worker %d does not follow the protocol: %s", self._worker, error)
            self.fail(error)
            return
        except self._device.verbs.error as error:
            self.fail(error)
            return
        if self.stream.closed:
            self.end()
            self._owner.stop_connecting(self._worker)
            return
        self._tell(pair)


class _RdmaIncoming(Incoming):
    """The stream from one peer, and the queue pair over which this worker reads it."""

    def __init__(self, owner: RdmaTransport, worker: int, decoder: FrameDecoder) -> None:
        super().__init__(owner, worker, decoder)
        self._rdma = owner
        self._device = device = owner.device
        self._landing = _Memory(device, memoryview(mmap.mmap(-1, LANDING_BYTES)), readable=False)
        self._words = _Memory(device, memoryview(mmap.mmap(-1, mmap.PAGESIZE)), readable=False)
        self._reader = ReadStream(decoder, self._landing.view)
        self._receives = _Receives(device, _ANSWERS)
        self._requests = _Requests.take(device.verbs)
        self._pair: _QueuePair | None = None
        self._peer: tuple[Any, ...] = ()  # the sender's set-up
        self._setup = b""  # what has come of it
        self._ready = False
        self._slot = 0  # of the last READ
        self._capacity = 0  # of the sender's region
        self._failures = 0  # in a row, which have brought nothing
        self._over_tcp = False  # on this connection

    def adopt(self, link: Link) -> None:
        """See Incoming."""
        if self.taken(link):
            self._capacity = link.capacity

    def end(self) -> None:
        super().end()
        if self._pair is not None:
            self._pair.close()
            self._pair = None
        self._setup = b""
        self._ready = self._over_tcp = False

    def discard(self) -> None:
        """Gives back everything, for good."""
        self.end()
        for memory in (self._landing, self._words, self._receives):
            memory.close()
        self._requests.give()

    def fail(self, error: object) -> None:
        """The connection cannot be used any more. The sender makes another one."""
        logger.debug("the stream from worker %d is interrupted: %s", self._worker, error)
        self._failures += self._ready
        self.end()

    def read(self, event: int, messages: list[tuple[int, Buffer]]) -> None:
        """Exchanges set-ups with the sender, and then notices the end of the connection."""
        connection = self.connection
        if connection is None:
            return
        if self._over_tcp:
            super().read(event, messages)
            return
        try:
            data = connection.recv(_SETUP.size - len(self._setup) or 1)
            if not data or self._ready:
                self._failures -= not data  # the other end has ended it
                self.fail("the sender has closed the connection")
            elif self._pair is None:
                self._setup += data
                if len(self._setup) == _SETUP.size:
                    self._connect(connection)
            else:
                self._ready = True
                self._reader.resume(self._capacity, bool(self._peer[6]))
                self._act()
        except BlockingIOError:
            pass
        except (OSError, BadFrame, self._device.verbs.error) as error:
            self.fail(error)

    def _connect(self, connection: Connection) -> None:
        """Answers the sender's set-up."""
        self._peer = _SETUP.unpack(self._setup)
        if self._peer[0] != _OVER_RDMA:
            raise BadFrame("the sender's set-up has no known form")
        device, sends = self._device, 4 * READS_MAX + RECEIVES + 2 * _SIGNALLED_EVERY
        self._pair = _QueuePair(device, self, device.incoming, sends, _ANSWERS)
        if self._failures >= _FAILURES_MAX:
            if self._failures == _FAILURES_MAX:
                self._failures += 1
                logger.warning(
                    "RDMA from worker %d has failed %d times and brought nothing; it sends over TCP from now on",
                    self._worker,
                    _FAILURES_MAX,
                )
            connection.send(self._pair.setup(None, None, _OVER_TCP))
            self._over_tcp = True
            self.begin(self._capacity)
            return
        self._receives.post_all(self._pair)
        self._pair.connect(self._peer)
        connection.send(self._pair.setup(None, None))

    def completed(self, kind: int, about: int, messages: list[tuple[int, Buffer]]) -> None:
        """A work request is done."""
        pair, reader = self._pair, self._reader
        if pair is None or kind == _SEND:
            return
        now = time.monotonic()
        try:
            if kind == _READ:
                self._failures = 0
                reader.completed(messages)
                reader.saw(self._words.view[WORDS_BYTES * about : WORDS_BYTES * (about + 1)].cast("Q").tolist(), now)
            else:
                head, processed = self._receives.read(about)
                self._receives.post(pair, about)
                reader.told(head, processed, now)
            self._act(now)
        except BadFrame as error:
            logger.error("worker %d does not follow the protocol, and is disconnected: %s", self._worker, error)
            self.fail(error)
        except self._device.verbs.error as error:
            self.fail(error)

    def turn(self) -> None:
        """Goes on after earlier messages were used, or at the time that was given to `turn_at`."""
        reader = self._reader
        if self._pair is None or not self._ready:
            return
        reader.make_room()
        if reader.landing_wanted and not reader.under_way:
            size = 1 << (reader.landing_wanted + LANDING_BYTES - 1).bit_length()
            landing = _Memory(self._device, memoryview(mmap.mmap(-1, size)), readable=False)
            reader.land_at(landing.view)
            self._landing.close()
            self._landing = landing
        self.act()

    def act(self) -> None:
        """Posts the requests that are due by now."""
        if self._ready:
            try:
                self._act()
            except self._device.verbs.error as error:
                self.fail(error)

    def _act(self, now: float | None = None) -> None:
        """Posts the READs and the message that are due."""
        pair, reader, requests = self._pair, self._reader, self._requests
        assert pair is not None
        if reader.waiting:
            now = time.monotonic() if now is None else now
            while (read := reader.next_read(now)) is not None:
                self._post(pair, requests, read)
            if reader.waiting:
                if not reader.under_way:
                    self._rdma.turn_later(self)
                elif (due := reader.due()) is not None:
                    self._rdma.turn_at(self, due)
        message = reader.message()
        if message is not None:
            pair.send(requests, *message)

    def _post(self, pair: _QueuePair, requests: _Requests, read: Read) -> None:
        slot = self._slot = (self._slot + 1) % READS_MAX
        *_, region, region_key, words, words_key = self._peer
        capacity, landing = self._capacity, self._landing
        at = read.position & (capacity - 1)
        first = min(read.size, capacity - at)
        chain = requests.reads[slot].single if first == read.size else requests.reads[slot].double
        place = landing.address + read.place
        chain[0].set(place, first, landing.local_key)
        chain[0].request.set_wr_rdma(region_key, region + at)
        if first < read.size:
            chain[1].set(place + first, read.size - first, landing.local_key)
            chain[1].request.set_wr_rdma(region_key, region)
        chain[-1].set(self._words.address + WORDS_BYTES * slot, WORDS_BYTES, self._words.local_key)
        chain[-1].request.set_wr_rdma(words_key, words)
        name = pair.name(_READ, slot)
        for one in chain:
            one.request.wr_id = name
        pair.pair.post_send(chain[0].request)

    def say_closed(self) -> None:
        self._reader.closed = True
        if self._over_tcp:
            super().say_closed()
        elif self._ready:
            with suppress(self._device.verbs.error):
                self._act()


class RdmaTransport(TcpTransport):
    """The end of one worker; see the module's docstring."""

    def __init__(self, worker: int, key: bytes, host: str, ports: tuple[int, int] = (0, 0), **options: Any) -> None:
        """See TcpTransport. Raises NoRdma when there is no device that can be used."""
        with _opening:
            self.device = _Device(host)
        super().__init__(worker, key, host, ports, **options)
        self._later: set[_RdmaIncoming] = set()  # at the next `receive`
        self._due: dict[_RdmaIncoming, float] = {}  # at a time
        self._timer = _Timer()
        self._looked_at = 0.0
        for descriptor, handler in (
            (self.device.incoming.descriptor, self._on_incoming),
            (self.device.outgoing.descriptor, self._on_outgoing),
            (self._timer.descriptor, self._on_timer),
        ):
            self._handlers[descriptor] = handler
            self._epoll.register(descriptor, select.EPOLLIN)
        self.device.incoming.ask()
        self.device.outgoing.ask()

    def _make_outgoing(self, worker: int, stream: SendStream) -> Outgoing:
        return _RdmaOutgoing(self, worker, stream)

    def _make_incoming(self, worker: int, decoder: FrameDecoder) -> Incoming:
        return _RdmaIncoming(self, worker, decoder)

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        messages: list[tuple[int, Buffer]] = []
        if self._later:
            later, self._later = self._later, set()
            for incoming in later:
                incoming.turn()
        self._take(messages)
        if messages:
            self.look(_LOOK_EVERY_S)
            return messages
        return super().receive(timeout)

    def look(self, every_s: float = 0.0) -> None:
        """Takes the completions of this worker's sends, unless that has just been done."""
        now = time.monotonic()
        if now - self._looked_at >= every_s:
            self._looked_at = now
            while completions := self.device.outgoing.poll():
                self._complete(completions, [])

    def close(self, wait_s: float = CLOSE_S) -> None:
        """See TcpTransport."""
        if not self._closed:
            super().close(wait_s)
            self._timer.close()
            self.device.close()

    def turn_later(self, incoming: _RdmaIncoming) -> None:
        """Calls `turn` of a stream at the next `receive`, when earlier messages are no longer valid."""
        self._later.add(incoming)
        self._ring()

    def turn_at(self, incoming: _RdmaIncoming, due: float) -> None:
        """Calls `turn` of a stream at a time."""
        self._due[incoming] = due
        self._timer.set(min(self._due.values()))

    def _take(self, messages: list[tuple[int, Buffer]]) -> None:
        """Takes the completions of this worker's receives, until some messages are there."""
        while not messages and (completions := self.device.incoming.poll()):
            self._complete(completions, messages)

    def _complete(self, completions: Sequence[Any], messages: list[tuple[int, Buffer]]) -> None:
        ends = self.device.ends
        for one in completions:
            name = one.wr_id
            end = ends.get(name >> 32)
            if end is None:
                continue  # of a queue pair that was given up
            if one.status:
                end.fail(f"a work request has failed with status {one.status}")
            else:
                end.completed(name >> 16 & 0xFFFF, name & 0xFFFF, messages)

    def _on_incoming(self, event: int, messages: list[tuple[int, Buffer]]) -> None:
        incoming = self.device.incoming
        incoming.event()
        while not messages:
            if incoming.ask():
                return
            self._take(messages)
        # There may be more, which have come before the device was asked for an event.
        self._ring()

    def _on_outgoing(self, event: int, messages: list[tuple[int, Buffer]]) -> None:
        outgoing = self.device.outgoing
        outgoing.event()
        while not outgoing.ask():
            self.look()

    def _on_bell(self, event: int, messages: list[tuple[int, Buffer]]) -> None:
        super()._on_bell(event, messages)
        self._take(messages)

    def _on_timer(self, event: int, messages: list[tuple[int, Buffer]]) -> None:
        self._timer.clear()
        now = time.monotonic()
        for incoming in [one for one, due in self._due.items() if due <= now]:
            del self._due[incoming]
            incoming.act()
        if self._due:
            self._timer.set(min(self._due.values()))


class _Timer:
    """A descriptor that is readable from a time on. (Python 3.13 has it in `os`.)"""

    _CLOEXEC_NONBLOCK = os.O_CLOEXEC | os.O_NONBLOCK

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, self._CLOEXEC_NONBLOCK)
        if self.descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def set(self, due: float) -> None:
        """`due`: in seconds of `time.monotonic`."""
        nanoseconds = max(1, int(due * 1e9))
        value = (ctypes.c_long * 4)(0, 0, *divmod(nanoseconds, 1_000_000_000))
        self._libc.timerfd_settime(self.descriptor, 1, value, None)  # 1: an absolute time

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.descriptor, 8)

    def close(self) -> None:
        os.close(self.descriptor)
