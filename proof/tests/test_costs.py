"""docs/costs.md shows users a few figures: they are those of the pages that the benchmarks write."""

from __future__ import annotations

import re

import pytest

from proof.pages.blocks import read

_LOCKS, _DATABASES = "benchmarks/locks.md", "benchmarks/authorities.md"
_ONE, _EIGHT = "One thread, no contention", "8 processes, one resource, nobody works while holding it"
#: By the name of a line: the page, the heading and the name of the line that has its figure.
RATES = {
    "SQLite": (_DATABASES, "SQLite, one caller", "fencelock"),
    "one node": (_LOCKS, _ONE, "fencelock | 1"),
    "three nodes": (_LOCKS, _ONE, "fencelock | 3"),
    "PostgreSQL": (_DATABASES, "PostgreSQL, one caller", "fencelock"),
    "five nodes": (_LOCKS, _ONE, "fencelock | 5"),
    "MariaDB": (_DATABASES, "MariaDB, one caller", "fencelock"),
    "ZooKeeper, one server": ("docs/zookeeper.md", "What it costs", "fencelock, one caller"),
    "etcd, three members": ("docs/etcd.md", "What it costs", "fencelock, one caller"),
    "for comparison: `Lock` of redis-py, one node, without a token": (_LOCKS, _ONE, "redis-py Lock | 1"),
    "for comparison: `SELECT … FOR UPDATE` on PostgreSQL": (
        _DATABASES,
        "PostgreSQL, one caller",
        "SELECT … FOR UPDATE, COMMIT",
    ),
}
HAND_OVERS = {
    "SQLite": (_DATABASES, "SQLite, 8 processes, one resource", "fencelock"),
    "one node": (_LOCKS, _EIGHT, "fencelock | 1"),
    "three nodes": (_LOCKS, _EIGHT, "fencelock | 3"),
    "PostgreSQL": (_DATABASES, "PostgreSQL, 8 processes, one resource", "fencelock"),
    "five nodes": (_LOCKS, _EIGHT, "fencelock | 5"),
    "MariaDB": (_DATABASES, "MariaDB, 8 processes, one resource", "fencelock"),
    "ZooKeeper, one server": ("docs/zookeeper.md", "What it costs", "fencelock, hand-overs of 8 processes"),
    "etcd, three members": ("docs/etcd.md", "What it costs", "fencelock, hand-overs of 8 processes"),
    "for comparison: `Lock` of redis-py, one node, without a token": (_LOCKS, _EIGHT, "redis-py Lock | 1"),
    "for comparison: `SELECT … FOR UPDATE` on PostgreSQL": (
        _DATABASES,
        "PostgreSQL, 8 processes, one resource",
        "SELECT … FOR UPDATE, COMMIT",
    ),
}
PAGE = read("docs/costs.md")


def figure(page: str, heading: str, line: str) -> str:
    """Return the first figure of a line in a table of a page."""
    (section,) = (text for text in read(page).split("\n## ") if text.startswith(f"{heading}\n"))
    found = re.search(rf"^\| {re.escape(line)} \| ([\d.,]+) \|", section, re.MULTILINE)
    assert found is not None, (page, heading, line)
    return found[1]


@pytest.mark.parametrize("name", RATES)
def test_rates_are_those_that_were_measured(name: str) -> None:
    """A line has both figures."""
    assert f"| {name} | {figure(*RATES[name])} | {figure(*HAND_OVERS[name])} |" in PAGE


@pytest.mark.parametrize(
    ("database", "rival"),
    [("PostgreSQL", "FOR UPDATE"), ("MariaDB", "FOR UPDATE"), ("SQLite", "BEGIN IMMEDIATE")],
)
def test_deposits_are_those_that_were_measured(database: str, rival: str) -> None:
    of = _DATABASES, f"{database}, deposits into one account: 200 callers, 1 deposit each"
    assert f"| {database} | {figure(*of, 'fencelock')} | {figure(*of, rival)}, `{rival}` |" in PAGE


def test_page_is_short() -> None:
    """Users read it to the end."""
    assert len(PAGE.splitlines()) <= 64
