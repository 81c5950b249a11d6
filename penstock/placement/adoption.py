"""Decides whether a new placement is worth the migrations from the running one (docs/papers.md: T12).

A migration costs each task that migrates a pause. So a new placement must be better by a margin, and must pay for the
pauses within `horizon_s`. It pays in processor time, or in latency: each record waits for a while in each hop between
workers, and longer in a hop between nodes, and what comes during a pause waits for its end. At a low rate records take
next to no processor time, and only their latency says which placement is better. What hops cost and how long they take
is measured while the job runs (`placement/hop_costs.py`, `placement/hop_latencies.py`).

After a migration the job is left alone for `rest_s`, because half of what is measured in that time still belongs to the
old placement. A placement is better when less traffic crosses between workers, or when it takes load from a worker that
has too much.

A job must never move to and fro between two placements while its load stays the same, also when what is measured is off
by a tenth. So `margin` is larger than what two such measurements can differ by in favour of either placement, and a
placement that is taken for its traffic must not make a worker so full that another placement is taken for its load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.placement.hop_costs import CORE_BYTES_PER_S, NODE_COST
from penstock.placement.hop_latencies import HopLatencies
from penstock.runtime.units import Seconds, number, number_above_zero

if TYPE_CHECKING:
    from penstock.placement.placement import Placement
    from penstock.placement.traffic import Bools, TrafficGraph

# A placement that is taken for its traffic may fill a worker up to this part of `busy`, or as far as one is full now.
_CALM = 0.8

# A worker gives tasks away when this takes more than so many cores off it.
_LESS_OVERLOAD = 0.1

# Tasks must exchange so many records that chance decides little. How much it decides is the sum of the roots of all
# rates over the sum of the rates: at 0.8, a quarter of what is measured in ten seconds is chance.
_CHANCE = 0.8

_ROUNDING = 1e-6


@dataclass(frozen=True)
class AdoptionOptions:
    """Says when a job moves its tasks. Defaults are in parentheses, and durations are in seconds, or timedeltas.

    `factor` (0.2): the part by which the measured load of a worker may be above its share, 0 or more.
    `margin` (0.2): the part of its costs that a job must save by a new placement, 0 or more. Above 1, no task moves
    for the sake of traffic.
    `horizon_s` (60): the time within which a new placement must pay for the migrations.
    `rest_s` (20): the time after a migration in which no task moves.
    `pause_s` (0.05): the pause of a task that migrates. 0.02 to 0.03 s were measured.
    `node_hop_s` (5e-05): how long a record waits between two workers of a node, until that is measured.
    `network_hop_s` (0.0002): how long a record waits between two nodes, until that is measured.
    `node_cost` (None): the cost of a byte between two nodes, relative to that of a byte between two workers of a node,
    0 or more. With None it is measured.
    `core_bytes_per_s` (None): the bytes a second that one core sends from worker to worker of a node, above 0. With
    None they are measured.
    `busy` (0.7): the number of cores that a worker must use before it gives tasks away, 0 or more. float("inf") means
    never.
    """

    factor: float = 0.2
    margin: float = 0.2
    horizon_s: Seconds = Seconds(60.0)
    rest_s: Seconds = Seconds(20.0)
    pause_s: Seconds = Seconds(0.05)
    node_hop_s: Seconds = Seconds(0.000_05)
    network_hop_s: Seconds = Seconds(0.000_2)
    node_cost: float | None = None
    core_bytes_per_s: float | None = None
    busy: float = 0.7

    def __post_init__(self) -> None:
        number(self.factor, "factor")
        number(self.margin, "margin", infinite=True)
        number(self.busy, "busy", infinite=True)
        if self.node_cost is not None:
            number(self.node_cost, "node_cost")
        if self.core_bytes_per_s is not None:
            number_above_zero(self.core_bytes_per_s, "core_bytes_per_s", ", or None: as measured")


@dataclass(frozen=True)
class Verdict:
    """Says whether to move tasks, with the reason for people."""

    adopt: bool
    reason: str
    moves: int = 0


def cost(placed: Placement, graph: TrafficGraph, node_cost: float) -> float:
    """Returns the cost of a placement: the bytes a second between workers of a node, plus `node_cost` times the bytes
    between nodes."""
    return graph.hop_cost(placed.worker_of, placed.node_of, node_cost)


def waiting(
    placed: Placement, records: TrafficGraph, options: AdoptionOptions, measured: HopLatencies | None = None
) -> float:
    """Returns how many records wait in hops at a time. `records` has records a second as traffic. `measured` says how
    long hops take, and `options` does so for the kinds of hops that have not been measured."""
    assumed = HopLatencies(0.0, options.node_hop_s, options.network_hop_s)
    hops = assumed if measured is None else measured.or_else(assumed)
    assert hops.worker is not None
    assert hops.node is not None
    assert hops.network is not None
    near = records.edge_cut(placed.worker_of)
    far = records.edge_cut(placed.node_of)
    inside = records.total_traffic - near
    return inside * hops.worker + (near - far) * hops.node + far * hops.network


def overload(placed: Placement, graph: TrafficGraph, options: AdoptionOptions) -> float:
    """Returns the number of cores of its node by which the fullest worker exceeds its limit. The result is 0 when that
    worker is not busy."""
    fullest = _fullest(placed, graph)
    if fullest < options.busy:
        return 0.0
    fair = graph.total_cpu / float(placed.worker_speeds.sum())
    return max(0.0, fullest - (1 + options.factor) * fair)


def room(running: Placement, graph: TrafficGraph, options: AdoptionOptions) -> float:
    """Returns by how much a new plan may fill nodes and workers above their shares (`plan`): as far as the options say,
    and not so far that `decide` would refuse the plan for a worker that is too full."""
    fair = graph.total_cpu / float(running.worker_speeds.sum())
    if not fair:
        return options.factor
    most = _fullest_allowed(running, graph, options) / fair * (1 - _ROUNDING)
    if 1 < len(running.nodes) < len(running.workers):
        most = math.sqrt(most)  # a worker may be above its share of a node that is above its own share
    return min(options.factor, max(0.0, most - 1))


def _fullest_allowed(running: Placement, graph: TrafficGraph, options: AdoptionOptions) -> float:
    """Returns how many cores of its node a worker may use in a placement that is taken for its traffic."""
    return max(_CALM * options.busy, _fullest(running, graph))


def _fullest(placed: Placement, graph: TrafficGraph) -> float:
    """Returns the cores of its node that the fullest worker uses. A slow node needs more of them for the same work."""
    loads = graph.loads(placed.worker_of, len(placed.workers)) / placed.worker_speeds
    return float(loads.max(initial=0.0))


def _at(tasks: Bools, records: TrafficGraph) -> float:
    """Returns how many records a second these tasks take in and put out."""
    records = records.pairs()
    starts = records.starts
    return float(tasks.repeat(starts[1:] - starts[:-1]) @ records.traffic)


def _certain(records: TrafficGraph) -> bool:
    """Returns whether tasks exchange enough records that the measurements are not mostly chance."""
    records = records.pairs()
    roots = float((records.traffic**0.5).sum())
    return roots <= _CHANCE * float(records.traffic.sum())


def resting(since_move_s: float | None, options: AdoptionOptions) -> Verdict | None:
    """Returns the verdict on a job that moved tasks this many seconds ago (None: never) and must still rest. None means
    that the verdict depends on the plan."""
    if since_move_s is None or since_move_s >= options.rest_s:
        return None
    return Verdict(False, f"{options.rest_s - since_move_s:.0f} s of rest are left after the last move")


def hopeless(
    running: Placement,
    graph: TrafficGraph,
    options: AdoptionOptions,
    node_cost: float,
    core_bytes_per_s: float,
    records: TrafficGraph,
    measured: HopLatencies | None = None,
) -> Verdict | None:
    """Returns the verdict on a job for which no plan could be worth the move of a single task, and otherwise None. The
    parameters are those of `decide`."""
    if overload(running, graph, options) > _LESS_OVERLOAD:
        return None
    saved_s = cost(running, graph, node_cost) / core_bytes_per_s * options.horizon_s
    waits_s = waiting(running, records, options, measured) * options.horizon_s
    if max(saved_s, waits_s) > options.pause_s:
        return None
    return Verdict(
        False, f"so little crosses that no plan could save the {options.pause_s:g} s for which a task that moves pauses"
    )


def decide(
    running: Placement,
    new: Placement,
    graph: TrafficGraph,
    options: AdoptionOptions,
    node_cost: float = NODE_COST,
    core_bytes_per_s: float = CORE_BYTES_PER_S,
    records: TrafficGraph | None = None,
    measured: HopLatencies | None = None,
) -> Verdict:
    """Decides whether a job should move from the placement `running` to `new`. `node_cost`, `core_bytes_per_s`: see
    HopCosts. `records` is the graph of the same tasks with records a second as traffic. Without it latency does not
    count. `measured`: see `waiting`."""
    moved = running.worker_of != new.worker_of
    moves = int(moved.sum())
    if not moves:
        return Verdict(False, "tasks run where they should")
    before, after = cost(running, graph, node_cost), cost(new, graph, node_cost)
    over, over_after = overload(running, graph, options), overload(new, graph, options)
    pause = moves * options.pause_s
    if over - over_after > _LESS_OVERLOAD:
        if (over - over_after) * options.horizon_s > pause:
            return Verdict(True, f"takes {over - over_after:.2f} cores off a worker that has too much", moves)
        return Verdict(False, f"{moves} moves cost more than a fairer load would bring", moves)
    if _fullest(new, graph) > _fullest_allowed(running, graph, options):
        return Verdict(False, "what crosses less would load a worker too much", moves)
    if after >= before:
        return Verdict(False, "no less traffic would cross by the new plan", moves)
    if after > (1 - options.margin) * before:
        saved = 1 - after / before
        return Verdict(False, f"{saved:.0%} less traffic is not worth a move (margin {options.margin:.0%})", moves)
    gain = (before - after) / core_bytes_per_s * options.horizon_s
    if gain < pause:
        saved_s = lost_s = 0.0
        if records is not None and _certain(records):
            waits, waits_after = (waiting(placed, records, options, measured) for placed in (running, new))
            saved_s = (waits - waits_after) * options.horizon_s
            lost_s = _at(moved, records) * options.pause_s**2 / 2
        if saved_s > max(lost_s, pause):
            return Verdict(
                True,
                f"{1 - after / before:.0%} less traffic crosses, and records wait {saved_s:.2g} s less in all in "
                f"{options.horizon_s:g} s, for {lost_s:.2g} s while tasks move",
                moves,
            )
        return Verdict(
            False, f"{moves} moves would cost {pause:.1f} s and save {gain:.2g} s in {options.horizon_s:g} s", moves
        )
    return Verdict(True, f"{1 - after / before:.0%} less traffic crosses", moves)
