"""A Redis Cluster is one node: one of its primaries has all keys of a namespace, and another may take over.

The tests use real clusters. A server says itself that it does not serve the keys (any more). A server that
serves them again, or in another's place, must not vote for that reason.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.cluster import ClusterNode, LoadBalancingStrategy
from redis.crc import key_slot

from fencelock import Redlock
from fencelock.authority.redlock.admin import change_nodes
from fencelock.errors import LockTimeoutError, MembershipError, QuorumError
from fencelock.tokens import split
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.groups import MAX_TTL, PATIENT, Cluster, ask, fact, is_refused, token_within
from tests.redlock.stage import NODE_KEY, OF_THE_NODE
from tests.redlock.views import Run

pytestmark = [pytest.mark.timed, pytest.mark.long]


@pytest.fixture(scope="module")
def calm() -> Iterator[Cluster]:
    """Three primaries that keep their slots; a test may do what it likes with their data."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(calm: Cluster) -> Cluster:
    """The same, blank."""
    for node in calm.nodes:
        ask(node, "FLUSHALL")
        ask(node, "SCRIPT", "FLUSH")
    return calm


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., Cluster]]:
    """A factory of clusters that end with the test."""
    with ExitStack() as stack:
        yield lambda *counts, **options: stack.enter_context(Cluster(*counts, **options))


@pytest.fixture
def authority(cluster: Cluster) -> Iterator[Redlock]:
    """A Redlock on the cluster alone, with counters from 0."""
    with Redlock(cluster.url()) as made:
        made.init(base=0)
        yield made


def test_any_server_of_a_cluster_leads_to_its_keys(cluster: Cluster) -> None:
    """The server is one of several in a URL, or alone. A user need not know how slots are divided."""
    urls = [cluster.url(), *(cluster.url(node) for node in cluster.nodes)]
    for number, url in enumerate(urls):
        with Redlock(url) as authority:
            assert authority.init(base=0) is (number == 0)
            with authority.lock("r") as token:
                assert token == number + 1
    assert ask(cluster.primary(), "DBSIZE") == len(OF_THE_NODE) + len(urls)  # each client tells what it is
    assert all(ask(node, "DBSIZE") == 0 for node in cluster.others())


def test_only_who_names_a_cluster_is_led_to_another_server(cluster: Cluster) -> None:
    """It would get the password. The plain URL of the server that has the keys is a node like any other."""
    with Redlock(cluster.primary().url) as authority:
        authority.init(base=0)
        assert token_within(authority) == 1
    with (
        Redlock(cluster.others()[0].url, outage_grace=0.0) as authority,
        pytest.raises(QuorumError, match=r"redis\+cluster://host1"),
    ):
        authority.lock("r", timeout=0).acquire()


def test_client_of_a_cluster_is_a_node(cluster: Cluster) -> None:
    """With its settings, and where it is told of addresses that are others from here."""
    first = cluster.others()[0]
    new_node: Any = ClusterNode  # redis-py has no types for it
    remapped: list[tuple[str, int]] = []

    def remap(address: tuple[str, int]) -> tuple[str, int]:
        remapped.append(address)
        return ("localhost", address[1])

    with (
        redis.RedisCluster(
            startup_nodes=[new_node("localhost", first.port)],
            decode_responses=True,
            load_balancing_strategy=LoadBalancingStrategy.ROUND_ROBIN,
            address_remap=remap,
        ) as client,
        Redlock(client) as authority,
    ):
        authority.init(base=0)
        remapped.clear()
        authority.close()
        with authority.lock("r") as token:
            assert token == 1
        assert remapped
        grant = asyncio.run(authority.aio.acquire(("r",), ttl=5, timeout=0))
        assert grant.tokens == (2,)
        assert authority.release(grant) is True


def test_two_servers_of_one_cluster_are_one_node(cluster: Cluster) -> None:
    """Both lead to the same primary, which would have two votes."""
    urls = [cluster.url(node) for node in cluster.nodes[:2]]
    with Redlock(urls) as authority, pytest.raises(MembershipError, match="same server"):
        authority.init()


def test_everything_that_locks_can_do_works_in_a_cluster(authority: Redlock) -> None:
    """Each script, with the keys that it names and those that it makes of them: all are of one slot."""
    with authority.lock("a", "b") as tokens:
        assert tokens == (1, 1)
        with pytest.raises(LockTimeoutError):
            authority.acquire(("b",), ttl=5.0, timeout=0)
    lock = authority.lock("a", ttl=5.0, fair=True)
    with lock as token:
        assert token == 2
        lock.extend(6.0)
        assert lock.remint() == 3
    assert [status.state.value for status in authority.status()] == ["admitted"]
    assert authority.recover() is True


@pytest.mark.usefixtures("never_look")
@pytest.mark.parametrize("fair", [True, False])
def test_waiting_in_line_works_in_a_cluster(authority: Redlock, cluster: Cluster, fair: bool) -> None:
    """Calls reach the waiting clients, because these listen where the keys are."""
    tokens: list[int] = []

    def take(own: Redlock) -> None:
        for _ in range(10):
            with own.lock("r", timeout=20.0, fair=fair) as token:
                tokens.append(token)

    with ExitStack() as stack:
        own = [stack.enter_context(Redlock(cluster.url())) for _ in range(3)]
        threads = [threading.Thread(target=take, args=(each,)) for each in own]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
    assert sorted(tokens) == list(range(1, 31))

    async def tasks() -> list[int]:
        async def one() -> int:
            async with authority.lock("r", timeout=20.0, fair=fair) as token:
                await asyncio.sleep(0.01)
                return token

        return sorted(await asyncio.gather(*(one() for _ in range(10))))

    assert asyncio.run(tasks()) == list(range(31, 41))


def test_restarted_server_of_a_cluster_is_admitted_again(make_cluster: Callable[..., Cluster]) -> None:
    """Recovery's scripts run there too. Its data is gone; two other nodes remember."""
    cluster = make_cluster(1)
    with Nodes(2) as others, Redlock([cluster.url(), *others.urls], **PATIENT) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
        assert token_within(authority) == 1
        ask(cluster.primary(), "FLUSHALL")
        assert token_within(authority) == 2
        assert authority.recover()
        others[0].kill()
        assert split(token_within(authority))[0] >= 1


def test_cluster_takes_the_place_of_a_node_and_gives_it_back(cluster: Cluster, nodes: Nodes) -> None:
    """The scripts of a change of nodes."""
    plain, clustered = nodes.urls[:1], [cluster.url()]
    with Redlock(plain) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
        assert token_within(authority) == 1
    assert change_nodes(plain, clustered).done
    with Redlock(clustered) as authority:
        assert split(token_within(authority)) == (1, 1)
    ask(nodes[0], "FLUSHALL")
    assert change_nodes(clustered, plain).done
    with Redlock(plain) as authority:
        assert split(token_within(authority))[0] == 2


def test_start_after_a_loss_works_in_a_cluster(cluster: Cluster) -> None:
    """In a later epoch, which is promised first."""
    with Redlock(cluster.url()) as authority:
        assert authority.init(base=0, above=5)
        with authority.lock("r") as token:
            assert split(token) == (1, 1)


def _tokens_over(cluster: Cluster, change: Callable[[], None]) -> list[int]:
    """Return the tokens before and after something happens to a cluster with a connection open to it."""
    with (
        Redlock(cluster.url(), recover=False, **PATIENT) as client,
        Redlock(cluster.url(), **PATIENT) as admin,
    ):
        before = token_within(client)
        change()
        assert is_refused(client)
        assert admin.recover()
        return [before, token_within(client), token_within(admin)]


@pytest.mark.parametrize("kill", [True, False], ids=["died", "ordered"])
def test_promoted_server_of_a_cluster_votes_when_it_has_been_admitted(
    make_cluster: Callable[..., Cluster], kill: bool
) -> None:
    """Open connections to the old one lead nowhere (MOVED); clients find the new one, which refuses."""
    cluster = make_cluster(3, replicas=True)
    with Redlock(cluster.url(), **PATIENT) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
    first, second, third = _tokens_over(cluster, lambda: cluster.fail_over(kill=kill))
    assert first < second < third
    assert [split(token)[0] for token in (first, second, third)] == [0, 1, 1]
    if not kill:
        there = cluster.primary()
        fourth, fifth, _ = _tokens_over(cluster, lambda: cluster.fail_over(kill=False))
        assert cluster.primary() is not there
        assert third < fourth < fifth
        assert [split(token)[0] for token in (fourth, fifth)] == [1, 2]


def test_tasks_go_where_the_keys_have_gone(make_cluster: Callable[..., Cluster], run: Run) -> None:
    """Asyncio's connections, for locks and for calls: after a failover by order, and when the slot moves."""
    cluster = make_cluster(2, replicas=True)

    async def tokens_of_all(authority: Redlock) -> list[int]:
        async def one() -> int:
            while True:
                try:
                    async with authority.lock("r", ttl=MAX_TTL, timeout=20.0) as token:
                        return token
                except QuorumError:
                    await asyncio.sleep(0.05)

        return sorted(await asyncio.gather(*(one() for _ in range(5))))

    async def main() -> None:
        with Redlock(cluster.url(), **PATIENT) as authority:
            await asyncio.to_thread(authority.init, base=0, max_ttl=MAX_TTL)
            found = [await tokens_of_all(authority)]
            await asyncio.to_thread(cluster.fail_over, kill=False)
            found.append(await tokens_of_all(authority))
            other = next(each for each in cluster.others() if fact(each, "role") == "master")
            await asyncio.to_thread(cluster.move_slot, other)
            found.append(await tokens_of_all(authority))
            flat = [token for tokens in found for token in tokens]
            assert flat == sorted(set(flat))
            assert [{split(token)[0] for token in tokens} for tokens in found] == [{0}, {1}, {2}]

    run(main())


def test_slot_that_moves_takes_no_vote_with_it(make_cluster: Callable[..., Cluster]) -> None:
    """The keys arrive at another server with all that they say, and it is not the one that was admitted.

    While the slot is on its way there are no locks; on its way back it is the same.
    """
    cluster = make_cluster(2)
    home = cluster.primary()
    with Redlock(cluster.url(), **PATIENT) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
        assert token_within(authority) == 1
        (other,) = cluster.others()
        cluster.begin_to_move_slot(other)
        with pytest.raises(QuorumError, match=r"TRYAGAIN|ASK"):
            authority.lock("new", ttl=MAX_TTL, timeout=0).acquire()
        for node in cluster.nodes:
            ask(node, "CLUSTER", "SETSLOT", key_slot(NODE_KEY.encode()), "STABLE")
        assert token_within(authority) == 2
    tokens = _tokens_over(cluster, lambda: cluster.move_slot(other))
    assert [split(token)[0] for token in tokens] == [0, 1, 1]
    tokens = _tokens_over(cluster, lambda: cluster.move_slot(home))
    assert [split(token)[0] for token in tokens] == [1, 2, 2]


def test_one_who_waits_listens_where_the_keys_have_gone(make_cluster: Callable[..., Cluster]) -> None:
    """The connection for calls lives on when a slot moves.

    Calls reach only clients that listen at the new place.
    """
    cluster = make_cluster(2)

    def is_heard(own: Redlock) -> bool:
        return str(own._connections._nodes._subscribe.arguments[0]).encode() in ask(
            cluster.primary(), "PUBSUB", "CHANNELS"
        )

    with Redlock(cluster.url(), **PATIENT) as holder, Redlock(cluster.url(), **PATIENT) as waiter:
        holder.init(base=0, max_ttl=MAX_TTL)
        for moves in range(2):
            if moves:
                cluster.move_slot(*cluster.others())
                token_within(holder)
                assert not is_heard(waiter)
            lock = holder.lock("r", ttl=MAX_TTL)
            lock.acquire()
            with ThreadPoolExecutor() as threads:
                waiting = threads.submit(token_within, waiter)
                assert eventually(lambda: is_heard(waiter))
                lock.release()
                waiting.result(20.0)


def test_cluster_without_its_slots_says_so(make_cluster: Callable[..., Cluster]) -> None:
    """No server has the namespace's slot yet. A server may get it, so the outage is waited for."""
    cluster = make_cluster(1, covered=False)
    for url in (cluster.url(), cluster.nodes[0].url):
        with (
            Redlock(url, outage_grace=0.0) as authority,
            pytest.raises(QuorumError, match=r"cluster is down.*--cluster check"),
        ):
            authority.lock("r", timeout=0).acquire()


def test_any_named_server_of_a_cluster_is_enough(make_cluster: Callable[..., Cluster]) -> None:
    """A cluster without one of its servers is a cluster still, for clients that name another of them."""
    cluster = make_cluster(3, replicas=True)
    door, other = [node for node in cluster.others()[:3] if cluster._owner(node, 0)][:2]
    with Redlock(cluster.url(door, other), **PATIENT) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
        assert token_within(authority) == 1
        door.kill()
        authority.close()
        assert eventually(cluster.is_whole, 30.0)
        assert token_within(authority) == 2
    with (
        Redlock(cluster.url(door), outage_grace=0.0) as late,
        pytest.raises(QuorumError, match="refused"),
    ):
        late.lock("r", timeout=0).acquire()


def test_socket_into_a_cluster_leads_no_further_than_its_server(
    make_cluster: Callable[..., Cluster],
) -> None:
    """Other servers of the cluster listen elsewhere, so the error says how to name the node."""
    cluster = make_cluster(2, settings={"unixsocket": "s"})
    sockets = {node: ask(node, "CONFIG", "GET", "dir")[1].decode() + "/s" for node in cluster.nodes}
    with Redlock(f"unix://{sockets[cluster.primary()]}") as authority:
        authority.init(base=0)
        assert token_within(authority) == 1
    (other,) = cluster.others()
    with (
        Redlock(f"unix://{sockets[other]}") as authority,
        pytest.raises(QuorumError, match=r"redis\+cluster://"),
    ):
        authority.lock("r", timeout=0).acquire()
