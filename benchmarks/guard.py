"""What the guard costs a flush: guarded beside plain beside `version_id_col`, interleaved in one run.

Each round changes N loaded objects of each model and flushes, in random order, so that whatever else the
machine does hits all of them alike. The flush alone is timed: no load, no commit. Medians are shown with the
ratio to the plain flush of the same round.

`--bystander` measures instead what it costs tables and engines that are not fenced that the process has a
fenced model at all: flushes and loads of the plain table by processes that have never imported the guard and
by processes that have, in turns.

    python -m benchmarks.guard
    python -m benchmarks.guard --database sqlite --rounds 300
    python -m benchmarks.guard --bystander
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sqlalchemy import Engine, Identity, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock.embedded import Postgres
from fencelock.guard import FencedModel, bind
from fencelock.lease import Lease

SIZES = (1, 10, 1000)


class Base(DeclarativeBase):
    """Tables of this benchmark."""


class Plain(Base):
    """What an application has without fencelock."""

    __tablename__ = "bench_plain"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    name: Mapped[str]
    value: Mapped[int]


class Guarded(FencedModel, Base):
    """The same with a fence; one resource guards the table."""

    __tablename__ = "bench_guarded"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    name: Mapped[str]
    value: Mapped[int]


class GuardedByRow(FencedModel, Base):
    """The same with a resource that is made of a column."""

    __tablename__ = "bench_guarded_by_row"
    __fence_resource__ = "shop:{shop}"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    shop: Mapped[int] = mapped_column(default=1)
    name: Mapped[str]
    value: Mapped[int]


class Versioned(Base):
    """SQLAlchemy's optimistic locking, which users reach for; it lets in a stale writer that reads again."""

    __tablename__ = "bench_versioned"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    name: Mapped[str]
    value: Mapped[int]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - SQLAlchemy's way to declare it


Model = type[Plain] | type[Guarded] | type[GuardedByRow] | type[Versioned]
MODELS: dict[str, Model] = {
    "plain": Plain,
    "guarded": Guarded,
    "guarded, by row": GuardedByRow,
    "version_id_col": Versioned,
}
LEASES = {"guarded": Lease("bench", 7), "guarded, by row": Lease("shop:1", 7)}


def session_for(engine: Engine, name: str) -> Session:
    """Return a session that may write the model."""
    session = Session(engine)
    if name in LEASES:
        bind(session, LEASES[name])
    return session


def fill(engine: Engine, rows: int) -> None:
    """Make the tables, with so many rows each."""
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    for name, model in MODELS.items():
        with session_for(engine, name) as session:
            session.add_all(model(name=f"name {number}", value=number) for number in range(rows))
            session.commit()


def flush_seconds(engine: Engine, name: str, rows: int) -> float:
    """Change so many objects, and return how long the flush took."""
    model = MODELS[name]
    with session_for(engine, name) as session:
        items: Sequence[Any] = session.scalars(select(model).order_by(model.id).limit(rows)).all()
        for item in items:
            item.value += 1
        began = time.perf_counter()
        session.flush()
        took = time.perf_counter() - began
        session.rollback()
    return took


def select_seconds(engine: Engine, name: str, rows: int) -> float:
    """Load so many objects, and return how long that took."""
    model = MODELS[name]
    with session_for(engine, name) as session:
        began = time.perf_counter()
        session.scalars(select(model).order_by(model.id).limit(rows)).all()
        return time.perf_counter() - began


CASES = {"flush": flush_seconds, "select": select_seconds}


def measure(engine: Engine, rounds: int, console: Console) -> None:
    """Print a table for one database."""
    table = Table(
        title=f"{engine.dialect.name}: median ms, and ratio to plain (median of the rounds' ratios)"
    )
    table.add_column("case")
    for name in MODELS:
        table.add_column(name, justify="right")
    rng = random.Random(1)
    for case, seconds_of in CASES.items():
        for rows in SIZES:
            turns = max(20, rounds // (1 if rows < 1000 else 10))
            taken: dict[str, list[float]] = {name: [] for name in MODELS}
            for turn in track(range(-5, turns), f"{engine.dialect.name} {case} {rows}", console=console):
                for name in rng.sample(list(MODELS), len(MODELS)):
                    seconds = seconds_of(engine, name, rows)
                    if turn >= 0:
                        taken[name].append(seconds)
            cells = []
            for samples in taken.values():
                ratios = [mine / plain for mine, plain in zip(samples, taken["plain"], strict=True)]
                cells.append(f"{statistics.median(samples) * 1000:.2f}  {statistics.median(ratios):.2f}")
            table.add_row(f"{case} {rows}", *cells)
    console.print(table)


_BYSTANDER = """
import sys, statistics, time
from sqlalchemy import create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

class Base(DeclarativeBase): pass

class Plain(Base):
    __tablename__ = "plain"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int]

if sys.argv[1] == "with":
    from fencelock.guard import FencedModel
    class Fenced(FencedModel, Base):
        __tablename__ = "fenced"
        id: Mapped[int] = mapped_column(primary_key=True)

engine = create_engine("sqlite://")
Base.metadata.create_all(engine)
with Session(engine) as session:
    session.add_all(Plain(value=0) for _ in range(100))
    session.commit()
    flushes, loads = [], []
    for _ in range(int(sys.argv[2])):
        began = time.process_time_ns()
        rows = session.scalars(select(Plain)).all()
        loads.append(time.process_time_ns() - began)
        for row in rows[:10]:
            row.value += 1
        began = time.process_time_ns()
        session.flush()
        flushes.append(time.process_time_ns() - began)
        session.rollback()
for samples in (flushes, loads):
    print(statistics.median(samples) / 1000)
"""


def bystander(rounds: int, console: Console) -> None:
    """Print what a plain table pays for a fenced one elsewhere in the process."""
    taken: dict[str, list[list[float]]] = {"without": [], "with": []}
    for _ in track(range(7), "pairs of processes", console=console):
        for kind, runs in taken.items():
            command = [sys.executable, "-c", _BYSTANDER, kind, str(rounds)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            runs.append([float(line) for line in output.split()])
    for at, case in enumerate(("flush of 10", "select of 100")):
        without, beside = (min(run[at] for run in runs) for runs in taken.values())
        console.print(f"{case}: {without:.1f} µs without, {beside:.1f} µs with: {beside / without:.3f}")


@contextmanager
def engine_of(database: str) -> Iterator[Engine]:
    """Yield an engine on the database that is asked for."""
    if database == "postgresql":
        with Postgres() as server:
            engine = create_engine(server.create_database())
            yield engine
            engine.dispose()
    elif database == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            engine = create_engine(f"sqlite:///{folder}/guard.sqlite")
            yield engine
            engine.dispose()
    else:
        engine = create_engine(database)
        yield engine
        Base.metadata.drop_all(engine)
        engine.dispose()


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--database",
        action="append",
        help="sqlite, postgresql or a SQLAlchemy URL; may be given several times",
    )
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--bystander", action="store_true", help="measure an unfenced table instead")
    arguments = parser.parse_args()
    console = Console()
    console.print(f"Python {platform.python_version()}, SQLAlchemy {sqlalchemy.__version__}")
    if arguments.bystander:
        bystander(arguments.rounds, console)
        return
    for database in arguments.database or ["sqlite", "postgresql"]:
        with engine_of(database) as engine:
            fill(engine, max(SIZES))
            measure(engine, arguments.rounds, console)


if __name__ == "__main__":
    main()
