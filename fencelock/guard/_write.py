"""UPDATE and DELETE of a fenced table: the condition, the token, and the question why a row was not written.

Apart from `rewrite` because it is the heart of the guard, and from `_insert` because a new row has no fence
to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from typing import Any, Final, NoReturn, TypeVar

from sqlalchemy import BigInteger, Delete, Select, Update, and_, bindparam, literal, not_, or_, select, tuple_
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.sql import ColumnElement, FromClause
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.selectable import AliasedReturnsRows

from fencelock.errors import FenceError, StaleReadError, StaleTokenError, UnfencedWriteError
from fencelock.guard._carried import CarriedToken
from fencelock.guard._exact import SameText, is_text
from fencelock.guard._statement import (
    ALL_KNOWN,
    ALL_OWN,
    LOADED_BIND,
    TOKEN_BIND,
    TOKEN_OPTION,
    UNKNOWN_BIND,
    Form,
    Row,
    accepted_by,
    apart,
    as_loaded,
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
    with_criteria,
)
from fencelock.guard._tables import FENCE_COLUMN, TRANSLATED, FencedTable, row_name
from fencelock.guard.session import LoadedFences, Tokens, rows_known_to

LOCKING_READS: Final = frozenset({"mysql", "mariadb"})
"""Dialects whose plain SELECT reads an old snapshot under the default isolation level (REPEATABLE READ)."""

_ADDED: Final = (SameText, CarriedToken)
"""What `guard` adds to the criteria, besides the condition."""

KEYS_PER_QUERY: Final = 500
_CRITERIA_PER_QUERY: Final = 100

_T = TypeVar("_T")

_TOKEN_OF: Final = itemgetter(TOKEN_BIND)
_LOADED_OF: Final = itemgetter(LOADED_BIND)
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
        key_in: returns their values in one execution: one by itself, or a tuple.
        naming: the parameters that make the resource's name, one for each column of the template; None where
            the statement does not tell them.
        looked_up: the names of those among them that the guard has added, whose values the session knows.
        accepted: what the fence may be, where what was loaded counts; None where it need only not be above
            the token.
        reads_more: whether what it writes may change which rows its WHERE clause is about.
        carries: whether it leaves its token behind for a strict trigger.
        assigns: whether it is an UPDATE; else it is a DELETE.
    """

    fenced: FencedTable
    source: FromClause
    stamped: tuple[str, ...]
    moved: frozenset[str]
    where: tuple[ColumnElement[bool], ...]
    key: tuple[BindParameter[Any], ...]
    key_in: Callable[[Row], Any]
    naming: tuple[BindParameter[Any], ...] | None
    looked_up: Mapping[str, int]
    accepted: tuple[BindParameter[Any], ...] | None
    reads_more: bool
    carries: bool
    assigns: bool

    def stamp(
        self, connection: Connection, rows: Sequence[Row], options: Mapping[str, Any], tokens: Tokens | None
    ) -> tuple[list[dict[str, Any]], Form | None]:
        """Return the parameters of each execution with its token added; and, if it matters, what was loaded.

        Args:
            connection: what executes it.
            rows: the parameters of each execution.
            options: its execution options.
            tokens: for the rows; None where the caller gives one by an option.

        Returns:
            The parameters, and the form of the condition that they need, where what was loaded counts.
        """
        self._refuse_moving(rows[0])
        loaded = None if tokens is None else tokens.loaded
        # The unit of work has made its parameters for this statement. Others are their caller's.
        stamped: list[dict[str, Any]] = [dict(row) for row in rows] if loaded is None else rows  # type: ignore[assignment]
        if tokens is None:
            stamp = dict.fromkeys(self.stamped, options[TOKEN_OPTION])
            for row in stamped:
                row.update(stamp)
        else:
            self._stamp_each(connection, stamped, tokens)
        if tokens is None or loaded is None or not self.key:
            return stamped, None
        return stamped, self._add_loaded(stamped, loaded, tokens)

    def _add_loaded(self, rows: list[dict[str, Any]], loaded: LoadedFences, tokens: Tokens) -> Form | None:
        """Add to stamped parameters what was loaded, and return the form of the condition that takes them."""
        if len(rows) == 1:
            fences = [loaded[self.key_in(rows[0])]]
        else:
            fences = list(map(loaded.__getitem__, map(self.key_in, rows)))
        if fences == list(map(_TOKEN_OF, rows)):
            return ALL_OWN
        if None not in fences and not tokens.earlier:
            for row, fence in zip(rows, fences):  # noqa: B905  one for each, and this is for each row
                row[LOADED_BIND] = fence
            return ALL_KNOWN
        if fences.count(None) == len(fences):
            return None
        form = Form(max(map(len, tokens.earlier.values()), default=0), None in fences)
        for row, fence in zip(rows, fences, strict=True):
            token = row[TOKEN_BIND]
            row[LOADED_BIND] = token if fence is None else fence
            if form.some_unknown:
                row[UNKNOWN_BIND] = token if fence is None else -1
            own = tokens.earlier.get(values_of(self.naming or (), row), ())
            row.update(zip(form.earlier_binds, (*own, *repeat(token, form.earlier)), strict=False))
        return form

    def read_above_token(self, rows: Sequence[Row]) -> FenceError | None:
        """Return the error to raise, before anything is sent, if what was loaded is above the token."""
        if self.accepted is None:
            return None
        loaded, first = self.accepted[0], rows[0]
        if LOADED_BIND in first and (
            first[LOADED_BIND] <= first[TOKEN_BIND]
            if len(rows) == 1
            else max(map(_LOADED_OF, rows)) <= min(map(_TOKEN_OF, rows))
        ):
            return None  # most often
        given = loaded.effective_value
        for row in rows:
            fence = row.get(loaded.key, given)
            if fence > row[TOKEN_BIND]:
                return StaleTokenError(self.fenced.name, self._identity(row) or None, row[TOKEN_BIND], fence)
        return None

    def _accepts(self, row: Row) -> tuple[int, ...] | None:
        """Return what the fence of a row may be; None if it is only not to be above the token."""
        if self.accepted is None or row.get(UNKNOWN_BIND, -1) >= 0:
            return None
        return values_of(self.accepted, row)

    def _stamp_each(self, connection: Connection, rows: list[dict[str, Any]], tokens: Tokens) -> None:
        """Add to each execution its own token, and what the session knows of its row where that is asked."""
        if self.naming is None:
            tokens.need_some()
            self._refuse_unnamed()
        known = rows_known_to(connection, self.fenced) if self.looked_up else None
        for row in rows:
            if known:
                values = known(self._identity(row))
                if values is None:
                    tokens.need_some()
                    self._refuse_unnamed()
                for name, at in self.looked_up.items():
                    row[name] = values[at]
            token = tokens.of_row(values_of(self.naming, row))
            for name in self.stamped:
                row[name] = token

    def _refuse_unnamed(self) -> NoReturn:
        template = self.fenced.template
        raise UnfencedWriteError(
            f"this statement does not say which resource guards the rows it writes: {self.fenced.name!r} is "
            f"guarded by {template.text!r}, so compare {' and '.join(template.columns)} with == in its WHERE "
            f"clause, or change the rows through their objects"
        )

    def _refuse_moving(self, row: Row) -> None:
        """Refuse to change a column that the resource's name is made of."""
        if self.fenced.fence.key not in self.stamped:
            return
        template = self.fenced.template
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

        def first(query: Select[Any], row: Row) -> tuple[Any, ...] | None:
            found = connection.execute(newest(query, connection), row, execution_options=passed_on).first()
            return None if found is None else tuple(found)

        if not self.key:
            query = self._asked().where(*self.where).limit(1)
            for row in rows:
                found = first(query.where(self._turned_away(row)), row)
                if found is not None:
                    return self._error(found, row)
            return None
        for group in self._groups(rows):
            if (
                first(self._asked().where(or_(*(criterion for criterion, _ in group))).limit(1), {})
                is not None
            ):
                for criterion, row in group:
                    found = first(self._asked().where(criterion).limit(1), {})
                    if found is not None:
                        return self._error(found, row)
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
            for found in connection.execute(query, row, execution_options=passed_on).all():
                error = self._error(tuple(found), row)
                if error is not None:
                    return error
        return None

    def wrote_all(self, rows: Sequence[Row], result: CursorResult[Any]) -> bool:
        """Tell whether it is known that each execution has written the one row that it named."""
        return bool(self.key) and result.rowcount == len(rows) and self._is_trusted(rows, result)

    def is_counted(self, rows: Sequence[Row], dialect: Any) -> bool:
        """Tell whether the driver will say how many rows these executions have written."""
        return dialect.supports_sane_rowcount and (len(rows) == 1 or dialect.supports_sane_multi_rowcount)

    def _is_trusted(self, rows: Sequence[Row], result: CursorResult[Any]) -> bool:
        dialect: Any = result.dialect
        return self.is_counted(rows, dialect) and (
            dialect.supports_sane_rowcount_returning or not result.returns_rows
        )

    def missed(
        self,
        connection: Connection,
        rows: Sequence[Row],
        objects: LoadedFences,
        options: Mapping[str, Any],
        result: CursorResult[Any],
    ) -> StaleReadError | None:
        """Return the error for an object whose row was not written, though no fence has turned it away.

        Mostly the row is gone. A row that is there was changed between the statement and the question why, by
        another session under the same token.
        """
        is_counted = self._is_trusted(rows, result)
        if not self.key or (is_counted and result.rowcount >= len(rows)):
            return None
        if not is_counted and any(column.key in rows[0] for column in self.fenced.table.primary_key):
            return None  # the rows that were written have other keys now
        if not self.assigns:
            return self._missed(rows, objects) if is_counted else None
        fences = self._fences_of(connection, rows, options)
        if is_counted or len(fences) < len(rows):
            return self._missed(rows, objects, fences)
        return None

    def gone_before(
        self, connection: Connection, rows: Sequence[Row], objects: LoadedFences, options: Mapping[str, Any]
    ) -> StaleReadError | None:
        """Return the error for an object that a DELETE will not find, where the driver will not tell.

        The rows that are there stay locked. After the DELETE nothing could tell which of them were there.
        """
        if self.assigns or not self.key or self.is_counted(rows, connection.dialect):
            return None
        there = self._fences_of(connection, rows, options)
        return self._missed(rows, objects) if len(there) < len(rows) else None

    def _fences_of(
        self, connection: Connection, rows: Sequence[Row], options: Mapping[str, Any]
    ) -> list[int]:
        """Return the fences of those rows that are there, and lock them."""
        passed_on = {TRANSLATED: options.get(TRANSLATED)}
        fences: list[int] = []
        for some in batched(rows, KEYS_PER_QUERY):
            query = select(self.source.c[self.fenced.fence.key])
            query = query.where(is_one_of(self._key(), map(self._identity, some))).with_for_update()
            fences += connection.scalars(query, execution_options=passed_on)
        return fences

    def _missed(
        self, rows: Sequence[Row], objects: LoadedFences, there: Sequence[int] = ()
    ) -> StaleReadError | None:
        mapper = self.fenced.mapper() if self.fenced.mapper else None
        if not self.assigns and mapper is not None and not mapper.base_mapper.confirm_deleted_rows:
            return None
        row = rows[0]
        name, token = self.fenced.name, row[TOKEN_BIND]
        if len(rows) > 1:
            return StaleReadError(name, None, token, token if len(there) == len(rows) else None, None)
        current = there[0] if there else None
        return StaleReadError(name, self._identity(row), token, current, objects[self.key_in(row)])

    def names(self, rows: Sequence[Row]) -> Iterator[str]:
        """Return the names of the rows that these executions have named."""
        return (row_name(self.fenced.table, self._identity(row)) for row in rows)

    def _groups(self, rows: Sequence[Row]) -> Iterator[list[tuple[ColumnElement[bool], Row]]]:
        """Return criteria for rows that the statement has named and the condition turned away.

        They come some at a time. One is for all rows of which the same is asked; with it go the parameters of
        one of these.
        """
        alike: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            asked = row[TOKEN_BIND], self._accepts(row), values_of(self.naming or (), row)
            alike.setdefault(asked, []).append(row)
        criteria_of = [
            (and_(is_one_of(self._key(), map(self._identity, some)), self._turned_away(some[0])), some[0])
            for group in alike.values()
            for some in batched(group, KEYS_PER_QUERY)
        ]
        yield from batched(criteria_of, _CRITERIA_PER_QUERY)

    def _turned_away(self, row: Row) -> ColumnElement[bool]:
        """Return the criterion that the condition, or the resource's name, turns a row away."""
        fence = self.source.c[self.fenced.fence.key]
        accepted = self._accepts(row)
        passes_not = fence > row[TOKEN_BIND] if accepted is None else fence.not_in(accepted)
        return or_(passes_not, fence.is_(None), *self._differs(values_of(self.naming or (), row)))

    def _asked(self) -> Select[Any]:
        """Return a query of what `_error` wants to know of rows, without any criteria."""
        return select(*self._key(), self.source.c[self.fenced.fence.key], *self.naming_columns())

    def _key(self) -> list[ColumnElement[Any]]:
        return [self.source.c[column.key] for column in self.fenced.table.primary_key]

    def naming_columns(self) -> list[ColumnElement[Any]]:
        """Return the columns that make the name of the resource, if the statement tells their values."""
        if self.naming is None:
            return []
        return [self.source.c[column.key] for column in self.fenced.template.columns.values()]

    def _differs(self, named: Sequence[Any]) -> Iterator[ColumnElement[bool]]:
        """Return criteria for a row that another resource guards than the one that these values name."""
        for column, value in zip(self.naming_columns(), named, strict=False):
            yield not_(holds(column, literal(value, column.type)))

    def _error(self, found: tuple[Any, ...], row: Row) -> FenceError | None:
        token, named = row[TOKEN_BIND], values_of(self.naming or (), row)
        width = len(self.fenced.table.primary_key)
        identity, current, naming = found[:width], found[width], found[width + 1 :]
        template = self.fenced.template
        if naming:
            asked, actual = template.render(named), template.render(naming)
            if asked != actual:
                return UnfencedWriteError(
                    f"{self.fenced.name}{identity!r} is guarded by {actual!r}, not by {asked!r} as this "
                    f"write has it; nothing was written, so roll back, and lock what the row itself names"
                )
        if current is None:
            return without_fence(self.fenced, identity)
        known = identity if self.key else None
        if current > token:
            return StaleTokenError(self.fenced.name, known, token, current)
        accepted = self._accepts(row)
        if accepted is None or current in accepted:
            return None
        return StaleReadError(self.fenced.name, known, token, current, accepted[0])


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


def holds(column: ColumnElement[Any], value: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the criterion that a column holds this value, to the character."""
    return SameText(column, value) if is_text(column) else column == value


def newest(query: Select[Any], connection: Connection) -> Select[Any]:
    """Make a query read what is committed now, not what was when the transaction's snapshot was taken."""
    return query.with_for_update(read=True) if connection.dialect.name in LOCKING_READS else query


def guard(
    statement: Update | Delete, fenced: FencedTable, *, explicit: bool, form: Form | None = None
) -> tuple[Update | Delete, GuardedWrite]:
    """Return the statement with the condition, and what is known of it.

    The condition is that the fence is not above the token; or, if there is a form, that it is what was
    loaded. And that the row is guarded by the resource that the token is of, as far as the WHERE clause does
    not say so by itself: see `_exact` for text, and `_naming` for rows that are named by their key alone.

    Args:
        statement: an UPDATE or DELETE of the table.
        fenced: the table.
        explicit: whether the caller vouches for the token, so that no resource is looked for.
        form: of the condition, where what was loaded counts.
    """
    changed = [column for column, _ in assigned(statement)]
    refuse_fence_assignment(map(key_of, changed), fenced)
    refuse_foreign_assignments(statement)
    refuse_hiding_text(statement)
    source = statement.table if isinstance(statement.table, AliasedReturnsRows) else fenced.table
    fence = source.c[fenced.fence.key]
    if form is not None:
        loaded: BindParameter[int] = bindparam(LOADED_BIND, type_=BigInteger)
        statement = statement.where(as_loaded(fence, loaded, form))
    parts = criteria(statement)
    accepted = next((binds for part in parts if (binds := accepted_by(part, fence)) is not None), None)
    is_told = accepted is not None or any(is_condition(part, fence) for part in parts)

    def is_own(part: Any) -> bool:
        return is_condition(part, fence) or bool(accepted_by(part, fence)) or isinstance(part, _ADDED)

    where = tuple(apart(part) for part in parts if not is_own(part))
    statement = with_criteria(statement, (*where, *filter(is_own, parts)))
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
        key_in=itemgetter(*[bind.key for bind in key]) if keyed else tuple,
        naming=naming,
        looked_up={bind.key: at for at, bind in enumerate(naming or ()) if bind.key.startswith(_LOOKED_UP)},
        accepted=accepted,
        reads_more=not keyed and reads_more(where, source),
        carries=fenced.strict,
        assigns=isinstance(statement, Update),
    )
    if not is_told:
        statement = statement.where(fence <= bindparam(TOKEN_BIND, type_=BigInteger))
    statement = statement.where(*_same_resource(write))
    if write.carries and not any(isinstance(part, CarriedToken) for part in parts):
        statement = statement.where(CarriedToken())
    return statement, write


def _moved(fenced: FencedTable, changed: Sequence[Any]) -> frozenset[str]:
    """Return which columns of the resource's name are assigned, by columns or by names of either kind."""
    keys = {key_of(column) for column in changed}
    names = {name for name in changed if isinstance(name, str)}  # attributes may be called like other columns
    columns = fenced.template.columns.items()
    return frozenset(name for name, column in columns if column.key in keys or name in names)


def _naming(
    fenced: FencedTable, pinned: Mapping[str, BindParameter[Any]], *, look_up: bool
) -> tuple[BindParameter[Any], ...] | None:
    """Return the parameters that make the resource's name.

    Where the primary key is pinned and does not tell it, the session knows the row, or did: the row may have
    been deleted and another inserted with its key, which another resource guards. So what it knows becomes
    a parameter of the statement, for the database to compare.
    """
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
