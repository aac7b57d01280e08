"""Reads textual SQL with a parser, where looking for words would only guess.

Two questions are answered about a text: whether it writes anything at all, and whether it is an UPDATE or a
DELETE of one table that carries the condition `last_fencing_token <= :fencing_token` for every row. Whatever
the parser does not understand, or might understand otherwise than the database does, counts as neither.

The parser is sqlglot (`pip install 'fencelock[sql]'`). Without it, text that mentions a fenced table and a
word that writes is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from fencelock.guard._tables import FENCE_COLUMN

try:
    import sqlglot
    from sqlglot import exp
except ModuleNotFoundError:  # an extra
    HAS_PARSER = False
else:
    HAS_PARSER = True
    # It warns of each statement that it does not understand; that is an answer here, and no trouble.
    logging.getLogger("sqlglot").addFilter(lambda record: "Falling back" not in record.getMessage())

TOKEN: Final = "fencing_token"  # noqa: S105  no password
"""The parameter that carries the token in a text."""

_DIALECTS: Final[Mapping[str, str]] = {
    "postgresql": "postgres",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}
_OFTEN: Final = 512
#: What databases and parsers do not read alike: MySQL executes some comments, and backslashes end strings
#: in some modes only.
_DOUBTFUL: Final = ("/*!", "/*M!", "\\")


@dataclass(frozen=True, slots=True)
class GuardedText:
    """An UPDATE or DELETE of one table whose text carries the condition.

    Attributes:
        deletes: whether it is a DELETE.
        schema: of the table, in lower case; empty where the text names none.
        table: its name, in lower case.
        assigned: the columns that it assigns, in lower case.
        pinned: the columns that its WHERE clause says equal a parameter or a number, in lower case; with the
            name of the parameter, or the number.
    """

    deletes: bool
    schema: str
    table: str
    assigned: frozenset[str]
    pinned: Mapping[str, str | int]


@lru_cache(maxsize=_OFTEN)
def only_reads(text: str, dialect: str) -> bool:
    """Tell whether a text is known to write nothing, functions that it calls apart."""
    statements = _parsed(text, dialect)
    writing = (exp.DML, exp.Command, exp.TruncateTable, exp.Into) if HAS_PARSER else ()
    return bool(statements) and all(
        isinstance(statement, exp.Query | exp.Values) and statement.find(*writing) is None
        for statement in statements
    )


@lru_cache(maxsize=_OFTEN)
def guarded(text: str, dialect: str) -> GuardedText | None:
    """Return what a text writes, if it carries the condition; None if it does not, or nobody can tell."""
    statements = _parsed(text, dialect)
    if len(statements) != 1:
        return None
    (statement,) = statements
    if not isinstance(statement, exp.Update | exp.Delete):
        return None
    target, where = statement.this, statement.args.get("where")
    several = statement.args.get("tables") or (isinstance(target, exp.Table) and target.args.get("joins"))
    if not isinstance(target, exp.Table) or several or where is None:
        return None
    if any(other is not statement for other in statement.find_all(exp.DML, exp.Command)):
        return None
    parts = list(_conjuncts(where.this))
    assigned = {_column(each.this, target): each.expression for each in statement.expressions}
    stamped = isinstance(statement, exp.Delete) or _is_token(assigned.get(FENCE_COLUMN))
    if not stamped or None in assigned or not any(_is_condition(part, target) for part in parts):
        return None
    return GuardedText(
        deletes=isinstance(statement, exp.Delete),
        schema=target.db.lower(),
        table=target.name.lower(),
        assigned=frozenset(name for name in assigned if name is not None),
        pinned=dict(_pins(parts, target)),
    )


def _parsed(text: str, dialect: str) -> Sequence[Any]:
    """Return the statements of a text; nothing where that cannot be told."""
    if not HAS_PARSER or dialect not in _DIALECTS or any(part in text for part in _DOUBTFUL):
        return ()
    try:
        return [each for each in sqlglot.parse(text, dialect=_DIALECTS[dialect]) if each is not None]
    except (sqlglot.ParseError, sqlglot.TokenError, RecursionError):
        return ()


def _conjuncts(clause: Any) -> Iterator[Any]:
    if isinstance(clause, exp.And | exp.Paren):
        for part in (clause.this, clause.args.get("expression")):
            if part is not None:
                yield from _conjuncts(part)
    else:
        yield clause


def _column(found: Any, target: Any) -> str | None:
    """Return the name of a column of the table that is written, in lower case; None for anything else."""
    if not isinstance(found, exp.Column) or found.table not in {"", target.alias_or_name}:
        return None
    return str(found.name.lower())


def _is_token(found: Any) -> bool:
    return isinstance(found, exp.Placeholder) and found.name == TOKEN


def _is_condition(clause: Any, target: Any) -> bool:
    if isinstance(clause, exp.LTE):
        return _column(clause.this, target) == FENCE_COLUMN and _is_token(clause.expression)
    if isinstance(clause, exp.GTE):
        return _column(clause.expression, target) == FENCE_COLUMN and _is_token(clause.this)
    return False


def _pins(parts: Sequence[Any], target: Any) -> Iterator[tuple[str, str | int]]:
    for part in parts:
        if isinstance(part, exp.EQ):
            for one, other in ((part.this, part.expression), (part.expression, part.this)):
                column = _column(one, target)
                if column is not None and isinstance(other, exp.Placeholder):
                    yield column, str(other.name)
                elif column is not None and isinstance(other, exp.Literal) and other.is_int:
                    yield column, int(other.name)
