"""Which sessions use each connection (a statement knows only its connection), and which bypass the guard."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar, overload
from weakref import ReferenceType, WeakSet, ref

from sqlalchemy.engine import Connection
from sqlalchemy.orm import InstanceState, Session, SessionTransaction

from fencelock._engines import is_async_scoped, is_async_session
from fencelock._owners import current_owner
from fencelock.errors import UnfencedWriteError
from fencelock.guard._sqlalchemy import executes_flush
from fencelock.guard.tables import new_write_id
from fencelock.lease import latest_session

if TYPE_CHECKING:
    from typing import TypeAlias

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import scoped_session

    Blocking: TypeAlias = Session | scoped_session[Any]
    Async: TypeAlias = AsyncSession | async_scoped_session[Any]
    AnySession: TypeAlias = Blocking | Connection | Async | AsyncConnection

_S_contra = TypeVar("_S_contra", contravariant=True)
_P = ParamSpec("_P")
_R_co = TypeVar("_R_co", covariant=True)

_SESSIONS: Final = "_fencelock_sessions"
"""The attribute of a connection with the sessions that have used it; the latest is last."""
STARTED: Final = "_fencelock_started"
"""The attribute of a connection with a transaction, and the time of its first statement."""
NOTES: Final = "_fencelock_notes"
"""The attribute of a session with its `Notes`."""


class Shift(NamedTuple):
    """The number by which a statement shifts write ids, and facts about that statement."""

    by: int
    criterion: object  # the last one of its WHERE clause
    connection: ReferenceType[Connection]
    names_keys: bool  # its WHERE clause compares the primary key, and nothing else


class Notes:
    """What the guard knows of a session beyond one transaction of a connection."""

    __slots__ = ("connections", "flush", "loaded", "shift", "writes")

    def __init__(self) -> None:
        self.connections: WeakSet[Connection] = WeakSet()  # those on which the session has begun
        self.flush: dict[Any, Any] = {}  # the `objects.FlushTokens` of each table and connection
        self.shift: Shift | None = None  # of the last statement
        self.writes = False  # whether the guard has written something inside a savepoint
        self.loaded: WeakSet[InstanceState[Any]] = WeakSet()  # objects that were loaded there afterwards


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


class InBothWorlds(Protocol[_S_contra, _P, _R_co]):
    """A function of a `Session` that also takes an `AsyncSession`, and returns a coroutine then."""

    @overload
    def __call__(self, session: _S_contra, *args: _P.args, **options: _P.kwargs) -> _R_co: ...
    @overload
    def __call__(
        self, session: Async, *args: _P.args, **options: _P.kwargs
    ) -> Coroutine[Any, Any, _R_co]: ...


def in_both_worlds(
    function: Callable[Concatenate[_S_contra, _P], _R_co],
) -> InBothWorlds[_S_contra, _P, _R_co]:
    return either(function)


def either(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function an `InBothWorlds`; for one whose result depends on its other arguments."""

    @wraps(function)
    def called(session: Any, *args: Any, **options: Any) -> Any:
        if is_async_scoped(session):
            session = session.registry()
        if is_async_session(session):
            return session.run_sync(function, *args, **options)
        return function(session, *args, **options)

    return called


def on_begin(session: Session, transaction: SessionTransaction, connection: object) -> None:
    if not isinstance(connection, Connection):
        return  # a program's mock
    join(connection, session)
    if not transaction.nested:
        notes = notes_of(session)
        notes.writes, notes.shift = False, None
        notes.loaded.clear()
    latest_session.set(ref(session))
    notes_of(session).connections.add(connection)


def notes_of(session: Session) -> Notes:
    found: Notes | None = getattr(session, NOTES, None)
    if found is None:
        found = Notes()
        setattr(session, NOTES, found)
    return found


NEVER: Final[tuple[Callable[[], object], float]] = (lambda: NEVER), math.inf  # no transaction, and its start


def note_start(connection: Connection) -> None:
    """Note the time of a transaction's first statement, before which no snapshot of it can be."""
    transaction = connection.get_transaction()
    if transaction is not None:
        setattr(connection, STARTED, (ref(transaction), time.monotonic()))


def started(connection: Connection) -> float:
    """Return when a connection's transaction sent its first statement; infinity if it has sent none."""
    transaction, when = getattr(connection, STARTED, NEVER)
    return when if transaction() is connection.get_transaction() else math.inf


def join(connection: Connection, session: Session) -> None:
    """Note that a session executes the next statements on a connection."""
    known: tuple[ReferenceType[Session], ...] = getattr(connection, _SESSIONS, ())
    if not known or known[-1]() is not session:
        others = (each for each in known if each() not in (None, session))
        setattr(connection, _SESSIONS, (*others, ref(session)))
        notes_of(session)  # so that `owner_of` finds them


def owner_of(connection: Connection) -> Session | None:
    """Return the session with a transaction on a connection: the flushing one, else the latest; or None."""
    known: tuple[ReferenceType[Session], ...] = getattr(connection, _SESSIONS, ())
    users = [
        each
        for reference in known
        if (each := reference()) is not None
        and each.in_transaction()
        and connection in getattr(each, NOTES).connections
    ]
    if len(users) > 1:
        users = [each for each in users if executes_flush(each)] or users
    return users[-1] if users else None


def connections_of(session: Session) -> list[Connection]:
    begun = notes_of(session).connections if session.in_transaction() else ()
    return [each for each in begun if each.in_transaction()]


def note_write(connection: Connection) -> None:
    """Note that the guard has written inside a savepoint; see `notes_loads`."""
    if (session := owner_of(connection)) is not None:
        notes_of(session).writes = True


def notes_loads(session: Session | None) -> bool:
    """Tell whether loaded objects are to be noted, because they may show what a savepoint undoes.

    SQLAlchemy expires an object at the rollback of a savepoint only if the unit of work has changed it there.
    An object that was loaded there after another write would keep values, and a write id, of no row.
    """
    return session is not None and session.in_nested_transaction() and notes_of(session).writes


def on_soft_rollback(session: Session, transaction: SessionTransaction) -> None:
    notes = notes_of(session)
    notes.shift = None
    if transaction.nested:
        for state in tuple(notes.loaded):
            if (known := state.obj()) is not None and known in session:
                session.expire(known)
        notes.loaded.clear()


def note_shift(connection: Connection, criterion: object = None, *, names_keys: bool = False) -> int:
    """Return a number by which a statement shifts write ids; `objects` adds it to those of loaded objects.

    `update(Model)` with a list of rows sends several statements and applies them to the objects afterwards.
    They have one criterion, and get one number.
    """
    by, session = new_write_id(), owner_of(connection)
    if session is not None:
        notes = notes_of(session)
        known = notes.shift
        if known is None or criterion is None or known.criterion is not criterion:
            known = notes.shift = Shift(by, criterion, ref(connection), names_keys)
        by = known.by
    return by


def note_no_shift(connection: Connection) -> None:
    if (session := owner_of(connection)) is not None:
        notes_of(session).shift = None


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
