"""The table of leases: a row for each resource that was ever locked, until it is pruned."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, MetaData, String, Table, Text

from fencelock._databases import RESOURCE, TIME
from fencelock._engines import check_metadata

LEASE_TABLE: Final = "fencelock_leases"


def lease_table(metadata: MetaData, *, schema: str | None = None) -> Table:
    """Return the table of leases as part of `metadata`, defining it there at the first call.

    ```python
    lease_table(Base.metadata)
    Base.metadata.create_all(engine)
    ```

    Call it before `create_all` or autogenerate, except for SQLite, for which fencelock makes the table in a
    file of its own. In a migration, call `op.create_lease_table()`.

    A row has the last `token` of its `resource`, the `nonce` of the acquisition that holds it (NULL if it is
    free), its `holder` (host, process id, program) and times, on MariaDB and MySQL in UTC. `queue` has the
    names of waiting processes and event loops.

    Args:
        metadata: the metadata of the models.
        schema: the schema of the table; `Database(…, schema=)` must be the same.
    """
    check_metadata("lease_table", metadata)
    resource, nonce, text = (  # on PostgreSQL, operands of exactly these types: see `statements._MS`
        each.with_variant(Text(), "postgresql") for each in (RESOURCE, String(32), String(255))
    )
    return Table(
        LEASE_TABLE,
        metadata,
        Column("resource", resource, primary_key=True),
        Column("token", BigInteger, nullable=False, autoincrement=False),
        Column("nonce", nonce),
        Column("expires_at", TIME),
        Column("holder", text),
        Column("since", TIME),
        Column("queue", text),
        schema=schema,
        keep_existing=True,
    )
