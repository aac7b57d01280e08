"""Runs of the simulation: no promise is broken, enough happens, and a seed replays to the last message."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from proof.simulation.lying import Lying
from proof.simulation.rolling import Rolling
from proof.simulation.run import Run, play
from proof.simulation.tidy import Tidy

#: `make proof` plays more.
SEEDS = 10
#: Kinds of faults that must have happened within so many seeds of each kind of run.
FAULTS = {
    Run: {"node blank", "node rollback", "node flush", "client crash", "client pause", "partition"},
    Rolling: {"rolling restart, blank", "rolling restart, flushed", "rolling restart, with its data"},
    Tidy: {"message lost", "node pause", "partition"},
    Lying: {"node blank", "node rollback", "node flush", "client crash", "client pause", "partition"},
}


@pytest.mark.long
@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.kind or "storm")
def test_no_promise_is_broken(kind: type[Run], size: int) -> None:
    """With everything going wrong, with nodes that restart in turn, and with connections that break."""
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


def trace_of(seed: int, size: int) -> list[str]:
    """Return the trace of a run."""
    lines: list[str] = []
    play(seed, size, trace=lines.append)
    return lines


def test_seed_replays_exactly_in_every_process() -> None:
    """Nothing comes from the order of a set of words, which is another one in every process."""
    program = (
        "from tests.simulation.test_runs import trace_of\n"
        "print(hash('a'))\n"
        "print(*trace_of(11, 3), sep=chr(10))"
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
    assert told[0][1:] == told[1][1:] == trace_of(11, 3)
    assert len(told[0]) > 100


def test_tracing_changes_nothing() -> None:
    """A run is the same with a trace and without."""
    assert play(3, 5) == play(3, 5, trace=lambda _: None)
