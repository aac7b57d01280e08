"""fencelock: quorum locks that mint fencing tokens, and a database that refuses stale writers."""

from fencelock.authority.redlock.redlock import Redlock
from fencelock.decorator import fenced
from fencelock.ending import exit_on_signals
from fencelock.errors import (
    AmbiguousFenceError,
    AuthorityError,
    FenceError,
    FencelockError,
    LockError,
    LockLostError,
    LockTimeoutError,
    MembershipError,
    NodesNotInitialisedError,
    NotHeldError,
    QuorumError,
    StaleTokenError,
    UnfencedWriteError,
)
from fencelock.guard import (
    FencedDataclassModel,
    FencedModel,
    bind,
    claim,
    claim_all,
    conditional_delete,
    conditional_update,
    execute_fenced,
    fenced_delete,
    fenced_update,
    gate,
)
from fencelock.lease import Lease
from fencelock.lock import AsyncLock, FencedLock, fenced_lock
from fencelock.settings import configure

__all__ = [
    "AmbiguousFenceError",
    "AsyncLock",
    "AuthorityError",
    "FenceError",
    "FencedDataclassModel",
    "FencedLock",
    "FencedModel",
    "FencelockError",
    "Lease",
    "LockError",
    "LockLostError",
    "LockTimeoutError",
    "MembershipError",
    "NodesNotInitialisedError",
    "NotHeldError",
    "QuorumError",
    "Redlock",
    "StaleTokenError",
    "UnfencedWriteError",
    "bind",
    "claim",
    "claim_all",
    "conditional_delete",
    "conditional_update",
    "configure",
    "execute_fenced",
    "exit_on_signals",
    "fenced",
    "fenced_delete",
    "fenced_lock",
    "fenced_update",
    "gate",
]
