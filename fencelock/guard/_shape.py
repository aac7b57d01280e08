"""Reads the final text of statements that SQLAlchemy has compiled: whether they still are what was guarded.

Between the statement that the guard has in hand and the text that reaches the driver, programs may come with
`@compiles`, with listeners that change the text, and with criteria that the ORM adds by itself. What is asked
here needs no parser, since most of the text is of a known make: comments, strings, quotes and what stands in
parentheses are taken away, and the outline that is left is read. What is not understood is no such statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Final

from fencelock.guard._tables import FENCE_COLUMN

_MYSQL: Final = frozenset({"mysql", "mariadb"})
_NAME: Final = r'(?:[\w$]+|"(?:[^"]|"")*"|`(?:[^`]|``)*`)'
_FENCE: Final = rf"(?:\w+\s*\.\s*)*{FENCE_COLUMN}"
_PARENTHESES: Final = re.compile(r"\([^()]*\)")
_ARM: Final = rf"{_FENCE}\s*<?=(?:(?!\b(?:or|and|{FENCE_COLUMN})\b).)*"
_EITHER: Final = re.compile(rf"\s*{_ARM}(?:\bor\s+{_ARM})+", re.IGNORECASE)
"""The condition that asks for what was loaded, which is in parentheses as a whole."""
_BARE_CONDITION: Final = f" {FENCE_COLUMN} <= "
_CONDITION: Final = re.compile(rf"\s*{_FENCE}\s*(?:<=|=(?!=)|in\b)", re.IGNORECASE)
_STAMP: Final = re.compile(rf"\b{FENCE_COLUMN}\s*=(?!=)", re.IGNORECASE)
_INSERT: Final = re.compile(r"\s*insert\s+into\b", re.IGNORECASE)
_OVERWRITES: Final = re.compile(r"\bon\s+(?:conflict|duplicate)\b", re.IGNORECASE)
_UPDATE: Final = re.compile(
    r"\s*(?:with\b.*?\(\)\s*)?(?:(?P<deletes>delete)|update)\b(?:\s+(?:low_priority|quick))*"
    r"\s+(?!(?:or|ignore)\b)(?P<sets>.*?)\bwhere\b(?P<where>.*)",
    re.IGNORECASE | re.DOTALL,
)
_AFTER_WHERE: Final = re.compile(r"\breturning\b|\border\s+by\b|\blimit\b", re.IGNORECASE)
_OR: Final = re.compile(r"\b(?:or|xor)\b", re.IGNORECASE)
_TARGET: Final = re.compile(
    r"\s*(?:insert\b[\w\s]*?\binto|replace\s+into|update(?:\s+(?:only|ignore|low_priority|or\s+\w+)\b)*"
    r"|delete(?:\s+(?:ignore|low_priority|quick)\b)*(?:\s+from(?:\s+only)?\b)?)\s+"
    rf"(?:{_NAME}\s*\.\s*)*(?P<name>{_NAME})",
    re.IGNORECASE,
)
_SCHEMA: Final = r"(?:[\w$]+\s*\.\s*)*"
_ALONE: Final = re.compile(
    rf"(?:insert(?:\sor\s\w+|\signore)?\sinto\s{_SCHEMA}(?P<inserted>[\w$]+)"
    r"(?=\s?\(|\s(?:select|values|default|set)\b)"
    rf"|update\s(?:only\s)?{_SCHEMA}(?P<updated>[\w$]+)(?:\sas\s\w+|\s(?!set\b)\w+)?\sset\b"
    rf"|delete\sfrom\s(?:only\s)?{_SCHEMA}(?P<deleted>[\w$]+)"
    r"(?:\sas\s\w+|\s(?!where\b|returning\b)\w+)?(?:\swhere\b|\sreturning\b|\Z))(?P<rest>.*)",
    re.IGNORECASE,
)
_QUOTED_NAME: Final = re.compile(r"n_(\d+)_")
_OF_INSERT: Final = re.compile(r"\b(?:do|key) update\b", re.IGNORECASE)
_READS: Final = re.compile(r"(?:select|values)\b(?P<rest>.*)", re.IGNORECASE)
_DEFINES: Final = re.compile(r"\s*(?:create|alter|drop|comment|grant|revoke|rename)\b", re.IGNORECASE)
_HAS_BODY: Final = re.compile(r"\s*create\b[^(]*?\b(?:trigger|function|procedure|event)\b", re.IGNORECASE)


def inserts_only(text: str, dialect: str) -> bool:
    """Tell whether a text is one INSERT that touches no row which is there already."""
    return all(
        _INSERT.match(outline) and not _OVERWRITES.search(outline) for outline in _outlines(text, dialect)
    )


def carries_condition(text: str, dialect: str) -> bool:
    """Tell whether a text is one UPDATE or DELETE, and the condition holds for each row that it writes."""
    return all(_carries(outline, dialect) for outline in _outlines(text, dialect))


def _carries(outline: str, dialect: str) -> bool:
    found = _UPDATE.match(outline)
    if found is None or not (found["deletes"] or _STAMP.search(found["sets"])):
        return False
    where = _AFTER_WHERE.split(found["where"], maxsplit=1)[0]
    if _OR.search(where) or (dialect in _MYSQL and "||" in where):
        return False
    return any(map(_CONDITION.match, re.split(r"\band\b", where, flags=re.IGNORECASE)))


def target(text: str, dialect: str) -> str | None:
    """Return the name of the table, without its schema, that a text writes to; None where it is not plain."""
    found = _TARGET.match(without_comments(text, dialect) if "/*" in text or "--" in text else text)
    if found is None:
        return None
    name = found["name"]
    return name if name[0] not in '"`' else name[1:-1].replace(name[0] * 2, name[0])


def written_alone(text: str, dialect: str, writes: re.Pattern[str]) -> str | None:
    """Return the one table, without its schema, that a text writes to; "" if it only reads; None if unclear.

    It may mention others: in strings and comments, or where it reads.

    Args:
        text: the text.
        dialect: of the database.
        writes: what finds the words that write.
    """
    readings = (False, True) if "\\" in text else (False,)
    found = {_alone(text, dialect, writes, escapes=escapes) for escapes in readings}
    return found.pop() if len(found) == 1 else None


def _alone(text: str, dialect: str, writes: re.Pattern[str], *, escapes: bool) -> str | None:
    names: list[str] = []

    def replace(found: re.Match[str]) -> str:
        if found["name"] is None:
            return " " if found["comment"] else " s_ "
        names.append(found["name"])
        return f"n_{len(names) - 1}_"

    bare = " ".join(_parts(dialect, escapes=escapes).sub(replace, text).split()).removesuffix(";")
    if any(sign in bare for sign in (";", "/*", "*/", "'")):
        return None
    match = _ALONE.match(bare) or _READS.match(bare)
    if match is None or writes.search(_OF_INSERT.sub("", match["rest"])):
        return None
    if match.re is _READS:
        return ""
    name: str = match["inserted"] or match["updated"] or match["deleted"]
    if (quoted := _QUOTED_NAME.fullmatch(name)) is None:
        return name
    name = names[int(quoted[1])]
    return name[1:-1].replace(name[0] * 2, name[0])


def defines(text: str, dialect: str) -> bool:
    """Tell whether a text only defines something (CREATE, ALTER, DROP, …), as far as it can be told."""
    if not _DEFINES.match(without_comments(text, dialect)):
        return False
    has_body = dialect != "postgresql" and _HAS_BODY.match(without_comments(text, dialect))
    return bool(has_body) or all(_outlines(text, dialect))


def without_comments(text: str, dialect: str) -> str:
    """Return a text without comments, and with one blank for each run of them."""
    return " ".join(_parts(dialect, escapes=False).sub(_keep, text).split())


def _outlines(text: str, dialect: str) -> Iterator[str]:
    """Return a text without comments, strings, quotes and parentheses, once for each way to read it.

    An empty one stands for a text that has several statements, or a comment that databases execute.
    """
    for escapes in (False, True) if "\\" in text else (False,):
        outline = _parts(dialect, escapes=escapes).sub(_blank, text)
        while (shorter := _PARENTHESES.sub(_close, outline)) != outline:
            outline = shorter.replace("()", "\0")
        outline = outline.replace("\0", "()").strip().removesuffix(";")
        yield "" if any(sign in outline for sign in (";", "/*", "*/", "'")) else outline


@cache
def _parts(dialect: str, *, escapes: bool) -> re.Pattern[str]:
    """Return what finds comments, strings and names in quotes, the first of them first."""
    strings = r"'(?:[^'\\]|\\.|'')*'" if escapes else r"'(?:[^']|'')*'"
    double = r'"(?:[^"\\]|\\.|"")*"' if escapes and dialect in _MYSQL else r'"(?:[^"]|"")*"'
    names = rf"{double}|`(?:[^`]|``)*`"
    comments = r"/\*(?!M?!).*?\*/|--(?=\s|\Z)[^\n]*|\#[^\n]*" if dialect in _MYSQL else r"/\*.*?\*/|--[^\n]*"
    dollars = r"|\$(?!\d)(?P<tag>\w*)\$.*?\$(?P=tag)\$" if dialect == "postgresql" else ""
    return re.compile(f"(?P<string>{strings}{dollars})|(?P<name>{names})|(?P<comment>{comments})", re.DOTALL)


def _keep(found: re.Match[str]) -> str:
    return " " if found["comment"] else found[0]


def _blank(found: re.Match[str]) -> str:
    if found["name"] is None:
        return " " if found["comment"] else " s_ "
    name = found["name"][1:-1]
    return name if name == FENCE_COLUMN else "n_" + re.sub(r"\W", "_", name)


def _close(found: re.Match[str]) -> str:
    inside = found[0][1:-1].replace("\0", "()")
    return _BARE_CONDITION if _EITHER.fullmatch(inside) else " () "
