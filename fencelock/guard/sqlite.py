"""What SQLite needs before several processes can claim: transactions that say at once that they will write.

One that has read before it writes fails at once with "database is locked", whatever the timeout, because what
it has read may be out of date. `BEGIN IMMEDIATE` is a choice for all of an engine's transactions, readers
included, so the guard leaves it to the program.
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
