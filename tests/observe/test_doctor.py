"""The doctor says which grants a database may lose, and which servers stand behind it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pymysql
import pytest
from sqlalchemy import Engine, NullPool, create_engine, make_url, text

from fencelock import Database
from fencelock.cli import database_settings, doctor
from fencelock.cli.database_settings import of_galera, of_settings
from proof.servers import Postgres
from proof.servers.galera import Galera
from tests.authorities.test_standby import Standby
from tests.conftest import galera_with_leases
from tests.polling import eventually
from tests.test_cli import fencelock


def findings(url: str) -> dict[str, dict[str, Any]]:
    ran = fencelock("doctor", "--url", url, "--json")
    assert ran.returncode in {0, 3}, ran.stderr
    return {each["advice"]: each for each in json.loads(ran.stdout)}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Postgres, Standby]]:
    safe = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
    with Postgres(settings=safe) as primary:
        with Database(primary.url) as authority:
            authority.init()
        with Standby(primary) as standby:
            assert eventually(lambda: bool(standby.ask("SELECT count(*) FROM pg_stat_wal_receiver") == 1))
            yield primary, standby


def ask(server: Postgres, *statements: str) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def test_standbys_that_are_not_waited_for(pair: tuple[Postgres, Standby]) -> None:
    primary, _ = pair
    found = findings(primary.url)
    assert not [each for each in found.values() if each["is_problem"]]
    (lossy,) = (each for advice, each in found.items() if "synchronous_standby_names" in advice)
    assert "has 1 standby and waits for none: a failover may lose the last locks" in lossy["what"]
    assert "the guard refuses the old holder" in lossy["advice"]
    (single,) = (each for advice, each in found.items() if "name all hosts" in advice)
    assert "the URL names one host" in single["what"]

    ask(primary, "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
    assert eventually(lambda: not [each for each in findings(primary.url) if "synchronous_standby" in each])
    ask(primary, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")


def test_urls_that_name_all_hosts(pair: tuple[Postgres, Standby]) -> None:
    """With `target_session_attrs` nothing is said; without it, that a standby may be taken."""
    primary, standby = pair
    url = make_url(primary.url)
    folders = [str(make_url(server.url).query["host"]) for server in pair]
    both = url.update_query_dict({"host": ",".join(folders), "port": "5432,5433"})
    wanting = both.render_as_string(hide_password=False)
    assert "add target_session_attrs=read-write" in findings(wanting)
    whole = both.update_query_dict({"target_session_attrs": "read-write"})
    found = findings(whole.render_as_string(hide_password=False))
    assert not [advice for advice in found if "target_session_attrs" in advice]
    assert standby.is_running


def test_a_standby_is_refused(pair: tuple[Postgres, Standby]) -> None:
    _, standby = pair
    ran = fencelock("doctor", "--url", standby.url)
    assert ran.returncode == 3
    assert "this server is a standby: name all hosts in the URL" in " ".join(ran.stdout.split())


def test_a_role_that_may_see_little(pair: tuple[Postgres, Standby]) -> None:
    """It finds the standbys as long as it may, and less where it may not; that is no error."""
    primary, _ = pair
    ask(primary, "CREATE ROLE worker LOGIN", "GRANT SELECT, INSERT, UPDATE ON fencelock_leases TO worker")
    url = make_url(primary.url).set(username="worker").render_as_string(hide_password=False)
    assert any("synchronous_standby_names" in advice for advice in findings(url))
    ask(primary, "REVOKE SELECT ON pg_stat_replication FROM PUBLIC")
    found = findings(url)
    assert not [advice for advice in found if "standby" in advice]
    assert "lock_timeout = '5s'" in found
    ask(primary, "REVOKE SELECT ON pg_settings FROM PUBLIC")
    assert findings(url) == {}
    ask(primary, "GRANT SELECT ON pg_stat_replication, pg_settings TO PUBLIC")


def test_schemas_in_which_others_may_create(pair: tuple[Postgres, Standby]) -> None:
    """Their functions may run with the rights of a program, or of an administrator."""
    primary, _ = pair
    ask(primary, "GRANT CREATE ON SCHEMA public TO PUBLIC")
    assert any("functions in 'public'" in each["what"] for each in findings(primary.url).values())
    ask(primary, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    assert not any("functions in 'public'" in each["what"] for each in findings(primary.url).values())


@pytest.mark.parametrize("value", ["off", "local", "remote_write"])
def test_commits_that_are_not_waited_for(pair: tuple[Postgres, Standby], value: str) -> None:
    """By default, as a database or a role may have it. Locks are granted durably all the same."""
    primary, _ = pair
    ask(primary, f"ALTER DATABASE postgres SET synchronous_commit = {value}")
    (found,) = (each for each in findings(primary.url).values() if "synchronous_commit is" in each["what"])
    assert f"synchronous_commit is {value} by default" in found["what"]
    assert not found["is_problem"]
    ask(primary, "ALTER DATABASE postgres RESET synchronous_commit")
    assert not [each for each in findings(primary.url).values() if "synchronous_commit is" in each["what"]]


def test_disks_that_are_not_waited_for(postgres: Postgres) -> None:
    url = postgres.create_database()
    with Database(url) as authority:
        authority.init()
    found = findings(url)
    for advice in ("fsync = on", "full_page_writes = on"):
        assert found[advice]["is_problem"], advice
    postgres.drop_database(url)


@pytest.fixture
def mariadb(mariadb_url: str) -> Iterator[Engine]:
    """An engine on a server whose settings a test may change."""
    engine = create_engine(mariadb_url, poolclass=NullPool)
    yield engine
    engine.dispose()


@pytest.mark.parametrize("value", [0, 2])
def test_a_log_of_mariadb_that_is_not_flushed(mariadb: Engine, value: int) -> None:
    """A crash of the machine may lose commits."""
    name = "innodb_flush_log_at_trx_commit"
    with mariadb.connect() as connection:
        before = connection.scalar(text(f"SELECT @@GLOBAL.{name}"))
        connection.execute(text(f"SET GLOBAL {name} = {value}"))
        try:
            found = {each.advice: each for each in of_settings(connection, "shown")}
        finally:
            connection.execute(text(f"SET GLOBAL {name} = {before}"))
        assert found[f"{name} = 1"].is_problem
        assert f"{name} = 1" not in {each.advice for each in of_settings(connection, "shown")} or before != 1


@pytest.mark.parametrize(
    ("log_bin", "sync_binlog", "wsrep_on", "advice"),
    [
        ("ON", "0", "OFF", {"sync_binlog = 1"}),
        ("ON", "1", "OFF", set()),
        ("OFF", "0", "OFF", set()),
        ("ON", "0", "ON", set()),
    ],
)
def test_a_log_of_transactions_that_is_not_flushed(
    monkeypatch: pytest.MonkeyPatch, log_bin: str, sync_binlog: str, wsrep_on: str, advice: set[str]
) -> None:
    values = {"log_bin": log_bin, "sync_binlog": sync_binlog, "wsrep_on": wsrep_on}
    monkeypatch.setattr(database_settings, "_values", lambda _: values)
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        assert {each.advice for each in of_settings(connection, "shown")} == advice
    engine.dispose()


class Clock:
    """A node whose clock goes by a rate, and which answers late the second time."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._delays = iter([0, 0.1])

    def time(self) -> tuple[int, int]:
        seconds, parts = divmod(time.monotonic() * self._rate, 1)
        time.sleep(next(self._delays))
        return int(seconds), int(parts * 1e6)


@pytest.mark.parametrize(("rate", "is_off"), [(1.0, False), (3.0, True), (0.3, True)])
def test_a_clock_that_is_off_is_told_and_an_answer_that_is_late_is_not(
    monkeypatch: pytest.MonkeyPatch, rate: float, *, is_off: bool
) -> None:
    monkeypatch.setattr(doctor, "_CLOCK_LOOK", 0.3)
    node: Any = Clock(rate)
    assert bool([*doctor._of_clock(node, "node")]) is is_off


@pytest.fixture
def cluster() -> Iterator[Galera]:
    """A cluster whose nodes a test may end."""
    with galera_with_leases() as made:
        yield made


@pytest.mark.long
def test_nodes_of_galera_that_are_left(cluster: Galera) -> None:
    urls = [make_url(url) for url in cluster.urls]

    def found(number: int) -> dict[str, bool]:
        return {each.what: each.is_problem for each in of_galera(urls[number])}

    def say(number: int, statement: str) -> None:
        # By the driver: SQLAlchemy says more, which a node without a majority refuses.
        host, port = str(urls[number].host), urls[number].port or 0
        with pymysql.connect(host=host, port=port, user="app", password="app") as connection:
            connection.cursor().execute(statement)

    assert [found(number) for number in range(3)] == [{}, {}, {}]
    well = findings(cluster.urls[0])
    assert not well["innodb_flush_log_at_trx_commit = 1"]["is_problem"]
    assert "of all nodes" in well["innodb_flush_log_at_trx_commit = 1"]["what"]

    say(2, "SET GLOBAL wsrep_provider_options = 'gmcast.isolate=1'")
    assert eventually(lambda: any("is one of two nodes" in what for what in found(0)), 30)
    assert eventually(lambda: any("without a majority" in what for what in found(2)), 30)
    alone = findings(cluster.urls[2])
    assert alone["see why it does not reach the others"]["is_problem"]
    assert any("grants nothing" in each["what"] for each in alone.values())
    say(2, "SET GLOBAL wsrep_provider_options = 'gmcast.isolate=0'")
    assert eventually(lambda: not any(map(found, range(3))), 60)

    say(0, "SHUTDOWN")
    assert eventually(lambda: any("is one of two nodes" in what for what in found(2)), 60)
    say(1, "SHUTDOWN")  # later: where two leave at once, no majority may be left
    assert eventually(lambda: any("is the only node" in what for what in found(2)), 60)
