"""`at_least` keeps a lease after its block until a moment, with every authority, for threads and tasks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest

from fencelock import Redlock
from fencelock.errors import LockLostError, LockTimeoutError
from fencelock.lock.renewal import release_again
from tests.authorities.faces import is_held
from tests.authorities.kinds import BLOCKING
from tests.authorities.stage import Stage

pytestmark = pytest.mark.timed

#: Seconds by which an end may be late: a busy machine answers slowly.
LATE = 0.35


def enter(stage: Stage, lock: Any, seconds: float = 0.0, inner: Any = None) -> None:
    """Enter a lock, perhaps another one inside it, and leave them after some seconds."""
    if stage.world == "blocking":
        with lock:
            if inner is not None:
                with inner:
                    pass
            time.sleep(seconds)
        return

    async def block() -> None:
        async with lock:
            if inner is not None:
                async with inner:
                    pass
            time.sleep(seconds)  # noqa: ASYNC251 - no other task is needed meanwhile

    stage.run(block())


def free_after(stage: Stage, *resources: str) -> float:
    """Return when another client could have the resources, by `time.monotonic`; it tries again and again."""
    other = stage.new()
    while is_held(other, *resources):
        time.sleep(0.02)
    return time.monotonic()


def free_for(rival: Redlock) -> float:
    """Return when "r" is free, by `time.monotonic`."""
    while rival.lock("r").locked():
        time.sleep(0.02)
    return time.monotonic()


@pytest.mark.parametrize("ttl", [0.4, 30.0], ids=["longer than its ttl", "shorter than its ttl"])
def test_lease_stays_until_then_and_no_longer(stage: Stage, ttl: float) -> None:
    """Where its ttl ends before that, and where it would last long after."""
    client: Any = stage.new_client()
    lock = client.lock("r", ttl=ttl, at_least=0.9)
    began = time.monotonic()
    enter(stage, lock)
    left = time.monotonic()
    assert left - began < 0.8
    assert lock.leases == ()
    took = free_after(stage, "r") - began
    assert 0.9 <= took < 0.9 + LATE + (left - began)


def test_several_resources_are_kept_together(stage: Stage) -> None:
    """Each of them is refused until then."""
    client: Any = stage.new_client()
    began = time.monotonic()
    enter(stage, client.lock("a", "b", at_least=1.0))
    other = stage.new()
    assert is_held(other, "a")
    assert is_held(other, "b")
    assert free_after(stage, "a", "b") - began >= 1.0


def test_block_that_takes_longer_releases_as_usual(stage: Stage) -> None:
    """At once, and not a ttl later."""
    client: Any = stage.new_client()
    enter(stage, client.lock("r", at_least=0.3), seconds=0.6)
    assert not is_held(stage.new(), "r")


def test_inner_block_asks_for_longer(stage: Stage) -> None:
    """The longest of the blocks counts, since the grant of the lease that they share."""
    client: Any = stage.new_client()
    began = time.monotonic()
    enter(stage, client.lock("r", at_least=0.1), inner=client.lock("r", at_least=1.0))
    assert free_after(stage, "r") - began >= 1.0


def test_same_owner_waits_like_others(stage: Stage) -> None:
    """It has left, so there is nothing to enter again; the error names the process, which is this one."""
    client: Any = stage.new_client()
    lock = client.lock("r", at_least=20.0, timeout=0)
    enter(stage, lock)
    with pytest.raises(LockTimeoutError, match=r"'r' is held by .*process"):
        enter(stage, lock)


def test_lost_lease_is_not_kept(stage: Stage) -> None:
    """Its next holder has it, and is left alone."""
    client: Any = stage.new_client()
    lock = client.lock("r", ttl=0.4, renew=False, at_least=5.0)
    with pytest.raises(LockLostError):
        enter(stage, lock, seconds=0.6)
    assert not is_held(stage.new(), "r")


def test_keeping_what_another_has_changes_nothing(stage: Stage) -> None:
    """Also where the holder's own clock has not noticed."""
    mine, other = stage.new(), stage.new()
    client: Any = mine.client
    grant = mine.acquire("r", ttl=0.3)
    time.sleep(0.5)
    newer = other.acquire("r", ttl=10.0)

    def keep() -> Any:
        return client.keep_gen(grant, time.monotonic() + 0.1)

    async def keep_async() -> Any:
        return await client.aio.run(keep())

    kept = client.run(keep()) if stage.world == "blocking" else stage.run(keep_async())
    assert kept is False
    time.sleep(0.3)
    assert is_held(mine, "r")
    assert other.release(newer) is True


PROGRAM = """
import sys, time
import fencelock
fencelock.configure(sys.argv[1])
with fencelock.fenced_lock("r", ttl=1.0, at_least=float(sys.argv[2])):
    print(time.monotonic(), flush=True)
    if len(sys.argv) > 3:
        time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.parametrize("stage", BLOCKING, indirect=True)
def test_lease_outlives_its_process(stage: Stage) -> None:
    """It exits at once, and the lease stays; one that is killed keeps nothing beyond its ttl."""
    url, late = stage.kind.mortal or stage.kind.url, stage.kind.late
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, "3"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr
    assert 2.9 < free_after(stage, "r") - float(ended.stdout) < 3.0 + LATE + late
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, url, "60", "sleep"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.wait()
    assert free_after(stage, "r") - time.monotonic() < 1.5 + late


def test_nodes_refuse_a_time_for_which_they_would_not_remember(authority: Redlock) -> None:
    """Before the block is entered: a node that forgot the lease would grant it again."""
    lock = authority.lock("r", at_least=3600.0)
    with pytest.raises(
        ValueError, match="at_least\\) of 3600 s is longer than the 60 s that these nodes allow"
    ):
        lock.acquire()
    assert not authority.lock("r").locked()


@pytest.mark.parametrize(
    ("seconds", "error", "says"),
    [
        (0, ValueError, "at_least is a positive number of seconds, or None"),
        (-1, ValueError, "at_least is a positive"),
        (float("nan"), ValueError, "at_least is a positive"),
        (float("inf"), ValueError, "at_least is a positive"),
        (604_801, ValueError, "longer than a week"),
        ("1h", TypeError, "at_least is a number of seconds"),
        (True, TypeError, "at_least is a number of seconds"),
    ],
)
def test_what_is_no_time_is_refused(
    authority: Redlock, seconds: Any, error: type[Exception], says: str
) -> None:
    """When the lock is made."""
    with pytest.raises(error, match=says):
        authority.lock("r", at_least=seconds)


def test_release_of_a_transaction_keeps_too(authority: Redlock, rival: Redlock) -> None:
    """The lease of a block that waits for a transaction is kept when the transaction ends."""
    lock = authority.lock("r", at_least=1.0)
    began = time.monotonic()
    transaction = object()
    with lock:
        lease = lock.lease
        lease._need(transaction)
    assert lease._left
    for call in lease._let_go(transaction):
        call()
    assert lease._released
    assert 1.0 <= free_for(rival) - began < 1.0 + LATE


def test_extension_that_ends_after_the_block_does_not_undo_it(authority: Redlock, rival: Redlock) -> None:
    """It may have made the locks again, or longer: they are kept once more, and not released."""
    lock = authority.lock("r", ttl=30.0, at_least=1.0)
    began = time.monotonic()
    with lock:
        (hold,) = lock._entered[0].holds
    authority.extend_many([(hold.grant, 30.0)])
    hold.release_finished = True
    for steps in release_again(hold):
        authority.run(steps)
    assert 1.0 <= free_for(rival) - began < 1.0 + LATE


@pytest.mark.parametrize("stage", ["quorum, asyncio", "asyncpg, asyncio", "sqlite, asyncio"], indirect=True)
def test_task_that_is_cancelled_while_it_leaves_keeps_the_lease(stage: Stage) -> None:
    """It does not wait for the answer, and what it asked for is done all the same."""
    client: Any = stage.new_client()
    began = time.monotonic()

    async def block() -> None:
        async with client.lock("r", ttl=30.0, at_least=1.5):
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    with pytest.raises(CancelledError):
        stage.run(block())
    assert 1.5 <= free_after(stage, "r") - began < 1.5 + LATE
