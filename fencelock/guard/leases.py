"""Which leases a transaction writes under.

A database transaction remembers the leases that it was first written under. The context variable behind
`held_leases` does not reach other threads, leaks out of suspended generators, and is empty once the block was
left. So what is remembered hangs on SQLAlchemy's transaction object, wherever the code runs.

An older lease of a resource stays in use where the context holds a newer one by now: the transaction has read
under the older one, another holder may have come between, and only the older token lets the database see it.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final
from weakref import ReferenceType, WeakKeyDictionary, ref

from sqlalchemy import Executable, Table
from sqlalchemy.engine import Connection, NestedTransaction, Transaction
from sqlalchemy.orm import Session

from fencelock.errors import FenceError, UnfencedWriteError
from fencelock.guard._bypass import BYPASS, blocking, is_bypassed
from fencelock.guard._sqlalchemy import outer_of, refuse_inactive, savepoint_name
from fencelock.guard._tables import FENCE_COLUMN, FencedTable, fenced_table, row_name
from fencelock.guard.endings import WATCHER, Watcher, watch_end
from fencelock.guard.events import report
from fencelock.guard.sessions import join, owner_of, users_of
from fencelock.lease import Lease, held_leases

if TYPE_CHECKING:
    from sqlalchemy.orm import InstanceState

    from fencelock.guard._bypass import AnySession

_REMEMBERED_ROWS: Final = 10_000
"""Of how many locked rows a transaction keeps the names; some are enough to wait for it by."""

_bound: WeakKeyDictionary[Session | Connection, tuple[Lease, ...]] = WeakKeyDictionary()
"""What sessions and connections were bound to."""


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
    bound = blocking(target)
    if leases:
        _bound[bound] = leases
    else:
        _bound.pop(bound, None)


class Writer(Watcher):
    """What one database transaction writes under.

    Attributes:
        claiming: leases in doubt that are about to be claimed under.
        has_transaction: whether the driver was seen to hold a transaction open.
        remembered: the leases it was written under so far, by resource.
        gates: which it has passed, and who did so: each as (resource, owner).
    """

    __slots__ = (
        "_born",
        "_bound_before",
        "_locked",
        "_locked_count",
        "_mark",
        "_needs",
        "_savepoints",
        "claiming",
        "gates",
        "has_transaction",
        "remembered",
    )

    def __init__(self, transaction: Transaction) -> None:
        super().__init__(transaction)
        self.has_transaction = False
        self.remembered: dict[str, Lease] = {}
        self.gates: set[tuple[str, object]] = set()
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
            UnfencedWriteError: if it has been given back, and waits for transactions of before at most.
        """
        if claiming and lease.in_doubt:
            self.claiming.add(lease)
        if self.remembered.get(resource) is not lease:
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
        while savepoint is not None and savepoint_name(savepoint) not in self._savepoints:
            self._savepoints[savepoint_name(savepoint)] = len(self._locked)  # nothing was noted in it so far
            watch_end(savepoint)
            savepoint = outer_of(savepoint)

    def take_back(self, savepoint: NestedTransaction) -> None:
        """Note a rollback to a savepoint: what was locked since may be free again, as on PostgreSQL."""
        since = self._savepoints.get(savepoint_name(savepoint), len(self._locked))
        undone = {name for names in self._locked[since:] for name in names()}
        del self._locked[since:]
        self._born = [each for each in self._born if each[0] < since]
        if undone:
            _expire_rows(savepoint.connection, undone)

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
        bound = _bound_to(connection) if _bound else None
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
    session = owner_of(connection)
    leases = None if session is None else _bound.get(session)
    return leases or _bound.get(connection)


def _call_each(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


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
    fenced = fenced_table_of(state)
    return None if fenced is None or state.key is None else row_name(fenced, state.key[1])


def fenced_table_of(state: InstanceState[Any]) -> Table | None:
    """Return the fenced table that an object has a row in."""
    tables = state.mapper.tables
    return next((each for each in tables if isinstance(each, Table) and fenced_table(each)), None)


def writer_of(connection: Connection) -> Writer:
    """Return what the connection's transaction writes under, beginning one where there is none.

    SQLAlchemy would begin it a moment later, when the statement is executed.
    """
    transaction = connection.get_transaction()
    if transaction is None:
        transaction = connection.begin()
    elif not transaction.is_active:
        refuse_inactive(connection)  # what executing would do, before anything is noted
    writer: Writer | None = getattr(connection, WATCHER, None)
    if writer is None or writer.transaction() is not transaction:
        writer = Writer(transaction)
        setattr(connection, WATCHER, writer)
    return writer


def _throw_away_writer(of: ReferenceType[Connection], gone: object) -> None:
    """End with a transaction of an unknown class, which was thrown away; its connection may live on."""
    connection = of()
    writer: Writer | None = getattr(connection, WATCHER, None)
    if writer is not None and writer.transaction is gone:
        delattr(connection, WATCHER)


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
    writer = open_writer(connection)
    if writer is not None:
        writer.lock(names, count, connection.get_nested_transaction())


def note_born(connection: Connection, resources: Callable[[], Iterable[str]] | None) -> None:
    """Note that the connection's transaction has inserted rows whose resources nobody can have locked."""
    writer = open_writer(connection)
    if writer is not None and resources is not None:
        writer.bear(resources, connection.get_nested_transaction())


def open_writer(connection: Connection) -> Writer | None:
    """Return what the connection's transaction writes under, if it has written."""
    writer: Writer | None = getattr(connection, WATCHER, None)
    transaction = None if writer is None else writer.transaction()
    return writer if transaction is not None and transaction is connection.get_transaction() else None


def resource_of(connection: Connection, token: int | None) -> str | None:
    """Return the resource whose token the connection's transaction has used; None if that is not known."""
    writer = open_writer(connection)
    leases = writer.remembered.values() if writer is not None else ()
    return next((lease.resource for lease in leases if lease.fencing_token == token), None)


def report_refusal(connection: Connection, error: FenceError) -> None:
    """Tell of what the database has turned away, with the resource of the token that was refused."""
    report(error, resource=resource_of(connection, getattr(error, "token", None)))


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
