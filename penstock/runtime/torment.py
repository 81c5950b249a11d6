"""Tormenting an operator, for users' own tests: many runs, each as a job might go, which must have the same results.

    def test_visits():
        penstock.testing.torment(lambda clicks: clicks.key_by("user").process(Visits()), [{"user": "ann"}, ...])

A run of a job may divide the records into other batches and among other numbers of tasks, may go back to an epoch
between any two steps, and may stop an operator because its outputs have no room. An operator that is right does not
show any of this. Each run here is one such course, made by chance from a seed.

It must never blame chance: a run is repeated exactly by its seed. And a failure must say what the run was like.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from random import Random
from typing import Any

from penstock.runtime.errors import FlowError, describe, shorten
from penstock.runtime.mistakes import called, refusing
from penstock.runtime.operators.ends import Write
from penstock.runtime.operators.fields import Field
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.program.graph import Edge
from penstock.runtime.records.pickling import copied
from penstock.runtime.records.userfunc import check_picklable
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.memory import Memory
from penstock.runtime.testing import Course, Pause, simulate
from penstock.runtime.units import is_whole, whole

_RESULTS = "results of the torment"
_ALL = 1 << 30  # more records than any input has
_SAVES = 0.25  # how likely an epoch begins in a pass of the run loop
_DIES = 0.08  # how likely the tasks are thrown away in a pass
_DIGITS = 12  # of floats, whose sums depend on the order of their terms
_SHOWN = 3  # results in a message
_SAME: Any = object.__eq__  # of classes that do not say when two objects are equal


@refusing
def torment(
    build: Callable[..., Stream],
    *inputs: Iterable[Any],
    runs: int = 30,
    seed: int = 0,
    expect: Iterable[Any] | Callable[[list[Any]], object] | None = None,
    parallelism: int | Sequence[int] = (1, 2, 3),
    interleave: bool = True,
    by: Callable[[Any], Any] | str | int | None = None,
    last_by: Callable[[Any], Any] | str | int | None = None,
) -> list[Any]:
    """Runs the flow that `build` makes of the inputs in many different ways. Raises AssertionError when the results
    differ.

    `build` gets a stream for each of the `inputs`, which are lists of records, and returns the stream of results. It is
    called twice, for flows with and without chains. The first run is plain: the records enter one by one, each operator
    has as many tasks as `parallelism` says first, and nothing fails. This call returns its results. Each of the `runs`
    that follow is another one of the ways in which a job may go, by chance:

    - the records enter one by one, all at once, or in batches of any size, alone or while others are on their way;
    - the records of several inputs enter in any order among the inputs (`interleave=False`: all of the first input
      first, then all of the second, and so on). Each input keeps its own order;
    - all tasks are thrown away several times, between any two steps, and built again from their last complete epoch;
    - there are other numbers of tasks, with and without chains of operators;
    - there is so little room in the channels that operators must wait with their outputs;
    - the tasks are in one worker, where operators share records, or in several.

    Results are compared without regard to their order, floats by their first 12 digits. `expect`: the results that all
    runs must have, or a function that gets the list of results and returns False, or raises AssertionError, when they
    are wrong (None: the results of the first run). `by`: results of the same by(result) must come in the same order,
    too. `last_by`: of the results with the same last_by(result), only the last one counts, as for aggregates that emit
    again and again. Both may be the name or the index of a field. `seed`: run number i has the seed `seed + i`. The
    message of a failure contains the call that repeats the run.

    The records of an input may have `testing.Pause` items among them. Errors of users' functions in the first run are
    raised as they are, for example a RecordError for state that cannot be saved.
    """
    inputs_: list[list[Any]] = []
    for number, records in enumerate(inputs, 1):
        if isinstance(records, str | bytes) or not isinstance(records, Iterable):
            raise FlowError(f"torment(): input {number} must be a list of records, got {called(records)}")
        inputs_.append(list(records))
        check_picklable(inputs_[-1], f"torment(): the records of input {number}")
    if not inputs_:
        raise FlowError("torment(): there is no input; give a list of records for each stream that `build` takes")
    whole(runs, "torment(): runs", 0)
    if not is_whole(seed):
        raise FlowError(f"torment(): seed={seed!r}; it must be a whole number")
    tasks = [parallelism] if isinstance(parallelism, int) else list(parallelism)
    if not tasks or not all(is_whole(each) and each >= 1 for each in tasks):
        raise FlowError(f"torment(): parallelism={parallelism!r}; give numbers of tasks, each 1 or more")
    if by is not None and last_by is not None:
        raise FlowError("torment(): give `by` or `last_by`: of the last results alone, none has an order")
    harness = _Harness(build, inputs_, tasks, interleave, _Comparing(_key(by, "by"), _key(last_by, "last_by"), expect))
    return harness.check(runs, seed)


@dataclass(frozen=True)
class _Way:
    """How a run goes. The defaults are those of a plain run."""

    seed: int = 0
    tasks: int = 1
    batches: str = "one by one"
    crowded: bool = False  # records enter while others are on their way
    interleaved: bool = False
    goes_back: bool = False
    chained: bool = True
    small_window: bool = False
    sharing: bool = False

    def words(self) -> str:
        """Describes the run."""
        said = [f"{self.tasks} task{'s' * (self.tasks > 1)} for each operator", f"records {self.batches}"]
        said += ["which meet on their way"] * self.crowded + ["the inputs in another order"] * self.interleaved
        said += ["tasks that went back to an epoch"] * self.goes_back + ["no chains"] * (not self.chained)
        said += ["little room for outputs"] * self.small_window + ["all tasks in one worker"] * self.sharing
        return ", ".join(said)


def _way(seed: int, tasks: list[int]) -> _Way:
    """Makes a run by chance. What has few values is taken in turn, so that a few runs have all of them."""
    chance = Random(f"torment {seed}")
    return _Way(
        seed=seed,
        tasks=tasks[seed % len(tasks)],
        batches=("one by one", "in batches", "all at once", "in batches")[seed // len(tasks) % 4],
        crowded=chance.random() < 0.5,
        interleaved=True,
        goes_back=chance.random() < 0.75,
        chained=chance.random() < 0.5,
        small_window=chance.random() < 0.5,
        sharing=chance.random() < 0.3,
    )


class _Harness:
    """Runs the flow on its ways, and compares."""

    def __init__(
        self,
        build: Callable[..., Stream],
        inputs: list[list[Any]],
        tasks: list[int],
        interleave: bool,
        comparing: _Comparing,
    ) -> None:
        self._inputs = {f"input {number}": records for number, records in enumerate(inputs, 1)}
        self._tasks = tasks
        self._interleave = interleave
        self._comparing = comparing
        self._flows = {chained: _flow(build, list(self._inputs), chained) for chained in (True, False)}

    def check(self, runs: int, seed: int) -> list[Any]:
        """Makes the plain run and all others. Returns the results of the plain run."""
        results = self._run(_Way(tasks=self._tasks[0]))
        wrong = self._comparing.begin(results)
        if wrong is not None:
            raise AssertionError(f"torment(): {wrong}\nThis is the plain run: records one by one, and nothing fails.")
        for each in range(seed, seed + runs):
            way = _way(each, self._tasks)
            if len(self._inputs) == 1 or not self._interleave:
                way = replace(way, interleaved=False)
            if not self._interleave:  # what is on its way could overtake
                way = replace(way, crowded=False)
            failed: Exception | None = None
            try:
                wrong = self._comparing.compare(self._run(way))
            except Exception as error:  # users' functions decide what they raise
                failed = error
                wrong = f"the plain run has ended well, and this one has failed: {describe(error)}"
            if wrong is not None:
                raise AssertionError(
                    f"torment(): {wrong}\nThe run with seed {each} has: {way.words()}."
                    f"\nRepeat this run with torment(..., runs=1, seed={each})."
                ) from failed
        return results

    def _run(self, way: _Way) -> list[Any]:
        # A function may change the records that it gets, so each run has copies.
        inputs = {name: [copied(record) for record in records] for name, records in self._inputs.items()}
        return simulate(self._flows[way.chained], inputs, way.tasks, self._course(way))[_RESULTS]

    def _course(self, way: _Way) -> Course:
        """Returns the course of a run."""
        sizes, window, order = (Random(f"{what} {way.seed}") for what in ("sizes", "window", "order"))
        turns = [
            name
            for name, records in self._inputs.items()
            for _ in range(sum(not isinstance(record, Pause) for record in records))
        ]
        if way.interleaved:
            order.shuffle(turns)
        elif self._interleave:
            turns = []
        course = Course(
            batch_size={
                "one by one": lambda: 1,
                "all at once": lambda: _ALL,
                "in batches": lambda: min(_ALL, int(sizes.expovariate(0.3)) + 1),
            }[way.batches],
            order=turns,
            one_by_one=not way.crowded,
            apart=not way.sharing,
        )
        if way.small_window:
            course.credit_window = window.choice((1, 100, 1000))
        if way.goes_back:
            course.goes_back = True
            course.saves = _often(_SAVES, math.inf, Random(f"saves {way.seed}"))
            deaths = Random(f"deaths {way.seed}")
            course.dies = _often(_DIES, deaths.randint(1, 5), deaths)
        return course


def _often(likely: float, most: float, chance: Random) -> Callable[[], bool]:
    """Returns a function that returns True now and then, at most a given number of times."""
    left = most

    def now() -> bool:
        nonlocal left
        if left > 0 and chance.random() < likely:
            left -= 1
            return True
        return False

    return now


def _flow(build: Callable[..., Stream], names: list[str], chained: bool) -> Flow:
    flow = Flow("torment", chaining=chained)
    stream = build(*(flow.read(Memory([]), name=name) for name in names))
    if not isinstance(stream, Stream):
        raise FlowError(
            f"torment(): `build` must return the stream of results, and it has returned {called(stream)}; return what "
            "the last method of the stream returns, such as s.map(f) or s.key_by(f).process(p)"
        )
    stream.write(Null(), name=_RESULTS)
    if _RESULTS not in flow.graph.operators:
        raise FlowError("torment(): `build` has returned a stream of another flow; build on the streams that it gets")
    for name in list(flow.graph.dangling()):  # such as the main output, when the results are a side output
        unused = Write(Null(), name=f"unused output of {name}")
        flow.graph.add(unused)
        flow.graph.connect(Edge(name, unused.name))
    return flow


def _key(selector: Callable[[Any], Any] | str | int | None, what: str) -> Callable[[Any], Any] | None:
    if selector is None or callable(selector):
        return selector
    if isinstance(selector, str | int) and not isinstance(selector, bool):
        return Field(selector)
    raise FlowError(f"torment(): {what}={selector!r}; give a function, or the name or the index of a field")


class _Comparing:
    """Says whether the results of a run are right."""

    def __init__(
        self,
        by: Callable[[Any], Any] | None,
        last_by: Callable[[Any], Any] | None,
        expect: Iterable[Any] | Callable[[list[Any]], object] | None,
    ) -> None:
        self._by = by
        self._last_by = last_by
        self._judge = expect if callable(expect) else None
        self._expected = None if expect is None or callable(expect) else list(expect)
        self._wanted: dict[Any, list[Any]] = {}

    def begin(self, results: list[Any]) -> str | None:
        """Takes the results of the plain run. Returns what is wrong with them, or None."""
        if self._judge is None:
            self._wanted = self._sorted(results if self._expected is None else self._expected)
        return self.compare(results)

    def compare(self, results: list[Any]) -> str | None:
        """Returns the first difference of a run's results, or None."""
        if self._judge is not None:
            try:
                wrong = self._judge(results) is False
            except AssertionError as error:
                return f"`expect` refuses the results, {shorten(results)}: {error}"
            return f"`expect` refuses the results, {shorten(results)}" if wrong else None
        found = self._sorted(results)
        lost = [each for key, some in self._wanted.items() for each in some[len(found.get(key, ())) :]]
        more = [each for key, some in found.items() for each in some[len(self._wanted.get(key, ())) :]]
        if not lost and not more:
            return None
        kind = "the results of one key, in their order" if self._by is not None else "result"
        return "the results are not those of " + (
            ("the plain run" if self._expected is None else "`expect`")
            + f":\n  lost: {_some(lost, kind)}\n  too much: {_some(more, kind)}"
        )

    def _sorted(self, results: list[Any]) -> dict[Any, list[Any]]:
        """Returns the results in the order of the values by which they are compared."""
        if self._last_by is not None:
            results = list({_frozen(self._last_by(result)): result for result in results}.values())
        if self._by is not None:
            of_key: dict[Any, list[Any]] = {}
            for result in results:
                of_key.setdefault(_frozen(self._by(result)), []).append(result)
            results = list(of_key.values())
        equal: dict[Any, list[Any]] = {}
        for result in results:
            equal.setdefault(_frozen(result), []).append(result)
        return equal


def _some(results: list[Any], kind: str) -> str:
    if not results:
        return "nothing"
    shown = "; ".join(shorten(result) for result in results[:_SHOWN])
    return f"{len(results):,} {kind}{'s' * (len(results) > 1 and kind == 'result')}: {shown}" + (
        "; ..." if len(results) > _SHOWN else ""
    )


def _frozen(value: Any) -> Any:
    """Returns a hashable stand-in for a result: equal for equal results, also for those that have no hash."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return dict, frozenset((_frozen(key), _frozen(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_frozen, value))
    if isinstance(value, set | frozenset):
        return frozenset, frozenset(map(_frozen, value))
    if isinstance(value, Enum | type):
        return value
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.compare]
        return type(value), tuple(_frozen(getattr(value, name)) for name in fields)
    if type(value).__eq__ is _SAME and hasattr(value, "__dict__"):
        return type(value), _frozen(vars(value))  # else no copy of it would be equal to it
    try:
        hash(value)
    except TypeError:
        return type(value), repr(value)
    return value
