"""Writes each row that a list names, as in `WHERE id IN (1, 2)`, with the token of its own lease."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.sql import operators

from fencelock.guard._sqlalchemy import with_values
from fencelock.guard.conditions import GuardedStatement, Row, Rows, criteria_of, equality_binds, values_of
from fencelock.guard.exact import holds
from fencelock.guard.leases import TokenLookup

_MOST: Final = 1000  # the most rows that a list may name, because the statement has a token for each row


def with_own_tokens(form: GuardedStatement, rows: Rows, tokens: TokenLookup) -> GuardedStatement:
    """Return the form, with a token for each row if a list in its WHERE clause names the rows."""
    if form.origin != "core" or form.resource_binds is not None or len(rows) != 1 or not tokens.hold_some:
        return form
    listed = _listed(form, rows[0])
    if listed is None:
        return form
    if not listed:
        return replace(form, names_no_row=True)
    template = form.fenced.template
    columns = [form.source.c[column.key] for column in template.columns.values()]
    token_of = {values: tokens.of_row(values) for values in listed}
    own = sa.case(
        *((_is_row(columns, values), sa.literal(token, sa.BigInteger)) for values, token in token_of.items())
    )
    fence = form.source.c[form.fenced.fence.key]
    statement = form.statement.where(fence <= own)
    if form.assigns:
        statement = with_values(statement, {fence.key: own})
    by_resource = {template.render(values): token for values, token in token_of.items()}
    return replace(form, statement=statement, listed=by_resource, own_token=own)


def _is_row(columns: Iterable[Any], values: Iterable[Any]) -> sa.ColumnElement[bool]:
    named = zip(columns, values, strict=True)
    return sa.and_(*[holds(column, sa.literal(value, column.type)) for column, value in named])


def _listed(form: GuardedStatement, row: Row) -> list[tuple[Any, ...]] | None:
    names = [column.key for column in form.fenced.template.columns.values()]
    found = _together(form.where, form, row)
    if not all(each.keys() >= set(names) for each in found):
        return None
    return list(dict.fromkeys(tuple([each[name] for name in names]) for each in found))


def _together(parts: Iterable[Any], form: GuardedStatement, row: Row) -> list[dict[str, Any]]:
    """Return the combinations of values that columns may have if all of these parts are true."""
    known: list[dict[str, Any]] = [{}]
    for part in criteria_of(parts):
        allowed = _allowed(part, form, row)
        if allowed == []:
            return []
        if allowed and not any(one.keys() & allowed[0].keys() for one in known):
            known = [one | other for one in known for other in allowed]
        if len(known) > _MOST:
            return [{}]
    return known


def _allowed(part: Any, form: GuardedStatement, row: Row) -> list[dict[str, Any]] | None:
    """Return the combinations of values that one part of a WHERE clause lists; None if it lists no values."""
    if isinstance(part, sa.BooleanClauseList):  # an OR, because `criteria_of` has split each AND
        return [each for clause in part.clauses for each in _together([clause], form, row)]
    columns = form.fenced.template.columns.values()
    if pinned := equality_binds([part], form.source, columns):
        return [dict(zip(pinned, values_of(pinned.values(), row), strict=True))]
    keys: dict[Any, str] = {form.source.c[column.key]: column.key for column in columns}
    left = getattr(part, "left", None)
    named = [*left.clauses] if isinstance(left, sa.Tuple) else [left]
    found = _list_in(part)
    if found is None or not all(each in keys for each in named):
        return None
    (listed,) = values_of([found], row)
    rows = listed if len(named) > 1 else [[value] for value in listed]
    return [dict(zip([keys[each] for each in named], values, strict=True)) for values in rows]


def _list_in(part: Any) -> sa.BindParameter[Any] | None:
    """Return the parameter that holds the list of `IN` or of `= ANY(array)`; None for another operator."""
    operator: Any = getattr(part, "operator", None)
    found: Any = getattr(part, "right", None)
    if operator is operators.eq and getattr(found, "operator", None) is operators.any_op:
        found = getattr(found.element, "element", None)
    elif operator is not operators.in_op:
        return None
    return found if isinstance(found, sa.BindParameter) else None
