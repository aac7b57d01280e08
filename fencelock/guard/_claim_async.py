"""Claims for coroutines: `claim`, `claim_all` and `gate` on the session behind an `AsyncSession`.

Apart from `claim` because an `AsyncSession` needs greenlet, which few programs have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from fencelock.guard.claim import claim, claim_all
from fencelock.guard.gate import gate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from sqlalchemy import Select
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    _Session: TypeAlias = AsyncSession | async_scoped_session[Any]
    _Bind: TypeAlias = Mapping[str, Any] | None

T = TypeVar("T")


@overload
async def claim_async(
    session: _Session, model: type[T], identity: object, *, nowait: bool = ..., bind_arguments: _Bind = ...
) -> T: ...
@overload
async def claim_async(
    session: _Session, model: type[T], identity: object, *, skip_locked: bool, bind_arguments: _Bind = ...
) -> T | None: ...
async def claim_async(session: _Session, model: type[T], identity: object, **options: Any) -> T | None:
    """Raise a row's fence, lock the row, and return it freshly loaded: `claim`, for an `AsyncSession`.

    It takes the same arguments, makes the same promises and raises the same errors. Other tasks run while
    the database works. As everywhere with asyncio, relationships that are not loaded cannot be looked at
    afterwards without `await`.

    Example:
        ```python
        async with fenced_lock("order:1"), AsyncSession(engine) as session:
            order = await claim_async(session, Order, 1)
            order.status = "paid"
            await session.commit()
        ```
    """
    return await _of_task(session).run_sync(lambda blocking: claim(blocking, model, identity, **options))


async def claim_all_async(
    session: _Session, statement: Select[Any], *, bind_arguments: _Bind = None
) -> list[Any]:
    """Claim every row that a query finds, and return them: `claim_all`, for an `AsyncSession`.

    Example:
        ```python
        items = await claim_all_async(session, select(Item).where(Item.order_id == 1))
        ```
    """
    return await _of_task(session).run_sync(claim_all, statement, bind_arguments=bind_arguments)


async def gate_async(session: _Session, resource: str | None = None, *, bind_arguments: _Bind = None) -> None:
    """Claim the resource's own row in the fence table: `gate`, for an `AsyncSession`.

    Example:
        ```python
        await gate_async(session, "order:1")
        session.add(Item(order_id=1))
        ```
    """
    await _of_task(session).run_sync(gate, resource, bind_arguments=bind_arguments)


def _of_task(session: _Session) -> AsyncSession:
    """Return the session behind the facade for scoped ones."""
    found: AsyncSession = session.registry() if hasattr(session, "registry") else session
    return found
