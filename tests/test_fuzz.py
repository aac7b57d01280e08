"""Random inputs, ten seconds of each sort; the seed is new each day, and the head of each run names it."""

from __future__ import annotations

import pytest

from fencelock import UnfencedWriteError
from proof import fuzz, twins
from tests.conftest import SEED


def test_whatever_nodes_and_programs_say_is_an_answer_or_an_error_that_is_promised() -> None:
    assert fuzz.fuzz(SEED, 10) > 0


def test_where_nobody_else_writes_fenced_models_do_what_plain_ones_do() -> None:
    engine = twins.engine_of("sqlite://")
    assert twins.fuzz(engine, SEED, 10) > 0
    engine.dispose()


def test_a_fenced_model_that_differs_from_its_twin_is_noticed() -> None:
    """The control: without a lease the guard refuses what the twin may do."""
    engine = twins.engine_of("sqlite://")
    with pytest.raises(UnfencedWriteError):
        twins.compare(engine, "one lease", [("set", 1, "a", 5)], leases=False, expires=False)
    engine.dispose()
