"""See what locks and fences do: events, metrics and spans.

Call `on_event` for events; `fencelock.observe.prometheus` and `fencelock.observe.otel` listen
for you. Nothing that locks or writes imports these modules, and they cost nothing while nothing listens.
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
