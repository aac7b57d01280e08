"""Adds the guard's condition to an UPDATE or DELETE of a fenced table.

The token and the write ids are parameters, so that SQLAlchemy's compiled cache, executemany and
insertmanyvalues work.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Literal, TypeAlias
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm.util import LoaderCriteriaOption
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import False_, True_
from sqlalchemy.sql.operators import custom_op

from fencelock.errors import UnfencedWriteError
from fencelock.guard import _sqlalchemy as private
from fencelock.guard.exact import TOKEN_BIND, holds, is_text
from fencelock.guard.tables import (
    FENCE_COLUMN,
    LIMIT,
    NO_LEASE,
    WRITE_COLUMN,
    FencedTable,
    excluded_of,
    shifted,
)

Row: TypeAlias = Mapping[str, Any]  # the parameters of one execution of a statement
Rows: TypeAlias = Sequence[Row]
Options: TypeAlias = Mapping[str, Any]  # execution options

SHIFT_BIND: Final = "fencelock_move"  # the parameter with the number by which a statement shifts write ids
_LOOKED_UP: Final = "fencelock_of_"
"""The prefix of parameters whose values are taken from the session's object of the row."""
LOADED_BIND: Final = "fencelock_loaded"
"""The parameter with the write id that an object was loaded with."""

CLAIM_OPTION: Final = "fencelock_claim"
"""Execution option of a statement that claims rows: it raises their fences, and gives them new write ids."""
TOKEN_OPTION: Final = "fencing_token"  # noqa: S105  no password
"""Execution option with an explicit token, which counts whatever leases are held."""

_CUTS_OFF: Final = re.compile(r"(?i)--|/\*|;|#(?![>-])|\b(?:insert|update|delete|merge)\b")
"""Text that begins a comment, ends the statement, or writes. `#>` and `#-` are operators of PostgreSQL."""
_QUOTED: Final = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`""")


def key_of(column: Any) -> str:
    key: str = getattr(column, "key", column)
    return key


def values_of(binds: Iterable[sa.BindParameter[Any]], row: Row) -> tuple[Any, ...]:
    """Return the values of parameters in one execution: from the row, else from the parameter itself."""
    return tuple([row[bind.key] if bind.key in row else bind.effective_value for bind in binds])  # noqa: SIM401


def names_of_binds(clauses: Iterable[Any]) -> set[str]:
    parts = (part for clause in clauses for part in visitors.iterate(clause))
    return {part.key for part in parts if isinstance(part, sa.BindParameter)}


def criteria_of(clauses: Iterable[Any]) -> Iterator[Any]:
    """Yield the parts of a WHERE clause that are joined by AND."""
    for clause in clauses:
        if isinstance(clause, sa.Grouping):
            yield from criteria_of([clause.element])
        elif isinstance(clause, sa.BooleanClauseList) and clause.operator is operators.and_:
            yield from criteria_of(clause.clauses)
        else:
            yield clause


def parenthesised(part: Any) -> Any:
    """Return a part of a WHERE clause in parentheses, unless it plainly compares columns and parameters.

    Without parentheses, an AND after the text `a = 1 OR b = 2`, or after an `op("OR", precedence=10)`, would
    apply to `b = 2` alone.
    """
    is_plain = (
        isinstance(part, sa.BinaryExpression)
        and not isinstance(part.operator, custom_op)
        and all(
            isinstance(side, sa.BindParameter) or (isinstance(side, sa.ColumnClause) and not side.is_literal)
            for side in (part.left, part.right)
        )
    )
    return part if is_plain else sa.Grouping(part)


def equality_binds(
    parts: Iterable[Any], source: sa.FromClause, columns: Iterable[sa.Column[Any]]
) -> dict[str, sa.BindParameter[Any]]:
    """Return the parameters that a WHERE clause compares with these columns by ==, by the columns' keys."""
    keys: dict[Any, str] = {source.c[column.key]: column.key for column in columns}
    found = {}
    for part in parts:
        if isinstance(part, sa.BinaryExpression) and part.operator in {operators.eq, operators.is_}:
            for column, value in ((part.left, part.right), (part.right, part.left)):
                if isinstance(value, True_ | False_) and column in keys:  # SQLAlchemy sends no parameter
                    found[keys[column]] = sa.literal(isinstance(value, True_))
                elif isinstance(value, sa.BindParameter) and column in keys:
                    # If only the parameter has a custom type, it may send another value to the database.
                    kinds = [isinstance(each.type, sa.TypeDecorator) for each in (value, column)]
                    if kinds != [True, False]:
                        found[keys[column]] = value
    return found


def compared(part: Any, column: sa.ColumnElement[int], operator: object) -> sa.BindParameter[int] | None:
    """Return the parameter of a part such as `column = parameter`; None for any other part."""
    is_so = (
        isinstance(part, sa.BinaryExpression)
        and part.operator is operator
        and isinstance(part.right, sa.BindParameter)
        and hash(part.left) == hash(column)  # annotated columns hash like the original
    )
    return part.right if is_so else None


def reads_more(parts: Iterable[Any], source: sa.FromClause) -> bool:
    """Tell whether a WHERE clause reads more than the row itself: other rows, other tables, or text.

    If it does, the statement itself may change which rows match, because a subquery may read its writes.
    """
    return any(
        isinstance(element, sa.TextClause | sa.SelectBase)
        or (
            isinstance(element, sa.ColumnClause)
            and (element.is_literal or hash(element.table) != hash(source))
        )
        for part in parts
        for element in visitors.iterate(part)
    )


def unchanged_by_raising(table: sa.Table) -> dict[sa.Column[Any], sa.Column[Any]]:
    """Return assignments `column = column`, so that `onupdate` has no effect if an UPDATE raises a fence."""
    return {
        column: column
        for column in table.c
        if (column.onupdate is not None or column.server_onupdate is not None) and column.computed is None
    }


def refuse_fence_assignment(keys: Iterable[str], fenced: FencedTable) -> None:
    found = {FENCE_COLUMN, WRITE_COLUMN, fenced.fence.key}.intersection(keys)
    if found:
        raise ValueError(
            f"{' and '.join(sorted(found))} of {fenced.name!r} belongs to the guard, which writes the "
            f"lease's token and a new write id; leave it out of values()"
        )


def refuse_moving(fenced: FencedTable, keys: Container[str], names: Container[str] = ()) -> None:
    template = fenced.template
    for name, column in template.columns.items():
        if column.key in keys or name in names:
            raise UnfencedWriteError(
                f"{name} of {fenced.name!r} must not change: {template.text!r} is made of it, and no single "
                "lease guards a row before and after the change; delete the row and insert another"
            )


def refuse_unguardable(statement: Any, fenced: FencedTable, source: sa.FromClause) -> None:
    """Refuse an UPDATE or DELETE that could write rows to which the condition does not apply."""
    if private.prefixes_of(statement):
        raise UnfencedWriteError(f"a write to {fenced.name!r} takes no prefix_with()")
    refuse_inner_writes(statement, fenced)
    if isinstance(statement, sa.Update) and private.has_rows(statement):
        raise InvalidRequestError(
            "an UPDATE takes no list in values(): write values({…}) or ordered_values(…)"
        )
    own = hash(source), hash(fenced.table)
    for column, _ in private.values_in(statement) if isinstance(statement, sa.Update) else ():
        if hash(getattr(column, "table", source)) not in own:
            raise UnfencedWriteError(
                f"an UPDATE of several tables, or of one under two names, cannot be guarded; update "
                f"{fenced.name!r} in a statement of its own"
            )
    for option in private.options_of(statement):
        if isinstance(option, LoaderCriteriaOption) and any(_texts_in(option.where_criteria)):
            raise UnfencedWriteError(
                "an UPDATE or DELETE of a fenced table takes no text in with_loader_criteria(), which comes "
                "after the condition; put it into where()"
            )
    refuse_cutting_off((statement, *(value for _, value in private.values_in(statement))))


def refuse_inner_writes(statement: Any, fenced: FencedTable) -> None:
    values = [value for _, value in private.values_in(statement) if isinstance(value, sa.ClauseElement)]
    parts = (each for part in (statement, *values) for each in visitors.iterate(part))
    if any(isinstance(each, sa.UpdateBase) and each is not statement for each in parts):
        raise UnfencedWriteError(
            f"a write to {fenced.name!r} takes no other write inside it, for example in a WITH clause: write "
            "that as a statement of its own"
        )


def refuse_cutting_off(clauses: Iterable[Any]) -> None:
    """Refuse text that could end a statement before the guard's condition, or write by itself."""
    for clause in clauses:
        for text in _texts_in(clause):
            # Backslashes escape quotes only in some modes, so the end of a string is unknown.
            bare = text if "\\" in text else _QUOTED.sub("", text)
            depths = [0, *accumulate((sign == "(") - (sign == ")") for sign in bare)]
            if _CUTS_OFF.search(bare) or min(depths) < 0 or depths[-1]:
                raise UnfencedWriteError(
                    f"the text {text!r} could cut off the condition of an UPDATE or DELETE of a fenced "
                    f"table, or write by itself: leave comments, semicolons, half parentheses and writes "
                    f"out of it, and pass values as parameters"
                )


def _texts_in(clause: Any) -> Iterator[str]:
    """Yield the texts of a clause that enter the SQL exactly as the program wrote them."""
    for element in visitors.iterate(clause) if isinstance(clause, sa.ClauseElement) else ():
        if isinstance(element, sa.TextClause):
            yield element.text
        elif isinstance(element, sa.ColumnClause) and element.is_literal:
            yield element.name
        elif isinstance(element, sa.BinaryExpression | sa.UnaryExpression):
            operators_in = element.operator, getattr(element, "modifier", None)
            yield from (each.opstring for each in operators_in if isinstance(each, custom_op))


def changes_only_excluded(statement: Any, table: Any, rows: Rows) -> bool:
    """Tell whether a statement is an UPDATE of columns in `__fence_excluded__` alone, which needs no guard.

    `onupdate` is not looked at. Text could assign another column, so it counts as one.
    """
    excluded = excluded_of(table)
    if not (excluded and isinstance(statement, sa.Update)) or private.has_rows(statement):
        return False
    values = [*private.values_in(statement)]
    assigned = {key_of(column) for column, _ in values}
    assigned |= rows[0].keys() & table.c.keys() if rows else set()
    return (
        bool(assigned)
        and assigned <= excluded
        and all(hash(getattr(column, "table", table)) == hash(table) for column, _ in values)
        and not any(any(_texts_in(value)) for _, value in values)
    )


Origin: TypeAlias = Literal["flush", "core", "explicit", "claim"]
"""Where a statement comes from. `core`: the program. `explicit`: the program, with an explicit token."""

_forms: WeakKeyDictionary[sa.ClauseElement, dict[Origin, GuardedStatement]] = WeakKeyDictionary()
"""The guarded forms of each statement. SQLAlchemy's own statements are the same objects at each flush."""


@dataclass(eq=False, slots=True)
class GuardedStatement:
    """A statement with the condition, and facts about the rows that it names."""

    statement: Any
    origin: Origin
    fenced: FencedTable
    source: sa.FromClause
    where: tuple[sa.ColumnElement[bool], ...]  # the WHERE clause without the condition
    key: tuple[sa.BindParameter[Any], ...]  # compared with the primary key; empty if a column is missing
    key_names: tuple[str, ...]  # of these parameters
    resource_binds: tuple[sa.BindParameter[Any], ...] | None  # None if they do not name the resource
    looked_up: Mapping[str, str]  # attributes to read from the session's object, by parameter
    loaded: sa.BindParameter[Any] | None  # the write id that the program's WHERE clause compares; else None
    shifts_ids: bool  # True if an UPDATE adds a number to the write ids, and does not set them
    is_optional: bool  # may be executed under no lease, and does not change the fence then
    reads_more: bool  # its own writes may change which rows match
    assigns: bool  # True for an UPDATE, False for a DELETE
    listed: Mapping[str, int] = field(default_factory=dict)  # tokens by resource, if a list names the rows
    own_token: sa.ColumnElement[int] | None = None  # the token of each row, as an SQL expression
    names_no_row: bool = False  # the list in its WHERE clause is empty

    @property
    def is_of_flush(self) -> bool:
        """Whether a flush executes the statement. If so, all of its rows should exist."""
        return self.origin == "flush"

    @property
    def names_keys(self) -> bool:
        """Whether the WHERE clause compares the primary key, and nothing else."""
        return len(self.where) == len(self.key)

    @property
    def write(self) -> sa.ColumnElement[int]:
        return self.source.c[self.fenced.write.key]

    def identity(self, row: Row) -> tuple[Any, ...]:
        return values_of(self.key, row)

    def accepts(self, row: Row) -> tuple[int, ...] | None:
        """Return the write ids that the row may have after the statement; None if each id is accepted."""
        loaded = row.get(LOADED_BIND) if self.loaded is None else values_of([self.loaded], row)[0]
        if loaded is None:
            return None
        by = row.get(SHIFT_BIND)
        return loaded, row.get(self.fenced.write.key, loaded) if by is None else shifted(loaded, by)


def form_of(statement: Any, fenced: FencedTable, origin: Origin) -> GuardedStatement:
    known = _forms.setdefault(statement, {})
    form = known.get(origin)
    if form is None:
        form = known[origin] = _with_condition(statement, fenced, origin)
    return form


def _with_condition(statement: Any, fenced: FencedTable, origin: Origin) -> GuardedStatement:
    """Add the condition: the fence is not above the token, and a flushed object has its loaded write id.

    The row must also belong to the token's resource. If the WHERE clause does not ensure this, a criterion is
    added: `SameText` for text, and a comparison with `looked_up` for rows named only by their key.
    """
    source = fenced.source_of(statement)
    assigned = [column for column, _ in private.values_in(statement)]
    if origin != "claim":
        refuse_fence_assignment(map(key_of, assigned), fenced)
    refuse_unguardable(statement, fenced, source)
    fence, assigns = source.c[fenced.fence.key], isinstance(statement, sa.Update)
    write = source.c[fenced.write.key]
    where: list[Any] = []
    own: list[Any] = []
    given = None
    for part in criteria_of(private.where_of(statement)):
        loaded = compared(part, write, operators.eq)
        given = loaded if given is None else given
        (where if loaded is None else own).append(parenthesised(part) if loaded is None else part)
    statement = private.with_where(statement, (*where, *own))
    columns = fenced.template.columns
    pinned = equality_binds(where, source, (*fenced.table.primary_key, *columns.values()))
    key = tuple([pinned[column.key] for column in fenced.table.primary_key if column.key in pinned])
    is_keyed = bool(key) and len(key) == len(fenced.table.primary_key)
    # If the key does not tell the resource, the session's object does. The row may have been deleted and
    # inserted again for another resource, so the object's values are parameters that the database compares.
    looked_up = {
        f"{_LOOKED_UP}{column.key}": mapper.get_property_by_column(column).key
        for mapper in fenced.mappers()[:1]
        for column in columns.values()
        if origin == "core" and is_keyed and column.key not in pinned
    }
    resource_binds = tuple(
        pinned.get(column.key, sa.bindparam(f"{_LOOKED_UP}{column.key}", type_=column.type))
        for column in columns.values()
        if column.key in pinned or looked_up
    )
    if origin == "flush":
        statement = statement.where(is_as_loaded(write))
    shifts_ids = assigns and origin in {"core", "explicit"}
    if shifts_ids:
        statement = shift_ids(statement, fenced, sa.bindparam(SHIFT_BIND, type_=sa.BigInteger))
    token_bind = sa.bindparam(TOKEN_BIND, type_=sa.BigInteger)
    is_optional = fenced.is_optional and origin in {"flush", "core"}
    statement = statement.where(passes(fence, token_bind, optional=is_optional))
    if is_optional and assigns:
        statement = private.with_values(statement, {fence.key: raised(fence, token_bind, optional=True)})
    if len(resource_binds) == len(columns) and origin in {"core", "claim"}:
        named = zip(columns.values(), resource_binds, strict=True)
        statement = statement.where(
            *[
                holds(source.c[column.key], bind)
                for column, bind in named
                if is_text(column) or bind.key.startswith(_LOOKED_UP)
            ]
        )
    if assigns:  # values() may name an attribute, which may be called like another column
        names = {name for name in assigned if isinstance(name, str)}
        refuse_moving(fenced, {key_of(column) for column in assigned}, names)
    return GuardedStatement(
        statement=statement,
        origin=origin,
        fenced=fenced,
        source=source,
        where=tuple(where),
        key=key if is_keyed else (),
        key_names=tuple([each.key for each in key]),
        resource_binds=resource_binds if len(resource_binds) == len(columns) else None,
        looked_up=looked_up,
        loaded=given,
        shifts_ids=shifts_ids,
        is_optional=is_optional,
        reads_more=not is_keyed and reads_more(where, source),
        assigns=assigns,
    )


_NONE: Final[sa.ColumnElement[int]] = sa.literal_column(str(NO_LEASE), sa.BigInteger)


def passes(fence: Any, token: Any, *, optional: bool) -> sa.ColumnElement[bool]:
    """Return the criterion: the fence is not above the token, or (if optional) there is no lease."""
    return sa.or_(fence <= token, token == _NONE) if optional else fence <= token


def is_as_loaded(write: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    """Return the criterion that a row was not written since its object was loaded."""
    return write == sa.bindparam(LOADED_BIND, type_=sa.BigInteger)


def raised(fence: Any, token: Any, *, optional: bool) -> sa.ColumnElement[int]:
    """Return the new fence of a row that `passes` lets through."""
    return sa.case((token == _NONE, fence), else_=token) if optional else token


def shift_ids(statement: sa.Update, fenced: FencedTable, by: Any) -> sa.Update:
    """Return an UPDATE that adds a number to the write ids; loaded objects add it, too (see `tables`)."""
    write = fenced.source_of(statement).c[fenced.write.key]
    by = (write + by) % sa.literal_column(str(LIMIT), sa.BigInteger)
    return private.with_values(statement, {write.key: by})
