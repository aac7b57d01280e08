"""Functions of a session take a `Session`, or an `AsyncSession` with `await`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from fencelock import (
    FencedModel,
    Lease,
    Receipt,
    StaleTokenError,
    bind,
    claim,
    claim_all,
    fence_table,
    gate,
    once,
    prune_receipts,
    receipt_table,
    upsert,
)
from tests.guard.rows import ForAsyncio, on_sqlite_alone


class Base(DeclarativeBase): ...


class Order(FencedModel, Base):
    __tablename__ = "bw_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str] = mapped_column(default="new")


fence_table(Base.metadata)
receipt_table(Base.metadata)
ROWS: dict[Any, Any] = {Order: {"id": 1, "last_fencing_token": 5}}
CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool]]] = {
    "claim": (lambda s: claim(s, Order, 1), lambda found: isinstance(found, Order)),
    "claim, by name": (
        lambda s: claim(session=s, model=Order, identity=1, nowait=False),
        lambda found: isinstance(found, Order),
    ),
    "claim_all": (lambda s: claim_all(s, select(Order)), lambda found: len(found) == 1),
    "gate": (lambda s: gate(s, "order:1"), lambda found: found is None),
    "once": (lambda s: once(s, "k"), lambda found: isinstance(found, Receipt) and not found.done),
    "upsert": (lambda s: upsert(s, Order, [{"id": 1, "status": "paid"}]), lambda found: found is None),
    "prune_receipts": (lambda s: prune_receipts(s, older_than=0), lambda found: found == 0),
}
EACH = pytest.mark.parametrize(("call", "is_right"), CALLS.values(), ids=CALLS)


@on_sqlite_alone
@EACH
def test_a_session_gives_the_result(engine: Engine, call: Any, is_right: Any) -> None:
    scoped = scoped_session(sessionmaker(engine))
    with Session(engine) as session:
        for each in (session, scoped):
            bind(each, Lease("order:1", 6))
            assert is_right(call(each))
            each.rollback()
    scoped.remove()


@on_sqlite_alone
@pytest.mark.parametrize("for_asyncio", [0], indirect=True)
@EACH
def test_an_async_session_gives_a_coroutine(
    engine: Engine, for_asyncio: ForAsyncio, call: Any, is_right: Any
) -> None:
    async def main() -> None:
        its = for_asyncio(engine)
        scoped = async_scoped_session(async_sessionmaker(its), scopefunc=asyncio.current_task)
        async with AsyncSession(its) as session:
            for each in (session, scoped):
                bind(each, Lease("order:1", 6))
                coming = call(each)
                assert inspect.iscoroutine(coming)
                assert is_right(await coming)
                await each.rollback()
        await scoped.remove()
        await its.dispose()

    asyncio.run(main())


@on_sqlite_alone
@pytest.mark.parametrize("for_asyncio", [0], indirect=True)
def test_a_refusal_is_raised_by_await(engine: Engine, for_asyncio: ForAsyncio) -> None:
    async def main() -> None:
        its = for_asyncio(engine)
        async with AsyncSession(its) as session:
            bind(session, Lease("order:1", 4))
            with pytest.raises(StaleTokenError):
                await claim(session, Order, 1)
        await its.dispose()

    asyncio.run(main())


@EACH
def test_python_warns_of_a_call_that_is_never_awaited(call: Any, is_right: Any) -> None:
    assert is_right
    session = AsyncSession()
    with pytest.warns(RuntimeWarning, match="never awaited"):
        call(session)
