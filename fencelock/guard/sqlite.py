"""What SQLite needs before several processes can claim.

SQLite locks the whole database, and a transaction that has read before it writes cannot wait for that lock:
it fails at once with "database is locked" (SQLITE_BUSY, SQLITE_BUSY_SNAPSHOT in WAL mode), whatever the
timeout, because what it has read may already be out of date. A transaction that begins with a claim is safe
as it is, since its first statement writes. One that reads first must say at its beginning that it will write.

That is a choice for all of an engine's transactions, readers included, which then wait for each other; so the
guard does not make it behind anybody's back. Apart from the rest because it concerns this one database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine

from fencelock._engines import is_async_engine

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


def begin_immediate(engine: Engine | AsyncEngine) -> None:
    """Make every transaction of a SQLite engine begin with `BEGIN IMMEDIATE`, before its first connection.

    Transactions then take turns from their first statement, waiting up to the connection's `timeout`
    (5 seconds unless `connect_args={"timeout": …}` says otherwise), and none fails half way. Use an engine
    of its own for work that only reads.

    Args:
        engine: an engine of SQLite, also one for coroutines.

    Raises:
        ValueError: if the engine is not one of SQLite.
    """
    if is_async_engine(engine):
        engine = engine.sync_engine
    if engine.dialect.name != "sqlite":
        raise ValueError(f"BEGIN IMMEDIATE is SQLite's, and this engine speaks to {engine.dialect.name}")

    def on_connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver shall not begin by itself: it would begin deferred

    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)
