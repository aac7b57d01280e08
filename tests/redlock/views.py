"""What tests look at: on the nodes, beside the library, and from tasks of a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import redis

from fencelock import Redlock
from fencelock.embedded import Nodes
from tests.redlock.stage import NODE_KEY

#: Runs a coroutine in a new loop.
Run = Callable[[Coroutine[Any, Any, Any]], Any]


async def take(authority: Redlock, resource: str = "r", **options: Any) -> int:
    """Acquire and release once; return the token."""
    grant = await authority.aio.acquire((resource,), **{"ttl": 30.0, "timeout": 10.0, **options})
    assert await authority.aio.release(grant)
    return grant.tokens[0]


def locks_on(nodes: Nodes) -> list[str]:
    """Return the lock keys that any running node has."""
    found: list[str] = []
    for node in nodes:
        if node.is_running:
            with redis.Redis.from_url(node.url, socket_timeout=2, decode_responses=True) as client:
                found += client.keys(f"{NODE_KEY}:l:*")
    return found


async def becomes_free(nodes: Nodes) -> bool:
    """Return whether all locks go within seconds, while the loop is there to see to it."""
    for _ in range(200):
        if not locks_on(nodes):
            return True
        await asyncio.sleep(0.02)
    return False


def connections_to(nodes: Nodes, number: int = 0) -> int:
    """Return how many connections a node has, besides the one that asks."""
    with redis.Redis.from_url(nodes[number].url) as client:
        facts: Any = client.info("clients")
        return int(facts["connected_clients"]) - 1


def waiting_on(node_url: str, resource: str = "r") -> int:
    """Return how many stand in a node's queue."""
    with redis.Redis.from_url(node_url) as client:
        return int(str(client.zcard(f"{NODE_KEY}:q:{resource}")))
