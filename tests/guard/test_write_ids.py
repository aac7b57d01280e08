"""The unit of work writes an object over the version that it was loaded from, and over no other.

Each row of the tables is a story that is told twice: with the write of another holder between the load and
the write, and without. The first is refused, the second accepted.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, PickleType, inspect, orm, select, text, update
from sqlalchemy.orm import Mapped, Session, load_only, mapped_column

from fencelock import Lease, StaleReadError, UnfencedWriteError, bind, claim
from fencelock.guard import tables
from tests.guard import models
from tests.guard import write_ids as wi
from tests.guard.marks import InMemory, named, on_sqlite_alone
from tests.guard.rows import holding, refill
from tests.guard.waiting import listening
from tests.guard.write_ids import NO_VERSION, Account, Joined, Row, Story, get, holder, whole

Base, ROWS = wi.Base, wi.fill


def switch(model: type[Any]) -> wi.Step:
    def write(session: Session, row: Any) -> None:
        session.delete(row)
        other = model(id=1, balance=3)
        inspect(other).identity_token = inspect(row).identity_token
        session.add(other)

    return write


def move_up(session: Session, first: Any) -> None:
    second = session.get_one(wi.Line, (1, 2))
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
    session.info["beside"] = session.get_one(wi.Animal, 1)


refer = wi.computing("favourite", lambda row: row.entries[1])
WRITES = {
    "a column": Story(),
    "DELETE": Story(write=Session.delete),
    "a column of the sub-table": Story(model=Joined, key=2, write=wi.setting("extra", 1)),
    "a column of the base": Story(model=Joined, key=2),
    "a column of the subclass": Story(model=wi.Single, key=3, write=wi.setting("extra", 1)),
    "a collection": Story(load=whole(), model=Account, write=wi.adding("entries", lambda: wi.Entry(id=3))),
    "links": Story(load=whole(), model=Account, write=wi.adding("tags", lambda: wi.Tag(id=7))),
    "post_update": Story(load=whole(), model=Account, write=refer),
    "post_update and a column": Story(load=whole(), model=Account, write=wi.in_turn(refer, wi.pay)),
    "post_update, of a shard": Story(load=whole(identity_token="eu"), model=Account, write=refer),
    "DELETE with post_update": Story(load=whole(), model=Account, write=Session.delete),
    "DELETE, of a shard": Story(load=whole(identity_token="eu"), model=Account, write=Session.delete),
    "DELETE, concrete": Story(load=wi.after(get(wi.Dog), load_beside), model=wi.Dog, write=Session.delete),
    "row switch": Story(model=wi.Versioned, write=switch(wi.Versioned)),
    "row switch, of a shard": Story(load=whole(identity_token="eu"), model=Account, write=switch(Account)),
    "row switch, concrete": Story(
        load=wi.after(get(wi.Dog), load_beside), model=wi.Dog, write=switch(wi.Dog)
    ),
    "row switch, second class": Story(load=get(wi.Twin), write=switch(wi.Twin)),
    "version counter": Story(model=wi.Versioned),
    "key": Story(model=wi.Versioned, write=wi.setting("id", 2)),
    "keys that move up": Story(model=wi.Line, key=(1, 1), write=move_up),
    "by a listener": Story(write=by_a_listener),
    "by the listener of another": Story(write=by_the_listener_of_another),
}


def expired(load: wi.Load, *names: str) -> wi.Load:

    def again(session: Session, row: Any) -> None:
        session.commit()
        session.expire(row)
        for name in names:
            getattr(row, name)

    return wi.after(load, again)


def refreshed(*names: str) -> wi.Load:

    def again(session: Session, row: Any) -> None:
        session.commit()
        session.expire(row)
        session.refresh(row, names)

    return wi.after(get(Account), again)


def subclass(model: type[Any], entity: Any) -> wi.Load:
    """Load a fenced subclass with other objects of a base that is not fenced."""
    return lambda session: next(each for each in session.scalars(select(entity)) if type(each) is model)


both = [wi.Engineer, wi.Manager]
append_note = wi.computing("note", lambda row: row.note + "A")
LOADS = {
    "load_only": Story(load=get(Row, 1, load_only(Row.balance))),
    'defer("*")': Story(load=get(Row, 1, orm.defer("*")), said=None),  # the written column is loaded later
    "deferred fence": Story(model=wi.Deferred),
    "deferred fence, and load_only": Story(
        load=get(wi.Deferred, 1, load_only(wi.Deferred.balance)), model=wi.Deferred
    ),
    "raiseload": Story(load=get(wi.DeferredByOption), model=wi.Deferred),
    "raiseload, and load_only": Story(
        load=get(wi.DeferredByOption, 1, load_only(wi.DeferredByOption.balance)),  # type: ignore[attr-defined]
        model=wi.Deferred,
    ),
    "column_property": Story(load=get(wi.WithProperty), model=wi.Deferred),
    "column_property, and load_only": Story(
        load=get(wi.WithProperty, 1, load_only(wi.WithProperty.balance)),  # type: ignore[arg-type]
        model=wi.Deferred,
    ),
    "second class": Story(load=get(wi.Twin)),
    "by the base": Story(load=get(Account, 2), model=Joined, key=2, write=wi.setting("extra", 1)),
    **{
        f"{model.__name__}, {name}": Story(
            load=subclass(model, entity), model=model, key=2 if model is wi.Manager else 1
        )
        for model in both
        for name, entity in {
            "inline": wi.Staff,
            "with_polymorphic": orm.with_polymorphic(wi.Staff, both),
            "aliased": orm.with_polymorphic(wi.Staff, both, flat=True, aliased=True),
        }.items()
    },
    "deferred column": Story(load=expired(get(), "note"), write=append_note, said=NO_VERSION),
    "deferred column, then the rest": Story(
        said=NO_VERSION,
        load=expired(get(), "note"),
        write=wi.in_turn(append_note, wi.computing("status", lambda row: row.status + "A")),
    ),
    "deferred column of a sub-table": Story(
        said=NO_VERSION,
        load=expired(get(Account, 2), "deep_extra"),
        model=Joined,
        key=2,
        write=wi.computing("deep_extra", lambda row: row.deep_extra - 1),
    ),
    "refresh": Story(load=refreshed("balance"), model=Account, said=NO_VERSION),
    "refresh with the key": Story(load=refreshed("id", "balance"), model=Account),
    "refresh of a collection": Story(
        load=refreshed("entries"),
        model=Account,
        other=lambda row: row.entries.append(wi.Entry(id=9)),
        write=wi.computing("balance", lambda row: len(row.entries)),
    ),
}


def detached(load: wi.Load) -> wi.Load:
    return wi.after(load, lambda session, row: session.expunge(row))


def changed_and_merged(session: Session, row: Any) -> Any:
    """Compute from the detached object, then merge it."""
    row.balance -= 20
    return session.merge(row)


def again(do: Callable[[Session, Any], object]) -> wi.Step:
    """Load a part of the object again; its balance is from before."""

    def then(session: Session, row: Any) -> None:
        do(session, row)
        assert (row.status, row.note, row.balance) in {("new", "", 100), ("other", "", 100)}
        session.commit()

    return then


def populate(statement: Any) -> wi.Step:
    def then(session: Session, _row: Any) -> None:
        session.scalars(statement, execution_options={"populate_existing": True}).unique().all()

    return then


def insert_again(row: Any) -> None:
    """Delete the row, and insert another with its key."""
    session = inspect(row).session
    session.delete(row)
    session.flush()
    session.add(Row(id=1))


without_id = select(Row).from_statement(select(Row.id, Row.status).where(Row.id == 1))
part_of_refreshed = select(wi.Refreshed).options(load_only(wi.Refreshed.status))  # type: ignore[attr-defined]


def nothing(_session: Session, _row: Any) -> None:
    """The object is changed already."""


def add(session: Session, row: Any) -> Any:
    session.add(row)
    return row


def take_and_say(row: Any) -> None:
    row.balance, row.status = row.balance - 20, "other"


def roll_back(session: Session, row: Any) -> None:
    row.balance -= 1
    session.rollback()


#: As much as the other holder, so that the row would look right.
take_too = wi.computing("balance", lambda row: row.balance - 20)
THEN = {
    "added": Story(load=detached(get()), then=add),
    "pickled and added": Story(
        load=detached(get()),
        then=lambda session, row: add(session, pickle.loads(pickle.dumps(row))),  # noqa: S301  made here
    ),
    "merged": Story(load=detached(get()), then=lambda session, row: session.merge(row), said=NO_VERSION),
    "merged, to what the row is": Story(
        load=detached(get()), then=lambda session, row: session.merge(row), write=take_too, said=NO_VERSION
    ),
    "merged without a load": Story(
        load=detached(get()), then=lambda session, row: session.merge(row, load=False)
    ),
    "changed and merged": Story(
        load=detached(get()), then=changed_and_merged, write=nothing, said=NO_VERSION
    ),
    "changed and merged, joined": Story(
        load=detached(get(Joined, 2)),
        model=Joined,
        key=2,
        then=changed_and_merged,
        write=nothing,
        said=NO_VERSION,
    ),
    **{
        name: Story(other=take_and_say, then=again(do), said=NO_VERSION)
        for name, do in {
            "the rest is loaded": nothing,
            "a part is refreshed": lambda session, row: session.refresh(row, ["status"]),
            "a part is expired": lambda session, row: session.expire(row, ["status"]),
            "the key is expired": lambda session, row: session.expire(row, ["id"]),
            "a part is populated": populate(select(Row).options(load_only(Row.status))),
        }.items()
    },
    "a part is populated without the id": Story(
        other=take_and_say,
        then=again(populate(without_id.options(load_only(Row.status)))),
        said=NO_VERSION,
        always=True,
    ),
    "a part is always refreshed": Story(
        load=get(wi.Refreshed),
        other=take_and_say,
        then=again(lambda session, _row: session.scalars(part_of_refreshed).all()),
        said=NO_VERSION,
    ),
    "claimed by the other": Story(other=lambda row: claim(inspect(row).session, Row, 1)),
    "deleted and inserted again": Story(other=insert_again),
    "deleted": Story(other=lambda row: inspect(row).session.delete(row), said=wi.DELETED),
    "refreshed": Story(then=lambda session, row: session.refresh(row), said=None),
    "expired": Story(then=lambda session, row: session.expire(row), said=None),
    "populated": Story(then=populate(select(Row)), said=None),
    "claimed": Story(then=lambda session, _row: claim(session, Row, 1), said=None),
    "rolled back": Story(then=roll_back, said=None),
}


def merging(
    model: type[Any] = Account, key: int = 1, *, only: tuple[Any, ...] = (), touched: str | None = None
) -> wi.Step:
    """Merge a newer object of the row, of which another session has loaded everything, or only a part."""

    def then(session: Session, row: Any) -> None:
        with Session(session.get_bind()) as reading:
            newer = reading.get_one(model, key, options=[load_only(*only)] if only else [])
            if touched is not None:
                assert getattr(newer, touched)
        assert session.merge(newer) is row

    return then


def pay_and_merge(session: Session, row: Any) -> None:
    """Change the object before the merge, which flushes nothing."""
    wi.pay(session, row)
    with session.no_autoflush:
        merging(Row, only=(Row.status,))(session, row)


def merging_from_an_entry(session: Session, _row: Any) -> None:
    """Merge an account over one of its entries: SQLAlchemy leaves out the relationship that it comes by."""
    with Session(session.get_bind()) as reading:
        loading = orm.joinedload(wi.Entry.account).selectinload(Account.entries)
        newer = reading.get_one(wi.Entry, 1, options=[loading])
    session.merge(newer)


def counting(name: str) -> wi.Step:
    return wi.computing("balance", lambda row: 10 + len(getattr(row, name)))


def with_own_write(session: Session, row: Any) -> None:
    """Write the object under an earlier lease."""
    bind(session, Lease("rows", 6))
    row.balance = 1
    session.commit()


EXTRA: dict[str, Any] = {
    "other": lambda row: setattr(row, "extra", 50),
    "write": wi.computing("extra", lambda row: row.extra - 30),
}
NOTES: dict[str, Any] = {
    "other": lambda row: row.notes.append(wi.Note(id=2)),
    "write": counting("notes"),
}
TAGS: dict[str, Any] = {"other": lambda row: row.tags.append(wi.Tag(id=7)), "write": counting("tags")}
PAIR: dict[str, Any] = {
    "other": lambda row: setattr(row, "pair", wi.Pair(50, 50)),
    "write": wi.computing("pair", lambda row: wi.Pair(row.pair.x - 30, row.pair.y - 30)),
}
AS_JOINED: dict[str, Any] = {"load": whole(2), "model": Joined, "key": 2}
MERGES = {
    "all of it": Story(then=merging(Row)),
    "a part": Story(then=merging(Row, only=(Row.status,))),
    "a part, into what is changed": Story(then=pay_and_merge, write=nothing),
    "joined": Story(**AS_JOINED, **EXTRA, then=merging(Joined, 2, only=(Joined.balance,))),
    "single": Story(
        load=whole(3),
        model=wi.Single,
        key=3,
        **EXTRA,
        then=merging(wi.Single, 3, only=(wi.Single.balance,)),
    ),
    "by the base": Story(**AS_JOINED, **EXTRA, then=merging(Account, 2)),
    "collection of a subclass": Story(**AS_JOINED, **NOTES, then=merging(Joined, 2)),
    "no cascade": Story(load=whole(), model=Account, **TAGS, then=merging(touched="tags")),
    "after a write": Story(
        load=wi.after(whole(), with_own_write), model=Account, **TAGS, then=merging(touched="tags")
    ),
    "composite": Story(load=whole(), model=Account, **PAIR, then=merging()),
    "where it comes from": Story(
        load=whole(),
        model=Account,
        other=lambda row: row.entries.append(wi.Entry(id=9)),
        then=merging_from_an_entry,
        write=counting("entries"),
    ),
}


def flushed(session: Session) -> Row:
    row = session.get_one(Row, 1)
    row.balance -= 30
    session.flush()
    return row


BEFORE: dict[str, Callable[[Session], Row]] = {
    "written": flushed,
    "claimed": lambda session: claim(session, Row, 1),
    "claimed and written": lambda session: (claim(session, Row, 1), flushed(session))[1],
}


def closed(session: Session, row: Row) -> Any:
    session.close()
    return row


def reset(session: Session, row: Row) -> Any:
    session.reset()
    return row


def expunged(session: Session, row: Row) -> Any:
    session.expunge(row)
    session.rollback()
    return row


def read_again(session: Session, _row: Row) -> Any:
    session.expunge_all()
    return session.get_one(Row, 1)


def read_by_another(session: Session, _row: Row) -> Any:
    """Have another session in the same transaction read it."""
    with Session(session.connection()) as other:
        return other.get_one(Row, 1)


def merged_elsewhere(session: Session, row: Row) -> Any:
    """Have a session of another transaction take the object over."""
    with Session(session.bind) as other:
        return other.merge(row, load=False)


def undone(begin: Callable[[Session], Row], kept: wi.Step) -> wi.Load:
    """Have the other holder write or claim the row, keep what has seen the new id, and roll back."""

    def load(session: Session) -> Any:
        with holder(session.get_bind(), wi.OTHER) as other:  # type: ignore[arg-type]
            seen = kept(other, begin(other))
            if seen in other:
                other.expunge(seen)
            other.rollback()
        return seen

    return load


KEPT: list[wi.Step] = [closed, reset, expunged, read_again, read_by_another, merged_elsewhere]
UNDONE = {
    f"{before}, {kept.__name__}": Story(load=undone(begin, kept), then=add, always=True)
    for before, begin in BEFORE.items()
    for kept in KEPT
    if before == "claimed and written" or kept in {closed, read_by_another}
}
#: SQLite hears each story twice. The other databases hear each way to write once, with both outcomes in turn,
#: because the database compares, and each driver counts rows in its own way.
STORIES = WRITES | {f"load: {name}": story for name, story in LOADS.items()}
STORIES |= {f"then: {name}": story for name, story in THEN.items()}
STORIES |= {f"undone: {name}": story for name, story in UNDONE.items()}
STORIES |= {f"merge: {name}": replace(story, said=NO_VERSION) for name, story in MERGES.items()}
TOLD = [("sqlite", way, written) for way in STORIES for written in (True, False)]
TOLD += [
    (database, way, (number + turn) % 2 == 0)
    for turn, database in enumerate(("postgresql", "mariadb"))
    for number, way in enumerate(WRITES)
]


@pytest.mark.parametrize(
    ("shared_url", "way", "written"),
    TOLD,
    indirect=["shared_url"],
)
def test_an_object_is_written_over_the_version_that_it_was_loaded_from(
    engine: Engine, way: str, *, written: bool
) -> None:
    wi.play(engine, STORIES[way], written=written)


@pytest.mark.parametrize("is_old", [True, False], ids=["written", "untouched"])
def test_the_id_that_a_form_brings_is_compared_on_an_expired_object(
    in_memory: InMemory, *, is_old: bool
) -> None:
    """As where a request has loaded the object, and has rolled back before the lock."""
    engine = refill(in_memory(models.Base.metadata), models.fenced(models.Order, 1))
    with Session(engine) as session:
        shown = session.get_one(models.Order, 1).last_write_id
    if is_old:
        with holding(engine, Lease("order:1", 7)) as session, session.begin():
            session.get_one(models.Order, 1).status = "of another"
    with holding(engine, Lease("order:1", 9)) as session:
        order = session.get_one(models.Order, 1)
        session.rollback()
        order.status, order.last_write_id = "edited", shown
        with pytest.raises(StaleReadError, match="two versions") if is_old else nullcontext():
            session.commit()


def without(*columns: Any) -> wi.Load:
    return wi.query(select(Row).from_statement(select(*columns).where(Row.id == 1)))


WITHOUT_ID = {
    "columns": without(Row.id, Row.balance),
    "text": wi.query(select(Row).from_statement(text("SELECT id, balance FROM wi_rows WHERE id = 1"))),
    "subquery": wi.query(select(orm.aliased(Row, select(Row.id, Row.balance).where(Row.id == 1).subquery()))),
}


WITHOUT = pytest.mark.parametrize("load", **named(WITHOUT_ID))


@on_sqlite_alone
@pytest.mark.parametrize("write", [wi.pay, Session.delete], ids=["UPDATE", "DELETE"])
@pytest.mark.parametrize("load", **named({**WITHOUT_ID, "deferred id": get(wi.DeferredId)}))
def test_an_object_without_its_id_is_not_written(engine: Engine, load: wi.Load, write: wi.Step) -> None:
    with holder(engine) as session:
        write(session, load(session))
        with pytest.raises(UnfencedWriteError, match="loaded without last_write_id"):
            session.flush()


@on_sqlite_alone
@WITHOUT
def test_an_object_that_gets_its_id_later_is_of_two_versions(engine: Engine, load: wi.Load) -> None:
    with holder(engine) as session:
        assert load(session).last_write_id == tables.NO_VERSION
    with holder(engine) as session:
        row = load(session)
        assert row.note == ""
        row.balance += 1
        with wi.refused(engine, NO_VERSION, wi.FENCE):
            session.commit()
        session.rollback()
        session.expunge_all()
        kept = load(session)
    wi.change(engine)
    with holder(engine) as session:
        row = session.merge(kept)
        row.balance -= 30
        with wi.refused(engine, NO_VERSION):
            session.commit()
        session.rollback()
        row.balance -= 30
        session.commit()
    assert wi.stored(engine) == 50


RENEWING: dict[str, wi.Step] = {
    "claim": lambda session, row: claim(session, type(row), row.id),
    "claim of the base": lambda session, row: claim(session, Account, row.id),
    "populate": lambda session, row: session.get_one(type(row), row.id, populate_existing=True),
    **{
        name: populate(select(Account).options(option))
        for name, option in {
            "lazyload": orm.lazyload(Account.entries),
            "selectinload": orm.selectinload(Account.entries),
            "joinedload": orm.joinedload(Account.entries),
        }.items()
    },
    "no eager load": lambda session, _row: (
        session.query(Account)
        .options(orm.lazyload(Account.entries))
        .populate_existing()
        .enable_eagerloads(value=False)
        .all()
    ),
}


def widen(row: Any) -> None:
    row.z = 50
    row.entries.append(wi.Entry(id=9))
    row.tags.append(wi.Tag(id=9))


@on_sqlite_alone
@pytest.mark.parametrize("key", [1, 2], ids=["base", "joined"])
@pytest.mark.parametrize("way", RENEWING)
def test_composites_and_collections_are_as_new_as_the_id(engine: Engine, way: str, key: int) -> None:
    with Session(engine, expire_on_commit=False) as session:
        row = whole(key)(session)
        assert (row.z, row.deep.y) == (1, 1)
        session.commit()
        wi.change(engine, Account, key, widen)
        bind(session, Lease("rows", wi.MINE))
        RENEWING[way](session, row)
        row.balance = row.deep.y + len(row.entries) + len(row.tags)
        session.commit()
    assert wi.stored(engine, Account, key) == 50 + (3 + 2 if key == 1 else 1 + 1)


@on_sqlite_alone
def test_composites_are_made_again_where_their_columns_are_loaded_again(engine: Engine) -> None:
    assert Account(id=9, x=5, y=6).pair == wi.Pair(5, 6)
    with holder(engine) as session:
        row = session.get_one(Account, 1)
        pair = row.pair
        assert (pair, row.z) == (wi.Pair(1, 1), 1)
        assert row.pair is pair
        session.expire(row)
        assert row.pair == wi.Pair(1, 1)
        row.pair = wi.Pair(2, 3)
        session.execute(update(Account).where(Account.id == 1).values(balance=4))
        session.refresh(row)
        assert (row.pair, row.balance) == (wi.Pair(2, 3), 4)
        session.commit()
        assert session.get_one(Account, 1, populate_existing=True).pair == wi.Pair(2, 3)


class Vector:
    """A value without one truth value when it is compared, as those of numpy."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, _other: object) -> bool:
        raise ValueError("truth value ambiguous")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("present", [False, True])
def test_merged_values_are_compared_by_their_type(in_memory: InMemory, *, present: bool) -> None:

    class Model(orm.DeclarativeBase): ...

    class Measured(wi.Fenced, Model):
        __tablename__ = "wi_measured"
        id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        vector: Mapped[Any] = mapped_column(PickleType(comparator=lambda x, y: x.number == y.number))

    engine = in_memory(Model.metadata)
    with holder(engine) as session, session.begin():
        row = Measured(id=1, vector=Vector(1))
        session.add(row)
    row.vector = Vector(2)
    with holder(engine) as session:
        kept = session.get(Measured, 1) if present else None
        merged = session.merge(row)
        assert not present or merged is kept
        session.commit()
        assert (merged.vector.number, merged.last_fencing_token) == (2, wi.MINE)
