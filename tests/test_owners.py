"""Two callers that one thread serves exclude each other, whichever library made the thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from sqlalchemy import create_engine
from starlette.concurrency import run_in_threadpool

from fencelock import Database, FencedLock, Lease, LockTimeoutError, fenced_lock
from fencelock.lease import held_leases


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[Database]:
    with Database(create_engine(f"sqlite:///{tmp_path}/leases.db")) as made:
        made.init()
        yield made


def lock(authority: Database, **options: Any) -> FencedLock[int]:
    return fenced_lock("order:1", authority=authority, **{"timeout": 0.2} | options)


async def with_asyncio(first: Any, second: Any, executor: ThreadPoolExecutor) -> list[Any]:
    asyncio.get_running_loop().set_default_executor(executor)
    return [await asyncio.to_thread(each) for each in (first, second)]


async def with_executor(first: Any, second: Any, executor: ThreadPoolExecutor) -> list[Any]:
    loop = asyncio.get_running_loop()
    return [await loop.run_in_executor(executor, each) for each in (first, second)]


async def with_threadpool(first: Any, second: Any, _: ThreadPoolExecutor) -> list[Any]:
    return [await run_in_threadpool(each) for each in (first, second)]


async def with_django(first: Any, second: Any, executor: ThreadPoolExecutor) -> list[Any]:
    async def call(function: Any) -> Any:
        return await sync_to_async(function, thread_sensitive=False, executor=executor)()

    return [await asyncio.create_task(call(each)) for each in (first, second)]


@pytest.mark.parametrize(
    ("serve", "shared"),
    [
        (with_asyncio, True),
        (with_executor, False),
        (with_threadpool, True),
        (with_django, True),
        (with_django, False),
    ],
)
def test_two_callers_in_one_thread_exclude_each_other(
    authority: Database, serve: Any, *, shared: bool
) -> None:
    one = lock(authority)
    other = one if shared else lock(authority)
    threads: list[int] = []

    def take() -> Lease:
        threads.append(threading.get_ident())
        return one.acquire()

    def take_too() -> Any:
        threads.append(threading.get_ident())
        try:
            return other.acquire()
        except LockTimeoutError as error:
            return str(error)

    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            lease, said = await serve(take, take_too, executor)
        assert threads[0] == threads[1]
        assert f"this same thread has acquired it, in {__file__}:" in said
        assert lock(authority).try_acquire() is None
        one.release()
        assert lease._released
        assert lock(authority).locked() is False

    asyncio.run(main())


def test_caller_enters_again(authority: Database) -> None:
    def enter_twice() -> list[int]:
        with lock(authority) as token, lock(authority) as again:
            return [token, again]

    def three_ways() -> None:
        first, second = enter_twice()
        assert first == second

    three_ways()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(three_ways).result()
        executor.submit(contextvars.copy_context().run, three_ways).result()
    asyncio.run(asyncio.to_thread(three_ways))


def test_task_of_django_enters_again(authority: Database) -> None:
    async def main() -> None:
        one, other = lock(authority), lock(authority)
        lease = await sync_to_async(one.acquire)()
        assert held_leases() == (lease,)
        assert lock(authority).locked()
        await sync_to_async(one.release)()
        assert (await sync_to_async(other.try_acquire)()) is not None
        await sync_to_async(other.release)()

    asyncio.run(main())


def test_lost_block_of_another_caller_is_left_and_not_the_holders(authority: Database) -> None:
    one = lock(authority, ttl=0.5, renew=False, timeout=5, if_lost="warn")

    def call(function: Any) -> Any:
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(contextvars.copy_context().run, function).result()

    call(one.__enter__)
    call(one.__enter__)
    (lease,) = [each for each in one.leases if not each.lost]
    call(lambda: one.__exit__(None, None, None))
    assert not lease._released
    assert lock(authority).locked()
    call(lambda: one.__exit__(None, None, None))
    assert lease._released


def test_error_says_nothing_of_an_outer_lease_that_is_lost(authority: Database, tmp_path: Path) -> None:
    rival = Database(create_engine(f"sqlite:///{tmp_path}/leases.db"))
    outer = lock(authority, ttl=0.3, renew=False, if_lost="warn")
    with rival, outer, rival.lock("order:1", timeout=60), pytest.raises(LockTimeoutError) as refused:
        lock(authority).acquire()
    assert "very thread" not in str(refused.value)
    assert "started this one" not in str(refused.value)
