"""Views for the tests: of the nodes, beside the library, and from tasks of a loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.base import Grant
from fencelock.authority.redlock.transport.aio import LoopConnections
from fencelock.authority.redlock.transport.blocking import SharedConnections
from proof.servers import Node, Nodes
from tests.authorities.faces import AsyncFace, Face
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY

#: Runs a coroutine in a new loop.
Run = Callable[[Coroutine[Any, Any, Any]], Any]


def is_free(rival: Redlock, resource: str = "account:1") -> bool:
    other = rival.lock(resource, timeout=0)
    if other.try_acquire() is None:
        return False
    other.release()
    return True


async def take(authority: Redlock, resource: str = "r", **options: Any) -> int:
    grant = await authority.aio.acquire((resource,), **{"ttl": 30.0, "timeout": 10.0, **options})
    assert await authority.aio.release(grant)
    return grant.tokens[0]


def locks_on(nodes: Sequence[Node]) -> list[str]:
    """Return the lock keys that any running node has, each with its node, what it holds and ms to live."""
    found: list[str] = []
    for number, node in enumerate(nodes):
        if node.is_running:
            with redis.Redis.from_url(node.url, socket_timeout=2, decode_responses=True) as client:
                keys: Any = client.keys(f"{NODE_KEY}:l:*")
                found += [f"{number}: {key} = {client.get(key)} for {client.pttl(key)}" for key in keys]
    return found


def is_held_everywhere(urls: Sequence[str], resource: str = "r", seconds: float = 60.0) -> bool:
    """Return whether every node that can be reached and is initialised comes to hold a lock that was granted.

    A majority is enough for the grant. On the others, the next attempt may still be the first.
    """
    return eventually(lambda: all(_has_lock_or_no_vote(url, resource) for url in urls), seconds)


def _has_lock_or_no_vote(url: str, resource: str) -> bool:
    with suppress(redis.RedisError), redis.Redis.from_url(url, socket_timeout=0.5) as client:
        return bool(client.exists(f"{NODE_KEY}:l:{resource}")) or not client.hexists(NODE_KEY, "e")
    return True


def hold(holder: Face, resource: str = "r", **terms: Any) -> Grant:
    """Return a grant that every node has made: the first question may go out before all are connected."""
    for _ in range(10):
        grant = holder.acquire(resource, **{"ttl": 60.0, "timeout": 5.0, **terms})
        if is_held_everywhere(redlock(holder).nodes, resource, 2.0):
            return grant
        holder.release(grant)
    pytest.fail(f"some node does not grant {resource!r}")


def redlock(face: Face) -> Redlock:
    assert isinstance(face.client, Redlock)
    return face.client


def connections_of(face: Face) -> SharedConnections | LoopConnections:
    """Return the connections of a Redlock's threads, or those of its loop."""
    client = redlock(face)
    if not isinstance(face, AsyncFace):
        return client._connections

    async def look() -> LoopConnections:
        return client.aio.here()

    return face.loop.run(look())


def lose_connection(face: Face, node: int) -> None:
    known, broken = connections_of(face), "broken by the test"
    if isinstance(known, SharedConnections):
        with known._mutex:
            known._nodes.broken(node, broken)
        return

    async def lose() -> None:
        known._nodes.broken(node, broken)

    assert isinstance(face, AsyncFace)
    face.loop.run(lose())


async def soon(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


async def connected(authority: Redlock) -> None:
    """Return when there is a link to every node: the first question may go out before that."""
    await take(authority)
    assert await soon(lambda: not authority.aio.here()._nodes.absent)


async def becomes_free(nodes: Nodes) -> bool:
    return await soon(lambda: not locks_on(nodes))


def connections_to(nodes: Nodes, number: int = 0) -> int:
    with redis.Redis.from_url(nodes[number].url) as client:
        facts: Any = client.info("clients")
        return int(facts["connected_clients"]) - 1


def waiting_on(node_url: str, resource: str = "r") -> int:
    with redis.Redis.from_url(node_url) as client:
        return int(str(client.zcard(f"{NODE_KEY}:q:{resource}")))


def all_wait(nodes: Nodes, count: int, resource: str = "r") -> bool:
    """Return whether so many stand in the queue of every node; a majority that lags passes them over."""
    return all(waiting_on(node.url, resource) == count for node in nodes)
