"""A short form of `python -m benchmarks.acquisitions`: real nodes, real processes, real deaths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.acquisitions import Settings, report, run

SETTINGS = Settings(count=2500, processes=8, resources=50, nodes=5, seed=11, pauses=2.0, control=False)


@pytest.fixture
def console() -> Console:
    """A console whose output pytest shows where the test fails."""
    return Console(width=110)


def test_tokens_are_unique_and_in_order_while_nodes_lose_their_memory(console: Console) -> None:
    """Leases expire, processes pause, two of five nodes die and come back blank: every token is right."""
    outcome = run(SETTINGS, console)
    assert report(outcome, console) == 0
    assert outcome.problems == []
    # What was to happen did happen; otherwise the claim would say nothing.
    assert len(outcome.acquisitions) >= SETTINGS.count
    assert len({one.resource for one in outcome.acquisitions}) > 40
    assert outcome.faults.kills >= 2
    assert outcome.faults.scripts > 0
    assert any(one.worked_until > one.valid_until for one in outcome.acquisitions)
    assert any(one.confirms for one in outcome.acquisitions)


def test_naive_tokens_are_caught(console: Console) -> None:
    """With the largest counter for a token, tokens are given twice; passed off as fencelock's, it fails."""
    settings = replace(SETTINGS, count=1500, resources=10, control=True)
    outcome = run(settings, console)
    assert report(outcome, console) == 0
    outcome.settings = replace(settings, control=False)
    assert report(outcome, console) == 1
    assert any("was given twice" in problem for problem in outcome.problems)
