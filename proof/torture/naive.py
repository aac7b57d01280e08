"""Locks with the token that comes to mind first: controls that must fail, to see that the checker notices.

On nodes, the token is the largest of the counters of those that granted the lock. Nothing raises the other
nodes' counters to it, and a node that lost its memory counts from the beginning again, and votes.

In a database, one transaction reads the lease, Python adds 1 to its token, and a second transaction writes
both back. Whatever another holder does in between is overwritten.

In etcd the token is the revision at which a key was put that was not there, in ZooKeeper the transaction that
made a node. Stores that begin again, or go back to a snapshot, count from there again.
"""

from __future__ import annotations

import base64
import json
import random
import secrets
import time
import urllib.request
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar, Unpack
from urllib.parse import urlsplit

import redis
from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NodeExistsError
from kazoo.handlers.threading import KazooTimeoutError
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import BigInteger, Column, Double, MetaData, String, Table, insert, select, update
from sqlalchemy.exc import DBAPIError

from fencelock._generators import Steps
from fencelock.authority.base import Authority, Grant, Terms, Wish
from fencelock.errors import AuthorityError, FencelockError, LockTimeoutError, NotHeldError
from fencelock.holder import LockInfo
from proof.torture.steps import run
from proof.torture.table import engine_on

_T = TypeVar("_T")

_COUNT = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return redis.call('INCR', KEYS[2]) end
return 0
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
#: Seconds between two attempts.
_PAUSES = (0.005, 0.05)
#: Seconds that ZooKeeper may take to answer: kazoo would wait for ever.
_ANSWER = 2.0
_LEASES = Table(
    "fencelock_torture_naive_leases",
    MetaData(),
    Column("resource", String(40), primary_key=True),
    Column("token", BigInteger, nullable=False),
    Column("nonce", String(40)),
    Column("expires_at", Double, nullable=False),
)


class _Naive(Authority):
    """An `Authority` that must not be used."""

    @abstractmethod
    def _take(self, resource: str, nonce: str, ttl: float) -> int:
        """Return a token; 0 where another holds the resource."""

    @abstractmethod
    def _give_back(self, grant: Grant) -> bool | None:
        """Release the lease: see `Authority.release_gen`."""

    def acquire_gen(self, resources: tuple[str, ...], **terms: Unpack[Terms]) -> Steps[Grant]:
        yield from ()
        ttl, timeout = terms["ttl"], terms["timeout"]
        (resource,) = resources
        deadline = time.monotonic() + (3600.0 if timeout is None else timeout)
        while True:
            nonce, began = secrets.token_urlsafe(16), time.monotonic()
            token = self._take(resource, nonce, ttl)
            expires_at = began + ttl * 0.99 - 0.002
            if token and time.monotonic() < expires_at:
                return Grant(resources, (token,), expires_at, nonce)
            if time.monotonic() > deadline:
                raise LockTimeoutError(f"{resource!r} is held by another")
            time.sleep(random.uniform(*_PAUSES))

    def extend_gen(self, wishes: Sequence[Wish]) -> Steps[list[Grant | FencelockError]]:
        yield from ()
        return [NotHeldError(f"{grant.resources} cannot be extended by {ttl} s") for grant, ttl in wishes]

    def remint_gen(self, grant: Grant, ttl: float) -> Steps[Grant]:
        yield from ()
        raise NotHeldError(f"{grant.resources} cannot be minted anew for {ttl} s")

    def release_gen(self, grant: Grant) -> Steps[bool | None]:
        yield from ()
        return self._give_back(grant)

    def run(self, steps: Steps[_T]) -> _T:
        return run(steps)

    def inspect_gen(self, resources: tuple[str, ...]) -> Steps[list[LockInfo]]:
        yield from ()
        raise AuthorityError(f"nothing is known of {resources}")


class NaiveLeases(_Naive):
    def __init__(self, url: str) -> None:
        self._engine = engine_on(url)

    @staticmethod
    def prepare(url: str, resources: Sequence[str]) -> None:
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
        engine = engine_on(url)
        _LEASES.drop(engine, checkfirst=True)
        engine.dispose()

    def _take(self, resource: str, nonce: str, ttl: float) -> int:
        its = _LEASES.c.resource == resource
        try:
            with self._engine.begin() as connection:
                lease = connection.execute(select(_LEASES).where(its)).one()
            if lease.nonce is not None and lease.expires_at > time.time():
                return 0
            values = {"token": lease.token + 1, "nonce": nonce, "expires_at": time.time() + ttl}
            with self._engine.begin() as connection:
                connection.execute(update(_LEASES).where(its).values(values))
        except DBAPIError as error:
            raise AuthorityError(str(error.orig)) from error
        return int(lease.token) + 1

    def _give_back(self, grant: Grant) -> bool | None:
        its = (_LEASES.c.resource == grant.resources[0]) & (_LEASES.c.nonce == grant.proof)
        try:
            with self._engine.begin() as connection:
                return connection.execute(update(_LEASES).where(its).values(nonce=None)).rowcount == 1
        except DBAPIError:
            return None


class NaiveEtcd(_Naive):
    """Speaks JSON to the gateway of any member."""

    def __init__(self, url: str) -> None:
        self._members = urlsplit(url).netloc.split(",")
        self._leases: dict[str, int] = {}

    def _take(self, resource: str, nonce: str, ttl: float) -> int:
        lease = secrets.randbits(62) + 1
        self._ask("lease/grant", {"ID": lease, "TTL": max(2, round(ttl))})
        key = base64.b64encode(f"naive/{resource}".encode()).decode()
        compare = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": 0}
        put = {"request_put": {"key": key, "value": "", "lease": lease}}
        answer = self._ask("kv/txn", {"compare": [compare], "success": [put]})
        if answer.get("succeeded"):
            self._leases[nonce] = lease
            return int(answer["header"]["revision"])
        self._ask("lease/revoke", {"ID": lease})
        return 0

    def _give_back(self, grant: Grant) -> bool | None:
        with suppress(AuthorityError):
            self._ask("lease/revoke", {"ID": self._leases.pop(grant.proof)})
            return True
        return None

    def _ask(self, path: str, data: dict[str, Any]) -> Any:
        for member in random.sample(self._members, len(self._members)):
            request = urllib.request.Request(f"http://{member}/v3/{path}", json.dumps(data).encode())
            with suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=1.0) as answer:  # noqa: S310
                return json.load(answer)
        raise AuthorityError("no member answers")


class NaiveZooKeeper(_Naive):
    def __init__(self, url: str, session_timeout: float) -> None:
        self._hosts, self._seconds = urlsplit(url).netloc, session_timeout
        self._client: KazooClient | None = None

    def _take(self, resource: str, nonce: str, ttl: float) -> int:  # noqa: ARG002 - the session lasts longer
        try:
            done = self._connected().create_async(
                f"/naive/{resource}", ephemeral=True, makepath=True, include_data=True
            )
            _, stat = done.get(timeout=_ANSWER)
        except NodeExistsError:
            return 0
        except (KazooException, KazooTimeoutError) as error:
            self._leave()
            raise AuthorityError(str(error)) from error
        return int(stat.czxid)

    def _connected(self) -> KazooClient:
        if self._client is None:
            client = KazooClient(self._hosts, timeout=self._seconds)
            client.start(timeout=_ANSWER)
            self._client = client
        return self._client

    def _leave(self) -> None:
        """Begin with a new client, because kazoo does not come back to servers that have counted less far."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):  # whatever kazoo says of a connection that is not there
                client.stop()
                client.close()

    def _give_back(self, grant: Grant) -> bool | None:
        try:
            self._connected().delete_async(f"/naive/{grant.resources[0]}").get(timeout=_ANSWER)
        except (KazooException, KazooTimeoutError):
            self._leave()
            return None
        return True


class NaiveRedlock(_Naive):
    def __init__(self, urls: Sequence[str]) -> None:
        self._nodes = [
            redis.Redis.from_url(url, socket_timeout=0.2, retry=Retry(NoBackoff(), 0)) for url in urls
        ]

    def _take(self, resource: str, nonce: str, ttl: float) -> int:
        keys = (f"naive:l:{resource}", f"naive:c:{resource}")
        counters = self._ask(_COUNT, keys, nonce, str(round(ttl * 1000)))
        if 2 * len(counters) > len(self._nodes):
            return max(counters)
        self._ask(_RELEASE, keys[:1], nonce)
        return 0

    def _give_back(self, grant: Grant) -> bool | None:
        return 2 * len(self._ask(_RELEASE, [f"naive:l:{grant.resources[0]}"], grant.proof)) > len(self._nodes)

    def _ask(self, script: str, keys: Sequence[str], *arguments: str) -> list[int]:
        answers = []
        for node in self._nodes:
            try:
                answers.append(int(node.eval(script, len(keys), *keys, *arguments)))
            except redis.RedisError:
                continue
        return [answer for answer in answers if answer]
