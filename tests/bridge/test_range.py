"""The switch range: the paper's figure, forks, unions and ends, and what holds on any graph."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bridge.range import Crosses, NoRange, SwitchRange, Vertex, switch_range


def anything(name: str) -> str | None:
    return None


def all_but(**reasons: str) -> Crosses:
    return reasons.get


def chain(*magnifications: float, arrived: float = 100.0) -> list[Vertex]:
    """Operations 1, 2, ... of these magnifications."""
    vertices = []
    for number, magnification in enumerate(magnifications, 1):
        following = (str(number + 1),) if number < len(magnifications) else ()
        vertices.append(
            Vertex(str(number), following, records_in=arrived, records_out=arrived * magnification, source=number == 1)
        )
        arrived *= magnification
    return vertices


def found(result: SwitchRange | NoRange) -> SwitchRange:
    assert isinstance(result, SwitchRange), result
    return result


# Figure 7: 100 -> 800 -> 500 -> 500 -> 50 -> ...; operation 1 is an operator that multiplies, behind a source.
FIGURE_7 = [
    Vertex("read", ("1",), records_in=100, records_out=100, source=True),
    Vertex("1", ("2",), records_in=100, records_out=800),
    Vertex("2", ("3",), records_in=800, records_out=500),
    Vertex("3", ("4",), records_in=500, records_out=500),
    Vertex("4", ("5",), records_in=500, records_out=50),
    Vertex("5", ("write",), records_in=50, records_out=50),
    Vertex("write", records_in=50, sink=True),
]


def test_figure_7_of_the_paper() -> None:
    result = found(switch_range(FIGURE_7, "2", anything))
    assert result.operators == ("2", "3", "4")
    assert result.reason == "'5' is handed 0.5 of what came, below 1"


def test_a_lower_bound_than_the_paper_s_makes_a_longer_range() -> None:
    result = found(switch_range(FIGURE_7, "2", anything, below=0.5))
    assert result.operators == ("2", "3", "4", "5")
    assert result.reason == "before 'write': it is a sink, and commits by epochs"


def test_an_operator_with_no_batch_form_ends_the_range_earlier() -> None:
    result = found(switch_range(FIGURE_7, "2", all_but(**{"4": "its state cannot be split"})))
    assert result.operators == ("2", "3")
    assert result.reason == "before '4': its state cannot be split"


def test_a_switch_point_with_no_batch_form_has_no_range() -> None:
    result = switch_range(FIGURE_7, "2", all_but(**{"2": "it is a process function"}))
    assert result == NoRange("'2' cannot cross: it is a process function")
    assert switch_range(FIGURE_7, "write", anything) == NoRange(
        "'write' cannot cross: it is a sink, and commits by epochs"
    )


def test_without_measurements_the_range_goes_on_to_where_it_must_end() -> None:
    bare = [Vertex("a", ("b",), source=True), Vertex("b", ("c",)), Vertex("c", ("d",)), Vertex("d", sink=True)]
    assert found(switch_range(bare, "b", anything)).operators == ("b", "c")


def test_a_mergeable_operator_is_the_last_of_its_range() -> None:
    words = [
        Vertex("read", ("split",), records_in=10, records_out=10, source=True),
        Vertex("split", ("count",), records_in=10, records_out=100),
        Vertex("count", ("top",), records_in=100, records_out=100, mergeable=True),
        Vertex("top", ("write",)),
        Vertex("write", sink=True),
    ]
    result = found(switch_range(words, "split", anything))
    assert result.operators == ("split", "count")
    assert result.reason == "before 'top': the state of 'count' stays with the record tasks"
    assert found(switch_range(words, "count", anything)).operators == ("count",)


def test_a_mergeable_end_can_be_taken_in_though_it_is_handed_less() -> None:
    yahoo = [
        Vertex("read", ("parse",), records_in=90, records_out=90, source=True, hands_columns=True),
        Vertex("parse", ("views",), records_in=90, records_out=90),
        Vertex("views", ("count",), records_in=90, records_out=30),
        Vertex("count", ("write",), records_in=30, records_out=1, mergeable=True),
        Vertex("write", sink=True),
    ]
    assert found(switch_range(yahoo, "parse", anything)).operators == ("read", "parse", "views")
    absorbed = found(switch_range(yahoo, "parse", anything, absorb_ends=True))
    assert absorbed.operators == ("read", "parse", "views", "count")


def test_branches_of_a_fork_end_each_for_itself() -> None:
    fork = [
        Vertex("a", ("p",), records_in=10, records_out=10, source=True),
        Vertex("p", ("few", "many"), records_in=10, records_out=20),
        Vertex("few", ("x",), records_in=20, records_out=2),
        Vertex("x", ("w1",)),
        Vertex("many", ("y",), records_in=20, records_out=40),
        Vertex("y", ("w2",)),
        Vertex("w1", sink=True),
        Vertex("w2", sink=True),
    ]
    result = found(switch_range(fork, "p", anything))
    assert set(result.operators) == {"p", "few", "many", "y"}


def diamond(left: float, right: float, other: tuple[str, ...] = ()) -> list[Vertex]:
    """p forks to two operators of these magnifications, which join in a union; `other` feeds the union as well."""
    return [
        Vertex("a", ("p",), records_in=10, records_out=10, source=True),
        *(Vertex(name, ("union",), source=True) for name in other),
        Vertex("p", ("left", "right"), records_in=10, records_out=10),
        Vertex("left", ("union",), records_in=10, records_out=10 * left),
        Vertex("right", ("union",), records_in=10, records_out=10 * right),
        Vertex("union", ("w",), records_in=10, records_out=10),
        Vertex("w", sink=True),
    ]


def test_a_union_within_is_handed_the_sum_of_its_branches() -> None:
    assert "union" in found(switch_range(diamond(0.6, 0.6), "p", anything)).operators
    less = found(switch_range(diamond(0.4, 0.4), "p", anything))
    assert "union" not in less.operators


def test_a_union_with_an_input_from_outside_is_where_the_range_ends() -> None:
    result = found(switch_range(diamond(1, 1, ("b",)), "p", anything))
    assert set(result.operators) == {"p", "left", "right"}
    assert result.reason == "before 'union': 'b', which is not in the range, feeds it too"


def test_partial_results_merge_with_what_comes_from_outside_the_range() -> None:
    vertices = [
        Vertex("read", ("p",), source=True),
        Vertex("other", ("count",), source=True),
        Vertex("p", ("count",)),
        Vertex("count", ("write",), mergeable=True),
        Vertex("write", sink=True),
    ]
    assert found(switch_range(vertices, "p", anything)).operators == ("p", "count")


def test_a_branch_that_cannot_cross_keeps_the_union_out() -> None:
    """Or records would leave the range and come back."""
    result = found(switch_range(diamond(1, 1), "p", all_but(left="no batch form")))
    assert set(result.operators) == {"p", "right"}


def test_the_switch_point_may_be_a_union() -> None:
    vertices = [
        Vertex("a", ("p",), records_in=10, records_out=10, source=True),
        Vertex("m", ("p",), records_in=10, records_out=50),
        Vertex("b", ("m",), records_in=10, records_out=10, source=True),
        Vertex("p", ("f",), records_in=60, records_out=60),
        Vertex("f", ("g",), records_in=60, records_out=15),
        Vertex("g", ("w",), records_in=15, records_out=15),
        Vertex("w", sink=True),
    ]
    # 60 came from operators that took 20: p is handed 3, g 0.75.
    assert found(switch_range(vertices, "p", anything)).operators == ("p", "f")


def test_a_used_side_output_has_no_batch_form_unless_said() -> None:
    def flow(cross: bool) -> list[Vertex]:
        return [
            Vertex("a", ("p",), source=True),
            Vertex("p", ("q",)),
            Vertex("q", ("w",), ("late",), side_outputs_cross=cross),
            Vertex("late", ("w2",)),
            Vertex("w", sink=True),
            Vertex("w2", sink=True),
        ]

    assert found(switch_range(flow(False), "p", anything)).reason == (
        "before 'q': its side output to 'late' has no batch form"
    )
    crossing = found(switch_range(flow(True), "p", anything))
    assert crossing.operators == ("p", "q")
    assert "before 'late': a side output of 'q' feeds it" in crossing.reason


def test_sources_that_hand_over_columns_go_in_front() -> None:
    def flow(*columns: bool, tap: bool = False) -> list[Vertex]:
        sources = [
            Vertex(f"s{i}", ("p", "tap") if tap else ("p",), source=True, hands_columns=able)
            for i, able in enumerate(columns)
        ]
        return [*sources, Vertex("p", ("w",)), Vertex("tap", ("w",)), Vertex("w", sink=True)]

    assert found(switch_range(flow(True), "p", anything)).operators == ("s0", "p")
    both = found(switch_range(flow(True, True), "p", anything))
    assert both.operators == ("s0", "s1", "p")
    assert found(switch_range(flow(True, False), "p", anything)).operators == ("p",)
    assert found(switch_range(flow(True, tap=True), "p", anything)).operators == ("p",)


def test_a_source_as_switch_point_means_what_it_feeds() -> None:
    result = found(switch_range(chain(1, 2, 0.1, 1), "1", anything))
    assert result.operators == ("2", "3")
    fork = [Vertex("s", ("a", "b"), source=True), Vertex("a"), Vertex("b")]
    assert switch_range(fork, "s", anything) == NoRange("source 's' feeds 2 operators: a range begins at one")
    shared = [Vertex("s", ("a",), source=True), Vertex("t", ("a",), source=True), Vertex("a")]
    assert isinstance(switch_range(shared, "s", anything), NoRange)


def test_what_is_not_a_flow_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no operator 'x'; there are: a"):
        switch_range([Vertex("a")], "x", anything)
    with pytest.raises(ValueError, match="cycle, 'a' -> 'b' -> 'a'"):
        switch_range([Vertex("a", ("b",)), Vertex("b", ("a",))], "a", anything)
    with pytest.raises(ValueError, match="'a' feeds 'b', which is not among"):
        switch_range([Vertex("a", ("b",))], "a", anything)


# --- what holds on any graph ---------------------------------------------------------------------------------------


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[float], int]:
    magnifications = draw(st.lists(st.sampled_from([0.1, 0.3, 0.5, 0.9, 1.0, 1.5, 4.0]), min_size=2, max_size=9))
    return magnifications, draw(st.integers(2, len(magnifications)))


@given(chains())
def test_on_a_chain_it_is_equation_8(drawn: tuple[list[float], int]) -> None:
    magnifications, p = drawn
    product = 1.0 if p == 2 else magnifications[p - 2]  # operation 1 is the source, which multiplies nothing
    q = p
    while True:
        product *= magnifications[q - 1]
        if product < 1 - 1e-12 or q == len(magnifications):
            break
        if abs(product - 1) < 1e-9:
            return  # rounding decides
        q += 1
    result = found(switch_range(chain(*magnifications), str(p), anything))
    assert result.operators == tuple(str(n) for n in range(p, q + 1))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Vertex], str, set[str]]:
    """A graph without cycles, a switch point that is no source, and operators with no batch form."""
    size = draw(st.integers(3, 10))
    names = [f"n{i}" for i in range(size)]
    feeds: dict[str, list[str]] = {name: [] for name in names}
    side: dict[str, list[str]] = {name: [] for name in names}
    sources = draw(st.integers(1, min(3, size - 1)))
    for i in range(sources, size):
        for j in draw(st.lists(st.integers(0, i - 1), min_size=1, max_size=3, unique=True)):
            (side if draw(st.integers(0, 9)) == 0 else feeds)[names[j]].append(names[i])
    vertices = []
    for i, name in enumerate(names):
        vertices.append(
            Vertex(
                name,
                tuple(feeds[name]),
                tuple(side[name]),
                records_in=draw(st.sampled_from([0, 100])),
                records_out=draw(st.sampled_from([0, 10, 50, 100, 130, 800])),
                source=i < sources,
                sink=not feeds[name] and not side[name] and draw(st.booleans()),
                mergeable=i >= sources and draw(st.integers(0, 4)) == 0,
                hands_columns=i < sources and draw(st.booleans()),
                side_outputs_cross=draw(st.booleans()),
            )
        )
    point = draw(st.sampled_from(names[sources:]))
    barred = set(draw(st.lists(st.sampled_from(names), max_size=2)))
    return draw(st.permutations(vertices)), point, barred


@given(graphs())
def test_on_any_graph(drawn: tuple[list[Vertex], str, set[str]]) -> None:
    vertices, point, barred = drawn
    crosses: Crosses = lambda name: "barred" if name in barred else None
    by_name = {vertex.name: vertex for vertex in vertices}
    after = {v.name: {*v.successors, *v.side_successors} for v in vertices}
    before = {name: {other for other in after if name in after[other]} for name in after}

    def reachable(start: set[str], within: set[str]) -> set[str]:
        seen: set[str] = set()
        todo = list(start)
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += after[name] & within
        return seen

    def able(name: str) -> bool:
        vertex = by_name[name]
        side = bool(vertex.side_successors) and not vertex.side_outputs_cross
        return not (vertex.source or vertex.sink or name in barred or side)

    result = switch_range(vertices, point, crosses)
    if isinstance(result, NoRange):
        assert not able(point)
        return
    sources = {name for name in result.operators if by_name[name].source}
    core = set(result.operators) - sources
    assert point in core
    assert all(able(name) for name in core)

    # one piece, behind the switch point, entered there only: save for partial results, which merge with anything
    assert reachable({point}, core) == core
    passing = {name for name in core if not by_name[name].mergeable}
    assert all(before[name] <= core for name in passing - {point})

    # convex: what is on a way from the range to the range is in it
    everything = set(by_name)
    outside_behind = reachable({n for name in core for n in after[name] - core}, everything)
    assert not any(after[name] & passing for name in outside_behind)

    # the order is the flow's
    position = {name: i for i, name in enumerate(result.operators)}
    assert all(position[name] < position[n] for name in position for n in after[name] if n in position)

    # Equation 8: within are those that are handed 1 or more, and nothing beyond that could be
    taken = given = 0.0
    for feeding in before[point]:
        vertex = by_name[feeding]
        if point in vertex.successors:
            taken += vertex.records_out if vertex.source else vertex.records_in
            given += vertex.records_out if vertex.source or vertex.records_in > 0 else 0.0
    volume = {point: given / taken if taken > 0 else 1.0}

    def handed(name: str) -> float:
        return sum(volume[f] * by_name[f].magnification for f in before[name] & core if name in by_name[f].successors)

    for name in result.operators:
        if name in core and name != point:
            volume[name] = handed(name)
            assert volume[name] >= 1
            assert not any(by_name[feeding].mergeable for feeding in before[name] & core)
    for name in {n for inner in core for n in after[inner]} - core:
        alone = (before[name] <= core or by_name[name].mergeable) and not any(
            by_name[f].mergeable or name in by_name[f].side_successors for f in before[name] & core
        )
        assert handed(name) < 1 or not able(name) or not alone

    # sources in front hand columns to the switch point alone, and nothing else feeds it
    if sources:
        assert before[point] == sources
        assert all(by_name[s].hands_columns and after[s] == {point} for s in sources)
