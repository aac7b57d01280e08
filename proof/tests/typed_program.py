"""A small program for a user of mypy --strict: every public name, used as the documentation says.

No test runs it. `test_typing.py` has it checked, outside of this project's own settings.
"""

# ruff: noqa: ARG001 - programs print, and name what they do not use

from __future__ import annotations

import asyncio
from typing import Literal, assert_type

import httpx
import redis
import redis.asyncio
from fastapi import FastAPI
from flask import Flask
from sqlalchemy import Column, Engine, Integer, MetaData, Table, create_engine, delete, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, sessionmaker

import fencelock
from fencelock import (
    AsyncFencedTransaction,
    AsyncLock,
    AuthorityError,
    CommitInDoubtError,
    CountersExhaustedError,
    Database,
    Etcd,
    FencedDataclassModel,
    FencedLock,
    FencedModel,
    FencedSemaphore,
    FencedTransaction,
    FenceError,
    FencelockError,
    GuardEvent,
    Leader,
    Lease,
    LeaseTableMissingError,
    LockError,
    LockLostError,
    LockTimeoutError,
    MembershipError,
    NodesNotInitialisedError,
    NotHeldError,
    QuorumError,
    Receipt,
    ReceiptMismatchError,
    Redlock,
    StaleReadError,
    StaleTokenError,
    Term,
    UnfencedWriteError,
    ZooKeeper,
    assert_held,
    bind,
    bypass,
    claim,
    claim_all,
    conditional_delete,
    conditional_update,
    configure,
    exit_on_signals,
    fence_table,
    fenced,
    fenced_lock,
    fenced_once,
    fenced_semaphore,
    fenced_text,
    fenced_transaction,
    forget,
    gate,
    http_status,
    is_retryable,
    leader,
    lease_table,
    on_event,
    once,
    prune_receipts,
    receipt_table,
    take_over,
    upsert,
)
from fencelock import alembic as fences
from fencelock.authority.line.line import LineAuthority
from fencelock.guard import fence_column, triggers, write_id_column
from fencelock.integrations import fastapi as fastapi_integration
from fencelock.integrations import flask as flask_integration
from fencelock.integrations import header
from fencelock.integrations.asgi import FencingTokenMiddleware
from fencelock.integrations.httpx import send_tokens, send_tokens_async
from fencelock.stores.file import FencedFile
from fencelock.stores.redis import AsyncFencedValue, FencedValue
from fencelock.testing import held_elsewhere, lost_lease, stale_writer, temporary_authority, unfenced


class Base(DeclarativeBase):
    """The tables."""


class Order(FencedModel, Base):
    """A fenced row."""

    __tablename__ = "orders"
    __fence_resource__ = "order:{id}"
    __fence_trigger__ = "strict"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str]


fence_table(Base.metadata)


class DataclassBase(MappedAsDataclass, DeclarativeBase):
    """The tables that are dataclasses."""


class Item(FencedDataclassModel, DataclassBase):
    """A fenced row that is a dataclass."""

    __tablename__ = "items"
    __fence_resource__ = "items"
    id: Mapped[int] = mapped_column(primary_key=True)


@fenced("order:{order_id}", ttl=15)
def ship(order_id: int) -> str:
    """Run under the lock."""
    return f"shipped {order_id}"


@fenced(
    "order:{order_id}",
    timeout=None,
    renew=True,
    max_hold=None,
    fair=True,
    reentrant=False,
    if_lost="warn",
    if_held="skip",
    at_least=60.0,
    authority=None,
)
async def ship_soon(order_id: int) -> str:
    """Run under the lock, in a task."""
    return f"shipped {order_id}"


def lead(term: Term) -> str:
    """Work while the term goes on."""
    assert_type(term.is_current, bool)
    assert_type(term.wait(0.1), bool)
    assert_type(term.lease, Lease)
    term.on_end(lambda ended: print(ended.token))
    return "done"


async def lead_async(term: Term) -> int:
    """Work in a task."""
    assert_type(await term.wait_async(0.1), bool)
    return term.token


async def leaders() -> None:
    """Be elected, in each way."""
    assert_type(leader("reports"), Leader)
    assert_type(leader("reports").run(lead), str)
    assert_type(await leader("reports", ttl=5).run(lead_async), int)
    with leader("reports") as term:
        assert_type(term, Term)
    async with leader("reports") as term:
        assert_type(term, Term)


def with_blocks(engine: Engine) -> None:
    """Lock, claim, write."""
    with fenced_lock("order:1") as token, Session(engine) as session:
        assert_type(token, int)
        assert_type(assert_held("order:1"), Lease)
        order = claim(session, Order, 1)
        assert_type(order, Order)
        order.status = "paid"
        assert_type(order.last_fencing_token, int)
        several = claim_all(session, select(Order).where(Order.status == "new"))
        print([each.status for each in several])
        gate(session, "order:1")
        upsert(session, Order, [{"id": 1, "status": "new"}])
        bind(session, Lease("order:1", token))
        session.commit()
        statement = update(Order).where(Order.id == 1).values(status="paid")
        print(session.connection().execute(statement, execution_options={"fencing_token": token}).rowcount)
        print(
            session.connection().execute(delete(Order), execution_options={"fencing_token": token}).rowcount
        )
    with fenced_lock("order:1", "stock:7", ttl=5, renew=True, max_hold=None, fair=True) as tokens:
        assert_type(tokens, tuple[int, ...])
    sql, parameters = conditional_update("orders", {"status": "paid"}, {"id": 1}, 5)
    print(sql, parameters, conditional_delete("orders", {"id": 1}, 5, paramstyle="qmark"))
    print(conditional_delete("orders", {"id": 1}, 5, dialect="postgresql"))
    print(fenced_text("DELETE FROM orders WHERE last_fencing_token <= :fencing_token", Order, token=5))
    print(ship(1).upper(), Item(id=1).id)


@on_event
def count(event: object) -> None:
    """Hang metrics on what the guard does."""
    if isinstance(event, GuardEvent):
        print(event.table, event.identity, event.resource, event.token, event.fence, event.error)


def around_the_guard(engine: Engine) -> None:
    """A block in which nothing is guarded."""
    with Session(engine) as session, bypass(session):
        session.execute(update(Order).values(status="settled"))


def with_triggers(engine: Engine) -> None:
    """Have the database refuse by itself."""
    table = Table(
        "crates",
        MetaData(),
        Column("id", Integer, primary_key=True),
        fence_column(trigger=True),
        write_id_column(),
    )
    with engine.begin() as connection:
        for statement in triggers.create(table, engine.dialect.name, strict=True):
            connection.execute(statement)
        assert_type(triggers.installed(connection, "crates"), bool | Literal["strict"])
        for statement in triggers.drop("crates", engine.dialect.name, schema=None):
            connection.execute(statement)


def pay(session: Session) -> str:
    """Run in a fenced transaction."""
    order = claim(session, Order, 1)
    order.status = "paid"
    return order.status


async def pay_soon(session: AsyncSession) -> str:
    """Run in one, in a task."""
    order = await claim(session, Order, 1)
    order.status = "paid"
    return order.status


def transactions(engine: Engine) -> None:
    """Every order right, in one line."""
    with fenced_transaction(sessionmaker(engine), "order:1", ttl=5) as session:
        assert_type(session, Session)
    transaction = fenced_transaction(engine, "order:1", "stock:7", retries=2, gate=False)
    assert_type(transaction, FencedTransaction[Session])
    assert_type(transaction.run(pay), str)


async def transactions_of_tasks(engine: AsyncEngine) -> None:
    """The same, with await."""
    async with fenced_transaction(async_sessionmaker(engine), "order:1", timeout=None) as session:
        assert_type(session, AsyncSession)
    transaction = fenced_transaction(engine, "order:1", retries=2)
    assert_type(transaction, AsyncFencedTransaction[AsyncSession])
    assert_type(await transaction.run(pay_soon), str)


def by_hand(quorum: Redlock) -> None:
    """Without a block."""
    lock = quorum.lock("order:1", timeout=None, if_lost="warn")
    assert_type(lock, FencedLock[int])
    several = quorum.lock("order:1", "stock:7", ttl=5, renew=False, max_hold=None, fair=True)
    assert_type(several, FencedLock[tuple[int, ...]])
    lock.on_lost(lambda lease: print(lease.resource, lease.lost))
    lease = lock.acquire(timeout=0)
    assert_type(lease, Lease)
    print(lease.token, lease.expires_at, lease.remaining)
    assert_type(Lease.from_header(lease.to_header()).token, int)
    assert_type(lock.remint(), int)
    lock.extend(60)
    lock.release()
    assert_type(lock.locked(), bool)
    assert_type(lock.hand_over(), str)
    with take_over(lock.hand_over(), authority=quorum, renew=False) as token:
        number: int = token
        print(number)
    with quorum.lock("order:1", reentrant=False):
        print("once")
    if (maybe := lock.try_acquire()) is not None:
        print(maybe.lost)
    print([node.address for node in quorum.status()])


async def in_tasks(quorum: Redlock, engine: AsyncEngine) -> None:
    async with quorum.lock("order:1") as token:
        assert_type(token, int)
    async with fenced_lock("order:1"), AsyncSession(engine) as session:
        order = await claim(session, Order, 1)
        assert_type(order, Order)
        assert_type(await claim(session, Order, 1, skip_locked=True), Order | None)
        print(len(await claim_all(session, select(Order))))
        await gate(session, "order:1")
        await session.commit()
    twin = quorum.lock("order:1").aio
    assert_type(twin, AsyncLock[int])
    lease = await twin.acquire()
    assert_type(lease, Lease)
    await twin.extend()
    assert_type(await twin.remint(), int)
    assert_type(await twin.locked(), bool)
    assert_type(await twin.hand_over(), str)
    async with take_over(await twin.hand_over()) as tokens:
        print(tokens)
    await twin.release()
    print((await ship_soon(1)).upper())


def mistakes(quorum: Redlock) -> None:
    """Mistakes that mypy refuses. --strict also refuses an ignore that nothing needs."""
    fenced_lock("order:1", tll=5)  # type: ignore[call-overload]
    fenced_lock("order:1", ttl="5")  # type: ignore[call-overload]
    fenced_lock("order:1", if_lost="ignore")  # type: ignore[call-overload]
    quorum.lock("order:1", tll=5)  # type: ignore[call-overload]
    quorum.lock("order:1", timeout="5")  # type: ignore[call-overload]
    quorum.lock("order:1", authority=quorum)  # type: ignore[call-overload]
    quorum.lock("order:1", reentrant="no")  # type: ignore[call-overload]
    take_over("{}", tll=5)  # type: ignore[call-arg]
    fenced("order:{order_id}", tll=5)  # type: ignore[call-arg]
    fenced("order:{order_id}", fair="no")  # type: ignore[arg-type]
    fence_column(trigger="Strict")  # type: ignore[arg-type]
    triggers.create("orders")  # type: ignore[call-arg]


def errors() -> dict[str, list[type[FencelockError]]]:
    """Tell them apart."""
    try:
        ship(1)
    except LockTimeoutError as error:
        assert_type(error.holder_ttl, float | None)
    except QuorumError as error:
        print(dict(error.nodes))
    except StaleReadError as error:
        assert_type(error.loaded, int | None)
    except StaleTokenError as error:
        assert_type(error.token, int)
        assert_type(error.current, int | None)
        print(error.table, error.identity)
    return {
        "lock": [LockError, LockLostError, NotHeldError],
        "authority": [AuthorityError, NodesNotInitialisedError, MembershipError, LeaseTableMissingError],
        "exhausted": [CountersExhaustedError],
        "receipt": [ReceiptMismatchError],
        "fence": [FenceError, UnfencedWriteError, CommitInDoubtError],
    }


@fenced_once("deposit:{key}", "account:{number}", fingerprint=lambda *_: None, retries=3, gate=False, ttl=15)
def deposit(session: Session, key: str, number: int = 1) -> dict[str, int]:
    """Be done once for each key."""
    return {"balance": number}


@fenced_once("deposit:{key}", "account:1")
async def deposit_async(session: AsyncSession, key: str) -> int:
    """The same, for coroutines."""
    return 5


async def slots() -> None:
    """Hold one of several slots; read and write."""
    lock = fenced_semaphore("gpu", slots=4, ttl=15, timeout=None)
    assert_type(lock, FencedSemaphore)
    with lock as (slot, token):
        assert_type(slot, int)
        assert_type(token, int)
        assert_type(lock.slot, int)
    async with lock as found:
        assert_type(found, tuple[int, int])
    with fenced_lock("order:1", shared=True, readers=16) as token:
        assert_type(token, int)


async def receipts(engine: Engine, its: AsyncEngine, maker: sessionmaker[Session]) -> None:
    """Do work once."""
    assert_type(receipt_table(MetaData(), schema="shop"), Table)
    assert_type(deposit(engine, "r1"), dict[str, int])
    assert_type(deposit(maker, "r1", number=2), dict[str, int])
    assert_type(await deposit_async(its, "r1"), int)
    with Session(engine) as session:
        assert_type(deposit(session, "r1"), dict[str, int])
        receipt = once(session, "k", fingerprint={"cents": 500})
        assert_type(receipt, Receipt)
        if not receipt.done:
            receipt.result = 5
        assert_type(prune_receipts(session, older_than=86_400.0), int)
    async with AsyncSession(its) as waiting:
        assert_type(await once(waiting, "k"), Receipt)
        assert_type(await deposit_async(waiting, "r1"), int)
    deposit("no engine", "r1")  # type: ignore[arg-type]


def databases(engine: Engine) -> None:
    """Have a database grant leases."""
    assert_type(configure("sqlite:///shop.db"), Redlock | Database | LineAuthority)
    granting = configure(engine)
    assert_type(granting, Database)
    with Database("postgresql+psycopg://app@db/shop", schema="locks") as elsewhere:
        assert_type(elsewhere.init(above=5), bool)
        with elsewhere.lock("order:1", ttl=30) as token:
            assert_type(token, int)
    asyncio.run(granting.aio.init())
    assert_type(lease_table(MetaData(), schema="locks"), Table)
    with Etcd("etcd://e1:2379") as store, ZooKeeper("zookeeper://z1:2181", session_timeout=10.0) as other:
        assert_type(store.init(above=5), None)
        assert_type(store.prune(3600.0), int)
        assert_type(asyncio.run(other.aio.prune(3600.0)), int)


def main() -> None:
    """Configure, and go."""
    exit_on_signals()
    forget(count)
    databases(create_engine("sqlite:///shop.db"))
    quorum = configure(Redlock("redis://r1:6379,redis://r2:6379,redis://r3:6379"))
    assert_type(quorum, Redlock)
    by_hand(quorum)
    with_triggers(create_engine("sqlite://"))
    around_the_guard(create_engine("sqlite://"))
    transactions(create_engine("sqlite://"))
    asyncio.run(transactions_of_tasks(create_async_engine("sqlite+aiosqlite://")))
    asyncio.run(in_tasks(quorum, create_async_engine("sqlite+aiosqlite://")))
    print(errors(), fencelock.__all__)


def travel(client: redis.Redis, aio: redis.asyncio.Redis) -> None:
    """Send tokens to other services, and write elsewhere under them."""
    assert_type(header.held(), dict[str, str])
    assert_type(header.from_header("order:1=1"), tuple[Lease, ...])
    with header.bound(header.to_header([Lease("order:1", 1)])):
        FencedValue(client, "order:1").set("x")
        FencedFile("order:1").write(b"x", token=1)
    assert_type(FencedFile("order:1").read(), bytes | None)
    AsyncFencedValue(aio, "key", resource="order:1")
    httpx.Client(event_hooks={"request": [send_tokens]})
    httpx.AsyncClient(event_hooks={"request": [send_tokens_async]})
    app = FastAPI()
    app.add_middleware(FencingTokenMiddleware)
    FencingTokenMiddleware(app)


def without_arguments(lock: FencedLock, engine: Engine) -> FencedTransaction:
    """Name the generic classes as most programs do: for one resource, and the usual session."""
    with lock as token:
        assert_type(token, int)
    with fenced_transaction(engine, "order:1") as session:
        assert_type(session, Session)
    return fenced_transaction(engine, "order:1")


def outcomes(error: Exception, app: FastAPI, site: Flask) -> tuple[bool, int]:
    """Try again, or answer."""
    fastapi_integration.answer_errors(app)
    flask_integration.answer_errors(site)
    return is_retryable(error), http_status(error)


def migrate() -> None:
    """Write a migration that a checker knows."""
    fences.add_fence("orders")
    fences.create_fence_table(schema="shop")


async def situations(engine: Engine, session: AsyncSession, folder: str) -> None:
    """Test with `fencelock.testing`."""
    with temporary_authority(folder) as authority, held_elsewhere("order:1") as lease:
        assert_type(authority, Database)
        assert_type(lease, Lease)
    with unfenced(), lost_lease("order:1"), stale_writer(engine, Order, 1):
        async with stale_writer(session, Order, (1,)):
            print("stale")
