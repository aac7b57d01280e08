"""The servers of etcd and ZooKeeper that other tests rely on do what they say."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psutil
import pytest

from proof.servers import Etcd, ServerError, ZooKeeper, zookeeper
from proof.servers.etcd import PASSWORD, PREFIX, USER
from tests.polling import eventually

needs_zookeeper = pytest.mark.skipif(
    bool(zookeeper.missing()), reason=f"no ZooKeeper: this machine lacks {zookeeper.missing()}"
)


@pytest.fixture
def cluster(etcd_cluster: Etcd) -> Iterator[Etcd]:
    """The members that all tests share, well before and after the test."""
    etcd_cluster.heal()
    yield etcd_cluster
    etcd_cluster.heal()


@pytest.fixture
def one_server(zookeeper_server: ZooKeeper) -> Iterator[ZooKeeper]:
    """The ZooKeeper that all tests share, well before and after the test."""
    zookeeper_server.heal()
    yield zookeeper_server
    zookeeper_server.heal()


@contextmanager
def kazoo_client(servers: ZooKeeper) -> Iterator[Any]:
    """A client of ZooKeeper that is not ours."""
    client = pytest.importorskip("kazoo.client").KazooClient(servers.hosts)
    client.start(timeout=10)
    yield client
    client.stop()
    client.close()


def value_at(cluster: Etcd, member: int, key: str) -> str:
    """Return what one member has, as the majority sees it."""
    return cluster.ctl("get", "--print-value-only", key, member=member).rstrip("\n")


def test_members_are_three_and_agree(cluster: Etcd) -> None:
    """What one member took, each has; each URL leads to a process of its own."""
    assert cluster.is_healthy()
    assert cluster.url == "etcd://" + ",".join(f"127.0.0.1:{port}" for port in cluster.client_ports)
    assert [urlsplit(url).port for url in cluster.urls] == cluster.client_ports
    assert len({cluster.process(member).pid for member in range(3)}) == 3
    before = cluster.revision()
    cluster.ctl("put", "key", "value", member=0)
    assert cluster.revision() == before + 1
    assert [value_at(cluster, member, "key") for member in range(3)] == ["value"] * 3


def test_path_of_a_url_is_new(etcd_url: str) -> None:
    """A test has a path of its own behind all hosts."""
    parts = urlsplit(etcd_url)
    assert parts.path.startswith("/")
    assert parts.path.count("test_") == 1


@pytest.mark.parametrize("farewell", ["kill", "stop"])
def test_follower_comes_back_with_what_it_missed(cluster: Etcd, farewell: str) -> None:
    """The others go on without it."""
    away = (cluster.leader() + 1) % 3
    pid = cluster.process(away).pid
    getattr(cluster, farewell)(away)
    assert not psutil.pid_exists(pid)
    assert not cluster.is_healthy()
    cluster.ctl("put", "missed", farewell)
    cluster.come_back(away)
    cluster.await_healthy()
    assert value_at(cluster, away, "missed") == farewell


@pytest.mark.timed
@pytest.mark.parametrize("fate", ["kill", "pause"])
def test_leader_is_replaced(cluster: Etcd, fate: str) -> None:
    """A paused leader keeps its process, and hears of the other one when it goes on."""
    old = cluster.leader()
    getattr(cluster, fate)(old)
    new = cluster.leader()
    assert new != old
    assert cluster.is_running(old) == (fate == "pause")
    assert not cluster.is_healthy()
    cluster.heal()
    assert cluster.leader() == new


@pytest.mark.timed
def test_isolated_leader_is_replaced() -> None:
    """A client still reaches it, and it can promise nothing; then it takes what the others wrote."""
    with Etcd(partitions=True) as cluster:
        old = cluster.leader()
        with cluster.isolated(old):
            assert eventually(lambda: cluster.leader() != old)
            cluster.ctl("put", "key", "value", member=cluster.leader())
            with pytest.raises(ServerError, match="deadline exceeded"):
                cluster.ctl("--command-timeout=1s", "get", "key", member=old)
            assert (
                cluster.ctl("get", "--consistency=s", "--print-value-only", "key", member=old).strip() == ""
            )
        cluster.await_healthy()
        assert value_at(cluster, old, "key") == "value"


@pytest.mark.long
@pytest.mark.timed
def test_isolated_follower_reaches_nobody_also_when_it_starts_again() -> None:
    """It passes no renewal of a lease on. It is cut off by its number, though it is known by its process."""
    with Etcd(partitions=True) as cluster:
        away = (cluster.leader() + 1) % 3
        lease = int(cluster.ctl("lease", "grant", "100").split()[1], 16)
        assert renews(cluster, away, lease)
        with cluster.isolated(away):
            assert not renews(cluster, away, lease)
            cluster.kill(away)
            cluster.come_back(away)
            with pytest.raises(ServerError, match="do not find together"):
                cluster.await_healthy(3)
        cluster.await_healthy()


def renews(cluster: Etcd, member: int, lease: int) -> bool:
    """Whether a member renews a lease within two seconds; etcdctl would try for ten."""
    with suppress(OSError):
        return "TTL" in cluster._request(member, "v3/lease/keepalive", {"ID": lease}).get("result", {})
    return False


def test_only_members_with_a_proxy_are_isolated(cluster: Etcd) -> None:
    """Otherwise nothing would happen, and a test prove nothing."""
    with pytest.raises(ServerError, match="partitions=True"), cluster.isolated(0):
        pass


def test_snapshot_takes_revisions_back(cluster: Etcd, tmp_path: Path) -> None:
    """Nothing in the answers shows it: ports, names and the cluster's identity stay."""
    cluster.ctl("put", "key", "before")
    revision, ports, told = cluster.revision(), cluster.client_ports, identities(cluster)
    cluster.snapshot(tmp_path / "snapshot")
    for _ in range(5):
        cluster.ctl("put", "key", "after")
    assert cluster.revision() == revision + 5
    cluster.restore(tmp_path / "snapshot")
    assert cluster.revision() == revision
    assert [value_at(cluster, member, "key") for member in range(3)] == ["before"] * 3
    assert (cluster.client_ports, identities(cluster)) == (ports, told)


def identities(cluster: Etcd) -> list[tuple[int, int]]:
    """Return what each member calls the cluster, and itself."""
    statuses = json.loads(cluster.ctl("endpoint", "status", "--write-out=json"))
    headers = [each["Status"]["header"] for each in statuses]
    return sorted((header["cluster_id"], header["member_id"]) for header in headers)


def test_compaction_forgets(cluster: Etcd) -> None:
    """An old revision can be read until it is compacted."""
    cluster.ctl("put", "key", "old")
    old = cluster.revision()
    cluster.ctl("put", "key", "new")
    assert cluster.ctl("get", "--print-value-only", f"--rev={old}", "key").strip() == "old"
    cluster.compact()
    with pytest.raises(ServerError, match="has been compacted"):
        cluster.ctl("get", f"--rev={old}", "key")


def test_emptied_cluster_has_no_keys_and_no_leases(cluster: Etcd) -> None:
    """Leases without keys too."""
    for number in range(3):
        cluster.ctl("put", f"key{number}", "value")
        cluster.ctl("lease", "grant", "100")
    cluster.empty()
    assert cluster.ctl("get", "", "--from-key").strip() == ""
    assert cluster.ctl("lease", "list").split()[:2] == ["found", "0"]


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_users_have_rights_below_a_prefix(tls: bool) -> None:
    """By a password, and over TLS by the name in the certificate; `disable_auth` takes it back."""
    with Etcd(1, tls=tls) as cluster:
        cluster.enable_auth()
        assert cluster.is_healthy()
        login = f"--user={USER}:{PASSWORD}"
        cluster.ctl(login, "put", f"{PREFIX}key", "value")
        with pytest.raises(ServerError, match="permission denied"):
            cluster.ctl(login, "put", "/other/key", "value")
        with pytest.raises(ServerError, match="authentication failed"):
            cluster.ctl(f"--user={USER}:wrong", "get", f"{PREFIX}key")
        cluster._has_auth = False  # so that root's name is not shown
        if tls:
            cluster.ctl("put", f"{PREFIX}key", "by certificate")
            with pytest.raises(ServerError, match="permission denied"):
                cluster.ctl("put", "/other/key", "value")
        else:
            with pytest.raises(ServerError, match="user name is empty"):
                cluster.ctl("get", f"{PREFIX}key")
        cluster._has_auth = True
        revision = cluster.revision()
        cluster.disable_auth()
        cluster.ctl("put", "/other/key", "value")
        assert cluster.revision() == revision + 1


def test_members_with_tls_demand_a_certificate() -> None:
    """The certificate of the server is good for its address.

    A client without a certificate of its own is refused.
    """
    with Etcd(1, tls=True) as cluster:
        assert cluster.tls is not None
        assert cluster.url == f"etcds://127.0.0.1:{cluster.client_ports[0]}"
        context = ssl.create_default_context(cafile=cluster.tls.ca)
        connection = http.client.HTTPSConnection("127.0.0.1", cluster.client_ports[0], context=context)
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            answer_of(connection)
        bob = cluster.tls.make_client("bob")
        context.load_cert_chain(bob.certificate, bob.key)
        connection = http.client.HTTPSConnection("127.0.0.1", cluster.client_ports[0], context=context)
        assert answer_of(connection) == 200


def answer_of(connection: http.client.HTTPConnection) -> int:
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.usefixtures("one_server")
def test_wiped_zookeeper_begins_again() -> None:
    """Its transactions are counted from the beginning, on the same port."""
    with ZooKeeper() as server:
        url = server.url
        with kazoo_client(server) as client:
            for number in range(20):
                client.ensure_path(f"/kept/{number}")
            before = client.exists("/kept/19").czxid
        server.wipe()
        assert server.is_healthy()
        assert server.url == url
        with kazoo_client(server) as client:
            assert client.exists("/kept") is None
            client.ensure_path("/kept/19")
            assert client.exists("/kept/19").czxid < before


def test_killed_zookeeper_comes_back_with_its_data(one_server: ZooKeeper) -> None:
    """It is gone when `kill` returns; without its data only if that is wanted."""
    with kazoo_client(one_server) as client:
        client.ensure_path("/kept")
    pid = one_server.process(0).pid
    for blank in (False, True):
        one_server.kill(0)
        assert not psutil.pid_exists(pid)
        assert not one_server.is_healthy()
        one_server.come_back(0, blank=blank)
        one_server.await_healthy()
        with kazoo_client(one_server) as client:
            assert (client.exists("/kept") is None) == blank


def test_paused_zookeeper_answers_nothing(one_server: ZooKeeper) -> None:
    """It takes connections, and says nothing until it goes on."""
    one_server.pause(0)
    with socket.create_connection(("127.0.0.1", one_server.client_ports[0])) as connection:
        connection.sendall(b"ruok")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(4)
        one_server.resume(0)
        connection.settimeout(10)
        assert connection.recv(4) == b"imok"


def test_emptied_path(one_server: ZooKeeper, zookeeper_url: str) -> None:
    """What lies below goes too; what lies beside stays."""
    path = urlsplit(zookeeper_url).path
    with kazoo_client(one_server) as client:
        client.ensure_path(f"{path}/below/it")
        client.ensure_path("/beside")
        one_server.empty(path)
        assert client.exists(path) is None
        assert client.exists("/beside")


@needs_zookeeper
@pytest.mark.long
def test_ensemble_of_zookeeper_replaces_its_leader() -> None:
    """The old leader comes back blank, as a follower with what all have."""
    with ZooKeeper(3) as servers:
        with kazoo_client(servers) as client:
            client.ensure_path("/kept")
        old = servers.leader()
        servers.kill(old)
        assert servers.leader() != old
        servers.come_back(old, blank=True)
        servers.await_healthy()
        assert servers.mode(old) == "follower"
        paused = servers.leader()
        servers.pause(paused)
        assert servers.leader() != paused
        servers.heal()
        with kazoo_client(servers) as client:
            assert client.exists("/kept")


SERVERS: Final[dict[str, Callable[[], str]]] = {
    "Etcd(partitions=True)": str,
    "ZooKeeper()": zookeeper.missing,
}


@pytest.mark.timed
@pytest.mark.parametrize("made", SERVERS)
def test_servers_end_with_a_killed_program(made: str) -> None:
    """Their folder goes too."""
    if lacks := SERVERS[made]():
        pytest.skip(f"no {made}: this machine lacks {lacks}")
    script = f"""
import json, time
from proof.servers import Etcd, ZooKeeper
servers = {made}.start()
pids = [each[0].pid for each in servers._workspace._belongings.servers.values()]
print(json.dumps([str(servers.folder), pids]), flush=True)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        folder, pids = json.loads(program.stdout.readline())
        assert len(pids) == (4 if "Etcd" in made else 1)
        assert all(map(psutil.pid_exists, pids))
        program.send_signal(signal.SIGKILL)
    assert eventually(lambda: not any(map(psutil.pid_exists, pids)))
    assert eventually(lambda: not Path(folder).exists())
