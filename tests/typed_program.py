"""A small program of a user who runs mypy --strict: every public name, used as the documentation says.

Nobody runs it. `test_typing.py` has it checked, outside of this project's own settings.
"""

# ruff: noqa: T201 - programs print

from __future__ import annotations

import asyncio
from typing import assert_type

from sqlalchemy import Engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column

import fencelock
from fencelock import (
    AmbiguousFenceError,
    AsyncLock,
    AuthorityError,
    FencedDataclassModel,
    FencedLock,
    FencedModel,
    FenceError,
    FencelockError,
    Lease,
    LockError,
    LockLostError,
    LockTimeoutError,
    MembershipError,
    NodesNotInitialisedError,
    NotHeldError,
    QuorumError,
    Redlock,
    StaleTokenError,
    UnfencedWriteError,
    bind,
    claim,
    claim_all,
    conditional_delete,
    conditional_update,
    configure,
    execute_fenced,
    exit_on_signals,
    fenced,
    fenced_delete,
    fenced_lock,
    fenced_update,
    gate,
)


class Base(DeclarativeBase):
    """The tables."""


class Order(FencedModel, Base):
    """A fenced row."""

    __tablename__ = "orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str]


class DataclassBase(MappedAsDataclass, DeclarativeBase):
    """The tables that are dataclasses."""


class Item(FencedDataclassModel, DataclassBase):
    """A fenced row that is a dataclass."""

    __tablename__ = "items"
    id: Mapped[int] = mapped_column(primary_key=True)


@fenced("order:{order_id}", ttl=15)
def ship(order_id: int) -> str:
    """Run under the lock."""
    return f"shipped {order_id}"


@fenced("order:{order_id}")
async def ship_soon(order_id: int) -> str:
    """Run under the lock, in a task."""
    return f"shipped {order_id}"


def with_blocks(engine: Engine) -> None:
    """Lock, claim, write."""
    with fenced_lock("order:1") as token, Session(engine) as session:
        assert_type(token, int)
        order = claim(session, Order, 1)
        assert_type(order, Order)
        order.status = "paid"
        assert_type(order.last_fencing_token, int)
        several = claim_all(session, select(Order).where(Order.status == "new"))
        print([each.status for each in several])
        gate(session, "order:1")
        bind(session, Lease("order:1", token))
        session.commit()
        statement = fenced_update(Order).where(Order.id == 1).values(status="paid")
        print(execute_fenced(session.connection(), statement, token=token).rowcount)
        print(execute_fenced(session.connection(), fenced_delete(Order), token=token).rowcount)
    with fenced_lock("order:1", "stock:7", ttl=5, renew=True, max_hold=None, fair=True) as tokens:
        assert_type(tokens, tuple[int, ...])
    sql, parameters = conditional_update("orders", {"status": "paid"}, {"id": 1}, 5)
    print(sql, parameters, conditional_delete("orders", {"id": 1}, 5, paramstyle="qmark"))
    print(ship(1).upper(), Item(id=1).id)


def by_hand(quorum: Redlock) -> None:
    """Without a block."""
    lock = quorum.lock("order:1", timeout=None, if_lost="warn")
    assert_type(lock, FencedLock[int])
    lock.on_lost(lambda lease: print(lease.resource, lease.lost))
    lease = lock.acquire(timeout=0)
    assert_type(lease, Lease)
    print(lease.fencing_token, lease.expires_at, lease.remaining)
    assert_type(lock.remint(), int)
    lock.extend(60)
    lock.release()
    if (maybe := lock.try_acquire()) is not None:
        print(maybe.lost)
    print([node.address for node in quorum.status()])


async def in_tasks(quorum: Redlock) -> None:
    """With async."""
    async with quorum.lock("order:1") as token:
        assert_type(token, int)
    twin = quorum.lock("order:1").aio
    assert_type(twin, AsyncLock[int])
    lease = await twin.acquire()
    assert_type(lease, Lease)
    await twin.extend()
    assert_type(await twin.remint(), int)
    await twin.release()
    print((await ship_soon(1)).upper())


def errors() -> dict[str, list[type[FencelockError]]]:
    """Tell them apart."""
    try:
        ship(1)
    except LockTimeoutError as error:
        assert_type(error.holder_ttl, float | None)
    except QuorumError as error:
        print(dict(error.nodes))
    except StaleTokenError as error:
        assert_type(error.token, int)
        assert_type(error.current, int | None)
        print(error.table, error.identity)
    return {
        "lock": [LockError, LockLostError, NotHeldError],
        "authority": [AuthorityError, NodesNotInitialisedError, MembershipError],
        "fence": [FenceError, UnfencedWriteError, AmbiguousFenceError],
    }


def main() -> None:
    """Configure, and go."""
    exit_on_signals()
    quorum = configure("redis://r1:6379,redis://r2:6379,redis://r3:6379")
    assert_type(quorum, Redlock)
    by_hand(quorum)
    asyncio.run(in_tasks(quorum))
    print(errors(), fencelock.__all__)
