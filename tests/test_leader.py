"""`leader` elects one of several candidates, term after term, and tells it when its term ends."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from fencelock import Redlock, StaleTokenError, Term, fenced_lock, leader
from fencelock.errors import LockLostError, LockTimeoutError, MembershipError, QuorumError
from fencelock.lease import held_leases
from proof.servers import Nodes
from tests.authorities.stage import together
from tests.conftest import ROOT
from tests.polling import IMPATIENT, eventually


def take_from(authority: Redlock, name: str = "r") -> None:
    assert authority.force_release(name) is not None


def test_block_is_a_term(authority: Redlock) -> None:
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
    async def lead() -> Term:
        async with leader("r", authority=authority) as term:
            assert await term.wait_async(0.01)
            assert held_leases() == (term.lease,)
        assert not await term.wait_async(10)
        return term

    assert not asyncio.run(lead()).is_current


def test_second_candidate_waits_for_the_first(authority: Redlock, rival: Redlock) -> None:
    elected = threading.Event()

    def campaign() -> None:
        with leader("r", authority=rival):
            elected.set()

    with leader("r", authority=authority):
        thread = threading.Thread(target=campaign)
        thread.start()
        assert not elected.wait(0.5)
    assert elected.wait(30)
    thread.join()


@pytest.mark.parametrize("waits", [True, False], ids=["while it waits", "between two looks"])
def test_term_is_over_when_the_loss_is_known(authority: Redlock, waits: bool) -> None:
    told: list[Term] = []

    def lead() -> None:
        with leader("r", ttl=3, authority=authority) as term:
            term.on_end(told.append)
            take_from(authority)
            if waits:
                assert not term.wait(3600)
            else:
                assert eventually(lambda: not term.is_current)
            assert term.lease.lost
            assert told == [term]
            term.on_end(told.append)
            assert told == [term, term]

    with pytest.raises(LockLostError):
        lead()
    assert len(told) == 2


def test_term_is_over_a_tenth_before_its_lease_and_for_good(authority: Redlock) -> None:
    """By the clock: nodes that answer no more let nothing be known."""
    with leader("r", ttl=60, authority=authority) as term:
        term.lease._extend_to(time.monotonic() + 6.3)
        assert not term.wait(3600)
        assert 0 < term.lease.remaining < 6.1
        assert not term.lease.lost
        term.lease._extend_to(time.monotonic() + 60)
        assert not term.is_current


def test_who_waits_for_the_end_is_woken_when_the_block_is_left(authority: Redlock) -> None:
    async def lead() -> bool:
        async with leader("r", authority=authority) as term:
            task = asyncio.create_task(term.wait_async(3600))
            await asyncio.sleep(0.1)
        return await asyncio.wait_for(task, 30)

    with ThreadPoolExecutor(1) as pool:
        with leader("r", authority=authority) as term:
            waiting = pool.submit(term.wait, 3600)
            time.sleep(0.1)
        assert not waiting.result(30)
    assert not asyncio.run(lead())


def test_callback_that_fails_is_logged(authority: Redlock, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Term] = []

    def fail(term: Term) -> None:
        raise ValueError(f"{term.token}")

    with leader("r", authority=authority) as term:
        term.on_end(fail)
        term.on_end(told.append)
    assert told == [term]
    assert "a callback of on_end failed" in caplog.text

    async def wrong(term: Term) -> None: ...

    with pytest.raises(TypeError, match="on_end takes a plain function"):
        term.on_end(wrong)


def test_threads_share_an_object(authority: Redlock) -> None:
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
    leader("r", ttl=1.0, authority=authority).__enter__()
    rival.acquire(("r",), ttl=1.0, timeout=30)


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
    term.lease._token_to_write()


def lost_in_a_task(term: Term) -> None:
    lost(term)


def stale(term: Term) -> None:
    assert not term.is_current
    raise StaleTokenError("t", (1,), term.token, term.token + 1)


@pytest.mark.parametrize("late", [lost, lost_in_a_task, stale, repr])
def test_run_campaigns_again_after_a_lost_term(
    authority: Redlock, rival: Redlock, late: Callable[[Term], None]
) -> None:
    tokens: list[int] = []

    def work(term: Term) -> str:
        tokens.append(term.token)
        if len(tokens) == 1:
            take_from(rival)
            assert not term.wait(3600)
            late(term)
        return "done"

    async def work_in_a_task(term: Term) -> str:
        return await asyncio.to_thread(work, term)

    async def campaign() -> str:
        return await leader("r", ttl=3, authority=authority).run(work_in_a_task)

    done = (
        asyncio.run(campaign())
        if late is lost_in_a_task
        else leader("r", ttl=3, authority=authority).run(work)
    )
    assert done == "done"
    first, second = tokens
    assert first < second


def test_other_errors_of_work_are_its_callers(authority: Redlock) -> None:
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
    ended = list[Term]()
    with leader("r", authority=authority) as term:
        term.on_end(ended.append)
        child = os.fork()
        if not child:  # the callbacks belong to its parent
            os._exit(int(term.is_current or bool(ended)))
        assert os.waitpid(child, 0)[1] == 0
        assert term.is_current


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


def test_a_loss_of_another_lock_does_not_end_the_term(authority: Redlock) -> None:
    calls = []

    def work(term: Term) -> None:
        calls.append(term.token)
        raise LockLostError("the lease of 'another' has ended", written=False)

    with pytest.raises(LockLostError, match="another"):
        leader("jobs", authority=authority).run(work)
    assert len(calls) == 1


def test_work_that_returns_a_coroutine_is_refused_before_it_is_left(authority: Redlock) -> None:
    async def work(term: Term) -> int:
        return term.token

    candidate = leader("jobs", authority=authority)
    with pytest.raises(TypeError, match="the work of a leader returned a coroutine"):
        candidate.run(lambda term: work(term))  # noqa: PLW0108
