"""Docstrings and comments use plain words: no phrase of `ODD`, because these hide the subject of a sentence.

The tests read fencelock/, tests/ and proof/. Code and all other strings may have any words.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
FOLDERS: Final = ("fencelock", "tests", "proof")

#: Each odd phrase with a comment that has it once.
ODD: Final = {
    "(?:some|no|any|every)body": "# Nobody waits; a somebodyish word is none.",
    "who(?:ever)?": "# Whoever asks; the whole is none.",
    "what is": "# It shows what\n# is locked; somewhat is none.",
    "anew": "# It is made anew; a_new is none.",
    "so long": "# It waits for so long; also longer.",
    "be inside": "# One can be inside; to be outside is none.",
    "of each there is": "# Of each there is one; of each there are two.",
    "the same of it": "# The same of it; the same item is none.",
    r"have (?!to )(?:\w+ ){1,3}be": "# Have a hold not be extended; it may have to be.",
}
#: Terms of other tools, which may stand in backquotes: the account of Unix.
TERMS: Final = ("`nobody`",)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield each docstring, and each comment with those on the lines above it, with its first line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, ast.get_source_segment(source, node) or ""
    first, last, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row = token.start[0]
            if row > last + 1:
                yield first, "\n".join(lines)
                first, lines = row, []
            lines.append(token.string)
            last = row
    yield first, "\n".join(lines)


def found(phrase: str, source: str) -> list[int]:
    """Return the line of each place with the phrase; its spaces may be the end of a line."""
    search = re.compile(rf"\b(?:{phrase})\b".replace(" ", r"[\s#:]+"), re.IGNORECASE)
    if not search.search(source):
        return []
    places = []
    for first, text in texts(source):
        for term in TERMS:
            text = text.replace(term, "`term`")  # noqa: PLW2901 - the rest of the text is read
        places += [first + text.count("\n", 0, match.start()) for match in search.finditer(text)]
    return sorted(places)


@cache
def sources() -> dict[str, str]:
    """Return the text of each file of Python, by its path."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


@pytest.mark.parametrize("phrase", ODD)
def test_prose_has_no_odd_phrase(phrase: str) -> None:
    """The error names each place: say there which client, task or row acts."""
    assert [f"{path}:{line}" for path, source in sources().items() for line in found(phrase, source)] == []


@pytest.mark.parametrize(("phrase", "comment"), ODD.items())
def test_each_phrase_is_found(phrase: str, comment: str) -> None:
    """In comments and docstrings, at the beginning of a sentence, and across the end of a line."""
    assert found(phrase, f"x = 1\n\n{comment}\n") == [3]
    docstring = comment.replace("# ", "    ")
    assert found(phrase, f"def f():\n    '''A function.\n\n{docstring}\n    '''\n") == [4]
    assert found(phrase, f"x = 1\n'''\n{docstring}\n'''\n") == [3]


def test_code_and_strings_may_have_any_words() -> None:
    """Names and SQL are no prose, and the account of Unix has its name."""
    source = "def f(who):\n    '''Runs as `nobody`.'''\n    return g('SELECT who', who)  # on a server\n"
    assert found("who(?:ever)?", source) == []
    assert found("(?:some|no|any|every)body", source) == []
    assert found("(?:some|no|any|every)body", source.replace("`", "")) == [2]


def test_all_folders_are_read() -> None:
    for folder in FOLDERS:
        assert sum(path.startswith(f"{folder}/") for path in sources()) > 50
