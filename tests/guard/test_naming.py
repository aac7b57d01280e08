"""The lease that a statement names guards the row, also where the database calls different texts equal."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import datetime
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import CHAR, Engine, Enum, String, bindparam, delete, insert, orm, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, NoResultFound, PendingRollbackError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.orm.exc import StaleDataError

import fencelock
from fencelock import FencedModel, Lease, UnfencedWriteError, bind, claim
from fencelock._databases import MYSQL
from tests.guard.marks import on_sqlite_alone
from tests.guard.rows import Keyed, bypassed, rows_of, turned_away


class Base(DeclarativeBase): ...


class Lowered(sa.TypeDecorator[str]):
    """Text that is stored in lower case, as types for e-mail addresses do."""

    impl = String(40)
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:  # noqa: ARG002
        return value and value.lower()


_LOOSE = (
    String(40)
    .with_variant(sqlite.VARCHAR(40, collation="NOCASE"), "sqlite")
    .with_variant(postgresql.CITEXT(), "postgresql")
)  # and MariaDB's default, which ignores case, accents and spaces at the end


class Stock(FencedModel, Base):
    __tablename__ = "na_stock"
    __fence_resource__ = "stock:{sku}!"
    sku: Mapped[str] = mapped_column(_LOOSE, primary_key=True)
    count: Mapped[int] = mapped_column(default=0)


class Part(FencedModel, Keyed, Base):
    __tablename__ = "na_parts"
    __fence_resource__ = "stock:{sku}!"
    sku: Mapped[str] = mapped_column(_LOOSE)
    count: Mapped[int] = mapped_column(default=0)


class Order(FencedModel, Keyed, Base):
    __tablename__ = "na_orders"
    __fence_resource__ = "order:{id}"
    number: Mapped[int] = mapped_column(default=1)


class Document(FencedModel, Base):
    __tablename__ = "na_documents"
    __fence_resource__ = "document:{id}"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(default=0)


class Account(FencedModel, Base):
    __tablename__ = "na_accounts"
    __fence_resource__ = "account:{mail}"
    mail: Mapped[str] = mapped_column(Lowered, primary_key=True)


class Crossed(FencedModel, Keyed, Base):
    """Its resource's attribute is called like another attribute's column."""

    __tablename__ = "na_crossed"
    __fence_resource__ = "group:{code}"
    code: Mapped[str] = mapped_column("group_name", String(20))
    value: Mapped[int] = mapped_column("code", default=0)


class Color(enum.Enum):
    """What jobs are told apart by."""

    RED = "red"


class Job(FencedModel, Base):
    __tablename__ = "na_jobs"
    __fence_resource__ = "job:{color}"
    color: Mapped[Color] = mapped_column(Enum(Color), primary_key=True)
    status: Mapped[str] = mapped_column(String(20), default="new")


class Word(FencedModel, Base):
    __tablename__ = "na_words"
    __fence_resource__ = "word:{word}"
    word: Mapped[str] = mapped_column(Enum("abc", "def", name="na_word"), primary_key=True)
    status: Mapped[str] = mapped_column(String(20), default="new")


class Bin(FencedModel, Base):
    __tablename__ = "na_bins"
    __fence_resource__ = "bin:{code}"
    code: Mapped[str] = mapped_column(CHAR(12), primary_key=True)
    count: Mapped[int] = mapped_column(default=0)


class Switch(FencedModel, Base):
    __tablename__ = "na_switches"
    __fence_resource__ = "switch:{is_on}"
    is_on: Mapped[bool] = mapped_column(primary_key=True)
    count: Mapped[int] = mapped_column(default=0)


class Slot(FencedModel, Base):
    __tablename__ = "na_slots"
    __fence_resource__ = "slot:{start:%H:%M:%S.%f}"
    start: Mapped[datetime] = mapped_column(primary_key=True)
    count: Mapped[int] = mapped_column(default=0)


KEY = uuid.UUID("A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11")


@pytest.fixture(scope="module")
def _tables(shared_url: str) -> None:
    engine = sa.create_engine(shared_url)
    if engine.dialect.name == "postgresql":
        known = "SELECT count(*) FROM pg_available_extensions WHERE name = 'citext'"
        with engine.begin() as connection:
            there = connection.scalar(text(known))
            connection.execute(text("CREATE EXTENSION citext" if there else "CREATE DOMAIN citext AS text"))
    Base.metadata.create_all(engine)
    engine.dispose()


ITS = {"last_fencing_token": 5}
ROWS: dict[Any, Any] = {
    Stock: {"sku": "abc", **ITS},
    Part: {"id": 1, "sku": "abc", **ITS},
    Order: {"id": 1, **ITS},
    Document: {"id": KEY, **ITS},
    Account: {"mail": "a@b", **ITS},
    Bin: {"code": "abc", **ITS},
}


def fences(engine: Engine) -> list[int]:
    return [fence for model in ROWS for fence in rows_of(engine, select(model.last_fencing_token))]


BY_NAME: dict[str, Callable[[Session, str], object]] = {
    "update": lambda s, sku: s.execute(update(Stock).where(Stock.sku == sku).values(count=9)),
    "update, more criteria": lambda s, sku: s.execute(
        update(Stock).where(Stock.sku == sku, Stock.count < 7).values(count=9)
    ),
    "update, outside the key": lambda s, sku: s.execute(update(Part).where(Part.sku == sku).values(count=9)),
    "update, several rows": lambda s, sku: s.execute(
        update(Part).where(Part.sku == sku, Part.id < 7).values(count=9)
    ),
    "update, key list": lambda s, sku: s.execute(update(Stock), [{"sku": sku, "count": 9}]),
    "executemany": lambda s, sku: s.connection().execute(
        update(Stock.__table__).where(Stock.__table__.c.sku == bindparam("b")),  # type: ignore[arg-type]
        [{"b": sku, "count": 9}],
    ),
    "delete": lambda s, sku: s.execute(delete(Stock).where(Stock.sku == sku)),
    "Query.update": lambda s, sku: s.query(Stock).filter(Stock.sku == sku).update({"count": 9}),
    "bulk_update_mappings": lambda s, sku: s.bulk_update_mappings(Stock, [{"sku": sku, "count": 9}]),
}
#: Python adds the exact comparison in the same way for all: some show it where other databases compare.
SOME = ("update", "update, outside the key", "delete", "executemany")
by_some_or_all = pytest.mark.parametrize(
    ("shared_url", "way"),
    [
        *(("sqlite", way) for way in BY_NAME),
        *((database, way) for database in ("postgresql", "mariadb") for way in SOME),
    ],
    indirect=["shared_url"],
)


@pytest.mark.parametrize(
    ("shared_url", "way", "spelt"),
    [
        *(("sqlite", way, "ABC") for way in BY_NAME),
        *(
            (database, way, spelt)
            for database in ("postgresql", "mariadb")
            for way in SOME
            for spelt in ("ABC", "äbc ")
        ),
    ],
    indirect=["shared_url"],
)
def test_a_loose_comparison_leads_no_lease_to_another_row(
    session: Session, engine: Engine, way: str, spelt: str
) -> None:
    bind(session, Lease(f"stock:{spelt}!", 99))
    equal = session.scalar(select(Stock.count).where(Stock.sku == spelt)) is not None
    try:
        BY_NAME[way](session, spelt)
    except UnfencedWriteError as error:
        assert "'stock:abc!'" in str(error)  # noqa: PT017  whether it raises differs by database
        assert equal
        session.rollback()
    except StaleDataError:
        session.rollback()
    else:
        assert not equal
    session.commit()
    assert set(fences(engine)) == {5}


def test_the_databases_of_these_tests_compare_loosely(session: Session) -> None:
    """Otherwise the test above would test nothing."""
    extension = text("SELECT count(*) FROM pg_extension WHERE extname = 'citext'")
    if session.get_bind().dialect.name == "postgresql" and not session.scalar(extension):
        pytest.skip("this PostgreSQL comes without citext")
    assert session.scalar(select(Stock.sku).where(Stock.sku == "ABC")) == "abc"
    assert session.scalar(select(Part.sku).where(Part.sku == "ABC")) == "abc"


@by_some_or_all
def test_an_exact_name_writes(session: Session, engine: Engine, way: str) -> None:
    bind(session, Lease("stock:abc!", 4))
    with pytest.raises(fencelock.StaleTokenError) as caught:
        BY_NAME[way](session, "abc")
    assert (caught.value.token, caught.value.current) == (4, 5)
    session.rollback()
    bind(session, Lease("stock:abc!", 6))
    BY_NAME[way](session, "abc")
    session.commit()
    assert fences(engine) != [5] * len(ROWS)


def test_text_beyond_ascii_is_found(session: Session) -> None:
    for key, name in enumerate(["straße", "日本", "o'clock", "50%", "🚪", r"a\\b"], 9):
        bind(session, Lease(f"stock:{name}!", 7))
        session.add(Part(id=key, sku=name))
        session.flush()
        written: Any = session.execute(update(Part).where(Part.sku == name).values(count=1))
        assert written.rowcount == 1, name
        session.get_one(Part, key).count = 2
        session.commit()
        claim(session, Part, key)


def test_a_claim_by_an_equal_name_changes_nothing_even_if_committed(session: Session, engine: Engine) -> None:
    """The refusal takes the transaction back, so that a careless commit raises no fence, and is told."""
    for lease, model, key in (
        ("stock:ABC!", Stock, "ABC"),
        ("account:A@B", Account, "A@B"),
        ("order:01", Order, "01"),
    ):
        bind(session, Lease(lease, 99))
        with pytest.raises((UnfencedWriteError, NoResultFound)):
            claim(session, model, key)
        with suppress(PendingRollbackError):  # where a row was found
            session.commit()
        session.rollback()
    assert set(fences(engine)) == {5}


SPELLINGS: list[Any] = ["01", "1.0", 1.0, "x", None, b"1"]


@on_sqlite_alone
@pytest.mark.parametrize("value", SPELLINGS, ids=repr)
def test_a_number_has_one_name(session: Session, engine: Engine, value: Any) -> None:
    """What a database would take for the key 1 makes no second resource of it."""
    bind(session, Lease(f"order:{value}", 99))
    which = update(Order.__table__).where(Order.__table__.c.id == bindparam("which"))  # type: ignore[arg-type]
    with turned_away(session, UnfencedWriteError):
        session.connection().execute(which, {"which": value, "number": 9})
    if value is not None:
        with pytest.raises(UnfencedWriteError):
            session.connection().execute(insert(Order.__table__), {"id": value})  # type: ignore[arg-type]
    session.rollback()
    assert set(fences(engine)) == {5}


@pytest.mark.parametrize(
    ("model", "key", "spellings"), [(Order, 1, (1, "1", True)), (Document, KEY, (KEY,))], ids=["int", "UUID"]
)
def test_spellings_that_mean_the_same_are_the_same(
    session: Session, model: Any, key: Any, spellings: tuple[Any, ...]
) -> None:
    bind(session, Lease(model.__fence_resource__.format(id=key), 6))
    table = model.__table__
    statement = update(table).where(table.c.id == bindparam("which")).values(number=2)
    for value in spellings:
        assert session.connection().execute(statement, {"which": value}).rowcount == 1, value


@pytest.mark.parametrize("shared_url", ["mariadb"], indirect=True)
@pytest.mark.parametrize(
    ("lease", "model", "key"), [("job:RED", Job, "RED"), ("job:red", Job, "red"), ("word:ABC", Word, "ABC")]
)
def test_a_member_of_an_enumeration_has_one_name(
    session: Session, engine: Engine, lease: str, model: Any, key: str
) -> None:
    column = next(iter(model.__table__.primary_key))
    with bypassed(engine) as connection:
        connection.execute(delete(model.__table__))
    bind(session, Lease(f"job:{Color.RED}", 9), Lease("word:abc", 9))
    session.add(Job(color=Color.RED) if model is Job else Word(word="abc"))
    session.commit()
    bind(session, Lease(lease, 10))
    with turned_away(session, UnfencedWriteError):
        session.execute(update(model).where(column == key).values(status="mine"))
    assert session.execute(select(model.status, model.last_fencing_token)).all() == [("new", 9)]


def test_the_spaces_of_char_are_no_part_of_a_name(session: Session) -> None:
    bind(session, Lease("bin:abc", 6))
    session.get_one(Bin, "abc").count = 1
    session.commit()
    assert claim(session, Bin, "abc").count == 1
    written = session.execute(update(Bin).where(Bin.code == "abc").values(count=2))
    assert written.rowcount == 1  # type: ignore[attr-defined]
    session.commit()
    with pytest.raises(UnfencedWriteError, match="bin:ab'"):
        session.execute(update(Bin).where(Bin.code == "ab ").values(count=3))


@pytest.mark.parametrize("kind", [sa.Numeric(9, 2), Enum("a", "A", name="na_letter")], ids=["1.0", "a, A"])
def test_a_type_that_has_no_one_spelling_is_refused_when_mapped(kind: Any) -> None:
    """1.0 and 1.00 are equal numbers and two names; MariaDB would take "a" for "A"."""
    given = {"__tablename__": "na_lots", "__fence_resource__": "lot:{id}"}
    with pytest.raises(ValueError, match="several ways"):
        type(
            "Lot",
            (FencedModel, orm.declarative_base()),
            {**given, "id": mapped_column(kind, primary_key=True)},
        )


@on_sqlite_alone
def test_attributes_and_columns_of_one_name_are_not_mixed_up(session: Session) -> None:
    bind(session, Lease("group:a", 3))
    session.add(Crossed(id=1, code="a"))
    session.flush()
    session.execute(update(Crossed).where(Crossed.code == "a").values(value=2))
    with pytest.raises(UnfencedWriteError, match="must not change"):
        session.execute(update(Crossed).where(Crossed.code == "a").values(code="b"))


def test_numbers_as_text_are_the_databases_business(session: Session) -> None:
    bind(session, Lease("stock:5!", 9))
    stock: Any = Stock.__table__
    with pytest.raises((UnfencedWriteError, DBAPIError)):
        session.connection().execute(update(stock).where(stock.c.sku == bindparam("b")), {"b": 5, "count": 1})


@pytest.mark.parametrize(
    "criterion",
    [Switch.is_on == True, Switch.is_on.is_(True), Switch.is_on.in_([True])],  # noqa: E712
)
def test_a_truth_value_names_rows_as_other_values_do(session: Session, criterion: Any) -> None:
    bind(session, Lease("switch:True", 7))
    session.add(Switch(is_on=True))
    session.commit()
    session.execute(update(Switch).where(criterion).values(count=1))
    session.execute(update(Switch), [{"is_on": True, "count": 2}])
    session.commit()
    assert session.scalar(select(Switch.count)) == 2
    session.delete(session.get_one(Switch, {"is_on": True}))
    session.commit()


def test_a_list_that_a_collation_widens_is_refused(session: Session) -> None:
    """The row is named by another name than its own, whether its fence is 0 or not."""
    leases = [Lease(f"stock:{name}!", 99) for name in ("ABC", "abd", "ABE")]
    with fencelock.bypass(session):
        session.execute(insert(Stock), [{"sku": "abe"}])
    session.commit()
    bind(session, *leases)
    for name in ("ABC", "ABE"):
        found = session.scalar(select(Stock.sku).where(Stock.sku == name)) is not None
        writing = update(Stock).where(Stock.sku.in_([name, "abd"])).values(count=1)
        with pytest.raises(UnfencedWriteError, match="is guarded by") if found else nullcontext():
            session.execute(writing)
        session.rollback()


def test_a_time_names_a_row_as_the_database_stores_it(session: Session) -> None:
    start = datetime(2026, 1, 1, 10, 0, 0, 700_000)  # noqa: DTZ001 - without a zone, as in the column
    bind(session, Lease("slot:10:00:00.700000", 7))
    session.add(Slot(start=start))
    if session.get_bind().dialect.name in MYSQL:  # which would store whole seconds
        with pytest.raises(UnfencedWriteError, match="the column stores whole seconds"):
            session.flush()
        return
    session.commit()
    session.get_one(Slot, start).count = 1
    session.commit()
    session.delete(session.get_one(Slot, start))
    session.commit()
