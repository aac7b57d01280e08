"""Waiting for another holder: woken by the nodes' calls, in order, whatever of that fails."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.redlock.protocol.queue import HESITATION, Waiter, WaitQueue
from fencelock.errors import LockTimeoutError
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY, OF_THE_NODE, keys_of
from tests.redlock.views import all_wait, is_held_everywhere


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
            line.note(node, b"1", 10.0)
        assert line.due(place) > 10.0
        line.note(2, b"1", 10.001)
        assert line.due(place) == 10.001

    def test_minority_of_calls_is_due_soon(self, line: WaitQueue) -> None:
        """Nodes that disagree on who is first leave nobody waiting; a repeated call adds nothing."""
        place = line.expect("")
        for _ in range(5):
            line.note(4, b"1", 10.0)
        assert 10.0 + 0.5 * HESITATION <= line.due(place) <= 10.0 + 1.5 * HESITATION

    def test_calls_count_from_the_last_try_only(self, line: WaitQueue) -> None:
        """What called an attempt that has failed since says nothing about the next one."""
        place = line.expect("")
        for node in range(3):
            line.note(node, b"1", 10.0)
        assert line.expect(place) == place
        assert line.due(place) == math.inf

    def test_calls_for_nobody_are_ignored(self, line: WaitQueue) -> None:
        """Of an acquisition that is over, of another client, or no call at all."""
        place = line.expect("")
        for message in (b"2", b"", b"\xff", b"1 soon", b"one"):
            line.note(0, message, 10.0)
        assert line.due(place) == math.inf
        line.leave(place)
        line.note(0, b"1", 10.0)
        assert line.due(place) == math.inf

    def test_nobody_stands_in_line_where_most_nodes_are_silent(self, line: WaitQueue) -> None:
        """Nobody would call them."""
        heard = [line.hears]
        line.go_deaf(1)
        heard.append(line.hears)
        line.listen(1)
        line.listen(1)
        heard.append(line.hears)
        assert heard == [True, False, True]

    def test_a_call_ends_no_sleep_when_its_place_is_gone(self, line: WaitQueue) -> None:
        """A contender that was called, and hears no majority any more, would come back at once for ever."""
        waiter = Waiter(line, lambda: 0.0, lambda: 0.0, fair=False, patient=True)
        waiter.position()
        position = waiter.position()
        assert position is not None
        assert position.place == waiter.place == "c.1"
        for node in range(3):
            line.note(node, b"1", 0.0)
        assert line.due(waiter.place) == 0.0
        line.go_deaf(0)
        assert waiter.position() is None
        assert line.due(waiter.place) == math.inf

    def test_first_bid_stands_in_line_where_the_last_acquisition_had_to_wait(self, line: WaitQueue) -> None:
        """Otherwise the lock is mostly free."""
        places = []
        for attempts in (1, 2, 1, 1):
            waiter = Waiter(line, lambda: 0.0, lambda: 0.0, fair=False, patient=True)
            positions = [waiter.position() for _ in range(attempts)]
            places.append(positions[0] is not None)
            waiter.leave()
        assert places == [False, False, True, False]

    def test_no_place_is_given_twice(self, line: WaitQueue) -> None:
        """It names the client and one acquisition of it."""
        places = [line.expect("") for _ in range(3)]
        assert places == ["c.1", "c.2", "c.3"]


@pytest.fixture
def waiter(authority: Redlock, rival: Redlock) -> Redlock:
    """Another client, whose listener is connected already."""
    start_listening(rival, authority)
    return rival


def start_listening(waiter: Redlock, holder: Redlock, nodes: int = 5) -> None:
    """Have a client wait for something once, until it hears so many nodes."""
    with holder.lock("warm-up"):
        for _ in range(20):
            with pytest.raises(LockTimeoutError):
                waiter.lock("warm-up", timeout=0.2).acquire()
            if heard_by(waiter) == nodes:
                return
    pytest.fail(f"hears {heard_by(waiter)} nodes only")


def heard_by(client: Redlock) -> int:
    """Return how many nodes a client listens to."""
    return len(client._connections.queue._listening)


def seconds_until_handed_over(holder: Redlock, waiter: Redlock, timeout: float = 3.0) -> float:
    """Let one wait for the other; return how long after the release it has the lock, infinity for never."""
    acquired = math.inf

    def wait() -> None:
        nonlocal acquired
        try:
            with waiter.lock("r", timeout=timeout):
                acquired = time.monotonic()
        except LockTimeoutError:
            pass

    thread = threading.Thread(target=wait)
    with holder.lock("r", ttl=30):
        thread.start()
        assert eventually(lambda: bool(waiter._connections._in_line) or not thread.is_alive())
        time.sleep(0.2)
    released = time.monotonic()
    thread.join()
    return acquired - released


@pytest.mark.usefixtures("never_look")
def test_waiter_is_woken_by_the_release(authority: Redlock, waiter: Redlock) -> None:
    """The holder's lease would last for 30 s, and looking alone would take 20."""
    assert seconds_until_handed_over(authority, waiter) < 1.0


@pytest.mark.usefixtures("never_look")
def test_waiter_that_hears_nothing_is_not_woken(
    authority: Redlock, waiter: Redlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests around it: it has the lock only when it looks for a last time."""
    monkeypatch.setattr(WaitQueue, "note", lambda *_: "")
    assert seconds_until_handed_over(authority, waiter, timeout=3.0) > 2.0


@pytest.mark.usefixtures("never_look")
def test_waiter_is_woken_though_a_minority_of_nodes_is_dead(
    authority: Redlock, waiter: Redlock, nodes: Nodes
) -> None:
    """Three of five calls are enough."""
    nodes[0].kill()
    nodes[3].kill()
    assert seconds_until_handed_over(authority, waiter) < 1.0


@pytest.mark.usefixtures("never_look")
def test_waiter_is_woken_though_calls_of_a_minority_are_lost(
    authority: Redlock, waiter: Redlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of five calls never arrive."""
    note = WaitQueue.note

    def lossy(line: WaitQueue, node: int, message: bytes, now: float) -> str:
        return note(line, node, message, now) if node > 1 else ""

    monkeypatch.setattr(WaitQueue, "note", lossy)
    assert seconds_until_handed_over(authority, waiter) < 1.0


def test_waiter_whose_calls_are_all_lost_looks_by_itself(
    authority: Redlock, waiter: Redlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After somewhat more than a second at the latest: a claim that nobody takes, and a look."""
    monkeypatch.setattr(WaitQueue, "note", lambda *_: "")
    assert seconds_until_handed_over(authority, waiter, timeout=10.0) < 2.0


def test_listener_connects_again(authority: Redlock, waiter: Redlock, nodes: Nodes) -> None:
    """A node that was killed and is back calls again; until then the others do."""
    nodes[1].kill()
    assert seconds_until_handed_over(authority, waiter) < 2.0
    assert heard_by(waiter) == 4
    nodes[1].restart(keep_data=False)
    start_listening(waiter, authority)
    assert seconds_until_handed_over(authority, waiter) < 2.0


def test_user_who_may_not_listen_waits_by_looking(authority: Redlock, nodes: Nodes) -> None:
    """It gets the lock all the same, and stands in no queue where it would be called in vain."""
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.acl_setuser("deaf", enabled=True, nopass=True, keys=["*"], commands=["+@all"], reset=True)
    try:
        urls = [url.replace("redis://", "redis://deaf:any@") for url in nodes.urls]
        with Redlock(urls) as deaf:
            assert seconds_until_handed_over(authority, deaf, timeout=5.0) < 2.0
            assert heard_by(deaf) == 0
            assert not deaf._connections.queue.hears
            with authority.lock("r"), pytest.raises(LockTimeoutError):
                deaf.lock("r", timeout=0.3).acquire()
        with redis.Redis.from_url(nodes[0].url) as client:
            assert client.keys(f"{NODE_KEY}:q:*") == []
    finally:
        for node in nodes:
            with redis.Redis.from_url(node.url) as client:
                client.acl_deluser("deaf")


def wait_and_hold(urls: list[str]) -> None:
    """Wait for the lock in a process of its own, which a test stops in the meantime."""
    with Redlock(urls) as authority, authority.lock("r", timeout=60):
        pass


@pytest.mark.parametrize("fair", [False, True])
def test_hung_process_at_the_head_costs_a_second(
    authority: Redlock, waiter: Redlock, nodes: Nodes, *, fair: bool
) -> None:
    """It is called first and does not come; the next one looks by itself, after the claim of 0.1 s."""
    head = multiprocessing.get_context("spawn").Process(target=wait_and_hold, args=(nodes.urls,), daemon=True)
    head.start()
    lock = authority.lock("r")
    lock.acquire()
    assert is_held_everywhere(nodes.urls)
    assert eventually(lambda: all_wait(nodes, 1), 60.0)  # a process takes its time to start
    assert head.pid is not None
    os.kill(head.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(acquire_and_release, waiter, "r", fair=fair)
        assert eventually(lambda: all_wait(nodes, 2))
        time.sleep(0.2)
        released = time.monotonic()
        lock.release()
        assert 0.05 < second.result(10) - released < 2.0
    os.kill(head.pid, signal.SIGKILL)
    head.join(10)


def acquire_and_release(authority: Redlock, *resources: str, fair: bool = False) -> float:
    """Return when it was acquired."""
    grant = authority.acquire(tuple(resources), ttl=30.0, timeout=30.0, fair=fair)
    acquired = time.monotonic()
    authority.release(grant)
    return acquired


def test_killed_processes_at_the_head_cost_nothing(authority: Redlock, waiter: Redlock, nodes: Nodes) -> None:
    """Nobody hears them any more, so they are passed over, however many they were: no claim is waited for."""
    tries = (seconds_behind_killed_processes(authority, waiter, nodes) for _ in range(3))
    assert any(seconds < 0.09 for seconds in tries)  # where they cost a claim, they always do


def seconds_behind_killed_processes(authority: Redlock, waiter: Redlock, nodes: Nodes) -> float:
    """Kill two processes that wait before `waiter`; return how long after the release that has the lock."""
    context = multiprocessing.get_context("spawn")
    heads = [context.Process(target=wait_and_hold, args=(nodes.urls,), daemon=True) for _ in range(2)]
    lock = authority.lock("r")
    lock.acquire()
    assert is_held_everywhere(nodes.urls)
    for head in heads:
        head.start()
    assert eventually(lambda: all_wait(nodes, 2), 60.0)
    for head in heads:
        head.kill()
        head.join(10)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(acquire_and_release, waiter, "r")
        assert eventually(lambda: all_wait(nodes, 3))
        lock.release()
        released = time.monotonic()
        return second.result(10) - released


@pytest.mark.usefixtures("never_look")
def test_connections_that_break_under_one_who_waits_are_opened_again(
    authority: Redlock, waiter: Redlock, nodes: Nodes
) -> None:
    """All of them at once, however long it takes to begin to open each."""
    lock = authority.lock("r")
    lock.acquire()
    assert is_held_everywhere(nodes.urls)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(acquire_and_release, waiter, "r")
        assert eventually(lambda: all_wait(nodes, 1))
        connections = waiter._connections._nodes
        before = set(map(connections.connection, range(5)))
        for node in reversed(nodes):
            with redis.Redis.from_url(node.url) as admin:
                admin.client_kill_filter(_type="pubsub")
        assert eventually(lambda: not before & set(map(connections.connection, range(5))))
        assert eventually(lambda: heard_by(waiter) == 5)
        lock.release()
        released = time.monotonic()
        assert second.result(30) - released < 1.0


@pytest.mark.parametrize("shared", [True, False], ids=["one client", "a client each"])
def test_eight_who_wait_come_in_order(
    authority: Redlock, nodes: Nodes, make_clients: Callable[[int], list[Redlock]], *, shared: bool
) -> None:
    """With `fair`, they get the lock in the order in which they asked for it."""
    clients = make_clients(1) * 8 if shared else make_clients(8)
    order: list[int] = []

    def wait(number: int) -> None:
        grant = clients[number].acquire(("r",), ttl=30.0, timeout=30.0, fair=True)
        order.append(number)
        clients[number].release(grant)

    lock = authority.lock("r")
    lock.acquire()
    assert is_held_everywhere(nodes.urls)
    with ThreadPoolExecutor(8) as pool:
        futures = []
        for number in range(8):
            futures.append(pool.submit(wait, number))
            assert eventually(lambda number=number: all_wait(nodes, number + 1))  # type: ignore[misc]
            time.sleep(0.02)
        lock.release()
        for future in futures:
            future.result(30)
    assert order == list(range(8))


@pytest.fixture
def make_clients(authority: Redlock, nodes: Nodes) -> Iterator[Callable[[int], list[Redlock]]]:
    """A factory of clients that are listening already."""
    made: list[Redlock] = []

    def make(count: int) -> list[Redlock]:
        for _ in range(count):
            made.append(Redlock(nodes.urls))
            start_listening(made[-1], authority)
        return made[-count:]

    yield make
    for client in made:
        client.close()


def test_waiting_for_several_resources_never_deadlocks(nodes: Nodes, authority: Redlock) -> None:
    """Twelve threads want two of three resources each, in all combinations, some of them fairly."""
    names = ("a", "b", "c")

    def work(number: int) -> int:
        mine = tuple(name for name in names if name != names[number % 3])
        for _ in range(5):
            acquire_and_release(authority, *mine, fair=number % 2 == 0)
        acquire_and_release(authority, *names)
        return number

    began = time.monotonic()
    with ThreadPoolExecutor(12) as pool:
        assert sorted(pool.map(work, range(12))) == list(range(12))
    assert time.monotonic() - began < 20
    with redis.Redis.from_url(nodes[0].url) as client:
        assert eventually(lambda: keys_of(client) == OF_THE_NODE, 10)


def test_uncontended_acquisition_leaves_no_thread_and_no_key(authority: Redlock, nodes: Nodes) -> None:
    """Nothing is left behind on a node for a client that never waits."""
    before = _threads()
    with authority.lock("r"):
        pass
    with authority.lock("r"), Redlock(nodes.urls) as other, pytest.raises(LockTimeoutError):
        other.lock("r", timeout=0).acquire()
    assert eventually(lambda: _threads() <= before)
    with redis.Redis.from_url(nodes[0].url) as client:
        assert eventually(lambda: keys_of(client) == OF_THE_NODE)


def _threads() -> set[threading.Thread]:
    """Return the threads that run, save those that renew leases, which stay for a while."""
    return {thread for thread in threading.enumerate() if thread.name != "fencelock-renewal"}


def test_one_who_gives_up_is_gone_from_the_queues(authority: Redlock, waiter: Redlock, nodes: Nodes) -> None:
    """Its timeout is over: nobody keeps anything for it."""
    with authority.lock("r"):
        with pytest.raises(LockTimeoutError):
            waiter.lock("r", timeout=0.3).acquire()
        assert eventually(lambda: all_wait(nodes, 0), 3.0)  # it ends after 5


def test_forked_child_waits_with_ears_of_its_own(authority: Redlock, waiter: Redlock) -> None:
    """It reads none of its parent's calls, and is woken by its own."""
    with authority.lock("r", ttl=30):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                acquire_and_release(waiter, "r")
                status = 0
            finally:
                os._exit(status)
        time.sleep(1.0)
    assert seconds_until_handed_over(authority, waiter) < 2.0
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_closing_lets_those_who_wait_go_on(authority: Redlock, waiter: Redlock) -> None:
    """They look by themselves from then on, without an error."""
    lock = authority.lock("r")
    lock.acquire()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(acquire_and_release, waiter, "r")
        time.sleep(0.3)
        waiter.close()
        time.sleep(0.1)
        lock.release()
        released = time.monotonic()
        assert second.result(10) - released < 3.0
    waiter.close()
