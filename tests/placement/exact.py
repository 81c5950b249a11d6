"""The least traffic that any placement within the limits has: an integer programme, and brute force for a few tasks."""

from __future__ import annotations

import itertools

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from penstock.placement.balance import Limits, limits_of, pack
from penstock.placement.traffic import Ints, TrafficGraph


def limits(graph: TrafficGraph, places: int, factor: float) -> Limits:
    """What each of so many equal places may take."""
    fair, room = np.full(places, 1 / places), np.full(places, np.inf)
    return limits_of(graph, fair, factor, room, pack(graph, fair, room))


def fits(graph: TrafficGraph, at: Ints, limits: Limits) -> bool:
    """Whether no place has more CPU than it may."""
    return bool((graph.loads(at, len(limits.cpu)) <= limits.cpu * (1 + 1e-6)).all())


def edges_of(graph: TrafficGraph) -> list[tuple[int, int, float]]:
    """Each edge once."""
    return [
        (v, int(u), float(w))
        for v in range(len(graph))
        for u, w in zip(
            graph.neighbours[graph.starts[v] : graph.starts[v + 1]],
            graph.traffic[graph.starts[v] : graph.starts[v + 1]],
            strict=True,
        )
        if v < u
    ]


def least_cut(graph: TrafficGraph, limits: Limits, seconds: float = 60.0) -> float | None:
    """The traffic across of the best placement; None when it was not found, or not proved, in `seconds`.

    x[v, p] = 1: task v is at place p. z[e, p] >= x[v, p] - x[u, p] and the other way round, so that the sum over p of
    z[e, p] is 2 for an edge that is cut, and half of it counts. Places with equal limits can change names: the first
    task of any of them is at the first of them.
    """
    tasks, places = len(graph), len(limits.cpu)
    edges = edges_of(graph)
    first_z = tasks * places
    variables = first_z + len(edges) * places
    cost = np.zeros(variables)
    rows: list[tuple[dict[int, float], float, float]] = [
        ({v * places + p: 1.0 for p in range(places)}, 1.0, 1.0) for v in range(tasks)
    ]
    for p in range(places):
        rows.append(({v * places + p: float(graph.cpu[v]) for v in range(tasks)}, 0.0, float(limits.cpu[p])))
        if np.isfinite(limits.memory[p]):
            rows.append(({v * places + p: float(graph.memory[v]) for v in range(tasks)}, 0.0, float(limits.memory[p])))
    for e, (u, v, traffic) in enumerate(edges):
        for p in range(places):
            z = first_z + e * places + p
            cost[z] = traffic / 2
            for a, b in ((u, v), (v, u)):
                rows.append(({z: 1.0, a * places + p: -1.0, b * places + p: 1.0}, 0.0, np.inf))
    upper = np.ones(variables)
    if len(set(zip(limits.cpu, limits.memory, strict=True))) == 1 and graph.allowed is None:
        for v in range(min(tasks, places)):
            upper[v * places + v + 1 : (v + 1) * places] = 0
    if graph.allowed is not None:
        upper[:first_z][~graph.allowed.reshape(-1)] = 0
    at = [(i, j, value) for i, (row, _, _) in enumerate(rows) for j, value in row.items()]
    i, j, value = zip(*at, strict=True)
    integrality = np.zeros(variables)
    integrality[:first_z] = 1
    found = milp(
        cost,
        integrality=integrality,
        bounds=Bounds(0, upper),
        constraints=LinearConstraint(
            coo_array((value, (i, j)), shape=(len(rows), variables)).tocsr(),
            np.array([low for _, low, _ in rows]),
            np.array([high for _, _, high in rows]),
        ),
        options={"time_limit": seconds},
    )
    return float(found.fun) if found.status == 0 else None


def least_cut_by_force(graph: TrafficGraph, limits: Limits) -> float | None:
    """The same, by trying all placements; None when none is within the limits."""
    best: float | None = None
    for places in itertools.product(range(len(limits.cpu)), repeat=len(graph)):
        at = np.array(places, dtype=np.int64)
        if (graph.loads(at, len(limits.cpu)) <= limits.cpu * (1 + 1e-9)).all():
            memory = np.bincount(at, weights=graph.memory, minlength=len(limits.cpu))
            if (memory <= limits.memory).all():
                cut = graph.edge_cut(at)
                best = cut if best is None else min(best, cut)
    return best


def least_hop_cost_by_force(
    graph: TrafficGraph, workers: Limits, nodes: Limits, node_of: Ints, node_cost: float
) -> float | None:
    """The least that hops cost in any placement within the limits of the workers and of the nodes."""
    count, tasks = len(node_of), len(graph)
    at = np.array(list(itertools.product(range(count), repeat=tasks)))
    node_at = node_of[at]
    fit = np.ones(len(at), dtype=np.bool_)
    for places, limits in ((at, workers), (node_at, nodes)):
        for place, most in enumerate(limits.cpu):
            fit &= (places == place) @ graph.cpu <= most * (1 + 1e-9)
    costs = np.zeros(len(at))
    for u, v, traffic in edges_of(graph):
        apart = (at[:, u] != at[:, v]) + (node_cost - 1) * (node_at[:, u] != node_at[:, v])
        costs += traffic * apart
    return float(costs[fit].min()) if fit.any() else None


def least_cut_of_two(graph: TrafficGraph, limits: Limits) -> float:
    """The same for two places, quicker: all placements at once."""
    tasks = len(graph)
    sides = (np.arange(2**tasks)[:, None] >> np.arange(tasks)) & 1
    second = sides @ graph.cpu
    fit = (second <= limits.cpu[1] * (1 + 1e-9)) & (graph.total_cpu - second <= limits.cpu[0] * (1 + 1e-9))
    cuts = np.zeros(len(sides))
    for u, v, traffic in edges_of(graph):
        cuts += traffic * (sides[:, u] != sides[:, v])
    return float(cuts[fit].min())
