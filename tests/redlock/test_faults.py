"""The drivers keep their promises on real nodes that die, hang or come back, and on sockets that break.

A driver mistakes no answer for another's, waits for nothing twice, and leaves no lock on a node that could
have been told. What it decides without a socket is in `test_connections`.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.base import Grant
from fencelock.errors import QuorumError
from fencelock.lock.hold import Hold, everything_held
from proof.servers import Node as Server
from proof.servers import Nodes
from tests.authorities.faces import Face, take
from tests.authorities.stage import Stage
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY, SlowDoor
from tests.redlock.views import connections_to, hold, locks_on, lose_connection, redlock

#: One that waits for a silent node does so for longer than any of these tests.
_PATIENT = {"node_timeout": 100.0}


def locked_on(nodes: Nodes, resource: str = "r") -> list[int]:
    locks = (line.split(" = ")[0].split(": ", 1) for line in locks_on(nodes))
    return [int(number) for number, key in locks if key == f"{NODE_KEY}:l:{resource}"]


def forget(nodes: Sequence[Server]) -> None:
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.delete(f"{NODE_KEY}:l:r")


@contextlib.contextmanager
def hung(*nodes: Server) -> Iterator[None]:
    for node in nodes:
        node.pause()
    try:
        yield
    finally:
        for node in nodes:
            node.resume()


def initialised(urls: Sequence[str] | str, **settings: Any) -> Redlock:
    authority = Redlock(urls, **settings)
    authority.init(base=0)
    return authority


@pytest.mark.complaint("redlock-py#27", "one node is down: the client raises, and leaves its keys behind")
@pytest.mark.complaint("redlock-hyperf", "a quorum that is computed in floating point needs three of three")
@pytest.mark.parametrize(
    ("count", "down", "world"), [(3, 1, "blocking"), (4, 1, "asyncio"), (5, 2, "blocking")]
)
def test_minority_may_be_killed_while_clients_hold_connections(
    blank: Stage, nodes: Nodes, count: int, down: int
) -> None:
    """The next acquisitions go on, tokens grow, and no key stays. One more node makes a majority."""
    mine = blank.new(initialised(nodes.urls[:count], **_PATIENT, outage_grace=0.3))
    first = take(mine)
    for node in nodes[:down]:
        node.kill()
    assert [take(mine) for _ in range(10)] == [first + 1 + number for number in range(10)]
    assert eventually(lambda: locks_on(nodes) == [])
    nodes[down].kill()
    with pytest.raises(QuorumError):
        mine.acquire("r", timeout=0)


def test_hung_minority_costs_nothing(blank: Stage, nodes: Nodes) -> None:
    mine = blank.new(initialised(nodes.urls, **_PATIENT))
    grants = [hold(mine, f"held{number}") for number in range(2)]
    with hung(*nodes[1:3]):
        for number in range(50):
            take(mine, f"r{number}")
        assert mine.release(grants[0]) is True
        (extended,) = mine.extend_many([(grants[1], 60.0)])
        assert isinstance(extended, Grant)


def test_late_grant_is_not_released_before_its_release(blank: Stage, nodes: Nodes) -> None:
    """Its answer is read before the RELEASE goes out: one more in front of that would leave it nothing."""
    mine = blank.new(initialised(nodes.urls[:3]))
    take(mine)
    with hung(nodes[2]):
        grant = mine.acquire("r")
    assert eventually(lambda: locked_on(nodes) == [0, 1, 2])
    forget(nodes[:1])
    assert mine.release(grant) is True


@pytest.mark.parametrize("patience", [100.0, 0.3], ids=["it is asked", "it is passed over"])
def test_hung_node_that_wakes_up_keeps_no_lock(blank: Stage, nodes: Nodes, patience: float) -> None:
    """What was sent to it is undone on it once it goes on, long before the ttl."""
    mine = blank.new(initialised(nodes.urls, node_timeout=patience, outage_grace=30.0))
    take(mine)
    with hung(nodes[2]):
        for _ in range(5):
            take(mine)
        if patience < 1.0:
            time.sleep(2 * patience)
            take(mine)
    assert eventually(lambda: take(mine, "other") > 0 and locked_on(nodes) == [])


def test_late_grant_of_a_given_up_acquisition_is_released(blank: Stage, nodes: Nodes) -> None:
    mine = blank.new(initialised(nodes.urls, node_timeout=0.3, outage_grace=0.3))
    take(mine)
    with hung(*nodes[:3]), pytest.raises(QuorumError) as failure:
        mine.acquire("r", timeout=0)
    assert sorted(failure.value.nodes) == sorted(redlock(mine).nodes)
    assert eventually(lambda: locked_on(nodes) == [])
    assert eventually(lambda: succeeds(mine))


def succeeds(client: Face) -> bool:
    with contextlib.suppress(QuorumError):
        return take(client, timeout=0) > 0
    return False


@pytest.mark.long
@pytest.mark.timed
@pytest.mark.parametrize(
    ("count", "timeout", "seconds", "world"),
    [
        (3, 0, 0.5, "asyncio"),
        (3, 1.0, 1.0, "blocking"),
        (3, 10.0, 2.0, "asyncio"),
        (1, None, 2.0, "blocking"),
    ],
)
def test_nodes_that_hang_cost_two_seconds_at_first_use(
    blank: Stage, nodes: Nodes, count: int, timeout: float | None, seconds: float
) -> None:
    """Connecting, and trying again, have one deadline, which is earlier where the timeout is."""
    initialised(nodes.urls[:count]).close()
    new = blank.new(Redlock(nodes.urls[:count]))
    with hung(*nodes[:count]):
        began = time.monotonic()
        with pytest.raises(QuorumError):
            new.acquire("r", timeout=timeout)
        assert seconds - 0.01 <= time.monotonic() - began < seconds + 0.8


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
@pytest.mark.parametrize("world", ["asyncio"])
def test_port_that_never_answers_costs_no_more_than_the_time_to_connect(blank: Stage, scheme: str) -> None:
    """As a port with TLS does behind a URL without, and the other way round."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"{scheme}://127.0.0.1:{server.getsockname()[1]}"
        new = blank.new(Redlock(url, connect_timeout=0.3, outage_grace=0.1))
        with pytest.raises(QuorumError):
            new.acquire("r", timeout=None)


def test_node_that_connects_slowly_is_waited_for(blank: Stage, nodes: Nodes) -> None:
    """Longer than the outage would be, where the settings say so: each try has the whole time."""
    initialised(nodes.urls[0]).close()
    with contextlib.closing(SlowDoor(nodes[0].port)) as door:
        slow = blank.new(Redlock(f"redis://127.0.0.1:{door.port}", connect_timeout=30.0, outage_grace=0.0))
        timer = threading.Timer(0.6, door.open.set)
        timer.start()
        assert take(slow) > 0
        timer.join()
        slow.close()


def test_script_cache_may_be_flushed_at_any_time(mine: Face, nodes: Nodes) -> None:
    grant = hold(mine)
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.script_flush()
    assert mine.release(grant) is True
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


def test_release_that_a_broken_connection_prevented_is_made_up_for(blank: Stage, nodes: Nodes) -> None:
    """The connection of a quorum of one breaks after the grant was made. No client waits for the ttl."""
    mine = blank.new(initialised(nodes.urls[0], node_timeout=0.3, outage_grace=0.3))
    take(mine)
    with hung(nodes[0]), pytest.raises(QuorumError):
        mine.acquire("r", timeout=0)
    lose_connection(mine, 0)
    assert eventually(lambda: succeeds(mine), 25.0)


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


def test_extension_that_cannot_be_decided_loses_nothing(blank: Stage, nodes: Nodes) -> None:
    """Too few nodes answer: the lease still ends when it would have, and can be extended afterwards."""
    mine = blank.new(initialised(nodes.urls, node_timeout=0.3, outage_grace=30.0))
    grant = mine.acquire("r", ttl=50, timeout=30)
    with hung(*nodes[:3]):
        (said,) = mine.extend_many([(grant, 60)])
    assert isinstance(said, QuorumError)

    def extended() -> bool:
        (said,) = mine.extend_many([(grant, 60)])
        return isinstance(said, Grant) and said.expires_at > grant.expires_at

    assert eventually(extended, 30.0)  # the nodes answer in time again
    assert eventually(lambda: mine.release(grant) is True)


@pytest.mark.timed
def test_idle_waiting_burns_no_processor_time(mine: Face, other: Face, nodes: Nodes) -> None:
    """A second of waiting for a holder, with one node dead and one hung, is not spent in a loop."""
    mine.acquire("r")
    nodes[0].kill()
    with hung(nodes[1]):
        began = time.process_time()
        with pytest.raises((TimeoutError, QuorumError)):
            other.acquire("r", timeout=1.0)
        assert time.process_time() - began < 0.35


@pytest.mark.parametrize(("hangs", "world"), [(True, "blocking"), (True, "uvloop"), (False, "asyncio")])
def test_node_that_comes_back_is_told_what_it_is_owed(clients: Stage, nodes: Nodes, *, hangs: bool) -> None:
    mine = clients.new(Redlock(nodes.urls, connect_timeout=0.5))
    grant = hold(mine)
    with hung(*nodes[:hangs]):
        lose_connection(mine, 0)
        assert mine.release(grant) is True
    assert eventually(lambda: take(mine, "other") > 0 and not locks_on(nodes)), locks_on(nodes)


def test_connection_is_opened_once_and_closed_where_it_comes_after_the_end(nodes: Nodes) -> None:
    """Asking for it again while that is going on changes nothing."""
    with contextlib.closing(SlowDoor(nodes[0].port)) as door:
        client = Redlock(f"redis://127.0.0.1:{door.port}", connect_timeout=30.0)
        connections = client._connections
        for is_closed in (False, True):
            client.close()
            door.open.clear()
            for _ in range(5):
                connections.connect(0)
            opening = {
                thread for thread in threading.enumerate() if thread.name.startswith("fencelock-connect")
            }
            assert len(opening) == 1
            if is_closed:
                client.close()
            door.open.set()
            for thread in opening:
                thread.join(30)
            assert (connections._nodes.connection(0) is None) is is_closed
            assert eventually(lambda is_closed=is_closed: connections_to(nodes) == (not is_closed))  # type: ignore[misc]
        client.close()
