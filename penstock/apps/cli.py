"""The `penstock` command.

Exit codes: 0 the job finished, or was stopped and drained; 1 it failed, or something else did; 2 it could not start
as asked (a wrong option, an input that is not there); 130 it was cancelled by Ctrl-C. Results go to stdout, all else
to stderr.
"""

from __future__ import annotations

import argparse
import difflib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import penstock
from penstock.apps.app import App, Prepared, count
from penstock.apps.catalog import APPS
from penstock.runtime.errors import FlowError, PenstockError

if TYPE_CHECKING:
    from penstock.actors import Job

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130

_WORKERS = 2  # the fewest with which records travel between processes
_EPILOG = """\
examples:
  penstock run wordcount                                 count a text's words, with live progress
  penstock run wordcount --input 'logs/*.txt' --output counts/
  penstock run sol --rate 5000 --workers 2               latency of hops, operator by operator
  penstock explain wordcount --workers 4                 the plan, without running it
  penstock run APP --help                                the options of an application

While a job runs: Ctrl-C ends its sources and lets everything under way come through; a second Ctrl-C
cancels it. From another terminal, on the same cluster: penstock status NAME, penstock stop NAME.
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

    ring = {} if options.ring_bytes is None else {"ring_bytes": options.ring_bytes}
    job = actors.run(prepared.flow, workers=options.workers, detached=options.detached, address=options.address, **ring)
    if options.detached:
        _say(f"job {job.name!r} runs on; next: penstock status {job.name}, penstock stop {job.name}")
        return OK
    with _Interrupts(job) as interrupts:
        status = job.wait(progress=options.progress)
        seconds = status.get("running_s", 0.0)
    if status["state"] != "CANCELLED":
        for line in prepared.results(status, seconds):
            print(line)
    sys.stdout.flush()
    _say(_summary(status, seconds))
    _say(_next_steps(prepared))
    if status["state"] == "CANCELLED":
        return INTERRUPTED if interrupts.count else FAILED
    return OK


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

    from penstock.actors.progress import line, table

    print(line(status))
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


def _summary(status: dict[str, Any], seconds: float) -> str:
    read = status.get("records_read", 0)
    latency = status.get("latency_all_ms") or {}
    parts = [
        f"{status['name']} {status['state'].lower()}: {read:,} records in {seconds:.1f} s",
        f"{read / seconds if seconds else 0:,.0f} records/s",
    ]
    if latency.get("p50") is not None:
        parts.append(f"latency p50 {latency['p50']:.2f} ms, p99 {latency['p99']:.2f} ms")
    if status.get("skipped"):
        parts.append(f"{status['skipped']:,} skipped")
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

    for name, action, about in (
        ("status", _status, "show what a running job does"),
        ("stop", _stop, "end a job's sources, let what is under way come through, wait for the end"),
        ("cancel", _cancel, "end a job at once, dropping what is under way"),
    ):
        command = commands.add_parser(name, parents=[everywhere], help=about, description=about.capitalize() + ".")
        command.set_defaults(run=action)
        command.add_argument("name", metavar="NAME", help="the job's name: its flow's")
        command.add_argument("--address", metavar="A", help="of the Ray cluster (the one on this machine)")
        if name == "status":
            command.add_argument("--json", action="store_true", help="everything there is, for programs")
        else:
            command.add_argument("--no-wait", dest="wait", action="store_false", help="return at once")
    return parser


def _app_parsers(
    command: argparse.ArgumentParser, everywhere: argparse.ArgumentParser
) -> Iterator[tuple[App, argparse.ArgumentParser]]:
    """A parser for each application below a command, with the options that both `run` and `explain` take."""
    choices = command.add_subparsers(title="applications", metavar="APP", required=True)
    for app in APPS.values():
        parser = choices.add_parser(
            app.name, parents=[everywhere], help=app.about, description=app.about.capitalize() + ".", allow_abbrev=False
        )
        app.add_options(parser)
        parser.add_argument("--name", metavar="NAME", default=app.name, help=f"of the job ({app.name})")
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
        "--address",
        metavar="A",
        help="of a Ray cluster, or 'local' for one of its own (the one on this machine, else one of its own)",
    )
    parser.add_argument("--detached", action="store_true", help="leave the job running on the cluster and return")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="show no live progress")


def _unknown_app(arguments: list[str]) -> str | None:
    """What to say about `penstock run nonsense`: argparse would list the names and no more."""
    if len(arguments) < 2 or arguments[0] not in ("run", "explain"):
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
