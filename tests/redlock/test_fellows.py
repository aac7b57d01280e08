"""A node with the data of a fellow node gets back the seat that the list has for its own address.

Such a node has followed the other one and was promoted again, or was started with the other's file. So it
tells the id of the other.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.redlock.admin import NodeState, change_nodes, statuses
from fencelock.authority.redlock.membership.members import Membership, MembershipView
from fencelock.authority.redlock.membership.reports import Census, NodeReport
from fencelock.authority.redlock.protocol.messages import Reply, ReplyKind
from fencelock.errors import FencelockError, MembershipError
from fencelock.lease import Lease
from proof.servers import Node, Nodes
from tests.polling import eventually
from tests.redlock.groups import ask, follow, promote
from tests.redlock.stage import NODE_KEY

Connect = Callable[..., Redlock]
Copy = Callable[[Node, Node], None]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with ExitStack() as stack:

        def make(nodes: Sequence[Node], **options: Any) -> Redlock:
            return stack.enter_context(Redlock([node.url for node in nodes], **options))

        yield make


def by_replication(node: Node, fellow: Node) -> None:
    """Have a node follow its fellow for a moment: process and connections live on."""
    follow(node, fellow)
    promote(node)


def saves(node: Node) -> bool:
    """Have a node write its file; False where it is about to write it by itself."""
    try:
        return bool(ask(node, "SAVE"))
    except redis.ResponseError:
        return False


def by_file(node: Node, fellow: Node) -> None:
    assert eventually(lambda: saves(fellow))
    node.kill()
    shutil.copy(fellow._folder / "dump.rdb", node._folder / "dump.rdb")
    node.start()


def ids(nodes: Sequence[Node]) -> list[str]:
    return [ask(node, "HGET", NODE_KEY, "id").decode() for node in nodes]


def take(authority: Redlock) -> int:
    """Lock once; return the token, or 0 where there was none. No error may say that the list is wrong."""
    try:
        with authority.lock("r", ttl=0.5, timeout=30) as token:
            return token
    except MembershipError:
        raise
    except FencelockError:
        return 0


def vote(authority: Redlock) -> bool:
    return {status.state for status in authority.status()} == {NodeState.ADMITTED}


@pytest.mark.long
@pytest.mark.timed
@pytest.mark.parametrize(("copy", "count"), [(by_replication, 3), (by_file, 5)])
def test_node_with_a_fellows_data_gets_its_own_seat_back(
    make_nodes: Callable[..., Nodes], connect: Connect, copy: Copy, count: int
) -> None:
    """Clients old and new have larger and larger tokens meanwhile, and a holder keeps its lease."""
    *nodes, replica = make_nodes(count + 1)
    by_replication(replica, nodes[0])  # a first one, later, would have it look as if it had restarted, too
    old, holder = connect(nodes), connect(nodes)
    old.init(base=0, max_ttl=2.0)
    seats = ids(nodes)
    tokens = [take(old)]
    lost: list[Lease] = []
    lock = holder.lock("held", ttl=2.0)
    lock.on_lost(lost.append)
    lock.acquire()
    copy(nodes[1], nodes[0])
    assert ids(nodes)[1] == seats[0]

    def look() -> bool:
        with Redlock([node.url for node in nodes]) as fresh:
            tokens.extend(filter(None, map(take, (old, fresh))))
            return vote(fresh)

    assert eventually(look)
    assert ids(nodes) == seats
    assert not lost
    lock.release()
    assert take(old)
    assert tokens == sorted(set(tokens))
    nodes[2].kill()
    assert take(old) > tokens[-1]  # of three, it is needed now


@pytest.mark.parametrize("copy", [by_replication, by_file])
def test_both_get_their_seats_where_the_owner_of_the_id_forgets_meanwhile(
    make_nodes: Callable[..., Nodes], connect: Connect, copy: Copy
) -> None:
    nodes = list(make_nodes(5))
    authority = connect(nodes, recover=False)
    authority.init(base=0, max_ttl=1.0)
    seats = ids(nodes)
    first = take(authority)
    copy(nodes[1], nodes[0])
    told = authority.status()[1]
    assert told.state is NodeState.RESTARTED
    assert told.detail == f"has the data of {nodes[0].url}; waits for a client that uses it"
    nodes[0].restart(keep_data=False)
    users = connect(nodes)
    assert eventually(lambda: take(users) > first and vote(users))
    assert ids(nodes) == seats


def test_two_that_vote_by_one_id_are_told_apart_by_a_change(nodes: Nodes, connect: Connect) -> None:
    """They grant locks, and the next list has each id once.

    A change refuses them where the list does not have these addresses: no one can tell which node has the id.
    """
    authority = connect(nodes[:3], recover=False)
    authority.init(base=0, max_ttl=1.0)
    ask(nodes[1], "HSET", NODE_KEY, "id", ids(nodes[:1])[0])
    authority.close()
    first = take(authority)
    assert first
    renamed = [url.replace("127.0.0.1", "localhost") for url in nodes.urls[:3]]
    with pytest.raises(MembershipError, match="same id"):
        change_nodes(renamed, [renamed[0], renamed[1], nodes.urls[3]])
    wanted = [nodes[number] for number in (0, 1, 3)]
    assert change_nodes(nodes.urls[:3], [node.url for node in wanted]).done
    assert len(set(ids(wanted))) == 3
    assert take(connect(wanted)) > first


# What the census makes of what nodes say.

SEATS = (("a", "A"), ("b", "B"), ("c", "C"))
LIST = Membership(SEATS, 1.0)
NAMES = ("A", "B", "C")
SILENT = Reply(ReplyKind.SILENT)


def said(word: str) -> NodeReport:
    """Return what a member says: its id, in capitals where it votes; `-` for a blank one."""
    if word == "-":
        return NodeReport("", "", False, None, 0, "", "", "", "", 0.0)  # noqa: FBT003 - as READ tells it
    return NodeReport(word.lower(), LIST.to_json(), word.isupper(), 0, 0, LIST.fingerprint, "", "", "", 0.0)


@pytest.mark.parametrize(
    ("names", "told", "waiting"),
    [
        ("ABC", "AaC", {1: "b"}),
        ("ABC", "-aC", {0: "a", 1: "b"}),
        ("ABC", "baC", {0: "a", 1: "b"}),
        ("ABC", "-AC", {0: "a"}),
        ("ABC", "A-B", {1: "b"}),
        ("AXC", "AbC", {1: "b"}),
        ("AXC", "AaC", {}),
        ("AXC", "aaC", {0: "a"}),
        ("AXC", "-aC", {0: "a"}),
        ("AXC", "A-C", {}),
        ("XYC", "aaC", {0: "a"}),
        ("ABX", "A-B", {}),
        ("ABC", "AxC", {}),
    ],
)
def test_seat_of_an_address(names: str, told: str, waiting: dict[int, str]) -> None:
    """The list knows whose it is; a node is asked only at an address that the list does not have."""
    census = Census.of(tuple(names), dict(enumerate(map(said, told))))
    assert census is not None
    assert census.waiting == waiting


def test_each_memory_counts_once() -> None:
    """Where all have restarted, one with a fellow's data has lost its own: an operator is needed."""
    for told in ("abc", "bac", "aac", "ab", "aab", "aaa"):
        standings = dict(enumerate(map(said, told)))
        census = Census.of(NAMES, standings)
        assert census is not None
        assert census.complete is (told in {"abc", "bac"}), told
        details = {status.detail for status in statuses(NAMES, standings, dict.fromkeys(range(3), SILENT))}
        assert any("--after-loss" in detail for detail in details) is not census.complete


@pytest.mark.parametrize(
    ("names", "told", "state", "words"),
    [
        ("AXC", "AaC", NodeState.RESTARTED, "has the data of A; its address is none of the list's: A, B, C"),
        ("ABX", "A-B", NodeState.BLANK, "another node has its seat"),
    ],
)
def test_status_says_why_a_node_gets_no_seat(names: str, told: str, state: NodeState, words: str) -> None:
    """The fellow whose data it has votes, and its address is unknown; or a renamed one has its seat."""
    standings = dict(enumerate(map(said, told)))
    status = statuses(tuple(names), standings, dict.fromkeys(range(3), SILENT))[1]
    assert (status.state, status.detail) == (state, words)


def test_order_rests_on_addresses() -> None:
    """Two clients have the same, though one was told by a node that had a fellow's data."""
    views = [MembershipView(names) for names in (NAMES, NAMES, ("X", "Y", "Z"))]
    for view, told in zip(views, ("abc", "cbc", "abc"), strict=True):
        for node, node_id in enumerate(told):
            view.note(node, node_id, LIST)
    assert {view.current().order for view in views} == {(0, 1, 2)}
