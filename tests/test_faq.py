"""docs/faq.md quotes what the library says: each message is held to the text in the source."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache

import fencelock
from proof.pages.blocks import ROOT, read

#: A value in a message: a field of an f-string, of a template or of a line of the log.
VALUE = "…"
_FIELD = re.compile(r"%[rsdg]|%[\d.+]+f|\{\w*(?:![rs])?(?::[^{}]*)?\}")
_ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
_CLASS = re.compile(r"([A-Z]\w*Error): ")
MESSAGES = _ROW.findall(read("docs/faq.md"))


def text_of(node: ast.expr) -> str:
    """Return the text that an expression makes, with `…` for parts that are known only when it runs."""
    match node:
        case ast.Constant(value=str() as text):
            return _FIELD.sub(VALUE, text)
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
    return VALUE


@cache
def said() -> str:
    """Return all texts of the library, one a line."""
    return "\n".join(_texts())


def _texts() -> Iterator[str]:
    for path in sorted((ROOT / "fencelock").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                yield text_of(node).replace("\n", " ")


def pattern_of(message: str) -> str:
    """Return what finds a message in one line of the source: a `…` in it stands for anything."""
    parts = (re.escape(part.strip()) for part in message.split(VALUE))
    return "[^\n]*".join(parts)


def is_said(message: str) -> bool:
    """Return whether the library says it; its class is one of the library's errors, or of Python's."""
    named = _CLASS.match(message)
    if named is not None:
        if not hasattr(fencelock, named[1]) and not hasattr(builtins, named[1]):
            return False
        message = message.removeprefix(named[0])
    return re.search(pattern_of(message), said()) is not None


def test_messages_are_said() -> None:
    assert [message for message in MESSAGES if not is_said(message)] == []


def test_page_has_messages() -> None:
    """And none of them twice."""
    assert len(MESSAGES) == len({*MESSAGES}) > 40


def test_other_messages_are_noticed() -> None:
    """A word that differs, and parts in another order."""
    assert re.search(pattern_of("this write to … needs the lease of …, and the held leases are …"), said())
    assert not re.search(pattern_of("this write to … needs a lease of …, and the held leases are …"), said())
    assert not re.search(pattern_of("and the held leases are …, this write to …"), said())
