"""Faults of components that the simulated cluster does not drive: entries of the table of tests/planting.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from penstock.bridge.burst import BurstDetector
from penstock.placement import refinement
from penstock.runtime.lifecycle import StateMachine
from penstock.runtime.operators.window_functions import _Accumulated
from penstock.runtime.operators.windowing import _Windowing
from penstock.runtime.records import class_evolution, enum_classes, remade
from penstock.runtime.records.key_groups import KeyGroups
from penstock.runtime.sinks.parts import PartsWriter
from penstock.runtime.state.timers import Timers
from penstock.runtime.worker.diversion import Diverted
from tests.planting import Test, planted_fault


@planted_fault(
    "penstock/runtime/sinks/parts.py",
    Test("tests/sinks/test_files_sink_epochs.py::test_back_to_an_older_epoch_than_the_last"),
)
def _later_parts_stay() -> Any:
    """A writer that goes back leaves the files of epochs that are done again."""
    return mock.patch.object(PartsWriter, "_delete_later_than")


@planted_fault(
    "penstock/runtime/sinks/parts.py", Test("tests/sinks/test_files_sink_epochs.py::test_another_number_of_tasks")
)
def _deletes_what_others_wrote() -> Any:
    """A task looks after the files of all tasks, also of those that are alive."""
    return mock.patch.object(PartsWriter, "_mine", return_value=True)


@planted_fault(
    "penstock/runtime/records/key_groups.py",
    Test("tests/exchange/test_partition.py::test_rescaling_moves_no_more_groups_than_it_must"),
)
def _all_groups_move() -> Any:
    """A rescale deals all key groups out anew, wherever they were."""
    return mock.patch.object(KeyGroups, "rescaled", lambda self, table, parallelism: self.table(parallelism))


@planted_fault(
    "penstock/runtime/records/class_evolution.py",
    Test("tests/records/test_class_evolution.py::test_fields_that_change_their_order_only"),
)
def _values_stay_in_their_places() -> Any:
    """Saved structs and named tuples are taken as they are where the class has the same fields, in whatever order."""
    differs = class_evolution.differs

    def by_set(class_: type, saved: str) -> bool:
        return set(saved.split(" ")) != set(class_evolution.layout(class_).split(" ")) and differs(class_, saved)

    return mock.patch.object(class_evolution, "differs", by_set)


@planted_fault(
    "penstock/runtime/records/enum_classes.py",
    Test("tests/records/test_class_evolution.py::test_members_are_those_of_the_same_name"),
)
def _members_by_value() -> Any:
    """Members of Enum classes are saved by their values, as pickle does."""
    return mock.patch.object(enum_classes, "reduced", lambda member: member.__reduce_ex__(5))


@planted_fault(
    "penstock/runtime/records/remade.py",
    Test("tests/records/test_pickling.py::test_open_files_do_not_travel"),
)
def _files_are_copied() -> Any:
    """An open file travels as a copy of what is in it."""
    return mock.patch.object(remade, "_stream", return_value=NotImplemented)


@planted_fault(
    "penstock/placement/refinement.py",
    Test("tests/placement/test_planner.py::test_every_small_graph_against_all_placements"),
)
def _no_limit_on_nodes() -> Any:
    """Tasks that talk to each other go to one node, however full it is."""
    return mock.patch.object(refinement._Filling, "excess", return_value=0.0)


@planted_fault(
    "penstock/bridge/burst.py",
    Test("tests/bridge/test_burst.py::test_a_burst_goes_up_and_comes_back"),
)
def _no_dwelling() -> Any:
    """A range that has just switched may switch back at once."""
    return mock.patch.object(BurstDetector, "dwell_s", 0.0)


@planted_fault(
    "penstock/runtime/lifecycle.py",
    Test("tests/runtime/test_lifecycle.py::test_an_event_is_taken_passed_over_or_refused"),
)
def _impossible_events_are_passed_over() -> Any:
    """An event that a state excludes is ignored, as if the table gave a reason."""
    move = StateMachine.move

    def silent(self: Any, event: str, why: str = "") -> bool:
        return (self.state, event) in self.table.answers and move(self, event, why)

    return mock.patch.object(StateMachine, "move", silent)


@planted_fault(
    "penstock/runtime/operators/windowing.py",
    Test("tests/event_time/test_time_units.py::test_windows_in_another_unit_than_the_watermark"),
)
def _windows_take_any_unit() -> Any:
    """Windows with a time of their own take it as it comes: seconds are milliseconds of January 1970."""
    return mock.patch.object(_Windowing, "_check_unit")


@planted_fault(
    "penstock/runtime/worker/diversion.py",
    Test(
        "tests/bridge/test_time_units_in_spark.py::test_times_in_another_unit_end_a_job_that_is_in_spark_from_the_start"
    ),
)
def _spark_is_asked_for_no_unit() -> Any:
    """The greatest time that columns in Spark have is a watermark, whatever it is."""
    return mock.patch.object(Diverted, "doubts", return_value=False)


@planted_fault(
    "penstock/runtime/sources/csv_files.py",
    Test("tests/sources/test_csv_source.py::test_a_recovery_does_not_read_on_in_other_rows"),
)
def _only_the_head_of_a_csv_file_counts() -> Any:
    """A file with the same first bytes is the file that was read."""
    from penstock.runtime.sources.csv_files import RowBlocks

    return mock.patch.object(RowBlocks, "_check_before")


# What loads Ray is imported when it is needed, because each process of a campaign loads this table.


@planted_fault(
    "penstock/actors/nodes.py",
    Test("tests/actors/test_nodes.py::test_who_has_asked_for_two_nodes_gets_a_fresh_one_for_a_lost_one"),
)
def _any_node_will_do() -> Any:
    """A worker of a lost node goes to a node that the job has, whatever number of nodes was asked for."""
    from penstock.actors.nodes import Nodes

    room_on = Nodes._room_on

    def packs(self: Any, fit: Any, used: Any, name: str) -> Any:
        with mock.patch.object(self, "_options", replace(self._options, nodes=None)):
            return room_on(self, fit, used, name)

    return mock.patch.object(Nodes, "_room_on", packs)


@planted_fault(
    "penstock/actors/nodes.py",
    Test("tests/actors/test_nodes.py::test_a_node_that_was_slow_at_the_start_is_asked_again"),
)
def _slow_nodes_are_lost_for_good() -> Any:
    """A node that was not reached when the job started is not asked again."""
    from penstock.actors.nodes import Nodes

    return mock.patch.object(Nodes, "find_again")


@planted_fault("penstock/actors/cluster.py", Test("tests/actors/test_name_of_an_ended_job.py"))
def _drivers_elsewhere_live_for_ever() -> Any:
    """A JobMaster takes each driver of another machine for one that lives."""
    from penstock.actors import cluster

    return mock.patch.object(cluster, "program_has_ended", return_value=False)


@planted_fault(
    "penstock/runtime/operators/windows.py",
    Test("tests/operators/test_early_sessions.py::test_the_bounds_of_a_result_are_those_of_its_records"),
)
def _early_results_wait_anew() -> Any:
    """Each record that makes a session longer puts its early result off."""
    return mock.patch.object(Timers, "times", return_value=())


@planted_fault(
    "penstock/runtime/operators/window_functions.py",
    Test("tests/operators/test_early_sessions.py::test_the_bounds_of_a_result_are_those_of_its_records"),
)
def _failed_records_make_sessions_longer() -> Any:
    """A session gets the bounds of a record before it is known whether the record can be added."""
    return mock.patch.object(_Accumulated, "try_out", return_value=None)
