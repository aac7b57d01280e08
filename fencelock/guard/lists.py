"""Rows that a list names, `WHERE id IN (1, 2)`: each is written with the token of its own lease."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import CollectionAggregate

from fencelock.guard.conditions import Form, Row, Rows, criteria_of, values_of
from fencelock.guard.dialects import holds
from fencelock.guard.leases import Tokens

_MOST: Final = 1000
"""Rows that a list may name. A statement has a token for each."""


def with_own_tokens(form: Form, rows: Rows, tokens: Tokens) -> Form:
    """Return a form with a token for each row that its WHERE clause lists; the same form if it lists none.

    Raises:
        UnfencedWriteError: the lease of one of the rows is not held.
    """
    if form.kind != "core" or form.naming is not None or len(rows) != 1 or not tokens.hold_some:
        return form
    listed = _listed(form, rows[0])
    if not listed:
        return form
    template = form.fenced.template
    columns = [form.source.c[column.key] for column in template.columns.values()]
    token_of = {values: tokens.of_row(values) for values in listed}
    own = sa.case(
        *((_is_row(columns, values), sa.literal(token, sa.BigInteger)) for values, token in token_of.items())
    )
    fence = form.source.c[form.fenced.fence.key]
    statement = form.statement.where(fence <= own)
    if form.assigns:
        statement = statement.values({fence.key: own})
    by_resource = {template.render(values): token for values, token in token_of.items()}
    return replace(form, statement=statement, is_optional=True, listed=by_resource, own_token=own)


def _is_row(columns: Iterable[Any], values: Iterable[Any]) -> sa.ColumnElement[bool]:
    named = zip(columns, values, strict=True)
    return sa.and_(*[holds(column, sa.literal(value, column.type)) for column, value in named])


def _listed(form: Form, row: Row) -> list[tuple[Any, ...]]:
    """Return the values that name the resources of all rows that a WHERE clause allows, if it tells them."""
    names = [column.key for column in form.fenced.template.columns.values()]
    found = _together(form.where, {form.source.c[name]: name for name in names}, row)
    if not all(each.keys() >= set(names) for each in found):
        return []
    return list(dict.fromkeys(tuple([each[name] for name in names]) for each in found))


def _together(parts: Iterable[Any], keys: Mapping[Any, str], row: Row) -> list[dict[str, Any]]:
    """Return the values that columns may have where all of these parts are true."""
    known: list[dict[str, Any]] = [{}]
    for part in criteria_of(parts):
        allowed = _allowed(part, keys, row)
        if allowed and not any(one.keys() & allowed[0].keys() for one in known):
            known = [one | other for one in known for other in allowed]
        if len(known) > _MOST:
            return [{}]
    return known


def _allowed(part: Any, keys: Mapping[Any, str], row: Row) -> list[dict[str, Any]]:
    """Return the values that one part lets columns have; none where it does not tell them."""
    if isinstance(part, sa.BooleanClauseList):  # an OR, because `criteria_of` takes an AND apart
        return [each for clause in part.clauses for each in _together([clause], keys, row)]
    if not isinstance(part, sa.BinaryExpression):
        return []
    left: Any = part.left
    right: Any = part.right
    is_many = part.operator is operators.in_op
    if isinstance(right, CollectionAggregate) and right.operator is operators.any_op:
        right, is_many = getattr(right.element, "element", None), True
    columns = [*left.clauses] if isinstance(left, sa.Tuple) else [left]
    is_equal = part.operator in {operators.eq, operators.in_op}
    if not (is_equal and isinstance(right, sa.BindParameter) and all(each in keys for each in columns)):
        return []
    (values,) = values_of([right], row)
    names = [keys[column] for column in columns]
    rows = values if is_many else [values]
    return [dict(zip(names, each if len(names) > 1 else [each], strict=True)) for each in rows]
