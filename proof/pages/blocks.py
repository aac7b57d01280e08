"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent.parent
PAGES: Final = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
#: Pages for developers of fencelock. They lie beside what they describe, and the site lacks them.
BESIDE: Final = (
    *("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
    *sorted(
        str(path.relative_to(ROOT)) for of in ("benchmarks", "proof") for path in (ROOT / of).rglob("*.md")
    ),
)

#: Languages whose blocks run, and those that only show: output, a diagram, or what another program reads.
RUN: Final = ("python", "sh")
SHOWN: Final = ("text", "sql", "ini", "yaml", "mermaid", "diff")

_FENCE: Final = re.compile(r"^(?P<indent> *)```(?P<language>\S*) *$")
_FILE: Final = re.compile(r"# (?P<name>[\w/.-]+\.py)$")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code as it is printed.

    Attributes:
        language: the word behind the fence.
        line: the number of its first line in the page.
        text: all of it.
    """

    language: str
    line: int
    text: str

    @property
    def file(self) -> str | None:
        """The file that the block is the content of: one that begins with the comment `# name.py`."""
        named = _FILE.match(self.text.split("\n", 1)[0]) if self.language == "python" else None
        return named["name"] if named else None


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    opened: tuple[str, str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence:
                opened, lines = (fence["indent"], fence["language"], number + 1), []
        elif fence and not fence["language"]:
            indent, language, first = opened
            yield Block(language, first, "\n".join(line.removeprefix(indent) for line in lines) + "\n")
            opened = None
        else:
            lines.append(line)
    assert opened is None, f"a block has no end: {opened}"


def prose(text: str) -> str:
    """Return a page without its blocks and comments."""
    kept, inside = [], False
    for line in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).split("\n"):
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)
