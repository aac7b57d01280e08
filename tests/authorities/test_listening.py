"""PostgreSQL's calls reach a waiting client, also after its listening has failed or ended at a bad moment."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url

from fencelock import Database
from fencelock.authority.database import listening
from fencelock.authority.database.connections import Connections
from fencelock.authority.database.listening import Ear
from fencelock.errors import LockTimeoutError
from proof.servers import Postgres
from tests.conftest import ReusedDatabase
from tests.polling import eventually
from tests.silence import Proxy


@pytest.fixture
def url(postgres_database: ReusedDatabase) -> Iterator[str]:
    """The URL of a database in which another client holds `r`."""
    with Database(postgres_database.url) as holder:
        holder.init()
        holder.acquire(("r",), ttl=60.0, timeout=1.0)
        yield postgres_database.url
    postgres_database.empty()


def wait_in_vain(client: Database, timeout: float) -> None:
    """Wait for what another holds."""
    with pytest.raises(LockTimeoutError):
        client.acquire(("r",), ttl=5.0, timeout=timeout)


def connections_of(url: str) -> int:
    """Return how many connections there are but the one that asks."""
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture
def slow_to_listen(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have what listens take a while to connect; tells that it has begun."""
    began = threading.Event()
    detached = Connections.detached

    def slowly(self: Connections, prepare: Any) -> Any:
        began.set()
        time.sleep(0.3)
        return detached(self, prepare)

    monkeypatch.setattr(Connections, "detached", slowly)
    return began


def test_a_client_that_is_closed_while_it_begins_to_listen_connects_no_more(
    url: str, slow_to_listen: threading.Event
) -> None:
    before, running = connections_of(url), set(threading.enumerate())
    with Database(url) as client:
        while not slow_to_listen.is_set():  # the first look may take until the timeout
            wait_in_vain(client, 0.1)
        listeners = [each for each in set(threading.enumerate()) - running if "fencelock" not in each.name]
        assert listeners
    for thread in listeners:
        thread.join(30.0)
    assert eventually(lambda: connections_of(url) == before)


def test_a_client_that_is_closed_before_it_begins_to_listen_connects_no_more(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = connections_of(url)
    start = threading.Thread.start
    held_back: list[threading.Thread] = []

    def hold_back(self: threading.Thread) -> None:
        if self.name.startswith("fencelock-"):
            start(self)
        else:
            held_back.append(self)

    monkeypatch.setattr(threading.Thread, "start", hold_back)
    with Database(url) as client:
        while not held_back:  # the first look may take until the timeout
            wait_in_vain(client, 0.5)
    for thread in held_back:
        start(thread)
        thread.join(30.0)
    assert eventually(lambda: connections_of(url) == before)


@pytest.mark.filterwarnings("error")
def test_a_client_that_cannot_listen_looks(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = connections_of(url)

    def refuse(*_: object) -> None:
        raise psycopg.OperationalError("no LISTEN here")

    monkeypatch.setattr(Ear, "_listen", refuse)
    with Database(url) as client:
        wait_in_vain(client, 0.4)
    gc.collect()
    assert eventually(lambda: connections_of(url) == before)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg_async"])
@pytest.mark.filterwarnings("error")
@pytest.mark.timed
def test_a_loop_closes_a_client_that_begins_to_listen_meanwhile(url: str, driver: str) -> None:
    """The client closes at once, though a caller still waits."""

    async def main() -> float:
        client = Database(url.replace("psycopg", driver)).aio
        waiting = asyncio.ensure_future(client.acquire(("r",), ttl=5.0, timeout=3.0))
        took = 0.0
        for _ in range(40):
            await asyncio.sleep(0)
        began = time.monotonic()
        await client.close()
        took = time.monotonic() - began
        with pytest.raises(LockTimeoutError):
            await waiting
        await client.close()
        return took

    assert asyncio.run(main()) < 2.5
    gc.collect()


@pytest.mark.long
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "psycopg_async"])
def test_a_listening_connection_that_went_silent_is_replaced(
    url: str, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    """A firewall has forgotten it. The client calls itself now and then, and does not hear that."""
    monkeypatch.setattr(listening, "_AGAIN", 0.5, raising=False)
    proxy = Proxy(make_url(url))
    named = proxy.url.set(drivername=f"postgresql+{driver}")
    client = Database(named.render_as_string(hide_password=False))

    async def soon(condition: Callable[[], bool]) -> bool:
        return await asyncio.to_thread(eventually, condition)

    async def main() -> None:
        waiting = asyncio.ensure_future(client.aio.acquire(("r",), ttl=5.0, timeout=None))
        queues = client.aio._authority.loop_end().here
        assert await soon(lambda: queues.hears)
        proxy.silence_open()
        assert await soon(lambda: not queues.hears)
        waiting.cancel()
        queues._listens_again = 0.0
        await asyncio.sleep(0.5)
        with pytest.raises(LockTimeoutError):
            await client.aio.acquire(("r",), ttl=5.0, timeout=0.1)
        assert await soon(lambda: queues.hears)
        await client.aio.close()

    def block() -> None:
        waiting = threading.Thread(target=wait_in_vain, args=(client, 5.0), daemon=True)
        waiting.start()
        queues = client._queues
        assert eventually(lambda: queues.hears)
        proxy.silence_open()
        assert eventually(lambda: not queues.hears)
        waiting.join(10.0)
        queues._listens_again = 0.0
        wait_in_vain(client, 0.1)
        assert eventually(lambda: queues.hears)

    try:
        block() if driver == "psycopg" else asyncio.run(main())
    finally:
        client.close()
        proxy.close()


def test_names_are_called_in_the_letters_of_the_database(postgres: Postgres) -> None:
    url = postgres.create_database()
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(
            "CREATE DATABASE fencelock_latin ENCODING LATIN1 LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        )
    latin = make_url(url).set(database="fencelock_latin").render_as_string(hide_password=False)
    with Database(latin) as holder, Database(latin) as client:
        holder.init()
        grant = holder.acquire(("für",), ttl=60.0, timeout=1.0)
        got: list[float] = []

        def wait() -> None:
            client.acquire(("für",), ttl=5.0, timeout=40.0)
            got.append(time.monotonic())

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        assert eventually(lambda: client._queues.hears)
        holder.release(grant)
        waiting.join(30.0)
        assert got
        assert client._queues.hears
