"""The short form of benchmarks/increments.py: paused workers lose nothing, and without a fence they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "increments.py"


def run(database: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a database."""
    return subprocess.run(
        [sys.executable, SCRIPT, "--database", database, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_paused_workers_lose_no_acknowledged_commit(database_url: str) -> None:
    """The final value equals the number of acknowledged commits, and the fence never goes down."""
    result = run(database_url, "--workers", "5", "--increments", "20", "--every", "0.3")
    assert result.returncode == 0, result.stdout + result.stderr


def test_paused_workers_lose_updates_of_an_ordinary_table(tmp_path: Path) -> None:
    """The control: with the same lock and the same pauses, an ordinary table loses acknowledged commits.

    Whether a pause strikes between reading and writing is chance, so that a run may be lucky; three are not.
    """
    options = ("--workers", "5", "--increments", "30", "--every", "0.2", "--think", "0.02", "--control")
    runs = (run(f"sqlite:///{tmp_path}/{number}.sqlite", *options) for number in range(3))
    assert any(result.returncode == 0 for result in runs)
