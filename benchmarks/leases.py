"""What it costs to hold very many leases, and what very many resources leave behind.

Holds leases on five nodes for a while, renewed in the background, and tells how much processor time that took
in this process and whether one was lost; then uses as many distinct resources as asked for, once each, and
counts what is left on a node.

    python -m benchmarks.leases
    python -m benchmarks.leases --leases 10000 --ttl 10 --seconds 60 --resources 1000000
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

import redis
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fencelock import FencedLock, Redlock
from fencelock.embedded import Nodes

NAMESPACE = "fencelock"
MOST_LOST, MOST_OF_A_CORE, MOST_KEYS = 0, 0.25, 2000
TASKS = 200


def hold(authority: Redlock, count: int, ttl: float, seconds: float, console: Console) -> tuple[float, int]:
    """Hold so many leases for so long; return the share of a core that it took, and how many were lost."""
    locks: list[FencedLock[int]] = [authority.lock(f"held-{number}", ttl=ttl) for number in range(count)]
    for lock in track(locks, description="acquiring", console=console, transient=True):
        lock.acquire()
    began, cpu_before = time.monotonic(), time.process_time()
    steps = 50
    for _ in track(range(steps), description="holding", console=console, transient=True):
        time.sleep(seconds / steps)
    share = (time.process_time() - cpu_before) / (time.monotonic() - began)
    lost = sum(lock.lease.lost for lock in locks)
    for lock in track(locks, description="releasing", console=console, transient=True):
        if not lock.lease.lost:
            lock.release()
    return share, lost


async def use(authority: Redlock, count: int, console: Console) -> float:
    """Acquire and release so many distinct resources, once each; return how many a second."""
    numbers = iter(track(range(count), description="resources", console=console, transient=True))

    async def work() -> None:
        for number in numbers:
            async with authority.lock(f"resource-{number}", ttl=10, renew=False):
                pass

    began = time.monotonic()
    await asyncio.gather(*(work() for _ in range(TASKS)))
    await authority.aio.close()
    return count / (time.monotonic() - began)


def left_on(urls: Sequence[str]) -> tuple[int, int]:
    """Return the most keys and bytes that any node has."""
    keys = memory = 0
    for url in urls:
        with redis.Redis.from_url(url) as client:
            keys = max(keys, client.dbsize())
            memory = max(memory, client.memory_usage(f"{{{NAMESPACE}}}") or 0)
    return keys, memory


def main() -> None:
    """Measure and print; exit with 1 if a claim fails."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.leases", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--leases", type=int, default=10_000, help="held at once (%(default)s)")
    parser.add_argument("--ttl", type=float, default=10.0, help="of each, in seconds (%(default)s)")
    parser.add_argument("--seconds", type=float, default=40.0, help="that they are held (%(default)s)")
    parser.add_argument("--resources", type=int, default=100_000, help="used once each (%(default)s)")
    options = parser.parse_args()
    console = Console()
    with Nodes(5) as nodes, Redlock(nodes.urls, namespace=NAMESPACE) as authority:
        authority.init()
        share, lost = hold(authority, options.leases, options.ttl, options.seconds, console)
        rate = asyncio.run(use(authority, options.resources, console))
        time.sleep(6)  # queues and claims end by themselves
        keys, memory = left_on(nodes.urls)
    claims = [
        (f"{options.leases:,} leases of {options.ttl:g} s, lost", f"{lost}", lost <= MOST_LOST),
        ("renewing them took, of one core", f"{share:.0%}", share < MOST_OF_A_CORE),
        (f"keys on a node after {options.resources:,} resources", f"{keys:,}", keys <= MOST_KEYS),
    ]
    table = Table(caption=f"{rate:,.0f} acquisitions/s from {TASKS} tasks; the hash takes {memory:,} bytes")
    for column in ("what", "measured", "holds"):
        table.add_column(column)
    for what, measured, holds in claims:
        table.add_row(what, measured, "yes" if holds else "NO")
    console.print(table)
    sys.exit(not all(holds for _, _, holds in claims))


if __name__ == "__main__":
    main()
