"""Two callers that one thread serves exclude each other, whichever library made the thread."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgiref.sync import sync_to_async
from fastapi import Depends, FastAPI
from sqlalchemy import create_engine
from starlette.concurrency import run_in_threadpool

from fencelock import Database, FencedLock, Lease, LockTimeoutError, fenced_lock
from fencelock.lease import held_leases


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[Database]:
    """A database that grants leases."""
    with Database(create_engine(f"sqlite:///{tmp_path}/leases.db")) as made:
        made.init()
        yield made


def lock(authority: Database, **options: Any) -> FencedLock[int]:
    """Return another object for the same resource."""
    return fenced_lock("order:1", authority=authority, **{"timeout": 0.2} | options)


async def with_asyncio(first: Any, second: Any, executor: ThreadPoolExecutor) -> list[Any]:
    """A worker thread gets a copy of the context."""
    asyncio.get_running_loop().set_default_executor(executor)
    return [await asyncio.to_thread(each) for each in (first, second)]


async def with_executor(first: Any, second: Any, executor: ThreadPoolExecutor) -> list[Any]:
    """A worker thread has one context for all calls."""
    loop = asyncio.get_running_loop()
    return [await loop.run_in_executor(executor, each) for each in (first, second)]


async def with_threadpool(first: Any, second: Any, _: ThreadPoolExecutor) -> list[Any]:
    """FastAPI's threads, which are used again at once."""
    return [await run_in_threadpool(each) for each in (first, second)]


async def with_django(first: Any, second: Any, executor: ThreadPoolExecutor) -> list[Any]:
    """What a call changes in the context comes back to its task; the other task does not see it."""

    async def call(function: Any) -> Any:
        return await sync_to_async(function, thread_sensitive=False, executor=executor)()

    return [await asyncio.create_task(call(each)) for each in (first, second)]


@pytest.mark.parametrize("shared", [True, False], ids=["one object", "two objects"])
@pytest.mark.parametrize("serve", [with_asyncio, with_executor, with_threadpool, with_django])
def test_two_callers_in_one_thread_exclude_each_other(
    authority: Database, serve: Any, *, shared: bool
) -> None:
    """The second waits like any other, and the error says where its own thread has taken the lock."""
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


def test_thread_of_a_pool_serves_requests(authority: Database) -> None:
    """A blocking dependency that yields: FastAPI enters and leaves it in its pool, in contexts of its own."""
    app, inside, most = FastAPI(), [0], [0]

    def locked() -> Iterator[None]:
        with lock(authority, timeout=10):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            yield
            inside[0] -= 1

    @app.post("/pay", dependencies=[Depends(locked)])
    async def pay() -> None:
        await asyncio.sleep(0.05)

    async def main() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:

            async def post(number: int) -> int:
                await asyncio.sleep(number * 0.02)
                return (await client.post("/pay")).status_code

            return await asyncio.gather(*map(post, range(6)))

    assert asyncio.run(main()) == [200] * 6
    assert most == [1]


def test_caller_enters_again(authority: Database) -> None:
    """In a thread, in a call of an executor, and in one that a library has brought there with its context."""

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
    """Its calls share one context, and one thread."""

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
    """Two callers entered one object. The caller that leaves in a thread of its own leaves the lost hold."""
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
    """Another process has the lock by then: this thread waits for that one, and not for itself."""
    rival = Database(create_engine(f"sqlite:///{tmp_path}/leases.db"))
    outer = lock(authority, ttl=0.3, renew=False, if_lost="warn")
    with rival, outer, rival.lock("order:1", timeout=5), pytest.raises(LockTimeoutError) as refused:
        lock(authority).acquire()
    assert "very thread" not in str(refused.value)
    assert "started this one" not in str(refused.value)


GEVENT = """
    from gevent import monkey
    {patch}
    import gevent
    from gevent.pool import Pool
    from sqlalchemy import create_engine
    import fencelock
    from fencelock import LockTimeoutError, fenced_lock

    authority = fencelock.Database(create_engine("sqlite:///leases.db"))
    authority.init()

    def take(timeout=0.2):
        lock = fenced_lock("order:1", authority=authority, timeout=timeout)
        try:
            return lock, lock.acquire()
        except LockTimeoutError:
            return lock, None

    pool = Pool(1)
    (one, lease), (_, none) = pool.apply(take), pool.apply(take)
    assert lease is not None and none is None, (lease, none)
    one.release()
    assert lease._released
    print("right")
"""


@pytest.mark.parametrize("patch", ["monkey.patch_all()", ""], ids=["patched", "not patched"])
def test_two_callers_of_a_pool_of_gevent(tmp_path: Path, patch: str) -> None:
    """Each call has a greenlet of its own."""
    program = textwrap.dedent(GEVENT).format(patch=patch)
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout == "right\n", ended.stderr
