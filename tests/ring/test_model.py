"""The ring against a model: two deques, and a clear idea of what room is."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.runtime.transport.ring import Message, Ring

CAPACITY, SLOTS, LEND_FROM = 1024, 8, 128


class RingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring.create(CAPACITY, slots=SLOTS)
        self.producers = [self.ring.producer(), self.ring.producer()]
        self.consumer = self.ring.consumer(zero_copy_min=LEND_FROM)
        self.number = self.written = 0
        self.waiting: deque[tuple[int, bytes]] = deque()  # written, not drained
        self.copies: list[tuple[int, bytes]] = []  # drained as bytes, not released
        self.lent: list[tuple[int, bytes, Message]] = []

    def teardown(self) -> None:
        self.lent.clear()
        self.consumer.close()
        self.ring.close()

    @rule(size=st.integers(0, CAPACITY // 2), who=st.integers(0, 1), parts=st.booleans())
    def write(self, size: int, who: int, parts: bool) -> None:
        self.number += 1
        payload = bytes([self.number % 256]) * size
        producer = self.producers[who]
        if parts:
            written = producer.try_write_parts(self.number, [payload[: size // 3], payload[size // 3 :]])
        else:
            written = producer.try_write(self.number, payload)
        if not written and not (self.waiting or self.copies or self.lent):
            # Full with nothing in it but, at most, a flush that the next drain releases.
            assert self.consumer.drain() == []
            written = producer.try_write(self.number, payload)
            assert written
        if written:
            self.written += 1
            self.waiting.append((self.number, payload))

    @rule(most=st.integers(1, 10))
    def drain(self, most: int) -> None:
        self.copies.clear()
        got = self.consumer.drain(most)
        assert len(got) == min(most, len(self.waiting))
        for target, payload in got:
            expected = self.waiting.popleft()
            assert (target, bytes(payload)) == expected
            if isinstance(payload, Message):
                assert len(expected[1]) >= LEND_FROM
                self.lent.append((*expected, payload))
            else:
                assert len(expected[1]) < LEND_FROM
                self.copies.append(expected)

    @rule()
    def release(self) -> None:
        self.consumer.release()
        self.copies.clear()

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), forget=st.booleans())
    def give_back(self, data: st.DataObject, forget: bool) -> None:
        _, payload, message = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
        assert bytes(message) == payload
        if not forget:
            message.release()

    @rule()
    def replace_the_consumer(self) -> None:
        again = sorted([*self.copies, *((t, p) for t, p, _ in self.lent)])
        self.consumer.close()
        self.consumer = self.ring.consumer(zero_copy_min=LEND_FROM)
        self.waiting.extendleft(reversed(again))
        self.copies.clear()
        self.lent.clear()

    @invariant()
    def lent_messages_are_untouched(self) -> None:
        assert all(bytes(message) == payload for _, payload, message in self.lent)

    @invariant()
    def counts_agree(self) -> None:
        stats = self.ring.stats()
        assert stats.written == self.written
        assert stats.used_slots >= len(self.waiting) + len(self.copies) + len(self.lent)
        assert stats.used_bytes <= CAPACITY


TestRing = RingMachine.TestCase
TestRing.settings = settings(stateful_step_count=60)
