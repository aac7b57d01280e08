"""The recipe of docs/sqlite.md: transactions of an SQLite engine take turns from their beginning."""

from __future__ import annotations

from sqlalchemy import Engine, event


def begin_immediate(engine: Engine) -> None:
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
