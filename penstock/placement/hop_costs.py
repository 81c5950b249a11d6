"""What it costs to pass records on: inside a worker, between two workers of a node, and between nodes (docs/papers.md:
T10, T12).

The workers of a job over several machines measure this while they work (`runtime/transport/hop_meter.py`), and
`HopCosts.of` puts their reports together. Planning only needs how much a hop between nodes costs more than one between
two workers of a node, `node_cost`. Messages of like size are compared, because a small message costs more for each
byte, and one kind of hop may have the smaller ones.
"""

from __future__ import annotations

#: The cost of traffic between nodes, relative to traffic between workers of one node, until it is measured.
NODE_COST = 4.0
