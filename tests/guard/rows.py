"""Rows of the guard's tests: how to be rid of them, whatever guards them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from sqlalchemy import Connection, Engine, MetaData, delete, select

from fencelock.guard import execute_fenced, fenced_delete
from fencelock.guard.tables import FENCE_COLUMN
from fencelock.tokens import MAX_TOKEN


def empty(connection: Connection, metadata: MetaData) -> None:
    """Delete all rows of all tables, with the largest token, which even strict triggers let pass."""
    for table in reversed(metadata.sorted_tables):
        if FENCE_COLUMN in table.c:
            execute_fenced(connection, fenced_delete(table), token=MAX_TOKEN)
        else:
            connection.execute(delete(table), execution_options={"fencelock": "bypass"})


def contents(engine: Engine, metadata: MetaData) -> dict[str, list[tuple[Any, ...]]]:
    with engine.connect() as connection:
        return {
            table.name: sorted((tuple(row) for row in connection.execute(select(table))), key=repr)
            for table in metadata.sorted_tables
        }


#: A maker of engines, each on a new SQLite database: the fixture `in_memory`.
InMemory: TypeAlias = Callable[[MetaData], Engine]
#: For what Python decides before a database hears of it.
on_sqlite_alone = pytest.mark.parametrize("shared_url", ["sqlite"], indirect=True)
