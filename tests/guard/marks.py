"""What the guard's tests are marked with, and the types of what they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pytest
from sqlalchemy import Engine, MetaData
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

#: What a session is to do.
Act: TypeAlias = Callable[[Session], object]
#: A maker of engines for coroutines: the fixture `for_asyncio`.
ForAsyncio: TypeAlias = Callable[[Engine], AsyncEngine]
#: A maker of engines, each on a new SQLite database: the fixture `in_memory`.
InMemory: TypeAlias = Callable[[MetaData], Engine]
#: For what Python decides before a database hears of it.
on_sqlite_alone = pytest.mark.parametrize("shared_url", ["sqlite"], indirect=True)
on_postgresql_alone = pytest.mark.parametrize("shared_url", ["postgresql"], indirect=True)
with_row_locks = pytest.mark.parametrize("shared_url", ["postgresql", "mariadb"], indirect=True)
one_driver = pytest.mark.parametrize("for_asyncio", [0], indirect=True)


def named(cases: Mapping[str, Any]) -> dict[str, Any]:
    return {"argvalues": list(cases.values()), "ids": list(cases)}
