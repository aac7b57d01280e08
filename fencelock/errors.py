"""Everything that fencelock raises.

```
FencelockError
├── LockError
│   ├── LockTimeoutError (also TimeoutError)   another held it until the timeout; .holder .holder_ttl
│   ├── LockLostError                          the lease ended before the work did
│   └── NotHeldError                           release or extend of a lock that is not held
├── AuthorityError
│   ├── QuorumError                            too few nodes, or no database, answered; .nodes: what each said
│   ├── NodesNotInitialisedError               the nodes hold no marker: run `fencelock init`
│   ├── MembershipError                        nodes disagree on the list of nodes
│   ├── CountersExhaustedError                 the nodes can count no further: begin the next epoch
│   └── LeaseTableMissingError                 the database has no table of leases: migrate
└── FenceError                                 never wrapped in SQLAlchemy's StatementError
    ├── StaleTokenError                        a newer holder has been here; .table .identity .token .current
    │   └── StaleReadError                     the row was written or deleted since it was loaded; .loaded
    ├── CommitInDoubtError                     it is not known what became of the last COMMIT
    └── UnfencedWriteError                     no lease guards this write
```

"Held by another", "too few nodes answered" and "the nodes refuse" are three different errors, because
a caller does three different things about them: wait, call an operator, fix the configuration.

Every error has `written`: False where nothing of the transaction is written once it is rolled back, None
where that cannot be known. docs/errors.md says of each what to do.

Bad arguments (a negative ttl, a malformed URL, an empty resource name) are plain `ValueError` or
`TypeError`. Every error survives `pickle`, so that it can cross a process boundary whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.exc import DontWrapMixin

from fencelock.holder import Holder
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
    "StaleReadError",
    "StaleTokenError",
    "UnfencedWriteError",
]


#: What stale holders are told whose next token may be refused as well, and so on for ever.
_OF_ANOTHER_LIFE = (
    ". Where new tokens are refused, too, what grants them has forgotten how far it had come: "
    "fencelock init --after-loss --database URL"
)
#: More tokens than are granted in a lifetime.
_FAR = 1 << (COUNTER_BITS - 4)


class FencelockError(Exception):
    """Base of everything that fencelock raises on purpose, except for bad arguments.

    Attributes:
        written: whether anything of the transaction is written. False: nothing is, once it is rolled back, so
            begin again where the table in docs/errors.md says so. None: that cannot be known, so look first.
    """

    written: bool | None = False


class LockError(FencelockError):
    """Something about one lock: its holder, or its time."""


class LockTimeoutError(LockError, TimeoutError):
    """Another holder had the resource until the timeout.

    Attributes:
        holder_ttl: seconds until the holder's lease ends unless it is renewed, as the nodes last
            reported it; None where contenders split the votes and none held it.
        holder: the process that held it, and since when (`host`, `pid`, `program`, `since`); None where it
            could not be told, and from `try_acquire`.
    """

    def __init__(
        self, message: str, *, holder_ttl: float | None = None, holder: Holder | None = None
    ) -> None:
        super().__init__(message)
        self.holder_ttl = holder_ttl
        self.holder = holder


class LockLostError(LockError):
    """The lease ended before the work did: another holder may have taken the resource meanwhile.

    A statement that the guard refuses for it sends nothing, and its transaction can only be rolled back.
    Leaving a block raises it only where the guard has seen no COMMIT under the lease, or cannot know the
    outcome of a transaction.

    Attributes:
        written: False where the guard has refused a statement, or has seen every transaction of the lease
            rolled back. None where nothing went through the guard, or a transaction is open or in doubt.
    """

    def __init__(self, message: str, *, written: bool | None = None) -> None:
        super().__init__(message)
        self.written = written


class NotHeldError(LockError):
    """A release or an extension of a lock that is not held."""


class AuthorityError(FencelockError):
    """Whatever grants the leases could not do its work, or must not."""


class QuorumError(AuthorityError):
    """Too few nodes answered to decide anything; or the database did not that grants leases.

    Attributes:
        nodes: what each node, or the database, said, by its address.
    """

    def __init__(self, message: str, *, nodes: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.nodes: Mapping[str, str] = dict(nodes or {})


class NodesNotInitialisedError(AuthorityError):
    """The nodes are blank. Creating their marker on demand would undo the protection, so it is explicit.

    The message holds the command to run.
    """


class MembershipError(AuthorityError):
    """The nodes, or the nodes and this client, disagree on the list of nodes."""


class CountersExhaustedError(AuthorityError):
    """The nodes can count no further in this epoch. The message says how to begin the next."""


class LeaseTableMissingError(AuthorityError):
    """The database that is to grant leases has no table for them. The message says how to make it."""


class FenceError(DontWrapMixin, FencelockError):
    """The storage guard refused a write. The transaction must be rolled back."""


class StaleTokenError(FenceError):
    """The row has been claimed or written under a larger token: this holder's lease is over.

    Raised by writes and claims. Nothing of the transaction (or of the innermost savepoint) can be committed
    then: until it is rolled back, all that is executed or committed in it raises SQLAlchemy's
    `PendingRollbackError`, which names this refusal.

    Attributes:
        table: name of the table.
        identity: primary key of the row, as a tuple; None where the statement named many rows.
        token: the fencing token that was refused; 0 where the trigger of an SQLite table did not say.
        current: the row's fence, or None where it could not be read any more.
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
        """Whether counting on from the token does not reach the fence."""
        if self.current is None or not self.token:
            return False
        ahead = self.current - self.token
        return split(self.current)[0] > split(self.token)[0] or ahead > _FAR


class StaleReadError(StaleTokenError):
    """The row was written since this object was loaded, by whichever holder: what it is made from is old.

    The lease may well be valid. Do the same as for any `StaleTokenError`: begin again, and
    load the row again.

    Attributes:
        table: name of the table.
        identity: primary key of the row, as a tuple; None where the statement named many rows.
        token: the fencing token of the write; 0 where it was under no lease.
        current: the row's fence now; None where the row is gone, or was not looked at.
        loaded: the row's `last_write_id` when the object was loaded; -1 where the object is of two versions;
            None where it is not known.
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
        self.args = (table, identity, token, current, loaded)
        self.loaded = loaded

    def __str__(self) -> str:
        row = self.table if self.identity is None else f"{self.table}{self.identity!r}"
        if self.detail:
            return f"{row}: {self.detail}"
        if self.current is None:
            what = "was deleted since this object was loaded: roll back, and look for it again"
        elif self.loaded is not None and self.loaded < 0:
            what = "is of two versions, merged or loaded in parts: roll back, and load all of it again"
        else:
            what = "was written since it was loaded: roll back, and load it again"
        if not self.token:
            return f"{row} {what}"
        return f"{row} {what} (the token of this write was {self.token}, the row's fence is {self.current})"


class CommitInDoubtError(FenceError):
    """The outcome of a COMMIT is unknown: the transaction may be committed, or still be under way.

    Nothing more is written with its token. In this order: roll back; mint a new token, `lock.remint()`; load
    again what you write. A transaction that is still under way keeps its row locks, so what you write waits
    for its end, and an object that you loaded before is refused. A statement compares no object: claim the
    row, or pass the gate, before it.
    Where the lock is over by then, lock again and look: `fenced_transaction` raises it after its release.
    """

    written = None


class UnfencedWriteError(FenceError):
    """A write to a fenced table without the lease that guards it. Nothing was sent to the database."""
