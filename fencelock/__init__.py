"""fencelock: locks that mint fencing tokens, and a guard that makes the database refuse stale writers."""

import typing as _typing

from fencelock import errors, guard
from fencelock._events import forget, on_event
from fencelock._fenced import fenced
from fencelock._fenced_once import fenced_once
from fencelock._leader import Leader, Term, leader
from fencelock._locking import configure, fenced_lock, fenced_semaphore, take_over
from fencelock._locking import load as _load
from fencelock._outcomes import http_status, is_retryable
from fencelock.authority.database.database import Database
from fencelock.authority.database.table import lease_table
from fencelock.errors import *  # noqa: F403 - the errors
from fencelock.guard import *  # noqa: F403 - the functions and models of the guard
from fencelock.lease import Lease, assert_held
from fencelock.lock.at_exit import exit_on_signals
from fencelock.lock.lock import AsyncLock, FencedLock
from fencelock.lock.slots import FencedSemaphore
from fencelock.transaction import AsyncFencedTransaction, FencedTransaction, fenced_transaction

if _typing.TYPE_CHECKING:
    from fencelock.authority.etcd.etcd import Etcd as Etcd
    from fencelock.authority.redlock.redlock import Redlock as Redlock
    from fencelock.authority.zookeeper.zookeeper import ZooKeeper as ZooKeeper

__all__ = [
    "AsyncFencedTransaction",
    "AsyncLock",
    "Database",
    "FencedLock",
    "FencedSemaphore",
    "FencedTransaction",
    "Leader",
    "Lease",
    "Redlock",
    "Term",
    "assert_held",
    "configure",
    "exit_on_signals",
    "fenced",
    "fenced_lock",
    "fenced_once",
    "fenced_semaphore",
    "fenced_transaction",
    "forget",
    "http_status",
    "is_retryable",
    "leader",
    "lease_table",
    "on_event",
    "take_over",
]
__all__ += errors.__all__
__all__ += guard.__all__


def __getattr__(name: str) -> _typing.Any:
    """Return an authority, and load the client of its servers only now.

    `__all__` lacks `Etcd` and `ZooKeeper`, so that `import *` works without their extras.
    """
    if name in {"Redlock", "Etcd", "ZooKeeper"}:
        return _load(name)
    raise AttributeError(f"module 'fencelock' has no attribute {name!r}")
