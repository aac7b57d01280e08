"""What it costs to hold very many leases, and what very many resources leave behind.

Holds leases on five nodes for a while, renewed in the background, and tells how much processor time that took
in this process and whether one was lost. Uses as many distinct resources as asked for, once each, and counts
what is left on a node. Exit status 1 if a claim fails.

    python -m benchmarks.leases
    python -m benchmarks.leases --leases 10000 --ttl 10 --seconds 60 --resources 1000000
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import redis
from rich.console import Console
from rich.progress import Progress, track

from benchmarks.report import Goal, Section
from fencelock import FencedLock, Redlock
from proof.servers import Nodes

NAMESPACE = "fencelock"
LEASES, TTL, SECONDS, RESOURCES = 10_000, 10.0, 30.0, 1_000_000
MOST_LOST, MOST_OF_A_CORE, MOST_KEYS = 0, 0.25, 2000
TASKS = 1000
#: Queues and claims end by themselves: after so many seconds, at most.
_SETTLED_AFTER = 6.0


@dataclass(frozen=True, slots=True)
class Claims:
    """What is claimed, and what was measured."""

    title: str
    note: str
    goals: Sequence[Goal]

    def section(self) -> Section:
        """Return it as a table."""
        rows = [(goal.what, goal.wanted, goal.measured) for goal in self.goals]
        return Section(self.title, ("what", "wanted", "measured"), rows, self.note)


def hold_many(console: Console, count: int = LEASES, *, ttl: float = TTL, seconds: float = SECONDS) -> Claims:
    """Hold so many leases for so long, on nodes of their own."""
    with Nodes(5) as nodes, Redlock(nodes.urls, namespace=NAMESPACE) as authority:
        authority.init()
        share, lost = _hold(authority, count, ttl, seconds, console)
    return Claims(
        f"{count:,} leases held and renewed",
        f"Each of {ttl:g} s, on five nodes, from one process, for {seconds:g} s.",
        (
            Goal(f"{count:,} leases of {ttl:g} s, lost", f"{MOST_LOST}", f"{lost:,}", lost <= MOST_LOST),
            Goal("renewing, of a core", f"< {MOST_OF_A_CORE:.0%}", f"{share:.0%}", share < MOST_OF_A_CORE),
        ),
    )


def use_many(console: Console, count: int = RESOURCES) -> Claims:
    """Acquire and release so many distinct resources once each, on nodes of their own."""
    with Nodes(5) as nodes, Redlock(nodes.urls, namespace=NAMESPACE) as authority:
        authority.init()
        blank = _memory_of(nodes.urls)
        rate = asyncio.run(_use(authority, count, console))
        time.sleep(_SETTLED_AFTER)
        keys, grown = _keys_on(nodes.urls), _memory_of(nodes.urls) - blank
        hash_bytes = _hash_on(nodes.urls)
    return Claims(
        f"What {count:,} distinct resources leave behind",
        f"Each acquired and released once, by {TASKS:,} tasks on five nodes: {rate:,.0f} a second. The data "
        f"of a node takes {grown / 1024:,.0f} KiB more than before, its hash {hash_bytes / 1024:,.0f} KiB.",
        (Goal(f"keys on a node after {count:,}", f"≤ {MOST_KEYS:,}", f"{keys:,}", keys <= MOST_KEYS),),
    )


def _hold(authority: Redlock, count: int, ttl: float, seconds: float, console: Console) -> tuple[float, int]:
    """Hold leases; return the share of a core that it took, and how many were lost."""
    locks: list[FencedLock[int]] = [authority.lock(f"held-{number}", ttl=ttl) for number in range(count)]
    for lock in track(locks, description="acquiring", console=console, transient=True):
        lock.acquire()
    began, cpu_before = time.monotonic(), time.process_time()
    time.sleep(seconds)  # in silence: a progress bar would be counted in
    share = (time.process_time() - cpu_before) / (time.monotonic() - began)
    lost = sum(lock.lease.lost for lock in locks)
    for lock in track(locks, description="releasing", console=console, transient=True):
        if not lock.lease.lost:
            lock.release()
    return share, lost


async def _use(authority: Redlock, count: int, console: Console) -> float:
    """Use resources; return how many a second."""
    numbers = iter(range(count))
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("resources", total=count)

        async def work() -> None:
            for number in numbers:
                await authority.aio.release(
                    await authority.aio.acquire((f"resource-{number}",), ttl=10, timeout=0)
                )
                if number % 1000 == 0:
                    progress.update(bar, completed=number)

        began = time.monotonic()
        await asyncio.gather(*(work() for _ in range(TASKS)))
        seconds = time.monotonic() - began
    await authority.aio.close()
    return count / seconds


def _keys_on(urls: Sequence[str]) -> int:
    """Return the most keys that any node has."""
    keys = 0
    for url in urls:
        with redis.Redis.from_url(url) as client:
            keys = max(keys, client.dbsize())
    return keys


def _hash_on(urls: Sequence[str]) -> int:
    """Return the most bytes that the hash has on any node."""
    most = 0
    for url in urls:
        with redis.Redis.from_url(url) as client:
            most = max(most, client.memory_usage(f"{{{NAMESPACE}}}") or 0)
    return most


def _memory_of(urls: Sequence[str]) -> int:
    """Return the most bytes that any node uses for its data."""
    most = 0
    for url in urls:
        with redis.Redis.from_url(url) as client:
            most = max(most, int(client.info("memory")["used_memory_dataset"]))
    return most


def main() -> None:
    """Measure and print; exit with 1 if a claim fails."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.leases", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--leases", type=int, default=LEASES, help="held at once (%(default)s)")
    parser.add_argument("--ttl", type=float, default=TTL, help="of each, in seconds (%(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that they are held (%(default)s)")
    parser.add_argument("--resources", type=int, default=RESOURCES, help="used once each (%(default)s)")
    options = parser.parse_args()
    console = Console()
    claims = (
        hold_many(console, options.leases, ttl=options.ttl, seconds=options.seconds),
        use_many(console, options.resources),
    )
    for one in claims:
        console.print(one.section().table())
    sys.exit(not all(goal.holds for one in claims for goal in one.goals))


if __name__ == "__main__":
    main()
