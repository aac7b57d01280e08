"""`async with fenced_lock(…)` keeps its promises about re-entry, cancellation, loops and the guard.

What asyncio shares with blocking code is in `test_lock`.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, assert_type

import pytest
import redis
import uvloop
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencelock import FencedModel, Lease, Redlock, StaleTokenError, bind, fenced_lock
from fencelock.errors import LockLostError, LockTimeoutError, NotHeldError
from fencelock.lease import held_leases
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY
from tests.redlock.views import becomes_free, locks_on

Main = Callable[[], Coroutine[Any, Any, None]]
Run = Callable[[Main], None]


@pytest.fixture
def run(request: pytest.FixtureRequest, authority: Redlock) -> Run:
    """Run a coroutine function in a new loop, and close the authority's connections in it."""
    is_uvloop = getattr(request, "param", "asyncio") == "uvloop"
    factory = uvloop.new_event_loop if is_uvloop else asyncio.new_event_loop

    def run_in_new_loop(main: Main) -> None:
        async def whole() -> None:
            try:
                await main()
            finally:
                await authority.aio.close()

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(whole())

    return run_in_new_loop


in_each_loop = pytest.mark.parametrize("run", ["asyncio", "uvloop"], indirect=True)


@in_each_loop
def test_block_yields_the_token_and_releases(authority: Redlock, run: Run) -> None:
    async def main() -> None:
        async with authority.lock("r") as token:
            assert_type(token, int)
            assert [lease.token for lease in held_leases()] == [token]
        assert held_leases() == ()
        async with fenced_lock("b", "r", authority=authority) as tokens:
            assert_type(tokens, tuple[int, ...])
            assert tokens == (1, token + 1)
        with pytest.raises(NotHeldError):
            await authority.lock("r").aio.release()

    run(main)


def test_methods_have_their_twins(authority: Redlock, run: Run) -> None:
    async def main() -> None:
        lock = authority.lock("r", ttl=20, renew=False)
        lease = await lock.aio.acquire()
        assert lock.lease is lease
        await lock.aio.extend(60)
        assert lease.remaining > 25
        assert await asyncio.create_task(authority.lock("r").aio.try_acquire()) is None
        with pytest.raises(LockTimeoutError):
            await asyncio.create_task(authority.lock("r").aio.acquire(timeout=0.05))
        await lock.aio.release()
        assert await lock.aio.try_acquire() is not None
        lock.release()
        assert repr(lock.aio) == f"{lock!r}.aio"

    run(main)


@pytest.mark.complaint(
    "aioredis-py#1040", "all tasks of a loop share the thread, and so the lock's thread-local token"
)
def test_task_enters_again_and_other_tasks_wait(authority: Redlock, run: Run) -> None:
    """The task gets the same token inside.

    A child task is another owner, though it sees its parent's leases.
    """

    async def child() -> Lease | None:
        assert held_leases()
        return await authority.lock("r").aio.try_acquire()

    async def main() -> None:
        async with authority.lock("r") as token, authority.lock("r", timeout=0) as again:
            assert token == again
            with authority.lock("r", timeout=0) as blocking:
                assert blocking == token
            assert await asyncio.create_task(child()) is None
        lease = await asyncio.create_task(authority.lock("r").aio.try_acquire())
        assert lease is not None

    run(main)


def test_tasks_whose_parent_holds_the_lock_hear_so_in_their_errors(
    authority: Redlock, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Each once, at its timeout. The log says nothing, because the parent may wait for none of them."""

    async def main() -> None:
        async with authority.lock("r"):
            children = [authority.lock("r").aio.acquire(timeout=0.1) for _ in range(200)]
            errors = await asyncio.gather(*children, return_exceptions=True)
        assert {type(error) for error in errors} == {LockTimeoutError}
        assert all("that started this one holds it" in str(error) for error in errors)

    run(main)
    assert not caplog.records


@in_each_loop
def test_tasks_take_turns(authority: Redlock, run: Run) -> None:
    inside, tokens = Counter[str](), []

    async def work() -> None:
        async with authority.lock("r", timeout=None) as token:
            inside["now"] += 1
            assert inside["now"] == 1
            tokens.append(token)
            await asyncio.sleep(0)
            inside["now"] -= 1

    async def main() -> None:
        await asyncio.gather(*(work() for _ in range(50)))

    run(main)
    assert tokens == sorted(set(tokens))


@in_each_loop
def test_body_that_is_cancelled_releases(authority: Redlock, nodes: Nodes, run: Run) -> None:
    async def main() -> None:
        entered = asyncio.Event()

        async def hold() -> None:
            async with authority.lock("r"):
                entered.set()
                await asyncio.sleep(60)

        async def fail() -> None:
            await entered.wait()
            raise KeyError("sibling")

        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(hold())
                group.create_task(fail())

        with pytest.raises(ExceptionGroup) as failure:
            await both()
        assert isinstance(failure.value.exceptions[0], KeyError)
        assert await becomes_free(nodes)

    run(main)


@pytest.mark.parametrize("outer_first", [False, True])
def test_all_that_a_cancelled_release_leaves_is_released(
    authority: Redlock, nodes: Nodes, run: Run, *, outer_first: bool
) -> None:
    async def main() -> None:
        outer, inner = authority.lock("a"), authority.lock("a", "b")
        await outer.aio.acquire()
        await inner.aio.acquire()
        if outer_first:
            await outer.aio.release()
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await inner.aio.release()
        task.uncancel()
        if not outer_first:
            await outer.aio.release()
        assert await becomes_free(nodes)

    run(main)


@pytest.mark.timed
@in_each_loop
def test_loops_come_and_go(authority: Redlock, run: Run) -> None:
    tokens = []

    async def main() -> None:
        async with authority.lock("r", ttl=1.0) as token:
            await asyncio.sleep(1.1)
            tokens.append(token)

    for _ in range(2):
        run(main)
        with authority.lock("r", timeout=0) as token:
            tokens.append(token)
    assert tokens == sorted(set(tokens))


def test_a_loop_that_ends_inside_the_block_makes_no_noise(authority: Redlock, nodes: Nodes) -> None:
    async def hold(entered: asyncio.Event) -> None:
        async with authority.lock("r", ttl=60.0):
            entered.set()
            await asyncio.sleep(60)

    async def main() -> None:
        entered = asyncio.Event()
        task = asyncio.ensure_future(hold(entered))
        await entered.wait()
        assert locks_on(nodes)
        assert not task.done()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
        gc.collect()
    assert eventually(lambda: locks_on(nodes) == [])


def test_lost_lease_raises_on_leaving_and_not_over_the_bodys_own_error(
    authority: Redlock, nodes: Nodes, run: Run
) -> None:
    def forget() -> None:
        for node in nodes:
            with redis.Redis.from_url(node.url) as client:
                client.delete(f"{NODE_KEY}:l:r")

    async def main() -> None:
        with pytest.raises(LockLostError):
            async with authority.lock("r"):
                forget()

        async def fail() -> None:
            async with authority.lock("r"):
                forget()
                raise KeyError("own")

        with pytest.raises(KeyError) as failure:
            await fail()
        assert any("ended before the work did" in note for note in failure.value.__notes__)

    run(main)


class Base(DeclarativeBase):
    pass


class Account(FencedModel, Base):
    __tablename__ = "async_lock_accounts"
    __fence_resource__ = "account:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


def test_sessions_of_coroutines_write_under_the_lease_of_the_task(authority: Redlock, tmp_path: Any) -> None:
    async def main() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'test.sqlite'}")
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with authority.lock("account:1") as token, AsyncSession(engine) as session:
            session.add(Account(id=1, balance=10))
            await session.commit()
        async with authority.lock("account:1"), AsyncSession(engine) as session:
            (await session.get_one(Account, 1)).balance = 20
            await session.commit()
        async with AsyncSession(engine) as session:
            bind(session, Lease("account:1", token))
            with pytest.raises(StaleTokenError):
                await session.execute(update(Account).where(Account.id == 1).values(balance=30))
        await engine.dispose()
        await authority.aio.close()

    asyncio.run(main())


def test_a_blocking_lock_that_keeps_the_loop_waiting_says_so_once(
    authority: Redlock, rival: Redlock, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def wait_for_it() -> None:
        with pytest.raises(LockTimeoutError):
            authority.lock("r", timeout=0.1).acquire()

    async def main() -> None:
        with authority.lock("other"):
            pass
        assert authority.lock("r").try_acquire() is None
        wait_for_it()

    with rival.lock("r"):
        wait_for_it()
        assert not caplog.messages
        run(main)
    (said,) = (message for message in caplog.messages if "a blocking lock" in message)
    assert said.startswith("<fenced_lock 'other' not held>: a blocking lock inside an event loop")
    assert "`async with`" in said


def test_a_coroutine_that_is_thrown_away_while_it_waits_ends_in_another_context(
    authority: Redlock, rival: Redlock, run: Run
) -> None:
    async def main() -> None:
        waiting = authority.lock("r", timeout=None).aio.acquire()
        contextvars.copy_context().run(waiting.send, None)
        waiting.close()

    with rival.lock("r"):
        run(main)


def test_a_coroutine_that_is_thrown_away_behind_its_loop_makes_no_noise(
    authority: Redlock, rival: Redlock, nodes: Nodes
) -> None:
    waiting = authority.lock("r").aio.acquire()

    async def main() -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(0.2, woken.set)
        loop.call_soon(waiting.send, None)
        await woken.wait()

    with rival.lock("r"):
        asyncio.run(main())
        waiting.close()
    assert eventually(lambda: locks_on(nodes) == [])
