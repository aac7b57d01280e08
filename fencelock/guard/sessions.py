"""Which sessions use each connection (a statement knows only its connection), and which bypass the guard."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final
from weakref import ReferenceType, WeakSet, ref

from sqlalchemy import inspect
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session, SessionTransaction

from fencelock._engines import is_async_scoped, is_async_session
from fencelock._owners import current_owner
from fencelock.errors import UnfencedWriteError
from fencelock.guard._sqlalchemy import executes_flush
from fencelock.lease import latest_session

if TYPE_CHECKING:
    from typing import TypeAlias

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import scoped_session

    Blocking: TypeAlias = Session | scoped_session[Any]
    Async: TypeAlias = AsyncSession | async_scoped_session[Any]
    AnySession: TypeAlias = Blocking | Connection | Async | AsyncConnection

_SESSIONS: Final = "_fencelock_sessions"
"""The attribute of a connection with the sessions that have used it; the latest is last."""
_BEGAN: Final = "_fencelock_began"
"""The attribute of a connection with the time when a session last began on it."""
CONNECTIONS: Final = "fencelock.connections"
"""The key in `session.info` of the connections on which the session has begun."""
_CLAIMED: Final = "fencelock.claimed"
"""The key in `session.info` of the objects that were claimed in a savepoint."""
SHIFTED: Final = "fencelock.moved"
"""The key in `session.info` of the number by which the session's last statement shifts write ids."""


def blocking(target: object) -> Session | Connection:
    """Return the session or connection behind an asyncio or scoped facade."""
    registry = getattr(target, "registry", None)
    target = registry() if callable(registry) else target
    for attribute in ("sync_session", "sync_connection"):
        target = getattr(target, attribute, target)
    if not isinstance(target, Session | Connection):
        raise TypeError(f"expected a session or a connection, not {type(target).__name__}")
    return target


def session_of(target: Any, function: str) -> Session:
    """Return the session behind a scoped facade."""
    found: Any = target.registry() if hasattr(target, "registry") else target
    if isinstance(found, Session):
        return found
    raise TypeError(f"{function} takes a Session or an AsyncSession, not {type(target).__name__}")


def in_both_worlds(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of a `Session` take an `AsyncSession`, too, and return a coroutine then."""

    @wraps(function)
    def either(session: Any, *args: Any, **options: Any) -> Any:
        if is_async_scoped(session):
            session = session.registry()
        if is_async_session(session):
            return session.run_sync(function, *args, **options)
        return function(session, *args, **options)

    return either


def on_begin(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    join(connection, session)
    if not transaction.nested:
        setattr(connection, _BEGAN, time.monotonic())
    latest_session.set(ref(session))
    session.info.setdefault(CONNECTIONS, WeakSet()).add(connection)


def began(connection: Connection) -> float:
    """Return when a session last began on a connection, by `time.monotonic`; infinity if none has begun."""
    known: float = getattr(connection, _BEGAN, math.inf)
    return known


def join(connection: Connection, session: Session) -> None:
    """Note that a session executes the next statements on a connection."""
    known: tuple[ReferenceType[Session], ...] = getattr(connection, _SESSIONS, ())
    if not known or known[-1]() is not session:
        others = (each for each in known if each() not in (None, session))
        setattr(connection, _SESSIONS, (*others, ref(session)))


def owner_of(connection: Connection) -> Session | None:
    """Return the session with a transaction on a connection: the flushing one, else the latest; or None."""
    known: tuple[ReferenceType[Session], ...] = getattr(connection, _SESSIONS, ())
    users = [
        each
        for reference in known
        if (each := reference()) is not None
        and each.in_transaction()
        and connection in each.info.get(CONNECTIONS, ())
    ]
    if len(users) > 1:
        users = [each for each in users if executes_flush(each)] or users
    return users[-1] if users else None


def connections_of(session: Session) -> list[Connection]:
    begun = session.info.get(CONNECTIONS, ()) if session.in_transaction() else ()
    return [each for each in begun if each.in_transaction()]


def note_claimed(session: Session, claimed: Iterable[object]) -> None:
    """Note the objects that a savepoint has claimed, because its rollback does not reset their write ids."""
    if session.in_nested_transaction():
        session.info.setdefault(_CLAIMED, WeakSet()).update(map(inspect, claimed))


def on_soft_rollback(session: Session, transaction: SessionTransaction) -> None:
    if transaction.nested:
        for state in session.info.pop(_CLAIMED, ()):
            if (known := state.obj()) in session:
                session.expire(known)


def note_shift(connection: Connection, by: int) -> None:
    """Note the number by which a statement shifts write ids; `objects` adds it to those of loaded objects."""
    session = owner_of(connection)
    if session is not None:
        session.info[SHIFTED] = by


BYPASS: Final = "bypass"
"""The value of the execution option `fencelock` with which a statement bypasses the guard."""

_blocks: Final[list[tuple[object, Session | Connection | None]]] = []
"""The open blocks of `unguarded`: owner, and session or connection; None for all of the owner's."""


@contextmanager
def bypass(target: AnySession) -> Iterator[None]:
    """Let a session or connection bypass the guard in this block.

    ```python
    with Session(engine) as session, bypass(session):
        session.add(Order(id=6, status="new"))   # a seed, while no holder is at work
        session.commit()
    ```

    It is for seeds, repairs and tests. Use it only while no holder works, because no fence is compared.
    Flushed objects still get new write ids. Other threads and tasks stay guarded, even on the same
    connection. Blocks may be nested. Coroutines use `with`, too, not `async with`. Flush in the block,
    because changes that are flushed after it are guarded.

    Raises:
        TypeError: if `target` is no session or connection.
    """
    with unguarded(blocking(target)):
        yield


@contextmanager
def unguarded(target: Session | Connection | None = None) -> Iterator[None]:
    """Let this thread or task bypass the guard in a block, on one session or connection or on all."""
    block = current_owner(), target
    _blocks.append(block)
    try:
        yield
    finally:
        _blocks.remove(block)


def is_bypassed(options: Mapping[str, Any], connection: Connection) -> bool:
    """Tell whether a statement with these execution options bypasses the guard on a connection."""
    choice = options.get("fencelock")
    if choice not in (None, BYPASS):
        raise ValueError(f"the execution option fencelock is {BYPASS!r} or left out, not {choice!r}")
    if choice is not None or not _blocks:
        return choice is not None
    here = current_owner()
    return any(
        owner == here and target in (None, connection, owner_of(connection))
        for owner, target in tuple(_blocks)
    )


def refuse_bypass(options: Mapping[str, Any], connection: Connection) -> None:
    if is_bypassed(options, connection):
        raise UnfencedWriteError(
            f"nothing can be claimed or written with a token under execution_options(fencelock={BYPASS!r}), "
            "because no fence is raised or compared there; use an engine, a connection and a statement "
            "without it"
        )
