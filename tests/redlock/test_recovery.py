"""Clients admit real nodes again that restart, forget or lag behind, in the background.

What stops, comes late or comes twice in between is in `test_recovery_schedules` and `test_members`; that no
lease is lost while all nodes restart one after the other is in the simulation (`Rolling`), and here once.
"""

from __future__ import annotations

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

from fencelock import Redlock
from fencelock.authority.redlock.admin import NodeState, NodeStatus
from fencelock.errors import (
    AuthorityError,
    CountersExhaustedError,
    FencelockError,
    MembershipError,
    NodesNotInitialisedError,
    QuorumError,
)
from fencelock.lease import Lease
from fencelock.tokens import MAX_COUNTER, split
from proof.servers import Node, Nodes
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY, RealNode, stripe_of

#: Seconds for which a node stays out, where a test waits for them.
MAX_TTL = 0.6

MakeRedlock = Callable[..., Redlock]


@pytest.fixture
def connect() -> Iterator[MakeRedlock]:
    with ExitStack() as stack:

        def make(nodes: Nodes | list[str] | tuple[Node, ...], **options: Any) -> Redlock:
            urls = [node if isinstance(node, str) else node.url for node in nodes]
            return stack.enter_context(Redlock(urls, **options))

        yield make


def take(authority: Redlock, resource: str = "r") -> int:
    with authority.lock(resource, ttl=0.5, timeout=30) as token:
        return int(token)


def states(authority: Redlock) -> list[NodeState]:
    return [status.state for status in authority.status()]


def votes_again(authority: Redlock) -> bool:
    def look() -> bool:
        with suppress(QuorumError):
            take(authority)
        return set(states(authority)) == {NodeState.ADMITTED}

    return eventually(look)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fencelock-recovery"]


def field(node: Node, name: str) -> str | None:
    with redis.Redis.from_url(node.url, decode_responses=True) as client:
        value = client.hget(NODE_KEY, name)
    return None if value is None else str(value)


def write(node: Node, **fields: str) -> None:
    with redis.Redis.from_url(node.url) as client:
        client.hset(NODE_KEY, mapping=fields)


def refuses(client: Redlock, error: type[FencelockError], word: str = "") -> bool:
    with pytest.raises(error) as refused:
        client.lock("r", ttl=0.5, timeout=0).acquire()
    return word in str(refused.value)


@pytest.mark.timed
def test_blank_minority_votes_again_after_the_longest_lease(nodes: Nodes, connect: MakeRedlock) -> None:
    """The clients do nothing but lock: two of five nodes forget, wait, and are admitted in a new epoch.

    In the end no thread and no connection of the recovery is left.
    """
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
    assert eventually(lambda: not threads())
    assert authority._recoverer._connections is None
    for dead in (2, 3):
        nodes[dead].kill()
    assert take(authority) > tokens[-1]  # the two are needed now


def test_restarted_node_votes_again_over_the_same_sockets(
    make_nodes: Callable[..., Nodes], connect: MakeRedlock
) -> None:
    """The refused connections stay open. What the nodes have promised is on their disks (WAITAOF)."""
    nodes = make_nodes(3, appendfsync="everysec")
    authority = connect(nodes)
    authority.init(base=0, max_ttl=MAX_TTL)
    take(authority)
    nodes[0].restart(keep_data=True)
    assert eventually(lambda: take(authority) > 0 and link_to(authority, 0) is not None)
    link = link_to(authority, 0)
    assert votes_again(authority)
    with redis.Redis.from_url(nodes[1].url) as client:
        calls: Any = client.info("commandstats")
    assert calls["cmdstat_waitaof"]["calls"] >= 3  # OPEN, PROMISE, RAISE
    nodes[1].kill()
    assert split(take(authority))[0] == 1
    assert link_to(authority, 0) is link


def link_to(authority: Redlock, node: int) -> object:
    return authority._connections._nodes.connection(node)


@pytest.mark.parametrize("count", [1, 3])
def test_nodes_that_all_restarted_with_their_data_vote_again(
    nodes: Nodes, connect: MakeRedlock, count: int
) -> None:
    """There is no majority to ask: all are asked, and tokens go on above the old ones."""
    authority = connect(nodes[:count])
    authority.init(base=0, max_ttl=MAX_TTL)
    first = take(authority)
    for node in nodes[:count]:
        kept = RealNode(node.url)
        fields = kept.remember()
        node.restart(keep_data=False)
        write(node, **fields)
        kept.close()
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
@pytest.mark.parametrize(("count", "side_by_side"), [(1, 4), (3, 1)])
def test_node_comes_back_for_programs_that_live_for_a_second(
    make_nodes: Callable[..., Nodes], connect: MakeRedlock, count: int, side_by_side: int
) -> None:
    """No program lives as long as the longest lease; whichever comes after that admits the node.

    Also where one has died between PROMISE and RAISE, and seems to be at work still.
    """
    nodes = make_nodes(count, appendfsync="everysec")
    authority = connect(nodes, recover=False)
    authority.init(base=0, max_ttl=3.0)
    first = take(authority)
    nodes[0].restart(keep_data=True)
    for node in nodes[1:]:
        write(node, p="1")
    began, came_back = time.monotonic(), threading.Event()

    def live(_: int) -> None:
        while not came_back.is_set() and time.monotonic() < began + 90:
            subprocess.run([sys.executable, "-c", PROGRAM, *nodes.urls], check=True, timeout=60)
            if states(authority)[0] is NodeState.ADMITTED:
                came_back.set()

    with ThreadPoolExecutor(side_by_side) as pool:
        list(pool.map(live, range(side_by_side)))
    assert came_back.is_set()
    assert time.monotonic() - began >= 3.0
    assert take(authority) > first


@pytest.mark.timed
def test_error_says_how_long_the_only_node_stays_out(nodes: Nodes, connect: MakeRedlock) -> None:
    """First how long it will take, then how long it still takes, and the lock is there then.

    One program that tried, and ended at once, is enough for the wait to begin.
    """
    connect(nodes[:1]).init(base=0, max_ttl=4)
    write(nodes[0], r="0" * 40)  # as after a restart with all data
    assert refuses(connect(nodes[:1], recover=False, outage_grace=0.1), QuorumError, "longest lease, 4 s")
    with Redlock(nodes.urls[0]) as brief:
        assert refuses(brief, QuorumError)
    assert field(nodes[0], "ticket") is not None
    with pytest.raises(QuorumError, match=r"vote again in [1-4] s"):
        connect(nodes[:1], outage_grace=0.1).lock("r", ttl=1, timeout=1).acquire()
    assert take(connect(nodes[:1], outage_grace=30.0)) > 0


def test_restart_of_more_than_a_minority_waits_for_every_node(nodes: Nodes, connect: MakeRedlock) -> None:
    """Two of three nodes restarted and the third is down. No other node knows the promises of the third."""
    authority = connect(nodes[:3])
    authority.init(base=0, max_ttl=MAX_TTL)
    take(authority)
    for node in nodes[:2]:
        write(node, r="0" * 40)
    kept = RealNode(nodes.urls[2])
    fields = kept.remember()
    kept.close()
    nodes[2].kill()
    end = time.monotonic() + 3 * MAX_TTL
    while time.monotonic() < end:
        assert refuses(authority, QuorumError)
    assert field(nodes[0], "p") == "0"
    nodes[2].restart(keep_data=False)
    write(nodes[2], **fields)
    assert votes_again(authority)


def test_blank_majority_is_left_to_an_operator(nodes: Nodes, connect: MakeRedlock) -> None:
    """No node knows what the others had promised: no ticket, no vote, and an error that says what to do."""
    authority = connect(nodes[:3])
    authority.init(base=0, max_ttl=MAX_TTL)
    take(authority)
    for node in nodes[:2]:
        with redis.Redis.from_url(node.url) as client:
            client.flushall()
    end = time.monotonic() + 2 * MAX_TTL
    while time.monotonic() < end:
        assert refuses(authority, NodesNotInitialisedError, "--after-loss --database")
    assert states(authority) == [NodeState.BLANK, NodeState.BLANK, NodeState.ADMITTED]
    assert "--after-loss" in authority.status()[0].detail
    assert (field(nodes[0], "e"), field(nodes[0], "ticket")) == (None, None)


def test_clients_with_another_list_recover_nobody(nodes: Nodes, connect: MakeRedlock) -> None:
    """A wrong, blank node must not become a fourth member of three; nor is a list of five any of theirs."""
    connect(nodes[:3]).init(base=0, max_ttl=MAX_TTL)
    wrong, larger = connect([*nodes[:2], nodes[3]]), connect(nodes)
    end = time.monotonic() + 2 * MAX_TTL
    while time.monotonic() < end:
        take(wrong)
        assert refuses(larger, AuthorityError)
    stranger = wrong.status()[2]
    assert (stranger.state, field(nodes[3], "ticket")) == (NodeState.BLANK, None)
    assert nodes.urls[2] in stranger.detail


def test_laggard_is_raised(nodes: Nodes, connect: MakeRedlock) -> None:
    authority = connect(nodes[:3])
    authority.init(base=0, max_ttl=300)
    take(authority)
    for node in nodes[:2]:
        write(node, e="4", p="4")
    assert eventually(lambda: take(authority) > 0 and field(nodes[2], "e") == "4")
    nodes[0].kill()
    assert split(take(authority))[0] == 4


def test_nothing_happens_with_recover_false(nodes: Nodes, connect: MakeRedlock) -> None:
    authority = connect(nodes[:3], recover=False)
    authority.init(base=0, max_ttl=MAX_TTL)
    nodes[0].restart(keep_data=False)
    end = time.monotonic() + 2 * MAX_TTL
    while time.monotonic() < end:
        take(authority)
        assert not threads()
    assert states(authority)[0] is NodeState.BLANK


def test_one_recovery_at_a_time_which_ends_with_close(nodes: Nodes, connect: MakeRedlock) -> None:
    """Many threads hear of it, one works, and no acquisition waits for it; nor does `close`.

    A forked child has no such thread, and may start its own.
    """
    authority = connect(nodes)
    authority.init(base=0, max_ttl=3000)
    nodes[0].restart(keep_data=False)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: [take(authority, f"r{number}") for _ in range(10)], range(8)))
    assert eventually(lambda: take(authority) > 0 and len(threads()) == 1)
    assert eventually(lambda: states(authority)[0] is NodeState.RECOVERING)
    child = os.fork()
    if child == 0:
        good = not threads()
        with suppress(BaseException):
            good = good and take(authority, "child") > 0
            os._exit(0 if good else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    authority.close()
    assert eventually(lambda: not threads())
    assert 2900 < (authority.status()[0].recovering_for or 0) < 3000


@pytest.mark.long
def test_interpreter_exits_quietly_during_a_recovery(nodes: Nodes) -> None:
    with Redlock(nodes.urls[:3]) as authority:
        authority.init(base=0, max_ttl=3000)
    nodes[0].restart(keep_data=False)
    code = (
        "import fencelock, sys, time, threading\n"
        "authority = fencelock.Redlock(sys.argv[1:])\n"
        "while not [t for t in threading.enumerate() if t.name == 'fencelock-recovery']:\n"
        "    with authority.lock('r'): pass\n"
    )
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", code, *nodes.urls[:3]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_many_clients_recover_a_node_without_getting_in_each_others_way(
    nodes: Nodes, connect: MakeRedlock
) -> None:
    clients = [connect(nodes[:3]) for _ in range(6)]
    clients[0].init(base=0, max_ttl=MAX_TTL)
    for client in clients:  # so that each is connected
        take(client, "other")
    nodes[0].restart(keep_data=False)
    tokens: list[int] = []
    over = threading.Event()

    def work(client: Redlock) -> None:
        while not over.is_set():
            with client.lock("r", ttl=0.5, timeout=60) as token:
                tokens.append(token)

    with ThreadPoolExecutor(6) as pool:
        working = [pool.submit(work, client) for client in clients]
        assert eventually(lambda: set(states(clients[0])) == {NodeState.ADMITTED})
        over.set()
        for each in working:
            each.result(60)
    assert tokens == sorted(set(tokens))
    assert 1 <= int(field(nodes[0], "e") or 0) <= 6


@pytest.mark.timed
def test_lease_that_is_only_renewed_outlives_a_restart_of_every_node(
    nodes: Nodes, connect: MakeRedlock
) -> None:
    """Its holder calls nothing; another waits for it all the time. An idle client knows the list still."""
    longest = 2.0
    holder, other, idle, users = (connect(nodes[:3], recover=number > 0) for number in range(4))
    holder.init(base=0, max_ttl=longest)
    before = take(idle)
    lost: list[Lease] = []
    lock = holder.lock("held", ttl=longest)
    lock.on_lost(lost.append)
    token = lock.acquire().token
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.acquire, ("held",), ttl=longest, timeout=None)
        for node in nodes[:3]:
            node.restart(keep_data=False)
            assert votes_again(users)
        assert (lost, waiting.done()) == ([], False)
        lock.release()
        assert waiting.result(30).tokens[0] > token
    assert take(idle) > before


def test_client_whose_nodes_belong_to_another_fleet_by_now_is_told(
    nodes: Nodes, connect: MakeRedlock
) -> None:
    client = connect(nodes[:3])
    client.init(base=0)
    assert take(client)
    for node in nodes[:3]:
        with redis.Redis.from_url(node.url) as admin:
            admin.flushall()
    connect(nodes).init(base=0)
    with pytest.raises(MembershipError, match="initialised as 5"):
        client.lock("r", ttl=0.5, timeout=30).acquire()


def test_status_tells_each_state(nodes: Nodes, connect: MakeRedlock) -> None:
    authority = connect(nodes, recover=False)
    assert states(authority) == [NodeState.BLANK] * 5
    authority.init(base=0, max_ttl=300)
    write(nodes[1], r="0" * 40)
    write(nodes[2], next="x", next_members=field(nodes[0], "members") or "")
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


def test_counters_that_have_come_to_their_end_begin_anew_in_the_next_epoch(
    nodes: Nodes, connect: MakeRedlock
) -> None:
    """At once, without a restart, and with larger tokens; other names go on meanwhile."""
    authority = connect(nodes[:3])
    authority.init(base=0)
    before = take(authority, "other")
    for node in nodes[:3]:
        write(node, **{f"c{stripe_of('r')}": str(MAX_COUNTER)})
    with pytest.raises(CountersExhaustedError, match=r"no counters left.*init .*--after-loss"):
        authority.lock("r", timeout=0).acquire()
    assert take(authority, "other") == before + 1
    authority.init(above=MAX_COUNTER)
    for name in ("r", "other"):
        assert split(take(authority, name)) == (1, 1)
    assert [status.epoch for status in authority.status()] == [1, 1, 1]
