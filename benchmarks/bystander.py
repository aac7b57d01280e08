"""What a plain table pays for a fenced one elsewhere in the process.

Flushes and loads of the same plain table by processes that have never imported the guard and by processes
that have a fenced model, in turns; the processor's time, of which the best of several runs counts.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from rich.console import Console
from rich.progress import track

from benchmarks.report import Goal, Section

_LIMIT = 1.01
_RUNS, _TURNS = 9, 1500
_CASES = ("flush of 10", "SELECT of 100")

_PROGRAM = """
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
Plain.__table__.create(engine)
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


def measure(console: Console, runs: int = _RUNS, turns: int = _TURNS) -> tuple[Section, list[Goal]]:
    """Return a table, and the goals that it decides."""
    taken: dict[str, list[list[float]]] = {"without": [], "with": []}
    for _ in track(range(runs), "bystander", console=console, transient=True):
        for kind, results in taken.items():
            command = [sys.executable, "-c", _PROGRAM, kind, str(turns)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results.append([float(line) for line in output.split()])
    rows, goals = [], []
    for at, case in enumerate(_CASES):
        without, beside = ([run[at] for run in results] for results in taken.values())
        ratio = min(beside) / min(without)
        rows.append((case, f"{min(without):.1f}", f"{min(beside):.1f}", f"{ratio:.3f}"))
        spread = statistics.quantiles(without, n=4)
        console.print(
            f"{case}: quartiles without the guard {spread[0]:.1f} … {spread[2]:.1f} µs", style="dim"
        )
        goals.append(
            Goal.at_most(f"a plain table beside a fenced one ÷ alone, {case}, SQLite", _LIMIT, ratio)
        )
    note = (
        "µs of the processor, SQLite in memory: without the guard in the process, and with a fenced model. "
        "Any listener of the class `Engine`, one that does nothing and is never called included, costs 1.03 "
        "(flush) and 1.045 (SELECT): each connection of SQLAlchemy then makes a list of listeners for every "
        "event of its own. The guard cannot do without: `fencelock/guard/_install.py` says why."
    )
    return Section("A plain table", ("case", "without", "with", "ratio"), rows, note), goals
