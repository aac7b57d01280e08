"""What a plain table pays for a fenced one elsewhere in the process.

Two processes at a time, one that has never imported the guard and one that has a fenced model, flush and load
the same plain table in short turns on one core, so that whatever else the machine does hits both alike. The
processor's time counts, and the median of several pairs, for no two processes are alike in memory.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from typing import Final

from rich.console import Console
from rich.progress import track

from benchmarks.report import Goal, Section

_LIMIT: Final = 1.01
_PAIRS, _ROUNDS, _TURNS = 25, 200, 4
_CASES: Final = ("flush of 10", "SELECT of 100")
_KINDS: Final = ("without", "with")

_PROGRAM = """
import os, sys, time
from sqlalchemy import create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

if hasattr(os, "sched_setaffinity"):  # both on one core, whose neighbours disturb both alike
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

class Base(DeclarativeBase): pass

class Plain(Base):
    __tablename__ = "plain"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int]

if sys.argv[1] == "with":
    from fencelock.guard import FencedModel
    class Fenced(FencedModel, Base):
        __tablename__ = "fenced"
        __fence_resource__ = "fenced"
        id: Mapped[int] = mapped_column(primary_key=True)

engine = create_engine("sqlite://")
Plain.__table__.create(engine)
with Session(engine) as session:
    session.add_all(Plain(value=0) for _ in range(100))
    session.commit()
    for _ in sys.stdin:
        flushes = loads = 0
        for _ in range(int(sys.argv[2])):
            began = time.process_time_ns()
            rows = session.scalars(select(Plain)).all()
            loads += time.process_time_ns() - began
            for row in rows[:10]:
                row.value += 1
            began = time.process_time_ns()
            session.flush()
            flushes += time.process_time_ns() - began
            session.rollback()
        print(flushes, loads, flush=True)
"""


class _Worker:
    """A process that does a few turns when it is told to."""

    def __init__(self, kind: str, stack: ExitStack) -> None:
        self._process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, kind, str(_TURNS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
        )

    def turn(self) -> list[float]:
        """Return the µs of one flush and of one SELECT."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        return [int(number) / 1000 / _TURNS for number in self._process.stdout.readline().split()]


def _quick(turns: list[list[float]], at: int) -> float:
    """Return the tenth of what turns took that was quickest: what disturbs one only ever makes it slower."""
    return statistics.quantiles((turn[at] for turn in turns), n=10)[0]


def measure(console: Console, pairs: int = _PAIRS, rounds: int = _ROUNDS) -> tuple[Section, list[Goal]]:
    """Return a table, and the goals that it decides."""
    taken: list[dict[str, list[list[float]]]] = []
    for _ in track(range(pairs), "bystander", console=console, transient=True):
        taken.append({kind: [] for kind in _KINDS})
        with ExitStack() as stack:
            workers = {kind: _Worker(kind, stack) for kind in _KINDS}
            for number in range(-rounds // 10, rounds):
                for kind in _KINDS if number % 2 else _KINDS[::-1]:
                    turn = workers[kind].turn()
                    if number >= 0:
                        taken[-1][kind].append(turn)
    rows, goals = [], []
    for at, case in enumerate(_CASES):
        alone, beside = ([_quick(pair[kind], at) for pair in taken] for kind in _KINDS)
        ratios = [mine / theirs for mine, theirs in zip(beside, alone, strict=True)]
        ratio = statistics.median(ratios)
        times = (f"{statistics.median(alone):.1f}", f"{statistics.median(beside):.1f}")
        rows.append((case, *times, f"{ratio:.3f}", f"{min(ratios):.3f} … {max(ratios):.3f}"))
        goals.append(
            Goal.at_most(f"a plain table beside a fenced one ÷ alone, {case}, SQLite", _LIMIT, ratio)
        )
    note = (
        "µs of the processor, SQLite in memory: without the guard in the process, and with a fenced model. "
        f"Of {pairs} pairs of processes, {rounds} turns each, of which the quickest tenth counts."
    )
    columns = ("case", "without", "with", "ratio", "lowest … highest")
    return Section("A plain table", columns, rows, note), goals
