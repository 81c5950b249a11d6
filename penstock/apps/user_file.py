"""Loads a user's own flow as an application of the command: `penstock run orders.py:flow`, or `module:flow`.

What is named is a Flow, or a function without arguments that returns one. A file with one flow needs no name, nor does
a file without any that has one function which says that it returns one: `def build() -> penstock.Flow`.

A file is run as a module, so its `if __name__ == "__main__":` is left out. Workers cannot import it, so all that it
defines, and all that it imports from beside it, travels to them by value, and into what the job saves: `resume` needs
the file no more. A module named by its import path has to be importable by the workers, as any library has.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from penstock.apps.app import App, Built, add_load_options, described_rate
from penstock.runtime.errors import FlowError, PenstockError
from penstock.runtime.operators.ends import Read, Write
from penstock.runtime.program.flow import Flow
from penstock.runtime.records.pickling import travels
from penstock.runtime.sinks import Collect
from penstock.runtime.sources import Generator
from penstock.runtime.status import JobStatus

_SHOWN = 20  # records of each Collect sink that are printed


def is_meant(target: str) -> bool:
    """Tells whether a name on the command line means the user's own flow."""
    return ":" in target or target.endswith(".py")


def user_app(target: str) -> App:
    """Returns the application that a target such as orders.py:flow names. Raises FlowError when there is no flow."""
    flow = _flow(target)
    return App(
        target,
        f"the flow {flow.name!r} of {target}",
        lambda options: add_load_options(options, rate="as the flow has it", duration="as the flow has it"),
        lambda options: _built(flow, target, options),
        default_name=flow.name,
    )


def _flow(target: str) -> Flow:
    place, _, name = target.rpartition(":") if not target.endswith(".py") else (target, "", "")
    module = _file(place) if place.endswith(".py") else _module(place)
    if name:
        if not hasattr(module, name):
            if flows := _flows(module) | _makers(module):
                raise FlowError(f"{place} defines no {name!r}; flows that it has: {', '.join(flows)}")
            known = ", ".join(_functions(module)) or "none"
            raise FlowError(f"{place} defines no {name!r}, and no flow; functions that might return one: {known}")
        found = getattr(module, name)
    else:
        flows = _flows(module) or _makers(module)
        if not flows:
            raise FlowError(
                f"{place} has no flow. Define one, as in flow = penstock.Flow('orders'), or name a function without "
                f"arguments that returns one: {place}:FUNCTION; functions that it has: "
                f"{', '.join(_functions(module)) or 'none'}"
            )
        if len(flows) != 1:
            listed = ", ".join(f"{place}:{name}" for name in flows)
            raise FlowError(f"{place} has {len(flows)} flows; say which one: {listed}")
        (found,) = flows.values()
    if callable(found) and not isinstance(found, Flow):
        with _running_users(f"{target} could not make its flow"):
            found = found()
    if not isinstance(found, Flow):
        raise FlowError(f"{target} is no flow, and no function that returns one: it is {type(found).__name__}")
    return found


def _flows(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Flow)}


def _functions(module: ModuleType) -> dict[str, Any]:
    """Returns, by name, the functions that a module defines and that can be called without arguments."""
    found = {}
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            parameters = inspect.signature(value).parameters.values()
            if all(
                each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
                for each in parameters
            ):
                found[name] = value
    return found


def _makers(module: ModuleType) -> dict[str, Any]:
    """Returns, by name, the functions whose annotation says that they return a flow. The annotation is compared as
    text, because annotations may not be evaluated."""
    found = {}
    for name, function in _functions(module).items():
        returns = function.__annotations__.get("return")
        if returns is Flow or (isinstance(returns, str) and returns.strip("'\"").rpartition(".")[2] == "Flow"):
            found[name] = function
    return found


def _file(path: str) -> ModuleType:
    """Loads a file as a module that travels to the workers by value, together with everything that it imports from its
    own directory."""
    if not os.path.isfile(path):
        raise FlowError(f"there is no file {path}")
    folder, name = os.path.dirname(os.path.abspath(path)), os.path.basename(path)[: -len(".py")]
    if name in sys.modules:
        name = f"penstock_own_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, folder)  # as of a script: what is beside it can be imported
    with _running_users(f"{path} could not be loaded"):
        spec.loader.exec_module(module)
    for one in set(sys.modules) - before:
        file = getattr(sys.modules[one], "__file__", None)
        if file is not None and os.path.dirname(os.path.abspath(file)) == folder:
            travels(sys.modules[one])
    return module


def _module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # Ray's workers have it too
    with _running_users(f"module {name} could not be loaded"):
        return importlib.import_module(name)


@contextmanager
def _running_users(failure: str) -> Iterator[None]:
    """Raises a FlowError in place of each error of the user's code within, which may be of any type."""
    try:
        yield
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        raise FlowError(f"{failure}: {_told(error)}") from error


def _told(error: BaseException) -> str:
    """Describes the error and the line that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = str(error) or "no reason given"
    hint = '; put what the file does as a program below if __name__ == "__main__":' * isinstance(error, SystemExit)
    return f"{type(error).__name__}: {text}{where}{hint}"


def _built(flow: Flow, target: str, options: SimpleNamespace) -> Built:
    flow = copy.copy(flow)
    flow.graph = copy.copy(flow.graph)
    flow.graph.operators = dict(flow.graph.operators)
    flow.name = flow.graph.name = options.name
    pace = "" if options.rate is None else f", {described_rate(options.rate)}"
    if options.rate is not None or options.duration is not None:
        _pace(flow, options.rate, options.duration)
    sinks = {name: op.sink for name, op in flow.graph.operators.items() if isinstance(op, Write)}

    def results(status: JobStatus, seconds: float) -> Iterable[str]:
        for name, sink in sinks.items():
            if isinstance(sink, Collect):
                records = sink.records()
                yield f"{name}: {len(records):,} records"
                yield from (f"  {record!r}" for record in records[:_SHOWN])
                if len(records) > _SHOWN:
                    yield f"  ... {len(records) - _SHOWN:,} more"

    return Built(flow, f"flow {flow.name!r}{pace}", results, (f"penstock explain {target}",))


def _pace(flow: Flow, rate: str | None, duration: float | None) -> None:
    """Gives the flow's Generator sources this rate and this duration in seconds."""
    paced = False
    for name, operator in flow.graph.operators.items():
        if isinstance(operator, Read) and isinstance(operator.source, Generator):
            other = copy.copy(operator)
            other.source = operator.source.paced(rate, duration)
            flow.graph.operators[name] = other
            paced = True
    if not paced:
        kinds = ", ".join(type(op.source).__name__ for op in flow.graph.operators.values() if isinstance(op, Read))
        raise FlowError(f"--rate and --duration pace Generator sources; flow {flow.name!r} reads {kinds or 'nothing'}")
