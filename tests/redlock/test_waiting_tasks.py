"""Tasks of a loop that wait for a held lock: called as threads are, over one connection a node and loop."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any, cast

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.base import Grant
from fencelock.authority.redlock.protocol.queue import WaitQueue
from fencelock.authority.redlock.transport.aio import LoopConnections
from fencelock.errors import FencelockError, LockTimeoutError
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.stage import SlowDoor
from tests.redlock.views import (
    Run,
    all_wait,
    becomes_free,
    connections_to,
    is_held_everywhere,
    locks_on,
    soon,
    take,
    waiting_on,
)

pytestmark = pytest.mark.usefixtures("no_noise")


@pytest.fixture
def client(authority: Redlock, rival: Redlock) -> Redlock:
    """Another client, whose tasks wait; `authority` holds what they wait for."""
    authority.release(hold(authority, "connect"))
    return rival


def hold(authority: Redlock, resource: str = "r") -> Grant:
    """Acquire with the blocking driver: while nobody else wants it, that takes a moment; on every node.

    Of new connections, one may come up when the majority has answered. Its node has the lock the next time.
    """
    for _ in range(5):
        grant = authority.acquire((resource,), ttl=30.0, timeout=5.0)
        if is_held_everywhere(authority.nodes, resource, seconds=2.0):
            return grant
        authority.release(grant)
    pytest.fail(f"{resource!r} is never held on every node")


def listener_of(client: Redlock) -> LoopConnections:
    """Return what hears for the running loop."""
    return client.aio.here()


def heard_by(client: Redlock) -> int:
    """Return how many nodes the running loop listens to."""
    return len(listener_of(client).queue._listening)


async def start_listening(client: Redlock, holder: Redlock, nodes: int = 5) -> None:
    """Have a task wait for something, until the loop hears so many nodes."""
    resource = f"warm-up-{threading.get_ident()}"
    grant = hold(holder, resource)
    for _ in range(20):
        with pytest.raises(LockTimeoutError):
            await client.aio.acquire((resource,), ttl=30, timeout=0.2)
        if heard_by(client) == nodes:
            break
    holder.release(grant)
    assert heard_by(client) == nodes


async def seconds_until_handed_over(holder: Redlock, client: Redlock, timeout: float = 3.0) -> float:  # noqa: ASYNC109
    """Let a task wait for another client; return how long after the release it has the lock."""
    grant = hold(holder)
    task = asyncio.ensure_future(take_and_tell(client, timeout))
    assert not listener_of(client).queue.hears or await soon(lambda: bool(listener_of(client)._in_line))
    await asyncio.sleep(0.2)
    holder.release(grant)
    released = time.monotonic()
    return await task - released


async def take_and_tell(client: Redlock, timeout: float = 30.0, **options: Any) -> float:  # noqa: ASYNC109
    """Acquire and release; return when it was acquired, infinity for never."""
    try:
        grant = await client.aio.acquire(("r",), ttl=30.0, timeout=timeout, **options)
    except LockTimeoutError:
        return math.inf
    acquired = time.monotonic()
    await client.aio.release(grant)
    return acquired


@pytest.mark.usefixtures("never_look")
def test_task_is_woken_by_the_release(authority: Redlock, client: Redlock, run: Run) -> None:
    """The holder's lease would last for 30 s, and looking alone would take 20."""

    async def main() -> None:
        await start_listening(client, authority)
        assert await seconds_until_handed_over(authority, client) < 1.0

    run(main())


@pytest.mark.usefixtures("never_look")
def test_task_that_hears_nothing_is_not_woken(
    authority: Redlock, client: Redlock, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests around it: it has the lock only when it looks for a last time."""
    monkeypatch.setattr(WaitQueue, "note", lambda *_: "")

    async def main() -> None:
        await start_listening(client, authority)
        assert await seconds_until_handed_over(authority, client, timeout=3.0) > 2.0

    run(main())


@pytest.mark.usefixtures("never_look")
def test_call_that_comes_before_the_wait_begins_is_not_missed(
    authority: Redlock, client: Redlock, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release falls between the answers to the attempt and the wait."""
    wait = LoopConnections.wait

    async def late(listener: LoopConnections, place: str, seconds: float) -> None:
        if place:
            authority.release(grants.pop())
            assert await soon(lambda: listener.queue.due(place) < time.monotonic())
        await wait(listener, place, seconds)

    grants: list[Grant] = []

    async def main() -> None:
        await start_listening(client, authority)
        grants.append(hold(authority))
        monkeypatch.setattr(LoopConnections, "wait", late)
        began = time.monotonic()
        assert await take_and_tell(client, timeout=3.0) - began < 1.0

    run(main())


def scripts_run_on(nodes: Nodes) -> int:
    """Return how many scripts the first node has executed."""
    with redis.Redis.from_url(nodes[0].url) as client:
        facts: Any = client.info("commandstats")
        return sum(facts.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


@pytest.mark.usefixtures("never_look")
@pytest.mark.parametrize("hears", [True, False], ids=["called", "looking"])
def test_fifty_tasks_take_turns_without_a_herd(
    authority: Redlock,
    client: Redlock,
    nodes: Nodes,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    *,
    hears: bool,
) -> None:
    """Whoever is called attempts, the others are quiet; those who look (the control) ask far more often."""
    if not hears:
        monkeypatch.setattr(WaitQueue, "listen", lambda *_: None)

    async def work() -> int:
        grant = await client.aio.acquire(("r",), ttl=30.0, timeout=60.0)
        await asyncio.sleep(0.02)
        await client.aio.release(grant)
        return grant.tokens[0]

    async def main() -> int:
        await start_listening(client, authority, nodes=5 if hears else 0)
        before = scripts_run_on(nodes)
        tokens = await asyncio.gather(*(work() for _ in range(50)))
        assert len(set(tokens)) == 50
        return scripts_run_on(nodes) - before

    scripts = run(main()) / 50
    assert (scripts < 8) == hears, scripts


def test_tasks_come_in_the_order_in_which_they_asked(
    authority: Redlock, client: Redlock, nodes: Nodes, run: Run
) -> None:
    """With `fair`, of one loop as of many clients."""
    order: list[int] = []

    async def work(number: int) -> None:
        grant = await client.aio.acquire(("r",), ttl=30.0, timeout=30.0, fair=True)
        order.append(number)
        await client.aio.release(grant)

    async def main() -> None:
        await start_listening(client, authority)
        grant = hold(authority)
        tasks = []
        for number in range(12):
            tasks.append(asyncio.ensure_future(work(number)))
            assert await soon(lambda number=number: all_wait(nodes, number + 1))  # type: ignore[misc]
            await asyncio.sleep(0.01)
        authority.release(grant)
        await asyncio.gather(*tasks)

    run(main())
    assert order == list(range(12))


def test_cancelled_task_leaves_its_place(authority: Redlock, client: Redlock, nodes: Nodes, run: Run) -> None:
    """It is gone from every queue, no node would keep the lock for it, and nothing of it is left here."""

    async def main() -> None:
        await start_listening(client, authority)
        grant = hold(authority)
        tasks = [asyncio.ensure_future(take_and_tell(client)) for _ in range(5)]
        assert await soon(lambda: all_wait(nodes, 5))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert await soon(lambda: all_wait(nodes, 0), 3.0)  # they end after 5
        listener = listener_of(client)
        assert not listener._in_line
        assert not listener.queue._places
        authority.release(grant)
        assert await becomes_free(nodes)

    run(main())


def test_storm_of_cancelled_tasks_that_wait_leaves_nothing(
    authority: Redlock, client: Redlock, nodes: Nodes, run: Run
) -> None:
    """100 tasks contend for three resources, each cancelled at a random moment of its wait or hand-over."""
    tokens: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    chance = random.Random(11)

    async def once() -> None:
        resource = chance.choice(list(tokens))
        grant = await client.aio.acquire((resource,), ttl=60.0, timeout=5.0, fair=chance.random() < 0.3)
        tokens[resource].append(grant.tokens[0])
        try:
            await asyncio.sleep(chance.random() * 0.01)
        finally:
            await client.aio.release(grant)

    async def work(end: float) -> None:
        while time.monotonic() < end:
            task = asyncio.ensure_future(once())
            await asyncio.sleep(chance.random() ** 3 * 2.0)
            task.cancel()
            with suppress(asyncio.CancelledError, FencelockError):
                await task

    async def main() -> None:
        await start_listening(client, authority)
        await asyncio.gather(*(work(time.monotonic() + 3.0) for _ in range(100)))
        assert await becomes_free(nodes)
        assert heard_by(client) == 5
        listener = listener_of(client)
        assert not listener._in_line
        assert not listener.queue._places
        for resource, seen in tokens.items():
            assert await take(client, resource, timeout=0) > max(seen)
            assert await soon(lambda resource=resource: waiting_on(nodes[0].url, resource) == 0)  # type: ignore[misc]

    run(main())
    assert all(seen == sorted(set(seen)) for seen in tokens.values())
    assert sum(map(len, tokens.values())) > 50


def test_node_that_was_killed_is_heard_again(
    authority: Redlock, client: Redlock, nodes: Nodes, run: Run
) -> None:
    """Until then the others call."""

    async def main() -> None:
        await start_listening(client, authority)
        nodes[1].kill()
        assert await seconds_until_handed_over(authority, client) < 2.0
        assert heard_by(client) == 4
        nodes[1].restart(keep_data=False)
        await start_listening(client, authority)
        assert await seconds_until_handed_over(authority, client) < 2.0

    run(main())


def test_tasks_wait_by_looking_where_most_nodes_are_silent(
    authority: Redlock, nodes: Nodes, run: Run
) -> None:
    """Three of five do not let this user listen: nobody stands in a queue where it is called in vain."""
    for node in nodes[:3]:
        with redis.Redis.from_url(node.url) as admin:
            admin.acl_setuser("deaf", enabled=True, nopass=True, keys=["*"], commands=["+@all"], reset=True)
    urls = [url.replace("redis://", "redis://deaf:any@") for url in nodes.urls[:3]] + nodes.urls[3:]

    async def main() -> None:
        async with Redlock(urls).aio as aio:
            deaf = cast("Redlock", aio._authority)
            assert await seconds_until_handed_over(authority, deaf, timeout=5.0) < 2.0
            assert await soon(lambda: heard_by(deaf) == 2)
            assert not listener_of(deaf).queue.hears
            assert await seconds_until_handed_over(authority, deaf, timeout=5.0) < 2.0
            grant = hold(authority)
            with pytest.raises(LockTimeoutError):
                await aio.acquire(("r",), ttl=30, timeout=0.3)
            assert waiting_on(nodes[4].url) == 0
            authority.release(grant)

    try:
        run(main())
    finally:
        for node in nodes[:3]:
            with redis.Redis.from_url(node.url) as admin:
                admin.acl_deluser("deaf")


@pytest.mark.usefixtures("never_look")
def test_tasks_of_two_loops_and_threads_hand_the_lock_to_each_other(
    authority: Redlock, client: Redlock, nodes: Nodes, run: Run
) -> None:
    """Two loops and two threads of one client, called over connections of their own; nobody looks."""
    tokens: list[int] = []
    ready = threading.Barrier(4, timeout=20.0)

    async def work() -> None:
        await start_listening(client, authority)
        await asyncio.to_thread(ready.wait)

        async def often() -> None:
            for _ in range(5):
                grant = await client.aio.acquire(("r",), ttl=30.0, timeout=60.0)
                tokens.append(grant.tokens[0])
                await client.aio.release(grant)

        await asyncio.gather(*(often() for _ in range(4)))

    def block() -> None:
        resource = f"warm-up-{threading.get_ident()}"
        grant = hold(authority, resource)
        while not client._connections.queue.hears:
            with pytest.raises(LockTimeoutError):
                client.acquire((resource,), ttl=30.0, timeout=0.2)
        authority.release(grant)
        ready.wait()
        for _ in range(10):
            grant = client.acquire(("r",), ttl=30.0, timeout=60.0)
            tokens.append(grant.tokens[0])
            client.release(grant)

    began = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        works = [threads.submit(run, work()), threads.submit(run, work())]
        works += [threads.submit(block) for _ in range(2)]
    failures = [failure for done in works if (failure := done.exception()) is not None]
    assert not failures
    assert time.monotonic() - began < 30.0
    assert len(tokens) == 60
    assert tokens == sorted(set(tokens))
    assert eventually(lambda: locks_on(nodes) == [])


def test_forked_child_waits_with_ears_of_its_own(authority: Redlock, client: Redlock, run: Run) -> None:
    """It is forked while a task of its parent waits, reads none of those calls, and both get the lock."""

    async def main() -> None:
        await start_listening(client, authority)
        grant = hold(authority)
        task = asyncio.ensure_future(take_and_tell(client))
        assert await soon(lambda: bool(listener_of(client)._in_line))
        child = os.fork()
        if child == 0:
            os._exit(exit_code_of_child(client))
        await asyncio.sleep(1.0)
        authority.release(grant)
        assert await task < math.inf
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert await seconds_until_handed_over(authority, client) < 2.0
        assert heard_by(client) == 5

    run(main())


def exit_code_of_child(client: Redlock) -> int:
    """Wait for the lock in a child; return 0 if it was had, in a loop that hears all nodes."""
    signal.alarm(20)

    async def main() -> int:
        return 0 if await take_and_tell(client) < math.inf and heard_by(client) == 5 else 1

    with suppress(BaseException):
        asyncio._set_running_loop(None)
        with ThreadPoolExecutor(1) as threads:  # a loop in a thread that never had one
            return threads.submit(asyncio.run, main()).result()
    return 2


def connecting_threads() -> list[str]:
    """Return the names of the threads that open connections."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fencelock-connect")]


def test_one_connection_to_each_node_is_all(
    authority: Redlock, client: Redlock, nodes: Nodes, run: Run
) -> None:
    """Also where tasks wait; no thread, timer or task is left in the loop."""

    async def main() -> None:
        before = connections_to(nodes)
        await take(client)
        assert await soon(lambda: connections_to(nodes) == before + 1)
        await start_listening(client, authority)
        assert connections_to(nodes) == before + 1
        assert not connecting_threads()
        timers = getattr(asyncio.get_running_loop(), "_scheduled", [])  # of asyncio's own loop
        assert not [timer for timer in timers if "resume" in repr(timer) and not timer.cancelled()]
        assert len(asyncio.all_tasks()) == 1

    run(main())


def test_closing_lets_tasks_that_wait_go_on(
    authority: Redlock, client: Redlock, nodes: Nodes, run: Run
) -> None:
    """They look by themselves from then on, without an error."""

    async def main() -> None:
        await start_listening(client, authority)
        grant = hold(authority)
        task = asyncio.ensure_future(take_and_tell(client))
        assert await soon(lambda: bool(listener_of(client)._in_line))
        await client.aio.close()
        await asyncio.sleep(0.1)
        authority.release(grant)
        released = time.monotonic()
        assert await task - released < 3.0
        await client.aio.close()
        assert await soon(lambda: connections_to(nodes) == 1)

    run(main())


def test_loop_that_ends_while_connections_are_opened_leaves_none(
    make_nodes: Callable[..., Nodes], run: Run
) -> None:
    """They come up when the loop is gone; the tasks that waited were cancelled with it."""
    nodes = make_nodes(1)  # of its own: other tests leave connections behind for a while
    with closing(SlowDoor(nodes[0].port)) as door, Redlock(nodes.urls[0]) as holder:
        holder.init(base=0)
        client = Redlock(f"redis://127.0.0.1:{door.port}", connect_timeout=5.0)

        async def main() -> None:
            hold(holder)
            task = asyncio.ensure_future(take_and_tell(client))
            assert await soon(lambda: bool(connecting_threads()))
            await asyncio.sleep(0.1)
            del task

        run(main())
        door.open.set()
        assert eventually(lambda: not connecting_threads())
        client.close()
        assert eventually(lambda: connections_to(nodes) <= 1)


@pytest.mark.usefixtures("never_look")
def test_connections_that_break_under_a_task_that_waits_are_opened_again(
    authority: Redlock, client: Redlock, nodes: Nodes, run: Run
) -> None:
    """All of them at once: it stands in line still, and is called over the new ones before it would look."""

    async def main() -> None:
        await start_listening(client, authority)
        grant = hold(authority)
        task = asyncio.ensure_future(take_and_tell(client, timeout=15.0))
        assert await soon(lambda: bool(listener_of(client)._in_line))
        connections = listener_of(client)._nodes
        before = set(map(connections.connection, range(5)))
        for node in reversed(nodes):
            with redis.Redis.from_url(node.url) as admin:
                admin.client_kill_filter(_type="pubsub")
        assert await soon(lambda: not before & set(map(connections.connection, range(5))))
        assert await soon(lambda: heard_by(client) == 5)
        authority.release(grant)
        released = time.monotonic()
        assert await task - released < 1.0

    run(main())
