"""The parts of the `penstock` command: its subcommands, their options, and the messages about wrong ones.

The options of a job are made from their definition in jobs/options.py; the applications add theirs with `Options`.
"""

from __future__ import annotations

import inspect
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import click

from penstock.host.process.network import TRANSPORTS
from penstock.jobs.options import Option, described
from penstock.placement.options import METHODS
from penstock.runtime.errors import FlowError, OptionError, PenstockError, shorten
from penstock.runtime.storage import filesystems

_WIDTH = 110


# --- values ------------------------------------------------------------------------------------------------------


#: A whole number of 1 or more.
COUNT = click.IntRange(1)
#: A time in seconds, or another number, of 0 or more.
SECONDS = click.FloatRange(0, math.inf, max_open=True)


def place(text: str) -> str:
    """Reads a directory or URL from the command line, in a form that other processes understand too."""
    try:
        path = filesystems.local_path(text)
    except filesystems.BadPlace as error:
        raise click.BadParameter(str(error)) from None
    return text if path is None else os.path.abspath(os.path.expanduser(path))


# --- commands ----------------------------------------------------------------------------------------------------


class Options(list[click.Option]):
    """The options of a command, in the order in which its help lists them."""

    def add(self, flag: str, **settings: Any) -> None:
        """Adds an option with these settings of click."""
        self.append(click.Option(flag.split(), **settings))


class _Looks(click.Command):
    """Shows usage, options and examples as users of the command see them."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings.update(context_settings={"max_content_width": _WIDTH}, add_help_option=False)
        super().__init__(*args, **settings)
        self.params.append(shows("-h --help", "show this message", click.Context.get_help))

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, " ".join(self.collect_usage_pieces(ctx)), "usage: ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(param, "heading", "Options"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write(f"\n{self.epilog}")


class Command(_Looks):
    """A command whose callback gets its options as attributes of one object."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeats an option that may have several values before each of them, as a shell writes `*.txt` out."""
        many = {flag for param in self.params if param.multiple for flag in param.opts}
        given: list[str] = []
        flag = None
        for word in args:
            if word.startswith("-"):
                flag = word if word in many else None
            elif flag is not None and given[-1] != flag:
                given.append(flag)
            given.append(word)
        return super().parse_args(ctx, given)


class Group(_Looks, click.Group):
    """A command that has further commands."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings.update(no_args_is_help=False)
        super().__init__(*args, **settings)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


def command(
    name: str,
    action: Callable[[SimpleNamespace], int],
    brief: str,
    *params: click.Parameter,
    app: Any = None,
) -> Command:
    """Returns a command that calls the action with its options. `brief`: one line about it. The action's docstring is
    its help, if it has one and is not for an application. `app`: the application, as a further attribute of the
    options."""
    about = inspect.getdoc(action) if app is None else None
    debug = click.Option(["--debug"], is_flag=True, help="show the traceback of an error")
    return Command(
        name,
        callback=lambda **given: action(SimpleNamespace(app=app, **given)),
        params=[*params, debug],
        short_help=brief,
        help=about or f"{brief[:1].upper()}{brief[1:]}.",
    )


def shows(flags: str, help: str, text: Callable[[click.Context], str]) -> click.Option:
    """Returns an option that shows a text and ends the command."""

    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            with output():
                print(text(ctx))
            ctx.exit()

    return click.Option(flags.split(), is_flag=True, is_eager=True, expose_value=False, callback=show, help=help)


def words(metavar: str, *kinds: Callable[[str], Any]) -> click.Argument:
    """Returns the arguments of a command for a running job, as `options.words`: the job's name, or None where it is
    left out, and a value of each kind."""

    def read(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> list[Any]:
        if not len(kinds) <= len(given) <= len(kinds) + 1:
            raise click.UsageError(f"it takes the arguments {metavar}", ctx)
        rest = given[len(given) - len(kinds) :]
        name = given[0] if len(given) > len(kinds) else None
        return [name, *(kind(word) for kind, word in zip(kinds, rest, strict=True))]

    return click.Argument(["words"], nargs=-1, metavar=metavar, callback=read)


def what_is_wrong(error: click.UsageError) -> str:
    """Returns the usage of a command, and the mistake in its line."""
    usage = "" if error.ctx is None else f"{error.ctx.get_usage()}\n"
    if isinstance(error, click.NoSuchOption):
        guess = f"; did you mean {error.possibilities[0]}?" if error.possibilities else ""
        return f"{usage}penstock: unrecognized arguments: {error.option_name}{guess}"
    message = error.format_message()
    if isinstance(error, click.BadParameter) and error.message and isinstance(error.param, JobOption | click.Argument):
        message = error.message  # it names the option, or shows the argument
    return f"{usage}penstock: {message[:1].lower()}{message[1:]}"


@contextmanager
def output() -> Iterator[None]:
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


# --- the options of a job ----------------------------------------------------------------------------------------


class JobOption(click.Option):
    """An option of a job, which help lists under the heading of its group."""

    def __init__(self, option: Option, flags: str, help: str = "", **settings: Any) -> None:
        super().__init__([flags, option.name], help=help or option.sentence, **settings)
        self.heading = option.heading


def spelled(option: str, *value: object) -> str:
    """Returns an option of `run` or `resume`, and its value if there is one, as users of the command write it."""
    flag = f"--{option.removesuffix('_s').replace('_', '-')}"
    if not value or value[0] is True:
        return flag
    given = value[0]
    if isinstance(given, tuple):  # a range of ports
        given = "-".join(map(str, given))
    if given is None:  # which turns epochs off in `run`
        given = 0
    return f"{flag} {given:g}" if isinstance(given, float) else f"{flag} {shlex.quote(str(given))}"


def of_job(*names: str, **defaults: Any) -> list[click.Option]:
    """Returns the options of a job with these names, and without names all options that a text can set. An option that
    is not given is None. `defaults`: other defaults than those of `run`."""
    made: list[click.Option] = []
    for option in described():
        name, flag = option.name, spelled(option.name)
        if name == "spark" or (names and name not in names):
            continue
        if isinstance(option.default, bool):
            pair = f"{flag}/--no-{flag[2:]}" if option.default else flag
            made.append(JobOption(option, pair, is_flag=True, default=None))
            continue
        choices = {"placement": METHODS, "transport": TRANSPORTS}.get(name)
        default = defaults.get(name)
        made.append(
            JobOption(
                option,
                flag,
                f"{option.sentence} ({default or option.default_words})",
                metavar=_metavar(option),
                type=_reader(option) if choices is None else click.Choice(choices),
                default=default,
            )
        )
    return made


def _metavar(option: Option) -> str:
    if option.name == "ports":
        return "FIRST-LAST"
    if option.name.endswith("_s"):
        return "S"
    return "URL" if "PathLike" in option.kind else "N" if option.kind.startswith(("int", "float")) else "TEXT"


def _reader(option: Option) -> Callable[[Any], Any]:
    """Returns a function that reads the text of an option of a job, and checks it as `run` does."""

    def read(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        try:
            value = _value(option, text)
            return value if option.name == "epoch_interval_s" and value == 0 else option.checked(value)
        except OptionError as error:
            problem = error.spelled(spelled)
        except FlowError as error:
            problem = f"{spelled(option.name, text)}; {str(error).partition('; ')[2]}".replace(" None ", " 0 ")
        except ValueError:
            kind = "a whole number" if option.kind.startswith("int") else "a number"
            problem = f"{spelled(option.name, text)}; it must be {kind}"
        raise click.BadParameter(problem)

    return read


def _value(option: Option, text: str) -> Any:
    """Returns the text of an option as a value of the option's type. Raises ValueError."""
    if option.name == "ports":
        first, _, last = text.partition("-")
        if not (first.isdecimal() and last.isdecimal()):
            raise FlowError(f"ports={shorten(text)}; it must be the first and the last port, such as 20000-20999")
        return int(first), int(last)
    if "PathLike" in option.kind:
        return place(text)
    if option.kind.startswith("int") and (text.isdecimal() or "str" not in option.kind):
        return int(text)
    return float(text) if option.kind.startswith("float") and text != "auto" else text


def given_of_job(options: SimpleNamespace) -> dict[str, Any]:
    """Returns the options of a job that were given on the command line, for JobOptions."""
    given = {each.name: value for each in described() if (value := getattr(options, each.name, None)) is not None}
    if given.get("epoch_interval_s") == 0:
        given["epoch_interval_s"] = None
    return given
