"""Each lease has its own token, and a later lease has a larger one, however the earlier lease ended."""

from __future__ import annotations

import time

import pytest

from fencelock.errors import LockLostError
from tests.authorities.faces import acquire_briefly, is_free_soon, is_held
from tests.authorities.kinds import ASYNCIO, EACH_DATABASE, EVERYWHERE
from tests.authorities.race import (
    Habits,
    assert_exclusive,
    assert_in_order,
    assert_unique,
    contend_as_task,
    race,
)
from tests.authorities.stage import Stage, in_one_loop

pytestmark = pytest.mark.timed


@pytest.mark.parametrize("stage", EVERYWHERE, indirect=True)
def test_tokens_are_unique_and_leases_exclusive(stage: Stage) -> None:
    """No token is granted twice, and no two hold at once, though leases expire and releases come twice."""
    journal = race(stage, Habits())
    assert_unique(journal)
    assert_exclusive(journal)


@pytest.mark.parametrize("stage", EVERYWHERE, indirect=True)
def test_tokens_follow_real_time(stage: Stage) -> None:
    """An acquisition that began after another had completed has the larger token, be that one held or not."""
    journal = race(stage, Habits(resources=("hot",), ttl=0.02, abandoned=0.5))
    assert_unique(journal)
    assert_in_order(journal)


@pytest.mark.parametrize("stage", ASYNCIO, indirect=True)
def test_tasks_of_one_loop_are_strangers(stage: Stage) -> None:
    """Tasks that share a client exclude one another, as those of different clients do."""
    clients = [stage.new_client(), stage.new_client()]

    async def main() -> None:
        journals = await in_one_loop(*(contend_as_task(clients[n % 2].aio, "hot", 4) for n in range(6)))
        journal = [entry for each in journals for entry in each]
        assert len(journal) == 24
        assert_unique(journal)
        assert_exclusive(journal)
        assert_in_order(journal)

    stage.run(main())


def test_a_reminted_grant_has_a_larger_token_and_is_still_exclusive(stage: Stage) -> None:
    """It is the grant from now on: others are refused, it can be extended, and its release frees."""
    mine, other = stage.new(), stage.new()
    first = mine.acquire("r", "s")
    second = mine.remint(first)
    assert second.resources == first.resources
    assert all(new > old for new, old in zip(second.tokens, first.tokens, strict=True))
    assert is_held(other, "r")
    assert is_held(other, "s")
    (third,) = mine.extend_many([(mine.remint(second), 20.0)])
    assert not isinstance(third, Exception), third
    assert all(new > old for new, old in zip(third.tokens, second.tokens, strict=True))
    assert mine.release(third) is True
    after = other.acquire("r", "s")
    assert all(new > old for new, old in zip(after.tokens, third.tokens, strict=True))


def test_remint_lasts_for_the_ttl_that_it_is_given(stage: Stage) -> None:
    """The reminted lease keeps others out for its ttl, beyond the end of the old grant, and no longer."""
    mine, other = stage.new(), stage.new()
    first = mine.acquire("r", ttl=0.2)
    second = mine.remint(first, ttl=0.6)
    assert first.expires_at < second.expires_at < time.monotonic() + 0.6
    time.sleep(max(0.0, first.expires_at + 0.1 - time.monotonic()))
    assert is_held(other, "r")
    assert is_free_soon(other, "r")


def test_remint_of_a_lost_grant_is_refused(stage: Stage) -> None:
    """Where another has taken over; what that one holds stays held."""
    mine, other, third = stage.new(), stage.new(), stage.new()
    expired = acquire_briefly(mine, "r")
    taken = other.acquire("r")
    with pytest.raises(LockLostError):
        mine.remint(expired)
    assert is_held(third, "r")
    assert other.release(taken) is True


# Nodes grant a free lock again: their lock has looked at its clock before it asks.
@pytest.mark.parametrize("stage", EACH_DATABASE, indirect=True)
def test_remint_is_refused_where_another_came_between(stage: Stage) -> None:
    """Although that one has gone again, and the resource is free."""
    mine, other = stage.new(), stage.new()
    expired = acquire_briefly(mine, "r")
    assert other.release(other.acquire("r")) is True
    with pytest.raises(LockLostError):
        mine.remint(expired)
    assert is_free_soon(other, "r")


@pytest.mark.parametrize("stage", EACH_DATABASE, indirect=True)
def test_remint_of_a_released_grant_is_refused(stage: Stage) -> None:
    """It is over, though the resource is free; and another may have come and gone."""
    mine, other = stage.new(), stage.new()
    released = mine.acquire("r")
    assert mine.release(released) is True
    with pytest.raises(LockLostError):
        mine.remint(released)
    assert is_free_soon(other, "r")


def test_remint_is_for_all_resources_or_none(stage: Stage) -> None:
    """Where one of them has been lost, none is held afterwards but what another holds."""
    mine, other, third = stage.new(), stage.new(), stage.new()
    grant = acquire_briefly(mine, "a", "b", "c")
    taken = other.acquire("b")
    with pytest.raises(LockLostError):
        mine.remint(grant)
    assert is_free_soon(third, "a")
    assert is_free_soon(third, "c")
    assert other.release(taken) is True


def test_an_expired_lease_is_granted_to_another(stage: Stage) -> None:
    """With a larger token, and not before its end; then its old holder can neither release nor extend."""
    mine, other, third = stage.new(), stage.new(), stage.new()
    old = acquire_briefly(mine, "r")
    new = other.acquire("r")
    assert time.monotonic() >= old.expires_at
    assert new.tokens[0] > old.tokens[0]
    assert mine.release(old) is False
    assert is_held(third, "r"), "the late release has freed what another holds"
    (said,) = mine.extend_many([(old, 10.0)])
    assert isinstance(said, LockLostError)
    assert other.release(new) is True


def test_a_lease_says_when_it_ends(stage: Stage) -> None:
    """In the future, and within its ttl from now: no holder relies on it for longer than it asked for."""
    mine = stage.new()
    for ttl in (1.0, 5.0, 30.0):
        grant = mine.acquire("r", ttl=ttl)
        now = time.monotonic()
        assert now < grant.expires_at < now + ttl
        assert mine.release(grant) is True


def test_the_second_release_returns_false(stage: Stage) -> None:
    """Also where another holds the resource by then."""
    mine, other, third = stage.new(), stage.new(), stage.new()
    grant = mine.acquire("r")
    assert mine.release(grant) is True
    assert mine.release(grant) is False
    taken = other.acquire("r")
    assert mine.release(grant) is False
    assert is_held(third, "r")
    assert other.release(taken) is True
