"""Events, metrics and spans of locks and fences.

Call `on_event` to get events; `fencelock.observe.prometheus` and `fencelock.observe.otel` make metrics and
spans of them. Locks and the guard import none of these modules. Without a listener, events cost very little.
"""

from fencelock._events import (
    CommitInDoubt,
    ConnectionEvent,
    ConnectionFailed,
    ConnectionOpened,
    Event,
    GuardEvent,
    LeaseExtended,
    LeaseLost,
    LockAcquired,
    LockEvent,
    LockNotAcquired,
    LockReleased,
    LockWaiting,
    RowClaimed,
    StaleWriteRefused,
    TokenReminted,
    UnfencedWriteRefused,
    WrittenWithoutLease,
    forget,
    on_event,
)

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
    "forget",
    "on_event",
]
