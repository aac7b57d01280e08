"""`locked`, `reentrant`, `cancel`, `hand_over` and `take_over`, with each sort of authority."""

from __future__ import annotations

import asyncio
import contextvars
import json
import multiprocessing
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import Database, FencedModel, Redlock, fenced_lock, fenced_semaphore, take_over
from fencelock._locking import factory_of
from fencelock.errors import LockError, LockLostError, LockTimeoutError, NotHeldError, QuorumError
from fencelock.lease import held_leases
from proof.servers import Nodes
from tests.authorities.kinds import MAKERS, SORTS, SORTS_IN_TASKS, Kind
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY


class Base(DeclarativeBase):
    pass


class Order(FencedModel, Base):
    __tablename__ = "handed_over_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    """A server: one is enough for what locks do above it."""
    with contextmanager(MAKERS[getattr(request, "param", "quorum")])(request) as made:
        yield made


@pytest.fixture
def pair(kind: Kind) -> Iterator[tuple[Any, Any]]:
    """Two clients of it."""
    first, second = kind.make(), kind.make()
    yield first, second
    first.close()
    second.close()


Pair = tuple[Any, Any]
each_sort = pytest.mark.parametrize("kind", [name for name in SORTS if name != "one-node"], indirect=True)
each_sort_in_tasks = pytest.mark.parametrize("kind", SORTS_IN_TASKS, indirect=True)
on_nodes = pytest.mark.parametrize("kind", ["quorum"], indirect=True)
in_a_database = pytest.mark.parametrize("kind", ["postgresql"], indirect=True)


def run(*authorities: Any, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function, and close the authorities' connections in its loop."""

    async def whole() -> None:
        try:
            await main()
        finally:
            for authority in authorities:
                await authority.aio.close()

    asyncio.run(whole())


@each_sort
def test_locked_tells_of_any_holder(pair: Pair) -> None:
    mine, other = pair
    lock = mine.lock("r")
    assert not lock.locked()
    with lock:
        assert [each.locked() for each in (lock, mine.lock("r"), other.lock("r"))] == [True] * 3
        assert other.lock("q", "r").locked()
        assert not other.lock("q").locked()
    assert not lock.locked()
    assert not other.lock("q", "r").locked()
    held = mine.lock("r", ttl=1.0, renew=False)
    held.acquire()
    assert eventually(lambda: not other.lock("r").locked()), "by the clock of what grants"


@each_sort_in_tasks
def test_tasks_ask_hand_over_and_take_over(pair: Pair) -> None:
    mine, other = pair

    async def main() -> None:
        lock = mine.lock("r", ttl=30)
        assert not await lock.aio.locked()
        async with lock as token:
            assert await other.lock("q", "r").aio.locked()
            handed = await lock.aio.hand_over()
        async with take_over(handed, authority=other) as taken:
            assert taken == token
            assert await mine.lock("r").aio.locked()
        assert not await mine.lock("r").aio.locked()

    run(mine, other, main=main)


@pytest.mark.parametrize(
    ("count", "value", "holds"), [(5, ">client.1", False), (2, "r|0|1", False), (3, "r|0|1", True)]
)
def test_a_claim_and_a_minority_are_no_holder(
    authority: Redlock, nodes: Nodes, count: int, value: str, *, holds: bool
) -> None:
    """Nodes keep the lock for a contender that was called; two may have the rest of an attempt."""
    for node in nodes[:count]:
        with redis.Redis.from_url(node.url) as client:
            client.set(f"{NODE_KEY}:l:r", value, px=60_000)
    assert authority.lock("r").locked() is holds


def test_locked_needs_a_majority(authority: Redlock, rival: Redlock, nodes: Nodes) -> None:
    assert not rival.lock("r").locked()
    with authority.lock("r", ttl=60, renew=False):
        for node in nodes[:2]:
            node.pause()
        assert rival.lock("r").locked()
        nodes[0].resume()
        nodes[1].resume()
        nodes[0].kill()
        assert rival.lock("r").locked()
        assert not rival.lock("q").locked()
        for node in nodes[1:3]:
            node.kill()
        with pytest.raises(QuorumError) as caught:
            rival.lock("r").locked()
        assert len(caught.value.nodes) == 5


@in_a_database
def test_reentrant_false_does_not_wait_for_itself(pair: Pair) -> None:
    mine, other = pair
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
    brief = mine.lock("r", ttl=1.0, renew=False, reentrant=False, if_lost="warn", timeout=30)
    with brief as token:
        assert eventually(lambda: brief.lease.lost)
        with brief as later:
            assert later > token
    with other.lock("r"), pytest.raises(LockTimeoutError) as caught:
        mine.lock("r", timeout=0, reentrant=False).acquire()
    assert "this same thread" not in str(caught.value)


@on_nodes
def test_reentrant_false_waits_for_other_threads_and_tasks(pair: Pair) -> None:
    mine, _ = pair
    got: list[int] = []

    def work() -> None:
        with mine.lock("r", timeout=50, reentrant=False) as token:
            got.append(token)

    with mine.lock("r", reentrant=False) as token:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(0.1)
        assert not got
    thread.join(60)
    assert got[0] > token

    async def main() -> None:
        once = mine.lock("r", timeout=None, reentrant=False)
        async with once:
            with pytest.raises(LockTimeoutError, match=r"holds it.*reentrant=True"):
                await once.aio.acquire()
            assert await once.aio.try_acquire() is None
        async with once:
            pass

    run(mine, main=main)


@each_sort
def test_a_lease_is_handed_over(pair: Pair) -> None:
    mine, other = pair
    lock = mine.lock("order:1", "a", ttl=30.0)
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
        minted = taken.remint()
        assert minted > tokens
        taken.extend(40)
    assert not mine.lock("order:1", "a").locked()
    with taken as again:
        assert again > minted
    assert not lost


@pytest.mark.timed
@on_nodes
def test_what_was_taken_over_is_renewed(pair: Pair) -> None:
    mine, other = pair

    async def main() -> None:
        lock = mine.lock("r", ttl=1.0)
        lease = await lock.aio.acquire()
        handed = await lock.aio.hand_over()
        taken = take_over(handed, authority=other, renew=True)
        assert (await taken.aio.acquire()).token == lease.token
        await asyncio.sleep(1.3)
        assert not taken.lease.lost
        assert await mine.lock("r").aio.locked()
        await taken.aio.release()
        assert not await mine.lock("r").aio.locked()

    run(mine, other, main=main)


@each_sort
def test_nothing_renews_it_on_its_way(pair: Pair) -> None:
    """It ends with its ttl; then it is lost for the one that comes too late, and nothing is left."""
    mine, other = pair
    lock = mine.lock("r", ttl=1.0)
    lock.acquire()
    handed = lock.hand_over()
    with other.lock("r", timeout=30) as token:
        with pytest.raises(LockLostError, match="ended"):
            take_over(handed, authority=other, ttl=5).acquire()
        assert mine.lock("r").locked()
    assert not mine.lock("r").locked()
    with pytest.raises(LockLostError):
        take_over(handed, authority=mine).acquire()
    with mine.lock("r", timeout=0) as later:
        assert later > token


@in_a_database
def test_settings_count_where_it_is_taken_over(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `renew` it ends; the default authority takes over as for `fenced_lock`."""
    mine, other = pair
    lock = mine.lock("r", ttl=60)
    lock.acquire()
    taken = take_over(lock.hand_over(), authority=other, renew=False)
    assert 30 < taken.acquire().remaining <= 60
    taken.release()
    assert not lock.locked()
    monkeypatch.setattr("fencelock._locking._default", other)
    default = fenced_lock("r", ttl=5)
    default.acquire()
    handed = default.hand_over()
    with pytest.raises(TypeError, match="tll"):
        take_over(handed, tll=5)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="ttl"):
        take_over(handed, ttl=-1)
    with take_over(handed):
        assert lock.locked()
    assert not lock.locked()


@pytest.mark.parametrize("kind", ["quorum", "postgresql", "sqlite", "etcd", "zookeeper"], indirect=True)
def test_another_process_takes_it_over(kind: Kind, pair: Pair) -> None:
    mine, _ = pair
    lock = mine.lock("r", ttl=60)
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


@pytest.mark.timed
@on_nodes
def test_what_is_entered_twice_is_not_handed_over(pair: Pair) -> None:
    mine, other = pair
    lock = mine.lock("r", ttl=1.0)
    with lock:
        for inner, giver in ((lock, lock), (mine.lock("r"), lock), (mine.lock("q", "r"), lock)):
            with inner, pytest.raises(LockError, match="more than once"):
                giver.hand_over()
        part = mine.lock("q", "r")
        with part, pytest.raises(LockError, match="more than once"):
            part.hand_over()
        threading.Event().wait(1.3)
        assert other.lock("r").locked()
        assert not lock.lease.lost
    assert not other.lock("r").locked()


def test_what_is_to_be_kept_for_a_time_is_kept_where_it_is_taken_over(pair: Pair) -> None:
    mine, other = pair
    lock = mine.lock("order:1", ttl=30.0, at_least=60)
    lock.acquire()
    with take_over(lock.hand_over(), authority=other):
        pass
    assert mine.lock("order:1").locked()


def test_a_lock_on_slots_is_not_handed_over(authority: Redlock) -> None:
    for lock in (
        fenced_lock("order:1", readers=4, authority=authority),
        fenced_lock("order:1", readers=4, shared=True, authority=authority),
        fenced_semaphore("gpu", 2, authority=authority),
    ):
        with lock:
            with pytest.raises(LockError, match="holds slots"):
                lock.hand_over()
            assert lock.lease.token > 0


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


def test_a_text_that_was_not_made_by_hand_over_is_refused(authority: Redlock) -> None:
    for garbage in ("", "x", "[]", "{}", "null", "1", '{"fencelock lease 2": {}}', None):
        with pytest.raises(ValueError, match="this text was not made by hand_over"):
            take_over(garbage, authority=authority)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="authority= is a Redlock"):
        take_over("x", authority=5)  # type: ignore[arg-type]
    lock = authority.lock("r", ttl=30)
    lock.acquire()
    ((name, its),) = json.loads(lock.hand_over()).items()
    wrong: list[tuple[str, Any]] = [("resources", 5), ("resources", []), ("tokens", "ab"), ("tokens", [0])]
    wrong += [("tokens", [1, 2]), ("proof", 7), ("proof", {}), ("ttl", -1)]
    for field, value in wrong:
        with pytest.raises((ValueError, TypeError), match="made by"):
            take_over(json.dumps({name: {**its, field: value}}), authority=authority)
    del its["ttl"]
    with pytest.raises(ValueError, match="made by hand_over"):
        take_over(json.dumps({name: its}), authority=authority)
    assert lock.locked()


def test_another_authority_is_refused(
    authority: Redlock, node_urls: list[str], make_nodes: Callable[..., Nodes], tmp_path: Path
) -> None:
    lock = authority.lock("r", ttl=30)
    token = lock.acquire().token
    handed = lock.hand_over()
    with (
        Database(f"sqlite:///{tmp_path / 'app.db'}") as database,
        Redlock(node_urls, namespace="another") as another,
    ):
        for wrong in (database, another):
            with pytest.raises(ValueError, match=r"has granted this lease, and <.* cannot take it over"):
                take_over(handed, authority=wrong)
        of_database = database.lock("q")
        of_database.acquire()
        with pytest.raises(ValueError, match="has granted this lease"):
            take_over(of_database.hand_over(), authority=authority)
    with Redlock(make_nodes(3).urls) as others:
        others.init(base=0)
        with pytest.raises(LockLostError):
            take_over(handed, authority=others).acquire()
        assert not others.lock("r").locked()
    with take_over(handed, authority=authority) as its:
        assert its == token


def test_a_text_has_no_password(nodes: Nodes) -> None:
    with Redlock(nodes[0].url.replace("redis://", "redis://default:s3cret@")) as authority:
        authority.init(base=0)
        lock = authority.lock("r")
        lock.acquire()
        assert "s3cret" not in lock.hand_over()


def test_nodes_that_are_out_do_not_lose_it(authority: Redlock, rival: Redlock, nodes: Nodes) -> None:
    lock = authority.lock("r", ttl=60)
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


@each_sort
def test_another_thread_cancels_what_waits(pair: Pair) -> None:
    mine, theirs = pair
    lock = theirs.lock("r", timeout=None)
    with mine.lock("r", ttl=60), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(contextvars.Context().run, lock.acquire)
        threading.Event().wait(0.3)
        assert not waiting.done()
        theirs.lock("r").cancel()  # of another lock object: that is not meant
        assert not waiting.done()

        def is_cancelled() -> bool:
            lock.cancel()
            return waiting.done()

        assert eventually(is_cancelled)
        with pytest.raises(LockTimeoutError, match="cancelled"):
            waiting.result()
    lock.cancel()  # nothing waits
    with lock:
        assert lock.leases


@each_sort_in_tasks
def test_a_task_is_cancelled_by_its_lock(pair: Pair) -> None:
    mine, theirs = pair

    async def main() -> None:
        lock, other = theirs.lock("r", timeout=None), theirs.lock("r", timeout=50)
        holder = mine.lock("r", ttl=60)
        await holder.aio.acquire()
        first, second = (asyncio.create_task(each.aio.acquire()) for each in (lock, other))
        await asyncio.sleep(0.3)
        lock.cancel()
        with pytest.raises(LockTimeoutError, match="cancelled"):
            await asyncio.wait_for(first, 40)
        assert not second.done()
        await holder.aio.release()
        await asyncio.wait_for(second, 40)
        await other.aio.release()

    run(mine, theirs, main=main)
