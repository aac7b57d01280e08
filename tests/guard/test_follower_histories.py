"""No acknowledged write is lost in random histories of workers that read from followers which are behind.

Each worker keeps an object for as long as it likes, loads parts of it from the leader or from one of two
followers, and writes what it makes of them. A write that was acknowledged is lost where its mark is not in
the row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import StaticPool, Text, create_engine, insert, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, deferred, load_only, mapped_column, undefer

from fencelock import FencedModel, Lease, StaleTokenError, bind, bypass
from fencelock.guard import objects
from tests.guard.rows import Keyed, Routing

HISTORIES, STEPS, TOKENS = 40, 40, (1, 2, 2)


def new_model() -> Any:
    class Base(DeclarativeBase): ...

    class Log(FencedModel, Keyed, Base):
        __tablename__ = "fh_logs"
        __fence_resource__ = "log"
        text: Mapped[str] = mapped_column(Text, default="")
        note: Mapped[str] = deferred(mapped_column(Text, default=""))

    return Log


Way = Callable[[Session, Any], object]


def ways(model: Any) -> list[Way]:
    whole = select(model)

    def expire(name: str) -> Way:
        def load(session: Session, log: Any) -> None:
            session.expire(log, [name])
            getattr(log, name)

        return load

    return [
        lambda session, _: session.scalars(whole).one(),
        lambda session, _: session.scalars(whole.execution_options(populate_existing=True)).one(),
        lambda session, _: session.scalars(whole.options(undefer(model.note))).one(),
        lambda session, _: session.scalars(
            whole.options(load_only(model.text)).execution_options(populate_existing=True)
        ).one(),
        lambda session, log: session.refresh(log),
        lambda session, log: session.refresh(log, ["text"]),
        lambda session, log: session.refresh(log, ["note"]),
        lambda _, log: log.note,
        expire("text"),
        expire("note"),
    ]


class World:
    """A leader, two followers, and three workers, each with its session and object."""

    def __init__(self, model: Any, seed: int) -> None:
        self.dice, self.model, self.ways = random.Random(seed), model, ways(model)
        self.leader, *self.followers = [create_engine("sqlite://", poolclass=StaticPool) for _ in range(3)]
        for engine in (self.leader, *self.followers):
            model.metadata.create_all(engine)
            with engine.begin() as connection, bypass(connection):
                connection.execute(insert(model), {"id": 1})
        self.acknowledged: list[str] = []
        self.workers = [self.new_worker(token) for token in TOKENS]

    def new_worker(self, token: int) -> tuple[Routing, list[Any]]:
        session = Routing(expire_on_commit=False)
        session.leader, session.reads = self.leader, [self.leader]
        bind(session, Lease("log", token))
        return session, [session.get_one(self.model, 1)]

    def copy(self) -> None:
        follower = self.dice.choice(self.followers)
        with self.leader.connect() as source, follower.begin() as target, bypass(target):
            (row,) = source.execute(select(self.model.__table__)).mappings()
            target.execute(update(self.model.__table__), dict(row))

    def write(self, session: Routing, log: Any, mark: str) -> None:
        name = self.dice.choice(["text", "note"]) if "note" in log.__dict__ else "text"
        setattr(log, name, f"{getattr(log, name)}{mark} ")
        session.commit()
        self.acknowledged.append(mark)

    def play(self) -> tuple[int, list[str]]:
        for number in range(STEPS):
            session, known = self.dice.choice(self.workers)
            session.reads = [self.dice.choice([self.leader, *self.followers])]
            try:
                match self.dice.randrange(5):
                    case 0:
                        self.copy()
                    case 1 | 2:
                        self.dice.choice(self.ways)(session, known[0])
                    case _:
                        self.write(session, known[0], f"m{number}")
            except StaleTokenError:
                session.rollback()
                session.expunge_all()
                session.reads = [self.dice.choice([self.leader, *self.followers])]
                known[0] = session.get_one(self.model, 1)
        with Session(self.leader) as last:
            log = last.get_one(self.model, 1)
            seen = {*log.text.split(), *log.note.split()}
        lost = [mark for mark in self.acknowledged if mark not in seen]
        return len(self.acknowledged), lost

    def close(self) -> None:
        for session, _ in self.workers:
            session.close()
        for engine in (self.leader, *self.followers):
            engine.dispose()


def play(model: Any) -> Iterator[tuple[int, int]]:
    for seed in range(HISTORIES):
        world = World(model, seed)
        acknowledged, lost = world.play()
        world.close()
        yield acknowledged, len(lost)


def test_no_acknowledged_write_is_lost() -> None:
    played = list(play(new_model()))
    assert sum(lost for _, lost in played) == 0
    assert sum(acknowledged for acknowledged, _ in played) > 3 * HISTORIES


def test_the_control_loses_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an object takes the id of whatever part is loaded last."""
    monkeypatch.setattr(objects, "_on_refresh", lambda *_: None)
    assert any(lost for _, lost in play(new_model()))
