"""What a thread waits for while another one reads, and how it is woken."""

from __future__ import annotations

import math
import threading
from contextlib import suppress

from fencelock.authority.redlock.protocol.messages import Broadcast
from fencelock.authority.redlock.protocol.queue import WaitQueue
from fencelock.authority.redlock.wire.connection import PendingBroadcast


class WaitForAnswers(PendingBroadcast):
    """A broadcast whose thread waits, until its patience ends at the deadline.

    Attributes:
        bell: what the thread sleeps on while another one reads for it; the same in `WaitForCall`.
    """

    __slots__ = ("bell", "deadline")

    def __init__(self, request: Broadcast) -> None:
        super().__init__(request)
        self.bell: threading.Lock | None = None
        self.deadline = -math.inf

    def due(self) -> float:
        """Return when it is over as far as is known now."""
        return -math.inf if self.complete else self.deadline

    def wake(self) -> None:
        ring(self)


class WaitForCall:
    """A wait in line, to be called; `over` when it has ended."""

    __slots__ = ("_deadline", "_place", "_queue", "bell", "over")

    def __init__(self, deadline: float, queue: WaitQueue, place: str) -> None:
        self.bell: threading.Lock | None = None
        self.over = False
        self._deadline = deadline
        self._queue = queue
        self._place = place

    def due(self) -> float:
        """Return when it is over as far as is known now."""
        return min(self._deadline, self._queue.due(self._place))


Wait = WaitForAnswers | WaitForCall


def ring(waiting: Wait) -> None:
    if waiting.bell is not None:
        with suppress(RuntimeError):  # it is awake
            waiting.bell.release()
