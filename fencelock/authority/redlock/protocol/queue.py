"""The contenders of this client that wait in line, and the calls that the nodes publish for them.

Threads share a `WaitQueue` without a lock, because each step is one atomic operation on a dict or a set.

When a node releases a lock, it keeps the lock for a moment for the first place in its queue. It publishes the
number of that place on the channel of its client: this is a *call*. One call may be wrong, because nodes can
differ about the order of two contenders that come at the same time. So a contender tries when a majority has
called its place. If only some nodes have called, it tries after a short moment, because perhaps no place gets
a majority. If this attempt fails, the contender passes on the locks that were kept for it.

These are only hints: a lost, late or false call costs time, but cannot make two holders.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from fencelock._backoff import spread

#: Seconds after which a contender tries if only some nodes have called its place: 0.5 to 1.5 times this.
HESITATION = 0.02


@dataclass(slots=True)
class _QueueEntry:
    """The nodes that have called a place since its last attempt, and when the next attempt is due."""

    callers: set[int] = field(default_factory=set)
    due: float = math.inf


class WaitQueue:
    """The places of one client in the queues of so many nodes; every place begins with its name, `client`."""

    def __init__(self, client: str, nodes: int, jitter: Callable[[], float]) -> None:
        self._client = client
        self._quorum = nodes // 2 + 1
        self._jitter = jitter
        self._numbers = itertools.count(1)
        self._listening: set[int] = set()
        self._places: dict[str, _QueueEntry] = {}
        #: Whether the last acquisition had to wait. Then mostly the next one has to wait, too.
        self.waits = False

    @property
    def hears(self) -> bool:
        """Whether the calls of a majority of the nodes arrive; otherwise no contender waits in line."""
        return len(self._listening) >= self._quorum

    def listen(self, node: int) -> None:
        self._listening.add(node)

    def go_deaf(self, node: int) -> None:
        self._listening.discard(node)

    def expect(self, place: str) -> str:
        """Count the calls for an attempt from now on; return its place, a new one if `place` is empty.

        Call this before each attempt, because a node's call may arrive before its answer.
        """
        place = place or f"{self._client}.{next(self._numbers)}"
        self._places[place] = _QueueEntry()
        return place

    def leave(self, place: str) -> None:
        self._places.pop(place, None)

    def on_call(self, node: int, message: bytes, now: float) -> str:
        """Note that a node has called a number; return its place, or an empty text if there is none."""
        name = f"{self._client}.{message.decode('ascii', 'replace')}"
        place = self._places.get(name)
        if place is None:
            return ""
        place.callers.add(node)
        if len(place.callers) >= self._quorum:
            place.due = now
        elif len(place.callers) == 1:
            place.due = min(place.due, now + spread(HESITATION, self._jitter(), 0.5, 1.5))
        return name

    def due(self, place: str) -> float:
        """Return when a place should try again because of calls; infinity without any."""
        known = self._places.get(place)
        return math.inf if known is None else known.due
