"""What an asyncio task waits for."""

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

    def __init__(self, request: Broadcast, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(request)
        self.deadline = math.inf
        self.woken: asyncio.Future[None] | None = loop.create_future()

    def wake(self) -> None:
        """Have the task go on."""
        if self.woken is not None:
            resume(self.woken)


def resume(woken: asyncio.Future[None]) -> None:
    """Resume the task that waits, unless it is on its way already, or its loop is closed."""
    if not woken.done() and not woken.get_loop().is_closed():
        woken.set_result(None)
