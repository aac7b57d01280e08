"""Write ids made in another way lose an update: each control beside the schedule that the guard refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import StaticPool

from fencelock import FencedModel, Lease, StaleReadError, bind
from tests.guard.rows import Keyed

ROOMS = ("leases", "objects", "statements")
"""Those that make ids."""


class Base(DeclarativeBase): ...


class Page(FencedModel, Keyed, Base):
    """Two holders add to its balance."""

    __tablename__ = "wm_pages"
    __fence_resource__ = "pages"
    balance: Mapped[int] = mapped_column(default=0)
    status: Mapped[int] = mapped_column(default=0)


@pytest.fixture
def database() -> Iterator[Engine]:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    Base.metadata.create_all(engine)
    with holder(engine) as session, session.begin():
        session.add(Page(id=1))
    yield engine
    engine.dispose()


def holder(engine: Engine) -> Session:
    session = Session(engine, expire_on_commit=False)
    bind(session, Lease("pages", 7))
    return session


def balance(engine: Engine) -> int:
    with Session(engine) as session:
        return session.get_one(Page, 1).balance


def add(engine: Engine) -> None:
    with holder(engine) as session, session.begin():
        session.get_one(Page, 1).balance += 100


def statement_follows(engine: Engine) -> None:
    """Write an object that was loaded before another's write, and that a statement has touched since."""
    with holder(engine) as session:
        page = session.get_one(Page, 1)
        session.commit()
        add(engine)
        session.execute(update(Page).where(Page.id == 1).values(status=1))
        page.balance += 1
        session.commit()


def restarts(engine: Engine) -> None:
    """Write an object after a process wrote that makes the ids which the process before it has made."""
    add(engine)
    with holder(engine) as session:
        page = session.get_one(Page, 1)
        session.commit()
        restart()
        add(engine)
        page.balance += 1
        session.commit()


_seeded = Random(1)


def restart() -> None:
    _seeded.seed(1)


def seeded_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take ids from `random`, which a program has seeded."""
    restart()
    for room in ROOMS:
        monkeypatch.setattr(f"fencelock.guard.{room}.new_write_id", lambda: _seeded.randrange(1, 2**53))


def absolute_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have statements set an id, instead of moving the one that they find."""

    def setting(statement: Any, fenced: Any, by: Any) -> Any:
        return statement.values({fenced.write.key: by})

    monkeypatch.setattr("fencelock.guard.conditions.shift_ids", setting)
    monkeypatch.setattr("fencelock.guard.objects.shifted", lambda _found, by: by)


SCHEDULES = [
    pytest.param(statement_follows, absolute_ids, id="absolute ids"),
    pytest.param(restarts, seeded_ids, id="seeded ids"),
]


@pytest.mark.parametrize(("schedule", "mutant"), SCHEDULES)
def test_the_guard_refuses(
    database: Engine, schedule: Callable[[Engine], None], mutant: Callable[..., None]
) -> None:
    del mutant
    with pytest.raises(StaleReadError):
        schedule(database)
    assert balance(database) >= 100


@pytest.mark.parametrize(("schedule", "mutant"), SCHEDULES)
def test_the_mutant_loses_an_update(
    database: Engine,
    monkeypatch: pytest.MonkeyPatch,
    schedule: Callable[[Engine], None],
    mutant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    mutant(monkeypatch)
    schedule(database)
    additions = 1 if schedule is statement_follows else 2
    assert balance(database) == 100 * (additions - 1) + 1
