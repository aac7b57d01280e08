"""A node with the data of a fellow node gets back the seat that the list has for its own address.

Such a node has followed the other one and was promoted again, or was started with the other's file. So it
tells the id of the other.
"""

from __future__ import annotations

import shutil
import time
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
from tests.polling import IMPATIENT, eventually
from tests.redlock.groups import ask, follow, promote
from tests.redlock.stage import NODE_KEY

pytestmark = pytest.mark.timed

MAX_TTL = 1.0

Connect = Callable[..., Redlock]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """A factory of clients that end with the test."""
    with ExitStack() as stack:

        def make(nodes: Sequence[Node], **options: Any) -> Redlock:
            return stack.enter_context(Redlock([node.url for node in nodes], **IMPATIENT, **options))

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
    """Start a node again with its fellow's file."""
    assert eventually(lambda: saves(fellow))
    node.kill()
    shutil.copy(fellow._folder / "dump.rdb", node._folder / "dump.rdb")
    node.start()


def ids(nodes: Sequence[Node]) -> list[str]:
    return [ask(node, "HGET", NODE_KEY, "id").decode() for node in nodes]


def take(authority: Redlock) -> int:
    """Lock once; return the token, or 0 where there was none. No error may say that the list is wrong."""
    try:
        with authority.lock("r", ttl=0.5, timeout=5) as token:
            return token
    except MembershipError:
        raise
    except FencelockError:
        return 0


def vote(authority: Redlock) -> bool:
    """Whether all nodes vote."""
    return {status.state for status in authority.status()} == {NodeState.ADMITTED}


@pytest.mark.long
@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("copy", [by_replication, by_file])
def test_node_with_a_fellows_data_gets_its_own_seat_back(
    make_nodes: Callable[..., Nodes], connect: Connect, copy: Callable[[Node, Node], None], count: int
) -> None:
    """Clients old and new have larger and larger tokens meanwhile, and a holder keeps its lease."""
    *nodes, replica = make_nodes(count + 1)
    by_replication(replica, nodes[0])  # a first one, later, would have it look as if it had restarted, too
    old, holder = connect(nodes), connect(nodes)
    old.init(base=0, max_ttl=MAX_TTL)
    seats = ids(nodes)
    tokens = [take(old)]
    lost: list[Lease] = []
    lock = holder.lock("held", ttl=MAX_TTL)
    lock.on_lost(lost.append)
    lock.acquire()
    copy(nodes[1], nodes[0])
    assert ids(nodes)[1] == seats[0]

    def look() -> bool:
        with Redlock([node.url for node in nodes], **IMPATIENT) as fresh:
            tokens.extend(filter(None, map(take, (old, fresh))))
            return vote(fresh)

    assert eventually(look, 20.0)
    assert ids(nodes) == seats
    time.sleep(MAX_TTL)
    assert not lost
    lock.release()
    assert take(old)
    assert tokens == sorted(set(tokens))
    nodes[2].kill()
    assert take(old) > tokens[-1]  # of three, it is needed now


@pytest.mark.parametrize("copy", [by_replication, by_file])
def test_owner_of_the_id_forgets_meanwhile(
    make_nodes: Callable[..., Nodes], connect: Connect, copy: Callable[[Node, Node], None]
) -> None:
    """Five nodes: both get their own seats back."""
    nodes = list(make_nodes(5))
    authority = connect(nodes)
    authority.init(base=0, max_ttl=MAX_TTL)
    seats = ids(nodes)
    first = take(authority)
    copy(nodes[1], nodes[0])
    nodes[0].restart(keep_data=False)
    assert eventually(lambda: take(authority) > first and vote(authority), 20.0)
    assert ids(nodes) == seats


def test_status_says_whose_data_a_node_has(make_nodes: Callable[..., Nodes], connect: Connect) -> None:
    """The status says so while the node waits for a client to admit it, and while a client does."""
    nodes = list(make_nodes(3))
    authority = connect(nodes, recover=False)
    authority.init(base=0, max_ttl=MAX_TTL)
    by_file(nodes[1], nodes[0])
    told = authority.status()[1]
    assert told.state is NodeState.RESTARTED
    assert told.detail == f"has the data of {nodes[0].url}; waits for a client that uses it"
    assert authority.recover()
    assert vote(authority)
    assert ids(nodes)[1] not in {ids(nodes)[0], ids(nodes)[2]}


def test_two_that_vote_by_one_id_are_told_apart_by_a_change(
    make_nodes: Callable[..., Nodes], connect: Connect
) -> None:
    """They grant locks, and the next list has each id once."""
    nodes = list(make_nodes(4))
    authority = connect(nodes[:3], recover=False)
    authority.init(base=0, max_ttl=MAX_TTL)
    doubled = ids(nodes[:1])[0]
    ask(nodes[1], "HSET", NODE_KEY, "id", doubled)
    authority.close()
    first = take(authority)
    assert first
    assert change_nodes([node.url for node in nodes[:3]], [nodes[n].url for n in (0, 1, 3)]).done
    assert len(set(ids([nodes[n] for n in (0, 1, 3)]))) == 3
    assert take(connect([nodes[n] for n in (0, 1, 3)])) > first


def test_a_change_refuses_two_ids_that_it_cannot_tell_apart(make_nodes: Callable[..., Nodes]) -> None:
    """The list does not have these addresses, so no client can tell which node has the id."""
    nodes = list(make_nodes(4))
    urls = [node.url for node in nodes]
    with Redlock(urls[:3]) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
    ask(nodes[1], "HSET", NODE_KEY, "id", ids(nodes[:1])[0])
    renamed = [url.replace("127.0.0.1", "localhost") for url in urls]
    with pytest.raises(MembershipError, match="same id"):
        change_nodes(renamed[:3], [renamed[0], renamed[1], urls[3]])
    assert change_nodes(renamed[:3], [renamed[0], renamed[2], urls[3]]).done  # without one of them


# What the census makes of what nodes say.

SEATS = (("a", "A"), ("b", "B"), ("c", "C"))
LIST = Membership(SEATS, 1.0)
NAMES = ("A", "B", "C")
SILENT = Reply(ReplyKind.SILENT)


def standing(node_id: str, *, admitted: bool = False, epoch: int = 0) -> NodeReport:
    """Return what a member says; without an id, a blank one."""
    if not node_id:
        return NodeReport("", "", admitted, None, 0, "", "", "", "", 0.0)
    return NodeReport(node_id, LIST.to_json(), admitted, epoch, epoch, LIST.fingerprint, "", "", "", 0.0)


def voter(node_id: str) -> NodeReport:
    """Return what a member says that votes."""
    return standing(node_id, admitted=True)


@pytest.mark.parametrize(
    ("names", "told", "waiting"),
    [
        (NAMES, (voter("a"), standing("a"), voter("c")), {1: "b"}),
        (NAMES, (standing(""), standing("a"), voter("c")), {0: "a", 1: "b"}),
        (NAMES, (standing("b"), standing("a"), voter("c")), {0: "a", 1: "b"}),
        (NAMES, (standing(""), voter("a"), voter("c")), {0: "a"}),
        (NAMES, (voter("a"), standing(""), voter("b")), {1: "b"}),
        (("A", "X", "C"), (voter("a"), standing("b"), voter("c")), {1: "b"}),
        (("A", "X", "C"), (voter("a"), standing("a"), voter("c")), {}),
        (("A", "X", "C"), (standing("a"), standing("a"), voter("c")), {0: "a"}),
        (("A", "X", "C"), (standing(""), standing("a"), voter("c")), {0: "a"}),
        (("A", "X", "C"), (voter("a"), standing(""), voter("c")), {}),
        (("X", "Y", "C"), (standing("a"), standing("a"), voter("c")), {0: "a"}),
        (("A", "B", "X"), (voter("a"), standing(""), voter("b")), {}),
        (NAMES, (voter("a"), standing("x"), voter("c")), {}),
    ],
)
def test_seat_of_an_address(
    names: tuple[str, ...], told: tuple[NodeReport, ...], waiting: dict[int, str]
) -> None:
    """The list knows whose it is; a node is asked only at an address that the list does not have."""
    census = Census.of(names, dict(enumerate(told)))
    assert census is not None
    assert census.waiting == waiting


@pytest.mark.parametrize(
    ("told", "complete"),
    [("abc", True), ("bac", True), ("aac", False), ("ab", False), ("aab", False), ("aaa", False)],
)
def test_each_memory_counts_once(told: str, *, complete: bool) -> None:
    """Where all have restarted, one with a fellow's data has lost its own: an operator is needed."""
    standings = {node: standing(node_id) for node, node_id in enumerate(told)}
    census = Census.of(NAMES, standings)
    assert census is not None
    assert census.complete is complete
    details = {status.detail for status in statuses(NAMES, standings, dict.fromkeys(range(3), SILENT))}
    assert any("--after-loss" in detail for detail in details) is not complete


def test_status_says_why_a_node_gets_no_seat() -> None:
    """The fellow whose data it has votes, and its address is unknown; or a renamed one has its seat."""
    for names, told, words in (
        (("A", "X", "C"), ("a", "a", "c"), "has the data of A; its address is none of the list's: A, B, C"),
        (("A", "B", "X"), ("a", "", "b"), "another node has its seat"),
    ):
        standings = {node: voter(said) for node, said in enumerate(told)} | {1: standing(told[1])}
        status = statuses(names, standings, dict.fromkeys(range(3), SILENT))[1]
        assert (status.state, status.detail) == (NodeState.RESTARTED if told[1] else NodeState.BLANK, words)


def test_order_rests_on_addresses() -> None:
    """Two clients have the same, though one was told by a node that had a fellow's data."""
    right, wrong, by_other_names = (
        MembershipView(NAMES),
        MembershipView(NAMES),
        MembershipView(("X", "Y", "Z")),
    )
    for node, (said, stale) in enumerate(zip("abc", "cbc", strict=True)):
        right.note(node, said, LIST)
        wrong.note(node, stale, LIST)
        by_other_names.note(node, said, LIST)
    assert right.current().order == wrong.current().order == by_other_names.current().order == (0, 1, 2)
