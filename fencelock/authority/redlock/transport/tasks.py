"""What an asyncio task waits for: answers, or a call."""

from __future__ import annotations

import asyncio
import math

from fencelock.authority.redlock.protocol.messages import Broadcast
from fencelock.authority.redlock.wire.connection import PendingBroadcast


class PendingOfTask(PendingBroadcast):
    """A broadcast whose task waits.

    Attributes:
        deadline: when its patience ends.
        woken: what the task waits for; None as soon as it does not, because it knows the loop.
    """

    __slots__ = ("deadline", "woken")

    def __init__(self, request: Broadcast, deadline: float, woken: asyncio.Future[None] | None) -> None:
        super().__init__(request)
        self.deadline = deadline
        self.woken = woken

    def wake(self) -> None:
        """Have the task go on."""
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)


class InLine:
    """A task that waits in line: what resumes it, and when that happens at the latest."""

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
