"""Helpers for the tests of a program: an authority without a server, and situations that are rare.

The pytest plugin, `fencelock.testing.plugin`, has a fixture for each of these functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from sqlalchemy import ColumnElement, Engine, event, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import NoResultFound
from sqlalchemy.orm import Session, SessionTransaction

from fencelock import _events
from fencelock._databases import MYSQL
from fencelock._engines import is_async_engine
from fencelock._locking import as_default, default_authority, fenced_lock
from fencelock.authority.database.database import Database
from fencelock.guard import triggers
from fencelock.guard._claim import fenced_model, key_of
from fencelock.guard.leases import end_early
from fencelock.guard.sessions import BYPASS, unguarded
from fencelock.lease import Lease, check_resource, holding
from fencelock.lock.hold import everything_held
from fencelock.lock.lock import FencedLock
from fencelock.lock.renewal import tell
from fencelock.lock.slots import slot_names

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

    Target = Session | Connection | Engine | AsyncSession | AsyncConnection | AsyncEngine

__all__ = ["held_elsewhere", "lost_lease", "stale_writer", "temporary_authority", "unfenced"]

#: The distance of a newer holder's token from tokens that are granted now: hours, if tokens are times.
_AHEAD: Final = 1 << 36
#: Seconds for which the other holder waits for the lock. A free lock is granted at once.
_PATIENCE: Final = 5.0
#: Statements after which the replacement of a trigger waits for 5 s at most.
_SHORT_WAIT: Final = {
    "postgresql": "SET LOCAL lock_timeout = '5s'",
    **dict.fromkeys(MYSQL, "SET lock_wait_timeout = 5"),
}


@contextlib.contextmanager
def temporary_authority(folder: str | os.PathLike[str]) -> Iterator[Database]:
    """Let an SQLite file in a folder grant the locks of this process, and of processes that it starts.

    In the block, this file is the default authority, and FENCELOCK_URL names it. Afterwards, both are reset.

    A test may run in an outer transaction that it rolls back, so that its sessions commit only savepoints. In
    the block, such a session needs its leases only until its own commit or rollback.

    ```python
    with temporary_authority(tmp_path), fenced_lock("order:1") as token:
        assert token > 0
    ```

    Args:
        folder: an existing folder, such as pytest's `tmp_path`.

    Returns:
        The authority, for `inspect` and `force_release`.
    """
    url = f"sqlite:///{Path(folder).absolute() / 'fencelock.db'}"
    with (
        Database(url) as authority,
        as_default(authority),
        mock.patch.dict(os.environ, FENCELOCK_URL=url),
        _ending_early(),
    ):
        yield authority


@contextlib.contextmanager
def _ending_early() -> Iterator[None]:
    """Make sessions let go of their leases at their own end, even inside an outer transaction."""

    def after_commit(session: Session) -> None:
        if session.get_nested_transaction() is None:
            end_early(session, committed=True)

    def after_end(session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None:
            end_early(session, committed=False)

    listeners: dict[str, Callable[..., None]] = {
        "after_commit": after_commit,
        "after_transaction_end": after_end,
    }
    for name, listener in listeners.items():
        event.listen(Session, name, listener)
    try:
        yield
    finally:
        for name, listener in listeners.items():
            event.remove(Session, name, listener)


def unfenced() -> AbstractContextManager[None]:
    """Let this thread or task write without a lock in a block, for factories and seeds.

    Flush or commit inside the block. `fencelock.bypass` does the same for one session.

    ```python
    with unfenced(), Session(engine) as session:
        session.add(Order(id=9, status="new"))
        session.commit()
    ```
    """
    return unguarded()


@contextlib.contextmanager
def held_elsewhere(resource: str, *, slots: int = 0) -> Iterator[Lease]:
    """Let another thread hold a lock in a block: code that wants the lock waits for its own `timeout`.

    ```python
    with held_elsewhere("order:1"), pytest.raises(LockTimeoutError):
        pay(1, timeout=0)
    ```

    Args:
        resource: the name of the lock.
        slots: of a semaphore, or of a lock beside readers: how many it has. The other thread holds all.

    Returns:
        The other holder's lease.

    Raises:
        LockTimeoutError: another holder has kept the lock for 5 s.
    """
    names = (resource, *slot_names(resource, 0, slots))
    authority: Any = default_authority()
    lock: FencedLock[Any] = FencedLock(names, default_authority, timeout=_PATIENCE)
    granted: Future[Lease] = Future()
    over = threading.Event()

    def hold() -> None:
        granted.set_result(lock.acquire())
        over.wait()
        lock.release()

    async def hold_in_loop() -> None:
        try:
            granted.set_result(await lock.aio.acquire())
            await asyncio.to_thread(over.wait)
            await lock.aio.release()
        finally:
            await authority.aio.close()

    in_loop = getattr(authority, "is_async", False)
    with ThreadPoolExecutor(1, thread_name_prefix="held-elsewhere") as elsewhere:
        holder = elsewhere.submit(asyncio.run, hold_in_loop()) if in_loop else elsewhere.submit(hold)
        either: list[Future[Any]] = [granted, holder]
        try:
            wait(either, return_when=FIRST_COMPLETED)
            if granted.done():
                yield granted.result()
        finally:
            over.set()
            holder.result()


@contextlib.contextmanager
def lost_lease(resource: str) -> Iterator[Lease]:
    """Make each lease of a resource end in a block, as if the process had been paused for too long.

    These are the leases that this process holds when the block begins, and those that it acquires in it, also
    of a semaphore's slots, of readers, and of a leader. The first write under such a lease raises
    `LockLostError`, even if the block acquires no lock. A statement with
    `execution_options(fencing_token=…)` uses no lease: only the database compares the token.

    ```python
    with lost_lease("order:1"), pytest.raises(LockLostError):
        pay(1)
    ```

    Returns:
        A lease of the resource; the lease has ended.
    """
    resource = check_resource(resource)

    def is_of(names: Iterable[str]) -> bool:
        return any(resource in {name, name.rpartition("#")[0]} for name in names)

    def lose(event: object) -> None:
        if isinstance(event, _events.LockAcquired) and is_of(event.resources):
            lose_all()

    def lose_all() -> None:
        for hold in everything_held():
            if is_of(hold.grant.resources):
                tell(hold.mark_lost("the test let it end", "expired"))

    _events.on_event(lose)
    try:
        lose_all()
        lease = Lease(resource, 1, expires_at=-math.inf)
        with holding([lease]):
            yield lease
    finally:
        _events.forget(lose)


def stale_writer(target: Target, model: type[Any], identity: object) -> StaleWriter:
    """Make every writer of a row stale in a block, as if a newer holder had fenced the row.

    The row's fence is above each token that is granted now. So the database refuses every write of the row
    under a lock, in any thread or process. After the block the fence has its old value. For that, a trigger
    of the table is replaced; on MariaDB not in an outer transaction, because that would commit it.

    ```python
    with stale_writer(engine, Order, 1), pytest.raises(StaleTokenError):
        pay(1)
    ```

    Args:
        target: an engine; or the session or connection of an outer transaction. With an asyncio engine,
            session or connection, write `async with`.
        model: a fenced model.
        identity: the primary key as `Session.get` takes it: a value, a tuple or a dict.

    Returns:
        A context manager for `with` or `async with`.

    Raises:
        TypeError: the model is not fenced; at the beginning of the block, if `target` is of another kind.
        ValueError: `identity` is no primary key of the model.
        sqlalchemy.exc.NoResultFound: at the beginning of the block, if there is no such row.
    """
    return StaleWriter(target, model, identity)


class StaleWriter:
    """The context manager that `stale_writer` returns, for `with` or `async with`."""

    def __init__(self, target: Target, model: type[Any], identity: object) -> None:
        self._mapper, fenced = fenced_model(model)
        key = key_of(self._mapper, identity)
        self._target: Any = target
        self._fence = fenced.fence
        self._row = [column == value for column, value in zip(fenced.table.primary_key, key, strict=True)]
        self._shown = f"{self._mapper.class_.__name__} with the primary key {key!r}"
        self._before = self._raised = 0

    def __enter__(self) -> None:
        with held_elsewhere("fencelock.testing") as lease:  # also where only coroutines can lock
            self._raised = lease.token + _AHEAD
        self._on_connection(self._target, self._raise)

    def __exit__(self, *_error: object) -> None:
        self._on_connection(self._target, self._lower)

    async def __aenter__(self) -> None:
        async with fenced_lock("fencelock.testing") as token:
            self._raised = token + _AHEAD
        await self._in_greenlet(self._raise)

    async def __aexit__(self, *_error: object) -> None:
        await self._in_greenlet(self._lower)

    def _raise(self, connection: Connection) -> None:
        before = connection.scalar(select(self._fence).where(*self._row))
        if before is None:
            raise NoResultFound(f"there is no {self._shown}, so no write of it can be late")
        self._before = before
        self._set(connection, self._raised)

    def _lower(self, connection: Connection) -> None:
        table, dialect = self._fence.table, connection.dialect.name
        form = triggers.installed(connection, table.name, schema=table.schema)
        if form and dialect in MYSQL and connection.in_nested_transaction():
            return  # the fence stays up until the outer transaction is rolled back
        if form and (wait := _SHORT_WAIT.get(dialect)):  # not for a transaction that the test keeps open
            connection.exec_driver_sql(wait)
        for statement in triggers.drop(table, dialect) if form else ():
            connection.execute(statement)
        self._set(connection, self._before, self._fence == self._raised)
        for statement in triggers.create(table, dialect, strict=form == "strict") if form else ():
            connection.execute(statement)

    def _set(self, connection: Connection, fence: int, *criteria: ColumnElement[bool]) -> None:
        changed = update(self._fence.table).where(*self._row, *criteria).values({self._fence: fence})
        connection.execute(changed, execution_options={"fencelock": BYPASS})

    def _on_connection(self, target: Any, work: Callable[[Connection], None]) -> None:
        if type(target).__module__.startswith("sqlalchemy.ext.asyncio"):
            raise TypeError(f"for this {type(target).__name__}, write `async with stale_writer(…)`")
        if isinstance(found := getattr(target, "get_bind", lambda _mapper: target)(self._mapper), Connection):
            with found.begin_nested() if found.in_transaction() else found.begin():
                work(found)
        elif isinstance(found, Engine):
            with found.begin() as connection:
                work(connection)
        else:
            kind = type(target).__name__
            raise TypeError(f"stale_writer takes an engine, session or connection, not {kind}")

    async def _in_greenlet(self, work: Callable[[Connection], None]) -> None:
        if is_async_engine(self._target):
            async with self._target.begin() as connection:
                await connection.run_sync(work)
        else:
            await self._target.run_sync(self._on_connection, work)
