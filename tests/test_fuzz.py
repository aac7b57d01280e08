"""Random inputs, ten or twenty seconds of each sort; the seed is new each day, and a run names it first."""

from __future__ import annotations

import pytest

from proof import fuzz, twins
from tests.conftest import SEED


def test_whatever_nodes_and_programs_say_is_an_answer_or_an_error_that_is_promised() -> None:
    assert fuzz.fuzz(SEED, 10) > 0


def test_where_nobody_else_writes_fenced_models_do_what_plain_ones_do() -> None:
    engine = twins.engine_of("sqlite://")
    found = twins.fuzz(engine, SEED, seconds=20)
    engine.dispose()
    assert found.kinds == {}
    assert found.programs > 0


def test_a_fenced_model_that_differs_from_its_twin_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: objects keep the write id with which they were loaded."""
    monkeypatch.setattr("fencelock.guard.objects.FlushTokens.note_sent", lambda *_: None)
    engine = twins.engine_of("sqlite://")
    found = twins.fuzz(engine, SEED, programs=200)
    engine.dispose()
    assert found.kinds
