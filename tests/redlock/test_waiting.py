"""Threads and tasks that wait for a holder are woken by the nodes' calls, in order, also after faults."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.redlock.protocol.acquire import Acquisition
from fencelock.authority.redlock.protocol.messages import Sleep
from fencelock.authority.redlock.protocol.queue import HESITATION, WaitQueue
from fencelock.authority.redlock.transport.aio import LoopConnections
from fencelock.errors import LockTimeoutError
from proof.servers import Nodes
from tests.authorities.faces import AsyncFace, BlockingFace, Face, Loop
from tests.authorities.stage import Stage, in_one_loop, together
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY, OF_THE_NODE, keys_of, node_set_of
from tests.redlock.views import all_wait, connections_of, connections_to, hold, locks_on, redlock, soon

pytestmark = [pytest.mark.timed, pytest.mark.usefixtures("no_noise")]
#: For acts that only a loop can do, or that are the same in threads and in tasks.
ONLY_TASKS = pytest.mark.parametrize("world", ["asyncio", "uvloop"])
ONLY_THREADS = pytest.mark.parametrize("world", ["blocking"])


@pytest.fixture
def line() -> WaitQueue:
    """A line of the client `c`, over five nodes of which three are heard."""
    made = WaitQueue("c", 5, lambda: 0.5)
    for node in range(3):
        made.listen(node)
    return made


class TestLine:
    """What calls mean, without sockets and clocks."""

    def test_majority_of_calls_is_due_at_once(self, line: WaitQueue) -> None:
        """Two of five are not enough; the third is."""
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
        """Of an acquisition that is over, of another client, or no call at all."""
        place = line.expect("")
        for message in (b"2", b"", b"\xff", b"1 soon", b"one"):
            line.on_call(0, message, 10.0)
        assert line.due(place) == math.inf
        line.leave(place)
        line.on_call(0, b"1", 10.0)
        assert line.due(place) == math.inf

    def test_nobody_stands_in_line_where_most_nodes_are_silent(self, line: WaitQueue) -> None:
        """No node would call the waiters."""
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
        """It names the client and one acquisition of it."""
        places = [line.expect("") for _ in range(3)]
        assert places == ["c.1", "c.2", "c.3"]


@pytest.fixture
def waiter(mine: Face, other: Face) -> Face:
    """Another client than `mine`, which hears all nodes already."""
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
    """Return how many nodes a client listens to."""
    return len(connections_of(client).queue._listening)


def is_in_line(client: Face) -> bool:
    """Tell whether a client stands in the queues of nodes."""
    return bool(connections_of(client)._in_line)


def take_and_tell(client: Face, *resources: str, timeout: float = 30.0, fair: bool = False) -> float:
    """Acquire and release; return when it was acquired, infinity for never."""
    try:
        grant = client.acquire(*(resources or ("r",)), timeout=timeout, fair=fair)
    except LockTimeoutError:
        return math.inf
    acquired = time.monotonic()
    client.release(grant)
    return acquired


def seconds_until_handed_over(holder: Face, waiter: Face, timeout: float = 3.0) -> float:
    """Let one wait for the other; return how long after the release it has the lock, infinity for never."""
    grant = hold(holder)
    with ThreadPoolExecutor(1) as pool:
        acquired = pool.submit(take_and_tell, waiter, timeout=timeout)
        assert not connections_of(waiter).queue.hears or eventually(lambda: is_in_line(waiter))
        time.sleep(0.2)
        holder.release(grant)
        released = time.monotonic()
        return acquired.result(30) - released


@pytest.mark.usefixtures("never_look")
def test_waiter_is_woken_by_the_release(mine: Face, waiter: Face) -> None:
    """The holder's lease would last for a minute, and looking alone would take 20 s."""
    assert seconds_until_handed_over(mine, waiter) < 1.0


@pytest.mark.long
@pytest.mark.usefixtures("never_look")
def test_waiter_that_hears_nothing_is_not_woken(
    mine: Face, waiter: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests around it: it has the lock only when it looks for a last time."""
    monkeypatch.setattr(WaitQueue, "on_call", lambda *_: "")
    assert seconds_until_handed_over(mine, waiter, timeout=2.0) > 1.0


@pytest.mark.usefixtures("never_look")
def test_waiter_is_woken_though_a_minority_of_nodes_is_dead(mine: Face, waiter: Face, nodes: Nodes) -> None:
    """Three of five calls are enough. A node that is back is heard again."""
    nodes[1].kill()
    nodes[3].kill()
    assert seconds_until_handed_over(mine, waiter) < 1.0
    assert heard_by(waiter) == 3
    nodes[1].restart(keep_data=False)
    start_listening(waiter, mine, nodes=4)
    assert seconds_until_handed_over(mine, waiter) < 1.0


@pytest.mark.usefixtures("never_look")
def test_waiter_is_woken_though_calls_of_a_minority_are_lost(
    mine: Face, waiter: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of five calls never arrive."""
    note = WaitQueue.on_call

    def lossy(line: WaitQueue, node: int, message: bytes, now: float) -> str:
        return note(line, node, message, now) if node > 1 else ""

    monkeypatch.setattr(WaitQueue, "on_call", lossy)
    assert seconds_until_handed_over(mine, waiter) < 1.0


def test_waiter_whose_calls_are_all_lost_looks_by_itself(
    mine: Face, waiter: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock comes after little more than a second at the latest.

    The time is a claim that no client takes, and a look.
    """
    monkeypatch.setattr(WaitQueue, "on_call", lambda *_: "")
    assert seconds_until_handed_over(mine, waiter, timeout=10.0) < 2.0


@pytest.mark.long
@pytest.mark.parametrize("deaf", [3, 5])
def test_user_who_may_not_listen_waits_by_looking(
    mine: Face, clients: Stage, nodes: Nodes, deaf: int
) -> None:
    """It gets the lock all the same, and stands in no queue where it would be called in vain."""
    for node in nodes[:deaf]:
        with redis.Redis.from_url(node.url) as admin:
            admin.acl_setuser("deaf", enabled=True, nopass=True, keys=["*"], commands=["+@all"], reset=True)
    deaf_urls = [url.replace("redis://", "redis://deaf:any@") for url in nodes.urls[:deaf]]
    try:
        user = clients.new(Redlock([*deaf_urls, *nodes.urls[deaf:]]))
        assert seconds_until_handed_over(mine, user, timeout=5.0) < 2.0
        assert eventually(lambda: heard_by(user) == 5 - deaf)
        assert not connections_of(user).queue.hears
        assert seconds_until_handed_over(mine, user, timeout=5.0) < 2.0
        mine.acquire("r")
        assert take_and_tell(user, timeout=0.3) == math.inf
        with redis.Redis.from_url(nodes[4].url) as admin:
            assert admin.keys(f"{NODE_KEY}:q:*") == []
    finally:
        for node in nodes[:deaf]:
            with redis.Redis.from_url(node.url) as admin:
                admin.acl_deluser("deaf")


@contextmanager
def waiting_processes(nodes: Nodes, count: int, threads: int = 1) -> Any:
    """Processes in which so many threads wait for the lock; they are killed in the end."""
    context = multiprocessing.get_context("spawn")
    given = nodes.urls, threads
    made = [context.Process(target=wait_and_hold, args=given, daemon=True) for _ in range(count)]
    for process in made:
        process.start()
    try:
        assert eventually(lambda: all_wait(nodes, count * threads), 60.0)  # a process takes its time to start
        yield made
    finally:
        for process in made:
            process.kill()
            process.join(10)


def wait_and_hold(urls: list[str], threads: int) -> None:
    """Wait for the lock in a process of its own, which a test stops in the meantime."""

    def wait(_: int) -> None:
        with authority.lock("r", timeout=60):
            pass

    with Redlock(urls) as authority, ThreadPoolExecutor(threads) as pool:
        list(pool.map(wait, range(threads)))


@pytest.mark.long
@ONLY_THREADS
@pytest.mark.parametrize("threads", [1, 20])
@pytest.mark.parametrize("fair", [False, True])
def test_hung_process_at_the_head_costs_a_second(
    mine: Face, waiter: Face, nodes: Nodes, threads: int, *, fair: bool
) -> None:
    """It is called first and does not come; the next one looks by itself, after the claim of 0.1 s.

    However many places it has: they are passed over, and called again when it goes on.
    """
    grant = hold(mine)
    with waiting_processes(nodes, 1, threads) as (head,), ThreadPoolExecutor(1) as pool:
        os.kill(head.pid, signal.SIGSTOP)
        second = pool.submit(take_and_tell, waiter, fair=fair)
        assert eventually(lambda: all_wait(nodes, threads + 1))
        time.sleep(0.2)
        released = time.monotonic()
        mine.release(grant)
        assert 0.05 < second.result(10) - released < 2.0
        os.kill(head.pid, signal.SIGCONT)
        head.join(10)
        assert head.exitcode == 0


@ONLY_THREADS
def test_killed_processes_at_the_head_cost_nothing(mine: Face, waiter: Face, nodes: Nodes) -> None:
    """The killed processes hear no calls, so they are passed over, however many they were.

    No claim is waited for.
    """
    tries = (seconds_behind_killed_processes(mine, waiter, nodes) for _ in range(3))
    assert any(seconds < 0.09 for seconds in tries)  # where they cost a claim, they always do


def seconds_behind_killed_processes(holder: Face, waiter: Face, nodes: Nodes) -> float:
    """Kill two processes that wait before `waiter`; return how long after the release that has the lock."""
    grant = hold(holder)
    with waiting_processes(nodes, 2):
        pass
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(take_and_tell, waiter)
        assert eventually(lambda: all_wait(nodes, 3))
        holder.release(grant)
        released = time.monotonic()
        return second.result(10) - released


@pytest.mark.usefixtures("never_look")
def test_connections_that_break_under_one_who_waits_are_opened_again(
    mine: Face, waiter: Face, nodes: Nodes
) -> None:
    """All of them at once: it stands in line still, and is called over the new ones before it would look."""
    grant = hold(mine)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(take_and_tell, waiter)
        assert eventually(lambda: all_wait(nodes, 1))
        connections = connections_of(waiter)._nodes
        before = set(map(connections.connection, range(5)))
        for node in reversed(nodes):
            with redis.Redis.from_url(node.url) as admin:
                admin.client_kill_filter(_type="pubsub")
        assert eventually(lambda: not before & set(map(connections.connection, range(5))))
        assert eventually(lambda: heard_by(waiter) == 5)
        mine.release(grant)
        released = time.monotonic()
        assert second.result(30) - released < 1.0


@pytest.mark.parametrize("shared", [True, False], ids=["one client", "a client each"])
def test_eight_who_wait_come_in_order(
    mine: Face, waiter: Face, clients: Stage, nodes: Nodes, *, shared: bool
) -> None:
    """With `fair`, they get the lock in the order in which they asked for it, and the queue is gone then."""
    waiters = [waiter] * 8
    if not shared:
        waiters[1:] = [clients.new() for _ in range(7)]
        for each in waiters[1:]:
            start_listening(each, mine)
    order: list[int] = []

    def wait(number: int) -> None:
        grant = waiters[number].acquire("r", timeout=30.0, fair=True)
        order.append(number)
        waiters[number].release(grant)

    grant = hold(mine)
    with ThreadPoolExecutor(8) as pool:
        futures = []
        for number in range(8):
            futures.append(pool.submit(wait, number))
            assert eventually(lambda number=number: all_wait(nodes, number + 1))  # type: ignore[misc]
            time.sleep(0.02)
        mine.release(grant)
        for future in futures:
            future.result(30)
    assert order == list(range(8))
    with redis.Redis.from_url(nodes[0].url) as client:
        assert eventually(lambda: keys_of(client) == OF_THE_NODE, 10)


@ONLY_THREADS
def test_uncontended_acquisition_leaves_no_thread_and_no_key(
    mine: Face, clients: Stage, nodes: Nodes
) -> None:
    """Nothing is left behind on a node for a client that never waits."""
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


def test_one_who_gives_up_is_gone_from_the_queues(mine: Face, waiter: Face, nodes: Nodes) -> None:
    """The waiter's timeout is over, so no node keeps a place for it."""
    mine.acquire("r")
    assert take_and_tell(waiter, timeout=0.3) == math.inf
    assert eventually(lambda: all_wait(nodes, 0), 3.0)  # it ends after 5
    assert not is_in_line(waiter)
    assert not connections_of(waiter).queue._places


@ONLY_TASKS
def test_cancelled_task_leaves_its_place(mine: Face, waiter: Face, clients: Stage, nodes: Nodes) -> None:
    """It is gone from every queue, no node would keep the lock for it, and nothing of it is left here."""
    grant = hold(mine)

    async def main() -> None:
        tasks = [
            asyncio.ensure_future(waiter.client.aio.acquire(("r",), ttl=30.0, timeout=30.0)) for _ in range(5)
        ]
        assert await soon(lambda: all_wait(nodes, 5))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    clients.run(main())
    assert eventually(lambda: all_wait(nodes, 0), 3.0)  # they end after 5
    assert not is_in_line(waiter)
    assert not connections_of(waiter).queue._places
    mine.release(grant)
    assert eventually(lambda: not locks_on(nodes))


def test_closing_lets_those_who_wait_go_on(mine: Face, waiter: Face, nodes: Nodes) -> None:
    """They look by themselves from then on, without an error."""
    grant = hold(mine)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(take_and_tell, waiter)
        assert eventually(lambda: is_in_line(waiter))
        waiter.close()
        time.sleep(0.1)
        mine.release(grant)
        released = time.monotonic()
        assert second.result(10) - released < 3.0
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
    began = time.monotonic()
    assert take_and_tell(waiter, timeout=3.0) - began < 1.0


def scripts_run_on(nodes: Nodes) -> int:
    """Return how many scripts the first node has executed."""
    with redis.Redis.from_url(nodes[0].url) as client:
        facts: Any = client.info("commandstats")
        return sum(facts.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


@pytest.mark.long
@ONLY_TASKS
@pytest.mark.usefixtures("never_look")
@pytest.mark.parametrize("hears", [True, False], ids=["called", "looking"])
def test_fifty_tasks_take_turns_without_a_herd(
    mine: Face, other: Face, clients: Stage, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, *, hears: bool
) -> None:
    """Only the called client attempts, and the others are quiet.

    Clients that look (the control) ask far more often.
    """
    if not hears:
        monkeypatch.setattr(WaitQueue, "listen", lambda *_: None)
    start_listening(other, mine, nodes=5 if hears else 0)
    client = other.client.aio

    async def work() -> int:
        grant = await client.acquire(("r",), ttl=30.0, timeout=60.0)
        await asyncio.sleep(0.02)
        await client.release(grant)
        return int(grant.tokens[0])

    async def main() -> None:
        assert len(set(await in_one_loop(*(work() for _ in range(50)), seconds=60.0))) == 50

    before = scripts_run_on(nodes)
    clients.run(main(), 60.0)
    scripts = (scripts_run_on(nodes) - before) / 50
    assert (scripts < 8) == hears, scripts


@ONLY_TASKS
@pytest.mark.usefixtures("never_look")
def test_two_loops_and_two_threads_hand_the_lock_to_each_other(mine: Face, other: Face, nodes: Nodes) -> None:
    """The callers of one client are called over connections of their own, and none of them looks."""
    client, second = redlock(other), Loop()
    faces = [other, AsyncFace(client, second), *(BlockingFace(client),) * 2]
    start_listening(BlockingFace(client), mine)
    start_listening(other, mine)
    start_listening(faces[1], mine)
    tokens: list[int] = []

    def work(face: Face) -> None:
        for _ in range(8):
            grant = face.acquire("r", timeout=60.0)
            tokens.append(grant.tokens[0])
            face.release(grant)

    began = time.monotonic()
    together(*(lambda face=face: work(face) for face in faces))
    faces[1].close()
    second.close()
    assert time.monotonic() - began < 30.0
    assert len(tokens) == 32
    assert tokens == sorted(set(tokens))
    assert eventually(lambda: locks_on(nodes) == [])


@ONLY_TASKS
def test_one_connection_to_each_node_is_all(mine: Face, other: Face, clients: Stage, nodes: Nodes) -> None:
    """Also where tasks wait; no thread, timer or task is left in the loop."""
    mine.release(hold(mine))
    before = connections_to(nodes)
    other.release(hold(other))
    assert eventually(lambda: connections_to(nodes) == before + 1)
    start_listening(other, mine)
    assert connections_to(nodes) == before + 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fencelock-connect")]

    async def look() -> None:
        timers = getattr(asyncio.get_running_loop(), "_scheduled", [])  # of asyncio's own loop
        assert not [timer for timer in timers if "resume" in repr(timer) and not timer.cancelled()]
        assert len(asyncio.all_tasks()) == 1

    clients.run(look())
