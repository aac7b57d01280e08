"""Models that the guard's tests share. Each file names those that it uses, with their rows, in its ROWS."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, ForeignKey, String, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from fencelock import FencedModel, Lease, fence_table, receipt_table
from tests.guard.rows import Keyed, holding, rows_of

OLD, NEW = 1, 2
"""The tokens of the older and the newer holder."""


class Base(DeclarativeBase):
    type_annotation_map = {str: String(40)}  # noqa: RUF012  SQLAlchemy's declaration


class Order(FencedModel, Keyed, Base):
    __tablename__ = "g_orders"
    __fence_resource__ = "order:{id}"
    status: Mapped[str] = mapped_column(default="new")
    total: Mapped[int] = mapped_column(default=0)


class Row(FencedModel, Keyed, Base):
    """One lease guards all rows."""

    __tablename__ = "g_rows"
    __fence_resource__ = "rows"
    status: Mapped[str] = mapped_column(default="new")
    value: Mapped[int] = mapped_column(default=0)


class Free(Keyed, Base):
    """Has no fence."""

    __tablename__ = "g_free"
    note: Mapped[str] = mapped_column(default="none")
    value: Mapped[int] = mapped_column(default=0)


class Log(FencedModel, Keyed, Base):
    """Its text has a mark of each write that it has seen."""

    __tablename__ = "g_logs"
    __fence_resource__ = "log"
    text: Mapped[str] = mapped_column(String(200), default="")


class Counted(FencedModel, Keyed, Base):
    """The same, with SQLAlchemy's own counter beside the write id."""

    __tablename__ = "g_counted"
    __fence_resource__ = "log"
    text: Mapped[str] = mapped_column(String(200), default="")
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


class Account(FencedModel, Keyed, Base):
    __tablename__ = "g_accounts"
    __fence_resource__ = "account:{id}"
    balance: Mapped[int] = mapped_column(default=100)
    status: Mapped[str] = mapped_column(default="new")
    remark: Mapped[str] = mapped_column(default="none", deferred=True)
    changed: Mapped[int] = mapped_column(default=0, onupdate=1)
    notes: Mapped[list[Note]] = relationship()


class Note(Base):
    __tablename__ = "g_notes"
    id: Mapped[int] = mapped_column(primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("g_accounts.id"))
    text: Mapped[str] = mapped_column(default="more")


class Task(FencedModel, Keyed, Base):
    __tablename__ = "g_tasks"
    __fence_resource__ = "queue:{queue}"
    queue: Mapped[str]
    balance: Mapped[int] = mapped_column(default=100)


class Seat(FencedModel, Base):
    __tablename__ = "g_seats"
    __fence_resource__ = "room"
    row: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    letter: Mapped[str] = mapped_column(primary_key=True)
    guest: Mapped[str | None]


class Document(FencedModel, Keyed, Base):
    __tablename__ = "g_documents"
    __fence_resource__ = "document:{id}"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "document"}  # noqa: RUF012
    kind: Mapped[str]
    title: Mapped[str] = mapped_column(default="new")


class Report(Document):
    __tablename__ = "g_reports"
    __mapper_args__ = {"polymorphic_identity": "report"}  # noqa: RUF012
    id: Mapped[int] = mapped_column(ForeignKey("g_documents.id"), primary_key=True, autoincrement=False)
    pages: Mapped[int] = mapped_column(default=0)


fences = fence_table(Base.metadata)
RECEIPTS = receipt_table(Base.metadata)
orders: Any = Order.__table__
FENCE = 5


def fenced(
    model: type[Any], *keys: int, fence: int = FENCE, **values: Any
) -> dict[Any, list[dict[str, Any]]]:
    """Return ROWS of one model, with these keys and a fence."""
    return {model: [{"id": key, "last_fencing_token": fence, **values} for key in keys]}


def leases(token: int) -> tuple[Lease, ...]:
    return tuple(Lease(resource, token) for resource in ("account:1", "queue:a", "room"))


def holder(engine: Engine, token: int = NEW, **options: Any) -> Session:
    return holding(engine, *leases(token), **options)


def balance(engine: Engine) -> int:
    (found,) = rows_of(engine, select(Account.balance))
    return int(found)


def fence(engine: Engine) -> int:
    (found,) = rows_of(engine, select(Account.last_fencing_token))
    return int(found)


def standing(engine: Engine, model: type[Any] = Order) -> dict[int, tuple[str, int]]:
    found = rows_of(engine, select(model.id, model.status, model.last_fencing_token))
    return {key: (status, fence) for key, status, fence in found}
