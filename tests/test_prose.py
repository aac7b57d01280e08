"""The prose of the library: docstrings that are long, and words that hide the subject of a sentence.

`LIMITS` has what was counted last. A count may only fall, and its limit falls with it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import fencelock

PACKAGE = Path(fencelock.__file__).parent
LONG = 40
_EXAMPLE = re.compile(r"(?ms)^ *```.*?^ *```$")
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def long_docstrings(text: str) -> int:
    """Count the docstrings of more than `LONG` words, their examples aside."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, _WITH_DOCSTRING))
    docstrings = (_EXAMPLE.sub("", ast.get_docstring(node) or "") for node in nodes)
    return sum(len(docstring.split()) > LONG for docstring in docstrings)


def uses(pattern: str) -> Callable[[str], int]:
    """Return what counts the places that match; a space in a pattern matches the end of a line, too."""
    search = re.compile(rf"\b(?:{pattern})\b".replace(" ", r"[\s#]+"), re.IGNORECASE)
    return lambda text: len(search.findall(text))


LIMITS = {
    "docstrings of more than 40 words": (long_docstrings, 190),
    "somebody, nobody, anybody, everybody": (uses("(?:some|no|any|every)body"), 0),
    "who, whoever": (uses("who(?:ever)?"), 4),
    "what is": (uses("what is"), 2),
    "anew": (uses("anew"), 0),
    "so long": (uses("so long"), 0),
    "be inside": (uses("be inside"), 0),
    "of each there is": (uses("of each there is"), 0),
    "the same of it": (uses("the same of it"), 0),
    "have it be": (uses(r"have (?!to )(?:\w+ ){1,3}be"), 0),
}


@pytest.mark.parametrize("name", LIMITS)
def test_prose_only_becomes_simpler(name: str) -> None:
    """The sum over all files is the limit; the message has the count of each file."""
    count, limit = LIMITS[name]
    files = {str(path.relative_to(PACKAGE)): count(path.read_text()) for path in PACKAGE.rglob("*.py")}
    total, most = sum(files.values()), Counter(files).most_common()
    assert total <= limit, (
        f"{name}: {total}, and {limit} before. By file: {[each for each in most if each[1]]}"
    )
    assert total == limit, f"{name}: lower the limit to {total}"


def test_counts_see_what_they_are_for() -> None:
    """Also across the end of a line, in comments and at the beginning of a sentence."""
    long = f"def f():\n    '''{'word ' * 41}'''\nclass A:\n    '''{'word ' * 40}'''\n"
    assert long_docstrings(long) == 1
    assert (
        long_docstrings(f"def f():\n    '''A\n\n    ```python\n    {'word ' * 41}\n    ```\n    '''\n") == 0
    )
    assert uses("what is")("What\n    # is here, what\n is there: somewhat is neither") == 2
    assert uses("have (?!to )(?:\\w+ ){1,3}be")("Have a hold not be extended; it may have to be") == 1
