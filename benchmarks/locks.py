"""How many times a second one thread, or the tasks of one loop, can acquire and release uncontended locks.

fencelock on one, three and five nodes, beside redis-py's `Lock`, sequential Redlocks, and the floor: bare
sockets that write the same scripts. All use the same node processes in the same run, taking turns in short
rounds of random order, so that whatever else the machine does hits all of them alike. Medians are shown
with the slowest and the fastest round.

    python -m benchmarks.locks
    python -m benchmarks.locks --rounds 30 --seconds 1

Last come eight processes that all want one lock: see `benchmarks.handovers`, which also runs alone.

Redlocks from PyPI take part if they are installed: `pip install 'fencelock[bench]'`.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import redis
import redis.asyncio
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import handovers
from benchmarks.bare_sockets import BareSockets
from benchmarks.sequential import SequentialRedlock
from fencelock import Redlock
from fencelock.authority.base import AsyncAuthority
from fencelock.embedded import Nodes

TTL = 10
BASELINE = "sequential Redlock"
BASELINE_ASYNC = "redis.asyncio Lock"


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


@dataclass(slots=True)
class AsyncContender(Contender):
    """One way to lock in asyncio code, by many tasks of which each has a resource of its own.

    Attributes:
        loop: where it runs.
        tasks: how many there are.
        once_of: acquires and releases the resource of a task.
    """

    loop: asyncio.AbstractEventLoop = field(kw_only=True)
    tasks: int = field(kw_only=True)
    once_of: Callable[[int], Coroutine[Any, Any, object]] = field(kw_only=True)

    def play(self, seconds: float) -> None:
        """Go on for so long, and note the results."""
        self.loop.run_until_complete(self._play(seconds))

    async def _play(self, seconds: float) -> None:
        cpu_before = time.process_time()
        began = time.perf_counter()
        counts = await asyncio.gather(*(self._repeat(task, began + seconds) for task in range(self.tasks)))
        self.rates.append(sum(counts) / (time.perf_counter() - began))
        self.costs.append((time.process_time() - cpu_before) / sum(counts))

    async def _repeat(self, task: int, end: float) -> int:
        count = 0
        while time.perf_counter() < end:
            await self.once_of(task)
            count += 1
        return count


def enter_async_contenders(
    urls: Sequence[str], tasks: int, stack: ExitStack, loop: asyncio.AbstractEventLoop
) -> list[Contender]:
    """Return those that run in asyncio code; their connections are closed with the stack."""
    entered: list[Contender] = []

    def enter(name: str, nodes: int, once_of: Callable[[int], Coroutine[Any, Any, object]]) -> None:
        def once() -> None:
            loop.run_until_complete(once_of(0))

        entered.append(AsyncContender(name, nodes, once, loop=loop, tasks=tasks, once_of=once_of))

    for count in (1, 5):
        authority = stack.enter_context(Redlock(urls[:count], namespace=_namespace(urls[:count])))
        authority.init()
        enter("fencelock", count, functools.partial(_acquire_and_release, authority.aio))
    client = redis.asyncio.Redis.from_url(urls[0], max_connections=tasks + 1)
    stack.callback(lambda: loop.run_until_complete(client.aclose()))
    locks = [client.lock(f"redis.asyncio-{task}", timeout=TTL, blocking=False) for task in range(tasks)]

    async def theirs(task: int) -> None:
        async with locks[task]:
            pass

    enter(BASELINE_ASYNC, 1, theirs)
    return entered


async def _acquire_and_release(aio: AsyncAuthority, task: int) -> None:
    await aio.release(await aio.acquire((f"fencelock-{task}",), ttl=TTL, timeout=0))


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


def table_of(entered: Sequence[Contender], baseline_name: str, title: str) -> Table:
    """Return the results, the fastest first."""
    baseline = next(one for one in entered if one.name == baseline_name)
    table = Table(title=title, caption=f"ratio: to the {baseline_name}; CPU: of the client alone")
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
    parser.add_argument("--tasks", type=int, default=100, help="in asyncio code (%(default)s)")
    options = parser.parse_args()
    console = Console()
    with Nodes(5) as nodes, closing(asyncio.new_event_loop()) as loop, ExitStack() as stack:
        entered = enter_contenders(nodes.urls, stack, console)
        entered_async = enter_async_contenders(nodes.urls, options.tasks, stack, loop)
        compare([*entered, *entered_async], rounds=options.rounds, seconds=options.seconds, console=console)
        with redis.Redis.from_url(nodes[0].url) as client:
            server = client.info("server")
        contended = handovers.measure(nodes.urls, processes=8, rounds=5, seconds=1.5, console=console)
    console.print(table_of(entered, BASELINE, "acquire and release, one thread, no contention"))
    title = f"asyncio: {options.tasks} tasks, a resource each"
    console.print(table_of(entered_async, BASELINE_ASYNC, title))
    console.print(contended)
    console.print(
        f"{options.rounds} rounds of {options.seconds:g} s; Python {platform.python_version()}, redis-py "
        f"{redis.__version__}, Valkey {server.get('valkey_version', server['redis_version'])}, "
        f"{os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
