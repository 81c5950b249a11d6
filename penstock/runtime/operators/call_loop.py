"""The asyncio loop on which `map_async` awaits the coroutines of one task, in a thread of its own.

The loop belongs to all calls of the task. It must never end before the task does: when something stops it, it runs on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitEnded
from contextlib import suppress
from typing import Any

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
        self._ending = False  # whether the loop is to stop
        self._beat_s = 0.0  # while calls are watched, the loop looks at the clock so often
        self._beat_due: float | None = None  # when it does so next; None: nothing is watched
        self._busy: Callable[[], bool] = lambda: False
        self._stood = (0.0, 0.0)  # (when the loop went on, for how long it had stood still), of a recent time
        self._thread = threading.Thread(target=self._run, name=f"{name} calls", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Runs a coroutine in the loop's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Calls something in the loop's thread, soon."""
        self.loop.call_soon_threadsafe(callback, *args)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        told = False
        while not self._ending:
            # A task of the user's own that raises SystemExit gives it to whoever awaits the task, and ends the loop.
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
                if not self._ending and not told:
                    told = True
                    logger.warning(
                        "operator %r: its function has stopped the asyncio loop that runs its coroutines, and the loop "
                        "was started again. Leave the loop alone: all calls of the task need it",
                        self._name,
                    )
        self.loop.close()

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
        try:
            return self.submit(_cancel(tasks)).result(2 * END_S)  # type: ignore[no-any-return]
        except WaitEnded:
            return None

    def end(self) -> None:
        """Ends all tasks of the loop, and the loop, as far as that is possible in a moment."""
        self.submit(self._last())
        self._thread.join(2 * END_S)

    async def _last(self) -> None:
        this = asyncio.current_task()
        await _cancel([task for task in asyncio.all_tasks() if task is not this])
        self._ending = True
        self.loop.stop()


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> int:
    """Cancels tasks of the loop, waits a moment for their ends, and returns how many have not ended."""
    chosen = list(tasks)
    for task in chosen:
        task.cancel()
    if not chosen:
        return 0
    _, left = await asyncio.wait(chosen, timeout=END_S)
    return len(left)
