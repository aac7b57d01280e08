"""Executes UPDATE, DELETE and INSERT of a fenced table with the guard around them.

Which rows a statement may touch decides which lease is needed. It is read off the WHERE clause: where every
column of `__fence_resource__` is compared with `==` to a value, the resource is known before anything is
sent. Objects bring their token with them. Statements that leave it open are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from sqlalchemy import BigInteger, Column, Insert, TextClause, Update, literal
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.schema import ScalarElementColumnDefault

from fencelock.errors import FenceError, LockLostError, UnfencedWriteError
from fencelock.guard._sqlalchemy import (
    execute_unguarded,
    inserts_plainly,
    keeps_order,
    options_to_execute,
    values_in,
)
from fencelock.guard.conditions import (
    CLAIM_OPTION,
    LOADED_BIND,
    MOVE_BIND,
    TOKEN_OPTION,
    Form,
    Kind,
    Row,
    criteria_of,
    form_of,
    key_of,
    moving,
    pins,
    refuse_fence_assignment,
    values_of,
    wants_token,
)
from fencelock.guard.dialects import TOKEN_BIND, ready, take_back
from fencelock.guard.endings import refuse
from fencelock.guard.events import report
from fencelock.guard.leases import Tokens, begin_writing, report_refusal
from fencelock.guard.objects import Stamp, flush_of, is_deleted, loaded_values, new_stamp, object_of
from fencelock.guard.sessions import is_bypassed, note_moved, refuse_bypass
from fencelock.guard.tables import WRITE_COLUMN, FencedTable, fenced_table, sub_table_of, underlying
from fencelock.guard.text import GUARDED, guard_text
from fencelock.guard.verdict import Verdict
from fencelock.guard.write_ids import new_write_id

_Execute: TypeAlias = Callable[[Any, Connection, Sequence[Row], Mapping[str, Any]], CursorResult[Any]]
"""How a statement executes itself on a connection, once for each of the parameters, with these options."""


def guarding(execute: _Execute) -> _Execute:
    """Return a kind of statement's way to execute itself, with the guard around it."""

    def guarded(
        statement: Any, connection: Connection, rows: Sequence[Row], options: Mapping[str, Any]
    ) -> CursorResult[Any]:
        table = None if isinstance(statement, TextClause) else statement.table
        fenced = fenced_table(table)
        base = sub_table_of(table) if fenced is None else None
        if fenced is None and base is None and table is not None:
            return execute(statement, connection, rows, options)  # most often, so do not dwell on it
        merged = options_to_execute(statement).merge_with(options_to_execute(connection), options)
        verdict = None
        try:
            if is_bypassed(merged, connection):
                statement = _around(connection, statement, fenced, rows, merged)
            elif fenced is not None:
                statement, rows, verdict = _guarded(connection, statement, fenced, rows or [{}], merged)
            elif base is not None:
                _check_sub_table(connection, statement, base, rows, merged)
            else:
                statement, rows, merged = guard_text(connection, statement, rows, merged)
        except (FenceError, LockLostError) as error:
            report(error, table=getattr(underlying(table), "name", None))
            refuse(connection, error)
            raise
        if fenced is not None or base is not None:
            merged = merged.union({GUARDED: True})
        result = execute_unguarded(connection, statement, rows, merged)
        if fenced is None or fenced.strict:
            take_back(connection)
        _follow(result, statement, fenced)
        refusal = verdict and verdict.of(result)
        if refusal:
            result.close()
            _raise(connection, refusal)
        return result

    return guarded


def _follow(result: CursorResult[Any], statement: object, fenced: FencedTable | None) -> None:
    """Have SQLAlchemy not expire the moved ids of a statement's objects: they follow it, see `objects`."""
    compiled: Any = result.context.compiled
    computed: list[Any] = compiled.postfetch if isinstance(statement, Update) else []
    if fenced is not None and fenced.write in computed:
        computed.remove(fenced.write)


def _raise(connection: Connection, refusal: FenceError) -> NoReturn:
    """Raise an error once nothing can come of what the statement belongs to."""
    report_refusal(connection, refusal)
    refuse(connection, refusal)
    raise refusal


def _around(
    connection: Connection,
    statement: Any,
    fenced: FencedTable | None,
    rows: Sequence[Row],
    options: Mapping[str, Any],
) -> Any:
    """Return a statement that goes around the guard. An UPDATE gives what it writes new ids all the same."""
    if TOKEN_OPTION in options or wants_token(statement, rows or [{}]):
        refuse_bypass(options, connection)
    if not isinstance(statement, Update) or fenced is None or fenced.write is None:
        return statement
    brings_its_own = fenced.write.key in {
        *(key_of(column) for column, _ in values_in(statement)),
        *(rows[0] if rows else ()),
    }
    if brings_its_own or CLAIM_OPTION in options or keeps_order(statement):
        note_moved(connection, 0)
        return statement
    by = new_write_id()
    note_moved(connection, by)
    return moving(statement, fenced, literal(by, BigInteger))


def _guarded(
    connection: Connection,
    statement: Any,
    fenced: FencedTable,
    rows: Sequence[Row],
    options: Mapping[str, Any],
) -> tuple[Any, Sequence[Row], Verdict | None]:
    """Return a statement with the condition, its parameters, and what tells afterwards if it was refused."""
    begin_writing(connection, options, fenced)
    token: int | None = options.get(TOKEN_OPTION)
    flush = flush_of(connection, fenced, options) if token is None else None
    tokens = flush if flush is not None or token is not None else Tokens(connection, fenced)
    if flush is not None:
        flush.check()
    if isinstance(statement, Insert):
        return statement, stamp_insert(statement, fenced, rows, token, tokens), None
    if flush is not None:
        stamped, kind = _unpack_stamps(connection, statement, fenced, rows, flush)
    else:
        kind = "claim" if CLAIM_OPTION in options else "core" if token is None else "explicit"
        stamped = _stamp_rows(connection, form_of(statement, fenced, kind), rows, token or tokens)
    form = form_of(statement, fenced, kind)
    if form.assigns:
        _refuse_moving(form, rows[0])
    if fenced.strict:
        ready(connection)
    verdict = Verdict(form, stamped, connection, options, of_objects=flush is not None)
    refusal = verdict.foreseen()
    if refusal is not None:
        _raise(connection, refusal)
    return form.statement, stamped, verdict


def _unpack_stamps(
    connection: Connection, statement: Any, fenced: FencedTable, rows: Sequence[Any], tokens: Tokens
) -> tuple[Sequence[dict[str, Any]], Kind]:
    """Take the stamps of a flush's rows apart. The unit of work has made the rows for this statement."""
    assert fenced.write is not None  # noqa: S101  a model has it
    fence, write, write_id = fenced.fence.key, fenced.write.key, tokens.write_id
    assigns, kind = isinstance(statement, Update), "objects"
    for row in rows:
        stamp = row.get(write)
        if type(stamp) is not Stamp or stamp.loaded is None:
            stamp = _stamp_of(connection, form_of(statement, fenced, "objects"), row, tokens)
            if stamp.loaded is None:
                kind = "blind"
        row[TOKEN_BIND] = stamp.token
        row[LOADED_BIND] = stamp.loaded
        stamp.loaded = write_id  # what a second statement of this flush finds
        if assigns:
            row[fence] = stamp.token
            row[write] = write_id
    return rows, kind  # type: ignore[return-value]


def _stamp_of(connection: Connection, form: Form, row: dict[str, Any], tokens: Tokens) -> Stamp:
    """Return the stamp of a row that does not bring one, or one that does not know what it replaces.

    The first is that of DELETE and `post_update`, or of an object that a listener has changed since; the
    second of a new object that takes the place of a deleted one.
    """
    write: Any = form.fenced.write
    state = object_of(connection, form.fenced, form.identity(row)) if form.key else None
    known = None if state is None else state.dict.get(WRITE_COLUMN)
    stamp = row.get(write.key)
    if type(stamp) is Stamp:
        stamp.loaded = None if known is stamp or known is None else int(known)
        if type(known) is Stamp:  # that of the deleted object
            stamp.loaded = known.loaded
        return stamp
    if type(known) is Stamp and known == tokens.write_id:
        return known
    loaded = tokens.write_id if state is None else None if known is None else int(known)
    made = new_stamp(tokens.write_id, _token_of(form, tokens, row, state), loaded)
    if state is not None and form.assigns:
        state.dict[WRITE_COLUMN] = made
    return made


def _stamp_rows(
    connection: Connection, form: Form, rows: Sequence[Row], token: int | Tokens | None
) -> list[dict[str, Any]]:
    """Return the parameters of a statement of the program's own, with tokens and write ids."""
    fenced = form.fenced
    by = new_write_id() if form.assigns and fenced.write is not None and form.kind != "claim" else None
    stamped = []
    for given in rows:
        row = dict(given)
        if isinstance(token, Tokens):
            state = object_of(connection, fenced, form.identity(row)) if form.looked_up else None
            row[TOKEN_BIND] = _token_of(form, token, row, state)
        else:
            row[TOKEN_BIND] = token
        if form.assigns:
            row[fenced.fence.key] = row[TOKEN_BIND]
        if by is not None and fenced.write is not None:
            row[MOVE_BIND if form.moves else fenced.write.key] = by
        stamped.append(row)
    note_moved(connection, by if by is not None and form.moves else 0)
    return stamped


def _token_of(form: Form, tokens: Tokens, row: dict[str, Any], state: Any) -> int:
    """Return the token of a row that the WHERE clause names, or that the session knows."""
    template = form.fenced.template
    if state is not None and form.looked_up:
        values = loaded_values(tuple(form.looked_up.values()), state)
        row.update(zip(form.looked_up, values or (), strict=False))
    if form.naming is not None and row.keys() >= form.looked_up.keys():
        return tokens.of_row(values_of(form.naming, row))
    tokens.need_some()
    raise UnfencedWriteError(
        f"this statement does not say which resource guards the rows it writes: {form.fenced.name!r} is "
        f"guarded by {template.text!r}, so compare {' and '.join(template.columns)} with == in its WHERE "
        f"clause, or change the rows through their objects"
    )


def _refuse_moving(form: Form, row: Row) -> None:
    """Refuse to change a column that the resource's name is made of."""
    template = form.fenced.template
    for name, column in template.columns.items():
        if column.key in row or name == form.moves_name:
            raise UnfencedWriteError(
                f"{name} of {form.fenced.name!r} must not change: {template.text!r} is made of it, and "
                f"no one lease guards a row both before and after; delete the row and insert another"
            )


def _check_sub_table(
    connection: Connection, statement: Any, base: FencedTable, rows: Sequence[Row], options: Mapping[str, Any]
) -> None:
    """Let a flush write a joined sub-table, if it writes the fenced rows as well.

    It does not where only a relationship with `post_update` on the other side wants the sub-table changed.
    """
    table = underlying(statement.table)
    flush = flush_of(connection, base, options)
    if flush is None:
        raise UnfencedWriteError(
            f"{table.name!r} holds part of the rows of {base.name!r}, where their fence is; change such "
            f"rows through their objects, so that the unit of work writes both tables"
        )
    if not isinstance(statement, Update):
        return
    pinned = pins(criteria_of(statement), table, table.primary_key)
    for row in rows:
        state = object_of(connection, base, values_of([pinned[each.key] for each in table.primary_key], row))
        if state is None or base.table not in state.mapper.tables or is_deleted(state):
            continue
        stamp = state.dict.get(WRITE_COLUMN)
        if type(stamp) is not Stamp or stamp != flush.write_id:
            raise UnfencedWriteError(
                f"a relationship with post_update writes to {table.name!r} and leaves {base.name!r} alone, "
                f"where the fence of its rows is; set the foreign key on the objects that have it, or do "
                f"without post_update"
            )


def stamp_insert(
    statement: Insert, fenced: FencedTable, rows: Sequence[Row], token: int | None, tokens: Tokens | None
) -> list[dict[str, Any]]:
    """Return the rows of an INSERT with their tokens and write ids."""
    if not inserts_plainly(statement) or statement.select is not None:
        raise UnfencedWriteError(
            f"only a plain INSERT into {fenced.name!r} can be stamped, with its rows as parameters: "
            f"execute(insert(…), [{{…}}, {{…}}]). ON CONFLICT, ON DUPLICATE KEY, OR REPLACE, IGNORE and "
            f"values([…]) may touch rows that a newer holder has fenced, or bring rows that the guard does "
            f"not see: use upsert(), or claim the row and update it; instead of SELECT, read the rows first"
        )
    own = {key_of(column): value for column, value in values_in(statement)}
    refuse_fence_assignment(own, fenced)
    stamped = []
    write_id = new_write_id() if tokens is None else tokens.write_id
    for row in rows:
        made = {**row}
        stamp = None if fenced.write is None else row.get(fenced.write.key)
        if type(stamp) is Stamp:
            made[fenced.fence.key] = stamp.token
            stamp.loaded = write_id  # what a second statement of the flush finds
        else:
            made[fenced.fence.key] = token or _new_row_token(tokens, {**own, **row})
        if fenced.write is not None:
            made[fenced.write.key] = write_id
        stamped.append(made)
    return stamped


def _new_row_token(tokens: Tokens | None, row: Row) -> int:
    """Return the token to stamp a new row with.

    Where the database makes the key, and the key makes the resource's name, nothing can have locked the
    resource yet: some lease must be held, and the row begins with the fence 0, open to its first holder.
    """
    assert tokens is not None  # noqa: S101  the caller has given no token
    template = tokens.fenced.template
    values: list[Any] = []
    for name, column in template.columns.items():
        value = _given(row, name, column)
        if value is None and column.primary_key:
            return tokens.of_new_row()
        if value is None or isinstance(value, ClauseElement):
            raise UnfencedWriteError(
                f"which resource guards a new row of {tokens.fenced.name!r} is not known before the database "
                f"has made it: give {name} a plain value, because {template.text!r} is made of it"
            )
        values.append(value)
    return tokens.of_row(tuple(values))


def _given(row: Mapping[str, Any], name: str, column: Column[Any]) -> Any:
    """Return what an INSERT gives for a column, which it may know by either name."""
    value = row.get(column.key, row.get(name))
    if value is None and isinstance(column.default, ScalarElementColumnDefault):
        value = column.default.arg
    return value.effective_value if isinstance(value, BindParameter) else value
