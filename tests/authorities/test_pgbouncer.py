"""Leases work in a PostgreSQL behind PgBouncer, which gives each transaction another connection."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest
from sqlalchemy import URL, create_engine, make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import Database, FencedModel, fenced_lock
from tests.authorities import test_cancellation, test_leases, test_queues, test_tokens, test_waiting
from tests.authorities.kinds import Kind
from tests.authorities.stage import Stage
from tests.conftest import ReusedDatabase
from tests.polling import eventually

#: Debian keeps it where only root looks.
_PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")


@pytest.fixture(scope="module")
def bouncer(postgres_database: ReusedDatabase) -> Iterator[URL]:
    """PgBouncer in transaction mode before the server of the tests, on a socket in a folder of its own."""
    if _PROGRAM is None:
        pytest.skip("there is no program pgbouncer (Debian has it as a package of this name)")
    server = make_url(postgres_database.url)
    with TemporaryDirectory(prefix="fencelock-bouncer-") as name:
        folder = Path(name)
        settings = folder / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n"
            f"* = host={server.query['host']} port={server.query['port']} user=postgres\n"
            f"[pgbouncer]\n"
            f"pool_mode = transaction\nauth_type = any\nlisten_addr =\nlisten_port = 6432\n"
            f"unix_socket_dir = {folder}\nmax_client_conn = 200\ndefault_pool_size = 5\n"
        )
        folder.chmod(0o777)
        account = ["-u", "nobody"] if os.geteuid() == 0 else []
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([_PROGRAM, "-q", *account, str(settings)], stdout=log, stderr=log)
        try:
            url = server.set(query={"host": str(folder), "port": "6432"})
            assert eventually(lambda: _answers(url)), (folder / "log").read_text()
            yield url
        finally:
            process.terminate()
            process.wait(10)


def _through(bouncer: URL, database: ReusedDatabase) -> URL:
    """Return its URL by its present name: PgBouncer has a client wait for one that is not there."""
    return bouncer.set(database=make_url(database.url).database)


def _answers(url: URL) -> bool:
    plain = url.set(drivername="postgresql", database="postgres").render_as_string(hide_password=False)
    try:
        psycopg.connect(plain).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture(params=["psycopg, blocking", "psycopg_async, asyncio"])
def stage(request: pytest.FixtureRequest, bouncer: URL, postgres_database: ReusedDatabase) -> Iterator[Stage]:
    """A driver whose connections are PgBouncer's."""
    driver, world = request.param.split(", ")
    with Database(postgres_database.url) as first:
        first.init()
    its = _through(bouncer, postgres_database)
    url = its.set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)
    with Stage(Kind(driver, lambda: Database(url), url), world) as made:
        yield made
    postgres_database.empty()


@pytest.mark.parametrize(
    "check",
    [
        test_tokens.test_tokens_are_unique_and_leases_exclusive,
        test_tokens.test_remint_is_for_all_resources_or_none,
        test_waiting.test_opposite_orders_end_in_no_deadlock,
        test_waiting.test_who_waits_is_granted_what_expires,
        test_queues.test_overlapping_sets_get_their_turns,
        test_queues.test_who_gives_up_several_keeps_nothing,
        test_queues.test_who_waits_for_several_is_not_passed_over_for_ever,
        test_leases.test_many_are_extended_at_once_and_each_is_told_its_own,
        test_leases.test_a_lease_that_is_extended_again_and_again_is_kept_and_then_ends,
        test_leases.test_closing_twice_and_going_on,
    ],
)
def test_the_suite_holds_behind_pgbouncer(stage: Stage, check: Callable[[Stage], None]) -> None:
    check(stage)


@pytest.mark.parametrize("stage", ["psycopg_async, asyncio"], indirect=True)
def test_cancellations_hold_behind_pgbouncer(stage: Stage) -> None:
    test_cancellation.test_a_cancelled_acquisition_leaves_nothing(stage)


def test_connections_change_between_transactions(bouncer: URL) -> None:
    """The control: in the tests above no session belongs to a client."""
    plain = bouncer.set(drivername="postgresql", database="postgres").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True) as one, psycopg.connect(plain, autocommit=True) as other:
        before = one.execute("SELECT pg_backend_pid()").fetchone()
        with other.transaction():
            other.execute("SELECT 1")  # on the connection that was free last
            assert one.execute("SELECT pg_backend_pid()").fetchone() != before


class Base(DeclarativeBase):
    """The tables of a program."""


class Account(FencedModel, Base):
    """A fenced row."""

    __tablename__ = "bounced_accounts"
    __fence_resource__ = "account:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)


def test_the_guard_holds_behind_pgbouncer(bouncer: URL, postgres_database: ReusedDatabase) -> None:
    url = _through(bouncer, postgres_database)
    engine = create_engine(url, connect_args={"prepare_threshold": None})
    Base.metadata.create_all(engine)
    with Database(engine) as authority:
        authority.init()

        def add(_: int) -> None:
            with fenced_lock("account:1", authority=authority), Session(engine) as session:
                session.get_one(Account, 1).balance += 1
                session.commit()

        with fenced_lock("account:1", authority=authority), Session(engine) as session, session.begin():
            session.add(Account(id=1))
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(add, range(40)))
    with Session(engine) as session:
        assert session.get_one(Account, 1).balance == 40
    Base.metadata.drop_all(engine)
    engine.dispose()


def test_advisory_lock_stays_behind(bouncer: URL, postgres_database: ReusedDatabase) -> None:
    plain = _through(bouncer, postgres_database).set(drivername="postgresql")
    with psycopg.connect(plain.render_as_string(hide_password=False), autocommit=True) as gone:
        gone.execute("SELECT pg_advisory_lock(7)")
    direct = postgres_database.url.replace("+psycopg", "")
    with psycopg.connect(direct, autocommit=True) as other:
        (is_free,) = other.execute("SELECT pg_try_advisory_lock(7)").fetchone() or ()
        assert not is_free
    with Database(_through(bouncer, postgres_database)) as dead:
        dead.init()
        dead.lock("r", ttl=1, renew=False).acquire()  # and never released
    with Database(_through(bouncer, postgres_database)) as authority, authority.lock("r", timeout=5):
        pass
    postgres_database.empty()
