"""What happens in fencelock, as values; and the one list of listeners, which every part tells.

Documented as `fencelock.observe`. Nothing pays for it while nothing listens: each part asks for `listeners`
before it makes an event. A listener is called in the thread, task or greenlet in which the thing happened,
and for one event at a time there: what a listener causes itself, or a signal handler, comes after that. A
listener that raises is logged, and changes nothing.

The events are not frozen, because each field of a frozen dataclass costs as much as the rest of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Literal, TypeVar

from fencelock._platform import in_forked_child

logger = logging.getLogger("fencelock.observe")

Outcome = Literal["timeout", "error", "cancelled"]
LossReason = Literal["max_hold", "expired", "gone"]
LockEnd = Literal["released", "lost", "max_hold"]


@dataclass(slots=True)
class Event:
    """Something that happened. Which kind it is tells the class."""


@dataclass(slots=True)
class LockEvent(Event):
    """Something that happened to a lock.

    Attributes:
        authority: what grants it; its `repr` shows no password.
        resources: their names.
        template: `"order:{id}"` where `@fenced` was given that; empty otherwise.
    """

    authority: object
    resources: tuple[str, ...]
    template: str


@dataclass(slots=True)
class LockWaiting(LockEvent):
    """A lock was not granted at the first attempt, and is waited for: for its holder, or for nodes.

    `LockAcquired` or `LockNotAcquired` follows.
    """


@dataclass(slots=True)
class LockAcquired(LockEvent):
    """A lock is held. `LockReleased` follows, once; never for a lock object that was thrown away instead.

    Attributes:
        tokens: one for each resource.
        waited: seconds that it took.
        had_to_wait: whether a `LockWaiting` was told before.
    """

    tokens: tuple[int, ...]
    waited: float
    had_to_wait: bool


@dataclass(slots=True)
class LockNotAcquired(LockEvent):
    """A lock was asked for, and not acquired.

    Attributes:
        waited: seconds that it took.
        had_to_wait: whether a `LockWaiting` was told before.
        outcome: another holder kept it ("timeout"), it could not be decided ("error"), or the task was
            cancelled, the thread interrupted or the acquisition given up ("cancelled").
        error: which is raised.
    """

    waited: float
    had_to_wait: bool
    outcome: Outcome
    error: BaseException


@dataclass(slots=True)
class LockReleased(LockEvent):
    """A lock is not held any more.

    Attributes:
        tokens: one for each resource.
        held: seconds since `LockAcquired`.
        end: it was given back, or handed over to another process ("released"); its lease had ended before
            ("lost"), because `max_hold` was over ("max_hold").
        error: why the nodes or the database could not be told; it ends by itself then. None if they were.
    """

    tokens: tuple[int, ...]
    held: float
    end: LockEnd
    error: BaseException | None


@dataclass(slots=True)
class LeaseExtended(LockEvent):
    """A lease was to be extended in the background.

    Attributes:
        outcome: it lives on ("extended"), it has ended, maybe before it could be tried ("lost"), or nothing
            was decided, and it is tried again until it ends ("error").
        lateness: seconds between when that was planned and when it began. A process that is too busy to
            renew its leases shows here first.
        ttl: seconds that the lease lasts.
        error: why it was not extended; None if it was.
    """

    outcome: Literal["extended", "lost", "error"]
    lateness: float
    ttl: float
    error: BaseException | None


@dataclass(slots=True)
class LeaseLost(LockEvent):
    """A lease has been found to have ended before it was given back.

    Attributes:
        tokens: one for each resource.
        reason: `max_hold` was over; its time ran out before it could be extended ("expired"); or the
            authority does not know it any more ("gone").
        detail: the same as a sentence.
    """

    tokens: tuple[int, ...]
    reason: LossReason
    detail: str


@dataclass(slots=True)
class TokenReminted(LockEvent):
    """A lock that is held has got larger tokens: the new ones, one for each resource."""

    tokens: tuple[int, ...]


@dataclass(slots=True)
class ConnectionEvent(Event):
    """Something that happened to a connection of an authority.

    Attributes:
        authority: `"Redlock"` or `"Database"`.
        endpoint: the node's address, or the database without its password.
    """

    authority: str
    endpoint: str


@dataclass(slots=True)
class ConnectionOpened(ConnectionEvent):
    """A connection has been opened."""


@dataclass(slots=True)
class ConnectionFailed(ConnectionEvent):
    """A node could not be connected to, or a database did not answer.

    Attributes:
        reason: why.
    """

    reason: str


@dataclass(slots=True)
class GuardEvent(Event):
    """Something that the guard did.

    Attributes:
        table: name of the table; None where it cannot be told.
        identity: primary key of the row, as a tuple; None where there is no one row.
        resource: of the lease; None where it is not known, or there is none.
        token: the fencing token that was written or refused; None where there is none.
        fence: of the row, where that was higher than the token.
        error: which is raised; None for a claim.
    """

    table: str | None
    identity: tuple[Any, ...] | None = None
    resource: str | None = None
    token: int | None = None
    fence: int | None = None
    error: Exception | None = None


@dataclass(slots=True)
class StaleWriteRefused(GuardEvent):
    """The database has turned a stale token away."""


@dataclass(slots=True)
class UnfencedWriteRefused(GuardEvent):
    """A write without its lease was refused."""


@dataclass(slots=True)
class WrittenWithoutLease(GuardEvent):
    """A row was written under no lease, as its model allows: `__fence_lease__ = "optional"`."""


@dataclass(slots=True)
class RowClaimed(GuardEvent):
    """A row has been claimed, or a gate passed."""


@dataclass(slots=True)
class CommitInDoubt(Event):
    """A transaction was written under a lease, and the outcome of its COMMIT is unknown.

    Attributes:
        resource: of the lease.
        token: with which it was written.
    """

    resource: str
    token: int


Listener = Callable[[Any], object]
_L = TypeVar("_L", bound=Listener)

#: Replaced and never changed, so that telling goes on with what it has begun with.
listeners: tuple[Listener, ...] = ()


def on_event(listener: _L) -> _L:
    """Have a function called with every event; may be used as a decorator.

    It is to be quick, and must not use the session, connection or lock that the event tells of.

    Raises:
        TypeError: it is no function.
    """
    global listeners  # noqa: PLW0603 - the list of this process is what this module is about
    if not callable(listener):
        raise TypeError(f"events are told to a function, and {listener!r} is none")
    listeners = (*listeners, listener)
    return listener


def forget(listener: Listener) -> None:
    """Call a function no more."""
    global listeners  # noqa: PLW0603 - as above
    listeners = tuple(each for each in listeners if each != listener)


#: The threads that call listeners at this moment, with the events that each has to tell after that.
_telling: dict[int, list[Event]] = {}
in_forked_child(_telling.clear)


def tell(event: Event) -> None:
    """Call all listeners."""
    thread = get_ident()
    if thread in _telling:  # a listener, or a signal handler that has interrupted one
        _telling[thread].append(event)
        return
    _telling[thread] = []
    try:
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener for events failed")
    finally:
        for each in _telling.pop(thread):
            tell(each)
