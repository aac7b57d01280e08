"""A transaction, or a savepoint, in which the fence has refused something: it can only be rolled back.

Whoever catches a refusal and goes on would else commit half of his work: what came before was rolled back
with the refused statement, and SQLAlchemy would begin another transaction for the rest. So SQLAlchemy's
object stays where it is, without being active any more, as after a COMMIT that has failed: whatever is
executed or committed then raises, until somebody has rolled back.
"""

from __future__ import annotations

from typing import NoReturn

from sqlalchemy.engine import Transaction
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.orm import Session

from fencelock.errors import FenceError, LockLostError

_ASKED_BY_SQLALCHEMY = "_invalid_transaction"
"""What a connection calls to say that its transaction is not active."""


class Refused:
    """Says of a connection's transaction, or savepoint, why it is not active.

    Attributes:
        transaction: the one.
        leaving: the session that is being told, and rolls back for this.
    """

    __slots__ = ("_message", "leaving", "transaction")

    def __init__(self, transaction: Transaction, refusal: FenceError | LockLostError) -> None:
        what = "savepoint" if transaction.connection.in_nested_transaction() else "transaction"
        self._message = (
            f"nothing of this {what} can be committed, because the guard has refused some of it: call "
            f"rollback(), then begin again. The refusal was: {refusal}"
        )
        self.transaction = transaction
        self.leaving: Session | None = None

    def __call__(self) -> NoReturn:
        """Refuse to go on.

        Raises:
            PendingRollbackError: in any case.
        """
        raise PendingRollbackError(self._message)


def mark_refused(transaction: Transaction, refusal: FenceError | LockLostError) -> Refused:
    """Have a transaction be inactive, and its connection say why."""
    refused = Refused(transaction, refusal)
    transaction.is_active = False  # type: ignore[misc]  # each kind of them has it
    setattr(transaction.connection, _ASKED_BY_SQLALCHEMY, refused)
    return refused


def refused_in(transaction: Transaction) -> Refused | None:
    """Return what was noted of a transaction or savepoint; None where nothing was refused in it."""
    found = vars(transaction.connection).get(_ASKED_BY_SQLALCHEMY)
    return found if isinstance(found, Refused) and found.transaction is transaction else None


def forget_refused(transaction: Transaction) -> None:
    """Note that a transaction is over, and its savepoints with it, or that a savepoint is."""
    found = vars(transaction.connection).get(_ASKED_BY_SQLALCHEMY)
    nested = transaction.connection.get_nested_transaction()
    if isinstance(found, Refused) and (found.transaction is transaction or nested is not transaction):
        delattr(transaction.connection, _ASKED_BY_SQLALCHEMY)
