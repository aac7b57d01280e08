"""A daemon that may run in several copies, of which one leads: `python examples/leader.py sqlite:///daemon.db`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fencelock
from fencelock import FencedModel, StaleReadError, Term


class Base(DeclarativeBase):
    """The base of the model."""


class Report(FencedModel, Base):
    """A row that only the leader writes: the lock of its name guards it."""

    __tablename__ = "reports"
    __fence_resource__ = "reports"
    id: Mapped[int] = mapped_column(primary_key=True)
    count: Mapped[int]


engine = create_engine(sys.argv[1])
fencelock.configure(engine)


def work(term: Term) -> None:
    """Count, until the term ends. A late write is refused, and `run` waits for the next term."""
    print(f"{os.getpid()} leads with token {term.token}", flush=True)
    while term.wait(0.1):
        with Session(engine) as session, suppress(StaleReadError):  # the leader before has written meanwhile
            report = session.get(Report, 1) or Report(id=1, count=0)
            report.count += 1
            session.add(report)
            session.commit()
    print(f"{os.getpid()} leads no more", flush=True)


if __name__ == "__main__":
    fencelock.exit_on_signals()
    with fencelock.fenced_lock("reports: table"):
        Base.metadata.create_all(engine)
    fencelock.leader("reports", ttl=2.0).run(work)
