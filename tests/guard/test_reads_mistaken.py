"""How the fence that an object was loaded with could be mistaken: for another object's, or for a newer one.

In each test rows are loaded at fence 5 and written under token 9; another holder comes in between with 7.
"""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import BigInteger, Engine, ForeignKey, String, delete, event, insert, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, load_only, mapped_column

from fencelock.errors import StaleReadError
from fencelock.guard import FencedModel, bind, claim
from fencelock.lease import Lease
from tests.guard.listening import listening


class Base(DeclarativeBase):
    """The models of this file."""

    type_annotation_map = {str: String(20)}  # noqa: RUF012  SQLAlchemy's declaration


class Account(FencedModel, Base):
    """One row, one resource."""

    __tablename__ = "mi_accounts"
    __fence_resource__ = "account:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int] = mapped_column(default=100)
    name: Mapped[str] = mapped_column(default="new")


class Line(FencedModel, Base):
    """The rows of a list, which are named by their places."""

    __tablename__ = "mi_lines"
    __fence_resource__ = "list:{listed}"
    listed: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    place: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    text: Mapped[str] = mapped_column(default="text")


class Counted(FencedModel, Base):
    """With a listener of its own, who counts what is written, and writes names in small letters."""

    __tablename__ = "mi_counted"
    __fence_resource__ = "counted:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(default="new")
    count: Mapped[int] = mapped_column(default=0)
    step: Mapped[int] = mapped_column(default=0)


@event.listens_for(Counted, "before_update")
def on_update(_mapper: Any, _connection: Any, counted: Counted) -> None:
    """Change what nobody has asked for."""
    counted.name = counted.name.lower()
    counted.count += counted.step


class Animal(FencedModel, Base):
    """A hierarchy whose classes have tables of their own."""

    __tablename__ = "mi_animals"
    __fence_resource__ = "animal:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    legs: Mapped[int] = mapped_column(default=4)


class Dog(Animal):
    """Another table."""

    __tablename__ = "mi_dogs"
    __fence_resource__ = "dog:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    legs: Mapped[int] = mapped_column(default=4)
    last_fencing_token: Mapped[int] = mapped_column(BigInteger, server_default="0")
    last_write_id: Mapped[int] = mapped_column(BigInteger, server_default="0")
    __mapper_args__ = {"concrete": True}  # noqa: RUF012  SQLAlchemy's declaration


class SameAccount(FencedModel, Base):
    """A second class for the accounts."""

    __table__ = Account.__table__
    __fence_resource__ = "account:{id}"


@pytest.fixture
def database(engine: Engine) -> Engine:
    """An engine on a database with an account and a list of three, all at fence 5."""
    Base.metadata.create_all(engine)
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(insert(Account), {"id": 1, "last_fencing_token": 5})
        lines = [{"listed": 1, "place": place, "last_fencing_token": 5} for place in (1, 2, 3)]
        connection.execute(insert(Line), lines)
        for step in (0, 1):
            connection.execute(insert(Counted), {"id": step, "step": step, "last_fencing_token": 5})
        for table in ("mi_animals", "mi_dogs"):
            connection.execute(insert(Base.metadata.tables[table]), {"id": 1, "last_fencing_token": 5})
    return engine


def write(database: Engine, token: int, model: type[Any], key: Any, **values: Any) -> None:
    """Write a row as its holder does."""
    with Session(database) as session:
        bind(session, Lease("account:1" if model is Account else "list:1", token))
        found = claim(session, model, key)
        for name, value in values.items():
            setattr(found, name, value)
        session.commit()


def newer_without(database: Engine, *loaded: Any) -> Account:
    """Return a detached object of the account as it is now, with these attributes alone."""
    with Session(database) as session:
        newer = session.scalars(select(Account).options(load_only(*loaded))).one()
        session.expunge(newer)
    return newer


def test_what_a_merge_does_not_bring_is_of_another_version(database: Engine) -> None:
    """The newer object lacks what the session's own has from before."""
    with Session(database, expire_on_commit=False) as session:
        account = session.get_one(Account, 1)
        session.commit()
        write(database, 7, Account, 1, balance=50)
        bind(session, Lease("account:1", 9))
        assert session.merge(newer_without(database, Account.name)) is account
        account.balance -= 30
        with pytest.raises(StaleReadError):
            session.commit()


def test_what_was_changed_keeps_its_fence_in_a_merge(database: Engine) -> None:
    """It was computed from the older state, and cannot be read anew."""
    with Session(database, expire_on_commit=False, autoflush=False) as session:
        account = session.get_one(Account, 1)
        session.commit()
        account.balance -= 30
        write(database, 7, Account, 1, balance=50)
        bind(session, Lease("account:1", 9))
        session.merge(newer_without(database, Account.name))
        with pytest.raises(StaleReadError):
            session.commit()


def test_rows_that_move_up_keep_their_own_fences(database: Engine) -> None:
    """The new key of one is the old key of the next, which is the one that is stale."""
    with Session(database, expire_on_commit=False) as session:
        first = session.get_one(Line, (1, 1))
        session.commit()
        write(database, 7, Line, (1, 1), text="other")
        write(database, 7, Line, (1, 2))
        second = session.get_one(Line, (1, 2))
        bind(session, Lease("list:1", 9))
        first.text, first.place, second.place = "mine", 0, 1
        with pytest.raises(StaleReadError):
            session.commit()


def test_rows_of_different_fences_move_up(database: Engine) -> None:
    """Nobody else has come, so nothing is refused."""
    for place in (1, 2, 3):
        write(database, 5 + place, Line, (1, place))
    with Session(database) as session:
        bind(session, Lease("list:1", 9))
        for line in session.scalars(select(Line).order_by(Line.place)).all():
            line.place -= 1
        session.commit()
        places = session.execute(select(Line.place, Line.last_fencing_token)).all()
    assert sorted(map(tuple, places)) == [(0, 9), (1, 9), (2, 9)]


def test_two_objects_of_one_row_in_one_flush(database: Engine) -> None:
    """As sharded sessions may have by mistake; whichever is written first, the older one is refused."""
    with Session(database, expire_on_commit=False, autoflush=False) as session:
        older = session.get_one(Account, 1)
        session.commit()
        write(database, 7, Account, 1, balance=50)
        newer = session.get_one(Account, 1, identity_token="another")
        assert newer is not older
        bind(session, Lease("account:1", 9))
        older.balance -= 30
        newer.name = "newer"
        with pytest.raises(StaleReadError):
            session.commit()


def count(_mapper: object, _connection: object, account: Account) -> None:
    """Change what nobody has asked for, as listeners do that keep a counter or a time."""
    account.balance += 1


def test_what_a_listener_alone_has_changed_is_compared(database: Engine) -> None:
    """The object looks changed and is not, until the listener has been there."""
    with Session(database, expire_on_commit=False) as session:
        account = session.get_one(Account, 1)
        session.commit()
        write(database, 7, Account, 1, balance=50)
        bind(session, Lease("account:1", 9))
        account.name = "else"
        account.name = "new"
        with listening(Account, "before_update", count), pytest.raises(StaleReadError):
            session.commit()


def test_what_a_listener_alone_has_changed_is_stamped(database: Engine) -> None:
    """So that the same holder goes on under the next lease."""
    with Session(database, expire_on_commit=False) as session:
        bind(session, Lease("counted:1", 7))
        counted = session.get_one(Counted, 1)
        counted.name = "else"
        counted.name = "new"
        session.commit()
        assert (counted.count, counted.last_fencing_token) == (1, 7)
        bind(session, Lease("counted:1", 9))
        counted.name = "newer"
        session.commit()


def test_what_a_listener_has_undone_is_not_stamped(database: Engine) -> None:
    """Nothing is written then, and the fence stays as it was."""
    with Session(database, expire_on_commit=False) as session:
        bind(session, Lease("counted:0", 7))
        counted = session.get_one(Counted, 0)
        counted.name = "NEW"
        session.commit()
        assert counted.last_fencing_token == 5
        bind(session, Lease("counted:0", 9))
        counted.name = "newer"
        session.commit()


@pytest.mark.parametrize(
    ("model", "resource", "values"),
    [(Dog, "dog:1", {"legs": 3}), (SameAccount, "account:1", {"balance": 3})],
    ids=["concrete", "second class"],
)
@pytest.mark.parametrize("stale", [True, False])
def test_row_switch_of_a_class_beside_another(
    database: Engine, model: type[Any], resource: str, values: dict[str, int], *, stale: bool
) -> None:
    """The object that was deleted is looked for among those of its own class."""
    with Session(database, expire_on_commit=False) as session:
        beside = session.get_one(Animal, 1)
        old = session.get_one(model, 1)
        session.commit()
        if stale:
            with Session(database) as other:
                bind(other, Lease(resource, 7))
                for name, value in values.items():
                    setattr(claim(other, model, 1), name, value + 10)
                other.commit()
        bind(session, Lease(resource, 9))
        session.delete(old)
        session.add(model(id=1, **values))
        if stale:
            with pytest.raises(StaleReadError):
                session.commit()
        else:
            session.commit()
        assert beside is not old


def test_what_another_object_s_listener_changes_is_compared(database: Engine) -> None:
    """SQLAlchemy advises against it; the object's own turn may have been before."""
    with database.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(insert(Account), {"id": 2, "last_fencing_token": 5})
    with Session(database, expire_on_commit=False) as session:
        first, second = session.get_one(Account, 1), session.get_one(Account, 2)
        session.commit()

        def change(_mapper: object, _connection: object, account: Account) -> None:
            if account is second:
                first.balance -= 30

        write(database, 7, Account, 1, balance=50)
        bind(session, Lease("account:1", 9), Lease("account:2", 9))
        first.name = "else"
        first.name = "new"
        second.name = "else"
        second.name = "new"
        with listening(Account, "before_update", change), pytest.raises(StaleReadError):
            session.commit()


@pytest.mark.parametrize("key", [["place", "listed"], ["text"]], ids=["in another order", "of its own"])
def test_key_of_the_model_is_that_of_the_table(key: list[str]) -> None:
    """By which the unit of work names a row: so it is looked up what was loaded of it."""

    class Model(DeclarativeBase):
        pass

    with pytest.raises(ValueError, match="primary key"):

        class Another(FencedModel, Model):
            __tablename__ = "mi_another"
            __fence_resource__ = "another"
            listed: Mapped[int] = mapped_column(primary_key=True)
            place: Mapped[int] = mapped_column(primary_key=True)
            text: Mapped[str]
            __mapper_args__ = {"primary_key": key}  # noqa: RUF012  SQLAlchemy's declaration


def test_key_of_a_joined_child_may_have_another_name(database: Engine) -> None:
    """It is equal to its parent's, which is not fenced here."""

    class Model(DeclarativeBase):
        pass

    class Parent(Model):
        __tablename__ = "mi_parents"
        id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)

    class Child(FencedModel, Parent):
        __tablename__ = "mi_children"
        __fence_resource__ = "child:{parent_id}"
        parent_id: Mapped[int] = mapped_column(ForeignKey("mi_parents.id"), primary_key=True)
        value: Mapped[int] = mapped_column(default=0)

    Model.metadata.create_all(database)
    with Session(database, expire_on_commit=False) as session:
        bind(session, Lease("child:1", 5))
        child = Child(id=1)
        session.add(child)
        session.commit()
        with Session(database) as other:
            bind(other, Lease("child:1", 7))
            other.get_one(Child, 1).value = 1
            other.commit()
        bind(session, Lease("child:1", 9))
        child.value += 2
        with pytest.raises(StaleReadError):
            session.commit()


def test_row_that_was_deleted_and_inserted_again_is_another(database: Engine) -> None:
    """Its fence may be lower than the holder's token, and its id is another one."""
    with Session(database) as session:
        bind(session, Lease("account:1", 9))
        account = claim(session, Account, 1)
        account.balance = 50
        session.commit()
        assert account.last_fencing_token == 9
        with database.execution_options(fencelock="bypass").begin() as connection:
            connection.execute(delete(Account))
            connection.execute(insert(Account), {"id": 1, "balance": 7, "last_fencing_token": 3})
        account.balance -= 30
        with pytest.raises(StaleReadError):
            session.commit()
    with Session(database) as session:
        assert session.get_one(Account, 1).balance == 7
