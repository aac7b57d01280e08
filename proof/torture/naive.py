"""Locks with the token that comes to mind first: controls that must fail, to see that the checker notices.

On nodes, the token is the largest of the counters of those that granted the lock. Nothing raises the other
nodes' counters to it, and a node that lost its memory counts from the beginning again, and votes.

In a database, one transaction reads the lease, Python adds 1 to its token, and a second transaction writes
both back. Whatever another holder does in between is overwritten.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Sequence

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import BigInteger, Column, Double, MetaData, String, Table, insert, select, update
from sqlalchemy.exc import DBAPIError

from fencelock.authority.base import AsyncAuthority, Grant, Wish
from fencelock.errors import AuthorityError, FencelockError, LockTimeoutError, NotHeldError
from proof.torture.table import engine_on

_COUNT = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return redis.call('INCR', KEYS[2]) end
return 0
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


#: Seconds between two attempts.
_PAUSES = (0.005, 0.05)
_LEASES = Table(
    "fencelock_torture_naive_leases",
    MetaData(),
    Column("resource", String(40), primary_key=True),
    Column("token", BigInteger, nullable=False),
    Column("nonce", String(40)),
    Column("expires_at", Double, nullable=False),
)


class _Naive:
    """What a control does not do, because it is not asked to."""

    def extend_many(self, wishes: Sequence[Wish]) -> list[Grant | FencelockError]:
        """Refuse: it is not asked for here."""
        return [NotHeldError(f"{grant.resources} cannot be extended by {ttl} s") for grant, ttl in wishes]

    def remint(self, grant: Grant, ttl: float) -> Grant:
        """Refuse: it is not asked for here."""
        raise NotHeldError(f"{grant.resources} cannot be minted anew for {ttl} s")

    @property
    def aio(self) -> AsyncAuthority:
        """Refuse: it is not asked for here."""
        raise NotImplementedError("this is for blocking code")


class NaiveLeases(_Naive):
    """An `Authority` that must not be used.

    Args:
        url: of the database.
    """

    def __init__(self, url: str) -> None:
        self._engine = engine_on(url)

    @staticmethod
    def prepare(url: str, resources: Sequence[str]) -> None:
        """Make its table anew, with a lease that has ended for each resource."""
        NaiveLeases.drop(url)
        engine = engine_on(url)
        with engine.begin() as connection:
            _LEASES.create(connection)
            connection.execute(
                insert(_LEASES), [{"resource": each, "token": 0, "expires_at": 0.0} for each in resources]
            )
        engine.dispose()

    @staticmethod
    def drop(url: str) -> None:
        """Drop its table."""
        engine = engine_on(url)
        _LEASES.drop(engine, checkfirst=True)
        engine.dispose()

    def acquire(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool = False,  # noqa: ARG002 - this one has no queue
    ) -> Grant:
        """Return a grant of one resource.

        Raises:
            LockTimeoutError: another held it until the timeout.
            AuthorityError: the database failed.
        """
        (resource,) = resources
        deadline = time.monotonic() + (3600.0 if timeout is None else timeout)
        while True:
            began = time.monotonic()
            try:
                token, nonce = self._take(resource, ttl)
            except DBAPIError as error:
                raise AuthorityError(str(error.orig)) from error
            expires_at = began + ttl * 0.99 - 0.002
            if token and time.monotonic() < expires_at:
                return Grant(resources, (token,), expires_at, nonce)
            if time.monotonic() > deadline:
                raise LockTimeoutError(f"{resource!r} is held by another")
            time.sleep(random.uniform(*_PAUSES))

    def _take(self, resource: str, ttl: float) -> tuple[int, str]:
        """Return a token and the nonce that it was written with; 0 where another holds the resource."""
        its = _LEASES.c.resource == resource
        with self._engine.begin() as connection:
            lease = connection.execute(select(_LEASES).where(its)).one()
        if lease.nonce is not None and lease.expires_at > time.time():
            return 0, ""
        token, nonce = lease.token + 1, secrets.token_urlsafe(16)
        with self._engine.begin() as connection:
            connection.execute(
                update(_LEASES).where(its).values(token=token, nonce=nonce, expires_at=time.time() + ttl)
            )
        return token, nonce

    def release(self, grant: Grant) -> bool | None:
        """End the lease where it is ours."""
        its = (_LEASES.c.resource == grant.resources[0]) & (_LEASES.c.nonce == grant.proof)
        try:
            with self._engine.begin() as connection:
                return connection.execute(update(_LEASES).where(its).values(nonce=None)).rowcount == 1
        except DBAPIError:
            return None


class NaiveRedlock(_Naive):
    """An `Authority` that must not be used.

    Args:
        urls: of the nodes.
    """

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
            time.sleep(random.uniform(*_PAUSES))

    def release(self, grant: Grant) -> bool | None:
        """Delete the lock where it is ours."""
        return 2 * self._release(grant.resources[0], grant.proof) > len(self._nodes)

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
