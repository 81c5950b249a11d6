"""Plans for large graphs beside METIS at the same balance, plans for the paper's topologies, plans with the costs of
hops beside those without, and how planning grows with the tasks; see README.md."""

from __future__ import annotations

import random
import time

import numpy as np

import penstock as ps
from benchmarks.common import Bench, median
from penstock.apps import sol, throughput
from penstock.placement.assignment import assign
from penstock.placement.baselines import jstorm, metis_parts, round_robin, turbostream
from penstock.placement.multilevel import partition
from penstock.placement.placement import workers_of
from penstock.placement.planner import node_by_node, plan
from penstock.placement.shape import TrafficEdge
from penstock.placement.topology import of_plan
from penstock.placement.traffic import Node, TrafficGraph

FACTOR = 0.05
NODES = (4, 16)
#: Nodes and workers of all entries of the TurboStream paper's Table II.
DEPLOYMENTS = ((8, 8), (4, 8), (2, 8), (1, 1), (4, 4), (2, 4), (2, 2), (1, 2))
SIZES = (100, 300, 1_000, 3_000, 10_000)


def layers(chance: random.Random, tasks: int) -> list[TrafficEdge]:
    """A large streaming job: operators of 8 to 24 tasks, fed by shuffles or task by task by one of the last three."""
    components: list[range] = []
    made = 0
    while made < tasks:
        width = min(chance.randint(8, 24), tasks - made)
        components.append(range(made, made + width))
        made += width
    edges: list[TrafficEdge] = []
    for number, component in enumerate(components[1:], 1):
        feeding = components[max(0, number - chance.randint(1, 3))]
        traffic = chance.expovariate(1) + 0.05
        if chance.random() < 0.4:
            edges += [(feeding[i % len(feeding)], task, 4 * traffic) for i, task in enumerate(component)]
        else:
            edges += [(a, b, traffic / len(component) * chance.uniform(0.5, 2)) for b in component for a in feeding]
    return edges


def near(chance: random.Random, tasks: int) -> list[TrafficEdge]:
    """Points of a square that talk to those around them, about eight each: a partitioner's home ground."""
    points = [(chance.random(), chance.random()) for _ in range(tasks)]
    reach = (8 / 3.14159 / tasks) ** 0.5
    cells: dict[tuple[int, int], list[int]] = {}
    for v, (x, y) in enumerate(points):
        cells.setdefault((int(x / reach), int(y / reach)), []).append(v)
    edges: list[TrafficEdge] = []
    for (a, b), here in cells.items():
        around = [v for da in (-1, 0, 1) for db in (-1, 0, 1) for v in cells.get((a + da, b + db), ())]
        for u in here:
            edges += [
                (u, v, chance.uniform(0.5, 2))
                for v in around
                if u < v and (points[u][0] - points[v][0]) ** 2 + (points[u][1] - points[v][1]) ** 2 < reach**2
            ]
    return edges


def grown(chance: random.Random, tasks: int) -> list[TrafficEdge]:
    """Each task talks to three of those before it: no good parts to find, the hardest of the three."""
    return [(chance.randrange(v), v, chance.expovariate(1)) for v in range(1, tasks) for _ in range(3)]


FAMILIES = {"layers": layers, "near": near, "grown": grown}


def run(bench: Bench) -> None:
    """See the module. A round is a seed of each family; 30 seeds, or six times --runs."""
    seeds = bench.pick(6 * bench.runs, 1)
    sizes = bench.pick((1_000, 10_000), (200,))
    for tasks in sizes:
        for nodes in NODES:
            ratios: dict[str, list[float]] = {}
            times: dict[str, list[float]] = {}
            over: dict[str, list[float]] = {}
            for seed in range(seeds):
                for family, make in FAMILIES.items():
                    graph = TrafficGraph.of(tasks, make(random.Random(seed), tasks))
                    fair = np.full(nodes, 1 / nodes)
                    theirs = metis_parts(graph, fair, FACTOR, seed)
                    reached = float(graph.loads(theirs, nodes).max() * nodes / tasks) - 1
                    began = time.perf_counter()
                    ours = partition(graph, fair, max(FACTOR, reached), seed=seed)
                    times.setdefault(family, []).append(time.perf_counter() - began)
                    ratios.setdefault(family, []).append(_over(graph.edge_cut(ours), graph.edge_cut(theirs)))
                    over.setdefault(family, []).append(float(graph.loads(ours, nodes).max() * nodes / tasks) - 1)
                bench.say(f"{tasks} tasks, {nodes} nodes: {seed + 1} of {seeds} seeds")
            for family in FAMILIES:
                config = f"{tasks} tasks ({family}) on {nodes} nodes, {seeds} seeds"
                bench.case(
                    f"cut traffic over METIS, {family}, {tasks} tasks, {nodes} nodes",
                    median(ratios[family]),
                    "x",
                    goal="<= 1",
                    config=config,
                    note=f"worst {max(ratios[family]):.3f}; fullest node {median(over[family]):+.1%} at a factor of "
                    f"{FACTOR:.0%}; METIS: the best of recursive and k-way within the same balance",
                    runs=ratios[family],
                )
                bench.case(
                    f"planning, {family}, {tasks} tasks, {nodes} nodes",
                    median(times[family]),
                    "s",
                    goal="< 1" if tasks <= 1_000 else "< 10",
                    config=config,
                    note=f"slowest {max(times[family]):.2f} s",
                    runs=times[family],
                )
    _papers_deployments(bench)
    _over_nodes(bench)
    _growth(bench)


def _over(figure: float, peer: float) -> float:
    """The ratio of two figures; 1 when both are 0, as of a graph in which no hop is needed."""
    return 1.0 if figure == peer else figure / peer


def _papers_deployments(bench: Bench) -> None:
    """What the off-line plans let across between nodes, on the deployments of the paper's Table II."""
    for name in ("SOL", "Throughput"):
        for nodes, workers in DEPLOYMENTS:
            source = ps.sources.Generator(int, 1)
            flow = sol.topology(source, levels=5, tasks=5) if name == "SOL" else throughput.topology(source)
            flow.parallelism = workers
            topology = of_plan(flow.plan(workers))
            graph, at = topology.graph, [Node(f"n{place}", workers // nodes) for place in range(nodes)]
            found = {
                "turbostream": turbostream(topology, at),
                "traffic": plan(graph, at),
                "jstorm": jstorm(topology, at),
                "round-robin": round_robin(topology, at),
            }
            for method, placed in found.items():
                bench.case(
                    f"part of the traffic that crosses nodes, {name} {nodes}N{workers}W, {method}",
                    placed.between_nodes(graph) / graph.total_traffic,
                    "",
                    peer="round-robin",
                    peer_figure=found["round-robin"].between_nodes(graph) / graph.total_traffic,
                    goal="<= 1" if method in {"turbostream", "traffic"} else None,
                    config=f"{len(topology)} tasks, traffic by the shape of the flow",
                    note=f"fullest node {placed.imbalance(graph):+.0%}",
                )


def _over_nodes(bench: Bench) -> None:
    """Plans that know what hops cost beside those that assign tasks to nodes first, and then to workers."""
    seeds = bench.pick(3 * bench.runs, 1)
    nodes = [Node("a", 2), Node("b", 2)]
    node_of = np.array(workers_of(nodes))
    for tasks in bench.pick((30, 100), (30,)):
        for node_cost in (1.5, 2.5, 4.0):
            for family, make in FAMILIES.items():
                costs: list[float] = []
                crossing, crossed = 0.0, 0.0  # between nodes
                for seed in range(seeds):
                    graph = TrafficGraph.of(tasks, make(random.Random(seed), tasks))
                    _, first = node_by_node(graph, nodes, factor=FACTOR, seed=seed, tasks=tasks, running=None)
                    found = plan(graph, nodes, factor=FACTOR, node_cost=node_cost, seed=seed)
                    before = graph.hop_cost(first, node_of[first], node_cost)
                    costs.append(_over(graph.hop_cost(found.worker_of, found.node_of, node_cost), before))
                    crossing += found.between_nodes(graph)
                    crossed += graph.edge_cut(node_of[first])
                bench.case(
                    f"cost of hops over that node by node, {family}, {tasks} tasks, between nodes {node_cost:g}",
                    median(costs),
                    "x",
                    goal="<= 1",
                    config=f"{tasks} tasks on 2 nodes of 2 workers, {seeds} seeds; a hop between nodes: {node_cost:g}",
                    note=f"{min(costs):.3f} to {max(costs):.3f}; traffic between nodes {_over(crossing, crossed):.2f}x",
                    runs=costs,
                )


def _growth(bench: Bench) -> None:
    """Seconds by tasks, beside the paper's own algorithm without its threshold."""
    series: dict[str, list[tuple[float, float]]] = {name: [] for name in [*FAMILIES, "the paper's Algorithm 2 alone"]}
    fair = np.full(4, 0.25)
    for tasks in bench.pick(SIZES, (100, 200)):
        for family, make in FAMILIES.items():
            graph = TrafficGraph.of(tasks, make(random.Random(1), tasks))
            began = time.perf_counter()
            partition(graph, fair, FACTOR)
            series[family].append((tasks, time.perf_counter() - began))
        if tasks <= 1_000:
            graph = TrafficGraph.of(tasks, layers(random.Random(1), tasks))
            began = time.perf_counter()
            assign(graph, fair, FACTOR / 4, tasks)
            series["the paper's Algorithm 2 alone"].append((tasks, time.perf_counter() - began))
    bench.plot("placement_plans.png", "planning for 4 nodes", series, "tasks", "seconds", log_x=True, log_y=True)
    for name, points in series.items():
        (first, quick), (last, slow) = points[0], points[-1]
        bench.case(
            f"growth, {name}",
            float(np.log(slow / quick) / np.log(last / first)),
            "power of the tasks",
            config=f"{first:g} to {last:g} tasks, 4 nodes",
            note=f"{quick:.2g} s to {slow:.2g} s",
        )
