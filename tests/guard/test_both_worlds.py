"""Functions of a session take a `Session`, or an `AsyncSession` with `await`, also behind a scoped facade."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import fencelock
from fencelock import Lease, StaleTokenError, bind, claim, claim_all, upsert
from tests.guard.marks import ForAsyncio, named, on_sqlite_alone, one_driver
from tests.guard.models import RECEIPTS, Order, fenced, fences

ROWS: dict[Any, Any] = {**fenced(Order, 1), fences: [], RECEIPTS: []}
CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool]]] = {
    "claim": (lambda s: claim(s, Order, 1), lambda found: isinstance(found, Order)),
    "claim, by name": (
        lambda s: claim(session=s, model=Order, identity=1, nowait=False),
        lambda found: isinstance(found, Order),
    ),
    "claim_all": (lambda s: claim_all(s, select(Order)), lambda found: len(found) == 1),
    "gate": (lambda s: fencelock.gate(s, "order:1"), lambda found: found is None),
    "once": (
        lambda s: fencelock.once(s, "k"),
        lambda found: isinstance(found, fencelock.Receipt) and not found.done,
    ),
    "upsert": (lambda s: upsert(s, Order, [{"id": 1, "status": "paid"}]), lambda found: found is None),
    "prune_receipts": (lambda s: fencelock.prune_receipts(s, older_than=0), lambda found: found == 0),
}
EACH = pytest.mark.parametrize(("call", "is_right"), **named(CALLS))
#: Those that compare a fence.
REFUSED = [CALLS[name][0] for name in ("claim", "claim, by name", "claim_all", "upsert")]


@on_sqlite_alone
@EACH
def test_a_session_gives_the_result(engine: Engine, call: Any, is_right: Any) -> None:
    scoped = scoped_session(sessionmaker(engine))
    with Session(engine) as session:
        for each in (session, scoped):
            bind(each, Lease("order:1", 6))
            assert is_right(call(each))
            each.rollback()
            bind(each, Lease("order:1", 4))
            if call in REFUSED:
                with pytest.raises(StaleTokenError):
                    call(each)
                with pytest.raises(PendingRollbackError):
                    each.commit()
            each.rollback()
    scoped.remove()


@on_sqlite_alone
@one_driver
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
                bind(each, Lease("order:1", 4))
                late = call(each)
                with pytest.raises(StaleTokenError) if call in REFUSED else nullcontext():
                    await late
                await each.rollback()
        await scoped.remove()
        await its.dispose()

    asyncio.run(main())


@EACH
def test_python_warns_of_a_call_that_is_never_awaited(call: Any, is_right: Any) -> None:
    assert is_right
    session = AsyncSession()
    with pytest.warns(RuntimeWarning, match="never awaited"):
        call(session)
