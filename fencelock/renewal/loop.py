"""Extends the leases of asyncio code: the event loop itself, with timers and short-lived tasks.

So nothing is pending while nothing is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import os
import time
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, ref

from fencelock._owners import running_loop
from fencelock.authority.base import Authority, Grant
from fencelock.renewal.schedule import Agenda, Extended, Renewable, failed, second_look, tell, tend


class LoopRenewer:
    """Extends the holds of one event loop's tasks, by timers of that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, authority: Authority) -> None:
        self._loop = ref(loop)
        self._authority = ref(authority)
        self._agenda = Agenda()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf
        self._round: asyncio.Task[list[Callable[[], object]]] | None = None
        self._tended: frozenset[Renewable] = frozenset()

    def watch(self, hold: Renewable) -> None:
        """Begin to extend a hold; called elsewhere than in the loop, begin soon."""
        loop = self._loop()
        if running_loop() is loop:
            self._agenda.enter(hold, time.monotonic())
            self._wind_up()
        elif loop is not None:
            with contextlib.suppress(RuntimeError):  # it has been closed, and nothing extends
                loop.call_soon_threadsafe(self.watch, hold, context=contextvars.Context())

    def strike(self, hold: Renewable) -> bool:
        """Cease to extend a hold; or return False, and go on, where an extension is under way."""
        if hold in self._tended:
            return False
        self._agenda.strike(hold)
        return True

    def stop(self, hold: Renewable) -> None:
        """Cease to extend a hold; one under way is not waited for, as only tasks of the loop could."""
        self._agenda.strike(hold)

    async def stop_soon(self, hold: Renewable) -> None:
        """Cease to extend a hold; in its loop, an extension under way has ended when this returns."""
        if self._round is not None and hold in self._tended and running_loop() is self._loop():
            await asyncio.wait([self._round])
        self._agenda.strike(hold)

    def _wind_up(self) -> None:
        """Set the timer, if it is not to ring early enough."""
        at = self._agenda.next_at
        if self._round is not None or at >= self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = at
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, at - time.monotonic()), self._ring, context=contextvars.Context()
        )

    def _ring(self) -> None:
        self._timer, self._wakes_at = None, math.inf
        if due := self._agenda.take(time.monotonic()):
            self._tended = frozenset(due)
            self._round = asyncio.get_running_loop().create_task(self._ask(due), name="fencelock-renewal")
            self._round.add_done_callback(self._end_round)
        else:
            self._wind_up()

    def _end_round(self, done: asyncio.Task[list[Callable[[], object]]]) -> None:
        tended, self._round, self._tended = self._tended, None, frozenset()
        if done.cancelled():  # with all tasks that there are; what is held is held still
            now = time.monotonic()
            for hold in tended:
                if not hold.over:
                    self._agenda.plan(hold, *second_look(hold, now))
        self._wind_up()
        if not done.cancelled():
            tell(done.result())

    async def _ask(self, due: list[Renewable]) -> list[Callable[[], object]]:
        authority = due[0].authority.aio
        steps = tend(due, time.monotonic, self._agenda.plan)
        answer: Sequence[Extended] = ()
        try:
            asked = next(steps)
            while True:
                try:
                    if isinstance(asked, Grant):
                        await authority.release(asked)
                    else:
                        answer = await authority.extend_many(asked)
                except Exception as error:  # noqa: BLE001 - renewal must outlive whatever happens
                    answer = failed(asked, error)
                asked = steps.send(answer)
        except StopIteration as end:
            calls: list[Callable[[], object]] = end.value
            return calls


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[Authority, LoopRenewer]] = (
    WeakKeyDictionary()
)


def for_loop(authority: Authority) -> LoopRenewer:
    """Return what extends the holds of the running event loop's tasks."""
    loop = asyncio.get_running_loop()
    renewers = _of_loops.get(loop)
    if renewers is None:
        renewers = _of_loops.setdefault(loop, WeakKeyDictionary())
    renewer = renewers.get(authority)
    if renewer is None:
        renewer = renewers[authority] = LoopRenewer(loop, authority)
    return renewer


def _forget() -> None:
    """In a forked child: nothing is held."""
    _of_loops.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
