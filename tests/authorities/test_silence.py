"""A silent server, network or proxy delays a call for a limited time, and no lease stays behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import pytest
from sqlalchemy import NullPool, create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from fencelock import Database, FencedLock, LockLostError, LockTimeoutError, QuorumError
from proof.servers import Postgres
from proof.torture.doubt import waiting_for_a_standby
from tests.authorities.faces import AsyncFace, BlockingFace, Face, Loop, is_held
from tests.polling import eventually
from tests.silence import Proxy

pytestmark = pytest.mark.timed

#: A driver, and the world that uses it.
DRIVERS: Final = (
    "postgresql+psycopg, blocking",
    "postgresql+psycopg, asyncio",
    "postgresql+asyncpg, asyncio",
    "postgresql+psycopg_async, asyncio",
    "mysql+pymysql, blocking",
    "mysql+aiomysql, asyncio",
    "mysql+asyncmy, asyncio",
)


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    """A proxy before a database with the table of leases."""
    with Database(database_url) as authority:
        authority.init()
    made = Proxy(make_url(database_url))
    yield made
    made.close()


@pytest.fixture
def beside(database_url: str, proxy: Proxy) -> Iterator[Face]:  # noqa: ARG001 - after its table
    """Another client, not through the proxy."""
    with Database(database_url) as authority:
        yield BlockingFace(authority)


def made_of(proxy: Proxy, driver: str, by: str) -> Database:
    """Return an authority through the proxy, of a URL or of an engine."""
    url = proxy.url.set(drivername=driver)
    if by == "URL":
        return Database(url.render_as_string(hide_password=False))
    is_async = url.get_dialect().is_async
    return Database(create_async_engine(url) if is_async else create_engine(url))


@pytest.fixture
def face(request: pytest.FixtureRequest, proxy: Proxy) -> Iterator[Face]:
    """A client through the proxy, with an open connection."""
    driver, world, by = request.param
    with made_of(proxy, driver, by) as authority:
        loop = Loop() if world == "asyncio" else None
        made: Face = BlockingFace(authority) if loop is None else AsyncFace(authority, loop)
        made.release(made.acquire("warm"))
        yield made
        proxy.speak()
        if loop is not None:
            loop.run(authority.aio.close())
            loop.close()


#: Where each of them is tried.
_DATABASES: Final = {"postgresql": "postgresql", "mysql": "mariadb"}

RunLock = Callable[[Face, FencedLock[int], Callable[[], float]], float]


@pytest.fixture
def run_lock() -> RunLock:
    """Run a body under a lock that is lost meanwhile, in the world of the face; return what it returned."""

    def run(face: Face, lock: FencedLock[int], body: Callable[[], float]) -> float:
        returned: list[float] = []

        async def main() -> None:
            async with lock:
                returned.append(await asyncio.to_thread(body))

        def block() -> None:
            with lock:
                returned.append(body())

        with pytest.raises(LockLostError):
            face.loop.run(main()) if isinstance(face, AsyncFace) else block()
        return returned[0]

    return run


def _each_driver(function: Callable[..., None]) -> Callable[..., None]:
    """Take a test with each driver by its URL, and with one of each world by an engine."""
    pairs = [(*name.split(", "), "URL") for name in DRIVERS]
    pairs += [("postgresql+psycopg", "blocking", "engine"), ("postgresql+asyncpg", "asyncio", "engine")]
    cases = [pytest.param(_DATABASES[pair[0].partition("+")[0]], pair, id=" ".join(pair)) for pair in pairs]
    parametrized: Callable[..., None]
    parametrized = pytest.mark.parametrize(("database_url", "face"), cases, indirect=True)(function)
    return parametrized


def took(call: Callable[[], object]) -> float:
    """Return for how many seconds a call took."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


@pytest.mark.long
@_each_driver
def test_connection_that_went_silent_is_replaced(face: Face, proxy: Proxy) -> None:
    """A firewall has forgotten it; the server lives. The acquisition comes within its timeout."""
    proxy.silence_open()
    assert took(lambda: face.release(face.acquire("r", timeout=2.0))) < 2.0


@pytest.mark.long
@_each_driver
def test_timeout_holds_beside_a_silent_server(face: Face, proxy: Proxy, beside: Face) -> None:
    """Nothing is left of the acquisition once the server speaks again, though its words arrive then."""

    def acquire() -> None:
        with pytest.raises(QuorumError, match="did not answer"):
            face.acquire("r", timeout=2.0)

    proxy.silence()
    assert 0.9 < took(acquire) < 2.7
    proxy.speak()
    assert eventually(lambda: not is_held(beside, "r"))


@pytest.mark.long
@_each_driver
def test_release_that_meets_a_silence_comes_when_it_ends(face: Face, proxy: Proxy, beside: Face) -> None:
    """Long before the end of the lease; the caller does not wait for it."""

    def release() -> None:
        with pytest.raises(QuorumError, match="released when the database answers"):
            face.release(grant)

    grant = face.acquire("r", ttl=60.0)
    proxy.silence()
    assert took(release) < 2.7
    assert is_held(beside, "r")
    proxy.speak()
    assert eventually(lambda: not is_held(beside, "r"))


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_what_a_loop_left_owed_is_released_by_the_next(proxy: Proxy, beside: Face) -> None:
    """A loop that ends waits for no server.

    An owed release is sent again as soon as another release is owed.
    """
    with made_of(proxy, "postgresql+asyncpg", "URL") as authority:

        async def release_in_vain(resource: str) -> None:
            grant = await authority.aio.acquire((resource,), ttl=60, timeout=2)
            proxy.silence()
            with pytest.raises(QuorumError, match="released when the database answers"):
                await authority.aio.release(grant)

        async def release_twice() -> None:
            await release_in_vain("second")
            proxy.speak()
            while is_held(beside, "first") or is_held(beside, "second"):  # noqa: ASYNC110 - of another client
                await asyncio.sleep(0.1)

        asyncio.run(release_in_vain("first"))
        proxy.speak()
        assert is_held(beside, "first")
        asyncio.run(asyncio.wait_for(release_twice(), 20))


@pytest.fixture
def hold_up() -> Iterator[tuple[Face, Callable[[], AbstractContextManager[None]]]]:
    """A client of a server of this test, and a block in which COMMITs of grants wait for a standby."""
    with Postgres(settings={"synchronous_commit": "on"}) as server, Database(server.url) as authority:
        authority.init()
        face = BlockingFace(authority)
        face.release(face.acquire("r"))
        engine = create_engine(server.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as connection:

            @contextmanager
            def held_up() -> Iterator[None]:
                with waiting_for_a_standby(connection):
                    time.sleep(0.5)  # until the server has read its settings
                    yield

            yield face, held_up


HoldUp = tuple[Face, Callable[[], AbstractContextManager[None]]]


@pytest.mark.long
def test_timeout_leaves_nothing_though_a_grant_comes_late(hold_up: HoldUp) -> None:
    """The statement was hung up and sent again, and the second one met the row lock of the first."""
    face, held_up = hold_up
    with held_up(), pytest.raises(LockTimeoutError):
        face.acquire("r", ttl=60.0, timeout=4.0)
    assert eventually(lambda: not is_held(face, "r"))
    assert took(lambda: face.acquire("r", timeout=5.0)) < 5.0


@pytest.mark.long
def test_acquisition_does_not_wait_for_its_own_late_grant(hold_up: HoldUp) -> None:
    """What holds the lock is a statement that it has sent itself."""
    face, held_up = hold_up
    with ThreadPoolExecutor() as threads:
        with held_up():
            late = threads.submit(face.acquire, "r", ttl=60.0, timeout=30.0)
            time.sleep(4.0)
        assert took(late.result) < 3.0


@pytest.mark.long
@_each_driver
def test_lost_lease_is_told_by_the_clock(face: Face, proxy: Proxy, run_lock: RunLock) -> None:
    """The renewal has no answer. The callback hears of the end in time, and the block is left in time."""
    check_lost_lease(face, proxy.silence, run_lock)


def check_lost_lease(face: Face, silence: Callable[[], None], run_lock: RunLock) -> None:
    """Let a silence end a lease, and check when the callback and the block hear of the end."""
    told: list[float] = []
    authority: Any = face.client
    lock: FencedLock[int] = FencedLock(("r",), lambda: authority, ttl=3.0)
    lock.on_lost(lambda _lease: told.append(time.monotonic()))

    def body() -> float:
        silence()
        assert eventually(lambda: bool(told))
        return time.monotonic()

    began = time.monotonic()
    leaving = run_lock(face, lock, body)
    assert told[0] - began < 4.0  # 3.1 where nothing else runs
    assert time.monotonic() - leaving < 2.7


@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
def test_process_ends_beside_a_silent_server(proxy: Proxy) -> None:
    """Though it holds a lock, and has threads that renew it."""
    # Early Python 3.12 starts no thread at the end of a process, so that only PyMySQL's own limit counts.
    longest = 14.0 if proxy.url.drivername == "mysql+pymysql" and sys.version_info[:2] == (3, 12) else 4.0
    check_end_of_process(proxy.silence, proxy.url.render_as_string(hide_password=False), longest)


def check_end_of_process(silence: Callable[[], None], url: str, longest: float = 4.0) -> None:
    """Have a silence begin while a process holds a lock, and see how long it takes to end."""
    program = """
        import sys, time, fencelock
        lock = fencelock.configure(sys.argv[1]).lock("r", ttl=30)
        lock.acquire()
        print("held", flush=True)
        sys.stdin.readline()
        print(time.time())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    silence()
    said, _ = process.communicate("end\n", timeout=30)
    assert time.time() - float(said) < longest
    assert process.returncode == 0
