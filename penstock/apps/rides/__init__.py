"""Ride-hailing (docs/papers.md: W9): the nearest driver for each passenger who asks for one.

`city.py` makes the locations of drivers and the requests of passengers by a seed.
"""
