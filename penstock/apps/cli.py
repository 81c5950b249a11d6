"""The `penstock` command.

Exit codes: 0 the job finished, or was stopped and drained; 1 it failed, or something else did; 2 it could not start
as asked (a wrong option, an input that is not there); 130 it was cancelled by Ctrl-C. Results go to stdout, all else
to stderr.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import penstock
from penstock.apps.app import App, Prepared, Status, count, seconds
from penstock.apps.catalog import APPS
from penstock.placement.options import METHODS
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import FlowError, JobFailed, NotEnoughResources, PenstockError, StoreError

if TYPE_CHECKING:
    from penstock.actors import Job
    from penstock.runtime.epochs.manifest import Manifest

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130

_WORKERS = 2  # the fewest with which records travel between processes
_STATE = "penstock/ below XDG_STATE_HOME or ~/.local/state"
_EPILOG = """\
examples:
  penstock run wordcount                                 count a text's words, with live progress
  penstock run wordcount --input 'logs/*.txt' --output counts/
  penstock run sol --rate 5000 --workers 2               latency of hops, operator by operator
  penstock explain wordcount --workers 4                 the plan, without running it
  penstock plan sol --nodes 4 --slots 4                  where its tasks would run, and what would cross
  penstock run APP --help                                the options of an application

While a job runs: Ctrl-C ends its sources and lets everything under way come through; a second Ctrl-C
cancels it. From another terminal, on the same cluster: penstock status NAME, penstock stop NAME,
penstock savepoint NAME DIR, penstock rescale NAME OPERATOR N.

A job goes on by itself when its processes die. One that has failed, or whose cluster or driver has gone,
is started again from its last complete epoch by penstock resume NAME.
"""

_ABOUT_RESUME = """\
Start a job again that has failed, or whose driver, cluster or machine has gone, from its last complete
epoch. The flow, its options and its state are taken from the store of its epochs; nothing else is needed.
Shows live progress and waits for the end, as run does. What a Collect sink has (the words that `run
wordcount` prints when it is given no --output) is not printed.
"""
_ABOUT_SAVEPOINT = """\
Save the state of a running job at a place of its own, where it stays whatever becomes of the job, and wait
until it is written. The job goes on. To start from it: penstock run APP --savepoint URL.
"""
_ABOUT_RESCALE = """\
Give an operator of a running job, and those that run fused with it, N tasks, and wait until they run. The
operators and their tasks are what penstock status NAME shows.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    unknown = _unknown_app(arguments)
    if unknown is not None:
        return _complain(unknown, MISUSED)
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as end:  # --help, --version, a wrong option: argparse has said what there is to say
        return end.code if isinstance(end.code, int) else FAILED
    try:
        code: int = options.run(options)
    except FlowError as error:
        return _fail(error, MISUSED, options)
    except (PenstockError, ConnectionError) as error:  # ConnectionError: no Ray cluster at --address
        return _fail(error, FAILED, options)
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


# --- the commands ----------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    app: App = options.app
    prepared = _prepare(app, options)
    prepared.flow.plan(options.workers)  # what is wrong with it should show before Ray is started
    _say(f"{app.name}: {prepared.intro}; {options.workers} worker{'s' * (options.workers != 1)}")
    from penstock import actors

    if options.epoch_interval == 0 and options.checkpoints is not None:
        raise FlowError("--checkpoints says where epochs are saved, and with --epoch-interval 0 there are none")
    given = {"ring_bytes": options.ring_bytes, "max_restarts": options.max_restarts}
    if options.epoch_interval is not None:
        given["epoch_interval_s"] = options.epoch_interval or None
    job = actors.run(
        prepared.flow,
        workers=options.workers,
        detached=options.detached,
        address=options.address,
        checkpoints=options.checkpoints,
        savepoint=options.savepoint,
        dual=options.dual,
        placement=options.placement,
        nodes=options.nodes,
        replan_s=options.replan,
        **{name: value for name, value in given.items() if value is not None or name == "epoch_interval_s"},
    )
    return _until_the_end(job, options, prepared)


def _resume(options: argparse.Namespace) -> int:
    from penstock import actors

    last = _last_epoch(options.name, options.checkpoints)
    job = actors.resume(
        options.name,
        checkpoints=options.checkpoints,
        workers=options.workers,
        detached=options.detached,
        address=options.address,
    )
    if last is not None:
        _say(f"{job.name}: goes on from epoch {last.epoch}, of {_ago(time.time() - last.created)}")
    return _until_the_end(job, options)


def _until_the_end(job: Job, options: argparse.Namespace, prepared: Prepared | None = None) -> int:
    """Wait for a job's end, unless it is detached, and say what came of it."""
    if options.detached:
        _say(f"job {job.name!r} runs on; next: penstock status {job.name}, penstock stop {job.name}")
        return OK
    began = time.time()
    with _Interrupts(job) as interrupts:
        try:
            status = job.wait(progress=options.progress)
        except (JobFailed, NotEnoughResources) as error:
            code = _fail(error, FAILED, options)
            _say_how_to_resume(job.name, options.checkpoints, began if prepared is not None else 0.0)
            return code
    ran = status.get("running_s", 0.0)
    if prepared is not None and status["state"] != "CANCELLED":
        for line in prepared.results(status, ran):
            print(line)
    sys.stdout.flush()
    _say(_summary(status, ran, resumed=prepared is None))
    if prepared is not None:
        _say(_next_steps(prepared))
    if status["state"] == "CANCELLED":
        return INTERRUPTED if interrupts.count else FAILED
    return OK


def _last_epoch(name: str, checkpoints: str | None) -> Manifest | None:
    """The epoch that `resume` would go on from, if there is one and the store can be read."""
    from penstock.actors.run import default_checkpoints

    try:
        found = Store.open(checkpoints or default_checkpoints(), name).latest()
    except StoreError:
        return None
    return None if found is None or found[0].program is None else found[0]


def _say_how_to_resume(name: str, checkpoints: str | None, since: float) -> None:
    """Of a job that has failed: how to go on, when it has saved an epoch `since` (an older one is another job's)."""
    last = _last_epoch(name, checkpoints)
    if last is not None and last.created >= since:
        where = "" if checkpoints is None else f" --checkpoints {shlex.quote(checkpoints)}"
        _say(f"next: penstock resume {name}{where}   (from epoch {last.epoch}, when its cause is mended)")


def _apps(options: argparse.Namespace) -> int:
    for app in APPS.values():
        print(f"{app.name:<12}{app.about}")
        parser = argparse.ArgumentParser(add_help=False)
        app.add_options(parser)
        print(f"{'':<12}{'  '.join(_brief(action) for action in parser._actions)}")
    print("\nall take --workers, --parallelism and more: penstock run APP --help")
    return OK


def _explain(options: argparse.Namespace) -> int:
    app: App = options.app
    print(_prepare(app, options).flow.explain(options.workers), end="")
    return OK


def _plan(options: argparse.Namespace) -> int:
    from rich.console import Console

    from penstock.apps import plan_view
    from penstock.placement import baselines
    from penstock.placement.planner import plan
    from penstock.placement.topology import of_plan
    from penstock.placement.traffic import Node

    nodes = [Node(f"node {number}", options.slots) for number in range(1, options.nodes + 1)]
    topology = of_plan(_prepare(options.app, options).flow.plan(options.nodes * options.slots))
    ours = plan(topology.graph, nodes, factor=options.factor)
    placements = {"penstock": ours, **baselines.all_of(topology, nodes, factor=options.factor)}
    for line in plan_view.by_node(topology, ours):
        print(line)
    print()
    Console().print(plan_view.comparison(topology, placements))
    print("\ntraffic in parts of what one source puts out; every operator is taken to put out what it takes in")
    if "METIS" not in placements:
        print("METIS is not among them: pip install pymetis")
    if options.picture is not None:
        text = plan_view.picture(topology, ours, options.app.name)
        try:
            with open(options.picture, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise FlowError(f"the picture cannot be written to {options.picture}: {error.strerror}") from error
        _say(f"wrote {options.picture}")
    return OK


def _prepare(app: App, options: argparse.Namespace) -> Prepared:
    prepared = app.build(options)
    prepared.flow.parallelism = options.parallelism
    return prepared


def _status(options: argparse.Namespace) -> int:
    status = _attach(options).status()
    if options.json:
        print(json.dumps(status, indent=2))
        return OK
    from rich.console import Console

    from penstock.actors.progress import epochs, line, table

    print(line(status))
    if status.get("epochs"):
        print(epochs(status))
    Console().print(table(status))
    for worker in status.get("workers", ()):
        print(f"worker {worker['index']}: process {worker['pid']}, {len(worker['tasks'])} tasks")
    return OK


def _stop(options: argparse.Namespace) -> int:
    job = _attach(options)
    job.stop()
    return _ended(job, options)


def _cancel(options: argparse.Namespace) -> int:
    job = _attach(options)
    job.cancel()
    return _ended(job, options)


def _savepoint(options: argparse.Namespace) -> int:
    job = _attach(options)
    job.savepoint(options.url)
    _say(f"saved job {job.name!r} in {options.url}; next: penstock run APP --savepoint {shlex.quote(options.url)}")
    return OK


def _rescale(options: argparse.Namespace) -> int:
    job = _attach(options)
    job.rescale(options.operator, options.parallelism)
    tasks = f"{options.parallelism} task{'s' * (options.parallelism != 1)}"
    _say(f"job {job.name!r}: {options.operator} runs in {tasks}; next: penstock status {job.name}")
    return OK


def _ended(job: Job, options: argparse.Namespace) -> int:
    if not options.wait:
        _say(f"told job {job.name!r}")
        return OK
    started = time.monotonic()
    status = job.wait(progress=False)
    _say(f"job {job.name!r} ended in {time.monotonic() - started:.1f} s: {status['state'].lower()}")
    return OK


def _attach(options: argparse.Namespace) -> Job:
    from penstock import actors

    return actors.attach(options.name, address=options.address)


# --- while a job runs -----------------------------------------------------------------------------------------


class _Interrupts:
    """Ctrl-C (or SIGTERM): the first time the job is stopped, the second cancelled, the third gives up waiting.

    The job is told by threads of their own, because a signal handler may run in the middle of anything.
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
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1:
            _say("\nstopping: what was read comes through; again to cancel")
            threading.Thread(target=self._job.stop, name="penstock-stop", daemon=True).start()
        elif self.count == 2:
            _say("\ncancelling")
            threading.Thread(target=self._job.cancel, name="penstock-cancel", daemon=True).start()
        else:
            raise KeyboardInterrupt


def _summary(status: Status, ran: float, *, resumed: bool) -> str:
    """`resumed`: the counts may go back to before the time that the job ran, so there is no rate."""
    read = status.get("records_read", 0)
    latency = status.get("latency_all_ms") or {}
    parts = [f"{status['name']} {status['state'].lower()}"]
    if resumed:
        parts[0] += f" {ran:.1f} s after it went on"
    else:
        parts[0] += f": {read:,} records in {ran:.1f} s"
        parts.append(f"{read / ran if ran else 0:,.0f} records/s")
    if latency.get("p50") is not None:
        parts.append(f"latency p50 {latency['p50']:.2f} ms, p99 {latency['p99']:.2f} ms")
    if status.get("skipped"):
        parts.append(f"{status['skipped']:,} skipped")
    restarts = (status.get("epochs") or {}).get("restarts", 0)
    if restarts:
        from penstock.actors.progress import times

        parts.append(f"restarted {times(restarts)}")
    return "; ".join(parts)


def _next_steps(prepared: Prepared) -> str:
    return "next: " + "\n      ".join([*prepared.next_steps, "penstock apps"])


# --- the command line -----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Run Penstock's applications, and look after running jobs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    everywhere = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    everywhere.add_argument("--debug", action="store_true", help="show the traceback of an error")

    run = commands.add_parser("run", help="run an application", description="Run an application.")
    for app, of_app in _app_parsers(run, everywhere):
        of_app.set_defaults(run=_run, app=app)
        _add_running_options(of_app)

    apps = commands.add_parser("apps", parents=[everywhere], help="list the applications and their options")
    apps.set_defaults(run=_apps)

    explain = commands.add_parser(
        "explain",
        help="show an application's plan",
        description="Show an application's logical and physical plan, without running it.",
    )
    for app, of_app in _app_parsers(explain, everywhere):
        of_app.set_defaults(run=_explain, app=app)

    planned = commands.add_parser(
        "plan",
        help="show where an application's tasks would run",
        description="Show on which nodes and workers an application's tasks would run and what traffic would cross, "
        "beside other placements, without running it.",
    )
    for app, of_app in _app_parsers(planned, everywhere, workers=False):
        of_app.set_defaults(run=_plan, app=app)
        of_app.add_argument("--nodes", metavar="N", type=count, default=4, help="machines (4)")
        of_app.add_argument("--slots", metavar="S", type=count, default=4, help="workers on each (4)")
        of_app.add_argument(
            "--factor",
            metavar="F",
            type=_part,
            default=0.1,
            help="by how much a node may be above its share of the tasks (0.1)",
        )
        of_app.add_argument("--picture", metavar="FILE", help="write the plan there as a picture (SVG)")

    for name, action, about in (
        ("status", _status, "show what a running job does"),
        ("stop", _stop, "end a job's sources, let what is under way come through, wait for the end"),
        ("cancel", _cancel, "end a job at once, dropping what is under way"),
    ):
        command = commands.add_parser(name, parents=[everywhere], help=about, description=about.capitalize() + ".")
        command.set_defaults(run=action)
        command.add_argument("name", metavar="NAME", help="the job's name: its flow's")
        _add_cluster_option(command)
        if name == "status":
            command.add_argument("--json", action="store_true", help="everything there is, for programs")
        else:
            command.add_argument("--no-wait", dest="wait", action="store_false", help="return at once")

    def add(name: str, action: Callable[[argparse.Namespace], int], brief: str, about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[everywhere], help=brief, description=about)
        command.set_defaults(run=action)
        command.add_argument("name", metavar="NAME", help="the job's name: its flow's")
        return command

    savepoint = add("savepoint", _savepoint, "save a running job's state at a place of its own", _ABOUT_SAVEPOINT)
    savepoint.add_argument("url", metavar="URL", type=_place, help="a directory, or s3://bucket/prefix and the like")
    _add_cluster_option(savepoint)

    rescale = add("rescale", _rescale, "give an operator of a running job more or fewer tasks", _ABOUT_RESCALE)
    rescale.add_argument("operator", metavar="OPERATOR", help="the operator's name")
    rescale.add_argument("parallelism", metavar="N", type=count, help="how many tasks it is to have")
    _add_cluster_option(rescale)

    resume = add("resume", _resume, "start a failed or vanished job again from its last epoch", _ABOUT_RESUME)
    resume.add_argument(
        "--checkpoints", metavar="URL", type=_place, help=f"where the job saved its epochs ({_STATE}); as given to run"
    )
    resume.add_argument("--workers", metavar="W", type=count, help="worker processes (as many as before)")
    _add_driver_options(resume)
    return parser


def _add_cluster_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", metavar="A", help="of the Ray cluster (the one on this machine)")


def _place(text: str) -> str:
    """A directory or URL, the same for processes that run elsewhere."""
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _part(text: str) -> float:
    """A part of something, 0 or more."""
    try:
        return seconds(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more, such as 0.1") from None


def _restarts(text: str) -> int:
    """A whole number, 0 or more."""
    return 0 if text == "0" else count(text)


def _app_parsers(
    command: argparse.ArgumentParser, everywhere: argparse.ArgumentParser, *, workers: bool = True
) -> Iterator[tuple[App, argparse.ArgumentParser]]:
    """A parser for each application below a command, with the options that all take. `workers`: --workers too."""
    choices = command.add_subparsers(title="applications", metavar="APP", required=True)
    for app in APPS.values():
        parser = choices.add_parser(
            app.name, parents=[everywhere], help=app.about, description=app.about.capitalize() + ".", allow_abbrev=False
        )
        app.add_options(parser)
        parser.add_argument("--name", metavar="NAME", default=app.name, help=f"of the job ({app.name})")
        if workers:
            parser.add_argument(
                "--workers", metavar="W", type=count, default=_WORKERS, help=f"worker processes ({_WORKERS})"
            )
        parser.add_argument(
            "--parallelism", metavar="P", type=count, help="tasks of each operator that has no number of its own (W)"
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
        help="seconds between epochs, to which the job goes back when a process dies; 0: none, and it fails then (1)",
    )
    parser.add_argument(
        "--checkpoints", metavar="URL", type=_place, help=f"where epochs are saved: a directory or a URL ({_STATE})"
    )
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        type=_restarts,
        help="deaths of workers within ten minutes that the job bears (10)",
    )
    parser.add_argument(
        "--savepoint", metavar="URL", type=_place, help="start from what penstock savepoint has saved there"
    )
    parser.add_argument(
        "--dual",
        metavar="MODE",
        default="off",
        help="on: a burst goes through Spark in micro-batches and comes back when it is over; spark-only: everything "
        "does; toggle:S: there and back every S seconds; off: nothing (off). Behind a comma settings, as on,delta=0.3",
    )
    parser.add_argument(
        "--placement",
        metavar="HOW",
        default="round-robin",
        choices=METHODS,
        help=f"how tasks are dealt to workers: {', '.join(METHODS)} (round-robin); see penstock plan APP",
    )
    parser.add_argument(
        "--nodes", metavar="N", type=count, help="nodes of the cluster that the workers are spread over (one)"
    )
    parser.add_argument(
        "--replan", metavar="S", type=seconds, help="move tasks by what they send, planned anew every S seconds (never)"
    )
    _add_driver_options(parser)


def _add_driver_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="A",
        help="of a Ray cluster, or 'local' for one of its own (the one on this machine, else one of its own)",
    )
    parser.add_argument("--detached", action="store_true", help="leave the job running on the cluster and return")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="show no live progress")


def _unknown_app(arguments: list[str]) -> str | None:
    """What to say about `penstock run nonsense`: argparse would list the names and no more."""
    if len(arguments) < 2 or arguments[0] not in ("run", "explain", "plan"):
        return None
    name = arguments[1]
    if name.startswith("-") or name in APPS:
        return None
    near = difflib.get_close_matches(name, APPS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    listed = "\n".join(f"  {app.name:<12}{app.about}" for app in APPS.values())
    return f"there is no application {name!r}{hint} There are:\n{listed}"


def _brief(action: argparse.Action) -> str:
    flag = action.option_strings[-1]
    return flag if action.nargs == 0 else f"{flag} {action.metavar or action.dest.upper()}"


def _ago(age_s: float) -> str:
    for unit, size in (("days", 86_400.0), ("hours", 3600.0), ("min", 60.0)):
        if age_s >= 2 * size:
            return f"{age_s / size:.0f} {unit} ago"
    return f"{max(0.0, age_s):.0f} s ago"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(error: Exception, code: int, options: argparse.Namespace) -> int:
    if options.debug:
        raise error
    text = str(error).strip() or type(error).__name__
    return _complain(text, code)


def _complain(text: str, code: int) -> int:
    _say(f"penstock: {text}")
    return code


if __name__ == "__main__":
    sys.exit(main())
