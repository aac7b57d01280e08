"""Databases that grant leases, beside peers, other ways to lock there, and the bare statements.

In every case all contenders (`benchmarks.on_databases`) use the same server, each from processes of its own.
They take turns in short rounds of random order, and ratios are taken within a round.

    python -m benchmarks.authorities
    python -m benchmarks.authorities --quick        # few short rounds, to see that everything works
    python -m benchmarks.authorities --docs docs    # also writes authority-benchmarks.md and .svg

PostgreSQL is embedded, with a disk that is waited for, unless --postgresql names another. MariaDB takes part
where FENCELOCK_TEST_MARIADB_URL names one or one answers at its standard port. Peers take part if they are
installed: `pip install 'fencelock[bench]'`. mithril-locks gets a home of its own (`benchmarks.peers`);
`--no-homes` leaves it out.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import sqlalchemy
from rich.console import Console
from sqlalchemy import URL, create_engine, make_url

from benchmarks import deposits, handovers, on_databases, plot, rates
from benchmarks.arena import Arena, median_ratio, ratios
from benchmarks.contenders import FENCELOCK, Contender
from benchmarks.guard import mariadb
from benchmarks.handovers import PROCESSES, Relay
from benchmarks.on_databases import (
    BARE,
    DLOCK,
    DLOCK_KEPT,
    MARIADB,
    MITHRIL,
    NOT_PREPARED,
    POSTGRESQL,
    SQLITE,
    TWO_TRANSACTIONS,
)
from benchmarks.peers import Homes
from benchmarks.rates import Rates
from benchmarks.report import Bar, Goal, Report, Section, Spread
from fencelock import Database
from proof.servers import Postgres

_WIDTH = 150
_TASKS = 100
_DURABLE = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
_PREAMBLE = """\
Written by `make bench-authorities`, not by hand. All locks of a table used the same database in the same run
and took turns in short rounds of random order, each in processes of its own. Medians of the rounds are shown,
with the slowest and the fastest round; ratios are medians of the ratios of each round. Server and clients
share the machine. A COMMIT waits for the disk."""
_MEANING = """\
- **Two bare statements** are the least that a lease in a table needs: one statement that acquires, one that
  releases, each a transaction of its own. fencelock sends the same number. The difference is SQLAlchemy, a
  new nonce, an end that no clock can move, and what an acquisition does when it is interrupted.
  psycopg prepares statements that are used often, and fencelock lets it, unless PgBouncer stands between.
- **Advisory locks and GET_LOCK** write nothing, so that no disk is waited for. `SELECT … FOR UPDATE` waits
  once, or not at all, where two statements wait twice. None of them gives a token. All of them occupy a
  connection for as long as the lock is held, and a holder that hangs keeps the lock until that ends.
- **Hand-overs**: locks of the server wake up the next in line. PostgreSQL calls the next of fencelock's
  processes, which then acquires: two round trips more. Elsewhere it looks again after a few milliseconds.
- **Deposits** are what a hot row of an application costs in all: the waits, the lock, and the transaction.
- **SQLite** waits for the disk once for each transaction in WAL mode, and more often without."""

#: What is to be reached: at least this share of the rate of another.
_LIMITS = {
    POSTGRESQL: ((DLOCK, 0.9), (DLOCK_KEPT, 0.9), (MITHRIL, 1.0), (NOT_PREPARED, 1.0)),
    MARIADB: (),
    SQLITE: ((TWO_TRANSACTIONS, 0.6), (f"{TWO_TRANSACTIONS}, WAL", 0.6)),
}


class Places:
    """The databases of a run, which are gone with its stack.

    Args:
        stack: what ends them.
        postgresql: the URL of a server on which a database may be made; None for an embedded one.
    """

    def __init__(self, stack: ExitStack, postgresql: str | None) -> None:
        self.absent: list[str] = []
        self.versions: list[str] = []
        self.urls: dict[str, str] = {}
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fencelock-"))
        self._add(SQLITE, f"sqlite:///{folder}/app.db")
        if postgresql is None:
            server = stack.enter_context(Postgres(settings=_DURABLE))
            self._add(POSTGRESQL, server.create_database())
        else:
            self._add(POSTGRESQL, _made_on(make_url(postgresql), stack))
        if (url := mariadb(stack)) is None:
            self.absent.append(f"{MARIADB} does not take part: no server answers")
        else:
            self._add(MARIADB, url.render_as_string(hide_password=False))

    def _add(self, name: str, url: str) -> None:
        with Database(url) as authority:
            authority.init()
        engine = create_engine(url)
        with engine.begin() as connection:
            if name in on_databases.TABLES:
                connection.exec_driver_sql(on_databases.TABLES[name])
            numbers = connection.dialect.server_version_info or ()
        engine.dispose()
        self.urls[name] = url
        self.versions.append(f"{name} {'.'.join(map(str, numbers))}")


def _made_on(server: URL, stack: ExitStack) -> str:
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    name = f"fencelock_bench_{os.getpid()}"
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")

    def drop() -> None:
        with engine.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
        engine.dispose()

    stack.callback(drop)
    return server.set(database=name).render_as_string(hide_password=False)


def alone(arena: Arena, database: str) -> None:
    """One caller."""
    name = f"{database}, one caller"
    results = rates.measure(arena, name, on_databases.ALONE[database], seconds=arena.seconds)
    by_name = {one.contender.name: one for one in results}
    goals = [
        Goal.at_least(
            f"{database}: {ours} ÷ {other}", limit, median_ratio(by_name[ours].rates, by_name[other].rates)
        )
        for other, limit in _LIMITS[database]
        for ours in (BARE, FENCELOCK)
        if ours in by_name and other in by_name
    ]
    arena.add(_section_of_rates(name, results, by_name.get(FENCELOCK)), goals)


def in_tasks(arena: Arena) -> None:
    """Tasks of one loop, a resource each, on PostgreSQL."""
    name = f"{POSTGRESQL}, asyncio, {_TASKS} tasks, a resource each"
    results = rates.measure(arena, name, on_databases.TASKS, width=_TASKS, seconds=2 * arena.seconds)
    baseline = next((one for one in results if one.contender is on_databases.TASKS[0]), None)
    arena.add(_section_of_rates(name, results, baseline))


def hand_over(arena: Arena, database: str) -> None:
    """Processes that all want one resource."""
    name = f"{database}, {PROCESSES} processes, one resource"
    ranked = handovers.measure(arena, name, on_databases.CONTENDING[database])
    arena.add(_section_of_relays(name, ranked))


def deposit(arena: Arena, database: str) -> None:
    """Callers of a web application who all write one row."""
    fewer = Arena(arena.urls, arena.console, min(3, arena.rounds), arena.seconds, arena.homes, arena.report)
    elapsed = {POSTGRESQL: 1.7, MARIADB: 2.5, SQLITE: 2.0}[database]
    deposits.deposit(fewer, database, deposits.Crowd(200, 1), elapsed=elapsed, p99=None)
    deposits.deposit(fewer, database, deposits.Crowd(8, 50), elapsed=None, p99=5.0)


def _section_of_rates(title: str, results: Sequence[Rates], baseline: Rates | None) -> Section:
    ours = FENCELOCK if baseline is None else baseline.contender.name
    rows = [
        (
            one.contender.name,
            f"{statistics.median(one.rates):,.0f}",
            f"{Spread.of(one.rates)}",
            *(_with_spread(ratios(baseline.rates, one.rates)) if baseline else ("", "")),
            f"{1e6 * statistics.median(one.costs):,.0f}",
        )
        for one in results
    ]
    return Section(
        title,
        ("lock", "per second", "slowest … fastest", f"{ours} ÷ it", "lowest … highest", "CPU µs"),
        rows,
        "Acquired and released, per second. CPU: of the client alone, each time.",
        "acquired and released per second",
        _bars((one.contender, one.rates) for one in results),
    )


def _section_of_relays(title: str, ranked: Sequence[Relay]) -> Section:
    baseline = next((one for one in ranked if one.contender.name == FENCELOCK), None)
    rows = [
        (
            one.contender.name,
            f"{statistics.median(one.handovers):,.0f}",
            f"{Spread.of(one.handovers)}",
            f"{handovers.ratio(baseline, one):.2f}" if baseline else "",
            f"{statistics.median(one.acquisitions):,.0f}",
            f"{1e3 * statistics.median(one.longest):,.0f} (≤ {1e3 * max(one.longest):,.0f})",
            f"{1e6 * statistics.median(one.costs):,.0f}",
        )
        for one in ranked
    ]
    columns = (
        *("lock", "hand-overs/s", "slowest … fastest", f"{FENCELOCK} ÷ it"),
        *("acquisitions/s", "longest wait ms", "CPU µs"),
    )
    return Section(
        title,
        columns,
        rows,
        "A hand-over is an acquisition by another process than the one before; none works while it holds.",
        "hand-overs per second",
        _bars((one.contender, one.handovers) for one in ranked),
    )


def _bars(results: Iterable[tuple[Contender, Sequence[float]]]) -> list[Bar]:
    return [Bar(contender.label, Spread.of(values)) for contender, values in results]


def _with_spread(values: Sequence[float]) -> tuple[str, str]:
    spread = Spread.of(values)
    return f"{spread.median:.2f}", f"{spread.low:.2f} … {spread.high:.2f}"


def run(options: argparse.Namespace, console: Console) -> Report:
    """Measure on all databases."""
    report = Report("Measured: databases as authorities", _PREAMBLE, meaning=_MEANING)
    homes = Homes(None if options.no_homes else options.homes.absolute())
    rounds, seconds = (2, 0.1) if options.quick else (options.rounds, options.seconds)
    with ExitStack() as stack:
        places = Places(stack, options.postgresql)
        report.absent += places.absent
        report.about = (
            f"{rounds} rounds, turns of {seconds:g} s; Python {platform.python_version()}, SQLAlchemy "
            f"{sqlalchemy.__version__}, {', '.join(places.versions)}, {os.cpu_count()} cores."
        )
        arenas = {
            name: Arena([url], console, rounds, seconds, homes, report) for name, url in places.urls.items()
        }
        for name in (POSTGRESQL, MARIADB, SQLITE):
            if name in arenas:
                alone(arenas[name], name)
        in_tasks(arenas[POSTGRESQL])
        for name in (POSTGRESQL, MARIADB, SQLITE):
            if name in arenas:
                hand_over(arenas[name], name)
        for name in (POSTGRESQL, MARIADB, SQLITE):
            if name in arenas:
                deposit(arenas[name], name)
    return report


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.authorities", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each case (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.35, help="that a turn lasts (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="two rounds of a tenth of a second")
    parser.add_argument(
        "--postgresql", metavar="URL", help="of a server on which a database may be made; embedded by default"
    )
    parser.add_argument(
        "--docs", type=Path, metavar="FOLDER", help="write authority-benchmarks.md and .svg there"
    )
    parser.add_argument(
        "--homes", type=Path, default=Path(".venv-peers"), help="where peers are installed (%(default)s)"
    )
    parser.add_argument("--no-homes", action="store_true", help="do without the peers that need one")
    options = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    began = time.monotonic()
    report = run(options, console)
    for goal in report.goals:
        reached = "reached" if goal.holds else "missed"
        console.print(f"{reached}: {goal.what}, {goal.measured}, wanted {goal.wanted}", highlight=False)
    console.print(f"{report.about} It took {(time.monotonic() - began) / 60:.1f} minutes.")
    if options.docs is not None:
        plot.draw(report.sections, report.about, options.docs / "authority-benchmarks.svg")
        (options.docs / "authority-benchmarks.md").write_text(report.markdown("authority-benchmarks.svg"))


if __name__ == "__main__":
    main()
