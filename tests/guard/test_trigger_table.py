"""The table of ways past SQLAlchemy that only a trigger sees: without one, with a plain and a strict one.

The column without a trigger is the control: a write that a trigger refuses is written there.
"""

# ruff: noqa: S608 - the SQL of these tests is written here

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from sqlalchemy import Column, Connection, Engine, Integer, MetaData, NullPool, String, Table, select

from fencelock import conditional_delete, conditional_update
from fencelock.guard import fence_column, write_id_column
from fencelock.guard.tables import FenceTrigger
from tests.conftest import MYSQL_URL
from tests.guard.rows import bypassed, refill, rows_of
from tests.guard.write_docs import check_section, grouped

FENCE = 5
TRIGGERS: tuple[FenceTrigger, ...] = (False, True, "strict")
SAME = "status = 'x'"
LOWER = "status = 'x', last_fencing_token = 4"
Act = Callable[[Connection, Any], object]
"""Writes with a connection's bare cursor."""


class Way(NamedTuple):
    """A way to write past SQLAlchemy."""

    name: str
    act: Act


def sql(name: str, *statements: str) -> Way:
    def act(_: Connection, cursor: Any) -> None:
        for statement in statements:
            cursor.execute(statement)

    return Way(name, act)


def updates(name: str, form: str) -> list[Way]:
    return [
        sql(f"{name}, leaves the fence", form.format(SAME)),
        sql(f"{name}, lowers the fence", form.format(LOWER)),
    ]


def with_token(kind: str, token: int) -> Act:
    """Return the write of a bare cursor with the statement that fencelock makes for it."""

    def act(connection: Connection, cursor: Any) -> None:
        style: Any = connection.dialect.paramstyle
        options: Any = {"dialect": connection.dialect.name}
        if kind == "UPDATE":
            made = conditional_update("tt_orders", {"status": "x"}, {"id": 1}, token, style, **options)
        else:
            made = conditional_delete("tt_orders", {"id": 1}, token, style, **options)
        cursor.execute(*made)

    return act


def copy_rows(_: Connection, cursor: Any) -> None:
    with cursor.copy("COPY tt_orders (id, status) FROM STDIN") as copy:
        copy.write_row((2, "x"))


def copy_and_update(_: Connection, cursor: Any) -> None:
    cursor.execute("CREATE TEMP TABLE staged ON COMMIT DROP AS SELECT * FROM tt_orders WHERE false")
    with cursor.copy("COPY staged (id, status, last_fencing_token) FROM STDIN") as copy:
        copy.write_row((1, "x", 4))
    cursor.execute(
        "UPDATE tt_orders SET status = staged.status, last_fencing_token = staged.last_fencing_token "
        "FROM staged WHERE staged.id = tt_orders.id"
    )


NEW_ROW = "INTO tt_orders (id, status) VALUES (2, 'x')"
SAME_ROW = "INTO tt_orders (id, status) VALUES (1, 'x')"
CASCADE = "DELETE FROM tt_customers"
KEEPS = sql("UPDATE, sets the fence that is there", f"UPDATE tt_orders SET {SAME}, last_fencing_token = 5")
RAISES = sql("UPDATE, raises the fence", "UPDATE tt_orders SET status = 'x', last_fencing_token = 6")
EVERYWHERE = [
    *updates("UPDATE", "UPDATE tt_orders SET {} WHERE id = 1"),
    KEEPS,
    RAISES,
    sql("UPDATE, moves the write id", "UPDATE tt_orders SET status = 'x', last_write_id = last_write_id + 1"),
    sql("DELETE", "DELETE FROM tt_orders"),
    sql("INSERT", f"INSERT {NEW_ROW}"),
    Way("`conditional_update`, stale", with_token("UPDATE", 4)),
    Way("`conditional_update`, again", with_token("UPDATE", 5)),
    Way("`conditional_update`, fresh", with_token("UPDATE", 6)),
    Way("`conditional_delete`, stale", with_token("DELETE", 4)),
    Way("`conditional_delete`, fresh", with_token("DELETE", 6)),
    *updates("view", "UPDATE tt_view SET {}"),
]
POSTGRESQL = [
    *EVERYWHERE,
    *updates("DO block", "DO $$ BEGIN UPDATE tt_orders SET {}; END $$"),
    *updates("CTE", "WITH w AS (UPDATE tt_orders SET {} RETURNING 1) SELECT * FROM w"),
    *updates("ON CONFLICT", f"INSERT {SAME_ROW} ON CONFLICT (id) DO UPDATE SET {{}}"),
    *updates("MERGE", "MERGE INTO tt_orders USING tt_customers ON true WHEN MATCHED THEN UPDATE SET {}"),
    sql("function, leaves the fence", "SELECT tt_same()"),
    sql("function, lowers the fence", "SELECT tt_lower()"),
    Way("COPY into the table", copy_rows),
    Way("COPY elsewhere and UPDATE from there, lowers the fence", copy_and_update),
    sql("foreign key, ON DELETE SET NULL", CASCADE),
    sql("TRUNCATE", "TRUNCATE tt_orders"),
]
MARIADB = [
    *EVERYWHERE,
    *updates("compound statement", "BEGIN NOT ATOMIC UPDATE tt_orders SET {}; END"),
    *updates("ON DUPLICATE KEY", f"INSERT {SAME_ROW} ON DUPLICATE KEY UPDATE {{}}"),
    sql("procedure, leaves the fence", "CALL tt_same()"),
    sql("procedure, lowers the fence", "CALL tt_lower()"),
    sql("REPLACE", f"REPLACE {SAME_ROW}"),
    sql("foreign key, ON DELETE SET NULL", CASCADE),
    sql("TRUNCATE", "SET foreign_key_checks = 0", "TRUNCATE tt_orders"),
]
SQLITE = [
    *EVERYWHERE,
    *updates("ON CONFLICT", f"INSERT {SAME_ROW} ON CONFLICT (id) DO UPDATE SET {{}}"),
    sql("OR REPLACE", f"INSERT OR REPLACE {SAME_ROW}"),
    sql("OR REPLACE, `PRAGMA recursive_triggers`", "PRAGMA recursive_triggers = ON", f"REPLACE {SAME_ROW}"),
    sql("foreign key, ON DELETE SET NULL", "PRAGMA foreign_keys = ON", CASCADE),
]
VIEW = "CREATE VIEW tt_view AS SELECT id, status, last_fencing_token FROM tt_orders"
STORED: dict[str, list[str]] = {
    "postgresql": [
        VIEW,
        f"CREATE FUNCTION tt_same() RETURNS void LANGUAGE sql AS $$ UPDATE tt_orders SET {SAME} $$",
        f"CREATE FUNCTION tt_lower() RETURNS void LANGUAGE sql AS $$ UPDATE tt_orders SET {LOWER} $$",
    ],
    "mysql": [
        VIEW,
        f"CREATE PROCEDURE tt_same() UPDATE tt_orders SET {SAME}",
        f"CREATE PROCEDURE tt_lower() UPDATE tt_orders SET {LOWER}",
    ],
    "sqlite": [
        VIEW,
        """CREATE TRIGGER tt_through INSTEAD OF UPDATE ON tt_view BEGIN
               UPDATE tt_orders SET status = NEW.status, last_fencing_token = NEW.last_fencing_token
               WHERE id = NEW.id;
           END""",
    ],
}
STORED_GOES = {
    "postgresql": ["DROP FUNCTION tt_same", "DROP FUNCTION tt_lower", "DROP VIEW tt_view"],
    "mysql": ["DROP PROCEDURE tt_same", "DROP PROCEDURE tt_lower", "DROP VIEW tt_view"],
    "sqlite": ["DROP VIEW tt_view"],
}
SECTION = """\
## What only a trigger sees: {database}

A bare cursor of {driver} writes to a row whose fence is 5 (`tests/guard/test_trigger_table.py`). A program
that knows no fence leaves it, a stale holder with token 4 lowers it. **stale** and **refused** are errors of
a trigger.

| ways | no trigger | plain trigger | strict trigger |
|---|---|---|---|
"""


def make_tables(trigger: FenceTrigger) -> MetaData:
    """Describe an order and its customer; the order's table has that trigger."""
    metadata = MetaData()
    Table("tt_customers", metadata, Column("id", Integer, primary_key=True))
    Table(
        "tt_orders",
        metadata,
        Column("id", Integer, primary_key=True),
        Column("status", String(20)),
        Column("customer_id", sa.ForeignKey("tt_customers.id", ondelete="SET NULL")),
        fence_column(resource="order:{id}", trigger=trigger),
        write_id_column(),
    )
    return metadata


def outcomes(engine: Engine, ways: list[Way], trigger: FenceTrigger) -> list[str]:
    metadata = make_tables(trigger)
    metadata.create_all(engine)
    orders, customers = (metadata.tables[name] for name in ("tt_orders", "tt_customers"))
    row = {"id": 1, "status": "new", "customer_id": 1, "last_fencing_token": FENCE}
    found: list[str] = []
    run(engine, STORED[engine.dialect.name])
    for way in ways:
        if not found or found[-1] == "written":  # else the rows are as they were
            refill(engine, {customers: {"id": 1}, orders: row})
        found.append(outcome(engine, orders, way))
    run(engine, STORED_GOES[engine.dialect.name])
    metadata.drop_all(engine)
    return found


def run(engine: Engine, statements: list[str]) -> None:
    with bypassed(engine) as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def outcome(engine: Engine, orders: Table, way: Way) -> str:
    everything = select(orders).order_by(orders.c.id)
    before = rows_of(engine, everything)
    driver: Any = engine.dialect.loaded_dbapi
    with engine.connect() as connection:
        bare: Any = connection.connection
        try:
            way.act(connection, bare.cursor())
            bare.commit()
        except driver.Error as error:
            bare.rollback()
            said = kind_of(str(error), knows=engine.dialect.name != "sqlite")
        else:
            said = "written"
    if rows_of(engine, everything) == before:
        return "no row" if said == "written" else said
    assert said == "written"
    return said


def kind_of(message: str, *, knows: bool) -> str:
    """Tell a trigger's errors apart. Those of SQLite know no numbers.

    Raises:
        AssertionError: if it is none of a trigger's.
    """
    if f"fencelock: {'token 4 < 5' if knows else 'a token below the fence'} in tt_orders" in message:
        return "stale"
    assert "fencelock: UPDATE without a token in tt_orders" in message
    return "refused"


@pytest.mark.parametrize(
    ("shared_url", "database", "ways"),
    [("sqlite", "SQLite", SQLITE), ("postgresql", "PostgreSQL", POSTGRESQL), ("mariadb", "MariaDB", MARIADB)],
    indirect=["shared_url"],
    ids=["sqlite", "postgresql", "mysql" if MYSQL_URL else "mariadb"],
)
def test_every_way_past_sqlalchemy_ends_as_the_docs_say(
    shared_url: str, database: str, ways: list[Way]
) -> None:
    engine = sa.create_engine(shared_url, poolclass=NullPool)  # what a way sets on a connection ends with it
    columns = [outcomes(engine, ways, trigger) for trigger in TRIGGERS]
    rows = [(way.name, tuple(found)) for way, found in zip(ways, zip(*columns, strict=True), strict=True)]
    driver = {"pysqlite": "sqlite3"}.get(engine.dialect.driver, engine.dialect.driver)
    check_section(SECTION.format(database=database, driver=driver) + grouped(rows))
    bare, _, strict = columns
    stale = [way.name for way, found in zip(ways, bare, strict=True) if found != "written"]
    assert stale == ["`conditional_update`, stale", "`conditional_delete`, stale"]
    lowered = [found for way, found in zip(ways, strict, strict=True) if "lowers" in way.name]
    assert set(lowered) == {"stale"}
