"""Authorities as programs often have them. They break promises, and the suite must notice."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fencelock.authority.base import Grant, Wish
from fencelock.errors import FencelockError, LockTimeoutError


class Naive:
    """Leases in a table: looked at in one transaction, taken in another, given back by any client that asks.

    Args:
        path: of the SQLite database, which has the table already: see `create`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @staticmethod
    def create(path: Path) -> None:
        """Make the table."""
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("CREATE TABLE leases (resource TEXT PRIMARY KEY, token INT, expires_at REAL)")

    def close(self) -> None:
        """Do nothing: each statement has a connection of its own."""

    def acquire(
        self, resources: tuple[str, ...], *, ttl: float, timeout: float | None, fair: bool = False
    ) -> Grant:
        """Take one after the other, and keep those before the one that is refused."""
        del fair
        until = time.monotonic() + (3600.0 if timeout is None else timeout)
        tokens = tuple(self._acquire_one(resource, ttl, until) for resource in resources)
        return Grant(resources, tokens, time.monotonic() + ttl, None)

    def _acquire_one(self, resource: str, ttl: float, until: float) -> int:
        while (left := self._left(resource)) > 0:
            if time.monotonic() >= until:
                raise LockTimeoutError(f"{resource} is held", holder_ttl=left)
            time.sleep(0.01)
        return self._take(resource, ttl)

    def _left(self, resource: str) -> float:
        found = self._execute("SELECT expires_at FROM leases WHERE resource = ?", resource)
        return found[0][0] - time.time() if found else 0.0

    def _take(self, resource: str, ttl: float) -> int:
        found = self._execute("SELECT MAX(token) FROM leases WHERE resource = ?", resource)
        token = (found[0][0] or 0) + 1
        time.sleep(0.001)  # what a network does
        self._execute("REPLACE INTO leases VALUES (?, ?, ?)", resource, token, time.time() + ttl)
        return token

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """Move the ends, whichever client holds the leases."""
        return [self._extend(grant, ttl) for grant, ttl in wishes]

    def _extend(self, grant: Grant, ttl: float) -> Grant:
        for resource in grant.resources:
            self._execute("UPDATE leases SET expires_at = ? WHERE resource = ?", time.time() + ttl, resource)
        return Grant(grant.resources, grant.tokens, time.monotonic() + ttl, None)

    def remint(self, grant: Grant, ttl: float) -> Grant:
        """Take the resources once more, whichever client holds them."""
        tokens = tuple(self._take(resource, ttl) for resource in grant.resources)
        return Grant(grant.resources, tokens, time.monotonic() + ttl, None)

    def release(self, grant: Grant) -> bool | None:
        """End the leases, whichever client holds them."""
        for resource in grant.resources:
            self._execute("UPDATE leases SET expires_at = 0 WHERE resource = ?", resource)
        return True

    def _execute(self, statement: str, *values: object) -> list[Any]:
        with closing(sqlite3.connect(self._path, timeout=20.0)) as connection, connection:
            return connection.execute(statement, values).fetchall()


class _ForgetfulTasks:
    """What `Forgetful` offers to coroutines."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def acquire(self, resources: tuple[str, ...], **terms: Any) -> Any:
        """Acquire, and then wait once more. A cancellation during that wait loses the grant."""
        grant = await self._inner.acquire(resources, **terms)
        await asyncio.sleep(0)
        return grant

    async def release(self, grant: Grant) -> Any:
        """Wait before the release is sent, and send nothing where that is cancelled."""
        await asyncio.sleep(0)
        return await self._inner.release(grant)


class Forgetful:
    """A sound authority, behind a layer that forgets what it holds where a task is cancelled."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.aio = _ForgetfulTasks(inner.aio)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
