"""The ring between processes that die, stop and come back. (The native torture does this a thousand times more.)"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.runtime.transport.ring import ConsumerDied, Ring, RingBusy, RingGone

Child = subprocess.Popen[str]
Start = Callable[[Ring, str], Child]


def line(child: Child) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def die(child: Child) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()


def test_messages_cross_processes(ring: Ring, python: Start) -> None:
    consumer = ring.consumer()
    code = "p = ring.producer()\nfor i in range(2000): p.write(%d, i.to_bytes(4, 'big'))"
    children = [python(ring, code % n) for n in range(3)]
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while sum(map(len, got.values())) < 6000:
        for target, payload in consumer.drain(timeout=None):
            got[target].append(int.from_bytes(payload, "big"))
    assert all(numbers == list(range(2000)) for numbers in got.values())
    assert [c.wait() for c in children] == [0, 0, 0]
    assert ring.stats().producers == 0


def test_a_killed_consumers_place_is_taken_over(ring: Ring, python: Start) -> None:
    producer = ring.producer()
    for payload in (b"1", b"2", b"3"):
        producer.write(0, payload)
    reader = python(ring, "c = ring.consumer()\nc.drain(1)\nsay(len(c.drain(1)))\nsignal.pause()")
    assert line(reader) == "1"
    with pytest.raises(RingBusy, match=f"process {reader.pid}"):
        ring.consumer()
    die(reader)
    with ring.consumer() as consumer:
        assert [bytes(p) for _, p in consumer.drain()] == [b"2", b"3"]


def test_a_writer_learns_that_the_consumer_died(ring: Ring, python: Start) -> None:
    producer = ring.producer()
    reader = python(ring, "c = ring.consumer()\nsay('here')\nsignal.pause()")
    assert line(reader) == "here"
    while producer.try_write(0, bytes(1000)):
        pass
    die(reader)
    with pytest.raises(ConsumerDied, match=f"process {reader.pid}"):
        producer.write(0, bytes(1000))
    with ring.consumer() as consumer:
        consumer.drain()
        consumer.release()
        producer.write(0, bytes(1000))


# A producer that dies in the middle of its copy: the payload's memory is gone, and reading it is a SIGBUS.
DIES_WRITING = """
import mmap, tempfile
p = ring.producer()
p.write(1, b"whole")
f = tempfile.TemporaryFile()
f.truncate(8192)
gone = mmap.mmap(f.fileno(), 8192)
f.truncate(0)
p.write(2, gone)
"""


@pytest.mark.parametrize("followed", [True, False])
def test_what_a_dead_producer_was_writing_is_skipped_and_reported(ring: Ring, python: Start, followed: bool) -> None:
    child = python(ring, DIES_WRITING)
    assert child.wait() == -signal.SIGBUS
    other = ring.producer()
    if followed:
        other.write(3, b"later")
    with ring.consumer() as consumer:
        got, skips = [], []
        while not skips:
            got += [(t, bytes(p)) for t, p in consumer.drain(timeout=None)]  # returns for a skip, too
            skips += consumer.skips()
        assert got == [(1, b"whole"), (3, b"later")][: 1 + followed]
        assert [(s.producer_pid, s.bytes) for s in skips] == [(child.pid, 8192)]
        assert "producer_pid" in repr(skips[0])
        assert consumer.skips() == []
        consumer.release()
        assert ring.stats().used_slots == 0
    assert ring.stats().skips == 1


def test_a_skip_that_was_not_released_is_reported_to_the_successor(ring: Ring, python: Start) -> None:
    assert python(ring, DIES_WRITING).wait() == -signal.SIGBUS
    for _ in range(2):
        with ring.consumer() as consumer:
            while not (skips := consumer.skips()):
                consumer.drain(timeout=None)
            assert len(skips) == 1
            consumer.close()


def test_a_slot_in_dead_hands_is_kept_until_the_consumer_has_seen_it(ring: Ring, python: Start) -> None:
    assert python(ring, DIES_WRITING).wait() == -signal.SIGBUS
    others = [ring.producer() for _ in range(254)]
    with pytest.raises(RingBusy):
        ring.producer()  # the dead one's place names the owner of a slot still in the ring
    with ring.consumer() as consumer:
        while not consumer.skips():
            consumer.drain(timeout=None)
        consumer.release()
    ring.producer().close()
    assert len(others) == 254


def test_the_address_ends_with_its_last_holder(python: Start) -> None:
    with Ring.create(4096) as ring:
        child = python(ring, "say(ring.address)\nsignal.pause()")
        address = line(child)
        ring.producer().write(0, b"still here")
    with Ring.attach(address) as again, again.consumer() as consumer:
        assert [bytes(p) for _, p in consumer.drain()] == [b"still here"]
    die(child)
    with pytest.raises(RingGone):
        Ring.attach(address)


def test_a_killed_process_leaves_nothing(python: Start, small_tmpfs: Path) -> None:
    with Ring.create(4096) as ring:
        code = f"big = Ring.create(512 * 1024, directory={str(small_tmpfs)!r})\nsay('made')\nsignal.pause()"
        for _ in range(3):  # the second would not fit beside the first
            child = python(ring, code)
            assert line(child) == "made"
            assert list(small_tmpfs.iterdir()) == []
            die(child)


def test_an_idle_consumer_sleeps(ring: Ring, python: Start) -> None:
    code = """
c = ring.consumer()
before = os.times()
c.drain(timeout=2)
after = os.times()
say(after.user + after.system - before.user - before.system)
"""
    assert float(line(python(ring, code))) <= 0.1  # of 2 s; it counts in steps of 10 ms
