"""`upsert`: INSERT, or UPDATE if the row exists, guarded and in one statement.

PostgreSQL and SQLite have `INSERT … ON CONFLICT DO UPDATE … WHERE fence <= new fence`. MariaDB and MySQL have
no WHERE there, so columns are assigned `IF(fence <= new fence, new value, old value)`, from left to right. So
the fence comes last. A query afterwards finds the rows that were refused.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import ClauseElement, Column, Insert, UniqueConstraint, and_, func, select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Mapper

from fencelock._databases import MYSQL, SUPPORTED
from fencelock.errors import FenceError, StaleTokenError, UnfencedWriteError
from fencelock.guard import tables
from fencelock.guard._claim import fenced_model
from fencelock.guard._install import install
from fencelock.guard.conditions import passes, raised, refuse_cutting_off
from fencelock.guard.exact import holds, insert_into, is_text, newest
from fencelock.guard.leases import TokenLookup, refuse_autocommit
from fencelock.guard.refused import refusing
from fencelock.guard.routing import target_of
from fencelock.guard.sessions import BYPASS, in_both_worlds, session_of
from fencelock.guard.verdict import KEYS_PER_QUERY, without_fence

if TYPE_CHECKING:
    from fencelock.guard.sessions import Blocking

_OWN: Final = frozenset({tables.FENCE_COLUMN, tables.WRITE_COLUMN})
_Key = tuple[Any, ...]
_Columns = tuple[Column[Any], ...]


@in_both_worlds
@refusing
def upsert(
    session: Blocking,
    model: type[Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    index_elements: Sequence[str] | None = None,
    set_: Mapping[str, Any] | None = None,
    bind_arguments: Mapping[str, Any] | None = None,
) -> None:
    """Insert rows, or update those whose key exists, unless a newer holder has fenced them.

    ```python
    with fenced_lock("order:1", "order:4"), Session(engine) as session:
        upsert(session, Order, [{"id": 1, "status": "paid"}, {"id": 4, "status": "new"}])
        session.commit()
    ```

    All or nothing: if one row is refused, nothing of the transaction (or of the innermost savepoint) can be
    committed any more. The rows are sorted by their columns and keys, so that two callers with the same
    rows wait for each other and do not deadlock. The session's objects of these rows are expired. Columns
    that a row does not name keep their values, or get their defaults in a new row. `onupdate` has no effect,
    as in SQLAlchemy's ON CONFLICT. As with any INSERT, a stale holder may insert a deleted row again: pass
    the `gate` first if that matters.

    Args:
        session: the session whose transaction writes the rows; with an `AsyncSession`, `await upsert(…)`.
        model: a fenced model whose rows are in one table.
        rows: the values of each row, by the names of attributes. The key and the attributes that
            `__fence_resource__` names must be among them.
        index_elements: the attributes of the key, which have a unique constraint or unique index; by default
            the primary key.
        set_: new values for a row that exists, by the names of attributes, in place of those in `rows`. SQL
            is allowed: `{"hits": Page.hits + 1}`. MariaDB and MySQL assign in this order, and an expression
            sees the values that were assigned before it.
        bind_arguments: chooses the database, as for `claim`; in a `ShardedSession`, one shard for each call.

    Raises:
        StaleTokenError: if a newer holder has claimed or written one of the rows.
        UnfencedWriteError: if the lease of one of the rows is not held, an existing row is guarded by another
            resource, or the connection is in AUTOCOMMIT.
        LockLostError: if a lease is known to be lost.
        FenceError: if the fence of a row is NULL, or the database considers a key equal to another one. On
            MariaDB and MySQL also if another row has the same value in another unique column; other
            databases raise their own IntegrityError.
        ValueError: if a row lacks its key, names the fence or an unknown column, has SQL as a value, or is
            given twice; or if no constraint or index makes `index_elements` unique.
        TypeError: if the model has no fence, or its rows are in several tables; or if it is unclear which
            database is meant.
        NotImplementedError: on a database other than PostgreSQL, SQLite, MariaDB and MySQL.
    """
    install()
    session = session_of(session, "upsert")
    mapper, fenced = fenced_model(model)
    if isinstance(rows, Mapping) or not all(isinstance(row, Mapping) for row in rows):
        raise TypeError(f"upsert takes a list of rows, each a dict of values, not {reprlib.repr(rows)}")
    if len(mapper.tables) > 1:
        raise TypeError(f"the rows of {mapper.class_.__name__} are in several tables; use session.merge()")
    if not rows:
        return
    if session.autoflush:
        session.flush()
    key = _key(mapper, fenced, index_elements)
    by_key = _by_key(mapper, fenced, rows, key)
    target = target_of(session, fenced.table, mapper, bind_arguments, () if index_elements else by_key)
    connection = target.connection
    tokens = TokenLookup(connection, fenced)
    refuse_autocommit(tokens.leases, connection, connection.get_execution_options(), fenced.name)
    token_of = {each: _token(tokens, row) for each, row in by_key.items()}
    changes = None if set_ is None else _changes(mapper, fenced, key, set_)

    def columns(each: _Key) -> list[str]:
        return sorted(by_key[each])

    for _, keys in groupby(sorted(by_key, key=columns), columns):
        some = sorted(keys)
        statement = _statement(connection.dialect.name, fenced, key, by_key[some[0]], changes)
        own = {fenced.write.key: tables.new_write_id()}
        stamped = [{**by_key[each], fenced.fence.key: token_of[each], **own} for each in some]
        connection.execute(statement, stamped, execution_options={"fencelock": BYPASS})
    written = list(_check(connection, fenced, key, by_key, token_of))
    shard = target.bind_arguments.get("shard_id")
    for identity in written:
        key_in_session = mapper.identity_key_from_primary_key(identity, identity_token=shard)
        known = session.identity_map.get(key_in_session)
        if known is not None:
            session.expire(known)


def _key(mapper: Mapper[Any], fenced: tables.FencedTable, names: Sequence[str] | None) -> _Columns:
    """Return the columns that decide whether a row exists; ValueError if they are not unique."""
    primary = tuple(fenced.table.primary_key)
    if names is None:
        return primary
    asked = tuple(_by_column(mapper, dict.fromkeys(names)))
    unique = [set(primary)]
    unique += [set(each.columns) for each in fenced.table.constraints if isinstance(each, UniqueConstraint)]
    unique += [set(each.columns) for each in fenced.table.indexes if each.unique and not each.dialect_kwargs]
    if set(asked) not in unique:
        raise ValueError(
            f"index_elements={names!r} of {mapper.class_.__name__}: name the attributes of its primary key, "
            f"or of one unique constraint or index (without a condition) of {fenced.name!r}"
        )
    return asked


def _by_column(mapper: Mapper[Any], values: Mapping[str, Any]) -> dict[Column[Any], Any]:
    if unknown := [name for name in values if name not in mapper.columns or name in _OWN]:
        raise ValueError(
            f"{unknown[0]!r} is no column of {mapper.class_.__name__} that can be given; "
            f"{' and '.join(sorted(_OWN))} are the guard's"
        )
    return {mapper.columns[name]: value for name, value in values.items()}


def _changes(
    mapper: Mapper[Any], fenced: tables.FencedTable, key: _Columns, values: Mapping[str, Any]
) -> dict[str, Any]:
    by_column = _by_column(mapper, values)
    if kept := [column.key for column in by_column if column in _kept(fenced, key)]:
        raise ValueError(f"{kept[0]!r} of a row of {fenced.name!r} must not change: leave it out of set_")
    changes = {
        column.key: value if (made := _sql_of(value)) is None else made for column, value in by_column.items()
    }
    refuse_cutting_off(changes.values())
    return changes


def _sql_of(value: Any) -> Any:
    """Return the SQL of a value, if it is SQL or the attribute of a model; None for a plain value."""
    return getattr(value, "__clause_element__", lambda: value if isinstance(value, ClauseElement) else None)()


def _by_key(
    mapper: Mapper[Any], fenced: tables.FencedTable, rows: Sequence[Mapping[str, Any]], key: _Columns
) -> dict[_Key, dict[str, Any]]:
    known: dict[_Key, dict[str, Any]] = {}
    for row in rows:
        values = {column.key: value for column, value in _by_column(mapper, row).items()}
        if made := [name for name, value in row.items() if _sql_of(value) is not None]:
            raise ValueError(
                f"{made[0]!r} of a row to upsert is SQL, and a new row has nothing to compute it from: give "
                f"the value of a new row, and set_={{{made[0]!r}: …}} for an existing row"
            )
        if mapper.polymorphic_on is not None and mapper.polymorphic_on.key in fenced.table.c:
            values.setdefault(mapper.polymorphic_on.key, mapper.polymorphic_identity)
        found = [values.get(column.key) for column in key]
        if None in found:
            names = ", ".join(mapper.get_property_by_column(column).key for column in key)
            raise ValueError(f"a row to upsert needs its whole key ({names}), and this row lacks it: {row!r}")
        named = tuple([tables.spelling(column, value) for column, value in zip(key, found, strict=True)])
        if named in known:
            raise ValueError(f"{mapper.class_.__name__} {named!r} is given twice: give each row once")
        known[named] = values
    return known


def _token(tokens: TokenLookup, row: Mapping[str, Any]) -> int:
    template = tokens.fenced.template
    for name, column in template.columns.items():
        if row.get(column.key) is None:
            raise ValueError(
                f"the lease of a row of {tokens.fenced.name!r} depends on {name}: give {name} in each row"
            )
    return tokens.of_row(tuple([row[column.key] for column in template.columns.values()]))


def _statement(
    dialect: str,
    fenced: tables.FencedTable,
    key: _Columns,
    row: Mapping[str, Any],
    changes: Mapping[str, Any] | None,
) -> Insert:
    kept = {column.key for column in _kept(fenced, key)}
    if dialect not in SUPPORTED:
        raise NotImplementedError(f"upsert knows PostgreSQL, SQLite, MariaDB and MySQL, not {dialect}")
    made = insert_into(fenced.table, dialect)
    new = made.inserted if dialect in MYSQL else made.excluded
    token = new[fenced.fence.key]
    named = dict.fromkeys([*key, *fenced.template.columns.values()])
    same = [holds(column, new[column.key]) for column in named]
    may_pass = and_(passes(fenced.fence, token, optional=fenced.is_optional), *same)
    written = {name: new[name] for name in row if name not in kept} if changes is None else {**changes}
    written[fenced.write.key] = new[fenced.write.key]
    # The fence comes last, because MariaDB and MySQL assign from left to right.
    written[fenced.fence.key] = raised(fenced.fence, token, optional=fenced.is_optional)
    if dialect not in MYSQL:
        return made.on_conflict_do_update(  # type: ignore[no-any-return]
            index_elements=[*key], set_=written, where=may_pass
        )
    assigned = [(name, func.if_(may_pass, value, fenced.table.c[name])) for name, value in written.items()]
    if fenced.is_strict:  # by the lower token of a refused row, the trigger tells that the writer is stale
        assigned[-1] = (fenced.fence.key, written[fenced.fence.key])
    return made.on_duplicate_key_update(assigned)  # type: ignore[no-any-return]


def _kept(fenced: tables.FencedTable, key: _Columns) -> set[Column[Any]]:
    """Return the columns that never change: the keys, and those that name the resource."""
    return {*key, *fenced.template.columns.values(), *fenced.table.primary_key}


def _check(
    connection: Connection,
    fenced: tables.FencedTable,
    key: _Columns,
    rows: Mapping[_Key, Mapping[str, Any]],
    token_of: Mapping[_Key, int],
) -> Iterator[_Key]:
    """Yield the primary keys of the written rows, as the database has them; raise if a row was refused."""
    template, primary = fenced.template, tuple(fenced.table.primary_key)
    of_resource = tuple(template.columns.values())
    texts = [at for at, column in enumerate(key) if is_text(column)]
    keys = iter(rows)
    while some := tuple(islice(keys, KEYS_PER_QUERY)):
        columns = (*key, *of_resource, *primary, fenced.fence)
        query = newest(select(*columns).where(tables.is_one_of(key, some)), connection)
        found = connection.execute(query).all()
        resources = {
            each: template.render([rows[each][column.key] for column in of_resource]) for each in some
        }
        tokens = {resources[each]: token_of[each] for each in some}
        asked_for, written = [{tuple([each[at] for at in texts]) for each in rows} for rows in (some, found)]
        if len(found) < len(some) or not written <= asked_for:  # a refused row is found, too
            raise FenceError(
                f"not all rows were written to {fenced.name!r}: other rows have the same values in a unique "
                f"column, or keys that the database considers equal"
            )
        for row in found:
            named, identity, current = tuple(row[: len(key)]), tuple(row[-1 - len(primary) : -1]), row[-1]
            actual = template.render(row[len(key) : len(key) + len(of_resource)])
            asked = {resources[named]} if named in resources else tokens
            if actual not in asked:  # compared before the fence, which may be equal by chance
                raise UnfencedWriteError(
                    f"{fenced.name}{identity!r} is guarded by {actual!r}, not by the resource that the "
                    "given row names; nothing was written"
                )
            if current is None:
                raise without_fence(fenced, identity)
            if current != tokens[actual] and not (fenced.is_optional and tokens[actual] == tables.NO_LEASE):
                raise StaleTokenError(fenced.name, identity, tokens[actual], current)
            yield identity
