"""A change of the limit that made things worse is undone once, and not tried again at such a load."""

from __future__ import annotations

import math

from penstock.runtime.multicast.limit_trials import LimitTrials


def trials() -> LimitTrials:
    return LimitTrials(10.0, 300.0, 0.1)


def test_a_scale_up_after_which_less_comes_through_is_undone() -> None:
    tried = trials()
    assert tried.undone(0.0, 2, 100.0) is None, "nothing was changed"
    tried.changed(1.0, 2, 4, 1_000.0)
    assert tried.undone(2.0, 4, 700.0) == 2
    assert tried.undone(2.1, 2, 600.0) is None, "to go back is no trial"


def test_a_load_that_grows_and_a_rate_that_is_off_by_chance_fail_no_limit() -> None:
    tried = trials()
    tried.changed(1.0, 2, 4, 1_000.0)
    assert tried.undone(2.0, 4, 1_200.0) is None
    assert tried.undone(3.0, 4, 920.0) is None
    assert not tried.refused(3.0, math.inf)


def test_a_change_is_on_trial_for_some_time_only() -> None:
    tried = trials()
    tried.changed(1.0, 2, 4, 1_000.0)
    assert tried.undone(11.5, 4, 700.0) is None
    tried.changed(20.0, 4, 3, 1_000.0)
    assert tried.undone(21.0, 2, 700.0) is None, "the limit is another one since"


def test_a_limit_that_failed_is_refused_at_such_a_rate_until_it_is_forgotten() -> None:
    tried = trials()
    tried.changed(1.0, 2, 4, 1_000.0)
    assert tried.undone(2.0, 4, 700.0) == 2
    assert tried.refused(3.0, 1_000.0) == {4}
    assert tried.refused(3.0, math.inf) == {4}
    assert tried.refused(3.0, 600.0) == set(), "a lower load may be carried"
    assert tried.refused(302.5, 1_000.0) == set()


def test_a_machine_that_is_busier_than_before_fails_no_limit() -> None:
    tried = trials()
    tried.changed(1.0, 4, 1, 1_000.0, 0.5)
    assert tried.undone(2.0, 1, 600.0, 0.3) is None
    assert tried.undone(3.0, 1, 600.0, 0.5) == 4
