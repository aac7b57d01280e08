"""The contenders of this client that wait in line, and the calls that the nodes publish for them.

Pure. Threads share it without a lock: each step is one operation on a dict or a set, which Python does whole.

A node that releases a lock keeps it, for a moment, for the first in its queue, and publishes the number of
that place on the channel of the client that it belongs to. One call may be wrong: nodes can differ about
which came first, where two came at the same time. So a place acts when a majority has called it. Where only
some have, and the others have called another, it acts after a short moment too, for none may get a majority;
the one that fails then hands on what it was kept.

All of this is hints. A call that is lost, late or made up costs time, never a token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from fencelock.authority.redlock.protocol.attempts import QueuePosition

#: Seconds after which a place acts that only some of the nodes have called; about half to one and a half.
HESITATION = 0.02


@dataclass(slots=True)
class _QueueEntry:
    """The nodes that have called a place since its last attempt, and when the next is due because of that."""

    callers: set[int] = field(default_factory=set)
    due: float = math.inf


class WaitQueue:
    """The places of one client in the nodes' queues.

    Args:
        client: its name, part of the channel and of every place; without dots.
        nodes: how many nodes there are.
        jitter: returns a random number between 0 and 1.
    """

    def __init__(self, client: str, nodes: int, jitter: Callable[[], float]) -> None:
        self._client = client
        self._quorum = nodes // 2 + 1
        self._jitter = jitter
        self._numbers = itertools.count(1)
        self._listening: set[int] = set()
        self._places: dict[str, _QueueEntry] = {}
        #: Whether the last acquisition had to wait. Then the next one will, mostly.
        self.waits = False

    @property
    def hears(self) -> bool:
        """Whether a majority of the nodes could call. Otherwise none should stand in line."""
        return len(self._listening) >= self._quorum

    def listen(self, node: int) -> None:
        """Note that a node's calls arrive from now on."""
        self._listening.add(node)

    def go_deaf(self, node: int) -> None:
        """Note that a node's calls do not arrive any more."""
        self._listening.discard(node)

    def expect(self, place: str) -> str:
        """Count the calls for an attempt from now on; return its place, a new one where it is empty.

        Said before each attempt, because a call may come before its answer does.
        """
        place = place or f"{self._client}.{next(self._numbers)}"
        self._places[place] = _QueueEntry()
        return place

    def leave(self, place: str) -> None:
        """Forget a place whose acquisition is over."""
        self._places.pop(place, None)

    def note(self, node: int, message: bytes, now: float) -> str:
        """Note that a node has called a number; return its place, empty for none of this line."""
        name = f"{self._client}.{message.decode('ascii', 'replace')}"
        place = self._places.get(name)
        if place is None:
            return ""
        place.callers.add(node)
        if len(place.callers) >= self._quorum:
            place.due = now
        elif len(place.callers) == 1:
            place.due = min(place.due, now + HESITATION * (0.5 + self._jitter()))
        return name

    def due(self, place: str) -> float:
        """Return when a place should try again because of calls; infinity without any."""
        known = self._places.get(place)
        return math.inf if known is None else known.due


class Waiter:
    """One acquisition's part in waiting: whether it stands in line, and where.

    Its first attempt does not, if the last acquisition of this client had not to wait: then the lock is
    mostly free, and a node has less to do.

    Args:
        queue: hears the nodes' calls.
        clock: returns the time in seconds; it goes evenly.
        wall: returns the time in seconds; it is about the same for all clients.
        fair: whether it leaves a free lock to those that have waited longer.
        patient: whether it is going to wait at all.

    Attributes:
        place: under which it is called; empty as long as it has none.
    """

    def __init__(
        self,
        queue: WaitQueue,
        clock: Callable[[], float],
        wall: Callable[[], float],
        *,
        fair: bool,
        patient: bool,
    ) -> None:
        self._queue = queue
        self._clock = clock
        self._fair = fair
        self._patient = patient
        self._began = clock()
        self._since = wall()
        self._attempts = 0
        self.place = ""

    def position(self) -> QueuePosition | None:
        """Return how the next attempt behaves; from now on calls for it count."""
        self._attempts += 1
        if self._patient and (self._attempts > 1 or self._queue.waits) and self._queue.hears:
            self.place = self._queue.expect(self.place)
            return QueuePosition(self.place, self._clock() - self._began, self._since, self._fair)
        if self.place:  # or else a call from before would end every sleep at once
            self._leave_line()
        return QueuePosition(fair=True) if self._fair else None

    def leave(self) -> None:
        """Forget the place: the acquisition is over."""
        self._queue.waits = self._attempts > 1
        if self.place:
            self._leave_line()

    def _leave_line(self) -> None:
        self._queue.leave(self.place)
        self.place = ""
