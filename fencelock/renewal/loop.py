"""Extends the leases of asyncio code, by timers and short tasks of the event loop itself.

When nothing is held, at most one timer is left, and it rings once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import time
from weakref import WeakKeyDictionary, ref

from fencelock._owners import running_loop
from fencelock._platform import in_forked_child
from fencelock.authority.base import Authority
from fencelock.renewal.schedule import Renewable, Renewer, tell


class LoopRenewer(Renewer):
    """Extends the holds of one event loop's tasks, by timers of that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = ref(loop)
        #: Weak, because a timer refers to its loop, which must not be kept alive: see `_of_loops`.
        self._timer: ref[asyncio.TimerHandle] | None = None
        self._wakes_at = math.inf
        self._round: asyncio.Task[None] | None = None

    def add(self, hold: Renewable) -> None:
        """Begin to extend a hold: at once in its loop, soon if another thread calls this."""
        loop = self._loop()
        if running_loop() is loop:
            self.reschedule(hold, time.monotonic())
            self._wind_up()
        elif loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and extends nothing any more
                loop.call_soon_threadsafe(self.add, hold, context=contextvars.Context())

    def stop(self, hold: Renewable) -> None:
        self._unplan(hold)

    async def stop_soon(self, hold: Renewable) -> None:
        """Stop extending a hold; in its loop, wait for an extension that is under way."""
        if self._round is not None and hold in self._in_flight and running_loop() is self._loop():
            await asyncio.wait([self._round])
        self._unplan(hold)

    def _wind_up(self) -> None:
        """Set the timer to the next look, unless it rings early enough."""
        at = self.next_at
        if self._round is not None or at >= self._wakes_at:
            return
        if self._timer is not None and (timer := self._timer()) is not None:
            timer.cancel()
        self._wakes_at = at
        pause, loop = max(0.0, at - time.monotonic()), asyncio.get_running_loop()
        self._timer = ref(loop.call_later(pause, self._ring, context=contextvars.Context()))

    def _ring(self) -> None:
        self._timer, self._wakes_at = None, math.inf
        if due := self.pop_due(time.monotonic()):
            extending = due[0].authority.aio.run(self.renew_due(due, time.monotonic, tell))
            self._round = asyncio.get_running_loop().create_task(extending, name="fencelock-renewal")
            self._round.add_done_callback(self._end_round)
        else:
            self._wind_up()

    def _end_round(self, done: asyncio.Task[None]) -> None:
        in_flight, self._round, self._in_flight = self._in_flight, None, frozenset()
        if done.cancelled():  # with all tasks of the loop; the leases are still held
            for hold in in_flight:
                if not hold.over:
                    hold.last_error = "the task that extends it was cancelled"
                    self.reschedule(hold, time.monotonic())
        self._wind_up()
        if not done.cancelled():
            done.result()


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[Authority, LoopRenewer]]
_of_loops = WeakKeyDictionary()


def for_loop(authority: Authority) -> LoopRenewer:
    loop = asyncio.get_running_loop()
    renewers = _of_loops.get(loop) or _of_loops.setdefault(loop, WeakKeyDictionary())
    return renewers.get(authority) or renewers.setdefault(authority, LoopRenewer(loop))


in_forked_child(_of_loops.clear)  # the child holds nothing
