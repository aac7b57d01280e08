"""The navigation of the site has each page once. `make docs` checks the rest, and needs zensical."""

from __future__ import annotations

import re

import pytest

from proof.pages import diagrams, llms, site
from proof.pages.blocks import ROOT, read


def test_navigation_has_each_page() -> None:
    """Those of docs/, those of the API, and the few that lie elsewhere."""
    assert site.differences() == []


def test_list_for_programs_has_the_pages_of_the_index() -> None:
    """`python -m proof.pages.llms` writes it again."""
    assert llms.FILE.read_text() == llms.render()


def test_list_of_the_site_has_its_addresses() -> None:
    """Pages are folders there."""
    assert "](first-hour/): " in llms.render(of_site=True)
    assert ".md)" not in llms.render(of_site=True)


def test_navigation_has_the_order_of_the_map() -> None:
    """That of docs/README.md, whose headings are its tabs."""
    listed = [page for below in site.navigation().values() for _, page in below]
    mapped = [entry.page for below in llms.sections().values() for entry in below]
    assert [page for page in listed if page in mapped] == mapped
    for heading in site.navigation():
        assert f'{{ "{heading}" = [' in site.settings()


def test_difference_is_a_sentence_that_names_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that the navigation lacks, and one that only it has."""
    before, (gone, *others) = site.differences(), site.navigation()["Start"]
    shown = {**site.navigation(), "Start": [*others, ("New", "new.md"), others[0]]}
    monkeypatch.setattr(site, "navigation", lambda: shown)
    assert [line for line in site.differences() if line not in before] == [
        f"The navigation does not name {gone[1]}.",
        "The navigation names new.md, and no such page exists.",
        f"The navigation names {others[0][1]} twice.",
    ]


@pytest.mark.parametrize("file", ["Makefile", "CONTRIBUTING.md", ".ci/run"])
def test_target_is_where_targets_are_listed(file: str) -> None:
    """In the help of `make`, in the page for contributors, and in what must pass before a change lands."""
    assert re.search(r"^\W*(?:@echo \")?`?make docs\b", (ROOT / file).read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("markdown", "for_the_site"),
    [
        ("See:\n- a\n- b\n", "See:\n\n- a\n- b\n"),
        ("1. a\n   ```sh\n   true\n   ```\n", "1. a\n    ```sh\n    true\n    ```\n"),
        ("[`a.b`](../README.md#try-it)", "[`a.b`](index.md#try-it)"),
        ("[the guard](../fencelock/guard)", "the guard (`fencelock/guard`)"),
        ("[live faults](../proof/torture/README.md)", "live faults (`proof/torture/README.md`)"),
        ("`[no](link.md)`", "`[no](link.md)`"),
    ],
)
def test_page_becomes_one_for_the_site(markdown: str, for_the_site: str) -> None:
    """Links lead to where the site has a page, and lists are lists of Python-Markdown, too."""
    assert site.for_site("docs/errors.md", markdown, set()) == for_the_site


def test_diagrams_are_drawn() -> None:
    """After a change: `python -m proof.pages.diagrams`."""
    assert {*diagrams.FOLDER.glob("*.svg")} == diagrams.sources().keys() != set()


def test_fault_of_a_page_is_found() -> None:
    """Signs of Markdown outside of code."""
    page = site.Made('<a id="x" href="y#z">**bold**</a><p>a\n- b</p><code>**c**</code><p>2**63</p>')
    assert (page.ids, page.links, page.left) == ({"x"}, ["y#z"], ["**bold**", "- b"])


def test_pages_say_what_they_are() -> None:
    """Each page of docs/ has one title, in its first line."""
    for page in site.pages():
        assert read(page).startswith("# "), page
