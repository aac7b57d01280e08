"""Every authority on every server there is, with every driver: how a test makes clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from sqlalchemy import make_url

from fencelock import Database, Etcd, Redlock, ZooKeeper
from proof.servers import Nodes
from tests.authorities.faces import Client
from tests.conftest import ReusedDatabase, mariadb_database


@dataclass(frozen=True, slots=True)
class Kind:
    """One authority on one server, by one driver.

    Attributes:
        name: of all three.
        make: returns a new client, with connections of its own, on the same server.
        url: what `fencelock.configure` takes in a child process.
        mortal: the same for a process that is killed: its locks are free soon.
        late: seconds by which the server may end a lease late, if its holder does not.
        most: the most resources of one lock.
    """

    name: str
    make: Callable[[], Client]
    url: str
    mortal: str = ""
    late: float = 0.0
    most: int = 5000


#: Takes the fixtures of a test; the kind is over when its generator is.
Maker = Callable[[pytest.FixtureRequest], Iterator[Kind]]


def _quorum(count: int) -> Maker:
    def make(request: pytest.FixtureRequest) -> Iterator[Kind]:
        nodes: Nodes = request.getfixturevalue("nodes")
        urls = nodes.urls[:count]
        with Redlock(urls) as first:
            first.init(base=0)
        yield Kind(f"{count} nodes", lambda: Redlock(urls), ",".join(urls))

    return make


def _database(driver: str, urls: Callable[[pytest.FixtureRequest], Iterator[str]]) -> Maker:
    """Return what makes a kind of a database, which `urls` gives with a driver for blocking code."""

    def make(request: pytest.FixtureRequest) -> Iterator[Kind]:
        for blocking in urls(request):
            with Database(blocking) as first:
                first.init()
            url = make_url(blocking).set(drivername=driver).render_as_string(hide_password=False)
            yield Kind(driver, lambda url=url: Database(url), url)  # type: ignore[misc]

    return make


def _etcd(request: pytest.FixtureRequest) -> Iterator[Kind]:
    url: str = request.getfixturevalue("etcd_url")
    # Whole seconds, two at least, and it looks twice a second.
    yield Kind("etcd", lambda: Etcd(url), url, late=3.0, most=40)


def _zookeeper(request: pytest.FixtureRequest) -> Iterator[Kind]:
    url: str = request.getfixturevalue("zookeeper_url")
    # A process that has died holds until its session ends.
    long, mortal = (f"{url}?session_timeout={seconds}" for seconds in (150, 2))
    yield Kind("zookeeper", lambda: ZooKeeper(long), long, mortal, late=3.0, most=500)


def _of_sqlite(request: pytest.FixtureRequest) -> Iterator[str]:
    folder: Path = request.getfixturevalue("tmp_path")
    yield f"sqlite:///{folder / 'app.db'}"


def _of_postgresql(request: pytest.FixtureRequest) -> Iterator[str]:
    database: ReusedDatabase = request.getfixturevalue("postgres_database")
    yield database.url
    database.empty()


def _of_mariadb(request: pytest.FixtureRequest) -> Iterator[str]:
    return mariadb_database(make_url(request.getfixturevalue("mariadb_url")))


#: Those that serve both worlds: a blocking driver is used by asyncio in threads.
_BLOCKING: Final[dict[str, Maker]] = {
    "quorum": _quorum(5),
    "one-node": _quorum(1),
    "postgresql": _database("postgresql+psycopg", _of_postgresql),
    "mariadb": _database("mysql+pymysql", _of_mariadb),
    "sqlite": _database("sqlite", _of_sqlite),
    "etcd": _etcd,
    "zookeeper": _zookeeper,
}
#: Those that serve asyncio only.
_ASYNCIO: Final[dict[str, Maker]] = {
    "asyncpg": _database("postgresql+asyncpg", _of_postgresql),
    "psycopg_async": _database("postgresql+psycopg_async", _of_postgresql),
    "aiomysql": _database("mysql+aiomysql", _of_mariadb),
    "asyncmy": _database("mysql+asyncmy", _of_mariadb),
    "aiosqlite": _database("sqlite+aiosqlite", _of_sqlite),
}
MAKERS: Final = _BLOCKING | _ASYNCIO
#: One of each sort, by its name alone; the second in tasks.
SORTS: Final = tuple(_BLOCKING)
SORTS_IN_TASKS: Final = ("quorum", "asyncpg", "aiomysql", "aiosqlite", "etcd", "zookeeper")

#: A kind and a world that can use it, as the fixture `stage` takes them.
BLOCKING: Final = tuple(f"{name}, blocking" for name in _BLOCKING)
EVERYWHERE: Final = (*BLOCKING, *(f"{name}, asyncio" for name in MAKERS))
#: Each sort once, in either world: drivers and worlds of one server say the same to it.
EACH_SORT: Final = (
    *("quorum, blocking", "postgresql, blocking", "aiomysql, asyncio"),
    *("sqlite, blocking", "etcd, asyncio", "zookeeper, blocking"),
)
#: The same in the other world.
EACH_SORT_TOO: Final = (
    *("one-node, asyncio", "asyncpg, asyncio", "mariadb, blocking"),
    *("aiosqlite, asyncio", "etcd, blocking", "zookeeper, asyncio"),
)
IN_PROCESSES: Final = tuple(name for name in BLOCKING if not name.startswith("one-node"))
EACH_DATABASE: Final = ("postgresql, blocking", "asyncpg, asyncio", "aiomysql, asyncio", "sqlite, blocking")
#: Each that connects in a way of its own, in the worlds for which that is made: for what drivers do
#: differently, such as connections, threads, cancellations and the types of values.
IN_LOOPS: Final = (
    *("quorum, asyncio", "etcd, asyncio", "zookeeper, asyncio", "sqlite, asyncio"),
    *(f"{name}, asyncio" for name in _ASYNCIO),
)
EACH_DRIVER: Final = (*IN_PROCESSES, *(name for name in IN_LOOPS if name != "sqlite, asyncio"))
