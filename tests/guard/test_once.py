"""`once` does work once for each key, because the receipt is committed with the work."""

from __future__ import annotations

import asyncio
import enum
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, insert, select, text, update
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateSchema, DropSchema

import fencelock
from fencelock import Lease, once, prune_receipts
from fencelock._databases import is_busy
from fencelock.guard import receipts as module
from tests.guard.marks import ForAsyncio, on_postgresql_alone, on_sqlite_alone, with_row_locks
from tests.guard.models import RECEIPTS, Free
from tests.guard.rows import holding, rows_of
from tests.guard.waiting import until_one_waits

ROWS: dict[Any, Any] = {Free: {"id": 1}, RECEIPTS: []}


def add(session: Session, key: str = "k", result: Any = None, **options: Any) -> Any:
    receipt = once(session, key, **options)
    if not receipt.done:
        session.execute(update(Free).values(value=Free.value + 1))
        receipt.result = result
    return receipt.result


def value(engine: Engine) -> int:
    (found,) = rows_of(engine, select(Free.value))
    return int(found)


def reading_committed(engine: Engine) -> Engine:
    level = "SERIALIZABLE" if engine.dialect.name == "sqlite" else "READ COMMITTED"
    return engine.execution_options(isolation_level=level)


def receipts(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(select(RECEIPTS)))


def test_a_second_call_gets_the_result_and_does_nothing(engine: Engine) -> None:
    """Work that is rolled back leaves no receipt."""
    with Session(engine) as session:
        add(session)
        session.rollback()
    for _ in range(2):
        with Session(engine) as session, session.begin():
            assert add(session, result={"balance": 7, "ok": [True, None]}) == {
                "balance": 7,
                "ok": [True, None],
            }
    with Session(engine) as session, session.begin():
        again = once(session, "k")
        assert (again.key, again.done, repr(again)) == ("k", True, "<Receipt 'k' done>")
        with pytest.raises(ValueError, match="its result cannot change"):
            again.result = 1
    assert (value(engine), [row.key for row in receipts(engine)]) == (1, ["k"])


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_second_waits_for_the_end_of_the_first(engine: Engine, commits: bool) -> None:
    its = reading_committed(engine)
    began = threading.Event()

    def second() -> Any:
        with Session(its) as session, session.begin():
            began.set()
            return add(session, result="second")

    with Session(its) as first, ThreadPoolExecutor() as pool:
        assert add(first, result="first") == "first"
        waits = pool.submit(second)
        began.wait()
        until_one_waits(engine)
        if commits:
            first.commit()
        else:
            first.rollback()
        assert waits.result(30) == ("first" if commits else "second")
    assert value(engine) == 1


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_many_at_once_at_each_isolation_level(engine: Engine, level: str) -> None:
    """Where the isolation hides the receipt, or two deadlock, the error is one that may be tried again."""
    if engine.dialect.name == "sqlite" and level != "SERIALIZABLE":
        pytest.skip("SQLite has one isolation level")
    its = engine.execution_options(isolation_level=level)
    barrier = threading.Barrier(6)

    def work(number: int) -> list[Any]:
        found = []
        for turn in range(5):
            barrier.wait(30)
            while True:
                try:
                    with Session(its) as session, session.begin():
                        session.scalar(select(Free.value))  # begins the snapshot
                        found.append(add(session, f"turn {turn}", result=[turn, number]))
                    break
                except DBAPIError as error:
                    if not is_busy(error):
                        raise
                except fencelock.LockTimeoutError:
                    pass
        return found

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(work, range(6)))
    for turn, seen in enumerate(zip(*results, strict=True)):
        assert len({str(each) for each in seen}) == 1, f"all see one result in turn {turn}"
    assert (value(engine), len(receipts(engine))) == (5, 5)


def test_those_who_wait_for_a_commit_do_not_deadlock(engine: Engine) -> None:
    """On MariaDB an INSERT IGNORE would leave them shared locks, and all but one would fail."""
    its = reading_committed(engine)
    begun = threading.Barrier(4)

    def waiter() -> Any:
        begun.wait(30)
        with Session(its) as session, session.begin():
            return add(session, result="theirs")

    with Session(its) as first, ThreadPoolExecutor(3) as pool:
        add(first, result="ours")
        waiters = [pool.submit(waiter) for _ in range(3)]
        begun.wait(30)
        until_one_waits(engine)
        first.commit()
        assert [each.result(30) for each in waiters] == ["ours"] * 3
    assert value(engine) == 1


def test_another_fingerprint_is_refused(engine: Engine) -> None:
    asked = {"account": 1, "cents": Decimal("5.00"), "at": datetime(2026, 11, 27, tzinfo=UTC)}
    same = {"at": datetime(2026, 11, 27, tzinfo=UTC), "cents": Decimal("5.0"), "account": 1}
    with Session(engine) as session, session.begin():
        add(session, fingerprint=asked)
    with Session(engine) as session, session.begin():
        assert once(session, "k", fingerprint=same).done
        assert once(session, "k").done, "without a fingerprint nothing is compared"
    with Session(engine) as session:
        session.execute(update(Free).values(value=99))
        with pytest.raises(fencelock.ReceiptMismatchError, match="'k' belongs to another request") as caught:
            once(session, "k", fingerprint={**asked, "cents": 600})
        assert (caught.value.key, caught.value.written) == ("k", False)
        with pytest.raises(PendingRollbackError):
            session.commit()
        session.rollback()
    assert value(engine) == 1


class Colour(enum.Enum):
    RED = "red"


@on_sqlite_alone
def test_fingerprints_and_results_are_plain_data(engine: Engine) -> None:
    plain: list[Any] = [0, 1.5, [], {"id": uuid.UUID(int=1), "in": Colour.RED, "by": (1, 2.5, None)}]
    with Session(engine) as session:
        for each in plain:
            assert not once(session, f"of {each}", fingerprint=each).done
            assert once(session, f"of {each}", fingerprint=each).done
        receipt = once(session, "k")
        receipt.result = given = {"pair": (1, 2), 3: "drei", "text": "ü"}
        given["pair"] = (0, 0)
        assert receipt.result == {"pair": [1, 2], "3": "drei", "text": "ü"}
        with session.begin_nested():
            receipt.result = 1
        receipt.result = "x" * (65_536 - 2)
        session.commit()
        with pytest.raises(ValueError, match="assign its result before the COMMIT"):
            receipt.result = 3
    with Session(engine) as session:
        assert once(session, "k").result == "x" * (65_536 - 2)


def test_keys_differ_where_their_characters_differ(engine: Engine) -> None:
    keys = ["a", "A", "ä", "\uff41", "é", "e\u0301", "😀" * 255]
    with Session(engine) as session, session.begin():
        assert [once(session, key).done for key in keys] == [False] * len(keys)
        assert [once(session, key).done for key in keys] == [True] * len(keys)


def test_a_transaction_gets_what_it_has_assigned_and_a_savepoint_takes_its_receipt_along(
    engine: Engine,
) -> None:
    with Session(engine) as session, session.begin():
        assert (add(session, result=1), add(session, result=2)) == (1, 1)
        for key in ("good", "bad", "fine"):
            with suppress(ZeroDivisionError), session.begin_nested():
                add(session, key, result=key)
                assert 1 / (key != "bad") == 1
        assert not once(session, "bad").done
        receipt = once(session, "later")
        for number in range(3):
            with session.begin_nested() if number == 1 else nullcontext():
                receipt.result = number
    assert value(engine) == 3
    found = {row.key: row.result for row in receipts(engine)}
    assert found == {"k": 1, "good": "good", "bad": None, "fine": "fine", "later": 2}


def test_receipt_keeps_the_token(engine: Engine) -> None:
    lease = Lease("order:1", 77)
    with holding(engine, lease) as session:
        once(session, "k")
        was_needed = lease._needed
        session.commit()
    assert (was_needed, lease._needed) == (True, False), "the lock outlives the COMMIT"
    with Session(engine) as session, session.begin():
        once(session, "without")
    rows = {row.key: row for row in receipts(engine)}
    assert (rows["k"].token, rows["without"].token) == (77, None)
    at = rows["k"].at.replace(tzinfo=UTC) if rows["k"].at.tzinfo is None else rows["k"].at
    assert abs(datetime.now(UTC) - at) < timedelta(minutes=1)


def test_transaction_that_never_ends(engine: Engine) -> None:
    short = {
        "postgresql": "SET LOCAL lock_timeout = '200ms'",
        "mysql": "SET innodb_lock_wait_timeout = 1",
        "sqlite": "PRAGMA busy_timeout = 200",
    }
    with Session(engine) as first, Session(engine) as second:
        once(first, "k")
        second.execute(text(short[engine.dialect.name]))
        with pytest.raises(
            fencelock.LockTimeoutError, match="another transaction with the receipt 'k' is still open"
        ):
            once(second, "k")
        second.rollback()
        if engine.dialect.name == "mysql":
            second.execute(text("SET innodb_lock_wait_timeout = DEFAULT"))


@on_sqlite_alone
def test_a_lost_lease_or_a_connection_that_commits_by_itself_writes_no_receipt(engine: Engine) -> None:
    with holding(engine, Lease("order:1", 77, expires_at=0.0)) as session:
        with pytest.raises(fencelock.LockLostError):
            once(session, "k")
        with pytest.raises(PendingRollbackError):
            session.commit()
    refused = pytest.raises(fencelock.UnfencedWriteError, match="'fencelock_receipts' needs a transaction")
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session, refused:
        once(session, "k")
    assert receipts(engine) == []


def test_old_receipts_are_pruned(engine: Engine) -> None:
    old = datetime.now(UTC) - timedelta(days=31)
    with engine.begin() as connection:
        connection.execute(insert(RECEIPTS), [{"key": f"old {n}", "at": old} for n in range(3)])
    with Session(engine) as session, session.begin():
        once(session, "new")
        assert prune_receipts(session, older_than=30 * 86_400) == 3
    with engine.begin() as connection:
        assert prune_receipts(connection, older_than=30 * 86_400) == 0
    assert [row.key for row in receipts(engine)] == ["new"]
    with engine.begin() as connection:
        assert prune_receipts(connection, older_than=1e300) == 0


@with_row_locks
def test_receipt_that_is_pruned_while_another_looks_for_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = engine.execution_options(isolation_level="READ COMMITTED")
    with Session(its) as session, session.begin():
        once(session, "k")
    insert_once, pruned = module._insert, list[int]()

    def insert_and_prune(*args: Any) -> bool:
        inserted = insert_once(*args)
        if not inserted and not pruned and engine.dialect.name == "postgresql":
            with its.begin() as connection:
                pruned.append(prune_receipts(connection, older_than=0))
        return inserted

    monkeypatch.setattr(module, "_insert", insert_and_prune)
    with Session(its) as session, session.begin():
        assert once(session, "k").done is (engine.dialect.name != "postgresql"), "MariaDB has locked the row"


@on_postgresql_alone
def test_receipts_are_in_the_schema_that_the_program_names(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencelock.guard.receipts._schemas", set())
    table = fencelock.receipt_table(MetaData(schema="once_app"))
    with engine.begin() as connection:
        connection.execute(DropSchema("once_app", cascade=True, if_exists=True))
        connection.execute(CreateSchema("once_app"))
        table.create(connection)
    with Session(engine) as session, session.begin():
        once(session, "k").result = 5
    with engine.connect() as connection:
        assert connection.scalars(select(table.c.result)).all() == [5]
    assert receipts(engine) == []


def test_coroutines_do_the_work_of_a_key_once(engine: Engine, for_asyncio: ForAsyncio) -> None:
    async def main() -> list[Any]:
        its = for_asyncio(engine)
        if engine.dialect.name != "sqlite":
            its = its.execution_options(isolation_level="READ COMMITTED")

        async def work(number: int) -> Any:
            async with AsyncSession(its) as session, session.begin():
                receipt = await once(session, "k", fingerprint={"a": 1})
                if not receipt.done:
                    await session.execute(update(Free).values(value=Free.value + 1))
                    receipt.result = number
                return receipt.result

        found = [await work(0)] if engine.dialect.name == "sqlite" else []
        found += await asyncio.gather(*(work(number) for number in range(1, 5)))
        async with AsyncSession(its) as session:
            with pytest.raises(fencelock.ReceiptMismatchError):
                await once(session, "k", fingerprint={"a": 2})
        await its.dispose()
        return found

    assert len(set(asyncio.run(main()))) == 1
    assert value(engine) == 1


@with_row_locks
def test_once_does_not_wait_for_another_key(engine: Engine) -> None:
    its = engine.execution_options(isolation_level="READ COMMITTED")
    with Session(its) as first, ThreadPoolExecutor(1) as pool:
        once(first, "one")

        def other() -> bool:
            with Session(its) as session, session.begin():
                return once(session, "two").done

        assert pool.submit(other).result(30) is False


def test_a_receipt_that_is_gone_at_the_commit_fails_it(engine: Engine) -> None:
    """As after an implicit COMMIT, or a rollback by a driver, which no listener hears."""
    with Session(engine) as session:
        add(session, result=1)
        session.execute(RECEIPTS.delete().where(RECEIPTS.c.key == "k"))
        with pytest.raises(fencelock.FenceError, match="the receipt 'k' is gone"):
            session.commit()
    assert value(engine) == 0


@on_sqlite_alone
def test_a_result_is_stored_whoever_commits(engine: Engine) -> None:
    """Also the caller's connection, and a COMMIT in two phases."""
    kept = {}
    for number, mode in enumerate(("conditional_savepoint", "rollback_only", "create_savepoint")):
        joined: Any = {"join_transaction_mode": mode}
        with engine.connect() as connection, Session(connection, **joined) as session:
            kept[mode] = add(session, mode, result=number)
            session.flush()
            connection.commit()
    if engine.dialect.name != "sqlite":
        with Session(engine, twophase=True) as session:
            kept["two phases"] = add(session, "two phases", result=3)
            session.commit()
    assert {row.key: row.result for row in receipts(engine)} == kept


def test_a_result_that_was_assigned_before_a_savepoint_fails_is_stored(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        once(session, "k").result = 5
        with suppress(ZeroDivisionError), session.begin_nested():
            with session.begin_nested():
                session.execute(update(Free).values(value=9))
            raise ZeroDivisionError
    assert [row.result for row in receipts(engine)] == [5]


@pytest.mark.parametrize("shared_url", ["mariadb"], indirect=True)
@pytest.mark.parametrize(
    "statement", ["TRUNCATE g_free", "alter table g_free comment 'x'", "ANALYZE TABLE g_free"]
)
def test_a_statement_that_commits_is_refused_beside_a_receipt(engine: Engine, statement: str) -> None:
    with Session(engine) as session:
        session.execute(text("CREATE TEMPORARY TABLE IF NOT EXISTS passes (id INT)"))
        add(session)
        with pytest.raises(fencelock.FenceError, match="would commit half of the open transaction"):
            session.execute(text(statement))
        with pytest.raises(PendingRollbackError):
            session.commit()
    assert value(engine) == 0


def test_a_fingerprint_is_exact() -> None:
    def digest(given: Any) -> Any:
        return module._digest({"given": given})

    long = "0.12345678901234567890123456789012345678901"
    assert digest(Decimal(long)) != digest(Decimal(long + "2"))
    assert digest(Decimal("1.50")) == digest(Decimal("1.5")) != digest(Decimal(15))
    assert digest(Decimal(100)) == digest(Decimal("1E+2")) != digest(Decimal(-100))
    assert digest(Decimal("0.00")) == digest(Decimal(0))
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert digest(noon) == digest(noon.astimezone(timezone(timedelta(hours=2))))
    assert digest(noon) != digest(noon.replace(tzinfo=None))


@pytest.mark.parametrize("number", ["NaN", "sNaN", "-Infinity"])
def test_a_fingerprint_has_no_number_that_is_none(number: str) -> None:
    with pytest.raises(TypeError, match="a fingerprint is plain data"):
        module._digest(Decimal(number))


def test_a_result_with_half_a_surrogate_pair_is_refused_at_once(engine: Engine) -> None:
    with Session(engine) as session, pytest.raises(TypeError, match="cannot be written as JSON"):
        once(session, "k").result = "\ud800"
