"""Leases in ZooKeeper: sessions, servers that lose their data, entries that are deleted, and logins."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from kazoo.security import make_acl

from fencelock import AuthorityError, FencelockError, QuorumError, ZooKeeper
from fencelock.authority.base import Grant
from fencelock.authority.line.entries import quoted
from fencelock.authority.zookeeper import verbs
from proof.servers import ZooKeeper as Server
from proof.servers import zookeeper
from tests.authorities.faces import BlockingFace, is_held, take
from tests.conftest import with_new_path
from tests.polling import eventually


@pytest.fixture
def url(zookeeper_server: Server) -> Iterator[str]:
    """A root of its own on a server of our own, whole before and behind the test."""
    zookeeper_server.heal()
    yield f"{with_new_path(zookeeper_server.url)}?session_timeout=4"
    zookeeper_server.heal()


@pytest.fixture
def authority(url: str) -> Iterator[ZooKeeper]:
    """A client, with a short session."""
    with ZooKeeper(url) as made:
        yield made


@pytest.fixture
def face(authority: ZooKeeper) -> BlockingFace:
    """The same with defaults for tests; a ttl must fit into the session."""
    return BlockingFace(authority)


@pytest.fixture
def other(url: str) -> Iterator[ZooKeeper]:
    """The client of another process."""
    with ZooKeeper(url) as made:
        yield made


@pytest.fixture
def kazoo(zookeeper_server: Server) -> Iterator[KazooClient]:
    """The means of an operator."""
    client = KazooClient(zookeeper_server.hosts)
    client.start()
    yield client
    client.stop()
    client.close()


def line_of(authority: ZooKeeper, resource: str) -> str:
    return f"/{authority._hosts.root}/l/{quoted(resource)}"


def granted_soon(authority: ZooKeeper, *resources: str, seconds: float = 20.0) -> Grant:
    """Return a grant, whatever the servers say meanwhile."""
    found: list[Grant] = []

    def is_granted() -> bool:
        try:
            found.append(authority.acquire(resources or ("r",), ttl=3.0, timeout=1.0))
        except FencelockError:
            return False
        return True

    assert eventually(is_granted, seconds)
    return found[0]


@pytest.mark.timed
def test_validity_is_two_thirds_of_the_session(authority: ZooKeeper) -> None:
    began = time.monotonic()
    grant = authority.acquire(("r",), ttl=4.0, timeout=2)
    assert 2.4 < grant.expires_at - began < 4.0 * 2 / 3 + 0.2
    for refuse in (
        lambda: authority.acquire(("s",), ttl=4.1, timeout=2),
        lambda: authority.extend_many([(grant, 5.0)]),
    ):
        with pytest.raises(ValueError, match=r"a ttl of .* is longer than the session of 4 s"):
            refuse()
    assert not is_held(BlockingFace(authority), "s")
    authority.release(grant)


def test_servers_limit_the_session(url: str) -> None:
    with ZooKeeper(url.partition("?")[0], session_timeout=1_000_000) as authority:
        authority.acquire(("r",), ttl=3.0, timeout=2)
        with pytest.raises(ValueError, match="session of 400 s"):
            authority.acquire(("s",), ttl=401.0, timeout=0)


@pytest.mark.long
@pytest.mark.timed
def test_lock_is_renewed_before_two_thirds_are_over(authority: ZooKeeper, other: ZooKeeper) -> None:
    """Though a third of the ttl would be too late."""
    with authority.lock("r", ttl=4.0) as token:
        time.sleep(6.0)
        info = other.inspect("r")
        assert info is not None
        assert info.token == token


@pytest.mark.long
def test_process_that_is_stopped_loses_its_session(url: str, other: ZooKeeper) -> None:
    program = """
        import sys, time, fencelock
        authority = fencelock.configure(sys.argv[1])
        grant = authority.acquire(("r",), ttl=3.0, timeout=2.0)
        print(grant.tokens[0], flush=True)
        sys.stdin.readline()
        (said,) = authority.extend_many([(grant, 3.0)])
        print(type(said).__name__, authority.release(grant))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        token = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGSTOP)
        grant = other.acquire(("r",), ttl=4.0, timeout=20.0)
        assert grant.tokens[0] > token
        os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate("go on\n", timeout=30)
    assert said == "LockLostError False\n"
    assert other.release(grant) is True


@pytest.mark.long
@pytest.mark.usefixtures("zookeeper_server")
def test_wiped_server_gives_no_token_again() -> None:
    """A wiped server counts from the beginning, but the time in a token goes on.

    A client that had a session gets another one.
    """
    with Server() as server, ZooKeeper(f"{server.url}?session_timeout=4") as authority:
        lost = granted_soon(authority)
        server.wipe()
        grant = granted_soon(authority)
        assert grant.tokens[0] > lost.tokens[0]
        assert authority.release(grant) is True
        assert authority.release(lost) is False


def test_restart_keeps_leases(zookeeper_server: Server, url: str) -> None:
    with ZooKeeper(url.partition("?")[0], session_timeout=60.0) as authority:
        grant = authority.acquire(("r",), ttl=40.0, timeout=2)
        zookeeper_server.stop(0)
        zookeeper_server.come_back(0)

        def is_extended() -> bool:
            (said,) = authority.extend_many([(grant, 40.0)])
            return isinstance(said, Grant)

        assert eventually(is_extended, 35.0)
        assert authority.release(grant) is True


@pytest.mark.long
def test_leader_of_three_is_killed() -> None:
    if lacks := zookeeper.missing():
        pytest.skip(f"no ZooKeeper: this machine lacks {lacks}")
    with Server(3) as servers, ZooKeeper(servers.url, session_timeout=15.0) as authority:
        grant = authority.acquire(("held",), ttl=10.0, timeout=2.0)
        for _ in range(2):
            leader = servers.leader()
            servers.kill(leader)
            later = granted_soon(authority)
            assert later.tokens[0] > grant.tokens[0]
            assert authority.release(later) is True
            (said,) = authority.extend_many([(grant, 10.0)])
            assert isinstance(said, Grant), said
            servers.come_back(leader)
            servers.await_healthy()
        assert authority.release(grant) is True


@pytest.mark.long
@pytest.mark.timed
def test_a_silent_server_is_left_and_its_leases_go_on() -> None:
    if lacks := zookeeper.missing():
        pytest.skip(f"no ZooKeeper: this machine lacks {lacks}")
    with Server(3) as servers, ZooKeeper(servers.url) as authority:
        lock = authority.lock("held", ttl=30.0, timeout=5.0)
        lock.acquire()
        # The leader stays, so that no election is waited for.
        asked = authority._opened()._client._connection._socket.getpeername()[1]
        silent = servers.client_ports.index(asked)
        if silent == servers.leader():
            pytest.skip("the client has met the leader")
        servers.pause(silent)
        try:
            began = time.monotonic()
            with authority.lock("another", ttl=10.0, timeout=10.0):
                assert time.monotonic() - began < 3.0 + 2.0
            time.sleep(11.0)  # a third of the ttl
            assert not lock.lease.lost
            assert lock.lease.remaining > 15.0
        finally:
            servers.resume(silent)
        lock.release()


def test_a_lock_with_too_long_names_is_refused_and_disturbs_no_other(authority: ZooKeeper) -> None:
    changes = authority._opened().changes
    with pytest.raises(ValueError, match="ZooKeeper accepts a megabyte"):
        authority.acquire(
            tuple(f"{number}{chr(0x1F600) * 250}" for number in range(500)), ttl=4.0, timeout=2.0
        )
    assert authority.release(authority.acquire(("r",), ttl=4.0, timeout=2.0)) is True
    assert authority._opened().changes <= changes + 1


def test_a_session_that_shrinks_makes_leases_shorter(authority: ZooKeeper) -> None:
    grants = [authority.acquire((name,), ttl=ttl, timeout=2.0) for name, ttl in (("a", 4.0), ("b", 2.0))]
    authority._opened().timeout = 3.0
    long, short = authority.extend_many([(grants[0], 4.0), (grants[1], 2.0)])
    assert isinstance(long, Grant)
    assert isinstance(short, Grant)


def test_entry_that_somebody_deletes(authority: ZooKeeper, other: ZooKeeper, kazoo: KazooClient) -> None:
    """The holder of a deleted entry hears of that at its next extension.

    A waiter enters again, and leaves nothing behind.
    """
    held = authority.acquire(("a", "b"), ttl=4.0, timeout=2)
    got: list[Grant] = []
    waiter = threading.Thread(target=lambda: got.append(other.acquire(("a", "b"), ttl=4.0, timeout=20.0)))
    waiter.start()
    line = line_of(authority, "a")
    assert eventually(lambda: len(kazoo.get_children(line)) == 2)
    first, second = sorted(kazoo.get_children(line), key=lambda name: name.rpartition("-")[2])
    kazoo.delete(f"{line}/{second}")
    time.sleep(0.2)
    kazoo.delete(f"{line}/{first}")
    (said,) = authority.extend_many([(held, 4.0)])
    assert isinstance(said, FencelockError)
    assert authority.release(held) is False
    waiter.join(30.0)
    assert len(got) == 1
    assert got[0].tokens > held.tokens
    assert other.release(got[0]) is True
    assert authority.inspect() == []


def test_release_by_force_frees_what_is_kept(authority: ZooKeeper, other: ZooKeeper) -> None:
    lock = authority.lock("r", ttl=4.0, at_least=60.0)
    with lock as token:
        pass
    info = other.inspect("r")
    assert info is not None
    assert (info.token, info.holder is not None) == (token, True)
    assert 50 < info.remaining <= 60.0 or info.remaining <= 4.0
    assert is_held(BlockingFace(other), "r")
    assert other.force_release("r", token=token) is not None
    assert take(BlockingFace(other), "r", ttl=4.0) > token


@pytest.mark.timed
def test_lease_ends_though_its_session_goes_on(authority: ZooKeeper, other: ZooKeeper) -> None:
    authority.acquire(("r",), ttl=0.5, timeout=2)
    began = time.monotonic()
    other.acquire(("r",), ttl=4.0, timeout=5.0)
    assert 0.3 < time.monotonic() - began < 3.5


def test_a_line_that_was_pruned_is_made_again(
    face: BlockingFace, authority: ZooKeeper, kazoo: KazooClient
) -> None:
    take(face, "free", ttl=4.0)
    old = int((time.time() - 7200) * 1000) << 10
    kazoo.set(line_of(authority, "free"), f"{old:020d}".encode())
    assert authority.prune(3600) == 1
    assert not kazoo.exists(line_of(authority, "free"))
    assert take(face, "free", ttl=4.0) > old


def test_login_guards_the_nodes(url: str) -> None:
    with_login = url.replace("://", "://alice:secret@")
    with ZooKeeper(with_login) as authority, ZooKeeper(url) as stranger:
        assert "secret" not in repr(authority)
        take(BlockingFace(authority), ttl=4.0)
        with pytest.raises(AuthorityError, match="NoAuthError"):
            stranger.acquire(("r",), ttl=3.0, timeout=0.5)
        assert take(BlockingFace(authority), ttl=4.0) > 0


def test_the_base_is_written_by_no_stranger(url: str, kazoo: KazooClient) -> None:
    """Not even below a root that an operator has made for all, which is ZooKeeper's default."""
    with_login = url.replace("://", "://alice:secret@")
    with ZooKeeper(with_login) as authority:
        root = authority._root
        kazoo.create_async(root, b"").get()
        first = take(BlockingFace(authority), ttl=4.0)
        kazoo.set(root, b"%020d" % (2**53 - 2_000_000_000_000))
        with pytest.raises(NoAuthError):
            kazoo.set(authority._above, b"%020d" % 2**51)
    with ZooKeeper(with_login) as authority:
        assert first < take(BlockingFace(authority), "s", ttl=4.0) < first + 2**40


@pytest.mark.parametrize("base", [2**52, 2**53 - 2_000_000_000_000])
def test_a_base_that_no_use_explains_is_refused(authority: ZooKeeper, kazoo: KazooClient, base: int) -> None:
    authority.init()
    kazoo.set(authority._above, b"%020d" % base)
    with pytest.raises(AuthorityError, match="which no use explains"):
        authority.acquire(("r",), ttl=2.0, timeout=0.0)


def test_a_login_below_nodes_of_strangers_is_refused(url: str) -> None:
    """A stranger, or a program without the login, has made them before."""
    with ZooKeeper(url) as stranger:
        stranger.init()
    with ZooKeeper(url.replace("://", "://alice:secret@")) as authority:
        with pytest.raises(AuthorityError, match="world:anyone can write"):
            authority.acquire(("r",), ttl=4.0, timeout=0.5)
        with pytest.raises(AuthorityError, match="world:anyone can write"):
            authority.init()


def test_root_that_nobody_may_make(authority: ZooKeeper, kazoo: KazooClient) -> None:
    """It is told, and not tried for ever."""
    everything = kazoo.get_acls("/")[0]
    kazoo.set_acls("/", [make_acl("world", "anyone", read=True, admin=True)])
    try:
        with pytest.raises(AuthorityError, match="NoAuth"):
            authority.init()
        with pytest.raises(AuthorityError, match="NoAuth"):
            authority.acquire(("r",), ttl=2.0, timeout=0.0)
    finally:
        kazoo.set_acls("/", everything)


def test_watch_is_forgotten_with_its_waiter(authority: ZooKeeper, other: ZooKeeper) -> None:
    """Else a leader that holds for months fills the memory of those that ask every second."""
    grant = authority.acquire(("r",), ttl=2.0, timeout=0.0)
    for _ in range(5):
        with pytest.raises(FencelockError):
            other.acquire(("r",), ttl=2.0, timeout=0.05)
    assert other._session is not None
    watchers = other._session._client._data_watchers
    assert eventually(lambda: not any(watchers.values()))
    assert authority.release(grant) is True


@pytest.mark.long
def test_acquisition_begins_the_next_session(zookeeper_server: Server, authority: ZooKeeper) -> None:
    """It keeps what it has entered there; else it would wait for itself, and leave an entry for ever."""
    authority.release(authority.acquire(("r",), ttl=2.0, timeout=0.0))
    zookeeper_server.pause(0)
    time.sleep(9.0)
    resumed = threading.Timer(0.1, zookeeper_server.resume, (0,))
    resumed.start()
    grant = authority.acquire(("r",), ttl=2.0, timeout=3.0)
    assert authority.release(grant) is True
    assert authority.inspect("r") is None


@pytest.mark.timed
def test_no_server_is_told_in_time() -> None:
    authority = ZooKeeper("zookeeper://bob:secret@127.0.0.1:1,127.0.0.1:2")
    began = time.monotonic()
    with pytest.raises(QuorumError, match=r"127.0.0.1:1,127.0.0.1:2/fencelock did not answer") as caught:
        authority.acquire(("r",), ttl=3.0, timeout=0.5)
    assert "secret" not in str(caught.value)
    authority.close()
    assert time.monotonic() - began < 20.0


def test_counter_of_a_line_goes_on_below_zero() -> None:
    names = [f"{'0' * 16}-{number}" for number in ("2147483646", "2147483647", "-2147483648", "-2147483647")]
    assert verbs.in_order([names[2], names[0], names[3], names[1]]) == names
    assert verbs.distance(names[0], names[3]) == -3
    assert verbs.distance("lock-of-another", names[0]) == 0


def test_loop_goes_on_meanwhile(authority: ZooKeeper) -> None:
    """Kazoo's own threads wait for the servers."""

    async def main() -> int:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.001)
                beats += 1

        task = asyncio.create_task(beat())
        grant = await authority.aio.acquire(("r",), ttl=4.0, timeout=1.0)
        with pytest.raises(FencelockError):
            await authority.aio.acquire(("r",), ttl=4.0, timeout=0.5)
        await authority.aio.release(grant)
        task.cancel()
        return beats

    assert asyncio.run(main()) > 50


def test_kazoo_tells_the_timeout(authority: ZooKeeper) -> None:
    authority.inspect()
    session: Any = authority._session
    assert session.timeout == pytest.approx(4.0)
