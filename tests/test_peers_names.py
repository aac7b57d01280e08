"""`locked`, `reentrant`, `cancel`, `hand_over` and `take_over` do what users of other libraries expect.

On nodes and on each database, in blocking code and in coroutines.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import Database, FencedModel, Redlock, fenced_lock, take_over
from fencelock._locking import factory_of
from fencelock.errors import LockError, LockLostError, LockTimeoutError, NotHeldError, QuorumError
from fencelock.lease import held_leases
from proof.servers import Nodes
from tests.authorities.kinds import MAKERS, SORTS, Kind
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY

pytestmark = pytest.mark.timed


class Base(DeclarativeBase):
    """The models of this file."""


class Order(FencedModel, Base):
    __tablename__ = "pn_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


@pytest.fixture(params=SORTS)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    """One server of each sort."""
    with contextmanager(MAKERS[request.param])(request) as made:
        yield made


@pytest.fixture
def pair(kind: Kind) -> Iterator[tuple[Any, Any]]:
    """Two clients of it."""
    first, second = kind.make(), kind.make()
    yield first, second
    first.close()
    second.close()


@pytest.fixture(params=["asyncpg", "aiomysql", "aiosqlite", "etcd", "zookeeper"])
def tasks_pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """Two clients of a database, by a driver for coroutines."""
    with contextmanager(MAKERS[request.param])(request) as made:
        first, second = made.make(), made.make()
        yield first, second
        first.close()  # the session of ZooKeeper belongs to no loop
        second.close()


def run(*authorities: Any, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function, and close the authorities' connections in its loop."""

    async def whole() -> None:
        try:
            await main()
        finally:
            for authority in authorities:
                await authority.aio.close()

    asyncio.run(whole())


# locked


def test_locked_tells_of_any_holder(pair: tuple[Any, Any]) -> None:
    """Of this object, another one, another client; of one of several resources; and no longer than held."""
    mine, other = pair
    lock = mine.lock("r")
    assert not lock.locked()
    with lock:
        assert lock.locked()
        assert mine.lock("r").locked()
        assert other.lock("r").locked()
        assert other.lock("q", "r").locked()
        assert not other.lock("q").locked()
    assert not lock.locked()
    assert not other.lock("q", "r").locked()


def test_a_lease_that_ended_is_no_holder(pair: tuple[Any, Any]) -> None:
    """By the clock of what grants, whatever the holder believes."""
    mine, other = pair
    held = mine.lock("r", ttl=0.4, renew=False, if_lost="warn")
    with held:
        assert other.lock("r").locked()
        assert eventually(lambda: not other.lock("r").locked())


def test_locked_in_a_task(pair: tuple[Any, Any]) -> None:
    """The same behind `await`."""
    mine, other = pair

    async def main() -> None:
        lock = mine.lock("r")
        assert not await lock.aio.locked()
        async with lock:
            assert await lock.aio.locked()
            assert await other.lock("q", "r").aio.locked()
        assert not await other.lock("r").aio.locked()

    run(mine, other, main=main)


def test_what_is_named_by_drivers_of_coroutines(tasks_pair: tuple[Any, Any]) -> None:
    """All of it, over connections of the loop."""
    mine, other = tasks_pair

    async def main() -> None:
        lock = mine.lock("r", ttl=5)
        async with lock as token:
            assert await other.lock("r").aio.locked()
            handed = await lock.aio.hand_over()
        async with take_over(handed, authority=other) as taken:
            assert taken == token
            assert await mine.lock("r").aio.locked()
        assert not await mine.lock("r").aio.locked()

    run(mine, other, main=main)


def key_on(url: str, resource: str, value: str | None) -> None:
    """Write a lock on one node, or delete it."""
    with redis.Redis.from_url(url) as client:
        key = f"{NODE_KEY}:l:{resource}"
        client.delete(key) if value is None else client.set(key, value, px=60_000)


def test_a_claim_is_no_holder(authority: Redlock, nodes: Nodes) -> None:
    """The nodes keep the lock for a contender that was called, for a moment."""
    for node in nodes:
        key_on(node.url, "r", ">client.1")
    assert not authority.lock("r").locked()


def test_a_minority_is_no_holder(authority: Redlock, nodes: Nodes) -> None:
    """Two of five nodes have the rest of an attempt; a third one makes a majority that is not free."""
    for node in nodes[:2]:
        key_on(node.url, "r", "rest|0|1")
    assert not authority.lock("r").locked()
    key_on(nodes[2].url, "r", "rest|0|1")
    assert authority.lock("r").locked()


def test_locked_needs_a_majority(authority: Redlock, rival: Redlock, nodes: Nodes) -> None:
    """A node out: it is told. Three out: QuorumError, which says what each has said."""
    with authority.lock("r", ttl=20, renew=False):
        nodes[0].kill()
        assert rival.lock("r").locked()
        assert not rival.lock("q").locked()
        for node in nodes[1:3]:
            node.kill()
        with pytest.raises(QuorumError) as caught:
            rival.lock("r").locked()
        assert len(caught.value.nodes) == 5


def test_hung_nodes_do_not_hide_the_holder(authority: Redlock, rival: Redlock, nodes: Nodes) -> None:
    """Two of five answer nothing."""
    assert not rival.lock("r").locked()
    with authority.lock("r", ttl=20, renew=False):
        for node in nodes[:2]:
            node.pause()
        assert rival.lock("r").locked()
        for node in nodes[:2]:
            node.resume()


# reentrant


def test_reentrant_false_does_not_wait_for_itself(pair: tuple[Any, Any]) -> None:
    """Refused at once, in a sentence that says so; another lock object enters."""
    mine, _ = pair
    once = mine.lock("r", timeout=None, reentrant=False)
    with once as token:
        with pytest.raises(LockTimeoutError, match=r"this same thread.* holds it.*reentrant=True"), once:
            pass
        with pytest.raises(LockTimeoutError, match="holds it"):
            once.acquire(timeout=0)
        assert once.try_acquire() is None
        with pytest.raises(LockTimeoutError, match="holds it"):
            mine.lock("q", "r", timeout=0, reentrant=False).acquire()
        with mine.lock("r", timeout=0) as again:
            assert again == token
        assert once.locked()
    assert not once.locked()
    with once as later:
        assert later > token


def test_reentrant_false_waits_for_others_as_any(pair: tuple[Any, Any]) -> None:
    """The sentence is of others, and another thread gets the lock when it is given back."""
    mine, other = pair
    with other.lock("r"), pytest.raises(LockTimeoutError) as caught:
        mine.lock("r", timeout=0, reentrant=False).acquire()
    assert "this same thread" not in str(caught.value)
    got: list[int] = []

    def work() -> None:
        with mine.lock("r", timeout=10, reentrant=False) as token:
            got.append(token)

    with mine.lock("r", reentrant=False) as token:
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.1)
        assert not got
    thread.join(10)
    assert got[0] > token


def test_reentrant_false_in_tasks(pair: tuple[Any, Any]) -> None:
    """The task that holds it is refused."""
    mine, _ = pair

    async def main() -> None:
        once = mine.lock("r", timeout=None, reentrant=False)
        async with once:
            with pytest.raises(LockTimeoutError, match=r"holds it.*reentrant=True"):
                await once.aio.acquire()
            assert await once.aio.try_acquire() is None
        async with once:
            pass

    run(mine, main=main)


def test_a_lost_lease_is_no_reason_not_to_enter(pair: tuple[Any, Any]) -> None:
    """The lock is acquired again."""
    mine, _ = pair
    lock = mine.lock("r", ttl=0.3, renew=False, reentrant=False, if_lost="warn")
    with lock as token:
        time.sleep(0.4)
        with lock as later:
            assert later > token


# hand_over and take_over


def test_a_lease_is_handed_over(pair: tuple[Any, Any]) -> None:
    """The giver holds nothing, and the taker holds the same tokens: renewed, reminted and given back."""
    mine, other = pair
    lock = mine.lock("order:1", "a", ttl=1.0)
    lost: list[object] = []
    lock.on_lost(lost.append)
    with lock as tokens:
        lease = lock.lease
        handed = lock.hand_over()
        assert held_leases() == lock.leases == ()
        assert not lease.lost
        assert other.lock("a").locked()
        with pytest.raises(NotHeldError):
            lock.hand_over()
        with pytest.raises(LockTimeoutError):
            mine.lock("a", timeout=0).acquire()
    assert other.lock("a").locked(), "leaving the block gives nothing back"
    taken = take_over(handed, authority=other)
    with taken as its:
        assert its == tokens
        assert [held.resource for held in held_leases()] == ["order:1", "a"]
        time.sleep(1.3)
        assert not taken.lease.lost, "it is renewed"
        assert mine.lock("a").locked()
        minted = taken.remint()
        assert minted > tokens
        taken.extend(2)
    assert not mine.lock("order:1", "a").locked()
    with mine.lock("order:1", timeout=0) as later:
        assert later > minted[0]
    with taken as again:
        assert again > minted
    assert not lost


def test_a_lease_is_handed_over_between_tasks(pair: tuple[Any, Any]) -> None:
    """The same behind `await`, and without a block."""
    mine, other = pair

    async def main() -> None:
        lock = mine.lock("r", ttl=1.0)
        lease = await lock.aio.acquire()
        handed = await lock.aio.hand_over()
        taken = take_over(handed, authority=other, renew=True)
        assert (await taken.aio.acquire()).token == lease.token
        await asyncio.sleep(1.3)
        assert not taken.lease.lost
        await taken.aio.release()
        assert not await mine.lock("r").aio.locked()

    run(mine, other, main=main)


def test_nothing_renews_it_on_its_way(pair: tuple[Any, Any]) -> None:
    """It ends with its ttl; then it is lost for the one that comes too late, and nothing is left."""
    mine, other = pair
    lock = mine.lock("r", ttl=0.4)
    lock.acquire()
    handed = lock.hand_over()
    with other.lock("r", timeout=5) as token:
        with pytest.raises(LockLostError, match="ended"):
            take_over(handed, authority=other, ttl=5).acquire()
        assert mine.lock("r").locked()
    assert not mine.lock("r").locked()
    with pytest.raises(LockLostError):
        take_over(handed, authority=mine).acquire()
    with mine.lock("r", timeout=0) as later:
        assert later > token


def test_without_renew_it_ends(pair: tuple[Any, Any]) -> None:
    """`renew=False` and `ttl` count where it is taken over."""
    mine, other = pair
    lock = mine.lock("r", ttl=20)
    lock.acquire()
    handed = lock.hand_over()
    taken = take_over(handed, authority=other, renew=False)
    assert 15 < taken.acquire().remaining <= 20
    taken.release()
    assert not lock.locked()


def test_another_process_takes_it_over(kind: Kind, pair: tuple[Any, Any]) -> None:
    """For which the text is made."""
    mine, _ = pair
    lock = mine.lock("r", ttl=10)
    token = lock.acquire().token
    handed = lock.hand_over()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Queue(), context.Queue()

    process = context.Process(target=_child, args=(kind.url, handed, ours, theirs))
    process.start()
    try:
        assert ours.get(timeout=60) == token
        assert lock.locked()
        theirs.put("leave")
        process.join(30)
        assert process.exitcode == 0
        assert not lock.locked()
    finally:
        process.kill()


def _child(url: str, handed: str, told: Any, wait: Any) -> None:
    """Take over, tell the token, and hold it until told to leave."""
    authority: Any = factory_of(url)(url)
    with take_over(handed, authority=authority) as token:
        told.put(token)
        wait.get(timeout=60)


def test_what_is_entered_twice_is_not_handed_over(pair: tuple[Any, Any]) -> None:
    """By this object, another one, or in part: it stays held, and renewed."""
    mine, other = pair
    lock = mine.lock("r", ttl=0.6)
    with lock:
        with lock, pytest.raises(LockError, match="more than once"):
            lock.hand_over()
        with mine.lock("r"), pytest.raises(LockError, match="more than once"):
            lock.hand_over()
        with mine.lock("q", "r") as _, pytest.raises(LockError, match="more than once"):
            lock.hand_over()
        inner = mine.lock("q", "r")
        with inner, pytest.raises(LockError, match="more than once"):
            inner.hand_over()
        time.sleep(0.9)
        assert other.lock("r").locked()
        assert not lock.lease.lost
    assert not other.lock("r").locked()


def test_what_is_not_held_is_not_handed_over(authority: Redlock) -> None:
    """NotHeldError where it never was, LockLostError where it has ended."""
    lock = authority.lock("r", ttl=0.3, renew=False, if_lost="warn")
    with pytest.raises(NotHeldError):
        lock.hand_over()
    with lock:
        time.sleep(0.4)
        with pytest.raises(LockLostError):
            lock.hand_over()


def test_an_open_transaction_keeps_it(authority: Redlock, tmp_path: Path) -> None:
    """Until it ends: what it has written must not be committed under the next holder."""
    engine = create_engine(f"sqlite:///{tmp_path / 'one.sqlite'}")
    Base.metadata.create_all(engine)
    lock = authority.lock("order:1")
    with lock as token:
        with Session(engine) as session:
            session.add(Order(id=1))
            session.flush()
            with pytest.raises(LockError, match="transaction"):
                lock.hand_over()
            session.commit()
        handed = lock.hand_over()
    with take_over(handed, authority=authority) as its, Session(engine) as session:
        assert its == token
        session.delete(session.get_one(Order, 1))
        session.commit()
    engine.dispose()


@pytest.mark.parametrize("garbage", ["", "x", "[]", "{}", "null", "1", '{"fencelock lease 2": {}}'])
def test_garbage_is_refused(garbage: str, authority: Redlock) -> None:
    """In a sentence that shows it."""
    with pytest.raises(ValueError, match="this text was not made by hand_over"):
        take_over(garbage, authority=authority)
    with pytest.raises(ValueError, match="this text was not made by hand_over"):
        take_over(None, authority=authority)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="authority= is a Redlock"):
        take_over(garbage, authority=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("resources", 5),
        ("resources", []),
        ("tokens", "ab"),
        ("tokens", [0]),
        ("tokens", [1, 2]),
        ("proof", 7),
        ("proof", {}),
        ("ttl", None),
        ("ttl", -1),
    ],
)
def test_a_text_with_a_wrong_field_is_refused(field: str, value: Any, authority: Redlock) -> None:
    """Damaged on its way; nothing of the lease is touched."""
    lock = authority.lock("r", ttl=5)
    lock.acquire()
    (name, its), *_ = json.loads(lock.hand_over()).items()
    if value is None:
        del its[field]
    else:
        its[field] = value
    with pytest.raises((ValueError, TypeError)) as caught:
        take_over(json.dumps({name: its}), authority=authority)
    assert str(caught.value)
    assert lock.locked()


def test_another_authority_is_refused(authority: Redlock, node_urls: list[str], tmp_path: Path) -> None:
    """Of another kind, or in another namespace: the sentence names both."""
    lock = authority.lock("r", ttl=5)
    lock.acquire()
    handed = lock.hand_over()
    with (
        Database(f"sqlite:///{tmp_path / 'app.db'}") as database,
        Redlock(node_urls, namespace="another") as another,
        database.lock("r", ttl=5) as token,
    ):
        for wrong in (database, another):
            with pytest.raises(ValueError, match=r"has granted this lease, and <.* cannot take it over"):
                take_over(handed, authority=wrong)
        of_database = database.lock("q")
        of_database.acquire()
        with pytest.raises(ValueError, match="has granted this lease"):
            take_over(of_database.hand_over(), authority=authority)
        assert token


def test_other_nodes_have_not_granted_it(authority: Redlock, make_nodes: Callable[..., Nodes]) -> None:
    """It is lost there, nothing is left there, and nothing has happened to the lease itself."""
    lock = authority.lock("r", ttl=5)
    token = lock.acquire().token
    handed = lock.hand_over()
    with Redlock(make_nodes(3).urls) as others:
        others.init(base=0)
        with pytest.raises(LockLostError):
            take_over(handed, authority=others).acquire()
        assert not others.lock("r").locked()
    with take_over(handed, authority=authority) as its:
        assert its == token


def test_a_text_has_no_password(nodes: Nodes) -> None:
    """It goes through queues and logs."""
    with Redlock(nodes[0].url.replace("redis://", "redis://default:s3cret@")) as authority:
        authority.init(base=0)
        lock = authority.lock("r")
        lock.acquire()
        assert "s3cret" not in lock.hand_over()


def test_nodes_that_are_out_do_not_lose_it(authority: Redlock, rival: Redlock, nodes: Nodes) -> None:
    """A minority; where a majority is out, QuorumError, and another try with the text succeeds."""
    lock = authority.lock("r", ttl=20)
    token = lock.acquire().token
    handed = lock.hand_over()
    for node in nodes[:3]:
        node.pause()
    with pytest.raises(QuorumError):
        take_over(handed, authority=rival).acquire()
    for node in nodes[1:3]:
        node.resume()

    def taken() -> bool:
        try:
            with take_over(handed, authority=rival) as its:
                return bool(its == token)
        except QuorumError:
            return False

    assert eventually(taken)
    nodes[0].resume()
    assert not rival.lock("r").locked()


def test_the_default_authority_takes_over(authority: Redlock, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for `fenced_lock`; and the settings are checked as there."""
    monkeypatch.setattr("fencelock._locking._default", authority)
    lock = fenced_lock("r", ttl=5)
    lock.acquire()
    handed = lock.hand_over()
    with pytest.raises(TypeError, match="tll"):
        take_over(handed, tll=5)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="ttl"):
        take_over(handed, ttl=-1)
    with take_over(handed):
        assert lock.locked()
    assert not lock.locked()


def test_another_thread_cancels_what_waits(pair: tuple[Any, Any]) -> None:
    """It ends soon, leaves nothing behind, and the lock object may wait again."""
    mine, theirs = pair
    lock = theirs.lock("r", timeout=None)
    with mine.lock("r", ttl=30), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(contextvars.Context().run, lock.acquire)
        time.sleep(0.5)
        assert not waiting.done()
        theirs.lock("r").cancel()  # of another lock object: that is not meant
        lock.cancel()
        with pytest.raises(LockTimeoutError, match="cancelled"):
            waiting.result(5)
    lock.cancel()  # nothing waits
    with lock:
        assert lock.leases


def test_a_task_is_cancelled_by_its_lock(pair: tuple[Any, Any]) -> None:
    """Of two that wait, the one that is meant; the other has the lock in its turn."""
    mine, theirs = pair

    async def main() -> None:
        lock, other = theirs.lock("r", timeout=None), theirs.lock("r", timeout=20)
        holder = mine.lock("r", ttl=30)
        await holder.aio.acquire()
        first, second = (asyncio.create_task(each.aio.acquire()) for each in (lock, other))
        await asyncio.sleep(0.5)
        lock.cancel()
        with pytest.raises(LockTimeoutError, match="cancelled"):
            await asyncio.wait_for(first, 5)
        assert not second.done()
        await holder.aio.release()
        await asyncio.wait_for(second, 5)
        await other.aio.release()

    run(mine, theirs, main=main)
