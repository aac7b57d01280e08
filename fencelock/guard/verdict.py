"""Why a guarded write has not written a row: the fence, another resource, another write, or no row at all.

Apart from the condition because it is only asked where a count is short, or a driver does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sqlalchemy import Select, and_, literal, not_, or_, select, tuple_
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.sql import ColumnElement

from fencelock.errors import FenceError, StaleReadError, StaleTokenError, UnfencedWriteError
from fencelock.guard._exact import holds
from fencelock.guard._statement import LOADED_BIND, TOKEN_BIND, Row, values_of
from fencelock.guard._tables import FENCE_COLUMN, TRANSLATED, FencedTable
from fencelock.guard._write import GuardedWrite

LOCKING_READS: Final = frozenset({"mysql", "mariadb"})
"""Dialects whose plain SELECT reads an old snapshot under the default isolation level (REPEATABLE READ)."""

KEYS_PER_QUERY: Final = 500
_CRITERIA_PER_QUERY: Final = 100

_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class Verdict:
    """Asks the database why executions of a guarded write have written fewer rows than they named.

    Attributes:
        write: what is known of the statement.
        rows: the parameters of each execution.
        connection: what has executed it, or is about to.
        options: its execution options.
    """

    write: GuardedWrite
    rows: Sequence[Row]
    connection: Connection
    options: Mapping[str, Any]

    @property
    def _passed_on(self) -> dict[str, Any]:
        return {TRANSLATED: self.options.get(TRANSLATED)}

    def wrote_all(self, result: CursorResult[Any]) -> bool:
        """Tell whether it is known that each execution has written the one row that it named."""
        return (
            bool(self.write.key)
            and result.rowcount == len(self.rows)
            and self.write.is_trusted(self.rows, result)
        )

    def refused(self) -> FenceError | None:
        """Return the error to raise if the condition has turned a row away, or None.

        Only asked for where `wrote_all` is not so.
        """
        passed_on = self._passed_on

        def first(query: Select[Any], row: Row) -> tuple[Any, ...] | None:
            found = self.connection.execute(
                newest(query, self.connection), row, execution_options=passed_on
            ).first()
            return None if found is None else tuple(found)

        if not self.write.key:
            query = self._asked().where(*self.write.where).limit(1)
            for row in self.rows:
                found = first(query.where(self._turned_away(row)), row)
                if found is not None:
                    return self._error(found, row)
            return None
        for group in self._groups():
            if (
                first(self._asked().where(or_(*(criterion for criterion, _ in group))).limit(1), {})
                is not None
            ):
                for criterion, row in group:
                    found = first(self._asked().where(criterion).limit(1), {})
                    if found is not None:
                        return self._error(found, row)
        return None

    def foreseen(self) -> FenceError | None:
        """Return the error to raise if the condition is going to turn a row away, or None.

        Only asked for where `reads_more` is so, and `refused` may find nothing afterwards: a child that was
        turned away while the statement has changed its parent, say, by which the WHERE clause found it. The
        rows are locked, as the statement itself would have done, so what is found here stays true; SQLite has
        no such locks, and nobody else writes once its transaction has begun to.
        """
        query = self._asked().where(*self.write.where).with_for_update(of=self.write.source)
        passed_on = self._passed_on
        for row in self.rows:
            for found in self.connection.execute(query, row, execution_options=passed_on).all():
                error = self._error(tuple(found), row)
                if error is not None:
                    return error
        return None

    def missed(self, result: CursorResult[Any]) -> StaleReadError | None:
        """Return the error for an object whose row was not written, though no fence has turned it away.

        Mostly the row is gone. A row that is there was changed between the statement and the question why, by
        another session under the same token.
        """
        is_counted = self.write.is_trusted(self.rows, result)
        if not self.write.key or (is_counted and result.rowcount >= len(self.rows)):
            return None
        if not is_counted and any(
            column.key in self.rows[0] for column in self.write.fenced.table.primary_key
        ):
            return None  # the rows that were written have other keys now
        if not self.write.assigns:
            return self._missed() if is_counted else None
        fences = self._fences()
        if is_counted or len(fences) < len(self.rows):
            return self._missed(fences)
        return None

    def gone_before(self) -> StaleReadError | None:
        """Return the error for an object that a DELETE will not find, where the driver will not tell.

        The rows that are there stay locked. After the DELETE nothing could tell which of them were there.
        """
        if (
            self.write.assigns
            or not self.write.key
            or self.write.is_counted(self.rows, self.connection.dialect)
        ):
            return None
        there = self._fences()
        return self._missed() if len(there) < len(self.rows) else None

    def _fences(self) -> list[int]:
        """Return the fences of those rows that are there, and lock them."""
        passed_on = self._passed_on
        fences: list[int] = []
        for some in batched(self.rows, KEYS_PER_QUERY):
            query = select(self.write.source.c[self.write.fenced.fence.key])
            query = query.where(is_one_of(self._key(), map(self.write.identity, some))).with_for_update()
            fences += self.connection.scalars(query, execution_options=passed_on)
        return fences

    def _missed(self, there: Sequence[int] = ()) -> StaleReadError | None:
        mapper = self.write.fenced.mapper() if self.write.fenced.mapper else None
        if not self.write.assigns and mapper is not None and not mapper.base_mapper.confirm_deleted_rows:
            return None
        row = self.rows[0]
        name, token = self.write.fenced.name, row[TOKEN_BIND]
        if len(self.rows) > 1:
            return StaleReadError(name, None, token, token if len(there) == len(self.rows) else None, None)
        current = there[0] if there else None
        return StaleReadError(name, self.write.identity(row), token, current, row.get(LOADED_BIND))

    def _groups(self) -> Iterator[list[tuple[ColumnElement[bool], Row]]]:
        """Return criteria for rows that the statement has named and the condition turned away.

        They come some at a time. One is for all rows of which the same is asked; with it go the parameters of
        one of these.
        """
        alike: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            asked = row[TOKEN_BIND], self.write.accepts(row), values_of(self.write.naming or (), row)
            alike.setdefault(asked, []).append(row)
        criteria_of = [
            (
                and_(is_one_of(self._key(), map(self.write.identity, some)), self._turned_away(some[0])),
                some[0],
            )
            for group in alike.values()
            for some in batched(group, KEYS_PER_QUERY)
        ]
        yield from batched(criteria_of, _CRITERIA_PER_QUERY)

    def _turned_away(self, row: Row) -> ColumnElement[bool]:
        """Return the criterion that the condition, or the resource's name, turns a row away."""
        fence = self.write.source.c[self.write.fenced.fence.key]
        accepted = self.write.accepts(row)
        if accepted is not None and self.write.write is not None:
            passes_not = or_(fence > row[TOKEN_BIND], self.write.write.not_in(accepted))
        else:
            passes_not = fence > row[TOKEN_BIND]
        return or_(passes_not, fence.is_(None), *self._differs(values_of(self.write.naming or (), row)))

    def _asked(self) -> Select[Any]:
        """Return a query of what `_error` wants to know of rows, without any criteria."""
        fence = self.write.source.c[self.write.fenced.fence.key]
        write = fence if self.write.write is None else self.write.write
        return select(*self._key(), fence, write, *self.write.naming_columns())

    def _key(self) -> list[ColumnElement[Any]]:
        return [self.write.source.c[column.key] for column in self.write.fenced.table.primary_key]

    def _differs(self, named: Sequence[Any]) -> Iterator[ColumnElement[bool]]:
        """Return criteria for a row that another resource guards than the one that these values name."""
        for column, value in zip(self.write.naming_columns(), named, strict=False):
            yield not_(holds(column, literal(value, column.type)))

    def _error(self, found: tuple[Any, ...], row: Row) -> FenceError | None:
        token, named = row[TOKEN_BIND], values_of(self.write.naming or (), row)
        width = len(self.write.fenced.table.primary_key)
        identity, current, write_id, naming = (
            found[:width],
            found[width],
            found[width + 1],
            found[width + 2 :],
        )
        template = self.write.fenced.template
        if naming:
            asked, actual = template.render(named), template.render(naming)
            if asked != actual:
                return UnfencedWriteError(
                    f"{self.write.fenced.name}{identity!r} is guarded by {actual!r}, not by {asked!r} as "
                    f"this write has it; nothing was written, so roll back, and lock what the row names"
                )
        if current is None:
            return without_fence(self.write.fenced, identity)
        known = identity if self.write.key else None
        if current > token:
            return StaleTokenError(self.write.fenced.name, known, token, current)
        accepted = self.write.accepts(row)
        if accepted is None or write_id in accepted:
            return None
        return StaleReadError(self.write.fenced.name, known, token, current, accepted[0])


def batched(all_of: Sequence[_T], count: int) -> Iterator[list[_T]]:
    """Return these things, as many at a time; `itertools` has it from Python 3.12."""
    for start in range(0, len(all_of), count):
        yield list(all_of[start : start + count])


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


def newest(query: Select[Any], connection: Connection) -> Select[Any]:
    """Make a query read what is committed now, not what was when the transaction's snapshot was taken."""
    return query.with_for_update(read=True) if connection.dialect.name in LOCKING_READS else query
