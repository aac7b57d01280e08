"""The events of fencelock, and the list of the functions that listen to them.

Users import them from `fencelock.observe`. Without a listener they cost almost nothing: most callers check
`listeners` before they make an event. A listener is called in the thread, task or greenlet of the event. If
listeners or signal handlers cause events meanwhile in this thread, these are told afterwards. If a listener
raises an `Exception`, this is logged, and changes nothing.

The events are not frozen, because a frozen dataclass takes several times as long to make.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Literal, TypeVar

from fencelock._checks import check_callback
from fencelock._process import in_forked_child

__all__ = [
    "CommitInDoubt",
    "ConnectionEvent",
    "ConnectionFailed",
    "ConnectionOpened",
    "Event",
    "GuardEvent",
    "LeaseExtended",
    "LeaseLost",
    "LockAcquired",
    "LockEvent",
    "LockNotAcquired",
    "LockReleased",
    "LockWaiting",
    "RowClaimed",
    "StaleWriteRefused",
    "TokenReminted",
    "UnfencedWriteRefused",
    "WrittenWithoutLease",
]

logger = logging.getLogger("fencelock.observe")

Outcome = Literal["timeout", "error", "cancelled"]
LossReason = Literal["max_hold", "expired", "gone"]
LockEnd = Literal["released", "lost", "max_hold"]


@dataclass(slots=True)
class Event:
    """Base class of the events."""


@dataclass(slots=True)
class LockEvent(Event):
    """Something that happened to a lock.

    Attributes:
        authority: the authority that grants the lock; its `repr` shows no password.
        resources: names of the resources.
        template: the template of `@fenced`, such as `"order:{id}"`; empty for other locks.
    """

    authority: object
    resources: tuple[str, ...]
    template: str


@dataclass(slots=True)
class LockWaiting(LockEvent):
    """The first attempt did not get the lock, so the caller waits: for the holder, or for nodes to answer.

    `LockAcquired` or `LockNotAcquired` follows.
    """


@dataclass(slots=True)
class LockAcquired(LockEvent):
    """A lock is held. One `LockReleased` follows, unless the lock object is thrown away or the process ends.

    Attributes:
        tokens: one for each resource.
        waited: seconds that the acquisition took.
        had_to_wait: whether a `LockWaiting` came before.
    """

    tokens: tuple[int, ...]
    waited: float
    had_to_wait: bool


@dataclass(slots=True)
class LockNotAcquired(LockEvent):
    """A lock was not acquired.

    Attributes:
        waited: seconds that the attempt took.
        had_to_wait: whether a `LockWaiting` came before.
        outcome: "timeout": another holder kept the lock. "cancelled": the task was cancelled, the thread
            interrupted, `FencedLock.cancel` called, or the process ends. "error": all other errors.
        error: the error that the caller gets.
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
        end: "released": it was released, or handed over to another process. "lost": its lease had ended
            before. "max_hold": it had ended because `max_hold` was over.
        error: the AuthorityError with which the release failed; None for any other release.
    """

    tokens: tuple[int, ...]
    held: float
    end: LockEnd
    error: BaseException | None


@dataclass(slots=True)
class LeaseExtended(LockEvent):
    """A lease was due to be extended in the background.

    Attributes:
        outcome: "extended": the lease goes on. "lost": it has ended, perhaps before the attempt. "error":
            nothing was decided, and renewal tries again until the lease ends.
        lateness: seconds between the planned and the real beginning. It rises before leases are lost, if a
            process is too busy to renew them.
        ttl: the ttl of the lock: seconds that a lease lasts after an extension, or less before `max_hold`.
        error: why the lease was not extended; None if it was.
    """

    outcome: Literal["extended", "lost", "error"]
    lateness: float
    ttl: float
    error: BaseException | None


@dataclass(slots=True)
class LeaseLost(LockEvent):
    """A lease was found to have ended before its release.

    Attributes:
        tokens: one for each resource.
        reason: "max_hold": `max_hold` was over. "expired": its time ran out. "gone": the authority no longer
            knows the lease, or `remint` got no new token.
        detail: the reason as a sentence.
    """

    tokens: tuple[int, ...]
    reason: LossReason
    detail: str


@dataclass(slots=True)
class TokenReminted(LockEvent):
    """A held lock has got new, larger tokens: `tokens` has one for each resource."""

    tokens: tuple[int, ...]


@dataclass(slots=True)
class ConnectionEvent(Event):
    """Something that happened to a connection of an authority.

    Attributes:
        authority: `"Redlock"`, `"Database"`, `"Etcd"` or `"ZooKeeper"`.
        endpoint: the address of the server, or the database without its password.
    """

    authority: str
    endpoint: str


@dataclass(slots=True)
class ConnectionOpened(ConnectionEvent):
    """A connection has been opened."""


@dataclass(slots=True)
class ConnectionFailed(ConnectionEvent):
    """A server could not be connected to, or did not answer.

    Attributes:
        reason: why.
    """

    reason: str


@dataclass(slots=True)
class GuardEvent(Event):
    """Something that the guard did.

    Attributes:
        table: name of the table; None if it is unknown.
        identity: primary key of the row, as a tuple; None if it is unknown, or there is no single row.
        resource: the resource that guards the row; None if it is unknown.
        token: the fencing token that was written or refused; None if there is none.
        fence: the row's fence, if a refusal names it.
        error: the error that the caller gets; None if nothing was refused.
    """

    table: str | None
    identity: tuple[Any, ...] | None = None
    resource: str | None = None
    token: int | None = None
    fence: int | None = None
    error: Exception | None = None


@dataclass(slots=True)
class StaleWriteRefused(GuardEvent):
    """A stale token or a stale object was refused."""


@dataclass(slots=True)
class UnfencedWriteRefused(GuardEvent):
    """A write was refused because it lacks its lease, or cannot be guarded."""


@dataclass(slots=True)
class WrittenWithoutLease(GuardEvent):
    """Rows are written under no lease, as their model allows: `__fence_lease__ = "optional"`."""


@dataclass(slots=True)
class RowClaimed(GuardEvent):
    """A row has been claimed, or a gate passed."""


@dataclass(slots=True)
class CommitInDoubt(Event):
    """A transaction was written under a lease, and the outcome of its COMMIT is unknown.

    Attributes:
        resource: the resource of the lease.
        token: the fencing token of the transaction.
    """

    resource: str
    token: int


Listener = Callable[[Any], object]
_L = TypeVar("_L", bound=Listener)

#: The tuple is replaced, never changed, so that `tell` goes on with the listeners that it began with.
listeners: tuple[Listener, ...] = ()


def on_event(listener: _L) -> _L:
    """Call a function with every event from now on; may be used as a decorator.

    ```python
    @on_event
    def show(event: Event) -> None:
        if isinstance(event, LeaseLost):
            print(event)

    forget(show)                                 # ends it
    ```

    The function should be quick. It must not use the session, connection or lock of the event.

    Returns:
        The function itself.

    Raises:
        TypeError: `listener` is not callable.
    """
    global listeners  # noqa: PLW0603 - the list of this process is what this module is about
    check_callback("on_event", "event", listener)
    listeners = (*listeners, listener)
    return listener


def forget(listener: Listener) -> None:
    """Stop calling a function that `on_event` took."""
    global listeners  # noqa: PLW0603 - as above
    listeners = tuple(each for each in listeners if each != listener)


#: The threads that call listeners at this moment, each with the events to tell afterwards.
_telling: dict[int, list[Event]] = {}
in_forked_child(_telling.clear)


def tell(event: Event) -> None:
    thread = get_ident()
    if thread in _telling:  # a listener calls this, or a signal handler that interrupted one
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
