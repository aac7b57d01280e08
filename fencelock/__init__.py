"""fencelock: locks that mint fencing tokens, and a guard that makes the database refuse stale writers."""

import typing as _typing

from fencelock._events import forget, on_event
from fencelock._fenced import fenced
from fencelock._fenced_once import fenced_once
from fencelock._leader import Leader, Term, leader
from fencelock._locking import configure, fenced_lock, fenced_semaphore, take_over
from fencelock._locking import load as _load
from fencelock._outcomes import http_status, is_retryable
from fencelock.authority.database.database import Database
from fencelock.authority.database.table import lease_table
from fencelock.errors import (
    AuthorityError,
    CommitInDoubtError,
    CountersExhaustedError,
    FenceError,
    FencelockError,
    LeaseTableMissingError,
    LockError,
    LockLostError,
    LockTimeoutError,
    MembershipError,
    NodesNotInitialisedError,
    NotHeldError,
    QuorumError,
    ReceiptMismatchError,
    StaleReadError,
    StaleTokenError,
    UnfencedWriteError,
)
from fencelock.guard import (
    FencedDataclassModel,
    FencedModel,
    Receipt,
    bind,
    bypass,
    claim,
    claim_all,
    conditional_delete,
    conditional_update,
    fence_table,
    fenced_text,
    gate,
    once,
    prune_receipts,
    receipt_table,
    upsert,
)
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
    "AuthorityError",
    "CommitInDoubtError",
    "CountersExhaustedError",
    "Database",
    "FenceError",
    "FencedDataclassModel",
    "FencedLock",
    "FencedModel",
    "FencedSemaphore",
    "FencedTransaction",
    "FencelockError",
    "Leader",
    "Lease",
    "LeaseTableMissingError",
    "LockError",
    "LockLostError",
    "LockTimeoutError",
    "MembershipError",
    "NodesNotInitialisedError",
    "NotHeldError",
    "QuorumError",
    "Receipt",
    "ReceiptMismatchError",
    "Redlock",
    "StaleReadError",
    "StaleTokenError",
    "Term",
    "UnfencedWriteError",
    "assert_held",
    "bind",
    "bypass",
    "claim",
    "claim_all",
    "conditional_delete",
    "conditional_update",
    "configure",
    "exit_on_signals",
    "fence_table",
    "fenced",
    "fenced_lock",
    "fenced_once",
    "fenced_semaphore",
    "fenced_text",
    "fenced_transaction",
    "forget",
    "gate",
    "http_status",
    "is_retryable",
    "leader",
    "lease_table",
    "on_event",
    "once",
    "prune_receipts",
    "receipt_table",
    "take_over",
    "upsert",
]


def __getattr__(name: str) -> _typing.Any:
    """Return an authority, and load the client of its servers only now.

    `__all__` lacks `Etcd` and `ZooKeeper`, so that `import *` works without their extras.
    """
    if name in {"Redlock", "Etcd", "ZooKeeper"}:
        return _load(name)
    raise AttributeError(f"module 'fencelock' has no attribute {name!r}")
