"""Makes `ray.init` give up when the head of the cluster ends while a process joins the cluster.

Ray asks the head (the GCS) for the id of its cluster in native code, which waits without limit for a head that has
ended since: no signal ends the call, not even Ctrl-C. `joining` has the question asked by a thread that is left behind
when the head has gone. It must never give up while the head still answers and the limit has not passed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray._private.node

# A head that is so busy that it does not answer within this time, as Ray's own limit is.
_LIMIT_S = 60.0
_LOOK_S = 0.5
# So many looks in a row at which nobody accepts a connection mean that the head has ended.
_LOOKS = 3


class HeadGone(BaseException):
    """The head ended while this process joined its cluster. Ray catches every Exception here, and tries again."""


@contextlib.contextmanager
def joining(accepts: Callable[[], bool]) -> Iterator[None]:
    """While the context is active, a client of a head that ends, or is silent for a minute, raises HeadGone.

    `accepts`: returns whether somebody accepts a connection at the head's address. Used by one thread at a time.
    """
    node: Any = ray._private.node
    make = node.GcsClient

    def client(*args: Any, **options: Any) -> Any:
        return _asked(lambda: make(*args, **options), accepts)

    node.GcsClient = client
    try:
        yield
    finally:
        node.GcsClient = make


def _asked(make: Callable[[], Any], accepts: Callable[[], bool]) -> Any:
    """Returns the result of `make`, or raises its error. Raises HeadGone when the head has gone before."""
    made: list[Any] = []
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            made.append(make())
        except BaseException as error:  # raised again by the thread that waits
            failed.append(error)

    # A daemon thread: a process that ends does not wait for the question that nobody will answer.
    thread = threading.Thread(target=ask, name="penstock-joining", daemon=True)
    thread.start()
    until = time.monotonic() + _LIMIT_S
    missed = 0
    while True:
        thread.join(_LOOK_S)
        if not thread.is_alive():
            break
        missed = 0 if accepts() else missed + 1
        if missed == _LOOKS:
            raise HeadGone("its head ended while this program joined it")
        if time.monotonic() > until:
            raise HeadGone(f"its head accepts connections, but has not answered for {_LIMIT_S:g} s")
    if failed:
        raise failed[0]
    return made[0]
