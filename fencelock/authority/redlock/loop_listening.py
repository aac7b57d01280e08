"""Hears the nodes' calls for all tasks of a loop that wait, over one connection to each node.

The loop reads them: whoever is called is resumed in its next round. Nothing is opened before a task waits,
and everything is closed when none has waited for a while, so that a loop in which nobody waits has nothing
to do, nor to end. Lost connections are opened again as long as somebody waits.

As for `Lines`, a loop knows its listener by readers and timers, and the listener it by weak references only,
so that a loop which is thrown away with tasks in it can go.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import Callable, Sequence

from fencelock.authority.redlock.dialling import LONGEST_BACKOFF
from fencelock.authority.redlock.ears import Ear, Listening
from fencelock.authority.redlock.node import Link, Node
from fencelock.authority.redlock.protocol import Answer, Said

#: Seconds by which a timer may be early.
_SLACK = 0.002
#: Seconds without anybody who waits, after which the connections are closed.
IDLE = 10.0


class _Rest:
    """A task that waits: what resumes it, and when that happens at the latest."""

    __slots__ = ("__weakref__", "_alarm", "_due", "woken")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.woken = loop.create_future()
        self._due = math.inf
        self._alarm: asyncio.TimerHandle | None = None

    def end_by(self, due: float, now: float) -> None:
        """Resume the task at that time, if it would not be sooner."""
        if due <= now:
            self.wake()
        elif due < self._due:
            self.cancel_alarm()
            self._due = due
            self._alarm = self.woken.get_loop().call_later(due - now, self.wake)

    def wake(self) -> None:
        """Resume the task, unless it is on its way already."""
        if not self.woken.done():
            self.woken.set_result(None)

    def cancel_alarm(self) -> None:
        """Leave nothing behind in the loop."""
        if self._alarm is not None:
            self._alarm.cancel()


def call_into(
    loop: asyncio.AbstractEventLoop | None, callback: Callable[[], None], otherwise: Callable[[], None]
) -> None:
    """Have a loop call something, from any thread; `otherwise` where it has been closed and nobody waits."""
    if loop is not None:
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:
            otherwise()


class LoopListener(Listening):
    """Wakes up tasks of one loop when the nodes call them; other arguments as for `Listening`.

    May be used in the loop's own thread only, and has to be closed there.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, nodes: Sequence[Node], node_key: str) -> None:
        super().__init__(nodes, node_key)
        self._loop = weakref.ref(loop)
        self._resting: weakref.WeakValueDictionary[str, _Rest] = weakref.WeakValueDictionary()
        self._last_rest = 0.0
        self._ends_when_idle = False
        self._dials_later = False

    def close(self) -> None:
        """Close the connections; whoever waits goes on by looking."""
        for ear in self._ears:
            ear.close()
        self._hang_up()

    async def wait(self, place: str, seconds: float) -> None:
        """Return when the nodes call the place, at the latest after so many seconds."""
        loop = asyncio.get_running_loop()
        self._last_rest = now = time.monotonic()
        self._dial_absent(now)
        self._end_when_idle(loop, IDLE)
        rest = _Rest(loop)
        rest.end_by(min(now + seconds, self._line.due(place)), now)
        if place:
            self._resting[place] = rest
            self._dial_later(now)
        try:
            await rest.woken
        finally:
            rest.cancel_alarm()
            self._resting.pop(place, None)

    def _end_when_idle(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        if not self._ends_when_idle:
            self._ends_when_idle = True
            # The handle is not kept: it knows the loop, which is to be free to go.
            loop.call_later(seconds, self._end_idleness)

    def _end_idleness(self) -> None:
        """Close the connections if nobody has waited for so long; otherwise look again."""
        self._ends_when_idle = False
        left = self._last_rest + IDLE - time.monotonic()
        if left <= 0 and not self._resting:
            self._hang_up()
        elif (loop := self._loop()) is not None:
            self._end_when_idle(loop, max(left, 0.1 * IDLE))

    def _announce(self) -> None:
        call_into(self._loop(), self._welcome, self.close)

    def _welcome(self) -> None:
        self._adopt()
        self._dial_again()

    def _lose(self, ear: Ear, answer: Answer) -> None:
        super()._lose(ear, answer)
        self._dial_later(time.monotonic())

    def _dial_later(self, now: float) -> None:
        """Open soon what has failed, if somebody waits. What has to wait longer is left to who waits next."""
        loop = self._loop()
        if self._dials_later or not self._resting or loop is None or loop.is_closed():
            return
        pauses = (ear.retry_at - now for ear in self._ears if ear.link is None and ear.retry_at > now)
        pause = min(pauses, default=math.inf)
        if pause <= LONGEST_BACKOFF:
            self._dials_later = True
            loop.call_later(pause + _SLACK, self._end_pause)

    def _end_pause(self) -> None:
        self._dials_later = False
        self._dial_again()

    def _dial_again(self) -> None:
        if self._resting:
            now = time.monotonic()
            self._dial_absent(now)
            self._dial_later(now)

    def _readable(self, ear: Ear) -> None:
        """Read what has arrived, and resume those who were called; called by the loop."""
        try:
            called = self._hear(ear)
        except BaseException:
            # A signal handler's: nobody knows how much of a message has been read.
            self._lose(ear, Answer(Said.UNREACHABLE, detail="reading was interrupted"))
            raise
        now = time.monotonic()
        for place in called:
            rest = self._resting.get(place)
            if rest is not None:
                rest.end_by(self._line.due(place), now)

    def _watch(self, ear: Ear, link: Link) -> None:
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.add_reader(link.descriptor, self._readable, ear)

    def _unwatch(self, ear: Ear, link: Link) -> None:  # noqa: ARG002 - the other listener's needs no more either
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.remove_reader(link.descriptor)
