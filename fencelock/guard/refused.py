"""A refused transaction can only be rolled back.

A program that catches a refusal and goes on would commit half of its work. So the `Connection` gets listeners
that raise until the transaction, or the savepoint, is rolled back. Other connections have no such listeners.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

from sqlalchemy import event
from sqlalchemy.engine import Connection, ExceptionContext, Transaction, TwoPhaseTransaction
from sqlalchemy.exc import PendingRollbackError

from fencelock._databases import MYSQL, error_number
from fencelock.errors import FenceError, FencelockError, LockLostError, ReceiptMismatchError
from fencelock.guard.events import report
from fencelock.guard.leases import open_leases
from fencelock.guard.sessions import connections_of, owner_of, session_of

_P = ParamSpec("_P")
_R = TypeVar("_R")

_STOPPED: Final = (
    "commit",
    "prepare_twophase",
    "commit_twophase",
    "savepoint",
    "before_execute",
    "before_cursor_execute",
)
_FREED_BY: Final = ("rollback", "rollback_twophase")
_DEADLOCK: Final = 1213

#: Like the reference to a dead transaction: nothing is refused.
_NOTHING: Final[tuple[Callable[[], None], str]] = (lambda: None), ""
_refused: WeakKeyDictionary[Connection, tuple[Callable[[], Transaction | None], str]] = WeakKeyDictionary()
"""By connection: a weak reference to its refused transaction or savepoint, and the message of later errors.

A strong reference would keep the connection alive, so that it never returns to its pool.
"""


def refuse(connection: Connection, refusal: FencelockError, table: str | None = None) -> None:
    """Report a refusal. From now on, the innermost savepoint or the transaction can only be rolled back.

    If a session uses the connection, this applies to all connections of the session.
    """
    session = owner_of(connection)
    _refuse({connection, *(() if session is None else connections_of(session))}, refusal, table)


def note_undone(context: ExceptionContext) -> None:
    """Refuse a transaction that the database has undone because of an error that the program may catch.

    PostgreSQL answers a later COMMIT with a ROLLBACK and no error. After a deadlock, MariaDB executes later
    statements in a new transaction, which has neither the work nor the locks of the first.
    """
    connection = context.connection
    leases = None if connection is None or context.is_disconnect else open_leases(connection)
    if connection is None or leases is None or not leases.is_needed:
        return
    dialect = connection.dialect.name
    is_deadlock = dialect in MYSQL and error_number(context.original_exception) == _DEADLOCK
    if is_deadlock or dialect == "postgresql":
        _stop_all([connection], "the database has undone it after an error", context.original_exception)


def _refuse(connections: Collection[Connection], refusal: FencelockError, table: str | None = None) -> None:
    report(refusal, table=table, resource=_resource_of(connections, refusal))
    _stop_all(connections, "the guard has refused some of it", refusal)


def _stop_all(connections: Iterable[Connection], why: str, error: BaseException) -> None:
    is_whole = error_number(error) == _DEADLOCK
    for each in connections:
        savepoint = None if is_whole else each.get_nested_transaction()
        scope = savepoint or each.get_transaction()
        if scope is not None and scope.is_active and not is_refused(each):
            what = "transaction" if savepoint is None else "savepoint"
            is_new = each not in _refused
            message = (
                f"nothing of this {what} can be committed, because {why}: call rollback(), then begin again. "
                f"The error was: {str(error).partition(chr(10))[0]}"
            )
            _refused[each] = ref(scope), message
            if savepoint is None:
                _roll_back_driver(each)  # frees the row locks at once
            if is_new:
                for name in _STOPPED:
                    event.listen(each, name, _stop)
                for name in _FREED_BY:
                    event.listen(each, name, _free)
                event.listen(each, "rollback_savepoint", _free_savepoint)
                event.listen(each, "release_savepoint", _stop_release)


def _resource_of(connections: Collection[Connection], refusal: FencelockError) -> str | None:
    token = getattr(refusal, "token", None)
    of_transactions = [leases for each in connections if (leases := open_leases(each)) is not None]
    used = (lease for leases in of_transactions for lease in leases.used.values())
    return next((lease.resource for lease in used if lease.token == token), None)


def refusing(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function: if it raises a refusal, its session's savepoint or transaction is refused."""

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (FenceError, LockLostError, ReceiptMismatchError) as error:
            session: Any = args[0] if args else kwargs["session"]
            _refuse(connections_of(session_of(session, function.__name__)), error)
            raise

    return wrapped


def is_refused(connection: Connection) -> bool:
    refused, _ = _refused.get(connection, _NOTHING)
    scope = refused()
    return scope is not None and scope in (connection.get_nested_transaction(), connection.get_transaction())


def _roll_back_driver(connection: Connection) -> None:
    """Roll the driver's transaction back at once; SQLAlchemy would leave it open until `rollback()`."""
    if not (connection.invalidated or isinstance(connection.get_transaction(), TwoPhaseTransaction)):
        with suppress(Exception):
            connection.dialect.do_rollback(connection.connection)


def _stop(connection: Connection, *_: Any) -> None:
    if is_refused(connection):
        refused, message = _refused[connection]
        if refused() is connection.get_transaction():
            _roll_back_driver(connection)
        raise PendingRollbackError(message)


def _stop_release(connection: Connection, name: str, _context: Any) -> None:
    """Roll back to a refused savepoint; SQLAlchemy counts it as released even if a listener raises."""
    if is_refused(connection):
        refused, message = _refused[connection]
        if refused() is not connection.get_transaction():
            _free(connection)
            connection.dialect.do_rollback_to_savepoint(connection, name)
        raise PendingRollbackError(message)


def _free(connection: Connection, *_: Any) -> None:
    _refused[connection] = _NOTHING


def _free_savepoint(connection: Connection, *_: Any) -> None:
    refused, _message = _refused[connection]
    if refused() is not connection.get_transaction():
        _free(connection)
