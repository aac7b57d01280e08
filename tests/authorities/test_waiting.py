"""A contender waits for a held lease until its timeout. A request for several resources gets all or none."""

from __future__ import annotations

import random
import threading
import time

import pytest

from fencelock import Database
from fencelock.errors import LockTimeoutError
from tests.authorities.faces import Face, acquire_briefly, is_free_soon, is_held, take
from tests.authorities.kinds import EACH_DRIVER, EACH_SORT_TOO
from tests.authorities.stage import Stage, together


@pytest.mark.parametrize("timeout", [0, 0.3])
def test_a_wait_is_refused_at_its_timeout(stage: Stage, timeout: float) -> None:
    mine, other, third = stage.new(), stage.new(), stage.new()
    grant = mine.acquire("r", ttl=30.0)
    take(other, "warm")
    began = time.monotonic()
    with pytest.raises(LockTimeoutError) as caught:
        other.acquire("r", timeout=timeout)
    assert timeout * 0.9 <= time.monotonic() - began < 20.0
    assert 5.0 < (caught.value.holder_ttl or 0.0) < 30.1
    assert isinstance(caught.value, TimeoutError)
    assert mine.release(grant) is True
    assert is_free_soon(third, "r")


@pytest.mark.parametrize("stage", EACH_SORT_TOO, indirect=True)
def test_one_try_is_granted_what_is_free(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    for client in (mine, other, mine):
        assert client.release(client.acquire("r", timeout=2)) is True
    abandoned = acquire_briefly(mine, "r")
    time.sleep(max(0.0, abandoned.expires_at - time.monotonic()) + 0.2 + stage.kind.late)
    assert other.acquire("r", timeout=2).tokens[0] > abandoned.tokens[0]


@pytest.mark.parametrize("stage", EACH_DRIVER, indirect=True)
def test_who_waits_for_ever_is_granted_what_is_released(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    grant = mine.acquire("r", ttl=60.0)

    def release() -> float:
        time.sleep(0.15)
        began = time.monotonic()
        assert mine.release(grant) is True
        return began

    def wait() -> float:
        other.acquire("r", timeout=None)
        return time.monotonic()

    released, granted = together(release, wait)
    assert released < granted < released + 25.0


def test_who_waits_is_granted_what_expires(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    end = mine.acquire("r", ttl=1.0).expires_at
    other.acquire("r", timeout=20.0)
    assert end <= time.monotonic()


@pytest.mark.timed
@pytest.mark.parametrize("stage", EACH_SORT_TOO, indirect=True)
def test_who_waits_stays_refused_where_the_lease_is_extended(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    grant = mine.acquire("r", ttl=0.6)

    def extend() -> None:
        time.sleep(0.1)
        mine.extend(grant, 30.0)

    def wait() -> None:
        with pytest.raises(LockTimeoutError):
            other.acquire("r", timeout=1.2)

    together(extend, wait)


def test_opposite_orders_end_in_no_deadlock(stage: Stage) -> None:
    faces = [stage.new() for _ in range(3)]
    names = ("a", "b", "c")
    knows_fair = not isinstance(faces[0].client, Database)

    def work(face: Face, seed: int) -> int:
        dice, highest = random.Random(seed), dict.fromkeys(names, 0)
        for _ in range(4):
            asked = tuple(dice.sample(names, k=dice.choice((2, 3))))
            fair = knows_fair and dice.random() < 0.5
            grant = face.acquire(*asked, ttl=60.0, timeout=50.0, fair=fair)
            assert grant.resources == asked
            assert all(token > highest[name] for name, token in zip(asked, grant.tokens, strict=True))
            highest |= dict(zip(asked, grant.tokens, strict=True))
            assert face.release(grant) is True
        return seed

    jobs = [lambda face=face, seed=seed: work(face, seed) for seed, face in enumerate(faces)]
    assert together(*jobs) == [0, 1, 2]


def test_tokens_come_in_the_order_in_which_they_are_asked_for(stage: Stage) -> None:
    mine = stage.new()
    for _ in range(9):
        take(mine, "z")
    for asked in (("z", "a", "m"), ("a", "m", "z")):
        before = [take(mine, name) for name in asked]
        grant = mine.acquire(*asked)
        assert mine.release(grant) is True
        after = [take(mine, name) for name in asked]
        assert grant.resources == asked
        assert all(low < token < high for low, token, high in zip(before, grant.tokens, after, strict=True))


@pytest.mark.parametrize("stage", EACH_SORT_TOO, indirect=True)
def test_a_refusal_leaves_nothing_of_the_others(stage: Stage) -> None:
    mine, other, third = stage.new(), stage.new(), stage.new()
    for place in (0, 1, 2):
        names = [f"{name}{place}" for name in "abc"]
        mine.acquire(names[place])
        for timeout in (0, 0.1):
            with pytest.raises(LockTimeoutError):
                other.acquire(*names, timeout=timeout)
        assert is_held(third, names.pop(place))
        assert is_free_soon(third, *names)


def test_a_fair_wait_ends_as_any_other(stage: Stage) -> None:
    """All are granted it in the end. An authority that knows no order says so, and waits for nothing."""
    holder = stage.new()
    grant = holder.acquire("r")
    if isinstance(holder.client, Database):
        with pytest.raises(ValueError, match="fair"):
            holder.acquire("s", fair=True)
        return
    waiting = [stage.new() for _ in range(3)]
    done = threading.Event()

    def wait(face: Face) -> int:
        got = face.acquire("r", timeout=50.0, fair=True)
        assert done.is_set()
        assert face.release(got) is True
        return got.tokens[0]

    def release() -> int:
        time.sleep(0.2)
        done.set()
        assert holder.release(grant) is True
        return grant.tokens[0]

    tokens = together(release, *(lambda face=face: wait(face) for face in waiting))
    assert len(set(tokens)) == 4
    assert min(tokens) == tokens[0]
