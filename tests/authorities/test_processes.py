"""Signal handlers and forks, each in a process of its own: see `programs`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.authorities.kinds import BLOCKING, EACH_SERVER
from tests.authorities.stage import Stage
from tests.conftest import ROOT


def run(program: str, url: str) -> dict[str, Any]:
    """Run one of the programs; return what it printed last."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.authorities.programs", program, url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert child.returncode == 0, child.stderr
    said: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize("stage", BLOCKING, indirect=True)
def test_nothing_is_left_of_what_a_handler_interrupts(stage: Stage) -> None:
    """What it raises comes out unchanged; two seconds later, at most, the resource is free."""
    said = run("interrupt", stage.kind.url)
    assert not said["odd"], "\n".join(said["odd"])
    assert said["left"] == []
    assert said["works"]
    assert said["interrupted"] > 5


@pytest.mark.parametrize("stage", BLOCKING, indirect=True)
def test_a_handler_may_use_the_authority_that_it_interrupts(stage: Stage) -> None:
    """It waits for nothing that it has interrupted, and spoils nothing of it."""
    said = run("lock_in_handlers", stage.kind.url)
    assert not said["odd"], "\n".join(said["odd"])
    assert said["longest"] < 0.9, "the handler waits for what it has interrupted until that is given up"
    assert said["handled"] > 5
    assert said["rounds"] > 2


@pytest.mark.parametrize("stage", (*EACH_SERVER, "postgresql, asyncio"), indirect=True)
def test_a_fork_shares_the_leases_and_no_connection(stage: Stage) -> None:
    """The child is refused what the parent holds, both go on at once, and the child's end ends nothing."""
    said = run(f"fork_{stage.world}", stage.kind.url)
    assert said == {
        "parent": True,
        "children": [{"refused": True, "used": True}] * 2,
        "extended": True,
        "stays held": True,
        "goes on": True,
        "released": True,
        "free": True,
    }
