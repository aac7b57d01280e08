"""Runs of the simulation: no promise is broken, enough happens, and a seed replays to the last message."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from proof.simulation.rolling import Rolling
from proof.simulation.run import play
from proof.simulation.tidy import Tidy

SEEDS = 40


@pytest.mark.parametrize("size", [3, 5])
def test_no_promise_is_broken(size: int) -> None:
    """Whatever goes wrong: P1, P2, no stale write, no lost update, and in the end everybody can go on."""
    acquisitions = writes = refused = 0
    faults = Counter[str]()
    for seed in range(SEEDS):
        outcome = play(seed, size)
        assert not outcome.violation, f"seed {seed}, {size} nodes: {outcome.detail}"
        acquisitions += outcome.acquisitions
        writes += outcome.writes
        refused += outcome.refused
        faults.update(outcome.faults)
    assert acquisitions > 100 * SEEDS
    assert writes > 50 * SEEDS
    assert refused
    missing = {"node blank", "node rollback", "node flush", "client crash", "client pause", "change of nodes"}
    assert not missing - set(faults)


@pytest.mark.parametrize("size", [3, 5])
def test_nobody_loses_a_lease_while_all_nodes_restart_one_after_the_other(size: int) -> None:
    """Nor is anybody told that the list of nodes is wrong; whoever waits has the lock in the end."""
    faults = Counter[str]()
    for seed in range(SEEDS):
        outcome = play(seed, size, run=Rolling)
        assert not outcome.violation, f"seed {seed}, {size} nodes: {outcome.detail}"
        assert sum(count for kind, count in outcome.faults.items() if kind.startswith("rolling")) == size
        faults.update(outcome.faults)
    assert faults["rolling restart, blank"] > SEEDS
    assert {"rolling restart, flushed", "rolling restart, with its data"} < set(faults)


@pytest.mark.parametrize("size", [3, 5])
def test_no_lock_is_left_where_connections_break_and_nodes_hang(size: int) -> None:
    """Of attempts that were given up, of grants that came late, and of releases that found no connection."""
    acquisitions, faults = 0, Counter[str]()
    for seed in range(SEEDS):
        outcome = play(seed, size, run=Tidy)
        assert not outcome.violation, f"seed {seed}, {size} nodes: {outcome.detail}"
        acquisitions += outcome.acquisitions
        faults.update(outcome.faults)
    assert acquisitions > 50 * SEEDS
    assert set(faults) == {"message lost", "node pause", "partition"}


def trace_of(seed: int, size: int) -> list[str]:
    """Return the trace of a run."""
    lines: list[str] = []
    play(seed, size, trace=lines.append)
    return lines


@pytest.mark.parametrize("seed", [0, 11, 62])
def test_seed_replays_exactly(seed: int) -> None:
    """The same seed, the same trace, to the last byte."""
    assert trace_of(seed, 3) == trace_of(seed, 3)


def test_trace_does_not_depend_on_the_process() -> None:
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


def test_tracing_changes_nothing() -> None:
    """Who looks at a run sees what happened without a trace."""
    assert play(3, 5) == play(3, 5, trace=lambda _: None)
