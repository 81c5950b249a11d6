"""The paradigm scheduler in the simulated cluster: in some seeds of the campaign everything happens that it is for."""

from __future__ import annotations

from collections import Counter

from tests.epochs.campaign import run_seed
from tests.epochs.sim import faults_of


def test_the_seeds_with_a_scheduler_switch_and_lose_spark_and_change_the_plan() -> None:
    seeds = [seed for seed in range(50, 100) if faults_of(seed).paradigms is not None]
    assert len(seeds) > 3
    counts = Counter[str]()
    for seed in seeds:
        counts += run_seed(seed)
    for what in (
        "Sparks",
        "switches to Spark",
        "answers",
        "deaths of Spark",
        "silences of Spark",
        "messages to divert",
        "messages to undivert",
        "messages to take_sample",
        "samples",
        "trials",
        "rescales",
        "master kills",
        "pauses",
    ):
        assert counts[what], f"{what}: none in seeds {seeds}"
    assert counts["kills"] > 10
