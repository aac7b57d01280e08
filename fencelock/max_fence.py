"""The highest fence of a database: after a loss, new tokens must be above it."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Column, Connection, MetaData, Table, func, inspect, select
from sqlalchemy.engine.reflection import ObjectKind

from fencelock.guard.tables import FENCE_COLUMN

_SYSTEM_SCHEMAS = ("information_schema", "pg_")


def highest_fence(connection: Connection) -> tuple[int, int]:
    """Return the largest `last_fencing_token` of all tables, and how many tables have that column.

    It reads all schemas by reflection, without the models; on MariaDB and MySQL, the connection's database.
    A table whose column has another name, because its model has renamed the column, is not found.
    """
    highest = count = 0
    for table in fenced_tables(connection):
        count += 1
        highest = max(highest, connection.scalar(select(func.max(table.c[FENCE_COLUMN]))) or 0)
    return highest, count


def fenced_tables(connection: Connection) -> Iterator[Table]:
    """Yield the tables that have `last_fencing_token`, each with only this column: see `highest_fence`."""
    inspector = inspect(connection)
    # On MariaDB and MySQL a schema is a database, so only the database of the connection is read.
    several = connection.dialect.name not in {"mysql", "mariadb"}
    schemas = inspector.get_schema_names() if several else [inspector.default_schema_name]
    for schema in schemas:
        if schema is not None and schema.startswith(_SYSTEM_SCHEMAS):
            continue
        found = inspector.get_multi_columns(schema=schema, kind=ObjectKind.TABLE)
        for (_, name), columns in found.items():
            if any(column["name"] == FENCE_COLUMN for column in columns):
                yield Table(name, MetaData(), Column(FENCE_COLUMN), schema=schema)
