"""`if_held="skip"` waits for no holder, and exactly one of several contenders that begin together runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from fencelock import Redlock, fenced
from fencelock.errors import LockTimeoutError, QuorumError
from proof.servers import Nodes
from tests.authorities.stage import Stage, together
from tests.polling import IMPATIENT

pytestmark = pytest.mark.timed

#: Contends in each round that is named on stdin, and tells whether it runs, until the next line.
CONTENDER = """
import sys, time
import fencelock
fencelock.configure(sys.argv[1])

@fencelock.fenced("{name}", ttl=10.0, if_held="skip")
def run(name):
    print("runs", flush=True)
    sys.stdin.readline()
    return True

while line := sys.stdin.readline():
    name, at = line.split()
    time.sleep(max(0.0, float(at) - time.monotonic() - 0.001))
    while time.monotonic() < float(at):
        pass
    if not run(name):
        print("skips", flush=True)
        sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("contenders", "rounds"),
    [(2, 25), pytest.param(2, 200, marks=pytest.mark.long), pytest.param(3, 200, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("count", [5, 3])
def test_of_those_that_begin_together_exactly_one_runs(
    nodes: Nodes, count: int, contenders: int, rounds: int
) -> None:
    """In processes, at the same moment, by votes that may be split."""
    url = ",".join(nodes.urls[:count])
    with Redlock(url) as quorum:
        quorum.init(base=0)
    command = [sys.executable, "-c", CONTENDER, url]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(contenders)
    ]
    outcomes = []

    def tell(line: str) -> None:
        for process in processes:
            assert process.stdin is not None
            print(line, file=process.stdin, flush=True)

    try:
        for number in range(rounds + 1):
            tell(f"r{number} {time.monotonic() + 0.01}")
            outcomes.append(sorted(process.stdout.readline() for process in processes if process.stdout))
            tell("go on")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert outcomes == [["runs\n", *["skips\n"] * (contenders - 1)]] * (rounds + 1)


def test_a_call_is_skipped_while_another_holds_the_lock(stage: Stage) -> None:
    """At once; the function is not called, and runs once the lock is free."""
    client: Any = stage.new_client()
    other = stage.new()
    called: list[int] = []

    if stage.world == "blocking":

        @fenced("r", authority=client, if_held="skip", timeout=30.0)
        def work() -> str:
            called.append(1)
            return "done"

        call = work
    else:

        @fenced("r", authority=client, if_held="skip", timeout=30.0)
        async def work_async() -> str:
            called.append(1)
            await asyncio.sleep(0)
            return "done"

        def call() -> str:
            return stage.run(work_async())

    assert call() == "done"
    grant = other.acquire("r")
    began = time.monotonic()
    assert call() is None
    assert time.monotonic() - began < 1.0
    assert called == [1]
    other.release(grant)
    assert call() == "done"


def test_threads_of_one_process(stage: Stage) -> None:
    """Of several that begin together one runs, and the others skip."""
    if stage.world != "blocking":
        pytest.skip("threads block")
    client: Any = stage.new_client()
    for number in range(10):
        barrier, decided = threading.Barrier(3), threading.Barrier(3)

        @fenced("r{number}", authority=client, if_held="skip")
        def work(number: int, decided: threading.Barrier) -> bool:  # noqa: ARG001 - named in the template
            decided.wait(20)
            return True

        def contend(number: int = number, barrier: Any = barrier, decided: Any = decided) -> bool:
            barrier.wait(20)
            if work(number, decided):
                return True
            decided.wait(20)
            return False

        assert sorted(together(contend, contend, contend)) == [False, False, True]


def test_timeout_of_the_function_itself_is_not_a_skip(authority: Redlock, rival: Redlock) -> None:
    """It has begun, so its error is its caller's."""
    grant = rival.acquire(("inner",), ttl=10.0, timeout=0)

    @fenced("outer", authority=authority, if_held="skip")
    def work() -> None:
        authority.lock("inner", timeout=0).acquire()

    with pytest.raises(LockTimeoutError, match="inner"):
        work()
    rival.release(grant)


def test_block_cannot_be_skipped(authority: Redlock, rival: Redlock) -> None:
    """Entering says so at once; `try_acquire` is for blocks, and an explicit timeout waits."""
    grant = rival.acquire(("r",), ttl=10.0, timeout=0)
    lock = authority.lock("r", if_held="skip")
    began = time.monotonic()
    with (
        pytest.raises(LockTimeoutError, match="cannot be skipped: write `if lock"),
        lock,
    ):
        pass
    assert time.monotonic() - began < 1.0
    assert lock.try_acquire() is None
    rival.release(grant)
    with lock:
        pass
    assert lock.try_acquire() is not None
    lock.release()


def test_nodes_that_do_not_answer_are_no_holder(nodes: Nodes) -> None:
    """Too few of them to decide: the call raises, and is not skipped."""
    with Redlock(nodes.urls, **IMPATIENT) as quorum:
        quorum.init(base=0)

        @fenced("r", authority=quorum, if_held="skip")
        def work() -> str:
            return "done"

        assert work() == "done"
        for node in list(nodes)[:3]:
            node.kill()
        with pytest.raises(QuorumError):
            work()


def test_other_words_are_refused(authority: Redlock) -> None:
    """When the lock is made."""
    with pytest.raises(ValueError, match="if_held is 'wait' or 'skip', not 'fail'"):
        authority.lock("r", if_held="fail")  # type: ignore[call-overload]
