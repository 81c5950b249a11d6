"""Some inputs of the campaign that fuzzes decoders (tests/heads/fuzz.py)."""

from __future__ import annotations

import random

from tests.heads import fuzz


def test_whatever_comes_is_refused_or_is_what_it_says() -> None:
    seed = random.randrange(1 << 40)
    outcomes = fuzz.run(seed, 4000, 0)
    assert {name for name, _ in outcomes} == {target.name for target in fuzz.TARGETS}


def test_what_was_not_changed_is_taken() -> None:
    taken = {"signal", "decoded", "pickled", "members", "tree", "head", "frames", "answered", "no proof"}
    rng = random.Random(1)
    with fuzz.nothing_is_unpickled() as code:
        for target in (fuzz.Messages(), fuzz.Relayed(), fuzz.Frames(), fuzz.Acknowledgements(), fuzz.Peers()):
            for _ in range(100):
                data = target.valid(rng)
                if isinstance(target, fuzz.Frames):
                    assert fuzz.Frames._model(data, fuzz.LARGEST_BODY)[2] is False
                    continue
                assert target.look(rng, data, code) in taken, (target.name, data.hex())
