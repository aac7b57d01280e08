"""`__fence_lease__ = "optional"`: a writer without a lease writes by the version of the row alone."""

from __future__ import annotations

import linecache
import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Column, Engine, ForeignKey, Integer, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

import fencelock
from fencelock import FencedModel, Lease, StaleReadError, UnfencedWriteError, bind, claim, gate
from fencelock.guard import events
from fencelock.observe import WrittenWithoutLease
from fencelock.observe.prometheus import instrument
from tests.guard.marks import Act, ForAsyncio, on_sqlite_alone
from tests.guard.rows import Keyed, acts, awaiting, core_table, holding, rows_of, turned_away

FENCE, TOKEN = 5, 9
HELD_ONE = (Lease("order:1", TOKEN),)


class Base(DeclarativeBase): ...


class Order(FencedModel, Keyed, Base):
    __tablename__ = "ol_orders"
    __fence_resource__ = "order:{id}"
    __fence_lease__ = "optional"
    __fence_trigger__ = "strict"
    total: Mapped[int] = mapped_column(default=0)
    kind: Mapped[int] = mapped_column(default=0)
    lines: Mapped[list[Line]] = relationship(cascade="all, delete-orphan")
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": 0}  # noqa: RUF012


class Express(Order):
    __tablename__ = "ol_express"
    id: Mapped[int] = mapped_column(ForeignKey(Order.id), primary_key=True)
    hours: Mapped[int] = mapped_column(default=24)
    __mapper_args__ = {"polymorphic_identity": 1}  # noqa: RUF012


class Line(Keyed, Base):
    __tablename__ = "ol_lines"
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))


class Strict(FencedModel, Keyed, Base):
    __tablename__ = "ol_strict"
    __fence_resource__ = "strict:{id}"
    total: Mapped[int] = mapped_column(default=0)
    parts: Mapped[list[Part]] = relationship()


class Part(Keyed, Base):
    __tablename__ = "ol_parts"
    strict_id: Mapped[int] = mapped_column(ForeignKey(Strict.id))


total = Column("total", Integer, server_default="0")
core = core_table("ol_core", total, metadata=Base.metadata, resource="core:{id}", lease="optional")
fencelock.fence_table(Base.metadata)
ORDER, EXPRESS = 1, 2
ITS = {"last_fencing_token": FENCE, "last_write_id": 11}
ROWS: dict[Any, Any] = {
    Order: [{"id": key, "kind": key - 1, **ITS} for key in (ORDER, EXPRESS)],
    Express: {"id": EXPRESS, "hours": 24},
    Strict: {"id": 1, **ITS},
    core: {"id": 1, **ITS},
}


def stored(engine: Engine, key: int = ORDER, table: Any = Order.__table__) -> tuple[int, int, int]:
    columns = table.c.total, table.c.last_fencing_token, table.c.last_write_id
    with engine.connect() as connection:
        return tuple(connection.execute(select(*columns).where(table.c.id == key)).one())


def add_by_object(session: Session) -> None:
    session.get_one(Order, ORDER).total += 1


def expired(session: Session) -> Order:
    order = session.get_one(Order, ORDER)
    session.expire(order)
    return order


WRITES: dict[str, Act] = acts(
    {
        "an object": add_by_object,
        "an expired object": lambda session: setattr(expired(session), "total", 1),
        "by key": update(Order).where(Order.id == ORDER).values(total=Order.total + 1),
        "by criteria": update(Order).where(Order.id < EXPRESS).values(total=Order.total + 1),
        "without criteria": update(Order).values(total=Order.total + 1),
        "by keys in a list": lambda session: session.execute(update(Order), [{"id": ORDER, "total": 1}]),
        "by values in a dict": update(Order).where(Order.id == ORDER).values({"total": 1}),
        "bulk": lambda s: s.bulk_update_mappings(Order.__mapper__, [{"id": ORDER, "total": 1}]),
    }
)


@pytest.mark.parametrize(
    ("shared_url", "way"),
    [
        *(("sqlite", way) for way in (*WRITES, "a sub-table")),
        *(
            (url, way)
            for url in ("postgresql", "mariadb")
            for way in ("an object", "by criteria", "a sub-table")
        ),
    ],
    indirect=["shared_url"],
)
def test_a_write_without_a_lease_moves_the_id_and_leaves_the_fence(engine: Engine, way: str) -> None:
    with Session(engine) as session, session.begin():
        if way == "a sub-table":
            session.get_one(Express, EXPRESS).hours = 2
        else:
            WRITES[way](session)
    total, fence, write_id = stored(engine, EXPRESS if way == "a sub-table" else ORDER)
    assert (total, fence) == (0 if way == "a sub-table" else 1, FENCE)
    assert write_id != 11


express: Any = Express.__table__
strict: Any = Strict.__table__
OF_SUB_TABLE: dict[str, Act] = acts(
    {
        "update()": update(Express).where(Express.id == EXPRESS).values(hours=2),
        "update() of all": update(Express).values(hours=Express.hours + 1),
        "keys in a list": lambda session: session.execute(update(Express), [{"id": EXPRESS, "hours": 2}]),
        "bulk": lambda s: s.bulk_update_mappings(Express.__mapper__, [{"id": EXPRESS, "hours": 2}]),
        "Core": update(express).values(hours=2),
        "another table": update(express).where(express.c.id == Order.id, Order.total == 0).values(hours=2),
        "delete()": delete(Express).where(Express.id == EXPRESS),
        "delete() in Core": delete(express),
        "Query.delete": lambda session: session.query(Express).filter_by(id=EXPRESS).delete(),
    }
)


@pytest.mark.parametrize("way", OF_SUB_TABLE)
def test_a_statement_of_a_sub_table_is_noticed_by_a_holder(engine: Engine, way: str) -> None:
    """CTFd deletes so. Only the rows that it has changed get another write id."""
    with holding(engine, Lease(f"order:{EXPRESS}", TOKEN), expire_on_commit=False) as holder:
        one = holder.get_one(Express, EXPRESS)
        holder.commit()
        with Session(engine) as session:
            loaded = session.get_one(Order, ORDER)
            OF_SUB_TABLE[way](session)
            loaded.total = 3  # another row, so that the session goes on
            session.commit()
        assert stored(engine, EXPRESS)[1] == FENCE
        assert stored(engine, EXPRESS)[2] != 11
        one.total = 7
        with turned_away(holder, StaleReadError):
            holder.commit()


@on_sqlite_alone
def test_a_statement_of_a_sub_table_that_is_no_plain_one(engine: Engine) -> None:
    with Session(engine) as session:
        session.execute(insert(express), {"id": ORDER, "hours": 1})
        with turned_away(session, UnfencedWriteError):
            session.connection().execute(insert(express).prefix_with("OR REPLACE"), {"id": ORDER, "hours": 1})
        hidden = insert(express).add_cte(update(strict).values(total=9).cte("others"))
        with turned_away(session, UnfencedWriteError, match="no other write inside it"):
            session.connection().execute(hidden, {"id": ORDER, "hours": 1})
        option = {"fencing_token": TOKEN}
        with turned_away(session, UnfencedWriteError):
            session.execute(update(Express).values(hours=2), execution_options=option)
        with turned_away(session, UnfencedWriteError, match=r"takes no prefix_with"):
            session.execute(update(Express).values(hours=2).prefix_with("OR REPLACE"))
        with turned_away(session, UnfencedWriteError, match="through their objects"):
            session.execute(update(Express), [{"id": EXPRESS, "hours": 2, "total": 3}])
    with holding(engine, *HELD_ONE) as holder, turned_away(holder, UnfencedWriteError):
        holder.execute(update(Express).values(hours=2))


@on_sqlite_alone
def test_a_fence_that_a_form_assigns_is_put_back(engine: Engine) -> None:
    with Session(engine, expire_on_commit=False) as session:
        order = session.get_one(Order, ORDER)
        order.total, order.last_fencing_token = 1, FENCE + 2
        session.commit()
        assert order.last_fencing_token == FENCE
    assert stored(engine)[:2] == (1, FENCE)


def test_upsert_leaves_the_fence_as_well(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        fencelock.upsert(session, Order, [{"id": ORDER, "total": 1}, {"id": 7, "total": 2}])
    assert stored(engine)[:2] == (1, FENCE)
    assert stored(engine, 7)[:2] == (2, 0)


def test_new_rows_begin_without_a_fence(engine: Engine) -> None:
    with Session(engine) as session:
        for key in (7, 8, 9):
            session.add(Order(id=key))
        session.flush()
        session.get_one(Order, 7).total = 3
        session.delete(session.get_one(Order, 8))
        session.commit()
        assert stored(engine, 7)[:2] == (3, 0)
        session.get_one(Order, 7).total = 4
        session.delete(session.get_one(Order, 9))
        session.execute(delete(Order).where(Order.id == EXPRESS + 5))
        session.commit()
    assert rows_of(engine, select(Order.__table__.c.id).order_by(Order.__table__.c.id)) == [1, 2]


def test_a_core_table_may_make_leases_optional(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(insert(core), {"id": 2})
        connection.execute(update(core).where(core.c.id == 1).values(total=4))
        connection.execute(update(core).where(core.c.id == 2).values(total=5))
    assert stored(engine, 1, core)[:2] == (4, FENCE)
    assert stored(engine, 2, core)[:2] == (5, 0)


def write_elsewhere(engine: Engine) -> None:
    with Session(engine) as session:
        add_by_object(session)
        session.commit()  # this line


@pytest.mark.parametrize(
    ("shared_url", "leases", "act"),
    [
        *(("sqlite", leases, act) for leases in ((), HELD_ONE) for act in ("UPDATE", "DELETE")),
        *(
            (url, *pair)
            for url in ("postgresql", "mariadb")
            for pair in (((), "UPDATE"), (HELD_ONE, "DELETE"))
        ),
    ],
    indirect=["shared_url"],
)
def test_an_object_is_written_over_the_version_that_was_loaded(
    engine: Engine, leases: tuple[Lease, ...], act: str
) -> None:
    with Session(engine, expire_on_commit=False) as session:
        order = session.get_one(Order, ORDER)
        session.commit()
        write_elsewhere(engine)
        bind(session, *leases)
        if act == "DELETE":
            session.delete(order)
        else:
            order.total = 50
        with pytest.raises(fencelock.StaleReadError, match="was written since") as caught:
            session.commit()
    assert caught.value.token == (TOKEN if leases else 0)
    assert stored(engine)[:2] == (1, FENCE)


@pytest.mark.parametrize(
    ("lease", "error"),
    [
        (Lease(f"order:{ORDER}", FENCE - 1), fencelock.StaleTokenError),
        (Lease(f"order:{ORDER}", TOKEN, 1.0), fencelock.LockLostError),
    ],
    ids=["below the fence", "ended"],
)
def test_a_stale_or_ended_lease_is_refused_where_leases_are_optional(
    engine: Engine, lease: Lease, error: type[Exception]
) -> None:
    with holding(engine, lease) as session:
        add_by_object(session)
        with pytest.raises(error):
            session.commit()


def write_and_flush(session: Session, write: Act) -> None:
    write(session)
    session.flush()


@on_sqlite_alone
def test_the_lease_of_another_row_is_a_slip(engine: Engine) -> None:
    with holding(engine, Lease("order:77", TOKEN)) as session:
        for write in (add_by_object, WRITES["by criteria"], WRITES["by key"]):
            with turned_away(session, UnfencedWriteError):
                write_and_flush(session, write)
        bind(session, Lease("customer:1", TOKEN))
        add_by_object(session)
        session.commit()
    assert stored(engine)[:2] == (1, FENCE)


def test_what_was_begun_under_a_lease_is_not_ended_without(engine: Engine, tmp_path: Any) -> None:
    with fencelock.Database(f"sqlite:///{tmp_path}/leases.sqlite") as authority, Session(engine) as session:
        with fencelock.fenced_lock(f"order:{ORDER}", authority=authority):
            add_by_object(session)
        with turned_away(session, UnfencedWriteError, match="flush or commit inside it"):
            session.commit()
        add_by_object(session)
        session.commit()


TEXT = fencelock.fenced_text(
    "UPDATE ol_orders SET total = 1, last_fencing_token = :fencing_token, last_write_id = :fencing_write_id "
    "WHERE id = 1 AND last_fencing_token <= :fencing_token",
    Order,
    resource="order:1",
)
NEEDY: dict[str, Act] = acts(
    {
        "claim": lambda session: claim(session, Order, ORDER),
        "gate": lambda session: gate(session, "order:1"),
        "fenced_text": TEXT,
        "a model that wants one": update(Strict).where(Strict.id == 1).values(total=1),
    }
)


@on_sqlite_alone
@pytest.mark.parametrize("way", NEEDY)
def test_what_names_a_token_needs_a_lease_all_the_same(engine: Engine, way: str) -> None:
    with Session(engine) as session, pytest.raises(UnfencedWriteError, match="no lease is held"):
        NEEDY[way](session)


@pytest.mark.parametrize("model", [Order, Strict])
def test_a_collection_alone_is_the_childrens_write(engine: Engine, model: type[Any]) -> None:
    """A writer without the parent's lease writes only the children.

    A holder of it writes the parent's row, too.
    """
    name, child = ("lines", Line) if model is Order else ("parts", Part)
    with Session(engine) as session:
        parent = session.get_one(model, 1)
        getattr(parent, name).append(child(id=1))
        session.commit()
        assert stored(engine, 1, model.__table__) == (0, FENCE, 11)
        bind(session, Lease(model.__fence_resource__.format(id=1), TOKEN))
        getattr(parent, name).append(child(id=2))
        session.commit()
        assert stored(engine, 1, model.__table__)[1] == TOKEN
        bind(session)
        with fencelock.bypass(session):
            getattr(parent, name).append(child(id=3))
            session.commit()
    assert rows_of(engine, select(child.__table__.c.id)) == [1, 2, 3]


def test_events_and_a_counter_tell_of_it(engine: Engine) -> None:
    registry, seen = CollectorRegistry(), list[object]()
    listeners: list[Any] = [instrument(registry=registry), fencelock.on_event(seen.append)]
    try:
        write_elsewhere(engine)
    finally:
        for each in listeners:
            fencelock.forget(each)
    told = [(each.table, each.resource) for each in seen if isinstance(each, WrittenWithoutLease)]
    assert told == [("ol_orders", "order:1")]
    assert registry.get_sample_value("fencelock_writes_without_lease_total", {"table": "ol_orders"}) == 1


def test_the_log_names_a_line_of_the_program_once(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, for_asyncio: ForAsyncio
) -> None:
    monkeypatch.setattr(events, "_places", set())
    caplog.set_level(logging.INFO, "fencelock.guard")

    async def write(session: AsyncSession) -> None:
        (await session.get_one(Order, ORDER)).total += 1
        await session.commit()  # this line

    for _ in range(2):
        write_elsewhere(engine)
        awaiting(for_asyncio(engine), write)
    places = [record.getMessage().split(" writes to ")[0] for record in caplog.records]
    assert len(places) == 2
    for place in places:
        file, _, number = place.rpartition(":")
        assert file == __file__
        assert "session.commit()  # this line" in linecache.getline(file, int(number))
