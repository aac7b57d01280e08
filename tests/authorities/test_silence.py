"""A silent server, network or proxy delays a call for a limited time, and no lease stays behind.

So it is with databases, nodes, etcd and ZooKeeper. A limit is of seconds, and a silence would last for ever.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Final

import pytest
from sqlalchemy import NullPool, create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from fencelock import (
    AuthorityError,
    Database,
    FencedLock,
    LockLostError,
    LockTimeoutError,
    QuorumError,
    Redlock,
)
from fencelock._locking import factory_of
from fencelock.authority.hosts import parse, shown
from proof.servers import Nodes, Postgres
from proof.torture.doubt import waiting_for_a_standby
from tests.authorities.faces import AsyncFace, Face, Loop, is_held
from tests.conftest import ReusedDatabase, mariadb_database
from tests.polling import eventually
from tests.silence import Proxy

#: Seconds by which a busy machine may be late.
LATE: Final = 8.0


class Scene:
    """A client behind proxies that can go silent, and another one past them.

    Attributes:
        through: the URL through the proxies.
        face: a client of that URL, with an open connection.
        beside: the other client.
        ttl: of long leases; a session of ZooKeeper limits it.
    """

    def __init__(self, proxies: Sequence[Proxy], silent: int, through: str, beside: Any, ttl: float) -> None:
        self._proxies, self._silent = proxies, silent
        self.through, self.beside, self.ttl = through, Face(beside), ttl
        self.face = self.beside

    def silence_open(self) -> None:
        """Let the connections that are open be silent for ever. New ones work."""
        for each in self._proxies[: self._silent]:
            each.silence_open()

    def silence(self) -> None:
        """Let the servers, or a majority of nodes, be silent until `speak`."""
        for each in self._proxies[: self._silent]:
            each.silence()

    def speak(self) -> None:
        """Pass on what was held back, and whatever comes."""
        for each in self._proxies:
            each.speak()

    @contextmanager
    def used_by(self, authority: Any, world: str) -> Iterator[None]:
        """Have a client through the proxies."""
        with authority:
            loop = Loop() if world == "asyncio" else None
            self.face = Face(authority) if loop is None else AsyncFace(authority, loop)
            self.face.release(self.face.acquire("warm", ttl=2.0))
            yield
            self.speak()
            if loop is not None:
                loop.run(authority.aio.close())
                loop.close()


def _of_database(request: pytest.FixtureRequest, stack: ExitStack, driver: str) -> Scene:
    if driver.startswith("postgresql"):
        database: ReusedDatabase = request.getfixturevalue("postgres_database")
        stack.callback(database.empty)
        url = database.url
    else:
        url = stack.enter_context(
            contextmanager(mariadb_database)(make_url(request.getfixturevalue("mariadb_url")))
        )
    authority = stack.enter_context(Database(url))
    authority.init()
    proxy = Proxy(make_url(url))
    stack.callback(proxy.close)
    through = proxy.url.set(drivername=driver).render_as_string(hide_password=False)
    return Scene([proxy], 1, through, authority, 60.0)


def _of_servers(request: pytest.FixtureRequest, stack: ExitStack, sort: str) -> Scene:
    url: str = request.getfixturevalue(f"{sort}_url")
    query = "?session_timeout=4" if sort == "zookeeper" else ""
    hosts = parse(url, (sort,), 1, ())
    proxies = [Proxy(make_url(f"x://{shown(each)}")) for each in hosts.addresses]
    for each in proxies:
        stack.callback(each.close)
    addresses = ",".join(f"{each.url.host}:{each.url.port}" for each in proxies)
    made: Any = factory_of(url)(url)
    beside = stack.enter_context(made)
    through = f"{sort}://{addresses}/{hosts.root}{query}"
    return Scene(proxies, len(proxies), through, beside, 4.0 if sort == "zookeeper" else 60.0)


def _of_nodes(request: pytest.FixtureRequest, stack: ExitStack, _: str) -> Scene:
    nodes: Nodes = request.getfixturevalue("nodes")
    beside = stack.enter_context(Redlock(nodes.urls[:3]))
    beside.init(base=0)
    proxies = [Proxy(make_url(url)) for url in nodes.urls[:3]]
    for each in proxies:
        stack.callback(each.close)
    through = ",".join(each.url.render_as_string(hide_password=False) for each in proxies)
    return Scene(proxies, 2, through, beside, 60.0)


MAKERS: Final = {"nodes": _of_nodes, "etcd": _of_servers, "zookeeper": _of_servers}


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """Of a sort or a driver, a world, and perhaps "engine": then the client has an engine, and not a URL."""
    name, world, *by = request.param.split(", ")
    with ExitStack() as stack:
        made = MAKERS.get(name, _of_database)(request, stack, name)
        authority: Any
        if by:
            is_async = make_url(made.through).get_dialect().is_async
            authority = Database((create_async_engine if is_async else create_engine)(made.through))
        else:
            authority = factory_of(made.through)(made.through)
        if world:
            stack.enter_context(made.used_by(authority, world))
        yield made


DATABASES: Final = (
    "postgresql+psycopg, blocking",
    "postgresql+psycopg, asyncio",
    "postgresql+asyncpg, asyncio",
    "postgresql+psycopg_async, asyncio",
    "mysql+pymysql, blocking",
    "mysql+aiomysql, asyncio",
    "mysql+asyncmy, asyncio",
    "postgresql+psycopg, blocking, engine",
    "postgresql+asyncpg, asyncio, engine",
)
SERVERS: Final = ("etcd, blocking", "etcd, asyncio", "zookeeper, blocking", "zookeeper, asyncio")
NODES: Final = ("nodes, blocking", "nodes, asyncio")
each_scene = pytest.mark.parametrize("scene", [*DATABASES, *SERVERS, *NODES], indirect=True)


def took(call: Callable[[], object]) -> float:
    """Return for how many seconds a call took."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


def is_free_soon(face: Face) -> bool:
    return eventually(lambda: not is_held(face, "r"))


@pytest.mark.long
@pytest.mark.parametrize("scene", DATABASES, indirect=True)
def test_a_connection_that_went_silent_is_replaced_within_one_acquisition(scene: Scene) -> None:
    """A firewall has forgotten it; the server lives."""
    scene.silence_open()
    assert took(lambda: scene.face.release(scene.face.acquire("r", timeout=10.0))) < 10.0


@pytest.mark.long
@pytest.mark.parametrize("scene", [*SERVERS, *NODES], indirect=True)
def test_connections_that_went_silent_are_replaced(scene: Scene) -> None:
    def is_granted() -> bool:
        try:
            scene.face.release(scene.face.acquire("r", ttl=2.0, timeout=2.0))
        except AuthorityError:
            return False
        return True

    scene.silence_open()
    assert eventually(is_granted)


@pytest.mark.long
@pytest.mark.timed
@each_scene
def test_a_timeout_holds_beside_a_silent_server(scene: Scene) -> None:
    """Nothing is left of the acquisition once the server speaks again, though its words arrive then."""

    def acquire() -> None:
        with pytest.raises(AuthorityError) as caught:
            scene.face.acquire("r", ttl=scene.ttl, timeout=2.0)
        assert scene.through.startswith("redis") or "did not answer" in str(caught.value)

    scene.silence()
    assert 0.9 < took(acquire) < 2.0 + LATE
    scene.speak()
    assert is_free_soon(scene.beside)


@pytest.mark.long
@pytest.mark.timed
@each_scene
def test_a_release_that_meets_a_silence_comes_when_it_ends(scene: Scene) -> None:
    """Long before the end of the lease; the caller does not wait for it."""

    def release() -> None:
        if scene.through.startswith("redis"):
            with suppress(AuthorityError):
                assert scene.face.release(grant) is None
        else:
            with pytest.raises(QuorumError, match=r"released when the (database|servers) answer"):
                scene.face.release(grant)

    grant = scene.face.acquire("r", ttl=scene.ttl)
    scene.silence()
    assert took(release) < 2.0 + LATE
    scene.speak()
    assert is_free_soon(scene.beside)


@pytest.mark.long
@pytest.mark.timed
@each_scene
def test_a_lost_lease_is_told_by_the_clock(scene: Scene) -> None:
    told, left = list[float](), list[float]()
    authority: Any = scene.face.client
    lock: FencedLock[int] = FencedLock(("r",), lambda: authority, ttl=3.0)
    lock.on_lost(lambda _lease: told.append(time.monotonic()))

    def body() -> None:
        scene.silence()
        assert eventually(lambda: bool(told))
        left.append(time.monotonic())

    async def task() -> None:
        async with lock:
            await asyncio.to_thread(body)

    def block() -> None:
        with lock:
            body()

    began = time.monotonic()
    with pytest.raises(LockLostError):
        scene.face.loop.run(task()) if isinstance(scene.face, AsyncFace) else block()
    assert 2.5 < told[0] - began < 3.0 + LATE
    assert time.monotonic() - left[0] < 2.0 + LATE


@pytest.mark.timed
@pytest.mark.parametrize(
    "scene",
    [
        "postgresql+psycopg, ",
        "mysql+pymysql, ",
        *(pytest.param(f"{sort}, ", marks=pytest.mark.long) for sort in MAKERS),
    ],
    indirect=True,
)
def test_a_process_ends_beside_a_silent_server(scene: Scene) -> None:
    """Though it holds a lock, and has threads that renew it."""
    program = """
        import sys, time, fencelock
        lock = fencelock.configure(sys.argv[1]).lock("r", ttl=30)
        lock.acquire()
        print("held", flush=True)
        sys.stdin.readline()
        print(time.time())
    """
    url = scene.through.replace("session_timeout=4", "session_timeout=30")
    command = [sys.executable, "-c", textwrap.dedent(program), url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        scene.silence()
        said, _ = process.communicate("end\n", timeout=60)
    # Early Python 3.12 starts no thread at the end of a process, so that only PyMySQL's own limit counts.
    longest = 10.0 if "pymysql" in url and sys.version_info[:2] == (3, 12) else 0.0
    assert time.time() - float(said) < longest + 4.0 + LATE
    assert process.returncode == 0


@pytest.mark.parametrize("scene", ["postgresql+asyncpg, "], indirect=True)
def test_what_a_loop_left_owed_is_released_by_the_next(scene: Scene) -> None:
    """A loop that ends waits for no server. An owed release is sent again as soon as another one is owed."""
    with Database(scene.through) as authority:

        async def release_in_vain(resource: str) -> None:
            grant = await authority.aio.acquire((resource,), ttl=60, timeout=2)
            scene.silence()
            with pytest.raises(QuorumError, match="released when the database answers"):
                await authority.aio.release(grant)

        async def release_twice() -> None:
            await release_in_vain("second")
            scene.speak()
            while is_held(scene.beside, "first") or is_held(scene.beside, "second"):  # noqa: ASYNC110 - of another
                await asyncio.sleep(0.1)

        asyncio.run(release_in_vain("first"))
        scene.speak()
        assert is_held(scene.beside, "first")
        asyncio.run(asyncio.wait_for(release_twice(), 40))


HoldUp = tuple[Face, Callable[[], AbstractContextManager[None]]]


@pytest.fixture
def hold_up() -> Iterator[HoldUp]:
    """A client of a server of this test, and a block in which COMMITs of grants wait for a standby."""
    with Postgres(settings={"synchronous_commit": "on"}) as server, Database(server.url) as authority:
        authority.init()
        face = Face(authority)
        face.release(face.acquire("r"))
        engine = create_engine(server.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as connection:

            @contextmanager
            def held_up() -> Iterator[None]:
                with waiting_for_a_standby(connection):
                    time.sleep(0.5)  # until the server has read its settings
                    yield

            yield face, held_up


@pytest.mark.long
def test_a_timeout_leaves_nothing_though_a_grant_comes_late(hold_up: HoldUp) -> None:
    face, held_up = hold_up
    with held_up(), pytest.raises(LockTimeoutError):
        face.acquire("r", ttl=60.0, timeout=4.0)
    assert is_free_soon(face)


@pytest.mark.long
def test_an_acquisition_does_not_wait_for_its_own_late_grant(hold_up: HoldUp) -> None:
    face, held_up = hold_up
    with ThreadPoolExecutor() as threads:
        with held_up():
            late = threads.submit(face.acquire, "r", ttl=60.0, timeout=50.0)
            time.sleep(4.0)
        assert took(late.result) < 2.0 + LATE


@pytest.mark.long
@pytest.mark.parametrize("scene", SERVERS, indirect=True)
def test_waiting_goes_on_behind_a_silence(scene: Scene) -> None:
    grant = scene.beside.acquire("r", ttl=scene.ttl)
    scene.silence_open()
    assert scene.beside.release(grant) is True
    got = scene.face.acquire("r", ttl=4.0, timeout=40.0)
    assert scene.face.release(got) is not False


@pytest.mark.long
@pytest.mark.parametrize("scene", ["zookeeper, "], indirect=True)
@pytest.mark.parametrize("later", [0.0, 0.6])
def test_what_is_closed_in_a_silence_connects_no_more(scene: Scene, later: float) -> None:
    """A release was being asked for, and could begin another session, which nothing would end."""

    def sessions() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "fencelock-zookeeper"}

    before = sessions()
    authority = factory_of(scene.through)(scene.through)
    authority.release(authority.acquire(("r",), ttl=2.0, timeout=1.0))
    scene.silence()
    with pytest.raises(QuorumError):
        authority.acquire(("r",), ttl=2.0, timeout=0.5)
    time.sleep(later)
    authority.close()
    scene.speak()
    assert eventually(lambda: sessions() <= before)
