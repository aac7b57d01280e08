"""INSERT, or UPDATE where the row is there already: guarded, in the one statement that databases have for it.

`INSERT … ON CONFLICT DO UPDATE … WHERE fence <= new fence` on PostgreSQL and SQLite. MariaDB and MySQL have
no WHERE there: each column keeps its value unless the fence lets it go, and the fence itself is written last,
for they assign from left to right. What was turned away is found out by one query afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, Final

from sqlalchemy import BigInteger, ColumnElement, Insert, and_, case, func, literal_column, or_, select
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Mapper, Session, scoped_session

from fencelock.errors import FenceError, StaleTokenError, UnfencedWriteError
from fencelock.guard._connecting import target_of
from fencelock.guard._install import install
from fencelock.guard.claim import fenced_model
from fencelock.guard.dialects import LOCKING_READS, holds, is_text, newest
from fencelock.guard.endings import refusing
from fencelock.guard.leases import Tokens, begin_writing, report_refusal
from fencelock.guard.sessions import BYPASS, session_of
from fencelock.guard.tables import FENCE_COLUMN, NO_LEASE, WRITE_COLUMN, FencedTable, new_write_id, spelling
from fencelock.guard.verdict import KEYS_PER_QUERY, is_one_of, without_fence

_OWN: Final = frozenset({FENCE_COLUMN, WRITE_COLUMN})
_NO_LEASE: Final = literal_column(str(NO_LEASE), BigInteger)
_Key = tuple[Any, ...]


@refusing
def upsert(
    session: Session | scoped_session[Any],
    model: type[Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    bind_arguments: Mapping[str, Any] | None = None,
) -> None:
    """Insert rows, or update those whose primary key is there already, unless a newer holder has fenced them.

    All or nothing: where one is turned away, nothing of the transaction (or of the innermost savepoint) can
    be committed any more. The rows are written in the order of their keys, so that two who write the same
    ones wait for each other. Objects that the session has of them are expired. Columns that a row does not
    name keep their values, or get their defaults in a new row; `onupdate` has no effect, as SQLAlchemy has it
    for ON CONFLICT. As with any INSERT, a stale holder may bring back a row that was deleted: pass the `gate`
    first where that matters.

    Args:
        session: whose transaction writes them. With an `AsyncSession`: `await session.run_sync(upsert, …)`.
        model: a fenced model with a table of its own.
        rows: for each the values by the names of attributes, the primary key and what `__fence_resource__`
            names included.
        bind_arguments: which database, as for `claim`; of a `ShardedSession`, one shard at a time.

    Raises:
        StaleTokenError: if a newer holder has claimed or written one of the rows.
        UnfencedWriteError: if the lease of one of the rows is not held, or the row that is there is guarded
            by another resource.
        LockLostError: if a lease is known to be lost.
        FenceError: (MariaDB, MySQL) if another row has the same value in another unique column. Elsewhere
            that is the database's own IntegrityError.
        ValueError: if a row lacks its key, names what is no column or the fence, or is given twice.
        TypeError: if the model has no fence, or its rows are in several tables.
        NotImplementedError: on a database other than PostgreSQL, SQLite, MariaDB and MySQL.
    """
    install()
    session = session_of(session, "upsert")
    mapper, fenced = fenced_model(model)
    if len(mapper.tables) > 1:
        raise TypeError(f"the rows of {mapper.class_.__name__} are in several tables; use session.merge()")
    if not rows:
        return
    if session.autoflush:
        session.flush()
    by_key = _by_key(mapper, fenced, rows)
    target = target_of(session, fenced.table, mapper, bind_arguments, by_key)
    connection = target.connection
    begin_writing(connection, connection.get_execution_options(), fenced)
    tokens = Tokens(connection, fenced)
    token_of = {key: _token(tokens, row) for key, row in by_key.items()}

    def columns(key: _Key) -> list[str]:
        return sorted(by_key[key])

    for _, keys in groupby(sorted(by_key, key=columns), columns):
        some = sorted(keys)
        statement = _statement(connection.dialect.name, fenced, by_key[some[0]])
        own = {fenced.write.key: new_write_id()}
        stamped = [{**by_key[key], fenced.fence.key: token_of[key], **own} for key in some]
        connection.execute(statement, stamped, execution_options={"fencelock": BYPASS})
    try:
        written = list(_check(connection, fenced, by_key, token_of))
    except FenceError as error:
        report_refusal(connection, error)
        raise
    shard = target.bind_arguments.get("shard_id")
    for identity in written:
        key_in_session = mapper.identity_key_from_primary_key(identity, identity_token=shard)
        known = session.identity_map.get(key_in_session)
        if known is not None:
            session.expire(known)


def _by_key(
    mapper: Mapper[Any], fenced: FencedTable, rows: Sequence[Mapping[str, Any]]
) -> dict[_Key, dict[str, Any]]:
    """Return the rows as their columns have them, by primary key."""
    known: dict[_Key, dict[str, Any]] = {}
    for row in rows:
        if unknown := [name for name in row if name not in mapper.columns or name in _OWN]:
            raise ValueError(
                f"{unknown[0]!r} is no column of {mapper.class_.__name__} that can be given; "
                f"{' and '.join(sorted(_OWN))} are the guard's"
            )
        values = {mapper.columns[name].key: value for name, value in row.items()}
        if mapper.polymorphic_on is not None and mapper.polymorphic_on.key in fenced.table.c:
            values.setdefault(mapper.polymorphic_on.key, mapper.polymorphic_identity)
        key = tuple([values.get(column.key) for column in fenced.table.primary_key])
        if None in key:
            names = ", ".join(mapper.get_property_by_column(column).key for column in mapper.primary_key)
            raise ValueError(
                f"a row to upsert needs its whole primary key ({names}), and this has not: {row!r}"
            )
        key = tuple(
            [spelling(column, value) for column, value in zip(fenced.table.primary_key, key, strict=True)]
        )
        if key in known:
            raise ValueError(f"{mapper.class_.__name__} {key!r} is given twice; which of them is it to be?")
        known[key] = values
    return known


def _token(tokens: Tokens, row: Mapping[str, Any]) -> int:
    template = tokens.fenced.template
    for name, column in template.columns.items():
        if row.get(column.key) is None:
            raise ValueError(
                f"which lease guards a row of {tokens.fenced.name!r} hangs on {name}: give it in each row"
            )
    return tokens.of_row(tuple([row[column.key] for column in template.columns.values()]))


def _statement(dialect: str, fenced: FencedTable, row: Mapping[str, Any]) -> Insert:
    """Return the statement for rows that have values for the same columns."""
    table = fenced.table
    kept = {column.key for column in _identifying(fenced)}
    names = [name for name in row if name not in kept]
    if dialect in LOCKING_READS:
        made = mysql.insert(table)
        new, passes = made.inserted, _lets_pass(fenced, made.inserted)
        written = {name: new[name] for name in names} | _stamps(fenced, new)
        # The fence comes last, because MariaDB assigns from left to right.
        assigned: list[tuple[str, ColumnElement[Any]]] = [
            (name, func.if_(passes, value, table.c[name])) for name, value in written.items()
        ]
        if fenced.is_strict:  # its trigger sees what is turned away, and then says that the fence is lower
            assigned[-1] = (fenced.fence.key, written[fenced.fence.key])
        return made.on_duplicate_key_update(assigned)
    if dialect not in {"postgresql", "sqlite"}:
        raise NotImplementedError(f"upsert knows PostgreSQL, SQLite, MariaDB and MySQL, not {dialect}")
    statement = postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
    new = statement.excluded
    return statement.on_conflict_do_update(
        index_elements=list(table.primary_key),
        set_={name: new[name] for name in names} | _stamps(fenced, new),
        where=_lets_pass(fenced, new),
    )


def _identifying(fenced: FencedTable) -> dict[ColumnElement[Any], None]:
    """Return the columns of the primary key and of the resource's name, which a row keeps."""
    naming = fenced.template.columns.values()
    return dict.fromkeys([*fenced.table.primary_key, *naming])


def _stamps(fenced: FencedTable, new: Any) -> dict[str, ColumnElement[Any]]:
    """Return what a row that is written gets as write id and fence, in this order."""
    fence = new[fenced.fence.key]
    if fenced.is_optional:
        fence = case((fence == _NO_LEASE, fenced.fence), else_=fence)
    return {fenced.write.key: new[fenced.write.key], fenced.fence.key: fence}


def _lets_pass(fenced: FencedTable, new: Any) -> ColumnElement[bool]:
    """Return the criterion for a row that may be written: the same key, resource and no higher fence."""
    same = [holds(column, new[column.key]) for column in _identifying(fenced)]
    passes = fenced.fence <= new[fenced.fence.key]
    if fenced.is_optional:
        passes = or_(passes, new[fenced.fence.key] == _NO_LEASE)
    return and_(passes, *same)


def _check(
    connection: Connection,
    fenced: FencedTable,
    rows: Mapping[_Key, Mapping[str, Any]],
    token_of: Mapping[_Key, int],
) -> Iterator[_Key]:
    """Yield the primary keys, as the database has them, of rows that were written with their tokens."""
    key = tuple(fenced.table.primary_key)
    template = fenced.template
    naming = tuple(template.columns.values())
    texts = [at for at, column in enumerate(key) if is_text(column)]
    keys = iter(rows)
    while some := tuple(islice(keys, KEYS_PER_QUERY)):
        query = newest(select(*key, fenced.fence, *naming).where(is_one_of(key, some)), connection)
        found = connection.execute(query).all()
        resources = {each: template.render([rows[each][column.key] for column in naming]) for each in some}
        tokens = {resources[each]: token_of[each] for each in some}
        for row in found:
            identity, current = tuple(row[: len(key)]), row[len(key)]
            actual = template.render(row[len(key) + 1 :])
            asked = {resources[identity]} if identity in resources else tokens
            if actual not in asked:  # before the fence, which may be equal by chance
                raise UnfencedWriteError(
                    f"{fenced.name}{identity!r} is guarded by {actual!r}, and not by what the row to "
                    f"upsert names; nothing was written"
                )
            if current is None:
                raise without_fence(fenced, identity)
            if current != tokens[actual] and not (fenced.is_optional and tokens[actual] == NO_LEASE):
                raise StaleTokenError(fenced.name, identity, tokens[actual], current)
            yield identity
        written = {tuple([row[at] for at in texts]) for row in found}
        if len(found) < len(some) or not written <= {tuple([each[at] for at in texts]) for each in some}:
            raise FenceError(
                f"not all rows were written to {fenced.name!r}: others have the same values in a unique "
                f"column, or keys that the database takes for the same"
            )
