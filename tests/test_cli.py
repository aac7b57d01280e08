"""The command line, run as a program: `fencelock init` and `fencelock demo`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import redis
from rich.console import Console

from fencelock import Redlock, fenced_lock
from fencelock.demo.page import Page
from fencelock.embedded import Nodes


def fencelock(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run the program as a user would, on a wide terminal."""
    return subprocess.run(
        [sys.executable, "-m", "fencelock", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "COLUMNS": "160", "TERM": "dumb"},
    )


def test_init_makes_blank_nodes_usable(nodes: Nodes) -> None:
    """After `fencelock init --base 0` the first token is 1; running it again changes nothing."""
    first = fencelock("init", *nodes.urls, "--base", "0")
    assert (first.returncode, first.stderr.splitlines()[0]) == (0, "5 nodes initialised")
    assert f"FENCELOCK_URL={nodes.url}" in first.stderr
    with Redlock(nodes.url) as quorum:
        with fenced_lock("a", authority=quorum) as token:
            assert token == 1
        second = fencelock("init", *nodes.urls)
        assert (second.returncode, "nothing was changed" in second.stderr) == (0, True)
        with fenced_lock("a", authority=quorum) as token:
            assert token == 2


def test_init_does_not_pass_over_a_node_that_restarted(make_nodes: Callable[..., Nodes]) -> None:
    """It has its data, but must not vote: that all is well would be the wrong answer."""
    nodes = make_nodes(1, appendfsync="always")
    assert fencelock("init", *nodes.urls).returncode == 0
    nodes[0].restart(keep_data=True)
    result = fencelock("init", *nodes.urls)
    assert result.returncode == 1
    assert "has restarted since" in result.stderr
    with redis.Redis.from_url(nodes.url) as client:
        client.flushall()
    assert fencelock("init", *nodes.urls).returncode == 0


def test_version_can_be_asked_for() -> None:
    """In one line."""
    assert fencelock("--version").stdout.startswith("fencelock ")


def test_init_names_the_node_that_does_not_answer(make_nodes: Callable[..., Nodes]) -> None:
    """All nodes must be reachable when they are initialised; the error names the one that is not."""
    nodes = make_nodes(3)
    nodes[1].kill()
    result = fencelock("init", *nodes.urls)
    assert result.returncode == 1
    assert "QuorumError" in result.stderr
    assert nodes[1].url in result.stderr


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "redis://", "redis://h:port"])
def test_init_refuses_what_is_no_url(url: str) -> None:
    """A malformed URL gets one line that shows a well-formed one, and no traceback."""
    result = fencelock("init", url)
    assert result.returncode == 1
    assert "redis://host:6379" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_demo_shows_that_every_claim_holds(database: str) -> None:
    """The demo ends with status 0, and its table shows the control's loss and the refusals."""
    result = fencelock("demo", "--database", database, timeout=90)
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
    """A database that cannot be understood is refused before servers are started, in one line."""
    result = fencelock("demo", "--database", "oracel")
    assert result.returncode == 1
    assert "postgresql, sqlite" in result.stderr
    assert "Traceback" not in result.stderr
