"""Reads the options of an application as the `penstock` command does."""

from __future__ import annotations

from types import SimpleNamespace

import click

from penstock.apps.app import App
from penstock.apps.command_line import Options, command


def parsed(app: App, *arguments: str) -> SimpleNamespace:
    """Returns the options that these arguments give to the application. Raises click.UsageError."""
    options = Options()
    app.add_options(options)
    options.append(click.Option(["--name"], default=app.name))
    found: list[SimpleNamespace] = []
    one = command(app.name, lambda given: found.append(given) or 0, app.about, *options)
    one.invoke(one.make_context(app.name, list(arguments)))
    return found[0]
