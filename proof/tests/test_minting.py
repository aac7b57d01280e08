"""The model of servers that mint tokens: the shipped way holds, and each other way breaks."""

from __future__ import annotations

import pytest

from proof.minting import CONTROLS, OUTAGE, History, broken, time_and_server

SEEDS = 200


def test_no_token_comes_twice_and_each_is_above_the_complete_ones() -> None:
    """With failovers, split brains, upgrades, restores, restarts and clocks that differ."""
    assert broken(time_and_server, SEEDS) == (0, 0)


@pytest.mark.parametrize("name", CONTROLS)
def test_each_control_gives_a_token_twice(name: str) -> None:
    """Milliseconds alone need two primaries at once, which few histories have."""
    twice, _ = broken(CONTROLS[name], 8 * SEEDS if name == "milliseconds" else SEEDS)
    assert twice > 0


def test_clocks_that_differ_by_more_than_an_outage_break_the_order() -> None:
    """That is the condition, so the model has to see it. Tokens stay unique."""
    histories = [History(seed, time_and_server, skew=4 * OUTAGE) for seed in range(SEEDS)]
    assert any(each.below for each in histories)
    assert not any(each.twice for each in histories)
