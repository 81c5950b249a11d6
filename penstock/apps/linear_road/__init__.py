"""Linear Road (docs/papers.md: A10): the tolls of expressways, computed from the positions that their cars report.

`traffic.py` makes the input: cars that enter, move, stop in accidents and ask questions, by a seed.
"""
