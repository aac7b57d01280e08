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
Where the statement itself may change which rows match it (its WHERE clause has a subquery, say), they are
asked for, and locked, before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

from sqlalchemy import BigInteger, Delete, Insert, StatementLambdaElement, Table, TextClause, Update, literal
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.orm import FromStatement
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.lambdas import NullLambdaStatement

from fencelock.errors import FenceError, LockLostError, UnfencedWriteError
from fencelock.guard._bypass import is_bypassed
from fencelock.guard._carried import ready, take_back
from fencelock.guard._insert import NewRows, stamp_insert
from fencelock.guard._sqlalchemy import (
    execute_unguarded,
    has_listeners,
    keeps_order,
    options_to_execute,
    resolved,
)
from fencelock.guard._statement import (
    CLAIM_OPTION,
    LOADED_BIND,
    MOVE_BIND,
    TOKEN_OPTION,
    Row,
    assigned,
    key_of,
    refuse_foreign_assignments,
    wants_token,
)
from fencelock.guard._tables import (
    TRANSLATED,
    FencedTable,
    fenced_table,
    harmless,
    impersonates_fenced,
    inherits_fenced,
    is_harmless,
    note_harmless,
    sub_table_of,
    underlying,
)
from fencelock.guard._write import GuardedWrite, Kind, guard, moving
from fencelock.guard.endings import refuse
from fencelock.guard.events import report
from fencelock.guard.flushes import LoadedIds, in_unit_of_work, tokens_for, writes_fenced_rows
from fencelock.guard.leases import begin_writing, note_born, note_locked, refuse_bypass, report_refusal
from fencelock.guard.row_tokens import Tokens
from fencelock.guard.sessions import note_moved
from fencelock.guard.text import guard_text
from fencelock.guard.verdict import Verdict
from fencelock.guard.write_ids import new_write_id

_Execute: TypeAlias = Callable[[Any, Connection, Sequence[Row], Mapping[str, Any]], CursorResult[Any]]
"""How a statement executes itself on a connection, once for each of the parameters, with these options."""

_Written: TypeAlias = tuple[GuardedWrite, Sequence[Row], LoadedIds | None]
"""What is known of a guarded statement, the parameters of each execution, and of objects what was loaded."""

_DML: Final = (Update, Delete, Insert)

_Known: TypeAlias = dict[Kind, tuple[Any, GuardedWrite]]
"""The guarded forms of a statement, by its kind."""

_guarded: WeakKeyDictionary[ClauseElement, _Known] = WeakKeyDictionary()
"""By statement, its guarded forms. SQLAlchemy's own statements are the same objects at each flush."""


def guarding(execute: _Execute) -> _Execute:
    """Return a kind of statement's way to execute itself, with the guard around it."""

    def guarded(
        statement: Any, connection: Connection, rows: Sequence[Row], options: Mapping[str, Any]
    ) -> CursorResult[Any]:
        own, common = options_to_execute(statement), options_to_execute(connection)
        if _is_of_no_concern(statement) and not (
            TRANSLATED in options or TRANSLATED in common or TRANSLATED in own
        ):
            return execute(statement, connection, rows, options)  # most often, so do not dwell on it
        merged = own.merge_with(common, options)
        try:
            form = _guarded_form(connection, statement, rows, merged)
        except (FenceError, LockLostError) as error:
            report(error, table=getattr(underlying(getattr(statement, "table", None)), "name", None))
            refuse(connection, error)
            raise
        if form is None:
            return execute(statement, connection, rows, options)
        statement, rows, written = form
        result = execute_unguarded(connection, statement, rows, merged)
        _follow(result, statement)
        if isinstance(written, NewRows):
            note_born(connection, written.resources(result))
            written = None
        executed: Any = result.context.invoked_statement
        if has_listeners(connection):
            written = _written_by(executed, statement, written, result, merged)
        if written is not None:
            _check(connection, written, merged, result)
        elif isinstance(statement, TextClause):
            take_back(connection)
        return result

    return guarded


def _follow(result: CursorResult[Any], statement: object) -> None:
    """Have SQLAlchemy not expire the moved ids of a statement's objects: they follow it, see `_loading`."""
    fenced = fenced_table(statement.table) if isinstance(statement, Update) else None
    compiled: Any = result.context.compiled
    computed: list[Any] = compiled.postfetch if fenced is not None else []
    if fenced is not None and fenced.write in computed:
        computed.remove(fenced.write)


def _guarded_form(
    connection: Connection, statement: Any, rows: Sequence[Row], options: Mapping[str, Any]
) -> tuple[Any, Sequence[Row], _Written | NewRows | None] | None:
    """Return a statement and its parameters with the fence, and what is to be checked or noted afterwards.

    None where the guard has nothing to do with it.

    Raises:
        FenceError: for a write that is refused.
    """
    rows = rows or [{}]
    if isinstance(statement, TextClause):
        text = None if is_bypassed(options, connection) else guard_text(connection, statement, rows)
        return None if text is None else (*text, None)
    dml = _innermost(statement)
    if not isinstance(dml, _DML):
        return None
    if is_bypassed(options, connection):
        if TOKEN_OPTION in options or wants_token(statement, rows):
            refuse_bypass(options, connection)
        return _unguarded_form(connection, statement, rows, options) if dml is statement else None
    if dml is not statement and _holds_fenced_rows(dml.table):
        raise UnfencedWriteError(
            f"a write to {underlying(dml.table).name!r} inside lambda_stmt() or from_statement() cannot be "
            f"guarded: execute the plain statement, with returning() of the model if it is to return objects"
        )
    fenced = fenced_table(dml.table)
    if fenced is None:
        known = harmless()
        _refuse_unguardable(connection, dml, rows, options)
        if TRANSLATED not in options and type(dml.table) is Table and not _holds_fenced_rows(dml.table):
            note_harmless(dml.table, known)
        return None
    writer = begin_writing(connection, options, fenced)
    tokens = None if TOKEN_OPTION in options else tokens_for(connection, fenced, options, writer)
    if isinstance(dml, Insert):
        rows, new = stamp_insert(dml, fenced, rows, options, tokens)
        return dml, rows, new
    guarded, written = _guarded_write(connection, dml, fenced, rows, options, tokens=tokens)
    return guarded, written[1], written


def _unguarded_form(
    connection: Connection, statement: Any, rows: Sequence[Row], options: Mapping[str, Any]
) -> tuple[Any, Sequence[Row], None] | None:
    """Return an UPDATE that goes around the guard, with new ids for what it writes: others shall notice."""
    note_moved(connection, 0)
    fenced = fenced_table(statement.table) if isinstance(statement, Update) else None
    if fenced is None or fenced.write is None or CLAIM_OPTION in options or keeps_order(statement):
        return None
    if in_unit_of_work(connection, fenced, options) or fenced.write.key in map(
        key_of, dict(assigned(statement))
    ):
        return None
    by = new_write_id()
    note_moved(connection, by)
    return moving(statement, fenced, literal(by, BigInteger)), rows, None


def _guarded_write(
    connection: Connection,
    statement: Update | Delete,
    fenced: FencedTable,
    rows: Sequence[Row],
    options: Mapping[str, Any],
    *,
    tokens: Tokens | None,
) -> tuple[Update | Delete, _Written]:
    """Return an UPDATE or DELETE with the condition, what is known of it, and its parameters.

    Raises:
        FenceError: if the rows are known to turn it away.
    """
    objects = None if tokens is None else tokens.loaded
    kind = Kind(tokens is None, objects is not None, claims=CLAIM_OPTION in options)
    known = _guarded.get(statement)
    if known is None:
        known = _guarded[statement] = {}
    guarded, write = known.get(kind) or _guard(known, statement, fenced, kind)
    stamped = write.stamp(connection, rows, options, tokens)
    if objects is not None and write.key and any(row[LOADED_BIND] is None for row in stamped):
        kind = kind._replace(blind=True)
        guarded, write = known.get(kind) or _guard(known, statement, fenced, kind)
    if objects is None:
        note_moved(connection, stamped[0][MOVE_BIND] if write.moves else 0)
    if write.carries:
        ready(connection)
    verdict = Verdict(write, stamped, connection, options)
    refusal = verdict.foreseen() if write.reads_more else None
    if objects is not None and refusal is None:
        refusal = verdict.gone_before()
    if refusal is not None:
        _raise(connection, refusal)
    return guarded, (write, stamped, objects)


def _holds_fenced_rows(table: Any) -> bool:
    """Tell whether a table is fenced, or completes one that is; it may be so only since it was looked at."""
    return fenced_table(table) is not None or sub_table_of(table) is not None


def _is_of_no_concern(statement: Any) -> bool:
    """Tell whether a statement writes a table known to be plain, and names no column of any other."""
    return (
        isinstance(statement, _DML)
        and is_harmless(statement.table)
        and not getattr(statement, "_values", None)
        and not getattr(statement, "_ordered_values", None)  # SQLAlchemy 2.0
    )


def _innermost(statement: Any) -> Any:
    """Return the UPDATE, DELETE or INSERT behind a lambda, and inside `select(…).from_statement(…)`."""
    is_spoilt = isinstance(statement, NullLambdaStatement)  # of these SQLAlchemy says that they do not write
    if is_spoilt or (isinstance(statement, StatementLambdaElement) and statement.is_dml):
        return _innermost(resolved(statement))
    return _innermost(statement.element) if isinstance(statement, FromStatement) else statement


def _written_by(
    executed: Any,
    guarded: Any,
    written: _Written | None,
    result: CursorResult[Any],
    options: Mapping[str, Any],
) -> _Written | None:
    """Return what is to be checked of what listeners for `before_execute` have made of a guarded statement.

    They may have exchanged the statement, the parameters, or both.
    """
    if executed is guarded:
        return written and (written[0], _sent(result.context), written[2])
    fenced = fenced_table(executed.table) if isinstance(executed, Update | Delete) else None
    if fenced is None:
        return None
    _, write = guard(executed, fenced, Kind(TOKEN_OPTION in options, sent=True))
    return write, _sent(result.context), None


def _sent(context: Any) -> list[dict[str, Any]]:
    """Return the parameters that a statement was executed with, without those that have made-up names."""
    named = [(bind.key, name) for bind, name in context.compiled.bind_names.items() if not bind.unique]
    return [{key: sent[name] for key, name in named if name in sent} for sent in context.compiled_parameters]


def _check(
    connection: Connection,
    written: _Written,
    options: Mapping[str, Any],
    result: CursorResult[Any],
) -> None:
    """Raise where the fence has turned a guarded statement away, or an object's row is gone."""
    write, rows, objects = written
    if write.carries:
        take_back(connection)
    verdict = Verdict(write, rows, connection, options)
    if verdict.wrote_all(result):
        note_locked(connection, partial(write.names, rows), len(rows))
    else:
        refusal = verdict.refused()
        if refusal is None and objects is not None:
            refusal = verdict.missed(result)
        if refusal is not None:
            result.close()
            _raise(connection, refusal)


def _raise(connection: Connection, refusal: FenceError) -> NoReturn:
    """Raise an error once nothing can come of what the statement belongs to."""
    report_refusal(connection, refusal)
    refuse(connection, refusal)
    raise refusal


def _guard(
    known: _Known, statement: Update | Delete, fenced: FencedTable, kind: Kind
) -> tuple[Update | Delete, GuardedWrite]:
    """Return the statement with the condition, for the first time as this kind, and make it known."""
    found = known[kind] = guard(statement, fenced, kind)
    return found


def _refuse_unguardable(
    connection: Connection, statement: Any, rows: Sequence[Row], options: Mapping[str, Any]
) -> None:
    """Refuse a write to a table that is not fenced itself but reaches a fenced one's rows."""
    table = statement.table
    base = sub_table_of(table)
    if base is not None:
        if not in_unit_of_work(connection, base, options):
            raise UnfencedWriteError(
                f"{table.name!r} holds part of the rows of {base.name!r}, where their fence is; change such "
                f"rows through their objects, so that the unit of work writes both tables"
            )
        if isinstance(statement, Update) and not writes_fenced_rows(
            connection, base, underlying(table), rows
        ):
            raise UnfencedWriteError(
                f"a relationship with post_update writes to {table.name!r} and leaves {base.name!r} alone, "
                f"where the fence of its rows is; set the foreign key on the objects that have it, or do "
                f"without post_update"
            )
    elif parent := inherits_fenced(table):
        raise UnfencedWriteError(
            f"{underlying(table).name!r} inherits from the fenced table {parent!r}, and its rows are rows of "
            f"that one: write them through {parent!r}, or fence {underlying(table).name!r} as well"
        )
    elif impersonates_fenced(table, options):
        raise UnfencedWriteError(
            f"this Table object is named {underlying(table).name!r} like a fenced table, but is not the one "
            f"that the guard knows; use the model's __table__; or, if it is the table of another database, "
            f'execution_options(fencelock="bypass")'
        )
    refuse_foreign_assignments(statement, options)
