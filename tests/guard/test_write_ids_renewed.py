"""Between its load and its write, an object becomes newer only if all of it is loaded again."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, PickleType, inspect, orm, select, text, update
from sqlalchemy.orm import Mapped, Session, aliased, joinedload, lazyload, load_only, mapped_column

from fencelock import Lease, UnfencedWriteError, bind, claim
from fencelock.guard import tables
from tests.guard import write_ids
from tests.guard.rows import InMemory, on_sqlite_alone
from tests.guard.write_ids import NO_VERSION, Account, Joined, Pair, Row, Step, Story, get, holder, whole

ROWS = write_ids.fill


def detached(load: write_ids.Load) -> write_ids.Load:
    return write_ids.after(load, lambda session, row: session.expunge(row))


def changed_and_merged(session: Session, row: Any) -> Any:
    """Compute from the detached object, then merge it."""
    row.balance -= 20
    return session.merge(row)


def again(do: Callable[[Session, Any], object]) -> Step:
    """Load a part of the object again; its balance is from before."""

    def then(session: Session, row: Any) -> None:
        do(session, row)
        assert (row.status, row.note, row.balance) in {("new", "", 100), ("other", "", 100)}
        session.commit()

    return then


def populate(statement: Any) -> Step:
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
part_of_refreshed = select(write_ids.Refreshed).options(load_only(write_ids.Refreshed.status))  # type: ignore[attr-defined]


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
take_too = write_ids.computing("balance", lambda row: row.balance - 20)
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
        load=get(write_ids.Refreshed),
        other=take_and_say,
        then=again(lambda session, _row: session.scalars(part_of_refreshed).all()),
        said=NO_VERSION,
    ),
    "claimed by the other": Story(other=lambda row: claim(inspect(row).session, Row, 1)),
    "deleted and inserted again": Story(other=insert_again),
    "deleted": Story(other=lambda row: inspect(row).session.delete(row), said=write_ids.DELETED),
    "refreshed": Story(then=lambda session, row: session.refresh(row), said=None),
    "expired": Story(then=lambda session, row: session.expire(row), said=None),
    "populated": Story(then=populate(select(Row)), said=None),
    "claimed": Story(then=lambda session, _row: claim(session, Row, 1), said=None),
    "rolled back": Story(then=roll_back, said=None),
}


def merging(
    model: type[Any] = Account, key: int = 1, *, only: tuple[Any, ...] = (), touched: str | None = None
) -> Step:
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
    write_ids.pay(session, row)
    with session.no_autoflush:
        merging(Row, only=(Row.status,))(session, row)


def merging_from_an_entry(session: Session, _row: Any) -> None:
    """Merge an account over one of its entries: SQLAlchemy leaves out the relationship that it comes by."""
    with Session(session.get_bind()) as reading:
        loading = joinedload(write_ids.Entry.account).selectinload(Account.entries)
        newer = reading.get_one(write_ids.Entry, 1, options=[loading])
    session.merge(newer)


def counting(name: str) -> write_ids.Step:
    return write_ids.computing("balance", lambda row: 10 + len(getattr(row, name)))


def with_own_write(session: Session, row: Any) -> None:
    """Write the object under an earlier lease."""
    bind(session, Lease("rows", 6))
    row.balance = 1
    session.commit()


EXTRA: dict[str, Any] = {
    "other": lambda row: setattr(row, "extra", 50),
    "write": write_ids.computing("extra", lambda row: row.extra - 30),
}
NOTES: dict[str, Any] = {
    "other": lambda row: row.notes.append(write_ids.Note(id=2)),
    "write": counting("notes"),
}
TAGS: dict[str, Any] = {"other": lambda row: row.tags.append(write_ids.Tag(id=7)), "write": counting("tags")}
PAIR: dict[str, Any] = {
    "other": lambda row: setattr(row, "pair", Pair(50, 50)),
    "write": write_ids.computing("pair", lambda row: Pair(row.pair.x - 30, row.pair.y - 30)),
}
AS_JOINED: dict[str, Any] = {"load": whole(2), "model": Joined, "key": 2}
MERGES = {
    "all of it": Story(then=merging(Row)),
    "a part": Story(then=merging(Row, only=(Row.status,))),
    "a part, into what is changed": Story(then=pay_and_merge, write=nothing),
    "joined": Story(**AS_JOINED, **EXTRA, then=merging(Joined, 2, only=(Joined.balance,))),
    "single": Story(
        load=whole(3),
        model=write_ids.Single,
        key=3,
        **EXTRA,
        then=merging(write_ids.Single, 3, only=(write_ids.Single.balance,)),
    ),
    "by the base": Story(**AS_JOINED, **EXTRA, then=merging(Account, 2)),
    "collection of a subclass": Story(**AS_JOINED, **NOTES, then=merging(Joined, 2)),
    "no cascade": Story(load=whole(), model=Account, **TAGS, then=merging(touched="tags")),
    "after a write": Story(
        load=write_ids.after(whole(), with_own_write), model=Account, **TAGS, then=merging(touched="tags")
    ),
    "composite": Story(load=whole(), model=Account, **PAIR, then=merging()),
    "where it comes from": Story(
        load=whole(),
        model=Account,
        other=lambda row: row.entries.append(write_ids.Entry(id=9)),
        then=merging_from_an_entry,
        write=counting("entries"),
    ),
}


@on_sqlite_alone
@pytest.mark.parametrize("written", [True, False], ids=["written", "untouched"])
@pytest.mark.parametrize("way", THEN)
def test_what_comes_between_makes_an_object_no_younger(engine: Engine, way: str, *, written: bool) -> None:
    """Save where all of it is loaded again."""
    write_ids.play(engine, THEN[way], written=written)


@on_sqlite_alone
@pytest.mark.parametrize("written", [True, False], ids=["written", "untouched"])
@pytest.mark.parametrize("way", MERGES)
def test_a_newer_object_merged_into_an_older_one_is_of_two_versions(
    engine: Engine, way: str, *, written: bool
) -> None:
    """What the merge does not bring stays as it was."""
    write_ids.play(engine, replace(MERGES[way], said=NO_VERSION), written=written)


def without(*columns: Any) -> write_ids.Load:
    """Load a row from a statement that leaves its id out."""
    return write_ids.query(select(Row).from_statement(select(*columns).where(Row.id == 1)))


WITHOUT_ID = {
    "columns": without(Row.id, Row.balance),
    "text": write_ids.query(select(Row).from_statement(text("SELECT id, balance FROM wi_rows WHERE id = 1"))),
    "subquery": write_ids.query(
        select(aliased(Row, select(Row.id, Row.balance).where(Row.id == 1).subquery()))
    ),
}


@on_sqlite_alone
@pytest.mark.parametrize(
    "write", [write_ids.pay, lambda session, row: session.delete(row)], ids=["UPDATE", "DELETE"]
)
@pytest.mark.parametrize(
    "load", [*WITHOUT_ID.values(), get(write_ids.DeferredId)], ids=[*WITHOUT_ID, "deferred id"]
)
def test_an_object_without_its_id_is_not_written(engine: Engine, load: write_ids.Load, write: Step) -> None:
    with holder(engine) as session:
        write(session, load(session))
        with pytest.raises(UnfencedWriteError, match="loaded without last_write_id"):
            session.flush()


@on_sqlite_alone
@pytest.mark.parametrize("load", WITHOUT_ID.values(), ids=WITHOUT_ID)
def test_reading_an_id_that_a_query_left_out_loads_it(engine: Engine, load: write_ids.Load) -> None:
    """The object is of two versions from then on."""
    with holder(engine) as session:
        assert load(session).last_write_id == tables.NO_VERSION


@on_sqlite_alone
@pytest.mark.parametrize("load", WITHOUT_ID.values(), ids=WITHOUT_ID)
def test_an_object_that_gets_its_id_later_is_of_two_versions(engine: Engine, load: write_ids.Load) -> None:
    """So is the object into which it is merged. After a rollback all is loaded again."""
    with holder(engine) as session:
        row = load(session)
        assert row.note == ""
        row.balance += 1
        with write_ids.refused(engine, NO_VERSION, write_ids.FENCE):
            session.commit()
        session.rollback()
        session.expunge_all()
        kept = load(session)
    write_ids.change(engine)
    with holder(engine) as session:
        row = session.merge(kept)
        row.balance -= 30
        with write_ids.refused(engine, NO_VERSION):
            session.commit()
        session.rollback()
        row.balance -= 30
        session.commit()
    assert write_ids.stored(engine) == 50


RENEWING: dict[str, Step] = {
    "claim": lambda session, row: claim(session, type(row), row.id),
    "claim of the base": lambda session, row: claim(session, Account, row.id),
    "populate": lambda session, row: session.get_one(type(row), row.id, populate_existing=True),
    **{
        name: populate(select(Account).options(option))
        for name, option in {
            "lazyload": lazyload(Account.entries),
            "selectinload": orm.selectinload(Account.entries),
            "joinedload": joinedload(Account.entries),
        }.items()
    },
    "no eager load": lambda session, _row: (
        session.query(Account)
        .options(lazyload(Account.entries))
        .populate_existing()
        .enable_eagerloads(value=False)
        .all()
    ),
}


def widen(row: Any) -> None:
    """Change a composite, a collection and links."""
    row.z = 50
    row.entries.append(write_ids.Entry(id=9))
    row.tags.append(write_ids.Tag(id=9))


@on_sqlite_alone
@pytest.mark.parametrize("key", [1, 2], ids=["base", "joined"])
@pytest.mark.parametrize("way", RENEWING)
def test_composites_and_collections_are_as_new_as_the_id(engine: Engine, way: str, key: int) -> None:
    with Session(engine, expire_on_commit=False) as session:
        row = whole(key)(session)
        assert (row.z, row.deep.y) == (1, 1)
        session.commit()
        write_ids.change(engine, Account, key, widen)
        bind(session, Lease("rows", write_ids.MINE))
        RENEWING[way](session, row)
        row.balance = row.deep.y + len(row.entries) + len(row.tags)
        session.commit()
    assert write_ids.stored(engine, Account, key) == 50 + (3 + 2 if key == 1 else 1 + 1)


@on_sqlite_alone
def test_composites_are_there(engine: Engine) -> None:
    assert Account(id=9, x=5, y=6).pair == Pair(5, 6)
    with holder(engine) as session:
        row = session.get_one(Account, 1)
        pair = row.pair
        assert (pair, row.z) == (Pair(1, 1), 1)
        assert row.pair is pair
        session.expire(row)
        assert row.pair == Pair(1, 1)
        row.pair = Pair(2, 3)
        session.execute(update(Account).where(Account.id == 1).values(balance=4))
        session.refresh(row)
        assert (row.pair, row.balance) == (Pair(2, 3), 4)
        session.commit()
        assert session.get_one(Account, 1, populate_existing=True).pair == Pair(2, 3)


class Vector:
    """A value without one truth value when it is compared, as those of numpy."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, _other: object) -> bool:
        raise ValueError("truth value ambiguous")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("present", [False, True])
def test_merged_values_are_compared_by_their_type(in_memory: InMemory, *, present: bool) -> None:
    """Their own comparison may raise."""

    class Model(orm.DeclarativeBase): ...

    class Measured(write_ids.Fenced, Model):
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
        assert (merged.vector.number, merged.last_fencing_token) == (2, write_ids.MINE)
