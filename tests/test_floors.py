"""What is loaded when: heavy libraries late, and nothing twice. Who may import whom is checked by `make lint`."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent
FLOORS = ("runtime", "placement", "bridge", "host", "local", "actors", "jobs", "apps")
_IMPORTERS = ("importlib.import_module", "import_module", "__import__")
MODULES = sorted(ROOT.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def imports_of(path: Path) -> list[tuple[int, str, bool]]:
    """What `imports` gives for a module of the package, which is read once."""
    return list(imports(path))


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, full module name, whether it is loaded with the module) of every import; names from a package too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ["penstock", *path.relative_to(ROOT).parent.parts]
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    lazy |= {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) not in lazy
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}", id(node) not in lazy
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _IMPORTERS and node.args:
            yield node.lineno, ast.unparse(node.args[0]).strip("'\""), id(node) not in lazy


def test_the_rules_see_what_they_forbid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way of writing an import is noticed."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    module = tmp_path / "runtime" / "bad.py"
    module.parent.mkdir()
    for text, name in (
        ("import ray", "ray"),
        ("def f():\n    import ray.util", "ray.util"),
        ("from penstock import actors", "penstock.actors"),
        ("from ..actors import nodes", "penstock.actors.nodes"),
        ("from .. import actors", "penstock.actors"),
        ("import importlib\nimportlib.import_module('pyspark')", "pyspark"),
    ):
        module.write_text(text)
        assert name in [found for _, found, _ in imports(module)]


@pytest.mark.parametrize("library", ["pyspark", "raydp", "pyverbs"])
def test_optional_libraries_are_loaded_lazily(library: str) -> None:
    for path in MODULES:
        for line, name, at_once in imports_of(path):
            assert name.split(".")[0] != library or not at_once, f"{relative(path)}:{line}"


def loaded(program: str) -> set[str]:
    """The modules that a new process has loaded after a program."""
    out = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT.parent,  # where the root links are
    )
    return set(json.loads(out.stdout.splitlines()[-1]))


def test_importing_penstock_is_light() -> None:
    heavy = {"ray", "pyspark", "raydp", "pyarrow", "rich", "pyverbs", "pandas"}
    assert not heavy & loaded("import penstock")


def test_a_worker_s_process_loads_little() -> None:
    """Each worker of each job pays for what it loads. It loads the JobMaster's module too, as Ray loads the class of
    every actor of which a process has a handle; but neither what only a JobMaster does, nor what only a driver does."""
    heavy = {
        "penstock.jobs.run",
        "penstock.bridge.paradigm_scheduler",
        "penstock.bridge.forms",
        "penstock.placement.placer",
        "numpy",
        "pyarrow",
        "rich",
    }
    assert not heavy & loaded("import penstock.actors.worker, penstock.actors.job_master")


def test_the_runtime_works_without_ray() -> None:
    program = (
        "import penstock as ps\n"
        "flow = ps.Flow('f')\n"
        "flow.read(ps.sources.Memory([1])).key_by(str).count().write(ps.sinks.Null())\n"
        "assert ps.testing.run(flow) == {'write': [('1', 1)]}"
    )
    assert not {"ray", "pyspark", "pyarrow"} & loaded(program)


def test_no_module_is_loaded_twice_through_the_root_links() -> None:
    program = (
        "import importlib, pkgutil, penstock\n"
        "for module in pkgutil.walk_packages(penstock.__path__, 'penstock.'):\n"
        "    if not module.name.endswith(('__main__', '.rdma')) and '.bridge.' not in module.name:\n"
        "        importlib.import_module(module.name)\n"
    )
    modules = loaded(program)
    assert "penstock.jobs.run" in modules
    copies = {name for name in modules if name.split(".")[0] in FLOORS}
    assert not copies
