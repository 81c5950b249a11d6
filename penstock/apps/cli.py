"""The `penstock` command.

Exit codes: 0 the job finished, or was stopped and drained; 1 it failed, or something else did; 2 it could not start
as asked (a wrong option, an input that is not there); 130 it was cancelled by Ctrl-C. Results go to stdout, everything
else to stderr. Where stdout is closed, or its reader has gone (`| head`), results go nowhere, and that is no failure.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import penstock
from penstock.apps import own
from penstock.apps.app import App, Built, Status, count, seconds
from penstock.apps.catalog import APPS, OF_THE_REPOSITORY
from penstock.host.decide.job_state import ENDED
from penstock.host.process.network import NODE_TIMEOUT_S, TRANSPORTS, checked_ports
from penstock.placement.options import METHODS
from penstock.runtime import standard_streams
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import (
    FlowError,
    JobFailed,
    NotEnoughResources,
    OptionError,
    PenstockError,
    StoreError,
)
from penstock.runtime.storage import filesystems

if TYPE_CHECKING:
    from penstock.jobs.job import Job
    from penstock.runtime.epochs.manifest import Manifest
    from penstock.runtime.program.flow import Flow
    from penstock.runtime.transport.certificates import Tls

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130

_OF_APPS = ("run", "explain", "plan")
# The options of the command whose names are not those of `run` with "-" for "_".
_FLAGS = {"epoch_interval_s": "--epoch-interval", "replan_s": "--replan", "node_timeout_s": "--node-timeout"}
_WORKERS = 2  # the fewest with which records travel between processes
_NAME = "the name of the job, which is that of its flow"
_ONE = f"{_NAME} (the only running job)"
_STATE = "penstock/ below XDG_STATE_HOME or ~/.local/state"
_EPILOG = """\
examples:
  penstock run wordcount                                 count a text's words, with live progress
  penstock run wordcount --input 'logs/*.txt' --output counts/
  penstock run sol --rate 5000 --workers 2               the latency of each operator
  penstock run orders.py:flow --workers 2                a flow of your own: a Flow, or a function that returns one
  penstock explain wordcount --workers 4                 the plan, without running it
  penstock plan sol --nodes 4 --slots 4                  where the tasks would run, and the traffic between nodes
  penstock run APP --help                                the options of an application

While a job runs, Ctrl-C ends its sources and waits until all records that were read have come through; a
second Ctrl-C cancels the job. In another terminal, penstock jobs lists the running jobs. Control them with
penstock status NAME, penstock stop NAME, penstock savepoint NAME DIR and penstock rescale NAME OPERATOR N.
You may leave out NAME while only one job runs.

A job recovers by itself when its processes die. When a job has failed, or its cluster or driver has gone,
penstock resume NAME starts it again from its last complete epoch.
"""

_ABOUT_RUN = """\
Run an application, or a flow of your own. For a flow of your own, give FILE.py:NAME or MODULE:NAME in place of
APP. NAME is a Flow, or a function without arguments that returns one. You may leave out :NAME when the file has
only one flow.
"""
_OWN_EXAMPLES = """\
examples of a flow of your own:
  penstock run orders.py:flow --workers 2                the Flow named flow in orders.py
  penstock run orders.py:build                           the flow that the function build() returns
  penstock run orders.py --help                          the options of such a flow
"""
_ABOUT_RESUME = """\
Start a job again from its last complete epoch, after it has failed or its driver, cluster or machine has
gone. The flow, its options and its state come from the checkpoint store; nothing else is needed. The command
shows live progress and waits for the end of the job, as run does. It does not print the records of Collect
sinks (such as the words that `run wordcount` prints without --output).
"""
_ABOUT_SAVEPOINT = """\
Save the state of a running job in a place that you name, and wait until it is written. The job continues. The
savepoint stays there whatever happens to the job. penstock run APP --savepoint URL starts a job from it.
"""
_ABOUT_RESCALE = """\
Give an operator of a running job, and the operators fused with it, N tasks, and wait until these tasks run.
penstock status NAME lists the operators and their tasks.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        return _main(argv)
    except KeyboardInterrupt:
        if argv is None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what was started must be ended, and the code must be ours
        return INTERRUPTED


def _main(argv: Sequence[str] | None) -> int:
    standard_streams.open_closed()
    arguments = list(sys.argv[1:] if argv is None else argv)
    unknown = _unknown_app(arguments)
    if unknown is not None:
        return _complain(unknown, MISUSED)
    try:
        parser = _parser(_known_apps(arguments))
        options, unknown_words = parser.parse_known_args(arguments)
        if unknown_words:
            parser.error(_unrecognized(parser, unknown_words))
    except PenstockError as error:  # of somebody's own flow, which is made before its options are known
        if "--debug" in arguments:
            raise
        return _complain(str(error), MISUSED)
    except SystemExit as end:  # --help, --version, a wrong option: argparse has said what there is to say
        with suppress(PenstockError), _output():
            pass  # but not yet written it
        return end.code if isinstance(end.code, int) else FAILED
    told = _Told()
    cluster = logging.getLogger("penstock.actors.cluster")
    before = cluster.level
    if getattr(options, "progress", False):
        cluster.addHandler(told)
        cluster.setLevel(logging.INFO)
    try:
        code: int = options.run(options)
    except FlowError as error:
        return _fail(error, MISUSED, options)
    # ConnectionError: no Ray cluster at --address; TimeoutError: of --timeout
    except (PenstockError, ConnectionError, TimeoutError) as error:
        return _fail(error, FAILED, options)
    finally:
        cluster.removeHandler(told)
        cluster.setLevel(before)
    return code


def _unrecognized(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """Returns what is wrong with words that no option or argument is, with the nearest options."""
    known, parsers = set[str](), [parser]
    while parsers:
        for action in parsers.pop()._actions:
            known.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    nearest = [close[0] for word in words if (close := difflib.get_close_matches(word.partition("=")[0], known, 1))]
    return f"unrecognized arguments: {' '.join(words)}" + (f"; did you mean {' '.join(nearest)}?" if nearest else "")


class _Told(logging.Handler):
    """Prints what Penstock logs about the Ray cluster, because starting or finding it takes the first seconds."""

    def emit(self, record: logging.LogRecord) -> None:
        _say(record.getMessage())


# --- the commands ----------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    app: App = options.app
    built = app.build(options)
    from penstock.jobs.options import JobOptions
    from penstock.jobs.prepare import prepare
    from penstock.jobs.run import start

    if options.epoch_interval == 0 and options.checkpoints is not None:
        raise OptionError(
            "{checkpoints} says where epochs are saved, but {epoch_interval_s=} turns epochs off; leave out "
            "{checkpoints} or {epoch_interval_s}",
            {"epoch_interval_s": None},
        )
    given = {
        "ring_bytes": options.ring_bytes,
        "max_restarts": options.max_restarts,
        "node_timeout_s": options.node_timeout,
    }
    if options.epoch_interval is not None:
        given["epoch_interval_s"] = options.epoch_interval or None
    of_job = JobOptions(
        workers=options.workers,
        parallelism=options.parallelism,
        local=options.local,
        detached=options.detached,
        address=options.address,
        checkpoints=options.checkpoints,
        savepoint=options.savepoint,
        dual=options.dual,
        placement=options.placement,
        nodes=options.nodes,
        replan_s=options.replan,
        spares=not options.no_spares,
        transport=options.transport,
        ports=options.ports,
        tls=_tls(options),
        **{name: value for name, value in given.items() if value is not None or name == "epoch_interval_s"},
    )
    prepared = prepare(built.flow, of_job)
    _say(f"{app.name}: {built.intro}; {options.workers} worker{'s' * (options.workers != 1)}")
    return _until_the_end(start(prepared), options, built)


def _replan(text: str) -> float | str:
    """Reads the value of --replan: seconds, or "auto"."""
    return text if text == "auto" else seconds(text)


def _tls(options: argparse.Namespace) -> bool | Tls:
    """Returns the value of `run(tls=)`."""
    if options.tls_files is None:
        found: bool = options.tls
        return found
    from penstock.runtime.transport.certificates import Tls

    return Tls(*options.tls_files)


def _resume(options: argparse.Namespace) -> int:
    from penstock.jobs.run import resume as start

    last = _last_epoch(options.name, options.checkpoints)
    job = start(
        options.name,
        checkpoints=options.checkpoints,
        workers=options.workers,
        local=options.local,
        detached=options.detached,
        address=options.address,
    )
    if last is not None:
        _say(f"{job.name}: continues from epoch {last.epoch}, which was saved {_ago(time.time() - last.created)}")
    return _until_the_end(job, options)


def _until_the_end(job: Job, options: argparse.Namespace, built: Built | None = None) -> int:
    """Waits for the end of a job, unless the job is detached, and prints its outcome. Returns the exit code."""
    if options.detached:
        _say(f"job {job.name!r} runs detached; next: penstock status {job.name}, penstock stop {job.name}")
        return OK
    began = time.time()
    with _Interrupts(job) as interrupts:
        try:
            status = job.wait(progress=options.progress)
        except (JobFailed, NotEnoughResources, StoreError) as error:
            code = _fail(error, FAILED, options)
            _say_how_to_resume(job.name, options.checkpoints, began if built is not None else 0.0)
            return code
    ran = status.get("running_s", 0.0)
    continued = "was resumed" if built is None else "started from the savepoint" if options.savepoint else None
    try:
        with _output():
            if built is not None and status["state"] != "CANCELLED":
                for line in built.results(status, ran):
                    print(line)
    finally:
        _say(_summary(status, ran, continued))
    if built is not None:
        _say(_next_steps(built))
    if status["state"] == "CANCELLED":
        return INTERRUPTED if interrupts.count else FAILED
    return OK


def _last_epoch(name: str, checkpoints: str | None) -> Manifest | None:
    """Returns the epoch from which `resume` would continue, or None if there is none or the store cannot be read."""
    from penstock.jobs.prepare import default_checkpoints

    try:
        found = Store.open(checkpoints or default_checkpoints(), name).latest()
    except StoreError:
        return None
    return None if found is None or found[0].program is None else found[0]


def _say_how_to_resume(name: str, checkpoints: str | None, since: float) -> None:
    """Prints how to resume a job that has failed, if the job has saved an epoch after the time `since`. An older epoch
    belongs to another job."""
    last = _last_epoch(name, checkpoints)
    if last is not None and last.created >= since:
        where = "" if checkpoints is None else f" --checkpoints {_to_type(checkpoints)}"
        _say(f"next: penstock resume {name}{where}   (from epoch {last.epoch}; correct the cause first)")


def _to_type(place: str) -> str:
    """Returns a path or URL as part of a command that the user can type. Keys and options of a URL are left out,
    because output is often kept."""
    shown = filesystems.named(place)
    return shlex.quote(shown) + ("" if shown == place else " (with the keys and options of the URL)")


def _apps(options: argparse.Namespace) -> int:
    with _output():
        for app in APPS.values():
            print(f"{app.name:<12}{app.about}")
            parser = argparse.ArgumentParser(add_help=False)
            app.add_options(parser)
            print(f"{'':<12}{'  '.join(_brief(action) for action in parser._actions)}")
        print("\nevery application takes --workers, --parallelism and more: penstock run APP --help")
    return OK


def _explain(options: argparse.Namespace) -> int:
    explained = _flow(options).explain(options.workers)
    with _output():
        print(explained, end="")
    return OK


def _plan(options: argparse.Namespace) -> int:
    from penstock.apps import plan_view
    from penstock.placement import baselines
    from penstock.placement.at_start import plan_at_start
    from penstock.placement.planner import plan
    from penstock.placement.shape import shape_of
    from penstock.placement.topology import of_plan
    from penstock.placement.traffic import Node

    nodes = [Node(f"node {number}", options.slots) for number in range(1, options.nodes + 1)]
    tasks = _flow(options).plan(options.nodes * options.slots, check_sinks=False)
    topology = of_plan(tasks)
    ours = plan_at_start(shape_of(tasks), nodes, factor=options.factor)
    placements = {
        "penstock": ours,
        "traffic": plan(topology.graph, nodes, factor=options.factor),
        **baselines.all_of(topology, nodes, factor=options.factor),
    }
    with _output():
        for line in plan_view.by_node(topology, ours):
            print(line)
        print()
        _print_table(plan_view.comparison(topology, placements))
        print()
        print(
            "traffic is relative to the output of one source; every operator is assumed to emit as much as it receives"
        )
        if "METIS" not in placements:
            print("METIS is left out because pymetis is not installed: pip install pymetis")
    if options.picture is not None:
        text = plan_view.picture(topology, ours, options.app.name)
        try:
            with open(options.picture, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise FlowError(f"the picture cannot be written to {options.picture}: {error.strerror}") from error
        _say(f"wrote {options.picture}")
    return OK


def _flow(options: argparse.Namespace) -> Flow:
    """Returns the flow of an application that is only shown."""
    from penstock.jobs.prepare import with_parallelism

    return with_parallelism(options.app.build(options).flow, options.parallelism)


def _status(options: argparse.Namespace) -> int:
    status = _attach(options).status()
    if options.json:
        with _output():
            print(json.dumps(status, indent=2))
        return OK
    from penstock.jobs.progress import epochs, line, processes, table

    with _output():
        print(line(status))
        if status["epochs"]["store"] is not None:
            print(epochs(status))
        _print_table(table(status))
        for said in processes(status):
            print(said)
    return OK


def _jobs(options: argparse.Namespace) -> int:
    from penstock.jobs.progress import line
    from penstock.jobs.run import jobs

    found = jobs(address=options.address)
    with _output():
        if options.json:
            print(json.dumps(found, indent=2))
            return OK
        for status in found:
            print(f"{line(status)}  [Ray at {status['cluster']}]")
    if not found:
        _say("no job runs")
    return OK


def _stop(options: argparse.Namespace) -> int:
    if options.savepoint is None:
        return _end(_attach(options), "stop", options)
    job = _attach(options)
    job.stop(savepoint=options.savepoint)
    _say(
        f"job {job.name!r} has stopped, and is saved in {filesystems.named(options.savepoint)}; "
        f"next: penstock run APP --savepoint {_to_type(options.savepoint)}"
    )
    return OK


def _cancel(options: argparse.Namespace) -> int:
    return _end(_attach(options), "cancel", options)


def _savepoint(options: argparse.Namespace) -> int:
    job = _attach(options)
    job.savepoint(options.url, options.timeout)
    _say(
        f"saved job {job.name!r} in {filesystems.named(options.url)}; "
        f"next: penstock run APP --savepoint {_to_type(options.url)}"
    )
    return OK


def _rescale(options: argparse.Namespace) -> int:
    job = _attach(options)
    before = job.status()["operators"]
    job.rescale(options.operator, options.parallelism)
    after = job.status()["operators"]
    # Operators that are fused with the named one have changed too.
    changed = [name for name in after if name in before and after[name]["parallelism"] != before[name]["parallelism"]]
    tasks = f"{options.parallelism} task{'s' * (options.parallelism != 1)}"
    if len(changed) > 1:
        which = f"{', '.join(changed[:-1])} and {changed[-1]} run in {tasks} each"
    else:
        which = f"{options.operator} runs in {tasks}"
    _say(f"job {job.name!r}: {which}; next: penstock status {job.name}")
    return OK


def _end(job: Job, how: Literal["stop", "cancel"], options: argparse.Namespace) -> int:
    """Stops or cancels a job, and waits for its end unless the user does not want to."""
    if (state := job.state) in ENDED:  # its JobMaster only waits for drivers to fetch what they want
        _say(f"job {job.name!r} had ended before: {state.lower()}")
        return OK
    (job.stop if how == "stop" else job.cancel)()
    if not options.wait:
        _say(f"job {job.name!r} has received the request")
        return OK
    started = time.monotonic()
    status = job.wait(progress=False)
    _say(f"job {job.name!r} ended in {time.monotonic() - started:.1f} s: {status['state'].lower()}")
    return OK


def _attach(options: argparse.Namespace) -> Job:
    from penstock.jobs.run import attach

    return attach(options.name, address=options.address)


# --- while a job runs -----------------------------------------------------------------------------------------


class _Interrupts:
    """Handles Ctrl-C and SIGTERM: the first one stops the job, the second one cancels it, and the third one ends the
    wait. Further Ctrl-Cs are ignored, because the program ends then.

    Threads of their own tell the job, because a signal handler may run in the middle of anything.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._before: dict[int, Any] = {}
        self.count = 0

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.count > 2 and number == signal.SIGINT else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1:
            again = "press Ctrl-C again to cancel" if number == signal.SIGINT else "another SIGTERM cancels the job"
            self._tell(self._job.stop, f"stopping: records that were read still come through; {again}")
        elif self.count == 2:
            self._tell(self._job.cancel, "cancelling")
        elif self.count == 3:
            _say_in_between("\nending without waiting for the job; what it has saved stays for penstock resume")
            raise KeyboardInterrupt

    def _tell(self, word: Callable[[], object], text: str) -> None:
        threading.Thread(target=word, name="penstock-interrupt", daemon=True).start()
        _say_in_between(f"\n{text}")


def _say_in_between(text: str) -> None:
    """Says something in a signal handler."""
    with suppress(RuntimeError):  # the signal came in the middle of a write to the same stream
        _say(text)


def _summary(status: Status, ran: float, continued: str | None = None) -> str:
    """Returns one line about a job that has ended. `continued` says how the job continued ("was resumed"), if it did:
    its counts then include records from before this run, so no rate is shown."""
    read = status.get("records_read", 0)
    latency = status.get("latency_all_ms") or {}
    parts = [f"{status['name']} {status['state'].lower()}"]
    if continued is not None:
        parts[0] += f" {ran:.1f} s after it {continued}"
    else:
        parts[0] += f": {read:,} records in {ran:.1f} s"
        parts.append(f"{read / ran if ran else 0:,.0f} records/s")
    if latency.get("p50") is not None:
        parts.append(f"latency p50 {latency['p50']:.2f} ms, p99 {latency['p99']:.2f} ms")
    if status.get("skipped"):
        parts.append(f"{status['skipped']:,} skipped")
    restarts = (status.get("epochs") or {}).get("restarts", 0)
    if restarts:
        from penstock.jobs.progress import times

        parts.append(f"restarted {times(restarts)}")
    return "; ".join(parts)


def _next_steps(built: Built) -> str:
    return "next: " + "\n      ".join([*built.next_steps, "penstock apps"])


# --- the command line -----------------------------------------------------------------------------------------


def _known_apps(arguments: Sequence[str]) -> Mapping[str, App]:
    """Returns the applications, and the user's own flow if the command names one."""
    if len(arguments) > 1 and arguments[0] in _OF_APPS and own.is_meant(arguments[1]):
        return {**APPS, arguments[1]: own.own_app(arguments[1])}
    return APPS


def _parser(known: Mapping[str, App]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Run Penstock's applications and flows of your own, and control running jobs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    everywhere = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    everywhere.add_argument("--debug", action="store_true", help="show the traceback of an error")

    run = commands.add_parser(
        "run",
        help="run an application, or a flow of your own: FILE.py:flow",
        description=_ABOUT_RUN,
        epilog=_OWN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for app, of_app in _app_parsers(known, run, everywhere):
        of_app.set_defaults(run=_run, app=app)
        _add_running_options(of_app)

    apps = commands.add_parser("apps", parents=[everywhere], help="list the applications and their options")
    apps.set_defaults(run=_apps)

    explain = commands.add_parser(
        "explain",
        help="show an application's plan",
        description="Show an application's logical and physical plan, without running it.",
    )
    for app, of_app in _app_parsers(known, explain, everywhere):
        of_app.set_defaults(run=_explain, app=app)

    planned = commands.add_parser(
        "plan",
        help="show where an application's tasks would run",
        description="Show on which nodes and workers an application's tasks would run, and the traffic between nodes, "
        "compared with other methods. The application does not run.",
    )
    for app, of_app in _app_parsers(known, planned, everywhere, workers=False):
        of_app.set_defaults(run=_plan, app=app)
        of_app.add_argument("--nodes", metavar="N", type=count, default=4, help="number of nodes (4)")
        of_app.add_argument("--slots", metavar="S", type=count, default=4, help="number of workers on each node (4)")
        of_app.add_argument(
            "--factor",
            metavar="F",
            type=_part,
            default=0.1,
            help="by which part a node may have more than its share of the tasks (0.1)",
        )
        of_app.add_argument("--picture", metavar="FILE", help="write a picture of the plan to this file (SVG)")

    listed = commands.add_parser(
        "jobs",
        parents=[everywhere],
        help="list the running jobs",
        description="List the running jobs of the cluster; without an address, those of all clusters on this machine.",
    )
    listed.set_defaults(run=_jobs)
    listed.add_argument("--json", action="store_true", help="print the status of each job as JSON")
    _add_cluster_option(listed)

    for name, action, about in (
        ("status", _status, "show what a running job does"),
        ("stop", _stop, "end a job's sources, let all records that were read come through, and wait for the end"),
        ("cancel", _cancel, "end a job at once; records on their way are dropped"),
    ):
        command = commands.add_parser(name, parents=[everywhere], help=about, description=_sentence(about))
        command.set_defaults(run=action)
        command.add_argument("name", metavar="NAME", nargs="?", help=_ONE)
        _add_cluster_option(command)
        if name == "status":
            command.add_argument("--json", action="store_true", help="print the whole status as JSON")
        else:
            command.add_argument("--no-wait", dest="wait", action="store_false", help="return at once")
        if name == "stop":
            command.add_argument(
                "--savepoint",
                metavar="URL",
                type=_place,
                help="end the job between two records instead, with open windows and timers saved in this directory or "
                "URL, and wait until it has ended",
            )

    def add(
        name: str, action: Callable[[argparse.Namespace], int], brief: str, about: str, *, running: bool = True
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[everywhere], help=brief, description=about)
        command.set_defaults(run=action)
        command.add_argument("name", metavar="NAME", nargs="?" if running else None, help=_ONE if running else _NAME)
        return command

    savepoint = add("savepoint", _savepoint, "save a running job's state in a place that you name", _ABOUT_SAVEPOINT)
    savepoint.add_argument("url", metavar="URL", type=_place, help="a directory or a URL such as s3://bucket/prefix")
    savepoint.add_argument(
        "--timeout", metavar="S", type=seconds, help="give the savepoint up after this many seconds (never)"
    )
    _add_cluster_option(savepoint)

    rescale = add("rescale", _rescale, "give an operator of a running job more or fewer tasks", _ABOUT_RESCALE)
    rescale.add_argument("operator", metavar="OPERATOR", help="the operator's name")
    rescale.add_argument("parallelism", metavar="N", type=count, help="the new number of tasks")
    _add_cluster_option(rescale)

    resume = add(
        "resume",
        _resume,
        "start a job again from its last epoch, after it has failed or its cluster has gone",
        _ABOUT_RESUME,
        running=False,
    )
    resume.add_argument(
        "--checkpoints", metavar="URL", type=_place, help=f"the --checkpoints with which the job was run ({_STATE})"
    )
    resume.add_argument("--workers", metavar="W", type=count, help="number of worker processes (as before)")
    _add_driver_options(resume)
    return parser


def _add_cluster_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", metavar="A", help="address of the Ray cluster (the one on this machine)")


def _place(text: str) -> str:
    """Reads a directory or URL from the command line, in a form that other processes understand too."""
    try:
        path = filesystems.local_path(text)
    except filesystems.BadPlace as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text if path is None else os.path.abspath(os.path.expanduser(path))


def _part(text: str) -> float:
    """Reads a fraction of 0 or more from the command line."""
    try:
        return seconds(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more, such as 0.1") from None


def _port_range(text: str) -> tuple[int, int]:
    """Reads the first and the last port of a range from the command line."""
    first, _, last = text.partition("-")
    try:
        return checked_ports((int(first), int(last)))
    except (ValueError, OptionError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the first and the last port of a range, such as 20000-20999"
        ) from None


def _restarts(text: str) -> int:
    """Reads a whole number of 0 or more from the command line."""
    return 0 if text == "0" else count(text)


def _app_parsers(
    known: Mapping[str, App],
    command: argparse.ArgumentParser,
    everywhere: argparse.ArgumentParser,
    *,
    workers: bool = True,
) -> Iterator[tuple[App, argparse.ArgumentParser]]:
    """Adds a parser for each application to a command, with the options that all of them take. With `workers` they also
    take --workers."""
    choices = command.add_subparsers(title="applications", metavar="APP", required=True)
    for app in known.values():
        parser = choices.add_parser(
            app.name,
            parents=[everywhere],
            help=app.about.replace("%", "%%"),  # it may have a file's name, and argparse formats it
            description=_sentence(app.about),
            allow_abbrev=False,
        )
        app.add_options(parser)
        name = app.default_name or app.name
        parser.add_argument("--name", metavar="NAME", default=name, help=f"name of the job ({name})")
        if workers:
            parser.add_argument(
                "--workers", metavar="W", type=count, default=_WORKERS, help=f"number of worker processes ({_WORKERS})"
            )
        parser.add_argument(
            "--parallelism",
            metavar="P",
            type=count,
            help="number of tasks of each operator that does not set its own (W)",
        )
        yield app, parser


def _add_running_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ring-bytes",
        metavar="B",
        type=count,
        help="size of each worker's inbox, a power of two (2 MiB)",
    )
    parser.add_argument(
        "--epoch-interval",
        metavar="S",
        type=seconds,
        help="seconds between epochs, to which the job goes back when a process dies; with 0 there are no epochs, and "
        "the job fails when a process dies (1)",
    )
    parser.add_argument(
        "--checkpoints", metavar="URL", type=_place, help=f"where to save epochs: a directory or a URL ({_STATE})"
    )
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        type=_restarts,
        help="deaths of workers within ten minutes that the job survives (10)",
    )
    parser.add_argument("--savepoint", metavar="URL", type=_place, help="start from the savepoint that is saved there")
    parser.add_argument(
        "--dual",
        metavar="MODE",
        default="off",
        help="on: a burst goes through Spark in micro-batches; spark-only: all records go through Spark; toggle:S: to "
        "Spark and back every S seconds; off: Spark is not used (off). Settings follow a comma: on,delta=0.3",
    )
    parser.add_argument(
        "--placement",
        metavar="HOW",
        default="auto",
        choices=METHODS,
        help=f"how tasks are assigned to workers: {', '.join(METHODS)} (auto, which penstock plan APP shows)",
    )
    parser.add_argument(
        "--nodes", metavar="N", type=count, help="number of Ray nodes over which the workers are spread (one)"
    )
    parser.add_argument(
        "--replan",
        metavar="S",
        type=_replan,
        help="measure the traffic, and move tasks when it is worth it, every S seconds (never); auto: every 10 in a "
        "job that has several workers and epochs and uses no Spark",
    )
    parser.add_argument(
        "--no-spares",
        action="store_true",
        help="keep no spare processes, from which dead workers come back sooner",
    )
    parser.add_argument(
        "--transport",
        metavar="NAME",
        default="auto",
        choices=TRANSPORTS,
        help=f"what carries records between machines: {', '.join(TRANSPORTS)} (auto)",
    )
    parser.add_argument(
        "--ports",
        metavar="FIRST-LAST",
        type=_port_range,
        help="the ports at which the job's processes may listen for other machines (any)",
    )
    parser.add_argument(
        "--tls",
        action="store_true",
        help="encrypt what the job's processes send to other machines, by a certificate that the job makes",
    )
    parser.add_argument(
        "--tls-files",
        metavar=("CERTIFICATE", "KEY", "AUTHORITY"),
        nargs=3,
        help="encrypt it by these files, which are at the same place on all machines",
    )
    parser.add_argument(
        "--node-timeout",
        metavar="S",
        type=seconds,
        help=f"a machine is lost when it has not answered for S seconds, 1 or more ({NODE_TIMEOUT_S:g})",
    )
    _add_driver_options(parser)


def _add_driver_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="A",
        help="address of a Ray cluster, or 'local' to start a new one (the one on this machine, else a new one)",
    )
    parser.add_argument(
        "--local",
        action="store_true",
        help="run the workers as child processes of this command, without Ray; other commands do not see the job",
    )
    parser.add_argument(
        "--detached", action="store_true", help="return at once and leave the job running on the cluster"
    )
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="show no live progress")


def _unknown_app(arguments: list[str]) -> str | None:
    """Returns the message about an unknown application. The message of argparse would only list the names."""
    if len(arguments) < 2 or arguments[0] not in _OF_APPS:
        return None
    name = arguments[1]
    if name.startswith("-") or name in APPS or own.is_meant(name):
        return None
    if name in OF_THE_REPOSITORY:
        return (
            f"{name!r} is an application of Penstock's repository, and the installed package does not have it; clone "
            f"the repository, run make setup there, and then .venv/bin/penstock {arguments[0]} {name}"
        )
    near = difflib.get_close_matches(name, APPS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    listed = "\n".join(f"  {app.name:<12}{app.about}" for app in APPS.values())
    return (
        f"there is no application {name!r}{hint} There are:\n{listed}\n"
        f"A flow of your own: penstock {arguments[0]} file.py:flow, or module:flow"
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _brief(action: argparse.Action) -> str:
    flag = action.option_strings[-1]
    return flag if action.nargs == 0 else f"{flag} {action.metavar or action.dest.upper()}"


def _ago(age_s: float) -> str:
    for unit, size in (("days", 86_400.0), ("hours", 3600.0), ("min", 60.0)):
        if age_s >= 2 * size:
            return f"{age_s / size:.0f} {unit} ago"
    return f"{max(0.0, age_s):.0f} s ago"


@contextmanager
def _output() -> Iterator[None]:
    """Surrounds everything that prints results, and writes them to the end. A reader that has gone wants no more
    results, so this is no failure; any other error is raised as a PenstockError."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # The interpreter writes at its end what is left.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        if not isinstance(error, BrokenPipeError):
            raise PenstockError(f"the results cannot be written to standard output: {error.strerror}") from error


def _print_table(table: Any) -> None:
    """Prints a table of rich. If nobody reads standard output, rich itself would end the process."""
    from rich.console import Console

    console = Console()
    with console.capture() as drawn:
        console.print(table)
    print(drawn.get(), end="")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(error: Exception, code: int, options: argparse.Namespace) -> int:
    if options.debug:
        raise error
    flags = _FLAGS if getattr(options, "tls_files", None) is None else {**_FLAGS, "tls": "--tls-files"}
    text = error.spelled(partial(_spelled, flags)) if isinstance(error, OptionError) else str(error).strip()
    return _complain(text or type(error).__name__, code)


def _spelled(flags: Mapping[str, str], option: str, *value: object) -> str:
    """Returns an option of `run` or `resume`, and its value if there is one, as users of the command write it. `flags`:
    the options that have another name there."""
    flag = flags.get(option, f"--{option.replace('_', '-')}")
    if not value or value[0] is True:
        return flag
    given = value[0]
    if isinstance(given, tuple):  # a range of ports
        given = "-".join(map(str, given))
    if given is None:  # which turns epochs off in `run`
        given = 0
    return f"{flag} {given:g}" if isinstance(given, float) else f"{flag} {shlex.quote(str(given))}"


def _complain(text: str, code: int) -> int:
    _say(f"penstock: {text}")
    return code


if __name__ == "__main__":
    sys.exit(main())
