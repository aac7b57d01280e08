"""proof/complaints.md: complaints of users of other libraries, and the tests that show how it is here.

A test says so by its marker: `@pytest.mark.complaint("redsync#186", "what those users met")`.
`FENCELOCK_WRITE_DOCS=1` has this file write the table.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from typing import Final

from tests.conftest import ROOT

PAGE = ROOT / "proof" / "complaints.md"
#: Where the issues of a library are, by the name that a marker gives.
REPOSITORIES: Final = {
    "aioredis-py": "aio-libs-abandoned/aioredis-py",
    "aioredlock": "joanvila/aioredlock",
    "redlock-rb": "leandromoreira/redlock-rb",
    "Madelson's DistributedLock": "madelson/DistributedLock",
    "node-redlock": "mike-marcacci/node-redlock",
    "pottery": "brainix/pottery",
    "python-redis-lock": "ionelmc/python-redis-lock",
    "RedLock.net": "samcook/RedLock.net",
    "redis-py": "redis/redis-py",
    "redisson": "redisson/redisson",
    "redlock-py": "SPSCommerce/redlock-py",
    "redsync": "go-redsync/redsync",
    "sqlalchemy": "sqlalchemy/sqlalchemy",
}


def linked(where: str) -> str:
    """Return the name of a complaint with links: "redsync#107, #144" has two of one library."""
    shown, last = [], ""
    for each in where.split(", "):
        name, _, number = each.partition("#")
        last = name or last
        repository = REPOSITORIES.get(last)
        to = f"https://github.com/{repository}" + (f"/issues/{number}" if number else "")
        shown.append(each if repository is None else f"[{each}]({to})")
    return ", ".join(shown)


def rows() -> Iterator[str]:
    """Return a row of the table for each marker."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for test in ast.parse(file.read_text()).body:
            for marker in test.decorator_list if isinstance(test, ast.FunctionDef) else ():
                if isinstance(marker, ast.Call) and ast.unparse(marker.func) == "pytest.mark.complaint":
                    assert isinstance(test, ast.FunctionDef)
                    where, says = map(ast.literal_eval, marker.args)
                    place = f"{file.relative_to(ROOT)}::{test.name}"
                    yield f"| {linked(where)} | {says} | `{place}` |"


def test_page_names_each_complaint_and_its_test() -> None:
    """Row by row, as the markers say."""
    before, ruler, _ = PAGE.read_text().partition("|---|---|---|\n")
    page = "\n".join(
        [before + ruler.rstrip(), *sorted(rows(), key=lambda row: row.lstrip("| [").lower()), ""]
    )
    if os.environ.get("FENCELOCK_WRITE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "FENCELOCK_WRITE_DOCS=1 writes it"
    assert page.count("\n") > 15
