"""Clients admit real nodes again that restart, forget or lag behind, in the background."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import redis

from fencelock import Redlock, fenced_lock
from fencelock.authority.redlock.admin import NodeState, NodeStatus
from fencelock.errors import AuthorityError, CountersExhaustedError, NodesNotInitialisedError, QuorumError
from fencelock.tokens import MAX_COUNTER, split
from proof.servers import Node, Nodes
from tests.polling import IMPATIENT, eventually
from tests.redlock.stage import NODE_KEY, stripe_of

pytestmark = pytest.mark.timed

MAX_TTL = 0.6

MakeRedlock = Callable[..., Redlock]


@pytest.fixture
def connect() -> Iterator[MakeRedlock]:
    """A factory of `Redlock`s with little patience, which end with the test."""
    with ExitStack() as stack:

        def make(nodes: Nodes | list[str], **options: Any) -> Redlock:
            urls = nodes.urls if isinstance(nodes, Nodes) else nodes
            return stack.enter_context(Redlock(urls, **{**IMPATIENT, "outage_grace": 0.1, **options}))

        yield make


def take(authority: Redlock, resource: str = "r") -> int:
    """Acquire and release once; return the token."""
    with authority.lock(resource, ttl=0.5, timeout=5) as token:
        return int(token)


def states(authority: Redlock) -> list[NodeState]:
    """Return how the nodes stand, in their order."""
    return [status.state for status in authority.status()]


def votes_again(authority: Redlock, *, seconds: float = 10.0) -> bool:
    """Use the lock until all nodes vote, as clients do; return whether they come to that."""

    def look() -> bool:
        with suppress(QuorumError):
            take(authority)
        return set(states(authority)) == {NodeState.ADMITTED}

    return eventually(look, seconds)


def threads() -> list[threading.Thread]:
    """Return the recoveries that are at work."""
    return [thread for thread in threading.enumerate() if thread.name == "fencelock-recovery"]


def field(nodes: Nodes, node: int, name: str) -> str | None:
    """Return a field of a node's hash."""
    with redis.Redis.from_url(nodes[node].url, decode_responses=True) as client:
        value = client.hget(NODE_KEY, name)
    return None if value is None else str(value)


def test_blank_minority_votes_again_after_the_longest_lease(nodes: Nodes, connect: MakeRedlock) -> None:
    """The clients do nothing but lock: two of five nodes forget, wait, and are admitted in a new epoch."""
    authority = connect(nodes)
    authority.init(base=0, max_ttl=MAX_TTL)
    tokens = [take(authority)]
    nodes[0].restart(keep_data=False)
    nodes[1].restart(keep_data=False)
    began = time.monotonic()
    while NodeState.ADMITTED not in states(authority)[:2]:
        tokens.append(take(authority))
    assert time.monotonic() - began >= MAX_TTL
    assert votes_again(authority)
    tokens.append(take(authority))
    assert tokens == sorted(set(tokens))
    assert (split(tokens[0])[0], split(tokens[-1])[0]) == (0, 1)
    assert {status.epoch for status in authority.status()} == {1}
    for dead in (2, 3):
        nodes[dead].kill()
    assert take(authority) > tokens[-1]  # the two are needed now


def test_restarted_node_votes_again_over_the_same_sockets(
    make_nodes: Callable[..., Nodes], connect: MakeRedlock
) -> None:
    """The refused connections stay open. They vote as soon as the node is admitted."""
    nodes = make_nodes(3, appendfsync="always")
    authority = connect(nodes)
    authority.init(base=0, max_ttl=MAX_TTL)
    take(authority)
    nodes[0].restart(keep_data=True)
    assert eventually(lambda: take(authority) > 0 and link_to(authority, 0) is not None)
    link = link_to(authority, 0)
    assert votes_again(authority)
    nodes[1].kill()
    assert split(take(authority))[0] == 1
    assert link_to(authority, 0) is link


def link_to(authority: Redlock, node: int) -> object:
    """Return what the authority speaks to a node over."""
    return authority._connections._nodes.connection(node)


@pytest.mark.parametrize("count", [1, 3])
def test_nodes_that_all_restarted_with_their_data_vote_again(
    make_nodes: Callable[..., Nodes], connect: MakeRedlock, count: int
) -> None:
    """There is no majority to ask: all are asked, and tokens go on above the old ones."""
    nodes = make_nodes(count, appendfsync="everysec")
    authority = connect(nodes)
    authority.init(base=0, max_ttl=MAX_TTL)
    first = take(authority)
    for node in nodes:
        node.restart(keep_data=True)
    assert votes_again(authority)
    assert split(take(authority))[0] == 1
    assert take(authority) > first


PROGRAM = """
import sys, time
from fencelock import Redlock
from fencelock.errors import FencelockError

end = time.monotonic() + 1
with Redlock(sys.argv[1:]) as authority:
    try:
        with authority.lock("r", ttl=0.5, timeout=0.5) as token:
            print(token)
    except FencelockError as error:
        print(error, file=sys.stderr)
    time.sleep(max(0.0, end - time.monotonic()))
"""


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("side_by_side", [1, 4])
def test_node_comes_back_for_programs_that_live_for_a_second(
    make_nodes: Callable[..., Nodes], connect: MakeRedlock, count: int, side_by_side: int
) -> None:
    """No program lives as long as the longest lease; whichever comes after that admits the node.

    Also where one has died between PROMISE and RAISE, and seems to be at work still.
    """
    longest = 3.0
    nodes = make_nodes(count, appendfsync="everysec")
    authority = connect(nodes, recover=False)
    authority.init(base=0, max_ttl=longest)
    first = take(authority)
    nodes[0].restart(keep_data=True)
    for node in nodes[1:]:
        with redis.Redis.from_url(node.url) as client:
            client.hset(NODE_KEY, "p", "1")
    began = time.monotonic()
    came_back: list[float] = []

    def live(_: int) -> None:
        """Begin one program after the other, until the node votes."""
        while not came_back and time.monotonic() < began + 25:
            subprocess.run([sys.executable, "-c", PROGRAM, *nodes.urls], check=True, timeout=30)
            if states(authority)[0] is NodeState.ADMITTED:
                came_back.append(time.monotonic() - began)

    with ThreadPoolExecutor(side_by_side) as pool:
        list(pool.map(live, range(side_by_side)))
    assert longest <= min(came_back, default=0.0) < longest + 9
    assert take(authority) > first


def test_error_says_how_long_the_only_node_stays_out(
    make_nodes: Callable[..., Nodes], connect: MakeRedlock
) -> None:
    """First how long it will take, then how long it still takes; it is right, and the lock is there then."""
    nodes = make_nodes(1, appendfsync="always")
    connect(nodes).init(base=0, max_ttl=2)
    nodes[0].restart(keep_data=True)
    with pytest.raises(QuorumError, match=r"longest lease, 2 s"):
        fenced_lock("r", authority=connect(nodes, recover=False), ttl=1, timeout=1).acquire()
    with pytest.raises(QuorumError):
        take(connect(nodes))
    assert eventually(lambda: field(nodes, 0, "ticket") is not None)
    began = time.monotonic()
    newcomer = connect(nodes)
    with pytest.raises(QuorumError, match=r"vote again in [12] s"):
        take(newcomer)
    newcomer.close()
    time.sleep(max(0.0, began + 2.1 - time.monotonic()))
    assert take(connect(nodes, outage_grace=2.0)) > 0


def test_program_that_ends_at_once_leaves_its_ticket(
    make_nodes: Callable[..., Nodes], connect: MakeRedlock
) -> None:
    """One try, an error, the end: the wait has begun all the same."""
    nodes = make_nodes(1, appendfsync="always")
    connect(nodes).init(base=0, max_ttl=2)
    nodes[0].restart(keep_data=True)
    with Redlock(nodes.urls) as brief, pytest.raises(QuorumError):
        brief.lock("r", ttl=1, timeout=0).acquire()
    assert field(nodes, 0, "ticket") is not None


def test_restart_of_more_than_a_minority_waits_for_every_node(
    make_nodes: Callable[..., Nodes], connect: MakeRedlock
) -> None:
    """Two of three nodes restarted and the third is down. No other node knows the promises of the third."""
    nodes = make_nodes(3, appendfsync="always")
    authority = connect(nodes)
    authority.init(base=0, max_ttl=MAX_TTL)
    take(authority)
    nodes[2].kill()
    for node in nodes[:2]:
        node.restart(keep_data=True)
    end = time.monotonic() + 4 * MAX_TTL
    while time.monotonic() < end:
        with pytest.raises(QuorumError):
            take(authority)
    assert field(nodes, 0, "p") == "0"
    nodes[2].start()
    assert votes_again(authority, seconds=20)


def test_blank_majority_is_left_to_an_operator(nodes: Nodes, connect: MakeRedlock) -> None:
    """No node knows what the others had promised: no ticket, no vote, and an error that says what to do."""
    authority = connect(list(nodes.urls[:3]))
    authority.init(base=0, max_ttl=MAX_TTL)
    take(authority)
    for node in nodes[:2]:
        with redis.Redis.from_url(node.url) as client:
            client.flushall()
    end = time.monotonic() + 3 * MAX_TTL
    while time.monotonic() < end:
        with pytest.raises(NodesNotInitialisedError, match="--after-loss --database"):
            take(authority)
    assert [status.state for status in authority.status()] == [
        NodeState.BLANK,
        NodeState.BLANK,
        NodeState.ADMITTED,
    ]
    assert "--after-loss" in authority.status()[0].detail
    assert (field(nodes, 0, "e"), field(nodes, 0, "ticket")) == (None, None)


def test_stranger_at_another_address_is_not_admitted(nodes: Nodes, connect: MakeRedlock) -> None:
    """A client that is configured with a wrong, blank node must not make it a fourth member of three."""
    right = connect(list(nodes.urls[:3]))
    right.init(base=0, max_ttl=MAX_TTL)
    wrong = connect([*nodes.urls[:2], nodes.urls[3]])
    end = time.monotonic() + 3 * MAX_TTL
    while time.monotonic() < end:
        take(wrong)
    stranger = wrong.status()[2]
    assert (stranger.state, field(nodes, 3, "ticket")) == (NodeState.BLANK, None)
    assert nodes.urls[2] in stranger.detail


def test_laggard_is_raised(nodes: Nodes, connect: MakeRedlock) -> None:
    """A voter in a lower epoch is brought to the highest; otherwise the next loss costs the quorum."""
    authority = connect(list(nodes.urls[:3]))
    authority.init(base=0, max_ttl=300)
    take(authority)
    for node in nodes[:2]:
        with redis.Redis.from_url(node.url) as client:
            client.hset(NODE_KEY, mapping={"e": "4", "p": "4"})
    assert eventually(lambda: take(authority) > 0 and field(nodes, 2, "e") == "4")
    nodes[0].kill()
    assert split(take(authority))[0] == 4


def test_nothing_happens_with_recover_false(nodes: Nodes, connect: MakeRedlock) -> None:
    """A client with `recover=False` starts no thread, and writes nothing to the blank node."""
    authority = connect(list(nodes.urls[:3]), recover=False)
    authority.init(base=0, max_ttl=MAX_TTL)
    nodes[0].restart(keep_data=False)
    end = time.monotonic() + 2 * MAX_TTL
    while time.monotonic() < end:
        take(authority)
        assert not threads()
    assert states(authority)[0] is NodeState.BLANK


def test_one_recovery_at_a_time_which_ends_with_close(nodes: Nodes, connect: MakeRedlock) -> None:
    """Many threads hear of it, one works; it sleeps for minutes, and `close` does not wait for that."""
    authority = connect(nodes)
    authority.init(base=0, max_ttl=300)
    nodes[0].restart(keep_data=False)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: [take(authority, f"r{number}") for _ in range(10)], range(8)))
    assert eventually(lambda: take(authority) > 0 and len(threads()) == 1)
    assert eventually(lambda: states(authority)[0] is NodeState.RECOVERING)
    began = time.monotonic()
    authority.close()
    assert eventually(lambda: not threads())
    assert time.monotonic() - began < 10.0
    assert 290 < (authority.status()[0].recovering_for or 0) < 300


def test_recovery_ends_when_nothing_is_left_to_do(nodes: Nodes, connect: MakeRedlock) -> None:
    """No thread stays behind, and no connection of it."""
    authority = connect(list(nodes.urls[:3]))
    authority.init(base=0, max_ttl=MAX_TTL)
    nodes[0].restart(keep_data=False)
    assert votes_again(authority)
    assert eventually(lambda: not threads())
    assert authority._recoverer._connections is None


def test_forked_child_recovers_nothing_unasked(nodes: Nodes, connect: MakeRedlock) -> None:
    """The thread stays with the parent; a child that uses the nodes itself may start its own."""
    authority = connect(list(nodes.urls[:3]))
    authority.init(base=0, max_ttl=MAX_TTL)
    nodes[0].restart(keep_data=False)
    assert eventually(lambda: take(authority) > 0 and bool(threads()))
    child = os.fork()
    if child == 0:
        good = not threads()
        with suppress(BaseException):
            good = good and take(authority, "child") > 0
            os._exit(0 if good else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert votes_again(authority)


def test_interpreter_exits_quietly_during_a_recovery(nodes: Nodes) -> None:
    """A recovery that would take minutes delays no exit, and prints nothing."""
    with Redlock(nodes.urls[:3]) as authority:
        authority.init(base=0)
    nodes[0].restart(keep_data=False)
    code = (
        "import fencelock, sys, time, threading\n"
        "authority = fencelock.Redlock(sys.argv[1:])\n"
        "while not [t for t in threading.enumerate() if t.name == 'fencelock-recovery']:\n"
        "    with authority.lock('r'): pass\n"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code, *nodes.urls[:3]],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < 15


def test_asyncio_users_have_their_nodes_recovered(nodes: Nodes, connect: MakeRedlock) -> None:
    """The same thread does it; the loop is not held up."""
    authority = connect(list(nodes.urls[:3]))
    authority.init(base=0, max_ttl=MAX_TTL)

    async def longest() -> float:
        durations = []
        end = time.monotonic() + 3 * MAX_TTL
        while time.monotonic() < end:
            began = time.monotonic()
            grant = await authority.aio.acquire(("r",), ttl=0.5, timeout=5)
            await authority.aio.release(grant)
            durations.append(time.monotonic() - began)
        return max(durations)

    async def main() -> None:
        calm = await longest()  # as long as the machine's other work has it
        nodes[0].restart(keep_data=False)
        assert await longest() < calm + 0.3
        assert len(await authority.aio.status()) == 3

    asyncio.run(main())
    assert votes_again(authority)


def test_many_clients_recover_a_node_without_getting_in_each_others_way(
    nodes: Nodes, connect: MakeRedlock
) -> None:
    """Eight clients wait for the same node: epochs grow by a few at most, tokens are unique."""
    clients = [connect(list(nodes.urls[:3])) for _ in range(8)]
    clients[0].init(base=0, max_ttl=MAX_TTL)
    for client in clients:  # so that each is connected
        take(client, "other")
    nodes[0].restart(keep_data=False)
    tokens: list[int] = []
    end = time.monotonic() + 4 * MAX_TTL

    def work(client: Redlock) -> None:
        while time.monotonic() < end:
            with client.lock("r", ttl=0.5, timeout=20) as token:
                tokens.append(token)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, clients))
    assert tokens == sorted(set(tokens))
    assert votes_again(clients[0])
    assert 1 <= int(field(nodes, 0, "e") or 0) <= 8


def test_acquisitions_do_not_wait_for_a_recovery(nodes: Nodes, connect: MakeRedlock) -> None:
    """Not even while the epoch changes: an acquisition that falls into it is a few tries longer."""
    authority = connect(nodes)
    authority.init(base=0, max_ttl=MAX_TTL)

    def longest() -> float:
        durations = []
        end = time.monotonic() + 3 * MAX_TTL
        while time.monotonic() < end:
            began = time.monotonic()
            take(authority)
            durations.append(time.monotonic() - began)
        return max(durations)

    calm = longest()  # as long as the machine's other work has it
    nodes[4].restart(keep_data=False)
    assert longest() < calm + 0.3
    assert split(take(authority))[0] == 1


def test_lease_survives_the_recovery_of_a_node(nodes: Nodes, connect: MakeRedlock) -> None:
    """It is extended and released across the change of epoch, and its token stays."""
    authority = connect(list(nodes.urls[:3]))
    authority.init(base=0, max_ttl=MAX_TTL)
    nodes[0].restart(keep_data=False)
    lock = authority.lock("held", ttl=0.5)
    token = lock.acquire().token
    end = time.monotonic() + 3 * MAX_TTL
    while time.monotonic() < end:
        take(authority)
        lock.extend(0.5)
    assert split(take(authority))[0] == 1
    assert lock.lease.token == token
    lock.release()


def test_what_is_promised_is_on_the_disk(make_nodes: Callable[..., Nodes], connect: MakeRedlock) -> None:
    """WAITAOF follows where the server has it; a server that writes nothing is not waited for."""
    nodes = make_nodes(3, appendfsync="everysec")
    authority = connect(nodes)
    authority.init(base=0, max_ttl=MAX_TTL)
    nodes[0].restart(keep_data=True)
    assert votes_again(authority)
    with redis.Redis.from_url(nodes[1].url) as client:
        calls: Any = client.info("commandstats")
    assert calls["cmdstat_waitaof"]["calls"] >= 3  # OPEN, PROMISE, RAISE


def test_recovery_works_on_every_server_program(connect: MakeRedlock, any_server: Node) -> None:
    """Also where there is no WAITAOF."""
    authority = connect([any_server.url])
    authority.init(base=0, max_ttl=MAX_TTL)
    with redis.Redis.from_url(any_server.url) as client:
        client.hset(NODE_KEY, "r", "0" * 40)  # as after a restart with all data
    assert votes_again(authority)


def test_status_tells_each_state(nodes: Nodes, connect: MakeRedlock) -> None:
    """Admitted, recovering, unreachable, closed, of another list, restarted: in the order of the nodes."""
    authority = connect(nodes, recover=False)
    assert states(authority) == [NodeState.BLANK] * 5
    authority.init(base=0, max_ttl=300)
    edits = {1: {"r": "0" * 40}, 2: {"next": "x", "next_members": field(nodes, 0, "members")}}
    for node, edit in edits.items():
        with redis.Redis.from_url(nodes[node].url) as client:
            client.hset(NODE_KEY, mapping=edit)
    with redis.Redis.from_url(nodes[3].url) as client:
        client.flushall()
    with Redlock(nodes.urls[3]) as other:
        other.init()
    nodes[4].kill()
    told = authority.status()
    assert [status.state for status in told] == [
        NodeState.ADMITTED,
        NodeState.RESTARTED,
        NodeState.CLOSED,
        NodeState.OTHER_MEMBERSHIP,
        NodeState.UNREACHABLE,
    ]
    assert told[0] == NodeStatus(nodes.urls[0], NodeState.ADMITTED, 0, 300.0)
    assert "refused" in told[4].detail
    assert nodes.urls[3] in told[3].detail


def test_client_of_another_number_of_nodes_recovers_nobody(nodes: Nodes, connect: MakeRedlock) -> None:
    """It has no business with a list that is not its own."""
    connect(list(nodes.urls[:3])).init(base=0, max_ttl=MAX_TTL)
    wrong = connect(nodes)
    nodes[0].restart(keep_data=False)
    end = time.monotonic() + 2 * MAX_TTL
    while time.monotonic() < end:
        with pytest.raises(AuthorityError):
            take(wrong)
    assert field(nodes, 0, "ticket") is None


def test_counters_that_have_come_to_their_end_begin_anew_in_the_next_epoch(nodes: Nodes) -> None:
    """At once, without a restart, and with larger tokens; other names go on meanwhile."""
    with Redlock(nodes.urls[:3]) as authority:
        authority.init(base=0)
        with authority.lock("other") as before:
            pass
        last = str(MAX_COUNTER)
        for node in list(nodes)[:3]:
            with redis.Redis.from_url(node.url) as client:
                client.hset(NODE_KEY, f"c{stripe_of('r')}", last)
        with pytest.raises(CountersExhaustedError, match=r"no counters left.*init .*--after-loss"):
            authority.lock("r", timeout=0).acquire()
        with authority.lock("other") as token:
            assert token == before + 1
        authority.init(above=MAX_COUNTER)
        for name in ("r", "other"):
            with authority.lock(name) as token:
                assert split(token) == (1, 1)
        assert [status.epoch for status in authority.status()] == [1, 1, 1]
