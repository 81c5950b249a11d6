"""The asyncio loop on which `map_async` awaits the coroutines of one task.

The loop runs in a thread of its own from the first call that needs that. Until then, what must be awaited at once (an
`open()`, a single call) is awaited in the thread that asks. The loop belongs to all calls of the task, so no coroutine
may stop or close it, and a callback that stops it does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitEnded
from contextlib import suppress
from typing import Any

from penstock.runtime.errors import PenstockError

logger = logging.getLogger(__name__)

#: At the end, calls that are still under way get so many seconds to end. Then they are left to themselves.
END_S = 0.5

# How often the loop looks at the clock, and after how many looks a longest standstill is forgotten.
_BEAT_LEAST_S = 0.005
_BEAT_MOST_S = 1.0
_STOOD_KEPT = 8


class CallLoop:
    """An asyncio loop, and the thread that runs it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._name = name
        self._ending = False  # whether the thread's loop is to stop
        self._told_of_stop = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._beat_s = 0.0  # while calls are watched, the loop looks at the clock so often
        self._beat_due: float | None = None  # when it does so next; None: nothing is watched
        self._busy: Callable[[], bool] = lambda: False
        self._stood = (0.0, 0.0)  # (when the loop went on, for how long it had stood still), of a recent time
        # The loop is that of all calls, and what stops or closes it is one call's mistake.
        self._stop_loop, self._close_loop = self.loop.stop, self.loop.close
        self.loop.stop = self._stop_of_user  # type: ignore[method-assign]
        self.loop.close = self._close_of_user  # type: ignore[method-assign]

    def _stop_of_user(self) -> None:
        """Refuses a coroutine that stops the loop. asyncio itself stops it from a callback, which is no coroutine."""
        if asyncio.current_task(self.loop) is not None:
            self._refuse()
        self._stop_loop()

    def _close_of_user(self) -> None:
        if self.loop.is_running():
            self._refuse()
        self._close_loop()  # it is collected as garbage without having been closed

    def _refuse(self) -> None:
        raise PenstockError(
            "the function must not stop or close the asyncio loop that runs its coroutines, because all calls of the "
            "task need it; to end this call, return or raise an error"
        )

    def run_in_thread(self) -> None:
        """Lets the loop run in its thread from now on."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._name} calls", daemon=True)
                self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Runs a coroutine in the loop's thread."""
        self.run_in_thread()
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Calls something in the loop's thread, soon."""
        self.run_in_thread()
        self.loop.call_soon_threadsafe(callback, *args)

    def until_done(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine on the loop to its end, in this thread unless a loop runs here already."""
        if self._thread is None:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return self._run_here(coroutine)
        return self.submit(coroutine).result()

    def _run_here(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine on the loop to its end, in this thread."""
        task = self.loop.create_task(coroutine)
        while not task.done():
            try:
                self.loop.run_until_complete(task)
            except SystemExit:  # the task's own, or that of a task of the user's, as in _run
                continue
            except RuntimeError:  # the task's own, or the loop was stopped
                if not task.done():
                    self._warn_of_stop()
        return task.result()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ending:
            # A task of the user's own that raises SystemExit gives it to whoever awaits the task, and ends the loop.
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
                if not self._ending:
                    self._warn_of_stop()
        # It was stopped, perhaps long ago by somebody who could not wait for it.
        self._run_here(_cancel(None))
        self._close_loop()

    def _warn_of_stop(self) -> None:
        """Says once that a callback of the user's, which belongs to no call, has stopped the loop."""
        if not self._told_of_stop:
            self._told_of_stop = True
            logger.warning(
                "operator %r: a callback of its function has stopped the asyncio loop that runs its coroutines, and "
                "the loop was started again. Leave the loop alone: all calls of the task need it",
                self._name,
            )

    def watch(self, timeout_s: float | None, busy: Callable[[], bool]) -> None:
        """Notes from now on for how long the loop stands still, while there are calls (`busy`). It must be called in
        the loop's thread. It costs a few looks at the clock in `timeout_s`, and nothing for a call."""
        if self._beat_due is None and timeout_s is not None:
            self._busy = busy
            self._beat_s = min(max(timeout_s / 8, _BEAT_LEAST_S), _BEAT_MOST_S)
            self._wait_for_beat()

    def _wait_for_beat(self) -> None:
        self._beat_due = time.monotonic() + self._beat_s
        self.loop.call_later(self._beat_s, self._beat)

    def _beat(self) -> None:
        now = time.monotonic()
        late = now - (self._beat_due or now)
        if late >= self._stood[1] or now - self._stood[0] > _STOOD_KEPT * self._beat_s:
            self._stood = (now, late)
        if self._busy():
            self._wait_for_beat()
        else:
            self._beat_due = None

    def stood_still(self, within_s: float) -> float:
        """Returns for how many seconds the loop has stood still at a stretch in the last seconds, as far as it was
        watched."""
        now = time.monotonic()
        due = self._beat_due
        until, past = self._stood
        return max(0.0 if due is None else now - due, past if now - until <= within_s else 0.0)

    def cancel(self, tasks: set[asyncio.Task[Any]]) -> int | None:
        """Cancels tasks of the loop, and waits a moment for their ends. Returns how many have not ended, or None when
        some function does not let the loop go on."""
        if self._thread is None:
            return 0
        try:
            return self.submit(_cancel(tasks)).result(2 * END_S)  # type: ignore[no-any-return]
        except WaitEnded:
            return None

    def end(self) -> None:
        """Ends all tasks of the loop, and the loop, as far as that is possible in a moment."""
        if self._thread is not None:
            self._ending = True
            self.loop.call_soon_threadsafe(self._stop_loop)
            self._thread.join(2 * END_S)
        else:
            self._run_here(_cancel(None))
            self._close_loop()


async def _cancel(tasks: set[asyncio.Task[Any]] | None) -> int:
    """Cancels tasks of the loop, or all of them (None), waits a moment for their ends, and returns how many have not
    ended."""
    chosen = list(asyncio.all_tasks() - {asyncio.current_task()} if tasks is None else tasks)
    for task in chosen:
        task.cancel()
    if not chosen:
        return 0
    _, left = await asyncio.wait(chosen, timeout=END_S)
    return len(left)
