"""The drivers keep their promises on real nodes that die, hang or come back, and on sockets that break.

Each test checks the same promises: a driver mistakes no answer for another's, waits for nothing twice, and
leaves no lock on a node that could have been told.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.base import Grant
from fencelock.authority.redlock.protocol.messages import Command
from fencelock.authority.redlock.transport.connector import Node, Opened
from fencelock.authority.redlock.wire import nodes as wire_nodes
from fencelock.errors import LockLostError, LockTimeoutError, QuorumError
from fencelock.lock.hold import Hold, everything_held
from proof.servers import Node as Server
from proof.servers import Nodes
from tests.authorities.faces import Face, take
from tests.authorities.stage import Stage
from tests.polling import IMPATIENT, eventually
from tests.redlock.stage import NODE_KEY, SlowDoor
from tests.redlock.views import connections_of, hold, locks_on, lose_connection, redlock

pytestmark = pytest.mark.timed


@pytest.fixture(params=["blocking", "asyncio"])
def world(request: pytest.FixtureRequest) -> str:
    """Each driver once."""
    return str(request.param)


def locked_on(nodes: Nodes, resource: str = "r") -> list[int]:
    locks = (line.split(" = ")[0].split(": ", 1) for line in locks_on(nodes))
    return [int(number) for number, key in locks if key == f"{NODE_KEY}:l:{resource}"]


def forget(nodes: Sequence[Server]) -> None:
    """End the lock of "r" on nodes."""
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.delete(f"{NODE_KEY}:l:r")


@pytest.mark.complaint("redlock-py#27", "one node is down: the client raises, and leaves its keys behind")
@pytest.mark.complaint("redlock-hyperf", "a quorum that is computed in floating point needs three of three")
@pytest.mark.parametrize(("count", "down"), [(3, 1), (4, 1), (5, 2)])
def test_minority_may_be_killed_while_clients_hold_connections(
    blank: Stage, nodes: Nodes, count: int, down: int
) -> None:
    """The next acquisitions go on at once, tokens grow, and no key stays. One more node makes a majority."""
    authority = Redlock(nodes.urls[:count], **IMPATIENT)
    authority.init(base=0)
    mine = blank.new(authority)
    first = take(mine)
    for node in nodes[:down]:
        node.kill()
    began = time.monotonic()
    assert [take(mine) for _ in range(10)] == [first + 1 + number for number in range(10)]
    assert time.monotonic() - began < 10 * 0.3 / 2  # no client waits for a silent node
    assert eventually(lambda: locks_on(nodes) == [])
    nodes[down].kill()
    with pytest.raises(QuorumError):
        mine.acquire("r", timeout=0)


def test_hung_minority_costs_nothing(mine: Face, nodes: Nodes) -> None:
    """Two of five nodes hang: a majority answers, and no client waits for the others."""
    take(mine)
    nodes[1].pause()
    nodes[2].pause()
    began = time.monotonic()
    for number in range(100):
        take(mine, f"r{number}")
    assert time.monotonic() - began < 100 * 0.3 / 4


def test_hung_node_is_waited_for_once(mine: Face, other: Face, nodes: Nodes) -> None:
    """Where a refusal needs the hung node's word, it is waited for once, and then known to be hung."""
    hold(mine)
    forget(nodes[:2])
    nodes[4].pause()
    durations = []
    for _ in range(6):
        began = time.monotonic()
        with pytest.raises(LockTimeoutError):
            other.acquire("r", timeout=0)
        durations.append(time.monotonic() - began)
    assert statistics.median(durations[1:]) < 0.25, durations


def test_late_grant_is_not_released_before_its_release(blank: Stage, nodes: Nodes) -> None:
    """Its answer is read before the RELEASE goes out: one more in front of that would leave it nothing."""
    nodes_of_three = Redlock(nodes.urls[:3])
    nodes_of_three.init(base=0)
    mine = blank.new(nodes_of_three)
    take(mine)
    nodes[2].pause()
    grant = mine.acquire("r")
    nodes[2].resume()
    assert eventually(lambda: locked_on(nodes) == [0, 1, 2])
    forget(nodes[:1])
    assert mine.release(grant) is True


def test_hung_node_that_wakes_up_keeps_no_lock(mine: Face, nodes: Nodes) -> None:
    """What was sent to a hung node is undone on it once it goes on, before its ttl."""
    take(mine)
    nodes[2].pause()
    for _ in range(5):
        take(mine)
    time.sleep(0.35)
    take(mine)
    nodes[2].resume()
    assert eventually(lambda: take(mine, "other") > 0 and locked_on(nodes) == [])


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "timeout", "seconds"),
    [(3, 0, 0.5), (3, 0.5, 0.5), (3, 1.0, 1.0), (3, 10.0, 2.0), (1, None, 2.0)],
)
def test_nodes_that_hang_cost_two_seconds_at_first_use(
    blank: Stage, nodes: Nodes, count: int, timeout: float | None, seconds: float
) -> None:
    """Connecting, and trying again, have one deadline, which is earlier where the timeout is."""
    with Redlock(nodes.urls[:count]) as first:
        first.init(base=0)
    new = blank.new(Redlock(nodes.urls[:count]))
    for node in nodes[:count]:
        node.pause()
    assert seconds - 0.01 <= _time_without_quorum(new, timeout) < seconds + 0.4


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_ports_that_never_answer_cost_two_seconds(blank: Stage, scheme: str) -> None:
    """As a port with TLS does behind a URL without, and the other way round."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        new = blank.new(Redlock(f"{scheme}://127.0.0.1:{server.getsockname()[1]}"))
        assert _time_without_quorum(new, None) < 2.4


def _time_without_quorum(client: Face, timeout: float | None) -> float:
    began = time.monotonic()
    with pytest.raises(QuorumError):
        client.acquire("r", timeout=timeout)
    return time.monotonic() - began


def test_node_that_connects_slowly_is_waited_for(blank: Stage, nodes: Nodes) -> None:
    """Longer than the outage would be, where the settings say so: each try has the whole time."""
    with Redlock(nodes.urls[0]) as first, contextlib.closing(SlowDoor(nodes[0].port)) as door:
        first.init(base=0)
        slow = blank.new(Redlock(f"redis://127.0.0.1:{door.port}", connect_timeout=5.0, outage_grace=0.0))
        timer = threading.Timer(0.6, door.open.set)
        timer.start()
        assert take(slow) > 0
        timer.join()
        slow.close()


def test_late_grant_of_a_given_up_acquisition_is_released(mine: Face, nodes: Nodes) -> None:
    """Without a quorum nothing is granted, and what hung nodes grant afterwards does not stay."""
    take(mine)
    for node in nodes[:3]:
        node.pause()
    with pytest.raises(QuorumError) as failure:
        mine.acquire("r", timeout=0)
    assert sorted(failure.value.nodes) == sorted(redlock(mine).nodes)
    for node in nodes[:3]:
        node.resume()
    assert eventually(lambda: locked_on(nodes) == [])
    assert take(mine) > 1


def test_grant_that_comes_after_the_release_is_released(mine: Face, nodes: Nodes) -> None:
    """Both are sent to a node that hangs, one behind the other."""
    take(mine)
    nodes[0].pause()
    take(mine)
    nodes[0].resume()
    assert eventually(lambda: locked_on(nodes) == [])


@pytest.mark.parametrize(("emptied", "ours"), [(2, True), (3, False)])
def test_lock_is_gone_where_a_node_is_blank(mine: Face, nodes: Nodes, emptied: int, *, ours: bool) -> None:
    """RELEASE hears so from the node; a majority of them, and the lease had ended before."""
    grant = hold(mine)
    for node in nodes[:emptied]:
        with redis.Redis.from_url(node.url) as client:
            client.flushall()
    assert mine.release(grant) is ours


def test_blank_node_does_not_vote_again(mine: Face, nodes: Nodes) -> None:
    """A node that comes back empty takes no lock, and a majority of the others is still needed."""
    take(mine)
    nodes[0].restart(keep_data=False)
    nodes[1].restart(keep_data=False)
    assert [take(mine) for _ in range(3)] == [2, 3, 4]
    for node in nodes[:2]:
        with redis.Redis.from_url(node.url) as client:
            mark = f"{NODE_KEY}:m".encode()  # of its memory
            assert set(client.keys(f"{NODE_KEY}:[^w]*")) <= {mark}
            assert not client.hexists(NODE_KEY, "e")
    nodes[2].kill()

    def failure() -> QuorumError:
        with pytest.raises(QuorumError) as raised:
            mine.acquire("r", timeout=0.1)
        return raised.value

    assert eventually(lambda: sum("blank" in said for said in failure().nodes.values()) == 2)


def test_restarted_node_with_its_data_does_not_vote(make_nodes: Callable[..., Nodes], blank: Stage) -> None:
    """Clients that were connected before the restart refuse it as well as new ones."""
    nodes = make_nodes(3, appendfsync="always")
    old, new = (blank.new(Redlock(nodes.urls, outage_grace=0.2)) for _ in range(2))
    redlock(old).init(base=0)
    take(old)
    nodes[0].restart(keep_data=True)
    assert take(old) == 2
    nodes[1].kill()
    for client in (old, new):
        with pytest.raises(QuorumError) as failure:
            client.acquire("r", timeout=0.5)
        assert any("restarted since it was admitted" in said for said in failure.value.nodes.values())


def test_script_cache_may_be_flushed_at_any_time(mine: Face, nodes: Nodes) -> None:
    """NOSCRIPT is answered with the text, on the same socket."""
    for number in range(5):
        assert take(mine) == number + 1
        with redis.Redis.from_url(nodes[number].url) as client:
            client.script_flush()
            client.config_resetstat()
    grant = mine.acquire("r")
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.script_flush()
    assert mine.release(grant) is True
    assert grant.tokens == (6,)
    # A majority is enough to go on; blocking code reads what the others said when it asks them next.
    assert eventually(lambda: take(mine, "other") > 0 and locked_on(nodes) == [])


def test_connections_closed_while_idle_are_opened_again(mine: Face, nodes: Nodes) -> None:
    """A server's idle timeout, or an operator's CLIENT KILL, costs no acquisition."""
    for number in range(3):
        assert take(mine, timeout=0) == number + 1
        for node in nodes:
            with redis.Redis.from_url(node.url) as client:
                client.client_kill_filter(_type="normal", skipme=True)
        time.sleep(0.02)


def test_connection_that_died_in_silence_is_replaced(
    blank: Stage, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine is gone and back, and the network never said so: its node is used again."""
    monkeypatch.setattr(wire_nodes, "_LOST_AFTER", 0.5)
    with contextlib.closing(SlowDoor(nodes[0].port)) as door:
        door.open.set()
        authority = Redlock(f"redis://127.0.0.1:{door.port}", node_timeout=0.2, outage_grace=0.1)
        authority.init(base=0)
        mine = blank.new(authority)
        first = take(mine)
        door.forget()
        with pytest.raises(QuorumError):
            mine.acquire("r", timeout=0)
        assert eventually(lambda: succeeds(mine))
        assert take(mine) > first
        assert eventually(lambda: locked_on(nodes) == [])
        mine.close()


def succeeds(client: Face) -> bool:
    """Return whether the nodes grant a lock."""
    with contextlib.suppress(QuorumError):
        return take(client, timeout=0) > 0
    return False


def test_release_that_a_broken_connection_prevented_is_made_up_for(blank: Stage, nodes: Nodes) -> None:
    """The connection of a quorum of one breaks after the grant was made. No client waits for the ttl."""
    alone = Redlock(nodes.urls[0], node_timeout=0.3)
    alone.init(base=0)
    mine = blank.new(alone)
    take(mine)
    nodes[0].pause()
    with pytest.raises(QuorumError):
        mine.acquire("r", timeout=0)
    nodes[0].resume()
    lose_connection(mine, 0)
    began = time.monotonic()
    take(mine, timeout=5)
    assert time.monotonic() - began < 2.0


def test_many_threads_share_one_client(mine: Face, nodes: Nodes) -> None:
    """16 threads on 5 resources: no token twice, none below one that was complete before, nothing left."""
    tokens: dict[str, list[int]] = {f"r{number}": [] for number in range(5)}
    overlaps = []

    def work(worker: int) -> None:
        for turn in range(12):
            resource = f"r{(worker + turn) % 5}"
            grant = mine.acquire(resource, timeout=60)
            before = len(tokens[resource])
            tokens[resource].append(grant.tokens[0])
            if len(tokens[resource]) != before + 1:
                overlaps.append(resource)
            mine.release(grant)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(work, range(16)))
    assert sum(map(len, tokens.values())) == 16 * 12
    assert all(seen == sorted(set(seen)) for seen in tokens.values())
    assert not overlaps
    assert eventually(lambda: locked_on(nodes, "r0") == [])  # the last turn may be kept a moment


def test_leases_that_are_let_expire_leave_nothing_in_memory(authority: Redlock) -> None:
    """A lock may be taken so that no other process does the job within a ttl. Such a use must not leak."""
    names = []
    for number in range(50):
        lock = authority.lock(f"once-{number}", ttl=0.5)
        # Not in this thread's context, because the next test would find the held locks there.
        assert contextvars.Context().run(lock.try_acquire)
        del lock
        names.append(f"once-{number}")

    def kept() -> list[Hold]:
        gc.collect()
        return [hold for hold in everything_held() if hold.grant.resources[0] in names]

    assert eventually(lambda: not kept())  # one may be extended at this moment


def test_extension_of_a_lost_lease_is_refused(authority: Redlock, nodes: Nodes) -> None:
    """A majority that no longer knows the lock ends the lease for good."""
    lock = authority.lock("r", ttl=5)
    lease = lock.acquire()
    lock.extend(10)
    assert 9 < lease.remaining < 10
    assert eventually(lambda: len(locked_on(nodes)) == 5)
    forget(nodes[:3])
    for _ in range(2):
        with pytest.raises(LockLostError):
            lock.extend(10)
    assert lease.lost
    with pytest.raises(LockLostError):
        lock.release()


def test_extension_that_cannot_be_decided_loses_nothing(mine: Face, nodes: Nodes) -> None:
    """Too few nodes answer: the lease still ends when it would have, and can be extended afterwards."""
    grant = mine.acquire("r", ttl=5)
    for node in nodes[:3]:
        node.pause()
    (said,) = mine.extend_many([(grant, 10)])
    assert isinstance(said, QuorumError)
    for node in nodes[:3]:
        node.resume()

    def extended() -> bool:
        (said,) = mine.extend_many([(grant, 10)])
        return isinstance(said, Grant) and said.expires_at > time.monotonic() + 9

    assert eventually(extended)  # the nodes answer in time again
    assert mine.release(grant) is True


def test_nodes_that_restarted_under_a_lease_do_not_make_it_lost(make_nodes: Callable[..., Nodes]) -> None:
    """They have the lock still, but must not vote: an extension cannot be decided, and is not refused."""
    nodes = make_nodes(3, appendfsync="always")
    with Redlock(nodes.urls, node_timeout=0.5) as authority:
        authority.init(base=0)
        lock = authority.lock("r", ttl=20)
        lease = lock.acquire()
        for node in nodes[:2]:
            node.restart(keep_data=True)
        with pytest.raises(QuorumError):
            lock.extend()
        assert not lease.lost
        lock.release()


def test_idle_waiting_burns_no_processor_time(mine: Face, other: Face, nodes: Nodes) -> None:
    """A second of waiting for a holder, with one node dead and one hung, is not spent in a loop."""
    mine.acquire("r")
    nodes[0].kill()
    nodes[1].pause()
    began = time.process_time()
    with pytest.raises(LockTimeoutError):
        other.acquire("r", timeout=1.0)
    assert time.process_time() - began < 0.35


def test_nodes_that_die_for_good_leave_no_growth(
    mine: Face, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the patience, a hung node gets only so many releases and no requests.

    A dead node is owed only as many.
    """
    monkeypatch.setattr(wire_nodes, "MOST_PENDING", 10)
    take(mine)
    nodes[0].pause()
    nodes[1].kill()
    known = connections_of(mine)._nodes

    def go_on(seconds: float) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            take(mine)
        hung = known.connection(0)
        assert hung is not None
        return len(hung.unanswered)

    before = go_on(0.7)
    assert go_on(0.5) <= before + 10
    assert known.connection(1) is None
    assert [len(known._nodes[node].pending_releases) for node in (0, 1)] == [10, 10]


def test_node_that_is_owed_more_than_its_socket_takes_is_told_all(
    mine: Face, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection broke while it owed thousands of answers; the next one hears of all."""
    take(mine)
    node = connections_of(mine)._nodes._nodes[0]
    opened = Node.open

    def open_narrow(node: Node, node_key: str) -> Opened:
        connection = opened(node, node_key)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return connection

    monkeypatch.setattr(Node, "open", open_narrow)
    lock = f"{NODE_KEY}:l:left"

    with redis.Redis.from_url(nodes[0].url) as client:
        client.set(lock, "n2999|0|1", px=60_000)
        lose_connection(mine, 0)
        for number in range(3000):
            nonce = f"n{number}"
            node.remember_release(Command("release", nonce, (NODE_KEY, lock), ("", nonce, 0, 1, 0)))
        assert eventually(lambda: take(mine) > 0 and not client.exists(lock))
    connection = node.connection
    assert connection is not None
    assert eventually(lambda: take(mine) > 0 and not connection.unanswered)
    assert node.connection is connection
    assert not node.pending_releases


@pytest.mark.parametrize("hangs", [True, False])
def test_node_that_comes_back_is_told_what_it_is_owed(clients: Stage, nodes: Nodes, *, hangs: bool) -> None:
    """A lock was released while there was no connection to a node that has it: the next one is told."""
    mine = clients.new(Redlock(nodes.urls, node_timeout=0.5, connect_timeout=0.5))
    grant = hold(mine)
    if hangs:
        nodes[0].pause()
    lose_connection(mine, 0)
    assert mine.release(grant) is True
    assert not hangs or grant.proof.attempt.nonce in connections_of(mine)._nodes._nodes[0].pending_releases
    if hangs:
        nodes[0].resume()
    assert eventually(lambda: take(mine, "other") > 0 and not locks_on(nodes)), locks_on(nodes)
