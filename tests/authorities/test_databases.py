"""A database's own: its table, its pool, connections that end, where tokens begin."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, StaticPool, create_engine, inspect, text
from sqlalchemy.orm import DeclarativeBase

import fencelock
from fencelock import (
    AuthorityError,
    Database,
    LeaseTableMissingError,
    LockTimeoutError,
    QuorumError,
    Redlock,
    fenced_lock,
    lease_table,
)
from fencelock.tokens import split


@pytest.fixture
def authority(engine: Engine) -> Iterator[Database]:
    """An authority in an empty database, with its table."""
    with Database(engine) as made:
        made.init()
        yield made


@pytest.fixture
def on_server(engine: Engine) -> Engine:
    """An engine on PostgreSQL or MariaDB."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no server: leases are in a file of their own")
    return engine


def test_missing_table_is_named_with_what_makes_it(on_server: Engine) -> None:
    """The message has the migration and the command, and no password."""
    with Database(on_server) as authority, pytest.raises(LeaseTableMissingError) as caught:
        authority.acquire(("r",), ttl=5, timeout=0)
    assert "op.create_lease_table()" in str(caught.value)
    assert "fencelock init " in str(caught.value)
    with Database(on_server) as authority:
        assert authority.init() is True
        assert authority.init() is False
        assert authority.release(authority.acquire(("r",), ttl=5, timeout=0)) is True


def test_metadata_makes_the_table(on_server: Engine) -> None:
    """As it does other tables of a program."""

    class Base(DeclarativeBase):
        pass

    assert lease_table(Base.metadata) is lease_table(Base.metadata)
    Base.metadata.create_all(on_server)
    with Database(on_server) as authority:
        assert authority.init() is False
        assert authority.release(authority.acquire(("r",), ttl=5, timeout=0)) is True


def test_file_of_sqlite_needs_nothing(tmp_path: Path) -> None:
    """Leases are beside the database, which is not touched."""
    with Database(f"sqlite:///{tmp_path}/app.db") as authority:
        grant = authority.acquire(("r",), ttl=5, timeout=0)
        assert (tmp_path / "app.db-leases").exists()
        assert not (tmp_path / "app.db").exists()
        assert authority.release(grant) is True


@pytest.mark.timed
def test_used_up_pool_keeps_no_lease_from_being_renewed(engine: Engine) -> None:
    """The authority has connections of its own."""
    small = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    with Database(small) as authority:
        authority.init()
        with small.connect(), fenced_lock("r", ttl=0.6, authority=authority) as token:
            time.sleep(1.5)
            with Database(engine) as other, pytest.raises(LockTimeoutError):
                other.acquire(("r",), ttl=5, timeout=0)
            assert token > 0
    small.dispose()


def test_ended_connections_are_replaced(on_server: Engine) -> None:
    """An acquisition, an extension and a release find theirs gone, and do not notice."""
    with Database(on_server) as authority, on_server.connect() as killer:
        authority.init()

        def end_all() -> None:
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

        end_all()
        grant = authority.acquire(("r",), ttl=5, timeout=0)
        end_all()
        (extended,) = authority.extend_many([(grant, 10)])
        assert not isinstance(extended, Exception)
        end_all()
        assert authority.release(extended) is True


def test_tokens_begin_above_what_a_storage_has_seen(authority: Database) -> None:
    """Of new resources, and of those that had a token; again has no effect."""
    before = authority.acquire(("old",), ttl=5, timeout=0)
    authority.release(before)
    highest = (3 << 44) + 12345
    authority.init(above=highest)
    for name in ("old", "new"):
        grant = authority.acquire((name,), ttl=5, timeout=0)
        assert split(grant.tokens[0])[0] == 4
        authority.release(grant)
    authority.init(above=highest)
    assert split(authority.acquire(("old",), ttl=5, timeout=0).tokens[0])[0] == 4


def test_unreachable_database_is_a_quorum_error() -> None:
    """As nodes that do not answer are; the error has no password."""
    url = "postgresql+psycopg://app:secret@127.0.0.1:1/shop"
    with Database(url) as authority, pytest.raises(QuorumError) as caught:
        authority.acquire(("r",), ttl=5, timeout=1)
    assert "secret" not in str(caught.value)
    assert list(caught.value.nodes) == ["postgresql+psycopg://app:***@127.0.0.1:1/shop"]


def test_password_in_the_query_is_hidden() -> None:
    """Drivers take it there, too."""
    with Database("postgresql+psycopg:///shop?host=h&user=u&password=secret") as authority:
        assert "secret" not in repr(authority)
        assert "user=u" in repr(authority)


@pytest.mark.parametrize(
    ("source", "kind", "said"),
    [
        ("sqlite://", ValueError, "file"),
        ("sqlite:///:memory:", ValueError, "file"),
        ("oracle://h/x", ValueError, "PostgreSQL, MariaDB and SQLite"),
        ("nonsense", ValueError, "no URL of a database, such as"),
        ("postgresql+pg8000://h/x", ImportError, "install the driver"),
        (5, TypeError, "URL or an Engine"),
    ],
)
def test_what_cannot_grant_is_refused(source: str, kind: type[Exception], said: str) -> None:
    """When it is named, and not later."""
    with pytest.raises(kind, match=said):
        Database(source)


def test_white_space_at_the_ends_of_a_url_is_no_part_of_it(tmp_path: Path) -> None:
    """A file of settings may end lines so, and another name would be another authority."""
    with Database(f"sqlite:///{tmp_path}/app.db") as one, Database(f" sqlite:///{tmp_path}/app.db\n") as two:
        one.acquire(("r",), ttl=5, timeout=0)
        with pytest.raises(LockTimeoutError):
            two.acquire(("r",), ttl=5, timeout=0)


def test_shared_connection_is_refused(on_server: Engine) -> None:
    """A pool of one connection would commit what others have begun."""
    shared = create_engine(on_server.url, poolclass=StaticPool)
    with pytest.raises(ValueError, match="StaticPool"):
        Database(shared)


def test_driver_for_coroutines_names_the_other(tmp_path: Path) -> None:
    """In blocking code."""
    url = f"sqlite+aiosqlite:///{tmp_path}/app.db"
    with Database(url) as authority, pytest.raises(AuthorityError, match="write sqlite:///"):
        authority.acquire(("r",), ttl=5, timeout=0)


def test_nothing_configured_names_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The project's own database first."""
    monkeypatch.delenv("FENCELOCK_URL", raising=False)
    monkeypatch.setattr("fencelock._configure._default", None)
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
    """An engine and a URL of a database make a `Database`, nodes a `Redlock`; others are refused."""
    monkeypatch.setattr("fencelock._configure._default", None)
    url = f"sqlite:///{tmp_path}/app.db"
    assert isinstance(fencelock.configure(url), Database)
    assert isinstance(fencelock.configure(create_engine(url)), Database)
    assert isinstance(fencelock.configure("redis://h"), Redlock)
    with pytest.raises(ValueError, match=r"sqlite:///app\.db"):
        fencelock.configure("mongodb://h")
    assert not inspect(create_engine(url)).get_table_names()
