"""Refuses what cannot be guarded, at the last moment before the cursor sees it.

What has come this far is SQL text and parameters, and, where SQLAlchemy compiled it, the compiled statement.
Whatever may write to a fenced table and does not carry the token is refused: driver SQL, textual SQL, DML
inside a WITH clause, and a guarded statement that somebody else's listener has replaced.

Textual SQL is looked at for a fenced table's name together with a word that writes. Where both are found, and
it is not plain that something else is written (see `_shape`), a parser has the last word (see `_text`); what
it does not understand needs `execution_options(fencelock="bypass")`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, ClassVar, Final

from sqlalchemy import DDL, TextClause
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.sql import visitors

from fencelock.errors import FenceError, UnfencedWriteError
from fencelock.guard._bypass import is_bypassed
from fencelock.guard._shape import (
    carries_condition,
    defines,
    inserts_only,
    target,
    without_comments,
    written_alone,
)
from fencelock.guard._statement import TOKEN_BIND
from fencelock.guard._tables import (
    FENCE_COLUMN,
    FENCE_TABLE,
    Known,
    fenced_names,
    fenced_table,
    harmless,
    is_harmless,
    note_harmless,
    sub_table_of,
    underlying,
)
from fencelock.guard._text import HAS_PARSER, TOKEN, only_reads
from fencelock.guard.events import report
from fencelock.guard.session import refuse
from fencelock.guard.textual import is_guarded

_WRITES: Final = re.compile(
    r"\b(?:delete|(?:insert|merge|replace|truncate)(?! ?\()|(?<!for )(?<!no key )update)\b"
    r"|(?:^|;|\*/) ?(?:call|copy|do|load)\b|\bset statement\b",  # MariaDB: SET STATEMENT … FOR UPDATE …
    re.IGNORECASE,
)
_LINE_COMMENT: Final = re.compile(r"(?:--|#).*")
"""A comment that ends with "for" must not make the UPDATE in the next line look like a locking read."""
_DRIVER_PARAMETERS: Final = ((re.compile(r"%\((\w+)\)s"), r":\1"), (re.compile(r"%s"), "?"))
"""Parameters as drivers have them, which a parser takes for an operator, and as it knows them."""
_ESCAPED_NAME: Final = r'\bU&"(?:[^"]|"")*"'
"""A name as PostgreSQL has it with escapes, which may be any."""
_RESHAPED: Final = (
    "the text that {} has come to cannot be guarded: an INSERT stays a plain INSERT INTO (for rows that may "
    "be there already, there is upsert()), and the condition stays outside of whatever else is in the WHERE "
    "clause of an UPDATE or DELETE; see to what changes statements on their way: @compiles, "
    "with_loader_criteria, or a listener for before_cursor_execute"
)
_JUDGED_TEXTS: Final = 1000
_JUDGED_LENGTH: Final = 10_000
_MISSING_TABLE: Final = re.compile(r"no such table|^relation .* does not exist|doesn't exist", re.IGNORECASE)
_USES_ROWS: Final = re.compile(r"\s*(?:insert|update|delete|select)\b", re.IGNORECASE)
"""SQLAlchemy finds out by DESCRIBE, and the error of that, whether MariaDB has a table."""
_MISSING_COLUMN: Final = re.compile(
    r"no such column|no column named|unknown column|column .* does not exist|undefined column", re.IGNORECASE
)


class _Judged:
    """Final texts of compiled statements that were found to be what was compiled, most of which come again.

    They are forgotten with what is known to be harmless, when one more table is fenced.
    """

    texts: ClassVar[set[str]] = set()
    known: ClassVar[Known | None] = None


def _note_judged(statement: str, known: Known) -> None:
    if _Judged.known is not known or len(_Judged.texts) >= _JUDGED_TEXTS:
        _Judged.texts, _Judged.known = set(), known
    if len(statement) <= _JUDGED_LENGTH:  # long ones have many parameters, and most often others each time
        _Judged.texts.add(statement)


def do_execute(_cursor: object, statement: str, _parameters: object, context: Any) -> None:
    """Refuse a statement that may write to a fenced table and was not guarded.

    Every statement of the process comes by: what reads, or was judged before, leaves at once.
    """
    if ";" not in statement and context is not None and not context.isddl:
        compiled = context.compiled
        if compiled is not None and (
            statement.startswith("SELECT") or (statement in _Judged.texts and is_harmless(compiled))
        ):
            return
    try:
        _refuse(statement, context)
    except FenceError as error:
        report(error)
        refuse(context.root_connection, error)
        raise


def do_execute_no_params(cursor: object, statement: str, context: Any) -> None:
    """Do the same where there are no parameters."""
    do_execute(cursor, statement, None, context)


def _refuse(statement: str, context: Any) -> None:
    if context is None or is_bypassed(context.execution_options, context.root_connection):
        return
    compiled, dialect = context.compiled, context.dialect.name
    if context.isddl:
        if isinstance(compiled.statement, DDL) or not defines(statement, dialect):
            _refuse_text(statement, dialect)
    elif compiled is None:
        _refuse_text(statement, dialect)
    elif is_guarded(context.invoked_statement):
        _refuse_changed_text(statement, context)
    elif compiled.isupdate or compiled.isdelete or compiled.isinsert:
        known = harmless()
        _refuse_unguarded(compiled)
        _refuse_reshaped(statement, compiled, dialect)
        if compiled.ctes or ";" in statement or getattr(compiled.statement, "select", None) is not None:
            _refuse_text_within(compiled.statement, dialect)
        else:
            note_harmless(compiled, known)  # the fence is in it, if its table has one
            _note_judged(statement, known)
    elif ";" in statement or not statement.startswith("SELECT"):
        _refuse_writing_ctes(compiled)
        _refuse_text(statement, dialect)


def _refuse_changed_text(statement: str, context: Any) -> None:
    """Refuse a text that carried the condition, if a listener has changed more than its comments."""
    dialect = context.dialect.name
    if statement == context.statement or carries_condition(statement, dialect):
        return
    if without_comments(statement, dialect) != without_comments(context.statement, dialect):
        raise UnfencedWriteError(_RESHAPED.format("the text of a write to a fenced table"))


def _refuse_reshaped(statement: str, compiled: Any, dialect: str) -> None:
    """Refuse a final text that is not what was compiled: another write, or one without its condition."""
    table = underlying(compiled.compile_state.dml_table)
    fenced = fenced_table(table)
    if compiled.isinsert and (fenced or sub_table_of(table)):
        is_the_same = inserts_only(statement, dialect)
    elif fenced:
        is_the_same = carries_condition(statement, dialect)
    else:
        name = target(statement, dialect)
        if name is None:
            _refuse_text(statement, dialect)
        is_the_same = name is None or name == table.name or name.lower() not in fenced_names()
    if not is_the_same:
        raise UnfencedWriteError(_RESHAPED.format(f"a write to {table.name!r}"))


def _refuse_text(statement: str, dialect: str) -> None:
    text = " ".join(_LINE_COMMENT.sub(r"\g<0> ;", statement).split())
    names = tuple(fenced_names())
    table = _mentioned(text, names)
    if table is None or not _WRITES.search(text):
        return
    written = written_alone(statement, dialect, _WRITES)
    is_other = written is not None and _mentioned(" ".join(written.split()), names) is None
    if is_other or _only_reads(statement, dialect):
        return
    parser = "" if HAS_PARSER else ", which needs pip install 'fencelock[sql]' to be recognised"
    raise UnfencedWriteError(
        f"textual SQL that may write to the fenced table {table!r} is not guarded: an UPDATE of it sets "
        f"{FENCE_COLUMN} = :{TOKEN} and, like a DELETE, has {FENCE_COLUMN} <= :{TOKEN} in its WHERE "
        f"clause{parser}; or use fenced_update() or fenced_delete() with execute_fenced(); or, if no fence "
        f'is wanted, execution_options(fencelock="bypass")'
    )


def _refuse_text_within(statement: Any, dialect: str) -> None:
    """Refuse text that writes in a WITH clause or a SELECT of a statement, whatever that is itself."""
    for element in visitors.iterate(statement):
        if isinstance(element, TextClause):
            _refuse_text(element.text, dialect)


def _only_reads(statement: str, dialect: str) -> bool:
    for parameter, known in _DRIVER_PARAMETERS:
        statement = parameter.sub(known, statement)
    return only_reads(statement, dialect)


def _mentioned(text: str, names: tuple[str, ...]) -> str | None:
    if not names:
        return None
    found = _pattern(names).search(text)
    return found and found[0]


@lru_cache(maxsize=64)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    spelt = "|".join("".join(map(_spelt, " ".join(name.split()))) for name in names)
    return re.compile(rf"(?<!\w)(?:{spelt})(?!\w)|{_ESCAPED_NAME}", re.IGNORECASE)


def _spelt(character: str) -> str:
    """Return a pattern for a character of a name, which may stand twice inside quotes and for drivers."""
    return re.escape(character) + ("{1,2}" if character in '"`%' else "")


def _refuse_unguarded(compiled: Any) -> None:
    """Check that the token is still in the statement, whoever has had it in hand since."""
    table = compiled.compile_state.dml_table
    fenced = None if is_harmless(table) else fenced_table(table)
    if fenced is not None:
        has_token = compiled.isinsert or any(name.startswith(TOKEN_BIND) for name in compiled.binds)
        fence = fenced.fence.key  # what is only compared with it is called otherwise
        if not has_token or not (compiled.isdelete or {fence, f"{fence}_m0"} & compiled.binds.keys()):
            raise UnfencedWriteError(
                f"a write to {fenced.name!r} has lost its fence on the way to the database; another listener "
                f"for before_execute has replaced the statement"
            )
    _refuse_writing_ctes(compiled)


def _refuse_writing_ctes(compiled: Any) -> None:
    for cte in getattr(compiled, "ctes", None) or ():
        element = cte.element
        table = underlying(getattr(element, "table", None))
        if getattr(element, "is_dml", False) and table.name.lower() in fenced_names():
            raise UnfencedWriteError(
                f"a write to the fenced table {table.name!r} inside a WITH clause cannot be guarded; "
                f"make it a statement of its own"
            )


def explain_what_is_missing(context: ExceptionContext) -> None:
    """Say what to do when the database lacks the column that the model has, or the fence table."""
    # Only the first line: those that follow quote the statement, which names the column anyway.
    message = str(context.original_exception).partition("\n")[0]
    refusal = None
    if (
        FENCE_TABLE in message
        and _MISSING_TABLE.search(message)
        and _USES_ROWS.match(context.statement or "")
    ):
        refusal = FenceError(
            f"the database lacks the table {FENCE_TABLE!r}, where gates and sealed locks keep their fences "
            f"({message}): call fence_table(Base.metadata) beside your models, then "
            f"Base.metadata.create_all(engine), or op.create_fence_table() in a migration; or pass no gate "
            f"(gate=False), and claim before you read"
        )
    elif FENCE_COLUMN in message and _MISSING_COLUMN.search(message):
        refusal = FenceError(
            f"the database lacks the column {FENCE_COLUMN!r} of a fenced model ({message}); add it with a "
            f'migration: op.add_fence("<table>"), which fencelock[alembic] brings, or '
            f'op.add_column("<table>", sa.Column("{FENCE_COLUMN}", sa.BigInteger(), nullable=False, '
            f'server_default=sa.text("0")))'
        )
    if refusal is not None:
        if context.connection is not None:
            refuse(context.connection, refusal)
        raise refusal from context.original_exception
