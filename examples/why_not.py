"""Why not SERIALIZABLE, an advisory lock, or FOR UPDATE SKIP LOCKED? What each one does with a late write.

Run `python examples/why_not.py`; it brings a PostgreSQL, or takes the URL of one. Ten pieces are in stock.
Worker A reads them and is paused. Worker B takes one piece. Then A writes what it has computed from its read.
If A's write is accepted, B's piece is sold twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Final

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import FencedModel, FencelockError, configure, fenced_lock, lease_table
from proof.servers import Postgres


class Base(DeclarativeBase):
    """The models."""


class Stock(Base):
    """A plain row."""

    __tablename__ = "why_stock"
    id: Mapped[int] = mapped_column(primary_key=True)
    pieces: Mapped[int]
    taken_by: Mapped[str] = mapped_column(default="")


class Fenced(FencedModel, Base):
    """A fenced row."""

    __tablename__ = "why_fenced"
    __fence_resource__ = "stock:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    pieces: Mapped[int]


def take(session: Session) -> None:
    """Take one piece, as worker B does in a transaction of its own."""
    with session.begin():
        session.get_one(Stock, 1, with_for_update=True).pieces -= 1


def serializable(engine: Engine, *, open_meanwhile: bool) -> None:
    """A's read and its write are two transactions, or one that stays open while A is paused."""
    strict = engine.execution_options(isolation_level="SERIALIZABLE")
    with Session(strict) as a, Session(strict) as b:
        pieces = a.get_one(Stock, 1).pieces
        if not open_meanwhile:
            a.rollback()
        take(b)
        a.execute(text("UPDATE why_stock SET pieces = :left WHERE id = 1"), {"left": pieces - 1})
        a.commit()


def advisory(engine: Engine) -> None:
    """The server, or a device of the network, ends A's idle session, and with it the lock."""
    with engine.connect() as lock, Session(engine) as a, Session(engine) as b:
        lock.execute(text("SELECT pg_advisory_lock(1)"))
        its = lock.scalar(text("SELECT pg_backend_pid()"))
        pieces = a.get_one(Stock, 1).pieces
        a.rollback()
        b.execute(text("SELECT pg_terminate_backend(:its, 1000)"), {"its": its})
        b.execute(text("SELECT pg_advisory_lock(1)"))  # B has it at once
        b.rollback()
        take(b)
        a.get_one(Stock, 1).pieces = pieces - 1
        a.commit()
        lock.invalidate()


def skip_locked(engine: Engine) -> None:
    """A marks the row and commits, because its work takes minutes; B takes the mark over after a while."""
    mark = text(
        "UPDATE why_stock SET taken_by = :worker "
        "WHERE id IN (SELECT id FROM why_stock FOR UPDATE SKIP LOCKED)"
    )
    with Session(engine) as a, Session(engine) as b:
        a.execute(mark, {"worker": "A"})
        pieces = a.get_one(Stock, 1).pieces
        a.commit()
        b.execute(mark, {"worker": "B"})
        b.commit()
        take(b)
        a.get_one(Stock, 1).pieces = pieces - 1
        a.commit()


def fencelock(engine: Engine) -> None:
    """A's lease ends while A is paused; B waits for that, and writes under a lease of its own."""

    def work() -> None:
        with fenced_lock("stock:1"), Session(engine) as b, b.begin():
            b.get_one(Fenced, 1).pieces -= 1

    with fenced_lock("stock:1", ttl=1, renew=False), Session(engine) as a, ThreadPoolExecutor() as threads:
        one = a.get_one(Fenced, 1)
        a.commit()
        threads.submit(work).result()
        one.pieces = 10 - 1
        a.commit()


WAYS: Final[dict[str, Callable[[Engine], None]]] = {
    "SERIALIZABLE, the transaction stays open": partial(serializable, open_meanwhile=True),
    "SERIALIZABLE, a transaction for the read": partial(serializable, open_meanwhile=False),
    "pg_advisory_lock, its session ends": advisory,
    "FOR UPDATE SKIP LOCKED, and a mark": skip_locked,
    "fencelock": fencelock,
}


def try_all(engine: Engine) -> None:
    """Let A write late in each way, and print what the database does."""
    Base.metadata.create_all(engine)
    for name, way in WAYS.items():
        with engine.execution_options(fencelock="bypass").begin() as connection:
            for table in (Stock.__table__, Fenced.__table__):
                connection.execute(table.delete())  # type: ignore[attr-defined]
                connection.execute(table.insert(), {"id": 1, "pieces": 10})  # type: ignore[attr-defined]
        try:
            way(engine)
            print(f"{name}: accepted, so one piece is sold twice")
        except (DBAPIError, FencelockError) as error:
            reason = error.orig if isinstance(error, DBAPIError) else error
            print(f"{name}: refused ({str(reason).splitlines()[0]})")


def main() -> None:
    """Find a database, and try."""
    with ExitStack() as stack:
        url = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(Postgres()).create_database()
        engine = create_engine(url)
        stack.callback(engine.dispose)
        lease_table(Base.metadata)
        configure(engine)
        try_all(engine)


if __name__ == "__main__":
    main()
