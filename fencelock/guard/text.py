"""Textual SQL: what carries the condition passes, what may write to a fenced table without it is refused.

`guard_text` takes a text where it executes itself, `do_execute` sees every statement before the driver does.
Both look for words and parse nothing: what they cannot tell is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import DDL, Connection, TextClause

from fencelock.errors import UnfencedWriteError
from fencelock.guard._sqlalchemy import parameters_of, with_text
from fencelock.guard.conditions import Row
from fencelock.guard.dialects import CARRIERS, ready
from fencelock.guard.endings import refuse
from fencelock.guard.events import report
from fencelock.guard.leases import note_token
from fencelock.guard.sessions import is_bypassed
from fencelock.guard.tables import FENCE_COLUMN, WRITE_COLUMN, fenced_names, is_strict, new_write_id
from fencelock.tokens import check as check_token

TOKEN: Final = "fencing_token"  # noqa: S105  no password
WRITE_ID: Final = "fencing_write_id"
GUARDED: Final = "fencelock_guarded"
"""Execution option of a statement that carries the condition."""

_NAME: Final = r'(?:[\w$]+|"(?:[^"]|"")+"|`(?:[^`]|``)+`)'
_FULL: Final = rf"{_NAME}(?: ?\. ?{_NAME})*"
_QUOTED: Final = re.compile(
    r"""(?s)'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|/\*(?!M?!).*?\*/|--(?=\s|\Z)[^\n]*"""
)
#: What databases read differently, outside of strings: comments that they execute or nest, `#`, `$tag$`.
_DOUBTFUL: Final = re.compile(r"[#']|--|/\*|\*/|\$(?!\d)\w*\$")
_GUARDED: Final = re.compile(
    rf"(?i)(?:delete from|update) (?:only )?(?P<name>{_FULL})"
    rf"(?: (?:as )?(?!(?:set|where)\b)(?P<alias>{_NAME}))?"
    r"(?: set (?P<sets>.*?))? where (?P<where>.*?)(?: (?:returning|order by|limit) .*)?"
)
#: What could let a row pass that the condition turns away, outside of parentheses.
_LOOSE: Final = re.compile(r"(?i)\b(?:or|xor|between|case)\b|\|\|")
#: A write to one table, as far as the word that follows the table's name.
_TARGET: Final = re.compile(
    rf"(?i)\b(?:(?:insert(?:\s+or\s+\w+|\s+ignore)?|replace)\s+into\s+{_FULL}"
    r"(?=\s*\(|\s+(?:as|select|values|default|set|with)\b)"
    rf"|update\s+(?:only\s+)?{_FULL}(?:\s+(?:as\s+)?(?!set\b)\w+)?\s+set\b"
    rf"|delete\s+from\s+(?:only\s+)?{_FULL}(?:\s+(?:as\s+)?(?!(?:where|returning|using)\b)\w+)?"
    r"(?=\s+(?:where|returning)\b|\s*(?:[;)]|\Z)))"
)
_WRITES: Final = re.compile(
    r'(?i)(?<![\w."`])(?:(?:insert|merge|replace|truncate)\b(?! ?\()|(?<!on )delete\b'
    r"|(?<!for )(?<!key )(?<!do )(?<!on )update\b)"
    r"|(?:^|;|\*/|\n)\s*(?:call|copy|do|load|exec\w*|prepare)\b|\bset\s+statement\b"
)
_ORDINARY: Final = re.compile(r"(?i)(?:select|with|values|insert|replace|update|delete)\b")
_DEFINES: Final = re.compile(r"(?i)\s*(?:create|alter(?!.*\btruncate\b)|drop|comment|grant|revoke)\b")


def guard_text(
    connection: Connection, statement: TextClause, rows: Sequence[Row], options: Mapping[str, Any]
) -> tuple[TextClause, Sequence[Row], Mapping[str, Any]]:
    """Return a text, its parameters and options: what carries the condition gets a new write id, and a mark.

    A strict trigger wants to see its token, too. Any other text is left as it is.
    """
    text, binds = statement.text, parameters_of(statement)
    table = guarded_table(text) if FENCE_COLUMN in text.lower() else None
    if table is None:
        if WRITE_ID in binds:
            raise _unguarded_error(written(text, tuple(fenced_names())) or "?")
        return statement, rows, options
    given = binds[TOKEN].effective_value
    for token in {row.get(TOKEN, given) for row in rows or [{}]}:
        if token is None:
            raise UnfencedWriteError(f'textual SQL has its token as a parameter: pass {{"{TOKEN}": token}}')
        note_token(connection, statement, check_token(token))
    if WRITE_ID in binds:
        rows = [{**row, WRITE_ID: new_write_id()} for row in rows or [{}]]
    if is_strict(table):
        ready(connection)
        carried = CARRIERS[connection.dialect.name].format(f":{TOKEN}")
        statement = with_text(
            statement, re.sub(rf"(?i)(\b{FENCE_COLUMN}\s*<=\s*:{TOKEN}\b)", rf"\1 AND {carried}", text)
        )
    return statement, rows, {**options, GUARDED: True}


@lru_cache(maxsize=1000)
def guarded_table(text: str) -> str | None:
    """Return the table, in lower case, that a text writes under the condition; None for any other text."""
    outline = _bare(text)
    while outline and (shorter := re.sub(r"\([^()]*\)", " _ ", outline)) != outline:
        outline = shorter
    found = _GUARDED.fullmatch(" ".join((outline or "").split()).rstrip("; "))
    if found is None or ";" in found[0] or _LOOSE.search(found["where"]):
        return None
    name = found["name"].rpartition(".")[2].strip()
    own = "|".join(map(re.escape, (found["name"], name, found["alias"] or name)))
    fence = rf"(?:(?:{own}) ?\. ?)?{FENCE_COLUMN}"
    stamps = [
        rf"(?:.*, ?)?(?:(?:{own}) ?\. ?)?{column} ?= ?:{bind}(?: ?,.*| from .*)?"
        for column, bind in ((FENCE_COLUMN, TOKEN), (WRITE_COLUMN, WRITE_ID))
    ]
    condition = rf"(?:.* and )?{fence} ?<= ?:{TOKEN}(?: and .*)?"
    sets = found["sets"]
    is_stamped = sets is None or all(re.fullmatch(stamp, sets, re.IGNORECASE) for stamp in stamps)
    is_guarded = is_stamped and re.fullmatch(condition, found["where"], re.IGNORECASE)
    return name.strip('"`').lower() if is_guarded else None


def do_execute(_cursor: object, statement: str, *rest: Any) -> None:
    """Refuse a statement that may write to a fenced table and was not guarded; its context comes last."""
    context = rest[-1]
    if context is None or GUARDED in context.execution_options:
        return
    if statement.startswith("SELECT") and ";" not in statement:
        return
    if is_bypassed(context.execution_options, context.root_connection):
        return
    if context.isddl and _DEFINES.match(statement) and not isinstance(context.compiled.statement, DDL):
        return
    name = written(statement, tuple(fenced_names()))
    if name is not None:
        error = _unguarded_error(name)
        report(error)
        refuse(context.root_connection, error)
        raise error


def _unguarded_error(name: str) -> UnfencedWriteError:
    return UnfencedWriteError(
        f"this statement may write to the fenced table {name!r} and is not guarded: write through the model, "
        f"fenced_update(), fenced_delete() or upsert(), outside of WITH; textual SQL has "
        f"{FENCE_COLUMN} <= :{TOKEN} in its WHERE clause, with AND and no OR beside it, and sets "
        f"{FENCE_COLUMN} = :{TOKEN} and {WRITE_COLUMN} = :{WRITE_ID}, which the guard fills in; or, if no "
        f"fence is wanted, execution_options(fencelock='bypass')"
    )


@lru_cache(maxsize=1000)
def written(statement: str, names: tuple[str, ...]) -> str | None:
    """Return the fenced table that a text may write to; None where it plainly writes to no table so named."""
    bare, named = _bare(statement), _pattern(names)
    sql = statement if bare is None else bare if _ORDINARY.match(bare) else _bare(statement, "\"`'") or ""
    found = named.search(sql)
    if found is None or (bare is not None and _DEFINES.match(bare) and ";" not in bare.rstrip("; ")):
        return None
    rest = _TARGET.sub(lambda target: target[0] if named.search(target[0]) else " ", sql)
    return found[0] if _WRITES.search(rest) else None


def _bare(text: str, kept: str = '"`') -> str | None:
    """Return a text without comments and strings; None where databases may read it in other ways."""
    bare = _QUOTED.sub(
        lambda part: part[0] if part[0][0] in kept else " _ " if part[0][0] == "'" else " ", text
    )
    doubtful = "'" not in kept and ("\\" in text or _DOUBTFUL.search(bare))
    return None if doubtful else " ".join(bare.split())


@lru_cache(maxsize=1000)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return what finds one of these names in any spelling, or one that PostgreSQL reads with escapes."""
    spelt = (re.sub(r'(["`%])', r"\1{1,2}", re.sub(r"(?:\\\s)+", r"\\s+", re.escape(name))) for name in names)
    return re.compile(rf"(?<!\w)(?:{'|'.join(spelt) or '(?!)'})(?!\w)|\bU&\"", re.IGNORECASE)
