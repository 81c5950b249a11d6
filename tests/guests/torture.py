"""Torments two peers over RDMA, one in each of two guests: python3 -m tests.guests.torture [MESSAGES [SEED [DEATHS]]].

In guest 0 a process sends, and is stopped, killed and cut off. In guest 1 a process receives, and knows by the seed
what must come: everything, once and in order.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from tests.guests import bare
from tests.guests.first_process import INTERFACE, switch_interface

assert bare
from penstock.runtime.transport.rdma import RdmaTransport  # noqa: E402
from penstock.runtime.transport.send_region import WRAP  # noqa: E402

KEY = b"the secret of one job, 32 bytes."
REGION_BYTES = 256 * 1024
PORT = 7000
LIMIT_S = 120.0
#: The positions of all streams wrap after some bytes.
FIRST = (WRAP - 400_000) & WRAP


def own_address() -> str:
    return os.environ["GUESTS"].split(",")[int(os.environ["GUEST"])]


def messages(seed: int, count: int) -> Iterator[tuple[int, bytes]]:
    """Yields the messages of a sender."""
    chance = random.Random(seed)
    pattern = chance.randbytes(70_000)
    for number in range(count):
        size = chance.choice((0, 10, 100, 1000, 5000, 20_000, 65_000))
        size = chance.randrange(size + 1)
        yield number % 1000, number.to_bytes(8, "little") + pattern[:size]


def digest(mail: list[tuple[int, bytes]]) -> str:
    told = hashlib.sha256()
    for task, body in mail:
        told.update(b"%d:%d:" % (task, len(body)))
        told.update(body)
    return told.hexdigest()


class Peer:
    """One worker's end, led by commands."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.transport = RdmaTransport(worker, KEY, own_address(), region_bytes=REGION_BYTES, first=FIRST)
        self.mail: list[tuple[int, bytes]] = []
        self.digest = hashlib.sha256()
        self.count = 0

    def take(self, timeout: float | None) -> None:
        for task, body in self.transport.receive(timeout):
            self.digest.update(b"%d:%d:" % (task, len(body)))
            self.digest.update(body)
            self.count += 1

    def address(self) -> str:
        return self.transport.address

    def connect(self, address: str) -> None:
        self.transport.drop([1 - self.worker])
        self.transport.connect({1 - self.worker: address})
        self.begin_again()

    def send(self, seed: int, count: int) -> None:
        """Sends all messages, and receives meanwhile, until the other end has everything."""
        for task, body in messages(seed, count):
            while not self.transport.send(1 - self.worker, task, (body[:8], body[8:])):
                self.take(0.01)
            self.take(0)
        self.settle()

    def send_for_ever(self, seed: int) -> None:
        print(json.dumps("sends"), flush=True)
        while True:
            self.send(seed, 1000)

    def flood(self, count: int) -> int:
        """Sends small messages, and returns how many bytes of memory this process has then."""
        body = bytes(100)
        send, other = self.transport.send, 1 - self.worker
        for number in range(count):
            while not send(other, number & 0xFF, (body,)):
                self.take(0.01)
        self.settle()
        return self.memory()

    def memory(self) -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def receive(self, count: int) -> str:
        """Receives so many messages in all, and returns the digest."""
        deadline = time.monotonic() + LIMIT_S
        while self.count < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.count} messages of {count}")
            self.take(1.0)
        return self.digest.hexdigest()

    def digest_so_far(self) -> str:
        return self.digest.hexdigest()

    def begin_again(self) -> None:
        """Counts what comes from here on."""
        self.digest, self.count = hashlib.sha256(), 0

    def receive_all(self, count: int) -> None:
        """Receives so many messages more, as long as some come."""
        until = self.count + count
        while self.count < until:
            self.take(1.0)

    def publish(self, seed: int, count: int) -> int:
        """Sends without receiving anything, as many as there is room for. The receiver, which waits for more, is told
        when all are there: so what it reads then does not depend on how quick it is."""
        out = self.transport._out[1 - self.worker]
        while not out._published.armed:
            self.take(0.1)
        out._published.armed = False
        sent = 0
        for task, body in messages(seed, count):
            if not self.transport.send(1 - self.worker, task, (body,)):
                break
            sent += 1
        out._published.armed = True
        out.write()
        return sent

    def settle(self) -> None:
        """Receives until the other end has everything."""
        self.take(0)
        while self.transport._out[1 - self.worker].stream.region.outstanding:
            self.take(0.1)

    def stop_yourself(self) -> None:
        print(json.dumps("stops"), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)

    def idle(self, seconds: float) -> float:
        """Receives for a while, and returns the share of the time that the processor worked for this process."""
        begin, used = time.monotonic(), time.process_time()
        while time.monotonic() < begin + seconds:
            self.take(0.5)
        return (time.process_time() - used) / seconds

    def close(self) -> None:
        self.transport.close()


def serve(worker: int) -> None:
    """Carries out commands that come as lines of JSON."""
    peer = Peer(worker)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(peer, name)(*arguments)), flush=True)


class Process:
    """A peer in a process of its own."""

    def __init__(self, worker: int) -> None:
        command = [sys.executable, "-m", "tests.guests.torture", "peer", str(worker)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError("the peer has died")
        return json.loads(line)

    def __call__(self, *command: Any) -> Any:
        self.start(*command)
        return self.answer()

    def state(self) -> str:
        with open(f"/proc/{self.process.pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]


class Other:
    """The main process of the other guest."""

    def __init__(self) -> None:
        own, host = int(os.environ["GUEST"]), os.environ["GUESTS"].split(",")[0]
        if own == 0:
            with socket.create_server((host, PORT)) as server:
                connection, _ = server.accept()
        else:
            while True:
                try:
                    connection = socket.create_connection((host, PORT), 5)
                    break
                except OSError:
                    time.sleep(0.2)
        self.connection = connection
        self.patience(LIMIT_S)
        # One file for both would lose what it has read ahead when something is written.
        self.reading: IO[str] = connection.makefile("r")
        self.writing: IO[str] = connection.makefile("w")

    def patience(self, seconds: float) -> None:
        self.connection.settimeout(seconds)

    def tell(self, what: Any) -> None:
        self.writing.write(json.dumps(what) + "\n")
        self.writing.flush()

    def hear(self) -> Any:
        line = self.reading.readline()
        if not line:
            raise EOFError("the other guest has gone")
        return json.loads(line)


def meet(worker: int, other: Other) -> Process:
    """Returns a new peer that is connected to the one of the other guest."""
    peer = Process(worker)
    other.tell(peer("address"))
    peer("connect", other.hear())
    return peer


def expected(seed: int, count: int) -> str:
    return digest(list(messages(seed, count)))


def say(text: str) -> None:
    print(f"{time.monotonic():7.2f} {text}", flush=True)


def sender(other: Other, count: int, deaths: int, seed: int) -> None:
    say("both send")
    peer = meet(0, other)
    peer("send", seed, count)
    got = peer("receive", count)
    assert got == expected(seed + 1, count), "what came from guest 1 is not what it sent"
    other.hear()

    say("the cable is cut")
    peer.start("send", seed, count)
    switch_interface(INTERFACE, False)
    time.sleep(3)
    switch_interface(INTERFACE, True)
    peer.answer()
    other.hear()

    say("the sender is stopped, and what it has published arrives")
    peer("send", seed, 1)
    peer("settle")
    published = peer("publish", seed + 2, 100_000)
    peer.start("stop_yourself")
    peer.answer()
    while peer.state() != "T":
        time.sleep(0.01)
    other.tell(published)
    other.hear()
    assert peer.state() == "T"
    os.kill(peer.process.pid, signal.SIGCONT)
    peer.answer()

    say("the sender dies in the middle, and its next process goes on")
    for _ in range(deaths):
        peer.start("send_for_ever", seed)
        peer.answer()
        other.hear()
        peer.process.kill()
        peer.process.wait()
        peer = Process(0)
        other.tell(peer("address"))
        peer("connect", other.hear())
    peer("send", seed + 3, count)
    other.hear()

    say("nobody sends")
    share = peer("idle", 2.0)
    say(f"an idle peer uses {100 * share:.1f} % of an emulated processor")
    peer("close")


def receiver(other: Other, count: int, deaths: int, seed: int) -> None:
    peer = meet(1, other)
    peer("send", seed + 1, count)
    assert peer("receive", count) == expected(seed, count), "what came from guest 0 is not what it sent"
    other.tell("all is there")

    peer("receive", 2 * count)
    twice = [*messages(seed, count), *messages(seed, count)]
    assert peer("digest_so_far") == digest(twice), "after a cut, what came from guest 0 is not what it sent"
    peer("begin_again")
    other.tell("all is there")

    peer("receive", 1)
    peer("idle", 0.1)  # now it has said that it waits for more
    published = other.hear()
    assert published > 5, published
    first = [*messages(seed, 1), *messages(seed + 2, published)]
    assert peer("receive", 1 + published) == digest(first)
    say(f"{published} messages have arrived from the stopped process")
    peer("begin_again")
    other.tell("all is there")

    for _ in range(deaths):
        peer("receive", min(200, 2 * count))
        other.tell("kill it")
        address = other.hear()
        peer("connect", address)
        other.tell(peer("address"))
    assert peer("receive", count) == expected(seed + 3, count), "what came from the next process is not what it sent"
    other.tell("all is there")
    peer("idle", 2.0)
    peer("close")


def main() -> None:
    if sys.argv[1:2] == ["peer"]:
        serve(int(sys.argv[2]))
        return
    torment(*map(int, sys.argv[1:]))


def torment(count: int = 400, seed: int = 1, deaths: int = 3) -> None:
    """Plays this guest's part."""
    part = sender if os.environ["GUEST"] == "0" else receiver
    part(Other(), count, deaths, seed)
    print("done", flush=True)


if __name__ == "__main__":
    main()
