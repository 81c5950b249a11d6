"""Searches all trees of the right shape for the one with the fewest changes of parents (least_change.py).

The search fills the places from the first to the last. It gives up a beginning from which nothing better than the best
solution can come, and of nodes that differ in their names only it tries one. It ends when its effort ends, so it finds
the best answer for some ten nodes, and for more nodes when the solution with which it begins is nearly right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runtime.multicast.change_problem import Problem


class Search:
    """Fills the places in all ways that may keep more parents than the best way found."""

    def __init__(self, problem: Problem, first: list[int], bound: int, effort: int) -> None:
        """`bound`: the most nodes that can keep their parent. `effort`: how many places may be filled."""
        self.best = first
        self._p = problem
        self._most = problem.kept(first)
        self._end = bound
        self._effort = effort
        self._occupants = [problem.root]
        self._placed = {problem.root}
        self._unplaced_kids = {node: len(kids) for node, kids in problem.kids.items()}
        self._fill(0)

    def _fill(self, kept: int) -> None:
        p = self._p
        place = len(self._occupants)
        if place == p.full:
            kept += len(p.last_layer(self._occupants)[0])
            if kept > self._most:
                self._most, self.best = kept, list(self._occupants)
            return
        if kept + self._bound(place) <= self._most:
            return
        above, units = self._occupants[p.above[place]], p.layer[place]
        for node in self._candidates(above, units):
            if not self._effort or self._most >= self._end:
                return
            self._effort -= 1
            parent = p.parent.get(node)
            self._occupants.append(node)
            self._placed.add(node)
            if parent is not None:
                self._unplaced_kids[parent] -= 1
            self._fill(kept + (parent == above))
            if parent is not None:
                self._unplaced_kids[parent] += 1
            self._placed.remove(node)
            self._occupants.pop()

    def _bound(self, place: int) -> int:
        """The most nodes that can still keep their parent when the places from `place` on are open."""
        p = self._p
        units = p.layer[place]
        total = 0
        # A node in a place may have one child in each of the layers that are still open to it.
        for at, node in enumerate(self._occupants):
            if kids := self._unplaced_kids[node]:
                end = min(p.layer[at] + p.limit, p.units)
                start = max(units, p.layer[at] + 1)
                if start == units and at < p.above[place]:
                    start += 1  # places of one layer are filled in the order of the places above them
                total += max(0, min(kids, end - start + 1))
        degrees = sorted((self._unplaced_kids[node] for node in p.nodes if node not in self._placed), reverse=True)
        for degree, at in zip(degrees, range(place, p.full), strict=False):
            if not degree:
                break
            total += min(degree, p.limit, p.units - p.layer[at])
        return total

    def _candidates(self, above: int, units: int) -> list[int]:
        """The nodes to try in a place, the most promising first; of nodes that are alike, one."""
        p = self._p
        shapes: dict[int, int] = {}
        numbers: dict[tuple[int, ...], int] = {}
        for node in reversed(p.nodes):
            if node not in self._placed:
                below = tuple(sorted(shapes[kid] for kid in p.kids[node] if kid not in self._placed))
                shapes[node] = numbers.setdefault(below, len(numbers))
        found: dict[tuple[int | None, int], int] = {}
        for node in p.nodes:
            if node not in self._placed:
                found.setdefault((p.parent.get(node), shapes[node]), node)
        return sorted(
            found.values(),
            key=lambda node: (p.parent.get(node) != above, p.old_layer[node] != units, -p.weight[node]),
        )
