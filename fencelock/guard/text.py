"""Refuses SQL that may write to a fenced table, unless it is guarded, or bypasses the guard.

`do_execute` looks for words, and parses nothing. If it cannot tell strings from code, the words in strings
count.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import DDL
from sqlalchemy.engine import Connection

from fencelock._databases import MYSQL
from fencelock.errors import FenceError, UnfencedWriteError
from fencelock.guard.leases import on_savepoint, open_leases
from fencelock.guard.refused import refuse
from fencelock.guard.sessions import NEVER, STARTED, is_bypassed, note_start, note_write
from fencelock.guard.tables import FENCE_COLUMN, WRITE_COLUMN, excluded_by_name, fenced_names

TOKEN: Final = "fencing_token"  # noqa: S105  no password
WRITE_ID: Final = "fencing_write_id"
GUARDED: Final = "fencelock_guarded"  # execution option of a statement that the guard has handled already

_NAME: Final = r'(?:[\w$]+|"(?:[^"]|"")+"|`(?:[^`]|``)+`)'
_FULL: Final = rf"{_NAME}(?: ?\. ?{_NAME})*"
_QUOTED: Final = re.compile(
    r"""(?s)'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|/\*(?!M?!).*?\*/|--(?=\s|\Z)[^\n]*"""
)
#: Characters that databases read differently: comments that some execute or nest, `#`, `$tag$`.
_DOUBTFUL: Final = re.compile(r"[#']|--|/\*|\*/|\$(?!\d)\w*\$")
#: The beginning of a write to one table, up to the word after the table's name.
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
_UPDATE: Final = re.compile(
    rf"(?i)update (?:only )?(?:{_NAME} ?\. ?)*({_NAME})(?: (?:as )?(?!set\b){_NAME})? set "  # noqa: S608
)
_PIECE: Final = re.compile(r'"(?:[^"]|"")*"|`(?:[^`]|``)*`|[\w$]+|\s+|.')
_ASSIGNED: Final = re.compile(rf" ?({_NAME}) ?= ?[^=]")
_COMMITS: Final = re.compile(
    r"(?i)\s*(?:alter|analyze|begin|check|create(?!\s+(?:or\s+replace\s+)?temporary)|drop(?!\s+temporary)|flush"
    r"|grant|(?:un)?lock\s+tables|optimize|rename|repair|revoke|start\s+transaction|truncate)\b"
)
_SAVEPOINT: Final = re.compile(
    rf"(?i)\s*(savepoint|rollback|release)(?:\s+to)?(?:\s+savepoint)?\s+({_NAME})\s*;?\s*\Z"
)
_LONG: Final = 4096  # statements with more characters are not cached, and are searched at each execution
_ORDINARY: Final = re.compile(r"(?i)(?:select|with|values|insert|replace|update|delete)\b")
_DEFINES: Final = re.compile(r"(?i)\s*(?:create|alter(?!.*\btruncate\b)|drop|comment|grant|revoke)\b")


def do_execute(_cursor: object, statement: str, *rest: Any) -> None:
    """Refuse an unguarded statement that may write to a fenced table: an event of SQLAlchemy's dialect."""
    context = rest[-1]
    if context is None:
        return
    connection = context.root_connection
    if getattr(connection, STARTED, NEVER)[0]() is not connection.get_transaction():
        note_start(connection)
    if GUARDED in context.execution_options:
        if connection.in_nested_transaction():
            note_write(connection)
    elif statement.startswith("SELECT") and ";" not in statement:
        return
    elif (savepoint := _SAVEPOINT.match(statement)) is not None:
        on_savepoint(connection, *savepoint.groups())
    else:
        error = _refusal(connection, statement, context)
        if error is not None:
            refuse(connection, error)
            raise error


def _refusal(connection: Connection, statement: str, context: Any) -> FenceError | None:
    leases = open_leases(connection) if context.dialect.name in MYSQL and _COMMITS.match(statement) else None
    if leases is not None and (leases.is_needed or leases.receipts):
        return FenceError(
            f"this statement would commit half of the open transaction, as MariaDB does at each "
            f"{statement.split(maxsplit=1)[0].upper()}: execute it in a transaction of its own"
        )
    if is_bypassed(context.execution_options, connection):
        return None
    if context.isddl and _DEFINES.match(statement) and not isinstance(context.compiled.statement, DDL):
        return None
    name = written(statement, tuple(fenced_names()))
    if name is None or _sets_only_excluded(statement):
        return None
    return _unguarded_error(name)


def _unguarded_error(name: str) -> UnfencedWriteError:
    line = (
        f"fenced_text('UPDATE {name} SET …, {FENCE_COLUMN} = :{TOKEN}, {WRITE_COLUMN} = :{WRITE_ID} "  # noqa: S608
        f"WHERE … AND {FENCE_COLUMN} <= :{TOKEN}', its model or Table)"
    )
    return UnfencedWriteError(
        f"this statement may write to the fenced table {name!r} and is not guarded: write through the model, "
        f"update(), delete() or upsert(), outside of WITH; as text, write {line}; or, if no "
        f"fence is wanted, execution_options(fencelock='bypass')"
    )


def _sets_only_excluded(statement: str) -> bool:
    """Tell whether a text is one UPDATE that sets only excluded columns; False if that is not plain."""
    table, columns = _set_columns(statement) if len(statement) <= _LONG else ("", frozenset())
    return bool(columns) and columns <= excluded_by_name(table)


@lru_cache(maxsize=1000)
def _set_columns(statement: str) -> tuple[str, frozenset[str]]:
    """Return the table of an UPDATE, and the columns that it sets, in lower case; none of other texts."""
    bare = _bare(statement)
    update = None if bare is None else _UPDATE.match(bare)
    if bare is None or update is None or ";" in bare.rstrip("; ") or _WRITES.search(bare[update.end() :]):
        return "", frozenset()
    depth, parts = 0, [""]
    for each in _PIECE.findall(bare[update.end() :]):
        depth += (each == "(") - (each == ")")
        if depth == 0 and each.lower() == "where":
            break
        if depth == 0 and each == ",":
            parts.append("")
        else:
            parts[-1] += each
    names = [found[1].strip('"`').lower() for part in parts if (found := _ASSIGNED.match(part)) is not None]
    return update[1].strip('"`').lower(), frozenset(names if len(names) == len(parts) else ())


def written(statement: str, names: tuple[str, ...]) -> str | None:
    """Return the name of a fenced table that the text may write to; None if no such write is found."""
    return (_written if len(statement) > _LONG else _written_before)(statement, names)


def _written(statement: str, names: tuple[str, ...]) -> str | None:
    bare, named = _bare(statement), _pattern(names)
    sql = statement if bare is None else bare if _ORDINARY.match(bare) else _bare(statement, "\"`'") or ""
    found = named.search(sql)
    if found is None or (bare is not None and _DEFINES.match(bare) and ";" not in bare.rstrip("; ")):
        return None
    rest = _TARGET.sub(lambda target: target[0] if named.search(target[0]) else " ", sql)
    return found[0] if _WRITES.search(rest) else None


#: Short statements are often repeated. Long ones mostly have values in them, so they are not cached.
_written_before: Final = lru_cache(maxsize=1000)(_written)


def _bare(text: str, kept: str = '"`') -> str | None:
    """Return a text without comments and strings; None if databases read the text differently."""
    if len(text) > _LONG and text.rfind("/*") > text.rfind("*/"):  # else each "/*" costs a search to the end
        return None
    bare = _QUOTED.sub(
        lambda part: part[0] if part[0][0] in kept else " _ " if part[0][0] == "'" else " ", text
    )
    doubtful = "'" not in kept and ("\\" in text or _DOUBTFUL.search(bare))
    return None if doubtful else " ".join(bare.split())


@lru_cache(maxsize=1000)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for these names in any spelling, and for names that PostgreSQL reads with escapes."""
    spelt = (re.sub(r'(["`%])', r"\1{1,2}", re.sub(r"(?:\\\s)+", r"\\s+", re.escape(name))) for name in names)
    return re.compile(rf"(?<!\w)(?:{'|'.join(spelt) or '(?!)'})(?!\w)|\bU&\"", re.IGNORECASE)
