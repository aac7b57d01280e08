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
    "ZooKeeper, one server": (_DATABASES, "ZooKeeper, one caller", "fencelock"),
    "etcd, three members": (_DATABASES, "etcd, one caller", "fencelock"),
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
    "ZooKeeper, one server": (_DATABASES, "ZooKeeper, 8 processes, one resource", "fencelock"),
    "etcd, three members": (_DATABASES, "etcd, 8 processes, one resource", "fencelock"),
    "for comparison: `Lock` of redis-py, one node, without a token": (_LOCKS, _EIGHT, "redis-py Lock | 1"),
    "for comparison: `SELECT … FOR UPDATE` on PostgreSQL": (
        _DATABASES,
        "PostgreSQL, 8 processes, one resource",
        "SELECT … FOR UPDATE, COMMIT",
    ),
}
PAGE = read("docs/costs.md")


def figure(page: str, heading: str, line: str, *, place: int = 1) -> str:
    """Return a figure of a line in a table of a page; by default the first one."""
    (section,) = (text for text in read(page).split("\n## ") if text.startswith(f"{heading}\n"))
    found = re.search(rf"^\| {re.escape(line)} \| (.+) \|$", section, re.MULTILINE)
    assert found is not None, (page, heading, line)
    return found[1].split(" | ")[place - 1].split(" ")[0]


@pytest.mark.parametrize("name", RATES)
def test_rates_are_those_that_were_measured(name: str) -> None:
    """A line has both figures."""
    assert f"| {name} | {figure(*RATES[name])} | {figure(*HAND_OVERS[name])} |" in PAGE


DATABASES = pytest.mark.parametrize(
    ("database", "rival"),
    [("PostgreSQL", "FOR UPDATE"), ("MariaDB", "FOR UPDATE"), ("SQLite", "BEGIN IMMEDIATE")],
)


@DATABASES
@pytest.mark.parametrize(("callers", "deposits"), [("200", "1 deposit"), ("8", "50 deposits")])
def test_deposits_are_those_that_were_measured(
    database: str, rival: str, callers: str, deposits: str
) -> None:
    """The unflattering ones as well: 99 % of them, and few callers with many deposits."""
    of = _DATABASES, f"{database}, deposits into one account: {callers} callers, {deposits} each"
    ours, others = (
        f"{figure(*of, name)} s, {figure(*of, name, place=3)} ms" for name in ("fencelock", rival)
    )
    shown = database if callers == "200" else ""
    line = f"| {shown} | {callers} × {deposits.split(maxsplit=1)[0]} | {ours} | {others}, `{rival}` |"
    assert line.replace("|  |", "| |") in PAGE


@DATABASES
def test_longest_waits_are_those_that_were_measured(database: str, rival: str) -> None:
    of = _DATABASES, f"{database}, 8 processes, one resource"
    of_rival = f"{'SELECT … ' if rival == 'FOR UPDATE' else ''}{rival}, COMMIT"
    ours, others = (figure(*of, name, place=5) for name in ("fencelock", of_rival))
    place = "on\nSQLite" if database == "SQLite" else f"on {database}"
    assert re.search(rf"{ours} ms {place} \((?:`{rival}`: )?{others} ms\)", PAGE)


STORES = {
    "etcd": [
        ("one caller", "grpcio, three calls", "the same three calls by grpcio"),
        ("one caller", "etcd3gw Lock", "the lock of etcd3gw"),
        ("asyncio, 100 tasks, a resource each", "grpc.aio, three calls", "the same three calls by grpc.aio"),
        ("8 processes, one resource", "etcd3gw Lock", "the lock of etcd3gw"),
    ],
    "ZooKeeper": [
        ("one caller", "kazoo Lock", "kazoo's `Lock`"),
        ("asyncio, 100 tasks, a resource each", "kazoo Lock in threads", "kazoo's `Lock` in 100 threads"),
        ("8 processes, one resource", "kazoo Lock", "kazoo's `Lock`"),
    ],
}


@pytest.mark.parametrize("store", STORES)
def test_pages_of_stores_show_what_was_measured(store: str) -> None:
    page = read(f"docs/{store.lower()}.md")
    for case, rival, shown in STORES[store]:
        of = _DATABASES, f"{store}, {case}"
        line = f"| {shown} | {figure(*of, rival)} | {figure(*of, rival, place=3)} |"
        assert f"| {figure(*of, 'fencelock')} | |\n" in page, case
        assert line in page, line


def test_page_of_etcd_shows_the_cpu_that_was_measured() -> None:
    of = _DATABASES, "etcd, one caller"
    ours, theirs = (
        float(figure(*of, name, place=5).replace(",", "")) / 1000
        for name in ("fencelock", "grpcio, three calls")
    )
    assert f"A lock takes {ours:.2f} ms of CPU; with a client in C, {theirs:.2f} ms." in read("docs/etcd.md")


def test_comparisons_are_those_that_were_measured() -> None:
    """docs/compared.md, to two digits."""

    def times(of: tuple[str, str], one: str, other: str) -> str:
        faster, slower = (float(figure(*of, name).replace(",", "")) for name in (one, other))
        return f"{faster / slower:.3g}"

    page = " ".join(read("docs/compared.md").split())
    passed_on = _DATABASES, "PostgreSQL, 8 processes, one resource"
    dlock = times(passed_on, "sqlalchemy-dlock", "fencelock")
    assert f"handed over {float(dlock):.2g} times as often as fencelock's" in page
    assert f"[{times(passed_on, 'pg_advisory_xact_lock, COMMIT', 'fencelock')} times]" in page
    assert f"It locks {times((_LOCKS, _ONE), 'redis-py Lock | 1', 'fencelock | 1')} times as often" in page


def test_page_is_short() -> None:
    """Users read it to the end."""
    assert len(PAGE.splitlines()) <= 70
