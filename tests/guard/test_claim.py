"""On two connections, a claim of a newer holder shuts an older holder out."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, delete, event, func, insert, select, text, update
from sqlalchemy.exc import DBAPIError, InvalidRequestError, NoResultFound, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fencelock import Lease, StaleTokenError, UnfencedWriteError, bind, claim, claim_all, gate
from fencelock.lease import note_ended, note_held
from tests.guard import claims
from tests.guard.claims import NEW, OLD, Account, Note, Seat, Task, balance, fence, holder, leases
from tests.guard.rows import Act, ForAsyncio, bypassed, holding, on_sqlite_alone, turned_away


@pytest.fixture
def engine(shared_engine: Engine, _tables: None) -> Engine:
    """An engine for each test, which may have it begin at once (`waits`)."""
    return claims.fill(shared_engine)


@pytest.fixture
def _waiting(engine: Engine) -> None:
    claims.let_wait(engine)


waits = pytest.mark.usefixtures("_waiting")
on_postgresql_alone = pytest.mark.parametrize("shared_url", ["postgresql"], indirect=True)
with_row_locks = pytest.mark.parametrize("shared_url", ["postgresql", "mariadb"], indirect=True)


@on_sqlite_alone
def test_without_a_claim_an_update_is_lost(engine: Engine, old: Session, new: Session) -> None:
    """The read hole: fenced writes alone accept the old holder's write between a read and a write."""
    read_by_new = new.get_one(Account, 1).balance
    new.rollback()
    account = old.get_one(Account, 1)
    account.balance -= 10
    old.commit()
    new.get_one(Account, 1).balance = read_by_new - 50
    new.commit()
    assert balance(engine) == 50, "the old holder's 10 is lost, though every write was fenced"


def test_with_a_claim_no_update_is_lost(engine: Engine, old: Session, new: Session) -> None:
    """The same schedule with a claim before the read: the old holder is turned away."""
    account = claim(new, Account, 1)
    read_by_new = account.balance
    new.commit()
    with pytest.raises(StaleTokenError) as caught:
        old.execute(update(Account).where(Account.id == 1).values(balance=Account.balance - 10))
    assert (caught.value.token, caught.value.current) == (1, 2)
    new.get_one(Account, 1).balance = read_by_new - 50
    new.commit()
    assert balance(engine) == 50


@with_row_locks
def test_claim_reads_past_the_snapshot_of_its_transaction(engine: Engine, new: Session) -> None:
    """MariaDB's REPEATABLE READ keeps an old snapshot; what a claim returns does not come from it."""
    claim(new, Account, 1)
    new.commit()
    assert new.get_one(Account, 1).balance == 100
    with holder(engine, NEW) as same_lease, same_lease.begin():
        claim(same_lease, Account, 1).balance = 70
    assert claim(new, Account, 1).balance == 70
    new.rollback()


@waits
def test_claim_holds_off_the_old_holder_until_the_commit(engine: Engine, old: Session, new: Session) -> None:
    """The claim's row lock makes an older write wait, and the raised fence then refuses it."""
    account = claim(new, Account, 1)
    refused = claims.in_thread(lambda: old.execute(update(Account).where(Account.id == 1).values(balance=0)))
    time.sleep(0.2)
    account.balance = 70
    new.commit()
    with pytest.raises(StaleTokenError) as caught:
        refused()
    assert caught.value.identity == (1,)
    assert (caught.value.token, caught.value.current) == (1, 2)
    old.rollback()
    assert balance(engine) == 70


TAKEN: dict[str, Act] = {
    "key tells the resource": lambda s: claim(s, Account, 1),
    "row tells the resource": lambda s: claim(s, Task, 1),
    "row tells the resource, nowait": lambda s: _claimed_in_the_end(s, nowait=True),
    "all": lambda s: claim_all(s, select(Task).where(Task.queue == "a")),
    "all of one": lambda s: claim_all(s, select(Account)),
}


def _claimed_in_the_end(session: Session, **how: Any) -> object:
    """Claim a task that may be locked, as a caller does that will not wait in the database."""
    while True:
        try:
            return claim(session, Task, 1, **how)
        except OperationalError:
            session.rollback()
            time.sleep(0.05)


@waits
@pytest.mark.parametrize("take", [pytest.param(take, id=name) for name, take in TAKEN.items()])
def test_what_is_read_after_a_claim_is_not_older_than_it(old: Session, new: Session, take: Act) -> None:
    """A claim that has waited sees what the older holder did to *other* rows, whatever the isolation level.

    It is the transaction's first act, so nothing of it may take a snapshot before the lock is there.
    """
    claim(old, Account, 1)
    claim(old, Task, 1)

    def first_act() -> tuple[str, int]:
        take(new)
        return new.get_one(Note, 1).text, new.get_one(Account, 1).balance

    read = claims.in_thread(first_act)
    time.sleep(0.2)
    old.get_one(Note, 1).text = "second"
    old.get_one(Account, 1).balance = 90
    old.commit()
    assert read() == ("second", 90)
    new.rollback()


@pytest.mark.parametrize("shared_url", ["mariadb"], indirect=True)
def test_a_claim_without_found_rows_is_no_refusal(engine: Engine) -> None:
    """A MariaDB connection that counts changed rows only says 0 for a claim that changes nothing."""
    import pymysql  # noqa: PLC0415  the driver of this one test

    url = engine.url
    counting = create_engine(
        url,
        creator=lambda: pymysql.connect(
            host=url.host or "",
            port=url.port or 3306,
            user=url.username,
            database=url.database,
            client_flag=0,
        ),
    )
    with holding(counting, *leases(NEW)) as session:
        claim(session, Account, 1)
        session.commit()
        assert claim(session, Account, 1).last_fencing_token == 2
        session.rollback()
        bind(session, *leases(OLD))
        with pytest.raises(StaleTokenError):
            claim(session, Account, 1)
    counting.dispose()


@waits
def test_a_rollback_to_a_savepoint_gives_the_claim_back(engine: Engine, old: Session, new: Session) -> None:
    """After ROLLBACK TO SAVEPOINT the row must be claimed again: nothing is remembered as claimed."""
    with new.begin_nested() as savepoint:
        claim(new, Account, 1)
        savepoint.rollback()
    if engine.dialect.name == "postgresql":  # the others keep the lock until the transaction ends
        claim(old, Account, 1).balance = 90
        old.commit()
        assert claim(new, Account, 1).balance == 90
    else:
        assert claim(new, Account, 1).balance == 100
    new.commit()
    assert fence(engine) == 2


def test_a_missing_row_is_no_result(new: Session) -> None:
    bind(new, Lease("account:9", 1))
    with pytest.raises(NoResultFound, match="no Account with the primary key"):
        claim(new, Account, 9)
    with pytest.raises(NoResultFound):
        claim(new, Account, 9, skip_locked=True)
    bind(new, Lease("queue:a", 1))
    with pytest.raises(NoResultFound):
        claim(new, Task, 9)
    assert claim(new, Task, 1).balance == 100


WRONG: dict[str, tuple[Act, type[Exception], str | None]] = {
    **{
        f"identity {identity}": (
            lambda s, identity=identity: claim(s, Account, identity),  # type: ignore[misc]
            ValueError,
            "identified by id",
        )
        for identity in (None, (1, 2), {"other": 1}, ())
    },
    "no fence": (lambda s: claim(s, Note, 1), TypeError, None),
    "no model": (lambda s: claim(s, str, 1), TypeError, None),
    "no table": (lambda s: claim(s, claims.Base, 1), TypeError, None),
    "all of a column": (lambda s: claim_all(s, select(Account.id)), TypeError, None),
    "all of two": (lambda s: claim_all(s, select(Account, Task)), TypeError, None),  # type: ignore[arg-type]
    "a class": (lambda _: claim(Session, Account, 1), TypeError, "a Session"),  # type: ignore[call-overload]
    "an engine": (lambda s: claim(s.get_bind(), Account, 1), TypeError, "a Session"),  # type: ignore[call-overload]
}


@on_sqlite_alone
@pytest.mark.parametrize(("take", "error", "match"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_claimed_is_told_before_anything_is_sent(
    new: Session, take: Act, error: type[Exception], match: str | None
) -> None:
    with pytest.raises(error, match=match):
        take(new)


@on_sqlite_alone
def test_what_can_be_claimed(engine: Engine, new: Session) -> None:
    assert claim_all(new, select(Account).where(Account.id == 9)) == []
    with holding(engine, Lease("room", 1)) as session:
        assert claim(session, Seat, (1, "a")) is claim(session, Seat, {"letter": "a", "row": 1})


DISCARDING: dict[str, tuple[Act, str | None]] = {
    "it": (lambda s: claim(s, Account, 1), "claim it before changing it"),
    "all": (lambda s: claim_all(s, select(Account)), None),
    "by a key that is text": (lambda s: claim(s, Account, "1"), None),
    "another row": (lambda s: claim(s, Account, 2), "flush first"),
}


@pytest.mark.parametrize(("take", "match"), DISCARDING.values(), ids=DISCARDING)
def test_what_is_not_flushed_is_never_discarded(
    engine: Engine, new: Session, take: Act, match: str | None
) -> None:
    """Where autoflush is off, the claim refuses: which row a key leads to, only the database knows."""
    bind(new, *leases(NEW), Lease("account:2", NEW))
    account = claim(new, Account, 1)
    with new.no_autoflush:
        account.balance = 80
        with pytest.raises((InvalidRequestError, DBAPIError), match=match):  # PostgreSQL compares no text
            take(new)
        assert account.balance == 80
    if engine.dialect.name == "sqlite":  # the others have refused the transaction that sent text
        new.commit()
        assert balance(engine) == 80


def test_nowait_and_skip_locked(engine: Engine, old: Session, new: Session) -> None:
    if engine.dialect.name == "sqlite":
        assert claim(new, Account, 1, nowait=True).balance == 100
        return
    claim(old, Account, 1)
    begun = time.monotonic()
    assert claim(new, Account, 1, skip_locked=True) is None
    with pytest.raises(OperationalError):
        claim(new, Account, 1, nowait=True)
    assert time.monotonic() - begun < 5
    new.rollback()
    old.rollback()
    assert claim(new, Account, 1, nowait=True).last_fencing_token == 2


def test_a_resource_that_the_key_does_not_tell(new: Session) -> None:
    """Where __fence_resource__ names other columns, the claim reads them to find the lease."""
    bind(new, Lease("queue:a", 3))
    with turned_away(new, UnfencedWriteError, match="'queue:b'"):
        claim(new, Task, 2)
    claim(new, Task, 1).balance = 1
    new.commit()
    assert new.scalars(select(Task.last_fencing_token).order_by(Task.id)).all() == [3, 0, 0]


def test_claim_all_claims_in_key_order_and_returns_in_query_order(engine: Engine, new: Session) -> None:
    """Two holders of overlapping sets cannot deadlock, whatever order their queries ask for."""
    bind(new, Lease("queue:a", 3), Lease("queue:b", 8))
    claimed: list[Any] = []

    def note(_c: object, _s: object, many: Any, params: Any, _o: object, _r: object) -> None:
        claimed.extend(row["key_0"] for row in many or [params] if "key_0" in row)

    event.listen(engine, "after_execute", note)
    tasks = claim_all(new, select(Task).order_by(Task.id.desc()))
    assert [task.id for task in tasks] == [3, 2, 1]
    assert claimed == [1, 2, 3]
    assert [task.last_fencing_token for task in tasks] == [3, 8, 3]


@on_sqlite_alone
def test_what_is_no_claim(new: Session) -> None:
    for wrong in (Account, text("SELECT 1"), update(Account), "SELECT 1", select(Account.id)):
        with pytest.raises(TypeError, match="claim_all takes a SELECT of one model"):
            claim_all(new, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="choose one"):
        claim(new, Account, 1, nowait=True, skip_locked=True)  # type: ignore[call-overload]


@on_sqlite_alone
@pytest.mark.parametrize(
    "take",
    [lambda s: claim(s, Account, 1), lambda s: claim_all(s, select(Account)), lambda s: gate(s, "account:1")],
    ids=["claim", "claim_all", "gate"],
)
def test_nothing_is_claimed_past_the_guard(engine: Engine, take: Act) -> None:
    past = holding(engine.execution_options(fencelock="bypass"), *leases(NEW))
    with past as session, turned_away(session, UnfencedWriteError, match="bypass"):
        take(session)
    assert fence(engine) == 0


@pytest.fixture
def hall(engine: Engine) -> Engine:
    with bypassed(engine) as connection:
        connection.execute(delete(Seat))
        connection.execute(
            insert(Seat), [{"row": row, "letter": ch} for row in range(1, 61) for ch in LETTERS]
        )
    return engine


LETTERS = "abcdefghijklmnopqrst"


@pytest.mark.usefixtures("hall")
def test_claim_all_of_many_rows(new: Session) -> None:
    bind(new, Lease("room", 5))
    seats = claim_all(new, select(Seat).order_by(Seat.letter.desc(), Seat.row))
    assert [(seat.letter, seat.row) for seat in seats] == [
        (letter, row) for letter in reversed(LETTERS) for row in range(1, 61)
    ]
    assert {seat.last_fencing_token for seat in seats} == {5}
    new.commit()
    assert len(claim_all(new, select(Seat).order_by(Seat.row, Seat.letter).offset(700).limit(30))) == 30


def test_claim_all_of_many_rows_is_refused_as_a_whole(hall: Engine, new: Session) -> None:
    bind(new, Lease("room", 5))
    claim(new, Seat, (60, "c"))
    new.commit()
    with holding(hall, Lease("room", 4)) as stale:
        with pytest.raises(StaleTokenError) as caught:
            claim_all(stale, select(Seat))
        assert caught.value.identity == (60, "c")
        stale.rollback()
        assert stale.scalar(select(func.count()).where(Seat.last_fencing_token == 4)) == 0


@with_row_locks
def test_two_who_claim_all_of_many_rows_wait_for_each_other(hall: Engine) -> None:
    with bypassed(hall) as connection:
        for row in range(60, 0, -1):  # PostgreSQL puts a written row behind the rest
            connection.execute(update(Seat).where(Seat.row == row).values(guest=f"{row}"))

    def claim_them() -> int:
        with holding(hall, Lease("room", 5)) as session:
            for _ in range(5):
                count = len(claim_all(session, select(Seat).where(Seat.row <= 15)))
                session.commit()
            return count

    waits = [claims.in_thread(claim_them) for _ in range(3)]
    assert [wait() for wait in waits] == [300] * 3


@on_sqlite_alone
def test_claims_by_the_held_lease(engine: Engine) -> None:
    lease = Lease("account:1", 4)
    note_held(lease)
    try:
        with Session(engine) as session, session.begin():
            claim(session, Account, 1).balance = 1
    finally:
        note_ended(lease)
    assert fence(engine) == 4


@on_postgresql_alone
def test_repeatable_read_conflicts_stay_the_databases_own(engine: Engine, old: Session) -> None:
    """PostgreSQL's serialization failure is retryable and not reported as a stale token."""
    strict = Session(engine.execution_options(isolation_level="REPEATABLE READ"))
    bind(strict, *leases(NEW))
    strict.get_one(Account, 1)
    claim(old, Account, 1).balance = 90
    old.commit()
    with turned_away(strict, DBAPIError, match="could not serialize"):
        claim(strict, Account, 1)
    assert claim(strict, Account, 1).balance == 90
    strict.close()


@on_postgresql_alone
def test_a_row_that_appears_after_the_claim_is_claimed(engine: Engine, new: Session) -> None:
    """A row inserted between the claim's UPDATE and its SELECT is not returned without its fence raised."""
    bind(new, Lease("account:5", 3))
    inserted: list[bool] = []

    def appear(_c: object, statement: Any, *_: object) -> None:
        if getattr(statement, "is_update", False) and not inserted:
            inserted.append(True)
            with bypassed(engine) as connection:
                connection.execute(insert(Account), {"id": 5, "balance": 1})

    event.listen(engine, "after_execute", appear)
    assert claim(new, Account, 5).last_fencing_token == 3
    assert new.connection().scalar(select(Account.last_fencing_token).where(Account.id == 5)) == 3


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


@on_sqlite_alone
@pytest.mark.parametrize("for_asyncio", [0], indirect=True)
def test_scoped_sessions_claim(engine: Engine, for_asyncio: ForAsyncio) -> None:
    """The session behind the facade claims, and is the one that a refusal leaves to be rolled back."""
    scoped = scoped_session(sessionmaker(engine))
    bind(scoped, *leases(NEW))
    gate(scoped, "account:1")
    claim(scoped, Account, 1).balance = 70
    assert [account.id for account in claim_all(scoped, select(Account))] == [1]
    scoped.commit()
    bind(scoped, *leases(OLD))
    with pytest.raises(StaleTokenError):
        claim(scoped, Account, 1)
    scoped.remove()

    async def main() -> None:
        aengine = for_asyncio(engine)
        of_task = async_scoped_session(async_sessionmaker(aengine), scopefunc=asyncio.current_task)
        bind(of_task, *leases(NEW))
        (await claim(of_task, Account, 1)).balance = 60
        await of_task.commit()
        await of_task.remove()
        await aengine.dispose()

    asyncio.run(main())
    assert balance(engine) == 60
