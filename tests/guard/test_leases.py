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
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Column, Engine, ForeignKey, Integer, String, Table, event, insert, select, update
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

import fencelock
from fencelock import FencedModel, Lease, LockLostError, StaleTokenError, UnfencedWriteError, bind, claim
from fencelock.lease import note_ended, note_held
from tests.guard.listening import listening, statements, words
from tests.guard.rows import Act, bypassed, core_table, holding, refill, turned_away
from tests.polling import eventually


class Base(DeclarativeBase): ...


class Customer(Base):
    __tablename__ = "le_customers"
    id: Mapped[int] = mapped_column(primary_key=True)


class Order(FencedModel, Base):
    __tablename__ = "le_orders"
    __fence_resource__ = "customer:{customer_id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(ForeignKey("le_customers.id"))
    status: Mapped[str] = mapped_column(String(20), default="new")
    successor_id: Mapped[int | None] = mapped_column(ForeignKey("le_orders.id"))
    successor: Mapped[Order | None] = relationship(remote_side="Order.id", post_update=True)
    customer: Mapped[Customer] = relationship()


class Ticket(FencedModel, Base):
    __tablename__ = "le_tickets"
    __fence_resource__ = "ticket:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    seat: Mapped[str] = mapped_column(String(20), default="none")


class Setting(FencedModel, Base):
    __tablename__ = "le_settings"
    __fence_resource__ = "tenant:{tenant}"
    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(String(20), default="main")
    value: Mapped[int] = mapped_column(default=0)


class Ledger(FencedModel, Base):
    __tablename__ = "le_ledger"
    __fence_resource__ = "ledger"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


class Stock(FencedModel, Base):
    __tablename__ = "le_stock"
    __fence_resource__ = "stock"
    id: Mapped[int] = mapped_column(primary_key=True)
    count: Mapped[int] = mapped_column(default=0)


ROWS: dict[Any, list[dict[str, int]]] = {
    Customer: [{"id": 1}, {"id": 2}],
    Order: [{"id": number, "customer_id": number} for number in (1, 2)],
    Ticket: [{"id": 1}, {"id": 2}],
    Stock: [{"id": 1}, {"id": 2}],
    Ledger: [{"id": 1}],
}


@pytest.fixture
def engine(tmp_path: Any) -> Iterator[Engine]:
    """An engine on SQLite: none of this depends on the database."""
    made = sa.create_engine(f"sqlite:///{tmp_path / 'test.sqlite'}")
    Base.metadata.create_all(made)
    yield refill(made, Base.metadata, ROWS)
    made.dispose()


@pytest.fixture
def held() -> Iterator[list[Lease]]:
    """Leases that the context holds for the length of the test."""
    leases = [Lease("ticket:1", 3), Lease("customer:1", 4)]
    note_held(*leases)
    yield leases
    note_ended(*leases)


def flush_after(act: Act, session: Session) -> None:
    act(session)
    session.flush()


def write(session: Session, seat: str, number: int = 1) -> Ticket:
    """Write a ticket by the unit of work."""
    ticket = session.get_one(Ticket, number)
    ticket.seat = seat
    session.flush()
    return ticket


@pytest.mark.usefixtures("held")
def test_the_held_lease_of_each_row_is_found(session: Session) -> None:
    session.get_one(Order, 1).status = "paid"
    assert write(session, "a").last_fencing_token == 3
    session.commit()
    assert session.get_one(Order, 1).last_fencing_token == 4


def test_rows_of_one_flush_get_their_own_tokens(session: Session) -> None:
    bind(session, Lease("ticket:1", 3), Lease("ticket:2", 30))
    for number in (1, 2):
        session.get_one(Ticket, number).seat = "a"
    session.commit()
    assert session.scalars(select(Ticket.last_fencing_token).order_by(Ticket.id)).all() == [3, 30]
    bind(session, Lease("ticket:1", 4), Lease("ticket:2", 29))
    tickets = session.scalars(select(Ticket)).all()
    for ticket in tickets:
        ticket.seat = "b"
    with pytest.raises(StaleTokenError) as caught:
        session.commit()
    assert (caught.value.identity, caught.value.token, caught.value.current) == ((2,), 29, 30)
    session.rollback()
    assert [ticket.seat for ticket in tickets] == ["a", "a"]


def assigning(model: type[Any], name: str, value: object, key: int = 1) -> Act:
    return lambda session: setattr(session.get_one(model, key), name, value)


def with_successor(session: Session) -> None:
    """Insert a row that the same flush updates, for which the session has no key yet."""
    session.add(Order(customer_id=1, successor=Order(customer=session.get_one(Customer, 1))))


def delete_expired(session: Session) -> None:
    """Delete an object whose columns are not loaded."""
    order = session.get_one(Order, 1)
    session.expire(order)
    session.delete(order)


def by_parameters(session: Session) -> None:
    """Name the resource of each execution by a value of its own."""
    table: Any = Ticket.__table__
    statement = update(table).where(table.c.id == sa.bindparam("which"))
    session.connection().execute(statement, [{"which": 1, "seat": "a"}, {"which": 2, "seat": "b"}])


TOKENS = {"ticket:1": 3, "ticket:2": 30, "customer:1": 4, "ledger": 5, "tenant:main": 6, "other": 7}
Guarded = tuple[tuple[str, ...], Act, type[Any], list[int]]
GUARDED: dict[str, Guarded] = {
    "a row by its key": (("ticket:1",), assigning(Ticket, "seat", "a"), Ticket, [3, 0]),
    "parameters": (("ticket:1", "ticket:2"), by_parameters, Ticket, [3, 30]),
    "a new row of a whole table": (("ledger",), lambda s: s.add(Ledger(id=2)), Ledger, [0, 5]),
    "a whole table": (("ledger", "other"), lambda s: s.execute(update(Ledger).values(value=1)), Ledger, [5]),
    "an object by other columns": (("customer:1",), assigning(Order, "status", "x"), Order, [4, 0]),
    "an expired object": (("customer:1",), delete_expired, Order, [0]),
    "a new row with post_update": (("customer:1",), with_successor, Order, [0, 0, 4, 4]),
    "criteria": (
        ("customer:1",),
        lambda s: s.execute(
            update(Order).where(Order.customer_id == 1, Order.status == "new").values(status="x")
        ),
        Order,
        [4, 0],
    ),
    "a default": (("tenant:main",), lambda s: s.add(Setting()), Setting, [6]),
}


@pytest.mark.parametrize(("held", "write", "model", "fences"), GUARDED.values(), ids=GUARDED)
def test_a_row_is_written_under_the_lease_that_it_names(
    session: Session, held: tuple[str, ...], write: Act, model: type[Any], fences: list[int]
) -> None:
    """The unit of work knows the row's columns, loaded or expired; a statement has to name them."""
    bind(session, *(Lease(resource, TOKENS[resource]) for resource in held))
    write(session)
    session.commit()
    assert session.scalars(select(model.last_fencing_token).order_by(model.id)).all() == fences


def updating(*criteria: Any, **values: Any) -> Act:
    return lambda session: session.execute(update(Order).where(*criteria).values(values or {"status": "x"}))


UNGUARDED: dict[str, tuple[Act, str]] = {
    "another row": (assigning(Ticket, "seat", "a", 2), "'ticket:2'.*'customer:1', 'ticket:1'"),
    "another row, by other columns": (assigning(Order, "status", "x", 2), "'customer:2'"),
    "a whole table": (lambda s: s.execute(update(Ledger).values(value=2)), "'ledger'"),
    "a new row": (lambda s: s.add(Setting(tenant="else")), "'tenant:else'"),
    "criteria, of another": (updating(Order.customer_id == 2), "'customer:2'"),
    "criteria, of any": (updating(Order.status == "new"), "compare customer_id"),
    "criteria, by the key": (updating(Order.id == 2), "compare customer_id"),
    "criteria, by OR": (updating((Order.customer_id == 1) | (Order.id == 2)), "compare customer_id"),
    "a value of the database": (
        lambda s: s.execute(
            insert(Order).values(customer_id=select(Customer.id).where(Customer.id == 1).scalar_subquery())
        ),
        "give customer_id a plain value",
    ),
    "to another resource": (assigning(Order, "customer_id", 2), "customer_id of 'le_orders' must not change"),
    "to another key": (assigning(Ticket, "id", 9), "must not change"),
    "to another, by a statement": (updating(Order.customer_id == 1, customer_id=2), "must not change"),
    "to another, by an attribute": (
        lambda s: s.execute(update(Order).where(Order.customer_id == 1).values({Order.customer_id: 2})),
        "must not change",
    ),
}


@pytest.mark.parametrize(("write", "match"), UNGUARDED.values(), ids=UNGUARDED)
def test_a_row_that_no_lease_names_is_refused_by_name(session: Session, write: Act, match: str) -> None:
    """The error says which resource is needed and which are held, or why no lease guards it."""
    bind(session, Lease("customer:1", 4), Lease("ticket:1", 3))
    with turned_away(session, UnfencedWriteError, match=match):
        flush_after(write, session)
    session.get_one(Ticket, 1).seat = "a"
    session.commit()


def test_a_transaction_remembers_its_lease(session: Session) -> None:
    """Work flushed after the lock's block was left is still guarded by the lease it was done under."""
    lease = Lease("ticket:1", 3)
    note_held(lease)
    write(session, "a")
    lease._released = True
    note_ended(lease)
    ticket = write(session, "b")
    session.commit()
    assert (ticket.seat, ticket.last_fencing_token) == ("b", 3)
    with pytest.raises(UnfencedWriteError):
        write(session, "c")


def test_a_transaction_keeps_the_older_lease_of_a_resource(session: Session) -> None:
    """What was read under the first lease may be out of date under the second, so the first one counts."""
    first, second = Lease("ticket:1", 3), Lease("ticket:1", 5)
    note_held(first)
    write(session, "a")
    note_ended(first)
    note_held(second)
    assert write(session, "b").last_fencing_token == 3
    session.commit()
    assert write(session, "c").last_fencing_token == 5
    note_ended(second)


@pytest.mark.usefixtures("held")
def test_bind_wins_over_the_context(session: Session) -> None:
    bind(session, Lease("ticket:1", 50))
    assert write(session, "a").last_fencing_token == 50
    session.commit()
    bind(session)
    with pytest.raises(StaleTokenError):
        write(session, "b")


def test_bind_again_replaces_what_the_transaction_remembers(session: Session) -> None:
    for token in (3, 5):
        bind(session, Lease("ticket:1", token))
        assert write(session, f"seat {token}").last_fencing_token == token


def test_a_transaction_of_an_unknown_class_needs_its_lease_no_longer_than_it_lives(engine: Engine) -> None:
    """No event says how such a transaction ends, and its connection may be used on and on."""

    class Own(RootTransaction):
        __slots__ = ()

    tickets: Any = Ticket.__table__
    lease = Lease("ticket:1", 3)
    with engine.connect() as connection:
        bind(connection, lease)
        connection.begin().__class__ = Own
        connection.execute(update(tickets).where(tickets.c.id == 1).values(seat="a"))
        was_needed = lease._needed
        connection.commit()
        assert was_needed
        assert eventually(lambda: not lease._needed)
        assert connection.scalar(select(tickets.c.last_fencing_token).where(tickets.c.id == 1)) == 3


@pytest.mark.parametrize(("target", "lease"), [("session", "lease"), (object(), Lease("a", 1)), (None, 5)])
def test_bind_refuses_what_is_neither(session: Session, target: object, lease: Any) -> None:
    with pytest.raises(TypeError):
        bind(session if target == "session" else target, lease)  # type: ignore[arg-type]


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
    lease = Lease("ticket:1", 3)
    bind(session, lease)
    ticket = write(session, "a")
    session.commit()
    end(lease)
    with turned_away(session, error, match=match):
        write(session, "b")
    assert (ticket.seat, ticket.last_fencing_token) == ("a", 3)


SEAT = update(Ticket).where(Ticket.id == 1).values(seat="b")
LEASELESS: dict[str, tuple[Act, str]] = {
    "insert": (lambda s: s.add(Ticket(id=7)), "fenced_lock('ticket:7')"),
    "update": (assigning(Ticket, "seat", "a"), "fenced_lock('ticket:1')"),
    "delete": (lambda s: s.delete(s.get_one(Ticket, 1)), "fenced_lock('ticket:1')"),
    "statement": (lambda s: s.execute(SEAT), "fenced_lock('ticket:1')"),
    "claim": (lambda s: claim(s, Ticket, 1), "fenced_lock('ticket:1')"),
    "key of the database": (lambda s: s.add(Ticket()), "any fenced_lock (the database makes the key"),
    "of a table": (assigning(Stock, "count", 1), "fenced_lock('stock')"),
    "inherited": (assigning(Order, "status", "paid", 2), "fenced_lock('customer:2')"),
}


@pytest.mark.parametrize(("write", "lock"), LEASELESS.values(), ids=LEASELESS)
def test_write_without_a_lease_is_told_which_and_that_threads_inherit_none(
    session: Session, write: Act, lock: str
) -> None:
    """The row's own resource, where its values are known; and how leases get into other threads."""
    hint = r"follow.*not into other threads or executors.*bind\(session, lock\.lease\)"
    with pytest.raises(UnfencedWriteError, match=f"no lease is held.*{re.escape(lock)}.*{hint}"):
        contextvars.Context().run(flush_after, write, session)  # one in which no block was left before


def test_nothing_is_sent_where_no_lease_is_held(engine: Engine, session: Session) -> None:
    """Neither for a row whose key the database makes, nor before a DELETE that comes later in the flush."""
    ticket = session.get_one(Ticket, 1)
    with statements(engine) as sent:
        for act in (lambda each: each.delete(ticket), lambda each: each.add(Ticket())):
            with turned_away(session, UnfencedWriteError):
                flush_after(act, session)
    assert {*words(sent)} <= {"SELECT"}


def test_a_lease_that_ends_within_a_flush_stops_it(session: Session, engine: Engine) -> None:
    """Between two of its statements, say while the first has waited for a row lock."""
    lease = Lease("ticket:1", 3, expires_at=time.monotonic() + 60)
    bind(session, lease, Lease("ticket:77", 3))
    session.get_one(Ticket, 1).seat = "a"
    session.add(Ticket(id=77))

    def run_out(*args: Any) -> None:
        if not args[2].startswith("SELECT"):
            lease._extend_to(time.monotonic() - 1)

    lost = pytest.raises(LockLostError, match="nothing was sent")
    with listening(engine, "before_cursor_execute", run_out), lost:
        session.commit()
    session.rollback()
    assert session.get_one(Ticket, 1).seat == "none"
    assert session.get(Ticket, 77) is None


ENDED_WRITES: dict[str, Act] = {
    "flush": lambda session: write(session, "b"),
    "statement": lambda session: session.execute(SEAT),
    "insert": lambda session: session.execute(insert(Ticket).values(id=1, seat="b")),
    "claim": lambda session: claim(session, Ticket, 1),
    "claim_all": lambda session: fencelock.claim_all(session, select(Ticket).where(Ticket.id == 1)),
    "gate": lambda session: fencelock.gate(session, "ticket:1"),
    "upsert": lambda session: fencelock.upsert(session, Ticket, [{"id": 1, "seat": "b"}]),
}


@pytest.mark.parametrize("write_it", ENDED_WRITES.values(), ids=ENDED_WRITES)
@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
def test_a_lease_that_has_ended_writes_nothing_more(
    engine: Engine, session: Session, write_it: Act, *, begun: bool
) -> None:
    """The clock ends the lease, whichever thread renews it.

    An earlier write under the lease does not help.
    """
    lease = Lease("ticket:1", 3, expires_at=time.monotonic() + 60)
    bind(session, lease)
    if begun:
        write(session, "a")
    lease._extend_to(time.monotonic())
    lost = pytest.raises(LockLostError, match="ended before this statement: nothing was sent")
    with statements(engine) as sent, lost:
        write_it(session)
    assert {*words(sent)} <= {"SELECT", "SAVEPOINT", "BEGIN"}
    session.rollback()
    lease._extend_to(time.monotonic() + 60)  # it was renewed in time, by its authority
    write(session, "c")
    session.commit()


def test_a_forked_child_writes_nothing(engine: Engine) -> None:
    """The child's copy of a lease is lost, bound or held."""
    lease = Lease("ticket:1", 3)
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
    older, newer = Lease("stock", 5), Lease("stock", 6)
    bind(session, older)

    def write_more(_mapper: object, connection: Connection, item: Stock) -> None:
        bind(session, newer)
        connection.execute(update(Stock).where(Stock.id == 3 - item.id).values(count=9))

    with listening(Stock, "after_update", write_more):
        session.get_one(Stock, 1).count += 1
        session.commit()
    assert session.scalars(select(Stock.last_fencing_token).order_by(Stock.id)).all() == [5, 6]


def test_a_lease_released_in_the_midst_of_a_flush_guards_nothing_from_there_on(session: Session) -> None:
    """The flush of another row has seen the lease held. The first use of the lease asks again."""
    first, second = Lease("ticket:1", 3), Lease("ticket:2", 3)
    bind(session, first, second)

    def release(_mapper: object, _connection: object, ticket: Ticket) -> None:
        if ticket.id == 1:
            second._released = True

    for ticket in session.scalars(select(Ticket).order_by(Ticket.id)):
        ticket.seat = "z"
    refused = pytest.raises(UnfencedWriteError, match="'ticket:2' has been released meanwhile")
    with listening(Ticket, "before_update", release), refused:
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
        with pytest.raises(IntegrityError):
            connection.commit()
        assert not lease._needed
        connection.rollback()
        connection.execute(insert(children), {"id": 2})
        connection.commit()
        assert connection.scalars(select(parents.c.id)).all() == []
        assert connection.scalars(select(children.c.id)).all() == [2]
    engine.dispose()


def test_two_sessions_of_one_connection_ask_anew(engine: Engine) -> None:
    """What one of them has found out does not serve the other, which is bound to another lease."""
    with engine.connect() as connection, Session(connection) as one, Session(connection) as two:
        bind(one, Lease("stock", 5))
        bind(two, Lease("stock", 4))
        one.get_one(Stock, 1).count += 1
        one.flush()
        two.get_one(Stock, 2).count += 1
        two.flush()
        assert sorted(one.scalars(select(Stock.last_fencing_token))) == [4, 5]


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
        note_held(Lease(f"ticket:{number}", number * 10))
        with Session(engine) as session:
            await asyncio.sleep(0)
            session.get_one(Ticket, number).seat = "a"
            await asyncio.sleep(0)
            session.commit()
            return session.get_one(Ticket, number).last_fencing_token

    async def both() -> list[int]:
        return [*await asyncio.gather(work(1), work(2))]

    assert asyncio.run(both()) == [10, 20]


def test_statements_on_a_shared_connection_are_of_the_session_that_began_last(engine: Engine) -> None:
    """Or that has flushed last; of one that has left, no more."""
    with bypassed(engine) as connection:
        connection.execute(update(Ticket).values(last_fencing_token=5))
    with engine.connect() as connection, Session(connection) as first, Session(connection) as second:
        bind(first, Lease("ticket:1", 6), Lease("customer:1", 6))
        bind(second, Lease("ticket:1", 4))
        for session in (first, second):
            session.connection()
        with turned_away(connection, StaleTokenError):
            connection.execute(SEAT)
        for session in (second, first):
            session.close()
        for session in (first, second):
            session.connection()
        first.get_one(Order, 1).status = "paid"
        first.flush()
        assert connection.execute(SEAT).rowcount == 1
        second.connection()
        first.close()
        with pytest.raises(StaleTokenError):
            second.execute(SEAT)


def test_a_session_is_asked_for_its_own_objects(engine: Engine) -> None:
    """A row whose resource is outside its key is known to the session that flushes, not to its neighbour."""
    with engine.connect() as connection, Session(connection) as first, Session(connection) as second:
        bind(first, Lease("customer:1", 6))
        order = first.get_one(Order, 1)
        second.get_one(Ticket, 1)
        order.status = "paid"
        first.commit()
        assert order.last_fencing_token == 6


@pytest.mark.usefixtures("held")
def test_bind_that_hides_a_lease_says_so(session: Session) -> None:
    """A caller that holds the needed lease, and has bound another one, hears that the bind is the reason."""
    bind(session, Lease("ticket:2", 3))
    with turned_away(
        session, UnfencedWriteError, match=r"needs the lease of 'ticket:1'.*bind\(session\) undoes it"
    ):
        session.execute(SEAT)
    bind(session)
    with pytest.raises(UnfencedWriteError) as caught:
        session.execute(update(Ticket).where(Ticket.id == 2).values(seat="x"))
    assert "undoes" not in str(caught.value)


def test_each_statement_asks_anew_what_is_held(session: Session) -> None:
    """What one statement has found out serves the next of its transaction only where nothing has happened."""

    def write_both() -> None:
        session.get_one(Stock, 1).count += 1
        session.flush()
        session.execute(update(Stock).values(count=5))

    def fences() -> set[int]:
        return set(session.scalars(select(Stock.last_fencing_token)))

    lease, other = Lease("stock", 5), Lease("other", 9)
    note_held(lease)
    try:
        write_both()
        assert fences() == {5}
        lease._remint(6, math.inf)
        write_both()
        assert fences() == {6}
        note_held(other)
        write_both()
        note_ended(other)
        bind(session, Lease("stock", 4))
        with turned_away(session, StaleTokenError):
            session.execute(update(Stock).values(count=6))
        bind(session)
        write_both()
        lease._doubt()
        with turned_away(session, fencelock.CommitInDoubtError):
            session.execute(update(Stock).values(count=7))
        lease._remint(7, math.inf)
        write_both()
        assert fences() == {7}
        lease._mark_lost("its time ran out")
        with pytest.raises(LockLostError):
            session.execute(update(Stock).values(count=8))
    finally:
        note_ended(lease, other)
