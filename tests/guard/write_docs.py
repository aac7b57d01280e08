"""The page on ways to write, proof/write-paths.md: each section is what a test has just seen.

`FENCELOCK_WRITE_DOCS=1` has the tests write their sections. Otherwise the page must say what happens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, TypeAlias

DOCS: Final = Path(__file__).parents[2] / "proof" / "write-paths.md"
Outcomes: TypeAlias = tuple[str, tuple[str, ...]]
"""A way to write, and what became of it under each condition."""


def grouped(ways: Iterable[Outcomes]) -> str:
    """Return the rows of a table, one for all ways that end alike."""
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for way, outcomes in ways:
        kind, found, name = way.partition(": ")
        alike.setdefault((kind if found else "", outcomes), []).append(name or way)
    rows = [
        f"| {kind and f'**{kind}** '}{' · '.join(names)} | {' | '.join(outcomes)} |\n"
        for (kind, outcomes), names in alike.items()
    ]
    return "".join(rows)


def check_section(section: str) -> None:
    """Check that the page has a section, which begins with its heading; or write it there.

    Raises:
        AssertionError: if the page says something else.
    """
    heading = section.splitlines()[0]
    found = [part.rstrip() for part in re.split(r"^(?=##? )", DOCS.read_text(), flags=re.MULTILINE) if part]
    headings = [part.splitlines()[0] for part in found]
    if os.environ.get("FENCELOCK_WRITE_DOCS") == "1":
        at = headings.index(heading) if heading in headings else len(found)
        found[at : at + 1] = [section.rstrip()]
        DOCS.write_text("\n\n".join(found) + "\n")
    else:
        assert heading in headings
        assert section.rstrip().splitlines() == found[headings.index(heading)].splitlines()
