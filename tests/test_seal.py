"""Sealed locks: real nodes that forget everything, and a database that has the last word."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, NullPool, create_engine, delete, event, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

from fencelock import (
    Lease,
    LockError,
    LockLostError,
    LockTimeoutError,
    Redlock,
    StaleTokenError,
    bind,
    fenced,
    fenced_lock,
    gate,
    sealing,
)
from fencelock._steps import block
from fencelock.authority.redlock.membership.recover import rise
from fencelock.authority.redlock.protocol.messages import Broadcast, Request
from fencelock.guard.fences import FENCES
from fencelock.sealing import Sealer, Wish
from fencelock.token import COUNTER_BITS, MAX_COUNTER, compose, split
from proof.servers import Nodes
from tests.redlock.stage import NODE_KEY

PLAIN = {"fencelock": "bypass"}


@pytest.fixture
def database(engine: Engine) -> Engine:
    """An engine on a database with an empty fence table."""
    FENCES.create(engine)
    return engine


@pytest.fixture
def aengine(database: Engine, for_asyncio: Callable[[Engine], AsyncEngine]) -> AsyncEngine:
    """The same database for coroutines."""
    return for_asyncio(database)


def forget(nodes: Nodes) -> None:
    """Have every node lose its memory at once, and be initialised again as if nothing had been."""
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.flushall()
    with Redlock(nodes.urls) as operator:
        operator.init(base=0)


def fence_of(database: Engine, resource: str) -> int | None:
    """Return what stands in the fence table."""
    with database.connect() as connection:
        return connection.scalar(select(FENCES.c.last_fencing_token).where(FENCES.c.resource == resource))


def set_fence(database: Engine, resource: str, token: int) -> None:
    """Put a fence there as an earlier holder would have."""
    with database.begin() as connection:
        row = {"resource": resource, "last_fencing_token": token, "sealed_by": "an earlier one"}
        connection.execute(insert(FENCES), row, execution_options=PLAIN)


def epochs(nodes: Nodes) -> list[int]:
    """Return the epoch of each node."""
    found = []
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            found.append(int(client.hget(NODE_KEY, "e") or -1))
    return found


def locked_on(nodes: Nodes, resource: str) -> int:
    """Return on how many nodes a resource is locked."""
    count = 0
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            count += client.exists(f"{NODE_KEY}:l:{resource}")
    return count


def test_fence_stands_at_the_token_before_the_block_begins(authority: Redlock, database: Engine) -> None:
    """One resource and several; the next token is larger, and sealed too."""
    with authority.lock("r", seal=database) as token:
        assert fence_of(database, "r") == token
    with authority.lock("b", "r", seal=database) as (b, r):
        assert r > token
        assert (fence_of(database, "b"), fence_of(database, "r")) == (b, r)


def test_tokens_rise_although_all_nodes_forgot(authority: Redlock, database: Engine, nodes: Nodes) -> None:
    """Every node flushed and initialised with base 0: the refused seal gives the hint, in one more try."""
    tokens = []
    for _ in range(3):
        for _ in range(3):
            with authority.lock("r", seal=database) as token:
                tokens.append(token)
        forget(nodes)
    with authority.lock("r", timeout=0, seal=database) as token:
        tokens.append(token)
    assert tokens == sorted(set(tokens))
    assert epochs(nodes) == [0] * 5


def test_refused_grant_is_released_on_the_nodes(authority: Redlock, database: Engine, nodes: Nodes) -> None:
    """Of the grants that the database refused nothing is left behind."""
    set_fence(database, "r", 1000)
    with authority.lock("r", seal=database) as token:
        assert token == 1001
    assert locked_on(nodes, "r") == 0


def test_fence_of_a_higher_epoch_raises_the_nodes(authority: Redlock, database: Engine, nodes: Nodes) -> None:
    """No counter could help: a majority promises the next epoch, and only then votes in it."""
    set_fence(database, "r", compose(7, 5))
    with authority.lock("r", seal=database) as token:
        assert split(token)[0] == 8
    assert sum(epoch == 8 for epoch in epochs(nodes)) >= 3
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            assert int(client.hget(NODE_KEY, "p") or 0) >= int(client.hget(NODE_KEY, "e") or 0)
    with authority.lock("other", seal=database) as token:
        assert split(token)[0] == 8


def test_last_counter_of_an_epoch_raises_the_nodes(authority: Redlock, database: Engine) -> None:
    """There is no counter above it."""
    set_fence(database, "r", MAX_COUNTER)
    with authority.lock("r", seal=database) as token:
        assert split(token)[0] == 1


def test_authority_exceeds_what_it_is_told(authority: Redlock) -> None:
    """`above` goes by resource, in the caller's order, and 0 asks for nothing."""
    grant = authority.acquire(("z", "a"), ttl=5, timeout=0, above=(500, 0))
    assert grant.tokens[0] == 501
    assert grant.tokens[1] == 1


def test_nothing_is_raised_before_a_majority_has_promised(authority: Redlock) -> None:
    """RAISE without PROMISE would let another choose the same epoch: the order of what is sent."""
    sent: list[str] = []

    def spying() -> Generator[Request, Any, int | None]:
        steps = rise(authority._group(), compose(3, 1))
        request = next(steps)
        while True:
            if isinstance(request, Broadcast):
                sent.append(request.command.script)
            answer = yield request
            try:
                request = steps.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    assert block(spying(), authority.do) == 4
    order = [script for script in sent if script in {"read", "promise", "raise"}]
    assert list(dict.fromkeys(order)) == ["read", "promise", "raise"]


def test_old_holder_is_shut_out_before_the_new_one_reads(authority: Redlock, database: Engine) -> None:
    """The old holder's gate is refused although the new holder has not touched the database himself."""
    old = authority.acquire(("r",), ttl=0.2, timeout=0)
    time.sleep(0.3)
    with authority.lock("r", seal=database), Session(database) as session:
        bind(session, Lease("r", old.tokens[0]))
        with pytest.raises(StaleTokenError):
            gate(session, "r")


def test_holder_passes_the_gate_that_he_has_sealed(authority: Redlock, database: Engine) -> None:
    """Everything later in the lease compares with <=."""
    with authority.lock("r", seal=database), Session(database) as session:
        for _ in range(2):
            gate(session, "r")
            session.commit()


def test_resent_seal_is_accepted_and_anothers_is_not(database: Engine) -> None:
    """The same token passes under its own nonce only: what tells a lost answer from a duplicate."""
    sealer = Sealer(database)
    wish = Wish(("r",), (5,), time.monotonic() + 5, "mine")
    assert sealer.seal(wish).done
    assert sealer.seal(wish).done
    twin = Wish(("r",), (5,), time.monotonic() + 5, "another's")
    assert sealer.seal(twin) == (False, (5,))
    older = Wish(("r",), (4,), time.monotonic() + 5, "mine")
    assert sealer.seal(older) == (False, (5,))
    assert fence_of(database, "r") == 5


def test_resent_seal_is_refused_once_somebody_newer_has_passed(database: Engine) -> None:
    """The nonce may still stand there when a gate has raised the fence since."""
    sealer = Sealer(database)
    wish = Wish(("r",), (5,), time.monotonic() + 5, "mine")
    sealer.seal(wish)
    with Session(database) as session:
        bind(session, Lease("r", 6))
        gate(session, "r")
        session.commit()
    assert sealer.seal(wish) == (False, (6,))


def test_several_are_sealed_together_or_not_at_all(database: Engine) -> None:
    """Where one fence is in the way, the others are told, and stay as they were."""
    set_fence(database, "b", 9)
    answer = Sealer(database).seal(Wish(("b", "a"), (3, 3), time.monotonic() + 5, "mine"))
    assert not answer.done
    assert answer.fences[0] == 9
    assert fence_of(database, "a") is None


def test_seal_with_not_above_gives_a_duplicate(
    authority: Redlock, database: Engine, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: with <= two leases carry one token after the nodes forgot. With < they do not."""

    def two_tokens() -> list[int]:
        forget(nodes)
        with database.begin() as connection:
            connection.execute(delete(FENCES), execution_options=PLAIN)
        tokens = []
        for _ in range(2):
            with authority.lock("r", seal=database) as token:
                tokens.append(token)
            forget(nodes)
        return tokens

    first, second = two_tokens()
    assert first < second
    strictly = sealing._raise_fence

    def not_above(connection: object, name: str, resource: str, token: int, nonce: str) -> bool:
        if strictly(connection, name, resource, token, nonce):  # type: ignore[arg-type]
            return True
        return sealing._read(connection, resource)[0] <= token  # type: ignore[arg-type]

    monkeypatch.setattr(sealing, "_raise_fence", not_above)
    first, second = two_tokens()
    assert first == second


def hold_row(database: Engine, resource: str, until: threading.Event, held: threading.Event) -> None:
    """Hold the resource's row of the fence table in an open transaction."""
    with database.connect() as connection:
        connection.execute(
            update(FENCES).where(FENCES.c.resource == resource).values(sealed_by="busy"),
            execution_options=PLAIN,
        )
        held.set()
        until.wait(20)
        connection.rollback()


@pytest.fixture
def row_held(database: Engine) -> Iterator[Callable[[], None]]:
    """The row of "r" is held by somebody's transaction, until the fixture is called."""
    set_fence(database, "r", 1)
    until, held = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold_row, args=(database, "r", until, held))
    thread.start()
    assert held.wait(5)

    def let_go() -> None:
        until.set()
        thread.join()

    yield let_go
    let_go()


def test_seal_waits_no_longer_than_the_lease_is_valid(
    authority: Redlock, database: Engine, nodes: Nodes, row_held: Callable[[], None]
) -> None:
    """Another transaction holds the row: in vain, a timeout that says so; what was granted is given back."""
    began = time.monotonic()
    with pytest.raises(LockTimeoutError, match="holds its row"):
        authority.lock("r", ttl=1.2, timeout=1.0, seal=database).acquire()
    assert 1.0 < time.monotonic() - began < 4
    assert locked_on(nodes, "r") == 0
    row_held()
    with authority.lock("r", ttl=1.2, timeout=1.0, seal=database) as token:
        assert fence_of(database, "r") == token
    with database.connect() as connection:
        settings = {
            "postgresql": "SHOW lock_timeout",
            "mysql": "SELECT @@SESSION.innodb_lock_wait_timeout",
            "sqlite": "PRAGMA busy_timeout",
        }
        usual = {"postgresql": "0", "mysql": 50, "sqlite": 5000}
        name = database.dialect.name
        assert connection.scalar(text(settings[name])) == usual[name]


@pytest.fixture
def hanging(database: Engine) -> Iterator[None]:
    """The database takes a seal's statement, or its COMMIT, and does not come back: not for a row's lock."""
    name = database.dialect.name
    with database.connect().execution_options(**PLAIN) as connection:
        if name == "postgresql":  # the COMMIT itself takes its time
            connection.exec_driver_sql("""
                CREATE FUNCTION take_time() RETURNS trigger LANGUAGE plpgsql
                AS $$ BEGIN PERFORM pg_sleep(15); RETURN NULL; END $$
            """)
            connection.exec_driver_sql("""
                CREATE CONSTRAINT TRIGGER slow AFTER INSERT OR UPDATE ON fencelock_fences
                DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION take_time()
            """)
            connection.commit()
        elif name == "sqlite":  # the COMMIT waits for a reader
            connection.exec_driver_sql("BEGIN")
            connection.exec_driver_sql("SELECT count(*) FROM fencelock_fences").all()
        else:  # what somebody migrates
            connection.exec_driver_sql("LOCK TABLES fencelock_fences WRITE")
        yield
        if name == "mysql":
            connection.exec_driver_sql("UNLOCK TABLES")


@pytest.mark.usefixtures("hanging")
def test_seal_that_the_database_does_not_finish_ends_with_the_lease(
    authority: Redlock, database: Engine, nodes: Nodes
) -> None:
    """Whatever it is that the server waits for, statements and COMMIT included."""
    began = time.monotonic()
    with pytest.raises(LockTimeoutError, match="the database is slow"):
        authority.lock("r", ttl=1.2, timeout=1.0, seal=database).acquire()
    assert 1.0 < time.monotonic() - began < 4
    assert locked_on(nodes, "r") == 0


@pytest.mark.usefixtures("hanging")
def test_coroutines_do_not_wait_for_a_database_that_hangs(
    authority: Redlock, aengine: AsyncEngine, nodes: Nodes
) -> None:
    """The same, through the drivers for asyncio."""

    async def main() -> None:
        began = time.monotonic()
        with pytest.raises(LockTimeoutError, match="the database is slow"):
            await authority.lock("r", ttl=1.2, timeout=1.0, seal=aengine).aio.acquire()
        assert 1.0 < time.monotonic() - began < 4
        await aengine.dispose()
        await authority.aio.close()

    asyncio.run(main())
    assert locked_on(nodes, "r") == 0


def test_two_rows_are_waited_for_no_longer_than_one(database: Engine, row_held: Callable[[], None]) -> None:
    """What the first has used up is not there for the second."""
    with database.begin() as connection:
        if database.dialect.name == "sqlite":
            pytest.skip("SQLite has one lock for everything")
        row = {"resource": "a", "last_fencing_token": 1}
        connection.execute(insert(FENCES), row, execution_options=PLAIN)
    until, held = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold_row, args=(database, "a", until, held))
    thread.start()
    assert held.wait(5)
    threading.Timer(1.5, until.set).start()
    began = time.monotonic()
    assert Sealer(database).seal(Wish(("a", "r"), (5, 5), began + 2.2, "mine")) == (False, ())
    assert time.monotonic() - began < 3.2
    thread.join()
    row_held()


def test_seal_goes_on_when_the_row_is_free(
    authority: Redlock, database: Engine, row_held: Callable[[], None]
) -> None:
    """A transaction that ends within the lease's time is waited for."""
    threading.Timer(0.4, row_held).start()
    with authority.lock("r", ttl=3, timeout=5, seal=database) as token:
        assert fence_of(database, "r") == token


def test_lease_that_ended_during_the_seal_is_not_returned(authority: Redlock, database: Engine) -> None:
    """The validity is looked at after the COMMIT: a slow one costs another try, with a larger token."""
    slow = iter([0.6])
    event.listen(database, "commit", lambda _: time.sleep(next(slow, 0)))
    with authority.lock("r", ttl=0.5, renew=False, seal=database) as token:
        assert token == 2
        assert not authority.lock("r").leases


def test_commit_in_doubt_is_sealed_on_a_new_connection(
    authority: Redlock, database: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost just after the COMMIT: the same token is sealed under the same nonce."""
    if database.dialect.name == "sqlite":
        pytest.skip("there is no connection to be lost")
    lost, commit = iter([True]), database.dialect.do_commit

    def commit_and_be_killed(connection: Any) -> None:
        commit(connection)
        if not next(lost, False):
            return
        driver = connection.driver_connection
        postgres = database.dialect.name == "postgresql"
        own = driver.info.backend_pid if postgres else driver.thread_id()
        with create_engine(database.url, poolclass=NullPool).connect() as other:
            other.execute(text(f"SELECT pg_terminate_backend({own}, 5000)" if postgres else f"KILL {own}"))
        connection.cursor().execute("SELECT 1")

    monkeypatch.setattr(database.dialect, "do_commit", commit_and_be_killed)
    with authority.lock("r", seal=database) as token:
        assert token == 1
        assert fence_of(database, "r") == 1
    assert next(lost, None) is None


def test_remint_is_sealed(authority: Redlock, database: Engine) -> None:
    """The new token stands in the fence before `remint` returns it."""
    lock = authority.lock("r", seal=database)
    with lock as token:
        newer = lock.remint()
        assert newer > token
        assert fence_of(database, "r") == newer


def test_remint_inside_ones_own_gate_is_refused(authority: Redlock, database: Engine) -> None:
    """It would wait for its own transaction. After the rollback it goes through; the lease was kept."""
    lock = authority.lock("r", seal=database)
    with lock as token, Session(database) as session:
        gate(session)
        with pytest.raises(LockError, match="roll back first"):
            lock.remint()
        assert lock.lease.fencing_token == token
        assert not lock.lease.lost
        session.rollback()
        assert lock.remint() > token


def test_remint_that_cannot_be_sealed_is_a_lost_lease(
    authority: Redlock, database: Engine, nodes: Nodes
) -> None:
    """A fence above the new token shows that somebody newer has been there."""
    lock = authority.lock("r", seal=database)
    lock.acquire()
    with database.begin() as connection:
        connection.execute(update(FENCES).values(last_fencing_token=1000), execution_options=PLAIN)
    with pytest.raises(LockLostError, match="not above the fence"):
        lock.remint()
    assert lock.lease.lost
    with pytest.raises(LockLostError):
        lock.release()
    assert locked_on(nodes, "r") == 0


def test_block_inside_one_that_did_not_seal_seals(authority: Redlock, database: Engine, nodes: Nodes) -> None:
    """Who asks for a seal gets it, with the token that is held; so all tokens rise though nodes forget."""
    with authority.lock("r") as token:
        assert fence_of(database, "r") is None
        for _ in range(2):
            with authority.lock("r", "s", seal=database) as (again, other):
                assert again == token
                assert (fence_of(database, "r"), fence_of(database, "s")) == (token, other)
    forget(nodes)
    with authority.lock("r", seal=database) as later:
        assert later > token


def test_block_inside_one_that_sealed_seals_where_that_did_not(authority: Redlock, database: Engine) -> None:
    """By another engine on the same database it is the same seal, whatever has passed the gate since."""
    another = create_engine(database.url, poolclass=NullPool)
    with authority.lock("r", seal=database) as token:
        with Session(database) as session:
            gate(session)
            session.commit()
        with authority.lock("r", seal=another) as again:
            assert again == token


def test_block_that_cannot_seal_what_is_held_is_not_entered(authority: Redlock, database: Engine) -> None:
    """Nobody can tell whose the fence is. The outer block goes on: it did not ask for a seal."""
    lock = authority.lock("r", seal=database)
    with authority.lock("r") as token:
        with Session(database) as session:
            gate(session)
            with pytest.raises(LockError, match="roll back first"):
                lock.acquire()
            session.commit()
        with pytest.raises(LockError, match=r"did not seal it.*give that block seal= too"):
            lock.acquire()
        assert lock.leases == ()
        assert fence_of(database, "r") == token
        with Session(database) as session:
            gate(session)


def test_remint_in_a_block_that_did_not_ask_for_the_seal_is_sealed(
    authority: Redlock, database: Engine
) -> None:
    """A token that is minted for a sealed hold is the sealed holder's too."""
    inner = authority.lock("r")
    with authority.lock("r", seal=database), inner as token:
        newer = inner.remint()
        assert newer > token
        assert fence_of(database, "r") == newer


def test_coroutines_seal_what_they_hold(authority: Redlock, database: Engine, aengine: AsyncEngine) -> None:
    """`async with` inside one that did not seal: sealed, or refused."""

    async def main() -> None:
        outer, inner = authority.lock("r"), authority.lock("r", seal=aengine)
        async with outer as token, inner as again:
            assert again == token
            assert fence_of(database, "r") == token
            newer = await outer.aio.remint()
            assert fence_of(database, "r") == newer
        async with outer as token:
            with database.begin() as connection:
                high = update(FENCES).values(last_fencing_token=token)
                connection.execute(high, execution_options=PLAIN)
            with pytest.raises(LockError, match="did not seal it"):
                await inner.aio.acquire()
            with pytest.raises(TypeError, match="AsyncEngine"):
                await authority.lock("r", seal=database).aio.acquire()
        await aengine.dispose()
        await authority.aio.close()

    asyncio.run(main())


def test_engine_must_suit_the_block(authority: Redlock, database: Engine, aengine: AsyncEngine) -> None:
    """A blocking engine under `async with`, an asyncio engine under `with`: nothing is acquired."""
    with pytest.raises(TypeError, match="AsyncEngine"):
        authority.lock("r", seal=aengine).acquire()

    async def main() -> None:
        with pytest.raises(TypeError, match="AsyncEngine"):
            async with authority.lock("r", seal=database):
                pass
        await authority.aio.close()

    asyncio.run(main())
    with pytest.raises(TypeError, match="Engine"):
        fenced_lock("r", seal="sqlite://")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="connection of its own"):
        fenced_lock("r", seal=create_engine("sqlite://"))


def test_coroutines_seal(authority: Redlock, database: Engine, aengine: AsyncEngine, nodes: Nodes) -> None:
    """`async with`: hints, epochs, re-mints and the decorator, as in blocking code."""

    @fenced("r", seal=aengine, authority=authority)
    async def work() -> int:
        return fence_of(database, "r") or 0

    async def main() -> None:
        tokens = []
        for _ in range(3):
            lock = authority.lock("r", seal=aengine)
            async with lock as token:
                assert fence_of(database, "r") == token
                tokens += [token, await lock.aio.remint()]
                assert fence_of(database, "r") == tokens[-1]
            await asyncio.to_thread(forget, nodes)
        tokens.append(await work())
        with database.begin() as connection:
            high = update(FENCES).values(last_fencing_token=compose(4, 4))
            connection.execute(high, execution_options=PLAIN)
        async with authority.lock("r", seal=aengine) as token:
            tokens.append(token)
        assert tokens == sorted(set(tokens))
        assert tokens[-1] >> COUNTER_BITS == 5
        await aengine.dispose()
        await authority.aio.close()

    asyncio.run(main())


def test_decorator_seals(authority: Redlock, database: Engine) -> None:
    """`@fenced(…, seal=engine)` for functions."""

    @fenced("order:{number}", seal=database, authority=authority)
    def work(number: int) -> int | None:
        return fence_of(database, f"order:{number}")

    assert work(3) == 1


WORKER = """
import sys, time
from sqlalchemy import create_engine
from fencelock import Redlock, FencelockError
nodes, url, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
engine, end = create_engine(url), time.monotonic() + seconds
authority = Redlock(nodes, node_timeout=0.5, outage_grace=5)
while time.monotonic() < end:
    began = time.monotonic_ns()
    try:
        with authority.lock("r", ttl=5, timeout=5, if_lost="warn", seal=engine) as token:
            print(token, began, time.monotonic_ns(), flush=True)
    except FencelockError as error:
        print(error, file=sys.stderr)
        time.sleep(0.02)
"""


@pytest.mark.usefixtures("authority")
def test_tokens_are_unique_and_rise_while_all_nodes_forget_under_load(database: Engine, nodes: Nodes) -> None:
    """P1 and P2, from the log of three processes, while every node loses its memory again and again."""
    url = database.url.render_as_string(hide_password=False)
    command = [sys.executable, "-c", WORKER, ",".join(nodes.urls), url, "4"]
    root = str(Path(__file__).parent.parent)
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=root)
        for _ in range(3)
    ]
    for _ in range(4):
        time.sleep(0.9)
        forget(nodes)
    lines = [line.split() for worker in workers for line in worker.communicate(timeout=60)[0].splitlines()]
    log = sorted((int(token), int(began), int(ended)) for token, began, ended in lines)
    assert len(log) > 30
    assert len({token for token, _, _ in log}) == len(log)
    latest_start = 0
    for token, began, ended in log:  # nobody with a larger token had completed before this one began
        assert ended > latest_start, token
        latest_start = max(latest_start, began)
