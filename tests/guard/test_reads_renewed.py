"""Objects of which only a part was loaded anew, and objects that outlive a transaction which was undone.

In each test rows are loaded at fence 5 and written under token 9; another holder comes in between with 7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Column, Engine, ForeignKey, Integer, Table, TypeDecorator, select
from sqlalchemy.ext.orderinglist import ordering_list
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    composite,
    joinedload,
    load_only,
    mapped_column,
    relationship,
    with_polymorphic,
)

from fencelock.errors import StaleReadError
from fencelock.guard import FencedModel, bind, claim
from fencelock.lease import Lease


class Base(DeclarativeBase):
    """The models of this file."""


links = Table(
    "rn_links",
    Base.metadata,
    Column("account", ForeignKey("rn_accounts.id"), primary_key=True),
    Column("tag", ForeignKey("rn_tags.id"), primary_key=True),
)


class Tag(Base):
    """Not fenced."""

    __tablename__ = "rn_tags"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Pair:
    """Two columns as one value."""

    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y

    def __composite_values__(self) -> tuple[int, int]:
        return self.x, self.y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and (self.x, self.y) == (other.x, other.y)

    __hash__ = None  # type: ignore[assignment]


class Account(FencedModel, Base):
    """With relationships of several kinds, and subclasses."""

    __tablename__ = "rn_accounts"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[int] = mapped_column(default=0)
    balance: Mapped[int] = mapped_column(default=100)
    x: Mapped[int] = mapped_column(default=1)
    y: Mapped[int] = mapped_column(default=1)
    pair: Mapped[Pair] = composite("x", "y")
    z: Mapped[int] = mapped_column(default=1, deferred=True)
    deep: Mapped[Pair] = composite("x", "z")
    steps: Mapped[list[Step]] = relationship(back_populates="account")
    tags: Mapped[list[Tag]] = relationship(secondary=links, cascade="save-update")
    items: Mapped[list[Item]] = relationship(order_by="Item.place", collection_class=ordering_list("place"))
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": 0}  # noqa: RUF012


class Vector:
    """A value that cannot be compared to one truth value, as those of numpy."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> Any:
        return Ambiguous() if isinstance(other, Vector) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class Ambiguous:
    """What comparing gives."""

    def __bool__(self) -> bool:
        raise ValueError("truth value ambiguous")


class VectorType(TypeDecorator[Vector]):
    """Keeps it as a number."""

    impl = Integer
    cache_ok = True

    def process_bind_param(self, value: Vector | None, dialect: object) -> int | None:  # noqa: ARG002
        """Make it a number."""
        return None if value is None else value.number

    def process_result_value(self, value: int | None, dialect: object) -> Vector | None:  # noqa: ARG002
        """Make it of a number."""
        return None if value is None else Vector(value)

    def compare_values(self, x: object, y: object) -> bool:
        """Compare what it holds."""
        return getattr(x, "number", None) == getattr(y, "number", None)


class Measured(FencedModel, Base):
    """Has such a value."""

    __tablename__ = "rn_measured"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    vector: Mapped[Any] = mapped_column(VectorType)


class Item(Base):
    """Has its place in its account's list."""

    __tablename__ = "rn_items"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    account_id: Mapped[int | None] = mapped_column(ForeignKey(Account.id))
    place: Mapped[int]


class Step(Base):
    """Knows its account."""

    __tablename__ = "rn_steps"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    account_id: Mapped[int | None] = mapped_column(ForeignKey(Account.id))
    account: Mapped[Account | None] = relationship(back_populates="steps")


class Joined(Account):
    """Has another table, and a collection."""

    __tablename__ = "rn_joined"
    id: Mapped[int] = mapped_column(ForeignKey(Account.id), primary_key=True)
    extra: Mapped[int] = mapped_column(default=100)
    notes: Mapped[list[Note]] = relationship()
    __mapper_args__ = {"polymorphic_identity": 1}  # noqa: RUF012


class Single(Account):
    """Has another column of the same table."""

    extra: Mapped[int | None] = mapped_column("extra_of_single", default=100)
    __mapper_args__ = {"polymorphic_identity": 2}  # noqa: RUF012


class Note(Base):
    """Not fenced."""

    __tablename__ = "rn_notes"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    joined_id: Mapped[int | None] = mapped_column(ForeignKey(Joined.id))


class Staff(Base):
    """Not fenced; its subclasses are, in tables of their own."""

    __tablename__ = "rn_staff"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[int]
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": 0}  # noqa: RUF012


class Engineer(FencedModel, Staff):
    """The first that is fenced."""

    __tablename__ = "rn_engineers"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(ForeignKey(Staff.id), primary_key=True)
    balance: Mapped[int] = mapped_column(default=100)
    __mapper_args__ = {"polymorphic_identity": 1, "polymorphic_load": "inline"}  # noqa: RUF012


class Manager(FencedModel, Staff):
    """The second."""

    __tablename__ = "rn_managers"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(ForeignKey(Staff.id), primary_key=True)
    balance: Mapped[int] = mapped_column(default=100)
    __mapper_args__ = {"polymorphic_identity": 2, "polymorphic_load": "inline"}  # noqa: RUF012


@pytest.fixture
def database(engine: Engine) -> Engine:
    """An engine on a database with rows of each kind at fence 5."""
    Base.metadata.create_all(engine)
    with Session(engine.execution_options(fencelock="bypass")) as session:
        account = Account(id=1, last_fencing_token=5, items=[Item(id=key, place=0) for key in (1, 2, 3)])
        account.tags = [Tag(id=1)]
        session.add(Measured(id=1, vector=Vector(1), last_fencing_token=5))
        account.steps = [Step(id=1)]
        joined = Joined(id=2, last_fencing_token=5, notes=[Note(id=1)])
        session.add_all([account, joined, Single(id=3, last_fencing_token=5)])
        session.add_all([Engineer(id=1, last_fencing_token=5), Manager(id=2, last_fencing_token=5)])
        session.commit()
    return engine


def change(database: Engine, model: type[Any], key: int, do: Callable[[Any], object], token: int = 7) -> None:
    """Write a row as its holder does."""
    with Session(database) as session:
        bind(session, Lease("rows", token))
        do(claim(session, model, key))
        session.commit()


def set_extra(row: Any) -> None:
    """Take away half of what the subclass adds."""
    row.extra = 50


def set_pair(row: Any) -> None:
    """Assign a value of two columns."""
    row.pair = Pair(50, 50)


def append_note(row: Any) -> None:
    """Add to the subclass's collection."""
    row.notes.append(Note(id=2))


def append_step(row: Any) -> None:
    """Add to a collection whose other side is being merged."""
    row.steps.append(Step(id=2))


def append_tag(row: Any) -> None:
    """Add to a collection that a merge leaves alone."""
    row.tags.append(Tag(id=7))


def take_from_extra(row: Any) -> int:
    """Compute from the subclass's column."""
    row.extra -= 30
    return int(row.extra)


def take_from_pair(row: Any) -> int:
    """Compute from a value of two columns."""
    row.pair = Pair(row.pair.x - 30, row.pair.y - 30)
    return int(row.x)


def count_notes(row: Any) -> int:
    """Compute from the subclass's collection."""
    row.balance = len(row.notes)
    return int(row.balance)


def count_tags(row: Any) -> int:
    """Compute from a collection that a merge leaves alone."""
    row.balance = len(row.tags)
    return int(row.balance)


def test_what_a_merge_comes_from_is_of_two_versions(database: Engine) -> None:
    """SQLAlchemy leaves out the other side of the relationship over which it has come."""
    with Session(database, expire_on_commit=False) as session:
        row = session.get_one(Account, 1)
        assert len(row.steps) == 1
        session.commit()
        change(database, Account, 1, append_step)
        with Session(database) as reading:
            loading = joinedload(Step.account).selectinload(Account.steps)
            newer = reading.get_one(Step, 1, options=[loading])
        bind(session, Lease("rows", 9))
        session.merge(newer)
        row.balance = len(row.steps)
        with pytest.raises(StaleReadError, match="two versions"):
            session.commit()


@pytest.mark.parametrize("renew", ["claim", "populate", "by the base"])
@pytest.mark.parametrize("model", [Account, Joined])
def test_composites_and_collections_are_as_new_as_the_fence(
    database: Engine, model: type[Any], renew: str
) -> None:
    """The row is loaded anew, by a query or by a claim."""
    key = 1 if model is Account else 2

    def widen(row: Any) -> None:
        row.z = 50
        row.items.append(Item(id=9, place=9))

    with Session(database, expire_on_commit=False) as session:
        row = session.get_one(model, key)
        before = len(row.items)
        assert (row.z, row.deep.y) == (1, 1)
        session.commit()
        change(database, model, key, widen)
        bind(session, Lease("rows", 9))
        if renew == "claim":
            claim(session, model, key)
        elif renew == "by the base":
            claim(session, Account, key)
        else:
            session.get_one(model, key, populate_existing=True)
        row.balance = row.deep.y + len(row.items)
        session.commit()
        assert row.balance == 50 + before + 1


@pytest.mark.parametrize(
    ("model", "key", "source", "options", "other", "write"),
    [
        pytest.param(Joined, 2, Joined, [Account.balance], set_extra, take_from_extra, id="joined"),
        pytest.param(Single, 3, Single, [Account.balance], set_extra, take_from_extra, id="single"),
        pytest.param(Joined, 2, Account, [], set_extra, take_from_extra, id="by the base"),
        pytest.param(Joined, 2, Joined, [], append_note, count_notes, id="collection of a subclass"),
        pytest.param(Account, 1, Account, [], append_tag, count_tags, id="no cascade"),
        pytest.param(Account, 1, Account, [], set_pair, take_from_pair, id="composite"),
    ],
)
def test_merge_that_leaves_something_out_makes_two_versions(  # noqa: PLR0917  each case in one line
    database: Engine,
    model: type[Any],
    key: int,
    source: type[Any],
    options: list[Any],
    other: Callable[[Any], object],
    write: Callable[[Any], int],
) -> None:
    """A newer object brings its values, and some of the older one stay."""
    with Session(database, expire_on_commit=False) as session:
        row = session.get_one(model, key)
        for name in ("notes", "tags", "pair", "extra"):
            getattr(row, name, None)
        session.commit()
        change(database, model, key, other)
        with Session(database) as reading:
            query = select(source).where(source.id == key)
            newer = reading.scalars(query.options(load_only(*options)) if options else query).one()
            if write is count_tags:
                assert newer.tags
        bind(session, Lease("rows", 9))
        assert session.merge(newer) is row
        write(row)
        with pytest.raises(StaleReadError, match="two versions"):
            session.commit()


@pytest.mark.parametrize("model", [Account, Joined])
def test_a_merged_change_counts_although_the_row_has_that_value_by_now(
    database: Engine, model: type[Any]
) -> None:
    """Two withdrawals of 30 from 100 do not come to 70."""
    with Session(database) as session:
        older = session.get_one(model, 2)
        session.expunge(older)
    older.balance -= 30

    def withdraw(row: Any) -> None:
        row.balance -= 30

    change(database, model, 2, withdraw)
    with Session(database) as session:
        bind(session, Lease("rows", 9))
        session.merge(older)
        with pytest.raises(StaleReadError):
            session.commit()


@pytest.mark.parametrize(("model", "key"), [(Engineer, 1), (Manager, 2)])
@pytest.mark.parametrize(
    "entity",
    [
        lambda: Staff,
        lambda: with_polymorphic(Staff, [Engineer, Manager]),
        lambda: with_polymorphic(Staff, [Engineer, Manager], flat=True, aliased=True),
    ],
    ids=["inline", "with_polymorphic", "aliased"],
)
def test_each_subclass_has_the_fence_of_its_own_table(
    database: Engine, model: type[Any], key: int, entity: Callable[[], Any]
) -> None:
    """One query loads objects of several fenced tables."""
    with Session(database, expire_on_commit=False) as session:
        row = next(each for each in session.scalars(select(entity())) if each.id == key)
        assert row.last_fencing_token == 5
        session.commit()
        change(database, model, key, lambda row: setattr(row, "balance", 50))
        bind(session, Lease("rows", 9))
        row.balance -= 30
        with pytest.raises(StaleReadError):
            session.commit()


def undo_by_close(session: Session, _row: Any) -> None:
    """As a `with` block does that an exception leaves."""
    session.close()


def undo_expunged(session: Session, row: Any) -> None:
    """Keep the object, and give up the rest."""
    session.expunge(row)
    session.rollback()


def undo_by_reset(session: Session, _row: Any) -> None:
    """As a pool of sessions might."""
    session.reset()


UNDOING = [undo_by_close, undo_expunged, undo_by_reset]


def assert_refused(database: Engine, row: Any) -> None:
    """Have a third holder write an object whose row the second has written meanwhile, in the end."""
    with Session(database) as session:
        bind(session, Lease("rows", 9))
        session.add(row)
        row.balance -= 10
        with pytest.raises(StaleReadError):
            session.commit()


@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize("undo", UNDOING)
def test_what_was_undone_is_not_what_was_loaded(
    database: Engine, undo: Callable[[Session, Any], None], *, claimed: bool
) -> None:
    """The holder of 7 fails, begins again and commits; what he has kept of the first time is older."""
    session = Session(database)
    bind(session, Lease("rows", 7))
    row = claim(session, Account, 1) if claimed else session.get_one(Account, 1)
    row.balance -= 30
    session.flush()
    undo(session, row)
    session.close()
    change(database, Account, 1, lambda row: setattr(row, "balance", 50))
    assert_refused(database, row)


def read_again(session: Session, _row: Any) -> Any:
    """Have the session make a new object of the row."""
    session.expunge_all()
    return session.get_one(Account, 1)


def read_by_another(session: Session, _row: Any) -> Any:
    """Have another session in the same transaction read it."""
    with Session(session.connection()) as other:
        return other.get_one(Account, 1)


def merge_elsewhere(session: Session, row: Any) -> Any:
    """Have a session of another transaction take the object over."""
    with Session(session.bind) as other:
        return other.merge(row, load=False)


@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize("copy", [read_again, read_by_another, merge_elsewhere])
def test_nor_is_what_was_seen_of_it(
    database: Engine, copy: Callable[[Session, Any], Any], *, claimed: bool
) -> None:
    """Another object of the row has seen the fence that was undone."""
    with Session(database) as session:
        bind(session, Lease("rows", 7))
        row = claim(session, Account, 1) if claimed else session.get_one(Account, 1)
        if not claimed:
            row.balance -= 30
            session.flush()
        seen = copy(session, row)
        if seen in session:
            session.expunge(seen)
        session.rollback()
    change(database, Account, 1, lambda row: setattr(row, "balance", 50))
    assert_refused(database, seen)


def test_what_a_savepoint_only_reads_stays_as_it_was_read(database: Engine) -> None:
    """It was not written since the savepoint, so that the rollback to it says nothing of it."""
    change(database, Account, 1, lambda row: setattr(row, "balance", 50))
    with Session(database, expire_on_commit=False) as session:
        bind(session, Lease("rows", 7))
        session.get_one(Joined, 2).balance += 1
        session.flush()
        savepoint = session.begin_nested()
        session.get_one(Single, 3).balance += 1
        row = session.get_one(Account, 1)
        savepoint.rollback()
        session.commit()
        assert row.last_fencing_token == 7
        bind(session, Lease("rows", 9))
        row.balance += 1
        session.commit()
        assert row.balance == 51


@pytest.mark.parametrize("present", [False, True])
def test_merged_values_are_compared_by_their_type(database: Engine, *, present: bool) -> None:
    """Some have no one truth value."""
    with Session(database) as reading:
        row = reading.get_one(Measured, 1)
    row.vector = Vector(2)
    with Session(database) as session:
        bind(session, Lease("rows", 9))
        kept = session.get(Measured, 1) if present else None
        merged = session.merge(row)
        assert not present or merged is kept
        session.commit()
        assert merged.vector.number == 2
        assert merged.last_fencing_token == 9


def test_what_was_undone_is_loaded_again_before_it_is_written(database: Engine) -> None:
    """No row has the id of a write that was undone, also where nothing came in between."""
    with Session(database) as session:
        bind(session, Lease("rows", 7))
        row = session.get_one(Account, 1)
        row.balance -= 30
        session.flush()
        session.flush()
        row.balance -= 30
        session.flush()
    with Session(database) as session:
        bind(session, Lease("rows", 9))
        session.add(row)
        row.balance -= 10
        with pytest.raises(StaleReadError):
            session.commit()
        session.rollback()
        row.balance -= 10
        session.commit()
        assert row.balance == 90


def test_a_savepoint_that_was_undone(database: Engine) -> None:
    """What was flushed before it stays, and what has left the session in it is as before."""
    with Session(database) as session:
        bind(session, Lease("rows", 7))
        first, row = session.get_one(Joined, 2), session.get_one(Account, 1)
        first.balance -= 1
        session.flush()
        session.expunge(first)
        savepoint = session.begin_nested()
        row.balance -= 30
        session.flush()
        session.expunge(row)
        savepoint.rollback()
        session.commit()
    assert first.last_fencing_token == 7
    change(database, Account, 1, lambda row: setattr(row, "balance", 50))
    assert_refused(database, row)


def test_an_outer_transaction_that_was_undone(database: Engine) -> None:
    """A session that has joined it keeps its objects, and has not heard of it."""
    if database.dialect.name == "sqlite":
        pytest.skip("its driver begins no transaction before a savepoint")
    with database.connect() as connection:
        outer = connection.begin()
        session = Session(connection, expire_on_commit=False, join_transaction_mode="create_savepoint")
        bind(session, Lease("rows", 7))
        row = session.get_one(Account, 1)
        row.balance -= 30
        session.commit()
        outer.rollback()
        session.close()
    change(database, Account, 1, lambda row: setattr(row, "balance", 50))
    assert_refused(database, row)


def test_an_insert_that_was_undone(database: Engine) -> None:
    """Whoever inserts the row again makes another."""
    session = Session(database)
    bind(session, Lease("rows", 7))
    row = Account(id=9, balance=10)
    session.add(row)
    session.flush()
    session.close()
    with Session(database) as again:
        bind(again, Lease("rows", 7))
        again.add(Account(id=9, balance=77))
        again.commit()
    with Session(database) as session:
        bind(session, Lease("rows", 9))
        session.add(row)
        row.balance += 1
        with pytest.raises(StaleReadError):
            session.commit()


def test_a_key_that_was_expired_by_its_name(database: Engine) -> None:
    """Loaded again it makes nothing else newer."""
    with Session(database, expire_on_commit=False) as session:
        row = session.get_one(Account, 1)
        session.commit()
        change(database, Account, 1, lambda row: setattr(row, "balance", 50))
        bind(session, Lease("rows", 9))
        session.expire(row, ["id"])
        row.balance -= 30
        with pytest.raises(StaleReadError):
            session.commit()
