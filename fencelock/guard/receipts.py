"""Receipts: each is a row that is committed together with its work, so that the work is done once.

The key is inserted first. A second transaction with the same key waits until the first has ended. Then it
finds the first one's receipt, or makes its own. So no receipt is ever "pending", and a crash leaves none.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, date, datetime, time, timedelta
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from fencelock._checks import EVER, check_seconds
from fencelock._databases import MYSQL, RESOURCE, TIME, waited_in_vain
from fencelock._engines import check_metadata
from fencelock.errors import FenceError, LockTimeoutError, ReceiptMismatchError
from fencelock.guard._install import install
from fencelock.guard.exact import insert_into, newest
from fencelock.guard.leases import leases_on, open_leases, refuse_autocommit
from fencelock.guard.refused import refuse, refusing
from fencelock.guard.routing import target_of
from fencelock.guard.sessions import connections_of, in_both_worlds, session_of
from fencelock.guard.tables import RECEIPT_TABLE, schema_of
from fencelock.lease import check_resource

if TYPE_CHECKING:
    from fencelock.guard.sessions import Blocking

_EXACT: Final = Context(MAX_PREC, Emin=MIN_EMIN, Emax=MAX_EMAX)  # the program's own context may round
MAX_RESULT: Final = 65_536  # the most bytes of a result's JSON, which is ASCII

_schemas: set[str | None] = set()
"""The schemas with which `receipt_table` was called; None stands for the default schema."""


def receipt_table(metadata: sa.MetaData, *, schema: str | None = None) -> sa.Table:
    """Return the table of receipts as part of `metadata`, defining it there at the first call.

    ```python
    receipt_table(Base.metadata)
    Base.metadata.create_all(engine)
    ```

    A row has the `key` of `once`, the SHA-256 of its `fingerprint`, the fencing `token` of the work (NULL
    without a lease), its `result`, and in `at` the time when it was made (except on PostgreSQL, in UTC).

    Args:
        metadata: the metadata of the models. If all calls of a program name one schema, `once` looks for the
            table there, else in the default schema of the connection.
        schema: the schema of the table.
    """
    check_metadata("receipt_table", metadata)
    table = _define(metadata, schema)
    _schemas.add(table.schema)
    return table


def _define(metadata: sa.MetaData, schema: str | None) -> sa.Table:
    return sa.Table(
        RECEIPT_TABLE,
        metadata,
        sa.Column("key", RESOURCE, primary_key=True),
        sa.Column("fingerprint", sa.String(64)),
        sa.Column("token", sa.BigInteger, autoincrement=False),
        sa.Column("result", sa.JSON(none_as_null=True)),
        sa.Column("at", TIME, nullable=False),
        schema=schema,
        keep_existing=True,
    )


_DEFAULT: Final = _define(sa.MetaData(), None)


def _table_of(connection: Connection) -> sa.Table:
    schema = schema_of(connection, _schemas)
    return _DEFAULT if schema is None else _define(_DEFAULT.metadata, schema)


class Receipt:
    """The receipt that `once` returns, with the result of the work.

    Attributes:
        key: the key, as given to `once`.
        done: whether the work was done before, or earlier in this transaction. Then only return `result`.
    """

    __slots__ = ("_result", "done", "is_stored", "is_working", "key")

    def __init__(self, key: str, *, done: bool, result: Any = None) -> None:
        self.key: str = key
        self.done: bool = done
        self._result = result
        self.is_stored: bool = False  # whether the COMMIT has begun
        self.is_working: bool = False  # whether the function of a `fenced_once` does the work now

    def __repr__(self) -> str:
        return f"<Receipt {self.key!r} {'done' if self.done else 'new'}>"

    def __bool__(self) -> bool:
        raise TypeError("a receipt is neither true nor false: ask receipt.done")

    @property
    def result(self) -> Any:
        """The result of the work: plain data of JSON, as later calls get it; None if none was assigned.

        Assign it before the COMMIT, which stores it. A later change of the assigned object is not noticed.

        Raises:
            TypeError: the assigned value is no plain data of JSON.
            ValueError: its JSON is longer than 64 KiB; or the work was done before, or committed.
        """
        return self._result

    @result.setter
    def result(self, value: Any) -> None:
        if self.done:
            raise ValueError(
                f"the work of the receipt {self.key!r} was done before, and its result cannot change"
            )
        if self.is_stored:
            raise ValueError(f"the receipt {self.key!r} is committed: assign its result before the COMMIT")
        try:
            text = json.dumps(value, allow_nan=False)
            json.dumps(value, ensure_ascii=False).encode()  # no database stores half of a surrogate pair
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"the result of {self.key!r} cannot be written as JSON: {error}") from None
        if len(text) > MAX_RESULT:
            raise ValueError(
                f"the result of {self.key!r} takes {len(text)} bytes of JSON, and a receipt keeps 64 KiB: "
                "store it in a table of your own, and its key in the receipt"
            )
        self._result = json.loads(text)
        self.is_working = False


def _store_results(connection: Connection, *_: Any) -> None:
    """Store results just before the COMMIT, so that no savepoint can undo it."""
    leases = open_leases(connection)
    for receipt in leases.receipts.values() if leases is not None else ():
        if receipt.is_working:
            raise FenceError(
                f"commit() inside the function would store the receipt {receipt.key!r} before its work is "
                "done: leave the COMMIT to fenced_once"
            )
        receipt.is_stored = True
        stored = {"its": receipt.key, "found": receipt.result}
        if connection.execute(_storing(_table_of(connection)), stored).rowcount != 1:
            raise FenceError(
                f"the receipt {receipt.key!r} is gone, because the database, or a statement that it does "
                "not tell of, has ended the transaction meanwhile: begin again"
            )


@in_both_worlds
@refusing
def once(
    session: Blocking, key: str, *, fingerprint: Any = None, bind_arguments: Mapping[str, Any] | None = None
) -> Receipt:
    """Return the receipt of a key, which says whether the work of that key was done before.

    ```python
    with fenced_transaction(engine, "account:1") as session:
        receipt = once(session, "deposit:r-18", fingerprint={"account": 1, "cents": 500})
        if not receipt.done:
            account = session.get_one(Account, 1)
            account.balance += 500
            receipt.result = {"balance": account.balance}
        answer = receipt.result
    ```

    The receipt is written in the transaction of the session, so it is committed with the work, or not at all.
    Another transaction with the same key waits for the end of this one, until the database's timeout.
    No lease is needed. If one is held, its token is kept in the receipt.

    Call it before the work, and before any read on which the work depends. `receipt_table(Base.metadata)`
    adds the table to your metadata; then run a migration.

    Args:
        session: the session whose transaction does the work; with an `AsyncSession`, `await once(…)`.
        key: 1 to 255 characters, the same in each try: an idempotency key, the id of a task, a slot of a
            schedule.
        fingerprint: the request, as plain data (also dates, Decimal, UUID). A call with the same key and
            another fingerprint is refused. None is not compared.
        bind_arguments: chooses the database of a session that has several, as in `Session.connection`.

    Raises:
        ReceiptMismatchError: the key belongs to another request. The transaction can only be rolled back.
        LockTimeoutError: another transaction with the key is still open, and the database's timeout is over.
        LockLostError: the lease is known to be lost.
        CommitInDoubtError: an earlier transaction with the lease's token may still be committed.
        UnfencedWriteError: each statement of the connection commits by itself.
        sqlalchemy.exc.DBAPIError: another transaction with the key has committed, and this one cannot see it
            because of its isolation (a serialization failure): begin again.
        TypeError, ValueError: the key could not name a lock, or the fingerprint is no plain data.
    """
    install()
    its = session_of(session, "once")
    name, digest = check_resource(key), _digest(fingerprint)
    connection = target_of(its, _DEFAULT, None, bind_arguments, ()).connection
    table = _table_of(connection)
    values = {"key": name, "fingerprint": digest, "token": _token(connection), "at": datetime.now(UTC)}
    made: dict[str, Receipt] = leases_on(connection).receipts
    while not _insert(connection, table, values):
        query = sa.select(table.c.fingerprint, table.c.result).where(table.c.key == name)
        row = connection.execute(newest(query, connection)).one_or_none()
        if row is not None:  # else the row was pruned meanwhile
            if None not in {digest, row.fingerprint} and digest != row.fingerprint:
                raise ReceiptMismatchError(name)
            ours = made.get(name)
            return Receipt(name, done=True, result=row.result if ours is None else ours.result)
    receipt = made[name] = Receipt(name, done=False)
    for moment in ("commit", "prepare_twophase"):
        if not sa.event.contains(connection, moment, _store_results):
            sa.event.listen(connection, moment, _store_results)
    return receipt


def _token(connection: Connection) -> int | None:
    """Return the token of the first held lease, and note the lease as needed; None if no lease is held."""
    leases = leases_on(connection)
    refuse_autocommit(leases, connection, connection.get_execution_options(), RECEIPT_TABLE)
    for resource, lease in leases.candidates(connection).items():
        token = lease._token_to_write()
        leases.remember(resource, lease)
        return token
    return None


def _insert(connection: Connection, table: sa.Table, values: dict[str, Any]) -> bool:
    dialect = connection.dialect.name
    try:
        result: Any = connection.execute(_insertion(table, dialect), values)
        if dialect == "postgresql":
            return result.first() is not None
        return bool(result.rowcount == 1 if dialect == "sqlite" else not result.lastrowid)
    except DBAPIError as error:
        if not waited_in_vain(error):
            raise
        raise LockTimeoutError(
            f"another transaction with the receipt {values['key']!r} is still open, and the database waits "
            "no longer: roll back, and try again later"
        ) from error


@cache
def _insertion(table: sa.Table, dialect: str) -> sa.Insert:
    """Return an INSERT that does nothing if the key exists.

    On MariaDB and MySQL `lastrowid` is 1 if the key exists, and 0 if the row is new. On SQLite the count of
    rows tells, because of `exact.leaves_rows`.
    """
    key = table.c.key
    insert = insert_into(table, dialect)
    if dialect in MYSQL:
        # This UPDATE changes nothing. After INSERT IGNORE, callers would deadlock on InnoDB's shared locks.
        nothing = sa.func.if_(sa.func.last_insert_id(1), key, key)
        return insert.on_duplicate_key_update(key=nothing)  # type: ignore[no-any-return]
    insert = insert.on_conflict_do_nothing(index_elements=["key"])
    return insert.inline() if dialect == "sqlite" else insert.returning(key)  # type: ignore[no-any-return]


@contextmanager
def working(session: Session, receipt: Receipt) -> Iterator[None]:
    """Refuse in a block that the work commits, or goes on after a rollback, which has undone its receipt."""

    def check(*began: Any) -> None:
        of_each = [open_leases(each) for each in connections_of(session)]
        if not any(leases and leases.receipts.get(receipt.key) is receipt for leases in of_each):
            error = FenceError(
                f"rollback() inside the function has undone the receipt {receipt.key!r}: what may fail goes "
                "into a savepoint, session.begin_nested()"
            )
            for connection in began[2:]:  # after the session and its transaction
                refuse(connection, error)
            raise error

    receipt.is_working = True
    sa.event.listen(session, "after_begin", check)
    try:
        yield
    finally:
        sa.event.remove(session, "after_begin", check)
    check()


@cache
def _storing(table: sa.Table) -> sa.Update:
    return sa.update(table).where(table.c.key == sa.bindparam("its")).values(result=sa.bindparam("found"))


@in_both_worlds
def prune_receipts(session: Blocking | Connection, older_than: float) -> int:
    """Delete the receipts that were made longer than `older_than` seconds ago; return how many.

    ```python
    with Session(engine) as session:
        prune_receipts(session, older_than=30 * 86_400)
        session.commit()
    ```

    The keys of these receipts can be used again, so a later retry does its work once more. With an
    `AsyncSession`, `await prune_receipts(…)`.

    Returns:
        The number of receipts that were deleted.

    Raises:
        TypeError, ValueError: `older_than` is no number of seconds from 0.
    """
    age = timedelta(seconds=min(check_seconds("older_than", older_than, zero=True), EVER))
    if isinstance(session, Connection):
        connection = session
    else:
        its = session_of(session, "prune_receipts")
        connection = target_of(its, _DEFAULT, None, None, ()).connection
    table = _table_of(connection)
    return connection.execute(sa.delete(table).where(table.c.at < datetime.now(UTC) - age)).rowcount


def _digest(fingerprint: Any) -> str | None:
    """Return the SHA-256 of a fingerprint. The order of its keys makes no difference."""
    if fingerprint is None:
        return None
    try:
        text = json.dumps(fingerprint, sort_keys=True, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"a fingerprint is plain data, such as {{'account': 1, 'cents': 500}}: {error}"
        ) from None
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: object) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Decimal) and value.is_finite():
        return str(_EXACT.normalize(value) or 0)
    if isinstance(value, datetime) and value.tzinfo is not None:
        return str(value.astimezone(UTC))
    if isinstance(value, date | time | UUID):  # a datetime is a date
        return str(value)
    raise TypeError(f"{type(value).__name__} is none")
