"""`claim` raises the fence of a row, locks the row, and loads its object only then.

The guard compares only rows that are written. A row that was only read may be out of date, and an act outside
of the database cannot be undone. After a claim, older holders are refused, and the row cannot change until
the transaction ends. A second claim locks the row again: a rollback to a savepoint may release the lock.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, overload

from sqlalchemy import BigInteger, Select, Update, bindparam, inspect, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import NoInspectionAvailable, NoResultFound
from sqlalchemy.orm import Mapper

from fencelock._databases import MYSQL
from fencelock.errors import UnfencedWriteError
from fencelock.guard._sqlalchemy import locks_rows
from fencelock.guard.conditions import CLAIM_OPTION, TOKEN_OPTION, unchanged_by_raising
from fencelock.guard.events import report_claim
from fencelock.guard.exact import TOKEN_BIND, SameText, is_text, leaves_rows, newest
from fencelock.guard.refused import refusing
from fencelock.guard.routing import Target, begin_claim, tokens_to_claim
from fencelock.guard.sessions import BYPASS, either, in_both_worlds, session_of
from fencelock.guard.tables import FENCE_COLUMN, FencedTable, fenced_table, is_one_of, new_write_id

T = TypeVar("T")

_WRITE_BIND: Final = "fencelock_write"
_Key: TypeAlias = tuple[Any, ...]
_Bind: TypeAlias = Mapping[str, Any] | None

if TYPE_CHECKING:
    from fencelock.guard.sessions import Async, Blocking

_LOADED_LATER: Final = frozenset({"select", True, "raise", "raise_on_sql", "write_only", "dynamic"})
"""Values of `relationship(lazy=)` that add nothing to the statement that loads an object."""


@overload
def claim(
    session: Blocking, model: type[T], identity: object, *, nowait: bool = ..., bind_arguments: _Bind = ...
) -> T: ...
@overload
def claim(
    session: Blocking, model: type[T], identity: object, *, skip_locked: bool, bind_arguments: _Bind = ...
) -> T | None: ...
@overload
def claim(
    session: Async, model: type[T], identity: object, *, nowait: bool = ..., bind_arguments: _Bind = ...
) -> Coroutine[Any, Any, T]: ...
@overload
def claim(
    session: Async, model: type[T], identity: object, *, skip_locked: bool, bind_arguments: _Bind = ...
) -> Coroutine[Any, Any, T | None]: ...
@either
@refusing
def claim(
    session: Blocking,
    model: type[T],
    identity: object,
    *,
    nowait: bool = False,
    skip_locked: bool = False,
    bind_arguments: _Bind = None,
) -> T | None:
    """Raise a row's fence to the lease's token, lock the row, and return it freshly loaded.

    ```python
    with fenced_lock("order:1"), Session(engine) as session:
        order = claim(session, Order, 1)
        if order.status == "new":
            order.status = "paid"
        session.commit()
    ```

    Older holders are then refused, and no other transaction changes the row until this one ends. The row
    gets a new write id, so objects that others have loaded from it are stale.
    Claim before the transaction reads anything. Under REPEATABLE READ (MariaDB's default), *other* rows are
    read as they were at its first read. On SQLite, a transaction that has read before cannot wait until it
    may write (the remedy is `BEGIN IMMEDIATE`: https://fencelock.github.io/fencelock/sqlite/).
    A claim that returns None (`skip_locked`) has read, so begin another transaction before the next claim.

    The session is flushed first, unless autoflush is off. Columns with `onupdate` keep their values.

    Args:
        session: the session that gets the object. With an `AsyncSession`, the call is awaited:
            `await claim(session, Order, 1)`. Relationships that are not loaded then need `await`, too.
        model: a fenced model.
        identity: the primary key as `Session.get` takes it: a value, a tuple or a dict.
        nowait: raise the database's error at once if the row is locked (not on SQLite).
        skip_locked: return None at once if the row is locked (not on SQLite).
        bind_arguments: chooses the database if the model and the key do not, as in `Session.connection`, such
            as `{"shard_id": "asia"}`. If the claim needs a SELECT, a session that reads from another database
            than it writes to is refused.

    Returns:
        The object; None if `skip_locked` has found the row locked.

    Raises:
        StaleTokenError: if a newer holder has claimed or written the row; `StaleReadError` for a snapshot
            older than the lease.
        UnfencedWriteError: if the row's lease is not held, or each statement commits by itself.
        LockLostError: if the lease is known to be lost.
        CommitInDoubtError: if an earlier transaction with the same token may still be committed.
        TypeError, ValueError: if the model is not fenced, or `identity` is no primary key of it.
        sqlalchemy.exc.NoResultFound: if there is no such row.
        sqlalchemy.exc.InvalidRequestError: if autoflush is off, and the session has changes of the model.
    """
    session = session_of(session, "claim")
    mapper, fenced = fenced_model(model)
    if nowait and skip_locked:
        raise ValueError("nowait raises an error for a locked row, skip_locked returns None: choose one")
    key = key_of(mapper, identity)
    target = begin_claim(session, fenced.table, mapper, bind_arguments, [key])
    connection = target.connection
    if (nowait or skip_locked) and not _try_lock(connection, fenced, key, skip_locked=skip_locked):
        return None
    values = _resource_values(connection, fenced, key)
    if values is not None:
        token = tokens_to_claim(connection, fenced).of_row(values)
        found: T | None = _claim_at_once(target, mapper, fenced, (*key, *values), token)
        if found is None:
            _raise_fences(connection, fenced, [(*key, *values)], token)
            found = next(iter(_load(target, select(model), fenced, [key])), None)
        if found is not None and getattr(found, FENCE_COLUMN) == token:
            template, loaded = fenced.template, mapper.primary_key_from_instance(found)
            asked = template.render(values)
            if template.in_key and (actual := template.render(_resource_values_in(fenced, loaded))) != asked:
                raise UnfencedWriteError(  # the column's type changes values, for instance to lower case
                    f"the claimed row of {fenced.name!r} is guarded by {actual!r}, not by {asked!r}: lock "
                    "the name that the row itself gives"
                )
            report_claim(fenced.name, key, asked, token)
            return found  # else there is no row, or it was inserted after the UPDATE
    raise NoResultFound(f"there is no {mapper.class_.__name__} with the primary key {key!r} to claim")


@in_both_worlds
@refusing
def claim_all(session: Blocking, statement: Select[Any], *, bind_arguments: _Bind = None) -> list[Any]:
    """Claim every row that a query finds, and return those that still match after they are locked.

    ```python
    with fenced_lock("order:1", "order:2"), Session(engine) as session:
        for order in claim_all(session, select(Order).where(Order.customer_id == 1)):
            order.status = "packed"
        session.commit()
    ```

    The rows are claimed in the order of their primary keys, so that two holders of overlapping sets do not
    deadlock. The result has the query's order. Rows that begin to match during the call are neither claimed
    nor returned.

    As with `claim`, call it before the transaction reads anything. On MariaDB and MySQL the query locks each
    row that it scans, so that later reads are as new as the claim. Without an index for its rows, it locks
    the whole table. If two such queries scan rows in different orders, expect a deadlock error. A subquery
    reads without a lock, so run it in an earlier transaction.

    Args:
        session: the session that gets the objects; with an `AsyncSession`, `await claim_all(…)`.
        statement: a SELECT of one fenced model, such as `select(Item).where(Item.order_id == 1)`.
        bind_arguments: chooses the database, as for `claim`; in a `ShardedSession`, one shard for each call.

    Returns:
        The objects that still match, in the order of the query.

    Raises:
        StaleTokenError: if a newer holder has claimed or written one of the rows; `StaleReadError` as for
            `claim`.
        UnfencedWriteError: if the lease of one of the rows is not held, or each statement commits by itself.
        LockLostError: if a lease is known to be lost.
        CommitInDoubtError: as for `claim`.
        TypeError: if the statement is no SELECT of one fenced model.
        sqlalchemy.exc.InvalidRequestError: if autoflush is off, and the session has changes of the model.
    """
    session = session_of(session, "claim_all")
    mapper, fenced = fenced_model(_selected_model(statement))
    columns = (*fenced.table.primary_key, *fenced.template.columns.values())
    target = begin_claim(session, fenced.table, mapper, bind_arguments)
    connection = target.connection
    target.check_reads(statement)
    query = _reading_now(statement.with_only_columns(*columns, maintain_column_froms=True), connection)
    found = session.execute(query, bind_arguments=target.bind_arguments).unique().all()
    if not found:
        return []
    tokens = tokens_to_claim(connection, fenced)
    width = len(fenced.table.primary_key)
    rows = [(tokens.of_row(row[width:]), tuple(row)) for row in sorted(found, key=lambda row: row[:width])]
    for token, some in groupby(rows, key=itemgetter(0)):
        _raise_fences(connection, fenced, [row for _, row in some], token)
    for token, row in rows:
        report_claim(fenced.name, row[:width], fenced.template.render(row[width:]), token)
    token_of = {row[:width]: token for token, row in rows}
    loaded = _load(target, statement.limit(None).offset(None), fenced, list(token_of))
    # Leave out rows that were deleted meanwhile and inserted again, because these were not claimed.
    return [each for each in loaded if getattr(each, FENCE_COLUMN) == token_of[tuple(inspect(each).identity)]]


def fenced_model(model: type[Any]) -> tuple[Mapper[Any], FencedTable]:
    try:
        mapper: Mapper[Any] = inspect(model)
        tables = mapper.tables
    except (NoInspectionAvailable, AttributeError):
        raise TypeError(f"expected a mapped class, not {model!r}") from None
    for table in tables:
        fenced = fenced_table(table)
        if fenced is not None:
            return mapper, fenced
    raise TypeError(f"{mapper.class_.__name__} has no fence; give it the mixin FencedModel")


def _selected_model(statement: object) -> type[Any]:
    described = statement.column_descriptions if isinstance(statement, Select) else []
    entity = described[0]["entity"] if len(described) == 1 else None
    if entity is None or described[0]["expr"] is not entity or not isinstance(entity, type):
        raise TypeError("claim_all takes a SELECT of one model, such as select(Order).where(…)")
    return entity


def key_of(mapper: Mapper[Any], identity: object) -> _Key:
    names = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
    if isinstance(identity, Mapping):
        values = [identity.get(name) for name in names] if identity.keys() == set(names) else []
    else:
        values = list(identity) if isinstance(identity, tuple | list) else [identity]
    if len(values) != len(names) or None in values:
        raise ValueError(
            f"{mapper.class_.__name__} is identified by {', '.join(names)}, and {identity!r} is no such key"
        )
    return tuple(values)


def _resource_values(connection: Connection, fenced: FencedTable, key: _Key) -> _Key | None:
    """Return the values that name a row's resource; None if the row must be read, and does not exist."""
    if fenced.template.in_key:
        return _resource_values_in(fenced, key)
    query = select(*fenced.template.columns.values()).where(*_criteria(fenced))
    row = connection.execute(_reading_now(query, connection), _parameters(key)).first()
    return None if row is None else tuple(row)


def _reading_now(query: Select[Any], connection: Connection) -> Select[Any]:
    """Return the query that precedes a claim, with a lock of its rows on MariaDB and MySQL.

    Without a lock, its snapshot would be older than the claim. A query that locks rows is not changed.
    """
    is_as_wanted = locks_rows(query) or connection.dialect.name not in MYSQL
    # Exclusive: two transactions that share a lock and then write would deadlock.
    return query if is_as_wanted else query.with_for_update()


def _resource_values_in(fenced: FencedTable, key: Sequence[Any]) -> _Key:
    by_column = dict(zip(fenced.table.primary_key, key, strict=True))
    return tuple(by_column[column] for column in fenced.template.columns.values())


def _claim_at_once(target: Target, mapper: Mapper[Any], fenced: FencedTable, row: _Key, token: int) -> Any:
    """Claim and load a row in one statement; return None if that is impossible, or if no row matches.

    A listener for `do_orm_execute` makes it impossible, because the listener may add criteria to a SELECT.
    """
    if not target.connection.dialect.update_returning or leaves_rows(target.connection):
        return None
    if target.session.dispatch.do_orm_execute:
        return None
    if mapper not in fenced.statements:
        fenced.statements[mapper] = _claiming(mapper, fenced)
    statement = fenced.statements[mapper]
    if statement is None:
        return None
    parameters = {**_parameters(row), TOKEN_BIND: token, _WRITE_BIND: new_write_id()}
    return target.session.scalar(statement, parameters, bind_arguments=target.bind_arguments)


def _claiming(mapper: Mapper[Any], fenced: FencedTable) -> Update | None:
    """Return the statement that claims and returns a row; None if one statement cannot load the object."""
    is_plain = (
        mapper.local_table is fenced.table
        and mapper.inherits is None
        and mapper.polymorphic_on is None
        and all(fenced.table.c.contains_column(each.columns[0]) for each in mapper.column_attrs)
        and all(each.lazy in _LOADED_LATER for each in mapper.relationships)
    )
    if not is_plain:
        return None
    token = bindparam(TOKEN_BIND, type_=BigInteger)
    criteria = _criteria(fenced, named=True)
    is_named = criteria[len(fenced.table.primary_key) :]
    criteria += [SameText(each.left, each.right) for each in is_named if is_text(each.left)]
    criteria.append(fenced.fence <= token)
    write_id = bindparam(_WRITE_BIND, type_=BigInteger)
    values = {**unchanged_by_raising(fenced.table), fenced.fence: token, fenced.write: write_id}
    options = {"fencelock": BYPASS, CLAIM_OPTION: True, "synchronize_session": False}
    claiming = update(mapper.class_).where(*criteria).values(values).returning(mapper.class_)
    return claiming.execution_options(populate_existing=True, **options)


def _criteria(fenced: FencedTable, *, named: bool = False) -> list[Any]:
    values = fenced.template.columns.values() if named else ()
    columns = enumerate([*fenced.table.primary_key, *values])
    return [column == bindparam(f"key_{at}") for at, column in columns]


def _parameters(row: _Key) -> dict[str, Any]:
    return {f"key_{at}": value for at, value in enumerate(row)}


def _raise_fences(connection: Connection, fenced: FencedTable, rows: Sequence[_Key], token: int) -> None:
    """Raise the fences of these rows in the given order, so that two claims do not deadlock."""
    if "raising" not in fenced.statements:
        raising = update(fenced.table).where(*_criteria(fenced, named=True))
        fenced.statements["raising"] = raising.values(unchanged_by_raising(fenced.table))
    connection.execute(
        fenced.statements["raising"],
        [*map(_parameters, rows)],
        execution_options={TOKEN_OPTION: token, CLAIM_OPTION: True},
    )


def _try_lock(connection: Connection, fenced: FencedTable, key: _Key, *, skip_locked: bool) -> bool:
    """Try to lock the row without waiting; return False if `skip_locked` has found it locked by another."""
    row = select(*fenced.table.primary_key).where(*_criteria(fenced))
    locking = row.with_for_update(nowait=not skip_locked, skip_locked=skip_locked, key_share=True)
    is_ours = connection.execute(locking, _parameters(key)).first() is not None
    return is_ours or connection.execute(row, _parameters(key)).first() is None


def _load(target: Target, statement: Select[Any], fenced: FencedTable, keys: Sequence[_Key]) -> Sequence[Any]:
    """Load the objects of a query that have these keys, and refresh those that the session has already."""
    query = statement.where(is_one_of(tuple(fenced.table.primary_key), keys))
    query = newest(query.execution_options(populate_existing=True), target.connection)
    target.check_reads(query)
    return target.session.scalars(query, bind_arguments=target.bind_arguments).unique().all()
