"""Semaphores, readers and writers keep their limits on every authority, in threads and tasks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import (
    Database,
    FencedModel,
    FencedSemaphore,
    LockError,
    LockTimeoutError,
    NotHeldError,
    UnfencedWriteError,
    fenced_lock,
    fenced_semaphore,
    forget,
    on_event,
)
from fencelock.lease import held_leases
from fencelock.lock import slots
from tests.authorities.kinds import MAKERS, SORTS, SORTS_IN_TASKS, Kind
from tests.polling import eventually

#: Seconds in which a free slot must be had on a busy machine.
SOON = 60.0


#: For code above the authority.
TWO_KINDS = pytest.mark.parametrize("kind", ["quorum", "sqlite"], indirect=True)


@pytest.fixture(params=SORTS)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    yield from MAKERS[request.param](request)


@pytest.fixture
def client(kind: Kind) -> Iterator[Any]:
    made: Any = kind.make()
    yield made
    made.close()


@pytest.fixture
def other(kind: Kind) -> Iterator[Any]:
    made: Any = kind.make()
    yield made
    made.close()


class Census:
    """Counts those inside, and notes a rule that is broken."""

    def __init__(self) -> None:
        self.inside: dict[object, int] = {}
        self.most = 0
        self.tokens: dict[object, list[int]] = {}
        self.broken: list[str] = []
        self._lock = threading.Lock()

    def enter(self, place: object, token: int) -> None:
        with self._lock:
            self.inside[place] = self.inside.get(place, 0) + 1
            self.most = max(self.most, sum(self.inside.values()))
            if self.inside[place] > 1:
                self.broken.append(f"{place} is held twice")
            if self.tokens.get(place, [0])[-1] >= token:
                self.broken.append(f"{place}: token {token} after {self.tokens[place][-1]}")
            self.tokens.setdefault(place, []).append(token)

    def leave(self, place: object) -> None:
        with self._lock:
            self.inside[place] -= 1


def sem(authority: Any, slots: int = 3, **settings: Any) -> FencedSemaphore:
    return fenced_semaphore("gpu", slots=slots, authority=authority, **settings)


def reader(authority: Any, readers: int = 4, **settings: Any) -> Any:
    return fenced_lock("order:1", shared=True, readers=readers, authority=authority, **settings)


def writer(authority: Any, readers: int = 4, **settings: Any) -> Any:
    return fenced_lock("order:1", readers=readers, authority=authority, **settings)


# Semaphores


def test_as_many_as_there_are_slots(client: Any) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(sem(client, reentrant=False)) for _ in range(3)]
        assert {slot for slot, _ in held} == {0, 1, 2}
        assert all(token > 0 for _, token in held)
        with pytest.raises(LockTimeoutError, match=r"all slots of 'gpu' \(3\) are held.* is held by"):
            sem(client, reentrant=False).acquire(timeout=0.2)
        assert sem(client, reentrant=False).try_acquire() is None
        assert sem(client).locked() is True
    assert sem(client).locked() is False
    assert client.inspect() == []


@TWO_KINDS
def test_owner_of_a_slot_enters_it_again(client: Any) -> None:
    lock = sem(client, slots=2)
    with lock as first, lock as again, sem(client, slots=2) as third:
        assert first == again == third
        assert lock.slot == first[0]
        assert lock.lease.resource == f"gpu#{first[0]}"
        assert [lease.resource for lease in held_leases()] == [lock.lease.resource]
        lock.extend(40)
        assert lock.lease.remaining > 20
        slot, larger = lock.remint()
        assert (slot, lock.lease.token, larger > first[1]) == (first[0], larger, True)
    with pytest.raises(NotHeldError):
        _ = lock.slot


@TWO_KINDS
def test_lock_that_waits_gets_the_first_slot_that_is_free(client: Any, other: Any) -> None:
    with ExitStack() as stack:
        locks = [stack.enter_context(sem(other, reentrant=False)) for _ in range(3)]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: sem(client, timeout=SOON).acquire().resource)
            with pytest.raises(TimeoutError):
                waiting.result(0.3)
            freed, _ = locks[-1]
            stack.pop_all().close()
            assert waiting.result(SOON).startswith("gpu#")
        assert 0 <= freed < 3


@pytest.mark.complaint("Madelson's DistributedLock", "a semaphore over a quorum is unsound")
def test_workers_share_the_slots(client: Any, other: Any) -> None:
    """Never two in a slot, never more than there are, and its tokens rise."""
    census = Census()

    def work(number: int) -> None:
        lock = sem(other if number % 2 else client, timeout=60)
        for _ in range(5):
            with lock as (slot, token):
                census.enter(slot, token)
                time.sleep(0.03)
                census.leave(slot)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert census.broken == []
    assert sum(map(len, census.tokens.values())) == 30
    assert census.most == 3


@pytest.mark.parametrize("kind", SORTS_IN_TASKS, indirect=True)
def test_tasks_share_the_slots(kind: Kind) -> None:
    census = Census()

    async def main() -> None:
        authority: Any = kind.make()
        lock = sem(authority, timeout=60)

        async def work() -> None:
            for _ in range(5):
                async with lock as (slot, token):
                    census.enter(slot, token)
                    await asyncio.sleep(0.03)
                    census.leave(slot)

        await asyncio.gather(*(work() for _ in range(6)))
        assert (await lock.aio.try_acquire()) is not None
        await lock.aio.release()
        assert await authority.aio.inspect() == []
        await authority.aio.close()
        authority.close()

    asyncio.run(main())
    assert census.broken == []
    assert (sum(map(len, census.tokens.values())), census.most) == (30, 3)


@TWO_KINDS
def test_a_lower_number_of_slots_or_readers_waits_for_the_higher_ones(client: Any, other: Any) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(sem(other, slots=4, reentrant=False))
        with pytest.raises(LockTimeoutError, match=r"'gpu#[23]' is held, and this program has 2 slots"):
            sem(client, slots=2).acquire(timeout=0.3)
    with sem(client, slots=2):
        pass
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(reader(other, readers=4, reentrant=False))
        with pytest.raises(LockTimeoutError, match=r"this program has 2 slots of 'order:1'"):
            writer(client, readers=2).acquire(timeout=0.2)


def test_many_names_take_no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(slots, "_MOST_NAMES", 10)
    with Database(f"sqlite:///{tmp_path}/app.db") as authority, ThreadPoolExecutor(1) as pool:
        for number in range(25):
            name = f"order:{number}"
            with fenced_lock(name, shared=True, readers=1, authority=authority):
                waits = fenced_lock(name, shared=True, readers=1, authority=authority, timeout=0.01)
                with pytest.raises(LockTimeoutError):
                    pool.submit(waits.acquire).result(SOON)
        assert 0 < len(slots._checked[authority]) <= 10
        assert 0 < len(slots._full_at[authority]) <= 10


# Readers and writers


@pytest.mark.parametrize("world", ["threads", "tasks"])
@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_a_slow_answer_to_a_short_try_does_not_end_a_longer_wait(
    kind: Kind, client: Any, world: Literal["threads", "tasks"]
) -> None:
    """No slot is held, but the table answers only after 0.8 s: a program makes an index, say."""
    locks = [fenced_semaphore("gpu", 2, timeout=10, authority=client), writer(client, timeout=10)]
    for lock in locks:
        with lock:
            pass
    engine = create_engine(kind.url)
    for lock in locks:
        with engine.begin() as connection, ThreadPoolExecutor(1) as pool:
            connection.exec_driver_sql("LOCK TABLE fencelock_leases IN ACCESS EXCLUSIVE MODE")
            if world == "threads":
                held = pool.submit(lock.acquire)
            else:
                held = pool.submit(asyncio.run, in_a_task(lock))
            time.sleep(0.8)
            connection.rollback()
            held.result(SOON)
            if world == "threads":
                pool.submit(lock.release).result(SOON)
    engine.dispose()


async def in_a_task(lock: Any) -> None:
    async with lock:
        pass


def test_readers_are_beside_each_other_and_writers_alone(client: Any, other: Any) -> None:
    with reader(client), reader(other), ThreadPoolExecutor(1) as pool, pytest.raises(LockTimeoutError):
        pool.submit(writer(other, timeout=0.3).acquire).result(SOON)
    with writer(client):
        with pytest.raises(LockTimeoutError, match=r"'order:1' is held by a writer, or by 4 readers"):
            reader(other).acquire(timeout=0.3)
        with pytest.raises(LockTimeoutError):
            writer(other).acquire(timeout=0)
    assert client.inspect() == []
    with reader(client), reader(other):
        assert len(client.inspect()) == 2


@TWO_KINDS
def test_token_of_a_writer_is_that_of_the_resource(client: Any, other: Any) -> None:
    lock = writer(client, timeout=SOON)
    with lock as first:
        assert lock.lease.resource == "order:1"
        assert len(lock._innermost().holds) == 1
        assert lock.remint() > first
    with ThreadPoolExecutor(1) as pool:
        held = reader(other)
        held.acquire()

        def write() -> tuple[int, int]:
            with lock as token:
                return token, len(lock._innermost().holds)

        waiting = pool.submit(write)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        held.release()
        second, holds = waiting.result(SOON)
    assert second > first
    assert holds > 1
    assert client.inspect() == []


@TWO_KINDS
def test_listeners_hear_of_a_writer_once(client: Any, other: Any) -> None:
    heard: list[str] = []

    def note(event: object) -> None:
        heard.append(type(event).__name__)

    on_event(note)
    try:
        held = reader(other)
        held.acquire()
        with pytest.raises(LockTimeoutError):
            writer(client, timeout=0.3).acquire()
        heard_of_failure, heard[:] = [*heard], []
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(writer(client, timeout=SOON).acquire)
            with pytest.raises(TimeoutError):
                waiting.result(0.3)
            held.release()
            waiting.result(SOON)
    finally:
        forget(note)
    assert heard_of_failure.count("LockNotAcquired") == 1
    assert [heard.count(name) for name in ("LockAcquired", "LockNotAcquired")] == [1, 0]


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        *(("quorum", "threads"), ("quorum", "tasks"), ("postgresql", "threads"), ("mariadb", "tasks")),
        *(("sqlite", "threads"), ("etcd", "tasks"), ("zookeeper", "threads")),
    ],
    indirect=["kind"],
)
def test_readers_do_not_starve_a_writer(kind: Kind, world: Literal["threads", "tasks"]) -> None:
    ended = threading.Event()

    def read() -> int:
        authority: Any = kind.make()
        lock, count = reader(authority, timeout=60), 0
        while not ended.is_set():
            with lock:
                time.sleep(0.02)
            count += 1
        authority.close()
        return count

    def write() -> None:
        authority: Any = kind.make()

        async def main() -> None:
            async with writer(authority, timeout=60):
                pass
            await authority.aio.close()

        if world == "tasks":
            asyncio.run(main())
        else:
            with writer(authority, timeout=60):
                pass
        authority.close()

    with ThreadPoolExecutor(7) as pool:
        readers = [pool.submit(read) for _ in range(6)]
        time.sleep(0.3)
        try:
            pool.submit(write).result(80)
        finally:
            ended.set()
        assert sum(each.result(70) for each in readers) > 6


@TWO_KINDS
def test_a_writer_that_gives_up_or_is_called_off_leaves_nothing(client: Any, other: Any) -> None:
    """After it has the resource and some slots, and whatever `at_least` says."""
    with reader(other), ThreadPoolExecutor(1) as pool:
        with pytest.raises(LockTimeoutError, match=r"'order:1#[0-3]' is held by py.+ \(process") as caught:
            writer(client).acquire(timeout=0.4)
        assert "this same thread" not in str(caught.value)
        with pytest.raises(LockTimeoutError):
            writer(client, at_least=20).acquire(timeout=0.4)
        assert [info.resource for info in client.inspect()] == [reader_slot(other)]
        waiting = pool.submit((lock := writer(client, timeout=None)).acquire)
        assert eventually(lambda: len(other.inspect()) > 1)
        lock.cancel()
        with pytest.raises(LockTimeoutError, match="cancelled"):
            waiting.result(SOON)
        assert eventually(lambda: len(other.inspect()) == 1)
    with writer(client), pytest.raises(NotHeldError):
        writer(client).release()
    assert client.inspect() == []
    with writer(client, at_least=30):
        pass
    assert len(client.inspect()) == 5


def reader_slot(authority: Any) -> str:
    (found,) = (each for each in authority.inspect() if "#" in each.resource)
    return str(found.resource)


@pytest.mark.parametrize("kind", ["quorum", "aiosqlite"], indirect=True)
def test_cancelled_task_leaves_nothing(kind: Kind) -> None:
    async def main() -> None:
        authority: Any = kind.make()
        read, write = reader(authority), writer(authority, timeout=None)
        async with read:
            waiting = asyncio.create_task(write.aio.acquire())
            while len(await authority.aio.inspect()) < 2:  # noqa: ASYNC110 - another server tells
                await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            for _ in range(100):
                if len(await authority.aio.inspect()) == 1:
                    break
                await asyncio.sleep(0.05)
            else:
                pytest.fail("something is left")
        await authority.aio.close()

    asyncio.run(main())


@TWO_KINDS
def test_reader_cannot_become_a_writer(client: Any) -> None:
    with reader(client), pytest.raises(LockError, match="holds a shared lock of it"):
        writer(client).acquire()
    with writer(client) as token, writer(client) as again, reader(client) as inner:
        assert again == token
        assert inner > 0
    assert client.inspect() == []


class Base(DeclarativeBase): ...


class Order(FencedModel, Base):
    __tablename__ = "slot_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Gpu(FencedModel, Base):
    __tablename__ = "slot_gpus"
    __fence_resource__ = "gpu#{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


@pytest.mark.parametrize("kind", ["sqlite"], indirect=True)
def test_a_slot_guards_its_own_row_and_a_shared_lock_none(client: Any) -> None:
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with sem(client) as (slot, token), Session(engine) as session:
        session.add(Gpu(id=slot))
        session.commit()
        assert session.get_one(Gpu, slot).last_fencing_token == token
        session.add(Gpu(id=(slot + 1) % 3))
        with pytest.raises(UnfencedWriteError, match="needs the lease of 'gpu#"):
            session.commit()
    for lock, error in (
        (reader(client), r"take fenced_lock\('order:1', readers=…\)"),
        (writer(client), None),
    ):
        with lock, Session(engine) as session:
            session.add(Order(id=1))
            with pytest.raises(UnfencedWriteError, match=error) if error else nullcontext():
                session.commit()
    engine.dispose()
