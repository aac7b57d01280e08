"""Executes UPDATE, DELETE and INSERT of a fenced table under the guard.

The rows that a statement may write decide which lease it needs. If the WHERE clause compares every column of
`__fence_resource__` with a value, by `==` or in a list, the resource is known before anything is sent.
Objects bring their tokens. An UPDATE or DELETE whose resource is unknown is refused, unless it has an
explicit token, or its model makes leases optional.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from sqlalchemy import BigInteger, Insert, Update, literal, select, update
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.schema import ScalarElementColumnDefault

from fencelock.errors import FenceError, LockLostError, UnfencedWriteError
from fencelock.guard import _sqlalchemy as private
from fencelock.guard import conditions
from fencelock.guard.conditions import LOADED_BIND, TOKEN_OPTION, GuardedStatement, Options, Origin, Row, Rows
from fencelock.guard.exact import TOKEN_BIND
from fencelock.guard.leases import TokenLookup, note_token, refuse_autocommit
from fencelock.guard.lists import with_own_tokens
from fencelock.guard.objects import FlushTokens, flush_of, loaded_values, object_of
from fencelock.guard.refused import refuse
from fencelock.guard.sessions import is_bypassed, note_no_shift, note_shift, refuse_bypass
from fencelock.guard.tables import (
    NO_LEASE,
    FencedTable,
    base_of,
    fenced_table,
    known,
    new_write_id,
    underlying,
)
from fencelock.guard.text import GUARDED
from fencelock.guard.verdict import Verdict
from fencelock.tokens import check as check_token

_Execute: TypeAlias = Callable[[Any, Connection, Rows, Options], CursorResult[Any]]
"""Executes a statement on a connection, once for each row of parameters, with these options."""


def guarding(execute: _Execute) -> _Execute:
    def guarded(statement: Any, connection: Connection, rows: Rows, options: Options) -> CursorResult[Any]:
        table = statement.table
        fenced = fenced_table(table)
        its = base_of(table) if fenced is None else fenced
        if its is None:  # the most frequent case, so it comes first
            if TOKEN_OPTION in options or TOKEN_OPTION in statement.get_execution_options():
                known(table)  # raises, because the table has no fence
            return execute(statement, connection, rows, options)
        merged = private.options_to_execute(statement).merge_with(
            private.options_to_execute(connection), options
        )
        verdict = None
        try:
            if is_bypassed(merged, connection):
                statement = _bypassing(connection, statement, fenced, rows, merged)
            elif its.excludes and _is_free(connection, statement, its, rows, merged):
                pass
            elif fenced is None:
                _check_sub_table(connection, statement, its, rows, merged)
            else:
                statement, rows, verdict = _guarded(connection, statement, fenced, rows or [{}], merged)
        except (FenceError, LockLostError) as error:
            refuse(connection, error, getattr(underlying(table), "name", None))
            raise
        result = private.execute_unguarded(connection, statement, rows, merged.union({GUARDED: True}))
        _keep_loaded_ids(result, statement, fenced)
        if verdict is not None and (refusal := verdict.of(result)) is not None:
            result.close()
            refuse(connection, refusal)
            raise refusal
        return result

    return guarded


def _is_free(
    connection: Connection, statement: Any, fenced: FencedTable, rows: Rows, options: Options
) -> bool:
    """Tell whether a statement needs no guard, because it changes only excluded columns."""
    if conditions.CLAIM_OPTION in options or options.get(TOKEN_OPTION) is not None:
        return False
    if not conditions.changes_only_excluded(statement, underlying(statement.table), rows):
        return False
    conditions.refuse_unguardable(statement, fenced, statement.table)
    note_no_shift(connection)
    return True


def _keep_loaded_ids(result: CursorResult[Any], statement: object, fenced: FencedTable | None) -> None:
    """Keep SQLAlchemy from expiring fences and write ids of loaded objects; `objects` shifts these ids."""
    compiled: Any = result.context.compiled
    computed: list[Any] = compiled.postfetch if isinstance(statement, Update) else []
    for column in () if fenced is None else (fenced.write, fenced.fence):
        if column in computed:
            computed.remove(column)


def _bypassing(
    connection: Connection, statement: Any, fenced: FencedTable | None, rows: Rows, options: Options
) -> Any:
    """Return a statement that bypasses the guard. Most UPDATEs still give their rows new write ids."""
    if options.get(TOKEN_OPTION) is not None:
        refuse_bypass(options, connection)
    if fenced is not None and isinstance(statement, Update):  # a joined sub-table has no ids
        assigned = {conditions.key_of(column) for column, _ in private.values_in(statement)}
        if fenced.write.key in assigned.union(*rows[:1]) or conditions.CLAIM_OPTION in options:
            note_no_shift(connection)
        else:
            by = note_shift(connection, next(reversed(private.where_of(statement)), None))
            statement = conditions.shift_ids(statement, fenced, literal(by, BigInteger))
    else:
        note_no_shift(connection)
    return statement


def _guarded(
    connection: Connection, statement: Any, fenced: FencedTable, rows: Rows, options: Options
) -> tuple[Any, Rows, Verdict | None]:
    given: int | None = options.get(TOKEN_OPTION)
    if given is not None:
        check_token(given)
        if TOKEN_OPTION in connection.get_execution_options():
            raise ValueError(
                "execution_options(fencing_token=…) is for one statement, and not for a connection or an "
                "engine; for all writes of a transaction, bind(connection, Lease(resource, token))"
            )
    flush = flush_of(connection, fenced, options) if given is None else None
    lookup = flush or TokenLookup(connection, fenced, given=given)
    refuse_autocommit(lookup.leases, connection, options, fenced.name)
    lookup.check()
    if given is not None and conditions.CLAIM_OPTION not in options:
        note_token(connection, given)
    if isinstance(statement, Insert):
        return statement, _stamp_insert(statement, fenced, rows, lookup), None
    if flush is not None:
        form, stamped = _of_flush(connection, statement, fenced, rows, flush)
    else:
        origin: Origin = "claim" if conditions.CLAIM_OPTION in options else "explicit" if given else "core"
        form = conditions.form_of(statement, fenced, origin)
        if given is None:
            form = with_own_tokens(form, rows, lookup)
        stamped = _stamp_rows(connection, form, rows, lookup)
    if form.assigns:
        conditions.refuse_moving(fenced, rows[0])
    verdict = Verdict(form, stamped, connection, options, flush)
    if (refusal := verdict.check_before()) is not None:
        raise refusal
    return form.statement, stamped, verdict


def _of_flush(
    connection: Connection, statement: Any, fenced: FencedTable, rows: Sequence[Any], flush: FlushTokens
) -> tuple[GuardedStatement, Rows]:
    """Give a flush's rows their tokens and write ids, in place, because only the flush has the rows.

    An UPDATE without a write id is a `post_update`, or writes a new object over the row of a deleted one. It
    gets an id of its own, because a trigger takes an UPDATE that leaves the id alone for another program's.
    """
    form = conditions.form_of(statement, fenced, "flush")
    fence, write, noted = fenced.fence.key, fenced.write.key, flush.rows
    write_id = flush.write_id if not form.assigns or write in rows[0] else new_write_id()
    flush.sending.clear()
    flush.sent_id = write_id
    for row in rows:
        key = tuple(map(row.__getitem__, form.key_names))
        written = noted.get(key) or flush.find(connection, key)
        row[TOKEN_BIND] = written.token
        row[LOADED_BIND] = written.now
        if form.assigns:
            flush.sending.append(written)
            row[write] = write_id
            row.pop(fence, None)
            if not fenced.is_optional:
                row[fence] = written.token
    return form, rows


def _stamp_rows(
    connection: Connection, form: GuardedStatement, rows: Rows, lookup: TokenLookup
) -> list[dict[str, Any]]:
    fenced = form.fenced
    by = new_write_id()
    if form.shifts_ids:
        by = note_shift(connection, form.where[-1] if form.where else None, names_keys=form.names_keys)
    stamped = []
    for given in rows:
        row = dict(given)
        state = object_of(connection, fenced, form.identity(row)) if form.looked_up else None
        row[TOKEN_BIND] = _token_of(form, lookup, row, state)
        if form.assigns:
            if not (form.is_optional or form.listed):  # else the statement itself sets the fence
                row[fenced.fence.key] = row[TOKEN_BIND]
            row[conditions.SHIFT_BIND if form.shifts_ids else fenced.write.key] = by
        stamped.append(row)
    return stamped


def _token_of(form: GuardedStatement, tokens: TokenLookup, row: dict[str, Any], state: Any) -> int:
    if tokens.given is not None:
        return tokens.given
    if form.names_no_row:
        return NO_LEASE
    if form.listed:
        return max(form.listed.values())
    template = form.fenced.template
    if state is not None and form.looked_up:
        values = loaded_values(tuple(form.looked_up.values()), state)
        row.update(zip(form.looked_up, values or (), strict=False))
    if form.resource_binds is not None and row.keys() >= form.looked_up.keys():
        return tokens.of_row(conditions.values_of(form.resource_binds, row))
    if tokens.does_without(None):
        return NO_LEASE
    tokens.need_some()
    raise UnfencedWriteError(
        f"this statement does not say which resource guards the rows it writes: {form.fenced.name!r} is "
        f"guarded by {template.text!r}, so compare {' and '.join(template.columns)} with == or in_() in its "
        f"WHERE clause, or change the rows through their objects"
    )


def _check_sub_table(
    connection: Connection, statement: Any, base: FencedTable, rows: Rows, options: Options
) -> None:
    """Refuse a write to a joined sub-table, unless its flush writes the fenced rows as well.

    For a relationship of another model with `post_update`, a flush would write only the sub-table. If no
    lease is needed, the fenced rows get new write ids.
    """
    table = underlying(statement.table)
    flush = flush_of(connection, base, options)
    if flush is None:
        if _shifts_base(connection, statement, base, rows, options):
            return
        raise UnfencedWriteError(
            f"{table.name!r} holds part of the rows of {base.name!r}, where their fence is; change such "
            f"rows through their objects, so that the unit of work writes both tables, or bypass the guard"
        )
    if not isinstance(statement, Update):
        return
    pinned = conditions.equality_binds(
        conditions.criteria_of(private.where_of(statement)), table, table.primary_key
    )
    for row in rows:
        state = object_of(
            connection, base, conditions.values_of([pinned[each.key] for each in table.primary_key], row)
        )
        if state is None or base.table not in state.mapper.tables:
            continue
        if (session := state.session) is not None and state.obj() in session.deleted:
            continue
        written = None if state.key is None else flush.rows.get(state.key[1])
        if state.key is not None and (written is None or not written.is_updated):
            raise UnfencedWriteError(
                f"a relationship with post_update writes to {table.name!r} and leaves {base.name!r} alone, "
                f"where the fence of its rows is; set the foreign key on the objects that have it, or do "
                f"without post_update"
            )


def _shifts_base(connection: Connection, statement: Any, base: FencedTable, rows: Rows, options: Any) -> bool:
    """Give the fenced rows of a sub-table's statement new write ids if that needs no lease; tell whether."""
    key, own = list(statement.table.primary_key), list(base.table.primary_key)
    is_plain = len(key) == len(own) == 1 and options.get(TOKEN_OPTION) is None
    # A list of keys with columns of both tables would move the write ids of its rows twice.
    if private.emits(statement, base.table) or not (
        is_plain and TokenLookup(connection, base).does_without(None)
    ):
        return False
    if isinstance(statement, Insert):
        if not private.inserts_plainly(statement) or statement.select is not None:
            return False
        conditions.refuse_inner_writes(statement, base)
        return True
    conditions.refuse_unguardable(statement, base, statement.table)
    where = private.where_of(statement)
    by = note_shift(connection, next(reversed(where), None))
    shifting = update(base.table).where(own[0].in_(select(key[0]).where(*where).correlate(None)))
    shifting = conditions.shift_ids(shifting, base, literal(by, BigInteger))
    named = conditions.names_of_binds(where)
    given = [{name: row[name] for name in named & row.keys()} for row in rows]
    private.execute_unguarded(connection, shifting, given, options.union({GUARDED: True}))
    return True


def _stamp_insert(
    statement: Insert, fenced: FencedTable, rows: Rows, lookup: TokenLookup
) -> list[dict[str, Any]]:
    if not private.inserts_plainly(statement) or statement.select is not None:
        raise UnfencedWriteError(
            f"only a plain INSERT into {fenced.name!r} can be stamped, with its rows as parameters: "
            f"execute(insert(…), [{{…}}, {{…}}]). ON CONFLICT, ON DUPLICATE KEY, OR REPLACE, IGNORE and "
            f"values([…]) may touch rows that a newer holder has fenced, or bring rows that the guard does "
            f"not see: use upsert(), or claim the row and update it; instead of SELECT, read the rows first"
        )
    conditions.refuse_inner_writes(statement, fenced)
    own = {conditions.key_of(column): value for column, value in private.values_in(statement)}
    conditions.refuse_fence_assignment(own, fenced)
    stamped = []
    write_id, known = lookup.write_id, lookup.inserted if isinstance(lookup, FlushTokens) else ()
    for row in rows:
        made = {**row}
        if row.get(fenced.fence.key) not in known:  # else it is the object's token
            made[fenced.fence.key] = _new_row_token(lookup, {**own, **row})
        made[fenced.write.key] = write_id
        stamped.append(made)
    return stamped


def _new_row_token(tokens: TokenLookup, row: Row) -> int:
    """Return the token for a new row.

    If the database makes the key that names the resource, no lease of it can exist yet. Then any lease must
    be held, unless the model makes leases optional. The row gets the fence 0, which every token passes.
    """
    if tokens.given is not None:
        return tokens.given
    template = tokens.fenced.template
    values: list[Any] = []
    for name, column in template.columns.items():
        value = row.get(column.key, row.get(name))  # an INSERT may use the column's or the attribute's name
        if value is None and isinstance(column.default, ScalarElementColumnDefault):
            value = column.default.arg
        if isinstance(value, BindParameter):
            value = value.effective_value
        if value is None and column.primary_key:
            return tokens.of_new_row()
        if value is None or isinstance(value, ClauseElement):
            raise UnfencedWriteError(
                f"which resource guards a new row of {tokens.fenced.name!r} is not known before the database "
                f"has made it: give {name} a plain value, because {template.text!r} is made of it"
            )
        values.append(value)
    return tokens.of_row(tuple(values))
