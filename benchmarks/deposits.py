"""The case of one hot row: many callers of a web application deposit into one account.

Two processes serve the callers, as two workers of a server do: tasks with drivers for coroutines, threads on
SQLite. Each deposit is a transaction of the ORM. It is made under `fenced_lock` with a `FencedModel`, or in
the way that the database has for it, `FOR UPDATE` or `BEGIN IMMEDIATE`, with a plain model. They take turns.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any, Final

from sqlalchemy import create_engine, event, make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from benchmarks.accounts import Account, Base, PlainAccount
from benchmarks.arena import Arena, ratios
from benchmarks.contenders import FENCELOCK
from benchmarks.report import Goal, Section
from fencelock import Database, fenced_lock

WORKERS: Final = 2
#: Of a worker's pool; callers beyond it wait for a connection.
_POOL: Final = 20
_PATIENCE: Final = 60.0
_DRIVERS: Final = {"postgresql": "postgresql+asyncpg", "mysql": "mysql+aiomysql"}
_PLAIN: Final = {"postgresql": "FOR UPDATE", "mysql": "FOR UPDATE", "sqlite": "BEGIN IMMEDIATE"}


@dataclass(frozen=True, slots=True)
class Crowd:
    """So many callers, who deposit so often each."""

    callers: int
    times: int

    def __str__(self) -> str:
        return f"{self.callers} callers, {self.times} deposit{'s' * (self.times > 1)} each"


#: Seconds that each deposit took, with the waits, and seconds until the last was made.
Waits = tuple[list[float], float]


def _blocking(url: str, crowd: Crowd, ready: Callable[[], object], *, is_fenced: bool) -> Waits:
    engine = create_engine(url, pool_size=_POOL, connect_args={"timeout": _PATIENCE})

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    @event.listens_for(engine, "connect")
    def leave_begin_to_us(connection: Any, _record: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode = WAL")

    with Database(url) as authority:

        def deposit() -> float:
            began = time.monotonic()
            if is_fenced:
                with fenced_lock("account:1", authority=authority, timeout=_PATIENCE), Session(engine) as its:
                    its.get_one(Account, 1).balance += 1
                    its.commit()
            else:
                with Session(engine) as its:
                    its.get_one(PlainAccount, 1).balance += 1
                    its.commit()
            return time.monotonic() - began

        with ThreadPoolExecutor(crowd.callers) as pool:
            deposit()
            ready()
            began = time.monotonic()
            waits = list(pool.map(lambda _: deposit(), range(crowd.callers * crowd.times)))
            took = time.monotonic() - began
    engine.dispose()
    return waits, took


async def _in_tasks(url: str, crowd: Crowd, ready: Callable[[], object], *, is_fenced: bool) -> Waits:
    engine = create_async_engine(url, pool_size=_POOL)
    authority = Database(url)

    async def deposit() -> float:
        began = time.monotonic()
        if is_fenced:
            async with (
                fenced_lock("account:1", authority=authority, timeout=_PATIENCE),
                AsyncSession(engine) as its,
                its.begin(),
            ):
                (await its.get_one(Account, 1)).balance += 1
        else:
            async with AsyncSession(engine) as its, its.begin():
                (await its.get_one(PlainAccount, 1, with_for_update=True)).balance += 1
        return time.monotonic() - began

    async def call() -> list[float]:
        return [await deposit() for _ in range(crowd.times)]

    await asyncio.gather(*(deposit() for _ in range(min(_POOL, crowd.callers))))  # connects
    ready()
    began = time.monotonic()
    waits = await asyncio.gather(*(call() for _ in range(crowd.callers)))
    took = time.monotonic() - began
    await authority.aio.close()
    await engine.dispose()
    return [each for some in waits for each in some], took


def _work(url: str, crowd: Crowd, barrier: Barrier, said: Any, is_fenced: bool) -> None:
    def ready() -> None:
        barrier.wait(_PATIENCE)

    if make_url(url).get_backend_name() == "sqlite":
        said.put(_blocking(url, crowd, ready, is_fenced=is_fenced))
    else:
        said.put(asyncio.run(_in_tasks(url, crowd, ready, is_fenced=is_fenced)))


def _take_turn(url: str, crowd: Crowd, *, is_fenced: bool) -> Waits:
    context = multiprocessing.get_context("spawn")
    barrier, said = context.Barrier(WORKERS), context.Queue()
    of_each = Crowd(crowd.callers // WORKERS, crowd.times)
    workers = [
        context.Process(target=_work, args=(url, of_each, barrier, said, is_fenced), daemon=True)
        for _ in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    found = [said.get(timeout=2 * _PATIENCE) for _ in workers]
    for worker in workers:
        worker.join()
    return [each for waits, _ in found for each in waits], max(took for _, took in found)


def prepare(url: str) -> None:
    """Make both tables, with the one account in each."""
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        cursor = connection.connection.cursor()  # past the guard
        cursor.execute("DELETE FROM deposit_accounts")
        cursor.execute("DELETE FROM deposit_plain")
        cursor.execute("INSERT INTO deposit_accounts (id, balance, last_fencing_token) VALUES (1, 0, 0)")
        cursor.execute("INSERT INTO deposit_plain (id, balance) VALUES (1, 0)")
    engine.dispose()


def deposit(arena: Arena, database: str, crowd: Crowd, *, elapsed: float | None, p99: float | None) -> None:
    """Let all callers deposit, in turns; the goals are ratios to the database's own way."""
    blocking = make_url(arena.urls[0])
    dialect = blocking.get_backend_name()
    prepare(arena.urls[0])
    url = blocking.set(drivername=_DRIVERS.get(dialect, blocking.drivername))
    shown = url.render_as_string(hide_password=False)
    turns: dict[bool, list[Waits]] = {True: [], False: []}
    name = f"{database}, deposits into one account: {crowd}"
    for _ in arena.count_rounds(name):
        for is_fenced, found in turns.items():
            found.append(_take_turn(shown, crowd, is_fenced=is_fenced))
    took = {key: [seconds for _, seconds in found] for key, found in turns.items()}
    tails = {key: [_percentile(waits) for waits, _ in found] for key, found in turns.items()}
    slower, longer = ratios(took[True], took[False]), ratios(tails[True], tails[False])
    rows = [
        (
            FENCELOCK if key else _PLAIN[dialect],
            f"{statistics.median(took[key]):.2f}",
            f"{min(took[key]):.2f} … {max(took[key]):.2f}",
            f"{1e3 * statistics.median(tails[key]):,.0f}",
            f"{statistics.median(slower):.2f}" if key else "",
            f"{statistics.median(longer):.2f}" if key else "",
        )
        for key in (False, True)
    ]
    columns = ("deposits by", "seconds in all", "fewest … most", "99 % within ms", "÷ seconds", "÷ ms")
    note = f"{WORKERS} processes; transactions of the ORM. The last columns compare with {_PLAIN[dialect]}."
    goals = [
        Goal.at_most(f"{name}: {what} ÷ {_PLAIN[dialect]}", limit, statistics.median(found))
        for what, limit, found in (("seconds", elapsed, slower), ("99 % within", p99, longer))
        if limit is not None
    ]
    arena.add(Section(name, columns, rows, note), goals)


def _percentile(waits: Sequence[float]) -> float:
    return statistics.quantiles(waits, n=100)[-1]
