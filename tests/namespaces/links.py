"""The cable between a host of the tests and the switch: it can be cut, and made lossy, thin and long.

Each direction has one device at its sending end, and what happens to frames happens there: a filter drops them (cut,
loss), then a queue makes them wait for their turn (rate). The filter is classic BPF: every kernel has it, an ordinary
user may load it in a network of his own, and it knows chance. It takes the frame and reports success, so that the
sender learns nothing, as with a real cable. A delay is a program of its own between two devices (wire.py): kernels
without netem have nothing that could keep a frame for a time.

The names of directions are the host's: `out` is what it sends.
"""

from __future__ import annotations

import ipaddress
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tests.namespaces.spaces import Space

Way = Literal["out", "in", "both"]
#: Of a cut between two hosts: from the first to the second, from the second to the first, or both.
Ways = Literal["there", "back", "both"]

_WIRE = Path(__file__).with_name("wire.py")

_RANDOM = 2**32 - 4096 + 56  # SKF_AD_OFF + SKF_AD_RANDOM: where a filter reads a random number
_LEAST_BURST = 4096  # two frames
_TAKEN, _PASS = 4, 2**32 - 1  # TC_ACT_STOLEN, TC_ACT_UNSPEC


def _dropping(share: float) -> str:
    """Returns a filter that takes this share of the frames."""
    if share >= 1.0:
        return f"1,6 0 0 {_TAKEN}"
    # A = random; if A >= limit, skip one; return TAKEN; return PASS
    return f"4,32 0 0 {_RANDOM},53 1 0 {int(share * 2**32)},6 0 0 {_TAKEN},6 0 0 {_PASS}"


def _dropping_from(sources: Collection[str]) -> str:
    """Returns a filter that takes the IPv4 packets of these addresses."""
    count = len(sources)
    # If the frame is no IPv4, pass; A = the source; if A is one of the addresses, take; pass.
    found = ["40 0 0 12", f"21 0 {count + 1} 2048", "32 0 0 26"]
    found += [f"21 {count - i} 0 {int(ipaddress.ip_address(source))}" for i, source in enumerate(sorted(sources))]
    found += [f"6 0 0 {_PASS}", f"6 0 0 {_TAKEN}"]
    return f"{len(found)},{','.join(found)}"


@dataclass
class _Direction:
    """The state of one direction, and the device at its sending end."""

    space: Space
    device: str
    is_cut: bool = False
    loss: float = 0.0
    filtered: bool = False
    rated: bool = False

    def filter(self) -> None:
        share = 1.0 if self.is_cut else self.loss
        if share:
            what = f"filter replace dev {self.device} egress prio 1 protocol all handle 1 bpf da bytecode"
            self.space.configure("tc", [f"{what} '{_dropping(share)}'"])
        elif self.filtered:
            self.space.configure("tc", [f"filter del dev {self.device} egress prio 1"])
        self.filtered = bool(share)

    def rate(self, bits_s: float | None, burst_bytes: int | None, queue_s: float) -> None:
        if bits_s is not None:
            shape = f"tbf rate {int(bits_s)}bit burst {burst_bytes} latency {int(queue_s * 1e6)}us"
            self.space.configure("tc", [f"qdisc replace dev {self.device} root {shape}"])
        elif self.rated:
            self.space.configure("tc", [f"qdisc del dev {self.device} root"])
        self.rated = bits_s is not None


class Link:
    """A host's cable."""

    def __init__(self, host: Space, switch: Space, number: int, segmented: Callable[[], None]) -> None:
        """Connects the host, with the device eth0 there and a port of the switch here. `segmented`: makes all hosts
        send frames of the size that a real cable has."""
        self._switch = switch
        self._segmented = segmented
        self._inner, self._outer, self._port = f"v{number}", f"w{number}", f"p{number}"
        self._wire: subprocess.Popen[str] | None = None
        self._down = False
        self._cut_from: set[str] = set()
        switch.configure(
            "ip",
            [
                f"link add {self._inner} type veth peer name eth0 netns {host.pid}",
                f"link set {self._inner} master switch up",
            ],
        )
        switch.configure("tc", [f"qdisc add dev {self._inner} clsact"])
        host.configure("tc", ["qdisc add dev eth0 clsact"])
        self._ways = {"out": _Direction(host, "eth0"), "in": _Direction(switch, self._inner)}

    def _chosen(self, way: Way) -> list[_Direction]:
        return list(self._ways.values()) if way == "both" else [self._ways[way]]

    def cut(self, way: Way = "both") -> None:
        """Nothing goes this way any more, until `restore`."""
        for direction in self._chosen(way):
            direction.is_cut = True
            direction.filter()

    def restore(self, way: Way = "both") -> None:
        """Ends a cut. Loss, rate and delay are as before it."""
        for direction in self._chosen(way):
            direction.is_cut = False
            direction.filter()

    def cut_from(self, address: str) -> None:
        """Nothing of the host with this address arrives any more, until `restore_from`. All others still reach this
        host, and what this host sends still arrives there."""
        self._cut_from.add(address)
        self._filter_sources()

    def restore_from(self, address: str) -> None:
        """Ends a cut of `cut_from`."""
        self._cut_from.discard(address)
        self._filter_sources()

    def _filter_sources(self) -> None:
        what = f"dev {self._inner} egress prio 2"
        if self._cut_from:
            program = _dropping_from(self._cut_from)
            command = f"filter replace {what} protocol all handle 1 bpf da bytecode '{program}'"
        else:
            command = f"filter del {what}"
        self._switch.configure("tc", [command], force=not self._cut_from)

    def loss(self, share: float, way: Way = "both") -> None:
        """This share of the frames is lost, by chance. 0: none."""
        if share:
            self._segmented()
        for direction in self._chosen(way):
            direction.loss = share
            direction.filter()

    def rate(
        self, bits_s: float | None, way: Way = "both", *, burst_bytes: int | None = None, queue_s: float = 0.02
    ) -> None:
        """No more bits than this go through in a second, and what would wait for longer than `queue_s` is lost. None:
        as many as the machine can. `burst_bytes`: what may go at once after a pause; by default as much as the link
        carries in a millisecond, because timers are not more exact under load. Segments that are larger than a burst
        are divided into frames, which costs as much CPU time as the senders and receivers themselves."""
        if burst_bytes is None and bits_s is not None:
            burst_bytes = max(_LEAST_BURST, int(bits_s / 8 / 1000))
        for direction in self._chosen(way):
            direction.rate(bits_s, burst_bytes, queue_s)

    def delay(self, out_s: float, in_s: float | None = None) -> None:
        """Every frame takes so much longer, each way (or this way and that). 0: no longer than the machine needs.

        The first delay, and the end of the last one, may cost the frames of an instant.
        """
        in_s = out_s if in_s is None else in_s
        if self._wire is None:
            if out_s or in_s:
                self._lay(out_s, in_s)
        elif out_s or in_s:
            assert self._wire.stdin is not None
            print(out_s, in_s, file=self._wire.stdin, flush=True)
            self._answered()
        else:
            self._switch.configure("ip", [f"link del {self._port}", f"link set {self._inner} master switch"])
            self._end_wire()

    def _lay(self, out_s: float, in_s: float) -> None:
        """Puts the wire between the host's device and a new port of the switch."""
        self._switch.configure(
            "ip", [f"link add {self._port} type veth peer name {self._outer}", f"link set {self._outer} up"]
        )
        command = ["nsenter", *self._switch.enter("net"), "setpriv", "--pdeathsig", "KILL"]
        command += [sys.executable, "-I", "-S", str(_WIRE), self._inner, self._outer, str(out_s), str(in_s)]
        self._wire = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._answered()
        self._switch.configure("ip", [f"link set {self._inner} nomaster", f"link set {self._port} master switch up"])

    def _answered(self) -> None:
        assert self._wire is not None
        assert self._wire.stdout is not None
        said = self._wire.stdout.readline()
        assert said == "ready\n", f"the wire of a link says {said!r}"

    def _end_wire(self) -> None:
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
            for end in (self._wire.stdin, self._wire.stdout):
                assert end is not None
                end.close()
            self._wire = None

    def close(self) -> None:
        """Removes the cable with all that was done to it. May be called again."""
        self._end_wire()
        if self._switch.alive:  # else it has gone with the switch, as it may also have gone with its host
            self._switch.configure("ip", [f"link del {self._inner}", f"link del {self._port}"], force=True)
