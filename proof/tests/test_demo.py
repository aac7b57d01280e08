"""`make demo`: the story comes true on a real database, and a claim that does not hold fails it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from demo.page import Page

ROOT = Path(__file__).parents[2]


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Play the demo as its make target does, on a wide terminal."""
    return subprocess.run(
        [sys.executable, "-m", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'examples'}:{ROOT}", "COLUMNS": "160", "TERM": "dumb"},
    )


@pytest.mark.long
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_demo_shows_that_every_claim_holds(database: str) -> None:
    """The demo ends with status 0, and its table shows the control's loss and the refusals."""
    result = demo("--database", database)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "balance 70 instead of 120" in result.stdout
    assert result.stdout.count("StaleTokenError: token") == 2
    assert "0 rows let through" in result.stdout
    assert "balance 150 after the refusals, 120 after A's second try" in result.stdout
    assert "QuorumError" in result.stdout
    assert "NO" not in result.stdout.split("What was claimed")[1]


def test_demo_fails_when_a_claim_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """One claim that was not seen to hold is enough to fail the whole, and it is marked."""
    page = Page(Console())
    page.claim("the sun rises", "it did", holds=True)
    assert page.verdict()
    page.claim("the moon is a cheese", "it was not", holds=False)
    assert not page.verdict()
    assert "1 of 2 claims do not hold" in capsys.readouterr().out


def test_demo_refuses_an_unknown_database() -> None:
    """An unknown database is refused in one line that shows no password."""
    result = demo("--database", "nonsense://u:s3cr3t@h/x")
    assert result.returncode == 1
    assert "sqlite, postgresql" in result.stderr
    assert "Traceback" not in result.stderr
    assert "s3cr3t" not in result.stdout + result.stderr
