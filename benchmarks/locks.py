"""fencelock beside its peers and the floor, in one run: rates, hand-overs, hung nodes, many leases.

All contenders (`benchmarks.contenders`) use the same node processes, each from processes of its own. In every
case they take turns in short rounds of random order, so that whatever else the machine does hits all of them
alike, and ratios are taken within a round. The table at the end holds the goals against what was measured.

    python -m benchmarks.locks
    python -m benchmarks.locks one-thread hand-overs --rounds 15
    python -m benchmarks.locks --docs benchmarks    # also writes locks.md and locks.svg

Peers take part if they are installed: `pip install --group bench`. Those that need another redis-py, or
node, get homes of their own (`benchmarks.peers`); `--no-homes` leaves them out.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import redis
from rich.console import Console

from benchmarks import bursts, handovers, hung_nodes, leases, plot, rates
from benchmarks.arena import NODES, NodesArena
from benchmarks.peers import Homes
from benchmarks.report import Report
from proof.servers import Nodes

#: Of the terminal, where it is none: tables are wide.
_WIDTH = 140


def _hold_many(arena: NodesArena) -> None:
    claims = leases.hold_many(arena.console)
    arena.add(claims.section(), claims.goals)


def _use_many(arena: NodesArena) -> None:
    claims = leases.use_many(arena.console)
    arena.add(claims.section(), claims.goals)


CASES: dict[str, Callable[[NodesArena], None]] = {
    "one-thread": rates.one_thread,
    "tasks": rates.many_tasks,
    "threads": rates.many_threads,
    "ceiling": rates.in_bulk,
    "hand-overs": handovers.contend,
    "bursts": bursts.burst,
    "hung": hung_nodes.hang,
    "leases": _hold_many,
    "resources": _use_many,
}


def run(arena: NodesArena, names: Sequence[str]) -> Report:
    """Measure some cases, and return what was found."""
    arena.initialise()
    arena.report.about = describe(arena)
    for name in names:
        CASES[name](arena)
    return arena.report


def describe(arena: NodesArena) -> str:
    """Return on what it is measured."""
    with redis.Redis.from_url(arena.nodes[0].url) as client:
        server = client.info("server")
    return (
        f"{arena.rounds} rounds, turns of {arena.seconds:g} s; Python {platform.python_version()}, redis-py "
        f"{redis.__version__}, Valkey {server.get('valkey_version', server['redis_version'])}, "
        f"{os.cpu_count()} cores for {NODES} nodes and all clients."
    )


def write(report: Report, folder: Path) -> None:
    """Write a document and its picture."""
    plot.draw(report.sections, report.about, folder / "locks.svg")
    (folder / "locks.md").write_text(report.markdown("locks.svg"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.locks", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"all by default: {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=7, help="of each case (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.35, help="that a turn lasts (%(default)s)")
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="write locks.md and locks.svg there")
    parser.add_argument(
        "--homes", type=Path, default=Path(".venv-peers"), help="where peers are installed (%(default)s)"
    )
    parser.add_argument("--no-homes", action="store_true", help="do without the peers that need one")
    options = parser.parse_args()
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"these are no cases: {', '.join(sorted(unknown))}")
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    homes = Homes(None if options.no_homes else options.homes.absolute())
    began = time.monotonic()
    with Nodes(NODES) as nodes:
        report = run(
            NodesArena(nodes.urls, console, options.rounds, options.seconds, homes, nodes=nodes),
            options.cases or list(CASES),
        )
    console.print(report.summary().table())
    console.print(f"{report.about} It took {(time.monotonic() - began) / 60:.1f} minutes.")
    if options.docs is not None:
        write(report, options.docs)


if __name__ == "__main__":
    main()
