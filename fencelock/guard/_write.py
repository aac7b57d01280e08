"""UPDATE and DELETE of a fenced table: the condition, the token, and the question why a row was not written.

Apart from `rewrite` because it is the heart of the guard, and from `_insert` because a new row has no fence
to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

from sqlalchemy import (
    BigInteger,
    Delete,
    Select,
    Update,
    and_,
    bindparam,
    func,
    literal,
    literal_column,
    not_,
    or_,
    select,
    tuple_,
)
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.sql import ColumnElement, FromClause
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.selectable import AliasedReturnsRows

from fencelock.errors import FenceError, StaleReadError, StaleTokenError, UnfencedWriteError
from fencelock.guard._carried import CarriedToken
from fencelock.guard._exact import SameText, is_text
from fencelock.guard._sqlalchemy import keeps_order
from fencelock.guard._statement import (
    CLAIM_OPTION,
    LOADED_BIND,
    MOVE_BIND,
    TOKEN_BIND,
    TOKEN_OPTION,
    Row,
    apart,
    assigned,
    criteria,
    is_condition,
    key_of,
    loaded_in,
    pins,
    reads_more,
    refuse_fence_assignment,
    refuse_foreign_assignments,
    refuse_hiding_text,
    values_of,
    with_criteria,
)
from fencelock.guard._tables import FENCE_COLUMN, TRANSLATED, FencedTable, row_name
from fencelock.guard.flushes import LoadedIds, rows_known_to
from fencelock.guard.row_tokens import Tokens
from fencelock.guard.write_ids import LIMIT, moved, new_write_id

LOCKING_READS: Final = frozenset({"mysql", "mariadb"})
"""Dialects whose plain SELECT reads an old snapshot under the default isolation level (REPEATABLE READ)."""

_ADDED: Final = (SameText, CarriedToken)
"""What `guard` adds to the criteria, besides the condition."""

KEYS_PER_QUERY: Final = 500
_CRITERIA_PER_QUERY: Final = 100

_T = TypeVar("_T")

_LOOKED_UP: Final = "fencelock_of_"
"""How the parameters begin that carry what the session knows of a row."""


class Kind(NamedTuple):
    """What kind of statement is to be guarded.

    Attributes:
        explicit: whether the caller vouches for the token, so that no resource is looked for.
        objects: whether it writes the objects of a flush.
        blind: whether it is not known of all of them what they were loaded with.
        claims: whether it only raises fences.
        sent: whether it is looked at once more, with what the guard has added to it.
    """

    explicit: bool = False
    objects: bool = False
    blind: bool = False
    claims: bool = False
    sent: bool = False


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
        write: the column of the write id; None in the fence table.
        loaded: the parameter that says which write id a row must have; None where any will do.
        moves: whether it moves write ids, by a parameter; else an UPDATE sets one.
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
    write: ColumnElement[int] | None
    loaded: BindParameter[Any] | None
    moves: bool
    reads_more: bool
    carries: bool
    assigns: bool

    def stamp(
        self, connection: Connection, rows: Sequence[Row], options: Mapping[str, Any], tokens: Tokens | None
    ) -> list[dict[str, Any]]:
        """Return the parameters of each execution with its token and its write id added.

        Args:
            connection: what executes it.
            rows: the parameters of each execution.
            options: its execution options.
            tokens: for the rows; None where the caller gives one by an option.
        """
        self._refuse_moving(rows[0])
        objects = None if tokens is None else tokens.loaded
        # The unit of work has made its parameters for this statement. Others are their caller's.
        stamped: list[dict[str, Any]] = [dict(row) for row in rows] if objects is None else rows  # type: ignore[assignment]
        if tokens is None:
            stamp = dict.fromkeys(self.stamped, options[TOKEN_OPTION])
            for row in stamped:
                row.update(stamp)
        else:
            self._stamp_each(connection, stamped, tokens)
        if tokens is not None and objects is not None:
            self._stamp_objects(stamped, objects, tokens.write_id)
        elif self.assigns and self.write is not None and CLAIM_OPTION not in options:
            write_id = new_write_id()
            for row in stamped:
                row[MOVE_BIND if self.moves else self._write_key] = write_id
        return stamped

    @property
    def _write_key(self) -> str:
        assert self.fenced.write is not None  # noqa: S101  only asked where `write` is there
        return self.fenced.write.key

    def _stamp_objects(self, rows: Sequence[dict[str, Any]], objects: LoadedIds, write_id: int) -> None:
        """Add what the rows of a flush were loaded with, and the id of this write."""
        for row in rows:
            if self.key:
                key = self.key_in(row)
                row[LOADED_BIND] = objects[key]
                objects[key] = write_id  # what a second statement of this flush finds
            if self.assigns and self.write is not None:
                row[self._write_key] = write_id

    def _accepts(self, row: Row) -> tuple[int, ...] | None:
        """Return which write ids a row may have, once it may have been written; None where any will do."""
        loaded = row.get(LOADED_BIND) if self.loaded is None else values_of([self.loaded], row)[0]
        if loaded is None or self.write is None:
            return None
        own = moved(loaded, row[MOVE_BIND]) if MOVE_BIND in row else row.get(self._write_key, loaded)
        return loaded, own

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
            return self._missed(rows) if is_counted else None
        fences = self._fences_of(connection, rows, options)
        if is_counted or len(fences) < len(rows):
            return self._missed(rows, fences)
        return None

    def gone_before(
        self, connection: Connection, rows: Sequence[Row], options: Mapping[str, Any]
    ) -> StaleReadError | None:
        """Return the error for an object that a DELETE will not find, where the driver will not tell.

        The rows that are there stay locked. After the DELETE nothing could tell which of them were there.
        """
        if self.assigns or not self.key or self.is_counted(rows, connection.dialect):
            return None
        there = self._fences_of(connection, rows, options)
        return self._missed(rows) if len(there) < len(rows) else None

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

    def _missed(self, rows: Sequence[Row], there: Sequence[int] = ()) -> StaleReadError | None:
        mapper = self.fenced.mapper() if self.fenced.mapper else None
        if not self.assigns and mapper is not None and not mapper.base_mapper.confirm_deleted_rows:
            return None
        row = rows[0]
        name, token = self.fenced.name, row[TOKEN_BIND]
        if len(rows) > 1:
            return StaleReadError(name, None, token, token if len(there) == len(rows) else None, None)
        current = there[0] if there else None
        return StaleReadError(name, self._identity(row), token, current, row.get(LOADED_BIND))

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
        if accepted is not None and self.write is not None:
            passes_not = or_(fence > row[TOKEN_BIND], self.write.not_in(accepted))
        else:
            passes_not = fence > row[TOKEN_BIND]
        return or_(passes_not, fence.is_(None), *self._differs(values_of(self.naming or (), row)))

    def _asked(self) -> Select[Any]:
        """Return a query of what `_error` wants to know of rows, without any criteria."""
        fence = self.source.c[self.fenced.fence.key]
        write = fence if self.write is None else self.write
        return select(*self._key(), fence, write, *self.naming_columns())

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
        identity, current, write_id, naming = (
            found[:width],
            found[width],
            found[width + 1],
            found[width + 2 :],
        )
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
        if accepted is None or write_id in accepted:
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
    statement: Update | Delete, fenced: FencedTable, kind: Kind
) -> tuple[Update | Delete, GuardedWrite]:
    """Return the statement with the condition, and what is known of it.

    The condition is that the fence is not above the token and, for objects, that the write id is the one that
    was loaded. And that the row is guarded by the resource that the token is of, as far as the WHERE clause
    does not say so by itself: see `_exact` for text, and `_naming` for rows named by their key alone.

    Args:
        statement: an UPDATE or DELETE of the table.
        fenced: the table.
        kind: of statement.
    """
    changed = [column for column, _ in assigned(statement)]
    if not kind.sent:
        refuse_fence_assignment(map(key_of, changed), fenced)
    refuse_foreign_assignments(statement)
    refuse_hiding_text(statement)
    source = statement.table if isinstance(statement.table, AliasedReturnsRows) else fenced.table
    fence = source.c[fenced.fence.key]
    write: Any = None if fenced.write is None else source.c[fenced.write.key]
    parts = criteria(statement)
    loaded = next((found for part in parts if (found := _loaded(part, write)) is not None), None)
    is_told = any(is_condition(part, fence) for part in parts)

    def is_own(part: Any) -> bool:
        return is_condition(part, fence) or _loaded(part, write) is not None or isinstance(part, _ADDED)

    where = tuple(apart(part) for part in parts if not is_own(part))
    statement = with_criteria(statement, (*where, *filter(is_own, parts)))
    pinned = dict(pins(where, source, fenced))
    key = tuple([pinned[column.key] for column in fenced.table.primary_key if column.key in pinned])
    keyed = bool(key) and len(key) == len(fenced.table.primary_key)
    naming = _naming(fenced, pinned, look_up=keyed and not kind.explicit)
    assigns = isinstance(statement, Update)
    moves = (
        assigns
        and write is not None
        and not (kind.objects or kind.claims or kind.sent or keeps_order(statement))
    )
    if kind.objects and keyed and write is not None:
        named: Any = bindparam(LOADED_BIND, type_=BigInteger)
        statement = statement.where(write == (func.coalesce(named, write) if kind.blind else named))
    if moves and isinstance(statement, Update):
        statement = moving(statement, fenced, bindparam(MOVE_BIND, type_=BigInteger))
    result = GuardedWrite(
        fenced=fenced,
        source=source,
        stamped=(fenced.fence.key, TOKEN_BIND) if assigns else (TOKEN_BIND,),
        moved=_moved(fenced, changed),
        where=where,
        key=key if keyed else (),
        key_in=itemgetter(*[bind.key for bind in key]) if keyed else tuple,
        naming=naming,
        looked_up={bind.key: at for at, bind in enumerate(naming or ()) if bind.key.startswith(_LOOKED_UP)},
        write=write,
        loaded=loaded,
        moves=moves,
        reads_more=not keyed and reads_more(where, source),
        carries=fenced.strict,
        assigns=assigns,
    )
    if not is_told:
        statement = statement.where(fence <= bindparam(TOKEN_BIND, type_=BigInteger))
    statement = statement.where(*_same_resource(result))
    if result.carries and not any(isinstance(part, CarriedToken) for part in parts):
        statement = statement.where(CarriedToken())
    return statement, result


def moving(statement: Update, fenced: FencedTable, by: Any) -> Update:
    """Have a statement move the ids of what it writes: an object follows if it was of the version found."""
    assert fenced.write is not None  # noqa: S101  the fence table has none, and is not written so
    source = statement.table if isinstance(statement.table, AliasedReturnsRows) else fenced.table
    write = source.c[fenced.write.key]
    return statement.values({write.key: (write + by) % literal_column(str(LIMIT), BigInteger)})


def _loaded(part: Any, write: ColumnElement[int] | None) -> BindParameter[int] | None:
    return None if write is None else loaded_in(part, write)


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
