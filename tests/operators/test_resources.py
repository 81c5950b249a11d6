"""What tasks need of their workers beside CPU time: the options `num_gpus` and `resources`."""

from __future__ import annotations

import re
from typing import Any

import pytest

import penstock as ps
from penstock.placement.options import PlacementOptions
from penstock.runtime.program.bound_tasks import bound_tasks, check_reserved, needs_of_workers
from penstock.runtime.program.plan import Plan, rescaled


def flow_with(parallelism: int = 3, **options: Any) -> ps.Flow:
    flow = ps.Flow("resources", parallelism=2)
    numbers = flow.read(ps.sources.Memory([1]), name="numbers")
    scored = numbers.map(int, name="score", parallelism=parallelism, **options)
    scored.key_by(int).count(name="counts").write(ps.sinks.Null(), name="out")
    return flow


def names_of(plan: Plan, tasks: dict[int, int]) -> dict[str, int]:
    return {plan.task_name(plan.by_number[number]): worker for number, worker in tasks.items()}


def test_tasks_that_need_resources_are_given_to_the_workers_in_turn() -> None:
    plan = flow_with(num_gpus=1, resources={"fpga": 0.5}).plan(2)
    assert names_of(plan, bound_tasks(plan, 2)) == {"score[0]": 0, "score[1]": 1, "score[2]": 0}
    assert needs_of_workers(plan, 2) == [{"GPU": 2, "fpga": 1}, {"GPU": 1, "fpga": 0.5}]
    assert needs_of_workers(plan, 4)[3] == {}
    plain = flow_with().plan(2)
    assert (bound_tasks(plain, 2), needs_of_workers(plain, 2)) == ({}, [{}, {}])


def test_operators_of_one_task_need_what_all_of_them_need() -> None:
    flow = ps.Flow("fused", parallelism=2)
    numbers = flow.read(ps.sources.Memory([1]), name="numbers").rebalance()
    numbers.map(int, num_gpus=0.5, name="one").map_batches(list, num_gpus=0.5, resources={"a": 1}, name="two").write(
        ps.sinks.Null(), name="out"
    )
    plan = flow.plan(2)
    assert plan.chain_of("one").needs == {"GPU": 1, "a": 1}
    assert "[1] one > two > out  x2, each task needs 1 GPU and 1 a" in flow.explain(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gpus": -1}, "operator 'score': num_gpus=-1; it must be a number, 0 or more"),
        ({"num_gpus": "1"}, "operator 'score': num_gpus='1'; it must be a number, 0 or more"),
        ({"num_gpus": 1.5}, "operator 'score': 1.5 GPU; Ray gives away parts of one GPU, and otherwise whole ones"),
        ({"resources": ["fpga"]}, "operator 'score': resources=['fpga']; give the amount that each task needs"),
        ({"resources": {1: 1}}, "operator 'score': resources has 1, which is no name"),
        ({"resources": {"fpga": 0}}, "operator 'score': resources['fpga']=0; it must be a number above 0"),
        ({"resources": {"CPU": 1}}, "resources has 'CPU'; cpus_per_worker of run() says how many CPUs"),
        ({"resources": {"GPU": 1}}, "resources has 'GPU'; use num_gpus"),
        ({"resources": {"memory": 1}}, "resources has 'memory'; Penstock reserves no memory"),
    ],
)
def test_needs_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ps.FlowError, match=re.escape(message)):
        flow_with(**options)


def test_the_number_of_such_tasks_cannot_change_in_a_running_job() -> None:
    plan = flow_with(num_gpus=1).plan(2)
    check_reserved(plan, rescaled(plan, "counts", 3), "counts")
    with pytest.raises(ps.FlowError, match=r"the number of tasks of 'score' cannot change .* each task needs 1 GPU"):
        check_reserved(plan, rescaled(plan, "score", 2), "score")


def test_an_operator_that_needs_resources_stays_out_of_spark() -> None:
    assert "score    stays: each of its tasks needs 1 fpga, which Spark does not reserve" in flow_with(
        resources={"fpga": 1}
    ).explain(2)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"replan_s": 5}, "replan_s"),
        ({"placement": PlacementOptions(at_least=1)}, "at_least"),
        ({"placement": PlacementOptions(grow=True)}, "grow"),
        ({"placement": PlacementOptions(pin={"counts": {"CPU": 1}})}, "pin"),
    ],
)
def test_placement_that_could_move_such_tasks_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ps.FlowError, match=rf"^{name}=.* is not for this flow: each task of 'score' needs 1 GPU"):
        ps.run(flow_with(num_gpus=1), workers=2, **options)


def test_without_ray_nothing_is_reserved() -> None:
    done = ps.run(flow_with(num_gpus=64, resources={"nowhere": 1}), workers=2, local=True, epoch_interval_s=None)
    assert done.wait(120, progress=False)["records_written"] == 1
