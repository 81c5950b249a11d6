"""A flow and its options become all that the start of a job needs: checked, planned and pickled once.

`run`, `resume` and `penstock run` prepare a job here, and hand the Prepared to the start; `penstock explain` and
`penstock plan` show the same plan. A mistake in a flow or its options is raised here, before Ray is asked for anything.
Nothing here starts a process.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.host.carry.carrier_options import CarrierOptions
from penstock.host.process.network import Network
from penstock.host.process.worker_process import WorkerOptions
from penstock.jobs.options import JobOptions
from penstock.placement.options import PlacementOptions
from penstock.runtime.epochs.coordinator import EpochOptions
from penstock.runtime.epochs.restore import cannot_take_back, check
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import (
    FlowError,
    JobNotFound,
    OptionError,
    PenstockError,
    StoreError,
    UnfinishedFiles,
    describe,
    shorten,
)
from penstock.runtime.operators.resources import told_needs
from penstock.runtime.program.flow import Flow, check_flow
from penstock.runtime.program.graph import SAVEPOINT
from penstock.runtime.program.mixing import mixing, mixing_words
from penstock.runtime.program.plan import Plan, packed_with_plan
from penstock.runtime.records.pickling import Program
from penstock.runtime.records.userfunc import user_line
from penstock.runtime.relaying.tree_options import TreeOptions

if TYPE_CHECKING:
    from penstock.bridge.paradigm_scheduler import DualOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A job that can be started.

    `options`: what the user has given. `carrier`: the same for the process that hosts the job. `packed`: the plan and
    `carrier`, as bytes for the job's processes and for `resume`; None in a local job without epochs, which needs none.
    """

    flow: Flow
    plan: Plan
    options: JobOptions
    carrier: CarrierOptions
    program: Program
    packed: bytes | None


@dataclass(frozen=True)
class Planned:
    """A flow with the options of its job, all of them checked, and its plan."""

    flow: Flow
    plan: Plan
    network: Network
    dual: DualOptions | None
    placement: PlacementOptions
    trees: TreeOptions


def planned(flow: Flow, options: JobOptions, *, check_sinks: bool = False) -> Planned:
    """Checks a flow and its options, and plans it. A plan that is only shown does not need empty places for its
    sinks."""
    check_flow(flow, "run()")
    network = options.network()
    dual = options.dual_options()
    epochs = options.epoch_interval_s is not None
    where = options.placement_options().checked(
        options.worker_count, list(flow.graph.operators), epochs, spark=dual is not None
    )
    trees = options.tree_options()
    flow = copy.copy(flow)
    if options.parallelism is not None:
        flow.parallelism = options.parallelism
    plan = flow.plan(options.worker_count, check_sinks=check_sinks)
    _check_needs(plan, where)
    return Planned(flow, plan, network, dual, where, trees)


def prepare(flow: Flow, options: JobOptions) -> Prepared:
    """Returns a new job that can be started. Raises PenstockError for everything that is wrong with it."""
    try:
        found = planned(flow, options, check_sinks=options.savepoint is None)
    except UnfinishedFiles as error:
        raise _whether_resumable(error, flow.name, options.checkpoints) from None
    flow, plan = found.flow, found.plan
    _warn_of_mixing(plan)
    store = origin = None
    if options.epoch_interval_s is not None:
        store = Store.open(options.checkpoints or default_checkpoints(), flow.name)
        store.check_format()
        store.check()
        if cannot_take_back(plan):
            store = store.flushed()
    if options.savepoint is not None:
        origin = _savepoint(options.savepoint, plan, store)
    carrier = CarrierOptions(
        options.worker_count,
        options.start_timeout_s,
        WorkerOptions(
            options.ring_bytes,
            options.window_bytes,
            options.cache_bytes,
            check_shared=options.check_shared,
            trees=found.trees,
        ),
        EpochOptions(options.epoch_interval_s, options.epoch_timeout_s, options.max_restarts),
        store,
        flow if store is not None else None,
        attempts=options.max_attempts,
        hang_timeout_s=options.hang_timeout_s,
        spares=options.spares,
        savepoint=origin,
        cpus_per_worker=options.cpus_per_worker,
        network=found.network,
        dual=found.dual,
        placement=found.placement,
    )
    program = Program()
    packed = None
    if store is not None or not options.local:
        with tidying(carrier):
            packed = packed_with_plan(program, plan, (plan, carrier))
    if store is not None:
        carrier = replace(carrier, program=packed)
    return Prepared(flow, plan, options, carrier, program, packed)


def prepare_to_resume(name: str, options: JobOptions) -> Prepared:
    """Returns a job that continues from its store. Raises JobNotFound when the store has no epoch of it."""
    if not isinstance(name, str):
        raise FlowError(f"name={shorten(name)}; it must be the name of a job, which is that of its flow")
    store = Store.open(options.checkpoints or default_checkpoints(), name)
    store.check_format()  # an older epoch of another format must stay too
    found = store.latest() if store.ended() is None else None
    if found is None or found[0].program is None:
        raise JobNotFound(
            f"there is no epoch of a job {name!r} in {store.place}: the job has finished, was cancelled, was never "
            "run with this checkpoint store, ran without epochs (epoch_interval_s=None), or failed before its first "
            "epoch was complete. Give the name and the checkpoint store with which the job was run, or run the job "
            "anew; if it was started from a savepoint, run it with that savepoint again (savepoint=..., or --savepoint)"
        )
    saved = store.get(found[0].program)
    try:
        program, (_, carrier) = Program.loads(saved)
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything when it is imported
        raise StoreError(
            f"job {name!r} cannot be resumed here, because {_not_loaded(error)}. The epochs in the store stay as they "
            "are"
        ) from error
    program.prefer_own()
    flow: Flow = carrier.flow
    workers = options.workers or carrier.workers
    # The saved program stays as it is: the next resume has the options of the first run again.
    carrier = replace(carrier, workers=workers, store=store, resume=True, savepoint=None, program=saved)
    plan = flow.plan(workers, list_splits=False, check_sinks=False)
    if cannot_take_back(plan):
        carrier = replace(carrier, store=store.flushed())
    _warn_of_mixing(plan)
    if options.local:
        return Prepared(flow, plan, options, without_ray(carrier, name), program, None)
    return Prepared(flow, plan, options, carrier, program, packed_with_plan(program, plan, (plan, carrier)))


@contextmanager
def tidying(carrier: CarrierOptions) -> Iterator[None]:
    """Removes the folders of a new job's store when the job cannot be started."""
    try:
        yield
    except BaseException:
        if carrier.store is not None and not carrier.resume:
            with suppress(StoreError):  # the first error tells more
                carrier.store.tidy()
        raise


def default_checkpoints() -> str:
    """Returns the directory of this machine where epochs are saved without `checkpoints`."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "penstock")


def without_ray(options: CarrierOptions, job: str) -> CarrierOptions:
    """Returns the options of a job that ran on Ray for its run without Ray, and warns of each option that is left out.
    The saved options stay, so the job has all of them again when it is resumed on Ray."""
    left_out = []
    if options.dual is not None:
        left_out.append("dual")
    here = PlacementOptions("round-robin" if options.placement.method == "round-robin" else "auto")
    if options.placement != here:
        left_out.append("placement")
    if left_out:
        logger.warning(
            "the job %r continues without its option%s %s, because a local job runs without Ray; a job that is resumed "
            "on Ray has %s again",
            job,
            "s" if len(left_out) > 1 else "",
            " and ".join(left_out),
            "them" if len(left_out) > 1 else "the option",
        )
    return replace(options, dual=None, placement=here)


def _check_needs(plan: Plan, where: PlacementOptions) -> None:
    """Raises OptionError for options of placement that do not fit tasks which need resources of their worker."""
    needing = [chain for chain in plan.chains if chain.needs]
    if not needing:
        return
    options = {
        "replan_s": where.period_s,
        "pin": dict(where.pin) or None,
        "at_least": where.at_least,
        "grow": where.grow or None,
    }
    for name, value in options.items():
        if value is not None:
            raise OptionError(
                f"{{{name}=}} is not for this flow: each task of {{operator}} needs {{needs}}, which one worker "
                f"reserves for it from the start to the end; leave out {{{name}}}",
                {name: value},
                operator=repr(needing[0].name),
                needs=told_needs(needing[0].needs),
            )


def _warn_of_mixing(plan: Plan) -> None:
    """Warns of a plan in which a task that is behind makes its records late."""
    if said := mixing_words(mixing(plan)):
        logger.warning("job %r: %s", plan.name, said)


def _whether_resumable(error: UnfinishedFiles, job: str, checkpoints: str | os.PathLike[str] | None) -> UnfinishedFiles:
    """Returns the error, and whether a job of this name can be resumed from this checkpoint store."""
    try:
        store = Store.open(checkpoints or default_checkpoints(), job)
        there = bool(store.epochs())
    except StoreError:
        return error
    if there:
        said = f"{store.place} has epochs of a job {job!r}, which penstock.resume({job!r}) continues."
    else:
        said = f"{store.place} has no epoch of a job {job!r}, so there is nothing to resume under this name."
    return UnfinishedFiles(f"{error} {said}")


def _savepoint(url: str | os.PathLike[str], plan: Plan, store: Store | None) -> Store:
    """The store of a savepoint, whose state fits this plan."""
    if store is None:
        raise OptionError(
            "a job that starts from a savepoint needs epochs, and {epoch_interval_s=} turns epochs off; leave out "
            "{epoch_interval_s} or {savepoint}",
            {"epoch_interval_s": None},
        )
    origin = Store.open(url, SAVEPOINT)
    found = origin.latest()
    if found is None:
        raise JobNotFound(
            f"there is no savepoint in {os.fspath(url)!r}; give the place that a job's savepoint was saved in"
        )
    manifest, _ = found
    uncommitted = {name for entry in manifest.tasks for name in entry.uncommitted}
    check(plan, json.loads(str(manifest.extra["kinds"])), manifest.key_groups, uncommitted)
    return origin


def _not_loaded(error: BaseException) -> str:
    """Says why a saved program cannot be loaded: in which file, and what to do."""
    if isinstance(error, ModuleNotFoundError):
        remedy = "Install the module, or add the directory that has the module to PYTHONPATH"
        return f"a module of its program cannot be imported: {error}. {remedy}"
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
        return f"a module of its program cannot be imported: {describe(error)} ({where}). Correct the file"
    here = error.__traceback__  # the lines that follow are of the loading, and then of the program
    line = user_line(error.with_traceback(None if here is None else here.tb_next))
    if line is None:  # nothing of the program has run; a name that the program had is not there
        return (
            f"what its program refers to has changed since: {describe(error)}. Put back what is missing under its old "
            "name, or run the flow anew"
        )
    return (
        f"a module of its program fails when it is imported: {describe(error)} ({line}). Correct what the module does "
        "when it is imported"
    )
