"""Each mistake in a call is told at once, by an error that says what belongs there: call, error, word."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import redis
import redis.asyncio
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Column, Integer, MetaData, Table, create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from fencelock import (
    Database,
    FencedModel,
    FenceError,
    Redlock,
    fence_table,
    fenced,
    fenced_lock,
    fenced_once,
    fenced_semaphore,
    fenced_transaction,
    leader,
    on_event,
)
from fencelock.guard import fence_column
from fencelock.guard.tables import template_of
from fencelock.observe import history
from fencelock.stores.redis import AsyncFencedValue, FencedValue
from fencelock.testing import stale_writer, temporary_authority

WEEK = 7 * 24 * 3600
WRONG: Any = 7
Case: TypeAlias = tuple[Callable[[], object], type[Exception], str]


class Base(DeclarativeBase): ...


class Plain(Base):
    __tablename__ = "arguments_plain"
    id: Mapped[int] = mapped_column(primary_key=True)


class Order(FencedModel, Base):
    __tablename__ = "arguments_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)


class Counting:
    """An object that is called like a generator function."""

    def __call__(self) -> Iterator[int]:
        yield 1


def numbers() -> Iterator[int]:
    yield 1


async def later() -> AsyncIterator[int]:
    yield 1


def ship(order_id: int) -> None: ...


def lacks(session: Session) -> None: ...


def method(self: Any, session: Session) -> None: ...


def model(**names: Any) -> object:
    body = {"__tablename__": "arguments_wrong", "id": mapped_column(Integer, primary_key=True), **names}
    return type("Wrong", (FencedModel, type("Alone", (DeclarativeBase,), {})), body)


def nested() -> object:
    key, fence = Column("id", Integer, primary_key=True), fence_column(resource="order:{id:{width}}")
    return template_of(Table("nested", MetaData(), key, Column("width", Integer), fence), "nested")


def stale(target: Any, kind: Any) -> object:
    with stale_writer(target, kind, 1):
        raise AssertionError


def add_fence() -> object:
    with create_engine("sqlite://").begin() as connection:
        op: Any = Operations(MigrationContext.configure(connection))
        return op.add_fence("orders", trigger="ids")


ENGINE = create_engine("sqlite://")
#: Of any type, for type checkers.
VALUE: Any = FencedValue
VALUE_OF_TASKS: Any = AsyncFencedValue
SEMAPHORE: Any = fenced_semaphore
RECORD: Any = history.record
LOCKS: list[Callable[..., object]] = [fenced_lock, Database(ENGINE).lock, Redlock("redis://h").lock]
DECORATED: list[Case] = [
    (lambda: fenced("order:{order}")(ship), TypeError, r"order.*no parameter of .*\(order_id: 'int'\)"),
    (lambda: fenced("{order_id:{width}}")(ship), TypeError, "width.*no parameter of"),
    (lambda: fenced("{0}")(ship), TypeError, "0.*no parameter of"),
    (lambda: fenced("{}")(ship), TypeError, "without a name.*no parameter of"),
    (lambda: fenced("{order_id}:{x.y}")(ship), TypeError, "x.*no parameter of"),
    *(
        (lambda text=text: fenced(text)(ship), ValueError, "no template")
        for text in ("order:{order_id", "order:}", "{order_id!z}")
    ),
    *(
        (lambda it=it: fenced("r")(it), TypeError, "generator")
        for it in (numbers, later, functools.partial(numbers), Counting())
    ),
    *((lambda it=it: fenced("r")(it), TypeError, "function") for it in (Plain, WRONG)),
    (lambda: fenced("r")(staticmethod(ship)), TypeError, "above"),
    (fenced, TypeError, "needs the resource to lock"),
    (
        lambda: fenced(lambda order_id: f"order:{order_id}")(WRONG),
        TypeError,
        "fenced decorates a function, not 7",
    ),
    (lambda: fenced("r", ttl=-1), ValueError, "ttl"),
    (lambda: fenced("r", ttl=10, max_hold=5), ValueError, "max_hold"),
    (lambda: fenced_once("k"), TypeError, r"call once\(session, key\)"),
    (lambda: fenced_once("k", "r", ttl=-1), ValueError, "ttl"),
    (lambda: fenced_once("{x}", "r")(lacks), TypeError, "which is no parameter"),
    (lambda: fenced_once("k", "r")(method), TypeError, "whose first parameter is a session"),
    (
        lambda: fenced_once("k", "r")(lacks)(WRONG),
        TypeError,
        "takes a sessionmaker, a scoped_session or an engine, not 7",
    ),
]
NAMED: list[Case] = [
    *(
        (lambda name=name: fenced_lock(name), ValueError, "no value where one belongs")
        for name in (
            "order:{id}",
            "order:{order.id}",
            f"order:{id}",
            "order:<shop.Order object at 0x7f28c409ff60>",
        )
    ),
    (lambda: model(__fence_resource__=f"order:{id}"), ValueError, "without the f before its quotes"),
    (lambda: model(__fence_resources__="order:{id}"), FenceError, r'__fence_resource__ = "order:\{id\}"'),
    (nested, ValueError, "braces within braces"),
    (lambda: Database(ENGINE).inspect(""), ValueError, "empty"),
    (lambda: Redlock("redis://h").inspect(""), ValueError, "empty"),
    *(
        (lambda lock=lock, ttl=ttl: lock("a", ttl=ttl), ValueError, "longer than a week")
        for lock in LOCKS
        for ttl in (WEEK + 1, 1e9, 1e12, 1e300)
    ),
]
SLOTS: list[Case] = [
    *((lambda n=n: SEMAPHORE("gpu", n), ValueError, "slots is a ") for n in (0, 1001)),
    *((lambda n=n: SEMAPHORE("gpu", n), TypeError, "slots is a ") for n in (2.0, True, None)),
    (lambda: fenced_lock("order:1", shared=True), ValueError, "shared=True, readers=16"),
    (lambda: fenced_lock("order:1", "order:2", readers=3), TypeError, "has one resource, not 2"),
    (lambda: fenced_lock("order:1", readers=0), ValueError, "readers is a number from 1"),
    (lambda: fenced_semaphore("g" * 254, 4), ValueError, "255"),
    (lambda: fenced_semaphore("gpu#1"), ValueError, "is the name of a slot"),
    (lambda: fenced_lock("doc:a#0"), ValueError, "is the name of a slot"),
    (lambda: fenced_semaphore("gpu", authority=WRONG), TypeError, "authority= is a Redlock"),
    (lambda: fenced_semaphore("gpu", shared=True), TypeError, "fenced_semaphore takes no shared"),
]
OTHERS: list[Case] = [
    *(
        (
            lambda it=it: fenced_transaction(it, "order:1"),
            TypeError,
            "takes a sessionmaker.*give it the engine",
        )
        for it in (Session, Session(ENGINE))
    ),
    (lambda: fenced_transaction(WRONG, "order:1"), TypeError, "takes a sessionmaker(?!.*give it the engine)"),
    (lambda: leader("r", authority=Database(ENGINE)).run(WRONG), TypeError, "run takes a plain function"),
    (lambda: on_event(WRONG), TypeError, "on_event takes a plain function"),
    (lambda: history.record(WRONG), TypeError, "Engine that blocks"),
    (lambda: RECORD(create_async_engine("sqlite+aiosqlite://")), TypeError, "Engine that blocks"),
    (add_fence, ValueError, "False, True or 'strict'"),
    (lambda: fence_table(MetaData(), trigger=WRONG), ValueError, "False or True"),
    (lambda: stale(ENGINE, Plain), TypeError, "Plain has no fence"),
    (lambda: stale("sqlite://", Order), TypeError, "an engine, session or connection, not str"),
    (
        lambda: VALUE(redis.asyncio.Redis(), "rate"),
        TypeError,
        r"^FencedValue takes a client, redis\.Redis, not",
    ),
    (
        lambda: VALUE("redis://:hidden@h", "rate"),
        TypeError,
        r"^FencedValue takes a client((?!hidden).)*$",
    ),
    (
        lambda: VALUE(redis.Redis().pipeline(), "rate"),
        TypeError,
        r"^FencedValue takes a client, redis\.Redis, not .*Pipeline",
    ),
    (
        lambda: VALUE_OF_TASKS(redis.Redis(), "rate"),
        TypeError,
        r"AsyncFencedValue takes a client, redis\.asyncio\.Redis, not",
    ),
]


@pytest.mark.parametrize(
    "table", [DECORATED, NAMED, SLOTS, OTHERS], ids=["decorated", "named", "slots", "others"]
)
def test_a_mistake_is_told_by_an_error_that_names_it(table: list[Case], tmp_path: Path) -> None:
    for number, (call, error, says) in enumerate(table):
        with temporary_authority(tmp_path), pytest.raises(error, match=says):
            pytest.fail(f"case {number} of {says!r} is taken: {call()}")


def test_what_is_right_is_taken() -> None:
    fenced_lock("a", ttl=WEEK, max_hold=None)
    fenced_lock("{1}:{}", "{order-1}")
    fenced_transaction(sessionmaker(ENGINE), "order:1")
