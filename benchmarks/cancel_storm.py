"""A storm of cancellations: whether asyncio tasks that end anywhere leave a lock or a connection behind.

Tasks acquire, extend and release a few resources, and each is cancelled at a random await. Afterwards
every lock must be free long before its ttl, every connection in step (each resource can be acquired at
once), and no token may have been given out twice. Exits with 1 otherwise.

    python -m benchmarks.cancel_storm
    python -m benchmarks.cancel_storm --tasks 1000 --resources 20 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections import Counter

import redis

from fencelock import Redlock
from fencelock.errors import FencelockError
from proof.servers import Nodes

#: Longer than a storm, so that no lock goes by itself.
TTL = 300.0


class Storm:
    """What has happened so far.

    Args:
        authority: who grants the locks.
        resources: how many.
        seed: of all that is random.
    """

    def __init__(self, authority: Redlock, resources: int, seed: int) -> None:
        self.tokens: dict[str, list[int]] = {f"r{number}": [] for number in range(resources)}
        self.ends: Counter[str] = Counter()
        self._aio = authority.aio
        self._chance = random.Random(seed)

    async def rage(self, tasks: int, seconds: float) -> None:
        """Keep so many tasks under way for so long, each cancelled at a random await."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._replace(end) for _ in range(tasks)))

    async def check(self) -> list[str]:
        """Return what is wrong, now that all is over."""
        wrong = [
            f"{name}: a token was given out twice" for name, seen in self.tokens.items() if _repeats(seen)
        ]
        for resource, seen in self.tokens.items():
            try:
                grant = await self._aio.acquire((resource,), ttl=TTL, timeout=0)
            except FencelockError as error:
                wrong.append(f"{resource}: {error}")
            else:
                await self._aio.release(grant)
                if grant.tokens[0] <= max(seen, default=0):
                    wrong.append(f"{resource}: token {grant.tokens[0]} comes after {max(seen)}")
        return wrong

    async def _replace(self, end: float) -> None:
        while time.monotonic() < end:
            task = asyncio.ensure_future(self._once())
            for _ in range(self._chance.choice([0, 1, 2, 3, 5, 8, 13, 21])):
                await asyncio.sleep(0)
            if self._chance.random() < 0.5:
                await asyncio.sleep(self._chance.random() * 0.5)
            task.cancel()
            if self._chance.random() < 0.3:
                await asyncio.sleep(0)
                task.cancel()  # perhaps in the middle of its release
            try:
                await task
                self.ends["came to its end"] += 1
            except asyncio.CancelledError:
                self.ends["cancelled"] += 1
            except FencelockError as error:
                self.ends[type(error).__name__] += 1

    async def _once(self) -> None:
        resource = self._chance.choice(list(self.tokens))
        grant = await self._aio.acquire((resource,), ttl=TTL, timeout=self._chance.choice([0, 0.1, 5]))
        self.tokens[resource].append(grant.tokens[0])
        try:
            if self._chance.random() < 0.2:
                await self._aio.extend_many([(grant, TTL)])
            if self._chance.random() < 0.2:
                await asyncio.sleep(self._chance.random() * 0.01)
        finally:
            await self._aio.release(grant)


def _repeats(tokens: list[int]) -> bool:
    return any(later <= earlier for earlier, later in itertools.pairwise(tokens))


def locks_left(urls: list[str]) -> int:
    """Return how many locks there are on all nodes."""
    count = 0
    for url in urls:
        with redis.Redis.from_url(url) as client:
            count += sum(1 for _ in client.scan_iter("*:l:*", count=1000))
    return count


async def _calm(urls: list[str], seconds: float) -> int:
    end = time.monotonic() + seconds
    while (left := locks_left(urls)) and time.monotonic() < end:  # noqa: ASYNC110 - nodes set no event
        await asyncio.sleep(0.05)
    return left


async def run(urls: list[str], options: argparse.Namespace) -> list[str]:
    """Have the storm, print what happened, and return what is wrong."""
    authority = Redlock(urls)
    async with authority.aio as aio:
        await aio.init()
        storm = Storm(authority, options.resources, options.seed)
        await storm.rage(options.tasks, options.seconds)
        began = time.monotonic()
        left = await _calm(urls, 5.0)
        print(f"{sum(storm.ends.values()):,} tasks: {dict(storm.ends)}")
        held = sum(map(len, storm.tokens.values()))
        print(f"{held:,} locks were held; {time.monotonic() - began:.2f} s later {left} were left")
        wrong = await storm.check()
    return [*([f"{left} locks are left"] if left else []), *wrong]


def main() -> None:
    """Have the storm, and say what it has left."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cancel_storm", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--tasks", type=int, default=1000, help="at a time (%(default)s)")
    parser.add_argument("--resources", type=int, default=20, help="that they contend for (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    options = parser.parse_args()
    with Nodes(5) as nodes:
        wrong = asyncio.run(run(nodes.urls, options))
    print(*wrong or ["nothing is left behind"], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
