"""A transaction with a refused write can only be rolled back, so that half of the work is never committed.

A table of pairs: ways to be refused meet ways to go on, with the causes in turn.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle, product
from typing import Any, TypeAlias

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, NullPool, create_engine, delete, insert, orm, select, text, update
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, sessionmaker

import fencelock
from fencelock import FencelockError, Lease, StaleTokenError, UnfencedWriteError, bind, claim
from fencelock.guard import triggers
from tests.door import Door
from tests.guard.marks import Act, ForAsyncio, on_postgresql_alone, on_sqlite_alone
from tests.guard.models import FENCE, Free, Row, fenced, fences
from tests.guard.rows import holding, rows_of, turned_away

WHY = r"rollback\(\)"
ROWS: dict[Any, Any] = {**fenced(Row, 1), Free: [], fences: {"resource": "rows", "last_fencing_token": FENCE}}


def note(target: Any, number: int) -> None:
    target.execute(insert(Free), {"id": number})


def notes(engine: Engine) -> list[int]:
    return rows_of(engine, select(Free.id).order_by(Free.id))


def flush(session: Session) -> None:
    """Write the row by the unit of work, without having read it."""
    row = Row(id=1)
    orm.make_transient_to_detached(row)
    session.add(row)
    row.value = 7
    session.flush()


PLAIN = "UPDATE g_rows SET value = 1"
TEXT = fencelock.fenced_text(
    f"{PLAIN}, last_fencing_token = :fencing_token, last_write_id = :fencing_write_id "
    "WHERE id = :id AND last_fencing_token <= :fencing_token",
    Row,
    resource="rows",
)
Way: TypeAlias = Callable[[Any], object]
CORE: dict[str, Way] = {
    "by key": lambda target: target.execute(update(Row).where(Row.id == 1).values(value=1)),
    "by criteria": lambda target: target.execute(update(Row).where(Row.value == 0).values(value=1)),
    "DELETE": lambda target: target.execute(delete(Row).where(Row.id == 1)),
    "all rows": lambda target: target.execute(update(Row).values(value=1)),
    "fenced_text": lambda target: target.execute(TEXT, {"id": 1}),
}
ORM: dict[str, Way] = {
    "flush": flush,
    "claim": lambda session: claim(session, Row, 1),
    "claim_all": lambda session: fencelock.claim_all(session, select(Row)),
    "gate": fencelock.gate,
    "upsert": lambda session: fencelock.upsert(session, Row, [{"id": 1, "value": 3}]),
}
UNGUARDED: dict[str, Way] = {
    "plain text": lambda target: target.execute(text(PLAIN)),
    "driver": lambda each: (each.connection() if isinstance(each, Session) else each).exec_driver_sql(PLAIN),
}
WAYS = CORE | ORM | UNGUARDED
CAUSES: dict[type[FencelockError], Callable[[], tuple[Lease, ...]]] = {
    StaleTokenError: lambda: (Lease("rows", 1),),
    UnfencedWriteError: lambda: (),
    fencelock.LockLostError: lambda: (Lease("rows", 9, time.monotonic() - 1),),
}


class Holder:
    """One that is refused for a cause, by a way."""

    def __init__(self, engine: Engine, kind: type[FencelockError], way: str) -> None:
        self.engine = engine
        self.way = way
        self.kind = UnfencedWriteError if way in UNGUARDED else kind
        self.why = rf"{WHY}.*token 1 is stale" if self.kind is StaleTokenError else WHY
        self._leases = CAUSES[kind]()

    def bound(self, target: Any) -> Any:
        if self._leases:
            bind(target, *self._leases)
        return target

    def refused(self, target: Any) -> None:
        with pytest.raises(self.kind) as caught:
            WAYS[self.way](target)
        assert type(caught.value) is self.kind
        assert caught.value.written is False

    @contextmanager
    def hears_why(self) -> Iterator[None]:
        with pytest.raises(PendingRollbackError, match=self.why):
            yield

    def stopped(self, *acts: Callable[[], object]) -> None:
        for act in acts:
            with self.hears_why():
                act()

    def work(self, target: Any, number: int) -> None:
        note(self.bound(target), number)
        self.refused(target)


def goes_on(engine: Engine, target: Any) -> None:
    """Check that what was rolled back is not committed, and that the next transaction is."""
    target.rollback()
    assert notes(engine) == []
    note(target, 9)
    target.commit()
    assert notes(engine) == [9]


def after_it(holder: Holder) -> list[int]:
    """Nothing is executed or committed until a rollback: neither once nor again, not even a read."""
    with Session(holder.engine) as session:
        acts: list[Callable[[], object]] = [
            session.commit,
            lambda: note(session, 2),
            lambda: session.scalars(select(Free)).all(),
            lambda: session.execute(update(Row).values(value=1), execution_options={"fencing_token": 9}),
            lambda: note(session.connection(), 2),
        ]
        for act in acts:
            holder.work(session, 1)
            holder.stopped(act)
            with turned_away(session, PendingRollbackError, match=WHY):
                act()
            session.expunge_all()
        holder.work(session, 1)
        holder.stopped(session.commit)
        goes_on(holder.engine, session)
    return [9]


def in_a_block(holder: Holder) -> list[int]:
    """SQLAlchemy commits at the end of `with`, and what cannot be committed raises there."""
    with holder.hears_why(), sessionmaker(holder.engine).begin() as session:
        holder.work(session, 1)
    return []


def in_a_savepoint(holder: Holder) -> list[int]:
    """The error ends the savepoint, and what was refused is rolled back with it. The rest goes on."""
    with Session(holder.engine) as session:
        note(holder.bound(session), 1)
        with suppress(ZeroDivisionError), session.begin_nested():
            holder.work(session, 2)
            raise ZeroDivisionError
        note(session, 3)
        session.commit()
    return [1, 3]


def in_a_savepoint_that_catches_it(holder: Holder) -> list[int]:
    """The savepoint is not released: its end says why, and so does all that is executed in it."""
    with Session(holder.engine) as session:
        note(holder.bound(session), 1)
        with holder.hears_why(), session.begin_nested():
            holder.work(session, 2)
            holder.stopped(lambda: note(session, 4))
        note(session, 3)
        session.commit()
    return [1, 3]


def by_a_session_that_has_joined(holder: Holder) -> list[int]:
    """The transaction's owner hears why; or the session's own rollback ends it, as without a fence."""
    modes: tuple[Any, ...] = ("conditional_savepoint", "rollback_only", "control_fully")
    for mode, rolls_back in product(modes, (False, True)):
        with (
            holder.engine.connect() as connection,
            Session(connection, join_transaction_mode=mode) as session,
        ):
            note(connection, 1)
            holder.refused(holder.bound(session))
            holder.stopped(lambda: session.scalars(select(Free)).all())
            if not rolls_back and mode != "control_fully":
                holder.stopped(lambda: note(connection, 2), connection.commit)
            session.rollback()
            if not rolls_back:
                connection.rollback()
            note(session, 3)
            session.commit()
            connection.rollback()
        with holder.engine.begin() as connection:
            connection.execute(delete(Free).where(Free.id == 3))
        assert notes(holder.engine) == []
    return []


def by_a_session_that_has_joined_by_a_savepoint(holder: Holder) -> list[int]:
    """The transaction that it has joined goes on, and may be committed."""
    mode: Any = "create_savepoint"
    with holder.engine.begin() as connection, Session(connection, join_transaction_mode=mode) as session:
        note(connection, 1)
        holder.work(session, 2)
        holder.stopped(session.commit)
        session.rollback()
        note(session, 3)
        session.commit()
    return [1, 3]


def beside_another_session(holder: Holder) -> list[int]:
    """It is one transaction: what the one was refused, the other cannot commit."""
    with holder.engine.connect() as connection:
        one, other = (holder.bound(Session(connection)) for _ in range(2))
        note(connection, 1)
        note(other, 2)
        holder.refused(one)
        holder.stopped(lambda: note(other, 4), connection.commit)
        connection.rollback()
        one.close()
        other.close()
    return []


def after_that_of_a_connection(holder: Holder) -> list[int]:
    """A transaction that began by itself, or was begun, ends with a rollback."""
    for begin in (False, True):
        with holder.engine.connect() as connection:
            if begin:
                connection.begin()
            holder.work(connection, 1)
            acts: tuple[Callable[[], object], ...] = (connection.commit, lambda: note(connection, 2))
            holder.stopped(acts[1], connection.begin_nested, acts[0])
            for act in acts:
                with pytest.raises(PendingRollbackError, match=WHY):
                    act()
            connection.rollback()
            assert notes(holder.engine) == []
            connection.execute(select(Free.id))
            connection.commit()
    return []


def in_a_block_of_a_connection(holder: Holder) -> list[int]:
    """`engine.begin()` raises at its end, and the error that ends a block stays what it was."""
    with holder.hears_why(), holder.engine.begin() as connection:
        holder.work(connection, 1)
    with suppress(ZeroDivisionError), holder.engine.begin() as connection:
        holder.refused(holder.bound(connection))
        raise ZeroDivisionError
    with holder.engine.connect() as connection:
        holder.refused(holder.bound(connection))  # to close it is to want nothing committed
    return []


def in_the_inner_savepoint_of_a_connection(holder: Holder) -> list[int]:
    with holder.engine.begin() as connection:
        note(holder.bound(connection), 1)
        outer = connection.begin_nested()
        note(connection, 2)
        inner = connection.begin_nested()
        holder.work(connection, 3)
        holder.stopped(lambda: note(connection, 4))
        with turned_away(inner, PendingRollbackError, match=f"savepoint.*{holder.why}"):
            inner.commit()
        outer.commit()
    return [1, 2]


def in_a_savepoint_that_ends_with_all(holder: Holder) -> list[int]:
    """Nothing of the refusal is left on the connection."""
    with holder.engine.connect() as connection:
        note(holder.bound(connection), 1)
        connection.begin_nested()
        holder.refused(connection)
        goes_on(holder.engine, connection)
    return [9]


End: TypeAlias = Callable[[Holder], list[int]]
GOING_ON: list[End] = [after_it, in_a_savepoint, by_a_session_that_has_joined_by_a_savepoint]
#: A flush that fails is rolled back by SQLAlchemy itself, as far as its session has begun the transaction.
BESIDE_FLUSHES: list[End] = [
    *(in_a_block, in_a_savepoint_that_catches_it),
    *(by_a_session_that_has_joined, beside_another_session),
]
OF_CONNECTIONS: list[End] = [
    *(after_that_of_a_connection, in_a_block_of_a_connection),
    *(in_the_inner_savepoint_of_a_connection, in_a_savepoint_that_ends_with_all),
]
ENDS = GOING_ON + BESIDE_FLUSHES + OF_CONNECTIONS
#: One of each kind that is refused in another place of the guard: these meet every end.
KINDS = ("by key", "flush", "claim", "plain text")
PAIRS = [
    (way, end)
    for way, end in product(WAYS, ENDS)
    if (way in KINDS or end in {after_it, in_a_savepoint})
    and not (way in ORM and end in OF_CONNECTIONS)
    and not (way == "flush" and end in BESIDE_FLUSHES)
]
TRIPLES: list[tuple[str, type[FencelockError], str, End]] = [
    *(("sqlite", cause, *pair) for pair, cause in zip(PAIRS, cycle(CAUSES), strict=False)),
    *(("postgresql", StaleTokenError, way, end) for way, end in zip(cycle(CORE), ENDS, strict=False)),
    *(("mariadb", StaleTokenError, way, end) for way, end in zip(cycle(CORE), ENDS, strict=False)),
]


@pytest.mark.parametrize(("shared_url", "kind", "way", "end"), TRIPLES, indirect=["shared_url"])
def test_what_is_refused_can_only_be_rolled_back(
    engine: Engine, kind: type[FencelockError], way: str, end: End
) -> None:
    assert end(Holder(engine, kind, way)) == notes(engine)


@pytest.mark.parametrize("gone", [False, True], ids=["written", "deleted"])
def test_a_row_that_has_changed_since_it_was_read_is_refused_alike(engine: Engine, *, gone: bool) -> None:
    with holding(engine, Lease("rows", 9), expire_on_commit=False) as session:
        row = session.get_one(Row, 1)
        session.commit()
        with holding(engine, Lease("rows", 7)) as other, other.begin():
            other.execute(delete(Row) if gone else update(Row).values(value=4))
        note(session, 1)
        row.value = 5
        with pytest.raises(fencelock.StaleReadError):
            session.flush()
        with pytest.raises(PendingRollbackError, match=WHY):
            session.commit()
        goes_on(engine, session)


@pytest.mark.parametrize(
    ("shared_url", "way"),
    [*(("postgresql", way) for way in ("by key", "fenced_text", *ORM)), ("mariadb", "by key")],
    indirect=["shared_url"],
)
def test_a_lease_in_doubt_leaves_open_whether_anything_is_written(
    engine: Engine, door: Door, way: str
) -> None:
    lease = Lease("rows", 9)
    with holding(door.engine, lease) as lost:
        claim(lost, Row, 1)
        with pytest.raises(DBAPIError):
            lost.commit()
    door.let_through()
    with holding(create_engine(engine.url, poolclass=NullPool), lease) as session:
        note(session, 1)
        with pytest.raises(fencelock.CommitInDoubtError) as caught:
            WAYS[way](session)
        assert caught.value.written is None
        with pytest.raises(PendingRollbackError, match=WHY):
            session.commit()
        goes_on(engine, session)


@on_sqlite_alone
def test_a_session_with_several_databases_commits_none_of_them(engine: Engine, tmp_path: Any) -> None:
    second = create_engine(f"sqlite:///{tmp_path}/second.sqlite")
    Free.__table__.create(second)  # type: ignore[attr-defined]
    holder = Holder(engine, StaleTokenError, "by key")
    with Session(binds={Row: engine, Free: second}) as session:
        holder.work(session, 1)
        holder.stopped(lambda: note(session, 2), session.commit)
    assert notes(second) == []
    second.dispose()


@on_postgresql_alone
def test_a_first_phase_is_not_sent_either(engine: Engine) -> None:
    """Neither PREPARE nor COMMIT, of a session and of a connection."""
    holder = Holder(engine, StaleTokenError, "by key")
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        holder.work(connection, 1)
        holder.stopped(transaction.prepare, transaction.commit)
        transaction.rollback()
    with Session(engine, twophase=True) as session:
        note(holder.bound(session), 1)
        holder.refused(session.connection())
        holder.stopped(session.commit)
        session.rollback()
    assert notes(engine) == []


def test_what_a_trigger_refuses_is_refused_alike(engine: Engine) -> None:
    with engine.begin() as connection:
        for made in triggers.create(Row, engine.dialect.name):
            connection.execute(made)
    try:
        with engine.connect() as connection:
            note(connection, 1)
            lower = update(Row).where(Row.id == 1).values(last_fencing_token=1)
            with pytest.raises(fencelock.FenceError):
                connection.execute(lower, execution_options={"fencelock": "bypass"})
            why = r"is stale.*refused by the table's trigger"
            with turned_away(connection, PendingRollbackError, match=why):
                connection.commit()
    finally:
        with engine.begin() as connection:
            for dropped in triggers.drop(Row, engine.dialect.name):
                connection.execute(dropped)
    assert notes(engine) == []


def test_coroutines_roll_back_as_well(engine: Engine, for_asyncio: ForAsyncio) -> None:
    async def main(target: AsyncEngine, holder: Holder) -> None:
        async with AsyncSession(target) as session:
            await session.run_sync(note, 1)
            with holder.hears_why():
                async with session.begin_nested():
                    await session.run_sync(lambda each: holder.refused(holder.bound(each)))
            await session.run_sync(note, 3)
            await session.run_sync(holder.refused)
            with holder.hears_why():
                await session.commit()
            await session.rollback()
        if holder.way in CORE:
            with holder.hears_why():
                async with target.begin() as connection:
                    await connection.run_sync(lambda each: holder.work(each, 1))
        await target.dispose()

    for way in ("by key", "claim", "upsert"):
        asyncio.run(main(for_asyncio(engine), Holder(engine, StaleTokenError, way)))
    assert notes(engine) == []


@pytest.mark.parametrize("within", [Session.begin, Session.begin_nested], ids=["transaction", "savepoint"])
@pytest.mark.parametrize(
    ("shared_url", "way"),
    [*(("sqlite", way) for way in KINDS), ("postgresql", "claim"), ("mariadb", "claim")],
    indirect=["shared_url"],
)
def test_a_session_that_is_thrown_away_keeps_no_connection(engine: Engine, way: str, within: Act) -> None:
    own = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=1)
    gc.freeze()  # objects from before need not be looked through
    for _ in range(2):
        session = Session(own)
        within(session)
        bind(session, Lease("rows", 1))
        with pytest.raises((StaleTokenError, UnfencedWriteError)):
            WAYS[way](session)
        del session
        gc.collect()
        assert isinstance(own.pool, sa.QueuePool)
        assert own.pool.checkedout() == 0
    gc.unfreeze()
    own.dispose()
