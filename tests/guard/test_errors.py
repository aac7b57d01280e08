"""Each mistake in the use of the guard gets an error that says what to do."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import Engine, delete, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fencelock
from fencelock import Lease, UnfencedWriteError, bind, claim, claim_all, gate, upsert
from tests.guard.rows import Act, InMemory, holding, turned_away


class Base(DeclarativeBase): ...


class Row(fencelock.FencedModel, Base):
    __tablename__ = "er_rows"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[int] = mapped_column(default=0)


fencelock.fence_table(Base.metadata)


@pytest.fixture
def engine(in_memory: InMemory) -> Engine:
    return in_memory(Base.metadata)


def test_a_fenced_statement_where_nothing_is_guarded(engine: Engine) -> None:
    """With the engine's, the connection's and the statement's own option."""
    statement = update(Row).where(Row.id == 1).values(value=1)
    bypassing = engine.execution_options(fencelock="bypass")
    given = {"fencing_token": 5}
    with bypassing.connect() as connection, pytest.raises(UnfencedWriteError, match="bypass"):
        connection.execute(statement, execution_options=given)
    with Session(bypassing) as session, pytest.raises(UnfencedWriteError, match="bypass"):
        session.execute(delete(Row), execution_options=given)
    with Session(engine) as session, pytest.raises(UnfencedWriteError, match="bypass"):
        session.execute(statement.execution_options(fencelock="bypass"), execution_options=given)


def test_a_gate_of_a_session_with_several_databases(engine: Engine) -> None:
    """It is told which, as `Session.connection` is."""
    with Session(binds={Row: engine}) as session:
        bind(session, Lease("rows", 5))
        with pytest.raises(TypeError, match="bind_arguments"):
            gate(session)
        gate(session, bind_arguments={"mapper": Row})
        session.commit()


def test_a_gate_for_coroutines_is_told_as_well() -> None:
    async def main() -> None:
        aengine = create_async_engine("sqlite+aiosqlite://")
        async with aengine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with AsyncSession(binds={Row: aengine}) as session:
            bind(session, Lease("rows", 5))
            await fencelock.gate(session, "rows", bind_arguments={"mapper": Row})
        await aengine.dispose()

    asyncio.run(main())


def change(session: Session) -> None:
    session.get_one(Row, 1).value = 1
    session.flush()


NULL_WRITES: dict[str, Act] = {
    "unit of work": change,
    "by key": lambda session: session.execute(update(Row).where(Row.id == 1).values(value=1)),
    "by criteria": lambda session: session.execute(update(Row).where(Row.value == 0).values(value=1)),
    "DELETE": lambda session: session.execute(delete(Row)),
    "claim": lambda session: claim(session, Row, 1),
    "claim_all": lambda session: claim_all(session, select(Row)),
    "upsert": lambda session: upsert(session, Row, [{"id": 1, "value": 1}]),
}


@pytest.mark.parametrize("way", NULL_WRITES)
def test_a_row_without_a_fence(shared_engine: Engine, way: str) -> None:
    """Its column was made without NOT NULL: the condition is never true, and what to do about it is said."""
    with shared_engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS er_rows"), execution_options={"fencelock": "bypass"})
        Row.__table__.create(connection)  # type: ignore[attr-defined]
        connection.execute(text("DROP TABLE er_rows"), execution_options={"fencelock": "bypass"})
        connection.execute(
            text(
                "CREATE TABLE er_rows (id INTEGER PRIMARY KEY, value INTEGER, last_fencing_token BIGINT,"
                " last_write_id BIGINT DEFAULT 0)"
            )
        )
        connection.execute(
            text("INSERT INTO er_rows (id, value) VALUES (1, 0)"), execution_options={"fencelock": "bypass"}
        )
    with holding(shared_engine, Lease("rows", 5)) as session:
        with turned_away(session, fencelock.FenceError, match=r"NULL.*SET last_fencing_token = 0"):
            NULL_WRITES[way](session)
        assert session.scalar(text("SELECT value FROM er_rows")) == 0


@pytest.mark.parametrize(
    ("token", "fence", "is_lost"),
    [
        (5, 6, False),
        (1_795_784_627_256, 1_795_999_999_999, False),
        (5, 1 << 44, True),
        (1, 1_795_784_627_256, True),
        ((2 << 44) + 7, (3 << 44) + 1, True),
        (5, None, False),
        (0, 1 << 44, False),
    ],
)
def test_a_fence_that_no_new_token_reaches(token: int, fence: int | None, *, is_lost: bool) -> None:
    """What grants the locks has begun again: to acquire again is no advice."""
    assert (
        "fencelock init --after-loss" in str(fencelock.StaleTokenError("orders", (1,), token, fence))
    ) is is_lost
