"""Which parts of which chains go to Spark: a plan as the switch range sees it."""

from __future__ import annotations

import penstock as ps
from penstock.bridge.forms import RangeForm, range_form
from penstock.bridge.parts import crosses, head, parts, vertices
from penstock.bridge.range import NoRange, SwitchRange, switch_range
from penstock.runtime.program.flow import Flow
from penstock.runtime.program.plan import Plan
from tests.bridge.flows import fork


def forms_of(plan: Plan) -> list[RangeForm]:
    return [form for chain in plan.chains if isinstance(form := range_form(plan, chain), RangeForm)]


def cut(
    flow: Flow, chain: int = 0, *, below: float = 0.0, counts: dict[str, tuple[float, float]] | None = None
) -> tuple[SwitchRange, dict[str, int], list[RangeForm]]:
    """The range that begins with a chain, and how far it reaches in each by the name of the chain's first operator."""
    plan = flow.plan(1)
    forms = forms_of(plan)
    found = switch_range(
        vertices(plan, forms, counts or {}), head(plan, chain), crosses(plan, forms), below=below, absorb_ends=True
    )
    assert not isinstance(found, NoRange), found.reason
    return found, {head(plan, i): position for i, position in parts(forms, found.operators).items()}, forms


def yahoo() -> Flow:
    flow = Flow("yahoo", parallelism=2)
    (
        flow.read(ps.sources.Memory([]), name="read")
        .map(str.strip, name="parse")
        .filter(str.isdigit, name="views")
        .map(int, name="project")
        .key_by(lambda n: n % 7)
        .sum(name="total")
        .write(ps.sinks.Null(), name="store")
    )
    return flow


# Of 90 lines a third are views.
THIRD = {"read": (90, 90), "parse": (90, 90), "views": (90, 30), "project": (30, 30), "total": (30, 1)}


def test_a_range_reaches_to_the_partial_results_unless_equation_8_is_asked_for() -> None:
    found, positions, forms = cut(yahoo(), counts=THIRD)
    assert found.operators == ("parse", "views", "project", "total")
    assert positions == {"read": 4}
    assert forms[0].before(4) is forms[0]

    found, positions, _ = cut(yahoo(), below=1.0, counts=THIRD)
    assert found.operators == ("parse", "views")
    assert positions == {"read": 3}
    shorter = forms[0].before(3)
    assert shorter.names == ["parse", "views"]
    assert shorter.combiner is None


def test_a_key_function_within_a_task_belongs_to_what_it_feeds() -> None:
    flow = Flow("one")
    flow.read(ps.sources.Memory([]), name="read").key_by(len).count(name="count").write(ps.sinks.Null())
    found, positions, forms = cut(flow)
    assert found.operators == ("count",)
    assert positions == {"read": forms[0].position}
    assert forms[0].aggregate == "count"


def test_a_range_goes_on_into_the_chains_behind_a_fork() -> None:
    found, positions, _ = cut(fork())
    assert set(found.operators) == {"parse", "few", "number", "many", "numbers", "letters"}
    assert positions == {"read": 2, "few": 2, "many": 1}


def test_branches_end_where_their_own_magnifications_say() -> None:
    counts = {"read": (10, 10), "parse": (10, 10), "few": (10, 1), "many": (10, 100)}
    found, positions, _ = cut(fork(), below=1.0, counts=counts)
    assert set(found.operators) == {"parse", "few", "many", "letters"}
    assert positions == {"read": 2, "few": 1, "many": 1}


def test_a_union_with_an_input_from_outside_is_left_to_the_record_tasks() -> None:
    flow = Flow("union", parallelism=2)
    one = flow.read(ps.sources.Memory([]), name="one").map(str.strip, name="strip")
    other = flow.read(ps.sources.Memory([]), name="other").map(str.strip, name="strip 2")
    one.union(other).map(str.upper, name="upper").write(ps.sinks.Null())
    found, positions, _ = cut(flow)
    assert found.operators == ("strip",)
    assert positions == {"one": 2}
    assert "'strip 2', which is not in the range, feeds it too" in found.reason


def test_partial_results_of_two_sources_end_their_ranges_both() -> None:
    flow = Flow("two", parallelism=2)
    one = flow.read(ps.sources.Memory([]), name="one").map(str.strip, name="strip")
    other = flow.read(ps.sources.Memory([]), name="other").map(str.strip, name="strip 2")
    one.union(other).key_by(len).count(name="count").write(ps.sinks.Null())
    for chain, name in ((0, "one"), (1, "other")):
        found, positions, _ = cut(flow, chain)
        assert found.operators[-1] == "count"
        assert positions == {name: 2}


def test_what_stays_ends_the_range_and_says_why() -> None:
    flow = Flow("stays", parallelism=2)
    (
        flow.read(ps.sources.Memory([]), name="read")
        .map(str.strip, name="strip")
        .key_by(len)
        .reduce(min, name="least")
        .write(ps.sinks.Null())
    )
    found, positions, _ = cut(flow)
    assert found.operators == ("strip",)
    assert positions == {"read": 2}
    assert "before 'least': its function sees records in order" in found.reason
