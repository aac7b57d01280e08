"""UPDATE and DELETE of a fenced table: the condition, the token, and the question why a row was not written.

Apart from `rewrite` because it is the heart of the guard, and from `_insert` because a new row has no fence
to compare with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import BigInteger, Delete, Select, Update, bindparam, select, tuple_
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.sql import ColumnElement, FromClause
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.selectable import AliasedReturnsRows

from fencelock.errors import StaleTokenError, UnfencedWriteError
from fencelock.guard._statement import (
    TOKEN_BIND,
    TOKEN_OPTION,
    Row,
    assigned,
    criteria,
    is_condition,
    key_of,
    pins,
    refuse_fence_assignment,
    refuse_foreign_assignments,
    value_of,
)
from fencelock.guard._tables import FencedTable
from fencelock.guard.session import Tokens, row_of

LOCKING_READS: Final = frozenset({"mysql", "mariadb"})
"""Dialects whose plain SELECT reads an old snapshot under the default isolation level (REPEATABLE READ)."""

_KEYS_PER_QUERY: Final = 500


@dataclass(eq=False, slots=True)
class GuardedWrite:
    """An UPDATE or DELETE with the condition, and what is known of the rows that it names.

    Attributes:
        fenced: the table.
        source: the table, or the alias of it, that the statement writes to.
        stamped: the names of the parameters that carry the token.
        changed: the columns that the statement itself assigns, by key.
        where: the criteria without the condition.
        pins: by column key, the parameter that the WHERE clause says the column equals.
        named: the parameters that make the resource's name, where the WHERE clause pins them all.
        keyed: whether the whole primary key is pinned, so that one execution writes one row at most.
    """

    fenced: FencedTable
    source: FromClause
    stamped: tuple[str, ...]
    changed: frozenset[str]
    where: tuple[ColumnElement[bool], ...]
    pins: Mapping[str, BindParameter[Any]]
    named: tuple[tuple[str, BindParameter[Any]], ...] | None
    keyed: bool

    def stamp(
        self, connection: Connection, rows: Sequence[Row], options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the parameters of each execution with its token added."""
        self._refuse_moving(rows[0])
        token: int | None = options.get(TOKEN_OPTION)
        if token is None:
            tokens = Tokens(connection, self.fenced)
            if self.fenced.template is not None:
                return [self._with_token(row, tokens.of_row(self._values(connection, row))) for row in rows]
            token = tokens.of_table()
        stamp = dict.fromkeys(self.stamped, token)
        return [{**row, **stamp} for row in rows]

    def _with_token(self, row: Row, token: int) -> dict[str, Any]:
        return {**row, **dict.fromkeys(self.stamped, token)}

    def _values(self, connection: Connection, row: Row) -> Mapping[str, Any]:
        template = self.fenced.template
        assert template is not None  # noqa: S101  only asked for tables with a template
        if self.named is not None:
            return {name: value_of(bind, row) for name, bind in self.named}
        known = row_of(connection, self.fenced, self._identity(row)) if self.keyed else None
        if known is None:
            raise UnfencedWriteError(
                f"this statement does not say which resource guards the rows it writes: {self.fenced.name!r} "
                f"is guarded by {template.text!r}, so compare {' and '.join(template.columns)} with == in "
                f"its WHERE clause, or change the rows through their objects"
            )
        return known

    def _refuse_moving(self, row: Row) -> None:
        """Refuse to change a column that the resource's name is made of."""
        template = self.fenced.template
        if template is None or self.fenced.fence.key not in self.stamped:
            return
        for name, column in template.columns.items():
            if column.key in row or name in self.changed or column.key in self.changed:
                raise UnfencedWriteError(
                    f"{name} of {self.fenced.name!r} must not change: {template.text!r} is made of it, and "
                    f"no one lease guards a row both before and after; delete the row and insert another"
                )

    def _identity(self, row: Row) -> tuple[Any, ...]:
        return tuple(value_of(self.pins[column.key], row) for column in self.fenced.table.primary_key)

    def refused(
        self,
        connection: Connection,
        rows: Sequence[Row],
        options: Mapping[str, Any],
        result: CursorResult[Any],
    ) -> StaleTokenError | None:
        """Return the error to raise if the fence has turned a row away, or None."""
        if self.keyed and _matched(result, len(rows)) == len(rows):
            return None
        passed_on = {"schema_translate_map": options.get("schema_translate_map")}
        for query, values in self._queries(rows):
            found = connection.execute(newest(query, connection), values, execution_options=passed_on).first()
            if found is not None:
                *identity, current = found
                return StaleTokenError(
                    self.fenced.name,
                    tuple(identity) if self.keyed else None,
                    values[TOKEN_BIND],
                    current,
                )
        return None

    def _queries(self, rows: Sequence[Row]) -> Iterator[tuple[Select[Any], Row]]:
        """Return queries for a row that the statement meant and whose fence is above its token."""
        key = [self.source.c[column.key] for column in self.fenced.table.primary_key]
        fence = self.source.c[self.fenced.fence.key]
        above = select(*key, fence).where(fence > bindparam(TOKEN_BIND, type_=BigInteger)).limit(1)
        if not self.keyed:
            query = above.where(*self.where)
            yield from ((query, row) for row in rows)
            return
        by_token: dict[int, list[tuple[Any, ...]]] = {}
        for row in rows:
            by_token.setdefault(row[TOKEN_BIND], []).append(self._identity(row))
        for token, identities in by_token.items():
            for start in range(0, len(identities), _KEYS_PER_QUERY):
                some = identities[start : start + _KEYS_PER_QUERY]
                one_of = tuple_(*key).in_(some) if len(key) > 1 else key[0].in_([value for (value,) in some])
                yield above.where(one_of), {TOKEN_BIND: token}


def _matched(result: CursorResult[Any], executions: int) -> int:
    """Return how many rows the statement matched, or -1 where the driver's number is not to be trusted."""
    dialect: Any = result.dialect
    trusted = (
        dialect.supports_sane_rowcount
        and (executions == 1 or dialect.supports_sane_multi_rowcount)
        and (not result.returns_rows or dialect.supports_sane_rowcount_returning)
    )
    return result.rowcount if trusted else -1


def newest(query: Select[Any], connection: Connection) -> Select[Any]:
    """Make a query read what is committed now, not what was when the transaction's snapshot was taken."""
    return query.with_for_update(read=True) if connection.dialect.name in LOCKING_READS else query


def guard(statement: Update | Delete, fenced: FencedTable) -> tuple[Update | Delete, GuardedWrite]:
    """Return the statement with the condition, and what is known of it."""
    changed = frozenset(key_of(column) for column, _ in assigned(statement))
    refuse_fence_assignment(changed, fenced)
    refuse_foreign_assignments(statement)
    source = statement.table if isinstance(statement.table, AliasedReturnsRows) else fenced.table
    parts = criteria(statement)
    where = tuple(part for part in parts if not is_condition(part))
    pinned = dict(pins(where, source, fenced))
    key = {column.key for column in fenced.table.primary_key}
    write = GuardedWrite(
        fenced=fenced,
        source=source,
        stamped=(fenced.fence.key, TOKEN_BIND) if isinstance(statement, Update) else (TOKEN_BIND,),
        changed=changed,
        where=where,
        pins=pinned,
        named=_named(fenced, pinned),
        keyed=bool(key) and key <= pinned.keys(),
    )
    if len(where) == len(parts):
        statement = statement.where(source.c[fenced.fence.key] <= bindparam(TOKEN_BIND, type_=BigInteger))
    return statement, write


def _named(
    fenced: FencedTable, pinned: Mapping[str, BindParameter[Any]]
) -> tuple[tuple[str, BindParameter[Any]], ...] | None:
    template = fenced.template
    if template is None or any(column.key not in pinned for column in template.columns.values()):
        return None
    return tuple((name, pinned[column.key]) for name, column in template.columns.items())
