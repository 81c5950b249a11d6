"""Lists every application of the `penstock` command, by name."""

from __future__ import annotations

from penstock.apps import grep, sol, throughput, wordcount, ysb
from penstock.apps.app import App

APPS: dict[str, App] = {app.name: app for app in (wordcount.APP, grep.APP, sol.APP, throughput.APP, ysb.APP)}
