"""Loops that come and go, tasks that are cancelled, and turns that are long: no lock and no answer is lost.

What tasks share with threads is in `test_faults`, `test_waiting` and the casts of `tests/authorities`.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest
import uvloop

from fencelock import Redlock
from fencelock.errors import NodesNotInitialisedError, QuorumError
from proof.servers import Nodes
from tests.authorities.storm import Storm
from tests.polling import eventually
from tests.redlock.stage import SlowDoor
from tests.redlock.views import (
    all_wait,
    becomes_free,
    connected,
    connections_to,
    is_held_everywhere,
    locks_on,
    soon,
    take,
)

pytestmark = pytest.mark.usefixtures("no_noise")


def no_connection_is_left(nodes: Nodes) -> bool:
    gc.collect()  # each time: a thread that still connects may know its loop
    return connections_to(nodes) == 0


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_loop_that_has_ended_is_thrown_away_with_its_connections(
    authority: Redlock, nodes: Nodes, run: Callable[..., Any]
) -> None:
    """One to each node, also where the timer of its renewal is still to ring."""
    authority.close()
    assert eventually(lambda: connections_to(nodes) == 0)
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def work() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await asyncio.gather(*(take(authority, f"r{number}") for number in range(50)))
        assert connections_to(nodes) == 1
        async with authority.lock("r"):
            pass

    for _ in range(3):
        run(work())
    assert eventually(lambda: no_connection_is_left(nodes))
    assert [loop() for loop in loops] == [None, None, None]


def test_close_ends_the_connections_of_a_loop_in_another_thread(authority: Redlock, nodes: Nodes) -> None:
    ready, closed = threading.Event(), threading.Event()

    async def main() -> None:
        await take(authority)
        ready.set()
        await asyncio.to_thread(closed.wait)
        await take(authority)

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(asyncio.run, main())
        ready.wait()
        authority.close()
        assert eventually(lambda: connections_to(nodes) == 0)
        closed.set()
        done.result()


@pytest.mark.long
def test_loop_that_is_closed_without_farewell_leaves_no_socket_behind(
    authority: Redlock, nodes: Nodes
) -> None:
    """Tasks still wait, and are not cancelled: the next loop closes everything, or the end of the first."""

    async def wait(resource: str) -> None:
        # Fair, because another attempt may be granted while the task waits, for no caller.
        await authority.aio.acquire((resource,), ttl=30, timeout=None, fair=True)

    def hears_all() -> bool:
        return not authority.aio.here()._nodes.absent

    # Two resources: the first is kept, for a moment, for a task that is no more.
    for resource, next_loop in (("r1", True), ("r2", False)):
        authority.close()
        loop = asyncio.new_event_loop()
        loop.run_until_complete(take(authority, "other"))
        with authority.lock(resource):
            # Else the task may be granted the lock of a node that the holder was not connected to yet.
            assert is_held_everywhere(nodes.urls, resource)
            task = loop.create_task(wait(resource))
            assert loop.run_until_complete(soon(hears_all))
            loop.run_until_complete(asyncio.sleep(0.2))
            task._log_destroy_pending = False  # type: ignore[attr-defined] # it is, and we know
            loop.close()
        authority._connections.close()
        assert eventually(lambda: connections_to(nodes) == 1)
        if next_loop:
            asyncio.run(take(authority, "other"))
        else:
            del task, loop
        assert eventually(lambda: no_connection_is_left(nodes))
    assert eventually(lambda: locks_on(nodes) == [])


def test_loop_that_is_closed_while_a_task_waits_for_answers_can_go(authority: Redlock, nodes: Nodes) -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(connected(authority))
    for node in nodes:
        node.pause()
    try:
        task = loop.create_task(authority.aio.acquire(("r",), ttl=30, timeout=0))
        loop.run_until_complete(asyncio.sleep(0.05))
        task._log_destroy_pending = False  # type: ignore[attr-defined] # it is, and we know
        loop.close()
        known = weakref.ref(loop)
        del task, loop
        gc.collect()
        assert known() is None
    finally:
        for node in nodes:
            node.resume()
    assert eventually(lambda: no_connection_is_left(nodes))


@pytest.mark.long
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_storm_of_cancellations_leaves_no_lock_and_no_place_in_line(
    nodes: Nodes, run: Callable[..., Any]
) -> None:
    """Though nodes hang again and again, for longer than a client waits: what hangs hears all."""
    chance, authority = random.Random(11), Redlock(nodes.urls, node_timeout=0.3)
    authority.init(base=0)
    storm = Storm(authority)

    async def let_nodes_hang() -> None:
        hung = chance.sample(list(nodes), chance.choice([1, 2, 5]))
        for node in hung:
            node.pause()
        await asyncio.sleep(chance.uniform(0.05, 0.8))
        for node in hung:
            node.resume()

    async def main() -> None:
        raging = asyncio.ensure_future(storm.rage(tasks=200, seconds=1.5))
        while not raging.done():
            await let_nodes_hang()
            await asyncio.sleep(chance.uniform(0.1, 0.5))
        await raging
        assert await becomes_free(nodes)
        known = authority.aio.here()
        assert not known._in_line
        assert not known.queue._places
        assert await soon(lambda: all(all_wait(nodes, 0, resource) for resource in storm.tokens))
        await storm.check()

    run(main())
    authority.close()


def test_loop_that_ends_while_connecting_leaves_no_connection(nodes: Nodes) -> None:
    with closing(SlowDoor(nodes[0].port)) as door:
        authority = Redlock(f"redis://127.0.0.1:{door.port}")

        async def main() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await take(authority)

        asyncio.run(main())
        gc.collect()
        door.open.set()
        assert eventually(
            lambda: not any(thread.name.startswith("fencelock-connect") for thread in threading.enumerate())
        )
        assert eventually(lambda: connections_to(nodes) == 0)


def test_loop_that_comes_to_no_end_of_its_turn_takes_no_node_for_silent(nodes: Nodes) -> None:
    with Redlock(nodes.urls, node_timeout=1.0) as authority:
        authority.init(base=0)

        async def work(number: int) -> int:
            time.sleep(0.015)  # noqa: ASYNC251 - what the loop does else in the same turn
            return await take(authority, f"r{number}", timeout=0)

        async def main() -> None:
            await connected(authority)
            tokens = await asyncio.gather(*map(work, range(100)))
            assert min(tokens) > 0

        asyncio.run(main())
        assert eventually(lambda: not locks_on(nodes)), locks_on(nodes)


def test_nodes_are_initialised_on_demand_only_where_asked_for(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
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

    asyncio.run(main())


def test_a_look_that_a_signal_handler_strikes_is_planned_again(nodes: Nodes) -> None:
    """By the next broadcast; and looks do not become more, however busy the loop is."""
    looks: list[float] = []

    async def main() -> None:
        authority = Redlock(nodes.urls[:1], node_timeout=0.3, outage_grace=0)
        authority.init(base=0)
        connections = authority.aio.here()
        look = connections._look
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)

        def strike(due: float) -> None:
            looks.append(due)
            if len(looks) == 1:
                raise InterruptedError
            look(due)

        connections._look = strike  # type: ignore[method-assign]
        await authority.aio.release(await authority.aio.acquire(("a",), ttl=9, timeout=0))
        looks.clear()
        nodes[0].pause()
        try:
            async with asyncio.timeout(30):
                first = asyncio.ensure_future(authority.aio.acquire(("a",), ttl=9, timeout=0))
                await asyncio.sleep(0.05)
                for _ in range(10):
                    time.sleep(0.03)  # noqa: ASYNC251 - a busy loop
                    second = asyncio.ensure_future(authority.aio.acquire(("b",), ttl=9, timeout=0))
                    await asyncio.sleep(0)
                results = await asyncio.gather(first, second, return_exceptions=True)
        finally:
            nodes[0].resume()
        assert [type(each) for each in results] == [QuorumError, QuorumError]
        assert 1 < len(looks) < 60
        await authority.aio.close()
        authority.close()

    asyncio.run(main())
