"""The offset of another clock: the truth is always within what is said to be uncertain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.host.process.clock_offset import DRIFT_PPM, ClockOffset

delays = st.integers(0, 50_000_000)


def test_nothing_is_known_before_a_measurement() -> None:
    offset = ClockOffset()
    assert offset.now(1) is None
    offset.add(0, 1_000, 10)
    assert offset.now(10) == (995, 6)
    later_ns = 10_000_000_000
    assert offset.now(later_ns) == (995, 6 + later_ns * DRIFT_PPM // 1_000_000)
    offset.forget()
    assert offset.now(11) is None


@given(
    st.integers(-(10**18), 10**18),
    st.floats(-DRIFT_PPM, DRIFT_PPM),
    st.lists(st.tuples(delays, delays, st.integers(0, 10**10)), min_size=1, max_size=100),
)
def test_the_truth_is_within_the_uncertainty(ahead: int, drift: float, asked: list[tuple[int, int, int]]) -> None:
    """Whatever the two ways take, and however the clocks drift."""

    def theirs(ours: int) -> int:
        return ours + ahead + int(ours * drift / 1e6)

    offset, now = ClockOffset(), 0
    for there, back, pause in asked:
        offset.add(now, theirs(now + there), now + there + back)
        now += there + back + pause
        found = offset.now(now)
        assert found is not None
        assert abs(theirs(now) - now - found.ahead_ns) <= found.uncertainty_ns + 2  # int() rounds twice


@given(st.lists(st.tuples(delays, delays), min_size=2, max_size=50))
def test_the_quickest_answer_counts(asked: list[tuple[int, int]]) -> None:
    offset = ClockOffset()
    for there, back in asked:
        offset.add(0, there, there + back)
    found = offset.now(0)
    assert found is not None
    assert found.uncertainty_ns <= min(there + back for there, back in asked) // 2 + 2
