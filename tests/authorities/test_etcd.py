"""Leases in etcd: failing members, TLS and logins, compaction, etcd's own leases, and odd values."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fencelock import AuthorityError, Etcd, QuorumError, _threads
from fencelock.authority.base import Grant
from fencelock.authority.etcd import messages
from fencelock.authority.etcd.aio import LoopLink
from fencelock.authority.etcd.members import Members
from proof.servers import Etcd as Cluster
from proof.servers.etcd import bundled
from proof.servers.workspace import free_ports
from tests.authorities.faces import BlockingFace, is_held, take
from tests.conftest import with_new_path
from tests.polling import eventually


@pytest.fixture
def cluster(etcd_cluster: Cluster) -> Iterator[Cluster]:
    """Three members of our own, whole before and behind the test."""
    etcd_cluster.heal()
    yield etcd_cluster
    etcd_cluster.heal()


@pytest.fixture
def authority(cluster: Cluster) -> Iterator[Etcd]:
    """A client of them, below a root of its own."""
    with Etcd(with_new_path(cluster.url)) as made:
        yield made


@contextmanager
def waiting(authority: Etcd, *names: str, watches: bool = True) -> Iterator[tuple[Etcd, list[Grant]]]:
    """Have another client wait for a held lock. At the end of the block it gets the lock, and releases it."""
    got: list[Grant] = []
    with Etcd(str(authority._members.hosts)) as other:

        def wait() -> None:
            got.append(other.acquire(names or ("r",), ttl=6.0, timeout=50.0))

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not watches or eventually(lambda: other._link is not None and bool(other._link._waiting))
        yield other, got
        waiter.join(60.0)
        assert len(got) == 1
        assert other.release(got[0]) is True


@pytest.fixture
def face(authority: Etcd) -> BlockingFace:
    """The same with defaults for tests."""
    return BlockingFace(authority)


@pytest.mark.parametrize(
    ("fault", "member"), [("kill", 0), ("kill", 1), ("kill", 2), ("pause", 0), ("pause", 1), ("stop", 2)]
)
def test_one_member_of_three_may_fail(cluster: Cluster, face: BlockingFace, fault: str, member: int) -> None:
    held = face.acquire("held", ttl=60.0)
    getattr(cluster, fault)(member)
    assert take(face, "r") > 0
    assert face.release(face.extend(held, 60.0)) is True


def test_no_majority_is_told_in_time(cluster: Cluster, face: BlockingFace) -> None:
    take(face)
    for member in (0, 1):
        cluster.kill(member)
    with pytest.raises(QuorumError, match="did not answer") as caught:
        face.acquire("r", timeout=2.0)
    assert caught.value.nodes
    cluster.heal()
    assert take(face) > 0


def test_a_waiter_hears_through_another_member(cluster: Cluster, authority: Etcd, face: BlockingFace) -> None:
    grant = face.acquire("r", ttl=60.0)
    with waiting(authority) as (other, _):
        assert other._link is not None
        cluster.kill(cluster.client_ports.index(other._link.address[1]))
        time.sleep(0.3)
        assert face.release(grant) is not False


def test_leaving_thread_calls_another_to_read(authority: Etcd, cluster: Cluster) -> None:
    """The reader asks one to go on that is about to leave: it must pass that on."""
    authority.init()
    link = authority._link
    assert link is not None
    answers: dict[str, list[messages.Answer]] = {name: [] for name in "abc"}
    came: dict[str, bool] = {}

    def ended(name: str) -> bool:
        return any(map(messages.has_ended, answers[name][0].messages))

    def ended_slowly() -> bool:
        found = ended("b")
        time.sleep(0.3 if found else 0.0)
        return found

    def wait(name: str) -> None:
        ready = ended_slowly if name == "b" else lambda: ended(name)
        came[name] = link.wait(ready, answers[name], time.monotonic() + 30.0)

    keys = {"a": b"/first", "b": b"/first", "c": b"/second"}
    for name, key in keys.items():
        link.start([messages.watch(key, 1)], answers[name])
    threads = [threading.Thread(target=wait, args=(name,)) for name in keys]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for name in ("/first", "/second"):
        cluster.ctl("put", name, "x")
        cluster.ctl("del", name)
        time.sleep(0.6)
    for thread in threads:
        thread.join(40.0)
    assert came == {"a": True, "b": True, "c": True}


@pytest.mark.timed
def test_validity_counts_from_the_grant_of_the_lease(
    authority: Etcd, face: BlockingFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from a second attempt, which a client makes that does not know the mark."""
    take(face)
    enter, entered = Etcd._enter, list[float]()

    def entering(self: Etcd, *arguments: Any, **named: Any) -> Any:
        entered.append(time.monotonic())
        if len(entered) > 1:
            time.sleep(0.2)
        return (yield from enter(self, *arguments, **named))

    monkeypatch.setattr(Etcd, "_enter", entering)
    with Etcd(str(authority._members.hosts)) as other:
        grant = other.acquire(("r",), ttl=5.0, timeout=0.0)
        assert len(entered) == 2
        assert grant.expires_at < entered[0] + 5.0
        assert other.release(grant) is True


@pytest.mark.long
def test_a_watch_begins_behind_a_compaction(
    cluster: Cluster, authority: Etcd, face: BlockingFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter need not look ten times a second, only because the revision of its entry is gone."""
    take_, looks = Etcd._take, list[float]()

    def taking(self: Etcd, *arguments: Any, **named: Any) -> Any:
        looks.append(time.monotonic())
        return (yield from take_(self, *arguments, **named))

    grant = face.acquire("r", ttl=60.0)
    with waiting(authority):
        for number in range(5):
            take(face, f"other{number}")
        cluster.compact(cluster.revision())
        monkeypatch.setattr(Etcd, "_take", taking)
        time.sleep(5.0)  # at a third of its ttl the waiter looks, and watches again
        assert len(looks) <= 4
        assert face.release(grant) is True


def test_a_compaction_does_not_disturb_a_waiter(
    cluster: Cluster, authority: Etcd, face: BlockingFace
) -> None:
    grant = face.acquire("r", ttl=60.0)
    with waiting(authority):
        for number in range(5):
            take(face, f"other{number}")
        cluster.compact(cluster.revision())
        face.release(grant)


def test_a_restored_snapshot_gives_no_token_again(
    cluster: Cluster, face: BlockingFace, tmp_path: Any
) -> None:
    """Its revisions and its marks go back; the time in a token does not."""
    take(face)
    cluster.snapshot(tmp_path / "snapshot.db")
    lost = [take(face) for _ in range(20)]
    before = cluster.revision()
    cluster.restore(tmp_path / "snapshot.db")
    cluster.await_healthy()
    assert cluster.revision() < before
    assert take(face) > max(lost)


def test_release_by_force_is_heard_of(face: BlockingFace, authority: Etcd) -> None:
    grant = face.acquire("r")
    assert authority.force_release("r", token=grant.tokens[0] + 1) is None
    forced = authority.force_release("r")
    assert forced is not None
    assert forced.token == grant.tokens[0]
    (said,) = face.extend_many([(grant, 30.0)])
    assert isinstance(said, Exception)
    assert face.release(grant) is False


def test_the_lease_of_a_waiter_that_was_taken_away_is_made_anew(face: BlockingFace, authority: Etcd) -> None:
    second = face.acquire("b", ttl=60.0)
    with waiting(authority, "a", "b", watches=False):
        assert eventually(lambda: bool(authority.inspect("a")))
        assert authority.force_release("a") is not None
        time.sleep(0.3)
        assert face.release(second) is True
    assert authority.inspect() == []


def test_an_extension_beyond_a_lease_of_etcd_leaves_no_other(face: BlockingFace, authority: Etcd) -> None:
    said = face.extend(face.acquire("r", ttl=5.0), 60.0)
    assert said.expires_at > time.monotonic() + 45.0
    again = face.extend(face.remint(said), 20.0)
    assert face.release(again) is True
    assert authority.inspect() == []


@pytest.mark.long
def test_a_move_that_was_not_answered_is_repeated(
    face: BlockingFace, authority: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = face.acquire("r", ttl=5.0)
    asking, sent = authority.asking, [0]

    def lossy(calls: Any, until: float, again: Any = None) -> Any:
        answers = yield from asking(calls, until, again)
        if calls[0].path.endswith(b"Txn"):
            sent[0] += 1
            if sent[0] == 1:
                raise QuorumError("the answer is lost")
        return answers

    monkeypatch.setattr(authority, "asking", lossy)
    (said,) = face.extend_many([(grant, 60.0)])
    assert isinstance(said, QuorumError)
    assert len(authority._leases_of(grant.proof)) == 2
    (said,) = face.extend_many([(grant, 2.0)])
    assert isinstance(said, Grant), said
    assert len(authority._leases_of(grant.proof)) == 1
    time.sleep(5.5)  # the first lease would have ended
    assert is_held(face, "r")
    assert face.release(grant) is True
    assert not is_held(face, "r")


def test_more_names_than_a_transaction_takes(authority: Etcd) -> None:
    with pytest.raises(ValueError, match="at most 40 names"):
        authority.acquire(tuple(f"r{number}" for number in range(41)), ttl=5.0, timeout=0)
    names = tuple(f"r{number}" for number in range(40))
    grant = authority.acquire(names, ttl=5.0, timeout=0)
    assert authority.release(grant) is True


@pytest.mark.long
def test_tls_with_client_certificates() -> None:
    with Cluster(tls=True) as cluster:
        assert cluster.tls is not None
        files = f"ca={cluster.tls.ca}&cert={cluster.tls.certificate}&key={cluster.tls.key}"
        with Etcd(f"{cluster.url}?{files}") as authority:
            assert take(BlockingFace(authority)) > 0

            async def main() -> None:
                grant = await authority.aio.acquire(("r",), ttl=5.0, timeout=2.0)
                assert await authority.aio.release(grant) is True
                await authority.aio.close()

            asyncio.run(main())
        for query in (f"?ca={cluster.tls.ca}", ""):
            with Etcd(cluster.url + query) as stranger, pytest.raises(QuorumError):
                stranger.acquire(("r",), ttl=5.0, timeout=0.5)
        with Etcd(cluster.url.replace("etcds", "etcd")) as plain, pytest.raises(QuorumError):
            plain.acquire(("r",), ttl=5.0, timeout=0.5)


@pytest.mark.long
def test_login_by_user_and_password() -> None:
    with Cluster(members=1, settings={"auth-token-ttl": "2"}) as cluster:
        with Etcd(cluster.login_url) as authority:
            face = BlockingFace(authority)
            first = take(face)  # no member asks for a login yet
            cluster.enable_auth()
            assert take(face) > first
            time.sleep(4.0)
            assert take(face) > first
            cluster.kill(0)
            cluster.come_back(0)
            cluster.await_healthy()
            assert take(face) > first  # the member has forgotten all tokens
        with Etcd(cluster.login_url.replace(":wonder", ":under")) as wrong:
            with pytest.raises(AuthorityError, match="refuses the login of 'alice'") as caught:
                wrong.acquire(("r",), ttl=5.0, timeout=0.5)
            assert "under" not in str(caught.value)
        with Etcd(cluster.url) as nobody, pytest.raises(AuthorityError, match="user name is empty"):
            nobody.acquire(("r",), ttl=5.0, timeout=0.5)
        elsewhere = Etcd(with_new_path(cluster.login_url))
        with elsewhere, pytest.raises(AuthorityError, match="permission denied"):
            elsewhere.acquire(("r",), ttl=5.0, timeout=0.5)


@pytest.mark.long
@pytest.mark.timed
def test_a_lease_ends_in_time_where_the_servers_make_longer_ones() -> None:
    """A lease of etcd lasts for one and a half election timeouts at least."""
    slow = {"election-timeout": "4000", "heartbeat-interval": "400"}
    with Cluster(members=1, settings=slow) as cluster, Etcd(cluster.url) as first, Etcd(cluster.url) as other:
        first.lock("r", ttl=3.0, renew=False, if_lost="warn").acquire()
        began = time.monotonic()
        other.acquire(("r",), ttl=5.0, timeout=20.0)
        assert time.monotonic() - began < 5.0


def test_an_opening_that_could_not_begin_is_begun_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another caller would wait for its threads for ever."""
    begun, start = list[threading.Thread](), _threads.start

    def start_one(thread: threading.Thread) -> None:
        begun.append(thread)
        if len(begun) > 1:
            raise RuntimeError("can't start new thread")
        thread.run = lambda: None  # type: ignore[method-assign]

    with Etcd(with_new_path(cluster.url)) as authority:
        monkeypatch.setattr(_threads, "start", start_one)
        with pytest.raises(RuntimeError):
            authority.acquire(("r",), ttl=5.0, timeout=0.5)
        monkeypatch.setattr(_threads, "start", start)
        assert take(BlockingFace(authority)) > 0


def test_a_wish_that_is_refused_spoils_no_other(authority: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(authority: Etcd, *_: Any) -> Any:
        yield from authority.all_of([messages.status()])
        raise AuthorityError("etcdserver: mvcc: database space exceeded")

    grants = [authority.acquire((name,), ttl=5.0, timeout=2.0) for name in "ab"]
    monkeypatch.setattr(Etcd, "_moving", refusing)
    longer, other = authority.extend_many([(grants[0], 50.0), (grants[1], 5.0)])
    assert isinstance(longer, AuthorityError)
    assert isinstance(other, Grant)


@pytest.mark.long
@pytest.mark.timed
@pytest.mark.parametrize("kind", ["gateway", "grpc-proxy"])
def test_through_a_proxy_of_etcd(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    """The second answers a keep-alive only while its stream is open, and tells no codes."""
    (port,) = free_ports(1)
    members = ",".join(f"127.0.0.1:{each}" for each in cluster.client_ports)
    command = [str(bundled()), kind, "start", f"--endpoints={members}", f"--listen-addr=127.0.0.1:{port}"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as proxy:
        try:
            with Etcd(with_new_path(f"etcd://127.0.0.1:{port}")) as authority:
                assert eventually(lambda: is_granted(authority))
                lock = authority.lock("r", ttl=3.0, timeout=5.0)
                lock.acquire()
                time.sleep(5.0)
                assert not lock.lease.lost
                lock.release()
                assert authority.inspect("r") is None
                assert take(BlockingFace(authority)) > 0
        finally:
            proxy.kill()


def is_granted(authority: Etcd) -> bool:
    with suppress(AuthorityError), authority.lock("first", ttl=5.0, timeout=1.0):
        return True
    return False


def test_password_is_not_shown() -> None:
    with Etcd("etcd://user:hidden@127.0.0.1:1") as authority:
        assert "hidden" not in repr(authority)
        with pytest.raises(QuorumError) as caught:
            authority.acquire(("r",), ttl=5.0, timeout=0.2)
        assert "hidden" not in str(caught.value)
        assert "127.0.0.1:1" in str(caught.value)


def test_server_that_speaks_no_http2(make_nodes: Callable[..., Any]) -> None:
    port = make_nodes(1).urls[0].rpartition(":")[2]
    with Etcd(f"etcd://127.0.0.1:{port}") as authority, pytest.raises(QuorumError, match="did not answer"):
        authority.acquire(("r",), ttl=5.0, timeout=0.2)


def test_call_that_is_cancelled_outside_its_loop(cluster: Cluster) -> None:
    """A coroutine may be closed when its loop does not run: the next call is sent anyway."""
    loop = asyncio.new_event_loop()
    link = loop.run_until_complete(LoopLink.open(members := Members(cluster.url), members.address, 2.0))

    async def start() -> messages.Answer:
        answer, begun = link.start(messages.watch(b"r", 1)), asyncio.Event()
        answer.notify = begun.set
        await begun.wait()  # from then on, the server sends nothing more
        return answer

    link.cancel(loop.run_until_complete(start()))
    assert loop.run_until_complete(link.exchange([messages.status()], 2.0))[0].is_over
    link.lose("the test is over")
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_large_requests_wait_for_room(cluster: Cluster) -> None:
    with Etcd(with_new_path(cluster.url)) as authority:
        big = messages.txn([], [messages.put(b"/big", b"x" * 1_000_000)])

        def ask() -> Any:
            (answer,) = yield from authority.asking([big], time.monotonic() + 5.0)
            return answer

        assert authority.run(ask()).status == messages.OK
        found = authority.run(authority._ranges([messages.get(b"/big")]))
        assert len(found[0][0][0].value) == 1_000_000


def test_fields_of_a_message_that_ends_too_early() -> None:
    for text in (b"\x08", b"\x12\x05ab", b"\xff\xff\xff"):
        with pytest.raises(ValueError, match="too early"):
            messages.fields_of(text)
