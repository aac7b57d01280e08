"""Holders behave in every way, and the same seed chooses the same."""

from __future__ import annotations

import random
from pathlib import Path

from proof.torture.plan import Plan, choose_plan, names
from proof.torture.settings import Settings

SETTINGS = Settings(Path(), ttl=1.5, resources=10, writes=0.25)


def plans(settings: Settings, count: int = 2000) -> list[Plan]:
    """Choose so many."""
    rng = random.Random(7)
    return [choose_plan(rng, settings) for _ in range(count)]


def test_every_way_to_hold_is_tried() -> None:
    """Long and short leases, overstayed, renewed, several at once, in turn; with writes and without."""
    chosen = plans(SETTINGS)
    overstaying = [one for one in chosen if one.work > one.lock["ttl"]]
    assert {one.lock["renew"] for one in overstaying} == {True, False}
    assert any(one.lock["ttl"] < 0.05 for one in chosen)
    assert max(one.lock["ttl"] for one in chosen) == SETTINGS.ttl
    assert {len(one.resources) for one in chosen} == {1, 2}
    assert {one.lock["fair"] for one in chosen if "fair" in one.lock} == {True, False}
    assert {one.together for one in chosen} == {True, False}
    assert 400 < sum(one.writes for one in chosen) < 600
    assert {name for one in chosen for name in one.resources} == set(names(SETTINGS))


def test_naive_locks_are_asked_for_what_they_can_do() -> None:
    """One resource, not renewed, not in turn."""
    chosen = plans(Settings(Path(), tasks=0, writes=0.0, quorum=False))
    assert {len(one.resources) for one in chosen} == {1}
    assert not any(
        one.lock["renew"] or one.lock["fair"] or one.writes for one in chosen if "fair" in one.lock
    )


def test_a_database_is_not_asked_for_a_place_in_line() -> None:
    """It keeps none; all the rest is asked for."""
    chosen = plans(Settings(Path(), authority="database"))
    assert not any(one.lock["fair"] for one in chosen if "fair" in one.lock)
    assert {len(one.resources) for one in chosen} == {1, 2}
    assert {one.lock["renew"] for one in chosen} == {True, False}


def test_a_seed_chooses_the_same_again() -> None:
    """What is up to chance is up to the seed."""
    assert plans(SETTINGS, 50) == plans(SETTINGS, 50)
