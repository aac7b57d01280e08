"""The pages as a list for programs that read: docs/llms.txt, made of the tables of docs/README.md.

`python -m tests.pages.llms` writes it. A test compares. The form is that of llmstxt.org.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tests.pages.blocks import ROOT, read

FILE: Final = ROOT / "docs" / "llms.txt"
_HEAD: Final = """\
# fencelock

> Distributed locks for SQLAlchemy. Each lock brings a fencing token, and the database rejects a write
> whose token is older than that of the row. For PostgreSQL, MariaDB and SQLite; blocking and asyncio.
"""
_LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)]+\.md)\)")


def lines() -> Iterator[str]:
    """Yield the sections, and a line for each page."""
    for line in read("docs/README.md").splitlines():
        if line.startswith("## "):
            yield f"\n{line}\n"
        elif line.startswith("| ["):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            said = _LINK.sub(r"\1", cells[1])
            yield from (f"- [{title}]({page}): {said}" for title, page in _LINK.findall(cells[0]))


def render() -> str:
    return _HEAD + "\n".join(lines()) + "\n"


if __name__ == "__main__":
    FILE.write_text(render())
