"""What users of other lock libraries complain of, complaint by complaint: none of it happens here.

Each test names where the complaint was made. Some of it is tested more closely elsewhere; here it is shown
the way those users met it, on real nodes.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fencelock
from fencelock import FencedModel, Lease, Redlock, StaleTokenError, bind
from fencelock.errors import (
    LockLostError,
    LockTimeoutError,
    MembershipError,
    NodesNotInitialisedError,
    QuorumError,
)
from fencelock.lease import held_leases
from proof.servers import Nodes
from tests.polling import IMPATIENT, eventually
from tests.redlock.stage import NODE_KEY, OF_THE_NODE, keys_of
from tests.redlock.views import locks_on


@pytest.fixture
def patience() -> dict[str, Any]:
    """Little: some nodes hang."""
    return IMPATIENT


def test_one_node_down_neither_fails_nor_leaves_keys(authority: Redlock, nodes: Nodes) -> None:
    """redlock-py#27, redlock-rs: a quorum was met, the client raised all the same, and the keys stayed."""
    nodes[2].kill()
    for number in range(5):
        with authority.lock(f"r{number}"):
            pass
    assert eventually(lambda: locks_on(nodes) == [])


@pytest.mark.parametrize(("count", "down"), [(3, 1), (4, 1), (5, 2)])
def test_quorum_is_a_majority_of_whole_nodes(nodes: Nodes, count: int, down: int) -> None:
    """redlock-hyperf: a quorum computed in floating point needs three of three."""
    with Redlock(nodes.urls[:count], node_timeout=0.3, outage_grace=0.2) as authority:
        authority.init(base=0)
        for node in nodes[:down]:
            node.kill()
        with authority.lock("r"):
            pass
        nodes[down].kill()
        if 2 * (count - down - 1) <= count:
            with pytest.raises(QuorumError):
                authority.lock("r").acquire()


@pytest.mark.parametrize(("count", "clients"), [(2, 2), (4, 4), (4, 2)])
def test_even_splits_do_not_hang(nodes: Nodes, count: int, clients: int) -> None:
    """node-redlock#168: two clients with a vote each, or four with two and two, retry for ever."""
    urls = nodes.urls[:count]
    with Redlock(urls) as first:
        first.init(base=0)

    def work(_: int) -> int:
        with Redlock(urls) as own:
            for _ in range(20):
                with own.lock("r", timeout=20):
                    pass
        return 20

    with ThreadPoolExecutor(clients) as pool:
        assert sum(pool.map(work, range(clients))) == 20 * clients


def test_renewal_does_not_outlive_the_release(authority: Redlock, nodes: Nodes) -> None:
    """redisson#7272: the watchdog extends, or makes again, a lock that was unlocked."""
    for _ in range(10):
        with authority.lock("r", ttl=0.15, if_lost="warn"):
            time.sleep(0.055)
        assert eventually(lambda: locks_on(nodes) == [], 1)
    time.sleep(0.2)
    assert locks_on(nodes) == []


def test_one_failed_renewal_is_not_the_end(authority: Redlock, nodes: Nodes) -> None:
    """redisson#5698: a renewal that failed once was never tried again."""
    with authority.lock("r", ttl=1.5) as token:
        for node in nodes[:3]:
            node.pause()
        time.sleep(0.9)
        for node in nodes[:3]:
            node.resume()
        time.sleep(1.5)
        with authority.lock("r", timeout=0) as again:
            assert again == token


def locks(nodes: Nodes) -> list[object]:
    """Return what stands in the lock of r on every node."""
    values = []
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            values.append(client.get(f"{NODE_KEY}:l:r"))
    return values


def test_renewal_stops_when_somebody_else_has_the_lock(
    authority: Redlock, rival: Redlock, nodes: Nodes
) -> None:
    """RedLock.net#48: renewal goes on after a conflict; aioredlock: its failure is swallowed."""
    told = threading.Event()
    lock = authority.lock("r", ttl=0.6)
    lock.on_lost(lambda _: told.set())
    lock.acquire()
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.delete(f"{NODE_KEY}:l:r")
    with rival.lock("r", timeout=2, ttl=20):
        assert told.wait(3)
        assert eventually(lambda: None not in locks(nodes))  # late votes are on their way
        theirs = locks(nodes)
        time.sleep(0.7)
        assert locks(nodes) == theirs
    with pytest.raises(LockLostError):
        lock.release()


def test_release_of_a_lock_that_is_held_is_no_error(authority: Redlock) -> None:
    """python-redis-lock#85: NotAcquired is raised now and then for a lock that was held all the time."""
    for _ in range(200):
        with authority.lock("r", ttl=5):
            pass


def test_renewal_has_an_end(authority: Redlock, rival: Redlock) -> None:
    """python-redis-lock#114, RedLock.net#68: a worker that hangs holds its lock for ever."""
    stuck = authority.lock("r", ttl=0.3, max_hold=0.6, if_lost="warn")
    with stuck, rival.lock("r", timeout=5):
        assert stuck.lease.lost


def test_extension_does_not_bring_an_expired_lock_back(authority: Redlock, nodes: Nodes) -> None:
    """aioredlock, redlock-rb#36: extend sets the key, whether or not it was still there."""
    lock = authority.lock("r", ttl=0.2, renew=False)
    lock.acquire()
    time.sleep(0.3)
    with pytest.raises(LockLostError):
        lock.extend(10)
    assert eventually(lambda: locks_on(nodes) == [], 1)
    with pytest.raises(LockLostError):
        lock.release()


def test_node_that_missed_the_lock_does_not_stay_without_it(authority: Redlock, nodes: Nodes) -> None:
    """redsync#186: a node that was away during the acquisition never learns of the lock."""
    nodes[1].pause()
    with authority.lock("r", ttl=0.9):
        with redis.Redis.from_url(nodes[0].url) as client:
            client.delete(f"{NODE_KEY}:l:r")
        nodes[1].resume()
        assert eventually(lambda: len(locks_on(nodes)) == 5, 3)


def test_timeout_of_zero_deletes_nobodys_lock(authority: Redlock, rival: Redlock, nodes: Nodes) -> None:
    """redis-py#4279: reacquire with timeout=0 deletes the lock."""
    with authority.lock("r", ttl=10) as token:
        for _ in range(5):
            assert rival.lock("r").try_acquire() is None
            with authority.lock("r", timeout=0) as again:
                assert again == token
        assert len(locks_on(nodes)) >= 3
    with pytest.raises(ValueError, match="ttl"):
        authority.lock("r", ttl=0)


def test_holder_is_the_task_and_not_the_thread(authority: Redlock) -> None:
    """aioredis-py#1040: all tasks of a loop share the thread, and so the lock's thread-local token."""

    async def other() -> None:
        assert await authority.lock("r").aio.try_acquire() is None

    async def main() -> None:
        async with authority.lock("r"):
            await asyncio.create_task(other())
        await authority.aio.close()

    asyncio.run(main())


def test_lock_that_is_never_released_does_not_crash_at_shutdown(authority: Redlock, nodes: Nodes) -> None:
    """pottery#274: __del__ releases when half of the interpreter is gone."""
    program = (
        "from fencelock import Redlock\n"
        f"quorum = Redlock({list(nodes.urls)!r})\n"
        "class Keeper:\n    pass\n"
        "keeper = Keeper()\n"
        "keeper.itself, keeper.lock = keeper, quorum.lock('r')\n"
        "keeper.lock.acquire()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert eventually(lambda: locks_on(nodes) == [])
    with authority.lock("r", timeout=0) as token:
        assert token == 2


def test_body_never_runs_without_the_lock(authority: Redlock, rival: Redlock, nodes: Nodes) -> None:
    """redlock-ng: the body runs although nothing was acquired."""
    ran = []
    with authority.lock("r"):
        with pytest.raises(LockTimeoutError), rival.lock("r", timeout=0):
            ran.append("held by another")
        for node in nodes[:3]:
            node.kill()
        with pytest.raises(QuorumError), rival.lock("other", timeout=0):
            ran.append("no quorum")
    assert ran == []


def test_held_unreachable_and_refused_are_three_errors(
    authority: Redlock, rival: Redlock, nodes: Nodes
) -> None:
    """redsync#107, #144, #158, #168, node-redlock#288: one error for everything that can go wrong."""
    with authority.lock("r"), pytest.raises(LockTimeoutError) as held:
        rival.lock("r", timeout=0).acquire()
    assert held.value.holder_ttl is not None
    with Redlock(nodes.urls[:3]) as fewer, pytest.raises(MembershipError, match="initialised as 5"):
        fewer.lock("r", timeout=0).acquire()
    with (
        Redlock(nodes.urls, namespace="new") as blank,
        pytest.raises(NodesNotInitialisedError, match="fencelock init"),
    ):
        blank.lock("r", timeout=0).acquire()
    for node in nodes[:3]:
        node.kill()
    with pytest.raises(QuorumError) as unreachable:
        rival.lock("r", timeout=0).acquire()
    assert sum("unreachable" in said for said in unreachable.value.nodes.values()) == 3
    kinds = (LockTimeoutError, QuorumError, MembershipError, NodesNotInitialisedError)
    assert not any(issubclass(one, other) for one in kinds for other in kinds if one is not other)


def test_holder_keeps_its_token_when_a_newer_one_is_given_out(authority: Redlock, rival: Redlock) -> None:
    """Redisson's getToken() asks for the current token: a stale holder is shown the newer holder's."""
    stale = authority.lock("r", ttl=0.1, renew=False)
    before = stale.acquire().fencing_token
    with rival.lock("r", timeout=3) as newer:
        assert stale.lease.fencing_token == before < newer
    with pytest.raises(LockLostError):
        stale.release()


def test_entering_again_keeps_the_token(authority: Redlock) -> None:
    """Redisson's RFencedLock gives a new token for each re-entry."""
    with authority.lock("r") as token, authority.lock("r") as again:
        assert token == again
        assert len(held_leases()) == 1


def test_tokens_need_no_key_for_each_resource(authority: Redlock, nodes: Nodes) -> None:
    """redisson#6510: 25 million token keys without a ttl."""
    for number in range(3000):
        with authority.lock(f"r{number}"):
            pass
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            assert eventually(lambda client=client: keys_of(client) == OF_THE_NODE, 10)  # type: ignore[misc]
            assert client.hlen(NODE_KEY) <= 1024 + 20


class Base(DeclarativeBase):
    """The tables of this file."""


class Order(FencedModel, Base):
    """A fenced row."""

    __tablename__ = "peers_orders"
    __fence_resource__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str]


def test_bulk_update_does_not_get_around_the_check() -> None:
    """sqlalchemy#9339, #12921, #5900: bulk statements know nothing of version_id_col."""
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        bind(session, Lease("orders", 7))
        session.add(Order(id=1, status="new"))
        session.commit()
        bind(session, Lease("orders", 6))
        with pytest.raises(StaleTokenError):
            session.execute(update(Order).values(status="stale"))
        session.rollback()
        with pytest.raises(StaleTokenError):
            session.execute(update(Order), [{"id": 1, "status": "stale"}])
    engine.dispose()


def test_there_is_no_semaphore() -> None:
    """Madelson's docs hold the counterexample: a semaphore over a quorum is unsound, so none is offered."""
    assert not [name for name in fencelock.__all__ if "semaphore" in name.lower()]
