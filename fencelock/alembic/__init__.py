"""Fences in Alembic: operations for migrations, which autogenerate knows.

Alembic 1.18 or later finds the plugin itself. With an earlier version, call
`fencelock.alembic.plugin.register()` in `env.py`.
`alembic revision --autogenerate` writes the operations. `alembic check` reports missing operations, also if
SQLite's batch mode has dropped a trigger.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

__all__ = [
    "add_fence",
    "create_fence_table",
    "create_fence_trigger",
    "create_lease_table",
    "create_receipt_table",
    "drop_fence",
    "drop_fence_table",
    "drop_fence_trigger",
    "drop_lease_table",
    "drop_receipt_table",
]

# The operations as functions, because type checkers do not know the names that a plugin adds to `alembic.op`.


def _do(name: str, *table: str, **options: Any) -> None:
    from alembic import op  # noqa: PLC0415 - Alembic loads this package during its own import

    getattr(op, name)(*table, **options)


def add_fence(
    table_name: str,
    *,
    trigger: bool | Literal["strict"] = False,
    excluded: Iterable[str] = (),
    schema: str | None = None,
) -> None:
    _do("add_fence", table_name, trigger=trigger, excluded=excluded, schema=schema)


def drop_fence(table_name: str, *, schema: str | None = None) -> None:
    _do("drop_fence", table_name, schema=schema)


def create_fence_trigger(
    table_name: str, *, strict: bool = False, excluded: Iterable[str] = (), schema: str | None = None
) -> None:
    _do("create_fence_trigger", table_name, strict=strict, excluded=excluded, schema=schema)


def drop_fence_trigger(table_name: str, *, schema: str | None = None) -> None:
    _do("drop_fence_trigger", table_name, schema=schema)


def create_fence_table(*, schema: str | None = None) -> None:
    _do("create_fence_table", schema=schema)


def drop_fence_table(*, schema: str | None = None) -> None:
    _do("drop_fence_table", schema=schema)


def create_lease_table(*, schema: str | None = None) -> None:
    _do("create_lease_table", schema=schema)


def drop_lease_table(*, schema: str | None = None) -> None:
    _do("drop_lease_table", schema=schema)


def create_receipt_table(*, schema: str | None = None) -> None:
    _do("create_receipt_table", schema=schema)


def drop_receipt_table(*, schema: str | None = None) -> None:
    _do("drop_receipt_table", schema=schema)
