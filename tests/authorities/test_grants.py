"""With the grants that the page names, a role can do everything. An error names each missing grant.

The statements are read out of the page, so that the page and this file cannot differ.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

import pytest
from sqlalchemy import URL, NullPool, create_engine, insert, make_url, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fencelock
from fencelock import AuthorityError, Database, FencedModel, LockTimeoutError, claim, fenced_lock, gate
from proof.pages.blocks import blocks, read
from proof.servers import Postgres
from tests.conftest import mariadb_database

_GRANT: Final = re.compile(r"^GRANT ([A-Z, ]+) ON (.+?) TO worker; *(?:-- )?([^,:\n]*)", re.MULTILINE)
#: The first line of a block of the page.
_NAMES: Final = {"postgresql": "-- PostgreSQL\n", "mariadb": "-- MariaDB and MySQL\n"}


class Base(DeclarativeBase):
    """The models of the shop."""


class Article(FencedModel, Base):
    """A fenced table."""

    __tablename__ = "articles"
    __fence_resource__ = "article:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    stock: Mapped[int]


fencelock.fence_table(Base.metadata)


@dataclass(frozen=True, slots=True)
class Grant:
    """A statement of the page: which rights, on what, and what for."""

    rights: tuple[str, ...]
    on: str
    reason: str


def grants_of(dialect: str) -> list[Grant]:
    """Return the grants that the page has for a database."""
    (block,) = (each for each in blocks(read("docs/authorities.md")) if each.text.startswith(_NAMES[dialect]))
    found = [Grant(tuple(each[1].split(", ")), each[2], each[3]) for each in _GRANT.finditer(block.text)]
    assert len(found) == block.text.count("GRANT"), "each statement of the page is read"
    return found


def rights_to_lock() -> list[tuple[str, str, str]]:
    """Return each right that a program needs to lock: of which database, the right, and on what."""
    return [
        (dialect, right, grant.on)
        for dialect in _NAMES
        for grant in grants_of(dialect)
        if grant.reason in {"", "to lock"}
        for right in grant.rights
    ]


class Shop:
    """A database with a table of leases, whose owner grants rights to a role that has none.

    Attributes:
        owner: an engine of the account that may grant.
        url: of the role.
        dialect: "postgresql", or "mariadb" for MySQL, too.
    """

    def __init__(self, url: URL, *, schema: str = "public") -> None:
        self.owner = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        self.dialect = "postgresql" if self.owner.dialect.name == "postgresql" else "mariadb"
        self._role = f"worker_{secrets.token_hex(6)}"
        self._database, self._schema = url.database or "", schema
        self.url = url.set(username=self._role, password="secret")

    def __enter__(self) -> Self:
        with self.owner.connect() as connection:
            if self.dialect == "postgresql":
                connection.execute(text(f"CREATE ROLE {self._role} LOGIN PASSWORD 'secret'"))
                for public in (f"DATABASE {self._database}", f"SCHEMA {self._schema}"):
                    connection.execute(text(f"REVOKE ALL ON {public} FROM PUBLIC"))
            else:
                connection.execute(text(f"CREATE USER {self._role} IDENTIFIED BY 'secret'"))
        return self

    def __exit__(self, *_: object) -> None:
        with self.owner.connect() as connection:
            if self.dialect == "postgresql":
                connection.execute(text(f"DROP OWNED BY {self._role}"))
                connection.execute(text(f"DROP ROLE {self._role}"))
            else:
                connection.execute(text(f"DROP USER {self._role}"))

    def create_schema(self) -> str:
        """Create the schema of the page's statement for `init`, and return its name."""
        page = read("docs/authorities.md")
        assert "CREATE SCHEMA locks AUTHORIZATION worker;" in page
        with self.owner.connect() as connection:
            connection.execute(text(f"CREATE SCHEMA locks AUTHORIZATION {self._role}"))
            connection.execute(text(f"GRANT CONNECT ON DATABASE {self._database} TO {self._role}"))
        return "locks"

    def grant(self, *reasons: str, but: tuple[str, str] = ("", ""), only: str = "") -> None:
        """Grant what the page says for some reasons, without one right, or only one right on tables."""
        for grant in grants_of(self.dialect):
            if grant.reason in {"", *reasons}:
                rights = [each for each in grant.rights if (each, grant.on) != but]
                self.give(only if only and grant.reason else ", ".join(rights), grant.on)

    def give(self, rights: str, on: str) -> None:
        """Grant rights on something of the page."""
        if self.dialect == "postgresql":
            on = on.replace("DATABASE shop", f"DATABASE {self._database}").replace("public", self._schema)
        else:
            on = on.replace("shop.", f"{self._database}.")
        if rights:
            with self.owner.connect() as connection:
                connection.execute(text(f"GRANT {rights} ON {on} TO {self._role}"))


def of_postgresql(server: Postgres, schema: str = "public") -> Iterator[Shop]:
    """A database of its own, because rights of all roles are taken away there."""
    url = server.create_database()
    with create_engine(url, poolclass=NullPool).begin() as connection:
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {schema}"))
    with Shop(make_url(url), schema=schema) as shop:
        yield shop
    server.drop_database(url)


@contextmanager
def shop_of(dialect: str, request: pytest.FixtureRequest) -> Iterator[Shop]:
    """Open the shop of a database."""
    if dialect == "postgresql":
        yield from of_postgresql(request.getfixturevalue("postgres"))
        return
    for url in mariadb_database(make_url(request.getfixturevalue("mariadb_url"))):
        with Shop(make_url(url)) as shop:
            yield shop


@pytest.fixture(params=["postgresql", "mariadb"])
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    """A database on each server."""
    with shop_of(request.param, request) as made:
        yield made


def make_table(shop: Shop, *, schema: str | None = None) -> None:
    """Make the table of leases as its owner."""
    with Database(shop.owner, schema=schema) as authority:
        authority.init()


def do_all(authority: Database) -> None:
    """Do whatever a program does with an authority."""
    first = authority.acquire(("r",), ttl=30, timeout=2)
    with pytest.raises(LockTimeoutError):
        authority.acquire(("r",), ttl=30, timeout=0)
    (extended,) = authority.extend_many([(first, 40.0)])
    assert not isinstance(extended, Exception)
    minted = authority.remint(extended, 30)
    assert minted.tokens > first.tokens
    assert [each.resource for each in authority.inspect()] == ["r"]
    assert authority.release(minted) is True
    several = authority.acquire(("r", "s", "t"), ttl=30, timeout=2)
    assert authority.release(authority.remint(several, 30)) is True
    authority.acquire(("r",), ttl=30, timeout=2)
    assert authority.force_release("r") is not None
    assert authority.inspect("r") is None


def test_a_role_with_these_grants_locks(shop: Shop) -> None:
    make_table(shop)
    shop.grant("to lock")
    with Database(shop.url) as authority:
        assert authority.init() is False
        do_all(authority)
        with pytest.raises(AuthorityError, match=r"refuses: .*denied"):
            authority.prune(3600)


def test_a_role_with_one_grant_more_prunes(shop: Shop) -> None:
    make_table(shop)
    shop.grant("to lock", "to prune")
    with Database(shop.url) as authority:
        grant = authority.acquire(("r",), ttl=30, timeout=2)
        assert authority.release(grant) is True
        ahead = grant.tokens[0] + (1 << 40)
        assert authority.init(above=ahead) is False
        assert authority.acquire(("r",), ttl=30, timeout=2).tokens[0] > ahead
        assert authority.prune(3600) == 0


def test_a_role_that_may_create_makes_the_table(shop: Shop) -> None:
    if shop.dialect == "postgresql":  # in a schema of its own, because others search the schema `public`
        own = shop.create_schema()
    else:
        shop.grant("to init")
        own = None
    with Database(shop.url, schema=own) as authority:
        assert authority.init() is True
        do_all(authority)


def test_a_role_that_may_not_create_is_told_so(shop: Shop) -> None:
    Base.metadata.create_all(shop.owner)
    shop.grant("to pass gates")
    with Database(shop.url) as authority, pytest.raises(AuthorityError, match=r"refuses: .*denied"):
        authority.init()


def test_another_schema(postgres: Postgres) -> None:
    for shop in of_postgresql(postgres, "locks"):
        make_table(shop, schema="locks")
        shop.grant("to lock")
        with Database(shop.url, schema="locks") as authority:
            do_all(authority)


@pytest.mark.parametrize(("dialect", "right", "on"), rights_to_lock())
def test_each_grant_that_is_missing_is_named(
    dialect: str, right: str, on: str, request: pytest.FixtureRequest
) -> None:
    with shop_of(dialect, request) as shop:
        make_table(shop)
        shop.grant("to lock", but=(right, on))
        with Database(shop.url) as authority, pytest.raises(AuthorityError) as caught:
            do_all(authority)
        # PostgreSQL passes over a schema that the role may not use, and says that there is no such table.
        assert ("USAGE on its schema" if right == "USAGE" else "denied") in str(caught.value)
        assert "secret" not in str(caught.value)


def test_a_role_that_only_looks(shop: Shop) -> None:
    make_table(shop)
    shop.grant("to lock", only="SELECT")
    with Database(shop.owner) as holder, Database(shop.url) as looking:
        holder.acquire(("r",), ttl=30, timeout=2)
        assert [each.resource for each in looking.inspect()] == ["r"]
        with pytest.raises(AuthorityError, match="denied"):
            looking.acquire(("s",), ttl=30, timeout=0)


def test_the_guard_needs_its_fence_table(shop: Shop) -> None:
    make_table(shop)
    Base.metadata.create_all(shop.owner)
    with shop.owner.connect() as connection:
        connection.execution_options(fencelock="bypass").execute(
            insert(Article), {"id": 1, "stock": 10, "last_fencing_token": 0, "last_write_id": 1}
        )
    shop.grant("to lock", "to pass gates")
    columns = "SELECT, UPDATE (stock, last_fencing_token, last_write_id)"
    table = "public.articles" if shop.dialect == "postgresql" else "shop.articles"
    shop.give(columns, table)
    engine = create_engine(shop.url, poolclass=NullPool)
    with (
        Database(shop.url) as authority,
        fenced_lock("article:1", authority=authority),
        Session(engine) as session,
    ):
        gate(session)
        claim(session, Article, 1).stock -= 1
        session.commit()
        assert session.get_one(Article, 1).stock == 9
