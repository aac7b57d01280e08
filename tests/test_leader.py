"""`leader` elects one of several candidates, term after term, and tells it when its term ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from fencelock import Redlock, StaleTokenError, Term, fenced_lock, leader
from fencelock.errors import LockLostError, LockTimeoutError, MembershipError, QuorumError
from fencelock.lease import held_leases
from proof import leaders
from proof.servers import Nodes
from tests.authorities.stage import together
from tests.conftest import ROOT
from tests.polling import IMPATIENT, eventually


def take_from(authority: Redlock, name: str = "r") -> None:
    """Take the lock from its holder, which hears of it at its next extension."""
    assert authority.force_release(name) is not None


def test_block_is_a_term(authority: Redlock) -> None:
    """It is current inside, by the lease that guards; it is over when the block is left."""
    candidate = leader("r", authority=authority)
    with candidate as term:
        assert term.wait(0.01)
        assert term.token == term.lease.token
        assert held_leases() == (term.lease,)
        assert repr(candidate) == "<leader 'r' elected>"
        assert repr(term) == f"<Term of 'r' token={term.token} current>"
    assert not term.is_current
    assert not term.wait(10)
    with candidate as following:
        assert following.token > term.token
        assert not term.is_current
    assert repr(candidate) == "<leader 'r' not elected>"


def test_block_of_a_coroutine_is_a_term(authority: Redlock) -> None:
    """The same object serves it."""

    async def lead() -> Term:
        async with leader("r", authority=authority) as term:
            assert await term.wait_async(0.01)
            assert held_leases() == (term.lease,)
        assert not await term.wait_async(10)
        return term

    assert not asyncio.run(lead()).is_current


def test_second_candidate_waits_for_the_first(authority: Redlock, rival: Redlock) -> None:
    """However long it takes, and then at once."""
    elected = threading.Event()

    def campaign() -> None:
        with leader("r", authority=rival):
            elected.set()

    with leader("r", authority=authority):
        thread = threading.Thread(target=campaign)
        thread.start()
        assert not elected.wait(0.5)
    assert elected.wait(1.0)
    thread.join()


@pytest.mark.timed
@pytest.mark.parametrize("waits", [True, False], ids=["while it waits", "between two looks"])
def test_term_is_over_when_the_loss_is_known(authority: Redlock, waits: bool) -> None:
    """The renewal finds it, calls back, and wakes what sleeps."""
    told: list[Term] = []

    def lead() -> None:
        with leader("r", ttl=1.5, authority=authority) as term:
            term.on_end(told.append)
            take_from(authority)
            began = time.monotonic()
            if waits:
                assert not term.wait(20)
            else:
                assert eventually(lambda: not term.is_current)
            assert time.monotonic() - began < 1.5
            assert told == [term]
            term.on_end(told.append)
            assert told == [term, term]

    with pytest.raises(LockLostError):
        lead()
    assert len(told) == 2


@pytest.mark.timed
def test_term_is_over_before_its_lease_is(nodes: Nodes) -> None:
    """By the clock: nodes that answer no more let nothing be known."""
    with Redlock(nodes.urls[:1], **IMPATIENT) as quorum:
        quorum.init(base=0)
        with leader("r", ttl=1.0, authority=quorum) as term:
            nodes[0].pause()
            assert not term.wait(20)
            assert not term.lease.lost
            assert 0.05 < term.lease.remaining < 0.15
            nodes[0].resume()
            time.sleep(0.5)
            assert not term.is_current, "it is over for good"


@pytest.mark.timed
def test_coroutine_is_woken_at_the_end(authority: Redlock) -> None:
    """By the renewal of its loop, and where the block is left meanwhile."""

    async def lead() -> tuple[bool, float]:
        async with leader("r", ttl=1.5, authority=authority) as term:
            task = asyncio.create_task(term.wait_async(20))
            await asyncio.sleep(0.1)
        began = time.monotonic()
        return await task, time.monotonic() - began

    goes_on, seconds = asyncio.run(lead())
    assert not goes_on
    assert seconds < 0.5


@pytest.mark.timed
def test_thread_is_woken_when_the_block_is_left(authority: Redlock) -> None:
    """It may work for the leader."""
    outcome: list[bool] = []
    with leader("r", authority=authority) as term:
        thread = threading.Thread(target=lambda: outcome.append(term.wait(20)))
        thread.start()
        time.sleep(0.1)
    thread.join(1.0)
    assert outcome == [False]


def test_callback_that_fails_is_logged(authority: Redlock, caplog: pytest.LogCaptureFixture) -> None:
    """And the next one is called."""
    told: list[Term] = []

    def fail(term: Term) -> None:
        raise ValueError(f"{term.token}")

    with leader("r", authority=authority) as term:
        term.on_end(fail)
        term.on_end(told.append)
    assert told == [term]
    assert "a callback of on_end failed" in caplog.text

    async def wrong(term: Term) -> None:
        """Be no plain function."""

    with pytest.raises(TypeError, match="on_end takes a plain function"):
        term.on_end(wrong)
    with pytest.raises(TypeError, match="run takes a plain function"):
        leader("r", authority=authority).run(None)  # type: ignore[call-overload]


def test_threads_share_an_object(authority: Redlock) -> None:
    """Each has its own term, one after the other; the same thread does not enter twice."""
    candidate = leader("r", authority=authority)
    with candidate, pytest.raises(LockTimeoutError, match="this same thread"), candidate:
        pass
    tokens: list[int] = []

    def campaign() -> None:
        with candidate as term:
            assert term.wait(0.05)
            tokens.append(term.token)

    together(campaign, campaign, campaign)
    assert tokens == sorted({*tokens})
    assert len(tokens) == 3


@pytest.mark.timed
def test_leader_that_was_thrown_away_is_not_renewed(authority: Redlock, rival: Redlock) -> None:
    """Nothing but its user keeps it: no callback does."""
    leader("r", ttl=1.0, authority=authority).__enter__()
    rival.acquire(("r",), ttl=1.0, timeout=2.0)


def test_run_returns_what_work_returns(authority: Redlock) -> None:
    assert leader("r", authority=authority).run(lambda term: term.token) > 0
    assert not fenced_lock("r", authority=authority).locked()

    async def work(term: Term) -> int:
        await asyncio.sleep(0)
        return term.token

    async def campaign() -> int:
        return await leader("r", authority=authority).run(work)

    assert asyncio.run(campaign()) > 0


def lost(term: Term) -> None:
    """Fail as a write under the lease does."""
    term.lease._token_to_write()


def stale(term: Term) -> None:
    """Fail as a write after the next leader's does, on a row."""
    assert not term.is_current
    raise StaleTokenError("t", (1,), term.token, term.token + 1)


@pytest.mark.timed
@pytest.mark.parametrize("late", [lost, stale, repr], ids=["lost", "stale", "returns"])
def test_run_campaigns_again_after_a_lost_term(
    authority: Redlock, rival: Redlock, late: Callable[[Term], None]
) -> None:
    """Whether work notices, is refused, or returns."""
    tokens: list[int] = []

    def work(term: Term) -> str:
        tokens.append(term.token)
        if len(tokens) == 1:
            take_from(rival)
            assert not term.wait(20)
            late(term)
        return "done"

    assert leader("r", ttl=1.5, authority=authority).run(work) == "done"
    first, second = tokens
    assert first < second


@pytest.mark.timed
def test_coroutine_campaigns_again_after_a_lost_term(authority: Redlock, rival: Redlock) -> None:
    """As blocking code does."""
    tokens: list[int] = []

    async def work(term: Term) -> str:
        tokens.append(term.token)
        if len(tokens) == 1:
            await asyncio.to_thread(take_from, rival)
            assert not await term.wait_async(20)
            lost(term)
        return "done"

    async def campaign() -> str:
        return await leader("r", ttl=1.5, authority=authority).run(work)

    assert asyncio.run(campaign()) == "done"
    assert tokens[0] < tokens[1]


def test_other_errors_of_work_are_its_callers(authority: Redlock) -> None:
    """Also those of the guard, while the term is current; the leader has resigned."""
    errors = (ValueError("no"), StaleTokenError("t", (1,), 1, 2))

    def fail(error: Exception) -> Callable[[Term], None]:
        def work(_: Term) -> None:
            raise error

        return work

    for error in (*errors, QuorumError("of another lock")):
        with pytest.raises(type(error)):
            leader("r", authority=authority).run(fail(error))
        assert not fenced_lock("r", authority=authority).locked()


def test_nodes_that_are_away_do_not_end_a_campaign(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """It goes on when they are back, and has logged why it was not elected."""
    with Redlock(nodes.urls, **IMPATIENT) as quorum:
        quorum.init(base=0)
        for node in list(nodes)[:3]:
            node.pause()

        def resume() -> None:
            for node in nodes:
                node.resume()

        timer = threading.Timer(2.0, resume)
        timer.start()
        with caplog.at_level(logging.WARNING, "fencelock.leader"):
            assert leader("r", authority=quorum).run(lambda term: term.is_current)
        timer.join()
    assert "r: could not take part in the election, and tries again soon: " in caplog.text


def test_nodes_that_need_an_operator_end_a_campaign(nodes: Nodes) -> None:
    """Trying again would not help."""
    with Redlock(nodes.urls) as five, Redlock(nodes.urls[:3]) as three:
        five.init(base=0)
        with pytest.raises(MembershipError):
            leader("r", authority=three).run(lambda term: term.token)


def test_forked_child_does_not_lead(authority: Redlock) -> None:
    """The term is its parent's."""
    with leader("r", authority=authority) as term:
        child = os.fork()
        if not child:
            os._exit(int(term.is_current))
        assert os.waitpid(child, 0)[1] == 0
        assert term.is_current


@pytest.mark.long
def test_next_leader_comes_in_time() -> None:
    """One round in short; the control, whose term ignores the clock, is current beside the next one."""
    figures = leaders.measure("quorum", 1, 2.0)
    assert figures.faults(2.0) == [], leaders.report("quorum", figures)
    assert figures.terms >= 4
    assert figures.written > 10


@pytest.mark.long
@pytest.mark.timeout(300)
def test_figures_of_leaders() -> None:
    """Over nodes and each database, with the control."""
    ended = subprocess.run(
        [sys.executable, "-m", "proof.leaders", "--rounds", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("all as it must be\n")


class Daemon:
    """A copy of the example, and what it has printed so far."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.process: Any = subprocess.Popen(
            [sys.executable, "-W", "error", str(ROOT / "examples" / "leader.py"), url],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        stack.callback(self._end)

    def _read(self) -> None:
        self.lines += iter(self.process.stdout.readline, "")

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()

    @property
    def leads(self) -> int:
        """How often it was elected."""
        return sum("leads with token" in line for line in self.lines)


def count_of(url: str) -> int:
    engine = create_engine(url)
    with engine.connect() as connection:
        count = connection.scalar(text("SELECT count FROM reports")) or 0
    engine.dispose()
    return int(count)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends what a test has started."""
    with ExitStack() as made:
        yield made


@pytest.mark.long
def test_example_in_three_copies(tmp_path: Path, stack: ExitStack) -> None:
    """One is killed, the next is stopped and woken, the third is told to end: another one counts on."""
    url = f"sqlite:///{tmp_path / 'daemon.db'}"
    copies = [Daemon(url, stack) for _ in range(3)]

    def next_leader(elections: int, seconds: float) -> Daemon:
        assert eventually(lambda: sum(copy.leads for copy in copies) == elections, seconds), elections
        (found,) = (
            copy
            for copy in copies
            if copy.lines and "leads with token" in copy.lines[-1] and copy not in gone
        )
        return found

    gone: list[Daemon] = []
    first = next_leader(1, 20.0)
    assert eventually(lambda: count_of(url) > 3)
    first.process.kill()
    gone.append(first)
    second = next_leader(2, 3.0)
    counted = count_of(url)
    assert eventually(lambda: count_of(url) > counted + 3)
    second.process.send_signal(signal.SIGSTOP)
    gone.append(second)
    third = next_leader(3, 3.0)
    second.process.send_signal(signal.SIGCONT)
    assert eventually(lambda: count_of(url) > counted + 6)
    gone.remove(second)
    third.process.terminate()
    gone.append(third)
    assert next_leader(4, 1.5) is second, [copy.lines for copy in copies]
    assert third.process.wait(5) == 128 + signal.SIGTERM
    assert not any("Traceback" in line for copy in copies for line in copy.lines)
