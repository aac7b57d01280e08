"""Tasks that acquire, extend and release, each cancelled at a random await; and the checks afterwards."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from typing import Any, Final

from fencelock import Redlock
from fencelock.authority.base import Grant
from fencelock.errors import FencelockError
from fencelock.lease import held_leases

#: Longer than a test, so that no lock goes by itself.
TTL: Final = 60.0
#: So many seconds a storm may take longer on a slow machine.
_LONGEST: Final = 20.0


class Storm:
    """Many tasks on a few resources, cancelled while they connect, wait, hold, extend, renew and release.

    Args:
        client: the authority that all of them use.
        seed: of its chances.

    Attributes:
        tokens: those of each resource, each noted while its lock was held.
        cancelled: how many tasks were.
    """

    def __init__(self, client: Any, seed: int = 7, resources: int = 20) -> None:
        self._client = client
        self._chance = random.Random(seed)
        self._is_fair = [True, False, False] if isinstance(client, Redlock) else [False]
        self.tokens: dict[str, list[int]] = {f"r{number}": [] for number in range(resources)}
        self.cancelled = 0

    async def rage(self, tasks: int, seconds: float) -> None:
        """Keep so many tasks under way for some seconds, and on a slow machine until enough has happened."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._work(end) for _ in range(tasks)))
        assert held_leases() == ()

    @property
    def is_enough(self) -> bool:
        """Whether so much was cancelled, and granted, that it shows something."""
        return self.cancelled > 50 and sum(map(len, self.tokens.values())) > 5

    async def _work(self, end: float) -> None:
        chance = self._chance
        while (now := time.monotonic()) < end or (now < end + _LONGEST and not self.is_enough):
            if now > end:  # cancelled calls leave releases behind, which a slow machine has to catch up with
                await asyncio.sleep(chance.random())
            task = asyncio.ensure_future(chance.choice((self._use_a_grant, self._use_a_block))())
            for _ in range(chance.choice([0, 1, 2, 3, 5, 8, 13, 21])):
                await asyncio.sleep(0)
            if chance.random() < 0.5:
                await asyncio.sleep(chance.random() ** 3 * 0.5)
            self.cancelled += task.cancel()
            if chance.random() < 0.3:
                await asyncio.sleep(0)
                task.cancel()  # perhaps in the middle of its release
            with suppress(asyncio.CancelledError, FencelockError):
                await task

    async def _use_a_grant(self) -> None:
        resource, aio = self._chance.choice(list(self.tokens)), self._client.aio
        grant: Grant = await aio.acquire(
            (resource,),
            ttl=TTL,
            timeout=self._chance.choice([0, 0.1, 5]),
            fair=self._chance.choice(self._is_fair),
        )
        assert grant.resources == (resource,)  # and not what another task asked for
        self.tokens[resource].append(grant.tokens[0])
        try:
            if self._chance.random() < 0.2:
                await aio.extend_many([(grant, TTL)])
            await asyncio.sleep(self._chance.choice([0, 0, 0.01]))
        finally:
            await aio.release(grant)

    async def _use_a_block(self) -> None:
        """As users do: it is renewed while it is held."""
        resource = self._chance.choice(list(self.tokens))
        async with self._client.lock(resource, ttl=0.5, timeout=5, if_lost="warn") as token:
            self.tokens[resource].append(token)
            await asyncio.sleep(self._chance.choice([0, 0.001, 0.01, 0.2]))

    async def check(self) -> None:
        """See that all is free, that tokens were unique and rising, and that the next ones are larger."""
        assert self.is_enough
        assert all(seen == sorted(set(seen)) for seen in self.tokens.values())
        for resource, seen in self.tokens.items():
            grant = await self._client.aio.acquire((resource,), ttl=TTL, timeout=10.0)
            assert grant.tokens[0] > max(seen, default=0)
            assert await self._client.aio.release(grant) is True
