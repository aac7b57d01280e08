"""The lease that a row names guards it, and a transaction remembers the leases of its writes."""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Column, Engine, ForeignKey, Integer, Table, event, insert, select, update
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Mapped, Session, mapped_column, relationship

import fencelock
from fencelock import FencedModel, Lease, LockLostError, StaleTokenError, UnfencedWriteError, bind, claim
from fencelock.lease import note_ended, note_held
from tests.guard.marks import Act, named
from tests.guard.models import Base, Free, Order, Row
from tests.guard.rows import bypassed, core_table, holding, refill, tables_of, turned_away
from tests.guard.waiting import listening, statements, words
from tests.polling import eventually


class Sale(FencedModel, Base):
    """Its key does not tell its resource."""

    __tablename__ = "le_sales"
    __fence_resource__ = "customer:{customer_id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(ForeignKey("g_free.id"))
    status: Mapped[str] = mapped_column(default="new")
    successor_id: Mapped[int | None] = mapped_column(ForeignKey("le_sales.id"))
    successor: Mapped[Sale | None] = relationship(remote_side="Sale.id", post_update=True)
    customer: Mapped[Free] = relationship()


class Setting(FencedModel, Base):
    __tablename__ = "le_settings"
    __fence_resource__ = "tenant:{tenant}"
    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(default="main")


class Ticket(FencedModel, Base):
    """The database makes its key."""

    __tablename__ = "le_tickets"
    __fence_resource__ = "ticket:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)


TWO = [{"id": 1}, {"id": 2}]
ROWS: dict[Any, Any] = {
    Free: TWO,
    Sale: [{"id": number, "customer_id": number} for number in (1, 2)],
    Order: TWO,
    Row: TWO,
    Setting: [],
    Ticket: [],
}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine on SQLite: none of this depends on the database."""
    made = sa.create_engine(f"sqlite:///{tmp_path / 'test.sqlite'}")
    Base.metadata.create_all(made, tables_of(ROWS))
    yield refill(made, ROWS)
    made.dispose()


@pytest.fixture
def held() -> Iterator[list[Lease]]:
    leases = [Lease("order:1", 3), Lease("customer:1", 4)]
    note_held(*leases)
    yield leases
    note_ended(*leases)


def flush_after(act: Act, session: Session) -> None:
    act(session)
    session.flush()


def write(session: Session, status: str, number: int = 1) -> Order:
    order = session.get_one(Order, number)
    order.status = status
    session.flush()
    return order


def fences(session: Session, model: type[Any]) -> list[int]:
    return [*session.scalars(select(model.last_fencing_token).order_by(model.id))]


def assigning(model: type[Any], name: str, value: object, key: int = 1) -> Act:
    return lambda session: setattr(session.get_one(model, key), name, value)


def with_successor(session: Session) -> None:
    """Insert a row that the same flush updates, for which the session has no key yet."""
    session.add(Sale(customer_id=1, successor=Sale(customer=session.get_one(Free, 1))))


def delete_expired(session: Session) -> None:
    sale = session.get_one(Sale, 1)
    session.expire(sale)
    session.delete(sale)


def by_parameters(session: Session) -> None:
    """Name the resource of each execution by a value of its own."""
    table: Any = Order.__table__
    statement = update(table).where(table.c.id == sa.bindparam("which"))
    session.connection().execute(statement, [{"which": 1, "status": "a"}, {"which": 2, "status": "b"}])


def updating(*criteria: Any, **values: Any) -> Act:
    return lambda session: session.execute(update(Sale).where(*criteria).values(values or {"status": "x"}))


TOKENS = {"order:1": 3, "order:2": 30, "customer:1": 4, "rows": 5, "tenant:main": 6, "other": 7}
Guarded = tuple[tuple[str, ...], Act, type[Any], list[int]]
GUARDED: dict[str, Guarded] = {
    "a row by its key": (("order:1",), assigning(Order, "status", "a"), Order, [3, 0]),
    "parameters": (("order:1", "order:2"), by_parameters, Order, [3, 30]),
    "a new row of a whole table": (("rows",), lambda s: s.add(Row(id=3)), Row, [0, 0, 5]),
    "a whole table": (("rows", "other"), lambda s: s.execute(update(Row).values(value=1)), Row, [5, 5]),
    "an object by other columns": (("customer:1",), assigning(Sale, "status", "x"), Sale, [4, 0]),
    "an expired object": (("customer:1",), delete_expired, Sale, [0]),
    "a new row with post_update": (("customer:1",), with_successor, Sale, [0, 0, 4, 4]),
    "criteria": (("customer:1",), updating(Sale.customer_id == 1, Sale.status == "new"), Sale, [4, 0]),
    "a default": (("tenant:main",), lambda s: s.add(Setting()), Setting, [6]),
}


@pytest.mark.parametrize(("held", "write", "model", "found"), **named(GUARDED))
def test_a_row_is_written_under_the_lease_that_it_names(
    session: Session, held: tuple[str, ...], write: Act, model: type[Any], found: list[int]
) -> None:
    """The unit of work knows the row's columns, loaded or expired; a statement has to name them."""
    bind(session, *(Lease(resource, TOKENS[resource]) for resource in held))
    write(session)
    session.commit()
    assert fences(session, model) == found


FROM_A_QUERY = select(Free.id).where(Free.id == 1).scalar_subquery()
UNGUARDED: dict[str, tuple[Act, str]] = {
    "another row": (assigning(Order, "status", "a", 2), "'order:2'.*'customer:1', 'order:1'"),
    "another row, by other columns": (assigning(Sale, "status", "x", 2), "'customer:2'"),
    "a whole table": (lambda s: s.execute(update(Row).values(value=2)), "'rows'"),
    "a new row": (lambda s: s.add(Setting(tenant="else")), "'tenant:else'"),
    "criteria, of another": (updating(Sale.customer_id == 2), "'customer:2'"),
    "criteria, of any": (updating(Sale.status == "new"), "compare customer_id"),
    "criteria, by the key": (updating(Sale.id == 2), "compare customer_id"),
    "criteria, by OR": (updating((Sale.customer_id == 1) | (Sale.id == 2)), "compare customer_id"),
    "a value of the database": (
        lambda s: s.execute(insert(Sale).values(customer_id=FROM_A_QUERY)),
        "give customer_id a plain value",
    ),
    "to another resource": (assigning(Sale, "customer_id", 2), "customer_id of 'le_sales' must not change"),
    "to another key": (assigning(Order, "id", 9), "must not change"),
    "to another, by a statement": (updating(Sale.customer_id == 1, customer_id=2), "must not change"),
    "to another, by an attribute": (
        lambda s: s.execute(update(Sale).where(Sale.customer_id == 1).values({Sale.customer_id: 2})),
        "must not change",
    ),
}


@pytest.mark.parametrize(("write", "match"), **named(UNGUARDED))
def test_a_row_that_no_lease_names_is_refused_by_name(session: Session, write: Act, match: str) -> None:
    """The error says which resource is needed and which are held, or why no lease guards it."""
    bind(session, Lease("customer:1", 4), Lease("order:1", 3))
    with turned_away(session, UnfencedWriteError, match=match):
        flush_after(write, session)
    session.get_one(Order, 1).status = "a"
    session.commit()


def test_rows_of_one_flush_get_their_own_tokens(session: Session) -> None:
    bind(session, Lease("order:1", 3), Lease("order:2", 30))
    for number in (1, 2):
        session.get_one(Order, number).status = "a"
    session.commit()
    assert fences(session, Order) == [3, 30]
    bind(session, Lease("order:1", 4), Lease("order:2", 29))
    orders = session.scalars(select(Order)).all()
    for order in orders:
        order.status = "b"
    with turned_away(session, StaleTokenError) as caught:
        session.commit()
    assert (caught.value.identity, caught.value.token, caught.value.current) == ((2,), 29, 30)
    assert [order.status for order in orders] == ["a", "a"]


def test_a_transaction_remembers_its_lease(session: Session) -> None:
    """A flush after the end of the block is guarded by its lease, and a newer one does not count yet.

    What was read under the first lease may be out of date under the second.
    """
    lease, newer = Lease("order:1", 3), Lease("order:1", 5)
    note_held(lease)
    write(session, "a")
    lease._released = True
    note_ended(lease)
    assert write(session, "b").last_fencing_token == 3
    note_held(newer)
    assert write(session, "c").last_fencing_token == 3
    session.commit()
    assert write(session, "d").last_fencing_token == 5
    session.commit()
    note_ended(newer)
    with pytest.raises(UnfencedWriteError):
        write(session, "e")


@pytest.mark.usefixtures("held")
def test_bind_wins_over_the_context_and_over_what_the_transaction_remembers(session: Session) -> None:
    session.get_one(Sale, 1).status = "paid"
    assert write(session, "held").last_fencing_token == 3
    assert session.get_one(Sale, 1).last_fencing_token == 4
    for token in (50, 51):
        bind(session, Lease("order:1", token))
        assert write(session, f"status {token}").last_fencing_token == token
    session.commit()
    bind(session)
    with pytest.raises(StaleTokenError):
        write(session, "b")


@pytest.mark.usefixtures("held")
def test_bind_that_hides_a_lease_says_so(session: Session) -> None:
    """A caller that holds the needed lease, and has bound another one, hears that the bind is the reason."""
    bind(session, Lease("order:2", 3))
    hint = r"needs the lease of 'order:1'.*bind\(session\) undoes it"
    with turned_away(session, UnfencedWriteError, match=hint):
        session.execute(PAID)
    bind(session)
    with pytest.raises(UnfencedWriteError) as caught:
        session.execute(update(Order).where(Order.id == 2).values(status="x"))
    assert "undoes" not in str(caught.value)


def test_a_transaction_of_an_unknown_class_needs_its_lease_no_longer_than_it_lives(engine: Engine) -> None:
    """No event says how such a transaction ends, and its connection may be used on and on."""

    class Own(RootTransaction):
        __slots__ = ()

    lease = Lease("order:1", 3)
    with engine.connect() as connection:
        bind(connection, lease)
        connection.begin().__class__ = Own
        connection.execute(PAID)
        was_needed = lease._needed
        connection.commit()
        assert was_needed
        assert eventually(lambda: not lease._needed, seconds=30)
        assert connection.scalar(select(Order.last_fencing_token).where(Order.id == 1)) == 3


PAID = update(Order).where(Order.id == 1).values(status="b")
LEASELESS: dict[str, tuple[Act, str]] = {
    "insert": (lambda s: s.add(Order(id=7)), "fenced_lock('order:7')"),
    "update": (assigning(Order, "status", "a"), "fenced_lock('order:1')"),
    "delete": (lambda s: s.delete(s.get_one(Order, 1)), "fenced_lock('order:1')"),
    "statement": (lambda s: s.execute(PAID), "fenced_lock('order:1')"),
    "claim": (lambda s: claim(s, Order, 1), "fenced_lock('order:1')"),
    "key of the database": (lambda s: s.add(Ticket()), "any fenced_lock (the database makes the key"),
    "of a table": (assigning(Row, "value", 1), "fenced_lock('rows')"),
    "by other columns": (assigning(Sale, "status", "paid", 2), "fenced_lock('customer:2')"),
}


@pytest.mark.parametrize(("write", "lock"), **named(LEASELESS))
def test_a_write_without_a_lease_is_told_which_and_that_threads_inherit_none(
    engine: Engine, session: Session, write: Act, lock: str
) -> None:
    """The row's own resource, where its values are known. Nothing is sent."""
    hint = r"follow.*not into other threads or executors.*bind\(session, lock\.lease\)"
    refused = pytest.raises(UnfencedWriteError, match=f"no lease is held.*{re.escape(lock)}.*{hint}")
    with statements(engine) as sent, refused:
        contextvars.Context().run(flush_after, write, session)  # one in which no block was left before
    assert {*words(sent)} <= {"SELECT"}


def test_nothing_is_deleted_before_a_refusal_that_comes_later_in_the_flush(
    engine: Engine, session: Session
) -> None:
    order = session.get_one(Order, 1)
    bind(session, Lease("order:1", 3))
    with statements(engine) as sent, turned_away(session, UnfencedWriteError):
        session.delete(order)
        session.add(Setting())
        session.flush()
    assert {*words(sent)} <= {"SELECT"}


@pytest.mark.parametrize(
    ("end", "error", "match"),
    [
        (lambda lease: setattr(lease, "_released", True), UnfencedWriteError, "no lease is held"),
        (lambda lease: lease._mark_lost("the nodes said so"), LockLostError, "the nodes said so"),
    ],
    ids=["released", "lost"],
)
def test_a_lease_that_is_gone_guards_nothing_more(
    session: Session, end: Callable[[Lease], object], error: type[Exception], match: str
) -> None:
    lease = Lease("order:1", 3)
    bind(session, lease)
    order = write(session, "a")
    session.commit()
    end(lease)
    with turned_away(session, error, match=match):
        write(session, "b")
    assert (order.status, order.last_fencing_token) == ("a", 3)


ENDED_WRITES: dict[str, Act] = {
    "flush": lambda session: write(session, "b"),
    "statement": lambda session: session.execute(PAID),
    "insert": lambda session: session.execute(insert(Order).values(id=1, status="b")),
    "claim": lambda session: claim(session, Order, 1),
    "claim_all": lambda session: fencelock.claim_all(session, select(Order).where(Order.id == 1)),
    "gate": lambda session: fencelock.gate(session, "order:1"),
    "upsert": lambda session: fencelock.upsert(session, Order, [{"id": 1, "status": "b"}]),
}


@pytest.mark.parametrize("way", ENDED_WRITES)
@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
def test_a_lease_whose_time_is_over_writes_nothing_more(
    engine: Engine, session: Session, way: str, *, begun: bool
) -> None:
    """Whichever thread renews it. An earlier write under the lease does not help."""
    lease = Lease("order:1", 3, expires_at=time.monotonic() + 600)
    bind(session, lease)
    if begun:
        write(session, "a")
    lease._extend_to(time.monotonic())
    lost = pytest.raises(LockLostError, match="ended before this statement: nothing was sent")
    with statements(engine) as sent, lost:
        ENDED_WRITES[way](session)
    assert {*words(sent)} <= {"SELECT", "SAVEPOINT", "BEGIN"}
    session.rollback()
    lease._extend_to(time.monotonic() + 600)  # it was renewed in time, by its authority
    write(session, "c")
    session.commit()


def test_a_lease_that_ends_within_a_flush_stops_it(session: Session, engine: Engine) -> None:
    """Between two of its statements, say while the first has waited for a row lock."""
    lease = Lease("order:1", 3, expires_at=time.monotonic() + 600)
    bind(session, lease, Lease("order:77", 3))
    session.get_one(Order, 1).status = "a"
    session.add(Order(id=77))

    def run_out(*args: Any) -> None:
        if not args[2].startswith("SELECT"):
            lease._extend_to(time.monotonic() - 1)

    lost = pytest.raises(LockLostError, match="nothing was sent")
    with listening(engine, "before_cursor_execute", run_out), lost:
        session.commit()
    session.rollback()
    assert session.get_one(Order, 1).status == "new"
    assert session.get(Order, 77) is None


def test_a_forked_child_writes_nothing(engine: Engine) -> None:
    """The child's copy of a lease is lost, bound or held."""
    lease = Lease("order:1", 3)
    note_held(lease)
    engine.dispose()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12: pytest has threads
        child = os.fork()
    if child == 0:
        try:
            write(Session(engine), "a")
        except LockLostError:
            os._exit(7)
        finally:
            os._exit(1)
    note_ended(lease)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_what_a_listener_writes_in_a_flush_is_written_under_what_is_held_then(session: Session) -> None:
    """A flush has settled its own tokens by then. Other statements ask for their tokens again."""
    bind(session, Lease("rows", 5))

    def write_more(_mapper: object, connection: Connection, item: Row) -> None:
        bind(session, Lease("rows", 6))
        connection.execute(update(Row).where(Row.id == 3 - item.id).values(value=9))

    with listening(Row, "after_update", write_more):
        session.get_one(Row, 1).value += 1
        session.commit()
    assert fences(session, Row) == [5, 6]


def test_a_lease_released_in_the_midst_of_a_flush_guards_nothing_from_there_on(session: Session) -> None:
    """The flush of another row has seen the lease held. The first use of the lease asks again."""
    first, second = Lease("order:1", 3), Lease("order:2", 3)
    bind(session, first, second)

    def release(_mapper: object, _connection: object, order: Order) -> None:
        if order.id == 1:
            second._released = True

    for order in session.scalars(select(Order).order_by(Order.id)):
        order.status = "z"
    refused = pytest.raises(UnfencedWriteError, match="'order:2' has been released meanwhile")
    with listening(Order, "before_update", release), refused:
        session.flush()


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_what_a_refused_commit_has_left_is_rolled_back_before_the_lease_is_let_go(database_url: str) -> None:
    """SQLite keeps a transaction open whose COMMIT a deferred foreign key has refused; PostgreSQL ends it."""
    engine = sa.create_engine(database_url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda driver, _: driver.execute("PRAGMA foreign_keys = ON"))
    metadata = sa.MetaData()
    deferred = ForeignKey("parents.id", deferrable=True, initially="DEFERRED")
    parents = core_table("parents", metadata=metadata, resource="parents")
    children = Table("children", metadata, Column("id", Integer, primary_key=True), Column("of", deferred))
    metadata.create_all(engine)
    lease = Lease("parents", 5)
    with engine.connect() as connection:
        bind(connection, lease)
        connection.execute(insert(parents), {"id": 1})
        connection.execute(insert(children), {"id": 1, "of": 99})
        with turned_away(connection, IntegrityError):
            connection.commit()
        assert not lease._needed
        connection.execute(insert(children), {"id": 2})
        connection.commit()
        assert connection.scalars(select(parents.c.id)).all() == []
        assert connection.scalars(select(children.c.id)).all() == [2]
    engine.dispose()


def test_two_sessions_of_one_connection_ask_anew(engine: Engine) -> None:
    """What one has found out does not serve the other, and each is asked for its own objects."""
    with engine.connect() as connection, Session(connection) as one, Session(connection) as two:
        bind(one, Lease("rows", 5), Lease("customer:1", 6))
        bind(two, Lease("rows", 4))
        sale = one.get_one(Sale, 1)
        one.get_one(Row, 1).value += 1
        one.flush()
        two.get_one(Row, 2).value += 1
        two.flush()
        sale.status = "paid"
        one.commit()
        assert fences(one, Row) == [5, 4]
        assert sale.last_fencing_token == 6


def test_statements_on_a_shared_connection_are_of_the_session_that_began_last(engine: Engine) -> None:
    """Or that has flushed last; of one that has left, no more."""
    with bypassed(engine) as connection:
        connection.execute(update(Order).values(last_fencing_token=5))
    with engine.connect() as connection, Session(connection) as first, Session(connection) as second:
        bind(first, Lease("order:1", 6), Lease("customer:1", 6))
        bind(second, Lease("order:1", 4))
        for session in (first, second):
            session.connection()
        with turned_away(connection, StaleTokenError):
            connection.execute(PAID)
        for session in (second, first):
            session.close()
        for session in (first, second):
            session.connection()
        first.get_one(Sale, 1).status = "paid"
        first.flush()
        assert connection.execute(PAID).rowcount == 1
        second.connection()
        first.close()
        with pytest.raises(StaleTokenError):
            second.execute(PAID)


def test_other_threads_do_not_see_the_held_lease(engine: Engine, held: list[Lease]) -> None:
    seen: list[object] = []

    def work(*leases: Lease) -> None:
        with holding(engine, *leases) as session:
            try:
                write(session, "a")
                seen.append("written")
            except fencelock.FenceError as error:
                seen.append(type(error))

    for leases in ((), (held[0],)):
        thread = threading.Thread(target=contextvars.Context().run, args=(work, *leases))
        thread.start()
        thread.join()
    assert seen == [UnfencedWriteError, "written"]


def test_tasks_keep_their_leases_apart(engine: Engine) -> None:
    async def work(number: int) -> int:
        note_held(Lease(f"order:{number}", number * 10))
        with Session(engine) as session:
            await asyncio.sleep(0)
            session.get_one(Order, number).status = "a"
            await asyncio.sleep(0)
            session.commit()
            return session.get_one(Order, number).last_fencing_token

    async def both() -> list[int]:
        return [*await asyncio.gather(work(1), work(2))]

    assert asyncio.run(both()) == [10, 20]


def test_each_statement_asks_anew_what_is_held(session: Session) -> None:
    """What one statement has found out serves the next of its transaction only where nothing has happened."""

    def write_both(token: int) -> None:
        session.get_one(Row, 1).value += 1
        session.flush()
        session.execute(update(Row).values(value=5))
        assert fences(session, Row) == [token, token]

    lease, other = Lease("rows", 5), Lease("other", 9)
    note_held(lease)
    try:
        write_both(5)
        lease._remint(6, math.inf)
        write_both(6)
        note_held(other)
        write_both(6)
        note_ended(other)
        bind(session, Lease("rows", 4))
        with turned_away(session, StaleTokenError):
            session.execute(update(Row).values(value=6))
        bind(session)
        write_both(6)
        lease._doubt()
        with turned_away(session, fencelock.CommitInDoubtError):
            session.execute(update(Row).values(value=7))
        lease._remint(7, math.inf)
        write_both(7)
        lease._mark_lost("its time ran out")
        with pytest.raises(LockLostError):
            session.execute(update(Row).values(value=8))
    finally:
        note_ended(lease, other)
