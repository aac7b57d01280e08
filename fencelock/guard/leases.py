"""The leases under which a transaction writes: those of its first writes, noted on its connection.

The context variable of held leases is not enough: it does not reach other threads, leaks out of generators,
and is empty after the block. Later writes use the lease of the first write, even if a newer lease is held by
then. Another holder may have written between the grants, and only the older token makes the database refuse.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

from sqlalchemy.engine import Connection, Transaction, TwoPhaseTransaction
from sqlalchemy.orm import Session

from fencelock import _events
from fencelock._databases import MYSQL, leaves_doubt
from fencelock._events import CommitInDoubt
from fencelock.errors import StaleReadError, UnfencedWriteError
from fencelock.guard._sqlalchemy import isolation_on_connect, refuse_inactive
from fencelock.guard.events import report_without_lease
from fencelock.guard.exact import keeps_snapshot
from fencelock.guard.sessions import blocking, notes_of, owner_of, started
from fencelock.guard.tables import NO_LEASE, FencedTable, new_write_id
from fencelock.lease import Lease, held_by_resource, newest, was_left

if TYPE_CHECKING:
    from fencelock.guard.sessions import AnySession

_bound: WeakKeyDictionary[Session | Connection, tuple[Lease, ...]] = WeakKeyDictionary()
"""The leases to which sessions and connections were bound."""

_LEASES: Final = "_fencelock_leases"
"""The attribute of a connection with the `TransactionLeases` of its transaction, or of an earlier one."""


def bind(target: AnySession, *leases: Lease) -> None:
    """Bind leases to a session or connection: they guard its writes, whatever leases are held.

    ```python
    def pay(lease: Lease) -> None:
        with Session(engine) as session:
            bind(session, lease)
            session.get_one(Order, 1).status = "paid"
            session.commit()

    with fenced_lock("order:1"), ThreadPoolExecutor() as threads:
        threads.submit(pay, assert_held("order:1")).result()
    ```

    Use it in other threads, executors and generators, because held leases do not reach them. Use it also for
    tokens of other sources (`Lease("order:1", token)`). The binding lasts as long as the session or
    connection, or until the next `bind`; `bind(session)` without leases undoes it. An open transaction
    forgets the leases that it used before. Sessions that share a connection need the same leases, because
    those of the session that last began or flushed on it count.

    `bind` does not keep the lock: the holder releases the lease as before. The release waits for transactions
    that have written under the lease by then, and for no others.

    Raises:
        TypeError: an argument is no lease, or `target` is no session or connection.
    """
    for lease in leases:
        if not isinstance(lease, Lease):
            raise TypeError(f"bind takes leases, such as fenced_lock(...).lease, not {type(lease).__name__}")
    bound = blocking(target)
    if leases:
        _bound[bound] = leases
    else:
        _bound.pop(bound, None)


class TransactionLeases:
    """The leases under which one transaction writes. The object may outlive SQLAlchemy's `Transaction`."""

    def __init__(self, transaction: Transaction) -> None:
        self.transaction: ref[Transaction] = ref(transaction)
        self.has_transaction = False  # whether the connection is known not to commit each statement
        self.shard: object = None  # the shard of the objects that are being written
        self.used: dict[str, Lease] = {}  # by resource
        self.gates: set[tuple[str, object]] = set()  # the passed gates: resource and owner
        # Resources of rows that the transaction has inserted with the fence 0.
        self.unlockable: set[str] = set()
        self.receipts: dict[str, Any] = {}  # those that the transaction has made, by key
        self._savepoints: list[tuple[str, dict[str, Any]]] = []  # with what was noted before each
        self._bound: tuple[Lease, ...] | None = None
        self._needs: set[Lease] = set()
        # The leases refer to this mark, because a reference to the object itself would keep it alive.
        self._mark = object()

    def __del__(self) -> None:
        """Let go of an abandoned transaction's leases in a new thread: `__del__` may run anywhere."""
        if calls := self._let_go(committed=False):
            with suppress(RuntimeError):  # too many threads; or an exit, which releases everything
                _thread.start_new_thread(_call_each, (calls,))

    def candidates(self, connection: Connection) -> dict[str, Lease]:
        """Return the leases that may guard a write now, by resource."""
        bound = None
        if _bound:
            session = owner_of(connection)
            bound = (None if session is None else _bound.get(session)) or _bound.get(connection)
        if bound != self._bound:
            self.used.clear()
            self._bound = bound
        return {**(held_by_resource() if bound is None else newest(bound)), **self.used}

    def at_savepoint(self, verb: str, name: str) -> None:
        """At SAVEPOINT, keep a copy of the notes; at ROLLBACK TO, return to it.

        The leases that the transaction needs stay needed until it ends.
        """
        names = [known for known, _ in self._savepoints]
        at = len(names) - 1 - names[::-1].index(name) if name in names else None
        if verb == "SAVEPOINT":
            noted = {each: copy(getattr(self, each)) for each in ("used", "gates", "unlockable", "receipts")}
            self._savepoints.append((name, noted))
        elif at is not None:
            del self._savepoints[at + (verb == "ROLLBACK") :]
            if verb == "ROLLBACK":
                for each, noted in self._savepoints[at][1].items():
                    setattr(self, each, copy(noted))

    @property
    def is_needed(self) -> bool:
        """Whether the transaction has written something under a lease, or has tried to."""
        return bool(self._needs)

    @property
    def bound_instead(self) -> str:
        """A hint, if held leases do not count because others were bound; else an empty text."""
        if self._bound is None or not (held := held_by_resource()):
            return ""
        bound = ", ".join(repr(lease.resource) for lease in self._bound)
        return (
            f"{', '.join(map(repr, held))} {'is' if len(held) == 1 else 'are'} held here, but this session "
            f"or connection is bound to a lease of {bound}, and only that counts: bind(session) undoes it"
        )

    def need(self, lease: Lease) -> None:
        """Note that a lease must not be released before the transaction ends."""
        if lease not in self._needs:
            self._needs.add(lease)
            lease._need(self._mark)

    def remember(self, resource: str, lease: Lease) -> None:
        """Note a lease under which the transaction writes; UnfencedWriteError if the lease was released."""
        if self.used.get(resource) is not lease:
            self.need(lease)
            if not lease._usable:  # the lease was usable when `candidates` found it
                raise UnfencedWriteError(
                    f"the lease of {resource!r} has been released meanwhile, before anything was written "
                    f"under it in this transaction; release it after the flush"
                )
            self.used[resource] = lease

    def end(self, *, committed: bool, in_doubt: bool) -> None:
        for lease in self._needs if in_doubt else ():
            lease._doubt()
            if _events.listeners:
                _events.tell(CommitInDoubt(lease.resource, lease.token))
        _call_each(self._let_go(committed=committed))

    def _let_go(self, *, committed: bool) -> list[Callable[[], object]]:
        calls = [call for lease in self._needs for call in lease._let_go(self._mark, committed=committed)]
        self._needs.clear()
        return calls


def _call_each(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


def leases_on(connection: Connection) -> TransactionLeases:
    """Return the `TransactionLeases` of a connection's transaction; begin a transaction if there is none."""
    transaction = connection.get_transaction() or connection.begin()
    if not transaction.is_active:
        refuse_inactive(connection)  # as an execution would, but before anything is noted
    leases: TransactionLeases | None = getattr(connection, _LEASES, None)
    if leases is None or leases.transaction() is not transaction:
        leases = TransactionLeases(transaction)
        setattr(connection, _LEASES, leases)
    return leases


def open_leases(connection: Connection) -> TransactionLeases | None:
    leases: TransactionLeases | None = getattr(connection, _LEASES, None)
    transaction = None if leases is None else leases.transaction()
    return leases if transaction is not None and transaction is connection.get_transaction() else None


def on_savepoint(connection: Connection, verb: str, name: str) -> None:
    """Note a SAVEPOINT, its RELEASE or a ROLLBACK to it, just before the database gets it.

    pysqlite and aiosqlite send no BEGIN before a SAVEPOINT. If it is the first statement of a transaction,
    its RELEASE would be a COMMIT, and a later refusal or rollback would leave half of the transaction.
    """
    transaction = connection.get_transaction()
    if transaction is None or not transaction.is_active:
        return
    if verb.upper() == "SAVEPOINT" and connection.dialect.name == "sqlite":
        driver: Any = connection.connection.driver_connection
        if not (driver.in_transaction or _commits_by_itself(connection, connection.get_execution_options())):
            connection.exec_driver_sql("BEGIN")
    leases_on(connection).at_savepoint(verb.upper(), name)


def on_end(transaction: Transaction, error: BaseException | None, *, commits: bool) -> None:
    leases: TransactionLeases | None = getattr(transaction.connection, _LEASES, None)
    if leases is None or transaction.is_active or leases.transaction() is not transaction:
        return
    connection = transaction.connection
    refused = error if commits else None
    if refused is not None and not (connection.invalidated or isinstance(transaction, TwoPhaseTransaction)):
        # If a COMMIT violates a deferred foreign key, SQLite leaves the transaction open. The connection's
        # next COMMIT would write it after all.
        with suppress(Exception):
            connection.dialect.do_rollback(connection.connection)
    was_cancelled = connection.invalidated and not isinstance(refused, Exception)
    in_doubt = refused is not None and (leaves_doubt(refused) or was_cancelled)
    leases.end(committed=commits and error is None, in_doubt=in_doubt)


def end_early(session: Session, *, committed: bool) -> None:
    """Let go of the leases under which a session has written in the outer transaction of a test."""
    for connection in tuple(notes_of(session).connections):
        if (leases := open_leases(connection)) is not None:
            delattr(connection, _LEASES)  # the next write uses the leases that are held then
            leases_on(connection).receipts = leases.receipts
            leases.end(committed=committed, in_doubt=False)


def note_token(connection: Connection, token: int) -> None:
    """Note that a transaction writes with this token, and so needs the leases that have the token."""
    leases = leases_on(connection)
    for lease in leases.candidates(connection).values():
        if lease.token == token:
            leases.need(lease)


def refuse_autocommit(
    leases: TransactionLeases, connection: Connection, options: Mapping[str, Any], table: str
) -> None:
    if not leases.has_transaction:
        if _commits_by_itself(connection, options):
            raise UnfencedWriteError(
                f"a write to {table!r} needs a transaction: on an AUTOCOMMIT connection the rows "
                f"before a refused one would stay written"
            )
        leases.has_transaction = True


def _commits_by_itself(connection: Connection, options: Mapping[str, Any]) -> bool:
    if (options.get("isolation_level") or isolation_on_connect(connection.dialect)) == "AUTOCOMMIT":
        return True
    driver: Any = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":  # in autocommit, too, a listener may have sent BEGIN
        driver = getattr(driver, "driver_connection", driver)  # the connection of aiosqlite
        by_itself = getattr(driver, "autocommit", None) is True or driver.isolation_level is None
        return by_itself and not driver.in_transaction
    if connection.dialect.name in MYSQL:
        return hasattr(driver, "get_autocommit") and bool(driver.get_autocommit())
    return getattr(driver, "autocommit", None) is True


NOT_INHERITED: Final = (
    "Leases follow into tasks and asyncio.to_thread, but not into other threads or executors: there, hand "
    "one over with bind(session, lock.lease)"
)
"""The hint in errors if no lease is held."""

_SEEDS: Final = (
    "Writes without rivals, such as seeds, may bypass the guard: with fencelock.bypass(session): …"
)

_OLD_SNAPSHOT: Final = (
    "this transaction began before the lease of {!r} was granted, and its isolation level reads all rows "
    "as they were then: roll back before you lock, or open the session inside the lock"
)


class TokenLookup:
    """Finds the tokens for the rows of one statement, or of one flush.

    With `claiming`, each row needs a held lease. `given` is an explicit token, which counts for all rows.
    """

    __slots__ = (
        *("_candidates", "_claiming", "_connection", "_found", "_used"),
        *("fenced", "given", "is_optional", "write_id", "leases"),
    )

    def __init__(
        self, connection: Connection, fenced: FencedTable, *, claiming: bool = False, given: int | None = None
    ) -> None:
        self.fenced = fenced
        self.given = given
        self.is_optional: bool = not claiming and fenced.is_optional  # rows may be written under no lease
        self._connection = connection
        self.leases: TransactionLeases = leases_on(connection)
        self.write_id: int = new_write_id()
        self._claiming = claiming
        self._candidates = self.leases.candidates(connection)
        self._found: dict[tuple[Any, ...], int] = {}
        self._used: list[Lease] = []

    def check(self) -> None:
        for lease in self._used:
            lease._token_to_write()

    @property
    def hold_some(self) -> bool:
        return any(map(self.fenced.template.match, self._candidates))

    def does_without(self, resource: str | None) -> bool:
        """Tell whether a row may be written without a lease, and report the write if so.

        A row may not if a lease of another row is held: most likely the resource's name is wrong. It also may
        not if the block of its lease was left during this transaction.
        """
        is_free = (
            self.is_optional
            and not self.hold_some
            and not (resource is not None and was_left(resource, since=started(self._connection)))
        )
        if is_free:
            report_without_lease(self.fenced.name, resource)
        return is_free

    def need_some(self, resource: str | None = None, *, is_new: bool = False) -> None:
        if self._candidates:
            return
        template = self.fenced.template
        if resource is None and not template.columns:
            resource = template.render(())
        hint = self.leases.bound_instead or f"{NOT_INHERITED}. {_SEEDS}"
        lock = f"fenced_lock(…) of its resource, {template.text!r} with the row's values,"
        if is_new:
            lock = "any fenced_lock (the database makes the key of this row, so it has no name yet)"
        if resource is not None:
            lock = f"fenced_lock({resource!r})"
            if was_left(resource):
                hint = "A block of this lock was left: if it made this change, flush or commit inside it"
        raise UnfencedWriteError(
            f"no lease is held for this write to {self.fenced.name!r}; acquire {lock} around it. {hint}"
        )

    def of_new_row(self) -> int:
        """Return the fence 0 for a row whose resource has no name yet, because the database makes its key.

        Later writes to the row in this transaction get the fence 0, too. The transaction needs all held
        leases, because it is unknown which of them guards the row.
        """
        if self._candidates or not self.does_without(None):
            self.need_some(is_new=True)
        for lease in self._candidates.values():
            self.leases.need(lease)
        return NO_LEASE

    def of_row(self, values: tuple[Any, ...]) -> int:
        token = self._found.get(values)
        if token is None:
            if self._connection.dialect.name in MYSQL:
                self.fenced.template.refuse_fractions(values)
            token = self._found[values] = self.of_resource(self.fenced.template.render(values))
        return token

    def holds(self, values: tuple[Any, ...] | None) -> bool:
        return values is not None and self.fenced.template.render(values) in self._candidates

    def only_resource(self) -> str:
        self.need_some()
        if len(self._candidates) > 1:
            raise UnfencedWriteError(
                f"{', '.join(map(repr, self._candidates))} are held, and this text does not say which of "
                f"them guards the rows that it writes: fenced_text(…, resource=…)"
            )
        return next(iter(self._candidates))

    def of_resource(self, resource: str) -> int:
        lease = self._candidates.get(resource)
        if lease is None:
            if not self._claiming and resource in self.leases.unlockable:
                return self.of_new_row()
            if self.does_without(resource):
                return NO_LEASE
            self.need_some(resource)
            how = f"acquire fenced_lock({resource!r}) around it"
            if any(name.rpartition("#")[0] == resource for name in self._candidates):
                how = f"a shared lock is for reading: leave it, and take fenced_lock({resource!r}, readers=…)"
            raise UnfencedWriteError(
                f"this write to {self.fenced.name!r} needs the lease of {resource!r}, and the held leases "
                f"are {', '.join(map(repr, self._candidates))}; "
                f"{how}{self.leases.bound_instead and '. '}{self.leases.bound_instead}"
            )
        lease._guarded = True  # also if it is lost: then the guard has refused a write
        token = lease._token_to_write()
        if (
            self._claiming
            and started(self._connection) < lease._granted_at
            and keeps_snapshot(self._connection)
        ):
            detail = _OLD_SNAPSHOT.format(resource)
            raise StaleReadError(self.fenced.name, None, token, None, None, detail=detail)
        self.leases.remember(resource, lease)
        self._used.append(lease)
        return token
