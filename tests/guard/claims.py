"""Models that the tests of claims and gates share, and their rows. The fences are 0."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, ForeignKey, String, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, column_property, mapped_column, relationship

from fencelock import FencedModel, Lease, bind, fence_table
from tests.guard.rows import Keyed, refill
from tests.immediate import begin_immediate

OLD, NEW = 1, 2
"""The tokens of the older and the newer holder."""


class Base(DeclarativeBase): ...


class Account(FencedModel, Keyed, Base):
    __tablename__ = "cl_accounts"
    __fence_resource__ = "account:{id}"
    balance: Mapped[int] = mapped_column(default=100)
    status: Mapped[str] = mapped_column(String(20), default="new")
    remark: Mapped[str] = mapped_column(String(20), default="none", deferred=True)
    changed: Mapped[int] = mapped_column(default=0, onupdate=1)
    notes: Mapped[list[Note]] = relationship()


class Note(Base):
    __tablename__ = "cl_notes"
    id: Mapped[int] = mapped_column(primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("cl_accounts.id"))
    text: Mapped[str] = mapped_column(String(20), default="more")


class Triggered(FencedModel, Keyed, Base):
    __tablename__ = "cl_triggered"
    __fence_resource__ = "account:1"
    __fence_trigger__ = True
    balance: Mapped[int] = mapped_column(default=100)


class Strict(FencedModel, Keyed, Base):
    __tablename__ = "cl_strict"
    __fence_resource__ = "account:1"
    __fence_trigger__ = "strict"
    balance: Mapped[int] = mapped_column(default=100)


class Task(FencedModel, Base):
    __tablename__ = "cl_tasks"
    __fence_resource__ = "queue:{queue}"
    id: Mapped[int] = mapped_column(primary_key=True)
    queue: Mapped[str] = mapped_column(String(20))
    balance: Mapped[int] = mapped_column(default=100)


class Seat(FencedModel, Base):
    __tablename__ = "cl_seats"
    __fence_resource__ = "room"
    row: Mapped[int] = mapped_column(primary_key=True)
    letter: Mapped[str] = mapped_column(String(1), primary_key=True)
    guest: Mapped[str | None] = mapped_column(String(20))


class Eager(FencedModel, Keyed, Base):
    __tablename__ = "cl_eager"
    __fence_resource__ = "account:1"
    balance: Mapped[int] = mapped_column(default=100)
    parts: Mapped[list[Part]] = relationship(lazy="joined")


class Part(Base):
    __tablename__ = "cl_parts"
    id: Mapped[int] = mapped_column(primary_key=True)
    eager_id: Mapped[int] = mapped_column(ForeignKey("cl_eager.id"))


class Computed(FencedModel, Keyed, Base):
    __tablename__ = "cl_computed"
    __fence_resource__ = "account:1"
    balance: Mapped[int] = mapped_column(default=100)
    known: Mapped[int | None] = column_property(select(Note.id).where(Note.id == 1).scalar_subquery())


class Animal(FencedModel, Keyed, Base):
    __tablename__ = "cl_animals"
    __fence_resource__ = "account:1"
    kind: Mapped[str] = mapped_column(String(20))
    balance: Mapped[int] = mapped_column(default=100)
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "animal"}  # noqa: RUF012


class Cat(Animal):
    __tablename__ = "cl_cats"
    id: Mapped[int] = mapped_column(ForeignKey("cl_animals.id"), primary_key=True)
    lives: Mapped[int] = mapped_column(default=9)
    __mapper_args__ = {"polymorphic_identity": "cat"}  # noqa: RUF012


fences = fence_table(Base.metadata)
MODELS: list[type[Any]] = [Account, Triggered, Strict, Task, Eager, Computed, Cat]
ROWS: dict[Any, list[dict[str, Any]]] = {
    Account: [{"id": 1}],
    Note: [{"id": 1, "account_id": 1, "text": "first"}],
    Triggered: [{"id": 1}],
    Strict: [{"id": 1}],
    Task: [{"id": 1, "queue": "a"}, {"id": 2, "queue": "b"}, {"id": 3, "queue": "a"}],
    Seat: [{"row": 1, "letter": "a"}, {"row": 1, "letter": "b"}],
    Eager: [{"id": 1}],
    Computed: [{"id": 1}],
    Animal: [{"id": 1, "kind": "cat"}],
    Cat: [{"id": 1}],
}


def fill(engine: Engine) -> Engine:
    return refill(engine, Base.metadata, ROWS)


def leases(token: int) -> tuple[Lease, ...]:
    return tuple(Lease(resource, token) for resource in ("account:1", "queue:a", "room"))


def holder(engine: Engine, token: int = NEW, **options: Any) -> Session:
    session = Session(engine, **options)
    bind(session, *leases(token))
    return session


def balance(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalars(select(Account.balance)).one()


def fence(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalars(select(Account.last_fencing_token)).one()


def in_thread(work: Callable[[], object]) -> Callable[[], Any]:
    """Start work in a thread; return what waits for its result or raises its error."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # noqa: BLE001  handed over to the caller
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Any:
        thread.join(30)
        assert not thread.is_alive()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return wait


def let_wait(engine: Engine) -> None:
    """Have SQLite's transactions wait for each other, as row locks have those of the others wait."""
    if engine.dialect.name == "sqlite":
        begin_immediate(engine)
        engine.dispose()
