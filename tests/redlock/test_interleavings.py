"""P1 and P2 hold under random schedules of the shipped generators, on nodes that answer as the scripts do.

A failing seed is in the test's name or message, and replays exactly. The controls show that this search
would have found the holes that the protocol closes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fencelock.authority.redlock.protocol import acquire
from proof.simulation.node import ModelNode
from proof.simulation.weaker import (
    WithoutComparison,
    WithoutOwnership,
    maximum_without_write_back,
    mixed_epochs,
)
from tests.redlock.model import History, World, node_with

STEPS = 50_000


def play(seed: int, node_class: type[ModelNode] = ModelNode, *, nodes: int = 3) -> History:
    """Run one random schedule; everything about it follows from the seed."""
    resources = ("r",) if seed % 2 else ("r", "s", "r672")
    world = World(
        seed,
        [node_with(node_class, seed % 3) for _ in range(nodes)],
        clients=2 + seed % 4,
        resources=resources,
        raise_epochs=0.002 if seed % 5 == 0 else 0.0,
    )
    return world.run(STEPS)


@pytest.mark.long
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_random_schedules_break_no_promise(nodes: int) -> None:
    """Delays, losses, duplicates, reordering, expiry at any time and epochs that rise: P1 and P2 hold."""
    completed = confirmed = 0
    for seed in range(6):
        history = play(seed, nodes=nodes)
        assert not history.violations, f"seed {seed}, {nodes} nodes: {history.violations}"
        completed += history.completed
        confirmed += history.confirmed
    assert completed > 500
    assert confirmed > 1000 or nodes == 1


def first_violation(node_class: type[ModelNode] = ModelNode, *, seeds: int = 40) -> str:
    """Return the first broken promise that random schedules find."""
    for seed in range(seeds):
        if violations := play(seed, node_class).violations:
            return violations[0]
    return ""


@pytest.mark.parametrize("mutant", [WithoutOwnership, WithoutComparison])
def test_weaker_nodes_are_caught(mutant: type[ModelNode]) -> None:
    """Controls: a CONFIRM without ownership, or without `g <= T`, breaks a promise within a few seeds."""
    assert first_violation(mutant)


@pytest.mark.parametrize(
    ("name", "mutant"), [("_decide", maximum_without_write_back), ("largest_epoch", mixed_epochs)]
)
def test_weaker_clients_are_caught(
    name: str, mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls: a maximum that is not written back, or epochs that are added up, break a promise."""
    monkeypatch.setattr(acquire, name, mutant)
    assert first_violation()
