"""What protection costs: the guard beside nothing, `version_id_col` and locks of rows, in one run.

In each round all entrants (`benchmarks.guarded`) do the same to as many rows, in random order, so that
whatever else the machine does hits all of them alike; ratios are taken within a round.

    python -m benchmarks.guard
    python -m benchmarks.guard --database sqlite --database postgresql+asyncpg --case "flush of updates"
    python -m benchmarks.guard --docs benchmarks    # also writes guard.md and .svg

Databases: `sqlite` (in memory) and `postgresql` (embedded) by default, both drivers of the latter, and
MariaDB where FENCELOCK_TEST_MARIADB_URL names one or one answers at its standard port; or SQLAlchemy URLs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import sqlalchemy
from rich.console import Console
from rich.progress import track
from sqlalchemy import URL, create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from benchmarks import bystander, plot, sections
from benchmarks.guarded import CASES, ENTRANTS, GUARDED, PLAIN, WIDER, Base, Entrant, Taken, fill, perform
from benchmarks.report import Bar, Goal, Report, Section, Spread
from proof.servers import Postgres
from proof.servers.mariadb import mariadb

SIZES = (1, 10, 1000)
#: Rounds for each size, as a share of what is asked for.
_SHARE = {1: 1.0, 10: 0.5, 1000: 0.2}
_FEWEST_ROUNDS = 5
_WARM_UP = 3
_FLUSH_LIMITS = {
    "postgresql+psycopg": {1: 1.2, 10: 1.2, 1000: 1.25},
    "sqlite": {1: 1.3, 10: 1.35, 1000: 1.3},
}
_SELECT_LIMIT = 1.1
_PREAMBLE = """\
Written by `python -m benchmarks.guard`. In every round all entrants did the same to rows of a table of
their own, in random order; a figure is the median of the rounds' ratios to the plain table of three columns,
which protects nothing. The tables show elapsed time. The goals count client CPU, with quartiles.
"One more column" protects nothing either: it tells what a wider row costs by itself, which is most of what
the guard adds to a SELECT of many rows.
Loading what is changed is not counted, but all that protects it is. A claim is compared with a plain
`SELECT … FOR UPDATE` (SQLite has none, and reads)."""

_T = TypeVar("_T")


class Database:
    """Where it takes place."""

    def __init__(self, url: URL) -> None:
        self.name = url.drivername
        self._engine = create_engine(url)

    def run(self, work: Callable[[Session], _T], *, commit: bool = False) -> _T:
        """Do something in a session of its own, and return what that returns."""
        with Session(self._engine) as session:
            result = work(session)
            (session.commit if commit else session.rollback)()
        return result

    def close(self) -> None:
        """Close connections."""
        self._engine.dispose()


class AsyncDatabase(Database):
    """The same through a driver for asyncio."""

    def __init__(self, url: URL) -> None:
        self.name = url.drivername
        self._async_engine = create_async_engine(url)
        self._runner = asyncio.Runner()

    def run(self, work: Callable[[Session], _T], *, commit: bool = False) -> _T:
        """Do something in a session of its own, and return what that returns."""
        return self._runner.run(self._run(work, commit=commit))

    async def _run(self, work: Callable[[Session], _T], *, commit: bool) -> _T:
        async with AsyncSession(self._async_engine) as session:
            result = await session.run_sync(work)
            await (session.commit if commit else session.rollback)()
        return result

    def close(self) -> None:
        """Close connections."""
        self._runner.run(self._async_engine.dispose())
        self._runner.close()


def prepare(database: Database) -> None:
    """Make the tables, and fill them."""

    def make(session: Session) -> None:
        Base.metadata.drop_all(session.connection())
        Base.metadata.create_all(session.connection())

    database.run(make, commit=True)
    for entrant in ENTRANTS:
        database.run(partial(fill, entrant), commit=True)


@dataclass(slots=True)
class Measured:
    """What all entrants took for one case.

    Attributes:
        rounds: what each round took, for each entrant.
    """

    rounds: dict[Entrant, list[Taken]] = field(default_factory=lambda: {entrant: [] for entrant in ENTRANTS})

    def ratios(self, entrant: Entrant, other: Entrant = PLAIN) -> list[Taken]:
        """Return how much more than the plain table, or another entrant, it took in each round."""
        pairs = zip(self.rounds[entrant], self.rounds[other], strict=True)
        return [Taken(mine.elapsed / theirs.elapsed, mine.cpu / theirs.cpu) for mine, theirs in pairs]

    def spread(self, entrant: Entrant, other: Entrant = PLAIN, *, of_cpu: bool = False) -> Spread:
        """Return the median of that and the quartiles, because single rounds have outliers."""
        ratios = [ratio.cpu if of_cpu else ratio.elapsed for ratio in self.ratios(entrant, other)]
        low, median, high = statistics.quantiles(ratios, n=4)
        return Spread(median, low, high)


Key = tuple[str, int]


def measure(database: Database, cases: Sequence[str], rounds: int, console: Console) -> dict[Key, Measured]:
    """Measure some cases in all sizes."""
    measured = {(case, rows): Measured() for rows in SIZES for case in cases}
    for (case, rows), results in measured.items():
        entered = [entrant for entrant in ENTRANTS if entrant.takes_part(case)]
        turns = max(_FEWEST_ROUNDS, round(rounds * _SHARE[rows]))
        label = f"{database.name}, {case}, {rows}"
        for turn in track(range(-_WARM_UP, turns), label, console=console, transient=True):
            for entrant in random.sample(entered, len(entered)):
                taken = database.run(partial(perform, CASES[case], entrant, rows))
                if turn >= 0:
                    results.rounds[entrant].append(taken)
    return measured


def section_of(name: str, measured: dict[Key, Measured]) -> Section:
    """Return what one database came to, as a table; its picture shows the flush of updates."""
    rows = []
    for (case, size), results in measured.items():
        plain = statistics.median(taken.elapsed for taken in results.rounds[PLAIN]) * 1000
        ratios = (
            f"{results.spread(entrant).median:.2f}" if entrant.takes_part(case) else ""
            for entrant in ENTRANTS[1:]
        )
        rows.append((f"{case}, {size:,}", f"{plain:.2f}", *ratios))
    bars = [
        Bar(f"{entrant.name} · {size:,}", results.spread(entrant))
        for (case, size), results in measured.items()
        if case == "flush of updates"
        for entrant in ENTRANTS[1:]
    ]
    columns = ("case, rows", "plain, ms", *(entrant.name for entrant in ENTRANTS[1:]))
    return Section(name, columns, rows, "", "a flush of so many updates, ÷ plain", bars)


def goals_of(name: str, measured: dict[Key, Measured]) -> list[Goal]:
    """Return how the guard compares with what was aimed at, in client CPU; a SELECT also with a wider row."""
    goals = []
    for (case, size), results in measured.items():
        limits: dict[Entrant, float | None] = {}
        if case == "SELECT":
            limits = {PLAIN: _SELECT_LIMIT, WIDER: _SELECT_LIMIT}
        elif case == "flush of updates":
            limits = {PLAIN: _FLUSH_LIMITS.get(name, {}).get(size)}
        for other, limit in limits.items():
            if limit is not None:
                found = results.spread(GUARDED, other, of_cpu=True)
                what = f"{name}: {case}, {size:,}, guarded ÷ {other.name}, client CPU"
                measured_as = f"{found.median:.2f} ({found.low:.2f} … {found.high:.2f})"
                goals.append(Goal(what, f"≤ {limit:g}", measured_as, found.median <= limit))
    return goals


class Servers:
    """Finds databases by their names, and starts what is needed for them; all of it ends with the stack."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._postgres: Postgres | None = None

    def database(self, name: str) -> Database | None:
        """Return a database that is ready; None where there is no server."""
        url = self._url(name)
        if url is None:
            return None
        database = AsyncDatabase(url) if url.get_dialect().is_async else Database(url)
        self._stack.callback(database.close)
        prepare(database)
        return database

    def _url(self, name: str) -> URL | None:
        if name == "sqlite":
            return make_url("sqlite://")
        if name in {"postgresql", "postgresql+asyncpg"}:
            if self._postgres is None:
                self._postgres = self._stack.enter_context(Postgres())
            url = make_url(self._postgres.create_database())
            return url.set(drivername=name) if "+" in name else url
        return mariadb(self._stack) if name == "mariadb" else make_url(name)


def run(names: Sequence[str], cases: Sequence[str], rounds: int, console: Console) -> Report:
    """Measure on all databases."""
    report = Report(title="Measured: the guard", preamble=_PREAMBLE)
    versions = f"Python {platform.python_version()}, SQLAlchemy {sqlalchemy.__version__}"
    report.about = f"{rounds} rounds of one row, fewer of more; {versions}, {os.cpu_count()} cores."
    with ExitStack() as stack:
        servers = Servers(stack)
        for name in names:
            database = servers.database(name)
            if database is None:
                report.absent.append(f"{name}: no server answers")
                continue
            measured = measure(database, cases, rounds, console)
            report.sections.append(section_of(database.name, measured))
            report.goals += goals_of(database.name, measured)
            console.print(report.sections[-1].table())
    return report


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.guard", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--database",
        action="append",
        metavar="NAME",
        help="sqlite, postgresql, postgresql+asyncpg, mariadb, a URL",
    )
    parser.add_argument("--case", action="append", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=200, help="of one row; fewer of more (%(default)s)")
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="write guard.md and guard.svg there")
    options = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console.width = 150
    began = time.monotonic()
    report = run(
        options.database or ["sqlite", "postgresql", "postgresql+asyncpg", "mariadb"],
        options.case or list(CASES),
        options.rounds,
        console,
    )
    whole = partial(sections.measure, console, options.rounds)
    for measure_more in (whole, partial(bystander.measure, console)):
        section, goals = measure_more()
        report.sections.append(section)
        report.goals += goals
        console.print(section.table())
    console.print(report.summary().table())
    console.print(f"{report.about} It took {(time.monotonic() - began) / 60:.1f} minutes.")
    if options.docs is not None:
        plot.draw(report.sections, report.about, options.docs / "guard.svg")
        (options.docs / "guard.md").write_text(report.markdown("guard.svg"))


if __name__ == "__main__":
    main()
