"""proof/complaints.md: complaints of users of other libraries, and the tests that show how it is here.

A test says so by its marker: `@pytest.mark.complaint("redsync#186", "what those users met")`.
`FENCELOCK_WRITE_DOCS=1` has this file write the table.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

from tests.conftest import ROOT

PAGE = ROOT / "proof" / "complaints.md"


def rows() -> Iterator[str]:
    """Return a row of the table for each marker."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for test in ast.parse(file.read_text()).body:
            for marker in test.decorator_list if isinstance(test, ast.FunctionDef) else ():
                if isinstance(marker, ast.Call) and ast.unparse(marker.func) == "pytest.mark.complaint":
                    assert isinstance(test, ast.FunctionDef)
                    where, says = map(ast.literal_eval, marker.args)
                    yield f"| {where} | {says} | `{file.relative_to(ROOT)}::{test.name}` |"


def test_page_names_each_complaint_and_its_test() -> None:
    """Row by row, as the markers say."""
    before, ruler, _ = PAGE.read_text().partition("|---|---|---|\n")
    page = "\n".join([before + ruler.rstrip(), *sorted(rows(), key=str.lower), ""])
    if os.environ.get("FENCELOCK_WRITE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "FENCELOCK_WRITE_DOCS=1 writes it"
    assert page.count("\n") > 15
