"""How a transaction ends: committed, rolled back, or refused.

A lease is not given back while a transaction needs it, so each transaction that writes says when it has
ended. After a refusal nothing can be done with a transaction or savepoint but a rollback: a program that
catches the error and goes on would commit half of its work. `_refused` holds the reason meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar
from weakref import ref

from sqlalchemy.engine import Connection, NestedTransaction, RootTransaction, Transaction, TwoPhaseTransaction
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from fencelock.errors import FenceError, LockLostError
from fencelock.guard._bypass import connections_of
from fencelock.guard._refused import Refused, forget_refused, mark_refused, refused_in
from fencelock.guard._sqlalchemy import fail_inside, is_flushing, look_active, roll_back_to, taking_part_in
from fencelock.guard.events import report
from fencelock.guard.sessions import session_of, users_of

if TYPE_CHECKING:
    from sqlalchemy.orm import SessionTransaction

_REFUSED: Final = "_fencelock_refused"
"""Where an error notes that it has refused a savepoint: it does not refuse the transaction around it, too."""

WATCHER: Final = "_fencelock_watcher"
"""Where a connection has what watches its transaction, or watched an earlier one."""

_P = ParamSpec("_P")

_R = TypeVar("_R")


class Watcher:
    """Hears how the transaction of a connection ends; it hangs on the connection.

    Attributes:
        committed: whether its COMMIT was answered.
        committing: whether its COMMIT, or the first phase of one, may have been sent.
        transaction: returns SQLAlchemy's object, which may be gone.
        undoing: whether it is being rolled back, so that nothing can come of it.
    """

    __slots__ = ("__weakref__", "committed", "committing", "transaction", "undoing")

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = ref(transaction)
        self.committed = False
        self.committing = False
        self.undoing = False

    def end(self) -> None:
        """Hear that it has ended."""
        raise NotImplementedError

    def take_back(self, savepoint: NestedTransaction) -> None:
        """Hear that it is rolled back to a savepoint."""
        raise NotImplementedError


def watcher_of(transaction: Transaction) -> Watcher | None:
    """Return what watches a transaction."""
    watcher: Watcher | None = getattr(transaction.connection, WATCHER, None)
    return watcher if watcher is not None and watcher.transaction() is transaction else None


class _Refusable(Transaction):
    """A transaction or savepoint of which nothing can come any more once the fence has refused some of it."""

    __slots__ = ()

    def refuse(self, refusal: FenceError | LockLostError) -> Refused:
        """Roll it back in the database, and have everybody who goes on with it hear why."""
        try:
            self._undo()
        finally:
            refused = mark_refused(self, refusal)
        return refused

    def _undo(self) -> None:
        raise NotImplementedError

    def _stays_refused(self) -> bool:
        """Tell whether it is a session that rolls back which only joined it, and does so for the refusal.

        Whoever has begun the transaction has not been told yet.
        """
        refused = refused_in(self)
        return refused is not None and any(
            session is refused.leaving or is_flushing(session)
            for session in users_of(self.connection)
            if _has_joined(session, self)
        )

    def _transaction_is_active(self) -> bool:
        """Have a `with` block of SQLAlchemy's commit also what was refused, so that it raises."""
        return self.is_active or refused_in(self) is not None


def _has_joined(session: Session, transaction: Transaction) -> bool:
    """Tell whether a session takes part in a transaction that somebody else is to commit."""
    own = session.get_transaction()
    return own is not None and any(
        each is transaction and not commits for _, each, commits in taking_part_in(own)
    )


class _Watched(_Refusable):
    """A transaction that lets go of its leases when it has ended, however it did."""

    __slots__ = ()

    def _undo(self) -> None:
        assert isinstance(self, RootTransaction)  # noqa: S101  there are no others
        self._note("undoing")
        try:
            self._connection_rollback_impl()
        finally:
            self.is_active = False
            self._note_end()

    def commit(self) -> None:
        self._note("committing")
        try:
            super().commit()
            self._note("committed")
        except DBAPIError:
            self._roll_back_refused()
            raise
        finally:
            self._note_end()

    def rollback(self) -> None:
        if self._stays_refused():
            return
        forget_refused(self)
        self._note("undoing")
        try:
            super().rollback()
        finally:
            self._note_end()

    def close(self) -> None:
        forget_refused(self)
        self._note("undoing")
        try:
            super().close()
        finally:
            self._note_end()

    def _roll_back_refused(self) -> None:
        """Have the driver end a transaction whose COMMIT was refused: to SQLAlchemy it is over.

        SQLite leaves it open where a deferred foreign key is not met. The next COMMIT of the connection would
        write it after all, though the lease was given back meanwhile.
        """
        connection = self.connection
        if not (isinstance(self, TwoPhaseTransaction) or connection.invalidated or connection.closed):
            with suppress(Exception):
                connection.dialect.do_rollback(connection.connection)

    def _note(self, what: Literal["committing", "committed", "undoing"]) -> None:
        watcher = watcher_of(self)
        if watcher is not None:
            setattr(watcher, what, True)

    def _note_end(self) -> None:
        watcher = None if self.is_active else watcher_of(self)
        if watcher is not None:
            watcher.end()


class _WatchedRoot(_Watched, RootTransaction):
    __slots__ = ()


class _WatchedTwoPhase(_Watched, TwoPhaseTransaction):
    __slots__ = ()

    def prepare(self) -> None:
        if (refused := refused_in(self)) is not None:
            refused()
        self._note("committing")
        super().prepare()


class _WatchedSavepoint(_Refusable, NestedTransaction):
    """A savepoint that tells the transaction when it is rolled back to: an `Engine`'s event would, too.

    But an engine with listeners of its own is slower at everything, whether a listener is called or not.
    """

    __slots__ = ()

    def _undo(self) -> None:
        self._take_back()
        roll_back_to(self)

    def rollback(self) -> None:
        if self._stays_refused():
            return
        forget_refused(self)
        self._take_back()
        super().rollback()

    def close(self) -> None:
        forget_refused(self)
        self._take_back()
        super().close()

    def _take_back(self) -> None:
        transaction = self.connection.get_transaction() if self.is_active else None
        watcher = None if transaction is None else watcher_of(transaction)
        if watcher is not None:
            watcher.take_back(self)


_WATCHED: Final[Mapping[type[Any], type[Transaction]]] = {
    NestedTransaction: _WatchedSavepoint,
    RootTransaction: _WatchedRoot,
    TwoPhaseTransaction: _WatchedTwoPhase,
    **{watched: watched for watched in (_WatchedSavepoint, _WatchedRoot, _WatchedTwoPhase)},
}


def watch_end(transaction: Transaction | None) -> bool:
    """Have a transaction, or a savepoint, say how it has ended; tell whether it will.

    SQLAlchemy has events before a COMMIT and none after it, save those of sessions, which do not see the
    transactions of others that they have joined. One of an unknown class lets go when it is thrown away.
    """
    watched = _WATCHED.get(type(transaction))
    if transaction is None or watched is None:
        return False
    transaction.__class__ = watched
    return True


def is_watched(transaction: Transaction | None) -> bool:
    """Tell whether a transaction says how it ends."""
    return isinstance(transaction, _Watched)


def refuse(connection: Connection, refusal: FenceError | LockLostError) -> None:
    """Have nothing come of what a refused statement belongs to, but a rollback.

    That is the innermost savepoint, or else the whole transaction; and the sessions whose transaction, or
    savepoint, it is, as after a flush that has failed. Again, by the same error, has no effect.
    """
    transaction = connection.get_nested_transaction() or connection.get_transaction()
    if transaction is None or not transaction.is_active or getattr(refusal, _REFUSED, False):
        return
    setattr(refusal, _REFUSED, True)
    sessions = [session for session in users_of(connection) if _boundary(session, transaction)]
    watch_end(connection.get_transaction())
    watch_end(transaction)
    if not isinstance(transaction, _Refusable):  # of a class that nobody knows
        transaction.rollback()
        return
    refused = transaction.refuse(refusal)
    for session in reversed(sessions):  # the one that began it, and will end it, comes last
        boundary = _boundary(session, transaction)
        if boundary is not None:
            _deactivate(session, boundary, refused, refusal)


def refusing(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have nothing come of a session's transaction, but a rollback, once this function has refused something.

    The function's first argument is the session.
    """

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (FenceError, LockLostError) as error:
            report(error)
            for connection in connections_of(session_of(args[0] if args else kwargs["session"])):  # type: ignore[arg-type]
                refuse(connection, error)
            raise

    return wrapped


def _boundary(session: Session, transaction: Transaction) -> SessionTransaction | None:
    """Return the innermost transaction of a session, if it is this one of a connection of it."""
    innermost = session.get_nested_transaction() or session.get_transaction()
    if innermost is None:
        return None
    return innermost if any(each is transaction for _, each, _ in taking_part_in(innermost)) else None


def _deactivate(
    session: Session, boundary: SessionTransaction, refused: Refused, refusal: FenceError | LockLostError
) -> None:
    """Have a session need a rollback, as a flush that fails does by itself."""
    # Else a `with` block of SQLAlchemy's would end without a word about what was not committed.
    look_active(boundary)
    if is_flushing(session):
        return
    refused.leaving = session
    try:
        fail_inside(boundary, refusal)
    finally:
        refused.leaving = None


def on_rollback(_session: Session, ended: SessionTransaction) -> None:
    """Have a session's own rollback end what it has joined, which the failure of its flush did not."""
    for _, transaction, _ in taking_part_in(ended):
        if refused_in(transaction) is not None:
            transaction.rollback()
