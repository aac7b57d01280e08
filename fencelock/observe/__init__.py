"""Events, metrics and spans of locks and fences.

`fencelock.on_event` adds a listener for events. `fencelock.observe.prometheus` and `fencelock.observe.otel`
make metrics and spans of them. Locks and the guard import none of these modules. Without a listener, events
cost very little.
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
]
