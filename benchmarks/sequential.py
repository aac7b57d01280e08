"""Redlock as it is usually written: one node after the other, and a token (if any) that is no token.

Two foils. `SequentialRedlock` is what the speed of fencelock is compared with: the least that the
algorithm can do with one redis-py client a node. `CountingRedlock` mints a token in the way that comes to
mind first, the maximum of the nodes' counters without raising the others to it; checks are run against it
to see that they would notice.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Sequence

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from fencelock.authority.base import AsyncAuthority, Grant, Wish
from fencelock.errors import FencelockError, LockTimeoutError, NotHeldError

RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
COUNT = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return redis.call('INCR', KEYS[2]) end
return 0
"""


def _clients(urls: Sequence[str]) -> list[redis.Redis]:
    return [redis.Redis.from_url(url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) for url in urls]


class SequentialRedlock:
    """SET NX PX on one node after the other; released by a script on one node after the other."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._nodes = _clients(urls)
        self._releases = [node.register_script(RELEASE) for node in self._nodes]

    def acquire(self, resource: str, ttl: float) -> str | None:
        """Return the nonce of the lock, or None if no majority granted it in time."""
        nonce = secrets.token_urlsafe(16)
        began = time.monotonic()
        votes = sum(bool(node.set(resource, nonce, nx=True, px=round(ttl * 1000))) for node in self._nodes)
        validity = ttl - (time.monotonic() - began) - 0.01 * ttl - 0.002
        if 2 * votes > len(self._nodes) and validity > 0:
            return nonce
        self.release(resource, nonce)
        return None

    def release(self, resource: str, nonce: str) -> None:
        """Delete the lock where it is ours."""
        for script in self._releases:
            script(keys=[resource], args=[nonce])


class CountingRedlock:
    """An `Authority` that must not be used: its token is the largest of the counters that granted.

    A node that lost its memory counts from the beginning again, and votes.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._nodes = _clients(urls)
        self._grants = [node.register_script(COUNT) for node in self._nodes]
        self._releases = [node.register_script(RELEASE) for node in self._nodes]

    def acquire(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool = False,  # noqa: ARG002 - this one has no queue
        above: tuple[int, ...] = (),  # noqa: ARG002 - nothing is sealed here
    ) -> Grant:
        """Return a grant of one resource.

        Raises:
            LockTimeoutError: no majority granted it until the timeout.
        """
        (resource,) = resources
        deadline = time.monotonic() + (3600.0 if timeout is None else timeout)
        while True:
            nonce = secrets.token_urlsafe(16)
            began = time.monotonic()
            counters = [
                counter
                for node in range(len(self._nodes))
                if (counter := self._ask(node, resource, nonce, ttl))
            ]
            expires_at = began + ttl * 0.99 - 0.002
            if 2 * len(counters) > len(self._nodes) and time.monotonic() < expires_at:
                return Grant(resources, (max(counters),), expires_at, nonce)
            self._release(resource, nonce)
            if time.monotonic() > deadline:
                raise LockTimeoutError(f"{resource!r} is held by another")
            time.sleep(random.uniform(0.005, 0.05))

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """Refuse: nobody asks for it here."""
        return [NotHeldError(f"{grant.resources} cannot be extended by {ttl} s") for grant, ttl in wishes]

    def remint(self, grant: Grant, ttl: float) -> Grant:
        """Refuse: nobody asks for it here."""
        raise NotHeldError(f"{grant.resources} cannot be minted anew for {ttl} s")

    def release(self, grant: Grant) -> bool | None:
        """Delete the lock where it is ours."""
        return 2 * self._release(grant.resources[0], grant.proof) > len(self._nodes)

    @property
    def aio(self) -> AsyncAuthority:
        """Refuse: nobody asks for it here."""
        raise NotImplementedError("this is for blocking code")

    def _ask(self, node: int, resource: str, nonce: str, ttl: float) -> int:
        keys = [f"counting:l:{resource}", f"counting:c:{resource}"]
        try:
            return int(self._grants[node](keys=keys, args=[nonce, round(ttl * 1000)]))
        except redis.RedisError:
            return 0

    def _release(self, resource: str, nonce: str) -> int:
        released = 0
        for script in self._releases:
            try:
                released += int(script(keys=[f"counting:l:{resource}"], args=[nonce]))
            except redis.RedisError:
                continue
        return released
