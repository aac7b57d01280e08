"""The map of the pages is docs/README.md: its order is that of the site, and of the list for programs.

`python -m proof.pages.llms` writes the list, docs/llms.txt, in the form of llmstxt.org. A test compares.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from proof.pages.blocks import ROOT, read

FILE: Final = ROOT / "docs" / "llms.txt"
_HEAD: Final = """\
# fencelock

> Distributed locks for SQLAlchemy. Each lock brings a fencing token, and the database rejects a write
> whose token is older than that of the row. For PostgreSQL, MariaDB and SQLite; blocking and asyncio.
"""
LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)]+\.md)\)")


class Entry(NamedTuple):
    """A page of the map."""

    title: str
    page: str
    says: str


def sections() -> dict[str, list[Entry]]:
    """Return the pages below each heading, in order."""
    found: dict[str, list[Entry]] = {}
    for line in read("docs/README.md").splitlines():
        if line.startswith("## "):
            below = found.setdefault(line[3:], [])
        elif line.startswith("| ["):
            link, says = (cell.strip() for cell in line.strip("|").split("|"))
            below += [Entry(title, page, says) for title, page in LINK.findall(link)]
    return {heading: below for heading, below in found.items() if below}


def render(*, of_site: bool = False) -> str:
    """Return the list with the pages as the repository has them, or the site."""
    lines = [_HEAD.rstrip()]
    for heading, below in sections().items():
        lines += ["", f"## {heading}", ""]
        for title, page, says in below:
            to = page.replace(".md", "/") if of_site else page
            lines.append(f"- [{title}]({to}): {says}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(render())
