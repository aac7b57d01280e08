"""`fenced_lock` keeps its promises about arguments, re-entry, losing and leaving, on five real nodes."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import enum
import inspect
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_type

import pytest
import redis

import fencelock
from fencelock import FencedLock, Redlock, _locking, errors, fenced, fenced_lock
from fencelock.errors import (
    AuthorityError,
    LockLostError,
    LockTimeoutError,
    MembershipError,
    NodesNotInitialisedError,
    NotHeldError,
    QuorumError,
)
from fencelock.lease import Lease, held_leases
from fencelock.lock.options import AllLockSettings, LockSettings
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.views import is_free, locks_on


def forget(nodes: Nodes, resource: str = "r") -> None:
    """End the lock of a resource on every node."""
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.delete(f"{{fencelock}}:l:{resource}")


def outlive(lease: Lease) -> None:
    """Return when a lease that nothing renews has ended."""
    assert eventually(lambda: lease.lost)


SOMEWHERE = Redlock("redis://nobody.invalid")
HELD = Redlock("redis://127.0.0.1:1")
REFUSED: list[tuple[Callable[[Any], object], list[Any], type[Exception], str]] = [
    (lambda ttl: fenced_lock("r", ttl=ttl), [-1, 0, -0.0, math.nan, math.inf, 0.009], ValueError, "ttl"),
    (lambda ttl: fenced_lock("r", ttl=ttl), ["30", None, True, b"1", 1j, [1]], TypeError, "ttl"),
    (lambda timeout: fenced_lock("r", timeout=timeout), [-0.001, math.nan, math.inf], ValueError, "timeout"),
    (lambda timeout: fenced_lock("r").acquire(timeout=timeout), [-1, math.nan], ValueError, "timeout"),
    (lambda timeout: fenced_lock("r", timeout=timeout), ["1", True, [1]], TypeError, "timeout"),
    (
        lambda name: fenced_lock("good", name),
        ["", " ", "a ", "\ta", "a\n", "a\x00b", "a\x7fb", "\ud800", "x" * 256, "x" * 10_000, "\u3000x"],
        ValueError,
        "resource",
    ),
    (fenced_lock, [b"r", 1, None, ("r",)], TypeError, "str"),
    (lambda names: fenced_lock(*names), [[]], ValueError, "name what to lock"),
    (
        lambda wrong: fenced_lock("r", authority=wrong),
        ["redis://127.0.0.1:6379", 7, object()],
        TypeError,
        r"is a Redlock\(…\), Database\(…\), Etcd\(…\) or ZooKeeper\(…\), ",
    ),
    (
        lambda setting: fenced_lock("r", **{setting: "no"}),  # type: ignore[call-overload]
        ["renew", "fair", "reentrant", "shared"],
        TypeError,
        r"True or False.*='no'|is True or False, not 'no'",
    ),
    (
        lambda make: make("r", tll=5),
        [fenced_lock, SOMEWHERE.lock, fenced],
        TypeError,
        "unexpected keyword argument 'tll'",
    ),
    (lambda authority: SOMEWHERE.lock("r", authority=authority), [None], TypeError, "'authority'"),  # type: ignore[call-overload]
    (lambda word: fenced_lock("r", if_lost=word), ["shout"], ValueError, "if_lost"),
    (
        lambda time: fenced_lock("r", at_least=time),
        [0, -1, math.nan, math.inf],
        ValueError,
        "is a positive",
    ),
    (lambda it: fenced_lock("r", at_least=it), [604_801], ValueError, "longer than a week"),
    (
        lambda time: fenced_lock("r", at_least=time),
        ["1h", True],
        TypeError,
        "is a number of seconds",
    ),
    (lambda name: getattr(HELD.lock("r"), name)(), ["release", "extend", "hand_over"], NotHeldError, "r"),
    (lambda name: getattr(HELD.lock("r"), name), ["lease"], NotHeldError, "r"),
]


@pytest.mark.parametrize(("call", "values", "error", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_is_refused_when_the_lock_is_made(
    call: Callable[[Any], object], values: list[Any], error: type[Exception], says: str
) -> None:
    for value in values:
        with pytest.raises(error, match=says):
            call(value)


def test_settings_are_the_parameters_of_fenced_lock() -> None:
    parameters = list(inspect.signature(fenced_lock).parameters.values())
    assert {each.name: each.default for each in parameters[1:]} == {
        "ttl": 30.0,
        "timeout": 10.0,
        "renew": True,
        "max_hold": 3600.0,
        "fair": False,
        "reentrant": True,
        "if_lost": "raise",
        "if_held": "wait",
        "at_least": None,
        "shared": False,
        "readers": None,
        "authority": None,
    }
    assert {each.name for each in parameters[1:]} == AllLockSettings.__optional_keys__
    of_the_class = list(inspect.signature(FencedLock).parameters.values())[2:]
    of_all = {"authority": None, "shared": False, "readers": None}
    assert {each.name: each.default for each in of_the_class} | of_all == {
        each.name: each.default for each in parameters[1:]
    }
    assert AllLockSettings.__optional_keys__ - LockSettings.__optional_keys__ == {"authority"}


def test_a_name_that_comes_twice_is_one_lock(authority: Redlock) -> None:
    lock = authority.lock("a", "b", "a", timeout=0)
    for _ in range(2):
        with lock as tokens:
            assert tokens[0] == tokens[2] != 0
            assert len(tokens) == 3
            assert [lease.resource for lease in lock.leases] == ["a", "b", "a"]
            assert lock.lease is lock.leases[0]
            reminted = lock.remint()
            assert reminted[0] == reminted[2] > tokens[0]
        assert not lock.locked()
    with authority.lock("a", "a") as tokens, authority.lock("b", "a", "b", timeout=0) as others:
        assert tokens == (others[1], others[1])


def test_any_other_text_is_a_name(authority: Redlock) -> None:
    names = ["straße:1", "订单:1", "🔒", "a b", "x" * 255, "{1}:b", "a|b", "%s", "é", "e\u0301", "\u200bx"]
    for name in names:
        with authority.lock(name) as token:
            assert token == 1
            assert held_leases()[-1].resource == name


def test_a_token_is_an_int_and_several_are_a_tuple(authority: Redlock) -> None:
    """At run time and for the type checker, in the order in which they were named."""
    with fenced_lock("b", authority=authority) as token:
        assert_type(token, int)
        assert token == 1
    with fenced_lock("b", "a", authority=authority) as tokens:
        assert_type(tokens, tuple[int, ...])
        assert tokens == (2, 1)
    with authority.lock("b") as token:
        assert_type(token, int)
    assert_type(authority.lock("a", "b"), FencedLock[tuple[int, ...]])


def test_the_timeout_is_that_of_the_lock_or_of_the_call(authority: Redlock, rival: Redlock) -> None:
    with authority.lock("r"):
        for lock, options in ((rival.lock("r", timeout=0.3), {}), (rival.lock("r"), {"timeout": 0.3})):
            began = time.monotonic()
            with pytest.raises(LockTimeoutError):
                lock.acquire(**options)
            assert 0.29 < time.monotonic() - began < 9.0


def test_a_lock_held_by_a_foreign_value_says_so(authority: Redlock, nodes: Nodes) -> None:
    """A key without an end, written by something else: the message names it."""
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.set("{fencelock}:l:r", "foreign")
    with pytest.raises(LockTimeoutError, match=r"held for ever.*\{fencelock\}:l:r") as failure:
        authority.lock("r", timeout=0.1).acquire()
    assert failure.value.holder_ttl == math.inf


def test_a_lease_tells_what_is_held_and_for_how_long(authority: Redlock) -> None:
    lock = authority.lock("r", ttl=60, renew=False)
    with lock as token:
        lease = lock.lease
        assert (lease.resource, lease.token) == ("r", token)
        assert 30.0 < lease.remaining < 59.41
        before, left, after = time.monotonic(), lease.remaining, time.monotonic()
        assert before + left - 1e-6 < lease.expires_at < after + left + 1e-6
        assert not lease.lost
    assert lease._released
    assert not lease.lost
    assert lock.leases == ()


def test_a_lock_may_be_used_again(authority: Redlock) -> None:
    lock = authority.lock("r")
    for expected in (1, 2):
        with lock as token:
            assert token == expected
    with pytest.raises(KeyError) as failure, lock:
        raise KeyError("r")
    assert not hasattr(failure.value, "__notes__")
    with lock as token:
        assert token == 4
    with pytest.raises(NotHeldError):
        lock.release()


@pytest.mark.complaint("redis-py#4279", "reacquire() and extend() of a Lock(timeout=0) delete it")
@pytest.mark.complaint("Redisson's RFencedLock", "each re-entry has a new token")
def test_holder_enters_again_with_the_same_token(authority: Redlock, rival: Redlock) -> None:
    lock = authority.lock("r")
    with lock as token:
        with lock as again, authority.lock("r", timeout=0) as once_more:
            assert again == once_more == token
        assert rival.lock("r").try_acquire() is None
        assert [lease.token for lease in held_leases()] == [token]
    assert held_leases() == ()
    with rival.lock("r", timeout=0) as later:
        assert later > token


def test_the_holder_of_some_resources_takes_only_the_others(authority: Redlock, rival: Redlock) -> None:
    with authority.lock("a", "b") as (a, b):
        with authority.lock("b", "c") as (b_again, _), authority.lock("a", "b") as both:
            assert (b_again, both) == (b, (a, b))
        assert is_free(rival, "c")
        assert not is_free(rival, "a")
        assert not is_free(rival, "b")


def test_another_thread_or_task_waits_like_anybody_else(authority: Redlock) -> None:
    lock = authority.lock("r", timeout=0)
    with lock, ThreadPoolExecutor(1) as other, pytest.raises(LockTimeoutError):
        other.submit(lock.acquire).result()

    async def child() -> list[str]:
        assert authority.lock("r").try_acquire() is None
        with authority.lock("inner"):
            return [lease.resource for lease in held_leases()]

    async def parent() -> None:
        with authority.lock("r"):
            assert await asyncio.create_task(child()) == ["r", "inner"]
            assert [lease.resource for lease in held_leases()] == ["r"]
            with authority.lock("r", timeout=0):
                pass

    asyncio.run(parent())


@pytest.mark.complaint("Redisson's getToken()", "a stale holder is shown the token of the newer one")
def test_lost_lease_is_acquired_anew(authority: Redlock) -> None:
    """The inner block gets a token of its own, for the lost one may have been exceeded."""
    outer = authority.lock("r", ttl=1.0, renew=False)
    stale = outer.acquire()
    outlive(stale)
    before = stale.token
    with authority.lock("r", timeout=20) as token, authority.lock("r", timeout=0) as again:
        assert token == again > before == stale.token
        assert held_leases()[-1].token == token
    with pytest.raises(LockLostError, match="ended before"):
        outer.release()


def test_a_lock_object_that_was_thrown_away_is_not_entered_again(authority: Redlock) -> None:
    """No caller could leave its block any more, so the next caller waits until the lease ends."""
    authority.lock("r", ttl=1.0).acquire()  # not renewed either, though no argument says so
    with authority.lock("r", timeout=20) as token:
        assert token > 1


def test_a_body_may_release_by_itself(authority: Redlock, rival: Redlock) -> None:
    lock = authority.lock("r")
    with ThreadPoolExecutor(1) as other:
        with lock:
            lock.release()
            other.submit(lock.acquire).result()
        assert not is_free(rival, "r")
        other.submit(lock.release).result()
    assert is_free(rival, "r")
    with lock:
        with lock:
            lock.release()
        assert not is_free(rival, "r"), "each block leaves what it entered, once"
    assert is_free(rival, "r")


def test_blocks_may_be_left_in_another_order(authority: Redlock, rival: Redlock) -> None:
    lock = authority.lock("r")

    def inside() -> Generator[None]:
        with lock:
            yield

    first, second = inside(), inside()
    next(first)
    next(second)
    first.close()
    assert not is_free(rival, "r")
    next(third := inside())
    second.close()
    assert not is_free(rival, "r")
    third.close()
    assert is_free(rival, "r")


def test_what_ended_while_others_were_waited_for_is_not_entered(authority: Redlock, rival: Redlock) -> None:
    """The body would run under a token that another holder may have exceeded; nothing is left behind."""
    obstacle = rival.lock("b")
    obstacle.acquire()
    outer = authority.lock("a", ttl=1.0, renew=False)
    lease = outer.acquire()
    both = authority.lock("a", "b", timeout=40)

    def give_way() -> None:
        outlive(lease)
        obstacle.release()

    with ThreadPoolExecutor(1) as threads:
        released = threads.submit(give_way)
        with pytest.raises(LockLostError, match="'a' has ended"), both:
            pytest.fail("the body ran")
        released.result()
    assert both.leases == ()
    assert eventually(lambda: is_free(rival, "a") and is_free(rival, "b"))
    with pytest.raises(LockLostError):
        outer.release()


def test_what_is_left_while_others_are_waited_for_stays_held(authority: Redlock, rival: Redlock) -> None:
    """The block that waits for "b" is inside "a" already, so the outer one's end does not release it."""
    outer, obstacle = authority.lock("a"), rival.lock("b")
    token = outer.acquire().token
    obstacle.acquire()

    def give_way() -> None:
        outer.release()
        obstacle.release()

    timer = threading.Timer(0.1, give_way)
    timer.start()
    with authority.lock("a", "b", timeout=40) as (still, _):
        assert still == token
        timer.join()
        assert not is_free(rival, "a")
    assert is_free(rival, "a")
    assert is_free(rival, "b")


def test_a_lease_that_ended_before_the_work_raises_on_leaving(authority: Redlock, nodes: Nodes) -> None:
    """By time, and where the nodes no longer know it; it does not hide the body's own exception."""
    lock = authority.lock("r", ttl=1.0, renew=False)
    with pytest.raises(LockLostError, match="ended before the work did"), lock:
        outlive(lock.lease)

    def work() -> None:
        with authority.lock("r"):
            forget(nodes)
            raise KeyError("the body's own")

    with pytest.raises(LockLostError), authority.lock("r"):
        forget(nodes)
    with pytest.raises(KeyError) as failure:
        work()
    assert any("ended before the work did" in note for note in failure.value.__notes__)
    with authority.lock("r", timeout=0) as token:
        assert token == 4


def test_an_extension_moves_the_end_and_keeps_the_token(authority: Redlock) -> None:
    """It is for the ttl of the lock, or for a given one, and never moves the end nearer."""
    lock = authority.lock("r", ttl=20, renew=False)
    with lock as token:
        lock.extend(60)
        assert lock.lease.remaining > 30
        lock.extend()
        assert lock.lease.remaining > 25
        assert lock.lease.token == token
        with pytest.raises(ValueError, match="ttl"):
            lock.extend(0)


@pytest.mark.complaint(
    "aioredlock, redlock-rb#36", "an extension sets the key, whether or not it was still there"
)
def test_lease_whose_time_ran_out_is_not_extended(authority: Redlock, nodes: Nodes) -> None:
    lock = authority.lock("r", ttl=1.0, renew=False)
    outlive(lock.acquire())
    for call in (lock.extend, lock.hand_over):
        with pytest.raises(LockLostError):
            call()
    assert eventually(lambda: locks_on(nodes) == [])
    with pytest.raises(LockLostError):
        lock.release()


@pytest.mark.complaint("redlock-ng", "the body runs although nothing was acquired")
def test_failed_acquisition_never_runs_the_body(authority: Redlock, rival: Redlock, nodes: Nodes) -> None:
    ran = []
    with authority.lock("r"), pytest.raises(LockTimeoutError), rival.lock("r", timeout=0):
        ran.append("held by another")
    for node in nodes[:3]:
        node.kill()
    with pytest.raises(QuorumError), rival.lock("other", timeout=0):
        ran.append("no quorum")
    assert ran == []
    assert held_leases() == ()


@pytest.mark.complaint(
    "redsync#107, #144, #158, #168, node-redlock#288", "one error stands for everything that can go wrong"
)
def test_held_unreachable_and_refused_are_three_errors(
    authority: Redlock, rival: Redlock, nodes: Nodes
) -> None:
    with authority.lock("r"), pytest.raises(LockTimeoutError) as held:
        rival.lock("r", timeout=0).acquire()
    assert held.value.holder_ttl is not None
    with Redlock(nodes.urls[:3]) as fewer, pytest.raises(MembershipError, match="initialised as 5"):
        fewer.lock("r", timeout=0).acquire()
    with (
        Redlock(nodes.urls, namespace="new") as blank,
        pytest.raises(NodesNotInitialisedError, match="fencelock init"),
    ):
        blank.lock("r", timeout=0).acquire()
    for node in nodes[:3]:
        node.kill()
    with pytest.raises(QuorumError) as unreachable:
        rival.lock("r", timeout=0).acquire()
    assert sum("unreachable" in said for said in unreachable.value.nodes.values()) == 3
    kinds = (LockTimeoutError, QuorumError, MembershipError, NodesNotInitialisedError)
    assert not any(issubclass(one, other) for one in kinds for other in kinds if one is not other)


def test_held_leases_are_those_of_the_context(authority: Redlock) -> None:
    lock = authority.lock("b", "c")
    with ThreadPoolExecutor(1) as elsewhere, authority.lock("a") as first:
        others = lock.__enter__()
        assert [lease.resource for lease in held_leases()] == ["a", "b", "c"]
        assert [lease.token for lease in held_leases()] == [first, *others]
        assert elsewhere.submit(held_leases).result() == ()
        snapshot = contextvars.copy_context()
        assert len(snapshot.run(held_leases)) == 3
        elsewhere.submit(lock.release).result()
        assert [lease.resource for lease in held_leases()] == ["a"]
    assert held_leases() == ()
    assert snapshot.run(held_leases) == ()


def test_errors_survive_pickling() -> None:
    """Whole, with what they carry; so that they may cross a process boundary."""
    samples = [
        LockTimeoutError("held", holder_ttl=1.5),
        LockLostError("lost"),
        NotHeldError("not held"),
        errors.QuorumError("too few", nodes={"redis://a": "silent"}),
        errors.NodesNotInitialisedError("blank"),
        errors.MembershipError("others"),
        errors.CountersExhaustedError("no more"),
        errors.LeaseTableMissingError("no table"),
        errors.StaleTokenError("orders", (1,), 3, 4, detail="x"),
        errors.StaleReadError("orders", (1,), 5, 4, 3),
        errors.UnfencedWriteError("none"),
        errors.ReceiptMismatchError("deposit:1"),
        errors.CommitInDoubtError("who knows"),
    ]
    bases = {"FencelockError", "LockError", "AuthorityError", "FenceError"}
    assert {type(sample).__name__ for sample in samples} | bases == set(errors.__all__)
    for sample in samples:
        for twin in (pickle.loads(pickle.dumps(sample)), copy.copy(sample)):  # noqa: S301 - our own
            assert type(twin) is type(sample)
            assert str(twin) == str(sample)
            assert vars(twin) == vars(sample)


def test_the_default_authority_comes_from_configure_or_from_the_environment(
    authority: Redlock, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_locking, "_default", None)
    monkeypatch.delenv("FENCELOCK_URL", raising=False)
    with pytest.raises(AuthorityError, match="FENCELOCK_URL"):
        fenced_lock("r").acquire()
    monkeypatch.setenv("FENCELOCK_URL", nodes.url)
    with fenced_lock("r") as token:
        assert token == 1
    from_environment = _locking.default_authority()
    assert isinstance(from_environment, Redlock)
    from_environment.close()
    assert fencelock.configure(authority) is authority
    with fenced_lock("r") as token:
        assert token == 2


@pytest.mark.parametrize(
    ("environment", "named", "warns"),
    [
        ("redis://a:1,redis://b:2", "redis://b:2,redis://a:1", False),
        ("redis://a:1", "redis://b:2", True),
        ("sqlite:///x.db", "redis://b:2", True),
        ("sqlite:///x.db", "sqlite+aiosqlite:///x.db", False),
        ("postgresql+psycopg://cli:x@h/shop", "postgresql+asyncpg://app:y@h:5432/shop?ssl=prefer", False),
        ("postgresql+psycopg://h/shop", "postgresql+psycopg://h/other", True),
        ("nonsense", "redis://b:2", True),
        ("", "redis://b:2", False),
    ],
)
def test_configure_warns_where_the_environment_names_another_place(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    environment: str,
    named: str,
    *,
    warns: bool,
) -> None:
    """Commands use that, so that a program and `fencelock run` would not exclude each other."""
    monkeypatch.setattr(_locking, "_default", None)
    monkeypatch.setenv("FENCELOCK_URL", environment)
    fencelock.configure(named)
    assert ("FENCELOCK_URL" in caplog.text) is warns


def test_a_lock_is_released_where_it_was_granted(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_locking, "_default", None)
    lock = fenced_lock("r")
    with Redlock(nodes[0].url) as first, Redlock(nodes[1].url) as second:
        for authority in (first, second):
            authority.init(base=0)
        fencelock.configure(first)
        with lock:
            fencelock.configure(second)
        with first.lock("r", timeout=0), lock as token:
            assert token == 1


def test_nonces_are_drawn_when_they_are_needed(authority: Redlock, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is kept in store: two processes restored from one snapshot would bid as one, and get one token."""
    drawn: list[bytes] = []
    draw = os.urandom

    def patched(size: int) -> bytes:
        drawn.append(draw(size))
        return drawn[-1]

    monkeypatch.setattr(os, "urandom", patched)
    for count in range(1, 4):
        with authority.lock("r"), authority.lock("s"):
            assert len([word for word in drawn if len(word) == 8]) == 2 * count


class Name(str, enum.Enum):  # noqa: UP042 - which is formatted as its text
    """Resources that an application has gathered; formatted, they are `Name.ACCOUNT`."""

    ACCOUNT = "account:1"


def test_a_name_that_equals_a_text_locks_what_the_text_does(authority: Redlock, rival: Redlock) -> None:
    """It does not matter which of the two came first, in which process."""
    for mine, theirs in ((Name.ACCOUNT, "account:1"), ("account:1", Name.ACCOUNT)):
        with authority.lock(mine):
            assert rival.lock(theirs, timeout=0).try_acquire() is None
            with authority.lock(theirs):  # again, as it is held already
                assert [type(lease.resource) for lease in held_leases()] == [str]
    grant = authority.acquire((Name.ACCOUNT,), ttl=5, timeout=5)
    assert rival.lock("account:1", timeout=0).try_acquire() is None
    assert authority.release(grant)
