"""Orders that are shipped by Celery, and a report for each minute, however many beats run."""

import os
from datetime import UTC, datetime

from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import crontab
from sqlalchemy import create_engine, exc, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import (
    AuthorityError,
    CommitInDoubtError,
    FencedModel,
    LockLostError,
    LockTimeoutError,
    StaleTokenError,
    fenced,
    fenced_once,
    receipt_table,
)

BROKER = os.environ.get("BROKER_URL", "redis://localhost:6379/1")
RESULTS = os.environ.get("RESULT_URL", "redis://localhost:6379/2")
DATABASE = os.environ.get("DATABASE_URL", "postgresql+psycopg://user@host/shop")

app = Celery("tasks", broker=BROKER, backend=RESULTS)
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, broker_connection_retry_on_startup=True)
engine = create_engine(  # PostgreSQL: no paused worker keeps a row for longer than a ttl, 30 s by default
    DATABASE, connect_args={"options": "-c idle_in_transaction_session_timeout=30s -c lock_timeout=5s"}
)


class Base(DeclarativeBase): ...


class Order(FencedModel, Base):
    __tablename__ = "orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    parcel: Mapped[str | None]


class Report(Base):
    __tablename__ = "reports"
    id: Mapped[int] = mapped_column(primary_key=True)
    slot: Mapped[str]
    parcels: Mapped[int]


receipt_table(Base.metadata)

AGAIN = (LockTimeoutError, AuthorityError, StaleTokenError)  # nothing was written
LOOK_FIRST = (LockLostError, CommitInDoubtError)  # perhaps it was: the task looks first
CONNECTION = (exc.OperationalError, exc.InterfaceError, exc.InternalError, exc.TimeoutError)  # likewise
persistent = app.task(  # retried without an end: a task that has failed is gone from the queue
    autoretry_for=AGAIN + LOOK_FIRST + CONNECTION, retry_backoff=True, retry_backoff_max=60, max_retries=None
)


def carrier(key: str) -> str:
    """Order a parcel; the same key brings the same parcel."""
    return f"parcel of {key}"


@persistent
@fenced("order:{order_id}", timeout=1)
def ship(order_id: int) -> str:
    with Session(engine, expire_on_commit=False) as session:
        order = session.get_one(Order, order_id)
        session.commit()  # no transaction is open while the carrier answers
        if order.parcel is None:  # an earlier try may have been committed
            order.parcel = carrier(key=f"ship order {order_id}")
            session.commit()
    return order.parcel


@fenced_once("report:{slot}", "report", gate=False, timeout=1)  # no fenced row, so no gate
def write_report(session: Session, slot: str) -> int:
    parcels = session.scalar(select(func.count(Order.parcel))) or 0
    session.add(Report(slot=slot, parcels=parcels))
    return parcels


@persistent
def report(slot: str) -> int:
    return write_report(engine, slot)


def this_minute() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M}"


app.conf.beat_schedule = {  # beat says which slot it is, by its own clock, when it sends the task
    "report": {"task": report.name, "schedule": crontab(), "kwargs": {"slot": BeatLazyFunc(this_minute)}},
}
