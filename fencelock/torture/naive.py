"""Redlock with the token that comes to mind first: a control that must fail, to see that the checker notices.

The token is the largest of the counters of those nodes that granted the lock. Nothing raises the other
nodes' counters to it, and a node that lost its memory counts from the beginning again, and votes.
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

_COUNT = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return redis.call('INCR', KEYS[2]) end
return 0
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class NaiveRedlock:
    """An `Authority` that must not be used."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._nodes = [
            redis.Redis.from_url(url, socket_timeout=0.2, retry=Retry(NoBackoff(), 0)) for url in urls
        ]
        self._grants = [node.register_script(_COUNT) for node in self._nodes]
        self._releases = [node.register_script(_RELEASE) for node in self._nodes]

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
            time.sleep(random.uniform(0.005, 0.05))  # noqa: S311 - it decides nothing but when to ask again

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
        keys = [f"naive:l:{resource}", f"naive:c:{resource}"]
        try:
            return int(self._grants[node](keys=keys, args=[nonce, round(ttl * 1000)]))
        except redis.RedisError:
            return 0

    def _release(self, resource: str, nonce: str) -> int:
        released = 0
        for script in self._releases:
            try:
                released += int(script(keys=[f"naive:l:{resource}"], args=[nonce]))
            except redis.RedisError:
                continue
        return released
