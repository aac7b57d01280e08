"""The schedule of renewal extends each lease in time, on a clock of the tests."""

from __future__ import annotations

import gc
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from fencelock import Lease
from fencelock._generators import Steps, run
from fencelock.authority.base import Grant, Wish
from fencelock.errors import FencelockError, LockLostError, QuorumError
from fencelock.lock.hold import Hold
from fencelock.lock.renewal import BatchRenewer, tell


class Plans(BatchRenewer):
    """What a renewer means to do, without a thread or a loop that does it."""

    def add(self, hold: Hold) -> None:
        """See `Clockwork.hold`."""

    def stop(self, hold: Hold) -> None:
        """See `Renewer.cancel`."""

    async def stop_soon(self, hold: Hold) -> None:
        """See `Renewer.cancel`."""


class Asked(NamedTuple):
    """An extension that was asked for: of what, when, and for how many seconds."""

    resource: str
    at: float
    seconds: float


class Clockwork:
    """Holds, a renewer, and an authority that answers as a test says; time passes in `run` only.

    Attributes:
        now: the time.
        answer: what the authority says to a wish: a grant, or an error that it returns or raises.
        asked: the extensions that were asked for.
        rounds: how many wishes each call of the authority had.
        released: the grants that the renewer released.
        told: when `on_lost` was called for which lease.
    """

    def __init__(self) -> None:
        self.now = self.began = time.monotonic()
        self.plans = Plans()
        self.answer: Callable[[Grant, float], Grant | Exception] = self.extend
        self.asked: list[Asked] = []
        self.rounds: list[int] = []
        self.released: list[Grant] = []
        self.told: list[tuple[Lease, float]] = []

    def hold(self, ttl: float, max_hold: float = math.inf, resource: str = "r", token: int = 1) -> Hold:
        """Return a lock that is held, and extended from now on."""
        grant = Grant((resource,), (token,), self.now + ttl, None)
        made = Hold(self, grant, None, ttl, self.now + max_hold)  # type: ignore[arg-type]
        made.tell_when_lost([lambda lease: self.told.append((lease, self.now))])
        self.plans.reschedule(made, self.now)
        return made

    def extend(self, grant: Grant, seconds: float) -> Grant:
        """Answer as an authority does that takes no time."""
        return Grant(grant.resources, grant.tokens, self.now + seconds, None)

    def run(self, seconds: float) -> None:
        """Let time pass, and let the renewer do its due work."""
        end = self.now + seconds
        while self.plans.next_at <= end:
            self.now = max(self.now, self.plans.next_at)
            self.look_at(self.plans.pop_due(self.now))
        self.now = end

    def look_at(self, due: Sequence[Hold]) -> None:
        if due:
            run(self.plans.renew_due(due, lambda: self.now, tell), self._refuse)
        self.plans._in_flight = frozenset()  # as each driver says when it has done so

    def _refuse(self, step: object) -> None:
        raise TypeError(f"nothing here takes time: {step!r}")

    def release_gen(self, grant: Grant) -> Steps[bool]:
        """See `Authority.release_gen`."""
        self.released.append(grant)
        yield from ()
        return True

    def extend_gen(self, wishes: Sequence[Wish]) -> Steps[list[Grant | FencelockError]]:
        """See `Authority.extend_gen`."""
        yield from ()
        self.rounds.append(len(wishes))
        self.asked += [Asked(grant.resources[0], self.now, seconds) for grant, seconds in wishes]
        outcomes: list[Grant | FencelockError] = []
        for wish in wishes:
            outcome = self.answer(*wish)
            if not isinstance(outcome, Grant | FencelockError):
                raise outcome
            outcomes.append(outcome)
        return outcomes


@pytest.fixture
def work() -> Clockwork:
    """A clock, and nothing that is held yet."""
    return Clockwork()


def test_extension_is_planned_for_a_third_of_the_ttl(work: Clockwork) -> None:
    hold = work.hold(ttl=9.0)
    assert 3.0 - 1e-6 <= hold.renew_at - work.now < 3.0 * 17 / 16
    hold.note_extension(Grant(("r",), (1,), work.now + 1.0, None))
    work.plans.reschedule(hold, work.now)
    assert 0.5 - 1e-6 <= hold.renew_at - work.now < 0.5 + 3.0 / 16
    hold.note_extension(Grant(("r",), (1,), work.now + 9.0, None))
    work.plans.reschedule(hold, work.now)
    work.answer = lambda _grant, _seconds: QuorumError("nobody")
    work.run(3.0 * 17 / 16)
    assert 0.45 - 1e-6 <= hold.renew_at - work.asked[-1].at < 0.45 * 17 / 16
    assert hold.last_error == "nobody"


@pytest.mark.parametrize("ttl", [0.1, 0.6, 30.0])
def test_held_lease_outlives_its_ttl_for_as_long_as_it_is_held(work: Clockwork, ttl: float) -> None:
    hold = work.hold(ttl)
    work.run(100 * ttl)
    assert not hold.over
    assert hold.grant.expires_at > work.now + 0.6 * ttl
    assert {asked.seconds for asked in work.asked} == {ttl}
    pauses = [later.at - one.at for one, later in zip(work.asked, work.asked[1:], strict=False)]
    assert ttl / 3 - 1e-6 <= min(pauses) <= max(pauses) < ttl / 3 * 17 / 16 + 1e-6
    assert work.plans.cancel(hold)
    before = len(work.asked)
    work.run(100 * ttl)
    assert len(work.asked) == before


@pytest.mark.complaint("redisson#5698", "a renewal that failed once is never tried again")
def test_outage_that_is_shorter_than_the_validity_is_survived(work: Clockwork) -> None:
    hold = work.hold(ttl=2.0)
    work.answer = lambda _grant, _seconds: QuorumError("nobody answers")
    work.run(1.85)  # the last try that is sure to come before the end is 0.15 s before it
    assert 11 <= len(work.asked) <= 13
    assert not hold.over
    work.answer = work.extend
    work.run(10.0)
    assert not hold.over
    assert not hold.last_error
    assert work.told == []


@pytest.mark.parametrize("ttl", [0.6, 30.0])
def test_lease_that_cannot_be_extended_in_time_is_lost_when_its_time_is_over(
    work: Clockwork, ttl: float
) -> None:
    hold = work.hold(ttl)
    end = hold.grant.expires_at
    work.answer = lambda _grant, _seconds: QuorumError("no answer in time")
    work.run(5 * ttl)
    ((lease, when),) = work.told
    assert end <= when < end + ttl / 20
    with pytest.raises(LockLostError, match=r"could not be extended in time: no answer in time"):
        lease._check()
    assert work.released == [hold.grant]
    assert max(asked.at for asked in work.asked) < end


def test_process_that_was_held_up_beyond_the_end_asks_for_nothing(work: Clockwork) -> None:
    hold = work.hold(ttl=9.0)
    work.now += 10.0
    work.run(1.0)
    assert hold.over
    assert work.asked == []
    with pytest.raises(LockLostError, match="this process was held up"):
        work.told[0][0]._check()


def test_lease_that_the_authority_has_lost_is_told_once(work: Clockwork) -> None:
    lost, other = work.hold(ttl=9.0), work.hold(ttl=9.0, resource="other")
    gone = LockLostError("no node has it")
    work.answer = lambda grant, seconds: gone if grant.resources == ("r",) else work.extend(grant, seconds)
    work.run(90.0)
    assert [lease for lease, _ in work.told] == list(lost.leases)
    assert work.released == [lost.grant]
    assert lost.over
    assert not other.over
    assert [asked.resource for asked in work.asked].count("r") == 1


@pytest.mark.parametrize("error", [QuorumError("no answer"), ZeroDivisionError("a mistake")])
def test_error_of_the_authority_is_the_trouble_of_each_hold(
    work: Clockwork, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    hold = work.hold(ttl=9.0)
    work.answer = lambda _grant, _seconds: error
    work.run(3.0 * 17 / 16)
    assert work.told == []
    assert str(error) in hold.last_error
    assert not hold.over
    assert hold.renew_at - work.asked[-1].at < 0.5
    assert ("a mistake" in caplog.text) == isinstance(error, ZeroDivisionError)


@pytest.mark.parametrize(("ttl", "max_hold"), [(0.3, 1.0), (0.5, 1.2), (9.0, 12.0)])
def test_hold_ends_with_max_hold_and_nobody_spins(work: Clockwork, ttl: float, max_hold: float) -> None:
    """No extension asks for more than is left, and none is asked for that would gain nothing."""
    hold = work.hold(ttl, max_hold)
    work.run(max_hold + ttl)
    ((lease, when),) = work.told
    assert min(max_hold, hold.grant.expires_at - work.began) <= when - work.began < max_hold + ttl / 3 / 16
    with pytest.raises(LockLostError, match="max_hold"):
        lease._check()
    assert all(asked.at + asked.seconds <= work.began + max_hold + 1e-6 for asked in work.asked)
    assert len(work.asked) <= 3 * max_hold / ttl + 4
    assert hold.over


def test_hold_that_lasts_until_max_hold_is_left_alone(work: Clockwork) -> None:
    """Also where it is looked at too early, for that would gain nothing."""
    hold = work.hold(ttl=9.0, max_hold=12.0)
    work.now += 6.0
    work.look_at([hold])
    assert [asked.seconds for asked in work.asked] == [pytest.approx(6.0)]
    work.look_at([hold])
    assert len(work.asked) == 1
    assert 6.0 - 1e-6 <= hold.renew_at - work.now < 6.0 + 3.0 / 16
    assert not hold.over


def test_callback_that_fails_harms_nobody(work: Clockwork, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Lease] = []
    hold, other = work.hold(ttl=9.0), work.hold(ttl=9.0, resource="other")
    hold.tell_when_lost([lambda _: 1 // 0, calls.append])
    gone = LockLostError("no node has it")
    work.answer = lambda grant, seconds: gone if grant.resources == ("r",) else work.extend(grant, seconds)
    with caplog.at_level(logging.ERROR):
        work.run(90.0)
    assert calls == list(hold.leases)
    assert "on_lost callback failed" in caplog.text
    assert not other.over


def test_many_leases_are_extended_in_few_rounds(work: Clockwork) -> None:
    holds = []
    for number in range(1000):
        holds.append(work.hold(ttl=6.0, resource=f"r{number}"))
        work.run(0.003)
    before = len(work.rounds)
    work.run(60.0)
    assert not any(hold.over for hold in holds)
    assert len(work.rounds) - before <= 17 * 30
    assert sum(work.rounds[before:]) >= 27 * 1000


def test_schedule_looks_at_nothing_early_and_forgets_what_is_struck(work: Clockwork) -> None:
    chance = random.Random(1)
    wanted: dict[Hold, float] = {}
    for _ in range(200):
        work.now = chance.uniform(0.0, 10.0)
        hold = work.hold(ttl=chance.uniform(1.0, 9.0))
        wanted[hold] = at = work.now + hold.ttl / 3
        assert at - 1e-6 <= hold.renew_at <= at + hold.ttl / 3 / 16 + 1e-6
    struck = next(iter(wanted))
    assert work.plans.cancel(struck)
    wanted.popitem()
    del hold
    gc.collect()
    now, seen, looks = 0.0, set[Hold](), 0
    while work.plans.next_at < math.inf:
        now = work.plans.next_at
        looks += 1
        for due in work.plans.pop_due(now):
            assert wanted[due] <= now + 1e-6
            seen.add(due)
    assert seen == set(wanted) - {struck}
    assert looks < 150


def test_schedule_looks_at_many_together_and_forgets_the_released(work: Clockwork) -> None:
    first, *others = [work.hold(ttl=30.0) for _ in range(4)]
    work.plans.cancel(first)
    assert 10.0 - 1e-6 <= work.plans.next_at - work.now < 10.0 + 10.0 / 16
    assert set(work.plans.pop_due(work.now + 11.0)) == set(others)
    assert work.plans.next_at == math.inf
    assert not work.plans.cancel(others[0])  # it is being looked at
