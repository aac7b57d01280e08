"""The fence table has a row for each resource whose gate was passed; `gate` claims the row.

A deleted row loses its fence. The resource's row in the fence table stays, so its fence outlives the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import Column, Engine, Insert, MetaData, Table, case, select
from sqlalchemy.engine import Connection, Transaction

from fencelock._databases import MYSQL, RESOURCE
from fencelock._engines import check_metadata
from fencelock._owners import current_owner
from fencelock.errors import FenceError, StaleTokenError, UnfencedWriteError
from fencelock.guard import tables
from fencelock.guard._install import install
from fencelock.guard.events import report_claim
from fencelock.guard.exact import insert_into, leaves_rows, newest
from fencelock.guard.leases import NOT_INHERITED, TransactionLeases, leases_on
from fencelock.guard.refused import refusing
from fencelock.guard.routing import begin_claim, tokens_to_claim
from fencelock.guard.sessions import BYPASS, in_both_worlds, session_of
from fencelock.lease import check_resource

if TYPE_CHECKING:
    from fencelock.guard.sessions import Blocking


def fence_table(metadata: MetaData, *, schema: str | None = None, trigger: bool = False) -> Table:
    """Return the fence table as part of `metadata`, defining it there at the first call.

    ```python
    fence_table(Base.metadata)
    Base.metadata.create_all(engine)
    ```

    Its columns are `resource VARCHAR(255) PRIMARY KEY` (compared exactly, on MariaDB too), and the two
    columns of a fenced model. The table is itself fenced: each row is guarded by its own resource.

    `gate` looks in the schema that all calls of a program, or their `metadata`, name. If they name several,
    or a `schema_translate_map` has the key None, `gate` looks in the default schema.

    Args:
        metadata: the metadata of the models.
        schema: the schema of the table.
        trigger: whether `create_all` makes a trigger that refuses to lower a resource's fence.

    Raises:
        ValueError: `trigger` is neither True nor False.
    """
    check_metadata("fence_table", metadata)
    if trigger not in (False, True):
        raise ValueError(f"the trigger of the fence table is False or True, not {trigger!r}")
    table = _define(metadata, schema)
    _schemas.add(table.schema)
    if trigger:
        install()
        table.c[tables.FENCE_COLUMN].info[tables.TRIGGER_MARK] = True
    return table


def _define(metadata: MetaData, schema: str | None) -> Table:
    table = Table(
        tables.FENCE_TABLE,
        metadata,
        Column("resource", RESOURCE, primary_key=True),
        tables.new_column(tables.FENCE_COLUMN, {}),
        tables.new_column(tables.WRITE_COLUMN, tables.WRITE_MARK),
        schema=schema,
        keep_existing=True,
    )
    if tables.fenced_table(table) is None:
        tables.register(
            tables.FencedTable(table, tables.ResourceTemplate("{resource}", {"resource": table.c.resource}))
        )
    return table


FENCES: Final = _define(MetaData(), None)  # the fence table in the connection's default schema

_schemas: set[str | None] = set()
"""The schemas with which `fence_table` was called; None stands for the default schema."""


@in_both_worlds
@refusing
def gate(
    session: Blocking, resource: str | None = None, *, bind_arguments: Mapping[str, Any] | None = None
) -> None:
    """Claim the resource's own row in the fence table; insert the row if there is none.

    ```python
    with fenced_lock("order:3"), Session(engine) as session:
        gate(session)                            # from now on no older holder passes
        session.add(Order(id=3, status="new"))
        session.commit()
    ```

    The fences of rows cannot guard an INSERT, a DELETE followed by an INSERT, or a group of rows that have no
    fences; the gate can. No other holder passes the gate of this resource until the
    transaction ends, and no older holder ever passes it again. Pass it before you read, as with `claim`.
    `fence_table(Base.metadata)` adds the fence table to your metadata; then run a migration.

    Args:
        session: the session whose transaction passes the gate; with an `AsyncSession`, `await gate(…)`.
        resource: the resource of the gate; by default, that of the only lease held.
        bind_arguments: chooses the database of a session that has several, as in `Session.connection`, such
            as `{"mapper": Order}` or `{"shard_id": "asia"}`.

    Raises:
        StaleTokenError: if a newer holder has passed the gate; `StaleReadError` as for `claim`.
        FenceError: if another open transaction of this thread, task or greenlet has passed the gate:
            this transaction would wait for the other for ever.
        UnfencedWriteError: if the resource's lease is not held, if `resource` is None and several leases are
            held, or if each statement commits by itself.
        LockLostError: if the lease is known to be lost.
        CommitInDoubtError: if an earlier transaction with the same token may still be committed.
        TypeError: if the session has several databases, and `bind_arguments` does not choose one.
        ValueError: if `resource` cannot name a lock.
    """
    install()
    connection = begin_claim(session_of(session, "gate"), FENCES, None, bind_arguments).connection
    schema = tables.schema_of(connection, _schemas)
    fences = FENCES if schema is None else _define(FENCES.metadata, schema)
    fenced = tables.fenced_table(fences)
    assert fenced is not None  # noqa: S101  it is registered where it is defined
    name = _only_resource(connection) if resource is None else check_resource(resource)
    refuse_to_wait_for_oneself(connection, name)
    token = tokens_to_claim(connection, fenced).of_row((name,))
    returns = connection.dialect.insert_returning and not leaves_rows(connection)
    result = connection.execute(
        _passing(fences, connection.dialect.name, returns=returns),
        {"resource": name, tables.FENCE_COLUMN: token, tables.WRITE_COLUMN: tables.new_write_id()},
        execution_options={"fencelock": BYPASS},
    )
    if not returns:
        result = connection.execute(newest(select(fenced.fence).where(fences.c.resource == name), connection))
    if (current := result.scalar_one()) > token:
        raise StaleTokenError(fenced.name, (name,), token, current)
    note_gate(connection, name)
    report_claim(fenced.name, (name,), name, token)


def _only_resource(connection: Connection) -> str:
    held = leases_on(connection).candidates(connection)
    if not held:
        raise UnfencedWriteError(
            f"no lease is held, and a gate needs one; acquire a fenced_lock around it. {NOT_INHERITED}"
        )
    if len(held) > 1:
        raise UnfencedWriteError(f"{', '.join(map(repr, held))} are held; say which one's gate to pass")
    return next(iter(held))


@cache
def _passing(fences: Table, dialect: str, *, returns: bool) -> Insert:
    """Return the statement that inserts a resource's row, or raises its fence, and locks the row.

    A higher fence stays, and then `gate` raises an error. The write id is new each time, so that Galera
    replicates a second passage with the same token. With two statements, callers would deadlock in InnoDB,
    because the first statement would leave a shared lock.
    """
    fence, is_mysql = fences.c[tables.FENCE_COLUMN], dialect in MYSQL
    made = insert_into(fences, dialect)
    given = made.inserted if is_mysql else made.excluded
    new = given[tables.FENCE_COLUMN]
    higher = {
        tables.FENCE_COLUMN: case((fence > new, fence), else_=new),
        tables.WRITE_COLUMN: given[tables.WRITE_COLUMN],
    }
    if is_mysql:
        made = made.on_duplicate_key_update(higher)
    else:
        made = made.on_conflict_do_update(index_elements=["resource"], set_=higher)
    return made.returning(fence) if returns else made  # type: ignore[no-any-return]


_at_gates: WeakKeyDictionary[TransactionLeases, None] = WeakKeyDictionary()
"""The leases of transactions that have passed a gate. A `WeakSet` allows no addition during a loop."""


def note_gate(connection: Connection, resource: str) -> None:
    leases = leases_on(connection)
    leases.gates.add((resource, current_owner()))
    _at_gates[leases] = None


def _at_gate_here(resource: str) -> Iterator[Transaction]:
    """Yield the open transactions of this thread, task or greenlet that have passed a resource's gate."""
    gate = resource, current_owner()
    for reference in _at_gates.keyrefs():
        leases = reference()
        transaction = None if leases is None or gate not in leases.gates else leases.transaction()
        if transaction is not None and transaction.is_active:
            yield transaction


def refuse_to_wait_for_oneself(connection: Connection, resource: str) -> None:
    for transaction in _at_gate_here(resource):
        other = transaction.connection
        if other is not connection and _is_same_database(other.engine, connection.engine):
            raise FenceError(
                f"another transaction of this thread, task or greenlet has passed the gate of {resource!r} "
                f"and is still open: this one would wait for it for ever. Work in its session, or end it"
            )


def _is_same_database(one: Engine, other: Engine) -> bool:
    # Each pool with a database in memory has a database of its own.
    in_memory = one.url.database in {None, "", ":memory:"}
    return one.pool is other.pool or (one.url.set(query={}) == other.url.set(query={}) and not in_memory)
