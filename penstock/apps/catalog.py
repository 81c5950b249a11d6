"""Lists every application of the `penstock` command, by name.

The applications of the papers are in the repository, and not in the installed package, which has those that the README
shows.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from penstock.apps import grep, sol, throughput, wordcount, ysb
from penstock.apps.app import App

#: The applications of the papers, which only a clone of the repository has.
OF_THE_REPOSITORY = ("nexmark", "rides", "stock", "linear-road", "sentiment")


def _folder(name: str) -> str:
    return f"penstock.apps.{name.replace('-', '_')}"


_APPS: list[App] = [wordcount.APP, grep.APP, sol.APP, throughput.APP, ysb.APP]
_APPS += [import_module(f"{_folder(name)}.app").APP for name in OF_THE_REPOSITORY if find_spec(_folder(name))]

APPS: dict[str, App] = {app.name: app for app in _APPS}
