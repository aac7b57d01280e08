"""A Redlock works with the nodes that it is given, or raises one clear error: strangers, other lists."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from fencelock import Redlock
from fencelock._generators import run
from fencelock.authority.redlock.protocol.acquire import make_attempt
from fencelock.authority.redlock.protocol.attempts import Attempt, Failed
from fencelock.authority.redlock.transport.connector import Node
from fencelock.errors import (
    AuthorityError,
    FencelockError,
    MembershipError,
    NodesNotInitialisedError,
    QuorumError,
)
from fencelock.tokens import split
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY, SlowDoor


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def failure_of(*nodes: str, **settings: Any) -> FencelockError:
    """Return what an acquisition comes to; where it does not get better, it must not wait for an outage."""
    settings = {"outage_grace": 100.0, **settings}
    with Redlock(list(nodes), **settings) as authority, pytest.raises(FencelockError) as failure:
        authority.lock("r", timeout=None).acquire()
    return failure.value


@contextmanager
def user(url: str, name: str, *words: str) -> Iterator[str]:
    with redis.Redis.from_url(url) as admin:
        rules = ["reset", "on", "nopass", "~*", "+@all", *words]
        admin.execute_command("ACL", "SETUSER", name, *rules)
        try:
            yield url.replace("redis://", f"redis://{name}:any@")
        finally:
            admin.acl_deluser(name)


def flush(nodes: Nodes, count: int) -> None:
    for node in nodes[:count]:
        with redis.Redis.from_url(node.url) as client:
            client.flushall()


@pytest.fixture
def three(nodes: Nodes) -> list[str]:
    with Redlock(nodes.urls[:3]) as authority:
        authority.init(base=0)
    return nodes.urls[:3]


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("redis://127.0.0.1:{port}", "refused"),
        ("redis://no-such-host.invalid:6379", ""),
        ("redis://a..b:6379", ""),
        (f"redis://{'x' * 70}.invalid:1", ""),
    ],
)
def test_unreachable_node_is_named_with_its_reason(url: str, word: str) -> None:
    url = url.format(port=free_port())
    error = failure_of(url, outage_grace=0.1)
    assert isinstance(error, QuorumError)
    assert word in error.nodes[url]


class _Page(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_web_server_is_no_node() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert isinstance(failure_of(f"redis://127.0.0.1:{server.server_port}"), QuorumError)
        finally:
            server.shutdown()
            thread.join()


def test_wrong_password_is_reported_as_such(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(1, password="right")
    for url in (f"redis://:wrong@127.0.0.1:{nodes[0].port}", f"redis://127.0.0.1:{nodes[0].port}"):
        error = failure_of(url)
        assert isinstance(error, QuorumError)
        assert "error" in next(iter(error.nodes.values()))
        assert "wrong@" not in str(error)
    blank = failure_of(*nodes.urls, namespace="shop")
    assert isinstance(blank, NodesNotInitialisedError)
    assert f"fencelock init --namespace shop redis://:PASSWORD@127.0.0.1:{nodes[0].port}`" in str(blank)
    with Redlock(nodes.urls) as authority:
        assert authority.init()


def test_user_without_rights_is_told_what_is_missing(nodes: Nodes) -> None:
    with Redlock(nodes.urls[0]) as authority:
        authority.init()
    with user(nodes.urls[0], "weak", "-evalsha", "-eval") as url:
        assert "evalsha" in str(failure_of(url)).lower()


def test_user_without_rights_to_channels_can_release(nodes: Nodes) -> None:
    """Waking the waiters is a courtesy; that it is forbidden must not leave locks behind."""
    with Redlock(nodes.urls[0]) as authority:
        authority.init()
    with user(nodes.urls[0], "mute", "resetchannels") as url, redis.Redis.from_url(nodes.urls[0]) as admin:
        with Redlock(url) as mute, mute.lock("a", "b"):
            pass
        keys: Any = admin.keys()
        assert not [key for key in keys if b":l:" in key]


def test_replica_is_no_node(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(2)
    with redis.Redis.from_url(nodes[1].url) as client:
        client.replicaof("127.0.0.1", nodes[0].port)
    assert "only primaries" in str(failure_of(nodes[1].url))


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
    """A proxy leads new connections to the promoted server; the old ones lead to one that must not vote."""
    first, second = make_nodes(2, settings={"repl-diskless-sync-delay": "0"})
    with (
        closing(SlowDoor(first.port)) as door,
        Redlock(f"redis://127.0.0.1:{door.port}", verify="vote") as authority,
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
    port = nodes[0].port
    for other in (f"redis://localhost:{port}", f"redis://127.0.0.1:{port}/1"):
        names = [nodes[0].url, other, nodes[1].url]
        with Redlock(names) as authority, pytest.raises(MembershipError, match="same server"):
            authority.init()
        flush(nodes, 2)


def test_second_name_of_a_server_that_connects_late_gets_no_second_vote(
    nodes: Nodes, three: list[str]
) -> None:
    """Its connection comes up between two rounds of one attempt; a majority of one server must not arise."""
    with closing(SlowDoor(nodes[0].port)) as door:
        names = [three[0], f"redis://localhost:{door.port}", f"redis://127.0.0.1:{free_port()}"]
        with Redlock(names, connect_timeout=0.5, outage_grace=0.0) as wrong:
            with pytest.raises(AuthorityError):
                wrong.lock("r", timeout=0).acquire()
            time.sleep(0.3)
            node_set = wrong._current()
            door.open.set()
            time.sleep(0.3)
            attempt = Attempt.of(node_set, ("r",), "nonce", 5.0)
            assert isinstance(run(make_attempt(node_set, attempt), wrong._connections.do), Failed)


@pytest.mark.parametrize("closed", [0.5, 0.8])
def test_nodes_that_are_heard_only_at_a_later_try_are_known_then(
    nodes: Nodes, authority: Redlock, *, closed: float
) -> None:
    """The first try knows no list of nodes, nor does the next when it begins: no reason to give up."""
    authority.close()
    with ExitStack() as stack:
        doors = [stack.enter_context(closing(SlowDoor(node.port))) for node in nodes]
        urls = [f"redis://127.0.0.1:{door.port}" for door in doors]
        late = stack.enter_context(Redlock(urls, connect_timeout=0.4, node_timeout=0.4, outage_grace=60.0))
        with ThreadPoolExecutor(1) as pool:
            acquired = pool.submit(late.acquire, ("r",), ttl=30.0, timeout=None)
            time.sleep(closed)
            for door in doors:
                door.open.set()
            assert late.release(acquired.result(60))


def test_init_waits_for_a_node_that_is_far_away(nodes: Nodes) -> None:
    """All nodes are needed, so a majority's being connected is no reason to begin without the others."""
    with closing(SlowDoor(nodes[2].port)) as door:
        opener = threading.Timer(0.3, door.open.set)
        opener.start()
        with Redlock([*nodes.urls[:2], f"redis://127.0.0.1:{door.port}"], connect_timeout=30.0) as authority:
            assert authority.init(base=0)
            with authority.lock("r") as token:
                assert token == 1
        opener.join()


def test_client_with_other_nodes_than_were_initialised_is_refused(nodes: Nodes, three: list[str]) -> None:
    """Too few, too many, and one exchanged: too few would let two majorities live side by side."""
    too_few = failure_of(*three[:2])
    assert isinstance(too_few, MembershipError)
    assert three[2] in str(too_few)
    for count in (4, 5):
        assert isinstance(failure_of(*nodes.urls[:count]), MembershipError)
    with Redlock(nodes.urls[3]) as stray:  # of another list, which is even of another size
        stray.init()
    with Redlock([*three[:2], nodes.urls[3]]) as exchanged:
        for number in range(3):
            with exchanged.lock("r") as token:
                assert token == number + 1  # two of its three are a majority of the right list


def test_mixed_lists_are_told_apart(nodes: Nodes) -> None:
    for urls in (nodes.urls[:2], nodes.urls[2:4]):
        with Redlock(urls) as authority:
            authority.init()
    assert isinstance(failure_of(*nodes.urls[:4]), MembershipError)


def test_auto_init_is_for_blank_nodes_only(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """FENCELOCK_AUTO_INIT=1 initialises blank nodes; where most nodes lost their memory it does not."""
    monkeypatch.setenv("FENCELOCK_AUTO_INIT", "1")
    with Redlock(nodes.urls[:3]) as authority, authority.lock("r") as token:
        assert token > 1_600_000_000_000
    flush(nodes, 2)
    assert "lost its memory" in str(failure_of(*nodes.urls[:3]))
    with redis.Redis.from_url(nodes[0].url) as client:
        assert not client.hexists(NODE_KEY, "e")  # a ticket at most, and no marker


def test_fleet_that_is_initialised_again_is_recognised(nodes: Nodes, three: list[str]) -> None:
    with Redlock(three) as client, Redlock(three) as operator:
        with client.lock("r") as token:
            assert token == 1
        flush(nodes, 3)
        operator.init(base=100)
        with client.lock("r", timeout=0) as token:
            assert token == 101


@pytest.mark.usefixtures("three")
def test_init_needs_every_node_and_none_in_use_elsewhere(nodes: Nodes) -> None:
    with Redlock(nodes.urls[2:5]) as other, pytest.raises(MembershipError, match="in use already"):
        other.init()
    nodes[4].kill()
    with (
        Redlock(nodes.urls[3:5], connect_timeout=2.0) as other,
        pytest.raises(QuorumError, match="needs a usable answer"),
    ):
        other.init()


def test_error_about_blank_nodes_names_both_commands(nodes: Nodes) -> None:
    """The likelier one first: the one after a loss, if the client or another node knows of former use."""
    urls = nodes.urls[:3]

    def complaint(authority: Redlock) -> tuple[bool, str]:
        with pytest.raises(NodesNotInitialisedError) as refused:
            authority.lock("r", timeout=0).acquire()
        words = str(refused.value)
        first, used = (
            words.find(f"first time: `fencelock init {' '.join(urls)}"),
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
        flush(nodes, 2)
        likely, words = complaint(newcomer)
        assert (likely, "2 of 3 nodes are blank" in words) == (True, True)
        flush(nodes, 3)
        likely, words = complaint(authority)
        assert (likely, "lost their data while in use" in words) == (True, True)
        with Redlock(urls) as stranger:
            assert not complaint(stranger)[0]


@pytest.mark.parametrize("max_ttl", [None, 300])
def test_nodes_keep_the_longest_ttl_that_they_have(nodes: Nodes, max_ttl: float | None) -> None:
    """New nodes get 60 s. A second `init` that does not say how long changes nothing.

    It binds acquisitions and extensions: a node that lost its memory stays out for no longer than that.
    """
    longest = max_ttl or 60
    with Redlock(nodes.urls[:3]) as authority:
        assert authority.init(max_ttl=max_ttl)
        assert not authority.init()
        lock = authority.lock("r", ttl=longest)
        with lock:
            with pytest.raises(ValueError, match=f"longer than the {longest} s"):
                lock.extend(longest + 1)
            lock.extend(longest)
        with pytest.raises(ValueError, match=f"longer than the {longest} s"):
            authority.lock("s", ttl=longest + 1).acquire()
        with pytest.raises(MembershipError, match="not 61 s"):
            authority.init(max_ttl=61)


@pytest.mark.parametrize(
    "settings",
    [
        {"decode_responses": True, "health_check_interval": 1},
        {"retry": Retry(ExponentialBackoff(), 3)},
        {"protocol": 3},
        {"protocol": 3, "decode_responses": True, "client_name": "mine", "socket_timeout": 5},
        {"single_connection_client": True},
    ],
    ids=["decoding", "retrying", "resp3", "everything", "single"],
)
def test_existing_clients_serve_as_nodes(nodes: Nodes, settings: dict[str, Any]) -> None:
    """Their settings are kept, except for those that would make a connection do things by itself."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(closing(redis.Redis("127.0.0.1", node.port, **settings)))
            for node in nodes[:3]
        ]
        with Redlock(clients) as authority:
            authority.init(base=0)
            with authority.lock("r") as token:
                assert token == 1
        assert all(client.ping() for client in clients)


def test_unix_socket_is_a_node(
    make_nodes: Callable[..., Nodes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("s") / "n.sock"
    make_nodes(1, settings={"unixsocket": str(path)})
    with Redlock(f"unix://{path}") as authority:
        authority.init(base=0)
        with authority.lock("r") as token:
            assert token == 1
        assert authority.nodes == (f"unix://{path}",)


def test_node_that_knows_no_script_has_the_first_lock(authority: Redlock, nodes: Nodes) -> None:
    """A late NOSCRIPT would be read with the next exchange only; so scripts are brought when connecting."""
    with ExitStack() as stack:
        clients = [stack.enter_context(redis.Redis.from_url(url)) for url in nodes.urls]
        for client in clients:
            client.script_flush()
        authority.close()
        with authority.lock("r"):
            assert eventually(lambda: all(client.exists(f"{NODE_KEY}:l:r") for client in clients), 30.0)
