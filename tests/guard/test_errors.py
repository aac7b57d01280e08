"""Each refusal and claim is reported once, with the facts that an operator needs, and says what to do."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
from sqlalchemy import Engine, delete, event, select, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Mapped, Session, mapped_column

import fencelock
from fencelock import FencedModel, Lease, StaleTokenError, UnfencedWriteError, claim, claim_all, gate, upsert
from fencelock.observe import GuardEvent, RowClaimed, StaleWriteRefused, UnfencedWriteRefused
from tests.guard.marks import Act, InMemory
from tests.guard.models import Base, Order, fenced
from tests.guard.rows import Keyed, bypassed, holding, refill, turned_away


@pytest.fixture
def engine(in_memory: InMemory) -> Engine:
    return refill(in_memory(Base.metadata), fenced(Order, 1, 2))


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
    session.get_one(Order, 1).total += 1
    session.flush()


STALE: tuple[Act, ...] = (
    write,
    lambda s: s.execute(update(Order).where(Order.id == 1).values(total=2)),
    lambda s: claim(s, Order, 1),
    lambda s: upsert(s, Order, [{"id": 1, "total": 2}]),
)
UNFENCED: tuple[Act, ...] = (
    *STALE,
    lambda s: s.execute(text("UPDATE g_orders SET total = 2")),
    lambda s: claim_all(s, select(Order)),
    gate,
)


def test_a_refused_write_is_told_once_with_all_facts(
    engine: Engine, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    for number, work in enumerate(STALE, 1):
        with holding(engine, Lease("order:1", 4)) as session, pytest.raises(StaleTokenError) as refused:
            work(session)
        assert len(told["stale"]) == number
        assert facts(told["stale"][-1]) == ("g_orders", (1,), "order:1", 4, 5)
        assert told["stale"][-1].error is refused.value
    records = [record for record in caplog.records if record.name == "fencelock.guard"]
    assert [(r.levelno, r.table, r.resource, r.token, r.fence) for r in records] == [  # type: ignore[attr-defined]
        (logging.WARNING, "g_orders", "order:1", 4, 5)
    ] * len(STALE)
    for number, work in enumerate(UNFENCED, 1):
        with Session(engine) as session, pytest.raises(UnfencedWriteError) as unfenced:
            work(session)
        assert len(told["unfenced"]) == number
        assert told["unfenced"][-1].error is unfenced.value
    assert [event.table for event in told["unfenced"][:2]] == ["g_orders"] * 2
    with holding(engine, Lease("a", 6), Lease("b", 6)) as session, pytest.raises(UnfencedWriteError):
        gate(session)
    assert [len(found) for found in told.values()] == [len(STALE), len(UNFENCED) + 1, 0]


def test_claims_and_gates_are_told(engine: Engine, told: Told, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fencelock.guard")
    with holding(engine, Lease("order:1", 6), Lease("order:2", 7)) as session:
        claim(session, Order, 1)
        claim_all(session, select(Order))
        gate(session, "order:2")
    assert [facts(event) for event in told["claim"]] == [
        ("g_orders", (1,), "order:1", 6, None),
        ("g_orders", (1,), "order:1", 6, None),
        ("g_orders", (2,), "order:2", 7, None),
        ("fencelock_fences", ("order:2",), "order:2", 7, None),
    ]
    levels = {record.levelno for record in caplog.records if record.name == "fencelock.guard"}
    assert levels == {logging.DEBUG}


def test_a_listener_that_fails_or_was_forgotten_changes_nothing(
    engine: Engine, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[object] = []
    fencelock.forget(fencelock.on_event(heard.append))

    @fencelock.on_event
    def fail(event: object) -> None:
        raise ZeroDivisionError(repr(event))

    try:
        with holding(engine, Lease("order:1", 4)) as session, pytest.raises(StaleTokenError):
            write(session)
    finally:
        fencelock.forget(fail)
    assert (len(told["stale"]), heard) == (1, [])
    assert "a listener for events failed" in caplog.text


def test_an_error_of_the_database_without_a_word_passes(engine: Engine) -> None:
    """Errors of the database pass through the guard, which reads them, as they are."""

    @event.listens_for(engine, "do_execute")
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError

    with engine.connect() as connection, pytest.raises(OperationalError) as failure:
        connection.execute(select(Order.id))
    assert str(failure.value.orig) == ""


class Loose(FencedModel, Keyed, Base):
    """Its columns were made without NOT NULL, so the condition is never true."""

    __tablename__ = "er_loose"
    __fence_resource__ = "loose"
    value: Mapped[int] = mapped_column(default=0)


ROWS: dict[Any, Any] = {Loose: []}


def change(session: Session) -> None:
    session.get_one(Loose, 1).value = 1
    session.flush()


NULL_WRITES: dict[str, Act] = {
    "unit of work": change,
    "by key": lambda s: s.execute(update(Loose).where(Loose.id == 1).values(value=1)),
    "by criteria": lambda s: s.execute(update(Loose).where(Loose.value == 0).values(value=1)),
    "DELETE": lambda s: s.execute(delete(Loose)),
    "claim": lambda s: claim(s, Loose, 1),
    "claim_all": lambda s: claim_all(s, select(Loose)),
    "upsert": lambda s: upsert(s, Loose, [{"id": 1, "value": 1}]),
}


@pytest.mark.parametrize(
    ("shared_url", "way"),
    [
        *(("sqlite", way) for way in NULL_WRITES),
        *(
            (url, way)
            for url in ("postgresql", "mariadb")
            for way in ("unit of work", "by criteria", "upsert")
        ),
    ],
    indirect=["shared_url"],
)
def test_a_row_whose_fence_is_null_says_what_to_do(shared_engine: Engine, way: str) -> None:
    with bypassed(shared_engine) as connection:
        for statement in (
            "DROP TABLE IF EXISTS er_loose",
            "CREATE TABLE er_loose (id INTEGER PRIMARY KEY, value INTEGER, last_fencing_token BIGINT)",
            "ALTER TABLE er_loose ADD last_write_id BIGINT DEFAULT 0",
            "INSERT INTO er_loose (id, value) VALUES (1, 0)",
        ):
            connection.execute(text(statement))
    with holding(shared_engine, Lease("loose", 5)) as session:
        with turned_away(session, fencelock.FenceError, match=r"NULL.*SET last_fencing_token = 0"):
            NULL_WRITES[way](session)
        assert session.scalar(text("SELECT value FROM er_loose")) == 0


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
def test_a_fence_that_no_new_token_reaches_says_to_begin_after_the_loss(
    token: int, fence: int | None, *, is_lost: bool
) -> None:
    """What grants the locks has begun again: to acquire again is no advice."""
    told = str(StaleTokenError("orders", (1,), token, fence))
    assert ("fencelock init --after-loss" in told) is is_lost
