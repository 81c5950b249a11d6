"""Shows the result of `penstock plan`: the tasks of each node, the traffic between nodes, and the same for other
methods of placement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from penstock.placement.placement import Placement
from penstock.placement.topology import Topology

if TYPE_CHECKING:
    from rich.table import Table

# The picture, in pixels.
_WORKER_WIDTH, _GAP, _LINE, _HEAD = 190, 16, 17, 26
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")


def comparison(topology: Topology, placements: Mapping[str, Placement]) -> Table:
    """Returns one row for each placement: the traffic between places, and how even the load is."""
    from rich.table import Table

    table = Table(title="placements of the same tasks on the same nodes", title_justify="left")
    table.add_column("placement", no_wrap=True)
    for column in ("between nodes", "of all", "between workers", "intra-node share", "fullest node"):
        table.add_column(column, justify="right")
    graph = topology.graph
    total = graph.total_traffic or 1.0
    for name, placed in placements.items():
        across = placed.between_nodes(graph)
        table.add_row(
            name,
            f"{across:.4g}",
            f"{across / total:.1%}",
            f"{placed.between_workers(graph):.4g}",
            f"{placed.intra_node_share(graph):.1%}",
            f"{placed.imbalance(graph):+.1%}",
        )
    return table


def by_node(topology: Topology, placed: Placement) -> Iterable[str]:
    """Returns the tasks of each worker of each node, and the traffic that each node sends and receives."""
    graph = topology.graph
    for place, node in enumerate(placed.nodes):
        here = placed.node_of == place
        across = graph.edge_cut(here.astype(np.int64))
        yield f"{node.name}: {int(here.sum())} tasks, {across:.4g} of traffic with other nodes"
        for worker, of in enumerate(placed.workers):
            if of == place:
                names = [topology.names[task] for task, there in enumerate(placed.tasks) if there == worker]
                yield f"  worker {worker}: {', '.join(_folded(names)) or '(nothing)'}"


def _folded(names: Sequence[str]) -> list[str]:
    """Joins the names of the tasks of one component: ["bolt[0]", "bolt[2]"] becomes ["bolt[0,2]"]."""
    together: dict[str, list[str]] = {}
    for name in names:
        component, _, index = name.rpartition("[")
        together.setdefault(component, []).append(index.rstrip("]"))
    return [f"{component}[{','.join(indices)}]" for component, indices in together.items()]


def picture(topology: Topology, placed: Placement, title: str) -> str:
    """Draws the plan as an SVG. A node is a box, and a worker is a box inside it with its tasks, coloured by component.
    Lines between nodes are as wide as the traffic between them."""
    graph = topology.graph
    tasks = {w: [t for t, there in enumerate(placed.tasks) if there == w] for w in range(len(placed.workers))}
    tallest = max((len(them) for them in tasks.values()), default=0)
    height = _HEAD + _LINE * max(1, tallest) + _GAP
    left: list[float] = []
    x = float(_GAP)
    shapes: list[str] = []
    top = 2 * _GAP + _HEAD
    for place, node in enumerate(placed.nodes):
        mine = [w for w, of in enumerate(placed.workers) if of == place]
        width = len(mine) * (_WORKER_WIDTH + _GAP) + _GAP
        left.append(x + width / 2)
        shapes.append(_box(x, top, width, height + _HEAD + _GAP, "#f4f4f4", escape(node.name)))
        for number, worker in enumerate(mine):
            at = x + _GAP + number * (_WORKER_WIDTH + _GAP)
            shapes.append(_box(at, top + _HEAD, _WORKER_WIDTH, height, "#ffffff", f"worker {worker}"))
            for row, task in enumerate(tasks[worker]):
                y = top + 2 * _HEAD + row * _LINE
                colour = _COLOURS[topology.components[task] % len(_COLOURS)]
                shapes.append(f'<rect x="{at + 8:g}" y="{y:g}" width="10" height="10" fill="{colour}"/>')
                shapes.append(_text(at + 24, y + 9, escape(_short(topology.names[task])), 11))
        x += width + _GAP
    bottom = top + height + _HEAD + _GAP
    lines, depth = _lines(topology, placed, left, bottom)
    crossing = f"{title}: {placed.between_nodes(graph):.4g} of {graph.total_traffic:.4g} cross between nodes"
    head = _text(_GAP, _GAP + 10, escape(crossing), 14)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{x:g}" height="{bottom + depth + _GAP:g}" '
        f'font-family="sans-serif">\n' + "\n".join([head, *shapes, *lines]) + "\n</svg>\n"
    )


def _lines(topology: Topology, placed: Placement, left: Sequence[float], y: float) -> tuple[list[str], float]:
    """Draws arcs below the nodes, as wide as the traffic between two nodes, and returns them with their depth."""
    graph, found, deepest = topology.graph, [], 0.0
    between: dict[tuple[int, int], float] = {}
    for a in range(len(left)):
        for b in range(a + 1, len(left)):
            both = np.where(placed.node_of == a, 0, np.where(placed.node_of == b, 1, 2))
            part = graph.part(np.flatnonzero(both < 2))
            between[a, b] = part.edge_cut(both[both < 2])
    most = max(between.values(), default=0.0) or 1.0
    for (a, b), traffic in between.items():
        if traffic:
            depth = 20.0 + (left[b] - left[a]) / 6
            deepest = max(deepest, depth)
            middle = (left[a] + left[b]) / 2
            found.append(
                f'<path d="M {left[a]:g} {y:g} Q {middle:g} {y + 2 * depth - 10:g} {left[b]:g} {y:g}" fill="none" '
                f'stroke="#888" stroke-opacity="0.6" stroke-width="{1 + 7 * traffic / most:.1f}"/>'
            )
            found.append(_text(middle, y + depth - 2, f"{traffic:.3g}", 11))
    return found, deepest + 10


def _box(x: float, y: float, width: float, height: float, fill: str, label: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="#999"/>'
        + _text(x + 8, y + 17, label, 12)
    )


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}">{text}</text>'


def _short(name: str, most: int = 26) -> str:
    """Shortens the name of a task and keeps its end, which has the index."""
    return name if len(name) <= most else name[: most - 12] + "..." + name[-9:]
