"""Redlock as it is usually written: one node after the other, and no token.

What the speed of fencelock is compared with: the least that the algorithm can do with one redis-py client
a node.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


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
