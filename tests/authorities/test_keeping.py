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
from tests.authorities.faces import acquire_briefly, is_free_soon, is_held
from tests.authorities.kinds import EACH_SORT_TOO, IN_PROCESSES
from tests.authorities.stage import Stage

#: A lock that is kept for too long, or not released, is held for this long or longer.
LONG = 20.0


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


@pytest.mark.parametrize("ttl", [0.4, 40.0], ids=["longer than its ttl", "shorter than its ttl"])
def test_a_lease_stays_until_then_and_no_longer(stage: Stage, ttl: float) -> None:
    lock = stage.new_client().lock("r", ttl=ttl, at_least=1.0)
    began = time.monotonic()
    enter(stage, lock)
    assert lock.leases == ()
    assert 1.0 <= free_after(stage, "r") - began < LONG


@pytest.mark.parametrize("stage", EACH_SORT_TOO, indirect=True)
def test_leaving_a_block_does_not_wait_until_then(stage: Stage) -> None:
    lock = stage.new_client().lock("a", "b", at_least=40.0, timeout=2)
    enter(stage, lock)
    other = stage.new()
    assert is_held(other, "a")
    assert is_held(other, "b")
    with pytest.raises(LockTimeoutError, match=r"'[ab]' is held by .*process"):
        enter(stage, lock)


@pytest.mark.parametrize("stage", EACH_SORT_TOO, indirect=True)
def test_a_block_that_takes_longer_releases_as_usual(stage: Stage) -> None:
    enter(stage, stage.new_client().lock("r", ttl=40.0, at_least=0.1), seconds=0.3)
    assert is_free_soon(stage.new(), "r")


def test_the_longest_of_the_blocks_counts(stage: Stage) -> None:
    client = stage.new_client()
    began = time.monotonic()
    enter(stage, client.lock("r", at_least=0.1), inner=client.lock("r", at_least=1.0))
    assert 1.0 <= free_after(stage, "r") - began < LONG


def test_a_lost_lease_is_not_kept(stage: Stage) -> None:
    lock = stage.new_client().lock("r", ttl=0.5, renew=False, at_least=40.0)
    with pytest.raises(LockLostError):
        enter(stage, lock, seconds=0.7)
    assert is_free_soon(stage.new(), "r")


def test_keeping_what_another_has_changes_nothing(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    grant = acquire_briefly(mine, "r")
    newer = other.acquire("r", ttl=50.0, timeout=20.0)
    assert mine.run(mine.client.keep_gen(grant, time.monotonic() + 0.1)) is False
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
@pytest.mark.parametrize("stage", IN_PROCESSES, indirect=True)
def test_a_kept_lease_outlives_its_process(stage: Stage) -> None:
    command = [sys.executable, "-c", PROGRAM, stage.kind.mortal or stage.kind.url]
    ended = subprocess.run([*command, "3"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr
    assert 2.9 < free_after(stage, "r") - float(ended.stdout) < LONG
    with subprocess.Popen([*command, "60", "sleep"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.wait()
    assert free_after(stage, "r") - time.monotonic() < LONG


def test_nodes_refuse_a_time_for_which_they_would_not_remember(authority: Redlock) -> None:
    """Before the block is entered: a node that forgot the lease would grant it again."""
    lock = authority.lock("r", at_least=3600.0)
    with pytest.raises(
        ValueError, match="at_least\\) of 3600 s is longer than the 60 s that these nodes allow"
    ):
        lock.acquire()
    assert not authority.lock("r").locked()


@pytest.mark.parametrize("way", ["transaction", "late extension"])
def test_what_ends_after_the_block_keeps_it_too(authority: Redlock, rival: Redlock, way: str) -> None:
    lock = authority.lock("r", ttl=40.0, at_least=1.0)
    began, transaction = time.monotonic(), object()
    with lock:
        lease, (hold,) = lock.lease, lock._entered[0].holds
        if way == "transaction":
            lease._need(transaction)
    if way == "transaction":
        assert lease._left
        for call in lease._let_go(transaction):
            call()
        assert lease._released
    else:
        authority.extend_many([(hold.grant, 40.0)])
        hold.release_finished = True
        for steps in release_again(hold):
            authority.run(steps)
    while rival.lock("r").locked():
        time.sleep(0.02)
    assert 1.0 <= time.monotonic() - began < LONG


@pytest.mark.parametrize("stage", ["quorum, asyncio", "asyncpg, asyncio", "sqlite, asyncio"], indirect=True)
def test_a_task_that_is_cancelled_while_it_leaves_keeps_the_lease(stage: Stage) -> None:
    """It does not wait for the answer, and what it asked for is done all the same."""
    client = stage.new_client()
    began = time.monotonic()

    async def block() -> None:
        async with client.lock("r", ttl=40.0, at_least=1.5):
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    with pytest.raises(CancelledError):
        stage.run(block())
    assert 1.5 <= free_after(stage, "r") - began < LONG
