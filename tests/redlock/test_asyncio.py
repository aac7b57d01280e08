"""The asyncio driver on real nodes: many tasks on one connection a node, loops that come and go.

What is looked at is what `test_faults.py` looks at with the blocking driver, and what only asyncio can do:
a task may be cancelled at any await, and a loop may end at any time.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.base import Grant
from fencelock.embedded import Nodes
from fencelock.errors import LockTimeoutError, NodesNotInitialisedError
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY

_T = TypeVar("_T")


@pytest.fixture
def authority(nodes: Nodes) -> Iterator[Redlock]:
    """A Redlock on five initialised nodes, with counters from 0 and little patience."""
    with Redlock(nodes.urls, node_timeout=0.3, connect_timeout=1.0, outage_grace=0.3) as made:
        made.init(base=0)
        yield made


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, _T]], _T]:
    """How to run a coroutine in a new loop, of each kind there is."""
    if request.param == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        return uvloop.run  # type: ignore[no-any-return]
    return asyncio.run


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


def connections_to(nodes: Nodes, number: int = 0) -> int:
    """Return how many connections a node has, besides the one that asks."""
    with redis.Redis.from_url(nodes[number].url) as client:
        facts: Any = client.info("clients")
        return int(facts["connected_clients"]) - 1


def test_acquire_extend_and_release(authority: Redlock, nodes: Nodes, run: Run) -> None:
    """The three operations, for several resources in the order of the caller."""

    async def main() -> None:
        grant = await authority.aio.acquire(("b", "a"), ttl=5, timeout=0)
        assert grant.resources == ("b", "a")
        assert grant.tokens == (1, 1)
        longer = await authority.aio.extend(grant, 20)
        assert longer.expires_at > grant.expires_at + 10
        with pytest.raises(LockTimeoutError):
            await authority.aio.acquire(("a",), ttl=5, timeout=0)
        assert await authority.aio.release(longer) is True
        assert await authority.aio.release(longer) is False

    run(main())
    assert eventually(lambda: locks_on(nodes) == [])


def test_tokens_of_many_tasks_are_unique_and_grow(authority: Redlock, nodes: Nodes, run: Run) -> None:
    """100 tasks on 20 resources: no token twice, none below one that was complete before, nothing left."""
    tokens: dict[str, list[int]] = {f"r{number}": [] for number in range(20)}

    async def work(worker: int) -> None:
        for turn in range(5):
            resource = f"r{(worker + turn) % 20}"
            grant = await authority.aio.acquire((resource,), ttl=30, timeout=60)
            tokens[resource].append(grant.tokens[0])
            assert await authority.aio.release(grant)

    async def main() -> None:
        await asyncio.gather(*(work(worker) for worker in range(100)))

    run(main())
    assert sum(map(len, tokens.values())) == 500
    assert all(seen == sorted(set(seen)) for seen in tokens.values())
    assert eventually(lambda: locks_on(nodes) == [])
    assert not authority._wanted


def test_all_tasks_share_one_connection_a_node(authority: Redlock, nodes: Nodes, run: Run) -> None:
    """Which goes with its loop, also without a word of farewell."""
    authority.close()
    assert eventually(lambda: connections_to(nodes) == 0)

    async def main() -> int:
        grants: list[Grant] = await asyncio.gather(
            *(authority.aio.acquire((f"r{number}",), ttl=30, timeout=10) for number in range(50))
        )
        count = connections_to(nodes)
        await asyncio.gather(*map(authority.aio.release, grants))
        return count

    assert run(main()) == 1
    gc.collect()
    assert eventually(lambda: connections_to(nodes) == 0)


def test_loops_in_sequence_each_have_their_own_connections(authority: Redlock, run: Run) -> None:
    """As tests and reloads have them, on one authority, with blocking code in between."""
    tokens = []
    for _ in range(3):
        tokens.append(run(take(authority)))
        with authority.lock("r", timeout=0) as token:
            tokens.append(token)
    assert tokens == [1, 2, 3, 4, 5, 6]


def test_nodes_are_initialised_on_demand_only_where_asked_for(
    nodes: Nodes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FENCELOCK_AUTO_INIT counts here as well; otherwise the error says what to do."""

    async def main() -> None:
        async with Redlock(nodes.urls).aio as aio:
            monkeypatch.delenv("FENCELOCK_AUTO_INIT", raising=False)
            with pytest.raises(NodesNotInitialisedError, match="fencelock init"):
                await aio.acquire(("r",), ttl=5, timeout=0)
            monkeypatch.setenv("FENCELOCK_AUTO_INIT", "1")
            assert await aio.release(await aio.acquire(("r",), ttl=5, timeout=0))
            assert not await aio.init()

    run(main())
