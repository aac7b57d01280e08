"""Each lease has its own token, and a later lease has a larger one, however the earlier lease ended."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from fencelock.authority.base import Grant
from fencelock.errors import LockLostError
from tests.authorities.faces import acquire_briefly, is_free_soon, is_held, take
from tests.authorities.kinds import EACH_DATABASE, EACH_DRIVER, EACH_SORT_TOO, IN_LOOPS
from tests.authorities.race import (
    Habits,
    assert_exclusive,
    assert_in_order,
    assert_unique,
    contend_as_task,
    race,
)
from tests.authorities.stage import Stage, in_one_loop


@pytest.mark.parametrize("stage", EACH_DRIVER, indirect=True)
def test_tokens_are_unique_and_leases_exclusive(stage: Stage) -> None:
    """No token is granted twice, and no two hold at once, though leases expire and releases come twice."""
    journal = race(stage, Habits())
    assert_unique(journal)
    assert_exclusive(journal)


def test_tokens_follow_real_time(stage: Stage) -> None:
    journal = race(stage, Habits(resources=("hot",), ttl=0.02, abandoned=0.5))
    assert_unique(journal)
    assert_in_order(journal)


@pytest.mark.parametrize("stage", IN_LOOPS, indirect=True)
def test_tasks_of_one_loop_exclude_one_another(stage: Stage) -> None:
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
    mine, other = stage.new(), stage.new()
    grants: list[Grant] = [mine.acquire("r", "s")]
    for _ in range(2):
        grants.append(mine.remint(grants[-1]))
        assert is_held(other, "r")
        assert is_held(other, "s")
    third = mine.extend(grants[-1], 20.0)
    assert mine.release(third) is True
    grants.append(other.acquire("r", "s"))
    for one, later in pairwise(grants):
        assert later.resources == one.resources
        assert all(new > old for new, old in zip(later.tokens, one.tokens, strict=True))


@pytest.mark.parametrize("stage", EACH_SORT_TOO, indirect=True)
def test_remint_lasts_for_the_ttl_that_it_is_given(stage: Stage) -> None:
    """The reminted lease keeps others out for its ttl, beyond the end of the old grant, and no longer."""
    mine, other = stage.new(), stage.new()
    first = mine.acquire("r", ttl=1.0)
    second = mine.remint(first, ttl=2.5)
    assert first.expires_at < second.expires_at < time.monotonic() + 2.5
    time.sleep(max(0.0, first.expires_at + 0.05 - time.monotonic()))
    assert is_held(other, "r") or time.monotonic() > second.expires_at
    assert is_free_soon(other, "r")
    assert time.monotonic() >= second.expires_at


def test_remint_of_a_lost_grant_is_refused(stage: Stage) -> None:
    mine, other, third = stage.new(), stage.new(), stage.new()
    expired = acquire_briefly(mine, "r")
    taken = other.acquire("r", timeout=20.0)
    with pytest.raises(LockLostError):
        mine.remint(expired)
    assert is_held(third, "r")
    assert other.release(taken) is True


# Nodes grant a free lock again: their lock has looked at its clock before it asks.
@pytest.mark.parametrize("stage", EACH_DATABASE, indirect=True)
def test_remint_is_refused_where_another_came_between(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    expired = acquire_briefly(mine, "r")
    take(other, "r", timeout=20.0)
    with pytest.raises(LockLostError):
        mine.remint(expired)
    assert is_free_soon(other, "r")


@pytest.mark.parametrize("stage", EACH_DATABASE, indirect=True)
def test_remint_of_a_released_grant_is_refused(stage: Stage) -> None:
    mine = stage.new()
    released = mine.acquire("r")
    assert mine.release(released) is True
    with pytest.raises(LockLostError):
        mine.remint(released)
    assert is_free_soon(stage.new(), "r")


@pytest.mark.parametrize("stage", EACH_SORT_TOO, indirect=True)
def test_remint_is_for_all_resources_or_none(stage: Stage) -> None:
    mine, other, third = stage.new(), stage.new(), stage.new()
    grant = acquire_briefly(mine, "a", "b", "c")
    taken = other.acquire("b", timeout=20.0)
    with pytest.raises(LockLostError):
        mine.remint(grant)
    assert is_free_soon(third, "a")
    assert is_free_soon(third, "c")
    assert other.release(taken) is True


def test_an_expired_lease_is_granted_to_another(stage: Stage) -> None:
    mine, other, third = stage.new(), stage.new(), stage.new()
    old = acquire_briefly(mine, "r")
    new = other.acquire("r", timeout=20.0)
    assert time.monotonic() >= old.expires_at
    assert new.tokens[0] > old.tokens[0]
    assert mine.release(old) is False
    assert is_held(third, "r"), "the late release has freed what another holds"
    (said,) = mine.extend_many([(old, 10.0)])
    assert isinstance(said, LockLostError)
    assert other.release(new) is True


@pytest.mark.parametrize("stage", EACH_SORT_TOO, indirect=True)
def test_a_lease_says_when_it_ends(stage: Stage) -> None:
    """In the future, and within its ttl from now: no holder relies on it for longer than it asked for."""
    mine = stage.new()
    for ttl in (3.0, 30.0):
        grant = mine.acquire("r", ttl=ttl)
        now = time.monotonic()
        assert now < grant.expires_at < now + ttl
        assert mine.release(grant) is True


def test_the_second_release_returns_false(stage: Stage) -> None:
    mine, other, third = stage.new(), stage.new(), stage.new()
    grant = mine.acquire("r")
    assert mine.release(grant) is True
    assert mine.release(grant) is False
    taken = other.acquire("r")
    assert mine.release(grant) is False
    assert is_held(third, "r")
    assert other.release(taken) is True
