"""A user's program with all of its classes in the main script, which looks whether they are one class everywhere.

    python tests/e2e/in_main.py DIRECTORY first     it is killed, rescaled and saved; then it fails
    python tests/e2e/in_main.py DIRECTORY second    it is resumed, and another starts from what was saved

tests/e2e/test_in_main.py runs it as a script and, cell by cell, in a notebook kernel. Functions of the flow raise where
a class is not the one that they know, which fails the job; what comes out is compared with a plain loop.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray

import penstock as ps
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split

RECORDS = 6000
HELD = 4000  # so many are read while the file "hold" is there
SPLITS = 2
LIMIT_S = 240.0


class Mode(Enum):
    ON = "on"
    OFF = "off"


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


@dataclass(frozen=True)
class User:
    name: str
    mode: Mode


class Refused(Exception):
    pass


@dataclass
class Order:
    number: int
    user: User
    line: Order.Line

    class Line(NamedTuple):
        size: Size
        amount: int


@dataclass
class Gift(Order):
    giver: User


@dataclass
class Account:
    user: User
    orders: int
    gifts: int
    amount: int
    last: Order | None


class Balance(NamedTuple):
    user: User
    orders: int
    gifts: int
    amount: int


def order(number: int) -> Order:
    user = User(f"u{number % 7}", Mode.ON if number % 3 else Mode.OFF)
    line = Order.Line(Size(1 + number % 2), number % 11)
    return Gift(number, user, line, User("giver", Mode.ON)) if number % 5 == 0 else Order(number, user, line)


@dataclass(frozen=True)
class Numbers(Split):
    first: int = 0


class Orders(Source):
    """Orders, of which the last come when a file has gone."""

    def __init__(self, hold: str) -> None:
        self.hold = hold

    def splits(self, parallelism: int) -> list[Split]:
        return [Numbers(str(first), offset=first, first=first) for first in range(SPLITS)]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return OrderReader(self.hold, splits)


class OrderReader(Reader):
    def __init__(self, hold: str, splits: list[Split]) -> None:
        if wrong := [split for split in splits if not isinstance(split, Numbers)]:
            raise TypeError(f"{wrong[0]!r} is none of Numbers")
        self.hold = hold
        self.next = {split.name: split.offset for split in splits}
        self.finished = not splits

    def read(self, limit: int) -> list[Order]:
        end = HELD if os.path.exists(self.hold) else RECORDS
        found = []
        for name, number in self.next.items():
            numbers = range(number, end, SPLITS)[: min(limit, 20)]
            found += [order(number) for number in numbers]
            self.next[name] += SPLITS * len(numbers)
        self.finished = all(number >= RECORDS for number in self.next.values())
        return found

    def offsets(self) -> dict[str, Any]:
        return dict(self.next)

    def ready_in(self) -> float:
        return 0.02


def looked_at(record: Order) -> Order:
    if not isinstance(record, Order) or not isinstance(record.user, User) or not isinstance(record.line, Order.Line):
        raise TypeError(f"{record!r} is no Order of this program")
    if record.user.mode is not (Mode.ON if record.number % 3 else Mode.OFF):
        raise TypeError(f"{record.user.mode!r} is no Mode of this program")
    if record != order(record.number):
        raise TypeError(f"{record!r} does not equal what it was made as")
    return record


class Keep(ps.ProcessFunction):
    def process(self, ctx: ps.ProcessContext, key: User, record: Order) -> Any:
        looked_at(record)
        account = ctx.get() or Account(key, 0, 0, 0, None)
        if not isinstance(account, Account) or not isinstance(account.user, User) or account.user != record.user:
            raise TypeError(f"{account!r} is not the Account of {record.user!r}")
        if account.last is not None:
            looked_at(account.last)
        account.orders += 1
        match record:
            case Gift():
                account.gifts += 1
        account.amount += record.line.amount * (2 if record.line.size is Size.LARGE else 1)
        account.last = record
        ctx.set(account)
        return [Balance(account.user, account.orders, account.gifts, account.amount)]


def refused(record: Order) -> Order:
    try:
        if record.number % 1000 == 999:
            raise Refused(record)
    except Refused as error:
        return error.args[0]
    return record


def failing(flag: str) -> Callable[[Balance], Balance]:
    def look(balance: Balance) -> Balance:
        if os.path.exists(flag):
            raise Refused("the job is to fail")
        return balance

    return look


def flow_of(name: str, directory: Path) -> tuple[ps.Flow, ps.sinks.Collect, ps.sinks.Collect]:
    flow = ps.Flow(name)
    balances, modes = ps.sinks.Collect(), ps.sinks.Collect()
    orders = flow.read(Orders(str(directory / "hold")), name="orders").rebalance().map(refused).map(looked_at)
    kept = orders.key_by(lambda record: record.user).process(Keep(), name="keep")
    kept.map(failing(str(directory / "fail"))).write(balances, name="balances")
    orders.key_by(lambda record: record.user.mode).count(emit="final", name="modes").write(modes, name="modes out")
    return flow, balances, modes


def expected() -> dict[User, Balance]:
    """Each user's last balance."""
    orders: dict[User, list[Order]] = defaultdict(list)
    for record in map(order, range(RECORDS)):
        orders[record.user].append(record)
    return {
        user: Balance(
            user,
            len(own),
            sum(isinstance(record, Gift) for record in own),
            sum(record.line.amount * int(record.line.size) for record in own),
        )
        for user, own in orders.items()
    }


def _differences(found: list[int], due: range) -> tuple[list[int], list[int]]:
    return sorted((Counter(found) - Counter(due)).elements()), sorted((Counter(due) - Counter(found)).elements())


def check(found: list[Any], first: bool) -> None:
    """Each user's balances are 1, 2, 3 ... (or from any number on) up to the last, which is as expected."""
    wrong = [one for one in found if type(one) is not Balance or not isinstance(one.user, User)]
    assert not wrong, f"{len(wrong)} of {len(found)} records are none of Balance: {wrong[:3]}"
    strange = [one for one in found if one.user.mode is not Mode.ON and one.user.mode is not Mode.OFF]
    assert not strange, f"{len(strange)} of {len(found)} have no Mode: {strange[:3]}"
    totals = expected()
    by_user: dict[User, list[Balance]] = defaultdict(list)
    for one in found:
        by_user[one.user].append(one)
    assert by_user.keys() == totals.keys(), f"{len(by_user)} users of {len(totals)}: {list(by_user)}"
    for user, own in by_user.items():
        numbers = sorted(balance.orders for balance in own)
        begin = 1 if first else numbers[0]
        more, missing = _differences(numbers, range(begin, totals[user].orders + 1))
        assert not more, f"{user}: {more} too many"
        assert not missing, f"{user}: {missing} are missing"
        assert max(own, key=lambda balance: balance.orders) == totals[user]


def check_modes(found: list[Any]) -> None:
    counts = {mode: sum(record.user.mode is mode for record in map(order, range(RECORDS))) for mode in Mode}
    assert dict(found) == counts, f"{found} where {counts} was due"


def wait_until(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.05)


def running(job: ps.Job, restarts: int) -> bool:
    status = job.status()
    assert status["state"] != "FAILED", status["error"]
    return status["state"] == "RUNNING" and status.get("epochs", {}).get("restarts", 0) >= restarts


def beyond(job: ps.Job) -> bool:
    """Whether an epoch is complete that was begun after this call."""
    epochs = job.status()["epochs"]
    begun = epochs["begun"]
    wait_until(lambda: job.status().get("epochs", {}).get("complete", 0) > begun, "another epoch is complete")
    return True


def first(directory: Path, its_master_dies: bool = True) -> None:
    """Keyed, recovered, rescaled, saved; then failed."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "hold").touch()
    name = directory.name
    flow, balances, _ = flow_of(name, directory)
    job = ps.run(flow, workers=2, epoch_interval_s=0.3, checkpoints=directory / "epochs")
    wait_until(lambda: running(job, 0) and len(balances.records()) > 100, "records come")
    found = balances.records()
    assert all(type(one) is Balance and one.user.mode in Mode for one in found)
    os.kill(job.status()["workers"][1]["pid"], signal.SIGKILL)
    wait_until(lambda: running(job, 1), "the job runs again")
    beyond(job)
    job.rescale("keep", 1)
    beyond(job)
    if its_master_dies:
        master: int = ray.get(job._link.handle.__ray_call__.remote(lambda self: os.getpid()))
        os.kill(master, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(master), "the JobMaster is gone")
        wait_until(lambda: running(job, 0), "the job runs again")
    job.rescale("keep", 2)
    job.savepoint(directory / "saved")
    (directory / "fail").touch()
    (directory / "hold").unlink()
    reason = ""
    try:
        job.wait(LIMIT_S)
    except ps.JobFailed as error:
        reason = str(error)
    assert "the job is to fail" in reason, reason or "the job did not fail"
    print("first: ok", flush=True)


def second(directory: Path) -> None:
    """The failed job is resumed in another process, and one on local processes starts from the savepoint."""
    (directory / "fail").unlink()
    name = directory.name
    job = ps.resume(name, checkpoints=directory / "epochs")
    job.wait(LIMIT_S)
    check(job.records("balances"), first=True)
    check_modes(job.records("modes out"))
    print("resumed: ok", flush=True)
    flow, balances, modes = flow_of(f"{name}-again", directory)
    options = {"checkpoints": directory / "epochs", "savepoint": directory / "saved"}
    ps.run(flow, workers=2, local=True, **options).wait(LIMIT_S)
    check(balances.records(), first=False)
    check_modes(modes.records())
    print("from the savepoint: ok", flush=True)


if __name__ == "__main__" and len(sys.argv) == 3 and sys.argv[2] in ("first", "second"):
    {"first": first, "second": second}[sys.argv[2]](Path(sys.argv[1]))
