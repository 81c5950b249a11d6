"""Lists every application of the `penstock` command, by name."""

from __future__ import annotations

from penstock.apps import grep, sol, throughput, wordcount, ysb
from penstock.apps.app import App
from penstock.apps.linear_road import app as linear_road
from penstock.apps.nexmark import app as nexmark
from penstock.apps.rides import app as rides
from penstock.apps.sentiment import app as sentiment
from penstock.apps.stock import app as stock

APPS: dict[str, App] = {
    app.name: app
    for app in (
        *(wordcount.APP, grep.APP, sol.APP, throughput.APP, ysb.APP),
        *(nexmark.APP, rides.APP, stock.APP, linear_road.APP, sentiment.APP),
    )
}
