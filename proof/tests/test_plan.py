"""Holders behave in every way that their authority can have, and the same seed chooses the same."""

from __future__ import annotations

import random
from pathlib import Path

from proof.torture.plan import Plan, choose_plan, names
from proof.torture.settings import Settings

SETTINGS = Settings(Path(), ttl=1.5, resources=10, writes=0.25)


def plans(settings: Settings) -> list[Plan]:
    rng = random.Random(7)
    return [choose_plan(rng, settings) for _ in range(2000)]


def test_every_way_to_hold_is_tried() -> None:
    """Long and short leases, overstayed, renewed, several at once, in turn; with writes and without."""
    chosen = plans(SETTINGS)
    assert {one.lock["renew"] for one in chosen if one.work > one.lock["ttl"]} == {True, False}
    assert any(one.lock["ttl"] < 0.05 for one in chosen)
    assert max(one.lock["ttl"] for one in chosen) == SETTINGS.ttl
    assert {1, 2, 3} <= {len(one.resources) for one in chosen} <= {1, 2, 3, 4}
    assert {one.lock.get("fair", False) for one in chosen} == {True, False}
    assert {one.together for one in chosen} == {True, False}
    assert 400 < sum(one.writes for one in chosen) < 600
    assert {name for one in chosen for name in one.resources} == set(names(SETTINGS))
    assert plans(SETTINGS) == chosen


def test_locks_are_asked_for_what_they_can_do() -> None:
    """A naive one for one resource, not renewed, not in turn; a database for no place in line."""
    naive = plans(Settings(Path(), tasks=0, writes=0.0, quorum=False))
    assert {len(one.resources) for one in naive} == {1}
    assert not any(one.lock["renew"] or one.lock.get("fair") or one.writes for one in naive)
    database = plans(Settings(Path(), authority="database"))
    assert not any(one.lock.get("fair") for one in database)
    assert {1, 2, 3} <= {len(one.resources) for one in database} <= {1, 2, 3, 4}
