"""The lock does the same on every series of server programs that is found.

Each of these runs the scripts that it needs on a real server: alone, behind Sentinel, in a cluster.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.redlock.admin import change_nodes
from fencelock.errors import LockTimeoutError, QuorumError
from fencelock.tokens import split
from proof.servers import Node, Nodes, ServerError
from proof.servers.nodes import reserve_port
from tests.conftest import server_programs
from tests.redlock.groups import (
    MAX_TTL,
    PATIENT,
    Cluster,
    Watched,
    ask,
    follow,
    is_refused,
    promote,
    token_within,
)
from tests.redlock.stage import NODE_KEY

pytestmark = pytest.mark.long


@pytest.fixture
def authority(any_server: Node) -> Iterator[Redlock]:
    """A Redlock on one node, with counters from 0."""
    with Redlock(any_server.url, **PATIENT) as made:
        made.init(base=0, max_ttl=MAX_TTL)
        yield made


def test_lock_is_taken_kept_exchanged_and_given_back(authority: Redlock) -> None:
    """One resource and several, blocking and from asyncio."""
    lock = authority.lock("r", ttl=MAX_TTL)
    with lock as token:
        assert token == 1
        lock.extend(MAX_TTL)
        assert lock.remint() == 2
        with pytest.raises(LockTimeoutError):
            authority.acquire(("r", "s"), ttl=MAX_TTL, timeout=0)
    with authority.lock("r", "s", ttl=MAX_TTL) as tokens:
        assert tokens == (3, 1)

    async def main() -> int:
        async with authority.lock("r", ttl=MAX_TTL) as token:
            return token

    assert asyncio.run(main()) == 4


@pytest.mark.usefixtures("never_look")
@pytest.mark.parametrize("fair", [True, False])
def test_those_who_wait_are_called(authority: Redlock, any_server: Node, fair: bool) -> None:
    """The threads have clients of their own, and no client would look again in time."""
    tokens: list[int] = []

    def work() -> None:
        with Redlock(any_server.url) as own:
            for _ in range(10):
                with own.lock("r", ttl=MAX_TTL, timeout=20.0, fair=fair) as token:
                    tokens.append(token)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert tokens == list(range(1, 31))
    assert authority.status()[0].epoch == 0


@pytest.mark.parametrize("keep_data", [True, False])
def test_node_that_restarted_is_admitted_again(server_program: Path, keep_data: bool) -> None:
    """With its data and without, beside two that remember; the epoch says so in the token."""
    with (
        Nodes(3, executable=server_program, appendfsync="always") as nodes,
        Redlock(nodes.urls, **PATIENT) as authority,
    ):
        authority.init(base=0, max_ttl=MAX_TTL)
        assert token_within(authority) == 1
        nodes[0].restart(keep_data=keep_data)
        epoch, counter = split(token_within(authority))
        assert (epoch, counter > 1) == (0, True)  # an attempt that a slow disk failed has minted, too
        assert authority.recover()
        nodes[1].kill()
        assert split(token_within(authority))[0] >= 1  # it may have been begun in the background as well


def with_older_data_by_replication(server: Node, copy: Node) -> Callable[[], None]:
    """Have a server copied now; return what makes it follow the copy, and be promoted again."""
    follow(copy, server)
    promote(copy)

    def go_back() -> None:
        follow(server, copy)
        promote(server)

    return go_back


def with_older_data_by_file(server: Node, _: Node) -> Callable[[], None]:
    """Have a server write a file now; return what makes it load that."""
    ask(server, "SAVE")
    return lambda: ask(server, "DEBUG", "RELOAD", "NOSAVE")


#: Ways in which a server's data go back in time, while its process and its connections live on.
WAYS_BACK = [with_older_data_by_replication, with_older_data_by_file]


@pytest.fixture
def one_that_goes_back(server_program: Path) -> Iterator[tuple[Nodes, Node]]:
    """Three nodes that let local clients debug them, and a server to copy one to."""
    is_old = server_programs().get("redis-6") == server_program  # it knows no such setting
    settings = {} if is_old else {"enable-debug-command": "local"}
    with Nodes(4, executable=server_program, settings=settings) as made:
        yield made, made[3]


@pytest.mark.parametrize("prepare", WAYS_BACK)
def test_node_with_older_data_in_the_same_process_does_not_vote(
    one_that_goes_back: tuple[Nodes, Node], prepare: Callable[[Node, Node], Callable[[], None]]
) -> None:
    """The socket that is older than the copy, and a new one, are refused until the node has been admitted."""
    servers, copy = one_that_goes_back
    with Redlock(servers[0].url, recover=False, **PATIENT) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
        assert token_within(authority) == 1
        go_back = prepare(servers[0], copy)
        assert [token_within(authority) for _ in range(5)] == [2, 3, 4, 5, 6]
        go_back()
        assert is_refused(authority)
        with Redlock(servers[0].url, recover=False, **PATIENT) as newcomer:
            assert is_refused(newcomer)
        assert authority.recover()
        assert split(token_within(authority)) == (1, 1)


@pytest.mark.parametrize("prepare", WAYS_BACK)
def test_minority_with_older_data_costs_no_token(
    one_that_goes_back: tuple[Nodes, Node], prepare: Callable[[Node, Node], Callable[[], None]]
) -> None:
    """One of three nodes goes back, and one of the other two is away: there is no majority meanwhile."""
    servers, copy = one_that_goes_back
    with Redlock(servers.urls[:3], recover=False, **PATIENT) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
        assert token_within(authority) == 1
        go_back = prepare(servers[0], copy)
        servers[2].pause()
        assert [token_within(authority) for _ in range(5)] == [2, 3, 4, 5, 6]
        servers[2].resume()
        go_back()
        servers[1].pause()
        assert is_refused(authority)
        servers[1].resume()
        epoch, counter = split(token_within(authority))
        assert epoch == 0
        assert counter > 6
        assert authority.recover()
        assert split(token_within(authority))[0] == 1


def test_nodes_take_the_place_of_others(any_server: Node, authority: Redlock, nodes: Nodes) -> None:
    """A server of any series in a list with others."""
    assert token_within(authority) == 1
    assert change_nodes([any_server.url], [any_server.url, *nodes.urls[:2]]).done
    with Redlock([any_server.url, *nodes.urls[:2]]) as together:
        assert split(token_within(together))[0] == 1


def test_primary_that_lacks_replicas_is_waited_for(
    authority: Redlock, any_server: Node, server_program: Path
) -> None:
    """`min-replicas-to-write`: it refuses to write, which passes. In Redis 6.2 scripts write all the same."""
    ask(any_server, "CONFIG", "SET", "min-replicas-to-write", 1)
    if server_programs().get("redis-6") == server_program:
        assert token_within(authority)
        return
    with pytest.raises(QuorumError, match="NOREPLICAS"):
        authority.lock("r", ttl=MAX_TTL, timeout=0).acquire()
    opener = threading.Timer(0.2, ask, (any_server, "CONFIG", "SET", "min-replicas-to-write", 0))
    opener.start()
    with authority.lock("r", ttl=MAX_TTL, timeout=10.0):
        pass
    opener.join()


def test_service_fails_over(server_program: Path) -> None:
    """Sentinel of the same series promotes a replica, which votes when it has been admitted."""
    with (
        Watched(executable=server_program).start() as service,
        Redlock(service.url(), **PATIENT) as authority,
    ):
        authority.init(base=0, max_ttl=MAX_TTL)
        assert token_within(authority) == 1
        service.fail_over(kill=True)
        assert is_refused(authority)
        assert authority.recover()
        assert split(token_within(authority))[0] == 1


def test_cluster_fails_over(server_program: Path) -> None:
    """The lock does the same in a cluster. The failover calls a waiting client there."""
    with (
        Cluster(3, replicas=True, executable=server_program) as cluster,
        Redlock(cluster.url(), **PATIENT) as authority,
    ):
        authority.init(base=0, max_ttl=MAX_TTL)
        assert token_within(authority) == 1
        cluster.fail_over(kill=False)
        assert split(token_within(authority))[0] == 1
        with Redlock(cluster.url(), **PATIENT) as other:
            lock = other.lock("r", ttl=MAX_TTL)
            lock.acquire()
            opener = threading.Timer(0.2, lock.release)
            opener.start()
            assert split(token_within(authority))[0] == 1
            opener.join()
        assert ask(cluster.primary(), "HGET", NODE_KEY, "e") == b"1"


class Certificates:
    """An authority of certificates, and one from it for servers and clients alike."""

    def __init__(self, folder: Path) -> None:
        self.authority, self.certificate, self.key = (
            folder / f"{name}.pem" for name in ("ca", "cert", "key")
        )
        ca_key, request, names = folder / "ca.key", folder / "request", folder / "names"
        new_key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
        self._openssl(
            f"req -x509 {new_key} -days 2 -subj /CN=ca -addext keyUsage=critical,keyCertSign "
            f"-keyout {ca_key} -out {self.authority}"
        )
        self._openssl(f"req {new_key} -subj /CN=localhost -keyout {self.key} -out {request}")
        # Python 3.13 wants to be told what each key is for, and whose it is signed with.
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
        self._openssl(
            f"x509 -req -in {request} -CA {self.authority} -CAkey {ca_key} -CAcreateserial -days 2 "
            f"-extfile {names} -out {self.certificate}"
        )

    @staticmethod
    def _openssl(arguments: str) -> None:
        subprocess.run(["openssl", *arguments.split()], check=True, capture_output=True)  # noqa: S607


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[tuple[str, Certificates]]:
    """The address of a server that speaks TLS itself, and wants a certificate and a user from its clients."""
    for program in ("openssl", "redis-server"):
        if not shutil.which(program):
            pytest.skip(f"no {program} on PATH: install it to run this test")
    certificates = Certificates(tmp_path)
    with reserve_port() as reservation:
        port = reservation.getsockname()[1]
        settings = {
            "tls-port": str(port),
            "tls-cert-file": str(certificates.certificate),
            "tls-key-file": str(certificates.key),
            "tls-ca-cert-file": str(certificates.authority),
            "user": "locker on >secret ~{fencelock}* &{fencelock}* +@all -@dangerous +info",
        }
        nodes = Nodes(1, executable="redis-server", settings=settings)
        try:
            nodes.start()
        except ServerError as error:
            pytest.skip(f"this redis-server was built without TLS: {error}")
        with nodes:
            yield f"localhost:{port}", certificates


def test_server_with_tls_and_users_is_a_node(tls_server: tuple[str, Certificates]) -> None:
    """By a URL, and by a client; with the rights to a namespace's keys and channels only."""
    address, certificates = tls_server
    host, port = address.split(":")
    trusting: dict[str, Any] = {
        "ssl_ca_certs": str(certificates.authority),
        "ssl_certfile": str(certificates.certificate),
        "ssl_keyfile": str(certificates.key),
    }
    url = f"rediss://locker:secret@{address}?{urlencode(trusting)}"
    with Redlock(url) as authority:
        assert authority.nodes == (f"rediss://{address}",)
        authority.init(base=0)
        with authority.lock("r") as token:
            assert token == 1
    client = redis.Redis(host, int(port), username="locker", password="secret", ssl=True, **trusting)
    with Redlock(client) as authority, authority.lock("r") as token:
        assert token == 2
    for wrong, complaint in (
        (url.replace("secret@", "guess@"), "user or password"),
        (f"rediss://locker:secret@{address}", "(?i)certificate"),
        (f"redis://locker:secret@{address}", "."),
    ):
        with (
            Redlock(wrong, outage_grace=0.0) as authority,
            pytest.raises(QuorumError, match=complaint),
        ):
            authority.lock("r", timeout=0).acquire()
