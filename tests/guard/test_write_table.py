"""The table of write paths in the docs is true, because the tests take every path, on every driver.

Each path is taken on tables without triggers, with plain ones and with strict ones: the guard's own
statements must pass them all. What only triggers see is in `test_trigger_table`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import pytest
from sqlalchemy import URL, Engine, Table, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from fencelock import Lease, StaleTokenError, UnfencedWriteError, bind, fenced_text, upsert
from fencelock.guard import conditions, triggers
from fencelock.guard.tables import FENCE_COLUMN, TRIGGER_MARK, FenceTrigger
from tests.guard import unguardable
from tests.guard import write_paths as guarded
from tests.guard.marks import Act
from tests.guard.rows import contents
from tests.guard.write_docs import Outcomes, check_section, grouped

DRIVERS = {
    "sqlite": ("pysqlite", "aiosqlite"),
    "postgresql": ("psycopg", "psycopg_async", "asyncpg"),
    "mariadb": ("pymysql", "aiomysql", "asyncmy"),
}
ALL_DRIVERS = sorted(driver for drivers in DRIVERS.values() for driver in drivers)
ASYNC = frozenset({"aiosqlite", "psycopg_async", "asyncpg", "aiomysql", "asyncmy"})
Write = Act


class Way(NamedTuple):
    """A way to write, and what it writes to."""

    kind: str
    name: str
    write: Write
    tables: Any

    @property
    def resource(self) -> str:
        """What guards the rows that it writes."""
        return "order:1" if self.tables is guarded else "orders"


def upsert_again(session: Session) -> None:
    upsert(session, guarded.Order, [{"id": 1, "status": "paid"}])


def upsert_anew(session: Session) -> None:
    upsert(session, guarded.Point, [{"id": 2, "x": 1}])


def by_text(sql: str, model: type[Any]) -> Write:
    return lambda session: session.execute(fenced_text(sql, model, resource="order:1"), {"id": 1})


update_by_text = by_text(
    "UPDATE wp_orders SET status = 'paid', last_fencing_token = :fencing_token,"
    " last_write_id = :fencing_write_id"
    " WHERE id = :id AND last_fencing_token <= :fencing_token",
    guarded.Order,
)
delete_by_text = by_text(
    "DELETE FROM wp_boxes WHERE id = :id AND last_fencing_token <= :fencing_token", guarded.Box
)
WAYS = (
    *(Way("UPDATE", name, write, guarded) for name, write in guarded.UPDATES.items()),
    Way("UPDATE", "upsert", upsert_again, guarded),
    Way("UPDATE", "`fenced_text`", update_by_text, guarded),
    *(Way("DELETE", name, write, guarded) for name, write in guarded.DELETES.items()),
    Way("DELETE", "`fenced_text`", delete_by_text, guarded),
    *(Way("INSERT", name, write, guarded) for name, write in guarded.INSERTS.items()),
    Way("INSERT", "upsert", upsert_anew, guarded),
    *(Way("other", name, write, unguardable) for name, write in unguardable.UNGUARDABLE.items()),
)
#: Changes of a collection alone.
CHILDREN = frozenset(
    {"link", "unlink", "link, write-only", "link, dynamic", "collection", "collection, by backref"}
)
HEAD = """\
# Every way to write, and what becomes of it

`tests/guard/test_write_table.py` writes this table. It takes each way without a lease, with a token below the
row's fence (stale), with the same token again, and with one above it (fresh): on SQLite, PostgreSQL and
MariaDB, through {drivers}.
Triggers make no difference here.

- **refused**: `UnfencedWriteError`, before anything is sent to the database.
- **stale**: `StaleTokenError`. The database has turned the write away, and all is rolled back.
- **written**: with the token, which is the row's fence from then on. Without a lease, a collection alone is
  written: its links and children, and not the fenced row.

A new row has no fence to compare with, so a stale holder's INSERT is written. Pass the `gate` first where
that matters. SQLAlchemy does not see bare cursors, `psql` and stored code: for them are `conditional_update`
and the triggers, in the sections below.

| ways | no lease | stale | again | fresh |
|---|---|---|---|---|
"""


def outcome(session: Session, resource: str, token: int | None, write: Write) -> str:
    if token is not None:
        bind(session, Lease(resource, token))
    try:
        write(session)
        session.commit()
    except UnfencedWriteError:
        return "refused"
    except StaleTokenError as error:
        right = (error.token, error.current) == (token, guarded.FENCE) and error.table
        return "stale" if right else repr(error)
    finally:
        session.rollback()
    return "written"


Rows = dict[str, list[tuple[Any, ...]]]


def check_rows(way: Way, token: int | None, ended: str, before: Rows, after: Rows) -> None:
    """Check that a write left its token on what it wrote, or else changed nothing anywhere."""
    new = {name: [row for row in rows if row not in before[name]] for name, rows in after.items()}
    gone = {name: [row for row in rows if row not in after[name]] for name, rows in before.items()}
    where = f"{way.kind} {way.name}, token {token}"
    if ended != "written":
        assert after == before, where
        return
    fences = {row[FENCES[name]] for name, rows in new.items() if name in FENCES for row in rows}
    if token is None:
        assert way.name in CHILDREN, where
        assert not fences, where
    elif way.kind == "DELETE":
        assert any(gone.values()), where
        assert not fences, where
    else:
        assert fences == {token}, where


Run = Callable[[Way, int | None], Awaitable[str]]


async def every_outcome(seeding: Engine, run: Run) -> list[Outcomes]:
    """Take every way under every condition; return what became of each."""
    found, seeded = [], None  # what was not written has left the rows as they were seeded
    for way in WAYS:
        cells = []
        for token in (None, guarded.STALE, guarded.FENCE, guarded.FRESH):
            metadata = way.tables.Base.metadata
            if seeded is not way.tables:
                way.tables.seed(seeding)
                before, seeded = contents(seeding, metadata), way.tables
            cells.append(await run(way, token))
            check_rows(way, token, cells[-1], before, contents(seeding, metadata))
            seeded = None if cells[-1] == "written" else seeded
        found.append((f"{way.kind}: {way.name}".removeprefix("other: "), tuple(cells)))
    return found


async def blocking(seeding: Engine, url: URL) -> list[Outcomes]:
    engine = create_engine(url)

    async def run(way: Way, token: int | None) -> str:
        with Session(engine) as session:
            return outcome(session, way.resource, token, way.write)

    try:
        return await every_outcome(seeding, run)
    finally:
        engine.dispose()


async def awaiting(seeding: Engine, url: URL) -> list[Outcomes]:
    engine = create_async_engine(url)

    async def run(way: Way, token: int | None) -> str:
        async with AsyncSession(engine) as session:
            return await session.run_sync(outcome, way.resource, token, way.write)

    try:
        return await every_outcome(seeding, run)
    finally:
        await engine.dispose()


@pytest.fixture(scope="module")
def seeding(shared_url: str) -> Iterator[Engine]:
    engine = create_engine(shared_url)
    for tables in (guarded, unguardable):
        tables.Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


FENCED: list[Table] = [
    table
    for tables in (guarded, unguardable)
    for table in tables.Base.metadata.sorted_tables
    if FENCE_COLUMN in table.c
]
#: Where the fence stands in a row.
FENCES = {table.name: [*table.c.keys()].index(FENCE_COLUMN) for table in FENCED}


@pytest.fixture
def _trigger(seeding: Engine, trigger: FenceTrigger) -> Iterator[None]:
    """All fenced tables with the trigger that the test wants, and models that say so."""
    set_triggers(seeding, trigger=trigger)
    yield
    set_triggers(seeding, trigger=False)


def set_triggers(engine: Engine, *, trigger: FenceTrigger) -> None:
    """Give all fenced tables a trigger, or none, and say so where a model's definition does."""
    dialect = engine.dialect.name
    with engine.begin() as connection:
        for table in FENCED:
            table.c[FENCE_COLUMN].info[TRIGGER_MARK] = trigger
            make = triggers.create(table, dialect, strict=trigger == "strict")
            for statement in make if trigger else triggers.drop(table, dialect):
                connection.execute(statement)
            assert triggers.installed(connection, table.name) == trigger
    conditions._forms.clear()  # a program's models never change their minds, so their statements are kept


#: Each database without a trigger and with one, once by a driver that blocks and once by one that does not.
SHORT = {
    ("pysqlite", False),
    ("aiosqlite", "strict"),
    ("psycopg", "strict"),
    ("asyncpg", False),
    ("pymysql", False),
}


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_trigger")
@pytest.mark.complaint("sqlalchemy#9339, #12921, #5900", "bulk statements know nothing of version_id_col")
@pytest.mark.parametrize(
    ("shared_url", "driver", "trigger"),
    [
        pytest.param(database, driver, trigger, marks=() if (driver, trigger) in SHORT else pytest.mark.long)
        for database, drivers in {**DRIVERS, "galera": ("pymysql", "asyncmy")}.items()  # at one of its nodes
        for driver in drivers
        for trigger in (False, True, "strict")
        if trigger is not True or driver not in ASYNC  # what plain ones refuse is refused by strict ones, too
        if database != "galera" or (driver, trigger) in {("pymysql", "strict"), ("asyncmy", False)}
    ],
    indirect=["shared_url"],
)
def test_every_way_to_write_ends_as_the_docs_say(seeding: Engine, driver: str) -> None:
    url = seeding.url
    take_all = awaiting if driver in ASYNC else blocking
    table = asyncio.run(take_all(seeding, url.set(drivername=f"{url.get_backend_name()}+{driver}")))
    check_section(HEAD.format(drivers=", ".join(ALL_DRIVERS)) + grouped(table))
    for way, (without, stale, again, fresh) in table:
        assert without == ("written" if way.removeprefix("UPDATE: ") in CHILDREN else "refused")
        assert stale == "refused" if again == "refused" else stale == "stale" or way.startswith("INSERT")
        assert again == fresh
