"""What an editor and a type checker see of the package, and what `import *` brings."""

from __future__ import annotations

import builtins
import importlib
import json
import pydoc
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

import penstock as ps
from penstock import bridge

ROOT = Path(ps.__file__).parent.parent

PROGRAM = """
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import penstock as ps
from penstock.sinks import Files, Parquet, Sink
from penstock.sources import Memory, Parquet as Tables
from penstock.testing import run

flow = ps.Flow("typed")
orders = flow.read(Memory([{"user": "ann", "price": 3}]), name="orders")
spent = orders.filter(ps.col("price") > 1, on_error="skip").key_by("user").sum("price", emit="final")
sink: Sink = Files("out/")
spent.write(sink)
orders.key_by("user").agg(n=ps.count(), top=ps.max("price"), least=ps.min("price"), all=ps.sum("price")).write(
    Parquet("table/"), name="table"
)
out: list[object] = run(flow)["write"]

state: str = ps.run(flow, workers=2).wait()["state"]
job: ps.Job = ps.attach("typed")
job.stop()
again: ps.Job = ps.resume("typed")
flow.read(Tables("*.parquet")).write(ps.sinks.Null())
flow.read(ps.sources.Arrow("*.arrow")).map(str, parallelism=2).write(ps.sinks.Collect())

# What a stream's records are follows from what its functions return.
@dataclasses.dataclass(frozen=True)
class Order:
    user: str
    cents: int
    ms: int


def parse(line: str) -> Order:
    user, cents, ms = line.split(",")
    return Order(user, int(cents), int(ms))


typed = ps.Flow("types")
lines = typed.read(ps.sources.Memory(["ann,5,1000"]))
parsed = lines.map(parse).watermark("ms")
users: ps.Stream[str] = parsed.map(lambda order: order.user)
keyed = parsed.key_by(lambda order: order.user)
count: ps.Stream[tuple[str, int]] = keyed.count()
words: ps.Stream[str] = lines.flat_map(str.split)
lists: ps.Stream[tuple[str, int, int, list[Order]]] = keyed.window(ps.Tumbling(1)).collect()

# The results of windows: the global window has no start and no end, and results that may be taken back have a sign.
windows: ps.WindowedStream[str, Order] = keyed.window(ps.Session(1))
counted: ps.Stream[tuple[str, int, int, int]] = keyed.window(ps.CountWindow(3)).count()
endless: ps.WindowedStream[str, Order, None] = keyed.window(ps.GlobalWindow(), early_count=1)
best: ps.Stream[tuple[str, None, None, list[Order]]] = endless.top(2, by="cents")
summed: ps.Stream[tuple[str, None, None, Any]] = keyed.window(ps.GlobalWindow(), updates="replace").sum("cents")
either: ps.Stream[tuple[str, int, int, int]] = keyed.window(ps.Session(1) if parsed else ps.Tumbling(1)).count()
several = [ps.Session(1), ps.Tumbling(1), ps.CountWindow(3)]
of_several: list[ps.Stream[tuple[str, int, int, int, int]]] = [
    keyed.window(window, updates="retract").count() for window in several
]
signed = keyed.window(ps.Sliding(10, 5), early_s=1, updates="retract")
counts: ps.Stream[tuple[str, int, int, int, int]] = signed.count()
sums: ps.Stream[tuple[str, int, int, Any, int]] = signed.sum("cents", name="sums")
least: ps.Stream[tuple[str, int, int, Any, int]] = signed.min("cents")
greatest: ps.Stream[tuple[str, int, int, Any, int]] = signed.max("cents", on_error="skip")
means: ps.Stream[tuple[str, int, int, Any, int]] = signed.mean("cents")
rows: ps.Stream[tuple[str, int, int, dict[str, Any], int]] = signed.agg(n=ps.count(), top=ps.max("cents"))
first: ps.Stream[tuple[str, int, int, Any, int]] = signed.reduce(lambda state, order: state)
own: ps.Stream[tuple[str, int, int, Any, int]] = signed.aggregate(ps.AggregateFunction())
tops: ps.Stream[tuple[str, int, int, list[Order], int]] = signed.top(1, by="cents", largest=False)
signs: ps.Stream[int] = keyed.window(ps.GlobalWindow(), updates="retract").collect().map(lambda result: result[4])


def of_all(ctx: ps.WindowContext, user: str, window: tuple[None, None], orders: list[Order]) -> list[int]:
    return [order.cents for order in orders]


of_orders: ps.Stream[int] = keyed.window(ps.GlobalWindow()).process(of_all)
pairs: ps.Stream[tuple[Order, Order | None]] = keyed.join(keyed, ps.Tumbling(1), how="left")
inner: ps.Stream[tuple[Order, Order]] = keyed.interval_join(keyed, lower_s=0, upper_s=1)
made: ps.Stream[int] = keyed.temporal_join(keyed, fn=lambda a, b: 3)
batches: ps.Stream[int] = parsed.map_batches(lambda some: [order.cents for order in some])
later: ps.Stream[int] = parsed.map_async(lambda order: order.cents)


async def ask(order: Order) -> float:
    return 1.0

asked: ps.Stream[float] = parsed.map_async(ask)


class Asking:
    def __init__(self, url: str) -> None:
        self.url = url

    async def __call__(self, order: Order) -> str:
        return order.user


names: ps.Stream[str] = parsed.map_async(Asking, fn_constructor_kwargs={"url": "here"})


def twice(ctx: ps.ProcessContext, user: str, order: Order) -> list[int]:
    return [order.cents, order.cents]


doubled: ps.Stream[int] = keyed.process(twice)


class Model:
    def __init__(self, path: str = "model") -> None:
        self.path = path

    def __call__(self, order: Order) -> float:
        return order.cents / 2


class Letters:
    def __call__(self, order: Order) -> list[str]:
        return list(order.user)


scores: ps.Stream[float] = parsed.map(Model, fn_constructor_kwargs={"path": "other"})
letters: ps.Stream[str] = parsed.flat_map(Letters)
halves: ps.Stream[float] = parsed.map_async(Model, fn_constructor_args=("other",))


class Weighed:
    def __init__(self, weight: int) -> None:
        self.weight = weight

    def __call__(self, orders: list[Order]) -> list[float]:
        return [order.cents * self.weight / 2 for order in orders]


class Halved:
    def __call__(self, orders: list[Order]) -> Iterator[float]:
        for order in orders:
            yield order.cents / 2


class Doubled:
    def __init__(self, column: str = "price") -> None:
        self.column = column

    def __call__(self, columns: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        return {**columns, "twice": columns[self.column] * 2}


class Frame:  # stands for a table of pandas or pyarrow, which have no types without further packages
    pass


class Framed:
    def __call__(self, frame: Frame) -> Frame:
        return frame


def framed(frame: Frame) -> Frame:
    return frame


def reversed_list(some: list[Order]) -> list[Order]:
    return some[::-1]


# A class says by its __call__ what comes of a batch, whatever its __init__ takes.
weighed: ps.Stream[float] = parsed.map_batches(Weighed, fn_constructor_kwargs={"weight": 2}, batch_size=8)
by_args: ps.Stream[float] = parsed.map_batches(Weighed, fn_constructor_args=(2,))
by_object: ps.Stream[float] = parsed.map_batches(Weighed(2), batch_format="list")
halved: ps.Stream[float] = parsed.map_batches(Halved, min_batch=2, linger_s=0.1)
turned: ps.Stream[Order] = parsed.map_batches(reversed_list)
longer: ps.Stream[float] = parsed.map_batches(Weighed, fn_constructor_args=(2,)).map(lambda half: half + 1)
listed: ps.Stream[Order] = parsed.map_batches(list)
columns: ps.Stream[dict[str, Any]] = orders.map_batches(Doubled, batch_format="numpy")
named: ps.Stream[dict[str, Any]] = orders.map_batches(
    Doubled, fn_constructor_kwargs={"column": "price"}, batch_format="numpy"
)
doubled_too: ps.Stream[dict[str, Any]] = orders.map_batches(Doubled("price"), batch_format="numpy")
frames: ps.Stream[dict[str, Any]] = orders.map_batches(Framed, batch_format="pandas")
tables: ps.Stream[dict[str, Any]] = orders.map_batches(Framed, batch_format="arrow")
more_frames: ps.Stream[dict[str, Any]] = orders.map_batches(framed, batch_format="pandas")
more_tables: ps.Stream[dict[str, Any]] = orders.map_batches(lambda table: table, batch_format="arrow")
"""

MISTAKES = """
import dataclasses

import penstock as ps


@dataclasses.dataclass(frozen=True)
class Order:
    user: str
    cents: int


def slip(ctx: ps.ProcessContext, user: int, order: Order) -> list[int]:
    return [order.cents]


class Model:
    def __call__(self, order: Order) -> float:
        return order.cents / 2


class Weighed:
    def __init__(self, weight: int) -> None:
        self.weight = weight

    def __call__(self, orders: list[Order]) -> list[float]:
        return [order.cents * self.weight / 2 for order in orders]


class OneForAll:
    def __call__(self, orders: list[Order]) -> int:
        return len(orders)


typed = ps.Flow("types")
orders = typed.read(ps.sources.Memory([Order("ann", 5)]))
users = orders.map(lambda order: order.user)
keyed = orders.key_by(lambda order: order.user)
# Each line from here on is wrong.

flow = ps.Flow("typed")
flow.read(ps.sources.Memory([1])).map(str, nmae="m")
flow.read(ps.sources.Memory([1])).map(str, on_error="ignore")
ps.sinks.Flies("out/")
ps.ruin(flow)
flow.map(str)
flow.read(ps.sources.Memory([1])).key_by(str).map(str)
orders.map(lambda order: order.usr)
orders.key_by(lambda order: order.price)
keyed.count().map(lambda pair: pair[2])
orders.flat_map(lambda order: order.cents)
wrong: ps.Stream[int] = keyed.count()
keyed.window(10)
keyed.join(orders, ps.Tumbling(1))
orders.watermark("ms", out_of_orderness="1")
keyed.interval_join(keyed, lower_s=0)
orders.fliter(bool)
keyed.count(emit="always")
keyed.process(slip)
keyed.window(ps.Tumbling(1)).collect().map(lambda window: window[3].cents)
keyed.join(keyed, ps.Tumbling(1), how="left").map(lambda pair: pair[1].cents)
keyed.window(ps.Tumbling(1)).count().map(lambda result: result[4])
keyed.window(ps.Tumbling(1), updates="retract").count().map(lambda result: result[5])
keyed.window(ps.GlobalWindow()).count().map(lambda result: result[1] + 1)
keyed.window(ps.GlobalWindow(), updates="retract").collect().map(lambda result: result[2] + 1)
keyed.window(ps.Tumbling(1), updates="retract").count(emit="latest")
keyed.window(ps.Tumbling(1), updates="retract").process(print)
keyed.window(ps.Tumbling(1), updates="take back")
users.map(Model)
users.map_batches(Weighed, fn_constructor_kwargs={"weight": 2})
orders.map_batches(OneForAll)
orders.map_batches(Model)
orders.map_batches(Weighed, fn_constructor_args=(2,)).map(lambda half: half.cents)
orders.map_batches(Weighed(2), batch_format="pands")
users.flat_map(list).map(lambda letter: letter.cents)
"""


PROGRAMS = {"program.py": PROGRAM, "mistakes.py": MISTAKES}


@pytest.fixture(scope="module", params=["mypy", "pyright"])
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """The lines with errors of both programs, as a strict check tells a user who has Penstock installed."""
    folder = tmp_path_factory.mktemp("typed")
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text)
    return (by_mypy if request.param == "mypy" else by_pyright)(folder)


def by_pyright(folder: Path) -> dict[str, dict[int, str]]:
    """What pyright finds, by file and line. basedpyright is pyright, with the node that it needs."""
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, dict[int, str]] = {name: {} for name in PROGRAMS}
    for one in json.loads(done.stdout)["generalDiagnostics"]:
        if one["severity"] == "error":
            found[Path(one["file"]).name][one["range"]["start"]["line"] + 1] = one["message"]
    return found


def by_mypy(folder: Path) -> dict[str, dict[int, str]]:
    """What `mypy --strict` finds, by file and line."""
    options = ["--strict", "--follow-imports=silent", "--no-error-summary", "--show-error-codes", "--no-incremental"]
    config = folder / "mypy.ini"
    # Libraries below Penstock are not looked into: that takes minutes and says nothing about it.
    config.write_text(
        f"[mypy]\nmypy_path = {ROOT}\n"
        "[mypy-ray.*,pyarrow.*,numpy.*,pyspark.*,raydp.*,rich.*,msgspec.*]\n"
        "follow_imports = skip\nignore_missing_imports = True\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={config}", *options, *PROGRAMS],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, dict[int, str]] = {name: {} for name in PROGRAMS}
    for line in done.stdout.splitlines():
        if ": error:" in line:
            name, number, _, message = line.split(":", 3)
            found[name][int(number)] = message
    return found


def test_a_user_s_program_passes_a_strict_type_check(errors: dict[str, dict[int, str]]) -> None:
    assert errors["program.py"] == {}


def test_a_type_check_finds_what_is_misspelt(errors: dict[str, dict[int, str]]) -> None:
    found = set(errors["mistakes.py"])
    lines = MISTAKES.splitlines()
    begin = lines.index("# Each line from here on is wrong.") + 1
    wanted = {i for i, line in enumerate(lines, 1) if i > begin and line and not line.startswith("flow = ")}
    assert found == wanted, [lines[i - 1] for i in found ^ wanted]


def test_windowed_streams_have_two_or_three_types_also_at_run_time() -> None:
    assert get_args(ps.WindowedStream[str, int]) == (str, int)
    assert get_args(ps.WindowedStream[str, int, None]) == (str, int, None)


def test_what_loads_late_is_listed_too() -> None:
    assert {
        "MissingField",
        "EvaluationError",
        "Job",
        "attach",
        "resume",
        "run",
        "sinks",
        "sources",
        "testing",
        "max",
        "min",
        "sum",
    } <= set(dir(ps))
    assert "Parquet" in dir(ps.sinks)
    assert {"Arrow", "Parquet"} <= set(dir(ps.sources))
    assert {"follow", "from_spark"} <= set(dir(bridge))
    for module in (ps, ps.sinks, ps.sources, bridge):
        for name in dir(module):
            assert hasattr(module, name)


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        (ps, "Parquet", "module 'penstock' has no attribute 'Parquet'; it is penstock.runtime.sinks.Parquet"),
        (ps, "ruin", "did you mean 'run'?"),
        (ps.sinks, "Flies", "did you mean 'Files'?"),
        (ps.sources, "Parqet", "did you mean 'Parquet'?"),
        (ps.sources, "zzz", "it has: Arrow, Csv, Generator"),
        (bridge, "folow", "did you mean 'follow'?"),
    ],
)
def test_a_name_that_a_module_does_not_have_is_guessed(module: ModuleType, name: str, words: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert words in str(caught.value)


def test_import_star_leaves_python_s_own_functions_alone() -> None:
    names: dict[str, object] = {}
    exec("from penstock import *", names)
    assert not {name for name in names if hasattr(builtins, name)} - {"__builtins__", "__doc__", "__name__"}
    assert names["Flow"] is ps.Flow


@pytest.mark.parametrize("name", ["sinks", "sources", "testing"])
def test_short_names_are_modules(name: str) -> None:
    """The very same ones, so that no class is there twice."""
    module = importlib.import_module(f"penstock.{name}")
    assert module is getattr(ps, name)
    assert module is importlib.import_module(f"penstock.runtime.{name}")


def test_short_names_load_nothing_heavy() -> None:
    program = (
        "from penstock.sinks import Sink\nfrom penstock.sources import Source\nfrom penstock.testing import run\n"
        "import sys; assert not {'ray', 'pyarrow', 'pandas', 'psutil'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_help_says_what_a_source_of_ones_own_needs() -> None:
    said = pydoc.render_doc(ps.sources, renderer=pydoc.plaintext)
    for word in ("finished", "stamp_ns", "ready_in", "split.offset", "context.wake()", "bounded"):
        assert word in said, word
    assert "module's docstring" not in (ps.sources.Source.__doc__ or "")


def test_a_wrong_option_can_be_caught_by_its_public_name(tmp_path: Path) -> None:
    flow = ps.Flow("job")
    flow.read(ps.sources.Memory([1])).write(ps.sinks.Null())
    with pytest.raises(ps.OptionError, match="transport"):
        ps.run(flow, transport="carrier pigeon", checkpoints=tmp_path)  # type: ignore[arg-type]
