"""Nodes that Sentinel watches: a promoted server must not vote before it is admitted again.

The tests use real services and real failovers. No client knows what a promoted server has missed. A server
that was replaced may go on to answer on connections that were opened to it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Self

import pytest
import redis
import redis.asyncio.sentinel
import redis.sentinel

from fencelock import Redlock
from fencelock.authority.redlock.transport import connector
from fencelock.errors import FencelockError, QuorumError
from fencelock.tokens import MAX_COUNTER, split
from proof.servers.nodes import LOOPBACK, Nodes
from tests.polling import eventually
from tests.redlock.groups import MAX_TTL, PATIENT, Watched, ask, fact, is_refused, token_within
from tests.redlock.stage import NODE_KEY

pytestmark = [pytest.mark.timed, pytest.mark.long]


@pytest.fixture(scope="module")
def calm() -> Iterator[Watched]:
    """One service without failovers. A test may do what it likes with its data."""
    with Watched() as watched:
        yield watched.start()


@pytest.fixture
def service(calm: Watched) -> Watched:
    """The same, blank."""
    ask(calm.primary(), "FLUSHALL")
    return calm


@pytest.fixture
def watch() -> Iterator[Callable[..., Watched]]:
    """A factory of services that end with the test."""
    with ExitStack() as stack:
        yield lambda services=1, **options: stack.enter_context(Watched(services, **options)).start()


def test_service_is_a_node_by_its_url(service: Watched) -> None:
    """The sentinels say which server it is."""
    with Redlock(service.url()) as authority:
        assert authority.init(base=0)
        for expected in (1, 2, 3):
            with authority.lock("r") as token:
                assert token == expected
    assert ask(service.primary(), "HGET", NODE_KEY, "e") == b"0"


def test_every_vote_proves_its_server(service: Watched) -> None:
    """Also where no replica is attached at that moment: the address alone says that one may be."""
    with Redlock(service.url()) as authority:
        authority.init()
        with authority.lock("r"):
            pass
        connection = authority._connections._nodes.connection(0)
        assert connection is not None
        assert connection.identity.replid


def test_client_of_a_service_is_a_node(service: Watched) -> None:
    """Made by `master_for`, for blocking and for asyncio code."""
    world: Any = redis.sentinel  # redis-py has no types for it
    manager = world.Sentinel(service.sentinel_addresses, socket_timeout=2)
    with Redlock(manager.master_for(service.name(), decode_responses=True, protocol=3)) as authority:
        authority.init(base=0)
        with authority.lock("r") as token:
            assert token == 1
        grant = asyncio.run(authority.aio.acquire(("r",), ttl=5, timeout=0))
        assert grant.tokens == (2,)
        assert authority.release(grant) is True


def test_passwords_of_servers_and_sentinels_are_two(watch: Callable[..., Watched]) -> None:
    """In the URL: the servers' where it always stands, the sentinels' as a setting."""
    service = watch(password="data", sentinel_password="watch")
    url = service.url(login=":data@", query="?sentinel_password=watch")
    with Redlock(url) as authority:
        authority.init(base=0)
        with authority.lock("r") as token:
            assert token == 1
    for wrong in (service.url(login=":data@"), service.url(query="?sentinel_password=watch")):
        with Redlock(wrong, outage_grace=0.0) as authority, pytest.raises(QuorumError, match=r"(?i)auth"):
            authority.lock("r", timeout=0).acquire()


def test_wrong_name_is_told_with_those_that_are_right(service: Watched) -> None:
    """At once: it does not get better."""
    url = service.url().replace(service.name(), "nonesuch")
    began = time.monotonic()
    with (
        Redlock(url, outage_grace=10.0) as authority,
        pytest.raises(QuorumError, match=r"'nonesuch'.*service-0"),
    ):
        authority.lock("r", timeout=20).acquire()
    assert time.monotonic() - began < 5.0


def test_sentinel_named_as_a_node_is_told_how_to_be_named(service: Watched) -> None:
    """A port mixed up; and the other way round, a server that is no sentinel."""
    sentinel = "redis://{}:{}".format(*service.sentinel_addresses[0])
    with Redlock(sentinel) as authority, pytest.raises(QuorumError, match=r"redis\+sentinel://"):
        authority.lock("r", timeout=0).acquire()
    server = f"redis+sentinel://127.0.0.1:{service.primary().port}/x"
    with (
        Redlock(server, outage_grace=0.0) as authority,
        pytest.raises(QuorumError, match="0 of its 1 sentinels answer"),
    ):
        authority.lock("r", timeout=0).acquire()


def test_replica_named_as_a_node_is_told_of_sentinels(service: Watched) -> None:
    with (
        Redlock(service.replica().url) as authority,
        pytest.raises(QuorumError, match=r"only primaries.*redis\+sentinel://"),
    ):
        authority.lock("r", timeout=0).acquire()


def test_majority_of_the_sentinels_has_to_answer(watch: Callable[..., Watched]) -> None:
    """One that is cut off may name a primary that has been replaced. Connections that are open need none."""
    service = watch()
    with Redlock(service.url(), **PATIENT) as authority:
        authority.init(base=0)
        with authority.lock("other"):
            pass
        service.kill_sentinel(0)
        with Redlock(service.url(), **PATIENT) as other, other.lock("r") as token:
            assert token == 1
        service.kill_sentinel(1)
        with (
            Redlock(service.url(), **PATIENT) as late,
            pytest.raises(QuorumError, match="1 of its 3 sentinels answer, and a majority is 2"),
        ):
            late.lock("r", timeout=0).acquire()
        with authority.lock("r") as token:
            assert token == 2


def test_a_majority_of_the_sentinels_names_the_primary(
    watch: Callable[..., Watched], service: Watched
) -> None:
    """One that says something else changes nothing, though it knows of a later failover; of two it blocks."""
    other = watch()
    other.fail_over(kill=False)
    ours = [f"{LOOPBACK}:{port}" for _, port in service.sentinel_addresses[:2]]
    hosts = [f"{LOOPBACK}:{other.sentinel_addresses[0][1]}", *ours]
    with Redlock(f"redis+sentinel://{','.join(hosts)}/{service.name()}") as authority:
        authority.init(base=0)
    assert ask(service.primary(), "EXISTS", NODE_KEY) == 1
    assert ask(other.primary(), "EXISTS", NODE_KEY) == 0
    with (
        Redlock(f"redis+sentinel://{','.join(hosts[:2])}/{service.name()}", outage_grace=0) as authority,
        pytest.raises(QuorumError, match="name different primaries"),
    ):
        authority.lock("r", timeout=0).acquire()


def test_promoted_server_votes_when_it_has_been_admitted(watch: Callable[..., Watched]) -> None:
    """After the primary's death: refused at first, then in a new epoch, and at the same URL."""
    service = watch()
    with Redlock(service.url(), recover=False, **PATIENT) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
        assert token_within(authority) == 1
        service.fail_over(kill=True)
        assert is_refused(authority)
        assert ask(service.primary(), "HGET", NODE_KEY, "e") == b"0"
        assert authority.recover()
        token = token_within(authority)
        assert split(token)[0] == 1


class Workers:
    """Threads that take a lock as often as they can, each through a client of its own.

    Attributes:
        held: for every lease when it was asked for, when it was granted, and its token.
    """

    def __init__(self, urls: str, count: int = 3) -> None:
        self.held: list[tuple[float, float, int]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(urls,)) for _ in range(count)]

    def _work(self, urls: str) -> None:
        with Redlock(urls, **PATIENT) as authority:
            while not self._stop.is_set():
                began = time.monotonic()
                with suppress(FencelockError):
                    lock = authority.lock("r", ttl=MAX_TTL, timeout=2.0, renew=False, if_lost="warn")
                    with lock as token:
                        self.held.append((began, time.monotonic(), token))
                        time.sleep(0.005)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def work_on(self) -> bool:
        """Whether leases are granted still, or again."""
        before = len(self.held)
        return eventually(lambda: len(self.held) > before + 3, 20.0)

    def check(self) -> None:
        """No token twice; and none below one that was granted before it was asked for."""
        tokens = [token for _, _, token in self.held]
        assert len(set(tokens)) == len(tokens)
        by_end = sorted(self.held, key=lambda lease: lease[1])
        for began, _, token in self.held:
            earlier = [other for _, ended, other in by_end if ended < began]
            assert token > max(earlier, default=0)


@pytest.mark.parametrize("kill", [True, False], ids=["died", "ordered"])
def test_tokens_rise_over_failovers_of_the_only_node(watch: Callable[..., Watched], kill: bool) -> None:
    """There and back again. In between there are no locks, for as long as the longest lease."""
    service = watch()
    with Redlock(service.url(), **PATIENT) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
    with Workers(service.url()) as workers:
        assert workers.work_on()
        for _ in range(2):
            service.fail_over(kill=kill)
            assert workers.work_on()
            if kill:
                next(node for node in service.services[0] if not node.is_running).restart(keep_data=False)
            assert eventually(lambda: _replicas_of(service) == 1, 30.0)
    workers.check()
    assert len({split(token)[0] for _, _, token in workers.held}) >= 3  # several may admit it at once


def _replicas_of(service: Watched, number: int = 0) -> int:
    """Return how many replicas the sentinels' primary has, all of them up to date."""
    primary = service.primary(number)
    with redis.Redis.from_url(primary.url) as client:
        facts: Any = client.info("replication")
    states = [
        value["state"] for name, value in facts.items() if name.startswith("slave") and name[5:].isdigit()
    ]
    return states.count("online")


def test_quorum_of_services_goes_on_while_one_fails_over(watch: Callable[..., Watched]) -> None:
    """Two of three are a majority; the third votes again when it has been admitted."""
    watched = watch(3)
    urls = ",".join(watched.url(number) for number in range(3))
    with Redlock(urls, **PATIENT) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
        with Workers(urls) as workers:
            for number, kill in ((0, True), (1, False)):
                assert workers.work_on()
                watched.fail_over(number, kill=kill)
                assert workers.work_on()
                assert eventually(lambda: all(s.state.value == "admitted" for s in authority.status()), 20.0)
            assert workers.work_on()
        workers.check()
        assert max(token for _, _, token in workers.held) > MAX_COUNTER
        (epoch,) = {status.epoch for status in authority.status()}
        assert epoch is not None
        assert epoch >= 2  # several may admit one at once


@pytest.mark.parametrize("verified", [True, False], ids=["every vote", "the socket"])
def test_failover_and_failback_past_an_open_connection(
    make_nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch, verified: bool
) -> None:
    """The same process answers on the same connection, with what the other one had kept of its data.

    Every vote proves the server; one that asks only the socket is refused as well, for the memory is another.
    """
    if not verified:
        identify = connector._identify
        monkeypatch.setattr(connector, "_identify", lambda *a, **o: replace(identify(*a, **o), replid=""))
    first, second = make_nodes(2, settings={"repl-diskless-sync-delay": "0"})
    ask(second, "REPLICAOF", first.host, first.port)
    assert eventually(lambda: fact(second, "master_link_status") == "up")
    with Redlock(first.url, recover=False, **PATIENT) as authority:
        authority.init(base=0)
        with authority.lock("r") as token:
            assert token == 1
        written = int(fact(first, "master_repl_offset"))
        assert eventually(lambda: int(fact(second, "slave_repl_offset")) >= written)
        ask(second, "REPLICAOF", "NO", "ONE")
        with authority.lock("r") as token:
            assert token == 2
        ask(first, "REPLICAOF", second.host, second.port)
        assert eventually(lambda: fact(first, "master_link_status") == "up")
        ask(first, "REPLICAOF", "NO", "ONE")
        assert is_refused(authority)


@pytest.mark.usefixtures("never_look")
def test_one_who_waits_is_called_by_the_server_that_took_over(watch: Callable[..., Watched]) -> None:
    """A waiting client listens where the locks have gone."""
    service = watch()
    with Redlock(service.url(), **PATIENT) as holder, Redlock(service.url(), **PATIENT) as waiter:
        holder.init(base=0, max_ttl=MAX_TTL)
        assert token_within(waiter) == 1
        for round_number in range(2):
            if round_number:
                service.fail_over(kill=False)
                token_within(holder)
                token_within(waiter)
            lock = holder.lock("r", ttl=MAX_TTL, renew=True)
            lock.acquire()
            with suppress(FencelockError):  # so that it stands in line at the next
                waiter.lock("r", ttl=MAX_TTL, timeout=0.5).acquire()
            began = time.monotonic()
            opener = threading.Timer(0.3, lock.release)
            opener.start()
            with waiter.lock("r", ttl=MAX_TTL, timeout=10.0):
                assert time.monotonic() - began < 2.0
            opener.join()
