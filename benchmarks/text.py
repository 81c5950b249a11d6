"""The sentences that are counted: ten words each, of a Zipf vocabulary of 10,000; the same in every run."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np

WORDS_A_SENTENCE = 10
VOCABULARY = 10_000
_LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
_MARKED = 100  # one line in so many carries the word that grep looks for
NEEDLE = "penstock"


def vocabulary(seed: int = 1) -> list[str]:
    """10,000 different words; the i-th is drawn with a weight of 1 / (i + 1)."""
    chance = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < VOCABULARY:
        length = min(12, 2 + len(words) // 2000 + chance.randrange(6))
        words["".join(chance.choices(_LETTERS, k=length))] = None
    return list(words)


def sentences(count: int, seed: int = 1, marked: bool = False) -> list[str]:
    """Sentences; each begins with a capital, so that the key function has work. `marked`: some carry the needle."""
    words = np.array(vocabulary(seed), dtype=object)
    weights = 1.0 / np.arange(1, VOCABULARY + 1)
    chance = np.random.default_rng(seed)
    drawn = chance.choice(VOCABULARY, size=(count, WORDS_A_SENTENCE), p=weights / weights.sum())
    lines = [" ".join(row).capitalize() for row in words[drawn].tolist()]
    if marked:
        for i in range(_MARKED // 2, count, _MARKED):
            lines[i] = f"{lines[i][: len(lines[i]) // 2]} {NEEDLE} {lines[i][len(lines[i]) // 2 :]}"
    return lines


def write_text(folder: Path, lines: list[str], files: int = 2) -> list[str]:
    """The lines as `files` text files of equal numbers of lines, so that two readers can share them."""
    paths = []
    for i in range(files):
        path = folder / f"part-{i}.txt"
        part = lines[len(lines) * i // files : len(lines) * (i + 1) // files]
        path.write_text("\n".join(part) + "\n")
        paths.append(str(path))
    return paths


key = str.lower  # what words are counted by, in every system


def count_words(lines: list[str]) -> Counter[str]:
    """What the counts must be."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(map(key, line.split()))
    return counts
