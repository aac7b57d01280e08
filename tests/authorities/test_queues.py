"""Waiters take turns: one caller of a process asks for all, and PostgreSQL calls the next process."""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

import pytest
from sqlalchemy import Engine, create_engine, text

from fencelock import Database
from fencelock.authority.base import Grant
from fencelock.authority.database.connections import Lent
from fencelock.authority.database.listening import Ear
from fencelock.authority.database.queues import Place, Queue, Queues
from fencelock.authority.loops import ThreadWakeup
from fencelock.errors import LockTimeoutError, QuorumError
from tests.authorities.kinds import EACH_DATABASE
from tests.authorities.stage import Stage, in_one_loop, together
from tests.conftest import ReusedDatabase
from tests.polling import eventually

#: Those that PostgreSQL calls, in each world.
CALLED = ("postgresql, blocking", "psycopg_async, asyncio", "asyncpg, asyncio")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a statement was sent, by its first word."""
    counts: Counter[str] = Counter()
    execute = Lent.execute

    def count(self: Lent, statement: Any, values: dict[str, Any] | None = None) -> Any:
        counts[str(statement).split(maxsplit=1)[0]] += 1
        return execute(self, statement, values)

    monkeypatch.setattr(Lent, "execute", count)
    return counts


def queue_of(engine: Engine) -> str:
    """Return the names of the worlds that wait."""
    with engine.connect() as connection:
        return connection.scalar(text("SELECT queue FROM fencelock_leases WHERE resource = 'r'")) or ""


@pytest.fixture
def server(stage: Stage) -> Iterator[Engine]:
    """The database, by a driver for blocking code."""
    engine = create_engine(stage.kind.url.replace("psycopg_async", "psycopg").replace("asyncpg", "psycopg"))
    yield engine
    engine.dispose()


def test_who_cannot_listen_looks() -> None:
    class Away:
        def detached(self, _prepare: object) -> None:
            raise OSError("refused")

    queues = Queues(ThreadWakeup, in_threads=True)
    nothing = cast("Any", None)
    ear = Ear(queues, nothing, nothing)
    ear.hear(cast("Any", Away()), lambda _: None)
    asyncio.run(ear.hear_in_loop(cast("Any", Away()), lambda _: None))
    assert not queues.hears


def wait_in_order(
    stage: Stage, server: Engine, count: int, *, several: bool = False
) -> tuple[Grant, Callable[[], list[int]]]:
    """Have so many clients wait, one after the other, for what another holds.

    Returns the grant of the holder, and what tells in which order they got it when it is released.
    """
    holder, waiting = stage.new(), [stage.new() for _ in range(count)]
    grant = holder.acquire("r", ttl=60.0)
    order: list[int] = []

    def wait(number: int) -> None:
        names = (f"a{number}", "r", "s") if several else ("r",)
        its = waiting[number].acquire(*names, timeout=50.0)
        order.append(number)
        assert waiting[number].release(its) is True

    threads = []
    for number in range(count):
        threads.append(threading.Thread(target=wait, args=(number,), daemon=True))
        threads[-1].start()
        assert eventually(lambda so_far=number + 1: len(queue_of(server)) == 8 * so_far)  # type: ignore[misc]

    def release() -> list[int]:
        holder.release(grant)
        for thread in threads:
            thread.join(60.0)
        return order

    return grant, release


@pytest.mark.parametrize("stage", CALLED, indirect=True)
def test_who_waits_longest_is_called_first(stage: Stage, server: Engine) -> None:
    _, release = wait_in_order(stage, server, 5)
    assert release() == [0, 1, 2, 3, 4]
    assert queue_of(server) == ""


@pytest.mark.parametrize("stage", CALLED, indirect=True)
def test_who_waits_for_several_is_called_in_turn(stage: Stage, server: Engine) -> None:
    """In the order in which they came. As long as they wait, others may take the free names."""
    _, release = wait_in_order(stage, server, 3, several=True)
    other = stage.new()
    assert other.release(other.acquire("a1", timeout=2)) is True
    assert release() == [0, 1, 2]
    assert queue_of(server) == ""


@pytest.mark.parametrize("stage", EACH_DATABASE, indirect=True)
def test_who_gives_up_several_keeps_nothing(stage: Stage) -> None:
    """Neither at its timeout, nor with one try, which waits in no queue."""
    holder, impatient, other = stage.new(), stage.new(), stage.new()
    grant = holder.acquire("r", ttl=60.0)
    for timeout in (0.0, 0.5):
        with pytest.raises(LockTimeoutError):
            impatient.acquire("a", "r", timeout=timeout)
        assert other.release(other.acquire("a", timeout=0.2)) is True
    assert holder.release(grant) is True


@pytest.mark.parametrize("stage", EACH_DATABASE, indirect=True)
def test_overlapping_sets_get_their_turns(stage: Stage) -> None:
    """`proof/several.py` is the model: no two callers keep from each other what they need."""

    def work(client: Any, names: tuple[str, ...]) -> None:
        for _ in range(15):
            its = client.acquire(*names, timeout=30.0)
            time.sleep(0.002)
            assert client.release(its) is True

    sets = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "b", "a"), ("b",)]
    together(*[functools.partial(work, stage.new(), names) for names in sets])


@pytest.mark.parametrize("stage", CALLED, indirect=True)
@pytest.mark.timed
def test_who_is_called_asks_once(stage: Stage, server: Engine, said: Counter[str]) -> None:
    _, release = wait_in_order(stage, server, 1)
    said.clear()
    time.sleep(1.0)
    assert said.total() < 10, "it looks again and again"
    assert release() == [0]
    assert said["INSERT"] == 1


@pytest.mark.parametrize("stage", CALLED[:1], indirect=True)
def test_who_comes_later_does_not_push_in(stage: Stage, server: Engine) -> None:
    """A released lease is kept for the first waiter in the queue, for a moment."""
    grant, release = wait_in_order(stage, server, 1)
    with server.begin() as connection:  # as the release does, for a world that is slow
        connection.execute(
            text(
                "UPDATE fencelock_leases SET nonce = 'deadbee,', expires_at = now() + interval '1 second'"
                " WHERE resource = 'r'"
            )
        )
    with pytest.raises(LockTimeoutError):
        stage.new().acquire("r", timeout=0)
    client: Any = stage.new().client
    assert client.inspect("r") is None, "nobody holds it"
    assert release() == [0]
    assert grant.tokens[0] > 0


@pytest.mark.parametrize("stage", CALLED[:1], indirect=True)
def test_who_was_called_and_does_not_come_costs_a_moment(stage: Stage, server: Engine) -> None:
    _, release = wait_in_order(stage, server, 1)
    with server.begin() as connection:
        connection.execute(
            text("UPDATE fencelock_leases SET queue = 'deadbee,' || queue WHERE resource = 'r'")
        )
    assert release() == [0]


@pytest.mark.parametrize("stage", CALLED, indirect=True)
def test_what_is_kept_for_one_who_has_given_up_is_passed_on(stage: Stage, server: Engine) -> None:
    holder, impatient, patient = stage.new(), stage.new(), stage.new()
    grant = holder.acquire("r", ttl=60.0)
    gave_up = threading.Event()

    def give_up() -> None:
        with pytest.raises(LockTimeoutError):
            impatient.acquire("r", timeout=2.0)
        gave_up.set()

    def wait() -> None:
        assert eventually(lambda: len(queue_of(server)) >= 8)
        assert patient.acquire("r", timeout=50.0).tokens > grant.tokens

    def release() -> None:
        assert eventually(lambda: len(queue_of(server)) >= 16)
        assert gave_up.wait(30)
        assert holder.release(grant) is True

    together(give_up, wait, release)


@pytest.mark.parametrize("stage", EACH_DATABASE, indirect=True)
@pytest.mark.timed
def test_callers_of_one_client_ask_for_each_other(stage: Stage, said: Counter[str]) -> None:
    holder, client = stage.new(), stage.new()
    grant = holder.acquire("r", ttl=60.0)
    callers = 30
    tokens: list[int] = []

    def work() -> None:
        its = client.acquire("r", timeout=50.0)
        tokens.append(its.tokens[0])
        assert client.release(its) is True

    def release() -> None:
        time.sleep(0.5)
        said.clear()
        time.sleep(0.5)
        assert said.total() < 0.5 / 0.001
        assert holder.release(grant) is True

    together(release, *[work] * callers)
    assert tokens == sorted(set(tokens))
    assert len(tokens) == callers


@pytest.mark.long
@pytest.mark.parametrize("stage", EACH_DATABASE, indirect=True)
def test_who_waits_for_several_is_not_passed_over_for_ever(stage: Stage) -> None:
    """A caller that wants several locks gets them, though other callers always wait for one of them."""
    crowd, several = [stage.new(), stage.new()], stage.new()
    is_over = threading.Event()

    def want_one(number: int) -> None:
        while not is_over.is_set():
            its = crowd[number % 2].acquire("r", timeout=50.0)
            time.sleep(0.002)
            crowd[number % 2].release(its)

    def want_several() -> None:
        time.sleep(0.3)
        try:
            for _ in range(2):
                assert several.release(several.acquire("r", "s", timeout=30.0)) is True
        finally:
            is_over.set()

    together(want_several, *[functools.partial(want_one, number) for number in range(8)])


@pytest.mark.parametrize("stage", EACH_DATABASE, indirect=True)
def test_the_first_of_a_queue_may_give_up(stage: Stage) -> None:
    """At its timeout; those behind it wait for as long as they want to."""
    holder, client = stage.new(), stage.new()
    grant = holder.acquire("r", ttl=60.0)

    gave_up = threading.Semaphore(0)

    def give_up() -> None:
        with pytest.raises(LockTimeoutError):
            client.acquire("r", timeout=0.3)
        gave_up.release()

    def follow() -> None:
        time.sleep(0.1)
        with pytest.raises(LockTimeoutError) as caught:
            client.acquire("r", timeout=0.4)
        assert 20.0 < (caught.value.holder_ttl or 0.0) <= 60.0
        gave_up.release()

    def wait() -> None:
        time.sleep(0.15)
        client.release(client.acquire("r", timeout=50.0))

    def release() -> None:
        assert gave_up.acquire(timeout=30)
        assert gave_up.acquire(timeout=30)
        assert holder.release(grant) is True

    together(give_up, follow, wait, release)


@pytest.mark.parametrize(
    "stage", ["asyncpg, asyncio", "aiomysql, asyncio", "aiosqlite, asyncio"], indirect=True
)
def test_the_first_of_a_queue_may_be_cancelled(stage: Stage) -> None:
    client = stage.new_client().aio

    async def story() -> None:
        grant = await client.acquire(("r",), ttl=60.0, timeout=1.0)
        tasks = [asyncio.ensure_future(client.acquire(("r",), ttl=60.0, timeout=50.0)) for _ in range(3)]
        await asyncio.sleep(0.3)
        tasks[0].cancel()
        await client.release(grant)
        second = await tasks[1]
        await client.release(second)
        third = await tasks[2]
        assert third.tokens > second.tokens > grant.tokens
        await client.release(third)

    stage.run(in_one_loop(story()))


def test_a_handler_is_not_behind_the_caller_that_it_has_interrupted(
    postgres_database: ReusedDatabase,
) -> None:
    """It cannot go on before the handler has ended, so it must not be waited for."""
    with Database(postgres_database.url) as client, Database(postgres_database.url) as holder:
        client.init()
        grant = holder.acquire(("r",), ttl=60.0, timeout=1.0)
        seen: list[bool] = []

        def handle(_number: int, _frame: FrameType | None) -> None:
            holder.release(grant)
            its = client.acquire(("r",), ttl=60.0, timeout=20.0)
            seen.append(bool(client.release(its)))

        before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        try:
            its = client.acquire(("r",), ttl=60.0, timeout=10.0)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert seen == [True]
        assert client.release(its) is True
    postgres_database.empty()


@pytest.fixture
def pair(postgres_database: ReusedDatabase) -> Iterator[tuple[Database, Database]]:
    """Two clients of one server."""
    with Database(postgres_database.url) as client, Database(postgres_database.url) as other:
        client.init()
        yield client, other
    postgres_database.empty()


def strike_once(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, *, late: bool = False) -> None:
    """Interrupt a method in the main thread, once, as a signal handler does."""
    method = getattr(kind, name)
    struck: list[bool] = []

    def strike(self: Any, *its: Any) -> Any:
        if struck or threading.current_thread() is not threading.main_thread():
            return method(self, *its)
        struck.append(True)
        if late:
            method(self, *its)
        raise KeyboardInterrupt

    monkeypatch.setattr(kind, name, strike)


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_release_takes_nothing_back_from_the_next(
    pair: tuple[Database, Database], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """It has transferred the lease already, and the next one holds it, without waiting for its end."""
    client, other = pair
    grant = client.acquire(("r",), ttl=60.0, timeout=1.0)
    got: list[Grant] = []
    waiting = threading.Thread(
        target=lambda: got.append(client.acquire(("r",), ttl=60.0, timeout=50.0)), daemon=True
    )
    waiting.start()
    assert eventually(lambda: client._queues.next_of(("r",)) is None and bool(client._queues._queues))
    client._queues._queues["r"].turn_began = time.monotonic() + 50.0
    strike_once(monkeypatch, Queue, "wake", late=late)
    with pytest.raises(KeyboardInterrupt):
        client.release(grant)
    waiting.join(30.0)
    assert got, "it was not woken"
    with pytest.raises(LockTimeoutError):
        other.acquire(("r",), ttl=5.0, timeout=0.2)
    assert client.release(got[0]) is True


def test_who_was_interrupted_as_it_left_is_in_nobodys_way(
    pair: tuple[Database, Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the error is kept, and its traceback with it."""
    client, other = pair
    grant = other.acquire(("r",), ttl=60.0, timeout=1.0)
    strike_once(monkeypatch, Queues, "leave")
    with pytest.raises(KeyboardInterrupt) as kept:
        client.acquire(("r",), ttl=60.0, timeout=0.2)
    other.release(grant)
    (its,) = together(lambda: client.acquire(("r",), ttl=60.0, timeout=30.0))
    assert client.release(its) is True
    assert kept.tb is not None


@pytest.mark.parametrize("does", ["join", "fail"])
def test_a_caller_that_the_garbage_collector_ends_may_leave_at_any_moment(does: str) -> None:
    queues = Queues(ThreadWakeup, in_threads=True)
    first, thrown_away, third, last = (queues.new_place(1.0) for _ in range(4))

    class Struck(Place):
        """Another leaves while this one is looked at."""

        @property
        def stack(self) -> Any:
            queues.leave("r", thrown_away)
            return self

        @stack.setter
        def stack(self, _: Any) -> None:
            """Keep that."""

    struck = Struck(ThreadWakeup(), 1.0)
    for stack, place in enumerate((first, thrown_away, third, last)):
        place.stack = stack
    for place in (first, thrown_away, third, struck):
        queues.join("r", place)
    if does == "join":
        queues.join("r", last)
        assert last in first.queue.alive()
    else:
        queues.join("r", last)
        queues.fail(last, QuorumError("no"))
        assert (first.error, third.error) != (None, None)
    assert first.queue.first is first
