"""A Redlock works with the nodes that it is given, or raises one clear error.

Tests give it URLs and clients of every kind, strangers, and lists that disagree.
"""

from __future__ import annotations

import asyncio
import http.server
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

import fencelock
from fencelock import Redlock
from fencelock._generators import run
from fencelock.authority.redlock.membership.initialise import DEFAULT_MAX_TTL, initialise
from fencelock.authority.redlock.membership.reports import NodeGroup
from fencelock.authority.redlock.protocol.acquire import make_attempt
from fencelock.authority.redlock.protocol.attempts import Attempt, Failed
from fencelock.authority.redlock.protocol.messages import Sleep
from fencelock.authority.redlock.transport.connector import Node
from fencelock.errors import (
    AuthorityError,
    FencelockError,
    MembershipError,
    NodesNotInitialisedError,
    QuorumError,
)
from fencelock.tokens import MAX_COUNTER, split
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY, SlowDoor

pytestmark = pytest.mark.timed


def free_port() -> int:
    """Return a port on which no program listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def failure_of(authority: Redlock) -> FencelockError:
    """Return what an acquisition comes to."""
    with authority, pytest.raises(FencelockError) as failure:
        authority.lock("r", timeout=0).acquire()
    return failure.value


@pytest.mark.parametrize(
    "url",
    [
        "",
        " , ",
        "127.0.0.1:6379",
        "http://127.0.0.1:6379",
        "redis://",
        "redis://:6379",
        "redis://h:port",
        "redis://h?no_such_setting=1",
        "redis://h:6379,nonsense",
    ],
)
def test_url_that_cannot_be_understood_is_refused_at_once(url: str) -> None:
    """Before anything is connected to, and with a word on what to write."""
    with pytest.raises(ValueError, match=r"redis://|setting"):
        Redlock(url)


@pytest.mark.parametrize("url", ["redis://me:secret@h:x", "redis://h:x?password=secret", "rediss://:secret@"])
def test_error_shows_no_password(url: str) -> None:
    """A URL in a message has lost its password, wherever that stood."""
    with pytest.raises(ValueError, match=r".") as failure:
        Redlock(url)
    assert "secret" not in str(failure.value)
    assert "secret" not in repr(Redlock("redis://me:secret@h:1"))


@pytest.mark.parametrize("nodes", [5, None, [5], [None], {"a": 1}.values(), redis.asyncio.Redis])
def test_node_of_the_wrong_kind_is_refused(nodes: Any) -> None:
    """Neither a URL nor a client."""
    with pytest.raises(TypeError):
        Redlock(nodes)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("namespace", ""),
        ("namespace", "a b"),
        ("namespace", "{x}"),
        ("node_timeout", 0),
        ("node_timeout", -1),
        ("connect_timeout", float("nan")),
        ("outage_grace", float("inf")),
        ("outage_grace", -0.1),
        ("verify", "always"),
        ("namespace", 5),
    ],
)
def test_setting_out_of_range_is_refused(setting: str, value: Any) -> None:
    """Before anything is connected to."""
    with pytest.raises(ValueError, match=r"."):
        Redlock("redis://h", **{setting: value})


def test_node_that_is_named_twice_is_refused() -> None:
    """The very same URL twice is seen without asking."""
    with pytest.raises(ValueError, match="named 2 times"):
        Redlock("redis://h:1,redis://h:2,redis://h:1")


def test_unreachable_node_is_named_with_its_reason() -> None:
    """No program listens on the port."""
    url = f"redis://127.0.0.1:{free_port()}"
    error = failure_of(Redlock(url, outage_grace=0.1))
    assert isinstance(error, QuorumError)
    assert "refused" in error.nodes[url]


def test_name_that_does_not_resolve_is_reported() -> None:
    """DNS failure: as unreachable, with what the resolver said; malformed names too."""
    for url in ("redis://no-such-host.invalid:6379", "redis://a..b:6379", f"redis://{'x' * 70}.invalid:1"):
        error = failure_of(Redlock(url, outage_grace=0))
        assert isinstance(error, QuorumError)
        assert len(error.nodes) == 1


class _Page(http.server.BaseHTTPRequestHandler):
    """Answers as a web server does."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_web_server_is_no_node() -> None:
    """Something else than Redis on the port: said at once, without waiting for an outage to pass."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            began = time.monotonic()
            error = failure_of(Redlock(f"redis://127.0.0.1:{server.server_port}", outage_grace=10.0))
            assert isinstance(error, QuorumError)
            assert time.monotonic() - began < 5.0
        finally:
            server.shutdown()
            thread.join()


def test_server_that_never_answers_costs_no_more_than_the_timeout() -> None:
    """A port that takes connections and says nothing."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        error = failure_of(
            Redlock(f"redis://127.0.0.1:{silent.getsockname()[1]}", connect_timeout=0.3, outage_grace=0.1)
        )
    assert isinstance(error, QuorumError)
    assert time.monotonic() - began < 1.5


def test_wrong_password_is_reported_as_such(make_nodes: Callable[..., Nodes]) -> None:
    """At once, and without showing it; the right one works."""
    nodes = make_nodes(1, password="right")
    began = time.monotonic()
    for url in (f"redis://:wrong@127.0.0.1:{nodes[0].port}", f"redis://127.0.0.1:{nodes[0].port}"):
        error = failure_of(Redlock(url, outage_grace=10.0))
        assert isinstance(error, QuorumError)
        assert "error" in next(iter(error.nodes.values()))
        assert "wrong@" not in str(error)
    assert time.monotonic() - began < 5.0
    with Redlock(nodes.urls) as authority:
        assert authority.init()


def test_user_without_rights_is_told_what_is_missing(nodes: Nodes) -> None:
    """An ACL that forbids scripts."""
    with redis.Redis.from_url(nodes[0].url) as admin, Redlock(nodes[0].url) as authority:
        authority.init()
        admin.acl_setuser(
            "weak", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-evalsha", "-eval"]
        )
        try:
            error = failure_of(Redlock(f"redis://weak:pw@127.0.0.1:{nodes[0].port}"))
        finally:
            admin.acl_deluser("weak")
    assert "evalsha" in str(error).lower()


def test_replica_is_no_node(make_nodes: Callable[..., Nodes]) -> None:
    """Only primaries grant locks."""
    nodes = make_nodes(2)
    with redis.Redis.from_url(nodes[1].url) as client:
        client.replicaof("127.0.0.1", nodes[0].port)
    error = failure_of(Redlock(nodes[1].url))
    assert "only primaries" in str(error)


def test_user_without_rights_to_channels_can_release(nodes: Nodes) -> None:
    """Waking the waiters is a courtesy; that it is forbidden must not leave locks behind."""
    with redis.Redis.from_url(nodes[0].url) as admin, Redlock(nodes[0].url) as authority:
        authority.init()
        admin.acl_setuser(
            "mute", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all"], reset_channels=True
        )
        try:
            with Redlock(f"redis://mute:pw@127.0.0.1:{nodes[0].port}") as mute, mute.lock("a", "b"):
                pass
            keys: Any = admin.keys()
            assert not [key for key in keys if b":l:" in key]
        finally:
            admin.acl_deluser("mute")


def test_votes_prove_their_server_once_there_has_been_a_replica(make_nodes: Callable[..., Nodes]) -> None:
    """Also while it happens to be detached: what may be promoted in its place is not told by the socket."""
    primary, replica = make_nodes(2)

    def replid_of_a_vote() -> str:
        opened = Node(primary.url, 1.0, verify_votes=False).open(NODE_KEY)
        opened.sock.close()
        return opened.identity.replid

    def has_replicas(count: int) -> bool:
        facts: Any = admin.info("replication")
        return bool(facts["connected_slaves"] == count)

    with redis.Redis.from_url(replica.url) as follower, redis.Redis.from_url(primary.url) as admin:
        assert not replid_of_a_vote()
        follower.replicaof("127.0.0.1", primary.port)
        assert eventually(lambda: has_replicas(1))
        follower.replicaof("NO", "ONE")
        assert eventually(lambda: has_replicas(0))
        facts: Any = admin.info("replication")
    assert replid_of_a_vote() == facts["master_replid"]


def test_connection_to_a_server_that_was_replaced_is_given_up(make_nodes: Callable[..., Nodes]) -> None:
    """A proxy leads new connections to the promoted server.

    The old one goes on to lead to a server that must not vote.
    """
    first, second = make_nodes(2, settings={"repl-diskless-sync-delay": "0"})
    with (
        closing(SlowDoor(first.port)) as door,
        Redlock(f"redis://127.0.0.1:{door.port}", verify="vote", node_timeout=0.3) as authority,
        redis.Redis.from_url(first.url) as old,
        redis.Redis.from_url(second.url) as new,
    ):
        door.open.set()
        authority.init(base=0, max_ttl=1.0)
        with authority.lock("r", ttl=1.0) as token:
            assert token == 1
        new.replicaof("127.0.0.1", first.port)
        assert eventually(lambda: bool(new.hgetall(NODE_KEY)))
        new.replicaof("NO", "ONE")
        old.replicaof("127.0.0.1", second.port)
        door.lead_to(second.port)

        def is_locked_again() -> bool:
            try:
                with authority.lock("r", ttl=1.0, timeout=0) as token:
                    return split(token) == (1, 1)
            except QuorumError:
                return False

        assert eventually(is_locked_again)


def test_two_names_of_one_server_are_refused(nodes: Nodes) -> None:
    """Two host names, and two databases: one server has one vote, also when it is initialised."""
    port = nodes[0].port
    for other in (f"redis://localhost:{port}", f"redis://127.0.0.1:{port}/1"):
        names = [nodes[0].url, other, nodes[1].url]
        with Redlock(names) as authority, pytest.raises(MembershipError, match="same server"):
            authority.init()
        for url in names:
            with redis.Redis.from_url(url) as client:
                client.flushall()


@pytest.mark.parametrize("closed", [0.5, 0.65, 0.8, 0.95])
def test_nodes_that_are_heard_only_at_a_later_try_are_known_then(
    authority: Redlock, nodes: Nodes, *, closed: float
) -> None:
    """The first try knows no list of nodes, nor does the next when it begins: no reason to give up."""
    authority.close()
    with ExitStack() as stack:
        doors = [stack.enter_context(closing(SlowDoor(node.port))) for node in nodes]
        urls = [f"redis://127.0.0.1:{door.port}" for door in doors]
        late = stack.enter_context(Redlock(urls, connect_timeout=0.4, node_timeout=0.4, outage_grace=20.0))
        with ThreadPoolExecutor(1) as pool:
            acquired = pool.submit(late.acquire, ("r",), ttl=10.0, timeout=30.0)
            time.sleep(closed)
            for door in doors:
                door.open.set()
            assert late.release(acquired.result(30))


def test_init_waits_for_a_node_that_is_far_away(nodes: Nodes) -> None:
    """All nodes are needed, so a majority's being connected is no reason to begin without the others."""
    with closing(SlowDoor(nodes[2].port)) as door:
        opener = threading.Timer(0.3, door.open.set)
        opener.start()
        with Redlock([*nodes.urls[:2], f"redis://127.0.0.1:{door.port}"]) as authority:
            assert authority.init(base=0)
            with authority.lock("r") as token:
                assert token == 1
        opener.join()


def test_command_to_type_knows_namespace_and_password(make_nodes: Callable[..., Nodes]) -> None:
    """What the error tells to run is what initialises these nodes, but for the password itself."""
    nodes = make_nodes(1, password="secret")
    error = failure_of(Redlock(nodes.urls, namespace="shop"))
    assert isinstance(error, NodesNotInitialisedError)
    assert f"fencelock init --namespace shop redis://:PASSWORD@127.0.0.1:{nodes[0].port}`" in str(error)


@pytest.mark.parametrize("url", ["redis:/bob:hunter2@h:1", "redis//bob:hunter2@h", "bob:hunter2@h:1"])
def test_password_in_a_malformed_url_is_not_shown(url: str) -> None:
    """Whatever is wrong with it."""
    with pytest.raises(ValueError, match="URL") as refusal:
        Redlock(url)
    assert "hunter2" not in str(refusal.value)


def test_second_name_of_a_server_that_connects_late_gets_no_second_vote(nodes: Nodes) -> None:
    """Its connection comes up between two rounds of one attempt; a majority of one server must not arise."""
    with Redlock(nodes.urls[:3]) as right:
        right.init(base=0)
        door = SlowDoor(nodes[0].port)
        names = [nodes[0].url, f"redis://localhost:{door.port}", f"redis://127.0.0.1:{free_port()}"]
        with Redlock(names, connect_timeout=0.5, outage_grace=0.0) as wrong:
            with pytest.raises(AuthorityError):
                wrong.lock("r", timeout=0).acquire()
            time.sleep(0.3)
            node_set = wrong._current()
            door.open.set()
            time.sleep(0.3)
            outcome = run(
                make_attempt(node_set, Attempt.of(node_set, ("r",), "nonce", 5.0)), wrong._connections.do
            )
            assert isinstance(outcome, Failed)
        door.close()


def test_client_with_other_nodes_than_were_initialised_is_refused(nodes: Nodes) -> None:
    """Too few, too many, and one exchanged: too few would let two majorities live side by side."""
    with Redlock(nodes.urls[:3]) as authority:
        authority.init()
    error = failure_of(Redlock(nodes.urls[:2]))
    assert isinstance(error, MembershipError)
    assert nodes[2].url in str(error)
    assert isinstance(failure_of(Redlock(nodes.urls[:4])), MembershipError)
    assert isinstance(failure_of(Redlock(nodes.urls)), MembershipError)
    with Redlock([*nodes.urls[:2], nodes[3].url]) as exchanged, exchanged.lock("r") as token:
        assert token > 0  # two of its three are a majority of the right list


def test_one_stray_node_does_not_stop_the_others(nodes: Nodes) -> None:
    """A node of another list, which is even of another size, has no vote and no say."""
    with Redlock(nodes.urls[:3]) as authority, Redlock(nodes[3].url) as stray:
        authority.init(base=0)
        stray.init()
    with Redlock([*nodes.urls[:2], nodes[3].url]) as mixed:
        for number in range(3):
            with mixed.lock("r") as token:
                assert token == number + 1


def test_mixed_lists_are_told_apart(nodes: Nodes) -> None:
    """Two nodes have one list and two have another, so no list has a majority."""
    with Redlock(nodes.urls[:2]) as first, Redlock(nodes.urls[2:4]) as second:
        first.init()
        second.init()
    assert isinstance(failure_of(Redlock(nodes.urls[:4])), MembershipError)


def test_blank_nodes_say_which_command_to_run(nodes: Nodes) -> None:
    """All blank, and most blank, are two different stories."""
    error = failure_of(Redlock(nodes.urls[:3]))
    assert isinstance(error, NodesNotInitialisedError)
    assert f"fencelock init {' '.join(nodes.urls[:3])}" in str(error)
    with Redlock(nodes.urls[:3]) as authority:
        authority.init()
    for node in nodes[:2]:
        with redis.Redis.from_url(node.url) as client:
            client.flushall()
    error = failure_of(Redlock(nodes.urls[:3]))
    assert isinstance(error, NodesNotInitialisedError)
    assert "2 of 3 nodes are blank" in str(error)


def test_auto_init_is_for_blank_nodes_only(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """FENCELOCK_AUTO_INIT=1 initialises blank nodes; where most nodes lost their memory it does not."""
    monkeypatch.setenv("FENCELOCK_AUTO_INIT", "1")
    with Redlock(nodes.urls[:3]) as authority, authority.lock("r") as token:
        assert token > 1_600_000_000_000
    for node in nodes[:2]:
        with redis.Redis.from_url(node.url) as client:
            client.flushall()
    with Redlock(nodes.urls[:3]) as authority, pytest.raises(MembershipError, match="lost its memory"):
        authority.lock("r", timeout=0).acquire()
    with redis.Redis.from_url(nodes[0].url) as client:
        assert not client.hexists(NODE_KEY, "e")  # a ticket at most, and no marker


def test_fleet_that_is_initialised_again_is_recognised(nodes: Nodes) -> None:
    """A client that was there before learns of the new list by itself."""
    with Redlock(nodes.urls[:3]) as client, Redlock(nodes.urls[:3]) as operator:
        client.init(base=0)
        with client.lock("r") as token:
            assert token == 1
        for node in nodes[:3]:
            with redis.Redis.from_url(node.url) as admin:
                admin.flushall()
        operator.init(base=100)
        with client.lock("r", timeout=0) as token:
            assert token == 101


def interrupted_init(urls: list[str], rounds: int) -> None:
    """Run an initialisation that dies after so many requests."""
    with Redlock(urls) as authority:
        group = NodeGroup(
            authority.nodes, NODE_KEY, 2.0, lambda: f"word-{time.perf_counter_ns()}", lambda: 0.0
        )
        generator = initialise(group, base=0, max_ttl=DEFAULT_MAX_TTL)
        channels = authority._connect()
        request = next(generator)
        while rounds:
            if isinstance(request, Sleep):  # not every connection is there yet
                time.sleep(request.seconds)
                request = generator.send(time.monotonic())
            else:
                request = generator.send(channels.do(request))
                rounds -= 1
        channels.close()


@pytest.mark.parametrize("rounds", range(1, 7))
def test_interrupted_init_is_finished_by_the_next(nodes: Nodes, rounds: int) -> None:
    """Wherever the first stopped, the second finds its tickets and completes the same list."""
    urls = nodes.urls[:3]
    interrupted_init(urls, rounds)
    with Redlock(urls) as authority:
        assert authority.init(base=0) is True
        assert authority.init(base=0) is False
        with authority.lock("r") as token:
            assert token == 1


def is_open(url: str) -> bool:
    """Whether a node has its marker."""
    with redis.Redis.from_url(url) as client:
        return bool(client.hexists(NODE_KEY, "e"))


def test_init_refuses_a_node_that_restarted_in_between(nodes: Nodes) -> None:
    """Half the list is open, and a node has lost its ticket: it cannot be told from one that has voted."""
    urls = nodes.urls[:3]
    interrupted_init(urls, 5)
    next(node for node in nodes[:3] if not is_open(node.url)).restart(keep_data=False)
    with Redlock(urls) as authority, pytest.raises(MembershipError, match="lost its memory"):
        authority.init(base=0)


def test_several_clients_may_initialise_at_once(nodes: Nodes) -> None:
    """One list comes out of it, whichever client was first."""
    clients = [Redlock(nodes.urls) for _ in range(6)]
    with ThreadPoolExecutor(6) as threads:
        assert any(threads.map(lambda client: client.init(base=0), clients))
    tokens = []
    for client in clients:
        with client, client.lock("r") as token:
            tokens.append(token)
    assert tokens == [1, 2, 3, 4, 5, 6]


def test_init_needs_every_node_and_none_in_use_elsewhere(nodes: Nodes) -> None:
    """One that is down, and one of another list."""
    with Redlock(nodes.urls[:3]) as authority:
        authority.init()
    with Redlock(nodes.urls[2:5]) as other, pytest.raises(MembershipError, match="in use already"):
        other.init()
    nodes[4].kill()
    with (
        Redlock(nodes.urls[3:5], connect_timeout=0.3) as other,
        pytest.raises(QuorumError, match="needs a usable answer"),
    ):
        other.init()


@pytest.mark.parametrize(
    "settings", [{"base": -1}, {"base": MAX_COUNTER}, {"max_ttl": 0}, {"max_ttl": float("nan")}]
)
def test_init_out_of_range_is_refused(settings: dict[str, Any]) -> None:
    """Before anything is connected to."""
    with Redlock("redis://127.0.0.1:1") as authority, pytest.raises(ValueError, match=r"."):
        authority.init(**settings)


def test_error_about_blank_nodes_names_both_commands(nodes: Nodes) -> None:
    """The likelier command comes first.

    If the client or another node knows of former use, that is the one after a loss.
    """
    urls = nodes.urls[:3]

    def complaint(authority: Redlock) -> tuple[bool, str]:
        with pytest.raises(NodesNotInitialisedError) as refused:
            authority.lock("r", timeout=0).acquire()
        words = str(refused.value)
        first, used = (
            words.find("first time: `fencelock init redis://"),
            words.find("before: `fencelock init"),
        )
        assert min(first, used) > 0
        assert "--after-loss --database URL`" in words
        return used < first, words

    with Redlock(urls) as authority, Redlock(urls) as newcomer:
        assert not complaint(authority)[0]
        authority.init()
        with authority.lock("r", ttl=1):
            pass
        for count, url in enumerate(urls):
            with redis.Redis.from_url(url) as client:
                client.flushall()
            if count == 1:
                likely, words = complaint(newcomer)
                assert (likely, "2 of 3 nodes are blank" in words) == (True, True)
        likely, words = complaint(authority)
        assert (likely, "lost their data while in use" in words) == (True, True)
        with Redlock(urls) as stranger:
            assert not complaint(stranger)[0]


@pytest.mark.parametrize("max_ttl", [None, 300])
def test_nodes_keep_the_longest_ttl_that_they_have(nodes: Nodes, max_ttl: float | None) -> None:
    """New nodes get 60 s. A second `init` that does not say how long changes nothing."""
    with Redlock(nodes.urls[:3]) as authority:
        assert authority.init(max_ttl=max_ttl)
        assert not authority.init()
        with authority.lock("r", ttl=max_ttl or 60):
            pass
        with pytest.raises(ValueError, match="longer than the"):
            authority.lock("s", ttl=(max_ttl or 60) + 1).acquire()
        with pytest.raises(MembershipError, match="not 61 s"):
            authority.init(max_ttl=61)


def test_longest_ttl_binds_acquisitions_and_extensions(nodes: Nodes) -> None:
    """A node that lost its memory stays out for no longer than that."""
    with Redlock(nodes.urls[:3]) as authority:
        authority.init(max_ttl=10)
        with pytest.raises(ValueError, match="longer than the 10 s"):
            authority.lock("r", ttl=11).acquire()
        lock = authority.lock("r", ttl=10)
        with lock:
            with pytest.raises(ValueError, match="longer than the 10 s"):
                lock.extend(11)
            lock.extend(10)


@pytest.fixture
def clients(nodes: Nodes) -> Iterator[Callable[..., list[redis.Redis]]]:
    """A factory of existing clients of three nodes."""
    made: list[redis.Redis] = []

    def make(**settings: Any) -> list[redis.Redis]:
        made.extend(redis.Redis(host="127.0.0.1", port=node.port, **settings) for node in nodes[:3])
        return made[-3:]

    yield make
    for client in made:
        client.close()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"decode_responses": True},
        {"health_check_interval": 1},
        {"retry": Retry(ExponentialBackoff(), 3)},
        {"protocol": 3},
        {"protocol": 3, "decode_responses": True, "client_name": "mine", "socket_timeout": 0.5},
        {"single_connection_client": True},
    ],
    ids=["plain", "decoding", "health-checks", "retrying", "resp3", "everything", "single"],
)
def test_existing_clients_serve_as_nodes(
    clients: Callable[..., list[redis.Redis]], settings: dict[str, Any]
) -> None:
    """Their settings are kept, except for those that would make a connection do things by itself."""
    with Redlock(clients(**settings)) as authority:
        authority.init(base=0)
        with authority.lock("r") as token:
            assert token == 1
    for client in clients(**settings):
        assert client.ping()


@pytest.mark.parametrize("client", [redis.asyncio.Redis, redis.asyncio.RedisCluster])
def test_asyncio_client_is_refused(client: Any) -> None:
    """Connections are opened by blocking ones, in asyncio code too: the error names what serves."""
    with pytest.raises(TypeError, match=r"redis\.Redis or redis\.RedisCluster, in asyncio code too"):
        Redlock(client(host="h"))
    with pytest.raises(TypeError, match="in asyncio code too"):
        Redlock([client(host="h")])


class TlsDoor:
    """A port that speaks TLS, in front of one that does not.

    Attributes:
        port: where it listens.
        certificate: of the authority that its own certificate is from: itself.
    """

    def __init__(self, target: int, folder: Path) -> None:
        self.certificate = folder / "certificate.pem"
        key = folder / "key.pem"
        command = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "
            f"/CN=localhost -addext subjectAltName=DNS:localhost -keyout {key} -out {self.certificate}"
        )
        subprocess.run(command.split(), check=True, capture_output=True)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, key)
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "localhost", family=socket.AF_INET, ssl=self._context)

    async def _serve(self, inside: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        outside, on = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(self._pump(inside, on), self._pump(outside, back))

    @staticmethod
    async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()

    def close(self) -> None:
        """Listen no more."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        await asyncio.sleep(0.2)  # until connections have ended by themselves
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def tls_door(tmp_path: Path) -> Iterator[Callable[[int], TlsDoor]]:
    """A factory of `TlsDoor`."""
    if not shutil.which("openssl"):
        pytest.skip("no openssl on PATH, which makes the certificate: install it to run this test")
    with ExitStack() as stack:
        yield lambda target: stack.enter_context(closing(TlsDoor(target, tmp_path)))


def test_unix_socket_is_a_node(
    make_nodes: Callable[..., Nodes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`unix://` URLs, in all three slashes."""
    path = tmp_path_factory.mktemp("s") / "n.sock"
    make_nodes(1, settings={"unixsocket": str(path)})
    with Redlock(f"unix://{path}") as authority:
        authority.init(base=0)
        with authority.lock("r") as token:
            assert token == 1
        assert authority.nodes == (f"unix://{path}",)


def test_configure_refuses_what_is_no_authority() -> None:
    """Nothing that could only fail later becomes the default."""
    for nonsense in (None, 5, object()):
        with pytest.raises(TypeError, match="redis-py clients"):
            fencelock.configure(nonsense)  # type: ignore[call-overload]
    with Redlock("redis://h") as authority, pytest.raises(TypeError, match="settings"):
        fencelock.configure(authority, namespace="x")  # type: ignore[call-overload]


def test_node_that_knows_no_script_has_the_first_lock(nodes: Nodes) -> None:
    """A late NOSCRIPT would be read with the next exchange only; so scripts are brought when connecting."""
    with Redlock(nodes.urls) as authority, ExitStack() as stack:
        clients = [stack.enter_context(redis.Redis.from_url(url)) for url in nodes.urls]
        authority.init(base=0)
        for client in clients:
            client.script_flush()
        authority.close()
        with authority.lock("r"):
            assert eventually(lambda: all(client.exists(f"{NODE_KEY}:l:r") for client in clients), 2.0)
