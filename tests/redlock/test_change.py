"""Tokens grow across a change of nodes: on real nodes, interrupted anywhere, under clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from fencelock import Redlock
from fencelock.authority.redlock.admin import NodeState, change_nodes
from fencelock.errors import FencelockError, LockTimeoutError, MembershipError, QuorumError
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY, RealNode, operator

pytestmark = pytest.mark.timed

MAX_TTL = 2.0


@pytest.fixture
def present(nodes: Nodes) -> list[str]:
    """Three nodes that are initialised with counters from 0."""
    with Redlock(nodes.urls[:3]) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
    return list(nodes.urls[:3])


@pytest.fixture
def stations(nodes: Nodes) -> Iterator[list[RealNode]]:
    """Connections to all five nodes, for an operator that is stepped by hand."""
    made = [RealNode(url) for url in nodes.urls]
    yield made
    for station in made:
        station.close()


def change(present: list[str], wanted: list[str]) -> bool:
    """Change the nodes, with little patience; return whether there was something to do."""
    return change_nodes(present, wanted, patience=0.5).done


def take(urls: list[str], *, ttl: float = 1.0, timeout: float = 5) -> int:
    """Lock once, and return the token."""
    with Redlock(urls, node_timeout=0.3, outage_grace=0.1) as authority:
        lock = authority.lock("r", ttl=ttl, timeout=timeout)
        with lock as token:
            return token


@pytest.mark.parametrize(
    ("wanted", "dead"),
    [((0, 1, 3), 2), ((0, 3, 4), None), ((0, 1, 2, 3, 4), None), ((0,), 2), ((3, 4), None), ((3,), 1)],
    ids=["replace a dead one", "replace two", "grow", "shrink", "all new", "all new, to one"],
)
def test_tokens_grow_across_a_change(
    nodes: Nodes, present: list[str], wanted: tuple[int, ...], dead: int | None
) -> None:
    """The new list votes in a larger epoch; the old one gives out nothing; once more changes nothing."""
    urls = [nodes.urls[node] for node in wanted]
    first = take(present)
    if dead is not None:
        nodes[dead].kill()
    assert change(present, urls) is True
    second = take(urls)
    assert second > first
    assert change(present, urls) is False
    with Redlock(urls) as authority:
        assert {status.state for status in authority.status()} == {NodeState.ADMITTED}
    if not set(wanted) & {0, 1, 2}:
        with pytest.raises(FencelockError):
            take(present, timeout=0.1)


def test_way_there_and_back(nodes: Nodes, present: list[str], stations: list[RealNode]) -> None:
    """A node that was left out comes back as a new one, once it is flushed."""
    other = [*present[:2], nodes.urls[3]]
    tokens = [take(present)]
    change(present, other)
    tokens.append(take(other))
    with pytest.raises(MembershipError, match="delete the key"):
        change(other, present)
    stations[2].client.flushall()
    assert change(other, present) is True
    tokens.append(take(present))
    assert tokens == sorted(set(tokens))


def test_leases_end_before_others_are_granted(nodes: Nodes, present: list[str]) -> None:
    """A change waits for the holder, which cannot extend any more. No other client is let in meanwhile."""
    with Redlock(present, node_timeout=0.3) as authority:
        lock = authority.lock("r", ttl=MAX_TTL)
        lease = lock.acquire()
        told: list[str] = []
        change_nodes(present, nodes.urls[3:], tell=told.append, patience=0.5)
        assert lease.lost
        assert any(sentence.startswith("waiting") for sentence in told)
        assert take(list(nodes.urls[3:])) > lease.token


def test_client_with_the_former_list_goes_on(nodes: Nodes, present: list[str]) -> None:
    """Two of its three nodes are in the new list, too: it learns of that by itself."""
    with Redlock(present, node_timeout=0.3) as authority:
        tokens = []
        for round_ in range(2):
            if round_:
                change(present, [*present[:2], nodes.urls[3]])
            with authority.lock("r", ttl=1) as token:
                tokens.append(token)
    assert tokens == sorted(set(tokens))


def test_clients_lock_through_a_change(nodes: Nodes, present: list[str]) -> None:
    """Tokens are unique and grow, whichever list a client asks.

    Attempts fail for the moment that a change takes.
    """
    tokens: list[int] = []
    over = threading.Event()

    def work() -> None:
        with Redlock(present, node_timeout=0.3, outage_grace=5.0) as authority:
            while not over.is_set():
                try:
                    with authority.lock("r", ttl=1, timeout=5) as token:
                        tokens.append(token)
                except (LockTimeoutError, QuorumError, MembershipError):
                    time.sleep(0.01)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: len(tokens) > 20)
    change(present, [*present[:2], nodes.urls[3]])
    reached = len(tokens)
    assert eventually(lambda: len(tokens) > reached + 20)
    over.set()
    for thread in threads:
        thread.join()
    assert tokens == sorted(set(tokens))


def test_a_longer_lease_is_allowed_by_the_same_nodes(present: list[str]) -> None:
    """Or a shorter one, once the longer ones are over; a client that is there goes on. Tokens grow."""
    tokens = [take(present)]
    with Redlock(present, node_timeout=0.3, outage_grace=5) as client:
        with client.lock("r", ttl=1) as token:
            tokens.append(token)
        with pytest.raises(ValueError, match=f"fencelock nodes set --max-ttl 5 {present[0]} ") as caught:
            client.lock("r", ttl=4.5).acquire()
        assert str(caught.value).endswith(present[2])
        for max_ttl in (5.0, MAX_TTL):
            assert change_nodes(present, present, max_ttl=max_ttl, patience=0.5).done
            assert not change_nodes(present, present, max_ttl=max_ttl, patience=0.5).done
            assert not change(present, present)
            assert [status.max_ttl for status in client.status()] == [max_ttl] * 3
            with client.lock("r", ttl=max_ttl) as token:
                tokens.append(token)
        with pytest.raises(ValueError, match="longer than the 2 s"):
            client.lock("r", ttl=4.5).acquire()
    with pytest.raises(ValueError, match="ttl"):
        change_nodes(present, present, max_ttl=-1)
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("steps", range(1, 30, 4))
def test_interrupted_change_of_the_longest_lease_is_finished(
    present: list[str], stations: list[RealNode], steps: int
) -> None:
    """By the next, with the same lease or none; another is refused where a node is closed for this one."""
    first = take(present)
    actor = operator(stations, (0, 1, 2), 5.0)
    for _ in range(steps):
        if actor.request is None:
            break
        actor.step()
    if any("next" in station.remember() for station in stations[:3]):
        with pytest.raises(MembershipError, match="set --max-ttl 5 "):
            change_nodes(present, present, max_ttl=7.0, patience=0.5)
        change(present, present)
    else:
        change_nodes(present, present, max_ttl=5.0, patience=0.5)
    with Redlock(present, node_timeout=0.3) as authority:
        assert [(status.state, status.max_ttl) for status in authority.status()] == [
            (NodeState.ADMITTED, 5.0)
        ] * 3
    assert take(present, ttl=4) > first


@pytest.mark.parametrize("steps", range(1, 40, 3))
def test_interrupted_change_is_finished_by_the_next(
    nodes: Nodes, present: list[str], stations: list[RealNode], steps: int
) -> None:
    """Wherever the first stopped, the second goes on with the same list; tokens grow."""
    first = take(present)
    actor = operator(stations, (0, 1, 3))
    for _ in range(steps):
        if actor.request is None:
            break
        actor.step()
    wanted = [*present[:2], nodes.urls[3]]
    change(present, wanted)
    assert take(wanted) > first
    with Redlock(wanted, node_timeout=0.3) as authority:
        assert [status.state for status in authority.status()] == [NodeState.ADMITTED] * 3


def test_node_that_was_left_closed_is_opened_by_the_next_run(
    nodes: Nodes, present: list[str], stations: list[RealNode]
) -> None:
    """The new list has a majority already, and one that stays was not reached any more."""
    actor = operator(stations, (0, 1, 3))
    actor.until("open")
    actor.step()
    actor.step()
    wanted = [*present[:2], nodes.urls[3]]
    before = take(wanted)
    assert change(present, wanted) is True
    with Redlock(wanted) as authority:
        assert {(status.state, status.epoch) for status in authority.status()} == {(NodeState.ADMITTED, 2)}
    assert take(wanted) > before


def test_new_node_that_forgets_under_way_is_recovered_later(
    nodes: Nodes, present: list[str], stations: list[RealNode]
) -> None:
    """The list is closed for one with its ticket: that is finished all the same, and clients admit it."""
    actor = operator(stations, (0, 1, 3))
    actor.until("promise")
    stations[3].client.flushall()
    wanted = [*present[:2], nodes.urls[3]]
    left_out = change_nodes(present, wanted, patience=0.5).left_out
    assert "clients admit it" in left_out[nodes.urls[3]]
    with Redlock(wanted, node_timeout=0.3) as authority:
        assert eventually(lambda: votes(authority) == 3)


def votes(authority: Redlock) -> int:
    """Lock once, and return how many nodes vote."""
    with authority.lock("r", ttl=1):
        return sum(status.state is NodeState.ADMITTED for status in authority.status())


def test_nothing_is_closed_where_the_end_cannot_be_reached(
    nodes: Nodes, present: list[str], stations: list[RealNode]
) -> None:
    """A new node that is down; a node that stays and has restarted; a majority of the old ones missing."""
    nodes[3].kill()
    with pytest.raises(QuorumError, match="must answer"):
        change(present, [*present[:2], nodes.urls[3]])
    stations[0].client.hset(NODE_KEY, "r", "0" * 40)
    with pytest.raises(MembershipError, match="does not vote now"):
        change(present, [*present[:2], nodes.urls[4]])
    nodes[1].kill()
    with pytest.raises(QuorumError, match="majority"):
        change(present, [nodes.urls[4]])
    assert "next" not in stations[2].remember()


def test_stranger_cannot_be_changed(nodes: Nodes) -> None:
    """Nodes that were never initialised have no list."""
    with pytest.raises(MembershipError, match="none of these nodes belongs"):
        change(list(nodes.urls[:2]), [nodes.urls[3]])
