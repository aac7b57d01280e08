"""REMINT gives a larger token for the same hold, and no other holder comes in between; on real nodes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import redis

from fencelock import Lease, Redlock
from fencelock._generators import Steps
from fencelock.authority.redlock.protocol import acquire, attempts
from fencelock.authority.redlock.protocol.messages import ReplyKind
from fencelock.errors import LockLostError, NotHeldError
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY, Stage
from tests.redlock.test_scripts import Scripts

pytestmark = pytest.mark.timed

RESOURCE = "r"


def nonces(nodes: Nodes) -> list[str]:
    """Return whose lock each running node has."""
    found = []
    for node in nodes:
        with redis.Redis.from_url(node.url, decode_responses=True) as client:
            found.append(str(client.get(f"{NODE_KEY}:l:{RESOURCE}")).split("|")[0])
    return found


def test_token_is_larger_and_the_hold_goes_on(authority: Redlock, rival: Redlock) -> None:
    """The lease is the same object; renewal, re-entry and release know the new token."""
    lock = authority.lock(RESOURCE, ttl=0.6)
    with lock as first:
        lease = lock.lease
        second = lock.remint()
        assert second > first
        assert lock.remint() > second
        assert lock.lease is lease
        with authority.lock(RESOURCE, timeout=0) as again:
            assert again == lease.token > second
        time.sleep(1.0)
        assert not lease.lost
        last = lease.token
    with rival.lock(RESOURCE, timeout=0) as later:
        assert later > last


def test_several_resources_get_new_tokens_together(authority: Redlock) -> None:
    """In the order of the lock."""
    lock = authority.lock("b", "a")
    with lock as before:
        after = lock.remint()
        assert all(new > old for new, old in zip(after, before, strict=True))
        assert after == tuple(lease.token for lease in lock.leases)


def test_nobody_comes_between(authority: Redlock, rival: Redlock) -> None:
    """A rival that tries all the time gets the lock once, after the release."""
    got: list[tuple[int, bool]] = []
    over = threading.Event()

    def compete() -> None:
        with rival.lock(RESOURCE, timeout=30) as token:
            got.append((token, over.is_set()))

    lock = authority.lock(RESOURCE)
    with lock:
        thread = threading.Thread(target=compete)
        thread.start()
        tokens = [lock.remint() for _ in range(100)]
        over.set()
    thread.join(30)
    assert tokens == sorted(set(tokens))
    ((token, came_last),) = got
    assert came_last
    assert token > tokens[-1]


def test_minority_that_hangs_is_no_obstacle(authority: Redlock, rival: Redlock, nodes: Nodes) -> None:
    """It keeps the old lock only until it hears of the new one."""
    lock = authority.lock(RESOURCE, ttl=20)
    with lock as first:
        for node in nodes[:2]:
            node.pause()
        assert lock.remint() > first
        for node in nodes[:2]:
            node.resume()
        new = nonces(nodes)[4]
        assert eventually(lambda: set(nonces(nodes)[:2]) <= {new, "None"})
    with rival.lock(RESOURCE, timeout=2):
        pass


def test_late_grant_of_a_new_token_is_kept(authority: Redlock, nodes: Nodes) -> None:
    """A node that hangs during REMINT, and answers afterwards, keeps the new lock: it is in use."""
    lock = authority.lock(RESOURCE, ttl=20)
    with lock:
        nodes[4].pause()
        lock.remint()
        nodes[4].resume()
        for _ in range(3):
            with authority.lock("other"):
                time.sleep(0.05)
        assert len(set(nonces(nodes))) == 1


def test_majority_that_hangs_loses_the_lease(authority: Redlock, rival: Redlock, nodes: Nodes) -> None:
    """The token was asked for, and the client cannot know which nodes heard so.

    Neither token is good any more.
    """
    told: list[Lease] = []
    lock = authority.lock(RESOURCE, ttl=1.0)
    lock.on_lost(told.append)
    lease = lock.acquire()
    for node in nodes[:3]:
        node.pause()
    with pytest.raises(LockLostError, match="no new token"):
        lock.remint()
    assert lease.lost
    assert told == [lease]
    for node in nodes[:3]:
        node.resume()
    with pytest.raises(LockLostError, match="a new token was asked for"):
        lease._check()
    with pytest.raises(LockLostError):
        lock.release()
    with rival.lock(RESOURCE, timeout=3) as token:
        assert token > lease.token


def test_lock_that_somebody_else_has_is_not_minted_anew(
    authority: Redlock, rival: Redlock, nodes: Nodes
) -> None:
    """The lease had been lost, and the holder had not noticed."""
    lock = authority.lock(RESOURCE, ttl=20)
    lock.acquire()
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.delete(f"{NODE_KEY}:l:{RESOURCE}")
    with rival.lock(RESOURCE, timeout=2) as theirs:
        with pytest.raises(LockLostError):
            lock.remint()
        assert eventually(lambda: len(set(nonces(nodes))) == 1)
        with pytest.raises(LockLostError):
            lock.release()
        with rival.lock(RESOURCE, timeout=0) as again:
            assert again == theirs


def test_what_is_not_held_or_lost_is_not_minted_anew(authority: Redlock) -> None:
    """Each with its own error, and without asking a node."""
    lock = authority.lock(RESOURCE, ttl=0.1, renew=False)
    with pytest.raises(NotHeldError):
        lock.remint()
    lock.acquire()
    time.sleep(0.15)
    with pytest.raises(LockLostError, match="has ended"):
        lock.remint()
    with pytest.raises(LockLostError):
        lock.release()


def test_lease_is_not_shortened(authority: Redlock) -> None:
    """What had been extended for longer stays so; the clocks' drift over it is all that is lost."""
    lock = authority.lock(RESOURCE, ttl=2, renew=False)
    with lock:
        lock.extend(50)
        lock.remint()
        assert lock.lease.remaining > 48


def test_max_hold_bounds_the_hold_all_the_same(authority: Redlock) -> None:
    """A new token is no new hold."""
    lock = authority.lock(RESOURCE, ttl=1, max_hold=1.2)
    with lock:
        began = time.monotonic()
        time.sleep(0.9)
        lock.remint()
        assert lock.lease.expires_at < began + 1.2


def test_tasks_mint_anew(authority: Redlock) -> None:
    """`await lock.aio.remint()`."""

    async def main() -> None:
        lock = authority.lock(RESOURCE)
        async with lock as first:
            assert await lock.aio.remint() == lock.lease.token > first
        await authority.aio.close()

    asyncio.run(main())


@pytest.fixture
def scripts(nodes: Nodes) -> Iterator[Scripts]:
    """The scripts of one node, with counters from 0."""
    made = Scripts(nodes[0].url, base=0)
    yield made
    made.real.close()


def test_resent_remint_gets_the_answer_that_it_got_before(scripts: Scripts) -> None:
    """And a late duplicate of the old ACQUIRE finds the lock held."""
    scripts.acquire("n1", RESOURCE)
    attempt = replace(
        attempts.Attempt.of(scripts.node_set, (RESOURCE,), "n2", 30.0), hints=(5,), instead_of="n1"
    )
    command = acquire._acquire_command(attempt, scripts.node_set)
    assert scripts.real.execute(command).counters == (5,)
    assert scripts.real.execute(command).counters == (5,)
    assert scripts.acquire("n1", RESOURCE).kind is ReplyKind.HELD
    assert scripts.lock(RESOURCE) == "n2|0|5"


def test_late_confirm_of_the_old_token_counts_for_nothing(nodes: Nodes) -> None:
    """The schedule of a CONFIRM that is under way during REMINT: the old nonce is over by then."""
    stage = Stage(nodes.urls[:3])
    try:
        stage.stand_at(0, 1, 1)
        a = stage.bidder()
        a.deliver(stage.nodes, 0, 1)
        a.resume()
        late = a.request.command
        a.deliver(stage.nodes, 0)
        a.resume()
        assert a.token == 2
        again = replace(
            attempts.Attempt.of(stage.node_set, (RESOURCE,), "anew", 30.0),
            hints=(3,),
            instead_of=a.attempt.nonce,
        )
        command = acquire._acquire_command(again, stage.node_set)
        assert [node.execute(command).counters for node in stage.nodes] == [(3,)] * 3
        assert [node.execute(late).kind for node in stage.nodes] == [ReplyKind.LOST] * 3
    finally:
        stage.close()


@pytest.mark.parametrize("asks_first", [True, False], ids=["remint arrives first", "release arrives first"])
@pytest.mark.parametrize("method", ["remint_gen", "extend_gen"], ids=["remint", "extend"])
def test_release_in_another_thread_meanwhile_leaves_nothing(
    authority: Redlock, rival: Redlock, monkeypatch: pytest.MonkeyPatch, *, method: str, asks_first: bool
) -> None:
    """Whichever reaches the nodes first: the caller learns that the lock is over, and it is free."""
    lock = authority.lock(RESOURCE, ttl=30, renew=False)
    lock.acquire()
    real = getattr(authority, method)

    def release() -> None:
        with suppress(LockLostError):  # no lock may have its old nonce any more
            lock.release()

    def meanwhile(*arguments: Any) -> Steps[Any]:
        answer = (yield from real(*arguments)) if asks_first else None
        releaser = threading.Thread(target=release)
        releaser.start()
        releaser.join()
        return answer if asks_first else (yield from real(*arguments))

    monkeypatch.setattr(authority, method, meanwhile)
    with pytest.raises(LockLostError, match="has ended"):
        lock.remint() if method == "remint_gen" else lock.extend()
    with rival.lock(RESOURCE, timeout=0):
        pass


def test_task_that_releases_meanwhile_leaves_nothing(authority: Redlock, rival: Redlock) -> None:
    """The same for two tasks that use one lock object, in whatever order they come to run."""

    async def main() -> None:
        for _ in range(50):
            lock = authority.lock(RESOURCE, ttl=30)
            await lock.aio.acquire()
            await asyncio.gather(lock.aio.remint(), lock.aio.release(), return_exceptions=True)
            async with rival.lock(RESOURCE, timeout=1.0):
                pass

    asyncio.run(main())
