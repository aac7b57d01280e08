"""The errors that fencelock raises.

```
FencelockError
├── LockError
│   ├── LockTimeoutError (also TimeoutError)   not acquired in time, or cancelled; .holder .holder_ttl
│   ├── LockLostError                          the lease ended before the work did
│   └── NotHeldError                           a call needs a lock that is not held
├── AuthorityError
│   ├── QuorumError                            too few nodes, or no servers, answered; .nodes: their answers
│   ├── NodesNotInitialisedError               the nodes hold no marker: run `fencelock init`
│   ├── MembershipError                        nodes disagree on the list of nodes
│   ├── CountersExhaustedError                 no larger token is left; nodes: begin the next epoch
│   └── LeaseTableMissingError                 the database has no table of leases: run a migration
├── ReceiptMismatchError                       a key of `once` belongs to another request; .key
└── FenceError                                 never wrapped in SQLAlchemy's StatementError
    ├── StaleTokenError                        the row's fence is larger; .table .identity .token .current
    │   └── StaleReadError                     the row was written or deleted since it was loaded; .loaded
    ├── CommitInDoubtError                     the outcome of a COMMIT is unknown
    └── UnfencedWriteError                     no lease guards this write, or it cannot be guarded
```

"Held by another", "too few nodes answered" and "the nodes refuse" are different errors, because a caller
reacts differently: wait, call an operator, fix the configuration.

Every error has `written`. False: after a rollback, nothing of the transaction is written. None: this is
unknown. What to do after each error: https://fencelock.github.io/fencelock/errors/

Bad arguments (a negative ttl, a malformed URL, an empty resource name) raise plain `ValueError` or
`TypeError`. Every error can be pickled with its attributes, so that it can be sent to another process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy.exc import DontWrapMixin

from fencelock.holder import Holder, LockInfo
from fencelock.tokens import COUNTER_BITS, split

__all__ = [
    "AuthorityError",
    "CommitInDoubtError",
    "CountersExhaustedError",
    "FenceError",
    "FencelockError",
    "LeaseTableMissingError",
    "LockError",
    "LockLostError",
    "LockTimeoutError",
    "MembershipError",
    "NodesNotInitialisedError",
    "NotHeldError",
    "QuorumError",
    "ReceiptMismatchError",
    "StaleReadError",
    "StaleTokenError",
    "UnfencedWriteError",
]

#: Advice for a stale holder whose next tokens may be refused as well.
_OF_ANOTHER_LIFE = (
    ". If new tokens are refused, too, the authority does not grant tokens above this fence: fencelock "
    "init --after-loss --database URL"
)
_FAR = 1 << (COUNTER_BITS - 4)  # a distance between two tokens that one authority never reaches in practice


PAGES: Final = "https://fencelock.github.io/fencelock"  # the address of the pages


class FencelockError(Exception):
    """Base class of all errors of fencelock, except those for bad arguments.

    Attributes:
        written: False: after a rollback, nothing of the transaction is written, so begin again if
            the module's page says so. None: unknown, so read the rows first.
    """

    written: bool | None = False


class LockError(FencelockError):
    """Base class of the errors about one lock: another holder has it, it is lost, or it is not held."""


class LockTimeoutError(LockError, TimeoutError):
    """A lock, or the receipt of `once`, was not free in time, or the acquisition was cancelled.

    Attributes:
        holder_ttl: seconds until the holder's lease ends if it is not renewed; None if this is unknown.
        holder: the process that held the resource (`host`, `pid`, `program`, `since`); None if it is unknown.
    """

    def __init__(
        self, message: str, *, holder_ttl: float | None = None, holder: Holder | None = None
    ) -> None:
        super().__init__(message)
        self.holder_ttl = holder_ttl
        self.holder = holder
        #: The held locks, if the authority has looked already; `lock.waiting` names a holder among them.
        self._seen: Sequence[LockInfo] | None = None


class LockLostError(LockError):
    """The lease ended before the work did: another holder may have taken the resource meanwhile.

    If a statement raises it, the statement was not sent, and the transaction can only be rolled back. The end
    of a block raises it only if the guard has seen no COMMIT under the lease, or cannot know the outcome of a
    transaction.

    Attributes:
        written: False if a call was refused before it wrote, or the guard saw every transaction of the lease
            rolled back. None if this is unknown.
    """

    def __init__(self, message: str, *, written: bool | None = None) -> None:
        super().__init__(message)
        self.written = written


class NotHeldError(LockError):
    """A call such as `release`, `extend` or `assert_held` needs a lock that is not held."""


class AuthorityError(FencelockError):
    """The authority (nodes, database, etcd or ZooKeeper) failed or refused, or none is configured."""


class QuorumError(AuthorityError):
    """Too few nodes answered to decide, or the authority did not answer.

    Attributes:
        nodes: what each server said, by its address; may be empty.
    """

    def __init__(self, message: str, *, nodes: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.nodes: Mapping[str, str] = dict(nodes or {})


class NodesNotInitialisedError(AuthorityError):
    """The nodes are blank and must be initialised; the message has the command.

    Initialising is an explicit step, because a node that has lost its data looks like a new node.
    """


class MembershipError(AuthorityError):
    """The nodes, or the nodes and this client, disagree on the list of nodes, or it cannot be changed now."""


class CountersExhaustedError(AuthorityError):
    """No larger token is left. For nodes, the message says how to begin the next epoch."""


class LeaseTableMissingError(AuthorityError):
    """The database has no table of leases. The message says how to create it."""


class ReceiptMismatchError(FencelockError):
    """The key of a receipt belongs to another request, because the fingerprints differ.

    The transaction can only be rolled back.

    Attributes:
        key: the key, as given to `once`.
    """

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return (
            f"the receipt {self.key!r} belongs to another request, whose fingerprint differs. Nothing was "
            "done: send a new request with a new key, and a repeated one exactly as it was"
        )


class FenceError(DontWrapMixin, FencelockError):
    """The guard refused a write, a transaction or a model, or a COMMIT has an unknown outcome."""


class StaleTokenError(FenceError):
    """The row has been claimed or written under a larger token, mostly by a newer holder.

    If the guard raises it, nothing of the transaction (or of the innermost savepoint) can be committed. Until
    the rollback, every statement and every COMMIT raises SQLAlchemy's `PendingRollbackError`, which names
    this refusal.

    Attributes:
        table: name of the table.
        identity: primary key of the row, as a tuple; None if it is not known, or there is more than one row.
        token: the fencing token that was refused; 0 if an SQLite trigger, which names no token, refused it.
        current: the row's fence; None if it was not read.
    """

    def __init__(
        self,
        table: str,
        identity: tuple[Any, ...] | None,
        token: int,
        current: int | None,
        *,
        detail: str = "",
    ) -> None:
        super().__init__(table, identity, token, current)
        self.table = table
        self.identity = identity
        self.token = token
        self.current = current
        self.detail = detail

    def __str__(self) -> str:
        row = self.table if self.identity is None else f"{self.table}{self.identity!r}"
        fence = "a larger one" if self.current is None else str(self.current)
        return (
            f"token {self.token} is stale: {row} has been fenced with {fence}; "
            "a newer holder has taken over, so roll back and acquire the lock again"
            + (_OF_ANOTHER_LIFE if self._is_of_another_life else "")
            + (f" ({self.detail})" if self.detail else "")
        )

    @property
    def _is_of_another_life(self) -> bool:
        """Whether the fence has a later epoch than the token, or is too far above it for one authority."""
        if self.current is None or not self.token:
            return False
        ahead = self.current - self.token
        return split(self.current)[0] > split(self.token)[0] or ahead > _FAR


class StaleReadError(StaleTokenError):
    """What was loaded is out of date: the row was written or deleted since, or the snapshot is too old.

    The lease may still be valid. As after any `StaleTokenError`, begin again and load the row again.

    Attributes:
        table: name of the table.
        identity: primary key of the row, as a tuple; None if it is not known, or there is more than one row.
        token: the fencing token of the write; 0 if the write was under no lease.
        current: the row's fence now; None if the row is gone, or was not read.
        loaded: the row's `last_write_id` when the object was loaded; -1 if the object mixes two versions;
            None if it is unknown.
    """

    def __init__(
        self,
        table: str,
        identity: tuple[Any, ...] | None,
        token: int,
        current: int | None,
        loaded: int | None,
        *,
        detail: str = "",
    ) -> None:
        super().__init__(table, identity, token, current, detail=detail)
        self.args: tuple[Any, ...] = (table, identity, token, current, loaded)
        self.loaded = loaded

    def __str__(self) -> str:
        row = self.table if self.identity is None else f"{self.table}{self.identity!r}"
        if self.detail:
            return f"{row}: {self.detail}"
        if self.current is None:
            what = "was deleted since this object was loaded: roll back, and look for it again"
        elif self.loaded is not None and self.loaded < 0:
            what = (
                "has parts of two versions: it was loaded in parts, merged, or filled from a form that "
                "shows an older row; roll back, and load all of it again"
            )
        else:
            what = "was written since it was loaded: roll back, and load it again"
        if not self.token:
            return f"{row} {what}"
        return f"{row} {what} (the token of this write was {self.token}, the row's fence is {self.current})"


class CommitInDoubtError(FenceError):
    """The outcome of a COMMIT is unknown: the transaction may be committed, or still be under way.

    Nothing more is written under a lease with this token. In this order: roll back; mint a new token with
    `lock.remint()`; load the objects again. If the transaction is still under way, its row locks block your
    write until it ends. Then objects that you loaded before its end are refused. A statement without objects
    has nothing to compare, so claim the row, or pass the gate, before you send it.
    If the lock was released, as after `fenced_transaction`, acquire it again, and read the row.
    """

    written: bool | None = None


class UnfencedWriteError(FenceError):
    """A write to a fenced table lacks the lease of a row, or cannot be guarded. That row was not written."""
