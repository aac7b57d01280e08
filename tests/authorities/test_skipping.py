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

#: Contends in each round that is named on stdin, and tells whether it runs, until the next line.
CONTENDER = """
import sys, time
import fencelock
fencelock.configure(sys.argv[1])

@fencelock.fenced("{name}", ttl=30.0, if_held="skip")
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
    ("count", "contenders", "rounds"),
    [
        (5, 2, 25),
        (3, 2, 25),
        pytest.param(5, 3, 200, marks=pytest.mark.long),
        pytest.param(3, 2, 200, marks=pytest.mark.long),
    ],
)
def test_of_those_that_begin_together_exactly_one_runs(
    nodes: Nodes, count: int, contenders: int, rounds: int
) -> None:
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
    called: list[int] = []
    skipping: Any = fenced("r", authority=stage.new_client(), if_held="skip", timeout=30.0)

    def work() -> str:
        called.append(1)
        return "done"

    async def work_async() -> str:
        await asyncio.sleep(0)
        return work()

    def call() -> Any:
        return skipping(work)() if stage.world == "blocking" else stage.run(skipping(work_async)())

    assert call() == "done"
    other = stage.new()
    grant = other.acquire("r", ttl=60.0)
    began = time.monotonic()
    assert call() is None
    assert time.monotonic() - began < 25.0
    assert called == [1]
    other.release(grant)
    assert call() == "done"


@pytest.mark.parametrize("stage", ["quorum, blocking", "postgresql, blocking"], indirect=True)
def test_one_of_several_threads_runs_and_the_others_skip(stage: Stage) -> None:
    client = stage.new_client()
    for number in range(10):
        barrier, decided = threading.Barrier(3), threading.Barrier(3)

        @fenced("r{number}", authority=client, if_held="skip")
        def work(number: int, decided: threading.Barrier) -> bool:  # noqa: ARG001 - named in the template
            decided.wait(30)
            return True

        def contend(number: int = number, barrier: Any = barrier, decided: Any = decided) -> bool:
            barrier.wait(30)
            if work(number, decided):
                return True
            decided.wait(30)
            return False

        assert sorted(together(contend, contend, contend)) == [False, False, True]


def test_a_timeout_of_the_function_itself_is_not_a_skip(authority: Redlock, rival: Redlock) -> None:
    @fenced("outer", authority=authority, if_held="skip")
    def work() -> None:
        authority.lock("inner", timeout=2).acquire()

    with rival.lock("inner"), pytest.raises(LockTimeoutError, match="inner"):
        work()


def test_a_block_cannot_be_skipped(authority: Redlock, rival: Redlock) -> None:
    """Entering says so without a wait; `try_acquire` is for blocks."""
    lock = authority.lock("r", if_held="skip", timeout=None)
    with rival.lock("r"):
        with pytest.raises(LockTimeoutError, match="cannot be skipped: write `if lock"), lock:
            pass
        assert lock.try_acquire() is None
    with lock:
        pass
    assert lock.try_acquire() is not None
    lock.release()
    with pytest.raises(ValueError, match="if_held is 'wait' or 'skip', not 'fail'"):
        authority.lock("r", if_held="fail")  # type: ignore[call-overload]


def test_nodes_that_do_not_answer_are_no_holder(nodes: Nodes) -> None:
    with Redlock(nodes.urls, **IMPATIENT) as quorum:
        quorum.init(base=0)
        work = fenced("r", authority=quorum, if_held="skip")(lambda: "done")
        assert work() == "done"
        for node in list(nodes)[:3]:
            node.kill()
        with pytest.raises(QuorumError):
            work()
