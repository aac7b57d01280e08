"""Adds the fence to statements, and finds out afterwards whether it has turned them away.

Every UPDATE of a fenced table becomes `UPDATE … SET …, last_fencing_token = :token WHERE … AND
last_fencing_token <= :token`, every DELETE gets the same condition, every INSERT the token. The check and
the write are thereby one atomic act of the database. The token travels as a parameter, never inside the
statement: SQLAlchemy's compiled cache, executemany and insertmanyvalues all keep working.

Which rows a statement may touch decides which lease is needed. It is read off the WHERE clause: where every
column of `__fence_resource__` is compared with `==` to a value (as all statements of the unit of work do for
the primary key), the resource is known before anything is sent. Statements that leave it open are refused.

Afterwards the rowcount is compared with the number of keys that the statement named. Where it is smaller,
not to be trusted, or says nothing because the statement named no whole key, one query asks for a row that
matches the statement and has a larger fence. A row that is simply gone is left to SQLAlchemy's own errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import BigInteger, Delete, Insert, Select, Update, bindparam, select, tuple_
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.sql import ClauseElement, ColumnElement, FromClause, operators
from sqlalchemy.sql.elements import BinaryExpression, BindParameter, BooleanClauseList, Grouping
from sqlalchemy.sql.schema import ScalarElementColumnDefault
from sqlalchemy.sql.selectable import AliasedReturnsRows

from fencelock.errors import StaleTokenError, UnfencedWriteError
from fencelock.guard._tables import (
    FENCE_COLUMN,
    FencedTable,
    fenced_table,
    impersonates_fenced,
    sub_table_of,
    underlying,
)
from fencelock.guard.session import BYPASS, Tokens, in_unit_of_work, roll_back, row_of
from fencelock.token import check as check_token

TOKEN_BIND: Final = "fencelock_token"  # noqa: S105  no password
"""Name of the parameter that carries the token into the condition."""

TOKEN_OPTION: Final = "fencelock_token"  # noqa: S105  no password
"""Execution option with which `execute_fenced` hands over an explicit token."""

LOCKING_READS: Final = frozenset({"mysql", "mariadb"})
"""Dialects whose plain SELECT reads an old snapshot under the default isolation level (REPEATABLE READ)."""

_KEYS_PER_QUERY: Final = 500

Row = Mapping[str, Any]

_writes: WeakKeyDictionary[ClauseElement, GuardedWrite] = WeakKeyDictionary()
_rewritten: WeakKeyDictionary[ClauseElement, GuardedWrite] = WeakKeyDictionary()


def before_execute(
    connection: Connection,
    statement: Any,
    multiparams: Sequence[Row],
    params: Row,
    options: Mapping[str, Any],
) -> tuple[Any, Sequence[Row], Row]:
    """Guard a statement on its way to the database, or refuse it."""
    if not getattr(statement, "is_dml", False) or _bypassed(options):
        return statement, multiparams, params
    fenced = fenced_table(statement.table)
    if fenced is None:
        _refuse_unguardable(connection, statement)
        return statement, multiparams, params
    _refuse_autocommit(connection, options, fenced)
    rows = multiparams or [params]
    if isinstance(statement, Insert):
        statement, rows = _stamp_insert(connection, statement, fenced, rows, options)
    else:
        write = _guarded(statement, fenced)
        statement, rows = write.statement, write.stamp(connection, rows, options)
    return (statement, rows, {}) if multiparams else (statement, [], rows[0])


def after_execute(  # noqa: PLR0917  SQLAlchemy's signature
    connection: Connection,
    statement: Any,
    multiparams: Sequence[Row],
    params: Row,
    options: Mapping[str, Any],
    result: CursorResult[Any],
) -> None:
    """Raise where the fence has turned a guarded statement away."""
    if not getattr(statement, "is_dml", False):
        return
    write = _rewritten.get(statement)
    if write is None or _bypassed(options):
        return
    stale = write.refused(connection, multiparams or [params], options, result)
    if stale is not None:
        result.close()
        roll_back(connection)
        raise stale


def _bypassed(options: Mapping[str, Any]) -> bool:
    choice = options.get("fencelock")
    if choice not in (None, BYPASS):
        raise ValueError(f"the execution option fencelock is {BYPASS!r} or left away, not {choice!r}")
    return choice is not None


def _refuse_unguardable(connection: Connection, statement: Any) -> None:
    """Refuse a write to a table that is not fenced itself but reaches a fenced one's rows."""
    table = statement.table
    base = sub_table_of(table)
    if base is not None:
        if not in_unit_of_work(connection):
            raise UnfencedWriteError(
                f"{table.name!r} holds part of the rows of {base.name!r}, where their fence is; change such "
                f"rows through their objects, so that the unit of work writes both tables"
            )
    elif impersonates_fenced(table):
        raise UnfencedWriteError(
            f"this Table object is named {underlying(table).name!r} like a fenced table, but is not the one "
            f"that the guard knows; use the model's __table__"
        )
    _refuse_foreign_assignments(statement, underlying(table))


def _refuse_autocommit(connection: Connection, options: Mapping[str, Any], fenced: FencedTable) -> None:
    level = options.get("isolation_level") or getattr(connection.dialect, "_on_connect_isolation_level", None)
    if level == "AUTOCOMMIT":
        raise UnfencedWriteError(
            f"a write to {fenced.name!r} needs a transaction: on an AUTOCOMMIT connection the rows before a "
            f"refused one would stay written"
        )


def _explicit_token(options: Mapping[str, Any]) -> int | None:
    token = options.get(TOKEN_OPTION)
    return None if token is None else check_token(token)


def _value(bind: BindParameter[Any], row: Row) -> Any:
    return row[bind.key] if bind.key in row else bind.effective_value  # noqa: SIM401  may be a callable


def _assigned(statement: Update | Delete | Insert) -> Iterator[tuple[Any, Any]]:
    """Return the columns (or their keys) that the statement itself assigns, and the values."""
    yield from (getattr(statement, "_values", None) or {}).items()
    yield from getattr(statement, "_ordered_values", None) or ()  # SQLAlchemy 2.0


def _key(column: Any) -> str:
    key: str = getattr(column, "key", column)
    return key


def _refuse_foreign_assignments(statement: Any, table: Any) -> None:
    """Refuse an UPDATE of several tables (MySQL) that assigns to a fenced one besides its target."""
    for column, _ in _assigned(statement):
        other = underlying(getattr(column, "table", None))
        if other is None or hash(other) == hash(table):
            continue
        if fenced_table(other) or sub_table_of(other) or impersonates_fenced(other):
            raise UnfencedWriteError(
                f"an UPDATE of {table.name!r} that also assigns to the fenced table {other.name!r} cannot be "
                f"guarded; update {other.name!r} in a statement of its own"
            )


def _refuse_fence_assignment(keys: Iterable[str], fenced: FencedTable) -> None:
    if FENCE_COLUMN in keys or fenced.fence.key in keys:
        raise ValueError(
            f"{FENCE_COLUMN} of {fenced.name!r} belongs to the guard, which writes the lease's token there; "
            f"leave it out of values()"
        )


# UPDATE and DELETE


@dataclass(eq=False, slots=True)
class GuardedWrite:
    """An UPDATE or DELETE with the condition, and what is known of the rows that it names.

    Attributes:
        fenced: the table.
        source: the table, or the alias of it, that the statement writes to.
        statement: with the condition added.
        where: the criteria without the condition.
        pins: by column key, the parameter that the WHERE clause says the column equals.
        keyed: whether the whole primary key is pinned, so that one execution writes one row at most.
        by_key_only: whether the WHERE clause consists of nothing else.
    """

    fenced: FencedTable
    source: FromClause
    statement: Update | Delete
    where: tuple[ColumnElement[Any], ...]
    pins: Mapping[str, BindParameter[Any]]
    keyed: bool
    by_key_only: bool

    def stamp(
        self, connection: Connection, rows: Sequence[Row], options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the parameters of each execution with its token added."""
        if isinstance(self.statement, Update):
            self._refuse_moving(rows[0])
            names = [self.fenced.fence.key, TOKEN_BIND]
        else:
            names = [TOKEN_BIND]
        token_of = self._token_source(connection, options)
        return [{**row, **dict.fromkeys(names, token_of(row))} for row in rows]

    def _token_source(self, connection: Connection, options: Mapping[str, Any]) -> Callable[[Row], int]:
        token = _explicit_token(options)
        if token is None:
            tokens = Tokens(connection, self.fenced)
            if self.fenced.template is not None:
                return lambda row: tokens.of_row(self._resource_values(connection, row))
            token = tokens.of_table()
        return lambda _row: token

    def _resource_values(self, connection: Connection, row: Row) -> Mapping[str, Any]:
        template = self.fenced.template
        assert template is not None  # noqa: S101  only asked for tables with a template
        pins = self.pins
        if all(column.key in pins for column in template.columns.values()):
            return {name: _value(pins[column.key], row) for name, column in template.columns.items()}
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
        if template is None:
            return
        changed = {_key(column) for column, _ in _assigned(self.statement)}
        for name, column in template.columns.items():
            if column.key in row or name in changed or column.key in changed:
                raise UnfencedWriteError(
                    f"{name} of {self.fenced.name!r} must not change: {template.text!r} is made of it, and "
                    f"no one lease guards a row both before and after; delete the row and insert another"
                )

    def _identity(self, row: Row) -> tuple[Any, ...]:
        return tuple(_value(self.pins[column.key], row) for column in self.fenced.table.primary_key)

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
            found = connection.execute(
                _newest(query, connection), values, execution_options=passed_on
            ).first()
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
        if not self.by_key_only:
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


def _newest(query: Select[Any], connection: Connection) -> Select[Any]:
    """Make a query read what is committed now, not what was when the transaction's snapshot was taken."""
    return query.with_for_update(read=True) if connection.dialect.name in LOCKING_READS else query


def _guarded(statement: Update | Delete, fenced: FencedTable) -> GuardedWrite:
    """Return the guarded form of a statement; SQLAlchemy's own statements are the same objects each time."""
    write = _writes.get(statement)
    if write is None:
        write = _writes[statement] = _guard(statement, fenced)
        _rewritten[write.statement] = write
    return write


def _guard(statement: Update | Delete, fenced: FencedTable) -> GuardedWrite:
    if isinstance(statement, Update):
        _refuse_fence_assignment({_key(column) for column, _ in _assigned(statement)}, fenced)
        _refuse_foreign_assignments(statement, fenced.table)
    source = statement.table if isinstance(statement.table, AliasedReturnsRows) else fenced.table
    where = list(_conjuncts(statement._where_criteria))  # noqa: SLF001  no public way to read the criteria
    plain = tuple(clause for clause in where if not _is_condition(clause))
    if len(plain) == len(where):
        statement = statement.where(source.c[fenced.fence.key] <= bindparam(TOKEN_BIND, type_=BigInteger))
    pins = dict(_pins(plain, source, fenced))
    key = {column.key for column in fenced.table.primary_key}
    keyed = bool(key) and key <= pins.keys()
    return GuardedWrite(
        fenced=fenced,
        source=source,
        statement=statement,
        where=plain,
        pins=pins,
        keyed=keyed,
        by_key_only=keyed and len(plain) == len(key),
    )


def _conjuncts(criteria: Iterable[Any]) -> Iterator[Any]:
    """Return the parts that must all be true."""
    for clause in criteria:
        if isinstance(clause, Grouping):
            yield from _conjuncts([clause.element])
        elif isinstance(clause, BooleanClauseList) and clause.operator is operators.and_:
            yield from _conjuncts(clause.clauses)
        else:
            yield clause


def _is_condition(clause: Any) -> bool:
    """Tell whether this is the condition on the fence, as `fenced_update` builds it."""
    right = getattr(clause, "right", None)
    return isinstance(right, BindParameter) and right.key == TOKEN_BIND


def _pins(
    clauses: Iterable[Any], source: FromClause, fenced: FencedTable
) -> Iterator[tuple[str, BindParameter[Any]]]:
    """Return the columns, of those that matter, that are said to equal one parameter."""
    resource = fenced.template.columns.values() if fenced.template else ()
    keys = {source.c[column.key]: column.key for column in (*fenced.table.primary_key, *resource)}
    for clause in clauses:
        if isinstance(clause, BinaryExpression) and clause.operator is operators.eq:
            for column, value in ((clause.left, clause.right), (clause.right, clause.left)):
                if isinstance(value, BindParameter) and column in keys:
                    yield keys[column], value


# INSERT


def _stamp_insert(
    connection: Connection,
    statement: Insert,
    fenced: FencedTable,
    rows: Sequence[Row],
    options: Mapping[str, Any],
) -> tuple[Insert, list[dict[str, Any]]]:
    """Add the token to the rows of an INSERT."""
    _refuse_overwriting_insert(statement, fenced)
    assigned = {_key(column): value for column, value in _assigned(statement)}
    _refuse_fence_assignment(assigned, fenced)
    token_of = _insert_token_source(connection, fenced, assigned, options)
    fence = fenced.fence.key
    if statement._multi_values:  # noqa: SLF001  no public way to read them
        return _stamp_multi_values(statement, fenced, token_of), [dict(row) for row in rows]
    return statement, [{**row, fence: token_of(row)} for row in rows]


def _stamp_multi_values(statement: Insert, fenced: FencedTable, token_of: Callable[[Row], int]) -> Insert:
    """Add the token to `insert().values([{…}, {…}])`, whose rows are part of the statement."""
    stamped = []
    for group in statement._multi_values:  # noqa: SLF001  no public way to read them
        for row in group:
            if not isinstance(row, Mapping):
                raise UnfencedWriteError(
                    f"rows inserted into {fenced.name!r} by position cannot be stamped; give them as dicts"
                )
            named = {_key(column): value for column, value in row.items()}
            _refuse_fence_assignment(named, fenced)
            stamped.append({**row, fenced.fence: token_of(named)})
    bare = statement._generate()  # noqa: SLF001  values() only ever adds rows
    bare._multi_values = ()  # noqa: SLF001  the same
    return bare.values(stamped)


def _refuse_overwriting_insert(statement: Insert, fenced: FencedTable) -> None:
    """Refuse an INSERT that may write to rows that exist, or whose rows nobody has seen yet."""
    if statement._post_values_clause is not None or statement._prefixes:  # noqa: SLF001  no public way
        raise UnfencedWriteError(
            f"INSERT with ON CONFLICT, ON DUPLICATE KEY, OR REPLACE or IGNORE into {fenced.name!r} may touch "
            f"rows that a newer holder has fenced; claim the row and update it, or insert it"
        )
    if statement.select is not None:
        raise UnfencedWriteError(
            f"INSERT … SELECT into {fenced.name!r} cannot be stamped; read the rows and insert them"
        )


def _insert_token_source(
    connection: Connection,
    fenced: FencedTable,
    assigned: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Callable[[Row], int]:
    token = _explicit_token(options)
    if token is None:
        tokens = Tokens(connection, fenced)
        if fenced.template is not None:
            return lambda row: _new_row_token(tokens, {**assigned, **row})
        token = tokens.of_table()
    return lambda _row: token


def _new_row_token(tokens: Tokens, row: Row) -> int:
    """Return the token to stamp a new row with.

    Where the database makes the key, and the key makes the resource's name, nobody can have locked the
    resource yet: some lease must be held, and the row begins with the fence 0, open to its first holder.
    """
    template = tokens.fenced.template
    assert template is not None  # noqa: S101  only asked for tables with a template
    values: dict[str, Any] = {}
    for name, column in template.columns.items():
        value = row.get(column.key, row.get(name))
        if value is None and isinstance(column.default, ScalarElementColumnDefault):
            value = column.default.arg
        if isinstance(value, BindParameter):
            value = value.effective_value
        if value is None and column.primary_key:
            return 0
        if value is None or isinstance(value, ClauseElement):
            raise UnfencedWriteError(
                f"which resource guards a new row of {tokens.fenced.name!r} is not known before the database "
                f"has made it: give {name} a plain value, because {template.text!r} is made of it"
            )
        values[name] = value
    return tokens.of_row(values)
