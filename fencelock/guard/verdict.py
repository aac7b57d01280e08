"""Finds out why a guarded write has not written a row: the fence, another resource, another write, no row.

It fetches the keys, fences and write ids of the rows that the statement names, and compares them. If the
statement names each row by its key, and the driver has counted all of them, no query is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Select, literal, not_, or_, select
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.sql import ColumnElement

from fencelock.errors import FenceError, StaleReadError, StaleTokenError, UnfencedWriteError
from fencelock.guard.conditions import LOADED_BIND, GuardedStatement, Row, values_of
from fencelock.guard.exact import TOKEN_BIND, holds, newest
from fencelock.guard.objects import FlushTokens
from fencelock.guard.tables import FENCE_COLUMN, NO_LEASE, TRANSLATED, FencedTable, is_one_of

KEYS_PER_QUERY: Final = 500


@dataclass(eq=False, slots=True)
class Verdict:
    """Asks the database whether the guard's condition has kept a statement from writing rows, and why."""

    form: GuardedStatement
    rows: Sequence[Row]
    connection: Connection
    options: Mapping[str, Any]
    flush: FlushTokens | None

    def of(self, result: CursorResult[Any]) -> FenceError | None:
        """Return the error of an executed statement: a row was refused, or a flushed object has none."""
        dialect: Any = self.connection.dialect
        is_counted = self._counts() and (dialect.supports_sane_rowcount_returning or not result.returns_rows)
        if not self.form.key:
            return self._find_refused()
        if is_counted and result.rowcount == len(self.rows):
            if self.flush is not None:
                self.flush.note_sent()
            return None
        present = self._rows_present()
        by_key = {self.form.identity(row): row for row in self.rows}
        for found in present:
            row = by_key.get(found[: len(self.form.key)])  # None if the database spells the key differently
            for each in self.rows if row is None else [row]:
                if (refusal := self._error(found, each)) is not None:
                    return refusal
        is_short = is_counted and result.rowcount < len(self.rows)
        moves_key = any(column.key in self.rows[0] for column in self.form.fenced.table.primary_key)
        is_gone = self.form.assigns and len(present) < len(self.rows) and not moves_key
        if is_counted and self._gone == len(self.rows) - result.rowcount:
            return None
        if (
            is_short
            and self.form.names_keys
            and self.form.origin != "claim"
            and len(present) == len(self.rows)
        ):
            return self._skipped()
        is_missed = self.form.is_of_flush and (is_short or (is_gone and not is_counted))
        if self.flush is not None and not is_missed:
            self.flush.note_sent()
        return self._missing_rows(present) if is_missed else None

    def _skipped(self) -> FenceError:
        """Return the error if the database has not written a row that is there, and passes the guard."""
        table, row = self.form.fenced.name, self.rows[0]
        if self.form.is_of_flush:
            return FenceError(
                f"the database has not written all rows of {table!r}, though nothing else has written them: "
                "a policy (row level security), a rule or a trigger of the database hides or skips a row"
            )
        known = self.form.identity(row) if len(self.rows) == 1 else None
        detail = (
            "another transaction has deleted the row and inserted it again while this statement waited, or a "
            "policy, a rule or a trigger of the database skips it: roll back, and begin again"
        )
        return StaleReadError(table, known, row[TOKEN_BIND], None, None, detail=detail)

    def check_before(self) -> FenceError | None:
        """Before a statement is executed, return its error if the result could not show it.

        One case is a statement whose writes may change which rows match. The other is a DELETE of objects if
        the driver does not count. The query locks the rows, so the verdict stays true. SQLite has no such
        locks, but also no second writer.
        """
        if self.form.reads_more:
            query = self._query().where(*self.form.where).with_for_update(of=self.form.source)
            for row in self.rows:
                for found in self._execute(query, row):
                    if (error := self._error(found, row)) is not None:
                        return error
        deletes_objects = not self.form.assigns and self.form.key and self.form.is_of_flush
        if deletes_objects and not self._counts():
            present = self._rows_present(lock=True)
            return self._missing_rows(present) if len(present) + self._gone < len(self.rows) else None
        return None

    @property
    def _gone(self) -> int:
        """How many of the rows the session itself has deleted before, as by a cascade after a DELETE."""
        gone = self.flush.gone if self.flush is not None else ()
        return sum(self.form.identity(row) in gone for row in self.rows) if gone else 0

    def _counts(self) -> bool:
        """Tell whether the driver counts the rows of these executions."""
        dialect = self.connection.dialect
        is_sane = dialect.supports_sane_rowcount
        return bool(is_sane and (len(self.rows) == 1 or dialect.supports_sane_multi_rowcount))

    def _find_refused(self) -> FenceError | None:
        """Return the error for a row that matches the WHERE clause, but not the guard's condition."""
        fence, write = self.form.source.c[self.form.fenced.fence.key], self.form.write
        for row in self.rows:
            accepted, named = self.form.accepts(row), self._resource_columns()
            turned_away: list[Any] = [fence.is_(None)]
            if self.form.own_token is not None:
                turned_away += [fence > self.form.own_token, self.form.own_token.is_(None)]
            elif not self._is_free(row):
                turned_away.append(fence > row[TOKEN_BIND])
            if accepted is not None:
                turned_away.append(write.not_in(accepted))
            for column, value in zip(named, values_of(self.form.resource_binds or (), row), strict=False):
                turned_away.append(not_(holds(column, literal(value, column.type))))
            query = self._query().where(*self.form.where, or_(*turned_away)).limit(1)
            for found in self._execute(newest(query, self.connection), row):
                return self._error(found, row)
        return None

    def _rows_present(self, *, lock: bool = False) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        key = [self.form.source.c[column.key] for column in self.form.fenced.table.primary_key]
        for start in range(0, len(self.rows), KEYS_PER_QUERY):
            some = self.rows[start : start + KEYS_PER_QUERY]
            query = self._query().where(is_one_of(key, map(self.form.identity, some)))
            query = query.with_for_update() if lock else newest(query, self.connection)
            found += self._execute(query, {})
        return found

    def _is_free(self, row: Row) -> bool:
        return self.form.is_optional and row[TOKEN_BIND] == NO_LEASE

    def _resource_columns(self) -> list[ColumnElement[Any]]:
        """Return the columns that name the resource; none for a flush, or without values to compare."""
        if (self.form.resource_binds is None and not self.form.listed) or self.form.is_of_flush:
            return []
        return [self.form.source.c[column.key] for column in self.form.fenced.template.columns.values()]

    def _query(self) -> Select[Any]:
        """Return a query, without criteria, for the columns that `_error` needs."""
        source, fenced = self.form.source, self.form.fenced
        key = [source.c[each.key] for each in fenced.table.primary_key]
        return select(*key, source.c[fenced.fence.key], self.form.write, *self._resource_columns())

    def _execute(self, query: Select[Any], row: Row) -> list[tuple[Any, ...]]:
        options = {TRANSLATED: self.options.get(TRANSLATED)}
        return [tuple(found) for found in self.connection.execute(query, row, execution_options=options)]

    def _error(self, found: tuple[Any, ...], row: Row) -> FenceError | None:
        fenced, token = self.form.fenced, row[TOKEN_BIND]
        width = len(fenced.table.primary_key)
        identity, (current, write_id), named = found[:width], found[width : width + 2], found[width + 2 :]
        if named:
            actual, asked = fenced.template.render(named), [*self.form.listed]
            asked = asked or [fenced.template.render(values_of(self.form.resource_binds or (), row))]
            if actual not in asked:
                others = " or ".join(map(repr, asked))
                return UnfencedWriteError(
                    f"{fenced.name}{identity!r} is guarded by {actual!r}, not by {others}, which this write "
                    "names; nothing was written, so roll back, and lock the resource that the row names"
                )
            token = self.form.listed.get(actual, token)
        if current is None:
            return without_fence(fenced, identity)
        known = identity if self.form.key else None
        if current > token and not self._is_free(row):
            return StaleTokenError(fenced.name, known, token, current)
        accepted = self.form.accepts(row)
        if accepted is None or write_id in accepted:
            return None
        return StaleReadError(fenced.name, known, token, current, accepted[0])

    def _missing_rows(self, present: Sequence[tuple[Any, ...]]) -> StaleReadError | None:
        """Return the error for objects whose rows are gone or changed; None if DELETEs may find no row."""
        fenced = self.form.fenced
        if not self.form.assigns and not all(each.confirm_deleted_rows for each in fenced.mappers()):
            return None
        row, token = self.rows[0], self.rows[0][TOKEN_BIND]
        if len(self.rows) > 1:
            current = token if len(present) == len(self.rows) else None
            return StaleReadError(fenced.name, None, token, current, None)
        current = present[0][len(self.form.key)] if present else None
        return StaleReadError(fenced.name, self.form.identity(row), token, current, row.get(LOADED_BIND))


def without_fence(fenced: FencedTable, identity: tuple[Any, ...]) -> FenceError:
    return FenceError(
        f"the fence of {fenced.name}{identity!r} is NULL, which lets no token pass: the column "
        f"{FENCE_COLUMN} was made without NOT NULL DEFAULT 0, as op.add_fence() makes it; in the rows that "
        f"have none, SET {FENCE_COLUMN} = 0, and then make it NOT NULL"
    )
