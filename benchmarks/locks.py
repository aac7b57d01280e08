"""How many times a second one thread can acquire and release a lock that nobody else wants.

fencelock on one, three and five nodes, beside redis-py's `Lock`, sequential Redlocks, and the floor: bare
sockets that write the same scripts. All use the same node processes in the same run, taking turns in short
rounds of random order, so that whatever else the machine does hits all of them alike. Medians are shown
with the slowest and the fastest round.

    python -m benchmarks.locks
    python -m benchmarks.locks --rounds 30 --seconds 1

Redlocks from PyPI take part if they are installed: `pip install 'fencelock[bench]'`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import redis
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.bare_sockets import BareSockets
from benchmarks.sequential import SequentialRedlock
from fencelock import Redlock
from fencelock.embedded import Nodes

TTL = 10
BASELINE = "sequential Redlock"


@dataclass(slots=True)
class Contender:
    """One way to lock.

    Attributes:
        name: whose.
        nodes: how many of the nodes it uses.
        once: acquires and releases; raises where it did not get the lock.
        rates: how often a second, in each round.
        costs: seconds of this process' CPU for each, in each round: what other processes, the nodes among
            them, do at the same time hardly changes it.
    """

    name: str
    nodes: int
    once: Callable[[], object]
    rates: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    def play(self, seconds: float) -> None:
        """Go on for so long, and note the results."""
        count = 0
        cpu_before = time.process_time()
        began = now = time.perf_counter()
        while now - began < seconds:
            self.once()
            count += 1
            now = time.perf_counter()
        self.rates.append(count / (now - began))
        self.costs.append((time.process_time() - cpu_before) / count)


def enter_contenders(urls: Sequence[str], stack: ExitStack, console: Console) -> list[Contender]:
    """Return everybody who takes part; their connections are closed with the stack."""
    entered = [_fencelock(urls[:count], stack) for count in (1, 3, 5)]
    # After fencelock, which has initialised the nodes.
    floor = stack.enter_context(closing(BareSockets(urls, _namespace(urls), "floor")))
    entered += [
        Contender("redis-py Lock", 1, _redis_py(urls[0], stack)),
        Contender(BASELINE, len(urls), _sequential(urls)),
        Contender("bare sockets (floor)", len(urls), floor.acquire_and_release),
    ]
    for package, enter in (("redlock-py", _redlock_py), ("pottery", _pottery)):
        try:
            entered.append(Contender(f"{package} Redlock", len(urls), enter(urls, stack)))
        except ModuleNotFoundError:
            console.print(f"{package} is not installed and does not take part")
    return entered


def _namespace(urls: Sequence[str]) -> str:
    return f"of-{len(urls)}"


def _fencelock(urls: Sequence[str], stack: ExitStack) -> Contender:
    authority = stack.enter_context(Redlock(urls, namespace=_namespace(urls)))
    authority.init()

    def once() -> None:
        with authority.lock("fencelock", ttl=TTL, timeout=0):
            pass

    return Contender("fencelock", len(urls), once)


def _redis_py(url: str, stack: ExitStack) -> Callable[[], object]:
    lock = stack.enter_context(redis.Redis.from_url(url)).lock("redis-py", timeout=TTL, blocking=False)

    def once() -> None:
        with lock:
            pass

    return once


def _sequential(urls: Sequence[str]) -> Callable[[], object]:
    redlock = SequentialRedlock(urls)

    def once() -> None:
        nonce = redlock.acquire("sequential", TTL)
        if nonce is None:
            raise RuntimeError("the sequential Redlock did not get its lock")
        redlock.release("sequential", nonce)

    return once


def _redlock_py(urls: Sequence[str], stack: ExitStack) -> Callable[[], object]:
    clients = [stack.enter_context(redis.Redis.from_url(url)) for url in urls]
    manager = importlib.import_module("redlock").Redlock(clients)

    def once() -> None:
        lock = manager.lock("redlock-py", TTL * 1000)
        if not lock:
            raise RuntimeError("redlock-py did not get its lock")
        manager.unlock(lock)

    return once


def _pottery(urls: Sequence[str], stack: ExitStack) -> Callable[[], object]:
    clients = {stack.enter_context(redis.Redis.from_url(url)) for url in urls}
    lock = importlib.import_module("pottery").Redlock(key="pottery", masters=clients, auto_release_time=TTL)

    def once() -> None:
        with lock:
            pass

    return once


def compare(entered: Sequence[Contender], *, rounds: int, seconds: float, console: Console) -> None:
    """Measure all of them, in turns."""
    order = list(entered)
    for contender in order:
        contender.once()  # scripts get cached, connections opened
    for _ in track(range(rounds), description="rounds", console=console, transient=True):
        random.shuffle(order)
        for contender in order:
            contender.play(seconds)


def table_of(entered: Sequence[Contender]) -> Table:
    """Return the results, the fastest first."""
    baseline = next(one for one in entered if one.name == BASELINE)
    table = Table(
        title="acquire and release, one thread, no contention",
        caption=f"ratio: to the {BASELINE}; CPU: of the client alone",
    )
    table.add_column("lock")
    for column in ("nodes", "median/s", "slowest … fastest", "ratio", "CPU µs"):
        table.add_column(column, justify="right")
    for one in sorted(entered, key=lambda one: -statistics.median(one.rates)):
        median = statistics.median(one.rates)
        # Of the same round each, so that a slow moment of the machine cancels out.
        ratios = [rate / other for rate, other in zip(one.rates, baseline.rates, strict=True)]
        table.add_row(
            one.name,
            f"{one.nodes}",
            f"{median:,.0f}",
            f"{min(one.rates):,.0f} … {max(one.rates):,.0f}",
            f"{statistics.median(ratios):.2f}",
            f"{1e6 * statistics.median(one.costs):,.0f}",
        )
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.locks", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=15, help="for each of them (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.4, help="that a round lasts (%(default)s)")
    options = parser.parse_args()
    console = Console()
    with Nodes(5) as nodes, ExitStack() as stack:
        entered = enter_contenders(nodes.urls, stack, console)
        compare(entered, rounds=options.rounds, seconds=options.seconds, console=console)
        with redis.Redis.from_url(nodes[0].url) as client:
            server = client.info("server")
    console.print(table_of(entered))
    console.print(
        f"{options.rounds} rounds of {options.seconds:g} s; Python {platform.python_version()}, redis-py "
        f"{redis.__version__}, Valkey {server.get('valkey_version', server['redis_version'])}, "
        f"{os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
