"""Sinks: where a flow's records go. `ps.sinks.Files("counts/")`."""

from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.sinks.call import Call, Null
from penstock.runtime.sinks.collect import Collect
from penstock.runtime.sinks.console import Console
from penstock.runtime.sinks.files import Files

__all__ = ["Call", "Collect", "Console", "Files", "Null", "Sink", "SinkContext", "SinkWriter"]
