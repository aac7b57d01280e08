"""The guard reports each refusal and each claim once, with the facts that an operator needs."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
from sqlalchemy import Engine, event, select, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fencelock
from fencelock import (
    Lease,
    UnfencedWriteError,
    claim,
    gate,
    upsert,
)
from fencelock.observe import GuardEvent, RowClaimed, StaleWriteRefused, UnfencedWriteRefused
from tests.guard.rows import Act, InMemory, holding, refill


class Base(DeclarativeBase): ...


class Order(fencelock.FencedModel, Base):
    __tablename__ = "ev_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


fencelock.fence_table(Base.metadata)


@pytest.fixture
def engine(in_memory: InMemory) -> Engine:
    """Two orders that have been fenced with 5."""
    orders = [{"id": number, "last_fencing_token": 5} for number in (1, 2)]
    return refill(in_memory(Base.metadata), Base.metadata, {Order: orders})


Told: TypeAlias = dict[str, list[GuardEvent]]


@pytest.fixture
def told() -> Iterator[Told]:
    found: Told = {"stale": [], "unfenced": [], "claim": []}
    kinds = {StaleWriteRefused: "stale", UnfencedWriteRefused: "unfenced", RowClaimed: "claim"}

    @fencelock.on_event
    def note(event: object) -> None:
        if isinstance(event, GuardEvent):
            found[kinds[type(event)]].append(event)

    yield found
    fencelock.forget(note)


def facts(event: GuardEvent) -> tuple[object, ...]:
    return event.table, event.identity, event.resource, event.token, event.fence


def write(session: Session) -> None:
    session.get_one(Order, 1).amount += 1
    session.flush()


def test_stale_write_is_told_once_with_all_facts(
    engine: Engine, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    stale: tuple[Act, ...] = (
        write,
        lambda s: s.execute(update(Order).where(Order.id == 1).values(amount=2)),
        lambda s: claim(s, Order, 1),
        lambda s: upsert(s, Order, [{"id": 1, "amount": 2}]),
    )
    for number, work in enumerate(stale, 1):
        holder = holding(engine, Lease("order:1", 4))
        with holder as session, pytest.raises(fencelock.StaleTokenError) as refused:
            work(session)
        assert len(told["stale"]) == number
        assert facts(told["stale"][-1]) == ("ev_orders", (1,), "order:1", 4, 5)
        assert told["stale"][-1].error is refused.value
    records = [record for record in caplog.records if record.name == "fencelock.guard"]
    assert [(r.levelno, r.table, r.resource, r.token, r.fence) for r in records] == [  # type: ignore[attr-defined]
        (logging.WARNING, "ev_orders", "order:1", 4, 5)
    ] * len(stale)
    assert not told["unfenced"]
    assert not told["claim"]


def test_write_without_its_lease_is_told_once(engine: Engine, told: Told) -> None:
    unfenced: tuple[Act, ...] = (
        write,
        lambda s: s.execute(update(Order).where(Order.id == 1).values(amount=2)),
        lambda s: s.execute(text("UPDATE ev_orders SET amount = 2")),
        lambda s: claim(s, Order, 1),
        lambda s: fencelock.claim_all(s, select(Order)),
        lambda s: upsert(s, Order, [{"id": 1}]),
        gate,
    )
    for number, work in enumerate(unfenced, 1):
        with Session(engine) as session, pytest.raises(UnfencedWriteError) as refused:
            work(session)
        assert len(told["unfenced"]) == number
        assert told["unfenced"][-1].error is refused.value
    assert [event.table for event in told["unfenced"][:2]] == ["ev_orders"] * 2
    with holding(engine, Lease("a", 6), Lease("b", 6)) as session, pytest.raises(UnfencedWriteError):
        gate(session)
    assert len(told["unfenced"]) == len(unfenced) + 1


def test_claims_and_gates_are_told(engine: Engine, told: Told, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fencelock.guard")
    with holding(engine, Lease("order:1", 6), Lease("order:2", 7)) as session:
        claim(session, Order, 1)
        fencelock.claim_all(session, select(Order))
        gate(session, "order:2")
    assert [facts(event) for event in told["claim"]] == [
        ("ev_orders", (1,), "order:1", 6, None),
        ("ev_orders", (1,), "order:1", 6, None),
        ("ev_orders", (2,), "order:2", 7, None),
        ("fencelock_fences", ("order:2",), "order:2", 7, None),
    ]
    assert {record.levelno for record in caplog.records if record.name == "fencelock.guard"} == {
        logging.DEBUG
    }


def test_callback_that_fails_changes_nothing(
    engine: Engine, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: object) -> None:
        raise ZeroDivisionError(repr(event))

    fencelock.on_event(fail)
    try:
        holder = holding(engine, Lease("order:1", 4))
        with holder as session, pytest.raises(fencelock.StaleTokenError):
            write(session)
    finally:
        fencelock.forget(fail)
    assert len(told["stale"]) == 1
    assert "a listener for events failed" in caplog.text


def test_what_is_no_function_is_refused() -> None:
    listen: Any = fencelock.on_event
    with pytest.raises(TypeError, match="on_event takes a plain function"):
        listen("print")

    async def coroutine(_event: object) -> None:
        """Nothing would await it."""

    with pytest.raises(TypeError, match="on_event takes a plain function"):
        listen(coroutine)


def test_error_without_a_word_is_the_users(engine: Engine) -> None:
    """Errors of the database pass through the guard, which reads them, as they are."""

    @event.listens_for(engine, "do_execute")
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError

    with engine.connect() as connection, pytest.raises(OperationalError) as failure:
        connection.execute(select(Order.id))
    assert str(failure.value.orig) == ""


def test_callback_that_was_forgotten_is_not_called(engine: Engine) -> None:
    """Given back by the function that registered it, as a decorator does."""
    heard: list[object] = []
    fencelock.forget(fencelock.on_event(heard.append))
    with holding(engine, Lease("order:2", 6)) as session:
        claim(session, Order, 2)
        with pytest.raises(UnfencedWriteError):
            write(session)
    assert not heard
