"""The retry policy of docs/errors.md pays exactly once; without the look it does not."""

from __future__ import annotations

from pathlib import Path

from proof.retries.shop import Shop


def test_policy_pays_exactly_once(tmp_path: Path) -> None:
    """While workers are paused and killed, connections end, and answers to COMMITs are lost."""
    result = Shop(tmp_path, chance=0.1).run(12.0)
    assert result.is_right(), list(result.lines())
    assert sum(count for what, count in result.faults.items() if "lost" in what) > 0
    assert result.errors["CommitInDoubtError, written None"] > 0


def test_without_the_look_orders_are_paid_twice(tmp_path: Path) -> None:
    """The control: answers to COMMITs are lost, and the same function is tried again."""
    result = Shop(tmp_path, looks=False, chance=0.3).run(60.0, until=lambda so_far: so_far.more > 0)
    assert result.more > 0, list(result.lines())
