"""A claim of a newer holder shuts an older one out, and a read after a claim is not older than it."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from random import randrange
from typing import Any

import pymysql
import pytest
from sqlalchemy import Engine, ForeignKey, create_engine, delete, event, func, insert, select, update
from sqlalchemy.exc import DBAPIError, InvalidRequestError, NoResultFound, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, Session, column_property, mapped_column, relationship, with_loader_criteria

import fencelock
from fencelock import FencedModel, Lease, StaleTokenError, UnfencedWriteError, bind, claim, claim_all, gate
from tests.guard import models
from tests.guard.marks import Act, ForAsyncio, named, on_postgresql_alone, on_sqlite_alone, with_row_locks
from tests.guard.models import NEW, OLD, Account, Note, Seat, balance, holder, leases
from tests.guard.rows import Keyed, awaiting, bypassed, holding, rows_of, turned_away
from tests.guard.waiting import in_thread, let_wait, statements, until_one_waits, words


class Triggered(FencedModel, Keyed, models.Base):
    __tablename__ = "cl_triggered"
    __fence_resource__ = "account:1"
    __fence_trigger__ = True
    balance: Mapped[int] = mapped_column(default=100)


class Strict(FencedModel, Keyed, models.Base):
    __tablename__ = "cl_strict"
    __fence_resource__ = "account:1"
    __fence_trigger__ = "strict"
    balance: Mapped[int] = mapped_column(default=100)


class Eager(FencedModel, Keyed, models.Base):
    __tablename__ = "cl_eager"
    __fence_resource__ = "account:1"
    balance: Mapped[int] = mapped_column(default=100)
    parts: Mapped[list[Part]] = relationship(lazy="joined")


class Part(Keyed, models.Base):
    __tablename__ = "cl_parts"
    eager_id: Mapped[int] = mapped_column(ForeignKey("cl_eager.id"))


class Computed(FencedModel, Keyed, models.Base):
    __tablename__ = "cl_computed"
    __fence_resource__ = "account:1"
    balance: Mapped[int] = mapped_column(default=100)
    known: Mapped[int | None] = column_property(select(Note.id).where(Note.id == 1).scalar_subquery())


class Animal(FencedModel, Keyed, models.Base):
    __tablename__ = "cl_animals"
    __fence_resource__ = "account:1"
    kind: Mapped[str]
    balance: Mapped[int] = mapped_column(default=100)
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "animal"}  # noqa: RUF012


class Cat(Animal):
    __tablename__ = "cl_cats"
    id: Mapped[int] = mapped_column(ForeignKey("cl_animals.id"), primary_key=True)
    lives: Mapped[int] = mapped_column(default=9)
    __mapper_args__ = {"polymorphic_identity": "cat"}  # noqa: RUF012


MODELS: list[type[Any]] = [Account, Triggered, Strict, models.Task, Eager, Computed, Cat]
ROWS: dict[Any, Any] = {
    Account: {"id": 1},
    Note: {"id": 1, "account_id": 1, "text": "first"},
    models.Task: [{"id": 1, "queue": "a"}, {"id": 2, "queue": "b"}, {"id": 3, "queue": "a"}],
    Seat: [{"row": 1, "letter": "a"}, {"row": 1, "letter": "b"}],
    **{model: {"id": 1} for model in (Triggered, Strict, Eager, Computed, Animal, Cat)},
    Animal: {"id": 1, "kind": "cat"},
    Part: [],
    models.Free: [],
    models.fences: [],
}
HELD = leases(NEW)
CLAIMS: dict[str, Act] = {
    "claim": lambda s: claim(s, Account, 1),
    "claim_all": lambda s: claim_all(s, select(Account)),
    "gate": lambda s: gate(s, "account:1"),
}
ZERO = update(Account).where(Account.id == 1).values(balance=0)


@on_sqlite_alone
def test_without_a_claim_an_update_is_lost(engine: Engine, old: Session, new: Session) -> None:
    """The control: fenced writes alone accept the old holder's write between a read and a write."""
    read_by_new = new.get_one(Account, 1).balance
    new.rollback()
    old.get_one(Account, 1).balance -= 10
    old.commit()
    new.get_one(Account, 1).balance = read_by_new - 50
    new.commit()
    assert balance(engine) == 50, "the old holder's 10 is lost, though every write was fenced"


def test_with_a_claim_no_update_is_lost(engine: Engine, old: Session, new: Session) -> None:
    """The same schedule with a claim before the read. A rollback to a savepoint gives a claim back."""
    with new.begin_nested() as savepoint:
        claim(new, Account, 1)
        savepoint.rollback()
    new.rollback()
    assert models.fence(engine) == 0
    read_by_new = claim(new, Account, 1).balance
    new.commit()
    with turned_away(old, StaleTokenError) as caught:
        old.execute(update(Account).where(Account.id == 1).values(balance=Account.balance - 10))
    assert (caught.value.token, caught.value.current) == (1, 2)
    new.get_one(Account, 1).balance = read_by_new - 50
    new.commit()
    assert balance(engine) == 50


@on_postgresql_alone
def test_a_row_is_free_after_a_rollback_to_a_savepoint(old: Session, new: Session) -> None:
    """Nothing is remembered as claimed. The other databases keep the lock until the transaction ends."""
    with new.begin_nested() as savepoint:
        claim(new, Account, 1)
        savepoint.rollback()
    claim(old, Account, 1).balance = 90
    old.commit()
    assert claim(new, Account, 1).balance == 90


def test_a_claim_holds_off_the_old_holder_until_the_commit(
    engine: Engine, old: Session, new: Session
) -> None:
    let_wait(engine)
    account = claim(new, Account, 1)
    refused = in_thread(lambda: old.execute(ZERO))
    until_one_waits(engine)
    account.balance = 70
    new.commit()
    with turned_away(old, StaleTokenError) as caught:
        refused()
    assert (caught.value.identity, caught.value.token, caught.value.current) == ((1,), 1, 2)
    assert balance(engine) == 70


def _claimed_in_the_end(session: Session) -> object:
    """Claim a task that may be locked, as a caller does that will not wait in the database."""
    while True:
        try:
            return claim(session, models.Task, 1, nowait=True)
        except OperationalError:
            session.rollback()
            time.sleep(0.05)


TAKEN: dict[str, Act] = {
    "key tells the resource": lambda s: claim(s, Account, 1),
    "row tells the resource": lambda s: claim(s, models.Task, 1),
    "row tells the resource, nowait": _claimed_in_the_end,
    "all": lambda s: claim_all(s, select(models.Task).where(models.Task.queue == "a")),
    "all of one": lambda s: claim_all(s, select(Account)),
}


@with_row_locks
@pytest.mark.parametrize("how", TAKEN)
def test_what_is_read_after_a_claim_is_not_older_than_it(
    engine: Engine, old: Session, new: Session, how: str
) -> None:
    """A claim that has waited sees what the older holder did to *other* rows, at any isolation level."""
    claim(old, Account, 1)
    claim(old, models.Task, 1)

    def first_act() -> tuple[str, int]:
        TAKEN[how](new)
        return new.get_one(Note, 1).text, new.get_one(Account, 1).balance

    read = in_thread(first_act)
    if "nowait" not in how:
        until_one_waits(engine)
    old.get_one(Note, 1).text = "second"
    old.get_one(Account, 1).balance = 90
    old.commit()
    assert read() == ("second", 90)
    new.rollback()


@with_row_locks
def test_a_claim_reads_past_the_snapshot_of_its_transaction(engine: Engine, new: Session) -> None:
    assert new.get_one(Account, 1).balance == 100
    with holder(engine, NEW) as same_lease, same_lease.begin():
        claim(same_lease, Account, 1).balance = 70
    assert claim(new, Account, 1).balance == 70


@pytest.mark.parametrize("shared_url", ["mariadb"], indirect=True)
def test_a_claim_that_changes_nothing_is_no_refusal(engine: Engine) -> None:
    """As on a connection that counts changed rows only."""
    url = engine.url
    given: dict[str, Any] = {"host": url.host, "port": url.port or 3306, "user": url.username}
    counting = create_engine(
        url, creator=lambda: pymysql.connect(**given, database=url.database, client_flag=0)
    )
    with holder(counting, NEW) as session:
        for _ in range(2):
            assert claim(session, Account, 1).last_fencing_token == 2
            session.commit()
        bind(session, *leases(OLD))
        with pytest.raises(StaleTokenError):
            claim(session, Account, 1)
    counting.dispose()


def test_a_missing_row_is_no_result(new: Session) -> None:
    bind(new, *leases(NEW), Lease("account:9", 1), Lease("room", 1))
    with pytest.raises(NoResultFound, match="no Account with the primary key"):
        claim(new, Account, 9)
    for act in (lambda: claim(new, Account, 9, skip_locked=True), lambda: claim(new, models.Task, 9)):
        with pytest.raises(NoResultFound):
            act()
    with turned_away(new, NoResultFound):
        claim(new, Seat, (1, "z"))
    assert claim_all(new, select(Account).where(Account.id == 9)) == []
    assert claim(new, Seat, (1, "a")) is claim(new, Seat, {"letter": "a", "row": 1})
    assert claim(new, models.Task, 1).balance == 100


DISCARDING: dict[str, tuple[Act, str | None]] = {
    "it": (lambda s: claim(s, Account, 1), "claim it before changing it"),
    "all": (lambda s: claim_all(s, select(Account)), None),
    "by a key that is text": (lambda s: claim(s, Account, "1"), None),
    "another row": (lambda s: claim(s, Account, 2), "flush first"),
}


@on_sqlite_alone
@pytest.mark.parametrize(("take", "match"), **named(DISCARDING))
def test_what_is_not_flushed_is_never_discarded(
    engine: Engine, new: Session, take: Act, match: str | None
) -> None:
    """Where autoflush is off, the claim refuses: which row a key leads to, only the database knows."""
    bind(new, *leases(NEW), Lease("account:2", NEW))
    account = claim(new, Account, 1)
    with new.no_autoflush:
        account.balance = 80
        with pytest.raises(InvalidRequestError, match=match):
            take(new)
        assert account.balance == 80
    new.commit()
    assert balance(engine) == 80


def test_nowait_raises_and_skip_locked_returns_none(engine: Engine, old: Session, new: Session) -> None:
    if engine.dialect.name != "sqlite":
        claim(old, Account, 1)
        assert claim(new, Account, 1, skip_locked=True) is None
        with turned_away(new, OperationalError):
            claim(new, Account, 1, nowait=True)
        old.rollback()
    ways: tuple[dict[str, Any], ...] = ({"nowait": True}, {"skip_locked": True})
    for how in ways:
        with statements(engine) as sent:
            assert claim(new, Account, 1, **how).last_fencing_token == 2
        assert words(sent) == ["SELECT", *at_once(engine)]


@with_row_locks
def test_coroutines_claim_without_waiting(engine: Engine, for_asyncio: ForAsyncio) -> None:
    async def main() -> None:
        aengine = for_asyncio(engine)
        async with AsyncSession(aengine) as first, AsyncSession(aengine) as second:
            for session in (first, second):
                bind(session, *leases(NEW))
            await claim(first, Account, 1)
            assert await claim(second, Account, 1, skip_locked=True) is None
            with pytest.raises(DBAPIError):
                await claim(second, Account, 1, nowait=True)
        await aengine.dispose()

    asyncio.run(main())


def test_a_claim_reads_a_row_whose_key_does_not_tell_the_resource(engine: Engine, new: Session) -> None:
    bind(new, Lease("queue:a", 3))
    with turned_away(new, UnfencedWriteError, match="'queue:b'"):
        claim(new, models.Task, 2)
    claim(new, models.Task, 1).balance = 1
    new.commit()
    assert rows_of(engine, select(models.Task.last_fencing_token).order_by(models.Task.id)) == [3, 0, 0]


def test_claim_all_claims_in_the_order_of_keys_and_returns_in_that_of_the_query(
    engine: Engine, new: Session
) -> None:
    """Two holders of overlapping sets cannot deadlock, whatever order their queries ask for."""
    bind(new, Lease("queue:a", 3), Lease("queue:b", 8), Lease("room", 3))
    claimed: list[Any] = []

    def note(_c: object, _s: object, many: Any, params: Any, *_: object) -> None:
        claimed.extend(row["key_0"] for row in many or [params] if "key_0" in row)

    event.listen(engine, "after_execute", note)
    tasks = claim_all(new, select(models.Task).order_by(models.Task.id.desc()))
    assert [(task.id, task.last_fencing_token) for task in tasks] == [(3, 3), (2, 8), (1, 3)]
    assert claimed == [1, 2, 3]
    with statements(engine) as sent:
        seats = claim_all(new, select(Seat).order_by(Seat.letter.desc()))
    assert [seat.letter for seat in seats] == ["b", "a"]
    assert words(sent) == ["SELECT", "UPDATE", "SELECT"]


@on_sqlite_alone
@pytest.mark.parametrize("how", CLAIMS)
def test_nothing_is_claimed_past_the_guard(engine: Engine, how: str) -> None:
    past = holder(engine.execution_options(fencelock="bypass"))
    with past as session, turned_away(session, UnfencedWriteError, match="bypass"):
        CLAIMS[how](session)
    assert models.fence(engine) == 0


LETTERS = "abcdefghijklmnopqrst"


@pytest.fixture
def hall(engine: Engine) -> Engine:
    """1,200 seats; PostgreSQL has the rows in reverse order, as it puts a written row behind the rest."""
    with bypassed(engine) as connection:
        connection.execute(delete(Seat))
        seats = [{"row": row, "letter": ch} for row in range(60, 0, -1) for ch in LETTERS]
        connection.execute(insert(Seat), seats)
    return engine


def test_claim_all_of_many_rows(hall: Engine, new: Session) -> None:
    bind(new, Lease("room", 5))
    seats = claim_all(new, select(Seat).order_by(Seat.letter.desc(), Seat.row))
    whole = [(letter, row) for letter in reversed(LETTERS) for row in range(1, 61)]
    assert [(seat.letter, seat.row) for seat in seats] == whole
    assert {seat.last_fencing_token for seat in seats} == {5}
    new.commit()
    assert len(claim_all(new, select(Seat).order_by(Seat.row, Seat.letter).offset(700).limit(30))) == 30
    bind(new, Lease("room", 6))
    claim(new, Seat, (60, "c"))
    new.commit()
    bind(new, Lease("room", 5))
    with turned_away(new, StaleTokenError) as caught:
        claim_all(new, select(Seat).where(Seat.row > 30))
    assert caught.value.identity == (60, "c")
    assert rows_of(hall, select(func.count()).where(Seat.last_fencing_token == 5)) == [1199]


@with_row_locks
def test_those_who_claim_all_of_many_rows_wait_for_each_other(hall: Engine) -> None:
    def claim_them() -> int:
        with holding(hall, Lease("room", 5)) as session:
            for _ in range(5):
                count = len(claim_all(session, select(Seat).where(Seat.row <= 15)))
                session.commit()
            return count

    waits = [in_thread(claim_them) for _ in range(3)]
    assert [wait() for wait in waits] == [300] * 3


def test_no_acknowledged_increment_is_lost(engine: Engine) -> None:
    """Four threads claim and increment one row, each time with a new token and without a lock.

    The value is the number of acknowledged commits, and the fence is a token that was given out.
    """
    let_wait(engine)
    tokens = count(1)

    def increment() -> int:
        done = 0
        while done < 8:
            with holding(engine, Lease("account:1", next(tokens))) as session:
                try:
                    session.scalars(select(models.Free.id)).all()
                    claim(session, Account, 1).balance += 1
                    session.commit()
                except StaleTokenError:
                    continue
            done += 1
        return done

    waits = [in_thread(increment) for _ in range(4)]
    assert [wait() for wait in waits] == [8] * 4
    assert balance(engine) == 132
    assert 32 <= models.fence(engine) < next(tokens)


def at_once(engine: Engine, model: type[Any] = Account) -> list[str]:
    shows_all = engine.dialect.name in {"postgresql", "sqlite"}
    return ["UPDATE"] if shows_all and model not in (Eager, Computed, Cat) else ["UPDATE", "SELECT"]


@pytest.mark.parametrize("model", MODELS)
def test_a_claim_sends_one_statement_where_it_is_sound(
    engine: Engine, session: Session, model: type[Any]
) -> None:
    """Each claim gives the row a new write id, also a second one under one token; the row can be written.

    The first use of a model makes its statement, so the claim runs twice.
    """
    ids = rows_of(engine, select(model.last_write_id).where(model.id == 1))
    for _ in range(2):
        with statements(engine) as sent:
            claimed = claim(session, model, 1)
        assert words(sent) == (["SELECT"] if model is models.Task else []) + at_once(engine, model)
        assert (claimed.id, claimed.last_fencing_token) == (1, NEW)
        assert not session.dirty
        known = claimed.last_write_id
        session.commit()
        ids += rows_of(engine, select(model.last_write_id).where(model.id == 1))
        assert known == ids[-1]
        claimed.balance += 1
        session.commit()
    (claimed,) = claim_all(session, select(model).where(model.id == 1))
    known = claimed.last_write_id
    session.commit()
    ids += rows_of(engine, select(model.last_write_id).where(model.id == 1))
    assert (known, claimed.balance, len({*ids})) == (ids[-1], 102, 4)


@pytest.mark.parametrize("expire_on_commit", [True, False])
def test_a_claim_loads_into_the_object_of_the_session(engine: Engine, expire_on_commit: bool) -> None:
    """No part of the object is older than the row: no column, and nothing that is loaded later."""
    with holding(engine, Lease("account:1", NEW), expire_on_commit=expire_on_commit) as session:
        known = session.get_one(Account, 1)
        assert (known.status, known.remark, len(known.notes)) == ("new", "none", 1)
        session.commit()
        with engine.begin() as connection:
            connection.execute(insert(Note), {"id": 2, "account_id": 1})
            statement = update(Account).where(Account.id == 1).values(status="paid", remark="much", changed=0)
            connection.execute(statement, execution_options={"fencing_token": OLD})
        with statements(engine) as sent:
            assert claim(session, Account, 1) is known
            assert (known.status, known.changed) == ("paid", 0)
        assert words(sent) == at_once(engine)
        assert (known.remark, len(known.notes)) == ("much", 2)
        session.commit()
        with engine.begin() as connection:
            connection.execute(insert(Note), {"id": 3, "account_id": 1})
        assert len(claim(session, Account, 1).notes) == 3, "although the row is the same"
        known.status = "sent"
        with statements(engine) as sent:
            claim(session, Account, 1)
        assert words(sent) == ["UPDATE", *at_once(engine)], "the change is flushed first"
        assert (known.status, known.changed) == ("sent", 1)


def test_a_refused_claim_says_why(engine: Engine, session: Session) -> None:
    claim(session, Account, 1)
    session.commit()
    with holding(engine, Lease("account:1", OLD)) as stale:
        known = stale.get(Account, 1, execution_options={"fencelock": "bypass"})
        with turned_away(stale, StaleTokenError) as caught:
            claim(stale, Account, 1)
        assert (caught.value.identity, caught.value.token, caught.value.current) == ((1,), OLD, NEW)
        assert known is not None
        bind(stale, Lease("other", NEW))
        with pytest.raises(UnfencedWriteError):
            claim(stale, Account, 1)


def test_a_claim_finds_no_row_that_a_listener_hides(engine: Engine, session: Session) -> None:
    """A listener that hides rows from SELECT hides them from a claim."""

    @event.listens_for(session, "do_orm_execute")
    def hide(state: Any) -> None:
        if state.is_select:
            state.statement = state.statement.options(with_loader_criteria(Account, Account.status != "gone"))

    with statements(engine) as sent:
        claim(session, Account, 1).status = "gone"
    assert words(sent) == ["UPDATE", "SELECT"]
    session.commit()
    with pytest.raises(NoResultFound):
        claim(session, Account, 1)


@on_postgresql_alone
@pytest.mark.parametrize("model", [Account, Eager])
def test_a_row_that_appears_during_a_claim_is_claimed_or_not_returned(
    engine: Engine, session: Session, model: type[Any]
) -> None:
    """Else its fence was not raised, and nothing would keep older holders out."""
    bind(session, Lease("account:1", 3), Lease("account:5", 3))
    inserted: list[bool] = []

    def appear(_c: object, statement: Any, *_: object) -> None:
        if getattr(statement, "is_update", False) and not inserted:
            inserted.append(True)
            with bypassed(engine) as connection:
                connection.execute(insert(model), {"id": 5})

    event.listen(engine, "after_execute", appear)
    if model is Eager:
        with pytest.raises(NoResultFound):
            claim(session, model, 5)
    assert claim(session, model, 5).last_fencing_token == 3
    assert session.connection().scalar(select(model.last_fencing_token).where(model.id == 5)) == 3


def test_coroutines_send_the_same_statements(engine: Engine, for_asyncio: ForAsyncio) -> None:
    async def play(session: AsyncSession) -> None:
        for known in (None, await session.get(Account, 1)):
            await session.commit()
            with statements(aengine.sync_engine) as sent:
                account = await fencelock.claim(session, Account, 1)
                await fencelock.gate(session, "account:1")
            # A call of aiosqlite that is cancelled would leave the rows of a RETURNING unread, and its lock.
            plainly = ["UPDATE", "SELECT", "INSERT", "SELECT"]
            wanted = plainly if engine.dialect.name == "sqlite" else [*at_once(engine), "INSERT"]
            assert words(sent) == wanted
            assert known in (None, account)
            assert (account.status, account.last_fencing_token) == ("new", NEW)
            await session.commit()
        assert await fencelock.claim_all(session, select(Account)) == [account]
        with pytest.raises(NoResultFound):
            await fencelock.claim(session, Seat, {"row": 1, "letter": "z"})
        await session.commit()
        bind(session, Lease("account:1", OLD))
        acts: tuple[Callable[[], Any], ...] = (
            lambda: claim(session, Account, 1),
            lambda: claim_all(session, select(Account)),
            lambda: gate(session),
        )
        for late in acts:
            with pytest.raises(StaleTokenError):
                await late()
            await session.rollback()

    aengine = for_asyncio(engine)
    awaiting(aengine, play, *leases(NEW))


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[fencelock.Database]:
    with fencelock.Database(f"sqlite:///{tmp_path}/leases.sqlite") as made:
        yield made


def booked(session: Session) -> int:
    return session.scalar(select(func.count()).select_from(models.Free)) or 0


def book(session: Session) -> None:
    if booked(session) == 0:
        session.add(models.Free(id=randrange(2**31)))
    session.commit()


def session_on(engine: Engine, level: str) -> Session:
    return Session(engine.execution_options(isolation_level=level) if level else engine)


@pytest.mark.parametrize(
    ("how", "level"),
    [
        *(("claim", level) for level in ("", "REPEATABLE READ", "SERIALIZABLE", "READ COMMITTED")),
        *((how, level) for how in ("claim_all", "gate") for level in ("", "REPEATABLE READ")),
    ],
)
def test_a_claim_in_a_snapshot_older_than_the_lock_is_refused(
    engine: Engine, authority: fencelock.Database, how: str, level: str
) -> None:
    """It would decide on rows from before the lock. Elsewhere the limit of one holds, too."""
    name = engine.dialect.name
    if name == "sqlite" and level not in {"", "SERIALIZABLE"}:
        pytest.skip("SQLite has no such level")
    is_old = level == "REPEATABLE READ" or (name, level) in {("mysql", ""), ("postgresql", "SERIALIZABLE")}
    with session_on(engine, level) as session:
        assert (session.get_one(Account, 1).id, booked(session)) == (1, 0)
        if name == "sqlite" or (name, level) == ("mysql", "SERIALIZABLE"):
            session.rollback()  # else a reader keeps others from writing
        with fencelock.fenced_lock("account:1", authority=authority), Session(engine) as other:
            book(other)
        with fencelock.fenced_lock("account:1", authority=authority):
            if is_old:
                with turned_away(
                    session, fencelock.StaleReadError, match="roll back before you lock"
                ) as caught:
                    CLAIMS[how](session)
                assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301
            CLAIMS[how](session)
            book(session)
    assert len(rows_of(engine, select(models.Free.id))) == 1


@with_row_locks
def test_a_lease_that_does_not_say_when_it_was_granted_books_twice(engine: Engine) -> None:
    """The control: a lease of another source, and an old snapshot."""
    with session_on(engine, "REPEATABLE READ") as session:
        assert booked(session) == 0
        with Session(engine) as other:
            book(other)
        bind(session, Lease("account:1", 2**62))
        gate(session, "account:1")
        book(session)
    assert len(rows_of(engine, select(models.Free.id))) == 2


def test_a_savepoint_is_as_old_as_its_transaction(engine: Engine, authority: fencelock.Database) -> None:
    """It begins after the lock, and reads what was there before."""
    is_sqlite = engine.dialect.name == "sqlite"
    with session_on(engine, "SERIALIZABLE" if is_sqlite else "REPEATABLE READ") as session:
        assert booked(session) == 0
        with fencelock.fenced_lock("account:1", authority=authority):
            savepoint = session.begin_nested()
            if is_sqlite:
                gate(session, "account:1")
            else:
                with pytest.raises(fencelock.StaleReadError):
                    gate(session, "account:1")
            savepoint.rollback()


@on_postgresql_alone
def test_a_serialization_failure_stays_the_databases_own(engine: Engine, old: Session) -> None:
    """It is retryable, and not reported as a stale token."""
    with holder(engine.execution_options(isolation_level="REPEATABLE READ")) as strict:
        strict.get_one(Account, 1)
        claim(old, Account, 1).balance = 90
        old.commit()
        with turned_away(strict, DBAPIError, match="could not serialize"):
            claim(strict, Account, 1)
        assert claim(strict, Account, 1).balance == 90
