"""Databases, etcd and ZooKeeper that grant leases, beside peers, other ways to lock there, and bare calls.

In every case all contenders (`benchmarks.on_databases`, `benchmarks.on_consensus`) use the same server, each
from processes of its own. They take turns in short rounds of random order, and ratios are taken within a
round.

    python -m benchmarks.authorities
    python -m benchmarks.authorities --quick        # few short rounds, to see that everything works
    python -m benchmarks.authorities --docs benchmarks    # also writes authorities.md and .svg
    python -m benchmarks.authorities --only etcd --only ZooKeeper

PostgreSQL is embedded, with a disk that is waited for, unless --postgresql names another. MariaDB takes part
where FENCELOCK_TEST_MARIADB_URL names one or one answers at its standard port, ZooKeeper where Java and its
library are installed. etcd has three members, which wait for the disk like ZooKeeper. Peers take part if they
are installed: `pip install --group bench`. mithril-locks gets a home of its own (`benchmarks.peers`);
`--no-homes` leaves it out.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import sqlalchemy
from rich.console import Console
from sqlalchemy import URL, create_engine, make_url

from benchmarks import deposits, handovers, on_consensus, on_databases, plot, rates
from benchmarks.arena import Arena, median_ratio, ratios
from benchmarks.contenders import FENCELOCK, Contender
from benchmarks.handovers import PROCESSES, Relay
from benchmarks.on_consensus import ETCD, ETCD3GW, GRPC_AIO, GRPCIO, KAZOO, KAZOO_IN_THREADS, ZOOKEEPER
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
from fencelock import Database, Etcd, ZooKeeper
from proof import servers
from proof.servers import Postgres, ServerError
from proof.servers.mariadb import mariadb

_WIDTH = 150
_TASKS = 100
_DURABLE = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
_DATABASES = (POSTGRESQL, MARIADB, SQLITE)
PLACES = (*_DATABASES, ETCD, ZOOKEEPER)
_PREAMBLE = """\
Written by `python -m benchmarks.authorities`. All locks of a table used the same database in the same run
and took turns in short rounds of random order, each in processes of its own. Medians of the rounds are shown,
with the slowest and the fastest round; ratios are medians of the ratios of each round. Server and clients
share the machine. A COMMIT waits for the disk, and so do the three members of etcd and ZooKeeper's one
server. All clients of etcd ask the same member, the leader."""
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
- **SQLite** waits for the disk once for each transaction in WAL mode, and more often without.
- **Three calls** are the least that a lock in etcd needs: a lease, a transaction that puts the key, and the
  end of the lease. fencelock makes the same three, and its transaction also mints a token.
- **etcd3gw** has no wait. Its locks leave leases behind, which end when their ttl is over.
- **kazoo's lock** needs three round trips, too: its node, the nodes before it, and the deletion. fencelock
  asks for the first two at once, and mints its token besides.
- **Whole sections** lock, read, write, COMMIT and release: fencelock with a `FencedModel`, the others with a
  plain model, which takes in what a stale holder writes. The rows are in PostgreSQL."""

#: What is to be reached: at least this share of the rate of another.
_LIMITS = {
    POSTGRESQL: ((DLOCK, 0.9), (DLOCK_KEPT, 0.9), (MITHRIL, 1.0), (NOT_PREPARED, 1.0)),
    MARIADB: (),
    SQLITE: ((TWO_TRANSACTIONS, 0.6), (f"{TWO_TRANSACTIONS}, WAL", 0.6)),
    ETCD: ((GRPCIO, 0.8), (ETCD3GW, 1.5)),
    ZOOKEEPER: ((KAZOO, 1.0),),
}
_LIMITS_OF_TASKS = {POSTGRESQL: (), ETCD: ((GRPC_AIO, 0.65),), ZOOKEEPER: ((KAZOO_IN_THREADS, 0.9),)}
_LIMITS_OF_HANDOVERS = {ETCD: ((ETCD3GW, 1.0),), ZOOKEEPER: ((KAZOO, 1.0),)}
_ALONE = on_databases.ALONE | on_consensus.ALONE
_CONTENDING = on_databases.CONTENDING | on_consensus.CONTENDING
_IN_TASKS = {POSTGRESQL: on_databases.TASKS} | on_consensus.TASKS


class Places:
    """The servers of a run, which are gone with its stack.

    Args:
        stack: what ends them.
        postgresql: the URL of a server on which a database may be made; None for an embedded one.
        wanted: which.
    """

    def __init__(self, stack: ExitStack, postgresql: str | None, wanted: Collection[str] = PLACES) -> None:
        self.absent: list[str] = []
        self.versions: list[str] = []
        #: Of each place; etcd and ZooKeeper have the URL of a database, too, for whole sections.
        self.urls: dict[str, list[str]] = {}
        if SQLITE in wanted:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fencelock-"))
            self._add(SQLITE, f"sqlite:///{folder}/app.db")
        if {POSTGRESQL, ETCD, ZOOKEEPER}.intersection(wanted):
            if postgresql is None:
                server = stack.enter_context(Postgres(settings=_DURABLE))
                self._add(POSTGRESQL, server.create_database())
            else:
                self._add(POSTGRESQL, _made_on(make_url(postgresql), stack))
        if MARIADB in wanted:
            if (url := mariadb(stack)) is None:
                self.absent.append(f"{MARIADB} does not take part: no server answers")
            else:
                self._add(MARIADB, url.render_as_string(hide_password=False))
        if ETCD in wanted:
            self._add_etcd(stack)
        if ZOOKEEPER in wanted:
            self._add_zookeeper(stack)

    def _add_etcd(self, stack: ExitStack) -> None:
        members = stack.enter_context(servers.Etcd(durable=True))
        url = members.urls[members.leader()]
        self._add_beside_database(ETCD, url, members.ctl("version").split()[2])
        with Etcd(url) as authority:
            authority.init()

    def _add_zookeeper(self, stack: ExitStack) -> None:
        try:
            server = stack.enter_context(servers.ZooKeeper(settings={"forceSync": "yes"}))
        except ServerError as error:
            self.absent.append(f"{ZOOKEEPER} does not take part: {error}")
            return
        said = server.ask(0, "srvr").partition("version: ")[2].partition("-")[0]
        self._add_beside_database(ZOOKEEPER, server.url, said)
        with ZooKeeper(server.url) as authority:
            authority.init()

    def _add_beside_database(self, name: str, url: str, version: str) -> None:
        self.urls[name] = [url, *self.urls[POSTGRESQL]]
        self.versions.append(f"{name} {version}")

    def _add(self, name: str, url: str) -> None:
        with Database(url) as authority:
            authority.init()
        engine = create_engine(url)
        with engine.begin() as connection:
            if name in on_databases.TABLES:
                connection.exec_driver_sql(on_databases.TABLES[name])
            numbers = connection.dialect.server_version_info or ()
        engine.dispose()
        self.urls[name] = [url]
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
    results = rates.measure(arena, name, _ALONE[database], seconds=arena.seconds)
    baseline = next((one for one in results if one.contender.name == FENCELOCK), None)
    goals = _goals(database, results, (BARE, FENCELOCK), _LIMITS[database])
    arena.add(_section_of_rates(name, results, baseline), goals)


def _goals(
    what: str, results: Sequence[Rates], ours: Iterable[str], limits: Iterable[tuple[str, float]]
) -> list[Goal]:
    by_name = {one.contender.name: one.rates for one in results}
    return [
        Goal.at_least(f"{what}: {one} ÷ {other}", limit, median_ratio(by_name[one], by_name[other]))
        for other, limit in limits
        for one in ours
        if one in by_name and other in by_name
    ]


def in_tasks(arena: Arena, place: str) -> None:
    """Tasks of one loop, a resource each."""
    name = f"{place}, asyncio, {_TASKS} tasks, a resource each"
    entered = _IN_TASKS[place]
    results = rates.measure(arena, name, entered, width=_TASKS, seconds=2 * arena.seconds)
    baseline = next((one for one in results if one.contender is entered[0]), None)
    goals = _goals(f"{place}, {_TASKS} tasks", results, [entered[0].name], _LIMITS_OF_TASKS[place])
    arena.add(_section_of_rates(name, results, baseline), goals)


def hand_over(arena: Arena, database: str) -> None:
    """Processes that all want one resource."""
    name = f"{database}, {PROCESSES} processes, one resource"
    ranked = handovers.measure(arena, name, _CONTENDING[database])
    by_name = {one.contender.name: one for one in ranked}
    goals = [
        Goal.at_least(
            f"{database}, hand-overs, {PROCESSES} processes: {FENCELOCK} ÷ {other}",
            limit,
            handovers.ratio(by_name[FENCELOCK], by_name[other]),
        )
        for other, limit in _LIMITS_OF_HANDOVERS.get(database, ())
        if FENCELOCK in by_name and other in by_name
    ]
    arena.add(_section_of_relays(name, ranked), goals)


def whole_sections(arena: Arena, place: str) -> None:
    """One caller, who also writes a row of a database."""
    name = f"{place}, whole sections"
    deposits.prepare(arena.urls[1])
    entered = on_consensus.SECTIONS[place]
    results = rates.measure(arena, name, entered, seconds=arena.seconds)
    baseline = next((one for one in results if one.contender is entered[0]), None)
    arena.add(_section_of_rates(name, results, baseline))


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
    report = Report("Measured: databases, etcd and ZooKeeper as authorities", _PREAMBLE, meaning=_MEANING)
    homes = Homes(None if options.no_homes else options.homes.absolute())
    rounds, seconds = (2, 0.1) if options.quick else (options.rounds, options.seconds)
    with ExitStack() as stack:
        places = Places(stack, options.postgresql, options.only or PLACES)
        report.absent += places.absent
        report.about = (
            f"{rounds} rounds, turns of {seconds:g} s; Python {platform.python_version()}, SQLAlchemy "
            f"{sqlalchemy.__version__}, {', '.join(places.versions)}, {os.cpu_count()} cores."
        )
        arenas = {
            name: Arena(places.urls[name], console, rounds, seconds, homes, report)
            for name in options.only or PLACES
            if name in places.urls
        }
        for case, where in (
            (alone, PLACES),
            (in_tasks, _IN_TASKS),
            (hand_over, PLACES),
            (whole_sections, on_consensus.SECTIONS),
            (deposit, _DATABASES),
        ):
            for name in filter(arenas.__contains__, where):
                case(arenas[name], name)
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
        "--only", action="append", choices=PLACES, help="where it takes place; may be given several times"
    )
    parser.add_argument(
        "--postgresql", metavar="URL", help="of a server on which a database may be made; embedded by default"
    )
    parser.add_argument(
        "--docs", type=Path, metavar="FOLDER", help="write authorities.md and authorities.svg there"
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
        plot.draw(report.sections, report.about, options.docs / "authorities.svg")
        (options.docs / "authorities.md").write_text(report.markdown("authorities.svg"))


if __name__ == "__main__":
    main()
