"""What the fence has refused some of can only be rolled back: nobody commits half of his work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, delete, insert, select, update
from sqlalchemy.exc import InvalidRequestError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from fencelock.errors import FenceError, StaleTokenError
from fencelock.guard import FencedModel, bind, claim, execute_fenced, fenced_update, upsert
from fencelock.guard.triggers import create, drop
from fencelock.lease import Lease

OLD = Lease("order:1", 1)
OTHER = Lease("order:2", 7)
FENCE = 5
WHY = r"rollback\(\).*token 1 is stale"


class Base(DeclarativeBase):
    """The models of this file."""


class Order(FencedModel, Base):
    """Guarded row by row; a newer holder has fenced the first."""

    __tablename__ = "rt_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[int] = mapped_column(default=0)


class Entry(Base):
    """Not fenced: the other half of the work."""

    __tablename__ = "rt_entries"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


@pytest.fixture
def engine(shared_engine: Engine, _tables: None) -> Engine:
    """An engine on two orders, the first of which a newer holder has fenced, and on no entries."""
    with shared_engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(delete(Order))
        connection.execute(delete(Entry))
        fence = {"last_fencing_token": FENCE}
        connection.execute(insert(Order), [{"id": 1, "value": 0} | fence, {"id": 2, "value": 0} | fence])
    return shared_engine


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """A session of the old holder, who has read the order before the newer one came."""
    with Session(engine, expire_on_commit=False) as made:
        made.get(Order, 1)
        made.commit()
        bind(made, OLD, OTHER)
        yield made


def entries(engine: Engine) -> list[int]:
    """Return what has been committed."""
    with engine.connect() as connection:
        return list(connection.scalars(select(Entry.id).order_by(Entry.id)))


def flush(session: Session) -> None:
    """Write it by the unit of work."""
    session.get_one(Order, 1).value = 5
    session.flush()


def write(session: Session) -> None:
    """Write it by a statement."""
    session.execute(
        update(Order).where(Order.id == 1).values(value=1).execution_options(synchronize_session=False)
    )


REFUSED: dict[str, Callable[[Session], object]] = {
    "statement": write,
    "criteria": lambda session: execute_fenced(session, fenced_update(Order).values(value=1), token=1),
    "flush": flush,
    "claim": lambda session: claim(session, Order, 1),
    "upsert": lambda session: upsert(session, Order, [{"id": 1, "value": 3}]),
}
refused = pytest.mark.parametrize("refuse", REFUSED.values(), ids=REFUSED)
#: A flush that fails is rolled back by SQLAlchemy itself, as far as its session has begun the transaction.
refused_beside_flushes = pytest.mark.parametrize(
    "refuse",
    [each for each in REFUSED.values() if each is not flush],
    ids=[each for each in REFUSED if each != "flush"],
)

GOING_ON: dict[str, Callable[[Session], object]] = {
    "commit": lambda session: session.commit(),
    "add": lambda session: session.execute(insert(Entry), {"id": 2}),
    "read": lambda session: session.scalars(select(Entry)).all(),
    "write": lambda session: execute_fenced(session, fenced_update(Order).values(value=1), token=9),
    "Core": lambda session: session.connection().execute(insert(Entry), {"id": 2}),
}


@refused
@pytest.mark.parametrize("go_on", GOING_ON.values(), ids=GOING_ON)
def test_a_session_goes_on_only_after_a_rollback(
    engine: Engine,
    session: Session,
    refuse: Callable[[Session], object],
    go_on: Callable[[Session], object],
) -> None:
    """Statement, flush and claim: nothing is committed until somebody has rolled back; then all is well."""
    session.add(Entry(id=1))
    session.flush()
    with pytest.raises(StaleTokenError):
        refuse(session)
    with pytest.raises(PendingRollbackError, match=WHY):
        go_on(session)
    with pytest.raises(InvalidRequestError):
        go_on(session)
    session.rollback()
    assert entries(engine) == []
    session.add(Entry(id=3))
    session.commit()
    assert entries(engine) == [3]


@refused_beside_flushes
def test_a_block_that_catches_it_does_not_end_without_a_word(
    engine: Engine, refuse: Callable[[Session], object]
) -> None:
    """SQLAlchemy commits at the end of `with`; what cannot be committed raises there."""
    made = sessionmaker(engine)
    with pytest.raises(PendingRollbackError, match=WHY), made.begin() as session:  # noqa: PT012
        session.get(Order, 1)
        bind(session, OLD, OTHER)
        session.add(Entry(id=1))
        session.flush()
        with suppress(StaleTokenError):
            refuse(session)
    assert entries(engine) == []


@refused
def test_a_savepoint_takes_only_itself_along(
    engine: Engine, session: Session, refuse: Callable[[Session], object]
) -> None:
    """What was refused inside it is rolled back with it, and the outer transaction goes on."""
    session.add(Entry(id=1))
    session.flush()
    with pytest.raises(StaleTokenError), session.begin_nested():  # noqa: PT012
        session.add(Entry(id=2))
        session.flush()
        refuse(session)
    session.add(Entry(id=3))
    session.commit()
    assert entries(engine) == [1, 3]


@refused_beside_flushes
def test_a_savepoint_that_catches_it_is_not_released(
    engine: Engine, session: Session, refuse: Callable[[Session], object]
) -> None:
    """The end of its block says why; so does all that is executed in it."""
    session.add(Entry(id=1))
    session.flush()
    with pytest.raises(PendingRollbackError, match=WHY), session.begin_nested():  # noqa: PT012
        session.add(Entry(id=2))
        session.flush()
        with suppress(StaleTokenError):
            refuse(session)
        with pytest.raises(PendingRollbackError, match=WHY):
            session.execute(insert(Entry), {"id": 4})
    session.add(Entry(id=3))
    session.commit()
    assert entries(engine) == [1, 3]


def stale(connection: Connection) -> None:
    """Be refused, and do not mind."""
    with pytest.raises(StaleTokenError):
        execute_fenced(connection, fenced_update(Order).where(Order.id == 1).values(value=1), token=1)


def test_a_connection_goes_on_only_after_a_rollback(engine: Engine) -> None:
    """A transaction that began by itself, and one that was begun."""
    for begin in (False, True):
        with engine.connect() as connection:
            if begin:
                connection.begin()
            connection.execute(insert(Entry), {"id": 1})
            stale(connection)
            for go_on in (
                lambda: connection.execute(insert(Entry), {"id": 2}),
                connection.begin_nested,
                connection.commit,
            ):
                with pytest.raises(PendingRollbackError, match=WHY):
                    go_on()
            with pytest.raises(InvalidRequestError):
                connection.execute(insert(Entry), {"id": 2})
            connection.rollback()
            assert entries(engine) == []
            connection.execute(select(Entry.id))
            connection.commit()


def test_a_block_of_a_connection_does_not_end_without_a_word(engine: Engine) -> None:
    """`engine.begin()` commits at its end, where it may; the error that ends a block stays what it was."""
    with pytest.raises(PendingRollbackError, match=WHY), engine.begin() as connection:  # noqa: PT012
        connection.execute(insert(Entry), {"id": 1})
        stale(connection)
    with pytest.raises(ZeroDivisionError), engine.begin() as connection:  # noqa: PT012
        stale(connection)
        raise ZeroDivisionError
    with engine.connect() as connection:
        stale(connection)  # who closes it wants nothing committed
    assert entries(engine) == []


def test_a_savepoint_of_a_connection_takes_only_itself_along(engine: Engine) -> None:
    """Also the outer savepoint goes on, and only the innermost one is lost."""
    with engine.begin() as connection:
        connection.execute(insert(Entry), {"id": 1})
        outer = connection.begin_nested()
        connection.execute(insert(Entry), {"id": 2})
        inner = connection.begin_nested()
        connection.execute(insert(Entry), {"id": 3})
        stale(connection)
        with pytest.raises(PendingRollbackError, match=WHY):
            connection.execute(insert(Entry), {"id": 4})
        with pytest.raises(PendingRollbackError, match=f"savepoint.*{WHY}"):
            inner.commit()
        inner.rollback()
        outer.commit()
    assert entries(engine) == [1, 2]


def test_a_rollback_of_all_ends_a_refused_savepoint(engine: Engine) -> None:
    """Nothing of it is left on the connection."""
    with engine.connect() as connection:
        connection.execute(insert(Entry), {"id": 1})
        connection.begin_nested()
        stale(connection)
        connection.rollback()
        connection.execute(insert(Entry), {"id": 2})
        connection.commit()
    assert entries(engine) == [2]


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "control_fully"])
@refused_beside_flushes
def test_a_transaction_that_a_session_has_joined_is_not_committed_either(
    engine: Engine, refuse: Callable[[Session], object], mode: Any
) -> None:
    """Whoever has begun it hears why; or the session's own rollback ends it, as without a fence."""
    for rolls_back in (False, True):
        with engine.connect() as connection, Session(connection, join_transaction_mode=mode) as session:
            connection.execute(insert(Entry), {"id": 1})
            session.get(Order, 1)
            bind(session, OLD, OTHER)
            with pytest.raises(StaleTokenError):
                refuse(session)
            with pytest.raises(PendingRollbackError, match=WHY):
                session.scalars(select(Entry)).all()
            if rolls_back or mode == "control_fully":
                session.rollback()
            else:
                with pytest.raises(PendingRollbackError, match=WHY):
                    connection.execute(insert(Entry), {"id": 2})
                with pytest.raises(PendingRollbackError, match=WHY):
                    connection.commit()
                session.rollback()
                connection.rollback()
            session.add(Entry(id=3))
            session.commit()
            connection.rollback()
        with engine.begin() as connection:
            connection.execute(delete(Entry).where(Entry.id == 3))
        assert entries(engine) == []


@refused
def test_a_session_that_joins_by_a_savepoint_takes_only_that_along(
    engine: Engine, refuse: Callable[[Session], object]
) -> None:
    """The transaction that it has joined goes on, and may be committed."""
    with (
        engine.begin() as connection,
        Session(connection, join_transaction_mode="create_savepoint") as session,
    ):
        connection.execute(insert(Entry), {"id": 1})
        session.get(Order, 1)
        bind(session, OLD, OTHER)
        session.add(Entry(id=2))
        session.flush()
        with pytest.raises(StaleTokenError):
            refuse(session)
        with pytest.raises(PendingRollbackError, match=WHY):
            session.commit()
        session.rollback()
        session.add(Entry(id=3))
        session.commit()
    assert entries(engine) == [1, 3]


@refused_beside_flushes
def test_each_session_of_a_connection_hears_of_it(
    engine: Engine, refuse: Callable[[Session], object]
) -> None:
    """It is one transaction: what the one was refused, the other cannot commit."""
    with engine.connect() as connection:
        connection.execute(insert(Entry), {"id": 1})
        one, other = Session(connection), Session(connection)
        one.get(Order, 1)
        for each in (one, other):
            bind(each, OLD, OTHER)
        other.add(Entry(id=2))
        other.flush()
        with pytest.raises(StaleTokenError):
            refuse(one)
        with pytest.raises(PendingRollbackError, match=WHY):
            other.execute(insert(Entry), {"id": 4})
        with pytest.raises(PendingRollbackError, match=WHY):
            connection.commit()
        connection.rollback()
        one.close()
        other.close()
    assert entries(engine) == []


def test_a_session_with_several_databases_commits_none_of_them(engine: Engine, tmp_path: Any) -> None:
    """A refusal in one of them is one in its transaction."""
    second = create_engine(f"sqlite:///{tmp_path}/second.sqlite")
    Base.metadata.create_all(second)
    with Session(binds={Order: engine, Entry: second}) as session:
        session.get(Order, 1)
        bind(session, OLD)
        session.add(Entry(id=1))
        session.flush()
        with pytest.raises(StaleTokenError):
            write(session)
        with pytest.raises(PendingRollbackError, match=WHY):
            session.commit()
    assert entries(second) == []
    second.dispose()


def test_a_first_phase_is_not_sent_either(postgres: Any) -> None:
    """Neither PREPARE nor COMMIT, of a session and of a connection."""
    url = postgres.create_database()
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(insert(Order), {"id": 1, "value": 0, "last_fencing_token": FENCE})
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        connection.execute(insert(Entry), {"id": 1})
        stale(connection)
        with pytest.raises(PendingRollbackError, match=WHY):
            transaction.prepare()
        with pytest.raises(PendingRollbackError, match=WHY):
            transaction.commit()
        transaction.rollback()
    with Session(engine, twophase=True) as session:
        session.add(Entry(id=1))
        session.flush()
        stale(session.connection())
        with pytest.raises(PendingRollbackError, match=WHY):
            session.commit()
        session.rollback()
    assert entries(engine) == []
    engine.dispose()
    postgres.drop_database(url)


def test_a_trigger_refuses_no_less(engine: Engine) -> None:
    """What only the trigger sees is refused like all else."""
    with engine.begin() as connection:
        for made in create(Order, engine.dialect.name):
            connection.execute(made)
    try:
        with engine.connect() as connection:
            connection.execute(insert(Entry), {"id": 1})
            lower = update(Order).where(Order.id == 1).values(last_fencing_token=1)
            with pytest.raises(FenceError):
                connection.execute(lower, execution_options={"fencelock": "bypass"})
            with pytest.raises(PendingRollbackError, match=r"is stale.*refused by the table's trigger"):
                connection.commit()
            connection.rollback()
    finally:
        with engine.begin() as connection:
            for dropped in drop(Order, engine.dialect.name):
                connection.execute(dropped)
    assert entries(engine) == []


@refused_beside_flushes
def test_coroutines_roll_back_as_well(
    engine: Engine, for_asyncio: Callable[[Engine], AsyncEngine], refuse: Callable[[Session], object]
) -> None:
    """Sessions and connections, savepoints too."""

    async def main(target: AsyncEngine) -> None:
        async with AsyncSession(target) as session:
            await session.get(Order, 1)
            bind(session, OLD, OTHER)
            session.add(Entry(id=1))
            await session.flush()
            with pytest.raises(PendingRollbackError, match=WHY):  # noqa: PT012
                async with session.begin_nested():
                    with suppress(StaleTokenError):
                        await session.run_sync(refuse)
            session.add(Entry(id=3))
            await session.flush()
            with pytest.raises(StaleTokenError):
                await session.run_sync(refuse)
            with pytest.raises(PendingRollbackError, match=WHY):
                await session.commit()
            await session.rollback()
        with pytest.raises(PendingRollbackError, match=WHY):  # noqa: PT012
            async with target.begin() as connection:
                await connection.execute(insert(Entry), {"id": 1})
                await connection.run_sync(stale)
        await target.dispose()

    asyncio.run(main(for_asyncio(engine)))
    assert entries(engine) == []
