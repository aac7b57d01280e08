"""How fast a lock goes from hand to hand: processes that all want one resource, over and over.

A *hand-over* is an acquisition by another process than the one before. A lock that its last holder takes
back at once, past everybody who waits, may make many acquisitions and hardly any hand-overs; so both are
counted, with the longest time that anybody had to wait. Nobody works while holding it: only the lock is
measured. All locks use the same node processes and take turns in rounds of random order.

    python -m benchmarks.handovers
    python -m benchmarks.handovers --processes 16 --rounds 10 --seconds 2

python-redis-lock takes part if it is installed: `pip install 'fencelock[bench]'`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Self

import redis
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fencelock import Redlock
from fencelock.embedded import Nodes

TTL = 10
TIMEOUT = 60
NAMESPACE = "hand-overs"

MakeLock = Callable[[], AbstractContextManager[Any]]


def _fencelock(urls: Sequence[str]) -> MakeLock:
    authority = Redlock(urls, namespace=f"{NAMESPACE}-{len(urls)}")
    return lambda: authority.lock("r", ttl=TTL, timeout=TIMEOUT)


def _redis_py(urls: Sequence[str]) -> MakeLock:
    client = redis.Redis.from_url(urls[0])
    return lambda: client.lock("redis-py", timeout=TTL, blocking_timeout=TIMEOUT)


def _python_redis_lock(urls: Sequence[str]) -> MakeLock:
    client = redis.Redis.from_url(urls[0])
    module = importlib.import_module("redis_lock")
    return lambda: module.Lock(client, "python-redis-lock", expire=TTL)


#: For each name, what makes the lock and how many nodes it uses.
KINDS: dict[str, tuple[Callable[[Sequence[str]], MakeLock], int]] = {
    "fencelock": (_fencelock, 5),
    "fencelock on 1 node": (_fencelock, 1),
    "redis-py Lock": (_redis_py, 1),
    "python-redis-lock": (_python_redis_lock, 1),
}
BASELINE = "redis-py Lock"


def work(kind: str, urls: Sequence[str], orders: Connection) -> None:
    """One process: at each order, acquire and release until the time given; answer when it held, and waited.

    The clock of `time.monotonic` is the same for all processes of a machine.
    """
    make, count = KINDS[kind]
    make_lock = make(urls[:count])
    while (until := orders.recv()) is not None:
        acquired: list[tuple[float, float]] = []
        asked = time.monotonic()
        while asked < until:
            with make_lock():
                now = time.monotonic()
                acquired.append((now, now - asked))
            asked = time.monotonic()
        orders.send(acquired)


@dataclass(slots=True)
class Team:
    """The processes that contend for one kind of lock.

    Attributes:
        kind: whose lock.
        handovers: how many a second, in each round.
        acquisitions: how many a second, in each round.
        longest: seconds that the one who waited longest had to wait, in each round.
    """

    kind: str
    handovers: list[float] = field(default_factory=list)
    acquisitions: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    _members: list[tuple[multiprocessing.process.BaseProcess, Connection]] = field(default_factory=list)

    def start(self, urls: Sequence[str], processes: int) -> Self:
        """Start the processes; they wait for orders."""
        context = multiprocessing.get_context("spawn")
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(self.kind, list(urls), theirs), daemon=True)
            process.start()
            self._members.append((process, ours))
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        for _, orders in self._members:
            orders.send(None)
        for process, _ in self._members:
            process.join(10)

    def play(self, seconds: float, *, note: bool = True) -> None:
        """Contend for so long, and note the results."""
        until = time.monotonic() + seconds
        for _, orders in self._members:
            orders.send(until)
        held = sorted(
            (at, waited, number)
            for number, (_, orders) in enumerate(self._members)
            for at, waited in orders.recv()
        )
        if not note:
            return
        span = held[-1][0] - held[0][0]
        changes = sum(before[2] != after[2] for before, after in itertools.pairwise(held))
        self.handovers.append(changes / span)
        self.acquisitions.append((len(held) - 1) / span)
        self.longest.append(max(waited for _, waited, _ in held))


def measure(urls: Sequence[str], *, processes: int, rounds: int, seconds: float, console: Console) -> Table:
    """Measure all kinds of locks in turns, and return the results."""
    for count in {count for _, count in KINDS.values()}:
        with Redlock(urls[:count], namespace=f"{NAMESPACE}-{count}") as authority:
            authority.init()
    with ExitStack() as stack:
        teams = []
        for kind in KINDS:
            if kind == "python-redis-lock" and importlib.util.find_spec("redis_lock") is None:
                console.print(f"{kind} is not installed and does not take part")
                continue
            teams.append(stack.enter_context(Team(kind).start(urls, processes)))
        for team in teams:
            team.play(seconds, note=False)  # connections opened, scripts cached
        order = list(teams)
        for _ in track(range(rounds), description="rounds", console=console, transient=True):
            random.shuffle(order)
            for team in order:
                team.play(seconds)
    return table_of(teams, processes)


def table_of(teams: Sequence[Team], processes: int) -> Table:
    """Return the results, the most hand-overs first."""
    baseline = next(team for team in teams if team.kind == BASELINE)
    table = Table(
        title=f"{processes} processes, one resource, nobody works while holding it",
        caption=f"medians of the rounds; ratio: of hand-overs, to {BASELINE} with its default sleep",
    )
    table.add_column("lock")
    columns = ("nodes", "hand-overs/s", "slowest … fastest", "ratio", "acquisitions/s", "longest wait ms")
    for column in columns:
        table.add_column(column, justify="right")
    for team in sorted(teams, key=lambda team: -statistics.median(team.handovers)):
        ratios = [one / other for one, other in zip(team.handovers, baseline.handovers, strict=True)]
        table.add_row(
            team.kind,
            f"{KINDS[team.kind][1]}",
            f"{statistics.median(team.handovers):,.0f}",
            f"{min(team.handovers):,.0f} … {max(team.handovers):,.0f}",
            f"{statistics.median(ratios):.1f}",
            f"{statistics.median(team.acquisitions):,.0f}",
            f"{1e3 * statistics.median(team.longest):,.0f} (at most {1e3 * max(team.longest):,.0f})",
        )
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.handovers", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--processes", type=int, default=8, help="that contend (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="for each of them (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.5, help="that a round lasts (%(default)s)")
    options = parser.parse_args()
    console = Console()
    with Nodes(5) as nodes:
        table = measure(
            nodes.urls,
            processes=options.processes,
            rounds=options.rounds,
            seconds=options.seconds,
            console=console,
        )
    console.print(table)


if __name__ == "__main__":
    main()
