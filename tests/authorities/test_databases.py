"""Leases in a database: its table, its pool, connections that end, and the first token."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, StaticPool, Table, create_engine, event, inspect, text
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.schema import CreateSchema
from sqlalchemy.util import await_only

import fencelock
from fencelock import (
    AuthorityError,
    Database,
    LeaseTableMissingError,
    LockLostError,
    LockTimeoutError,
    QuorumError,
    Redlock,
    fenced_lock,
    lease_table,
)
from fencelock.authority.database.connecting import Work
from fencelock.authority.database.connections import Lent
from fencelock.authority.database.statements import SET_UP, Statements
from fencelock.guard import trigger_sql
from fencelock.tokens import FORGED
from tests.authorities.children import run
from tests.conftest import ReusedDatabase
from tests.polling import eventually


@pytest.fixture
def authority(engine: Engine) -> Iterator[Database]:
    """An authority in an empty database, with its table."""
    with Database(engine) as made:
        made.init()
        yield made


on_postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
on_mariadb = pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
on_servers = pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)


@pytest.fixture
def on_server(engine: Engine) -> Engine:
    """An engine on PostgreSQL or MariaDB, as the test says."""
    return engine


@on_servers
def test_missing_table_is_named_with_what_makes_it(on_server: Engine) -> None:
    with Database(on_server) as authority, pytest.raises(LeaseTableMissingError) as caught:
        authority.acquire(("r",), ttl=30, timeout=0)
    assert "op.create_lease_table()" in str(caught.value)
    assert "fencelock init " in str(caught.value)
    with Database(on_server) as authority:
        assert authority.init() is True
        assert authority.init() is False
        assert authority.release(authority.acquire(("r",), ttl=30, timeout=2)) is True


@on_servers
def test_metadata_makes_the_table(on_server: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    assert lease_table(Base.metadata) is lease_table(Base.metadata)
    Base.metadata.create_all(on_server)
    with Database(on_server) as authority:
        assert authority.init() is False
        assert authority.release(authority.acquire(("r",), ttl=30, timeout=2)) is True


@on_postgresql
@pytest.mark.timed
def test_used_up_pool_keeps_no_lease_from_being_renewed(engine: Engine) -> None:
    """The authority has connections of its own."""
    small = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    with Database(small) as authority:
        authority.init()
        with small.connect(), fenced_lock("r", ttl=1.5, authority=authority) as token:
            time.sleep(2.0)
            with Database(engine) as other, pytest.raises(LockTimeoutError):
                other.acquire(("r",), ttl=30, timeout=0)
            assert token > 0
    small.dispose()


@pytest.fixture
def end_all(on_server: Engine) -> Iterator[Callable[[], None]]:
    """End all connections to the database, as a restart does, or a limit for idle ones."""
    with on_server.connect() as killer:

        def end() -> None:
            if on_server.dialect.name == "postgresql":
                killer.execute(
                    text(
                        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    )
                )
            else:
                others = text(
                    "SELECT id FROM information_schema.processlist WHERE db = database()"
                    " AND id <> connection_id()"
                )
                for number in killer.scalars(others).all():
                    killer.execute(text(f"KILL {number}"))

        yield end


@on_servers
def test_ended_connections_are_replaced(on_server: Engine, end_all: Callable[[], None]) -> None:
    with Database(on_server) as authority:
        authority.init()
        end_all()
        grant = authority.acquire(("r",), ttl=30, timeout=2)
        end_all()
        (extended,) = authority.extend_many([(grant, 10)])
        assert not isinstance(extended, Exception)
        end_all()
        assert authority.release(extended) is True
        several = authority.acquire(("a", "b"), ttl=30, timeout=2)
        end_all()
        assert authority.release(authority.remint(several, 5)) is True  # it is one transaction


@on_servers
def test_all_idle_connections_are_given_up_together(on_server: Engine, end_all: Callable[[], None]) -> None:
    """After a quiet night the first lock finds more dead connections than it makes tries."""
    with Database(on_server, pool_size=8) as authority:
        authority.init()
        meet = threading.Barrier(8)
        with authority.lock("held"), ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda number: _lock_together(authority, meet, number), range(8)))
        end_all()
        assert authority.release(authority.acquire(("r",), ttl=30, timeout=2)) is True
        end_all()
        authority.close()  # says nothing of connections that are gone


@pytest.fixture
def listened(on_server: Engine) -> Iterator[tuple[Engine, list[Any]]]:
    """An engine, and all connections that are opened with it, or on behalf of it."""
    opened: list[Any] = []
    engine = create_engine(on_server.url)
    event.listen(engine, "connect", lambda connection, _record: opened.append(connection))
    yield engine, opened
    engine.dispose()


Listened = tuple[Engine, list[Any]]


def are_closed(opened: list[Any]) -> bool:
    return all(each.closed if hasattr(each, "closed") else not each.open for each in opened)


@on_servers
def test_what_a_closed_authority_owes_opens_no_connection(
    listened: Listened, end_all: Callable[[], None]
) -> None:
    """Releases that a failover may have lost are sent again in the background; `close` ends that."""
    engine, opened = listened
    authority = Database(engine)
    authority.init()
    authority.release(authority.acquire(("r",), ttl=60, timeout=2))
    before = set(threading.enumerate())
    end_all()
    grant = authority.acquire(("s",), ttl=60, timeout=2)  # it finds its connection lost
    senders = [each for each in set(threading.enumerate()) - before if not each.name.startswith("fencelock")]
    assert senders
    authority.close()
    for each in senders:
        each.join(30)
    assert are_closed(opened)
    assert authority.release(grant) is True  # and the next use connects again
    authority.close()
    assert eventually(lambda: are_closed(opened))


@on_servers
def test_a_call_that_a_close_has_overtaken_leaves_no_connection(listened: Listened) -> None:
    engine, opened = listened
    authority = Database(engine)
    authority.init()

    def work(connection: Lent) -> int:
        authority.close()
        return int(connection.execute("SELECT 1").rows[0][0])

    assert authority.run(authority.asking(Work(work))) == 1
    assert authority.release(authority.acquire(("r",), ttl=60, timeout=2)) is True
    connections = authority._connections
    assert connections is not None
    authority.close()
    ended = time.monotonic() + 30.0
    assert connections.run(lambda lent: lent.execute("SELECT 1"), 2.0, ended).rows[0][0] == 1
    assert len(opened) > 2
    assert are_closed(opened)


@on_postgresql
def test_a_connection_that_nobody_waits_for_any_more_is_closed(
    listened: Listened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler has interrupted the caller while it was being opened."""
    engine, opened = listened
    with Database(engine) as authority:
        authority.init()
    before = set(threading.enumerate())

    result = Future.result

    def interrupt(opened: Future[Any], *seconds: float) -> Any:
        if seconds:
            raise KeyboardInterrupt
        return result(opened)  # it was open already

    with Database(engine) as authority, monkeypatch.context() as patched:
        patched.setattr(Future, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            authority.acquire(("r",), ttl=60, timeout=0)
    for each in set(threading.enumerate()) - before:
        if each.name == "fencelock-connect":
            each.join(30)
    assert are_closed(opened)


@on_postgresql
def test_a_connection_that_ends_while_the_table_is_made_is_replaced(
    listened: Listened, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, opened = listened
    create, calls = Table.create, list[None]()

    def create_once_more(table: Table, connection: Connection, **options: Any) -> None:
        calls.append(None)
        if len(calls) == 1:
            connection.connection.driver_connection.close()  # type: ignore[union-attr]
        create(table, connection, **options)

    monkeypatch.setattr(Table, "create", create_once_more)
    with Database(engine) as authority:
        assert authority.init()
    assert len(calls) == 2
    assert are_closed(opened)


def _lock_together(authority: Database, meet: threading.Barrier, number: int) -> None:
    meet.wait(30)
    authority.release(authority.acquire((f"r{number}",), ttl=60, timeout=20))


@on_postgresql
def test_many_threads_use_few_connections(listened: Listened) -> None:
    """What finds none free waits for one."""
    engine, opened = listened
    with Database(engine) as authority:
        authority.init()
        meet = threading.Barrier(60)
        with ThreadPoolExecutor(60) as threads:
            list(threads.map(lambda number: _lock_together(authority, meet, number), range(60)))
        assert 1 < len(opened) <= 30  # 10 at a time; connections beyond 5 are closed in between


@pytest.mark.long
def test_a_server_has_to_allow_eleven_connections_for_each_process(postgres_database: ReusedDatabase) -> None:
    """So it is for any number of threads. docs/authorities.md gives the number for `max_connections`."""
    url, seen = postgres_database.url, list[int]()
    ask = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with Database(url) as authority:
        authority.init()
    looking = psycopg.connect(url.replace("+psycopg", ""), autocommit=True)
    with looking, ThreadPoolExecutor(2) as threads:
        running = [threads.submit(run, "lock_in_many_threads", url) for _ in range(2)]
        while not all(each.done() for each in running):
            seen.append(looking.execute(ask).fetchone()[0])  # type: ignore[index]
            time.sleep(0.01)
    assert all(each.result() > 30 for each in running)
    assert 10 < max(seen) <= 22 + 2  # a server process that ends is seen for a moment
    postgres_database.empty()


@on_servers
def test_an_engine_knows_its_server_whoever_connects_first(
    on_server: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first connection asks what the server is, once for the program's pool and the authority's."""
    engine, begun = create_engine(on_server.url), threading.Event()
    initialize = engine.dialect.initialize

    def slowly(connection: Connection) -> None:
        begun.set()
        time.sleep(0.2)
        initialize(connection)

    monkeypatch.setattr(engine.dialect, "initialize", slowly)
    with Database(on_server) as first:
        first.init()
    with Database(engine) as authority, ThreadPoolExecutor(1) as threads:
        granted = threads.submit(authority.acquire, ("r",), ttl=30, timeout=2)
        assert begun.wait(30)
        with engine.connect():
            assert engine.dialect.default_schema_name is not None
        authority.release(granted.result())
    engine.dispose()


@pytest.mark.parametrize(("database_url", "for_asyncio"), [("postgresql", 0), ("mariadb", 1)], indirect=True)
def test_an_engine_for_coroutines_knows_its_server_whoever_connects_first(
    on_server: Engine, for_asyncio: Callable[[Engine], AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, begun = for_asyncio(on_server), asyncio.Event()
    initialize = engine.dialect.initialize

    def slowly(connection: Connection) -> None:
        begun.set()
        await_only(asyncio.sleep(0.2))
        initialize(connection)

    monkeypatch.setattr(engine.dialect, "initialize", slowly)
    with Database(on_server) as first:
        first.init()

    async def main() -> None:
        with closing(Database(engine)) as authority:
            granting = asyncio.create_task(authority.aio.acquire(("r",), ttl=30, timeout=2))
            await begun.wait()
            async with engine.connect():
                assert engine.dialect.default_schema_name is not None
            await authority.aio.release(await granting)
            await authority.aio.close()
        await engine.dispose()

    asyncio.run(main())


@on_postgresql
def test_an_engine_is_taken_whole(on_server: Engine) -> None:
    prepared: list[object] = []
    plain = create_engine(on_server.url)
    event.listen(plain, "connect", lambda connection, _record: prepared.append(connection))
    with plain.begin() as connection:
        connection.execute(text("CREATE SCHEMA locks"))
    translated = plain.execution_options(schema_translate_map={None: "locks"})
    before = len(prepared)
    with Database(translated) as authority:
        authority.init()
        authority.release(authority.acquire(("r",), ttl=30, timeout=2))
    assert len(prepared) > before
    assert inspect(plain).has_table("fencelock_leases", schema="locks")
    assert not inspect(plain).has_table("fencelock_leases")
    plain.dispose()


@on_servers
def test_tables_made_by_several_at_once(on_server: Engine) -> None:
    with Database(on_server) as one, Database(on_server) as other, ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda number: (one, other)[number % 2].init(), range(8)))
    assert sum(made) <= 1
    assert inspect(on_server).has_table("fencelock_leases")


def test_many_names_are_one_release(authority: Database) -> None:
    names = tuple(f"r{number}" for number in range(1200))
    for _ in range(2):
        grant = authority.acquire(names, ttl=60, timeout=5)
        (extended,) = authority.extend_many([(grant, 60)])
        assert not isinstance(extended, Exception)
        assert authority.release(extended) is True


def test_holder_is_told_in_letters_that_every_database_has(
    authority: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table may have another character set, and a text that only informs fails no acquisition."""
    named = "fencelock.authority.database.releasing.name_of_process"
    monkeypatch.setattr(named, lambda _pid: "host 1 订单.py")
    authority.acquire(("r",), ttl=30, timeout=2)
    found = authority.inspect("r")
    assert found is not None
    assert found.holder is not None
    assert found.holder.program == r"\u8ba2\u5355.py"


def test_tokens_begin_above_what_a_storage_has_seen(authority: Database) -> None:
    authority.release(authority.acquire(("old",), ttl=30, timeout=2))
    highest = (300 << 44) + 12345
    authority.init(above=highest)
    first = authority.acquire(("other",), ttl=30, timeout=2).tokens[0]
    for name in ("old", "new"):
        grant = authority.acquire((name,), ttl=30, timeout=2)
        assert grant.tokens[0] > highest
        authority.release(grant)
    authority.init(above=highest)
    # The time goes on: a day is added once.
    assert 0 <= authority.acquire(("old",), ttl=30, timeout=2).tokens[0] - first < 60_000 << 10


def test_a_base_that_no_use_explains_is_ignored(authority: Database, engine: Engine) -> None:
    """Another program has written it; rows would be closed for good."""
    authority.init(above=(300 << 44))
    first = authority.acquire(("r",), ttl=30, timeout=2).tokens[0]
    with the_leases(engine) as connection:
        forge = text("UPDATE fencelock_leases SET token = :token WHERE resource = ''")
        connection.execute(forge, {"token": FORGED - 1})
    assert authority.acquire(("half",), ttl=30, timeout=2).tokens[0] > FORGED
    with the_leases(engine) as connection:
        connection.execute(forge, {"token": 2**63 - 2**51})
    assert authority.acquire(("s",), ttl=30, timeout=2).tokens[0] < first
    for above in (None, FORGED):
        with pytest.raises(ValueError, match="no use explains"):
            authority.init(above=above)


@on_mariadb
@pytest.mark.parametrize("driver", ["pymysql", "aiomysql", "asyncmy"])
def test_a_character_set_without_all_names_is_refused(engine: Engine, driver: str) -> None:
    """Where the server is not strict, it would store "?" for other characters, which names another lock."""
    pytest.importorskip(driver)
    url = engine.url.set(drivername=f"mysql+{driver}").update_query_dict({"charset": "utf8"})

    async def lock(authority: Database) -> None:
        async with authority.lock("user:😀", ttl=5):
            raise AssertionError

    with pytest.raises(AuthorityError, match="charset=utf8mb4"):
        asyncio.run(lock(Database(url)))


@contextmanager
def the_leases(engine: Engine) -> Iterator[Connection]:
    """Change the table of leases, which is a file of its own on SQLite."""
    sqlite = engine.dialect.name == "sqlite"
    leases = create_engine(f"sqlite:///{engine.url.database}-leases") if sqlite else engine
    with leases.begin() as connection:
        yield connection
    if sqlite:
        leases.dispose()


def test_tokens_follow_the_clock(authority: Database) -> None:
    before = time.time() * 1000
    tokens = [authority.acquire((name,), ttl=30, timeout=2).tokens[0] for name in ("a", "b")]
    assert before - 1000 < tokens[0] >> 10 <= tokens[1] >> 10 < before + 60_000
    assert tokens[0] & 1023 == tokens[1] & 1023
    assert tokens[1] < 2**53


def test_many_rows_go_in_batches(authority: Database, engine: Engine) -> None:
    """A statement for all of them would stop locks, on SQLite each one of the file."""
    authority.init()
    rows = [{"resource": f"order:{number:05}"} for number in range(4500)]
    with the_leases(engine) as connection:
        connection.execute(text("INSERT INTO fencelock_leases (resource, token) VALUES (:resource, 1)"), rows)
    authority.acquire(("order:02000",), ttl=60, timeout=2)
    assert authority.prune(3600) == 4499
    with the_leases(engine) as connection:
        assert connection.scalars(text("SELECT resource FROM fencelock_leases")).all() == ["order:02000"]


def test_rows_that_nothing_needs_can_go(authority: Database, engine: Engine) -> None:
    authority.init(above=(300 << 44))
    long_ago = authority.acquire(("free",), ttl=60, timeout=2)
    authority.release(long_ago)
    authority.acquire(("held",), ttl=60, timeout=2)
    recent = authority.acquire(("recent",), ttl=60, timeout=2)
    authority.release(recent)
    with the_leases(engine) as connection:
        older = text("UPDATE fencelock_leases SET token = token - :age WHERE resource IN ('free', 'held')")
        connection.execute(older, {"age": (2 * 3_600_000) << 10})
    assert authority.prune(3600) == 1
    with the_leases(engine) as connection:
        assert set(connection.scalars(text("SELECT resource FROM fencelock_leases"))) == {
            "",
            "held",
            "recent",
        }
    again = authority.acquire(("free",), ttl=60, timeout=2)
    assert again.tokens > long_ago.tokens
    authority.release(again)
    authority.init(above=again.tokens[0] + (1 << 45))  # which makes all earlier tokens look old
    assert authority.prune(3600) == 0
    for seconds, kind, said in (
        (60, ValueError, "at least an hour"),
        (math.inf, ValueError, "number of seconds"),
        ("1h", TypeError, "number of seconds"),
    ):
        with pytest.raises(kind, match=said):
            authority.prune(seconds)  # type: ignore[arg-type]
    assert authority.prune(1e300) == 0


def test_an_unreachable_database_is_a_quorum_error() -> None:
    url = "postgresql+psycopg://app:secret@127.0.0.1:1/shop"
    with Database(url) as authority, pytest.raises(QuorumError) as caught:
        authority.acquire(("r",), ttl=5, timeout=1)
    assert "secret" not in str(caught.value)
    assert list(caught.value.nodes) == ["postgresql+psycopg://app:***@127.0.0.1:1/shop"]
    with Database("postgresql+psycopg:///shop?host=h&user=u&password=secret") as authority:
        assert "secret" not in repr(authority)
        assert "user=u" in repr(authority)


@pytest.mark.parametrize(
    ("one", "other"),
    [("{}/app.db", "{}/shared/app.db"), ("{}/app.db", "{}/app.db\n"), ("{}/app.db", "{}/app.db")],
)
def test_two_names_of_one_file_are_one_authority(tmp_path: Path, one: str, other: str) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "app.db").symlink_to(tmp_path / "shared" / "app.db")
    urls = [f"sqlite:///{each.format(tmp_path)}" for each in (one, other)]
    with Database(urls[0]) as mine, Database(urls[1]) as another:
        mine.acquire(("r",), ttl=60, timeout=2)
        with pytest.raises(LockTimeoutError):
            another.acquire(("r",), ttl=60, timeout=0)


def test_a_file_of_leases_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "app.db-leases"
    with Database(f"sqlite:///{tmp_path}/app.db") as old, Database(f"sqlite:///{tmp_path}/app.db") as new:
        lost = old.acquire(("lost",), ttl=60, timeout=2)
        assert path.exists()
        assert not (tmp_path / "app.db").exists()
        for each in tmp_path.glob("app.db-leases*"):
            each.unlink()
        new.acquire(("r",), ttl=60, timeout=2)
        assert path.exists()
        with pytest.raises(LockTimeoutError):
            old.acquire(("r",), ttl=60, timeout=0)
        (said,) = old.extend_many([(lost, 60)])
        assert isinstance(said, LockLostError)


def test_database_in_memory_grants_within_its_process() -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with Database(engine) as one, Database(engine) as same, Database(create_engine("sqlite://")) as other:
        one.acquire(("r",), ttl=60, timeout=2)
        with pytest.raises(LockTimeoutError):
            same.acquire(("r",), ttl=60, timeout=0)
        other.acquire(("r",), ttl=60, timeout=0)


@pytest.mark.parametrize("mode", ["SIMULTANEOUS_ASSIGNMENT", "ORACLE", "ANSI"])
@on_mariadb
def test_leases_depend_on_no_mode_of_sql(on_server: Engine, mode: str) -> None:
    told = create_engine(on_server.url, connect_args={"init_command": f"SET SESSION sql_mode = '{mode}'"})
    with Database(told) as one, Database(told) as other:
        one.init()
        one.acquire(("r",), ttl=1.0, timeout=2)
        other.acquire(("r",), ttl=60, timeout=20)
        with pytest.raises(LockTimeoutError):
            one.acquire(("r",), ttl=60, timeout=0.3)
        one.release(one.acquire(("a", "b"), ttl=60, timeout=0))
    told.dispose()


def test_words_for_mysql_are_those_that_mysql_documents() -> None:
    """MariaDB's own are no part of them, be it in leases or in triggers.

    Nor is the function VALUES: MySQL 8.0.20 warns of it, which aiomysql and asyncmy ask for and tell.
    """
    said = [str(each) for each in vars(Statements("mysql", "fencelock_leases", mysql.dialect())).values()]
    said += [*SET_UP["mysql"], *trigger_sql.CREATE["mysql"].values(), trigger_sql.DROP["mysql"]]
    words = r"\bRETURNING\b|\bSET STATEMENT\b|:=|\bOR REPLACE\b|\bIF NOT EXISTS\b|\bSYSDATE\b|\bVALUES\("
    assert [each for each in said if re.search(words, each, re.IGNORECASE)] == []
    assert sum("LAST_INSERT_ID" in each for each in said) == 3


@pytest.mark.parametrize(
    ("source", "kind", "said"),
    [
        ("sqlite:///file:app.db?uri=true", ValueError, "plain path"),
        ("oracle://h/x", ValueError, "PostgreSQL, MariaDB, MySQL and SQLite"),
        ("nonsense", ValueError, "no URL of a database, such as"),
        ("postgresql+psycopg://h:abc/x", ValueError, "^this is no URL of a database.*%40"),
        ("postgresql+psycopg://u:hid@den@h/x", ValueError, "^this is no URL of a database.*%40"),
        ("postgresql+psycopg2://h/x", ImportError, "install the driver of .*: pip install psycopg2$"),
        ("postgresql+pg8000://h/x", ValueError, "pg8000 cannot be used for leases; use one of aiomysql"),
        ("postgresql+unheard_of://h/x", ValueError, "unheard_of cannot be used for leases; use one of aio"),
        ("mysql+psycopg://h/x", ValueError, "mysql.psycopg cannot be used for leases; use one of aiomysql"),
        (5, TypeError, "URL or an Engine"),
    ],
)
def test_what_cannot_grant_is_refused(source: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        Database(source)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what brings it: another one would not help."""
    packages = {
        "postgresql+psycopg": "'fencelock[postgres]'",
        "postgresql+asyncpg": "asyncpg",
        "mysql+pymysql": "'fencelock[mysql]'",
        "mysql+asyncmy": "asyncmy",
        "sqlite+aiosqlite": "aiosqlite",
    }
    for driver, package in packages.items():
        monkeypatch.setitem(sys.modules, driver.partition("+")[2], None)
        with pytest.raises(ImportError, match=rf"pip install {re.escape(package)}$"):
            Database(f"{driver}://h/x")


@on_postgresql
def test_shared_connection_is_refused(on_server: Engine) -> None:
    """A pool of one connection would commit what others have begun."""
    shared = create_engine(on_server.url, poolclass=StaticPool)
    with pytest.raises(ValueError, match="StaticPool"):
        Database(shared)


def test_nothing_configured_names_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCELOCK_URL", raising=False)
    monkeypatch.setattr("fencelock._locking._default", None)
    with pytest.raises(AuthorityError) as caught:
        fenced_lock("r").acquire()
    said = str(caught.value)
    assert (
        0
        < said.index("fencelock.configure(engine)")
        < said.index("sqlite:///app.db")
        < said.index("redis://")
    )


def test_configure_goes_by_the_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fencelock._locking._default", None)
    url = f"sqlite:///{tmp_path}/app.db"
    assert isinstance(fencelock.configure(url), Database)
    assert isinstance(fencelock.configure(create_engine(url)), Database)
    assert isinstance(fencelock.configure("redis://h"), Redlock)
    with pytest.raises(ValueError, match=r"sqlite:///app\.db"):
        fencelock.configure("mongodb://h")
    plain = create_engine(url)
    assert not inspect(plain).get_table_names()
    plain.dispose()


def test_a_schema_may_have_any_name(postgres_database: ReusedDatabase) -> None:
    engine = create_engine(postgres_database.url)
    for schema in ("a :b", "br{ace}", "a%b", 'q"x', "My Schema"):
        with engine.begin() as connection:
            connection.execute(CreateSchema(schema))
        with Database(engine, schema=schema) as authority:
            authority.init()
            assert authority.release(authority.acquire(("r", "s"), ttl=30, timeout=1)) is True
    engine.dispose()
    postgres_database.empty()
