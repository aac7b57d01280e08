"""Held leases live on by themselves: on real nodes that hang, forget and die, for threads and for tasks.

The schedule alone is tested in `test_renewal_schedule`, on a clock of its own.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import redis

from fencelock import FencedLock, Lease, Redlock
from fencelock._generators import Call, Steps
from fencelock.authority.base import Grant
from fencelock.errors import LockLostError
from fencelock.lock.hold import Hold
from fencelock.lock.renewal import for_thread
from proof.servers import Nodes
from tests.loops import in_loop
from tests.polling import IMPATIENT, eventually
from tests.redlock.stage import NODE_KEY
from tests.redlock.views import becomes_free

#: Short, for leases that are renewed or found lost after a third of it.
TTL = 1.2


@pytest.fixture
def patience() -> dict[str, Any]:
    """Little: some nodes hang."""
    return IMPATIENT


def locks(nodes: Nodes, resource: str = "r") -> list[str | None]:
    """Return what each node holds under a resource's lock key."""
    values = []
    for node in nodes:
        with redis.Redis.from_url(node.url, decode_responses=True) as client:
            value = client.get(f"{NODE_KEY}:l:{resource}")
            values.append(None if value is None else str(value))
    return values


def are_free(nodes: Nodes) -> bool:
    return eventually(lambda: locks(nodes) == [None] * 5)


def forget(nodes: Nodes, *which: int) -> None:
    """End the lock on some nodes, once all of them have it: late votes are on their way."""
    assert eventually(lambda: None not in locks(nodes))
    with ExitStack() as stack:
        clients = [stack.enter_context(redis.Redis.from_url(nodes[number].url)) for number in which]
        for client in clients:
            client.ping()
        for client in clients:  # no extension is to come in between
            client.delete(f"{NODE_KEY}:l:r")


@contextmanager
def paused(nodes: Nodes) -> Iterator[None]:
    """Let all nodes hang."""
    for node in nodes:
        node.pause()
    try:
        yield
    finally:
        for node in nodes:
            node.resume()


async def extended(lock: FencedLock[int]) -> Hold:
    """Return the hold of a task's lock when its loop has asked the nodes to extend it."""
    (hold,) = lock._entered[0].holds
    while hold not in hold.renewer._in_flight:  # type: ignore[union-attr]  # noqa: ASYNC110 - no event tells of it
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    return hold


@pytest.mark.timed
def test_a_held_lease_outlives_its_ttl(authority: Redlock, rival: Redlock) -> None:
    """With the same token; also that of a task, from the event loop itself, without a thread for it."""
    with authority.lock("r", ttl=TTL) as token:
        time.sleep(1.3 * TTL)
        assert rival.lock("r").try_acquire() is None
        with authority.lock("r", timeout=0) as again:
            assert again == token

    async def main() -> None:
        lock = authority.lock("r", ttl=TTL)
        async with lock as token:
            await asyncio.sleep(1.3 * TTL)
            assert await rival.lock("r").aio.try_acquire() is None
            assert lock.lease.token == token
            assert lock.lease.remaining > 0
        assert await rival.lock("r").aio.try_acquire() is not None
        await rival.aio.close()
        await authority.aio.close()

    asyncio.run(main())


def test_a_loop_that_is_blocked_for_longer_than_the_ttl_loses_its_leases(authority: Redlock) -> None:
    """A task that blocks the loop keeps it from renewing, and hears of the loss on leaving."""

    async def main() -> None:
        lock = authority.lock("r", ttl=TTL)
        async with lock:
            while not lock.lease.lost:
                time.sleep(0.05)  # noqa: ASYNC251 - that is the point
            await asyncio.sleep(0.05)

    with pytest.raises(LockLostError, match="ended before the work did"):
        asyncio.run(main())


def test_nothing_is_renewed_unless_it_is_asked_for(authority: Redlock, rival: Redlock) -> None:
    """`renew=False` leaves a lease to its ttl, and so does a lock object that was thrown away."""
    lock = authority.lock("r", ttl=TTL, renew=False)
    lock.acquire()
    authority.lock("thrown away", ttl=TTL).acquire()
    gc.collect()
    with rival.lock("r", timeout=30), rival.lock("thrown away", timeout=30):
        assert lock.lease.lost
    with pytest.raises(LockLostError):
        lock.release()


@pytest.mark.timed
@pytest.mark.complaint("redisson#7272", "the watchdog extends, or makes again, a lock that was unlocked")
def test_nothing_is_renewed_after_the_release(authority: Redlock, nodes: Nodes) -> None:
    """Release at random moments of renewal: no key comes back (Redisson's watchdog outlived unlock)."""
    chance = random.Random(3)
    for _ in range(20):
        with authority.lock("r", ttl=0.1, timeout=30, if_lost="warn"):
            time.sleep(chance.uniform(0.0, 0.05))
        assert are_free(nodes)
    time.sleep(0.1)
    assert locks(nodes) == [None] * 5


@pytest.mark.timed
@pytest.mark.complaint("redsync#186", "a node that was away during the acquisition never learns of the lock")
def test_node_that_missed_the_lock_gets_it_back(authority: Redlock, nodes: Nodes) -> None:
    """A lock that a minority has lost is made again there, and the token stays (redsync#186)."""
    with authority.lock("r", ttl=TTL) as token:
        forget(nodes, 1, 3)
        assert eventually(lambda: None not in locks(nodes))
        marks = [str(value).split("|")[2] for value in locks(nodes)]
        assert marks == [str(token), "restored"] * 2 + [str(token)]
        time.sleep(TTL)
    assert are_free(nodes)


@pytest.mark.complaint("RedLock.net#48", "renewal goes on after a conflict")
@pytest.mark.complaint("aioredlock", "a renewal that fails is swallowed")
def test_lock_that_a_majority_has_lost_is_lost(authority: Redlock, rival: Redlock, nodes: Nodes) -> None:
    """Renewal does not bring it back (aioredlock), says so once, and leaves nothing behind."""
    told: list[Lease] = []
    lock = authority.lock("r", ttl=TTL)
    lock.on_lost(told.append)
    lease = lock.acquire()
    forget(nodes, 0, 1, 2)
    assert eventually(lambda: bool(told))
    assert told == [lease]
    assert lease.lost
    with pytest.raises(LockLostError, match="the lease has ended"):
        lease._check()
    assert are_free(nodes)
    with rival.lock("r", timeout=20, renew=False):
        assert eventually(lambda: None not in locks(nodes))  # late votes are on their way
        theirs = locks(nodes)
        time.sleep(TTL / 2)
        assert locks(nodes) == theirs
        with pytest.raises(LockLostError):
            lock.release()
    assert told == [lease]


def test_a_lost_lease_of_a_task_is_told_in_the_loop(authority: Redlock, nodes: Nodes) -> None:
    """So that the callback may cancel the task."""

    async def work() -> None:
        lock = authority.lock("r", ttl=TTL, if_lost="warn")
        task = asyncio.current_task()
        assert task is not None
        lock.on_lost(lambda _: task.cancel("lost"))
        async with lock:
            forget(nodes, 0, 1, 2)
            await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work())


@pytest.mark.complaint("python-redis-lock#114, RedLock.net#68", "a worker that hangs holds its lock for ever")
def test_hold_ends_with_max_hold(authority: Redlock, rival: Redlock) -> None:
    """A worker that hangs beside a healthy renewer does not hold for ever."""
    told: list[Lease] = []
    lock = authority.lock("r", ttl=TTL, max_hold=2 * TTL)
    lock.on_lost(told.append)
    began = time.monotonic()
    lock.acquire()
    with rival.lock("r", timeout=30):
        assert time.monotonic() - began > 1.5 * TTL
    assert eventually(lambda: bool(told))
    with pytest.raises(LockLostError, match="max_hold"):
        told[0]._check()
    with pytest.raises(LockLostError):
        lock.release()


def test_leaving_a_lost_block_can_be_a_warning(
    authority: Redlock, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    """`if_lost="warn"`: the log says it, and nothing is raised."""
    with caplog.at_level(logging.WARNING, "fencelock"), authority.lock("r", if_lost="warn"):
        forget(nodes, 0, 1, 2)
    assert "ended before the work did" in caplog.text


@pytest.mark.timed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_fails_takes_its_time_or_ends_its_thread_harms_nobody(
    authority: Redlock, nodes: Nodes, rival: Redlock
) -> None:
    """Other leases are renewed meanwhile, and afterwards."""
    told: list[Lease] = []
    over = threading.Event()

    def take_time(lease: Lease) -> None:
        told.append(lease)
        over.wait(30)
        sys.exit("nobody is to go down with it")

    lock, other = authority.lock("r", ttl=TTL), authority.lock("other", ttl=TTL)
    lock.on_lost(lambda _: 1 // 0)
    lock.on_lost(take_time)
    with other:
        lock.acquire()
        forget(nodes, 0, 1, 2)
        assert eventually(lambda: bool(told))
        for _ in range(2):
            time.sleep(1.2 * TTL)
            assert not other.lease.lost
            over.set()
        assert rival.lock("other").try_acquire() is None
    with pytest.raises(LockLostError):
        lock.release()


@pytest.mark.parametrize("method", ["extend", "remint"])
def test_a_callback_that_fails_does_not_hide_what_was_found(
    authority: Redlock, rival: Redlock, nodes: Nodes, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A caller that extends or remints a lost lease hears of the loss, and so do all callbacks."""
    told: list[Lease] = []
    lock = authority.lock("r", renew=False)
    lock.on_lost(lambda _: 1 // 0)
    lock.on_lost(told.append)
    lease = lock.acquire()
    forget(nodes, 0, 1, 2, 3, 4)
    with rival.lock("r", timeout=20):
        with pytest.raises(LockLostError):
            getattr(lock, method)()
        assert told == [lease]
        assert "on_lost callback failed" in caplog.text
        with pytest.raises(LockLostError):
            lock.release()


def test_a_callback_may_release_the_lock(authority: Redlock, nodes: Nodes) -> None:
    """The renewal does not wait for the callback."""
    outcome: list[object] = []
    lock = authority.lock("r", ttl=TTL)

    def give_back(_: Lease) -> None:
        try:
            lock.release()
        except LockLostError as error:
            outcome.append(error)

    lock.on_lost(give_back)
    lock.acquire()
    forget(nodes, 0, 1, 2)
    assert eventually(lambda: bool(outcome))
    assert lock.leases == ()


def test_a_callback_that_comes_late_is_called_at_once(authority: Redlock) -> None:
    """For a lease that is lost already. A value that cannot be called is refused."""
    told: list[Lease] = []
    lock = authority.lock("r", ttl=TTL, renew=False)
    lease = lock.acquire()
    assert eventually(lambda: lease.lost)
    lock.on_lost(told.append)
    assert told == [lease]
    with pytest.raises(LockLostError):
        lock.release()

    async def nobody_awaits(_: Lease) -> None: ...

    for bad in (None, 1, nobody_awaits):
        with pytest.raises(TypeError, match="plain function"):
            lock.on_lost(bad)  # type: ignore[arg-type]


def test_a_paused_process_does_not_revive_its_lease(authority: Redlock, rival: Redlock, nodes: Nodes) -> None:
    """Stopped for longer than the ttl: renewal wakes up, finds the time over, and asks for nothing."""
    read, write = os.pipe()
    child = os.fork()
    if not child:  # pragma: no cover - measured in the parent
        try:
            with Redlock(nodes.urls) as own:
                lock = own.lock("r", ttl=TTL, if_lost="warn")
                lease = lock.acquire()
                os.write(write, b"+")
                eventually(lambda: lease._over, 30)
                os.write(write, b"lost" if lease._over else b"kept")
        except BaseException:  # noqa: BLE001 - it must not go on as the test run that it is a copy of
            os.write(write, b"-" + traceback.format_exc().encode())
        os._exit(0)
    said = os.read(read, 1)
    assert said == b"+", os.read(read, 65536).decode()
    os.kill(child, signal.SIGSTOP)
    with rival.lock("r", timeout=30, ttl=60, renew=False) as token:
        assert eventually(lambda: None not in locks(nodes))  # late votes are on their way
        os.kill(child, signal.SIGCONT)
        assert os.read(read, 4) == b"lost"
        assert [str(value).split("|")[2] for value in locks(nodes)] == [str(token)] * 5
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    with authority.lock("r", timeout=0):
        pass


@pytest.mark.timed
@in_loop
async def test_an_extension_under_way_does_not_bring_back_the_old_token(
    authority: Redlock, nodes: Nodes
) -> None:
    """A blocking remint of what a task acquired: the loop cannot wait for its own round meanwhile."""
    lock = authority.lock("r", ttl=TTL)
    async with lock:
        with paused(nodes):
            hold = await extended(lock)
        token = lock.remint()
        for _ in range(4):
            await asyncio.sleep(TTL / 3)
        assert lock.lease.token == token
        assert hold.grant.tokens == (token,)
        assert not lock.lease.lost
    assert await becomes_free(nodes)


@pytest.mark.timed
@pytest.mark.parametrize("method", ["extend", "remint"])
@in_loop
async def test_the_lease_of_a_task_is_renewed_after_a_thread_has_extended_it(
    authority: Redlock, rival: Redlock, nodes: Nodes, method: str
) -> None:
    """Its loop renews it still; the thread has none."""
    lock = authority.lock("r", ttl=TTL)
    async with lock:
        await asyncio.sleep(TTL / 6)
        with paused(nodes):
            changing = asyncio.create_task(asyncio.to_thread(getattr(lock, method)))
            await asyncio.sleep(TTL / 3)  # the loop finds nothing to do when it meant to look
        await changing
        await asyncio.sleep(1.5 * TTL)
        assert not lock.lease.lost
        assert await rival.lock("r").aio.try_acquire() is None


@pytest.mark.timed
@in_loop
async def test_a_loop_renews_though_every_task_was_cancelled(
    authority: Redlock, rival: Redlock, nodes: Nodes
) -> None:
    """Supervisors do the same when they begin to shut down, and then clean up for a while."""
    lock = authority.lock("r", ttl=TTL)
    async with lock:
        with paused(nodes):
            await extended(lock)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert [task.cancel() for task in others] == [True]
        await asyncio.sleep(1.5 * TTL)
        assert not lock.lease.lost
        assert await rival.lock("r").aio.try_acquire() is None


def test_a_lease_of_one_loop_is_released_in_another_while_it_is_extended(
    authority: Redlock, nodes: Nodes
) -> None:
    """Neither loop waits for the other, and no lock is made again behind the release."""
    lock = authority.lock("r", ttl=4)
    acquired, released = threading.Event(), threading.Event()

    async def hold_it() -> None:
        await lock.aio.acquire()
        for node in nodes:
            node.pause()
        await extended(lock)
        acquired.set()
        await asyncio.to_thread(released.wait, 30)
        await asyncio.sleep(0.5)
        await authority.aio.close()

    async def give_back() -> None:
        try:
            for node in nodes:
                node.resume()
            async with asyncio.timeout(30):
                await lock.aio.release()
        finally:
            released.set()
            await authority.aio.close()

    thread = threading.Thread(target=asyncio.run, args=(hold_it(),))
    thread.start()
    assert acquired.wait(30)
    asyncio.run(give_back())
    thread.join(30)
    assert are_free(nodes)


def test_a_task_that_releases_what_a_thread_extends_lets_other_tasks_run(
    authority: Redlock, nodes: Nodes
) -> None:
    """The extension has ended before the release is sent, so no lock is made again behind it."""
    lock = authority.lock("r", ttl=4)
    lock.acquire()
    (hold,) = lock._entered[0].holds

    async def main() -> None:
        with paused(nodes):
            assert eventually(lambda: hold in hold.renewer._in_flight)  # type: ignore[union-attr]
            releasing = asyncio.create_task(lock.aio.release())
            for _ in range(10):
                await asyncio.sleep(0.01)
            assert not hold.release_finished
        await asyncio.wait_for(releasing, 30)
        await authority.aio.close()

    asyncio.run(main())
    assert hold not in hold.renewer._in_flight  # type: ignore[union-attr]
    assert are_free(nodes)


@pytest.mark.parametrize("last", ["extension", "release"])
def test_an_extension_that_arrives_behind_the_release_leaves_nothing(
    authority: Redlock, nodes: Nodes, last: str
) -> None:
    """A thread gives back a task's lease, and cannot wait for the loop. The last of the two cleans up."""
    extend_gen, release_gen = authority.extend_gen, authority.release_gen
    has_extended, answered, arrives, ended = (threading.Event() for _ in range(4))

    def extend_again(wishes: list[tuple[Grant, float]]) -> Steps[Any]:
        outcome = yield from extend_gen(wishes)
        has_extended.set()
        yield Call(lambda: None, lambda: asyncio.to_thread(arrives.wait, 30))
        yield from extend_gen(wishes)  # as if some nodes had got it only now
        return outcome

    def release_slowly(grant: Grant) -> Steps[bool | None]:
        answer = yield from release_gen(grant)
        answered.set()
        if last == "release":
            yield Call(lambda: ended.wait(30), lambda: asyncio.sleep(0))
        return answer

    authority.extend_gen = extend_again  # type: ignore[assignment,method-assign]
    authority.release_gen = release_slowly  # type: ignore[method-assign]

    async def main() -> None:
        lock = authority.lock("r", ttl=4)
        await lock.aio.acquire()
        (hold,) = lock._entered[0].holds
        await asyncio.to_thread(has_extended.wait, 30)
        giving_back = asyncio.create_task(asyncio.to_thread(lock.release))
        await (giving_back if last == "extension" else asyncio.to_thread(answered.wait, 30))
        arrives.set()
        while hold in hold.renewer._in_flight:  # type: ignore[union-attr]  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0)
        ended.set()
        await giving_back
        await authority.aio.close()

    asyncio.run(main())
    # The loop's EXTEND and the thread's RELEASE have connections of their own: a node that is slow just then
    # may execute them the other way round, and keep the lock until its ttl.
    assert eventually(lambda: locks(nodes).count(None) >= 4, 2)


@pytest.mark.timed
def test_the_renewing_thread_ends_when_it_is_idle_and_comes_back(
    authority: Redlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps no process and no Redlock alive. It stays while a lease is held that is due late."""
    monkeypatch.setattr("fencelock.lock.renewal._IDLE", 0.1)
    worker = for_thread(authority)._worker
    for _ in range(2):
        with authority.lock("r", ttl=TTL, if_lost="warn"):
            assert worker._thread is not None
            assert worker._thread.daemon
        assert eventually(lambda: worker._thread is None)
    with authority.lock("r", ttl=TTL) as token:
        time.sleep(1.3 * TTL)
        with authority.lock("r", timeout=0) as again:
            assert again == token


@pytest.mark.timed
def test_a_forked_child_renews_nothing_of_its_parent_and_can_hold_its_own(
    authority: Redlock, nodes: Nodes
) -> None:
    """Its copies of the leases are lost; the parent's go on."""
    with authority.lock("r", ttl=TTL) as token:
        child = os.fork()
        if not child:  # pragma: no cover - measured in the parent
            code = 1
            try:
                with Redlock(nodes.urls).lock("own", ttl=TTL) as own:
                    time.sleep(1.2 * TTL)
                    code = 0 if own else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with authority.lock("r", timeout=0) as again:
            assert again == token


@pytest.mark.timed
@pytest.mark.complaint("python-redis-lock#85", "NotAcquired is raised for a lock that was held all the time")
def test_threads_release_while_others_hold(authority: Redlock) -> None:
    """Eight threads, short leases, renewal under way all the time: every release is of a lease that lives."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        try:
            for _ in range(6):
                with authority.lock(f"r{number}", ttl=1.5):
                    time.sleep(chance.uniform(0.3, 0.6))  # around its first renewal
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
