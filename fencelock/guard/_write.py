"""UPDATE and DELETE of a fenced table: the condition, the token and the write id.

Apart from `rewrite` because it is the heart of the guard, and from `_insert` because a new row has no fence
to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, NamedTuple, NoReturn

from sqlalchemy import (
    BigInteger,
    Delete,
    Update,
    bindparam,
    func,
    literal_column,
)
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.sql import ColumnElement, FromClause
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.selectable import AliasedReturnsRows

from fencelock.errors import UnfencedWriteError
from fencelock.guard._carried import CarriedToken
from fencelock.guard._exact import SameText, holds, is_text
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
from fencelock.guard._tables import FencedTable, row_name
from fencelock.guard.flushes import LoadedIds, rows_known_to
from fencelock.guard.row_tokens import Tokens
from fencelock.guard.write_ids import LIMIT, moved, new_write_id

_ADDED: Final = (SameText, CarriedToken)
"""What `guard` adds to the criteria, besides the condition."""

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

    def accepts(self, row: Row) -> tuple[int, ...] | None:
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
                values = known(self.identity(row))
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

    def identity(self, row: Row) -> tuple[Any, ...]:
        """Return the primary key of the row that an execution names."""
        return values_of(self.key, row)

    def is_counted(self, rows: Sequence[Row], dialect: Any) -> bool:
        """Tell whether the driver will say how many rows these executions have written."""
        return dialect.supports_sane_rowcount and (len(rows) == 1 or dialect.supports_sane_multi_rowcount)

    def is_trusted(self, rows: Sequence[Row], result: CursorResult[Any]) -> bool:
        """Tell whether the driver has said it."""
        dialect: Any = result.dialect
        return self.is_counted(rows, dialect) and (
            dialect.supports_sane_rowcount_returning or not result.returns_rows
        )

    def names(self, rows: Sequence[Row]) -> Iterator[str]:
        """Return the names of the rows that these executions have named."""
        return (row_name(self.fenced.table, self.identity(row)) for row in rows)

    def naming_columns(self) -> list[ColumnElement[Any]]:
        """Return the columns that make the name of the resource, if the statement tells their values."""
        if self.naming is None:
            return []
        return [self.source.c[column.key] for column in self.fenced.template.columns.values()]


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
