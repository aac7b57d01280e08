"""A refused transaction can only be rolled back.

A program that catches a refusal and goes on would commit half of its work. So the `Connection` gets listeners
that raise until the transaction, or the savepoint, is rolled back. Other connections have no such listeners.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

from sqlalchemy import event
from sqlalchemy.engine import Connection, Transaction, TwoPhaseTransaction
from sqlalchemy.exc import PendingRollbackError

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
_FREED_BY: Final = ("rollback", "rollback_savepoint", "rollback_twophase")

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


def _refuse(connections: Collection[Connection], refusal: FencelockError, table: str | None = None) -> None:
    report(refusal, table=table, resource=_resource_of(connections, refusal))
    for each in connections:
        savepoint = each.get_nested_transaction()
        scope = savepoint or each.get_transaction()
        if scope is not None and scope.is_active and not is_refused(each):
            what = "transaction" if savepoint is None else "savepoint"
            is_new = each not in _refused
            message = (
                f"nothing of this {what} can be committed, because the guard has refused some of it: call "
                f"rollback(), then begin again. The refusal was: {refusal}"
            )
            _refused[each] = ref(scope), message
            if savepoint is None:
                _roll_back_driver(each)  # frees the row locks at once
            if is_new:
                for name in _STOPPED:
                    event.listen(each, name, _stop)
                for name in _FREED_BY:
                    event.listen(each, name, _free)
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
        _, message = _refused[connection]
        _free(connection)
        connection.dialect.do_rollback_to_savepoint(connection, name)
        raise PendingRollbackError(message)


def _free(connection: Connection, *_: Any) -> None:
    _refused[connection] = _NOTHING
