"""Forks, in a process that may fork: see `programs`."""

from __future__ import annotations

import pytest

from tests.authorities.children import run
from tests.authorities.kinds import EACH_SERVER
from tests.authorities.stage import Stage


@pytest.mark.parametrize("stage", [*EACH_SERVER, "postgresql, asyncio"], indirect=True)
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
