"""Mappings, and orders of a flush, by which the fence that an object was loaded with went unseen.

In each test rows are loaded at fence 5 and written under token 9; another holder comes in between with 7.
"""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Engine,
    ForeignKey,
    ForeignKeyConstraint,
    Integer,
    String,
    Table,
    insert,
    inspect,
    select,
)
from sqlalchemy.engine import Connection
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    column_property,
    deferred,
    joinedload,
    lazyload,
    load_only,
    mapped_column,
    registry,
    relationship,
    selectinload,
)

from fencelock.errors import StaleReadError
from fencelock.guard import FencedModel, bind, claim, write_id_column
from fencelock.guard.model import fence_column
from fencelock.lease import Lease
from tests.guard.listening import listening


class Base(DeclarativeBase):
    """The models of this file."""


links = Table(
    "un_links",
    Base.metadata,
    Column("account", ForeignKey("un_accounts.id"), primary_key=True),
    Column("other", ForeignKey("un_others.id"), primary_key=True),
)


class Other(Base):
    """What an account refers to."""

    __tablename__ = "un_others"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Account(FencedModel, Base):
    """With a row that it refers to, set by a statement of its own, and a collection."""

    __tablename__ = "un_accounts"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int] = mapped_column(default=100)
    other_id: Mapped[int | None] = mapped_column(ForeignKey(Other.id))
    other: Mapped[Other | None] = relationship(post_update=True)
    others: Mapped[list[Other]] = relationship(secondary=links)


class Noted(FencedModel, Base):
    """A fenced table that listeners write to."""

    __tablename__ = "un_noted"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True)


class Deferred(FencedModel, Base):
    """A fence that is said to be loaded when it is asked for."""

    __tablename__ = "un_deferred"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int] = mapped_column(default=100)
    last_fencing_token: Mapped[int] = deferred(fence_column())


class DeferredByOption(Base):
    """The same, in the words of a newer SQLAlchemy."""

    __table__ = Deferred.__table__
    last_fencing_token = deferred(Deferred.__table__.c.last_fencing_token, raiseload=True)


class WithProperty:
    """An imperative mapping that makes the attribute by hand."""

    id: int
    balance: int


registry(metadata=Base.metadata).map_imperatively(
    WithProperty,
    Deferred.__table__,
    properties={"last_fencing_token": column_property(Deferred.__table__.c.last_fencing_token)},
)


class Refreshed(FencedModel, Base):
    """Loaded anew by every query."""

    __tablename__ = "un_refreshed"
    __fence_resource__ = "rows"
    __mapper_args__ = {"always_refresh": True}  # noqa: RUF012  SQLAlchemy's declaration
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int] = mapped_column(default=100)
    name: Mapped[str] = mapped_column(String(20), default="new")


@pytest.fixture
def database(engine: Engine) -> Engine:
    """An engine on a database with two accounts that refer to a row, and others, all at fence 5."""
    Base.metadata.create_all(engine)
    both = [{"id": key, "last_fencing_token": 5} for key in (1, 2)]
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(insert(Other), [{"id": key} for key in (1, 2, 3)])
        connection.execute(insert(Account), [{**row, "other_id": 1} for row in both])
        connection.execute(insert(links), {"account": 1, "other": 1})
        connection.execute(insert(Deferred), both)
        connection.execute(insert(Refreshed), both)
    return engine


def write(database: Engine, token: int, model: type[Any], **values: Any) -> None:
    """Write all rows of a model as their holder does."""
    with Session(database) as session:
        bind(session, Lease("rows", token))
        for key in (1, 2):
            row = claim(session, model, key)
            for name, value in values.items():
                setattr(row, name, value)
        session.commit()


@pytest.mark.parametrize("options", [(), (load_only,)])
@pytest.mark.parametrize("model", [Deferred, DeferredByOption, WithProperty])
def test_a_fence_is_loaded_however_it_is_mapped(
    database: Engine, model: Any, options: tuple[Any, ...]
) -> None:
    """With everything else, and never later."""
    with Session(database, expire_on_commit=False) as session:
        query = select(model).where(model.id == 1).options(*(option(model.balance) for option in options))
        row = session.scalars(query).one()
        session.commit()
        write(database, 7, Deferred, balance=50)
        bind(session, Lease("rows", 9))
        row.balance -= 30
        with pytest.raises(StaleReadError):
            session.flush()


def test_a_key_in_another_order_than_the_parent_s_is_refused() -> None:
    """The fences of (1, 2) and (2, 1) would be taken for each other's."""

    class Own(DeclarativeBase):
        pass

    class Document(Own):
        __tablename__ = "un_documents"
        a: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        b: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)

    def child(*columns: str) -> type[Any]:
        table = Table(
            "_".join(("un", *columns)),
            Own.metadata,
            *(Column(name, Integer, primary_key=True, autoincrement=False) for name in columns),
            ForeignKeyConstraint(["in_a", "in_b"], ["un_documents.a", "un_documents.b"]),
            fence_column(resource="rows"),
            write_id_column(),
        )
        return type(f"Invoice{''.join(columns)}", (Document,), {"__table__": table})

    child("in_a", "in_b")
    with pytest.raises(ValueError, match=r"\['a', 'b'\].* is \['in_b', 'in_a'\].*same order"):
        child("in_b", "in_a")


@pytest.mark.parametrize("shard", [None, "eu"])
@pytest.mark.parametrize("what", ["delete", "refer", "replace", "write"])
def test_an_object_of_a_shard_and_statements_before_its_own(
    database: Engine, shard: str | None, what: str
) -> None:
    """A relationship with `post_update` is written before the events of the object that is deleted."""
    with Session(database, expire_on_commit=False) as session:
        account = session.get_one(Account, 1, identity_token=shard)
        assert account.other is not None
        session.commit()
        write(database, 7, Account, balance=50)
        bind(session, Lease("rows", 9))
        if what == "write":
            account.balance -= 30
        elif what == "refer":
            account.other = session.get_one(Other, 2)
        else:
            session.delete(account)
        if what == "replace":
            another = Account(id=1, balance=account.balance - 30)
            inspect(another).identity_token = shard
            session.add(another)
        with pytest.raises(StaleReadError):
            session.flush()


@pytest.mark.parametrize("name", ["before_update", "after_update"])
def test_a_session_in_a_listener_flushes_between(database: Engine, name: str) -> None:
    """The fences of the flush around it count afterwards."""

    def note(_mapper: Any, connection: Connection, _account: Account) -> None:
        with Session(connection, join_transaction_mode="rollback_only") as inner:
            bind(inner, Lease("rows", 9))
            inner.add(Noted())
            inner.commit()

    with Session(database, expire_on_commit=False) as session, listening(Account, name, note):
        changed, *deleted = session.scalars(select(Account).order_by(Account.id))
        assert deleted[0].other is not None
        session.commit()
        with Session(database) as other:
            bind(other, Lease("rows", 7))
            claim(other, Account, 2 if name == "after_update" else 1).balance = 50
            other.commit()
        bind(session, Lease("rows", 9))
        changed.balance -= 30
        for each in deleted:
            if name == "after_update":
                session.delete(each)
            else:
                each.balance -= 30
        with pytest.raises(StaleReadError):
            session.flush()


def test_a_class_that_is_always_loaded_anew(database: Engine) -> None:
    """What a query leaves out stays as old as it was, and so does the fence."""
    with Session(database, expire_on_commit=False) as session:
        row = session.get_one(Refreshed, 1)
        session.commit()
        write(database, 7, Refreshed, balance=50)
        bind(session, Lease("rows", 9))
        session.scalars(select(Refreshed).options(load_only(Refreshed.name))).all()
        row.balance -= 30
        with pytest.raises(StaleReadError):
            session.flush()


@pytest.mark.parametrize("how", ["not at all", "later", "at once", "with it"])
def test_collections_are_loaded_anew_with_the_fence(database: Engine, how: str) -> None:
    """Whichever way SQLAlchemy loads them where it loads an object anew; it keeps some that it has."""
    option = {
        "not at all": lazyload(Account.others),
        "later": lazyload(Account.others),
        "at once": selectinload(Account.others),
        "with it": joinedload(Account.others),
    }[how]
    with Session(database, expire_on_commit=False) as session:
        account = session.get_one(Account, 1)
        assert [other.id for other in account.others] == [1]
        session.commit()
        with Session(database) as other:
            bind(other, Lease("rows", 7))
            newer = claim(other, Account, 1)
            newer.others.append(other.get_one(Other, 2))
            other.commit()
        bind(session, Lease("rows", 9))
        query = session.query(Account).where(Account.id == 1).options(option).populate_existing()
        if how == "not at all":
            query = query.enable_eagerloads(value=False)
        assert query.one() is account
        assert account.last_fencing_token == 7
        account.balance = len(account.others)
        session.commit()
        assert account.balance == 2


def test_a_query_without_the_fence_leaves_it_to_what_it_does_not_load(database: Engine) -> None:
    """The balance is from before, so the fence is."""
    without = select(Refreshed.id, Refreshed.name).where(Refreshed.id == 1)
    query = select(Refreshed).from_statement(without).options(load_only(Refreshed.name))
    with Session(database, expire_on_commit=False) as session:
        row = session.get_one(Refreshed, 1)
        session.commit()
        write(database, 7, Refreshed, balance=50, name="other")
        bind(session, Lease("rows", 9))
        assert session.scalars(query, execution_options={"populate_existing": True}).one() is row
        assert (row.name, row.balance, row.last_fencing_token) == ("other", 100, 5)
        row.balance -= 30
        with pytest.raises(StaleReadError):
            session.flush()


def test_a_merge_of_a_newer_object_beside_an_older_collection(database: Engine) -> None:
    """The object is of two versions then."""
    with Session(database, expire_on_commit=False, autoflush=False) as session:
        account = session.get_one(Account, 1)
        assert [other.id for other in account.others] == [1]
        account.balance = 1
        bind(session, Lease("rows", 6))
        session.commit()
        with Session(database) as other:
            bind(other, Lease("rows", 7))
            newer = claim(other, Account, 1)
            newer.others.append(other.get_one(Other, 2))
            newer.balance = 2
            other.commit()
        with Session(database) as other:
            detached = other.get_one(Account, 1)
        bind(session, Lease("rows", 9))
        assert session.merge(detached) is account
        account.balance = len(account.others)
        with pytest.raises(StaleReadError, match="two versions"):
            session.commit()
