"""A node may be one server, a service of Sentinel, or a Redis Cluster; what takes over does not vote at once.

The tests use real servers of each series that is found, and real failovers. No client knows what a promoted
server has missed, and a server that was replaced may go on to answer on connections that were opened to it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import redis
import redis.sentinel
from redis.cluster import ClusterNode, LoadBalancingStrategy
from redis.crc import key_slot

from fencelock import Redlock
from fencelock.authority.redlock.admin import change_nodes
from fencelock.authority.redlock.transport import connector
from fencelock.errors import LockTimeoutError, MembershipError, QuorumError
from fencelock.tokens import split
from proof.servers import Node, Nodes, ServerError
from proof.servers.certificates import Certificates
from proof.servers.nodes import LOOPBACK, reserve_port
from tests.authorities.stage import together
from tests.conftest import SERVER_SERIES, server_programs
from tests.polling import eventually
from tests.redlock.groups import (
    MAX_TTL,
    PATIENT,
    Cluster,
    Watched,
    ask,
    fact,
    follow,
    is_refused,
    promote,
    token_within,
)
from tests.redlock.stage import NODE_KEY, OF_THE_NODE

pytestmark = pytest.mark.long


def program_of(series: str) -> Path:
    if series not in server_programs():
        pytest.skip(f"no {series} server: put one on PATH, or name its program in FENCELOCK_TEST_SERVERS")
    return server_programs()[series]


def refusal_of(node: Any, **settings: Any) -> str:
    with Redlock(node, **{"outage_grace": 0.0, **settings}) as authority, pytest.raises(QuorumError) as said:
        authority.lock("r", ttl=MAX_TTL, timeout=0).acquire()
    return str(said.value)


@pytest.fixture(scope="module")
def calm_service() -> Iterator[Watched]:
    with Watched() as watched:
        yield watched.start()


@pytest.fixture
def service(calm_service: Watched) -> Watched:
    """A primary, its replica and three sentinels, without failovers; blank."""
    ask(calm_service.primary(), "FLUSHALL")
    return calm_service


@pytest.fixture(scope="module")
def calm_cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


@pytest.fixture
def cluster(calm_cluster: Cluster) -> Cluster:
    for node in calm_cluster.nodes:
        ask(node, "FLUSHALL")
        ask(node, "SCRIPT", "FLUSH")
    return calm_cluster


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=[*SERVER_SERIES, "service", "cluster"])
def url(request: pytest.FixtureRequest, started: ExitStack) -> str:
    if request.param in {"service", "cluster"}:
        place: Watched | Cluster = request.getfixturevalue(request.param)
        return place.url()
    return started.enter_context(Nodes(1, executable=program_of(request.param))).url


def test_everything_that_locks_can_do_works(url: str) -> None:
    """Each script, with the keys that it names and those that it makes of them; blocking and from asyncio."""
    with Redlock(url, **PATIENT) as authority:
        assert authority.init(base=0, max_ttl=30.0)
        lock = authority.lock("r", ttl=5.0, fair=True)
        with lock as token:
            assert token == 1
            lock.extend(6.0)
            assert lock.remint() == 2
            assert authority.lock("r").locked()
            with pytest.raises(LockTimeoutError):
                authority.acquire(("r", "s"), ttl=MAX_TTL, timeout=0)
        with authority.lock("r", "s", ttl=MAX_TTL) as tokens:
            assert tokens == (3, 1)
        grant = asyncio.run(authority.aio.acquire(("r",), ttl=5, timeout=5))
        assert grant.tokens == (4,)
        assert authority.release(grant) is True
        assert [status.state.value for status in authority.status()] == ["admitted"]
        assert authority.recover() is True
        assert authority.init(above=5) is False
        assert split(token_within(authority)) == (1, 1)


@pytest.mark.usefixtures("never_look")
def test_those_who_wait_are_called(url: str) -> None:
    tokens: list[int] = []

    def work() -> None:
        with Redlock(url) as own:
            for number in range(10):
                with own.lock("r", timeout=None, fair=number % 2 > 0) as token:
                    tokens.append(token)

    with Redlock(url) as authority:
        authority.init(base=0)
        together(*[work] * 3, seconds=60.0)

        async def one() -> None:
            async with authority.lock("r", timeout=None) as token:
                tokens.append(token)

        async def tasks() -> None:
            await asyncio.gather(*(one() for _ in range(5)))

        asyncio.run(tasks())
    assert tokens == list(range(1, 36))


MOVING = [
    *((series, "service", True) for series in SERVER_SERIES),
    *((series, "cluster", False) for series in SERVER_SERIES),
    (SERVER_SERIES[0], "service", False),
    (SERVER_SERIES[0], "cluster", True),
]


@pytest.mark.parametrize(("series", "kind", "kill"), MOVING)
def test_promoted_server_votes_when_it_has_been_admitted(
    started: ExitStack, series: str, kind: str, *, kill: bool
) -> None:
    """Open connections lead nowhere, or to the old one; clients find the new one, which refuses at first.

    There and back again where the old one lives. A client that waits is called there.
    """
    place: Watched | Cluster
    if kind == "service":
        place = started.enter_context(Watched(executable=program_of(series))).start()
    else:
        place = started.enter_context(Cluster(3, replicas=True, executable=program_of(series)))
    client = started.enter_context(Redlock(place.url(), recover=False, **PATIENT))
    admin = started.enter_context(Redlock(place.url(), **PATIENT))
    admin.init(base=0, max_ttl=MAX_TTL)
    epoch, last = split(token_within(client))[0], 0
    for _ in range(1 if kill else 2):
        before = place.primary()
        place.fail_over(kill=kill)
        assert place.primary() is not before
        assert is_refused(client)
        assert admin.recover()
        token = token_within(client)
        assert token > last
        assert split(token)[0] > epoch
        epoch, last = split(token)[0], token
    lock = admin.lock("r", ttl=MAX_TTL)
    lock.acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(token_within, client)
        assert eventually(lambda: ask(place.primary(), "ZCARD", f"{NODE_KEY}:q:r") == 1)
        lock.release()
        assert waiting.result(60) > last


def older_by_replication(server: Node, copy: Node) -> Callable[[], None]:
    """Have a server copied now; return what makes it follow the copy, and be promoted again."""
    follow(copy, server)
    promote(copy)

    def go_back() -> None:
        follow(server, copy)
        promote(server)

    return go_back


def older_by_file(server: Node, _: Node) -> Callable[[], None]:
    """Have a server write a file now; return what makes it load that."""
    ask(server, "SAVE")
    return lambda: ask(server, "DEBUG", "RELOAD", "NOSAVE")


@pytest.mark.parametrize("prepare", [older_by_replication, older_by_file])
@pytest.mark.parametrize("series", SERVER_SERIES)
def test_node_with_older_data_in_the_same_process_does_not_vote(
    started: ExitStack, series: str, prepare: Callable[[Node, Node], Callable[[], None]]
) -> None:
    """The socket that is older than the copy, and a new one, are refused until the node has been admitted."""
    settings = {} if series == "redis-6" else {"enable-debug-command": "local"}  # it knows no such setting
    server, copy = started.enter_context(Nodes(2, executable=program_of(series), settings=settings))
    with Redlock(server.url, recover=False, **PATIENT) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
        assert token_within(authority) == 1
        go_back = prepare(server, copy)
        assert token_within(authority) > 1
        go_back()
        assert is_refused(authority)
        with Redlock(server.url, recover=False, **PATIENT) as newcomer:
            assert is_refused(newcomer)
        assert authority.recover()
        assert split(token_within(authority)) == (1, 1)


@pytest.mark.parametrize("keep_data", [True, False])
def test_node_of_any_series_is_admitted_again_and_joins_a_list(
    server_program: Path, nodes: Nodes, *, keep_data: bool
) -> None:
    with (
        Nodes(3, executable=server_program, appendfsync="always") as made,
        Redlock(made.urls, **PATIENT) as authority,
    ):
        authority.init(base=0, max_ttl=MAX_TTL)
        first = token_within(authority)
        made[0].restart(keep_data=keep_data)
        assert token_within(authority) > first
        assert authority.recover()
        made[1].kill()
        assert split(token_within(authority))[0] >= 1  # it may have been begun in the background as well
        wanted = [made.urls[0], made.urls[2], nodes.urls[0]]
        assert change_nodes(made.urls, wanted).done
        with Redlock(wanted) as together:
            assert split(token_within(together))[0] >= 2


def test_primary_that_lacks_replicas_is_waited_for(any_server: Node, server_program: Path) -> None:
    """`min-replicas-to-write`: it refuses to write, which passes. In Redis 6.2 scripts write all the same."""
    with Redlock(any_server.url, outage_grace=60.0) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
        ask(any_server, "CONFIG", "SET", "min-replicas-to-write", 1)
        if server_programs().get("redis-6") == server_program:
            assert token_within(authority)
            return
        assert "NOREPLICAS" in refusal_of(any_server.url)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(authority.acquire, ("r",), ttl=MAX_TTL, timeout=None)
            ask(any_server, "CONFIG", "SET", "min-replicas-to-write", 0)
            assert waiting.result(60).tokens


# Nodes that Sentinel watches.


def test_client_of_a_service_is_a_node(service: Watched) -> None:
    """Every vote proves its server, also where no replica is attached: the address says that one may be."""
    world: Any = redis.sentinel  # redis-py has no types for it
    manager = world.Sentinel(service.sentinel_addresses, socket_timeout=2)
    with Redlock(manager.master_for(service.name(), decode_responses=True, protocol=3)) as authority:
        authority.init(base=0)
        with authority.lock("r") as token:
            assert token == 1
        connection = authority._connections._nodes.connection(0)
        assert connection is not None
        assert connection.identity.replid


def test_passwords_of_servers_and_sentinels_are_two(started: ExitStack) -> None:
    service = started.enter_context(Watched(password="data", sentinel_password="watch")).start()
    with Redlock(service.url(login=":data@", query="?sentinel_password=watch")) as authority:
        authority.init(base=0)
        assert token_within(authority) == 1
    for wrong in (service.url(login=":data@"), service.url(query="?sentinel_password=watch")):
        assert "auth" in refusal_of(wrong).lower()


def test_service_that_is_named_wrong_is_told_how_to_be_named(service: Watched) -> None:
    """At once: it does not get better."""
    unknown = refusal_of(service.url().replace(service.name(), "nonesuch"), outage_grace=100.0)
    assert "'nonesuch'" in unknown
    assert "service-0" in unknown
    sentinel = "redis://{}:{}".format(*service.sentinel_addresses[0])
    assert "redis+sentinel://" in refusal_of(sentinel, outage_grace=100.0)
    server = f"redis+sentinel://127.0.0.1:{service.primary().port}/x"
    assert "0 of its 1 sentinels answer" in refusal_of(server)
    replica = refusal_of(service.replica().url)
    assert "only primaries" in replica
    assert "redis+sentinel://" in replica


def test_majority_of_the_sentinels_has_to_answer_and_to_name_the_primary(
    service: Watched, started: ExitStack
) -> None:
    """One that is cut off may name a primary that has been replaced. Connections that are open need none."""
    other = started.enter_context(Watched()).start()
    other.fail_over(kill=False)
    ours = [f"{LOOPBACK}:{port}" for _, port in service.sentinel_addresses[:2]]
    hosts = [f"{LOOPBACK}:{other.sentinel_addresses[0][1]}", *ours]
    with Redlock(f"redis+sentinel://{','.join(hosts)}/{service.name()}") as authority:
        authority.init(base=0)
    assert ask(service.primary(), "EXISTS", NODE_KEY) == 1
    assert ask(other.primary(), "EXISTS", NODE_KEY) == 0
    two = f"redis+sentinel://{','.join(hosts[:2])}/{service.name()}"
    assert "name different primaries" in refusal_of(two)
    with Redlock(other.url(), **PATIENT) as authority:
        authority.init(base=0)
        assert token_within(authority) == 1
        other.kill_sentinel(0)
        with Redlock(other.url(), **PATIENT) as second:
            assert token_within(second) == 2
        other.kill_sentinel(1)
        assert "1 of its 3 sentinels answer, and a majority is 2" in refusal_of(other.url())
        assert token_within(authority) == 3


def test_quorum_of_services_goes_on_while_one_fails_over(started: ExitStack) -> None:
    watched = started.enter_context(Watched(3)).start()
    urls = ",".join(watched.url(number) for number in range(3))
    with Redlock(urls, **PATIENT) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
        tokens = [token_within(authority)]
        for number, kill in ((0, True), (1, False)):
            watched.fail_over(number, kill=kill)
            tokens.append(token_within(authority))
            assert eventually(
                lambda: (
                    token_within(authority) > 0
                    and {status.state.value for status in authority.status()} == {"admitted"}
                )
            )
            tokens.append(token_within(authority))
        assert tokens == sorted(set(tokens))
        (epoch,) = {status.epoch for status in authority.status()}
        assert epoch is not None
        assert epoch >= 2  # several may admit one at once


@pytest.mark.parametrize("verified", [True, False], ids=["every vote", "the socket"])
def test_failover_and_failback_past_an_open_connection(
    make_nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch, *, verified: bool
) -> None:
    """The same process answers on the same connection, with what the other one had kept of its data.

    Every vote proves the server; one that asks only the socket is refused as well, for the memory is another.
    """
    if not verified:
        identify = connector._identify
        monkeypatch.setattr(connector, "_identify", lambda *a, **o: replace(identify(*a, **o), replid=""))
    first, second = make_nodes(2, settings={"repl-diskless-sync-delay": "0"})
    follow(second, first)
    with Redlock(first.url, recover=False, **PATIENT) as authority:
        authority.init(base=0)
        assert token_within(authority) == 1
        written = int(fact(first, "master_repl_offset"))
        assert eventually(lambda: int(fact(second, "slave_repl_offset")) >= written)
        promote(second)
        assert token_within(authority) == 2
        follow(first, second)
        promote(first)
        assert is_refused(authority)


# A Redis Cluster.


def test_any_server_of_a_cluster_leads_to_its_keys(cluster: Cluster) -> None:
    """One of several, or alone; two of them are one node. Only the URL of a cluster leads elsewhere."""
    urls = [cluster.url(), *(cluster.url(node) for node in cluster.nodes)]
    for number, url in enumerate(urls):
        with Redlock(url) as authority:
            assert authority.init(base=0) is (number == 0)
            assert token_within(authority) == number + 1
    assert ask(cluster.primary(), "DBSIZE") == len(OF_THE_NODE) + len(urls)  # each client tells what it is
    assert all(ask(node, "DBSIZE") == 0 for node in cluster.others())
    with Redlock(cluster.primary().url) as authority:  # the plain URL of the server that has the keys
        assert token_within(authority) == len(urls) + 1
    assert "redis+cluster://host1" in refusal_of(cluster.others()[0].url)  # it would get the password
    ask(cluster.primary(), "FLUSHALL")
    with Redlock(urls[1:3]) as authority, pytest.raises(MembershipError, match="same server"):
        authority.init()


def test_client_of_a_cluster_is_a_node(cluster: Cluster) -> None:
    new_node: Any = ClusterNode  # redis-py has no types for it
    remapped: list[tuple[str, int]] = []

    def remap(address: tuple[str, int]) -> tuple[str, int]:
        remapped.append(address)
        return ("localhost", address[1])

    with (
        redis.RedisCluster(
            startup_nodes=[new_node("localhost", cluster.others()[0].port)],
            decode_responses=True,
            load_balancing_strategy=LoadBalancingStrategy.ROUND_ROBIN,
            address_remap=remap,
        ) as client,
        Redlock(client) as authority,
    ):
        authority.init(base=0)
        remapped.clear()
        authority.close()
        assert token_within(authority) == 1
        assert remapped


def test_cluster_takes_the_place_of_a_node_and_gives_it_back(cluster: Cluster, nodes: Nodes) -> None:
    plain, clustered = nodes.urls[:1], [cluster.url()]
    with Redlock(plain) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
        assert token_within(authority) == 1
    for number, (old, new) in enumerate(((plain, clustered), (clustered, plain)), 1):
        ask(nodes[0] if number == 2 else cluster.primary(), "FLUSHALL")
        assert change_nodes(old, new).done
        with Redlock(new) as authority:
            assert split(token_within(authority)) == (number, 1)


def test_slot_that_moves_takes_no_vote_with_it(started: ExitStack) -> None:
    """The keys arrive at another server with all that they say, and it is not the one that was admitted.

    While the slot is on its way there are no locks. A waiting client listens where the keys have gone.
    """
    cluster = started.enter_context(Cluster(2))
    home, (other,) = cluster.primary(), cluster.others()
    client = started.enter_context(Redlock(cluster.url(), recover=False, **PATIENT))
    admin = started.enter_context(Redlock(cluster.url(), **PATIENT))

    def is_heard() -> bool:
        channel = str(client._connections._nodes._subscribe.arguments[0]).encode()
        return channel in ask(cluster.primary(), "PUBSUB", "CHANNELS")

    admin.init(base=0, max_ttl=MAX_TTL)
    assert token_within(client) == 1
    cluster.begin_to_move_slot(other)
    with pytest.raises(QuorumError, match=r"TRYAGAIN|ASK"):
        client.lock("new", ttl=MAX_TTL, timeout=0).acquire()
    for node in cluster.nodes:
        ask(node, "CLUSTER", "SETSLOT", key_slot(NODE_KEY.encode()), "STABLE")
    assert token_within(client) == 2
    for epoch, target in ((1, other), (2, home)):
        cluster.move_slot(target)
        assert is_refused(client)
        assert admin.recover()
        assert split(token_within(client))[0] == epoch
        assert split(token_within(admin))[0] == epoch
        lock = admin.lock("r", ttl=MAX_TTL)
        lock.acquire()
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(token_within, client)
            assert eventually(is_heard)
            lock.release()
            waiting.result(60.0)


def test_tasks_go_where_the_keys_have_gone(started: ExitStack) -> None:
    cluster = started.enter_context(Cluster(2, replicas=True))

    async def one(authority: Redlock) -> int:
        while True:
            try:
                async with authority.lock("r", ttl=MAX_TTL, timeout=60.0) as token:
                    return token
            except QuorumError:
                await asyncio.sleep(0.05)

    def move() -> None:
        cluster.move_slot(next(each for each in cluster.others() if fact(each, "role") == "master"))

    async def main() -> None:
        with Redlock(cluster.url(), **PATIENT) as authority:
            await asyncio.to_thread(authority.init, base=0, max_ttl=MAX_TTL)
            found: list[list[int]] = []
            for change in (lambda: None, lambda: cluster.fail_over(kill=False), move):
                await asyncio.to_thread(change)
                found.append(sorted(await asyncio.gather(*(one(authority) for _ in range(5)))))
        flat = [token for tokens in found for token in tokens]
        assert flat == sorted(set(flat))
        assert [{split(token)[0] for token in tokens} for tokens in found] == [{0}, {1}, {2}]

    asyncio.run(main())


def test_any_named_server_of_a_cluster_is_enough(started: ExitStack) -> None:
    cluster = started.enter_context(Cluster(3, replicas=True))
    door, other = [node for node in cluster.others()[:3] if cluster._owner(node, 0)][:2]
    with Redlock(cluster.url(door, other), **PATIENT) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
        assert token_within(authority) == 1
        door.kill()
        authority.close()
        assert eventually(cluster.is_whole, 30.0)
        assert token_within(authority) == 2
    assert "refused" in refusal_of(cluster.url(door))


def test_server_that_does_not_have_the_keys_says_so(started: ExitStack) -> None:
    """No server has the slot yet. And a socket leads no further than its server: others listen elsewhere."""
    uncovered = started.enter_context(Cluster(1, covered=False))
    for url in (uncovered.url(), uncovered.nodes[0].url):
        said = refusal_of(url)
        assert "cluster is down" in said
        assert "--cluster check" in said
    cluster = started.enter_context(Cluster(2, settings={"unixsocket": "s"}))
    sockets = {node: ask(node, "CONFIG", "GET", "dir")[1].decode() + "/s" for node in cluster.nodes}
    with Redlock(f"unix://{sockets[cluster.primary()]}") as authority:
        authority.init(base=0)
        assert token_within(authority) == 1
    (other,) = cluster.others()
    assert "redis+cluster://" in refusal_of(f"unix://{sockets[other]}")


@pytest.fixture
def tls_server(tmp_path: Path, started: ExitStack) -> tuple[str, Certificates]:
    """The address of a server that speaks TLS itself, and wants a certificate and a user from its clients."""
    for program in ("openssl", "redis-server"):
        if not shutil.which(program):
            pytest.skip(f"no {program} on PATH: install it to run this test")
    made = Certificates.make(tmp_path / "certificates")
    with reserve_port() as reservation:
        port = reservation.getsockname()[1]
        settings = {
            "tls-port": str(port),
            "tls-cert-file": str(made.server.certificate),
            "tls-key-file": str(made.server.key),
            "tls-ca-cert-file": str(made.ca),
            "user": "locker on >secret ~{fencelock}* &{fencelock}* +@all -@dangerous +info",
        }
        nodes = Nodes(1, executable="redis-server", settings=settings)
        try:
            nodes.start()
        except ServerError as error:
            pytest.skip(f"this redis-server was built without TLS: {error}")
        started.enter_context(nodes)
    return f"localhost:{port}", made


def test_server_with_tls_and_users_is_a_node(tls_server: tuple[str, Certificates]) -> None:
    address, made = tls_server
    host, port = address.split(":")
    trusting: dict[str, Any] = {
        "ssl_ca_certs": str(made.ca),
        "ssl_certfile": str(made.certificate),
        "ssl_keyfile": str(made.key),
    }
    url = f"rediss://locker:secret@{address}?{urlencode(trusting)}"
    with Redlock(url) as authority:
        assert authority.nodes == (f"rediss://{address}",)
        authority.init(base=0)
        assert token_within(authority) == 1
    client = redis.Redis(host, int(port), username="locker", password="secret", ssl=True, **trusting)
    with Redlock(client) as authority:
        assert token_within(authority) == 2
    assert "user or password" in refusal_of(url.replace("secret@", "guess@"))
    assert "certificate" in refusal_of(f"rediss://locker:secret@{address}").lower()
    assert refusal_of(f"redis://locker:secret@{address}")
