"""REMINT gives a larger token for the same hold, also while nodes hang, and beside a release; on real nodes.

That it is refused for a lost grant, is exclusive, and is for all resources or none is in
`tests/authorities/test_tokens`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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


def nonces(nodes: Nodes) -> list[str]:
    found = []
    for node in nodes:
        with redis.Redis.from_url(node.url, decode_responses=True) as client:
            found.append(str(client.get(f"{NODE_KEY}:l:r")).split("|")[0])
    return found


@pytest.mark.timed
def test_token_is_larger_and_the_hold_goes_on(authority: Redlock, rival: Redlock) -> None:
    """The lease is the same object; renewal, re-entry and release know the new token."""
    lock = authority.lock("r", ttl=1.0)
    with pytest.raises(NotHeldError):
        lock.remint()
    with lock as first:
        lease = lock.lease
        second = lock.remint()
        assert second > first
        assert lock.remint() > second
        assert lock.lease is lease
        with authority.lock("r", timeout=0) as again:
            assert again == lease.token > second
        time.sleep(1.5)
        assert not lease.lost
        last = lease.token
    with rival.lock("r", timeout=0) as later:
        assert later > last


def test_several_resources_get_new_tokens_in_the_order_of_the_lock(authority: Redlock) -> None:
    lock = authority.lock("b", "a")
    with lock as before:
        after = lock.remint()
        assert all(new > old for new, old in zip(after, before, strict=True))
        assert after == tuple(lease.token for lease in lock.leases)


@pytest.mark.parametrize("hung", [1, 2])
def test_minority_that_hangs_is_no_obstacle_and_keeps_the_new_lock_then(
    authority: Redlock, rival: Redlock, nodes: Nodes, *, hung: int
) -> None:
    lock = authority.lock("r", ttl=50)
    with lock as first:
        for node in nodes[:hung]:
            node.pause()
        assert lock.remint() > first
        for node in nodes[:hung]:
            node.resume()
        new = nonces(nodes)[4]
        assert eventually(lambda: set(nonces(nodes)[:hung]) <= {new, "None"})
        for _ in range(3):
            with authority.lock("other"):
                pass
        assert set(nonces(nodes)) <= {new, "None"}
    with rival.lock("r", timeout=30):
        pass


def test_majority_that_hangs_loses_the_lease(nodes: Nodes, rival: Redlock) -> None:
    """The client cannot know which nodes heard that a token was asked for: neither token is good any more."""
    told: list[Lease] = []
    with Redlock(nodes.urls, node_timeout=0.3, outage_grace=0.3) as authority:
        lock = authority.lock("r", ttl=2.0)
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
        with rival.lock("r", timeout=30) as token:
            assert token > lease.token


def test_lease_is_not_shortened_and_the_hold_not_prolonged(authority: Redlock) -> None:
    """What had been extended stays so, but for the clocks' drift; a new token is no new hold."""
    lock = authority.lock("r", ttl=2, renew=False)
    with lock:
        lock.extend(50)
        lock.remint()
        assert lock.lease.remaining > 40
    bounded = authority.lock("r", ttl=30, max_hold=40)
    with bounded:
        bounded.remint()
        before = bounded.lease.expires_at
        time.sleep(0.1)
        bounded.remint()
        assert bounded.lease.expires_at <= before + 10.0


def test_resent_remint_gets_the_answer_that_it_got_before(make_stage: Callable[..., Stage]) -> None:
    """A late duplicate of the old ACQUIRE finds the lock held; a late CONFIRM of it counts for nothing."""
    stage = make_stage()
    stage.stand_at(0, 1, 1)
    a = stage.bidder()
    old = a.request.command
    a.deliver(stage.nodes, 0, 1)
    a.resume()
    late = a.request.command
    a.deliver(stage.nodes, 0)
    a.resume()
    assert a.token == 2
    plain = attempts.Attempt.of(stage.node_set, ("r",), "anew", 30.0)
    again = replace(plain, hints=(3,), instead_of=a.attempt.nonce)
    command = acquire._acquire_command(again, stage.node_set)
    for _ in range(2):
        assert [node.execute(command).counters for node in stage.nodes] == [(3,)] * 3
    assert [node.execute(late).kind for node in stage.nodes] == [ReplyKind.LOST] * 3
    assert [node.execute(old).kind for node in stage.nodes] == [ReplyKind.HELD] * 3
    assert {node.client.get(f"{NODE_KEY}:l:r") for node in stage.nodes} == {"anew|0|3"}


@pytest.mark.parametrize("asks_first", [True, False], ids=["remint arrives first", "release arrives first"])
@pytest.mark.parametrize("method", ["remint_gen", "extend_gen"], ids=["remint", "extend"])
def test_release_in_another_thread_meanwhile_leaves_nothing(
    authority: Redlock, rival: Redlock, monkeypatch: pytest.MonkeyPatch, *, method: str, asks_first: bool
) -> None:
    """Whichever reaches the nodes first: the caller learns that the lock is over, and it is free."""
    lock = authority.lock("r", ttl=30, renew=False)
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
    with rival.lock("r", timeout=5):
        pass
