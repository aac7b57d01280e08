"""UPDATE and DELETE of a fenced table: the condition, the token, and the question why a row was not written.

Apart from `rewrite` because it is the heart of the guard, and from `_insert` because a new row has no fence
to compare with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from sqlalchemy import BigInteger, Delete, Select, Update, bindparam, literal, not_, or_, select, tuple_
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.sql import ColumnElement, FromClause
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.selectable import AliasedReturnsRows

from fencelock.errors import FenceError, StaleTokenError, UnfencedWriteError
from fencelock.guard._carried import CarriedToken
from fencelock.guard._exact import SameText, is_text
from fencelock.guard._statement import (
    TOKEN_BIND,
    TOKEN_OPTION,
    Row,
    assigned,
    criteria,
    is_condition,
    key_of,
    pins,
    reads_more,
    refuse_fence_assignment,
    refuse_foreign_assignments,
    refuse_hiding_text,
    values_of,
    with_text_apart,
)
from fencelock.guard._tables import FENCE_COLUMN, TRANSLATED, FencedTable, ResourceTemplate, row_name
from fencelock.guard.session import Tokens, Writer, rows_known_to

LOCKING_READS: Final = frozenset({"mysql", "mariadb"})
"""Dialects whose plain SELECT reads an old snapshot under the default isolation level (REPEATABLE READ)."""

_ADDED: Final = (SameText, CarriedToken)
"""What `guard` adds to the criteria, besides the condition."""

KEYS_PER_QUERY: Final = 500

_LOOKED_UP: Final = "fencelock_of_"
"""How the parameters begin that carry what the session knows of a row."""


@dataclass(eq=False, slots=True)
class GuardedWrite:
    """An UPDATE or DELETE with the condition, and what is known of the rows that it names.

    Attributes:
        fenced: the table.
        source: the table, or the alias of it, that the statement writes to.
        stamped: the names of the parameters that carry the token.
        moved: the columns of the resource's name that the statement itself assigns, as the template has them.
        where: the criteria without the condition.
        key: the parameters that the WHERE clause says the primary key equals; empty where one is missing, so
            that one execution may write many rows.
        naming: the parameters that make the resource's name, one for each column of the template; None where
            the statement does not tell them.
        looked_up: the names of those among them that the guard has added, whose values the session knows.
        reads_more: whether what it writes may change which rows its WHERE clause is about.
        carries: whether it leaves its token behind for a strict trigger.
    """

    fenced: FencedTable
    source: FromClause
    stamped: tuple[str, ...]
    moved: frozenset[str]
    where: tuple[ColumnElement[bool], ...]
    key: tuple[BindParameter[Any], ...]
    naming: tuple[BindParameter[Any], ...] | None
    looked_up: Mapping[str, int]
    reads_more: bool
    carries: bool

    def stamp(
        self, connection: Connection, rows: Sequence[Row], options: Mapping[str, Any], writer: Writer
    ) -> list[dict[str, Any]]:
        """Return the parameters of each execution with its token added."""
        if self.fenced.template is not None:
            self._refuse_moving(self.fenced.template, rows[0])
        token: int | None = options.get(TOKEN_OPTION)
        if token is None:
            tokens = Tokens(connection, self.fenced, options, writer=writer)
            if self.fenced.template is not None:
                return list(self._stamp_each(connection, rows, tokens))
            token = tokens.of_table()
        stamp = dict.fromkeys(self.stamped, token)
        return [{**row, **stamp} for row in rows]

    def _stamp_each(
        self, connection: Connection, rows: Sequence[Row], tokens: Tokens
    ) -> Iterator[dict[str, Any]]:
        """Add to each execution its own token, and what the session knows of its row where that is asked."""
        if self.naming is None:
            tokens.need_some()
            self._refuse_unnamed()
        known = rows_known_to(connection, self.fenced) if self.looked_up else None
        for row in rows:
            stamped = dict(row)
            if known:
                values = known(self._identity(row))
                if values is None:
                    tokens.need_some()
                    self._refuse_unnamed()
                for name, at in self.looked_up.items():
                    stamped[name] = values[at]
            token = tokens.of_row(values_of(self.naming, stamped))
            for name in self.stamped:
                stamped[name] = token
            yield stamped

    def _refuse_unnamed(self) -> NoReturn:
        template = self.fenced.template
        assert template is not None  # noqa: S101  only asked for tables with a template
        raise UnfencedWriteError(
            f"this statement does not say which resource guards the rows it writes: {self.fenced.name!r} is "
            f"guarded by {template.text!r}, so compare {' and '.join(template.columns)} with == in its WHERE "
            f"clause, or change the rows through their objects"
        )

    def _refuse_moving(self, template: ResourceTemplate, row: Row) -> None:
        """Refuse to change a column that the resource's name is made of."""
        if self.fenced.fence.key not in self.stamped:
            return
        for name, column in template.columns.items():
            if column.key in row or name in self.moved:
                raise UnfencedWriteError(
                    f"{name} of {self.fenced.name!r} must not change: {template.text!r} is made of it, and "
                    f"no one lease guards a row both before and after; delete the row and insert another"
                )

    def _identity(self, row: Row) -> tuple[Any, ...]:
        return values_of(self.key, row)

    def refused(
        self,
        connection: Connection,
        rows: Sequence[Row],
        options: Mapping[str, Any],
    ) -> FenceError | None:
        """Return the error to raise if the condition has turned a row away, or None.

        Only asked for where `wrote_all` is not so.
        """
        passed_on = {TRANSLATED: options.get(TRANSLATED)}
        for query, row, named in self._queries(rows):
            found = connection.execute(newest(query, connection), row, execution_options=passed_on).first()
            if found is not None:
                return self._error(tuple(found), row[TOKEN_BIND], named)
        return None

    def foreseen(
        self, connection: Connection, rows: Sequence[Row], options: Mapping[str, Any]
    ) -> FenceError | None:
        """Return the error to raise if the condition is going to turn a row away, or None.

        Only asked for where `reads_more` is so, and `refused` may find nothing afterwards: a child that was
        turned away while the statement has changed its parent, say, by which the WHERE clause found it. The
        rows are locked, as the statement itself would have done, so what is found here stays true; SQLite has
        no such locks, and nobody else writes once its transaction has begun to.
        """
        query = self._asked().where(*self.where).with_for_update(of=self.source)
        passed_on = {TRANSLATED: options.get(TRANSLATED)}
        for row in rows:
            named = values_of(self.naming or (), row)
            for found in connection.execute(query, row, execution_options=passed_on).all():
                error = self._error(tuple(found), row[TOKEN_BIND], named)
                if error is not None:
                    return error
        return None

    def wrote_all(self, rows: Sequence[Row], result: CursorResult[Any]) -> bool:
        """Tell whether it is known that each execution has written the one row that it named."""
        if not self.key:
            return False
        dialect: Any = result.dialect
        is_told = (  # drivers whose number is not to be trusted apart
            dialect.supports_sane_rowcount
            and (len(rows) == 1 or dialect.supports_sane_multi_rowcount)
            and (dialect.supports_sane_rowcount_returning or not result.returns_rows)
        )
        return bool(is_told) and result.rowcount == len(rows)

    def names(self, rows: Sequence[Row]) -> Iterator[str]:
        """Return the names of the rows that these executions have named."""
        return (row_name(self.fenced.table, self._identity(row)) for row in rows)

    def _queries(self, rows: Sequence[Row]) -> Iterator[tuple[Select[Any], Row, tuple[Any, ...]]]:
        """Return queries for a row that the statement meant and the condition turned away.

        With each go its parameters, and the values that the statement says make the resource's name.
        """
        fence = self.source.c[self.fenced.fence.key]
        above = or_(fence > bindparam(TOKEN_BIND, type_=BigInteger), fence.is_(None))
        asked = self._asked().limit(1)
        if not self.key:
            query = asked.where(*self.where, or_(above, *self._differs(self.naming or ())))
            yield from ((query, row, values_of(self.naming or (), row)) for row in rows)
            return
        groups: dict[tuple[int, tuple[Any, ...]], list[tuple[Any, ...]]] = {}
        for row in rows:
            group = row[TOKEN_BIND], values_of(self.naming or (), row)
            groups.setdefault(group, []).append(self._identity(row))
        for (token, named), identities in groups.items():
            turned_away = or_(above, *self._differs(named))
            for start in range(0, len(identities), KEYS_PER_QUERY):
                some = identities[start : start + KEYS_PER_QUERY]
                yield asked.where(is_one_of(self._key(), some), turned_away), {TOKEN_BIND: token}, named

    def _asked(self) -> Select[Any]:
        """Return a query of what `_error` wants to know of rows, without any criteria."""
        return select(*self._key(), self.source.c[self.fenced.fence.key], *self.naming_columns())

    def _key(self) -> list[ColumnElement[Any]]:
        return [self.source.c[column.key] for column in self.fenced.table.primary_key]

    def naming_columns(self) -> list[ColumnElement[Any]]:
        """Return the columns that make the name of the resource, if the statement tells their values."""
        template = self.fenced.template
        if template is None or self.naming is None:
            return []
        return [self.source.c[column.key] for column in template.columns.values()]

    def _differs(self, named: Sequence[Any]) -> Iterator[ColumnElement[bool]]:
        """Return criteria for a row that another resource guards than the one that these values name."""
        for column, value in zip(self.naming_columns(), named, strict=False):
            yield not_(
                holds(column, value if isinstance(value, BindParameter) else literal(value, column.type))
            )

    def _error(self, found: tuple[Any, ...], token: int, named: tuple[Any, ...]) -> FenceError | None:
        width = len(self.fenced.table.primary_key)
        identity, current, naming = found[:width], found[width], found[width + 1 :]
        template = self.fenced.template
        if template is not None and naming:
            asked, actual = template.render(named), template.render(naming)
            if asked != actual:
                return UnfencedWriteError(
                    f"{self.fenced.name}{identity!r} is guarded by {actual!r}, not by {asked!r} as this "
                    f"write has it; nothing was written, so roll back, and lock what the row itself names"
                )
        if current is None:
            return without_fence(self.fenced, identity)
        if current <= token:
            return None
        return StaleTokenError(self.fenced.name, identity if self.key else None, token, current)


def without_fence(fenced: FencedTable, identity: tuple[Any, ...]) -> FenceError:
    """Return the error for a row whose fence is NULL, so that no token passes."""
    return FenceError(
        f"the fence of {fenced.name}{identity!r} is NULL, which lets no token pass: the column "
        f"{FENCE_COLUMN} was made without NOT NULL DEFAULT 0, as op.add_fence() makes it; in the rows that "
        f"have none, SET {FENCE_COLUMN} = 0, and then make it NOT NULL"
    )


def is_one_of(
    key: Sequence[ColumnElement[Any]], identities: Iterable[tuple[Any, ...]]
) -> ColumnElement[bool]:
    """Return the criterion that a primary key is one of these."""
    return tuple_(*key).in_(identities) if len(key) > 1 else key[0].in_([value for (value,) in identities])


def holds(column: ColumnElement[Any], value: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the criterion that a column holds this value, to the character."""
    return SameText(column, value) if is_text(column) else column == value


def newest(query: Select[Any], connection: Connection) -> Select[Any]:
    """Make a query read what is committed now, not what was when the transaction's snapshot was taken."""
    return query.with_for_update(read=True) if connection.dialect.name in LOCKING_READS else query


def guard(
    statement: Update | Delete, fenced: FencedTable, *, explicit: bool
) -> tuple[Update | Delete, GuardedWrite]:
    """Return the statement with the condition, and what is known of it.

    The condition is that the fence is not above the token; and that the row is guarded by the resource that
    the token is of, as far as the WHERE clause does not say so by itself: see `_exact` for text, and
    `_naming` for rows that are named by their key alone.

    Args:
        statement: an UPDATE or DELETE of the table.
        fenced: the table.
        explicit: whether the caller vouches for the token, so that no resource is looked for.
    """
    changed = [column for column, _ in assigned(statement)]
    refuse_fence_assignment(map(key_of, changed), fenced)
    refuse_foreign_assignments(statement)
    refuse_hiding_text(statement)
    source = statement.table if isinstance(statement.table, AliasedReturnsRows) else fenced.table
    fence = source.c[fenced.fence.key]
    statement, parts = with_text_apart(statement, criteria(statement))
    where = tuple(part for part in parts if not (is_condition(part, fence) or isinstance(part, _ADDED)))
    pinned = dict(pins(where, source, fenced))
    key = tuple([pinned[column.key] for column in fenced.table.primary_key if column.key in pinned])
    keyed = bool(key) and len(key) == len(fenced.table.primary_key)
    naming = _naming(fenced, pinned, look_up=keyed and not explicit)
    write = GuardedWrite(
        fenced=fenced,
        source=source,
        stamped=(fenced.fence.key, TOKEN_BIND) if isinstance(statement, Update) else (TOKEN_BIND,),
        moved=_moved(fenced, changed),
        where=where,
        key=key if keyed else (),
        naming=naming,
        looked_up={bind.key: at for at, bind in enumerate(naming or ()) if bind.key.startswith(_LOOKED_UP)},
        reads_more=not keyed and reads_more(where, source),
        carries=fenced.strict,
    )
    if not any(is_condition(part, fence) for part in parts):
        statement = statement.where(fence <= bindparam(TOKEN_BIND, type_=BigInteger))
    statement = statement.where(*_same_resource(write))
    if write.carries and not any(isinstance(part, CarriedToken) for part in parts):
        statement = statement.where(CarriedToken())
    return statement, write


def _moved(fenced: FencedTable, changed: Sequence[Any]) -> frozenset[str]:
    """Return which columns of the resource's name are assigned, by columns or by names of either kind."""
    template = fenced.template
    keys = {key_of(column) for column in changed}
    names = {name for name in changed if isinstance(name, str)}  # attributes may be called like other columns
    columns = template.columns.items() if template else ()
    return frozenset(name for name, column in columns if column.key in keys or name in names)


def _naming(
    fenced: FencedTable, pinned: Mapping[str, BindParameter[Any]], *, look_up: bool
) -> tuple[BindParameter[Any], ...] | None:
    """Return the parameters that make the resource's name.

    Where the primary key is pinned and does not tell it, the session knows the row, or did: the row may have
    been deleted and another inserted with its key, which another resource guards. So what it knows becomes
    a parameter of the statement, for the database to compare.
    """
    if fenced.template is None:
        return None
    columns = fenced.template.columns
    if not look_up and any(column.key not in pinned for column in columns.values()):
        return None
    return tuple(
        pinned.get(column.key, bindparam(f"{_LOOKED_UP}{name}", type_=column.type))
        for name, column in columns.items()
    )


def _same_resource(write: GuardedWrite) -> Iterator[ColumnElement[bool]]:
    """Return what the WHERE clause does not say yet of the columns that make the resource's name."""
    columns = write.naming_columns()
    for column, bind in zip(columns, write.naming or (), strict=True):
        if bind.key in write.looked_up or is_text(column):
            yield holds(column, bind)
