"""Decides whether a new placement is worth the migrations from the running one (docs/papers.md: T12).

A migration costs each task that migrates a pause. So a new placement must be better by a margin, and must pay for the
pauses within `horizon_s`. After a migration the job is left alone for `rest_s`, because half of what is measured in
that time still belongs to the old placement. A placement is better when less traffic crosses between workers, or when
it takes load from a worker that has too much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.placement.hop_costs import CORE_BYTES_PER_S, NODE_COST
from penstock.runtime.units import Seconds

if TYPE_CHECKING:
    from penstock.placement.placement import Placement
    from penstock.placement.traffic import TrafficGraph


@dataclass(frozen=True)
class AdoptionOptions:
    """Says when a job moves its tasks. Durations are in seconds, or timedeltas."""

    factor: float = 0.2  # by how much a worker may be above its share, as measured
    margin: float = 0.2  # the part of the cost that a new plan must save
    horizon_s: Seconds = Seconds(60.0)  # the time within which it must pay for the migrations
    rest_s: Seconds = Seconds(20.0)  # the time after a migration in which no other one is made
    pause_s: Seconds = Seconds(0.1)  # the pause of a task that migrates
    node_cost: float | None = None  # of traffic between nodes, relative to that between workers of one node (measured)
    core_bytes_per_s: float | None = None  # that a core takes from worker to worker of a node (measured)
    busy: float = 0.7  # cores: a worker with less has no reason to give tasks away


@dataclass(frozen=True)
class Verdict:
    """Says whether to move tasks, with the reason for people."""

    adopt: bool
    reason: str
    moves: int = 0


def cost(placed: Placement, graph: TrafficGraph, node_cost: float) -> float:
    """Returns what a placement costs: the bytes a second between workers of a node, plus `node_cost` times the bytes
    between nodes."""
    return graph.hop_cost(placed.worker_of, placed.node_of, node_cost)


def overload(placed: Placement, graph: TrafficGraph, options: AdoptionOptions) -> float:
    """Returns by how many cores the fullest worker exceeds what it may use. The result is 0 when that worker is not
    busy."""
    load = graph.loads(placed.worker_of, len(placed.workers))
    fullest = float(load.max(initial=0.0))
    if fullest < options.busy:
        return 0.0
    return max(0.0, fullest - (1 + options.factor) * float(load.mean()))


def resting(since_move_s: float | None, options: AdoptionOptions) -> Verdict | None:
    """Returns the verdict on a job that moved tasks so many seconds ago (None: never) and must still rest. None means
    that the verdict depends on the plan."""
    if since_move_s is None or since_move_s >= options.rest_s:
        return None
    return Verdict(False, f"{options.rest_s - since_move_s:.0f} s of rest are left after the last move")


def decide(
    running: Placement,
    new: Placement,
    graph: TrafficGraph,
    options: AdoptionOptions,
    node_cost: float = NODE_COST,
    core_bytes_per_s: float = CORE_BYTES_PER_S,
) -> Verdict:
    """Decides whether a job should move from the placement `running` to `new`. The last two: see HopCosts."""
    moves = int((running.worker_of != new.worker_of).sum())
    if not moves:
        return Verdict(False, "tasks run where they should")
    before, after = cost(running, graph, node_cost), cost(new, graph, node_cost)
    over, over_after = overload(running, graph, options), overload(new, graph, options)
    pause = moves * options.pause_s
    if over - over_after > 0.1:
        if (over - over_after) * options.horizon_s > pause:
            return Verdict(True, f"takes {over - over_after:.2f} cores off a worker that has too much", moves)
        return Verdict(False, f"{moves} moves cost more than a fairer load would bring", moves)
    if over_after > over + 0.1:
        return Verdict(False, "what crosses less would load a worker too much", moves)
    if after > (1 - options.margin) * before:
        saved = 1 - after / before if before else 0.0
        return Verdict(False, f"{saved:.0%} less traffic is not worth a move (margin {options.margin:.0%})", moves)
    gain = (before - after) / core_bytes_per_s * options.horizon_s
    if gain < pause:
        return Verdict(
            False, f"{moves} moves would cost {pause:.1f} s and save {gain:.2g} s in {options.horizon_s:g} s", moves
        )
    return Verdict(True, f"{1 - after / before:.0%} less traffic crosses", moves)
