"""Tokens grow across a change of nodes, on real nodes and under clients."""

from __future__ import annotations

import threading
import time

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.redlock.admin import NodeState, change_nodes
from fencelock.errors import FencelockError, LockTimeoutError, MembershipError, QuorumError
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY

MAX_TTL = 2.0


@pytest.fixture
def present(nodes: Nodes) -> list[str]:
    with Redlock(nodes.urls[:3]) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
    return list(nodes.urls[:3])


def change(present: list[str], wanted: list[str]) -> bool:
    return change_nodes(present, wanted, patience=1.5).done


def take(urls: list[str], *, ttl: float = 1.0, timeout: float = 30) -> int:
    with Redlock(urls, outage_grace=30.0) as authority:
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
            take(present, timeout=0)


def test_way_there_and_back(nodes: Nodes, present: list[str]) -> None:
    other = [*present[:2], nodes.urls[3]]
    tokens = [take(present)]
    change(present, other)
    tokens.append(take(other))
    with pytest.raises(MembershipError, match="delete the key"):
        change(other, present)
    with redis.Redis.from_url(nodes.urls[2]) as client:
        client.flushall()
    assert change(other, present) is True
    tokens.append(take(present))
    assert tokens == sorted(set(tokens))


def test_leases_end_before_others_are_granted(nodes: Nodes, present: list[str]) -> None:
    """A change waits for the holder, which cannot extend any more. No other client is let in meanwhile."""
    with Redlock(present) as authority:
        lock = authority.lock("r", ttl=MAX_TTL)
        lease = lock.acquire()
        told: list[str] = []
        change_nodes(present, nodes.urls[3:], tell=told.append)
        assert lease.lost
        assert any(sentence.startswith("waiting") for sentence in told)
        assert take(list(nodes.urls[3:])) > lease.token


def test_clients_lock_through_a_change(nodes: Nodes, present: list[str]) -> None:
    """Tokens are unique and grow, whichever list a client asks.

    Attempts fail for the moment that a change takes.
    """
    tokens: list[int] = []
    over = threading.Event()

    def work() -> None:
        with Redlock(present, outage_grace=30.0) as authority:
            while not over.is_set():
                try:
                    with authority.lock("r", ttl=1, timeout=30) as token:
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
    with Redlock(present, outage_grace=30) as client:
        with client.lock("r", ttl=1) as token:
            tokens.append(token)
        with pytest.raises(ValueError, match=f"fencelock nodes set --max-ttl 5 {present[0]} ") as caught:
            client.lock("r", ttl=4.5).acquire()
        assert str(caught.value).endswith(present[2])
        for max_ttl in (5.0, MAX_TTL):
            assert change_nodes(present, present, max_ttl=max_ttl).done
            assert not change_nodes(present, present, max_ttl=max_ttl).done
            assert not change(present, present)
            assert [status.max_ttl for status in client.status()] == [max_ttl] * 3
            with client.lock("r", ttl=max_ttl) as token:
                tokens.append(token)
        with pytest.raises(ValueError, match="longer than the 2 s"):
            client.lock("r", ttl=4.5).acquire()
    with pytest.raises(ValueError, match="ttl"):
        change_nodes(present, present, max_ttl=-1)
    assert tokens == sorted(set(tokens))


def test_nothing_is_closed_where_the_end_cannot_be_reached(nodes: Nodes, present: list[str]) -> None:
    """A new node that is down; a node that stays and has restarted; a majority of the old ones missing."""
    nodes[3].kill()
    with pytest.raises(QuorumError, match="must answer"):
        change(present, [*present[:2], nodes.urls[3]])
    with redis.Redis.from_url(nodes.urls[0]) as client:
        client.hset(NODE_KEY, "r", "0" * 40)
    with pytest.raises(MembershipError, match="does not vote now"):
        change(present, [*present[:2], nodes.urls[4]])
    nodes[1].kill()
    with pytest.raises(QuorumError, match="majority"):
        change(present, [nodes.urls[4]])
    with redis.Redis.from_url(nodes.urls[2]) as client:
        assert not client.hexists(NODE_KEY, "next")


def test_stranger_cannot_be_changed(nodes: Nodes) -> None:
    with pytest.raises(MembershipError, match="none of these nodes belongs"):
        change(list(nodes.urls[:2]), [nodes.urls[3]])
