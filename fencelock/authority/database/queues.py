"""The queues of callers that wait for a resource: one in each world, and one of worlds in the database."""

from __future__ import annotations

import math
import secrets
import string
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary, ref

from fencelock._owners import current_stack
from fencelock.authority.base import Grant
from fencelock.authority.loops import Wakeup
from fencelock.errors import QuorumError

# A world is the blocking code of a process, or an event loop. Of its callers that wait for one resource, only
# the first asks the database. During a short turn, a holder transfers its lease to the next caller of its own
# world.
#
# The column `queue` has the names of the worlds that wait. After a turn, the resource is kept for the first
# of them for a moment, and PostgreSQL calls that world by NOTIFY. These are only hints: a lost, late or false
# hint costs time, but cannot make two holders.
#
# A caller that needs several resources has a name of its own there. It waits for the first one that is
# occupied, in the order of the resources, and keeps the free ones before it. So no two callers keep from each
# other what they need (`proof/several.py` is the model).

_TURN: Final = 0.01  # seconds for which the callers of a world transfer a lock to each other
_LONG_TURN: Final = 0.05  # the same in a world that hears no calls
_KEPT: Final = 0.25  # seconds after which a world joins the queue of worlds again
_USUALLY: Final = 0.7  # the part of the usual wait for which the first caller pauses
_MOST_USUAL: Final = 1000  # the most resources whose usual waits are kept
_DEAF: Final = 30.0  # seconds until a world that hears no calls tries to listen again
NAME_LENGTH: Final = 8  # characters of a name in the column `queue`, with its comma
WORLD_LENGTH: Final = 4  # the first characters, which a world and its callers of several resources share
_LETTERS: Final = string.ascii_lowercase + string.digits


def new_name(world: str = "") -> str:
    """Return a name for a world, or for a caller of this world that needs several resources."""
    common = world[:WORLD_LENGTH]
    return common + "".join(secrets.choice(_LETTERS) for _ in range(NAME_LENGTH - 1 - len(common))) + ","


class Place:
    """A caller's place in a queue: at first in a queue of its own."""

    def __init__(self, wakeup: Wakeup, ttl: float) -> None:
        self.wakeup = wakeup  # wakes the caller when it has to look at its place again
        self.ttl = ttl  # ttl of the wanted lease, in seconds
        self.grant: Grant | None = None  # the grant that the previous holder has transferred to the caller
        self.is_late = False  # whether an unanswered statement may still grant the resource to this caller
        self.worlds_ahead = 0  # how many worlds are known to come before this one
        #: Since when no world comes before this one, on the clock of `time.monotonic`.
        self.next_since: float = time.monotonic()
        self.waits_for = ""  # the resource in whose queue a caller that needs several ones is
        self.is_due = False  # whether the caller has to make an attempt now
        #: Whether the caller has to check now, because the database may keep the resource for another world.
        self.looks = False
        #: The error of the first caller, which could not ask the database.
        self.error: QuorumError | None = None
        self.has_left = False
        self.stack: int = current_stack()
        self.queue: Queue = Queue(deque([ref(self)]))

    @property
    def is_first(self) -> bool:
        return self.queue.first is self


@dataclass(eq=False, slots=True)
class Queue:
    """The callers of a world that wait for a resource."""

    #: Weak references, because a caller that a signal handler interrupts may not remove its place.
    places: deque[ref[Place]]
    held_until: float | None = None  # the end of the other holder's lease, as far as it is known
    turn_began: float | None = None
    _queued_at: float = -math.inf

    @property
    def first(self) -> Place | None:
        with suppress(IndexError):
            if (place := self.places[0]()) is not None:
                return place
        # Do not remove dead places: if another thread removed one meanwhile, a living one could be lost.
        return next((place for each in list(self.places) if (place := each()) is not None), None)

    def alive(self) -> Iterator[Place]:
        # A copy, because the garbage collector may make a caller leave meanwhile, but not within `list`.
        return (place for each in list(self.places) if (place := each()) is not None)

    @property
    def held_for(self) -> float | None:
        """For how many seconds the other holder's lease lasts; None if it is unknown."""
        return None if self.held_until is None else max(0.0, self.held_until - time.monotonic())

    def note_grant(self) -> None:
        """Note that a caller of this world has the resource."""
        if self.turn_began is None:
            self.turn_began = time.monotonic()
        self._queued_at = -math.inf

    def end_turn(self) -> None:
        """Note that another world may have the resource next."""
        self.turn_began = None
        self._queued_at = -math.inf

    def end_wait(self) -> None:
        """Note that this world is not in the queue of worlds, because the resource was free."""
        self._queued_at = -math.inf

    @property
    def has_to_queue(self) -> bool:
        """Whether to join the queue of worlds now; after True, it is False for a while."""
        if (now := time.monotonic()) < self._queued_at + _KEPT:
            return False
        self._queued_at = now
        return True

    def be_called(self) -> None:
        """Note that the database keeps the resource for the first caller, which is in no queue any more."""
        self.end_wait()
        self.wake()

    def wake(self) -> None:
        """Let the first caller make an attempt now."""
        if (place := self.first) is not None:
            place.is_due = True
            place.wakeup.wake()


class Queues:
    """The queues of a world."""

    def __init__(self, wakeup: Callable[[], Wakeup], *, in_threads: bool) -> None:
        self.name: str = new_name()
        self.hears: bool = False  # whether PostgreSQL's calls arrive
        #: Whether the last successful acquisition had to wait; then the next one mostly has to wait, too.
        self.waited = False
        self.ear: Any = None  # the `Ear` that hears the calls
        self.new_wakeup = wakeup
        self._in_threads = in_threads
        self._mutex = threading.RLock()  # reentrant, because a signal handler may interrupt its owner
        self._queues: dict[str, Queue] = {}
        #: The callers that need several resources, by name. A signal handler may keep one from leaving.
        self._several: WeakValueDictionary[str, Place] = WeakValueDictionary()
        #: How long the last caller of this world was the first for a resource, in seconds.
        self._usual: dict[str, float] = {}
        self._listens_again = 0.0
        self._last_wait = 0.0

    def new_place(self, ttl: float) -> Place:
        return Place(self.new_wakeup(), ttl)

    def join(self, resource: str, place: Place) -> None:
        """Append a place to the queue; not for a signal handler that has interrupted a caller in it."""
        with self._mutex:
            queue = self._queues.setdefault(resource, place.queue)
            if queue is place.queue:
                return
            if not (self._in_threads and any(each.stack == place.stack for each in queue.alive())):
                place.queue = queue
                queue.places.append(ref(place))

    def note_wait(self, resource: str, seconds: float) -> None:
        """Note for how long a caller was the first for a resource."""
        with self._mutex:
            before = self._usual.pop(resource, seconds)
            self._usual[resource] = (before + seconds) / 2
            if len(self._usual) > _MOST_USUAL:
                del self._usual[next(iter(self._usual))]

    def pause_after(self, resource: str, waited: float) -> float:
        """Return the pause of a caller that hears no calls, and has been the first for so many seconds.

        It looks often when the resource usually becomes free, and less often before and after that.
        """
        usual = self._usual.get(resource, 0.0)
        return max(_USUALLY * usual - waited, usual / 20, (waited - usual) / 2)

    def join_several(self, place: Place) -> str:
        """Return a new name for a caller that needs several resources."""
        with self._mutex:
            name = new_name(self.name)
            while name == self.name or name in self._several:
                name = new_name(self.name)
            self._several[name] = place
            return name

    def leave_several(self, name: str) -> None:
        self._several.pop(name, None)

    def leave(self, resource: str, place: Place) -> None:
        """Remove a place; if it was the first, wake the next one."""
        if place.has_left:
            return
        with self._mutex:
            queue, was_first = place.queue, place.is_first
            with suppress(ValueError):
                queue.places.remove(ref(place))
            if (first := queue.first) is not None:
                if was_first:
                    first.wakeup.wake()
            elif self._queues.get(resource) is queue:
                del self._queues[resource]
        place.has_left = True  # last, because a signal handler may interrupt this

    def fail(self, place: Place, error: QuorumError) -> None:
        """Let all others in the queue raise the error of the first."""
        with self._mutex:
            for other in place.queue.alive():
                if other is not place:
                    other.error = error
                    other.wakeup.wake()

    def next_of(self, resources: tuple[str, ...]) -> Place | None:
        """Return the place in this world to which a holder may transfer its lease, or None."""
        with self._mutex:
            queue = self._queues.get(resources[0]) if len(resources) == 1 else None
            turn = _TURN if self.hears else _LONG_TURN
            if queue is None or queue.turn_began is None or time.monotonic() > queue.turn_began + turn:
                return None
            return queue.first

    def deliver(self, place: Place, grant: Grant) -> bool:
        """Give a place its transferred grant; return False if its caller has given up."""
        with self._mutex:
            if place.queue.first is not place:
                return False
            place.grant = grant
            place.queue.wake()
            return True

    def released(self, resource: str, kept_for: str | None) -> None:
        """Wake the first caller after a release; `kept_for` names the world that comes next, or is None."""
        with self._mutex:
            if kept_for is not None and (several := self._several.get(kept_for)) is not None:
                several.queue.be_called()
            if (queue := self._queues.get(resource)) is None:
                return
            queue.end_turn()
            if kept_for in (None, self.name):
                queue.wake()
            elif (place := queue.first) is not None:
                place.looks = True
                place.wakeup.wake()

    def call(self, name: str, resource: str) -> bool:
        """Wake the caller for which a resource is kept; return False if there is none."""
        with self._mutex:
            if name != self.name:
                if (place := self._several.get(name)) is not None:
                    place.queue.be_called()
                return place is not None
            if (queue := self._queues.get(resource)) is None or queue.first is None:
                return False
            queue.be_called()
            return True

    @property
    def has_to_listen(self) -> bool:
        """Whether to begin to listen now; after True, it is False for a while."""
        now = self._last_wait = time.monotonic()
        if self.hears or now < self._listens_again:
            return False
        self._listens_again = now + _DEAF
        return True

    def is_idle(self, seconds: float) -> bool:
        return not (self._queues or self._several) and time.monotonic() > self._last_wait + seconds

    def go_deaf(self) -> None:
        self.hears = False
        self._listens_again = time.monotonic() + _DEAF
