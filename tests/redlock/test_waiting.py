"""Threads and tasks that wait for a holder are woken by the nodes' calls, in order, also after faults."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.base import Grant
from fencelock.authority.redlock.protocol.acquire import Acquisition
from fencelock.authority.redlock.protocol.messages import Sleep
from fencelock.authority.redlock.protocol.queue import HESITATION, WaitQueue
from fencelock.authority.redlock.transport.aio import LoopConnections
from fencelock.errors import LockTimeoutError
from proof.servers import Nodes
from tests.authorities.faces import AsyncFace, BlockingFace, Face, Loop
from tests.authorities.stage import Stage, in_one_loop, together
from tests.polling import eventually
from tests.redlock.stage import OF_THE_NODE, keys_of, node_set_of
from tests.redlock.views import all_wait, connections_of, connections_to, hold, locks_on, redlock, soon

pytestmark = pytest.mark.usefixtures("no_noise")
#: For acts that only a loop can do, or that are the same in threads and in tasks.
ONLY_TASKS = pytest.mark.parametrize("world", ["asyncio"])
ONLY_THREADS = pytest.mark.parametrize("world", ["blocking"])


@pytest.fixture
def line() -> WaitQueue:
    """A line of the client `c`, over five nodes of which three are heard."""
    made = WaitQueue("c", 5, lambda: 0.5)
    for node in range(3):
        made.listen(node)
    return made


class TestLine:
    def test_majority_of_calls_is_due_at_once(self, line: WaitQueue) -> None:
        place = line.expect("")
        for node in range(2):
            line.on_call(node, b"1", 10.0)
        assert line.due(place) > 10.0
        line.on_call(2, b"1", 10.001)
        assert line.due(place) == 10.001

    def test_minority_of_calls_is_due_soon(self, line: WaitQueue) -> None:
        """Nodes that disagree on the first in line leave no client waiting. A repeated call adds nothing."""
        place = line.expect("")
        for _ in range(5):
            line.on_call(4, b"1", 10.0)
        assert 10.0 + 0.5 * HESITATION <= line.due(place) <= 10.0 + 1.5 * HESITATION

    def test_calls_count_from_the_last_try_only(self, line: WaitQueue) -> None:
        """What called an attempt that has failed since says nothing about the next one."""
        place = line.expect("")
        for node in range(3):
            line.on_call(node, b"1", 10.0)
        assert line.expect(place) == place
        assert line.due(place) == math.inf

    def test_calls_for_nobody_are_ignored(self, line: WaitQueue) -> None:
        place = line.expect("")
        for message in (b"2", b"", b"\xff", b"1 soon", b"one"):
            line.on_call(0, message, 10.0)
        assert line.due(place) == math.inf
        line.leave(place)
        line.on_call(0, b"1", 10.0)
        assert line.due(place) == math.inf

    def test_nobody_stands_in_line_where_most_nodes_are_silent(self, line: WaitQueue) -> None:
        heard = [line.hears]
        line.go_deaf(1)
        heard.append(line.hears)
        line.listen(1)
        line.listen(1)
        heard.append(line.hears)
        assert heard == [True, False, True]

    def test_a_call_ends_no_sleep_when_its_place_is_gone(self, line: WaitQueue) -> None:
        """A contender that was called, and hears no majority any more, would come back at once for ever."""
        acquisition = Acquisition(("r",), 30.0, lambda: "nonce", line)
        assert [acquisition.next_attempt(node_set_of("", 5)).place for _ in range(2)] == ["", "c.1"]
        for node in range(3):
            line.on_call(node, b"1", 0.0)
        assert line.due("c.1") == 0.0
        line.go_deaf(0)
        assert acquisition.next_attempt(node_set_of("", 5)).position is None
        assert line.due("c.1") == math.inf

    def test_first_bid_stands_in_line_where_the_last_acquisition_had_to_wait(self, line: WaitQueue) -> None:
        """Otherwise the lock is mostly free."""
        places = []
        for attempts in (1, 2, 1, 1):
            acquisition = Acquisition(("r",), 30.0, lambda: "nonce", line)
            made = [acquisition.next_attempt(node_set_of("", 5)) for _ in range(attempts)]
            places.append(made[0].position is not None)
            acquisition.leave_queue()
        assert places == [False, False, True, False]

    def test_no_place_is_given_twice(self, line: WaitQueue) -> None:
        places = [line.expect("") for _ in range(3)]
        assert places == ["c.1", "c.2", "c.3"]


@pytest.fixture
def waiter(mine: Face, other: Face) -> Face:
    start_listening(other, mine)
    return other


def start_listening(waiter: Face, holder: Face, nodes: int = 5) -> None:
    """Have a client wait for something, until it hears so many nodes."""
    resource = f"warm-up-{threading.get_ident()}"
    grant = hold(holder, resource)
    for _ in range(20):
        with pytest.raises(LockTimeoutError):
            waiter.acquire(resource, timeout=0.2)
        if heard_by(waiter) == nodes:
            break
    holder.release(grant)
    assert heard_by(waiter) == nodes


def heard_by(client: Face) -> int:
    return len(connections_of(client).queue._listening)


@contextmanager
def waiting(waiter: Face, nodes: Nodes, place: int = 1, **terms: Any) -> Iterator[None]:
    """Have a client wait in line for the held lock; in the end it must be granted that before it looks."""

    def take() -> Grant:
        grant = waiter.acquire("r", timeout=None, **terms)
        waiter.release(grant)
        return grant

    with ThreadPoolExecutor(1) as pool:
        granted = pool.submit(take)
        assert eventually(lambda: all_wait(nodes, place))
        yield
        assert granted.result(30).tokens


@pytest.mark.usefixtures("never_look")
@pytest.mark.parametrize("world", ["blocking", "asyncio", "uvloop"])
def test_waiter_is_woken_by_the_release(mine: Face, waiter: Face, nodes: Nodes) -> None:
    grant = hold(mine)
    with waiting(waiter, nodes):
        mine.release(grant)


@pytest.mark.usefixtures("never_look")
@ONLY_THREADS
def test_waiter_is_woken_though_a_minority_of_nodes_is_dead(mine: Face, waiter: Face, nodes: Nodes) -> None:
    """Three of five calls are enough. A node that is back is heard again."""
    nodes[1].kill()
    nodes[3].kill()
    alive: Any = [nodes[number] for number in (0, 2, 4)]
    for back in (False, True):
        if back:
            nodes[1].restart(keep_data=False)
            start_listening(waiter, mine, nodes=4)
        grant = mine.acquire("r", timeout=30)
        with waiting(waiter, alive):
            mine.release(grant)
        assert heard_by(waiter) == 3 + back


@pytest.mark.long
@ONLY_THREADS
def test_user_who_may_not_listen_waits_by_looking(mine: Face, clients: Stage, nodes: Nodes) -> None:
    """It gets the lock all the same, and stands in no queue where it would be called in vain."""
    for node in nodes[:3]:
        with redis.Redis.from_url(node.url) as admin:
            admin.acl_setuser("deaf", enabled=True, nopass=True, keys=["*"], commands=["+@all"], reset=True)
    deaf_urls = [url.replace("redis://", "redis://deaf:any@") for url in nodes.urls[:3]]
    try:
        user = clients.new(Redlock([*deaf_urls, *nodes.urls[3:]]))
        grant = mine.acquire("r")
        with pytest.raises(LockTimeoutError):
            user.acquire("r", timeout=0.3)
        assert eventually(lambda: heard_by(user) == 2)
        with pytest.raises(LockTimeoutError):
            user.acquire("r", timeout=0.3)
        assert all_wait(nodes, 0)
        mine.release(grant)
        assert user.acquire("r", timeout=30).tokens
    finally:
        for node in nodes[:3]:
            with redis.Redis.from_url(node.url) as admin:
                admin.acl_deluser("deaf")


@pytest.mark.usefixtures("never_look")
def test_connections_that_break_under_one_who_waits_are_opened_again(
    mine: Face, waiter: Face, nodes: Nodes
) -> None:
    """All of them at once: it stands in line still, and is called over the new ones before it would look."""
    grant = hold(mine)
    with waiting(waiter, nodes):
        connections = connections_of(waiter)._nodes
        before = set(map(connections.connection, range(5)))
        for node in reversed(nodes):
            with redis.Redis.from_url(node.url) as admin:
                admin.client_kill_filter(_type="pubsub")
        assert eventually(lambda: not before & set(map(connections.connection, range(5))))
        assert eventually(lambda: heard_by(waiter) == 5)
        mine.release(grant)


@pytest.mark.parametrize(("world", "shared"), [("blocking", True), ("asyncio", True), ("blocking", False)])
def test_those_who_wait_come_in_order(
    mine: Face, waiter: Face, clients: Stage, nodes: Nodes, *, shared: bool
) -> None:
    """With `fair`, they get the lock in the order in which they asked for it, and the queue is gone then."""
    waiters = [waiter] * 6
    if not shared:
        waiters[1:] = [clients.new() for _ in range(5)]
        for each in waiters[1:]:
            start_listening(each, mine)
    order: list[int] = []

    def wait(number: int) -> None:
        grant = waiters[number].acquire("r", timeout=None, fair=True)
        order.append(number)
        waiters[number].release(grant)

    grant = hold(mine)
    with ThreadPoolExecutor(6) as pool:
        futures = []
        for number in range(6):
            futures.append(pool.submit(wait, number))
            assert eventually(lambda number=number: all_wait(nodes, number + 1))  # type: ignore[misc]
            time.sleep(0.02)
        mine.release(grant)
        for future in futures:
            future.result(30)
    assert order == list(range(6))
    with redis.Redis.from_url(nodes[0].url) as client:
        assert eventually(lambda: keys_of(client) == OF_THE_NODE)


@ONLY_THREADS
def test_uncontended_acquisition_leaves_no_thread_and_no_key(
    mine: Face, clients: Stage, nodes: Nodes
) -> None:
    before = _threads()
    with redlock(mine).lock("r"):
        pass
    other = clients.new()
    with redlock(mine).lock("r"), pytest.raises(LockTimeoutError):
        other.acquire("r", timeout=0)
    other.close()
    assert eventually(lambda: _threads() <= before)
    with redis.Redis.from_url(nodes[0].url) as client:
        assert eventually(lambda: keys_of(client) == OF_THE_NODE)


def _threads() -> set[threading.Thread]:
    """Return the threads that run, save those that renew leases, which stay for a while."""
    return {thread for thread in threading.enumerate() if thread.name != "fencelock-renewal"}


def test_one_who_gives_up_or_is_cancelled_is_gone_from_the_queues(
    mine: Face, waiter: Face, clients: Stage, nodes: Nodes, world: str
) -> None:
    grant = hold(mine)
    with pytest.raises(LockTimeoutError):
        waiter.acquire("r", timeout=0.3)
    assert eventually(lambda: all_wait(nodes, 0))

    async def cancel() -> None:
        tasks = [
            asyncio.ensure_future(waiter.client.aio.acquire(("r",), ttl=30.0, timeout=None)) for _ in range(5)
        ]
        assert await soon(lambda: all_wait(nodes, 5))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    if world == "asyncio":
        clients.run(cancel())
        assert eventually(lambda: all_wait(nodes, 0))
    assert not connections_of(waiter)._in_line
    assert not connections_of(waiter).queue._places
    mine.release(grant)
    assert eventually(lambda: not locks_on(nodes))


def test_closing_lets_those_who_wait_go_on(mine: Face, waiter: Face, nodes: Nodes) -> None:
    """They look by themselves from then on, without an error."""
    grant = hold(mine)
    with waiting(waiter, nodes):
        waiter.close()
        time.sleep(0.1)
        mine.release(grant)
    waiter.close()
    mine.close()
    assert eventually(lambda: connections_to(nodes) == 0)


@ONLY_TASKS
@pytest.mark.usefixtures("never_look")
def test_call_that_comes_before_the_wait_begins_is_not_missed(
    mine: Face, waiter: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release falls between the answers to the attempt and the wait."""
    sleep, grants = LoopConnections.sleep, [hold(mine)]

    async def late(listener: LoopConnections, request: Sleep) -> float:
        if request.place:
            await mine.client.aio.release(grants.pop())
            assert await soon(lambda: listener.queue.due(request.place) < time.monotonic())
        return await sleep(listener, request)

    monkeypatch.setattr(LoopConnections, "sleep", late)
    assert waiter.acquire("r", timeout=None).tokens


def scripts_run_on(nodes: Nodes) -> int:
    with redis.Redis.from_url(nodes[0].url) as client:
        facts: Any = client.info("commandstats")
        return sum(facts.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


@ONLY_TASKS
@pytest.mark.usefixtures("never_look")
def test_tasks_take_turns_without_a_herd(mine: Face, waiter: Face, clients: Stage, nodes: Nodes) -> None:
    client = waiter.client.aio

    async def work() -> int:
        grant = await client.acquire(("r",), ttl=30.0, timeout=None)
        await asyncio.sleep(0.02)
        await client.release(grant)
        return int(grant.tokens[0])

    async def main() -> None:
        assert len(set(await in_one_loop(*(work() for _ in range(30)), seconds=60.0))) == 30

    mine.release(hold(mine))
    before = scripts_run_on(nodes)
    clients.run(main(), 60.0)
    assert (scripts_run_on(nodes) - before) / 30 < 8


@ONLY_TASKS
@pytest.mark.usefixtures("never_look")
def test_two_loops_and_two_threads_hand_the_lock_to_each_other(mine: Face, other: Face, nodes: Nodes) -> None:
    client, second = redlock(other), Loop()
    faces = [other, AsyncFace(client, second), *(BlockingFace(client),) * 2]
    for face in faces[:3]:
        start_listening(face, mine)
    tokens: list[int] = []

    def work(face: Face) -> None:
        for _ in range(8):
            grant = face.acquire("r", timeout=None)
            tokens.append(grant.tokens[0])
            face.release(grant)

    together(*(lambda face=face: work(face) for face in faces))
    faces[1].close()
    second.close()
    assert len(tokens) == 32
    assert tokens == sorted(set(tokens))
    assert eventually(lambda: locks_on(nodes) == [])
