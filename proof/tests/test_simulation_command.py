"""`python -m proof.simulation`: it counts, names what failed, stops when it is told to, and replays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from proof.simulation import __main__ as command
from proof.simulation.run import Outcome, play

PROGRAM = [sys.executable, "-m", "proof.simulation"]


@pytest.mark.long
def test_seeds_are_played_and_counted(capfd: pytest.CaptureFixture[str]) -> None:
    """Two seeds with both numbers of nodes, in five kinds: twenty runs, and nothing broke."""
    assert command.main(["--seeds", "2", "--jobs", "1", "--start", "7"]) == 0
    told = capfd.readouterr().out
    assert "runs                  20 " in told
    assert "no promise was broken" in told
    assert "snapshot" in told
    assert "rolling restart" in told
    assert "partition" in told


def test_failed_run_is_named_with_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 1, and the seed is told."""
    good = play(0, 3)

    def outcomes(*_: object) -> object:
        yield Outcome(8, 5, "P1", "P1: as a test", 1, 0, 0, 0, {}, 1, 1.0)
        yield Outcome(9, 3, "P2", "P2: as a test", 1, 0, 0, 0, {}, 1, 1.0, "rolling")
        yield good

    monkeypatch.setattr(command, "play_all", outcomes)
    assert command.main(["--seeds", "1"]) == 1
    told = capfd.readouterr().out
    assert "python -m proof.simulation --replay 8 --nodes 5\n" in told
    assert "python -m proof.simulation --replay 9 --nodes 3 --rolling\n" in told
    assert "2 runs broke a promise" in told


def test_interrupt_ends_it_with_a_summary() -> None:
    """Ctrl-C stops a run without an end; what has been seen until then is told, and no traceback."""
    with subprocess.Popen(
        [*PROGRAM, "--jobs", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "seeds from 0 on; Ctrl-C ends it\n"
        process.send_signal(signal.SIGINT)
        told, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert "stopped" in told
    assert "no promise was broken" in told
    assert "Traceback" not in complaints
