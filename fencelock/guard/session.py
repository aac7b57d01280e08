"""Which lease guards a row, and what the unit of work must do so that the statements can be guarded.

A database transaction remembers the leases that it was first written under: the context variable behind
`held_leases` does not reach other threads, leaks out of suspended generators, and is empty once the block
around the work has been left while the session still has something to flush. What is remembered hangs on
SQLAlchemy's transaction object, not on a thread and not on a task, so it is right wherever the code runs.

Where a transaction has written under a lease of a resource and the context now holds a *newer* lease of the
same resource, the older one stays in use: what the transaction has read, it read before somebody else may
have come and gone, and only the older token lets the database see that.

Here it is also noted which fence an object was loaded with, which the statement compares: what is written
was computed from that state of the row.

Attributes are stamped here (so that objects show the fence they were written with, and so that a change in a
collection, a link table or a joined sub-table writes the base row too); which token really goes into a
statement is decided once more, and finally, when the statement is rewritten.
"""

from __future__ import annotations

import _thread
import operator
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial, wraps
from itertools import count
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from sqlalchemy import URL, Engine, Executable, Table, event, inspect
from sqlalchemy.engine import (
    Connection,
    ExceptionContext,
    NestedTransaction,
    RootTransaction,
    Transaction,
    TwoPhaseTransaction,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Mapper, Session
from sqlalchemy.orm.base import INCLUDE_PENDING_MUTATIONS, NO_VALUE, PASSIVE_NO_INITIALIZE
from sqlalchemy.types import TypeEngine

from fencelock._owners import current_owner
from fencelock.errors import FenceError, LockLostError, UnfencedWriteError
from fencelock.guard._bypass import BYPASS, blocking, connections_of, is_bypassed
from fencelock.guard._refused import Refused, forget_refused, mark_refused, refused_in
from fencelock.guard._tables import FENCE_COLUMN, WRITE_COLUMN, FencedTable, fenced_table, row_name
from fencelock.guard.events import report
from fencelock.guard.write_ids import MIXED, new_write_id
from fencelock.lease import Lease, held_leases, was_left

if TYPE_CHECKING:
    from sqlalchemy.orm import InstanceState, SessionTransaction, UOWTransaction, scoped_session

    from fencelock.guard._bypass import AnySession

NOT_INHERITED: Final = (
    "Leases follow into tasks and asyncio.to_thread, but not into other threads or executors: there, hand "
    "one over with bind(session, lock.lease)"
)
"""What to say to one who holds no lease, and may believe that he does."""

_REMEMBERED_ROWS: Final = 10_000
"""Of how many locked rows a transaction keeps the names; some are enough to wait for it by."""

_COMMITS_NOTHING: Final = re.compile(
    r"\s*(?:select|insert|update|delete|with|values|savepoint|release savepoint|rollback to)\b[^;]*;?\s*\Z",
    re.IGNORECASE,
)
"""Single statements that cannot end a transaction by COMMIT, as CALL, SET, and on MariaDB all DDL may."""

_MOVED: Final = "fencelock.moved"
"""Where a session has by how much its last statement moves write ids."""

_SESSIONS: Final = "_fencelock_sessions"
"""Where a connection has the sessions that have joined it, the last one last."""

_CHANGES_ONLY = PASSIVE_NO_INITIALIZE | INCLUDE_PENDING_MUTATIONS
"""Ask an attribute for its changes without loading anything."""

_BOUND: Final = "_fencelock_bound"
"""Where a session or connection has the leases that it was bound to."""

_WRITER: Final = "_fencelock_writer"
"""Where a connection has what its transaction, or an earlier one, writes under."""

_at_gates: WeakKeyDictionary[Writer, None] = WeakKeyDictionary()
"""Those that have passed a gate; in no `WeakSet`, where one thread cannot look while another adds to it."""


_REFUSED: Final = "_fencelock_refused"
"""Where an error notes that it has refused a savepoint: it does not refuse the transaction around it, too."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Process:
    """Whether anybody has bound anything or passed a gate: few do.

    For the others nobody has to be asked for it.
    """

    binds = False
    gates = False


def bind(
    target: AnySession,
    *leases: Lease,
) -> None:
    """Hand leases to a session or connection: its writes are guarded by these, whatever the context holds.

    For code that the held leases do not reach by themselves: other threads, executors, generators; and for
    tokens that come from elsewhere (`Lease("order:1", token)`). It lasts as long as the session or
    connection, or until the next `bind`; without leases it undoes an earlier one. A transaction that is
    already open forgets the leases that it was written under before. Of sessions that share a connection,
    the one that has begun or flushed on it last is taken for the one whose statement it is: bind the same
    leases to each, or give each a connection of its own.

    It does not keep the lock: whoever took the lease still releases it, which waits for transactions that
    have been written under it by then, and for no others.

    Example:
        ```python
        def work(lease: Lease) -> None:  # in a thread of its own
            with Session(engine) as session:
                bind(session, lease)
                ...
        ```

    Raises:
        TypeError: if what is bound is no lease, or is bound to something else than a session or connection.
    """
    for lease in leases:
        if not isinstance(lease, Lease):
            raise TypeError(f"bind takes leases, such as fenced_lock(...).lease, not {type(lease).__name__}")
    _Process.binds = True
    setattr(blocking(target), _BOUND, leases or None)


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


class Writer:
    """What one database transaction writes under.

    Attributes:
        claiming: leases in doubt that are about to be claimed under.
        committed: whether its COMMIT was answered.
        committing: whether its COMMIT, or the first phase of one, may have been sent.
        has_transaction: whether the driver was seen to hold a transaction open.
        remembered: the leases it was written under so far, by resource.
        transaction: returns SQLAlchemy's object, which may be gone.
        gates: which it has passed, and who did so: each as (resource, owner).
        undoing: whether it is being rolled back, so that nothing can come of it.
    """

    __slots__ = (
        "__weakref__",
        "_born",
        "_bound_before",
        "_locked",
        "_locked_count",
        "_mark",
        "_needs",
        "_savepoints",
        "claiming",
        "committed",
        "committing",
        "gates",
        "has_transaction",
        "remembered",
        "transaction",
        "undoing",
    )

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = ref(transaction)
        self.has_transaction = False
        self.remembered: dict[str, Lease] = {}
        self.gates: set[tuple[str, object]] = set()
        self.undoing = False
        self.committed = False
        self.committing = False
        self.claiming: set[Lease] = set()
        self._bound_before: tuple[Lease, ...] | None = None
        self._needs: set[Lease] = set()
        self._locked: list[Callable[[], Iterable[str]]] = []
        self._locked_count = 0
        self._savepoints: dict[str, int] = {}
        self._born: list[tuple[int, Callable[[], Iterable[str]]]] = []
        # Stands for it in the leases: if they referred to it, it would never be thrown away.
        self._mark = object()

    def __del__(self) -> None:
        """End with a transaction that was thrown away; in a thread, for this runs amidst anything."""
        if calls := self._let_go():
            with suppress(RuntimeError):  # the interpreter is on its way out, and gives everything back
                _thread.start_new_thread(_call_each, (calls,))

    def remember(self, resource: str, lease: Lease, connection: Connection, *, claiming: bool) -> None:
        """Note that the transaction is written under a lease, which is that of this resource; or claims.

        Raises:
            FenceError: if another transaction of this thread, task or greenlet has passed the gate with it.
            UnfencedWriteError: if it has been given back, and waits for transactions of before at most.
        """
        if claiming and lease.in_doubt:
            self.claiming.add(lease)
        if self.remembered.get(resource) is not lease:
            if _Process.gates:
                _refuse_beside_gate(connection, resource, lease)
            self.need(lease, connection)
            if not lease.usable:  # it was when the flush began
                raise UnfencedWriteError(
                    f"the lease of {resource!r} has been released meanwhile, before anything was written "
                    f"under it in this transaction; release it after the flush"
                )
            self.remembered[resource] = lease

    def need(self, lease: Lease, connection: Connection) -> None:
        """Note that a lease must not be given back before the transaction ends."""
        if lease not in self._needs:
            self._needs.add(lease)
            lease.need(self._mark)
            transaction = self.transaction()
            if not watch_end(transaction) and transaction is not None:
                self.transaction = ref(transaction, partial(_throw_away_writer, ref(connection)))

    def doubt(self) -> None:
        """Note that nobody knows what became of the transaction, whose connection was lost."""
        if not self.undoing:
            locked = {name for names in self._locked for name in names()}
            for lease in self._needs:
                lease.doubt(locked)

    def lock(
        self, names: Callable[[], Iterable[str]], count: int, savepoint: NestedTransaction | None
    ) -> None:
        """Note that the transaction has locked as many rows, whose names can be asked for.

        Args:
            names: returns them.
            count: how many.
            savepoint: the innermost that is open.
        """
        if self._locked_count < _REMEMBERED_ROWS:
            if savepoint is not None:
                self._note_savepoints(savepoint)
            self._locked.append(names)
            self._locked_count += count

    def bear(self, resources: Callable[[], Iterable[str]], savepoint: NestedTransaction | None) -> None:
        """Note that the transaction has inserted rows whose resources nobody can have locked before.

        Args:
            resources: returns their names.
            savepoint: the innermost that is open.
        """
        self._note_savepoints(savepoint)
        self._born.append((len(self._locked), cache(lambda: frozenset(resources()))))
        self._locked.append(tuple)  # what comes next is known to come later

    def has_born(self, resource: str) -> bool:
        """Tell whether the transaction has inserted the row that this resource is named after."""
        return any(resource in resources() for _, resources in reversed(self._born))

    def _note_savepoints(self, savepoint: NestedTransaction | None) -> None:
        while savepoint is not None and _name(savepoint) not in self._savepoints:
            self._savepoints[_name(savepoint)] = len(self._locked)  # nothing was noted in it so far
            watch_end(savepoint)
            savepoint = savepoint._previous_nested  # noqa: SLF001  SQLAlchemy has no public way to ask

    def take_back(self, savepoint: NestedTransaction) -> set[str]:
        """Note a rollback to a savepoint: what was locked since may be free again, as on PostgreSQL.

        Returns:
            The names of the rows that were locked since, as far as they are known.
        """
        since = self._savepoints.get(_name(savepoint), len(self._locked))
        undone = {name for names in self._locked[since:] for name in names()}
        del self._locked[since:]
        self._born = [each for each in self._born if each[0] < since]
        return undone

    def end(self) -> None:
        """Let go of the leases: the transaction has ended."""
        _call_each(self._let_go())

    def _let_go(self) -> list[Callable[[], object]]:
        calls = [call for lease in self._needs for call in lease.let_go(self._mark, committed=self.committed)]
        self._needs.clear()
        self._locked.clear()
        self._savepoints.clear()
        self._born.clear()
        return calls

    @property
    def bound_instead(self) -> str:
        """What to say where leases that are held do not count, because others were bound; else nothing."""
        if self._bound_before is None or not (held := _usable(None)):
            return ""
        bound = ", ".join(repr(lease.resource) for lease in self._bound_before)
        return (
            f"{', '.join(map(repr, held))} {'is' if len(held) == 1 else 'are'} held here, but this session "
            f"or connection is bound to a lease of {bound}, and only that counts: bind(session, lock.lease) "
            f"binds the present one, and bind(session) undoes it"
        )

    def candidates(self, connection: Connection) -> dict[str, Lease]:
        """Return the leases that may guard a write now, by resource."""
        bound = _bound_to(connection) if _Process.binds else None
        if bound != self._bound_before:
            self.remembered.clear()
            self._bound_before = bound
        found = _usable(bound)
        if self.remembered:
            found.update(self.remembered)
        return found


def _usable(bound: Iterable[Lease] | None) -> dict[str, Lease]:
    """Return the leases under which work may begin, by resource: those bound, or else those held."""
    found = held_leases() if bound is None else [lease for lease in bound if lease.usable]
    return {lease.resource: lease for lease in found}


def _bound_to(connection: Connection) -> tuple[Lease, ...] | None:
    """Return what the session of a connection's statements is bound to, or else the connection itself."""
    leases: tuple[Lease, ...] | None = getattr(owner_of(connection), _BOUND, None)
    return leases or getattr(connection, _BOUND, None)


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


def users_of(connection: Connection) -> list[Session]:
    """Return the sessions whose transaction the connection's is, the one that joined last at the end.

    Those that have left it and live on are not among them.
    """
    return [
        session
        for reference in getattr(connection, _SESSIONS, ())
        if (session := reference()) is not None and connection in connections_of(session)
    ]


def owner_of(connection: Connection) -> Session | None:
    """Return the session whose statements a connection executes: that which flushes, or has begun last."""
    users = users_of(connection)
    if len(users) > 1:
        users = [session for session in users if _is_flushing(session)] or users
    return users[-1] if users else None


def _is_flushing(session: Session) -> bool:
    return session._flushing  # noqa: SLF001  SQLAlchemy has no public way to ask


def _name(savepoint: NestedTransaction) -> str:
    """Return what a savepoint is called: the object would keep its transaction alive."""
    return savepoint._savepoint  # noqa: SLF001  SQLAlchemy has no public way to ask


def _call_each(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


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
            session is refused.leaving or _is_flushing(session)
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
        each is transaction and not commits
        for _, each, commits, _ in own._connections.values()  # noqa: SLF001  no public way
    )


class _Watched(_Refusable):
    """A transaction that lets go of its leases when it has ended, however it did."""

    __slots__ = ()

    def _undo(self) -> None:
        assert isinstance(self, RootTransaction)  # noqa: S101  there are no others
        self._note_undoing()
        try:
            self._connection_rollback_impl()
        finally:
            self.is_active = False
            self._note_end()

    def commit(self) -> None:
        self._note_committing()
        try:
            super().commit()
            self._note_committed()
        except DBAPIError:
            self._roll_back_refused()
            raise
        finally:
            self._note_end()

    def rollback(self) -> None:
        if self._stays_refused():
            return
        forget_refused(self)
        self._note_undoing()
        try:
            super().rollback()
        finally:
            self._note_end()

    def close(self) -> None:
        forget_refused(self)
        self._note_undoing()
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

    def _note_committing(self) -> None:
        writer = _known_writer(self)
        if writer is not None:
            writer.committing = True

    def _note_committed(self) -> None:
        writer = _known_writer(self)
        if writer is not None:
            writer.committed = True

    def _note_undoing(self) -> None:
        writer = _known_writer(self)
        if writer is not None:
            writer.undoing = True

    def _note_end(self) -> None:
        writer = None if self.is_active else _known_writer(self)
        if writer is not None:
            writer.end()


class _WatchedRoot(_Watched, RootTransaction):
    __slots__ = ()


class _WatchedTwoPhase(_Watched, TwoPhaseTransaction):
    __slots__ = ()

    def prepare(self) -> None:
        if (refused := refused_in(self)) is not None:
            refused()
        self._note_committing()
        super().prepare()


class _WatchedSavepoint(_Refusable, NestedTransaction):
    """A savepoint that tells the transaction when it is rolled back to: an `Engine`'s event would, too.

    But an engine with listeners of its own is slower at everything, whether a listener is called or not.
    """

    __slots__ = ()

    def _undo(self) -> None:
        self._take_back()
        self.connection._rollback_to_savepoint_impl(_name(self))  # noqa: SLF001  as `rollback` does

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
        writer = _open_writer(self.connection) if self.is_active else None
        undone = writer.take_back(self) if writer is not None else None
        if undone:
            _expire_rows(self.connection, undone)


def _expire_rows(connection: Connection, names: Container[str]) -> None:
    """Have sessions forget what they know of rows with these names: it was written, or locked, and undone.

    SQLAlchemy does so by itself with objects that have been changed since the savepoint.
    """
    for session in users_of(connection):
        for state in session.identity_map.all_states():
            if FENCE_COLUMN in state.dict and _row_of(state) in names:
                session.expire(state.obj())


def _row_of(state: InstanceState[Any]) -> str | None:
    """Return the name of an object's fenced row, if it has one."""
    fenced = _fenced_table_of(state)
    return None if fenced is None or state.key is None else row_name(fenced, state.key[1])


def _fenced_table_of(state: InstanceState[Any]) -> Table | None:
    tables = state.mapper.tables
    return next((each for each in tables if isinstance(each, Table) and fenced_table(each)), None)


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


def writer_of(connection: Connection) -> Writer:
    """Return what the connection's transaction writes under, beginning one where there is none.

    SQLAlchemy would begin it a moment later, when the statement is executed.
    """
    transaction = connection.get_transaction()
    if transaction is None:
        transaction = connection.begin()
    elif not transaction.is_active:
        connection._invalid_transaction()  # noqa: SLF001  what executing would do, before anything is noted
    writer: Writer | None = getattr(connection, _WRITER, None)
    if writer is None or writer.transaction() is not transaction:
        writer = Writer(transaction)
        setattr(connection, _WRITER, writer)
    return writer


def _known_writer(transaction: Transaction) -> Writer | None:
    writer: Writer | None = getattr(transaction.connection, _WRITER, None)
    return writer if writer is not None and writer.transaction() is transaction else None


def _throw_away_writer(of: ReferenceType[Connection], gone: object) -> None:
    """End with a transaction of an unknown class, which was thrown away; its connection may live on."""
    connection = of()
    writer: Writer | None = getattr(connection, _WRITER, None)
    if writer is not None and writer.transaction is gone:
        delattr(connection, _WRITER)


def note_token(target: Connection | Session, statement: Executable, token: int) -> None:
    """Note that a transaction is written with this token, of whichever lease it is."""
    arguments = {"clause": statement}
    connection = target.connection(bind_arguments=arguments) if isinstance(target, Session) else target
    if isinstance(target, Session):
        join(connection, target)
    writer = writer_of(connection)
    for lease in writer.candidates(connection).values():
        if lease.fencing_token == token:
            writer.need(lease, connection)


def note_locked(connection: Connection, names: Callable[[], Iterable[str]], count: int) -> None:
    """Note that the connection's transaction has locked as many rows, whose names can be asked for."""
    writer = _open_writer(connection)
    if writer is not None:
        writer.lock(names, count, connection.get_nested_transaction())


def note_moved(connection: Connection, by: int) -> None:
    """Note by how much a statement moves write ids, for the objects that SQLAlchemy applies it to."""
    session = owner_of(connection)
    if session is not None:
        session.info[_MOVED] = by


def moved_by(session: Session | None) -> int:
    """Return by how much the statement that is being applied to a session's objects moves their ids."""
    found: int = 0 if session is None else session.info.get(_MOVED, 0)
    return found


def note_born(connection: Connection, resources: Callable[[], Iterable[str]] | None) -> None:
    """Note that the connection's transaction has inserted rows whose resources nobody can have locked."""
    writer = _open_writer(connection)
    if writer is not None and resources is not None:
        writer.bear(resources, connection.get_nested_transaction())


def _open_writer(connection: Connection) -> Writer | None:
    writer: Writer | None = getattr(connection, _WRITER, None)
    transaction = None if writer is None else writer.transaction()
    return writer if transaction is not None and transaction is connection.get_transaction() else None


def take_doubted(connection: Connection, token: int) -> list[Lease]:
    """Return the leases in doubt that the transaction is about to claim under with this token."""
    claiming = writer_of(connection).claiming
    taken = [lease for lease in claiming if lease.fencing_token == token]
    claiming.difference_update(taken)
    return taken


def doubt_lost_transaction(context: ExceptionContext) -> None:
    """Note that the connection of a transaction was lost, unless it is sure that nothing was committed.

    Where the network or the server ended it, nobody here can tell for sure what had been sent and what has
    arrived: that is in doubt, whatever statement has found it out. Where the program itself gave up waiting
    (a task was cancelled, or Ctrl-C pressed), it is known what it waited for: that is in doubt from the
    moment in which SQLAlchemy sets about the COMMIT, or PREPARE; with a statement that may itself commit (see
    `_COMMITS_NOTHING`); and where SQLAlchemy's transaction is of a class that is not watched. Else it is not,
    and the same token goes on: the connection is closed, and the server rolls back what nobody has asked it
    to commit. Until it notices, the lost transaction keeps its row locks, so that a claim waits for its end.
    """
    connection = context.connection
    writer = _open_writer(connection) if context.is_disconnect and connection is not None else None
    if writer is None or connection is None:
        return
    given_up = not isinstance(context.original_exception, Exception)
    watched = isinstance(connection.get_transaction(), _Watched)
    sql = context.statement or getattr(context.execution_context, "statement", None)
    if not given_up or writer.committing or not watched or (sql and not _COMMITS_NOTHING.match(sql)):
        writer.doubt()


def note_gate(connection: Connection, resource: str) -> None:
    """Note that the connection's transaction holds the resource's row of the fence table."""
    writer = writer_of(connection)
    writer.gates.add((resource, current_owner()))
    _at_gates[writer] = None
    _Process.gates = True


def passes_gate_here(resource: str) -> bool:
    """Tell whether an open transaction of this thread, task or greenlet has passed the gate of a resource."""
    return any(True for _ in _at_gate_here(resource))


def _at_gate_here(resource: str) -> Iterator[tuple[Writer, Transaction]]:
    """Yield the open transactions of this thread, task or greenlet that have passed a resource's gate."""
    gate = resource, current_owner()
    for reference in _at_gates.keyrefs():
        writer = reference()
        transaction = None if writer is None else writer.transaction()
        if writer is not None and transaction is not None and transaction.is_active and gate in writer.gates:
            yield writer, transaction


def _at_gate_elsewhere(connection: Connection, resource: str) -> Iterator[Writer]:
    """Yield what those of them write under that are in the same database, on other connections."""
    for writer, transaction in _at_gate_here(resource):
        other = transaction.connection
        if other is not connection and _is_same_database(other.engine, connection.engine):
            yield writer


def _refuse_beside_gate(connection: Connection, resource: str, lease: Lease) -> None:
    """Refuse to write under a lease with whose gate another transaction of this very owner is open.

    That one would write what it has read over this, and the fence, which is the lease's own, would not tell.

    Raises:
        FenceError: if there is one, in the same database.
    """
    if any(writer.remembered.get(resource) is lease for writer in _at_gate_elsewhere(connection, resource)):
        raise FenceError(
            f"another transaction of this thread, task or greenlet has passed the gate of {resource!r} and "
            f"is still open: what it has read, it may write over this. Work in its session, or end it first"
        )


def refuse_to_wait_for_oneself(connection: Connection, resource: str) -> None:
    """Refuse a gate that another open transaction of this very thread, task or greenlet has passed.

    Raises:
        FenceError: the database would wait for that transaction, which cannot go on meanwhile.
    """
    if any(True for _ in _at_gate_elsewhere(connection, resource)):
        raise FenceError(
            f"another transaction of this thread, task or greenlet has passed the gate of {resource!r} and "
            f"is still open: this one would wait for it for ever. Work in its session, or end it first"
        )


def _is_same_database(one: Engine, other: Engine) -> bool:
    def place(url: URL) -> tuple[Any, ...]:
        return url.get_backend_name(), url.host, url.port, url.database

    # Each pool on a database in memory has one of its own.
    in_memory = one.url.database in {None, "", ":memory:"}
    return one.pool is other.pool or (place(one.url) == place(other.url) and not in_memory)


def refuse_bypass(options: Mapping[str, Any], connection: Connection) -> None:
    """Refuse to do fenced work where everything passes unguarded.

    Raises:
        UnfencedWriteError: if these execution options say so, or a block of this connection.
    """
    if is_bypassed(options, connection):
        raise UnfencedWriteError(
            f"nothing can be claimed or written with a token under execution_options(fencelock={BYPASS!r}), "
            f"where no fence is raised or compared; use an engine, a connection and a statement without it"
        )


def begin_writing(connection: Connection, options: Mapping[str, Any], fenced: FencedTable) -> Writer:
    """Return what the connection's transaction writes under; refuse a connection that has none.

    Whether it has one, SQLAlchemy knows, or only the driver.

    Raises:
        UnfencedWriteError: if each statement would be committed by itself.
    """
    writer = writer_of(connection)
    if writer.has_transaction:
        return writer
    level = options.get("isolation_level") or getattr(connection.dialect, "_on_connect_isolation_level", None)
    if level != "AUTOCOMMIT":
        commits_by_itself = _COMMITS_BY_ITSELF.get(connection.dialect.name)
        writer.has_transaction = commits_by_itself is None or not commits_by_itself(
            connection.connection.dbapi_connection
        )
    if not writer.has_transaction:
        raise UnfencedWriteError(
            f"a write to {fenced.name!r} needs a transaction: on an AUTOCOMMIT connection the rows before a "
            f"refused one would stay written"
        )
    return writer


def _mysql_commits_by_itself(driver: Any) -> bool:
    ask = getattr(driver, "get_autocommit", None)
    return ask is not None and bool(ask())


def _sqlite_commits_by_itself(driver: Any) -> bool:
    """Tell whether nobody begins a transaction: neither the driver nor a listener for "begin"."""
    driver = getattr(driver, "driver_connection", driver)  # that of aiosqlite, behind SQLAlchemy's adapter
    if getattr(driver, "autocommit", None) is True:  # from Python 3.12
        return True
    return getattr(driver, "isolation_level", "") is None and not driver.in_transaction


_COMMITS_BY_ITSELF: Final[Mapping[str, Callable[[Any], bool]]] = {
    "mysql": _mysql_commits_by_itself,
    "mariadb": _mysql_commits_by_itself,
    "postgresql": lambda driver: getattr(driver, "autocommit", None) is True,
    "sqlite": _sqlite_commits_by_itself,
}


class Tokens:
    """The tokens for the rows of one statement: resolves, checks and remembers each lease once.

    Args:
        connection: what executes it.
        fenced: the table that it writes.
        options: its execution options.
        writer: the connection's, where that is known.
        claiming: whether it is about to claim the rows, which leases in doubt are good for.

    Attributes:
        loaded: for a flush, the write ids that the objects were loaded with.
        write_id: for a flush, the id of its writes.
        writer: what the connection's transaction writes under.
    """

    __slots__ = (
        "_candidates",
        "_claiming",
        "_connection",
        "_found",
        "_options",
        "_used",
        "fenced",
        "loaded",
        "write_id",
        "writer",
    )

    def __init__(
        self,
        connection: Connection,
        fenced: FencedTable,
        options: Mapping[str, Any],
        *,
        writer: Writer | None = None,
        claiming: bool = False,
    ) -> None:
        self.fenced = fenced
        self._connection = connection
        self._options = options
        self._claiming = claiming
        self.writer = writer or writer_of(connection)
        self._candidates = self.writer.candidates(connection)
        self._found: dict[tuple[Any, ...], int] = {}
        self._used: list[Lease] = []
        self.loaded: LoadedIds | None = None
        self.write_id = 0

    def serves(self, writer: Writer) -> bool:
        """Tell whether leases have been found, and in this transaction: a listener may have begun another.

        Raises:
            LockLostError: if one of them has ended since.
        """
        if not self._used or self.writer is not writer:
            return False
        for lease in self._used:
            lease.token_to_write(claiming=self._claiming)
        return True

    @property
    def none_held(self) -> bool:
        """Whether there is no lease that could guard anything."""
        return not self._candidates

    def need_some(self, resource: str | None = None) -> None:
        """Refuse a write under no lease at all; the resource that it needed is named where it is known.

        Raises:
            UnfencedWriteError: if none is held.
        """
        if not self.none_held:
            return
        hint = self.writer.bound_instead or NOT_INHERITED
        if resource is not None and was_left(resource):
            hint = (
                "Where the block that held it was left before this write was sent, call flush() or commit() "
                "inside the block"
            )
        template = self.fenced.template
        if resource is None and not template.columns:
            resource = template.render(())
        lock = (
            f"fenced_lock({resource!r})"
            if resource
            else f"fenced_lock(…) of its resource, {template.text!r} with the row's values,"
        )
        raise UnfencedWriteError(
            f"no lease is held for this write to {self.fenced.name!r}; acquire {lock} around it. {hint}"
        )

    def of_new_row(self) -> int:
        """Return the fence 0 for a row whose resource nobody can have locked yet: the database names it.

        That is a row without a key so far; and until the transaction ends, for nobody else sees it, the row
        with its new key, and what hangs on it.

        Which of the leases it is written under cannot be told, so all of them are waited for.

        Raises:
            UnfencedWriteError: if none is held.
        """
        self.need_some()
        for lease in self._candidates.values():
            self.writer.need(lease, self._connection)
        return 0

    def of_row(self, values: tuple[Any, ...]) -> int:
        """Return the token of the resource that guards the row with these values, as the template has them.

        Raises:
            UnfencedWriteError: if that resource's lease is not among those held.
            LockLostError: if the lease is known to be lost.
        """
        token = self._found.get(values)
        if token is None:
            token = self._found[values] = self._look_up(values)
        return token

    def _look_up(self, values: tuple[Any, ...]) -> int:
        resource = self.fenced.template.render(values)
        lease = self._candidates.get(resource)
        if lease is None:
            if not self._claiming and self.writer.has_born(resource):
                return self.of_new_row()
            self.need_some(resource)
            raise UnfencedWriteError(
                f"this write to {self.fenced.name!r} needs the lease of {resource!r}, and held are "
                f"{', '.join(map(repr, self._candidates))}; acquire fenced_lock({resource!r}) around it"
                f"{self.writer.bound_instead and '. '}{self.writer.bound_instead}"
            )
        token = lease.token_to_write(claiming=self._claiming)
        self.writer.remember(resource, lease, self._connection, claiming=self._claiming)
        self._used.append(lease)
        return token


def resource_of(connection: Connection, token: int | None) -> str | None:
    """Return the resource whose token the connection's transaction has used; None if that is not known."""
    writer = _open_writer(connection)
    leases = writer.remembered.values() if writer is not None else ()
    return next((lease.resource for lease in leases if lease.fencing_token == token), None)


def report_refusal(connection: Connection, error: FenceError) -> None:
    """Tell of what the database has turned away, with the resource of the token that was refused."""
    report(error, resource=resource_of(connection, getattr(error, "token", None)))


def rows_known_to(
    connection: Connection, fenced: FencedTable
) -> Callable[[tuple[Any, ...]], tuple[Any, ...] | None]:
    """Return how to look up, by primary key, the template's values of a row that the session knows.

    They are those that were loaded, whatever has been assigned since; None for an unknown row.
    """
    session = owner_of(connection)
    mapper = fenced.mapper() if fenced.mapper else None
    if session is None or mapper is None:
        return lambda _identity: None
    flush = _flushes.get(session.hash_key) if _is_flushing(session) else None
    known = flush.known.get(fenced, {}) if flush else {}
    names = tuple(fenced.template.columns)

    def values_of(identity: tuple[Any, ...]) -> tuple[Any, ...] | None:
        values = known.get(identity)
        if values is not None:
            return values
        instance = session.identity_map.get(mapper.identity_key_from_primary_key(identity))
        if instance is not None:
            state = instance._sa_instance_state  # noqa: SLF001  what inspect() returns
            return _loaded_values(names, state, state.dict)
        for state in flush.unsaved if flush else ():
            if tuple(mapper.primary_key_from_instance(state.obj())) == identity:
                return _loaded_values(names, state, state.dict)
        return None

    return values_of


def tokens_for(
    connection: Connection, fenced: FencedTable, options: Mapping[str, Any], writer: Writer
) -> Tokens:
    """Return the tokens for a statement: those that its flush has found already, if it is the unit of work's.

    Raises:
        LockLostError: if a lease has ended since.
    """
    found = None
    if "compiled_cache" in options:  # the unit of work has one of its own for each mapper
        flush = _executing(connection)
        found = None if flush is None else flush.tokens(fenced, connection)
        if found is not None and found.serves(writer):
            return found
    made = Tokens(connection, fenced, options, writer=writer)
    if found is not None:
        made.loaded, made.write_id = found.loaded, found.write_id
    return made


def loaded_id(current: Mapping[str, Any]) -> int | None:
    """Return the write id that an object was loaded with; None if unknown."""
    return current.get(WRITE_COLUMN)


def _loaded_values(
    names: tuple[str, ...], state: InstanceState[Any], current: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Return attributes as they were loaded, or None where one is not known."""
    assigned = state.committed_state if state.key is not None else {}
    values = []
    for name in names:
        value = assigned[name] if name in assigned else current.get(name)
        if value is None:
            value = getattr(state.obj(), name)  # expired, deferred, or not there yet
        if value is None or value is NO_VALUE:
            return None
        values.append(value)
    return tuple(values)


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
    connections = innermost._connections.values()  # noqa: SLF001  the same
    return innermost if any(each is transaction for _, each, *_ in connections) else None


def _deactivate(
    session: Session, boundary: SessionTransaction, refused: Refused, refusal: FenceError | LockLostError
) -> None:
    """Have a session need a rollback, as a flush that fails does by itself."""
    # Else a `with` block of SQLAlchemy's would end without a word about what was not committed.
    boundary._transaction_is_active = _yes  # type: ignore[method-assign]  # noqa: SLF001  no public way
    if _is_flushing(session):
        return
    refused.leaving = session
    try:
        boundary._begin().rollback()  # noqa: SLF001  as a flush does
    finally:
        refused.leaving = None
    boundary._rollback_exception = refusal  # noqa: SLF001  the same


def _yes() -> bool:
    return True


def _on_rollback(_session: Session, ended: SessionTransaction) -> None:
    """Have a session's own rollback end what it has joined, which the failure of its flush did not."""
    for _, transaction, *_ in list(ended._connections.values()):  # noqa: SLF001  the same
        if refused_in(transaction) is not None:
            transaction.rollback()


def in_unit_of_work(connection: Connection, fenced: FencedTable, options: Mapping[str, Any]) -> bool:
    """Tell whether a flush is executing a statement of its own on the rows of a fenced model.

    Bulk operations are no flush, and what listeners execute during one is not the flush's.
    """
    session = owner_of(connection)
    mapper = fenced.mapper() if fenced.mapper else None
    return (
        session is not None
        and mapper is not None
        and session._warn_on_events  # noqa: SLF001  SQLAlchemy has no public way to ask
        and options.get("compiled_cache") is mapper.base_mapper._compiled_cache  # noqa: SLF001  the same
    )


def writes_fenced_rows(
    connection: Connection, fenced: FencedTable, table: Table, rows: Iterable[Mapping[str, Any]]
) -> bool:
    """Tell whether the flush writes the fenced rows as well that rows of a joined sub-table belong to.

    It does not where only a relationship with `post_update` on the other side wants the sub-table changed.
    """
    session = owner_of(connection)
    mapper = fenced.mapper() if fenced.mapper else None
    if session is None or mapper is None:
        return False
    flush = _flushes.get(session.hash_key)
    names = _key_names(mapper, table)
    for row in rows:
        identity = tuple([row.get(name) for name in names])
        if _is_plain(session, mapper, fenced, identity):
            continue
        if flush is None or not flush.writes(session, mapper, identity):
            return False
    return True


def _is_plain(session: Session, mapper: Mapper[Any], fenced: FencedTable, identity: tuple[Any, ...]) -> bool:
    """Tell whether a row is that of an object whose class has no part in the fenced table."""
    instance = session.identity_map.get(mapper.identity_key_from_primary_key(identity))
    if instance is None:
        return False
    its: Mapper[Any] = inspect(instance).mapper
    return fenced.table not in its.tables


def _key_names(base: Mapper[Any], table: Table) -> list[str]:
    """Return the parameters with which the unit of work names a row of a sub-table, in the key's order."""
    mapper = next(each for each in base.self_and_descendants if table in each.tables)
    columns = mapper._pks_by_table[table]  # noqa: SLF001  as the unit of work makes its statements
    labels: dict[str, Any] = {
        mapper.get_property_by_column(column).key: column._label  # noqa: SLF001  the same
        for column in columns
    }
    keys = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
    return [labels[key] for key in keys] if labels.keys() == set(keys) else list(labels.values())


_mappers: WeakKeyDictionary[Table, WeakSet[Mapper[Any]]] = WeakKeyDictionary()
"""Of each fenced table, the mappers of all classes whose objects have rows there."""


class LoadedIds(dict[Any, int | None]):
    """By primary key, the write ids that objects were loaded with whose rows of a table one flush writes.

    A key is the value of its one column, or a tuple of several, as `itemgetter` gives them. None where it is
    not known. Of an object that the flush has replaced by a new one with its key (a row switch), or that only
    a relationship with `post_update` writes, nobody has told; the session has it.

    Attributes:
        moved: those of objects whose key has changed, by the new one. Their rows have it already where a
            cascade of the database has been there before; else it may be another row's still.
    """

    __slots__ = ("_fenced", "_flush", "moved")

    def __init__(self, flush: _Flush, fenced: FencedTable) -> None:
        self._flush = flush
        self._fenced = fenced
        self.moved: dict[Any, int | None] = {}

    def note(self, key: Any, loaded: int | None) -> None:
        """Note the write id of an object; one that no row has, should there be two of one row."""
        other = self.get(key)
        self[key] = loaded if other in {None, loaded} else other if loaded is None else MIXED

    def __missing__(self, key: Any) -> int | None:
        for mapper in _mappers.get(self._fenced.table, ()):
            identity = key if len(mapper.primary_key) > 1 else (key,)
            for state in self._flush.objects_of(mapper, identity):
                if self._fenced.table in state.mapper.tables:
                    return None if state in self._flush.stamped else loaded_id(state.dict)
        return self.moved.get(key)


class _Flush:
    """What one flush has found out so far.

    Attributes:
        number: a larger one than those of all that have begun before.
        plan: returns the plan of the unit of work; None once that is thrown away, or where none was noted.
        stamped: the objects whose fenced rows it writes, save those it deletes.
        write_id: of its writes.
        found: what `tokens` has returned so far, by table and connection.
        known: by table and primary key, the template's values of rows about to be written.
        unsaved: new objects, for tables whose resources cannot be told from the key alone.
    """

    __slots__ = ("_session", "_shards", "found", "known", "number", "plan", "stamped", "unsaved", "write_id")

    def __init__(self, session: Session, plan: UOWTransaction | None = None) -> None:
        self._session = ref(session)
        self.number = next(_numbers)
        self.plan = (lambda: None) if plan is None else ref(plan, partial(_forget_flush, session.hash_key))
        self.stamped: set[InstanceState[Any]] = set()
        self.write_id = new_write_id()
        self.found: dict[tuple[FencedTable, Connection], Tokens | None] = {}
        self.known: dict[FencedTable, dict[tuple[Any, ...], tuple[Any, ...]]] = {}
        self.unsaved: list[InstanceState[Any]] = []
        self._shards: set[Any] | None = None

    def tokens(self, fenced: FencedTable, connection: Connection) -> Tokens | None:
        """Return the tokens for rows of a table, or None where the connection bypasses the guard."""
        key = fenced, connection
        tokens = self.found.get(key)
        if tokens is None and key not in self.found:
            session = self._session()
            if session is not None:
                join(connection, session)  # another one may have joined the transaction since
            options = connection.get_execution_options()
            tokens = None if is_bypassed(options, connection) else Tokens(connection, fenced, options)
            if tokens is not None and session is not None:
                tokens.loaded, tokens.write_id = LoadedIds(self, fenced), self.write_id
            self.found[key] = tokens
        return tokens

    def objects_of(self, mapper: Mapper[Any], identity: tuple[Any, ...]) -> Iterator[InstanceState[Any]]:
        """Yield the objects that the session has of a row, of whichever shards the flush writes to."""
        session, plan = self._session(), self.plan()
        if self._shards is None:
            states: Iterable[InstanceState[Any]] = () if plan is None else plan.states
            self._shards = {None, *(state.identity_token for state in states)}
        for shard in self._shards:
            key = mapper.identity_key_from_primary_key(identity, identity_token=shard)
            instance = None if session is None else session.identity_map.get(key)
            if instance is not None:
                yield inspect(instance)

    def writes(self, session: Session, mapper: Mapper[Any], identity: tuple[Any, ...]) -> bool:
        """Tell whether the fenced row with this primary key is written or deleted."""
        plan: Any = self.plan()
        if plan is None or not plan.transaction.is_active:  # an earlier one, which somebody has kept
            return False
        instance = session.identity_map.get(mapper.identity_key_from_primary_key(identity))
        if instance is not None:
            state = inspect(instance)
            deleted, only_listed = plan.states.get(state, (False, True))
            if state in self.stamped or (deleted and not only_listed):
                return True
        keys = (mapper.primary_key_from_instance(state.obj()) for state in self.stamped)
        return identity in map(tuple, keys)  # a new object, or one with a new key


_numbers: Final = count()

_flushes: dict[int, _Flush] = {}
"""Those that write fenced rows, by the number that a session has and its objects know.

This is asked for each object of a flush. SQLAlchemy has no event for every end of a flush, which may come to
nothing, or fail in another listener; but its plan is thrown away then, and what is here goes with it.
"""


def _executing(connection: Connection) -> _Flush | None:
    """Return the flush that is executing its statements on a connection.

    Of several it is the one that began last: in a listener of the other, in another session.
    """
    executing = [
        flush
        for reference in getattr(connection, _SESSIONS, ())
        if (session := reference()) is not None
        and session._warn_on_events  # noqa: SLF001  no public way to ask; a bulk operation does not set it
        and (flush := _flushes.get(session.hash_key)) is not None
    ]
    if len(executing) > 1:
        return max(executing, key=operator.attrgetter("number"))
    return executing[0] if executing else None


def _forget_flush(number: int, gone: object) -> None:
    flush = _flushes.get(number)
    if flush is not None and flush.plan is gone:
        del _flushes[number]


class _NotePlans:
    """Notes the plan of a flush when the first object of a mapper goes in, as one of its processors.

    The mapper's events do not tell the plan, and a session's `before_flush` has every flush of the process
    look through its objects once more.
    """

    def per_property_preprocessors(self, plan: UOWTransaction) -> None:
        number = plan.session.hash_key
        flush = _flushes.get(number)
        if flush is None or flush.plan() is not plan:  # an earlier one's, whose plan somebody has kept
            _flushes[number] = _Flush(plan.session, plan)


_note_plans: Final = _NotePlans()


def note_plans_of(mapper: Mapper[Any]) -> None:
    """Note the plans of flushes that write objects of a mapper, though it may not be fenced."""
    mapper._dependency_processors.append(_note_plans)  # type: ignore[arg-type]  # noqa: SLF001  no public way
    watch_plans(mapper, None)


def watch_plans(mapper: Mapper[Any], _model: object) -> None:
    """Note the plan whichever mapper of a fenced one's hierarchy comes first: a listener for all mappers.

    SQLAlchemy may look for objects of a whole hierarchy when one of any of its mappers goes in, and has then
    no use for the processors of the others any more.
    """
    hierarchy = mapper.base_mapper.self_and_descendants
    processors: list[list[Any]] = [each._dependency_processors for each in hierarchy]  # noqa: SLF001  see `watch_mapper`
    if any(_note_plans in each for each in processors):
        for each in processors:
            if _note_plans not in each:
                each.append(_note_plans)


def _on_begin(session: Session, _transaction: object, connection: Connection) -> None:
    join(connection, session)


def _on_insert_undone(_session: Session, instance: object) -> None:
    """Have an object whose row is not there have no fence."""
    state: InstanceState[Any] = inspect(instance)
    if _fenced_table_of(state) is not None:
        for name in (FENCE_COLUMN, WRITE_COLUMN):
            state.dict.pop(name, None)


def watch_sessions() -> None:
    """Listen to every session of the process."""
    event.listen(Session, "after_begin", _on_begin)
    event.listen(Session, "after_soft_rollback", _on_rollback)
    event.listen(Session, "persistent_to_transient", _on_insert_undone)
    event.listen(Session, "pending_to_transient", _on_insert_undone)


def watch_mapper(mapper: Mapper[Any], fenced: FencedTable) -> None:
    """Listen to the unit of work of a fenced model.

    The mapper's events are used, not the session's `before_flush`: they see also what other listeners and
    cascades have added to the flush, for each object, just before its columns are looked at.
    """
    _mappers.setdefault(fenced.table, WeakSet()).add(mapper)
    watch = _Watch(mapper, fenced)
    # With retval SQLAlchemy calls them as they are; what they return is of no interest to it here.
    event.listen(mapper, "before_insert", watch.on_insert, raw=True, retval=True)
    watch.listen_to(mapper)
    event.listen(mapper, "before_delete", watch.on_delete, raw=True, retval=True)
    event.listen(mapper, "mapper_configured", watch.on_configured)
    note_plans_of(mapper)


class _Watch:
    """Stamps the objects of one mapper, and notes which resource guards each of them."""

    __slots__ = (
        "_comparing",
        "_fenced",
        "_in_row",
        "_key",
        "_key_in",
        "_looked_up",
        "_naming",
    )

    def __init__(self, mapper: Mapper[Any], fenced: FencedTable) -> None:
        columns: Iterable[tuple[str, Any]] = mapper.columns.items()
        own = {column: key for key, column in columns if getattr(column, "table", None) is fenced.table}
        template = fenced.template
        self._fenced = fenced
        self._key = tuple(mapper.get_property_by_column(column).key for column in mapper.primary_key)
        self._key_in = operator.itemgetter(*self._key)
        self._in_row = frozenset(own.values()) - {FENCE_COLUMN, WRITE_COLUMN}
        self._comparing: dict[str, Callable[[Any, Any], Any]] = {}
        self._naming = tuple(own[column] for column in template.columns.values())
        self._looked_up = not template.in_key

    def listen_to(self, mapper: Mapper[Any]) -> None:
        """Have UPDATEs be looked at."""
        event.listen(mapper, "before_update", self.on_update, raw=True, retval=True)

    def on_configured(self, mapper: Mapper[Any], _model: object) -> None:
        """Have UPDATEs be looked at after all listeners that are there by now: they may change more.

        No flush knows the mapper yet, so nobody is going through its listeners.
        """
        event.remove(mapper, "before_update", self.on_update)
        self.listen_to(mapper)

    def on_insert(self, _mapper: object, connection: Connection, state: InstanceState[Any]) -> None:
        flush = flush_of(state)
        if self._looked_up:
            flush.unsaved.append(state)
        flush.stamped.add(state)
        state.dict[WRITE_COLUMN] = flush.write_id
        tokens = flush.tokens(self._fenced, connection)
        if tokens is not None:
            state.dict[FENCE_COLUMN] = self._token_for(flush, tokens, state, state.dict)

    def on_update(self, _mapper: object, connection: Connection, state: InstanceState[Any]) -> None:
        current = state.dict
        writes_row = self._writes_row(state, current)
        flush = _flushes.get(state.session_id) or flush_of(state)  # type: ignore[arg-type]  # it has a session
        if not writes_row and not _has_changed(state, current):
            state.committed_state.pop(
                FENCE_COLUMN, None
            )  # of an object that was merged, and claimed meanwhile
            flush.tokens(self._fenced, connection)  # for what another object's listener may change yet
            return
        if WRITE_COLUMN not in current:
            self._load_with_key(state, current)
        loaded = loaded_id(current)
        flush.stamped.add(state)
        tokens = flush.found.get((self._fenced, connection)) or flush.tokens(self._fenced, connection)
        if tokens is not None:
            token = self._token_for(flush, tokens, state, current)
            self._note_loaded(tokens, state, current, self._known(state, loaded))
            current[FENCE_COLUMN] = token
        current[WRITE_COLUMN] = flush.write_id
        state.committed_state[WRITE_COLUMN] = NO_VALUE  # it looks changed, so the row is written

    def on_delete(self, _mapper: object, connection: Connection, state: InstanceState[Any]) -> None:
        flush = flush_of(state)
        self._load_with_key(state, state.dict)
        tokens = flush.tokens(self._fenced, connection)
        if tokens is None:
            return
        if self._looked_up:
            self._token_for(flush, tokens, state, state.dict)
        elif tokens.none_held:  # the statement has the key, which the object need not be loaded for
            tokens.need_some(self._resource_of(state))
        self._note_loaded(tokens, state, state.dict, self._known(state, loaded_id(state.dict)))

    def _known(self, state: InstanceState[Any], loaded: int | None) -> int | None:
        """Return what an object was loaded with; refuse one of which that will never be known."""
        if loaded is None and WRITE_COLUMN not in state.expired_attributes and state.key is not None:
            raise UnfencedWriteError(
                f"this {state.mapper.class_.__name__} was loaded without {WRITE_COLUMN}, so that its age is "
                f"not known: load that with the rest, or load it again"
            )
        return loaded

    def _load_with_key(self, state: InstanceState[Any], current: dict[str, Any]) -> None:
        """Load an expired object now, as the unit of work is about to, which needs its key.

        The fence comes with it then, and is not loaded over the one that is stamped.
        """
        for key in self._key:
            if key not in current:
                manager: Mapping[str, Any] = state.manager
                manager[key].impl.get(state, current)

    def _note_loaded(
        self, tokens: Tokens, state: InstanceState[Any], current: dict[str, Any], write_id: int | None
    ) -> None:
        """Note the id that an object was loaded with, by the key with which its row will be named."""
        loaded = tokens.loaded
        if loaded is None:  # this object is flushed without a plan that could be noted
            return
        assigned = state.committed_state
        try:
            if assigned.keys().isdisjoint(self._key):
                loaded.note(self._key_in(current), write_id)
            else:
                loaded.note(self._key_in({**current, **assigned}), write_id)
                loaded.moved[self._key_in(current)] = write_id
        except KeyError:  # it was expired by its name
            self._load_with_key(state, current)
            self._note_loaded(tokens, state, current, write_id)

    def _resource_of(self, state: InstanceState[Any]) -> str | None:
        """Return which resource guards an object, by its key alone."""
        template = self._fenced.template
        if state.key is None:
            return None
        key = dict(zip(self._fenced.table.primary_key, state.key[1], strict=True))
        return template.render([key[column] for column in template.columns.values()])

    def _token_for(
        self, flush: _Flush, tokens: Tokens, state: InstanceState[Any], current: Mapping[str, Any]
    ) -> int:
        """Return the token to write an object with."""
        fenced = self._fenced
        try:
            values = _loaded_values(self._naming, state, current)
            if values is None:
                self._refuse_null(state, current)
                return tokens.of_new_row()
            if self._looked_up and state.key is not None:
                flush.known.setdefault(fenced, {})[state.key[1]] = values
            return tokens.of_row(values)
        except FenceError as error:
            report(error, table=fenced.name)
            raise

    def _refuse_null(self, state: InstanceState[Any], current: Mapping[str, Any]) -> None:
        """Refuse a row whose resource has no name, and will have none."""
        template = self._fenced.template
        for name, column in zip(self._naming, template.columns.values(), strict=True):
            comes_later = state.key is None and (
                column.primary_key or column.default is not None or column.server_default is not None
            )
            if current.get(name) is None and column.nullable and not comes_later:
                raise UnfencedWriteError(
                    f"{name} of this row of {self._fenced.name!r} is NULL, so that {template.text!r} names "
                    f"no resource and no lease can guard the row: name the resource by columns that are "
                    f"never NULL, such as the primary key, or give {name} a value that stands for none"
                )

    def _writes_row(self, state: InstanceState[Any], current: Mapping[str, Any]) -> bool:
        """Tell whether the unit of work will write the fenced row of a dirty object by itself."""
        comparing = self._comparing
        if not comparing:  # for the first time: the attributes have been made since the mapper was
            known: Mapping[str, Any] = state.manager
            comparing.update({key: _comparison(known[key].impl) for key in self._in_row & known.keys()})
        for key, loaded in state.committed_state.items():
            is_equal = comparing.get(key)
            if is_equal is not None and is_equal(current.get(key), loaded) is not True:
                return True
        return False


def _comparison(attribute: Any) -> Callable[[Any, Any], Any]:
    """Return what tells whether two values of an attribute are equal, as the unit of work does."""
    by_type = attribute.is_equal
    return operator.eq if getattr(by_type, "__func__", None) is TypeEngine.compare_values else by_type


def flush_of(state: InstanceState[Any]) -> _Flush:
    """Return the flush that an object is part of.

    Should its plan not have been noted, it is one for this object alone: its row is guarded as any other, and
    what cannot be told without the plan is refused.
    """
    session = state.session
    assert session is not None  # noqa: S101  an object that is being flushed has one
    return _flushes.get(session.hash_key) or _Flush(session)


def _has_changed(state: InstanceState[Any], current: dict[str, Any]) -> bool:
    """Tell whether anything of a dirty object is to be written: a column, a link or a collection."""
    manager = state.manager
    for key, loaded in tuple(state.committed_state.items()):
        if key == FENCE_COLUMN:
            continue
        impl: Any = manager[key].impl
        if impl.collection or impl.uses_objects:
            history = impl.get_history(state, current, _CHANGES_ONLY)
            if (history.added or history.deleted) and not manager[key].property.viewonly:
                return True
        elif key not in current or impl.is_equal(current[key], loaded) is not True:
            return True
    return False
