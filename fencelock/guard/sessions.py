"""Which session uses which connection: the statement knows only its connection.

It is noted on the connection itself. Every room that asks for the session asks here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import ReferenceType, ref

from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session

from fencelock.guard._bypass import connections_of
from fencelock.guard._sqlalchemy import is_flushing

if TYPE_CHECKING:
    from sqlalchemy.orm import scoped_session

_SESSIONS: Final = "_fencelock_sessions"
"""Where a connection has the sessions that have joined it, the last one last."""

_MOVED: Final = "fencelock.moved"
"""Where a session has by how much its last statement moves write ids."""


def session_of(target: Session | scoped_session[Any], *, function: str = "") -> Session:
    """Return the session behind the facade for scoped ones.

    Args:
        target: what was given.
        function: that it was given to, where this one has no twin for coroutines.

    Raises:
        TypeError: for anything else, an `AsyncSession` for instance.
    """
    session = target.registry() if hasattr(target, "registry") else target
    if function and not isinstance(session, Session):
        raise _no_target(target, function, "a Session")
    if not isinstance(session, Session):
        raise TypeError(
            f"expected a Session, not {type(session).__name__}; for an AsyncSession there are claim_async, "
            f"claim_all_async and gate_async"
        )
    return session


def session_or_connection(
    target: Session | Connection | scoped_session[Any], *, function: str
) -> Session | Connection:
    """Return what `session_of` does, and a connection as it is.

    Raises:
        TypeError: for anything else.
    """
    found = target.registry() if hasattr(target, "registry") else target
    if not isinstance(found, Session | Connection):
        raise _no_target(target, function, "a Session or a Connection")
    return found


def _no_target(target: object, function: str, wanted: str) -> TypeError:
    """Return the error for what a function cannot write with; coroutines are told what to write."""
    if hasattr(target, "registry"):
        way = "session()"
    elif hasattr(target, "sync_connection") and "Connection" in wanted:
        way = "connection"
    else:
        way = "session"
    is_for_coroutines = type(target).__module__.startswith("sqlalchemy.ext.asyncio")
    return TypeError(
        f"{function} takes {wanted}, not {type(target).__name__}"
        + (f"; in coroutines write `await {way}.run_sync({function}, …)`" if is_for_coroutines else "")
    )


def on_begin(session: Session, _transaction: object, connection: Connection) -> None:
    """Join: a listener for all sessions."""
    join(connection, session)


def join(connection: Connection, session: Session) -> None:
    """Note that a session has begun to use a connection, or flushes on it.

    It is noted on the connection itself, where that costs next to nothing: every session of the process does
    it for every transaction, and few of them ever write to a fenced table.
    """
    known: tuple[ReferenceType[Session], ...] = getattr(connection, _SESSIONS, ())
    if known and known[-1]() is session:
        return
    others = [each for each in known if each() not in (None, session)]
    setattr(connection, _SESSIONS, (*others, ref(session)))


def sessions_on(connection: Connection) -> list[Session]:
    """Return the sessions that have joined a connection and live on, the last one last."""
    known: tuple[ReferenceType[Session], ...] = getattr(connection, _SESSIONS, ())
    return [session for reference in known if (session := reference()) is not None]


def users_of(connection: Connection) -> list[Session]:
    """Return the sessions whose transaction the connection's is, the one that joined last at the end.

    Those that have left it and live on are not among them.
    """
    return [session for session in sessions_on(connection) if connection in connections_of(session)]


def owner_of(connection: Connection) -> Session | None:
    """Return the session whose statements a connection executes: that which flushes, or has begun last."""
    users = users_of(connection)
    if len(users) > 1:
        users = [session for session in users if is_flushing(session)] or users
    return users[-1] if users else None


def note_moved(connection: Connection, by: int) -> None:
    """Note by how much a statement moves write ids, for the objects that SQLAlchemy applies it to."""
    session = owner_of(connection)
    if session is not None:
        session.info[_MOVED] = by


def moved_by(session: Session | None) -> int:
    """Return by how much the statement that is being applied to a session's objects moves their ids."""
    found: int = 0 if session is None else session.info.get(_MOVED, 0)
    return found
