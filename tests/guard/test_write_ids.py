"""The unit of work writes an object over the version that it was loaded from, and over no other.

Each row of the tables is a story that is told twice: with the write of another holder between the load and
the write, and without. The first is refused, the second accepted.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from sqlalchemy import Engine, insert, inspect, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, defer, load_only, mapped_column, with_polymorphic

from fencelock import FencedModel, Lease, StaleReadError
from tests.guard import write_ids
from tests.guard.listening import listening
from tests.guard.rows import bypassed, holding, on_sqlite_alone
from tests.guard.write_ids import Account, Deferred, Dog, Joined, Row, Story, Tag, Versioned, get, whole

ROWS = write_ids.fill


def switch(model: type[Any]) -> write_ids.Step:
    def write(session: Session, row: Any) -> None:
        session.delete(row)
        other = model(id=1, balance=3)
        inspect(other).identity_token = inspect(row).identity_token
        session.add(other)

    return write


def move_up(session: Session, first: Any) -> None:
    """Give the first line another place, and its place to the next line."""
    second = session.get_one(write_ids.Line, (1, 2))
    first.balance, first.place, second.place = 1, 0, 1


def by_a_listener(session: Session, row: Any) -> None:
    """Flush an object that looks changed, and is not until its listener is called."""

    def count(_mapper: object, _connection: object, counted: Row) -> None:
        counted.balance += 1

    row.status, row.status = "else", row.status
    with listening(Row, "before_update", count):
        session.flush()


def by_the_listener_of_another(session: Session, row: Any) -> None:
    """Have the listener of an object that is flushed later change this one; SQLAlchemy advises against it."""
    second = session.get_one(Row, 2)

    def count(_mapper: object, _connection: object, counted: Row) -> None:
        if counted is second:
            row.balance -= 30

    for each in (row, second):
        each.status, each.status = "else", each.status
    with listening(Row, "before_update", count):
        session.flush()


def load_beside(session: Session, _row: Any) -> None:
    """Have the session keep an object of the base class, which has the same key in another table."""
    session.info["beside"] = session.get_one(write_ids.Animal, 1)


refer = write_ids.computing("favourite", lambda row: row.entries[1])
WRITES = {
    "a column": Story(),
    "DELETE": Story(write=Session.delete),
    "a column of the sub-table": Story(model=Joined, key=2, write=write_ids.setting("extra", 1)),
    "a column of the base": Story(model=Joined, key=2),
    "a column of the subclass": Story(model=write_ids.Single, key=3, write=write_ids.setting("extra", 1)),
    "a collection": Story(
        load=whole(), model=Account, write=write_ids.adding("entries", lambda: write_ids.Entry(id=3))
    ),
    "links": Story(load=whole(), model=Account, write=write_ids.adding("tags", lambda: Tag(id=7))),
    "post_update": Story(load=whole(), model=Account, write=refer),
    "post_update and a column": Story(
        load=whole(), model=Account, write=write_ids.in_turn(refer, write_ids.pay)
    ),
    "post_update, of a shard": Story(load=whole(identity_token="eu"), model=Account, write=refer),
    "DELETE with post_update": Story(load=whole(), model=Account, write=Session.delete),
    "DELETE, of a shard": Story(load=whole(identity_token="eu"), model=Account, write=Session.delete),
    "DELETE, concrete": Story(load=write_ids.after(get(Dog), load_beside), model=Dog, write=Session.delete),
    "row switch": Story(model=Versioned, write=switch(Versioned)),
    "row switch, of a shard": Story(load=whole(identity_token="eu"), model=Account, write=switch(Account)),
    "row switch, concrete": Story(load=write_ids.after(get(Dog), load_beside), model=Dog, write=switch(Dog)),
    "row switch, second class": Story(load=get(write_ids.Twin), write=switch(write_ids.Twin)),
    "version counter": Story(model=Versioned),
    "key": Story(model=Versioned, write=write_ids.setting("id", 2)),
    "keys that move up": Story(model=write_ids.Line, key=(1, 1), write=move_up),
    "by a listener": Story(write=by_a_listener),
    "by the listener of another": Story(write=by_the_listener_of_another),
}
#: What the guard refuses although nothing was written.
REFUSED_IN_VAIN = {
    "DELETE, of a shard": "post_update comes before the event that tells the shard",
    "DELETE, concrete": "the object of the base class is taken for the one to be deleted",
    "row switch, concrete": "the same",
}
untouched = [
    pytest.param(way, False, marks=pytest.mark.xfail(way in REFUSED_IN_VAIN, reason=why, strict=True))
    for way in WRITES
    for why in [REFUSED_IN_VAIN.get(way, "")]
]


@pytest.mark.parametrize(("way", "written"), [*((way, True) for way in WRITES), *untouched])
def test_every_way_to_write_an_object_compares(engine: Engine, way: str, *, written: bool) -> None:
    """The database compares, and each driver counts rows in its own way."""
    write_ids.play(engine, WRITES[way], written=written)


def expired(load: write_ids.Load, *names: str) -> write_ids.Load:
    """Load an object, expire it, and load these of its attributes by their names."""

    def again(session: Session, row: Any) -> None:
        session.commit()
        session.expire(row)
        for name in names:
            getattr(row, name)

    return write_ids.after(load, again)


def refreshed(*names: str) -> write_ids.Load:
    """Load an object, expire it, and refresh these of its attributes."""

    def again(session: Session, row: Any) -> None:
        session.commit()
        session.expire(row)
        session.refresh(row, names)

    return write_ids.after(get(Account), again)


def subclass(model: type[Any], entity: Any) -> write_ids.Load:
    """Load a fenced subclass with other objects of a base that is not fenced."""
    return lambda session: next(each for each in session.scalars(select(entity)) if type(each) is model)


both = [write_ids.Engineer, write_ids.Manager]
append_note = write_ids.computing("note", lambda row: row.note + "A")
LOADS = {
    "load_only": Story(load=get(Row, 1, load_only(Row.balance))),
    'defer("*")': Story(load=get(Row, 1, defer("*")), said=None),  # the written column is loaded later
    "deferred fence": Story(model=Deferred),
    "deferred fence, and load_only": Story(
        load=get(Deferred, 1, load_only(Deferred.balance)), model=Deferred
    ),
    "raiseload": Story(load=get(write_ids.DeferredByOption), model=Deferred),
    "raiseload, and load_only": Story(
        load=get(write_ids.DeferredByOption, 1, load_only(write_ids.DeferredByOption.balance)),  # type: ignore[attr-defined]
        model=Deferred,
    ),
    "column_property": Story(load=get(write_ids.WithProperty), model=Deferred),
    "column_property, and load_only": Story(
        load=get(write_ids.WithProperty, 1, load_only(write_ids.WithProperty.balance)),  # type: ignore[arg-type]
        model=Deferred,
    ),
    "second class": Story(load=get(write_ids.Twin)),
    "by the base": Story(load=get(Account, 2), model=Joined, key=2, write=write_ids.setting("extra", 1)),
    **{
        f"{model.__name__}, {name}": Story(
            load=subclass(model, entity), model=model, key=2 if model is write_ids.Manager else 1
        )
        for model in both
        for name, entity in {
            "inline": write_ids.Staff,
            "with_polymorphic": with_polymorphic(write_ids.Staff, both),
            "aliased": with_polymorphic(write_ids.Staff, both, flat=True, aliased=True),
        }.items()
    },
    "deferred column": Story(load=expired(get(), "note"), write=append_note),
    "deferred column, then the rest": Story(
        load=expired(get(), "note"),
        write=write_ids.in_turn(append_note, write_ids.computing("status", lambda row: row.status + "A")),
    ),
    "deferred column of a sub-table": Story(
        load=expired(get(Account, 2), "deep_extra"),
        model=Joined,
        key=2,
        write=write_ids.computing("deep_extra", lambda row: row.deep_extra - 1),
    ),
    "refresh": Story(load=refreshed("balance"), model=Account),
    "refresh with the key": Story(load=refreshed("id", "balance"), model=Account),
    "refresh of a collection": Story(
        load=refreshed("entries"),
        model=Account,
        other=lambda row: row.entries.append(write_ids.Entry(id=9)),
        write=write_ids.computing("balance", lambda row: len(row.entries)),
    ),
}


@on_sqlite_alone
@pytest.mark.parametrize("written", [True, False], ids=["written", "untouched"])
@pytest.mark.parametrize("way", LOADS)
def test_every_way_to_load_an_object_loads_its_id(engine: Engine, way: str, *, written: bool) -> None:
    """No option leaves the id out, and a part that is loaded by itself brings it."""
    write_ids.play(engine, LOADS[way], written=written)


class Pages(DeclarativeBase):
    pass


class Page(FencedModel, Pages):
    __tablename__ = "wi_pages"
    __fence_resource__ = "page:{id}"  # a flush loads the columns that it names
    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]


@on_sqlite_alone
@pytest.mark.parametrize("is_old", [True, False], ids=["written", "untouched"])
def test_id_that_a_form_brings_is_compared_on_an_expired_object(engine: Engine, *, is_old: bool) -> None:
    """As where a request has loaded the object, and has rolled back before the lock."""
    Pages.metadata.drop_all(engine)
    Pages.metadata.create_all(engine)
    with bypassed(engine) as connection:
        connection.execute(insert(Page), {"id": 1, "text": "first"})
    with Session(engine) as session:
        shown = session.get_one(Page, 1).last_write_id
    if is_old:
        with holding(engine, Lease("page:1", 7)) as session, session.begin():
            session.get_one(Page, 1).text = "of another"
    with holding(engine, Lease("page:1", 9)) as session:
        page = session.get_one(Page, 1)
        session.rollback()
        page.text, page.last_write_id = "edited", shown
        with pytest.raises(StaleReadError, match="two versions") if is_old else nullcontext():
            session.commit()
