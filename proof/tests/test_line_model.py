"""The model of the line: the shipped protocol holds, and breaks without any of its rules."""

from __future__ import annotations

import pytest

from proof.line.controls import CONTROLS, STORES, play
from proof.line.etcd import Etcd
from proof.line.judge import BELOW, OVERLAP, STUCK, TWICE, UNFAIR
from proof.line.rules import ETCD, OUTAGE, SHIPPED, Rules

SEEDS = 200


@pytest.mark.parametrize("store", STORES)
def test_nothing_breaks_while_everything_goes_wrong(store: str) -> None:
    """With lost and late requests, pauses, crashes, restores, forced releases, pruning and raised bases."""
    judges = [play(seed, store) for seed in range(SEEDS)]
    assert [(seed, dict(+each.broken)) for seed, each in enumerate(judges) if +each.broken] == []
    assert sum(each.grants for each in judges) > 5 * SEEDS


@pytest.mark.parametrize("name", CONTROLS)
def test_each_control_breaks(name: str) -> None:
    """A rule that could go unnoticed would be none."""
    assert CONTROLS[name].first(range(1500)) is not None


@pytest.mark.parametrize("store", STORES)
def test_clocks_that_differ_by_more_than_a_restore_takes_break_only_the_order(store: str) -> None:
    """That is the condition, so the model has to see it."""
    judges = [play(seed, store, skew=6 * OUTAGE, restores=5) for seed in range(SEEDS)]
    assert any(each.broken[BELOW] for each in judges)
    assert not any(each.broken[OVERLAP] or each.broken[UNFAIR] or each.broken[STUCK] for each in judges)


@pytest.mark.parametrize("store", STORES)
def test_a_base_that_is_lost_in_a_restore_breaks_the_order(store: str) -> None:
    """An operator that restores a store whose base was raised has to raise it again before programs go on."""
    judges = [play(seed, store, loses_base=True, restores=5, raises=5) for seed in range(SEEDS)]
    assert any(each.broken[BELOW] or each.broken[TWICE] for each in judges)


@pytest.mark.parametrize("keeps_entries", [True, False])
def test_a_request_to_enter_that_comes_late_leaves_the_entry_under_its_lease(keeps_entries: bool) -> None:
    """The holder has moved its entry to a longer lease, and is about to revoke the old one."""
    store = Etcd(Rules(keeps_entries=keeps_entries))
    old, new = 1, 2
    store.grant(old, 1000)
    store.enter(old, [0])
    store.grant(new, 5000)
    assert store.move(old, [0], old, new)
    store.enter(old, [0])  # the first try, of which the client has never heard
    store.revoke(old)
    assert (store.head(0) is not None) is keeps_entries


def test_a_history_repeats() -> None:
    """A seed is all that a report has to name."""
    first, again = (play(7, ETCD, SHIPPED) for _ in range(2))
    assert first.grants == again.grants
