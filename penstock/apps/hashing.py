"""Chance by number, for generators whose records must be the same whichever task makes them.

A record that depends on nothing but a seed and its number is made from words that `mixed` gives, one after the other.
What a word is must never change: the shipped data and the expectations of tests depend on it.
"""

from __future__ import annotations

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # the step of SplitMix64: multiples of it lie far apart


def mixed(word: int) -> int:
    """The output function of SplitMix64: every bit depends on the whole word."""
    word &= WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31
