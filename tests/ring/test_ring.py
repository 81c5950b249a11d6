"""The ring's API in one process: what each call does, and each error."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from penstock.runtime.errors import PenstockError
from penstock.runtime.transport import ring as ring_module
from penstock.runtime.transport.ring import (
    Consumer,
    Message,
    MessageTooLarge,
    Ring,
    RingBusy,
    RingClosed,
    RingError,
    RingForked,
    RingFull,
    RingGone,
    RingNoSpace,
    Wait,
    recommended_capacity,
)


def all_of(consumer: Consumer) -> list[tuple[int, bytes]]:
    out = []
    while batch := consumer.drain():
        out += [(target, bytes(payload)) for target, payload in batch]
    return out


# ---- writing and reading


def test_messages_come_out_in_order_with_their_targets(ring: Ring) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    sent = [(i * 7919 % 2**32, bytes([i % 256]) * (i * 13 % 200)) for i in range(300)]
    for target, payload in sent:
        assert producer.try_write(target, payload)
    assert all_of(consumer) == sent


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda b: memoryview(b).cast("B", (2, 3))])
def test_any_contiguous_buffer_is_a_payload(ring: Ring, make) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    assert producer.try_write(0, make(b"abcdef"))
    producer.write(0, make(b"abcdef"))
    assert all_of(consumer) == [(0, b"abcdef")] * 2


def test_what_is_no_payload_or_target_is_refused_and_nothing_is_written(ring: Ring) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    with pytest.raises(TypeError):
        producer.try_write(0, "text")
    with pytest.raises(BufferError):
        producer.try_write(0, memoryview(b"abcdef")[::2])
    with pytest.raises(TypeError):
        producer.try_write("0", b"")
    for target in (-1, 2**32, 2**64):
        with pytest.raises(OverflowError):
            producer.try_write(target, b"")
    with pytest.raises(TypeError):
        producer.try_write(0)
    with pytest.raises(TypeError):
        producer.write(0, b"", tmeout=1)
    with pytest.raises(TypeError):
        producer.try_write_parts(0, [b"a", "b"])
    assert all_of(consumer) == []
    assert ring.stats().written == 0


def test_parts_become_one_message(ring: Ring) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    assert producer.try_write_parts(1, [b"ab", memoryview(b"cd"), b"", bytearray(b"e")])
    producer.write_parts(2, (), timeout=1)
    assert all_of(consumer) == [(1, b"abcde"), (2, b"")]


def test_wrapping_keeps_every_message_whole() -> None:
    with Ring.create(4096) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        for i in range(2000):
            payload = bytes([i % 251]) * (i * 37 % 2049)
            assert producer.try_write(i, payload)
            assert all_of(consumer) == [(i, payload)]
        assert ring.stats().flushes > 100


def test_drain_takes_at_most_what_was_asked(ring: Ring) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    for _ in range(10):
        producer.write(0, b"x")
    assert [len(consumer.drain(4)) for _ in range(4)] == [4, 4, 2, 0]


# ---- full


def test_full_is_an_answer_and_room_comes_with_release(ring: Ring) -> None:
    producer, consumer = ring.producer(), ring.consumer(zero_copy_min=None)
    big = bytes(ring.max_message)
    assert producer.try_write(0, big)
    assert producer.try_write(0, big)
    assert not producer.try_write(0, b"x")
    assert len(consumer.drain()) == 2
    assert not producer.try_write(0, b"x")  # drained is not released
    consumer.release()
    assert producer.try_write(0, big)


def test_write_gives_up_after_its_timeout(ring: Ring) -> None:
    producer = ring.producer()
    producer.write(0, bytes(ring.max_message))
    producer.write(0, bytes(ring.max_message))
    with pytest.raises(RingFull, match="no room for a message of 5 bytes within"):
        producer.write(0, b"abcde", timeout=0.01)
    with pytest.raises(RingFull):
        producer.write(0, b"abcde", 0)
    with pytest.raises(ValueError, match="timeout"):
        producer.write(0, b"abcde", timeout=-1)


def test_a_writer_that_waits_is_woken_by_release() -> None:
    with Ring.create(1024) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        writer = threading.Thread(target=lambda: [producer.write(i, bytes(300)) for i in range(500)])
        writer.start()
        got: list[int] = []
        while len(got) < 500:
            got += [target for target, _ in consumer.drain(timeout=None)]
        writer.join()
        assert got == list(range(500))


def test_the_room_of_a_flush_alone_does_not_wait_for_a_message() -> None:
    """A writer waits for room that only the flush at the end holds, while the reader waits for that writer."""
    with Ring.create(1024) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        got: list[int] = []

        def read() -> None:
            while len(got) < 400:
                got.extend(target for target, _ in consumer.drain(timeout=None))

        reader = threading.Thread(target=read)
        reader.start()
        for i in range(400):
            producer.write(i, bytes(512 - 16 * (i % 5)))
        reader.join()
        assert got == list(range(400))


def test_a_message_that_can_never_fit_names_the_remedy(ring: Ring) -> None:
    producer = ring.producer()
    size = ring.max_message + 1
    for write in (
        lambda: producer.try_write(0, bytes(size)),
        lambda: producer.write(0, bytes(size)),
        lambda: producer.try_write_parts(0, [bytes(size - 1), b"x"]),
        lambda: producer.write_parts(0, [b"", bytes(size)]),
    ):
        with pytest.raises(MessageTooLarge, match=f"{size} bytes.*up to {size - 1}.*capacity=131072"):
            write()
    assert ring.stats().written == 0


# ---- zero copy


def test_large_messages_are_lent_and_hold_their_room() -> None:
    with Ring.create(4096) as ring:
        producer, consumer = ring.producer(), ring.consumer(zero_copy_min=1000)
        for i in range(3):
            producer.write(i, bytes([i]) * 1000)
        lent = [m for _, m in consumer.drain()]
        assert all(isinstance(m, Message) for m in lent)
        assert consumer.drain() == []  # releases copies, not these
        assert [bytes(m) for m in lent] == [bytes([i]) * 1000 for i in range(3)]
        assert [len(m) for m in lent] == [1000] * 3
        with pytest.raises((TypeError, ValueError)):
            lent[0].view()[0] = 1  # type: ignore[index]
        gc.collect()
        assert not producer.try_write(9, bytes(1500))
        lent[2].release()
        lent[1].release()
        lent[1].release()
        assert not producer.try_write(9, bytes(1500))  # the first still holds the left edge
        del lent[0]
        assert producer.try_write(9, bytes(1500))
        with pytest.raises(BufferError, match="released"):
            bytes(lent[0])
        assert ring.stats().used_slots == 2  # a flush and the new one


def test_a_view_keeps_its_message(ring: Ring) -> None:
    producer, consumer = ring.producer(), ring.consumer(zero_copy_min=1)
    producer.write(0, b"hello")
    ((_, message),) = consumer.drain()
    view = message.view()
    with pytest.raises(BufferError, match="still in use"):
        message.release()
    with pytest.raises(BufferError, match="still in use"):
        consumer.close()
    del message
    gc.collect()
    assert ring.stats().used_slots == 1
    assert view == b"hello"
    view.release()
    del view
    gc.collect()
    assert ring.stats().used_slots == 0


def test_a_closed_consumers_messages_cannot_be_read(ring: Ring) -> None:
    producer, consumer = ring.producer(), ring.consumer(zero_copy_min=1)
    producer.write(0, b"hello")
    ((_, message),) = consumer.drain()
    consumer.close()
    with pytest.raises(BufferError):
        bytes(message)
    with ring.consumer() as successor:
        assert all_of(successor) == [(0, b"hello")]


def test_held_and_copied_messages_may_be_released_in_any_order(ring: Ring) -> None:
    producer, consumer = ring.producer(), ring.consumer(zero_copy_min=100)
    held = {}
    for lap in range(300):
        producer.write(lap, bytes(100 if lap % 3 else 50))
        held.update({target: message for target, message in consumer.drain() if isinstance(message, Message)})
        if lap % 7 == 0:
            for target in list(held)[::-2]:
                held.pop(target).release()
    held.clear()
    assert consumer.drain() == []
    assert ring.stats().used_slots == 0


def test_giving_back_a_message_frees_the_flush_before_it() -> None:
    with Ring.create(1024) as ring:
        producer, consumer = ring.producer(), ring.consumer(zero_copy_min=400)
        producer.write(0, bytes(36 * 16 // 2))
        producer.write(0, bytes(36 * 16 // 2))
        assert len(consumer.drain()) == 2
        consumer.release()
        assert producer.try_write(1, bytes(449))  # after a flush of the 28 units at the end
        ((_, message),) = consumer.drain()
        assert not producer.try_write(2, bytes(113))
        message.release()
        assert producer.try_write(2, bytes(113))


# ---- waiting


@pytest.mark.parametrize("wait", [Wait.SLEEP, Wait.DEFAULT, Wait.SPIN, Wait(max_spin_us=10, adaptive=False)])
def test_a_waiting_consumer_is_woken_by_a_message(ring: Ring, wait: Wait) -> None:
    producer, consumer = ring.producer(), ring.consumer(wait)
    go = threading.Barrier(2)

    def write() -> None:
        for i in range(50):
            go.wait()
            producer.write(i, bytes(i * 200))

    writer = threading.Thread(target=write)
    writer.start()
    for i in range(50):
        go.wait()
        ((target, payload),) = consumer.drain(timeout=None)
        assert (target, len(payload)) == (i, i * 200)
    writer.join()


def test_drain_ends_with_its_timeout(ring: Ring) -> None:
    consumer = ring.consumer()
    assert consumer.drain(timeout=0.02) == []
    with pytest.raises(ValueError, match="timeout"):
        consumer.drain(timeout=-1)


def test_wake_ends_the_wait_now_or_next(ring: Ring) -> None:
    consumer = ring.consumer()
    ring.wake()
    assert consumer.drain(timeout=None) == []
    other = threading.Thread(target=Ring.attach(ring.address).wake)
    other.start()
    assert consumer.drain(timeout=None) == []
    other.join()


def test_a_consumer_is_for_one_thread_at_a_time(ring: Ring) -> None:
    consumer = ring.consumer()
    thread = threading.Thread(target=lambda: consumer.drain(timeout=None))
    thread.start()

    def until_refused() -> None:
        while True:
            consumer.drain()

    with pytest.raises(RingBusy, match="one thread at a time"):
        until_refused()
    with pytest.raises(RingBusy, match="wake it"):
        consumer.close()
    ring.wake()
    thread.join()
    consumer.close()


def test_wait_policies_are_checked() -> None:
    with pytest.raises(ValueError, match="max_spin_us"):
        Wait(max_spin_us=-1)


# ---- places


def test_one_consumer_at_a_time(ring: Ring) -> None:
    with ring.consumer(), pytest.raises(RingBusy, match=f"process {os.getpid()}"):
        ring.consumer()
    ring.consumer().close()


def test_a_successor_gets_what_was_drained_and_not_released(ring: Ring) -> None:
    producer = ring.producer()
    for payload in (b"1", b"2", b"3", b"4"):
        producer.write(0, payload)
    with ring.consumer() as first:
        assert len(first.drain(1)) == 1
        assert len(first.drain(2)) == 2  # releases the one before
    with ring.consumer() as second:
        assert [p for _, p in all_of(second)] == [b"2", b"3", b"4"]
    with ring.consumer() as third:
        assert all_of(third) == []


def test_what_was_released_out_of_order_does_not_come_again(ring: Ring) -> None:
    producer = ring.producer()
    for target, payload in enumerate([b"held" * 10, b"copy"] * 2):
        producer.write(target, payload)
    consumer = ring.consumer(zero_copy_min=20)
    lent = [p for _, p in consumer.drain() if isinstance(p, Message)]
    consumer.release()
    lent[1].release()
    consumer.close()
    with ring.consumer() as successor:
        assert [t for t, _ in all_of(successor)] == [0]
    assert ring.stats().used_slots == 0


def test_producers_places_are_limited_and_come_free(ring: Ring) -> None:
    producers = [ring.producer() for _ in range(255)]
    with pytest.raises(RingBusy, match="255"):
        ring.producer()
    producers[100].close()
    ring.producer().write(0, b"x")
    assert ring.stats().producers == 254  # that one is gone again


# ---- handles


def test_closed_handles_say_so(ring: Ring) -> None:
    producer, consumer = ring.producer(), ring.consumer()
    producer.close()
    consumer.close()
    producer.close()
    consumer.close()
    for call in (
        lambda: producer.try_write(0, b""),
        lambda: producer.write(0, b""),
        lambda: producer.try_write_parts(0, []),
        lambda: producer.write_parts(0, []),
        consumer.drain,
        consumer.release,
        consumer.skips,
    ):
        with pytest.raises(RingClosed):
            call()
    ring.close()
    for call in (ring.producer, ring.consumer, ring.wake, ring.stats, lambda: ring.address):
        with pytest.raises(RingClosed):
            call()


def test_producers_and_consumers_outlive_the_handle() -> None:
    with Ring.create(4096) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        address = ring.address
    producer.write(1, b"x")
    assert all_of(consumer) == [(1, b"x")]
    with pytest.raises(RingGone):
        Ring.attach(address)


def test_stats_count(ring: Ring) -> None:
    producer = ring.producer()
    producer.write(0, bytes(10))
    producer.write(0, bytes(30))
    stats = ring.stats()
    assert (stats.written, stats.bytes) == (2, 40)
    assert (stats.used_slots, stats.used_bytes) == (2, 16 + 32)
    assert (stats.producers, stats.consumer_pid, stats.delivered) == (1, None, 0)
    with ring.consumer() as consumer:
        consumer.drain()
        assert ring.stats().consumer_pid == os.getpid()
        assert ring.stats().delivered == 2


def test_nothing_ever_stands_in_the_directory(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR))
    except OSError as error:
        pytest.skip(f"no O_TMPFILE in {tmp_path}: {error}")
    with Ring.create(4096, directory=str(tmp_path)) as ring, Ring.attach(ring.address) as other:
        other.producer().write(0, b"x")
        assert list(tmp_path.iterdir()) == []


def test_rings_that_cannot_be_made(tmp_path: Path) -> None:
    for capacity in (0, -1, 1000, 512, 3 * 2**20, 2**40, 2**70):
        with pytest.raises(RingError, match="capacity"):
            Ring.create(capacity)
    for slots in (0, 4, 100, 2**30):
        with pytest.raises(RingError, match="slots"):
            Ring.create(4096, slots=slots)
    with pytest.raises(RingError, match="No such file"):
        Ring.create(4096, directory=str(tmp_path / "none"))


def test_no_space_names_the_sizes(small_tmpfs: Path) -> None:
    with pytest.raises(RingNoSpace, match=r"a ring of 2097152 bytes.* free of 1048576.*smaller capacity \(ring_bytes"):
        Ring.create(2 * 1024 * 1024, directory=str(small_tmpfs))
    Ring.create(64 * 1024, directory=str(small_tmpfs)).close()


def test_addresses_that_are_no_ring(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content in (b"", bytes(100_000)):
        file.write_bytes(content)
        with pytest.raises(RingGone, match="not a ring"):
            Ring.attach(str(file))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RingGone, match="not a ring"):
        Ring.attach(str(tmp_path / "pipe"))
    with pytest.raises(RingGone, match="No such file"):
        Ring.attach(f"/proc/{os.getpid()}/fd/99999")


@pytest.mark.parametrize(
    ("offset", "text"),
    [(0, "not a ring"), (8, "same release"), (12, "same release"), (16, "damaged"), (32, "damaged"), (40, "namespace")],
)
def test_a_head_that_does_not_fit_is_told_apart(ring: Ring, tmp_path: Path, offset: int, text: str) -> None:
    content = bytearray(Path(ring.address).read_bytes())
    content[offset] ^= 1
    (tmp_path / "copy").write_bytes(content)
    with pytest.raises(RingError, match=text):
        Ring.attach(str(tmp_path / "copy"))


def test_handles_do_not_work_across_a_fork(ring: Ring) -> None:
    producer, consumer = ring.producer(), ring.consumer(zero_copy_min=1)
    producer.write(0, b"x")
    ((_, message),) = consumer.drain()
    pid = os.fork()
    if pid == 0:
        bad = 1
        try:
            for call in (lambda: producer.try_write(0, b""), consumer.drain, ring.stats, ring.producer, ring.wake):
                with pytest.raises(RingForked, match="attach"):
                    call()
            with pytest.raises(BufferError):
                bytes(message)
            producer.close()
            consumer.close()
            with Ring.attach(ring.address) as mine:
                mine.producer().write(1, b"from the child")
            ring.close()
            bad = 0
        finally:
            os._exit(bad)
    assert os.waitpid(pid, 0)[1] == 0
    assert bytes(message) == b"x"
    assert [(t, bytes(p)) for t, p in consumer.drain()] == [(1, b"from the child")]
    assert producer.try_write(0, b"")


# ---- sizes, errors


def test_recommended_capacity_is_fifty_to_a_hundred_messages() -> None:
    for size in (6000, 10_000, 40_000, 100_000, 1_000_000, 2_684_354):
        capacity = recommended_capacity(size)
        assert capacity & (capacity - 1) == 0
        assert 50 * size <= capacity <= 100 * size
    assert recommended_capacity(0) == recommended_capacity(100) == 256 * 1024
    assert recommended_capacity(1e9) == 256 * 1024 * 1024
    with pytest.raises(ValueError, match="negative"):
        recommended_capacity(-1)


def test_every_error_is_in_the_tree_and_says_what_it_is() -> None:
    errors = [e for e in vars(ring_module).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len([e for e in errors if issubclass(e, RingError)]) == 9
    for error in errors:
        assert issubclass(error, PenstockError)
        assert error.__doc__
