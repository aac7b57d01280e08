"""Text that mentions a fenced table is not refused for that, and text that writes to one is."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, String, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencelock import FencedModel, UnfencedWriteError
from tests.guard.rows import Keyed, turned_away


class Base(DeclarativeBase): ...


class Event(FencedModel, Keyed, Base):
    __tablename__ = "events"
    __fence_resource__ = "event:{id}"


class Order(FencedModel, Base):
    __tablename__ = "order"
    __fence_resource__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class Audit(Keyed, Base):
    __tablename__ = "me_audit"
    msg: Mapped[str] = mapped_column(String(80), default="none")


MENTIONING = [
    "INSERT INTO me_audit (id, msg) VALUES (2, 'no new events; delete')",
    "INSERT INTO me_audit (id, msg) SELECT id, 'seen' FROM events",
    "DELETE FROM me_audit WHERE id NOT IN (SELECT id FROM events)",
    "UPDATE me_audit SET msg = 'x' /* events */",
    "UPDATE me_audit SET msg = 'x' WHERE id IN (SELECT a.id FROM (SELECT id FROM me_audit ORDER BY id) a)",
    "INSERT INTO me_audit (id, msg) WITH seen AS (SELECT id FROM events) SELECT id, 'x' FROM seen",
    "WITH seen AS (SELECT id FROM events WHERE 'x' <> 'update') SELECT id FROM seen",
    "SELECT id, 'update; delete from events' FROM events -- do not delete",
    "CREATE TABLE me_child (id INTEGER REFERENCES events (id) ON DELETE CASCADE ON UPDATE CASCADE)",
    "DROP TABLE me_child -- and delete no events",
]
WRITING = [
    "UPDATE events SET id = 2",
    "UPDATE me_audit SET msg = 'x'; UPDATE events SET id = 2",
    "UPDATE me_audit, events SET events.id = 2",
    "UPDATE me_audit JOIN events SET events.id = 2",
    "DELETE events FROM me_audit, events",
    "DELETE FROM e USING me_audit, events AS e",
    "WITH gone AS (DELETE FROM events RETURNING id) INSERT INTO me_audit (id) SELECT id FROM gone",
    "INSERT INTO me_audit (id) WITH gone AS (DELETE FROM events RETURNING id) SELECT id FROM gone",
    'UPDATE "events" SET id = 2',
    "INSERT INTO events (id) SELECT id FROM me_audit",
    "UPDATE me_audit SET msg = '\\' WHERE id = 1; DELETE FROM events -- '",
    "-- what we wait for\nUPDATE events SET id = 2",
    "DO 'BEGIN UPDATE events SET id = 2; END'",
    "DO $$ BEGIN UPDATE events SET id = 2; END $$",
    "PREPARE gone FROM 'DELETE FROM events'",
    "EXPLAIN ANALYZE UPDATE events SET id = 2",
    "ALTER TABLE events TRUNCATE PARTITION p0",
    "SET STATEMENT max_statement_time=100 FOR UPDATE events SET id = 2",
]
EXECUTED_COMMENT = "UPDATE me_audit SET msg = 'x' /*! ; UPDATE events SET id = 2 */"
"""By MariaDB alone."""


@pytest.mark.usefixtures("_tables")
def test_text_that_mentions_a_fenced_table_passes(shared_engine: Engine) -> None:
    with shared_engine.connect() as connection:
        for sql in MENTIONING:
            connection.execute(text(sql.replace(":", "\\:")))


@pytest.mark.usefixtures("_tables")
def test_text_that_writes_to_a_fenced_table_is_refused(shared_engine: Engine) -> None:
    with shared_engine.connect() as connection:
        executed = [EXECUTED_COMMENT] if shared_engine.dialect.name == "mysql" else []
        for sql in WRITING + executed:
            with turned_away(connection, UnfencedWriteError, match="events"):
                connection.exec_driver_sql(sql)
