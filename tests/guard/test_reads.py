"""Writes of the unit of work prove what they were computed from: the write id that came with their object.

In each test a row is loaded at fence 5, and written under token 9. Whoever writes it in between with 7 is
another holder; with 9 it is the same one.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import (
    Engine,
    ForeignKey,
    String,
    bindparam,
    create_engine,
    delete,
    event,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    defer,
    load_only,
    make_transient_to_detached,
    mapped_column,
    relationship,
)

from fencelock.errors import StaleReadError, StaleTokenError
from fencelock.guard import (
    FencedModel,
    bind,
    claim,
    claim_all,
    execute_fenced,
    fenced_delete,
    fenced_text,
    fenced_update,
    upsert,
)
from fencelock.lease import Lease


class Base(DeclarativeBase):
    """The models of this file."""

    type_annotation_map = {str: String(20)}  # noqa: RUF012  SQLAlchemy's declaration


class Account(FencedModel, Base):
    """One row, one resource."""

    __tablename__ = "rd_accounts"
    __fence_resource__ = "account:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int] = mapped_column(default=100)
    status: Mapped[str | None]
    notes: Mapped[str | None] = mapped_column(deferred=True)
    favourite_id: Mapped[int | None] = mapped_column(
        ForeignKey("rd_entries.id", use_alter=True, name="rd_fav")
    )
    entries: Mapped[list[Entry]] = relationship(foreign_keys="Entry.account_id", cascade="all, delete-orphan")
    favourite: Mapped[Entry | None] = relationship(foreign_keys=favourite_id, post_update=True)


class Entry(Base):
    """Not fenced; hangs on an account."""

    __tablename__ = "rd_entries"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    account_id: Mapped[int] = mapped_column(ForeignKey("rd_accounts.id"))


class Person(FencedModel, Base):
    """A hierarchy in joined tables; one lease guards all of it."""

    __tablename__ = "rd_people"
    __fence_resource__ = "people"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str]
    name: Mapped[str | None]
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "person"}  # noqa: RUF012


class Engineer(Person):
    """In a sub-table."""

    __tablename__ = "rd_engineers"
    id: Mapped[int] = mapped_column(ForeignKey("rd_people.id"), primary_key=True)
    language: Mapped[str | None]
    __mapper_args__ = {"polymorphic_identity": "engineer"}  # noqa: RUF012


class Manager(Person):
    """In the same table."""

    title: Mapped[str | None]
    __mapper_args__ = {"polymorphic_identity": "manager"}  # noqa: RUF012


class Versioned(FencedModel, Base):
    """With SQLAlchemy's own counter beside the write id."""

    __tablename__ = "rd_versioned"
    __fence_resource__ = "people"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version, "eager_defaults": True}  # noqa: RUF012


PEOPLE = "people"
TABLES: dict[type[Base], Any] = {model: model.__table__ for model in (Account, Person, Engineer)}


AT_5 = {"last_fencing_token": 5, "last_write_id": 5}


def lease(token: int, resource: str = "account:1") -> Lease:
    """Return a lease made by hand."""
    return Lease(resource, token)


def session_with(engine: Engine, token: int, resource: str = "account:1", **options: Any) -> Session:
    """Return a session that writes under a token."""
    session = Session(engine, **options)
    bind(session, lease(token, resource))
    return session


def write(engine: Engine, token: int, **values: Any) -> None:
    """Write the account as another holder does, or the same one in another session."""
    with session_with(engine, token) as session:
        account = claim(session, Account, 1)
        for name, value in (values or {"balance": 50}).items():
            setattr(account, name, value)
        session.commit()


def stored(engine: Engine, what: Any = Account.balance) -> Any:
    """Return what the database has."""
    with engine.connect() as connection:
        return connection.scalar(select(what))


@contextmanager
def refused(current: int = 7, token: int = 9) -> Iterator[None]:
    """Expect the error, with these facts."""
    with pytest.raises(StaleReadError) as caught:
        yield
    error = caught.value
    assert (error.current, error.token) == (current, token)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  made here
    assert (str(again), again.loaded) == (str(error), error.loaded)


@contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    """Note what is sent."""
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield sent
    event.remove(engine, "before_cursor_execute", note)


@pytest.fixture
def engine(shared_engine: Engine, _tables: None) -> Engine:
    """An engine on a database with one row of each kind, at fence 5."""
    with shared_engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(update(Account).values(favourite_id=None))
        for model in (Entry, Account, TABLES[Engineer], TABLES[Person], Versioned):
            connection.execute(delete(model))
        connection.execute(
            insert(Account),
            {"id": 1, "balance": 100, "status": "new", **AT_5},
        )
        connection.execute(insert(Entry), [{"id": 1, "account_id": 1}, {"id": 2, "account_id": 1}])
        people = insert(TABLES[Person])
        connection.execute(people, [{"id": 1, "kind": "engineer", **AT_5}])
        connection.execute(people, [{"id": 2, "kind": "manager", **AT_5}])
        connection.execute(insert(TABLES[Engineer]), {"id": 1, "language": "C"})
        connection.execute(insert(Versioned), {"id": 1, "version": 1, **AT_5})
    return shared_engine


def plain(engine: Engine, **options: Any) -> Session:
    """Return a session that holds nothing yet."""
    return Session(engine, **options)


@pytest.mark.parametrize("token", [7, 9])
def test_object_from_before_the_lock_is_not_written_over_what_came_since(engine: Engine, token: int) -> None:
    """The row was loaded, then another holder wrote it, or the same one, then this one got the lock."""
    with plain(engine, expire_on_commit=False) as session:
        account = session.get_one(Account, 1)
        session.commit()
        write(engine, token)
        bind(session, lease(9))
        account.balance -= 30
        with refused(token):
            session.commit()
    assert stored(engine) == 50


def test_claim_of_another_holder_changes_nothing(engine: Engine) -> None:
    """It shuts older holders out, and what was read is as true as before."""
    with plain(engine, expire_on_commit=False) as session:
        account = session.get_one(Account, 1)
        session.commit()
        with session_with(engine, 7) as other:
            claim(other, Account, 1)
            other.commit()
        bind(session, lease(9))
        account.balance -= 30
        session.commit()
    assert stored(engine) == 70


def test_object_from_before_the_lock_is_written_where_nobody_came(engine: Engine) -> None:
    """A larger token alone is no reason to refuse."""
    with plain(engine) as session:
        account = session.get_one(Account, 1)
        bind(session, lease(9))
        account.balance -= 30
        session.commit()
        assert account.last_fencing_token == 9
    assert stored(engine) == 70


def test_row_that_an_older_holder_writes_late_is_not_overwritten(engine: Engine) -> None:
    """Read under the lock without a claim, while an older holder's write is still under way."""
    with session_with(engine, 9, expire_on_commit=False) as session:
        account = session.get_one(Account, 1)
        session.commit()
        write(engine, 7)
        account.balance -= 30
        with refused():
            session.commit()
    assert stored(engine) == 50


def test_delete_proves_what_it_has_seen(engine: Engine) -> None:
    """An object that was loaded before another holder wrote is not deleted."""
    with plain(engine, expire_on_commit=False) as session:
        account = session.get_one(Account, 1, options=[defer(Account.balance)])
        session.execute(update(Account).values(favourite_id=None), execution_options={"fencelock": "bypass"})
        entries = list(account.entries)
        session.commit()
        write(engine, 7)
        bind(session, lease(9))
        assert entries
        session.delete(account)
        with refused():
            session.commit()
    assert stored(engine) == 50


def test_loop_that_begins_again_on_a_stale_token_is_right(engine: Engine) -> None:
    """It is a StaleTokenError, and a rollback has the session load the row again."""
    with plain(engine, expire_on_commit=False) as session:
        account = session.get_one(Account, 1)
        session.commit()
        write(engine, 7)
        bind(session, lease(9))
        for _ in range(2):
            try:
                account.balance -= 30
                session.commit()
            except StaleTokenError:
                session.rollback()
            else:
                break
    assert stored(engine) == 20


def test_what_was_loaded_above_the_token_is_a_stale_token(engine: Engine) -> None:
    """The lease is too old, whatever was read."""
    with plain(engine, expire_on_commit=False) as session:
        write(engine, 10)
        account = session.get_one(Account, 1)
        session.commit()
        bind(session, lease(9))
        account.balance -= 30
        with pytest.raises(StaleTokenError) as caught:
            session.commit()
        assert type(caught.value) is StaleTokenError
        assert (caught.value.token, caught.value.current, caught.value.identity) == (9, 10, (1,))


@pytest.mark.parametrize("way", ["merged", "added", "merged without a load", "pickled"])
def test_write_id_of_a_detached_object_counts(engine: Engine, way: str) -> None:
    """It was kept in a cache, say; that its row is loaded again to merge it makes it no younger."""
    with plain(engine) as session:
        kept = session.get_one(Account, 1)
        session.expunge(kept)
    if way == "pickled":
        kept = pickle.loads(pickle.dumps(kept))  # noqa: S301  made here
    write(engine, 7)
    with plain(engine) as session:
        if way == "merged":
            kept.balance -= 30
            session.merge(kept)
        elif way == "merged without a load":
            session.merge(kept, load=False).balance = 70
        else:
            session.add(kept)
            kept.balance -= 30
        bind(session, lease(9))
        with refused():
            session.commit()
    assert stored(engine) == 50


def test_merged_object_that_happens_to_be_what_the_row_is(engine: Engine) -> None:
    """Both took 50 off: the row would look right, and one of them had not happened."""
    with plain(engine) as session:
        kept = session.get_one(Account, 1)
        session.expunge(kept)
    write(engine, 7)
    with plain(engine) as session:
        bind(session, lease(9))
        session.merge(kept).balance -= 50
        with refused():
            session.commit()
    with plain(engine) as session:
        session.merge(kept)
        session.rollback()
        session.merge(session.get_one(Account, 1))
        session.commit()
    assert stored(engine) == 50


def test_merged_object_of_another_version_than_the_session_s_own(engine: Engine) -> None:
    """It is of two versions then, though the newer one was given. Without the session's own, it passes."""
    with plain(engine, expire_on_commit=False) as session:
        own = session.get_one(Account, 1)
        session.commit()
        write(engine, 7)
        with plain(engine) as other:
            newer = other.get_one(Account, 1)
            other.expunge(newer)
        newer.balance -= 30
        bind(session, lease(9))
        session.merge(newer)
        with refused():
            session.commit()
        session.rollback()
        assert own.balance == 50
        session.merge(newer)
        session.commit()
    assert stored(engine) == 20


def test_merged_object_made_by_hand(engine: Engine) -> None:
    """It was computed from no row: what counts is only that the row does not change under the merge."""
    write(engine, 7)
    with session_with(engine, 9) as session:
        session.merge(Account(id=1, balance=1))
        session.commit()
    assert stored(engine) == 1


def test_object_made_persistent_by_hand(engine: Engine) -> None:
    """Its write id is not known, and never taken for 0."""
    write(engine, 7)
    with session_with(engine, 9) as session:
        account = Account(id=1)
        make_transient_to_detached(account)
        session.add(account)
        account.balance = 1
        session.commit()
    assert stored(engine) == 1


def test_expired_object_is_loaded_with_its_key_as_ever(engine: Engine) -> None:
    """Values that are assigned blindly are written whatever was there; no statement more is sent for it."""
    with plain(engine) as session:
        account = session.get_one(Account, 1)
        session.commit()
        write(engine, 7)
        bind(session, lease(9))
        account.balance = 1
        with statements(engine) as sent:
            session.commit()
        assert len(sent) == 2
        assert account.last_fencing_token == 9
    assert stored(engine) == 1


@pytest.mark.parametrize("stale", [False, True])
def test_objects_of_known_and_unknown_write_id_in_one_flush(engine: Engine, *, stale: bool) -> None:
    """One statement for both: the unknown one passes, the known one is compared."""
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(insert(Account), {"id": 2, "balance": 100, "last_fencing_token": 7})
    with plain(engine, expire_on_commit=False) as session:
        known = session.get_one(Account, 1)
        unknown = Account(id=2)
        make_transient_to_detached(unknown)
        session.add(unknown)
        session.commit()
        if stale:
            write(engine, 7)
        bind(session, lease(9), lease(9, "account:2"))
        known.balance, unknown.balance = 1, 2
        with statements(engine) as sent:
            if stale:
                with refused():
                    session.commit()
            else:
                session.commit()
                assert len(sent) == 1
    second = select(Account.balance).where(Account.id == 2).scalar_subquery()
    assert stored(engine, second) == (100 if stale else 2)


class TestTheSameHolder:
    """Goes on, and is never refused."""

    def test_in_several_transactions(self, engine: Engine) -> None:
        """Each leaves the write id that the next one finds."""
        with session_with(engine, 9, expire_on_commit=False) as session:
            account = session.get_one(Account, 1)
            for _ in range(3):
                account.balance -= 10
                session.commit()
        assert stored(engine) == 70

    def test_with_other_statements_in_between(self, engine: Engine) -> None:
        """Core, text, bulk, upsert: what they have not told the session of is loaded again."""
        with session_with(engine, 9) as session:
            account = session.get_one(Account, 1)
            connection = session.connection()
            connection.execute(update(TABLES[Account]).where(Account.id == 1).values(status="core"))
            session.bulk_update_mappings(inspect(Account), [{"id": 1, "status": "bulk"}])
            session.execute(update(Account), [{"id": 1, "status": "bulk"}])
            session.execute(
                fenced_text(
                    "UPDATE rd_accounts SET status = 'text', last_fencing_token = :fencing_token,"
                    " last_write_id = :fencing_write_id "
                    "WHERE id = 1 AND last_fencing_token <= :fencing_token",
                    Account,
                )
            )
            upsert(session, Account, [{"id": 1, "status": "upsert"}])
            session.commit()
            account.balance -= 10
            session.commit()
        assert stored(engine) == 90

    @pytest.mark.parametrize("synchronize", ["auto", "evaluate", "fetch"])
    def test_with_statements_that_the_session_follows(self, engine: Engine, synchronize: str) -> None:
        """SQLAlchemy applies them to the objects, whose ids move as the rows' do."""
        with session_with(engine, 9, expire_on_commit=False) as session:
            account = session.get_one(Account, 1)
            statement = update(Account).where(Account.id == 1)
            for status in ("one", "two"):
                session.execute(
                    statement.values(status=status), execution_options={"synchronize_session": synchronize}
                )
                account.balance -= 10
                session.flush()
            session.commit()
        assert stored(engine) == 80

    def test_object_of_another_version_does_not_become_new_by_a_statement(self, engine: Engine) -> None:
        """The statement writes the row as it is, and the object was computed from another one."""
        with plain(engine, expire_on_commit=False) as session:
            account = session.get_one(Account, 1)
            session.commit()
            write(engine, 9)
            bind(session, lease(9))
            session.execute(update(Account).where(Account.id == 1).values(status="x"))
            account.balance -= 10
            with refused(9):
                session.commit()

    def test_with_a_claim_in_another_session(self, engine: Engine) -> None:
        """The row's write id is then the holder's own."""
        with session_with(engine, 9, expire_on_commit=False) as session:
            account = session.get_one(Account, 1)
            session.commit()
            with session_with(engine, 9) as other:
                claim(other, Account, 1)
                other.commit()
            account.balance -= 10
            session.commit()
        assert stored(engine) == 90

    def test_after_remint(self, engine: Engine) -> None:
        """All tokens of a hold are its own; not those of a COMMIT in doubt."""
        hold = lease(7)
        with plain(engine, expire_on_commit=False) as session:
            account = session.get_one(Account, 1)
            session.commit()
            bind(session, hold)
            account.balance -= 0
            session.commit()
            hold.remint(8, hold.expires_at)
            hold.remint(9, hold.expires_at)
            account.balance -= 10
            session.commit()
        assert stored(engine) == 90

    def test_with_another_lease(self, engine: Engine) -> None:
        """It was released and taken again, with nobody in between."""
        with session_with(engine, 7, expire_on_commit=False) as session:
            account = session.get_one(Account, 1)
            account.balance -= 10
            session.commit()
            bind(session, lease(9))
            account.balance -= 10
            session.commit()
        assert stored(engine) == 80

    def test_writes_what_it_has_inserted(self, engine: Engine) -> None:
        """A new object knows its write id."""
        with session_with(engine, 9, "account:3", expire_on_commit=False) as session:
            account = Account(id=3)
            session.add(account)
            session.commit()
            account.balance -= 10
            session.commit()
            assert account.last_fencing_token == 9


class TestAfterARollback:
    """The object's write id is what the row has, or not known; never what was rolled back."""

    def test_of_the_transaction(self, engine: Engine) -> None:
        """Everything is loaded again."""
        with session_with(engine, 9, expire_on_commit=False) as session:
            account = session.get_one(Account, 1)
            account.balance -= 10
            session.flush()
            session.rollback()
            assert account.last_fencing_token == 5
            account.balance -= 10
            session.commit()
        assert stored(engine) == 90

    @pytest.mark.parametrize("how", ["flushed", "claimed", "all claimed"])
    def test_to_a_savepoint(self, engine: Engine, how: str) -> None:
        """Whatever had raised the fence: the row has the write id again that the object was loaded with."""
        with session_with(engine, 9, expire_on_commit=False) as session:
            account = session.get_one(Account, 1)
            with session.begin_nested() as savepoint:
                if how == "flushed":
                    account.balance -= 10
                    session.flush()
                elif how == "claimed":
                    claim(session, Account, 1)
                else:
                    claim_all(session, select(Account))
                assert account.last_fencing_token == 9
                savepoint.rollback()
            account.balance -= 10
            session.commit()
        assert stored(engine) == 90

    @pytest.mark.parametrize("nested", [False, True])
    def test_of_an_insert(self, engine: Engine, *, nested: bool) -> None:
        """The row is not there: the object has no write id, and can be inserted again."""
        with session_with(engine, 9, "account:3") as session:
            account = Account(id=3)
            inner = session.begin_nested() if nested else session.begin()
            session.add(account)
            session.flush()
            assert account.last_fencing_token == 9
            inner.rollback()
            assert inspect(account).dict.get("last_fencing_token") is None
            session.add(account)
            session.commit()
            assert account.last_fencing_token == 9


class TestPartsOfAnObject:
    """The write id is loaded with whatever else is loaded, and never later."""

    @pytest.mark.parametrize("options", [[load_only(Account.balance)], [defer("*")]])
    def test_no_option_leaves_it_out(self, engine: Engine, options: list[Any]) -> None:
        """As with the primary key."""
        with plain(engine, expire_on_commit=False) as session:
            account = session.get_one(Account, 1, options=options)
            session.commit()
            write(engine, 7)
            assert "last_write_id" in inspect(account).dict
            bind(session, lease(9))
            account.balance -= 10
            with refused():
                session.commit()

    @pytest.mark.parametrize("how", ["refreshed", "expired", "deferred", "populate_existing"])
    def test_what_is_loaded_later_makes_it_no_younger(self, engine: Engine, how: str) -> None:
        """The rest of the object is as old as before."""
        with plain(engine, expire_on_commit=False) as session:
            account = session.get_one(Account, 1)
            session.commit()
            write(engine, 7)
            if how == "refreshed":
                session.refresh(account, ["status"])
            elif how == "expired":
                session.expire(account, ["status"])
            elif how == "populate_existing":
                query = select(Account).options(load_only(Account.status))
                session.scalars(query.execution_options(populate_existing=True)).all()
            assert (account.status, account.notes, account.balance) == ("new", None, 100)
            session.commit()
            bind(session, lease(9))
            account.balance -= 10
            with refused():
                session.commit()

    @pytest.mark.parametrize("how", ["refresh", "populate_existing"])
    def test_what_is_loaded_anew_is_as_young_as_its_write_id(self, engine: Engine, how: str) -> None:
        """Nothing of the object is older than that."""
        with plain(engine, expire_on_commit=False) as session:
            account = session.get_one(Account, 1)
            session.commit()
            write(engine, 7)
            if how == "refresh":
                session.refresh(account)
            else:
                session.scalars(select(Account).execution_options(populate_existing=True)).all()
            assert account.balance == 50
            session.commit()
            bind(session, lease(9))
            account.balance -= 10
            session.commit()
        assert stored(engine) == 40

    def test_query_without_the_write_id(self, engine: Engine) -> None:
        """Loaded with the rest later, it is newer than the part from before."""
        with plain(engine, expire_on_commit=False) as session:
            query = select(Account).from_statement(text("SELECT id, balance FROM rd_accounts"))
            account = session.scalars(query).one()
            session.commit()
            write(engine, 7)
            assert account.status == "new"
            session.commit()
            bind(session, lease(9))
            account.balance -= 10
            with refused():
                session.commit()


class TestShapes:
    """Whatever the statement looks like."""

    @pytest.mark.parametrize(
        ("model", "attribute"),
        [(Engineer, "language"), (Engineer, "name"), (Manager, "title"), (Person, "name")],
    )
    def test_inheritance(self, engine: Engine, model: type[Person], attribute: str) -> None:
        """The write id of the base row counts, also where only the sub-table changes."""
        identity = 2 if model is Manager else 1
        with plain(engine, expire_on_commit=False) as session:
            person = session.get_one(model, identity)
            session.commit()
            with session_with(engine, 7, PEOPLE) as other:
                claim(other, Person, identity).name = "other"
                other.commit()
            bind(session, lease(9, PEOPLE))
            setattr(person, attribute, "x")
            with refused():
                session.commit()
            session.rollback()
            setattr(session.get_one(model, identity), attribute, "x")
            session.commit()

    def test_collection(self, engine: Engine) -> None:
        """A change in a collection writes the row, so it is compared as well."""
        with plain(engine, expire_on_commit=False) as session:
            account = session.get_one(Account, 1)
            assert len(account.entries) == 2
            session.commit()
            write(engine, 7)
            bind(session, lease(9))
            account.entries.append(Entry(id=3))
            with refused():
                session.commit()
        assert stored(engine, select(Entry.id).where(Entry.id == 3).scalar_subquery()) is None

    @pytest.mark.parametrize("also", [False, True])
    def test_post_update(self, engine: Engine, *, also: bool) -> None:
        """Alone, and as the second UPDATE of a row in one flush."""
        for stale in (False, True):
            with plain(engine, expire_on_commit=False) as session:
                account = session.get_one(Account, 1)
                first, second = account.entries
                session.commit()
                if stale:
                    write(engine, 10)
                bind(session, lease(11 if stale else 9))
                account.favourite = second if stale else first
                if also:
                    account.balance += 1
                if stale:
                    with refused(10, 11):
                        session.commit()
                else:
                    session.commit()

    def test_version_counter(self, engine: Engine) -> None:
        """It stands beside the write id, which is what tells."""
        with plain(engine, expire_on_commit=False) as session:
            row = session.get_one(Versioned, 1)
            session.commit()
            with session_with(engine, 7, PEOPLE) as other:
                claim(other, Versioned, 1).value = 50
                other.commit()
            bind(session, lease(9, PEOPLE))
            row.value = 1
            with refused():
                session.commit()
            session.rollback()
            row.value = 1
            session.commit()
            assert row.version == 3

    @pytest.mark.parametrize("delete_them", [False, True])
    def test_many_rows(self, engine: Engine, *, delete_them: bool) -> None:
        """In one statement for all; one old one among them is found."""
        with engine.execution_options(fencelock="bypass").begin() as connection:
            connection.execute(
                insert(TABLES[Person]),
                [{"id": 10 + n, "kind": "person", "last_fencing_token": n % 6} for n in range(300)],
            )
        for stale in (True, False):
            with plain(engine, expire_on_commit=False) as session:
                people = session.scalars(select(Person).where(Person.id >= 10).order_by(Person.id)).all()
                session.commit()
                if stale:
                    with session_with(engine, 7, PEOPLE) as other:
                        claim(other, Person, 210).name = "other"
                        other.commit()
                bind(session, lease(9, PEOPLE))
                for person in people:
                    if delete_them:
                        session.delete(person)
                    else:
                        person.name = "x"
                if stale:
                    with pytest.raises(StaleReadError) as caught:
                        session.commit()
                    assert (caught.value.identity, caught.value.current) == ((210,), 7)
                else:
                    with statements(engine) as sent:
                        session.commit()
                    assert len([each for each in sent if "rd_people" in each]) == 1

    def test_row_switch(self, engine: Engine) -> None:
        """A new object in the place of a deleted one: the write id of the deleted one counts."""
        for stale in (False, True):
            with plain(engine, expire_on_commit=False) as session:
                row = session.get_one(Versioned, 1)
                session.commit()
                if stale:
                    with session_with(engine, 10, PEOPLE) as other:
                        claim(other, Versioned, 1).value = 50
                        other.commit()
                bind(session, lease(11 if stale else 9, PEOPLE))
                session.delete(row)
                session.add(Versioned(id=1, value=3))
                if stale:
                    with refused(10, 11):
                        session.commit()
                else:
                    session.commit()

    def test_key_change(self, engine: Engine) -> None:
        """The row is named by its old key."""
        for stale in (False, True):
            with plain(engine, expire_on_commit=False) as session:
                row = session.scalars(select(Versioned)).one()
                session.commit()
                if stale:
                    with session_with(engine, 10, PEOPLE) as other:
                        claim(other, Versioned, row.id).value = 50
                        other.commit()
                bind(session, lease(11 if stale else 9, PEOPLE))
                row.id += 1
                if stale:
                    with refused(10, 11):
                        session.commit()
                else:
                    session.commit()
                    assert row.last_fencing_token == 9

    def test_bulk_and_core_have_no_object(self, engine: Engine) -> None:
        """They are compared with the token alone, whatever objects the session has of their rows."""
        with plain(engine, expire_on_commit=False) as session:
            account = session.get_one(Account, 1)
            session.commit()
            write(engine, 7)
            bind(session, lease(9))
            session.execute(update(Account), [{"id": 1, "balance": 1}])
            session.bulk_update_mappings(inspect(Account), [{"id": 1, "balance": 2}])
            session.execute(update(Account).where(Account.id == account.id).values(balance=3))
            session.commit()
        assert stored(engine) == 3


class TestStatementsThatSayIt:
    """`fenced_update(…, loaded=…)`, for those who know what they have read."""

    @pytest.mark.parametrize("named", [True, False])
    @pytest.mark.parametrize("make", ["update", "delete"])
    def test_refuses_what_came_since(self, engine: Engine, make: str, *, named: bool) -> None:
        """By key, and by criteria."""
        which = Account.id == 1 if named else Account.status == "new"

        def statement(loaded: int | None) -> Any:
            if make == "update":
                return fenced_update(Account, loaded=loaded).where(which).values(balance=1)
            return fenced_delete(Account, loaded=loaded).where(which)

        with engine.execution_options(fencelock="bypass").begin() as connection:
            connection.execute(delete(Entry))
        write(engine, 7)
        with engine.connect() as connection:
            with pytest.raises(StaleReadError) as caught:
                execute_fenced(connection, statement(5), token=9)
            assert (caught.value.loaded, caught.value.current, caught.value.token) == (5, 7, 9)
            assert caught.value.identity == ((1,) if named else None)
            connection.rollback()
            now = connection.scalar(select(Account.last_write_id))
            assert execute_fenced(connection, statement(now), token=9).rowcount == 1
            connection.commit()

    def test_takes_one_for_each_row(self, engine: Engine) -> None:
        """As a parameter of one's own."""
        statement = fenced_update(Account, loaded=bindparam("seen")).where(Account.id == bindparam("key"))
        with engine.begin() as connection:
            execute_fenced(
                connection,
                statement.values(balance=1),
                [{"key": 1, "seen": 5}, {"key": 2, "seen": 3}],
                token=9,
            )
        with engine.connect() as connection, pytest.raises(StaleReadError):
            execute_fenced(connection, statement.values(balance=1), [{"key": 1, "seen": 5}], token=11)

    @pytest.mark.parametrize("loaded", [-1, 2**53, "5", 1.5])
    def test_refuses_what_is_no_id(self, loaded: Any) -> None:
        """Before there is a statement."""
        with pytest.raises((ValueError, TypeError), match="write id"):
            fenced_update(Account, loaded=loaded)


def test_asyncio(engine: Engine, for_asyncio: Callable[[Engine], AsyncEngine]) -> None:
    """One object and many, on each driver; a flush of many sends few statements, however it counts."""
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(
            insert(TABLES[Person]),
            [{"id": 10 + n, "kind": "person", "last_fencing_token": n % 6} for n in range(99)],
        )

    async def play() -> None:
        made = for_asyncio(engine)
        async with AsyncSession(made, expire_on_commit=False) as session:
            account = await session.get_one(Account, 1)
            people = (await session.scalars(select(Person).where(Person.id >= 10))).all()
            await session.commit()
            write(engine, 7)
            bind(session, lease(9), lease(9, PEOPLE))
            account.balance -= 30
            with refused():
                await session.commit()
            await session.rollback()
        async with AsyncSession(made, expire_on_commit=False) as session:
            bind(session, lease(9, PEOPLE))
            people = (await session.scalars(select(Person).where(Person.id >= 10))).all()
            await session.commit()
            for person in people:
                person.name = "x"
            with statements(made.sync_engine) as sent:
                await session.commit()
            assert (
                len(sent) <= 3
            )  # the UPDATE; with asyncpg, which rows have turned it away, and which are there
        await made.dispose()

    asyncio.run(play())


def test_another_engine_on_the_same_database(engine: Engine) -> None:
    """What was loaded over one engine is written over another."""
    with plain(engine) as session:
        account = session.get_one(Account, 1)
        session.expunge(account)
    write(engine, 7)
    other = create_engine(engine.url)
    with session_with(other, 9) as session:
        session.add(account)
        account.balance = 1
        with refused():
            session.commit()
    other.dispose()
