"""UPDATE and DELETE of a fenced table with the condition: made once of each statement.

The heart of the guard. The token and the write ids travel as parameters, never inside the statement, so that
SQLAlchemy's compiled cache, executemany and insertmanyvalues all keep working.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias
from weakref import WeakKeyDictionary

from sqlalchemy import BigInteger, Update, bindparam, func, literal_column
from sqlalchemy.sql import ClauseElement, ColumnElement, FromClause, operators
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.selectable import AliasedReturnsRows

from fencelock.guard._carried import CarriedToken
from fencelock.guard._exact import holds, is_text
from fencelock.guard._sqlalchemy import keeps_order, values_in, with_where
from fencelock.guard._tables import FencedTable
from fencelock.guard.criteria import (
    LOADED_BIND,
    TOKEN_BIND,
    Row,
    apart,
    compared,
    criteria_of,
    is_condition,
    key_of,
    pins,
    reads_more,
    refuse_fence_assignment,
    refuse_unguardable,
    values_of,
)
from fencelock.guard.write_ids import LIMIT, moved

MOVE_BIND: Final = "fencelock_move"
"""Name of the parameter by which a statement moves the write ids of what it writes."""

_LOOKED_UP: Final = "fencelock_of_"
"""How the parameters begin that carry what the session knows of a row."""

Kind: TypeAlias = Literal["objects", "blind", "core", "explicit", "claim"]
"""Whose statement it is.

"objects" is a flush's, "blind" one that does not know what all of its objects were loaded from. "core" is the
program's own, "explicit" the same with a token that its caller vouches for. "claim" only raises fences.
"""

_forms: WeakKeyDictionary[ClauseElement, dict[Kind, Form]] = WeakKeyDictionary()
"""By statement. SQLAlchemy's own statements are the same objects at each flush."""


@dataclass(eq=False, slots=True)
class Form:
    """A statement with the condition, and how it names rows.

    Attributes:
        statement: the one to execute.
        kind: whose it is.
        fenced: the table.
        source: the table, or the alias of it, that the statement writes to.
        where: the criteria without the condition.
        key: the parameters that the WHERE clause says the primary key equals; empty where one is missing, so
            that one execution may write many rows.
        naming: the parameters that make the resource's name, one for each column of the template; None where
            the statement does not tell them.
        looked_up: attributes whose values the session knows, by those of them that the guard has added.
        loaded: the parameter that says which write id a row must have; None where any will do.
        moves: whether it moves write ids, by a parameter; else an UPDATE sets one.
        moves_name: a column of the resource's name that the statement itself assigns.
        reads_more: whether what it writes may change which rows its WHERE clause is about.
        assigns: whether it is an UPDATE; else it is a DELETE.
    """

    statement: Any
    kind: Kind
    fenced: FencedTable
    source: FromClause
    where: tuple[ColumnElement[bool], ...]
    key: tuple[BindParameter[Any], ...]
    naming: tuple[BindParameter[Any], ...] | None
    looked_up: Mapping[str, str]
    loaded: BindParameter[Any] | None
    moves: bool
    moves_name: str | None
    reads_more: bool
    assigns: bool

    @property
    def write(self) -> ColumnElement[int] | None:
        """The column of the write id; None in the fence table."""
        return None if self.fenced.write is None else self.source.c[self.fenced.write.key]

    def identity(self, row: Row) -> tuple[Any, ...]:
        """Return the primary key of the row that an execution names."""
        return values_of(self.key, row)

    def accepts(self, row: Row) -> tuple[int, ...] | None:
        """Return which write ids a row may have, once it may have been written; None where any will do."""
        loaded = row.get(LOADED_BIND) if self.loaded is None else values_of([self.loaded], row)[0]
        if loaded is None or self.fenced.write is None:
            return None
        by = row.get(MOVE_BIND)
        return loaded, row.get(self.fenced.write.key, loaded) if by is None else moved(loaded, by)


def form_of(statement: Any, fenced: FencedTable, kind: Kind) -> Form:
    """Return a statement of this kind with the condition."""
    known = _forms.setdefault(statement, {})
    form = known.get(kind)
    if form is None:
        form = known[kind] = _made(statement, fenced, kind)
    return form


def _made(statement: Any, fenced: FencedTable, kind: Kind) -> Form:
    """Add the condition to a statement.

    It says that the fence is not above the token and, for objects, that the write id is the one that was
    loaded. And that the row is guarded by the resource that the token is of, as far as the WHERE clause does
    not say so by itself: see `_exact` for text, and `_looked_up` for rows named by their key alone.
    """
    source = statement.table if isinstance(statement.table, AliasedReturnsRows) else fenced.table
    assigned = [column for column, _ in values_in(statement)]
    if kind != "claim":
        refuse_fence_assignment(map(key_of, assigned), fenced)
    refuse_unguardable(statement, fenced, source)
    fence, assigns = source.c[fenced.fence.key], isinstance(statement, Update)
    write: Any = None if fenced.write is None else source.c[fenced.write.key]
    parts = criteria_of(statement)
    where: list[Any] = []
    own: list[Any] = []
    for part in parts:
        is_own = is_condition(part, fence) or compared(part, write, operators.eq) is not None
        (own if is_own else where).append(part if is_own else apart(part))
    statement = with_where(statement, (*where, *own))
    columns = fenced.template.columns
    pinned = pins(where, source, (*fenced.table.primary_key, *columns.values()))
    key = tuple([pinned[column.key] for column in fenced.table.primary_key if column.key in pinned])
    is_keyed = bool(key) and len(key) == len(fenced.table.primary_key)
    looked_up = _looked_up(fenced, pinned) if kind == "core" and is_keyed else {}
    naming = tuple(
        pinned.get(column.key, bindparam(f"{_LOOKED_UP}{column.key}", type_=column.type))
        for column in columns.values()
        if column.key in pinned or looked_up
    )
    if kind in {"objects", "blind"}:
        loaded = bindparam(LOADED_BIND, type_=BigInteger)
        statement = statement.where(write == (loaded if kind == "objects" else func.coalesce(loaded, write)))
    moves = assigns and write is not None and kind in {"core", "explicit"} and not keeps_order(statement)
    if moves:
        statement = moving(statement, fenced, bindparam(MOVE_BIND, type_=BigInteger))
    if not any(is_condition(part, fence) for part in own):
        statement = statement.where(fence <= bindparam(TOKEN_BIND, type_=BigInteger))
    if len(naming) == len(columns) and kind in {"core", "claim"}:
        named = zip(columns.values(), naming, strict=True)
        statement = statement.where(
            *[holds(source.c[column.key], bind) for column, bind in named if _is_open(column, bind)]
        )
    if fenced.strict:
        statement = statement.where(CarriedToken())
    keys = {key_of(column) for column in assigned}
    names = {
        name for name in assigned if isinstance(name, str)
    }  # attributes may be called like other columns
    return Form(
        statement=statement,
        kind=kind,
        fenced=fenced,
        source=source,
        where=tuple(where),
        key=key if is_keyed else (),
        naming=naming if len(naming) == len(columns) else None,
        looked_up=looked_up,
        loaded=next(
            (found for part in own if (found := compared(part, write, operators.eq)) is not None), None
        ),
        moves=moves,
        moves_name=next(
            (name for name, column in columns.items() if column.key in keys or name in names), None
        ),
        reads_more=not is_keyed and reads_more(where, source),
        assigns=assigns,
    )


def moving(statement: Update, fenced: FencedTable, by: Any) -> Update:
    """Have a statement move the ids of what it writes: an object follows if it was of the version found."""
    assert fenced.write is not None  # noqa: S101  the fence table has none, and is not written so
    source = statement.table if isinstance(statement.table, AliasedReturnsRows) else fenced.table
    write = source.c[fenced.write.key]
    return statement.values({write.key: (write + by) % literal_column(str(LIMIT), BigInteger)})


def _looked_up(fenced: FencedTable, pinned: Mapping[str, BindParameter[Any]]) -> dict[str, str]:
    """Return the attributes that name the resource of a row, by the parameters that shall carry them.

    Where the primary key is pinned and does not tell the resource, the session knows the row, or did: the row
    may have been deleted and another inserted with its key, which another resource guards. So what it knows
    becomes a parameter of the statement, for the database to compare.
    """
    mappers = fenced.mappers()
    columns = [column for column in fenced.template.columns.values() if column.key not in pinned]
    if not mappers:
        return {}
    return {f"{_LOOKED_UP}{column.key}": mappers[0].get_property_by_column(column).key for column in columns}


def _is_open(column: ColumnElement[Any], bind: BindParameter[Any]) -> bool:
    """Tell whether the WHERE clause does not say yet that a row is guarded by this very resource."""
    return is_text(column) or bind.key.startswith(_LOOKED_UP)
