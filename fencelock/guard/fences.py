"""The fence table: one row per resource, which outlives every row that the resource guards.

A row that is not there has no fence, the resource's own row has; `gate` claims it. Apart from `claim` because
migrations need the table and nothing else.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Column, MetaData, Table
from sqlalchemy.engine import Connection

from fencelock._databases import RESOURCE
from fencelock.guard import tables
from fencelock.guard._install import install
from fencelock.guard.tables import FENCE_COLUMN, FENCE_TABLE, WRITE_COLUMN


def fence_table(metadata: MetaData, *, schema: str | None = None, trigger: bool = False) -> Table:
    """Return the fence table as part of `metadata`, defining it there at the first call.

    ```python
    fence_table(Base.metadata)
    Base.metadata.create_all(engine)
    ```

    Its columns are `resource VARCHAR(255) PRIMARY KEY` (compared exactly, on MariaDB too), and the two of a
    fenced model. It is fenced itself: each row by its own resource.

    Where all calls of a program name one schema (as `metadata` may do), `gate` looks for the table there;
    else in the default schema of the connection, or where its `schema_translate_map` has that.

    Args:
        metadata: of the models.
        schema: where the table is.
        trigger: have the database itself refuse whatever lowers a resource's fence, as for models.

    Raises:
        ValueError: if another trigger is asked for.
    """
    if trigger not in (False, True):
        raise ValueError(f"the trigger of the fence table is False or True, not {trigger!r}")
    table = _define(metadata, schema)
    _schemas.add(table.schema)
    if trigger:
        install()
        table.c[FENCE_COLUMN].info[tables.TRIGGER_MARK] = True
    return table


def fences_of(connection: Connection) -> Table:
    """Return the fence table that a connection's gates are in."""
    schema = tables.schema_of(connection, _schemas)
    return FENCES if schema is None else _define(FENCES.metadata, schema)


def _define(metadata: MetaData, schema: str | None) -> Table:
    table = Table(
        FENCE_TABLE,
        metadata,
        Column("resource", RESOURCE, primary_key=True),
        tables.new_column(FENCE_COLUMN, {}),
        tables.new_column(WRITE_COLUMN, tables.WRITE_MARK),
        schema=schema,
        keep_existing=True,
    )
    if tables.fenced_table(table) is None:
        tables.register(
            tables.FencedTable(table, tables.ResourceTemplate("{resource}", {"resource": table.c.resource}))
        )
    return table


FENCES: Final = _define(MetaData(), None)
"""The fence table in the connection's default schema."""

_schemas: set[str | None] = set()
"""Those that `fence_table` was asked for."""
