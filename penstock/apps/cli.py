"""The `penstock` command.

Exit codes: 0 the job finished, or was stopped and drained; 1 it failed, or something else did; 2 it could not start
as asked (a wrong option, an input that is not there); 130 it was cancelled by Ctrl-C. Results go to stdout, everything
else to stderr. Where stdout is closed, or its reader has gone (`| head`), results go nowhere, and that is no failure.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import click

import penstock
from penstock.apps import user_file
from penstock.apps.app import App, Built
from penstock.apps.catalog import APPS, OF_THE_REPOSITORY
from penstock.apps.command_line import (
    COUNT,
    SECONDS,
    Group,
    Options,
    command,
    given_of_job,
    of_job,
    output,
    place,
    shows,
    spelled,
    what_is_wrong,
    words,
)
from penstock.host.decide.job_state import ENDED
from penstock.jobs.options import JobOptions
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
from penstock.runtime.status import JobStatus
from penstock.runtime.storage import filesystems

if TYPE_CHECKING:
    from penstock.jobs.job import Job
    from penstock.runtime.epochs.manifest import Manifest

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130

_WORKERS = 2  # the fewest with which records travel between processes
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

_OWN_EXAMPLES = """\
examples of a flow of your own:
  penstock run orders.py:flow --workers 2                the Flow named flow in orders.py
  penstock run orders.py:build                           the flow that the function build() returns
  penstock run orders.py --help                          the options of such a flow
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
    debug = "--debug" in arguments
    told = _Told()
    cluster = logging.getLogger("penstock.actors.cluster")
    before = cluster.level
    if arguments[:1] in (["run"], ["resume"]) and "--no-progress" not in arguments:
        cluster.addHandler(told)
        cluster.setLevel(logging.INFO)
    try:
        root = _root()
        code: int = root.invoke(root.make_context("penstock", arguments))
    except click.exceptions.Exit as end:  # of --help and --version
        return end.exit_code
    except click.UsageError as error:
        _say(what_is_wrong(error))
        return MISUSED
    # ConnectionError: no Ray cluster at --address; TimeoutError: of --timeout
    except (PenstockError, ConnectionError, TimeoutError) as error:
        if debug:
            raise
        files = "--tls-files" in arguments
        return _fail(
            error, MISUSED if isinstance(error, FlowError) else FAILED, tls="--tls-files" if files else "--tls"
        )
    finally:
        cluster.removeHandler(told)
        cluster.setLevel(before)
    return code


class _Told(logging.Handler):
    """Prints Penstock's log about the Ray cluster, because starting or finding it takes the first seconds."""

    def emit(self, record: logging.LogRecord) -> None:
        _say(record.getMessage())


# --- the commands ----------------------------------------------------------------------------------------------


def _run(options: SimpleNamespace) -> int:
    """Runs an application, or a flow of your own. For a flow of your own, give FILE.py:NAME or MODULE:NAME in place of
    APP. NAME is a Flow, or a function without arguments that returns one. You may leave out :NAME when the file has
    only one flow."""
    from penstock.jobs.prepare import prepare
    from penstock.jobs.run import start

    app: App = options.app
    built = app.build(options)
    prepared = prepare(built.flow, _options_of_new_job(options))
    _say(f"{app.name}: {built.intro}; {options.workers} worker{'s' * (options.workers != 1)}")
    return _until_the_end(start(prepared), options, built)


def _options_of_new_job(options: SimpleNamespace) -> JobOptions:
    given = given_of_job(options)
    if options.epoch_interval_s == 0 and options.checkpoints is not None:
        raise OptionError(
            "{checkpoints} says where epochs are saved, but {epoch_interval_s=} turns epochs off; leave out "
            "{checkpoints} or {epoch_interval_s}",
            {"epoch_interval_s": None},
        )
    if options.tls_files is not None:
        from penstock.runtime.transport.certificates import Tls

        given["tls"] = Tls(*options.tls_files)
    return JobOptions(**given)


def _resume(options: SimpleNamespace) -> int:
    """Starts a job again from its last complete epoch, after it has failed or its driver, cluster or machine has gone.
    The flow, its options and its state come from the checkpoint store; nothing else is needed. The command shows live
    progress and waits for the end of the job, as run does. It does not print the records of Collect sinks (such as the
    words that `run wordcount` prints without --output)."""
    from penstock.jobs.prepare import prepare_to_resume
    from penstock.jobs.run import start

    last = _last_epoch(options.name, options.checkpoints)
    job = start(prepare_to_resume(options.name, JobOptions(**given_of_job(options))))
    if last is not None:
        _say(f"{job.name}: continues from epoch {last.epoch}, which was saved {_ago(time.time() - last.created)}")
    return _until_the_end(job, options)


def _until_the_end(job: Job, options: SimpleNamespace, built: Built | None = None) -> int:
    """Waits for the end of a job, unless the job is detached, and prints its outcome. Returns the exit code."""
    if options.detached:
        _say(f"job {job.name!r} runs detached; next: penstock status {job.name}, penstock stop {job.name}")
        return OK
    began = time.time()
    with _Interrupts(job) as interrupts:
        try:
            status = job.wait(progress=options.progress)
        except (JobFailed, NotEnoughResources, StoreError) as error:
            code = _fail(error, FAILED)
            _say_how_to_resume(job.name, options.checkpoints, began if built is not None else 0.0)
            return code
    ran = status.running_s
    continued = "was resumed" if built is None else "started from the savepoint" if options.savepoint else None
    try:
        with output():
            if built is not None and status.state != "CANCELLED":
                for line in built.results(status, ran):
                    print(line)
    finally:
        _say(_summary(status, ran, continued))
    if built is not None:
        _say(_next_steps(built))
    if status.state == "CANCELLED":
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


def _apps(options: SimpleNamespace) -> int:
    with output():
        for app in APPS.values():
            print(f"{app.name:<12}{app.about}")
            print(f"{'':<12}{'  '.join(map(_brief, _own_options(app)))}")
        print("\nevery application takes --workers, --parallelism and more: penstock run APP --help")
    return OK


def _explain(options: SimpleNamespace) -> int:
    """Shows an application's logical and physical plan, without running it. It takes the options of run."""
    from penstock.jobs.prepare import planned
    from penstock.runtime.program.explain import explain

    found = planned(options.app.build(options).flow, _options_of_new_job(options))
    with output():
        print(explain(found.flow, found.plan, options.workers), end="")
    return OK


def _plan(options: SimpleNamespace) -> int:
    """Shows on which nodes and workers an application's tasks would run, and the traffic between nodes, compared with
    other methods. The application does not run."""
    from penstock.apps import plan_view
    from penstock.jobs.prepare import planned
    from penstock.placement import baselines
    from penstock.placement.at_start import plan_at_start
    from penstock.placement.planner import plan
    from penstock.placement.shape import shape_of
    from penstock.placement.topology import of_plan
    from penstock.placement.traffic import Node

    nodes = [Node(f"node {number}", options.slots) for number in range(1, options.nodes + 1)]
    job = JobOptions(workers=options.nodes * options.slots, **given_of_job(options))
    tasks = planned(options.app.build(options).flow, job).plan
    topology = of_plan(tasks)
    ours = plan_at_start(shape_of(tasks), nodes, factor=options.factor)
    placements = {
        "penstock": ours,
        "traffic": plan(topology.graph, nodes, factor=options.factor),
        **baselines.all_of(topology, nodes, factor=options.factor),
    }
    with output():
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


def _status(options: SimpleNamespace) -> int:
    status = _attach(options).status()
    if options.json:
        with output():
            print(json.dumps(status.plain(), indent=2))
        return OK
    from penstock.jobs.progress import epochs, line, processes, table

    with output():
        print(line(status))
        if status.epochs.store is not None:
            print(epochs(status))
        _print_table(table(status))
        for said in processes(status):
            print(said)
    return OK


def _jobs(options: SimpleNamespace) -> int:
    """Lists the running jobs of the cluster; without an address, the jobs of all clusters on this machine."""
    from penstock.jobs.progress import line
    from penstock.jobs.run import jobs

    found = jobs(address=options.address)
    with output():
        if options.json:
            print(json.dumps([status.plain() for status in found], indent=2))
            return OK
        for status in found:
            print(f"{line(status)}  [Ray at {status.cluster}]")
    if not found:
        _say("no job runs")
    return OK


def _stop(options: SimpleNamespace) -> int:
    if options.savepoint is None:
        return _end(_attach(options), "stop", options)
    job = _attach(options)
    job.stop(savepoint=options.savepoint)
    _say(
        f"job {job.name!r} has stopped, and is saved in {filesystems.named(options.savepoint)}; "
        f"next: penstock run APP --savepoint {_to_type(options.savepoint)}"
    )
    return OK


def _cancel(options: SimpleNamespace) -> int:
    return _end(_attach(options), "cancel", options)


def _savepoint(options: SimpleNamespace) -> int:
    """Saves the state of a running job in a place that you name, and waits until it is written. The job continues. The
    savepoint stays there whatever happens to the job. penstock run APP --savepoint URL starts a job from it."""
    options.name, url = options.words
    job = _attach(options)
    job.savepoint(url, options.timeout)
    _say(f"saved job {job.name!r} in {filesystems.named(url)}; next: penstock run APP --savepoint {_to_type(url)}")
    return OK


def _rescale(options: SimpleNamespace) -> int:
    """Gives an operator of a running job, and the operators fused with it, N tasks, and waits until these tasks run.
    penstock status NAME lists the operators and their tasks."""
    options.name, operator, parallelism = options.words
    job = _attach(options)
    before = job.status().operators
    job.rescale(operator, parallelism)
    after = job.status().operators
    # Operators that are fused with the named one have changed too.
    changed = [name for name in after if name in before and after[name]["parallelism"] != before[name]["parallelism"]]
    tasks = f"{parallelism} task{'s' * (parallelism != 1)}"
    if len(changed) > 1:
        which = f"{', '.join(changed[:-1])} and {changed[-1]} run in {tasks} each"
    else:
        which = f"{operator} runs in {tasks}"
    _say(f"job {job.name!r}: {which}; next: penstock status {job.name}")
    return OK


def _end(job: Job, how: Literal["stop", "cancel"], options: SimpleNamespace) -> int:
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
    _say(f"job {job.name!r} ended in {time.monotonic() - started:.1f} s: {status.state.lower()}")
    return OK


def _attach(options: SimpleNamespace) -> Job:
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


def _summary(status: JobStatus, ran: float, continued: str | None = None) -> str:
    """Returns one line about a job that has ended. `continued` says how the job continued ("was resumed"), if it did:
    its counts then include records from before this run, so no rate is shown."""
    read = status.records_read
    latency = status.latency_all_ms
    parts = [f"{status.name} {status.state.lower()}"]
    if continued is not None:
        parts[0] += f" {ran:.1f} s after it {continued}"
    else:
        parts[0] += f": {read:,} records in {ran:.1f} s"
        parts.append(f"{read / ran if ran else 0:,.0f} records/s")
    if latency.get("p50") is not None:
        parts.append(f"latency p50 {latency['p50']:.2f} ms, p99 {latency['p99']:.2f} ms")
    if status.skipped:
        parts.append(f"{status.skipped:,} skipped")
    restarts = status.epochs.restarts
    if restarts:
        from penstock.jobs.progress import times

        parts.append(f"restarted {times(restarts)}")
    return "; ".join(parts)


def _next_steps(built: Built) -> str:
    return "next: " + "\n      ".join([*built.next_steps, "penstock apps"])


# --- the command line -----------------------------------------------------------------------------------------


class _OfApps(Group):
    """A command whose subcommands are the applications, and flows of the user's own."""

    def __init__(
        self,
        name: str,
        action: Callable[[SimpleNamespace], int],
        brief: str,
        *params: click.Parameter,
        epilog: str = "",
    ) -> None:
        about = inspect.getdoc(action)
        super().__init__(name, short_help=brief, help=about, epilog=epilog, subcommand_metavar="APP [OPTIONS]")
        self._action, self._of_all = action, params

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(APPS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Returns the command for an application. Raises FlowError when there is none of this name."""
        if name.startswith("-"):
            return None
        if name not in APPS and not user_file.is_meant(name):
            raise FlowError(_unknown_app(str(self.name), name))
        app = APPS[name] if name in APPS else user_file.user_app(name)
        named = app.default_name or app.name
        options = _own_options(app)
        options.add("--name", metavar="NAME", default=named, help=f"name of the job ({named})")
        return command(app.name, self._action, app.about, *options, *self._of_all, app=app)


def _root() -> click.Command:
    """Returns the whole command."""
    name = click.Argument(["name"], required=False, metavar="[NAME]")
    address = click.Option(["--address"], metavar="A", help="address of the Ray cluster (the one on this machine)")
    as_json = click.Option(["--json"], is_flag=True, help="print all that the status has, as JSON")
    no_wait = click.Option(["--no-wait", "wait"], is_flag=True, flag_value=False, default=True, help="return at once")
    progress = click.Option(
        ["--no-progress", "progress"], is_flag=True, flag_value=False, default=True, help="show no live progress"
    )
    files = click.Option(
        ["--tls-files"],
        metavar="CERTIFICATE KEY AUTHORITY",
        nargs=3,
        help="do what --tls does by these files, which are at the same place on all machines",
    )
    stops_at = click.Option(
        ["--savepoint"],
        metavar="URL",
        type=place,
        help="end the job between two records instead, with open windows and timers saved in this directory or URL, "
        "and wait until it has ended",
    )
    gives_up = click.Option(
        ["--timeout"], metavar="S", type=SECONDS, help="give the savepoint up after this many seconds (never)"
    )
    to_show = Options()
    to_show.add("--nodes", metavar="N", type=COUNT, default=4, help="number of nodes (4)")
    to_show.add("--slots", metavar="S", type=COUNT, default=4, help="number of workers on each node (4)")
    to_show.add(
        "--factor",
        metavar="F",
        type=SECONDS,
        default=0.1,
        help="by which part a node may have more than its share of the tasks (0.1)",
    )
    to_show.add("--picture", metavar="FILE", help="write a picture of the plan to this file (SVG)")

    return Group(
        "penstock",
        help="Run Penstock's applications and flows of your own, and control running jobs.",
        epilog=_EPILOG,
        params=[shows("--version", "show the version", lambda _: f"penstock {penstock.__version__}")],
        commands=[
            _OfApps(
                "run",
                _run,
                "run an application, or a flow of your own: FILE.py:flow",
                *(*of_job(workers=_WORKERS), files, progress),
                epilog=_OWN_EXAMPLES,
            ),
            command("apps", _apps, "list the applications and their options"),
            _OfApps(
                "explain",
                _explain,
                "show an application's plan, with the options of run",
                *(*of_job(workers=_WORKERS), files),
            ),
            _OfApps("plan", _plan, "show where an application's tasks would run", *of_job("parallelism"), *to_show),
            command("jobs", _jobs, "list the running jobs", as_json, address),
            command("status", _status, "show the work of a running job", name, address, as_json),
            command(
                "stop",
                _stop,
                "end a job's sources, let all records that were read come through, and wait for the end",
                *(name, address, no_wait, stops_at),
            ),
            command("cancel", _cancel, "end a job at once; records on their way are dropped", name, address, no_wait),
            command(
                "savepoint",
                _savepoint,
                "save a running job's state in a place that you name",
                *(words("[NAME] URL", place), gives_up, address),
            ),
            command(
                "rescale",
                _rescale,
                "give an operator of a running job more or fewer tasks",
                *(words("[NAME] OPERATOR N", str, COUNT), address),
            ),
            command(
                "resume",
                _resume,
                "start a job again from its last epoch, after it has failed or its cluster has gone",
                click.Argument(["name"], metavar="NAME"),
                *of_job("checkpoints", "workers", "address", "local", "detached"),
                progress,
            ),
        ],
    )


def _own_options(app: App) -> Options:
    """Returns the options that only this application has."""
    options = Options()
    app.add_options(options)
    return options


def _unknown_app(command: str, name: str) -> str:
    """Returns the message about an unknown application."""
    if name in OF_THE_REPOSITORY:
        return (
            f"{name!r} is an application of Penstock's repository, and the installed package does not have it; clone "
            f"the repository, run make setup there, and then .venv/bin/penstock {command} {name}"
        )
    near = difflib.get_close_matches(name, APPS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    listed = "\n".join(f"  {app.name:<12}{app.about}" for app in APPS.values())
    return (
        f"there is no application {name!r}{hint} There are:\n{listed}\n"
        f"A flow of your own: penstock {command} file.py:flow, or module:flow"
    )


def _brief(option: click.Option) -> str:
    return option.opts[-1] if option.is_flag else f"{option.opts[-1]} {option.metavar}"


def _ago(age_s: float) -> str:
    for unit, size in (("days", 86_400.0), ("hours", 3600.0), ("min", 60.0)):
        if age_s >= 2 * size:
            return f"{age_s / size:.0f} {unit} ago"
    return f"{max(0.0, age_s):.0f} s ago"


def _print_table(table: Any) -> None:
    """Prints a table of rich. If nobody reads standard output, rich itself would end the process."""
    from rich.console import Console

    console = Console()
    with console.capture() as drawn:
        console.print(table)
    print(drawn.get(), end="")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(error: Exception, code: int, tls: str = "--tls") -> int:
    """Prints an error. `tls`: the option of the command that has given `run(tls=)`."""

    def spell(option: str, *value: object) -> str:
        return tls if option == "tls" else spelled(option, *value)

    text = error.spelled(spell) if isinstance(error, OptionError) else str(error).strip()
    return _complain(text or type(error).__name__, code)


def _complain(text: str, code: int) -> int:
    _say(f"penstock: {text}")
    return code


if __name__ == "__main__":
    sys.exit(main())
