"""No run of the simulation breaks a promise, enough happens, and a seed replays to the last message."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from fencelock import Database, fenced_lock
from fencelock.lock.hold import everything_held
from proof.simulation.lying import Lying
from proof.simulation.rolling import Rolling
from proof.simulation.run import Run, play
from proof.simulation.slots import Slots
from proof.simulation.tidy import Tidy

#: `make proof` plays more.
SEEDS = 10
#: Kinds of faults that must have happened within so many seeds of each kind of run.
FAULTS = {
    Run: {"node blank", "node rollback", "node flush", "client crash", "client pause", "partition"},
    Rolling: {"rolling restart, blank", "rolling restart, flushed", "rolling restart, with its data"},
    Tidy: {"message lost", "node pause", "partition"},
    Lying: {"node blank", "node rollback", "node flush", "client crash", "client pause", "partition"},
    Slots: {"node blank", "node rollback", "node flush", "client crash", "client pause", "partition"},
}


@pytest.mark.long
@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.kind or "storm")
def test_no_promise_is_broken(kind: type[Run], size: int) -> None:
    acquisitions, faults = 0, Counter[str]()
    for seed in range(SEEDS):
        outcome = play(seed, size, run=kind)
        assert not outcome.violation, f"seed {seed}, {size} nodes: {outcome.detail}"
        acquisitions += outcome.acquisitions
        faults.update(outcome.faults)
    assert acquisitions > 50 * SEEDS
    assert set(faults) >= FAULTS[kind]
    if kind is Rolling:
        assert sum(count for fault, count in faults.items() if fault.startswith("rolling")) == size * SEEDS
    if kind is Tidy:
        assert set(faults) == FAULTS[kind]


def trace_of(seed: int, size: int, kind: type[Run] = Run) -> list[str]:
    lines: list[str] = []
    play(seed, size, trace=lines.append, run=kind)
    return lines


@pytest.mark.parametrize("kind", [Run, pytest.param(Slots, marks=pytest.mark.long)])
def test_seed_replays_exactly_in_every_process(kind: type[Run]) -> None:
    """Nothing comes from the order of a set of words, which is another one in every process."""
    program = (
        f"from tests.redlock.test_simulation import {kind.__name__}, trace_of\n"
        "print(hash('a'))\n"
        f"print(*trace_of(11, 3, {kind.__name__}), sep=chr(10))"
    )
    told = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        told.append(done.stdout.splitlines())
    assert told[0][0] != told[1][0]
    assert told[0][1:] == told[1][1:] == trace_of(11, 3, kind)
    assert len(told[0]) > 100


def test_tracing_changes_nothing() -> None:
    assert play(3, 5) == play(3, 5, trace=lambda _: None)


def test_no_simulated_lock_is_left() -> None:
    """Neither of a client that died, nor of one that was in a block when the run ended."""
    outcomes = [play(seed, 3, run=Slots) for seed in (0, 1)]
    assert sum(outcome.faults.get("client crash", 0) for outcome in outcomes) > 0
    assert everything_held() == []
    with fenced_lock("order:1", readers=2, authority=Database("sqlite://")) as token:  # by the real clock
        assert token > 0
