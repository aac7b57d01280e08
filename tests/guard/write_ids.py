"""Models of every shape, their rows, and the parts of a story, which the tests of write ids share.

Rows have the fence 5 and a write id of their own. The test writes under token 9, another holder under 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import pytest
from sqlalchemy import Column, Engine, ForeignKey, String, Table, delete, event, insert, orm, update
from sqlalchemy.ext.orderinglist import ordering_list
from sqlalchemy.orm import Mapped, Session, composite, deferred, mapped_column, registry, relationship

from fencelock import FencedModel, Lease, StaleReadError, bind
from fencelock.guard import fence_column, write_id_column
from tests.guard.rows import Keyed, bypassed, contents, holding

FENCE, OTHER, MINE = 5, 7, 9
WRITTEN, NO_VERSION, DELETED = "was written since", "has parts of two versions", "was deleted since"


class Base(orm.DeclarativeBase):
    type_annotation_map = {str: String(20)}  # noqa: RUF012  SQLAlchemy's declaration


class Fenced(FencedModel):
    __fence_resource__ = "rows"


class Row(Fenced, Keyed, Base):
    __tablename__ = "wi_rows"
    balance: Mapped[int] = mapped_column(default=100)
    status: Mapped[str] = mapped_column(default="new")
    note: Mapped[str] = mapped_column(default="", deferred=True)


class Twin(Fenced, Base):
    __table__ = Row.__table__


@event.listens_for(Twin, "before_update")
def on_update(_mapper: object, _connection: object, twin: Any) -> None:
    status = twin.status or "new"
    twin.balance += status.count("+")
    twin.status = status.lower().replace("+", "")


class Refreshed(Fenced, Base):
    __table__ = Row.__table__
    __mapper_args__ = {"always_refresh": True}  # noqa: RUF012


class Deferred(Fenced, Keyed, Base):
    __tablename__ = "wi_deferred"
    balance: Mapped[int] = mapped_column(default=100)
    last_fencing_token: Mapped[int] = deferred(fence_column())


class DeferredByOption(Base):
    """The same, in the words of a newer SQLAlchemy."""

    __table__ = Deferred.__table__
    last_fencing_token = deferred(Deferred.__table__.c.last_fencing_token, raiseload=True)


class DeferredId(Base):
    __table__ = Deferred.__table__
    last_write_id = deferred(Deferred.__table__.c.last_write_id)


class WithProperty:
    """An imperative mapping that makes the attribute by hand."""

    id: int
    balance: int


registry(metadata=Base.metadata).map_imperatively(
    WithProperty,
    Deferred.__table__,
    properties={"last_fencing_token": orm.column_property(Deferred.__table__.c.last_fencing_token)},
)


class Versioned(Fenced, Keyed, Base):
    __tablename__ = "wi_versioned"
    balance: Mapped[int] = mapped_column(default=100)
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version, "eager_defaults": True}  # noqa: RUF012


class Line(Fenced, Base):
    __tablename__ = "wi_lines"
    listed: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    place: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int] = mapped_column(default=100)


class Numbered(Fenced, Base):
    __tablename__ = "wi_numbered"
    id: Mapped[int] = mapped_column(primary_key=True)


class Animal(Fenced, Keyed, Base):
    __tablename__ = "wi_animals"
    balance: Mapped[int] = mapped_column(default=100)


class Dog(Animal):
    __tablename__ = "wi_dogs"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int] = mapped_column(default=100)
    last_fencing_token: Mapped[int] = mapped_column(fence_column().type, server_default="0")
    last_write_id: Mapped[int] = mapped_column(write_id_column().type, server_default="0")
    __mapper_args__ = {"concrete": True}  # noqa: RUF012


class Staff(Keyed, Base):
    """Not fenced, though its subclasses are, in tables of their own."""

    __tablename__ = "wi_staff"
    kind: Mapped[int]
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": 0}  # noqa: RUF012


class Engineer(Fenced, Staff):
    __tablename__ = "wi_engineers"
    id: Mapped[int] = mapped_column(ForeignKey(Staff.id), primary_key=True)
    balance: Mapped[int] = mapped_column(default=100)
    __mapper_args__ = {"polymorphic_identity": 1, "polymorphic_load": "inline"}  # noqa: RUF012


class Manager(Fenced, Staff):
    __tablename__ = "wi_managers"
    staff_id: Mapped[int] = mapped_column(ForeignKey(Staff.id), primary_key=True)
    balance: Mapped[int] = mapped_column(default=100)
    __mapper_args__ = {"polymorphic_identity": 2, "polymorphic_load": "inline"}  # noqa: RUF012


links = Table(
    "wi_links",
    Base.metadata,
    Column("account", ForeignKey("wi_accounts.id"), primary_key=True),
    Column("tag", ForeignKey("wi_tags.id"), primary_key=True),
)


class Tag(Keyed, Base):
    __tablename__ = "wi_tags"


@dataclass
class Pair:
    x: int
    y: int


class Account(Fenced, Keyed, Base):
    __tablename__ = "wi_accounts"
    kind: Mapped[int] = mapped_column(default=0)
    balance: Mapped[int] = mapped_column(default=100)
    x: Mapped[int] = mapped_column(default=1)
    y: Mapped[int] = mapped_column(default=1)
    z: Mapped[int] = mapped_column(default=1, deferred=True)
    pair: Mapped[Pair] = composite("x", "y")
    deep: Mapped[Pair] = composite("x", "z")
    favourite_id: Mapped[int | None] = mapped_column(
        ForeignKey("wi_entries.id", use_alter=True, name="wi_favourite")
    )
    favourite: Mapped[Entry | None] = relationship(foreign_keys=favourite_id, post_update=True)
    entries: Mapped[list[Entry]] = relationship(
        foreign_keys="Entry.account_id",
        back_populates="account",
        cascade="all, delete-orphan",
        order_by="Entry.place",
        collection_class=ordering_list("place"),
    )
    tags: Mapped[list[Tag]] = relationship(secondary=links, cascade="save-update")
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": 0}  # noqa: RUF012


class Entry(Keyed, Base):
    """Has its place in the list of its account."""

    __tablename__ = "wi_entries"
    place: Mapped[int] = mapped_column(default=0)
    account_id: Mapped[int | None] = mapped_column(ForeignKey(Account.id))
    account: Mapped[Account | None] = relationship(foreign_keys=account_id, back_populates="entries")


class Joined(Account):
    __tablename__ = "wi_joined"
    id: Mapped[int] = mapped_column(ForeignKey(Account.id), primary_key=True)
    extra: Mapped[int] = mapped_column(default=100)
    deep_extra: Mapped[int] = mapped_column(default=100, deferred=True)
    notes: Mapped[list[Note]] = relationship()
    __mapper_args__ = {"polymorphic_identity": 1}  # noqa: RUF012


class Single(Account):
    """Has another column of the same table."""

    extra: Mapped[int | None] = mapped_column("extra_of_single", default=100)
    __mapper_args__ = {"polymorphic_identity": 2}  # noqa: RUF012


class Note(Keyed, Base):
    __tablename__ = "wi_notes"
    joined_id: Mapped[int | None] = mapped_column(ForeignKey(Joined.id))


ROWS: dict[str, list[dict[str, int]]] = {
    "wi_rows": [{"id": 1}, {"id": 2}],
    "wi_deferred": [{"id": 1}],
    "wi_versioned": [{"id": 1, "version": 1}],
    "wi_lines": [{"listed": 1, "place": place} for place in (1, 2, 3)],
    "wi_animals": [{"id": 1}],
    "wi_dogs": [{"id": 1}],
    "wi_staff": [{"id": 1, "kind": 1}, {"id": 2, "kind": 2}],
    "wi_engineers": [{"id": 1}],
    "wi_managers": [{"staff_id": 2}],
    "wi_tags": [{"id": 1}, {"id": 2}],
    "wi_accounts": [{"id": key, "kind": key - 1, "extra_of_single": 100} for key in (1, 2, 3)],
    "wi_joined": [{"id": 2}],
    "wi_entries": [{"id": 1, "account_id": 1, "place": 0}, {"id": 2, "account_id": 1, "place": 1}],
    "wi_links": [{"account": 1, "tag": 1}],
    "wi_notes": [{"id": 1, "joined_id": 2}],
}


def fill(engine: Engine) -> Engine:
    """Have a database contain ROWS and nothing else, each fenced row with an id of its own."""
    ids = count(11)
    with bypassed(engine) as connection:
        connection.execute(update(Account).values(favourite_id=None))
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(delete(table))
        for name, rows in ROWS.items():
            table = Base.metadata.tables[name]
            for row in rows:
                its = {"last_fencing_token": FENCE, "last_write_id": next(ids)}
                connection.execute(insert(table), row | (its if "last_write_id" in table.c else {}))
        connection.execute(update(Account).where(Account.id == 1).values(favourite_id=1))
    return engine


def holder(engine: Engine, token: int = MINE) -> Session:
    return holding(engine, Lease("rows", token), expire_on_commit=False)


@contextmanager
def loaded(engine: Engine) -> Iterator[tuple[Session, Row]]:
    """Load the row in a transaction of its own, in a session of the test's holder."""
    with holder(engine) as session:
        row = session.get_one(Row, 1)
        session.commit()
        yield session, row


def take(row: Any) -> None:
    row.balance -= 20


def change(
    engine: Engine,
    model: type[Any] = Row,
    key: Any = 1,
    do: Callable[[Any], object] = take,
    token: int = OTHER,
) -> None:
    with holder(engine, token) as session, session.begin():
        do(session.get_one(model, key))


def stored(engine: Engine, model: type[Any] = Row, key: int = 1) -> int:
    with Session(engine) as session:
        return int(session.get_one(model, key).balance)


@contextmanager
def refused(
    engine: Engine, match: str = WRITTEN, current: int | None = OTHER
) -> Iterator[pytest.ExceptionInfo[StaleReadError]]:
    before = contents(engine, Base.metadata)
    with pytest.raises(StaleReadError, match=match) as caught:
        yield caught
    assert (caught.value.current, caught.value.token) == (current, MINE)
    assert contents(engine, Base.metadata) == before


Load: TypeAlias = Callable[[Session], Any]
Step: TypeAlias = Callable[[Session, Any], Any]


def get(model: type[Any] = Row, key: Any = 1, *options: Any, **given: Any) -> Load:
    return lambda session: session.get_one(model, key, options=options, **given)


def whole(key: int = 1, **given: Any) -> Load:
    """Load an account with all that it has, and its favourite."""

    def load(session: Session) -> Any:
        account = session.get_one(Account, key, **given)
        for name in ("entries", "tags", "notes", "pair", "deep", "extra", "favourite"):
            getattr(account, name, None)
        return account

    return load


def after(load: Load, do: Step) -> Load:

    def loading(session: Session) -> Any:
        row = load(session)
        do(session, row)
        return row

    return loading


def query(statement: Any) -> Load:
    return lambda session: session.scalars(statement).one()


def computing(name: str, value: Callable[[Any], object]) -> Step:
    return lambda _session, row: setattr(row, name, value(row))


def in_turn(*steps: Step) -> Step:
    def both(session: Session, row: Any) -> None:
        for step in steps:
            step(session, row)

    return both


pay = computing("balance", lambda row: row.balance - 30)


def setting(name: str, value: object) -> Step:
    return lambda _session, row: setattr(row, name, value)


def adding(name: str, made: Callable[[], Any]) -> Step:
    return lambda _session, row: getattr(row, name).append(made())


@dataclass(frozen=True, kw_only=True)
class Story:
    """How an object is loaded, what the other holder does to its row, what comes then, and how it is written.

    Attributes:
        load: where it is not plainly by its key.
        said: by the refusal, where the other holder has written; None where the write is accepted.
        always: the write is refused without the other holder's, too.
    """

    load: Load | None = None
    model: type[Any] = Row
    key: Any = 1
    other: Callable[[Any], object] = take
    then: Step = lambda _session, row: row
    write: Step = pay
    said: str | None = WRITTEN
    always: bool = False


def play(engine: Engine, story: Story, *, written: bool) -> None:
    with Session(engine, expire_on_commit=False) as session:
        found = (story.load or get(story.model, story.key))(session)
        session.commit()
        if written:
            change(engine, story.model, story.key, story.other)
        bind(session, Lease("rows", MINE))
        row = story.then(session, found) or found

        def act() -> None:
            story.write(session, row)
            session.commit()

        if story.said is not None and (written or story.always):
            current = None if story.said == DELETED else OTHER if written else FENCE
            with refused(engine, story.said, current):
                act()
            return
        before = contents(engine, Base.metadata)
        act()
    assert contents(engine, Base.metadata) != before
    if story.write is pay:
        assert stored(engine, story.model, story.key) == (50 if written else 70)
